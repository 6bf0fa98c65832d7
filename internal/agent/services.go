package agent

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/service"
)

// setLinger is how long a backend set outlives its last reference: a packet
// that read the service before the switch still finds it.
const setLinger = time.Second

// services writes pw_services and pw_backends. A set of backends is written
// whole under a new number, then every frontend of the port is switched, then
// the old set goes.
type services struct {
	now       func() time.Time
	frontends *reconcile.Table[maps.ServiceKey, maps.Service]
	backends  *reconcile.Table[maps.BackendKey, maps.Backend]
	// changed is told of every backend address that a port lost.
	changed func(maps.Addr)

	byName map[types.NamespacedName]service.Compiled
	ports  map[service.PortKey]*portState
	// claims says which port has a frontend; waiting, which services want one
	// that another has.
	claims  map[maps.ServiceKey]service.PortKey
	waiting map[maps.ServiceKey]map[types.NamespacedName]struct{}
	owners  map[maps.ServiceKey]map[types.NamespacedName]struct{}

	ids, sets     map[uint32]struct{} // claimed by a port
	nextID        uint32
	nextSet       uint32
	graves        []grave
	leftoversFrom time.Time // what nobody wants may be removed from here on
}

type portState struct {
	id, set   uint32
	frontends []maps.ServiceKey
	backends  []maps.Backend
	next      *nextSet // being written
}

type nextSet struct {
	set      uint32
	backends []maps.Backend
}

// grave is a set to be removed.
type grave struct {
	set   uint32
	count int
	users []maps.ServiceKey // that pointed at it
	at    time.Time
}

func newServices(st stores, now func() time.Time, changed func(maps.Addr)) (*services, error) {
	s := &services{
		now:       now,
		frontends: reconcile.New(st.services),
		backends:  reconcile.New(st.backends),
		changed:   changed,
		byName:    make(map[types.NamespacedName]service.Compiled),
		ports:     make(map[service.PortKey]*portState),
		claims:    make(map[maps.ServiceKey]service.PortKey),
		waiting:   make(map[maps.ServiceKey]map[types.NamespacedName]struct{}),
		owners:    make(map[maps.ServiceKey]map[types.NamespacedName]struct{}),
		ids:       make(map[uint32]struct{}),
		sets:      make(map[uint32]struct{}),
		nextID:    1,
		nextSet:   1,
	}
	if err := errors.Join(s.frontends.Load(), s.backends.Load()); err != nil {
		return nil, err
	}
	for _, v := range s.frontends.All() {
		s.nextID = max(s.nextID, v.Id+1)
		s.nextSet = max(s.nextSet, v.Set+1)
	}
	for k := range s.backends.All() {
		s.nextSet = max(s.nextSet, k.Set+1)
	}
	return s, nil
}

// apply brings the services given to their compiled state; a zero Compiled
// removes one. It returns the services to compile and apply again, because a
// frontend they wanted has become free or their backends found no room, and
// what went wrong by service.
func (s *services) apply(dirty map[types.NamespacedName]service.Compiled) (again []types.NamespacedName, errs map[types.NamespacedName]error) {
	errs = make(map[types.NamespacedName]error)
	fail := func(n types.NamespacedName, err error) {
		if err != nil {
			errs[n] = errors.Join(errs[n], err)
		}
	}
	var lost []maps.Addr
	again = s.giveUp(dirty, &lost)

	// New sets, whole.
	for name, c := range dirty {
		for _, p := range c.Ports {
			s.prepare(name, p)
		}
	}
	up := s.backends.Upsert()
	for name, c := range dirty {
		for _, p := range c.Ports {
			if err := s.written(s.ports[p.Key()], up); err != nil {
				fail(name, fmt.Errorf("service port %s %w: %w", p.Key(), errFormerBackends, err))
			}
		}
	}
	// Frontends.
	for name, c := range dirty {
		for _, p := range c.Ports {
			for _, err := range s.point(name, p, &lost) {
				fail(name, err)
			}
		}
		s.own(name, c)
		if c.Name == "" {
			delete(s.byName, name)
		} else {
			s.byName[name] = c
		}
	}
	res := s.frontends.Upsert()
	for k, err := range res.Errs {
		fail(s.ownerOf(k), err)
	}
	res = s.frontends.Prune()
	for k, err := range res.Errs {
		fail(s.ownerOf(k), err)
	}
	for _, a := range lost {
		s.changed(a)
	}
	return again, errs
}

// giveUp takes back what the dirty services had and no longer want, so that
// another of them may have it in this very round.
func (s *services) giveUp(dirty map[types.NamespacedName]service.Compiled, lost *[]maps.Addr) (again []types.NamespacedName) {
	for name, c := range dirty {
		want := make(map[maps.ServiceKey]service.PortKey)
		ports := make(map[service.PortKey]bool)
		for _, p := range c.Ports {
			ports[p.Key()] = true
			for _, f := range p.Frontends {
				want[f] = p.Key()
			}
		}
		for _, p := range s.byName[name].Ports {
			key := p.Key()
			st := s.ports[key]
			if st == nil {
				continue
			}
			for _, f := range st.frontends {
				if want[f] == key || s.claims[f] != key {
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
				for _, b := range st.backends {
					*lost = append(*lost, b.Addr)
				}
				s.bury(st.set, len(st.backends), st.frontends)
				delete(s.ports, key)
				delete(s.ids, st.id)
			}
		}
		for f, names := range s.waiting {
			if delete(names, name); len(names) == 0 {
				delete(s.waiting, f)
			}
		}
	}
	return again
}

// prepare starts a new set for a port whose backends changed.
func (s *services) prepare(name types.NamespacedName, p service.Port) {
	key := p.Key()
	st := s.ports[key]
	if st == nil {
		st = s.adopt(p)
		s.ports[key] = st
	}
	if slices.Equal(st.backends, p.Backends) {
		return
	}
	next := &nextSet{backends: p.Backends}
	if len(p.Backends) > 0 {
		next.set = s.nextSet
		s.nextSet++
		s.sets[next.set] = struct{}{}
	}
	for i, b := range p.Backends {
		s.backends.Set(maps.BackendKey{Set: next.set, Slot: uint32(i)}, b)
	}
	st.next = next
}

// written is called when the new set was tried: with an entry missing, the
// port stays with the set it has.
func (s *services) written(st *portState, up reconcile.Result[maps.BackendKey]) error {
	if st.next == nil {
		return nil
	}
	for i := range st.next.backends {
		if err := up.Errs[maps.BackendKey{Set: st.next.set, Slot: uint32(i)}]; err != nil {
			s.bury(st.next.set, len(st.next.backends), nil)
			st.next = nil
			return err
		}
	}
	return nil
}

// point makes the frontends of a port lead to its set.
func (s *services) point(name types.NamespacedName, p service.Port, lost *[]maps.Addr) (errs []error) {
	key := p.Key()
	st := s.ports[key]
	if st.next != nil {
		kept := make(map[maps.Backend]struct{}, len(st.next.backends))
		for _, b := range st.next.backends {
			kept[b] = struct{}{}
		}
		for _, b := range st.backends {
			if _, ok := kept[b]; !ok {
				*lost = append(*lost, b.Addr)
			}
		}
		s.bury(st.set, len(st.backends), st.frontends)
		st.set, st.backends, st.next = st.next.set, st.next.backends, nil
	}
	st.frontends = st.frontends[:0:0]
	for _, f := range p.Frontends {
		if other, taken := s.claims[f]; taken && other != key {
			if s.waiting[f] == nil {
				s.waiting[f] = make(map[types.NamespacedName]struct{})
			}
			s.waiting[f][name] = struct{}{}
			errs = append(errs, fmt.Errorf("frontend %s of %s belongs to %s", maps.KeyString(f), key, other))
			continue
		}
		s.claims[f] = key
		st.frontends = append(st.frontends, f)
		n := uint32(len(st.backends))
		s.frontends.Set(f, maps.Service{Id: st.id, Set: st.set, Count: n, ExtSet: st.set, ExtCount: n})
	}
	return errs
}

// own writes the entries that mark addresses as some service's.
func (s *services) own(name types.NamespacedName, c service.Compiled) {
	for _, a := range s.byName[name].Addrs {
		if slices.Contains(c.Addrs, a) {
			continue
		}
		k := service.OwnerKey(a)
		if delete(s.owners[k], name); len(s.owners[k]) == 0 {
			delete(s.owners, k)
			s.frontends.Delete(k)
		}
	}
	for _, a := range c.Addrs {
		k := service.OwnerKey(a)
		if s.owners[k] == nil {
			s.owners[k] = make(map[types.NamespacedName]struct{})
		}
		s.owners[k][name] = struct{}{}
		s.frontends.Set(k, maps.Service{Flags: maps.ServiceAddrOwned})
	}
}

// adopt makes the state of a port seen for the first time: with the id and
// the set that an earlier run left under one of its frontends, if no other
// port has them.
func (s *services) adopt(p service.Port) *portState {
	st := &portState{}
	for _, f := range p.Frontends {
		v, ok := s.frontends.Actual(f)
		if !ok {
			continue
		}
		if _, taken := s.ids[v.Id]; st.id == 0 && v.Id != 0 && !taken {
			st.id = v.Id
		}
		if _, taken := s.sets[v.Set]; v.Set == 0 || taken || st.set != 0 || int(v.Count) > 1<<20 {
			continue
		}
		list := make([]maps.Backend, 0, v.Count)
		for i := range v.Count {
			b, ok := s.backends.Actual(maps.BackendKey{Set: v.Set, Slot: i})
			if !ok {
				break
			}
			list = append(list, b)
		}
		if len(list) == int(v.Count) {
			st.set, st.backends, st.frontends = v.Set, list, p.Frontends
			s.sets[st.set] = struct{}{}
			for i, b := range list {
				s.backends.Set(maps.BackendKey{Set: st.set, Slot: uint32(i)}, b)
			}
		}
	}
	if st.id == 0 {
		st.id = s.nextID
		s.nextID++
	}
	s.ids[st.id] = struct{}{}
	return st
}

// bury has a set removed when nothing can be reading it any more.
func (s *services) bury(set uint32, count int, users []maps.ServiceKey) {
	if set != 0 {
		s.graves = append(s.graves, grave{set, count, slices.Clone(users), s.now().Add(setLinger)})
	}
}

// buryLeftovers is called once, when all services have been applied: what an
// earlier run left and nobody claimed goes too, after the same delay.
func (s *services) buryLeftovers() {
	s.leftoversFrom = s.now().Add(setLinger)
	s.graves = append(s.graves, grave{at: s.leftoversFrom})
}

// sweep removes the sets whose time has come and returns when to call again;
// the zero time stands for not before something changes.
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
		delete(s.sets, g.set)
		for i := range g.count {
			s.backends.Delete(maps.BackendKey{Set: g.set, Slot: uint32(i)})
		}
	}
	s.graves = left
	if due {
		err = s.backends.Prune().Err()
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
		if v, ok := s.frontends.Actual(f); ok && v.Set == g.set && g.set != 0 {
			return true
		}
	}
	return false
}

// retry writes what failed before and is due again.
func (s *services) retry() error {
	up, down := s.frontends.Upsert(), s.frontends.Prune()
	return errors.Join(up.Err(), down.Err())
}

func (s *services) ownerOf(f maps.ServiceKey) types.NamespacedName {
	if k, ok := s.claims[f]; ok {
		return types.NamespacedName{Namespace: k.Namespace, Name: k.Name}
	}
	for name := range s.owners[f] {
		return name
	}
	return types.NamespacedName{}
}
