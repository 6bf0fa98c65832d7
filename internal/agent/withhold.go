package agent

import (
	"errors"
	"fmt"
	gomaps "maps"
	"math"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/reconcile"
)

// An address whose entry cannot be written, because pw_addrs or pw_prefixes is
// full, is judged by what is around it, which may be allowed what the address
// is not: a block without its except, everybody but a pod that a Deny rule
// names. Such allowances are withheld until the entry is written.

// mistaken is an identity that the datapath takes for another one.
type mistaken struct{ id, is uint32 }

// written is what one round wants the maps of addresses to hold.
type written struct {
	addrs     map[maps.Addr]maps.Peer
	prefixes  map[maps.PrefixKey]maps.Peer
	endpoints map[maps.Addr]maps.Endpoint
}

// suspects are the entries of want that could not be written and, if a map of
// that size has no room for all that are new, these.
func suspects[K, V comparable](t *reconcile.Table[K, V], want map[K]V, size int) map[K]V {
	out := make(map[K]V)
	for k := range t.Failed() {
		if v, ok := want[k]; ok {
			out[k] = v
		}
	}
	if len(want)+t.Len() <= size {
		return out
	}
	added := make(map[K]V)
	for k, v := range want {
		if _, ok := t.Actual(k); !ok {
			added[k] = v
		}
	}
	if len(added)+t.Len() > size {
		gomaps.Copy(out, added)
	}
	return out
}

// mistaken says who is taken for whom. With ahead it is asked before the
// round's entries are written, about those that will not be.
func (p *peers) mistaken(w written, ahead bool) map[mistaken]bool {
	addrsMax, prefixesMax := math.MaxInt, math.MaxInt
	if ahead {
		addrsMax, prefixesMax = p.addrsMax, p.prefixesMax
	}
	addrs, prefixes := suspects(p.addrs, w.addrs, addrsMax), suspects(p.prefixes, w.prefixes, prefixesMax)
	endpoints := suspects(p.endpoints, w.endpoints, math.MaxInt)
	out := make(map[mistaken]bool)
	if len(addrs)+len(prefixes)+len(endpoints) == 0 {
		return out
	}
	add := func(id, is uint32) {
		if id != is {
			out[mistaken{id, is}] = true
		}
	}
	// What is around an address now, and what will be.
	around := []*lpm[uint32]{newLPM[uint32]()}
	for k, v := range p.prefixes.All() {
		around[0].set(k, v.Identity)
	}
	if ahead && w.prefixes != nil {
		around = append(around, newLPM[uint32]())
		for k, v := range w.prefixes {
			if _, ok := prefixes[k]; !ok {
				around[1].set(k, v.Identity)
			}
		}
	}
	byPrefix := func(id uint32, addr [16]byte, maxLen int) {
		for _, l := range around {
			is, ok := l.lookup(addr, maxLen)
			if !ok {
				is = maps.IdentityWorld
			}
			add(id, is)
		}
	}
	for k, v := range addrs {
		if _, local := p.endpoints.Actual(k); local {
			continue // judged by pw_endpoints
		}
		if old, ok := p.addrs.Actual(k); ok {
			add(v.Identity, old.Identity)
		} else {
			byPrefix(v.Identity, k.B, 128)
		}
	}
	for k, v := range endpoints {
		if old, ok := p.endpoints.Actual(k); ok {
			add(v.Identity, old.Identity)
		}
	}
	for k, v := range prefixes {
		if old, ok := p.prefixes.Actual(k); ok {
			add(v.Identity, old.Identity)
		} else {
			byPrefix(v.Identity, k.Addr, int(k.Len)-1)
		}
	}
	return out
}

// withhold takes out of the tables what who is mistaken for somebody else
// would be allowed and is not, and puts back what was taken for no reason that
// is left.
func (p *peers) withhold(who map[mistaken]bool, out policy.Output) error {
	if len(who) == 0 && len(p.withheld) == 0 {
		return nil
	}
	tables := whole(out)
	now := changing(tables, out)
	next := p.opened(who, now, tables)
	if gomaps.Equal(next, p.withheld) {
		return nil
	}
	changed := make(map[uint32]bool)
	for k := range next {
		if !p.withheld[k] {
			changed[k.Table] = true
		}
	}
	for k := range p.withheld {
		if !next[k] {
			changed[k.Table] = true
		}
	}
	p.withheld = next
	p.policy.Desire(p.without(now))
	down := p.policy.PruneIf(func(k maps.PolicyKey, _ maps.PolicyEntry) bool { return next[k] })
	err := errors.Join(down.Err(), p.upsertPolicy())
	for k, v := range p.endpoints.All() {
		if changed[v.PolicyIn] || changed[v.PolicyOut] {
			p.gens.bump(p.slots[k])
		}
	}
	return err
}

// doubtful says that a round has to look at everything.
func (p *peers) doubtful() bool {
	_, addrs := p.addrs.NextRetry()
	_, prefixes := p.prefixes.NextRetry()
	_, endpoints := p.endpoints.NextRetry()
	return addrs || prefixes || endpoints || len(p.withheld) > 0
}

// without is a table without what is withheld.
func (p *peers) without(t map[maps.PolicyKey]maps.PolicyEntry) map[maps.PolicyKey]maps.PolicyEntry {
	if len(p.withheld) == 0 {
		return t
	}
	out := gomaps.Clone(t)
	for k := range p.withheld {
		delete(out, k)
	}
	return out
}

// withheldErr says what is missing, and until when.
func (p *peers) withheldErr() error {
	tables := make(map[uint32]bool)
	for k := range p.withheld {
		tables[k.Table] = true
	}
	if len(tables) == 0 {
		return nil
	}
	return fmt.Errorf("%d allowances of %d policy tables are withheld: addresses that could not be written would be let in by them; "+
		"they are put back when pw_addrs, pw_prefixes and pw_endpoints hold all addresses (with fewer pods or ipBlocks)",
		len(p.withheld), len(tables))
}

// opened are the allowances by which somebody is let in, since taken for
// somebody else, who is not to be.
func (p *peers) opened(who map[mistaken]bool, now, tables map[maps.PolicyKey]maps.PolicyEntry) map[maps.PolicyKey]bool {
	out := make(map[maps.PolicyKey]bool)
	if len(who) == 0 {
		return out
	}
	about := make(map[uint32]map[uint32][]maps.PolicyKey) // by table and identity
	for k := range now {
		if about[k.Table] == nil {
			about[k.Table] = make(map[uint32][]maps.PolicyKey)
		}
		about[k.Table][k.Identity] = append(about[k.Table][k.Identity], k)
	}
	for n, keys := range about {
		for m := range who {
			// Wherever the one or the other has an entry, and elsewhere.
			places := append([]maps.PolicyKey{{Kind: maps.PolicyAny}}, keys[m.id]...)
			for _, place := range append(places, keys[m.is]...) {
				if _, ok := p.decides(tables, nil, n, m.id, place); ok {
					continue
				}
				for {
					k, ok := p.decides(now, out, n, m.is, place)
					if !ok {
						break
					}
					out[k] = true
				}
			}
		}
	}
	return out
}

// decides looks up, as the datapath does, what a table says of an identity
// where place is about: the entry that allows it, if one does.
func (p *peers) decides(entries map[maps.PolicyKey]maps.PolicyEntry, less map[maps.PolicyKey]bool, table, identity uint32, place maps.PolicyKey) (maps.PolicyKey, bool) {
	k := maps.PolicyKey{Table: table, Identity: identity, Kind: place.Kind, Proto: place.Proto, Port: place.Port}
	for {
		if e, ok := entries[k]; ok && !less[k] {
			return k, e.Verdict == maps.VerdictAllow
		}
		switch {
		case k.Kind == maps.PolicyPort:
			k.Kind = maps.PolicyClass
			k.Port, _ = p.classes.Actual(uint32(k.Port))
		case k.Kind == maps.PolicyClass:
			k.Kind, k.Proto, k.Port = maps.PolicyAny, 0, 0
		case k.Kind == maps.PolicyAny && table&maps.TableDefault != 0 && identity != maps.IdentityUnknown:
			k.Kind, k.Identity = maps.PolicyDefault, 0
		default:
			return k, false
		}
	}
}
