package policy

import (
	"hash/maphash"
	"maps"
	"net/netip"

	pwmaps "github.com/podweir/podweir/internal/maps"
)

// State is what one compile leaves for the next: the numbers in use, the
// counters, and what the maps hold once its output is applied. A State that
// [Compile] returned is never changed; those of a [Compiler] share their maps.
type State struct {
	addrs     map[netip.Addr]uint32
	prefixes  map[netip.Prefix]uint32
	tables    map[uint32]Table
	endpoints map[netip.Addr][2]uint32

	peers      map[string]uint32 // selectors and blocks in force
	identities map[string]uint32 // by signature
	rules      map[RuleRef]uint32
	ports      partition
	digests    map[digest][]uint32 // tables that may be found by content

	seed maphash.Seed

	nextPeer, nextIdentity, nextTable, nextRule uint32
	nextClass                                   uint16
}

// Snapshot is what the maps hold of an earlier run.
type Snapshot struct {
	Addrs       map[netip.Addr]uint32
	Prefixes    map[netip.Prefix]uint32
	Policy      Table
	PortClasses []PortClass
	// Endpoints has the {in, out} tables of each local pod address.
	Endpoints map[netip.Addr][2]uint32
}

func newState() *State {
	return &State{
		seed:         maphash.MakeSeed(),
		nextPeer:     1,
		nextIdentity: pwmaps.IdentityFirstDynamic,
		nextTable:    1,
		nextRule:     1,
		nextClass:    1,
	}
}

// successor returns an empty State that goes on counting where st stopped.
func (st *State) successor() *State {
	return &State{
		seed:         st.seed,
		nextPeer:     st.nextPeer,
		nextIdentity: st.nextIdentity,
		nextTable:    st.nextTable,
		nextRule:     st.nextRule,
		nextClass:    st.nextClass,
	}
}

// Restore makes a State from what an earlier run left in the maps, so that
// the first compile changes over from it as from a previous output. No number
// in the snapshot is handed out again. What the numbers stood for is lost, so
// all tables and identities will be new.
func Restore(s Snapshot) *State {
	st := newState()
	st.addrs = maps.Clone(s.Addrs)
	st.prefixes = maps.Clone(s.Prefixes)
	st.endpoints = maps.Clone(s.Endpoints)
	st.tables = make(map[uint32]Table)
	for k, e := range s.Policy {
		t := st.tables[k.Table]
		if t == nil {
			t = make(Table)
			st.tables[k.Table] = t
		}
		t[k] = e
		st.nextIdentity = after(st.nextIdentity, k.Identity)
		st.nextTable = afterTable(st.nextTable, k.Table)
		st.nextRule = after(st.nextRule, e.Rule)
	}
	for _, ids := range s.Endpoints {
		for _, id := range ids {
			st.nextTable = afterTable(st.nextTable, id)
			if id != 0 && st.tables[id] == nil {
				st.tables[id] = Table{}
			}
		}
	}
	for _, id := range s.Addrs {
		st.nextIdentity = after(st.nextIdentity, id)
	}
	for _, id := range s.Prefixes {
		st.nextIdentity = after(st.nextIdentity, id)
	}
	for _, c := range s.PortClasses {
		st.nextClass = max(st.nextClass, c.Class+1)
	}
	st.ports = restorePartition(s.PortClasses)
	return st
}

// afterTable is after for tables, whose numbers have a flag in them.
func afterTable(counter, number uint32) uint32 {
	if number &^= pwmaps.TableDefault; number >= pwmaps.TableDefault>>1 {
		return counter // damage, too: counting on would come to the flag
	}
	return max(counter, number+1)
}

// after is the counter behind a number in use. Numbers of the upper half come
// from damage: counting on from them would come to 0, and table 0 lets
// everything pass.
func after(counter, number uint32) uint32 {
	if number >= 1<<31 {
		return counter
	}
	return max(counter, number+1)
}
