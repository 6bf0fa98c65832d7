package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/service"
)

// setLinger is how long a backend set outlives its last reference: a packet
// that read the service before the switch still finds it.
const setLinger = time.Second

// backendSet is a set of backends in the maps, with its Maglev table.
type backendSet struct {
	num      uint32
	backends []maps.Backend
	maglev   uint32 // size of the table, 0 = none
}

// uses are the numbers of a port's sets by what they are for; 0 = empty.
type uses struct{ internal, cluster, external uint32 }

// grave is what has to be done when no packet can be reading old entries any
// more: remove a set, or decide flows to addresses again.
type grave struct {
	backendSet
	users []maps.ServiceKey // that pointed at the set
	lost  []maps.Addr
	at    time.Time
}

// wanted are the sets of a port, those with equal backends one. Only the one
// for clients outside has a Maglev table.
func wanted(p *service.Port) (out []backendSet) {
	for _, list := range [][]maps.Backend{p.Internal, p.Cluster, p.External} {
		if len(list) > 0 && find(out, list) == nil {
			out = append(out, backendSet{backends: list})
		}
	}
	if set := find(out, p.External); set != nil {
		set.maglev = p.Maglev
	}
	return out
}

// find returns the set that holds just these backends.
func find(sets []backendSet, list []maps.Backend) *backendSet {
	for i := range sets {
		if slices.Equal(sets[i].backends, list) {
			return &sets[i]
		}
	}
	return nil
}

// value is the entry of a frontend.
func (st *portState) value(p *service.Port, kind service.FrontendKind) maps.Service {
	v := maps.Service{Id: st.id, Affinity: p.Affinity}
	flag := func(on bool, f uint32) {
		if on {
			v.Flags |= f
		}
	}
	in, ext := st.use.internal, st.use.internal
	if kind.External() {
		in, ext = st.use.cluster, st.use.external
		v.Flags = maps.ServiceExternal
		flag(p.NoLocalExternal, maps.ServiceNoLocalExt)
		flag(p.KeepSource, maps.ServiceKeepSource)
		flag(kind == service.LoadBalancerIP && p.Restricted, maps.ServiceSourceRanges)
	} else {
		flag(p.NoLocalInternal, maps.ServiceNoLocal|maps.ServiceNoLocalExt)
	}
	for i := range st.sets {
		set := &st.sets[i]
		if set.num == in {
			v.Set, v.Count = set.num, uint32(len(set.backends))
		}
		if set.num == ext {
			v.ExtSet, v.ExtCount = set.num, uint32(len(set.backends))
			if kind.External() && p.Maglev != 0 {
				v.Maglev = set.maglev
			}
		}
	}
	return v
}

// prepare writes down what a port needs before its frontends can be switched:
// sets it does not have yet, under new numbers, states and source ranges.
func (s *services) prepare(p *service.Port) {
	key := p.Key()
	st := s.ports[key]
	if st == nil {
		st = s.adopt(p)
		s.ports[key] = st
	}
	st.next, st.noRoom = wanted(p), 0
	for i := range st.next {
		set := &st.next[i]
		have := find(st.sets, set.backends)
		if set.maglev != 0 && (have == nil || have.maglev != set.maglev) && !s.tables.fits(set.maglev) {
			st.noRoom, set.maglev = set.maglev, 0
		}
		if have != nil && (have.maglev == set.maglev || set.maglev == 0) {
			*set = *have
			continue
		}
		set.num = s.nextSet
		s.nextSet++
		s.sets[set.num] = struct{}{}
		s.desire(*set)
	}
	for _, b := range p.States {
		s.states.Set(stateKey(st.id, b.Backend), b.Flags)
	}
	for _, r := range p.SourceRanges {
		if k, err := rangeKey(st.id, r); err == nil {
			s.ranges.Set(k, 1)
		}
	}
}

// desire asks for the entries of a set.
func (s *services) desire(set backendSet) {
	for i, b := range set.backends {
		s.backends.Set(maps.BackendKey{Set: set.num, Slot: uint32(i)}, b)
	}
	if set.maglev != 0 {
		entries := service.MaglevChunks(service.Maglev(set.backends, set.maglev))
		table := s.tables.table(entries)
		if have, ok := s.maglev.Actual(set.num); !ok || have != table {
			s.tables.prepare(set.num, entries)
		}
		s.maglev.Set(set.num, table)
	}
}

// dropTable asks for the removal of the Maglev table of a set.
func (s *services) dropTable(set uint32) {
	s.tables.forget(set)
	s.maglev.Delete(set)
}

// entries calls f for the keys of a set's backends.
func (set *backendSet) entries(f func(maps.BackendKey)) {
	for i := range set.backends {
		f(maps.BackendKey{Set: set.num, Slot: uint32(i)})
	}
}

// commit is called when what prepare asked for was tried: with an entry
// missing, the port stays with the sets and states it has, except that it can
// do without a Maglev table.
func (s *services) commit(p *service.Port) error {
	st := s.ports[p.Key()]
	next := st.next
	st.next = nil
	noTable := s.withoutTable(st, next)
	if err := s.missing(st, p, next); err != nil {
		for _, set := range next {
			if !st.has(set.num) {
				s.bury(set, nil)
			}
		}
		former := make(map[maps.Backend]uint32, len(st.states))
		for _, b := range st.states {
			former[b.Backend] = b.Flags
		}
		for _, b := range p.States {
			if old, ok := former[b.Backend]; ok {
				s.states.Set(stateKey(st.id, b.Backend), old)
			} else {
				s.states.Delete(stateKey(st.id, b.Backend))
			}
		}
		return fmt.Errorf("it %w: %w", errFormerBackends, err)
	}
	old := st.sets
	st.sets = next
	num := func(list []maps.Backend) uint32 {
		if set := find(next, list); set != nil {
			return set.num
		}
		return 0
	}
	st.use = uses{num(p.Internal), num(p.Cluster), num(p.External)}
	for _, set := range old {
		if !st.has(set.num) {
			s.bury(set, st.frontends)
		}
	}
	kept := make(map[maps.Backend]struct{}, len(p.States))
	for _, b := range p.States {
		kept[b.Backend] = struct{}{}
	}
	for _, b := range st.states {
		if _, ok := kept[b.Backend]; !ok {
			s.states.Delete(stateKey(st.id, b.Backend))
		}
	}
	st.states = p.States
	return noTable
}

// withoutTable takes the Maglev table from a new set if there is no room for
// all of it: backends are then chosen evenly.
func (s *services) withoutTable(st *portState, next []backendSet) (err error) {
	if st.noRoom != 0 {
		return s.tables.full(st.noRoom)
	}
	for i := range next {
		set := &next[i]
		if set.maglev == 0 || st.has(set.num) {
			continue
		}
		if err = s.maglev.Err(set.num); err != nil {
			s.dropTable(set.num)
			err = noTableError{set.maglev, err}
			set.maglev = 0
			return err
		}
	}
	return nil
}

func (st *portState) has(num uint32) bool {
	return slices.ContainsFunc(st.sets, func(s backendSet) bool { return s.num == num })
}

// missing says what of the sets and states of a port could not be written.
func (s *services) missing(st *portState, p *service.Port, next []backendSet) (err error) {
	for i := range next {
		if st.has(next[i].num) {
			continue
		}
		next[i].entries(func(k maps.BackendKey) { err = firstErr(err, s.backends, k) })
	}
	for _, b := range p.States {
		err = firstErr(err, s.states, stateKey(st.id, b.Backend))
	}
	return err
}

func firstErr[K, V comparable](err error, t *reconcile.Table[K, V], k K) error {
	if err != nil {
		return err
	}
	return t.Err(k)
}

// restrict gives up the source ranges that a port no longer has; they go when
// the frontends are switched. What could not be written lets nobody in.
func (s *services) restrict(p *service.Port) (errs []error) {
	st := s.ports[p.Key()]
	old := st.ranges
	st.ranges = nil
	for _, r := range p.SourceRanges {
		k, err := rangeKey(st.id, r)
		if err == nil {
			st.ranges = append(st.ranges, k)
			err = s.ranges.Err(k)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, k := range old {
		if !slices.Contains(st.ranges, k) {
			s.ranges.Delete(k)
		}
	}
	return errs
}

// adopt makes the state of a port seen for the first time: with the id, the
// sets and the states that an earlier run left under its frontends, if no
// other port has them.
func (s *services) adopt(p *service.Port) *portState {
	st := &portState{port: p.Key()}
	for _, f := range p.Frontends {
		v, ok := s.frontends.Actual(f.Key)
		if !s.leftoversFrom.IsZero() {
			break // what the frontend has is of this run, and somebody else's
		}
		if _, taken := s.ids[v.Id]; ok && st.id == 0 && v.Id != 0 && !taken {
			st.id = v.Id
		}
	}
	if st.id == 0 {
		st.id = s.nextID
		s.nextID++
	}
	s.ids[st.id] = struct{}{}
	s.adoptSets(st, p)
	for _, k := range s.statesOf[st.id] {
		v, _ := s.states.Actual(k)
		s.states.Set(k, v)
		st.states = append(st.states, service.BackendState{Backend: maps.Backend{Addr: k.Addr, Port: k.Port}, Flags: v})
	}
	return st
}

// adoptSets takes the sets that the frontends with the port's id point at,
// if they are whole.
func (s *services) adoptSets(st *portState, p *service.Port) {
	type size struct{ count, maglev uint32 }
	found := make(map[uint32]size)
	var order []uint32
	var use uses
	see := func(num, count, maglev uint32) {
		if num == 0 {
			return
		}
		old, again := found[num]
		if !again {
			order = append(order, num)
		} else if old.count != count {
			count = 0 // it cannot be both
		}
		found[num] = size{count, max(old.maglev, maglev)}
	}
	for _, f := range p.Frontends {
		if v, ok := s.frontends.Actual(f.Key); ok && v.Id == st.id {
			st.frontends = append(st.frontends, f.Key)
			if f.Kind.External() {
				use.cluster, use.external = v.Set, v.ExtSet
			} else {
				use.internal = v.Set
			}
			see(v.Set, v.Count, 0)
			see(v.ExtSet, v.ExtCount, v.Maglev)
		}
	}
	for _, num := range order {
		size := found[num]
		if _, taken := s.sets[num]; taken || size.count == 0 || size.count > 1<<20 ||
			size.maglev != 0 && (size.maglev < size.count || service.CheckMaglevSize(size.maglev) != nil) {
			continue
		}
		set := backendSet{num: num, maglev: size.maglev}
		for i := range size.count {
			b, ok := s.backends.Actual(maps.BackendKey{Set: num, Slot: i})
			if !ok {
				break
			}
			set.backends = append(set.backends, b)
		}
		if len(set.backends) == int(size.count) && find(st.sets, set.backends) == nil {
			s.sets[num] = struct{}{}
			st.sets = append(st.sets, set)
			s.desire(set)
		}
	}
	// What was not adopted is not among the sets, and counts as empty.
	st.use = use
}

// bury has a set removed when nothing can be reading it any more.
func (s *services) bury(set backendSet, users []maps.ServiceKey) {
	s.graves = append(s.graves, grave{backendSet: set, users: slices.Clone(users), at: s.now().Add(setLinger)})
}

// buryLeftovers is called once, when all services have been applied: what an
// earlier run left and nobody claimed goes too, after the same delay.
func (s *services) buryLeftovers() {
	s.leftoversFrom = s.now().Add(setLinger)
	s.graves = append(s.graves, grave{at: s.leftoversFrom})
}

// sweep does what is due and returns when to call again; the zero time stands
// for not before something changes.
func (s *services) sweep() (next time.Time, err error) {
	now := s.now()
	left := s.graves[:0]
	due := false
	for _, g := range s.graves {
		if now.Before(g.at) || now.Before(s.leftoversFrom) || s.leftoversFrom.IsZero() {
			left = append(left, g)
			continue
		}
		if s.inUse(g) { // a frontend could not be switched yet
			g.at = now.Add(setLinger)
			left = append(left, g)
			continue
		}
		due = true
		delete(s.sets, g.num)
		g.entries(s.backends.Delete)
		if g.maglev != 0 {
			s.dropTable(g.num)
		}
		for _, a := range g.lost {
			s.changed(a)
		}
	}
	s.graves = left
	if due {
		down, tables := s.backends.Prune(), s.maglev.Prune()
		if err = down.Err(); err == nil {
			err = tables.Err()
		}
	}
	for _, g := range s.graves {
		at := g.at
		if at.Before(s.leftoversFrom) {
			at = s.leftoversFrom
		}
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	return next, err
}

func (s *services) inUse(g grave) bool {
	for _, f := range g.users {
		if v, ok := s.frontends.Actual(f); ok && g.num != 0 && (v.Set == g.num || v.ExtSet == g.num) {
			return true
		}
	}
	return false
}

// upsertStates writes states and keeps the index of them.
func (s *services) upsertStates() reconcile.Result[maps.BackendStateKey] {
	r := s.states.Upsert()
	for _, k := range r.Added {
		s.hasState(k)
	}
	return r
}

// hasState notes a state that was not in the map before.
func (s *services) hasState(k maps.BackendStateKey) {
	s.statesOf[k.Service] = append(s.statesOf[k.Service], k)
}

// lostStates takes states that were removed out of the index.
func (s *services) lostStates(keys []maps.BackendStateKey) {
	gone := make(map[uint32]map[maps.BackendStateKey]struct{})
	for _, k := range keys {
		if gone[k.Service] == nil {
			gone[k.Service] = make(map[maps.BackendStateKey]struct{})
		}
		gone[k.Service][k] = struct{}{}
	}
	for id, of := range gone {
		left := slices.DeleteFunc(s.statesOf[id], func(k maps.BackendStateKey) bool { _, ok := of[k]; return ok })
		if s.statesOf[id] = left; len(left) == 0 {
			delete(s.statesOf, id)
		}
	}
}

func stateKey(id uint32, b maps.Backend) maps.BackendStateKey {
	return maps.BackendStateKey{Addr: b.Addr, Service: id, Port: b.Port}
}

func rangeKey(id uint32, r netip.Prefix) (maps.SrcRangeKey, error) {
	p, err := maps.ToPrefix(r)
	return maps.ToSrcRange(id, p), err
}
