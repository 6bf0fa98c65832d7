package packet

import (
	"maps"
	"net/netip"

	"github.com/podweir/podweir/internal/bpf"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

type (
	addr    = pwmaps.Addr
	flowKey = pwmaps.FlowKey
)

// cluster is what the agent has written, in the form the rules read it. The
// model looks here, the datapath in its maps; edit changes both.
type cluster struct {
	pods     map[addr]pwmaps.Endpoint
	addrs    map[addr]pwmaps.Peer
	prefixes map[pwmaps.PrefixKey]pwmaps.Peer
	services map[pwmaps.ServiceKey]pwmaps.Service
	backends map[pwmaps.BackendKey]pwmaps.Backend
	states   map[pwmaps.BackendStateKey]uint32
	own      map[uint32]pwmaps.DevAddrs
	policy   map[pwmaps.PolicyKey]pwmaps.PolicyEntry
	gens     map[uint32]uint32
	wire     place // the way out
	router   addr
	nextSet  uint32
}

func dump[K comparable, V any](w *world, m pwmaps.Map[K, V]) map[K]V {
	w.t.Helper()
	all, err := m.Dump()
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

// readCluster takes the world as newWorld has filled it.
func (w *world) readCluster() *cluster {
	w.t.Helper()
	c := &cluster{
		pods: dump(w, w.set.Endpoints), addrs: dump(w, w.set.Addrs), prefixes: dump(w, w.set.Prefixes),
		services: dump(w, w.set.Services), backends: dump(w, w.set.Backends), policy: dump(w, w.set.Policy),
		states: dump(w, w.set.BackendStates), own: dump(w, w.set.DevAddrs),
		gens: make(map[uint32]uint32), wire: w.wirePlace(), router: pwmaps.ToAddr(w.f.router), nextSet: setFree,
	}
	for slot := range uint32(slotMax) {
		gen, _, err := w.set.Gens.Get(slot)
		if err != nil {
			w.t.Fatal(err)
		}
		c.gens[slot] = gen
	}
	return c
}

// restore brings the maps and the cluster back to what base says, except for
// generations, which only ever move on.
func (c *cluster) restore(w *world, base *cluster) {
	w.t.Helper()
	same(w, w.set.Endpoints, c.pods, base.pods)
	same(w, w.set.Addrs, c.addrs, base.addrs)
	same(w, w.set.Services, c.services, base.services)
	same(w, w.set.Backends, c.backends, base.backends)
	same(w, w.set.BackendStates, c.states, base.states)
	c.nextSet = base.nextSet
}

func same[K, V comparable](w *world, m pwmaps.Map[K, V], have, want map[K]V) {
	w.t.Helper()
	for k := range maps.Clone(have) {
		if _, ok := want[k]; !ok {
			edit(w, m, have, k, nil)
		}
	}
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			edit(w, m, have, k, &v)
		}
	}
}

// edit writes (or, with nil, removes) one entry in both views.
func edit[K, V comparable](w *world, m pwmaps.Map[K, V], view map[K]V, k K, v *V) {
	w.t.Helper()
	if v == nil {
		delete(view, k)
		del(w, m, k)
		return
	}
	view[k] = *v
	put(w, m, k, *v)
}

// moved says that something about an address changed: its own generation
// moves, and that of the prefixes that speak for it when it has no entry.
func (c *cluster) moved(w *world, slots ...uint32) {
	w.t.Helper()
	for _, slot := range slots {
		gen := c.gens[slot] + 1
		edit(w, w.set.Gens, c.gens, slot, &gen)
	}
}

// target is what the cluster knows of an address.
type target struct {
	gen                   pwmaps.GenRef
	identity, node, flags uint32
	dev                   uint32 // of a pod of this node
	tableIn, tableOut     uint32
	mac                   [6]byte
	shaped                bool
}

// resolve: a pod of this node, else the exact address, else the longest
// prefix.
func (c *cluster) resolve(a addr) target {
	if ep, ok := c.pods[a]; ok {
		return target{
			gen: pwmaps.GenRef{Slot: ep.Slot, Gen: c.gens[ep.Slot]}, identity: ep.Identity,
			flags: pwmaps.PeerPod, dev: ep.Ifindex, tableIn: ep.PolicyIn, tableOut: ep.PolicyOut, mac: ep.Mac,
			shaped: ep.Flags&pwmaps.EndpointQdisc != 0,
		}
	}
	peer, ok := c.addrs[a]
	for k, p := range c.prefixes {
		if ok {
			break
		}
		if covers(k, a) && !c.covered(k, a) {
			peer = p
		}
	}
	return target{
		gen:      pwmaps.GenRef{Slot: peer.Slot, Gen: c.gens[peer.Slot]},
		identity: peer.Identity, node: peer.Node, flags: peer.Flags,
	}
}

func covers(k pwmaps.PrefixKey, a addr) bool {
	return netip.PrefixFrom(netip.AddrFrom16(k.Addr), int(k.Len)).Contains(netip.AddrFrom16(a.B))
}

// covered: a longer prefix holds the address too.
func (c *cluster) covered(k pwmaps.PrefixKey, a addr) bool {
	for other := range c.prefixes {
		if other.Len > k.Len && covers(other, a) {
			return true
		}
	}
	return false
}

// allows asks one table for a peer: exact port, class of ports, anything, and
// the default if there is one; a table that says nothing denies.
func (c *cluster) allows(table, identity uint32, proto uint8, port uint16) (ok bool, rule uint32) {
	if table == 0 {
		return true, 0
	}
	probes := []pwmaps.PolicyKey{{Kind: pwmaps.PolicyAny}}
	if hasPorts(proto) {
		probes = []pwmaps.PolicyKey{
			{Kind: pwmaps.PolicyPort, Proto: proto, Port: port},
			{Kind: pwmaps.PolicyClass, Proto: proto},
			{Kind: pwmaps.PolicyAny},
		}
	}
	for _, k := range probes {
		k.Table, k.Identity = table, identity
		if e, found := c.policy[k]; found {
			return e.Verdict == pwmaps.VerdictAllow, e.Rule
		}
	}
	if table&pwmaps.TableDefault == 0 || identity == pwmaps.IdentityUnknown {
		return false, 0
	}
	e := c.policy[pwmaps.PolicyKey{Table: table, Kind: pwmaps.PolicyDefault}]
	return e.Verdict == pwmaps.VerdictAllow, e.Rule
}

func hasPorts(proto uint8) bool {
	return proto == pwmaps.ProtoTCP || proto == pwmaps.ProtoUDP || proto == pwmaps.ProtoSCTP
}

// frontend is the service port that a tuple calls: its very address, or a
// NodePort of a node; from outside, of this one alone.
func (c *cluster) frontend(k flowKey, own bool) (pwmaps.Service, bool) {
	if !hasPorts(k.Proto) {
		return pwmaps.Service{}, false
	}
	key := pwmaps.ServiceKey{Addr: k.Dst, Port: k.Dport, Proto: k.Proto}
	svc, ok := c.services[key]
	peer := c.addrs[k.Dst]
	if ok || k.Dport < 30000 || k.Dport > 32767 || peer.Flags&pwmaps.PeerNodePort == 0 ||
		own && peer.Flags&pwmaps.PeerHost == 0 {
		return svc, ok
	}
	key.Addr = addr{}
	if pwmaps.FromAddr(k.Dst).Is4() {
		key.Addr = pwmaps.ToAddr(netip.IPv4Unspecified())
	}
	svc, ok = c.services[key]
	return svc, ok
}

// choices are the backends behind a service port, for callers from there;
// nil if it is none.
func (c *cluster) choices(k flowKey, from bpf.DpPwPlaceKind) (service *pwmaps.Service, all []netip.AddrPort) {
	outside := from == bpf.DpPwPlaceKindPW_PLACE_WIRE
	svc, ok := c.frontend(k, outside)
	if !ok || from == bpf.DpPwPlaceKindPW_PLACE_NODE {
		return nil, nil
	}
	set, n := svc.Set, svc.Count
	if outside {
		set, n = svc.ExtSet, svc.ExtCount
	}
	for slot := range n {
		b := c.backends[pwmaps.BackendKey{Set: set, Slot: slot}]
		all = append(all, ap(pwmaps.FromAddr(b.Addr), b.Port))
	}
	return &svc, all
}

// holds: would the flow be translated today as it was?
func (c *cluster) holds(f *mflow) bool {
	svc, ok := c.frontend(f.key, f.from.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE)
	if !ok || f.from.kind == bpf.DpPwPlaceKindPW_PLACE_NODE {
		return f.service == 0
	}
	return svc.Id == f.service &&
		c.states[pwmaps.BackendStateKey{Addr: f.back.Src, Service: svc.Id, Port: f.back.Sport}] != 0
}
