package agent

import (
	"errors"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/tunnel"
)

// peers writes who stands behind an address and what is allowed between them:
// pw_nodes, pw_node_v6, pw_node_ids, pw_addrs, pw_prefixes, pw_endpoints, pw_policy and
// pw_port_class, in an order that is safe at every step.
type peers struct {
	gens      *generations
	ids       *nodeIDs
	nodes     *reconcile.Table[uint32, maps.Node]
	nodesV6   *reconcile.Table[uint32, maps.NodeV6]
	nodeIDs   *reconcile.Table[maps.Addr, uint32]
	addrs     *reconcile.Table[maps.Addr, maps.Peer]
	prefixes  *reconcile.Table[maps.PrefixKey, maps.Peer]
	endpoints *reconcile.Table[maps.Addr, maps.Endpoint]
	policy    *reconcile.Table[maps.PolicyKey, maps.PolicyEntry]
	classes   *reconcile.Table[uint32, uint16]

	slots       map[maps.Addr]uint32
	nodePorts   map[maps.Addr]struct{} // that NodePorts answer on
	prefixSlots *lpm[uint32]
	portClasses []policy.PortClass

	// What the last round applied.
	applied    bool
	was        peerInput
	byName     map[string]uint32 // ids of the other nodes
	nodeErrs   []error
	ways       *lpm[maps.Peer] // what the tunnel and policy know of prefixes
	identities *lpm[uint32]
	short      bool // entries of pw_policy were not written

	addrsMax, prefixesMax int                     // sizes of pw_addrs and pw_prefixes
	withheld              map[maps.PolicyKey]bool // of the tables that are in force
}

// localEndpoint is a pod of this node whose Pod object is known.
type localEndpoint struct {
	endpoint.Endpoint
	pod types.NamespacedName
}

// selfNode is the index of pw_nodes that holds this node's own address.
const selfNode = 0

// peerInput is what one round has compiled.
type peerInput struct {
	self      string
	selfAddr  netip.Addr // tunnel endpoint of this node
	vni       uint32
	mode      tunnel.Mode
	plain     bool                    // packets of their pods are taken without a header
	ways      map[netip.Addr]node.Way // how the kernel reaches the others
	nodes     []tunnel.NodeInfo
	tunnel    tunnel.Output
	policy    policy.Output
	endpoints map[netip.Addr]localEndpoint
	qdiscs    map[int]node.Qdisc // of pods' devices
	// deltas says that those of tunnel and policy name all that is different
	// from what was applied last.
	deltas bool
}

// sameNodes says that a and b know the same of the other nodes.
func sameNodes(a, b peerInput) bool {
	same := func(a, b tunnel.NodeInfo) bool {
		return a.Name == b.Name && a.Addr == b.Addr && slices.Equal(a.MAC, b.MAC) &&
			slices.Equal(a.InternalIPs, b.InternalIPs) && slices.Equal(a.PodCIDRs, b.PodCIDRs)
	}
	return a.selfAddr == b.selfAddr && gomaps.Equal(a.ways, b.ways) &&
		(len(a.nodes) > 0 && len(a.nodes) == len(b.nodes) && &a.nodes[0] == &b.nodes[0] || slices.EqualFunc(a.nodes, b.nodes, same))
}

// newPeers adopts what the maps hold.
func newPeers(st stores, now func() time.Time) (*peers, error) {
	gens, err := newGenerations(st.gens, now)
	if err != nil {
		return nil, err
	}
	p := &peers{
		gens:        gens,
		nodes:       reconcile.New(st.nodes),
		nodesV6:     reconcile.New(st.nodesV6),
		nodeIDs:     reconcile.New(st.nodeIDs),
		addrs:       reconcile.New(st.addrs),
		prefixes:    reconcile.New(st.prefixes),
		endpoints:   reconcile.New(st.endpoints),
		policy:      reconcile.New(st.policy),
		classes:     reconcile.New(st.classes),
		slots:       make(map[maps.Addr]uint32),
		prefixSlots: newLPM[uint32](),
		addrsMax:    st.addrs.MaxEntries(),
		prefixesMax: st.prefixes.MaxEntries(),
	}
	err = errors.Join(p.nodes.Load(), p.nodesV6.Load(), p.nodeIDs.Load(), p.addrs.Load(), p.prefixes.Load(),
		p.endpoints.Load(), p.policy.Load(), p.classes.Load())
	if err != nil {
		return nil, err
	}
	p.ids = adoptNodeIDs(st.nodesMax, p.nodes.All(), p.nodeIDs.All())
	p.adoptSlots()
	return p, nil
}

// restored is the policy that the maps hold of an earlier run.
func (p *peers) restored() *policy.State { return policy.Restore(p.snapshot()) }

// adoptSlots takes over the slots of an earlier run. Of two entries that
// claim one slot (corrupted maps) one gets another, and so does an endpoint
// whose slot is not that of its address.
func (p *peers) adoptSlots() {
	for k, v := range p.addrs.All() {
		if p.gens.adopt(v.Slot) {
			p.slots[k] = v.Slot
		}
	}
	for k, v := range p.prefixes.All() {
		if p.gens.adopt(v.Slot) {
			p.prefixSlots.set(k, v.Slot)
		}
	}
	for k, v := range p.endpoints.All() {
		if _, ok := p.slots[k]; !ok && p.gens.adopt(v.Slot) {
			p.slots[k] = v.Slot
		}
	}
}

func (p *peers) snapshot() policy.Snapshot {
	s := policy.Snapshot{
		Addrs:     make(map[netip.Addr]uint32, p.addrs.Len()),
		Prefixes:  make(map[netip.Prefix]uint32, p.prefixes.Len()),
		Policy:    make(policy.Table, p.policy.Len()),
		Endpoints: make(map[netip.Addr][2]uint32, p.endpoints.Len()),
	}
	for k, v := range p.addrs.All() {
		s.Addrs[maps.FromAddr(k)] = v.Identity
	}
	for k, v := range p.prefixes.All() {
		s.Prefixes[maps.FromPrefix(k)] = v.Identity
	}
	for k, v := range p.policy.All() {
		s.Policy[k] = v
	}
	for k, v := range p.endpoints.All() {
		s.Endpoints[maps.FromAddr(k)] = [2]uint32{v.PolicyIn, v.PolicyOut}
	}
	ports := make([]uint32, 0, p.classes.Len())
	for port := range p.classes.All() {
		ports = append(ports, port)
	}
	slices.Sort(ports)
	for _, port := range ports {
		class, _ := p.classes.Actual(port)
		if n := len(s.PortClasses); n > 0 && s.PortClasses[n-1].Class == class && uint32(s.PortClasses[n-1].Hi)+1 == port {
			s.PortClasses[n-1].Hi = uint16(port)
			continue
		}
		s.PortClasses = append(s.PortClasses, policy.PortClass{Lo: uint16(port), Hi: uint16(port), Class: class})
	}
	return s
}

// apply brings the maps to what was compiled. Errors are by map and key; the
// rest is in force all the same.
func (p *peers) apply(in peerInput) error {
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	// Who can be reached, before anything refers to it.
	deltas := in.deltas && p.applied && !p.doubtful()
	nodes := !deltas || len(p.nodeErrs) > 0 || !sameNodes(p.was, in)
	if nodes {
		was := p.byName
		p.byName, p.nodeErrs = p.compileNodes(in)
		deltas = deltas && gomaps.Equal(was, p.byName)
	}
	errs = append(errs, p.nodeErrs...)
	up := p.nodes.Upsert()
	note(up.Err())
	note(p.nodesV6.Upsert().Err())
	note(p.nodeIDs.Upsert().Err())
	renumbered := up.Changed

	// New tables beside the old ones, and what makes the change safe.
	settle := p.desireTables(in.policy, deltas && !p.short)
	note(p.upsertPolicy())
	note(p.applyClasses(in.policy.PortClasses))

	c := p.compilePeers(in, deltas && !in.tunnel.Delta.Prefixes && !in.policy.Delta.Prefixes)
	w := written{c.addrs, c.prefixes, c.endpoints}
	note(p.withhold(p.mistaken(w, true), in.policy))
	m := moves{p: p, note: note}
	p.applyEarly(in, c, &m)

	// Addresses to where they belong.
	if c.deltas {
		for k, v := range c.addrs {
			p.addrs.Set(k, v)
		}
		for _, k := range c.gone {
			p.addrs.Delete(k)
		}
	} else {
		p.prefixes.Desire(c.prefixes)
		p.addrs.Desire(c.addrs)
	}
	p.endpoints.Desire(c.endpoints)
	m.prefixes(p.prefixes.Upsert())
	m.addrs(p.addrs.Upsert())
	m.endpoints(p.endpoints.Upsert())

	// Removals, then everything that was decided from what moved.
	m.endpoints(p.endpoints.Prune())
	m.addrs(p.addrs.Prune())
	m.prefixes(p.prefixes.Prune())
	for _, id := range renumbered {
		if id != selfNode {
			p.bumpNode(id)
		}
	}
	p.dropUnusedSlots()
	note(p.withhold(p.mistaken(w, false), in.policy))
	note(p.withheldErr())
	note(p.gens.flush())

	// What nothing refers to any more.
	settle(len(p.policy.Failed()) > 0)
	if len(p.withheld) > 0 {
		p.policy.Desire(p.without(whole(in.policy)))
	}
	note(p.prunePolicy())
	p.short = len(p.policy.Failed()) > 0
	note(p.nodeIDs.Prune().Err())
	note(p.nodesV6.Prune().Err())
	note(p.nodes.Prune().Err())
	if nodes {
		p.ids.retain(p.byName)
	}
	p.was, p.applied = in, true
	return errors.Join(errs...)
}

// whole is all entries of all tables.
func whole(out policy.Output) map[maps.PolicyKey]maps.PolicyEntry {
	tables := make(map[maps.PolicyKey]maps.PolicyEntry)
	for _, t := range out.Tables {
		gomaps.Copy(tables, t)
	}
	return tables
}

// changing is tables with what is transitional.
func changing(tables map[maps.PolicyKey]maps.PolicyEntry, out policy.Output) map[maps.PolicyKey]maps.PolicyEntry {
	if len(out.Transitional) == 0 {
		return tables
	}
	both := gomaps.Clone(tables)
	gomaps.Copy(both, out.Transitional)
	return both
}

// desireTables wants the tables of the output and what is transitional; settle
// wants the tables alone. deltas: what the Delta names is all that is new. Where
// an entry could not be written, what is wanted of its table was changed.
func (p *peers) desireTables(out policy.Output, deltas bool) (settle func(failed bool)) {
	if !deltas {
		tables := whole(out)
		p.policy.Desire(p.without(changing(tables, out)))
		return func(bool) { p.policy.Desire(tables) }
	}
	for _, n := range out.Delta.GoneTables {
		for k := range p.was.policy.Tables[n] {
			p.policy.Delete(k)
		}
	}
	for _, n := range out.Delta.NewTables {
		for k, v := range out.Tables[n] {
			p.policy.Set(k, v)
		}
	}
	for k, v := range out.Delta.Added {
		p.policy.Set(k, v)
	}
	for _, k := range out.Delta.Removed {
		p.policy.Delete(k)
	}
	for k, v := range out.Transitional {
		p.policy.Set(k, v)
	}
	return func(failed bool) {
		if failed {
			p.policy.Desire(whole(out))
			return
		}
		for k := range out.Transitional {
			p.policy.Delete(k)
		}
	}
}

// isDenial tells the entries of pw_policy that close from those that open.
func isDenial(_ maps.PolicyKey, e maps.PolicyEntry) bool { return e.Verdict != maps.VerdictAllow }

// upsertPolicy writes denials before what they narrow. A table that lacks one
// of its denials (the map is full) allows nothing: a table in use, which the
// transitional denials are for, loses what it allowed.
func (p *peers) upsertPolicy() error {
	denials := p.policy.UpsertIf(isDenial)
	short := make(map[uint32]bool)
	for k := range p.policy.Failed() {
		if e, ok := p.policy.Desired(k); ok && isDenial(k, e) {
			short[k.Table] = true
		}
	}
	if len(short) == 0 {
		return errors.Join(denials.Err(), p.policy.Upsert().Err())
	}
	opens := func(k maps.PolicyKey, e maps.PolicyEntry) bool { return short[k.Table] && !isDenial(k, e) }
	for k, e := range p.policy.All() {
		if opens(k, e) {
			p.policy.Delete(k)
		}
	}
	return errors.Join(denials.Err(), p.policy.PruneIf(opens).Err(),
		p.policy.UpsertIf(func(k maps.PolicyKey, e maps.PolicyEntry) bool { return !opens(k, e) }).Err())
}

// prunePolicy removes what opens before what closes.
func (p *peers) prunePolicy() error {
	opens := p.policy.PruneIf(func(k maps.PolicyKey, e maps.PolicyEntry) bool { return !isDenial(k, e) })
	return errors.Join(opens.Err(), p.policy.Prune().Err())
}

// applyEarly gives the passing identities, then the endpoints their tables.
func (p *peers) applyEarly(in peerInput, c compiledPeers, m *moves) {
	for prefix, id := range in.policy.Early.Prefixes {
		k, err := maps.ToPrefix(prefix)
		if err != nil {
			continue
		}
		v, ok := p.prefixes.Actual(k)
		if !ok {
			if v, ok = c.prefixes[k]; !ok {
				continue
			}
		}
		v.Identity = id
		p.prefixes.Set(k, v)
	}
	m.prefixes(p.prefixes.Upsert())
	early := make(map[maps.Addr]uint32, len(in.policy.Early.Addrs))
	for a, id := range in.policy.Early.Addrs {
		k := maps.ToAddr(a)
		early[k] = id
		v, ok := p.addrs.Actual(k)
		if !ok {
			if v, ok = c.addrs[k]; !ok {
				continue
			}
		}
		v.Identity = id
		p.addrs.Set(k, v)
	}
	m.addrs(p.addrs.Upsert())
	for k, v := range c.endpoints {
		if id, ok := early[k]; ok {
			v.Identity = id
		} else if old, ok := p.endpoints.Actual(k); ok {
			v.Identity = old.Identity
		}
		p.endpoints.Set(k, v)
	}
	m.endpoints(p.endpoints.Upsert())
}

// moves collects what the phases changed and moves the generations.
type moves struct {
	p    *peers
	note func(error)
}

func (m *moves) addrs(r reconcile.Result[maps.Addr]) {
	m.note(r.Err())
	for _, k := range r.Added {
		// Until now the address was judged by the prefix around it.
		if slot, ok := m.p.prefixSlots.lookup(k.B, 128); ok {
			m.p.gens.bump(slot)
		}
	}
	m.touched(r.Touched())
	m.freed(r.Removed)
}

func (m *moves) endpoints(r reconcile.Result[maps.Addr]) {
	m.note(r.Err())
	m.touched(r.Touched())
	m.freed(r.Removed)
}

func (m *moves) touched(keys []maps.Addr) {
	for _, k := range keys {
		m.p.gens.bump(m.p.slots[k])
	}
}

// freed gives back the slots of addresses that are in neither map any more.
func (m *moves) freed(keys []maps.Addr) {
	for _, k := range keys {
		_, isAddr := m.p.addrs.Actual(k)
		_, isEndpoint := m.p.endpoints.Actual(k)
		if slot, ok := m.p.slots[k]; ok && !isAddr && !isEndpoint {
			m.p.gens.release(slot)
			delete(m.p.slots, k)
		}
	}
}

func (m *moves) prefixes(r reconcile.Result[maps.PrefixKey]) {
	m.note(r.Err())
	for _, k := range r.Added {
		if slot, ok := m.p.prefixSlots.parent(k); ok {
			m.p.gens.bump(slot)
		}
	}
	for _, k := range r.Touched() {
		m.p.gens.bump(m.p.prefixSlots.m[k])
	}
	for _, k := range r.Removed {
		if slot, ok := m.p.prefixSlots.m[k]; ok {
			m.p.gens.release(slot)
			m.p.prefixSlots.remove(k)
		}
	}
}

// dropUnusedSlots gives back the slots of what could never be written and is
// no longer wanted.
func (p *peers) dropUnusedSlots() {
	if len(p.slots) > p.addrs.Len() {
		for k, slot := range p.slots {
			_, isAddr := p.addrs.Actual(k)
			_, wanted := p.addrs.Desired(k)
			_, isEndpoint := p.endpoints.Actual(k)
			_, wantedEndpoint := p.endpoints.Desired(k)
			if !isAddr && !wanted && !isEndpoint && !wantedEndpoint {
				p.gens.release(slot)
				delete(p.slots, k)
			}
		}
	}
	if len(p.prefixSlots.m) > p.prefixes.Len() {
		for k, slot := range p.prefixSlots.m {
			_, is := p.prefixes.Actual(k)
			if _, wanted := p.prefixes.Desired(k); !is && !wanted {
				p.gens.release(slot)
				p.prefixSlots.remove(k)
			}
		}
	}
}

// bumpAddr moves the generation that flows to an address depend on; that of
// NodePorts, the unspecified one of a family, stands for all that they answer
// on.
func (p *peers) bumpAddr(k maps.Addr) {
	if a := maps.FromAddr(k); a.IsUnspecified() {
		for n := range p.nodePorts {
			if maps.FromAddr(n).Is4() == a.Is4() {
				p.gens.bump(p.slots[n])
			}
		}
		return
	}
	if slot, ok := p.slots[k]; ok {
		p.gens.bump(slot)
	} else if slot, ok := p.prefixSlots.lookup(k.B, 128); ok {
		p.gens.bump(slot)
	}
}

func (p *peers) bumpNode(id uint32) {
	for k, v := range p.addrs.All() {
		if v.Node == id {
			p.gens.bump(p.slots[k])
		}
	}
	for k, v := range p.prefixes.All() {
		if v.Node == id {
			p.gens.bump(p.prefixSlots.m[k])
		}
	}
}

func (p *peers) slot(k maps.Addr) uint32 {
	slot, ok := p.slots[k]
	if !ok {
		slot = p.gens.alloc()
		p.slots[k] = slot
	}
	return slot
}

func (p *peers) applyClasses(want []policy.PortClass) error {
	if !slices.Equal(want, p.portClasses) || p.portClasses == nil {
		classes := make(map[uint32]uint16)
		for _, c := range want {
			for port := uint32(c.Lo); port <= uint32(c.Hi); port++ {
				classes[port] = c.Class
			}
		}
		p.classes.Desire(classes)
		p.portClasses = slices.Clone(want)
	}
	if err := errors.Join(p.classes.Upsert().Err(), p.classes.Prune().Err()); err != nil {
		return fmt.Errorf("port classes: %w", err)
	}
	return nil
}

// nextRetry is when a failed entry is due again.
func (p *peers) nextRetry() (next time.Time) {
	for _, t := range []func() (time.Time, bool){
		p.nodes.NextRetry, p.nodesV6.NextRetry, p.nodeIDs.NextRetry, p.addrs.NextRetry, p.prefixes.NextRetry,
		p.endpoints.NextRetry, p.policy.NextRetry, p.classes.NextRetry,
	} {
		if at, ok := t(); ok && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}
