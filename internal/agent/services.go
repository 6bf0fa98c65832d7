package agent

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/service"
)

// errTaken is wrapped by errors about frontends that are another owner's.
var errTaken = errors.New("belongs to")

// services writes what the datapath knows of services: pw_services,
// pw_backends, pw_maglev, pw_backend_st and pw_src_ranges. It does not ask
// where ports come from: they belong to owners, services or others.
//
// Per round: new sets of backends whole under new numbers, their Maglev
// tables, the states of backends, and source ranges; then the frontends are
// switched; then states of backends that are gone are removed and the
// generations of their addresses moved; sets that nothing points at go when
// no packet can be reading them any more (see sets.go).
//
// Of several owners that want one frontend, the one that has it keeps it; in
// one round, the one created first gets it, then the first by name.
type services struct {
	now       func() time.Time
	frontends *reconcile.Table[maps.ServiceKey, maps.Service]
	backends  *reconcile.Table[maps.BackendKey, maps.Backend]
	maglev    *reconcile.Table[uint32, maglevTable] // by set
	tables    *maglevStore                          // behind it
	states    *reconcile.Table[maps.BackendStateKey, uint32]
	ranges    *reconcile.Table[maps.SrcRangeKey, uint32]
	// changed is told of every address whose flows have to be decided again;
	// the address of NodePorts stands for all that they answer on.
	changed func(maps.Addr)

	byOwner map[service.Owner]service.Compiled
	ports   map[service.PortKey]*portState
	// claims says which port has a frontend; waiting, which owners want one
	// that another has, and wants the same by owner.
	claims     map[maps.ServiceKey]*portState
	waiting    map[maps.ServiceKey]map[service.Owner]struct{}
	wants      map[service.Owner][]maps.ServiceKey
	addrOwners map[maps.ServiceKey]int // how many owners mark the address as theirs

	// The states that the map holds, by the id of the service port.
	statesOf map[uint32][]maps.BackendStateKey

	ids, sets     map[uint32]struct{} // claimed by a port
	nextID        uint32
	nextSet       uint32
	graves        []grave
	leftoversFrom time.Time // what nobody wants may be removed from here on
}

// portState is what a port has in the maps.
type portState struct {
	port      service.PortKey
	id        uint32
	frontends []maps.ServiceKey
	sets      []backendSet // distinct ones
	use       uses
	states    []service.BackendState // each backend once
	ranges    []maps.SrcRangeKey
	next      []backendSet // being written
	noRoom    uint32       // the size of a table that would not fit
}

func newServices(st stores, now func() time.Time, changed func(maps.Addr)) (*services, error) {
	tables := newMaglevStore(st.maglev)
	s := &services{
		now:        now,
		frontends:  reconcile.New(st.services),
		backends:   reconcile.New(st.backends),
		maglev:     reconcile.New(tables),
		tables:     tables,
		states:     reconcile.New(st.states),
		ranges:     reconcile.New(st.ranges),
		changed:    changed,
		byOwner:    make(map[service.Owner]service.Compiled),
		ports:      make(map[service.PortKey]*portState),
		claims:     make(map[maps.ServiceKey]*portState),
		waiting:    make(map[maps.ServiceKey]map[service.Owner]struct{}),
		wants:      make(map[service.Owner][]maps.ServiceKey),
		addrOwners: make(map[maps.ServiceKey]int),
		statesOf:   make(map[uint32][]maps.BackendStateKey),
		ids:        make(map[uint32]struct{}),
		sets:       make(map[uint32]struct{}),
		nextID:     1,
		nextSet:    1,
	}
	err := errors.Join(s.frontends.Load(), s.backends.Load(), s.maglev.Load(), s.states.Load(), s.ranges.Load())
	if err != nil {
		return nil, err
	}
	for _, v := range s.frontends.All() {
		s.nextID = max(s.nextID, v.Id+1)
		s.nextSet = max(s.nextSet, v.Set+1, v.ExtSet+1)
	}
	for k := range s.states.All() {
		s.hasState(k)
		s.nextID = max(s.nextID, k.Service+1)
	}
	for k := range s.backends.All() {
		s.nextSet = max(s.nextSet, k.Set+1)
	}
	for set := range s.maglev.All() {
		s.nextSet = max(s.nextSet, set+1)
	}
	return s, nil
}

// apply brings the owners given to their compiled state; a zero Compiled
// removes one. more says that this is a part of them, younger ones follow, and
// nothing is to be removed before the last part: at start that would be all
// which an earlier run left and nobody has asked for yet. It returns the owners
// to compile and apply again, because a frontend they wanted has become free or
// their backends found no room, and what went wrong by owner.
func (s *services) apply(dirty map[service.Owner]service.Compiled, more bool) (again []service.Owner, errs map[service.Owner]error) {
	errs = make(map[service.Owner]error)
	fail := func(o service.Owner, err error) {
		if err != nil {
			errs[o] = errors.Join(errs[o], err)
		}
	}
	order := inOrder(dirty)
	again = s.giveUp(dirty)
	each := func(f func(o service.Owner, p *service.Port)) {
		for _, o := range order {
			for i := range o.Ports {
				f(o.owner, &o.Ports[i])
			}
		}
	}
	// Everything that frontends will refer to.
	each(func(_ service.Owner, p *service.Port) { s.prepare(p) })
	s.backends.Upsert()
	s.maglev.Upsert()
	s.upsertStates()
	s.ranges.Upsert()
	each(func(o service.Owner, p *service.Port) {
		if err := s.commit(p); err != nil {
			fail(o, fmt.Errorf("service port %s: %w", p.Key(), err))
		}
		for _, err := range s.restrict(p) {
			fail(o, fmt.Errorf("source range of %s: %w", p.Key(), err))
		}
	})
	// Frontends.
	each(func(o service.Owner, p *service.Port) {
		for _, err := range s.point(o, p) {
			fail(o, err)
		}
	})
	for _, o := range order {
		s.own(o.owner, o.Compiled)
		if o.Name == "" {
			delete(s.byOwner, o.owner)
		} else {
			s.byOwner[o.owner] = o.Compiled
		}
	}
	_ = s.flush(more) // its errors are those of the entries below, or of retry
	each(func(o service.Owner, p *service.Port) {
		for _, f := range s.ports[p.Key()].frontends {
			fail(o, s.frontends.Err(f))
		}
	})
	for _, o := range order {
		for _, a := range o.Addrs {
			fail(o.owner, s.frontends.Err(service.OwnerKey(a)))
		}
	}
	return again, errs
}

// ordered is an owner with when it was created; zero if it is removed.
type ordered struct {
	owner   service.Owner
	created time.Time
}

// compare sorts owners: removed ones, then by age, then by name.
func (a ordered) compare(b ordered) int {
	return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.owner.Namespace, b.owner.Namespace),
		cmp.Compare(a.owner.Name, b.owner.Name), cmp.Compare(a.owner.Kind, b.owner.Kind))
}

// toApply is an owner of a round with what it compiled to; that of one which
// is removed has no owner in it.
type toApply struct {
	ordered
	service.Compiled
}

func inOrder(dirty map[service.Owner]service.Compiled) []toApply {
	out := make([]toApply, 0, len(dirty))
	for o, c := range dirty {
		out = append(out, toApply{ordered{o, c.Created}, c})
	}
	slices.SortFunc(out, func(a, b toApply) int { return a.compare(b.ordered) })
	return out
}

// giveUp takes back what the dirty owners had and no longer want, so that
// another of them may have it in this very round.
func (s *services) giveUp(dirty map[service.Owner]service.Compiled) (again []service.Owner) {
	for owner, c := range dirty {
		want := make(map[maps.ServiceKey]service.PortKey)
		ports := make(map[service.PortKey]bool)
		for i := range c.Ports {
			key := c.Ports[i].Key()
			ports[key] = true
			for _, f := range c.Ports[i].Frontends {
				want[f.Key] = key
			}
		}
		was := s.byOwner[owner]
		for i := range was.Ports {
			key := was.Ports[i].Key()
			st := s.ports[key]
			if st == nil {
				continue
			}
			for _, f := range st.frontends {
				if want[f] == key || s.claims[f] != st {
					continue
				}
				delete(s.claims, f)
				s.frontends.Delete(f)
				for waiter := range s.waiting[f] {
					if _, inRound := dirty[waiter]; !inRound {
						again = append(again, waiter)
					}
				}
			}
			if !ports[key] {
				s.forget(key, st)
			}
		}
		for _, f := range s.wants[owner] {
			if delete(s.waiting[f], owner); len(s.waiting[f]) == 0 {
				delete(s.waiting, f)
			}
		}
		delete(s.wants, owner)
	}
	return again
}

// forget removes a port; its frontends are given up already.
func (s *services) forget(key service.PortKey, st *portState) {
	for _, set := range st.sets {
		s.bury(set, st.frontends)
	}
	for _, b := range st.states {
		s.states.Delete(stateKey(st.id, b.Backend))
	}
	for _, k := range st.ranges {
		s.ranges.Delete(k)
	}
	delete(s.ports, key)
	delete(s.ids, st.id)
}

// point makes the frontends of a port lead to its sets.
func (s *services) point(owner service.Owner, p *service.Port) (errs []error) {
	st := s.ports[p.Key()]
	st.frontends = nil
	for _, f := range p.Frontends {
		if other, taken := s.claims[f.Key]; taken && other != st {
			if s.waiting[f.Key] == nil {
				s.waiting[f.Key] = make(map[service.Owner]struct{})
			}
			s.waiting[f.Key][owner] = struct{}{}
			s.wants[owner] = append(s.wants[owner], f.Key)
			errs = append(errs, fmt.Errorf("frontend %s of %s %w %s", maps.KeyString(f.Key), st.port, errTaken, other.port))
			continue
		}
		s.claims[f.Key] = st
		st.frontends = append(st.frontends, f.Key)
		s.frontends.Set(f.Key, st.value(p, f.Kind))
	}
	return errs
}

// own writes the entries that mark addresses as some service's.
func (s *services) own(owner service.Owner, c service.Compiled) {
	had := s.byOwner[owner].Addrs
	for _, a := range had {
		if slices.Contains(c.Addrs, a) {
			continue
		}
		k := service.OwnerKey(a)
		if s.addrOwners[k]--; s.addrOwners[k] == 0 {
			delete(s.addrOwners, k)
			s.frontends.Delete(k)
		}
	}
	for _, a := range c.Addrs {
		k := service.OwnerKey(a)
		if !slices.Contains(had, a) {
			s.addrOwners[k]++
		}
		s.frontends.Set(k, maps.Service{Flags: maps.ServiceAddrOwned})
	}
}

// flush switches the frontends, then removes what they do not need any more,
// and moves the generations of the addresses involved: of backends that are
// gone, of all backends that a frontend led to which now leads elsewhere or
// nowhere, and of the address of a new external frontend, which may have been
// somebody's without the service. A packet that found the old entries a moment ago
// may still make a flow of them: the generations move once more when it is over.
// more: nothing is removed yet, see apply.
func (s *services) flush(more bool) error {
	lost := make(map[maps.Addr]struct{})
	led := make(map[maps.ServiceKey]uint32) // where, so far
	for k := range s.frontends.Unsettled() {
		if _, stays := s.frontends.Desired(k); more && !stays {
			continue
		}
		if v, ok := s.frontends.Actual(k); ok {
			led[k] = v.Id
		}
	}
	leads := func(k maps.ServiceKey) {
		v, _ := s.frontends.Actual(k)
		if old := led[k]; old != v.Id {
			for _, b := range s.statesOf[old] {
				lost[b.Addr] = struct{}{}
			}
			if old == 0 && v.Flags&maps.ServiceExternal != 0 {
				lost[k.Addr] = struct{}{}
			}
		}
	}
	up := s.frontends.Upsert()
	var down reconcile.Result[maps.ServiceKey]
	if !more {
		down = s.frontends.Prune()
	}
	for _, k := range slices.Concat(up.Changed, up.Added, down.Removed) {
		leads(k)
	}
	added := s.upsertStates()
	var gone reconcile.Result[maps.BackendStateKey]
	if !more {
		gone = s.states.Prune()
	}
	for _, k := range gone.Removed {
		lost[k.Addr] = struct{}{}
	}
	s.lostStates(gone.Removed)
	ranges := s.ranges.Upsert()
	var left reconcile.Result[maps.SrcRangeKey]
	if !more {
		left = s.ranges.Prune()
	}
	if len(lost) > 0 {
		g := grave{at: s.now().Add(setLinger)}
		for a := range lost {
			s.changed(a)
			g.lost = append(g.lost, a)
		}
		s.graves = append(s.graves, g)
	}
	return errors.Join(up.Err(), down.Err(), added.Err(), gone.Err(), ranges.Err(), left.Err())
}

// retry writes what failed before and is due again.
func (s *services) retry() error { return s.flush(false) }

// nextRetry is when a failed entry is due again; zero: none failed.
func (s *services) nextRetry() (next time.Time) {
	for _, t := range []func() (time.Time, bool){s.frontends.NextRetry, s.states.NextRetry, s.ranges.NextRetry} {
		if at, ok := t(); ok {
			next = sooner(next, at)
		}
	}
	return next
}
