package policy

import (
	"encoding/binary"
	"hash/maphash"
	"strings"

	pwmaps "github.com/podweir/podweir/internal/maps"
)

// expander writes the rules of groups out as verdict entries.
type expander struct {
	ids   *identities
	ports partition
	rule  func(RuleRef) uint32
}

// step is a rule of a group, in the order in which they are asked.
type step struct {
	rule
	tier Tier
	ref  uint32
}

// slot is a key of a table without table and identity.
type slot struct {
	kind, proto uint8
	port        uint16
}

var anySlot = slot{kind: pwmaps.PolicyAny}

// parent is where the datapath looks when a slot is empty.
func (p partition) parent(s slot) slot {
	if s.kind == pwmaps.PolicyPort {
		return slot{pwmaps.PolicyClass, s.proto, p.of(s.port)}
	}
	return anySlot
}

func (s slot) key(identity uint32) pwmaps.PolicyKey {
	return pwmaps.PolicyKey{Identity: identity, Port: s.port, Proto: s.proto, Kind: s.kind}
}

// decision is a verdict and the rule that it is of.
type decision struct {
	allow bool
	ref   uint32
}

func (d decision) entry() pwmaps.PolicyEntry {
	e := pwmaps.PolicyEntry{Rule: d.ref, Verdict: pwmaps.VerdictDeny}
	if d.allow {
		e.Verdict = pwmaps.VerdictAllow
	}
	return e
}

// covers says that d, found in a parent slot, serves for e too: the verdict is
// the same and, of a denial, the rule that events name.
func (d decision) covers(e decision) bool { return d.allow && e.allow || d == e }

// expand returns the entries of a group, with table number 0 in the keys.
func (x *expander) expand(g *group) Table {
	steps := x.steps(g)
	lists := make(map[*identity][]int32) // the steps about each
	for i, s := range steps {
		if s.anyPeer {
			for _, id := range x.ids.list {
				lists[id] = append(lists[id], int32(i))
			}
			continue
		}
		for _, pr := range s.peers {
			for _, id := range x.ids.members[x.ids.f.number[pr.key]] {
				if l := lists[id]; len(l) == 0 || l[len(l)-1] != int32(i) {
					lists[id] = append(l, int32(i))
				}
			}
		}
	}
	same := make(map[string]*row)
	rows := make(map[*identity]*row, len(lists))
	add := func(id *identity) {
		named := g.named
		if g.direction == Egress {
			named = id.named
		}
		key := rowKey(lists[id], named)
		r := same[key]
		if r == nil {
			r = x.row(g, steps, lists[id], named)
			same[key] = r
		}
		rows[id] = r
	}
	out := make(Table)
	var byDefault decision
	if g.clustered() {
		for _, id := range x.ids.list {
			add(id)
		}
		byDefault = commonest(rows)
		if byDefault != (decision{}) {
			out[pwmaps.PolicyKey{Kind: pwmaps.PolicyDefault}] = byDefault.entry()
		}
	} else {
		for id := range lists { // whom no step is about finds no entry
			add(id)
		}
	}
	for id, r := range rows {
		if r.any != byDefault {
			out[anySlot.key(id.number)] = r.any.entry()
		}
		for _, e := range r.ports {
			out[e.slot.key(id.number)] = e.decision.entry()
		}
	}
	return out
}

func (x *expander) steps(g *group) []step {
	var out []step
	for _, p := range g.policies {
		for _, r := range p.rules[g.direction] {
			ref := x.rule(RuleRef{p.ref(), g.direction, r.index, r.name})
			out = append(out, step{rule: r, tier: p.tier, ref: ref})
		}
	}
	return out
}

func rowKey(list []int32, named map[portName]uint16) string {
	var b strings.Builder
	for _, i := range list {
		var w [4]byte
		binary.BigEndian.PutUint32(w[:], uint32(i))
		b.Write(w[:])
	}
	b.WriteString("|")
	writeNamed(&b, named)
	return b.String()
}

// row is what a group's policies make of an identity: of what has no ports,
// and of the slots of which they make something else.
type row struct {
	any   decision
	ports []slotDecision
}

type slotDecision struct {
	slot
	decision
}

// first has, of one tier, the first step about anything and about each slot.
type first struct {
	any int32 // -1: none
	at  map[slot]int32
}

// step returns the first step about what a slot stands for, -1 if there is
// none: of the slot itself and of all that it is looked for in after it.
func (f *first) step(s slot, p partition) int32 {
	best := f.any
	for s.kind != pwmaps.PolicyAny {
		if i, ok := f.at[s]; ok && (best < 0 || i < best) {
			best = i
		}
		s = p.parent(s)
	}
	return best
}

// row decides about an identity that the steps of the list are about.
func (x *expander) row(g *group, steps []step, list []int32, named map[portName]uint16) *row {
	var tiers [tierCount]first
	for t := range tiers {
		tiers[t] = first{any: -1, at: make(map[slot]int32)}
	}
	for _, i := range list {
		f := &tiers[steps[i].tier]
		if f.any >= 0 {
			continue // nothing after it is asked
		}
		if steps[i].anyPort {
			f.any = i
			continue
		}
		for _, ps := range steps[i].portSets {
			x.slots(ps, named, func(s slot) {
				if _, ok := f.at[s]; !ok {
					f.at[s] = i
				}
			})
		}
	}
	decide := func(s slot) decision {
		for t := range tierCount {
			i := tiers[t].step(s, x.ports)
			switch {
			case i >= 0 && steps[i].action == actionAccept:
				return decision{allow: true, ref: steps[i].ref}
			case i >= 0 && steps[i].action == actionDeny:
				return decision{ref: steps[i].ref}
			case t == TierNetworkPolicy && g.isolated:
				return decision{}
			}
		}
		return decision{allow: true}
	}
	r := &row{any: decide(anySlot)}
	done := make(map[slot]bool)
	for t := range tiers {
		for s := range tiers[t].at {
			if done[s] {
				continue
			}
			done[s] = true
			if d := decide(s); !decide(x.ports.parent(s)).covers(d) {
				r.ports = append(r.ports, slotDecision{s, d})
			}
		}
	}
	return r
}

// slots visits the slots that an element of a rule's ports stands for.
func (x *expander) slots(ps ports, named map[portName]uint16, visit func(slot)) {
	var classes []uint16
	switch ps.kind {
	case portExact:
		visit(slot{pwmaps.PolicyPort, ps.proto, ps.rng.lo})
	case portNamed:
		if port, ok := named[portName{ps.name, ps.proto}]; ok {
			visit(slot{pwmaps.PolicyPort, ps.proto, port})
		}
	case portRanged:
		classes = x.ports.within(ps.rng.lo, ps.rng.hi)
	case portAll:
		classes = x.ports.all()
	}
	for _, c := range classes {
		visit(slot{pwmaps.PolicyClass, ps.proto, c})
	}
}

// commonest returns the decision that most rows make of what they make
// nothing else of; of equally common ones a denial, and the earlier rule.
func commonest(rows map[*identity]*row) decision {
	count := make(map[decision]int)
	for _, r := range rows {
		count[r.any]++
	}
	var best decision
	for d, n := range count {
		m := count[best]
		if n > m || n == m && (best.allow && !d.allow || best.allow == d.allow && d.ref < best.ref) {
			best = d
		}
	}
	return best
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
// previous compile, or a new one. A table that is being extended is no other
// group's.
func (st *State) number(s *work, t Table) (uint32, digest) {
	d := digestOf(st.seed, t)
	for _, from := range []*State{st, s.prev} {
		for _, n := range from.digests[d] {
			if _, ok := s.extended[n]; ok || !equalTables(t, from.tables[n], n) {
				continue
			}
			if from == s.prev {
				st.keep(n, d, from.tables[n])
			}
			return n, d
		}
	}
	n := st.nextTable
	st.nextTable++
	if _, ok := t[pwmaps.PolicyKey{Kind: pwmaps.PolicyDefault}]; ok {
		n |= pwmaps.TableDefault
	}
	numbered := make(Table, len(t))
	for k, e := range t {
		k.Table = n
		numbered[k] = e
	}
	st.keep(n, d, numbered)
	return n, d
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
