package policy

import (
	"cmp"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
)

// Compile compiles in. prev is the State of the previous output, which the
// maps hold by now; nil if there is none. Neither is changed.
func Compile(in Input, prev *State) Output {
	return NewCompiler(prev).Compile(Changes{Pods: in.Pods, Rest: &in})
}

// Changes is what is not as it was when a [Compiler] compiled last.
type Changes struct {
	// Pods that are new or different. Their addresses go to the compiler.
	Pods []Pod
	// Gone are pods that are no more. One that is in Pods, too, is there.
	Gone []types.NamespacedName
	// Rest is everything but the pods, if some of it is different: its Pods
	// are not read. The first Compile needs it. A policy that is different is
	// another object.
	Rest *Input
}

// Compiler compiles a cluster that changes: given what changed, its output
// means what that of [Compile] given everything does, numbers aside, and costs
// what mentions the change. It is not safe for concurrent use.
//
// Where Compile makes another table of one in which an identity is new or
// gone, a Compiler has it get and lose the entries of that one: see
// [Delta].
//
// A pod's change costs the identities of its addresses and, when an identity
// comes or goes by it, the tables whose policies mention that one. What
// changes which selectors, blocks and named ports are in force costs a look at
// every pod.
type Compiler struct {
	st  *State
	out Output

	members members
	choice  *choice
	parsed  parsed
	f       *inForce
	ids     *identities
	lpm     *lpm[uint32]             // of the prefixes
	groupOf map[netip.Addr][2]string // keys of the groups of local addresses
	indexes map[uint32]tableIndex    // of tables that took part in a change
	older   bool                     // out.Rules has rules of the state before, too
}

// NewCompiler makes a compiler of an empty cluster. prev is as for [Compile].
func NewCompiler(prev *State) *Compiler {
	if prev == nil {
		prev = newState()
	}
	return &Compiler{st: prev, members: newMembers(), indexes: make(map[uint32]tableIndex)}
}

// Compile takes ch over and returns the output. The one before, and its State,
// are no longer valid then: their maps are shared.
func (c *Compiler) Compile(ch Changes) Output {
	prev := c.st
	st := prev.successor()
	s := &work{prev: prev, st: st, whole: c.f == nil}
	c.take(ch, s)
	c.findInForce(s)
	c.identify(s)
	c.expand(s)
	c.findLocal(s)

	out := &c.out
	out.Problems = slices.Concat(c.members.problems(), c.parsed.problems)
	out.Early, out.Transitional = c.changeOver(s)
	c.nameRules(s)
	out.Addrs, out.Prefixes, out.Tables = st.addrs, st.prefixes, st.tables
	out.PortClasses = st.ports.list
	out.State = st
	out.Delta, out.Work = s.delta(), s.did
	for n := range c.indexes {
		_, differs := s.extended[n]
		if _, ok := st.tables[n]; !ok || differs {
			delete(c.indexes, n)
		}
	}
	c.st = st
	return *out
}

// work is what one Compile does.
type work struct {
	prev, st *State

	touched   map[netip.Addr]struct{} // whose owner, or what it is, may be another
	policies  bool                    // are different
	local     bool                    // so is a local pod, or what selects it
	groups    bool                    // so are groups
	regrouped bool                    // an endpoint goes from one to another, or one's policies are different
	whole     bool                    // all addresses are looked at
	ports     bool                    // classes of ports are different
	tables    bool                    // so are tables
	rules     bool                    // so are the rules in force

	moved []moved
	came  []*identity
	went  []*identity

	extended map[uint32]extended
	did      Work
}

// moved is an address whose identity is another one than before.
type moved struct {
	addr     netip.Addr
	from, to uint32
	had, has bool // an identity of its own
}

func (s *work) touch(addrs ...netip.Addr) {
	if s.whole {
		return
	}
	for _, a := range addrs {
		s.touched[a] = struct{}{}
	}
}

// delta says what the step changed.
func (s *work) delta() Delta {
	d := Delta{Prefixes: s.whole && !gomaps.Equal(s.prev.prefixes, s.st.prefixes)}
	for _, m := range s.moved {
		d.Addrs = append(d.Addrs, m.addr)
	}
	if s.tables {
		for n := range s.st.tables {
			if _, ok := s.prev.tables[n]; !ok {
				d.NewTables = append(d.NewTables, n)
			}
		}
		for n := range s.prev.tables {
			if _, ok := s.st.tables[n]; !ok {
				d.GoneTables = append(d.GoneTables, n)
			}
		}
	}
	for _, e := range s.extended {
		if d.Added == nil {
			d.Added = make(Table)
		}
		gomaps.Copy(d.Added, e.added)
		d.Removed = append(d.Removed, e.removed...)
	}
	return d
}

// take brings what the compiler knows of the cluster up to date.
func (c *Compiler) take(ch Changes, s *work) {
	s.touched = make(map[netip.Addr]struct{})
	m := &c.members
	if ch.Rest != nil {
		for namespace := range m.setNamespaces(ch.Rest.Namespaces) {
			if c.ids != nil {
				c.ids.forget(namespace)
			}
			for mb := range m.byNamespace[namespace] {
				mb.class, mb.chosen = nil, nil
				s.touch(mb.addrs...)
				s.local = s.local || mb.isLocal()
			}
		}
		m.setNodes(ch.Rest.Nodes, s)
		if s.policies = c.parsed.set(ch.Rest); s.policies {
			s.local = true
			c.choice = newChoice(c.parsed.policies, m.nsLabels)
			for _, mb := range m.local {
				mb.chosen = nil
			}
		}
	}
	for _, name := range ch.Gone {
		m.remove(name, s)
	}
	for i := range ch.Pods {
		m.put(&ch.Pods[i], s)
	}
	if c.choice == nil {
		c.choice = newChoice(nil, m.nsLabels)
	}
}

// identify gives the addresses that may have another identity theirs.
func (c *Compiler) identify(s *work) {
	prev, st := s.prev, s.st
	var order []netip.Addr
	if s.whole {
		order = slices.AppendSeq(slices.Collect(gomaps.Keys(c.members.nodes)), gomaps.Keys(c.members.claims))
		st.addrs = make(map[netip.Addr]uint32, len(order))
		c.ids = newIdentities(c.f, c.members.nsLabels, prev, st)
		st.prefixes = c.ids.prefixes()
		c.lpm = newLPM(st.prefixes)
	} else {
		order = slices.Collect(gomaps.Keys(s.touched))
		st.addrs, st.prefixes, st.identities = prev.addrs, prev.prefixes, prev.identities
		c.ids.f, c.ids.prev, c.ids.st = c.f, prev, st
	}
	slices.SortFunc(order, netip.Addr.Compare) // so that numbers come out the same
	order = slices.Compact(order)
	before := make(map[uint32]int) // addresses that leave an identity
	s.did.Addrs = len(order)
	for _, a := range order {
		m := moved{addr: a}
		m.from, m.had = prev.addrs[a]
		if id := c.identityOf(a); id != nil {
			m.to, m.has = id.number, true
			id.refs++
			st.addrs[a] = id.number
		} else {
			delete(st.addrs, a)
		}
		if m.had && !s.whole {
			before[m.from]++
		}
		if m.had != m.has || m.from != m.to {
			s.moved = append(s.moved, m)
		}
	}
	if s.whole {
		for a, id := range prev.addrs {
			if _, ok := st.addrs[a]; !ok {
				s.moved = append(s.moved, moved{addr: a, from: id, had: true})
			}
		}
		c.ids.fresh = nil
		return
	}
	for n, left := range before {
		id := c.ids.byNumber[n]
		if id.refs -= left; id.refs == 0 {
			c.ids.remove(id)
			s.went = append(s.went, id)
		}
	}
	s.came, c.ids.fresh = c.ids.fresh, nil
}

// identityOf returns the identity of an address, nil if it has none of its own.
func (c *Compiler) identityOf(a netip.Addr) *identity {
	if n, ok := c.members.nodes[a]; ok {
		var class *podClass
		if n.node != nil {
			class = c.ids.nodeClass(n.node)
		}
		return c.ids.address(n.kind, class, a)
	}
	mb := c.members.owner(a)
	if mb == nil {
		return nil
	}
	if mb.class == nil || mb.classOf != c.ids {
		mb.class, mb.classOf = c.ids.class(&mb.pod), c.ids
	}
	return c.ids.address(maps.IdentityPod, mb.class, a)
}

// expand writes the tables of groups that are new, or about which something
// they depend on is.
func (c *Compiler) expand(s *work) {
	prev, st := s.prev, s.st
	peers := make(map[uint32]struct{}) // whose members came or went
	for _, list := range [][]*identity{s.came, s.went} {
		for _, id := range list {
			for _, n := range id.peers {
				peers[n] = struct{}{}
			}
		}
	}
	changed := len(s.came)+len(s.went) > 0
	var stale []*group
	for _, g := range c.f.groups {
		if s.whole || s.ports || g.number == 0 || changed && g.depends(peers) {
			stale = append(stale, g)
		}
	}
	if s.tables = len(stale) > 0 || s.groups; !s.tables {
		st.tables, st.digests, st.rules = prev.tables, prev.digests, prev.rules
		return
	}
	st.tables, st.digests, st.rules = make(map[uint32]Table), make(map[digest][]uint32), prev.rules
	if s.rules = s.groups || s.whole; s.rules {
		st.rules = make(map[RuleRef]uint32)
	}
	isStale := make(map[*group]bool, len(stale))
	for _, g := range stale {
		isStale[g] = true
	}
	for _, g := range c.f.groups {
		if isStale[g] {
			continue
		}
		if _, ok := st.tables[g.number]; !ok {
			st.keep(g.number, g.digest, prev.tables[g.number])
		}
		if s.rules {
			for _, r := range g.rules {
				st.ruleNumber(prev, r)
			}
		}
	}
	x := &expander{ids: c.ids, ports: st.ports, rule: func(r RuleRef) uint32 { return st.ruleNumber(prev, r) }}
	s.did.Groups = len(stale)
	written := make(map[*group]Table, len(stale))
	for _, g := range stale {
		written[g] = x.expand(g)
	}
	if changed && !s.whole && !s.ports && !s.regrouped {
		c.extend(s, written)
	}
	for _, g := range stale {
		if _, ok := s.extended[g.number]; !ok {
			g.number, g.digest = st.number(s, written[g])
		}
	}
	for n, e := range s.extended {
		st.keep(n, e.digest, e.now)
	}
}

// extended is a table that stays, with entries that come and go.
type extended struct {
	now     Table
	both    Table // with what goes
	added   Table
	removed []maps.PolicyKey
	digest  digest
}

// extend lets the tables of groups stay whose entries differ in those of
// identities that came or went alone: no address has these, before or after.
// All groups that have the table must agree, and none comes to it or leaves it.
func (c *Compiler) extend(s *work, written map[*group]Table) {
	passing := make(map[uint32]bool, len(s.came)+len(s.went))
	for _, list := range [][]*identity{s.came, s.went} {
		for _, id := range list {
			passing[id.number] = true
		}
	}
	users := make(map[uint32][]*group)
	for _, g := range c.f.groups {
		users[g.number] = append(users[g.number], g)
	}
	for n, groups := range users {
		t, stale := written[groups[0]]
		if n == 0 || !stale || slices.ContainsFunc(groups, func(g *group) bool {
			other, stale := written[g]
			return !stale || !gomaps.Equal(t, other)
		}) {
			continue
		}
		e, ok := newExtended(n, s.prev.tables[n], t, passing)
		if !ok {
			continue
		}
		e.digest = digestOf(s.st.seed, t)
		if s.extended == nil {
			s.extended = make(map[uint32]extended)
		}
		s.extended[n] = e
		for _, g := range groups {
			g.digest = e.digest
		}
		delete(c.indexes, n)
	}
}

// newExtended compares table n with what is to be in it, keys without number;
// false if it differs in more than the entries of the identities given.
func newExtended(n uint32, old, t Table, passing map[uint32]bool) (extended, bool) {
	e := extended{now: make(Table, len(t)), both: gomaps.Clone(old), added: make(Table)}
	for k, v := range t {
		k.Table = n
		e.now[k], e.both[k] = v, v
		was, ok := old[k]
		switch {
		case ok && was == v:
		case ok || !passing[k.Identity]:
			return e, false
		default:
			e.added[k] = v
		}
	}
	for k := range old {
		if _, ok := e.now[k]; ok {
			continue
		}
		if !passing[k.Identity] {
			return e, false
		}
		e.removed = append(e.removed, k)
	}
	return e, true
}

// findLocal says what became of the local pods.
func (c *Compiler) findLocal(s *work) {
	st := s.st
	if !s.tables && !s.local && c.out.Endpoints != nil {
		st.endpoints = s.prev.endpoints
		return
	}
	out := make(map[types.NamespacedName]Endpoint, len(c.members.local))
	for name := range c.members.local {
		out[name] = Endpoint{}
	}
	for _, g := range c.f.groups {
		if g.refs == nil {
			g.refs = g.policyRefs()
		}
		for _, mb := range g.pods {
			ep := out[mb.name()]
			if g.direction == Ingress {
				ep.In, ep.InPolicies = g.number, g.refs
			} else {
				ep.Out, ep.OutPolicies = g.number, g.refs
			}
			out[mb.name()] = ep
		}
	}
	st.endpoints = make(map[netip.Addr][2]uint32)
	for _, mb := range c.members.sortedLocal() {
		ep := out[mb.name()]
		for _, a := range mb.addrs {
			st.endpoints[a] = [2]uint32{ep.In, ep.Out}
		}
	}
	c.out.Endpoints = out
}

// nameRules says what the numbers of rules stand for: those of this state and
// of the one before.
func (c *Compiler) nameRules(s *work) {
	if !s.rules && !c.older && c.out.Rules != nil {
		return
	}
	out := make(map[uint32]RuleRef, len(s.st.rules))
	for _, rules := range []map[RuleRef]uint32{s.prev.rules, s.st.rules} {
		for r, n := range rules {
			out[n] = r
		}
	}
	c.older = len(out) != len(s.st.rules)
	c.out.Rules = out
}

// ruleNumber returns the number of a rule.
func (st *State) ruleNumber(prev *State, r RuleRef) uint32 {
	if n, ok := st.rules[r]; ok {
		return n
	}
	n, ok := prev.rules[r]
	if !ok {
		n = st.nextRule
		st.nextRule++
	}
	st.rules[r] = n
	return n
}

func conflict(p *Pod, a netip.Addr, who string) Problem {
	return Problem{
		Object: "Pod " + p.Namespace + "/" + p.Name,
		Field:  "status.podIPs",
		Err:    fmt.Sprintf("%s is owned by %s; the claim is ignored", a, who),
	}
}

// beats says that p, and not q, owns an address that both claim.
func beats(p, q *Pod) bool {
	if p.Local != q.Local {
		return p.Local
	}
	return cmp.Or(p.Created.Compare(q.Created), cmp.Compare(p.UID, q.UID),
		cmp.Compare(q.Namespace, p.Namespace), cmp.Compare(q.Name, p.Name)) > 0
}
