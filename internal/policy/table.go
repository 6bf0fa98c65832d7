package policy

import (
	"hash/maphash"

	pwmaps "github.com/podweir/podweir/internal/maps"
)

// expander writes the rules of groups out as verdict entries.
type expander struct {
	ids   *identities
	ports partition
	rule  func(RuleRef) uint32
}

// expand returns the entries of a group, with table number 0 in the keys. An
// identity that may do anything has the one entry for that; otherwise the
// first rule that allows an entry is its rule.
func (x *expander) expand(g *group) Table {
	out := make(Table)
	anything := make(map[*identity]bool)
	x.each(g, func(r rule, ref uint32, id *identity) {
		if r.anyPort && !anything[id] {
			anything[id] = true
			out[pwmaps.PolicyKey{Identity: id.number, Kind: pwmaps.PolicyAny}] = allow(ref)
		}
	})
	classes := x.ports.all()
	x.each(g, func(r rule, ref uint32, id *identity) {
		if anything[id] {
			return
		}
		for _, ps := range r.portSets {
			put := func(kind uint8, port uint16) {
				k := pwmaps.PolicyKey{Identity: id.number, Port: port, Proto: ps.proto, Kind: kind}
				if _, ok := out[k]; !ok {
					out[k] = allow(ref)
				}
			}
			switch ps.kind {
			case portExact:
				put(pwmaps.PolicyPort, ps.rng.lo)
			case portRanged:
				for _, c := range x.ports.within(ps.rng.lo, ps.rng.hi) {
					put(pwmaps.PolicyClass, c)
				}
			case portAll:
				for _, c := range classes {
					put(pwmaps.PolicyClass, c)
				}
			case portNamed:
				named := g.named
				if g.direction == Egress {
					named = id.named
				}
				if port, ok := named[portName{ps.name, ps.proto}]; ok {
					put(pwmaps.PolicyPort, port)
				}
			}
		}
	})
	return out
}

// each visits the rules in order, and the identities that a rule is about.
func (x *expander) each(g *group, visit func(rule, uint32, *identity)) {
	for _, p := range g.policies {
		for _, r := range p.rules[g.direction] {
			ref := x.rule(RuleRef{p.namespace, p.name, g.direction, r.index})
			if r.anyPeer {
				for _, id := range x.ids.list {
					visit(r, ref, id)
				}
				continue
			}
			for _, pr := range r.peers {
				for _, id := range x.ids.members[x.ids.f.number[pr.key]] {
					visit(r, ref, id)
				}
			}
		}
	}
}

func allow(rule uint32) pwmaps.PolicyEntry {
	return pwmaps.PolicyEntry{Rule: rule, Verdict: pwmaps.VerdictAllow}
}

// digest speeds up finding equal tables; equality is checked entry by entry.
type digest struct {
	n   int
	sum uint64
}

func digestOf(seed maphash.Seed, t Table) digest {
	d := digest{n: len(t)}
	for k, e := range t {
		k.Table = 0
		d.sum += maphash.Comparable(seed, struct {
			k pwmaps.PolicyKey
			e pwmaps.PolicyEntry
		}{k, e})
	}
	return d
}

// number returns t under its number: that of an equal table of this or the
// previous compile, or a new one.
func (st *State) number(prev *State, t Table) uint32 {
	d := digestOf(st.seed, t)
	for _, from := range []*State{st, prev} {
		for _, n := range from.digests[d] {
			if !equalTables(t, from.tables[n], n) {
				continue
			}
			if from == prev {
				st.keep(n, d, prev.tables[n])
			}
			return n
		}
	}
	n := st.nextTable
	st.nextTable++
	numbered := make(Table, len(t))
	for k, e := range t {
		k.Table = n
		numbered[k] = e
	}
	st.keep(n, d, numbered)
	return n
}

func (st *State) keep(n uint32, d digest, t Table) {
	st.tables[n] = t
	st.digests[d] = append(st.digests[d], n)
}

// equalTables compares t, keys without a number, with table n.
func equalTables(t, numbered Table, n uint32) bool {
	if len(t) != len(numbered) {
		return false
	}
	for k, e := range t {
		k.Table = n
		if got, ok := numbered[k]; !ok || got != e {
			return false
		}
	}
	return true
}
