package policy

import (
	"cmp"
	gomaps "maps"
	"net/netip"
	"slices"

	"github.com/podweir/podweir/internal/maps"
)

// move is a change of identity that some address makes.
type move struct{ from, to uint32 }

// changeOver returns what makes the change to the new state safe.
//
// While endpoints change their tables one after the other, old and new tables
// are in force side by side. An address that changes its identity as well must
// be known to both under one number: an old table answers for it as for the
// old identity, a new one as for the new. If the new identity is new and only
// addresses of the old one get it, its number serves; or, if the old identity
// goes and all its addresses get the new one, that of the old. Otherwise a
// passing number is drawn. A table that stays is old to some endpoints and new
// to others: it allows what both answers allow, and denies the rest.
//
// Likewise the classes: see transitionalClasses.
func (c *Compiler) changeOver(s *work) (Early, Table) {
	early := Early{Addrs: make(map[netip.Addr]uint32), Prefixes: make(map[netip.Prefix]uint32)}
	extra := make(Table)
	changing := changingTables(s.prev, s.st)
	if len(changing) == 0 {
		return early, extra
	}
	ch := &change{prev: s.prev, st: s.st, extra: extra, views: make(map[uint32]view), indexes: c.indexes, extended: s.extended, mixed: changing, lpmNew: c.lpm, lpmOld: c.lpm}
	if s.whole {
		ch.lpmOld = newLPM(s.prev.prefixes)
	}
	ch.known, ch.stays = c.numbers(s)
	ch.transitionalClasses()
	via := ch.moves(s)
	for _, m := range s.moved {
		mv := ch.move(m)
		n := via(mv.from, mv.to)
		if m.had && n != mv.from || !m.had && mv.from != mv.to {
			early.Addrs[m.addr] = n
		}
	}
	for p, mv := range ch.regions {
		n := via(mv.from, mv.to)
		if old, ok := s.prev.prefixes[p]; !ok || old != n {
			early.Prefixes[p] = n
		}
	}
	return early, extra
}

// changingTables are those that some endpoint goes to or comes from.
func changingTables(prev, st *State) map[uint32]bool {
	out := make(map[uint32]bool)
	for a, t := range st.endpoints { // the pods of one node: few
		old, ok := prev.endpoints[a]
		for d := range t {
			if ok && old[d] != t[d] {
				out[old[d]], out[t[d]] = true, true
			}
		}
	}
	return out
}

// change is the work of one changeOver.
type change struct {
	prev, st *State
	extra    Table
	views    map[uint32]view // of old tables that go
	indexes  map[uint32]tableIndex
	extended map[uint32]extended
	mixed    map[uint32]bool // tables to which or from which an endpoint goes
	lpmOld   *lpm[uint32]
	lpmNew   *lpm[uint32]
	regions  map[netip.Prefix]move

	known, stays func(identity uint32) bool // addresses have it before, after
}

// move returns the identities between which an address goes: without one of
// its own it has that of the prefix around it.
func (c *change) move(m moved) move {
	mv := move{m.from, m.to}
	around := func(l *lpm[uint32]) uint32 {
		if n, ok := l.addr(m.addr); ok {
			return n
		}
		return maps.IdentityWorld
	}
	if !m.had {
		mv.from = around(c.lpmOld)
	}
	if !m.has {
		mv.to = around(c.lpmNew)
	}
	return mv
}

// view is a table by identity, transitional classes included.
type view map[uint32]rowView

// rowView is what a table says of one identity.
type rowView map[slot]maps.PolicyEntry

func slotOf(k maps.PolicyKey) slot { return slot{k.Kind, k.Proto, k.Port} }

func (v view) add(k maps.PolicyKey, e maps.PolicyEntry) {
	if k.Kind == maps.PolicyDefault {
		return // of no identity
	}
	if v[k.Identity] == nil {
		v[k.Identity] = make(rowView)
	}
	v[k.Identity][slotOf(k)] = e
}

// decide is what the datapath finds in table t for a slot of an identity.
func (c *change) decide(t uint32, entries Table, identity uint32, s slot) maps.PolicyEntry {
	row := c.row(t, entries, identity)
	for {
		if e, ok := row[s]; ok {
			return e
		}
		if s.kind == maps.PolicyAny {
			return entries[maps.PolicyKey{Table: t, Kind: maps.PolicyDefault}]
		}
		s = c.st.ports.parent(s)
	}
}

// put writes a transitional decision, unless the one that is found without it
// is the same.
func (c *change) put(t, identity uint32, s slot, e, parent maps.PolicyEntry) {
	if allows(e) == allows(parent) {
		return
	}
	k := s.key(identity)
	k.Table = t
	if !allows(e) {
		e.Verdict = maps.VerdictDeny // of what no entry was found for
	}
	c.extra[k] = e
}

func allows(e maps.PolicyEntry) bool { return e.Verdict == maps.VerdictAllow }

// strictest returns the entry that denies, if one does.
func strictest(a, b maps.PolicyEntry) maps.PolicyEntry {
	if allows(a) {
		return b
	}
	return a
}

// moves finds all changes of identity, writes the transitional entries, and
// returns the number by which an address goes from one identity to another.
// Who stays where he is need not be looked at: nobody stays in an identity that
// is new, or that goes.
func (c *change) moves(s *work) func(from, to uint32) uint32 {
	c.regions = make(map[netip.Prefix]move)
	if s.whole {
		for _, m := range []map[netip.Prefix]uint32{c.prev.prefixes, c.st.prefixes} {
			for p := range m {
				mv := move{maps.IdentityWorld, maps.IdentityWorld}
				if n, ok := c.lpmOld.lookup(p); ok {
					mv.from = n
				}
				if n, ok := c.lpmNew.lookup(p); ok {
					mv.to = n
				}
				c.regions[p] = mv
			}
		}
	}
	passing := make(map[move]uint32)
	sources := make(map[uint32]map[uint32]bool) // by target
	targets := make(map[uint32]map[uint32]bool) // by source
	note := func(m move) {
		if sources[m.to] == nil {
			sources[m.to] = make(map[uint32]bool)
		}
		if targets[m.from] == nil {
			targets[m.from] = make(map[uint32]bool)
		}
		sources[m.to][m.from] = true
		targets[m.from][m.to] = true
		if m.from != m.to {
			passing[m] = 0
		}
	}
	for _, m := range s.moved {
		note(c.move(m))
	}
	for _, m := range c.regions {
		note(m)
	}
	order := slices.SortedFunc(gomaps.Keys(passing), func(a, b move) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	for _, m := range order {
		switch {
		case !c.known(m.to) && len(sources[m.to]) == 1:
			passing[m] = m.to
		case !c.stays(m.from) && len(targets[m.from]) == 1:
			passing[m] = m.from
		default:
			passing[m] = c.st.nextIdentity
			c.st.nextIdentity++
		}
		c.write(m, passing[m])
	}
	return func(from, to uint32) uint32 {
		if from == to {
			return from
		}
		return passing[move{from, to}]
	}
}

// numbers tells the identities that addresses have before and after a step.
func (c *Compiler) numbers(s *work) (known, stays func(uint32) bool) {
	stays = func(n uint32) bool { return c.ids.byNumber[n] != nil }
	before := make(map[uint32]bool)
	if !s.whole {
		for _, id := range s.came {
			before[id.number] = false
		}
		for _, id := range s.went {
			before[id.number] = true
		}
		return func(n uint32) bool {
			if was, ok := before[n]; ok {
				return was
			}
			return stays(n)
		}, stays
	}
	for _, n := range []uint32{maps.IdentityWorld, maps.IdentityHost, maps.IdentityRemoteNode, maps.IdentityPod} {
		before[n] = true
	}
	for _, n := range s.prev.addrs {
		before[n] = true
	}
	for _, n := range s.prev.prefixes {
		before[n] = true
	}
	return func(n uint32) bool { return before[n] }, stays
}

// write adds what the tables say of n while addresses move by it.
func (c *change) write(m move, n uint32) {
	for t, entries := range c.prev.tables {
		if _, stays := c.st.tables[t]; !stays && n != m.from {
			c.copyRow(t, entries, m.from, n)
		}
	}
	for t, entries := range c.st.tables {
		_, stays := c.prev.tables[t]
		x, differs := c.extended[t]
		switch {
		case stays && c.mixed[t]:
			c.bothRows(t, entries, m, n)
		case n == m.to:
		case differs && n == m.from: // its entries are there to the end
		case differs: // so that no endpoint comes or goes
			c.bothRows(t, x.both, m, n)
		case !stays || n == m.from:
			c.copyRow(t, entries, m.to, n)
		default:
			c.bothRows(t, entries, m, n)
		}
	}
}

// bothRows writes for n what table t allows to both ends of a move.
func (c *change) bothRows(t uint32, entries Table, m move, n uint32) {
	both := func(s slot) maps.PolicyEntry {
		return strictest(c.decide(t, entries, m.from, s), c.decide(t, entries, m.to, s))
	}
	c.put(t, n, anySlot, both(anySlot), entries[maps.PolicyKey{Table: t, Kind: maps.PolicyDefault}])
	for _, end := range []uint32{m.from, m.to} {
		for s := range c.row(t, entries, end) {
			if s != anySlot {
				c.put(t, n, s, both(s), both(c.st.ports.parent(s)))
			}
		}
	}
}

func (c *change) copyRow(t uint32, entries Table, from, n uint32) {
	for s, e := range c.row(t, entries, from) {
		k := s.key(n)
		k.Table = t
		c.extra[k] = e
	}
}

// row returns what table t says of an identity, transitional classes included.
func (c *change) row(t uint32, entries Table, identity uint32) rowView {
	if v, ok := c.views[t]; ok {
		return v[identity]
	}
	x, ok := c.indexes[t]
	if !ok {
		x = newTableIndex(entries)
		c.indexes[t] = x
	}
	row := make(rowView)
	for _, k := range x.of(identity) {
		row[slotOf(k)] = entries[k]
	}
	return row
}

// tableIndex is the keys of a table by identity.
type tableIndex []maps.PolicyKey

func newTableIndex(entries Table) tableIndex {
	x := make(tableIndex, 0, len(entries))
	for k := range entries {
		if k.Kind != maps.PolicyDefault { // of no identity
			x = append(x, k)
		}
	}
	slices.SortFunc(x, func(a, b maps.PolicyKey) int { return cmp.Compare(a.Identity, b.Identity) })
	return x
}

func (x tableIndex) of(identity uint32) tableIndex {
	search := func(n uint32) int {
		i, _ := slices.BinarySearchFunc(x, n, func(k maps.PolicyKey, n uint32) int { return cmp.Compare(k.Identity, n) })
		return i
	}
	lo := search(identity)
	hi := lo
	for hi < len(x) && x[hi].Identity == identity {
		hi++
	}
	return x[lo:hi]
}
