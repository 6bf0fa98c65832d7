package agent

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/service"
	corev1 "k8s.io/api/core/v1"
)

type serviceBench struct {
	*memStores
	*clock
	s    *services
	lost []maps.Addr
}

func newServiceBench(t *testing.T, st *memStores, c *clock) *serviceBench {
	t.Helper()
	b := &serviceBench{memStores: st, clock: c}
	var err error
	b.s, err = newServices(st.stores(), c.now, func(a maps.Addr) { b.lost = append(b.lost, a) })
	if err != nil {
		t.Fatal(err)
	}
	// At every write of any map: what a packet could find is whole.
	st.check = func() {
		t.Helper()
		last := st.lines[len(st.lines)-1]
		for k, v := range st.services.m {
			for _, set := range []struct{ num, count uint32 }{{v.Set, v.Count}, {v.ExtSet, v.ExtCount}} {
				for i := range set.count {
					if _, ok := st.backends.m[maps.BackendKey{Set: set.num, Slot: i}]; !ok {
						t.Errorf("after %q: %s points at set %d of %d, slot %d missing", last, maps.KeyString(k), set.num, set.count, i)
					}
				}
			}
			for i := range (v.Maglev + uint32(len(maps.Maglev{}.Slot)) - 1) / uint32(len(maps.Maglev{}.Slot)) {
				chunk, ok := st.maglev.m[maps.MaglevKey{Set: v.ExtSet, Chunk: i}]
				if !ok || uint32(slices.Max(chunk.Slot[:])) >= v.ExtCount {
					t.Errorf("after %q: %s has a table of set %d of %d, chunk %d: %v", last, maps.KeyString(k), v.ExtSet, v.ExtCount, i, chunk)
				}
			}
		}
	}
	return b
}

func compiled(name, vip string, backends ...string) map[service.Owner]service.Compiled {
	p := service.Port{
		Owner: service.Service("default", name), PortName: "http", Protocol: corev1.ProtocolTCP, Family: corev1.IPv4Protocol,
		Frontends: []service.Frontend{{Key: maps.ServiceKey{Addr: ip(vip), Port: 80, Proto: maps.ProtoTCP}}},
	}
	for _, b := range backends {
		p.Internal = append(p.Internal, maps.Backend{Addr: ip(b), Port: 8080})
		p.States = append(p.States, service.BackendState{
			Backend: maps.Backend{Addr: ip(b), Port: 8080}, Flags: maps.BackendIn | maps.BackendExt | maps.BackendServing,
		})
	}
	return map[service.Owner]service.Compiled{
		p.Owner: {
			Owner: p.Owner,
			Addrs: []netip.Addr{netip.MustParseAddr(vip)}, Ports: []service.Port{p},
		},
	}
}

func gone(name string) map[service.Owner]service.Compiled {
	return map[service.Owner]service.Compiled{service.Service("default", name): {}}
}

func (b *serviceBench) apply(t *testing.T, c map[service.Owner]service.Compiled) []service.Owner {
	t.Helper()
	b.lost = nil
	again, errs := b.s.apply(c, false)
	for n, err := range errs {
		t.Errorf("%s: %v", n, err)
	}
	return again
}

func (b *serviceBench) sweep(t *testing.T) {
	t.Helper()
	if _, err := b.s.sweep(); err != nil {
		t.Error(err)
	}
}

func (b *serviceBench) frontend(vip string) (maps.Service, bool) {
	v, ok := b.services.m[maps.ServiceKey{Addr: ip(vip), Port: 80, Proto: maps.ProtoTCP}]
	return v, ok
}

func TestServiceLife(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66", "10.244.158.65"))
	first, _ := b.frontend("10.98.0.1")
	if first.Id == 0 || first.Set == 0 || first.Count != 2 {
		t.Fatalf("frontend %+v", first)
	}
	if v := b.services.m[maps.ServiceKey{Addr: ip("10.98.0.1")}]; v != (maps.Service{Flags: maps.ServiceAddrOwned}) {
		t.Errorf("ownership entry %+v", v)
	}
	// Nothing changed: nothing is written.
	n := len(b.lines)
	if b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66", "10.244.158.65")); len(b.lines) != n {
		t.Errorf("an unchanged service was written: %v", b.lines[n:])
	}
	// A backend leaves: new set, same id, the old set lingers a second.
	b.apply(t, compiled("web", "10.98.0.1", "10.244.158.65"))
	second, _ := b.frontend("10.98.0.1")
	if second.Id != first.Id || second.Set == first.Set || second.Count != 1 {
		t.Errorf("frontend %+v, was %+v", second, first)
	}
	if !slices.Equal(b.lost, []maps.Addr{ip("10.244.80.66")}) {
		t.Errorf("lost %v", b.lost)
	}
	b.sweep(t)
	if len(b.backends.m) != 3 {
		t.Errorf("%d backends: the old set is to linger", len(b.backends.m))
	}
	b.advance(setLinger)
	b.sweep(t)
	if len(b.backends.m) != 1 {
		t.Errorf("%d backends after a second, want 1", len(b.backends.m))
	}
	// The address moves (S25), then all backends go, then the service.
	b.apply(t, compiled("web", "10.98.0.2", "10.244.158.65"))
	if _, ok := b.frontend("10.98.0.1"); ok {
		t.Error("the old address still answers")
	}
	if v, _ := b.frontend("10.98.0.2"); v != second {
		t.Errorf("frontend %+v, want %+v", v, second)
	}
	b.apply(t, compiled("web", "10.98.0.2"))
	if v, _ := b.frontend("10.98.0.2"); v != (maps.Service{Id: first.Id}) {
		t.Errorf("without backends: %+v", v)
	}
	b.apply(t, gone("web"))
	b.advance(setLinger)
	b.sweep(t)
	if len(b.services.m)+len(b.backends.m)+len(b.s.ports)+len(b.s.claims)+len(b.s.addrOwners)+len(b.s.ids)+len(b.s.sets) != 0 {
		t.Errorf("left over: %v %v %+v", b.services.m, b.backends.m, b.s)
	}
}

func TestServiceTargetPortChange(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66"))
	c := compiled("web", "10.98.0.1", "10.244.80.66")
	for _, x := range c {
		x.Ports[0].Internal[0].Port = 9090
		x.Ports[0].States[0].Backend.Port = 9090
	}
	b.apply(t, c)
	if !slices.Equal(b.lost, []maps.Addr{ip("10.244.80.66")}) {
		t.Errorf("lost %v: flows to the old port would never be decided again", b.lost)
	}
}

func TestServiceRestart(t *testing.T) {
	st, c := newMemStores(), newClock()
	b := newServiceBench(t, st, c)
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66"))
	b.apply(t, compiled("dns", "10.98.0.10", "10.244.80.53"))
	b.apply(t, compiled("old", "10.98.0.99", "10.244.80.99"))
	web, _ := b.frontend("10.98.0.1")
	dns, _ := b.frontend("10.98.0.10")

	// Again over the same maps: numbers are adopted, what changed is changed,
	// what went meanwhile (S30) goes with the first full round.
	n := len(st.lines)
	b = newServiceBench(t, st, c)
	all := compiled("web", "10.98.0.1", "10.244.80.66")
	for k, v := range compiled("dns", "10.98.0.10", "10.244.80.54") {
		all[k] = v
	}
	b.apply(t, all)
	b.s.buryLeftovers()
	if v, _ := b.frontend("10.98.0.1"); v != web {
		t.Errorf("unchanged service: %+v, was %+v", v, web)
	}
	if v, _ := b.frontend("10.98.0.10"); v.Id != dns.Id || v.Set == dns.Set {
		t.Errorf("changed service: %+v, was %+v", v, dns)
	}
	if _, ok := b.frontend("10.98.0.99"); ok {
		t.Error("a service deleted while the agent was down is still there")
	}
	b.sweep(t)
	if len(st.backends.m) != 4 {
		t.Errorf("%d backends, want all sets for another second", len(st.backends.m))
	}
	b.advance(setLinger)
	b.sweep(t)
	if len(st.backends.m) != 2 {
		t.Errorf("%d backends, want 2: %v", len(st.backends.m), st.backends.m)
	}
	for _, l := range st.lines[n:] {
		if l == "put pw_services 10.98.0.1:80/tcp" {
			t.Errorf("the unchanged frontend was written: %v", st.lines[n:])
		}
	}
	// A number of an earlier life is not given to somebody else.
	b.apply(t, compiled("new", "10.98.0.3", "10.244.80.3"))
	if v, _ := b.frontend("10.98.0.3"); v.Id <= 3 || v.Set <= 4 {
		t.Errorf("new service has old numbers: %+v", v)
	}
}

// A start in parts: what an earlier run left stays until the last part, as it
// is where nothing changed.
func TestServiceRestartInParts(t *testing.T) {
	st, c := newMemStores(), newClock()
	b := newServiceBench(t, st, c)
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66"))
	b.apply(t, compiled("dns", "10.98.0.10", "10.244.80.53"))
	b.apply(t, compiled("old", "10.98.0.99", "10.244.80.99"))
	dns, _ := b.frontend("10.98.0.10")

	n := len(st.lines)
	b = newServiceBench(t, st, c)
	if _, errs := b.s.apply(compiled("web", "10.98.0.1", "10.244.80.67"), true); len(errs) != 0 {
		t.Error(errs)
	}
	for _, l := range st.lines[n:] {
		if strings.HasPrefix(l, "delete") {
			t.Errorf("before the last part: %s", l)
		}
	}
	if v, ok := b.frontend("10.98.0.1"); !ok || v.Count != 1 || st.backends.m[maps.BackendKey{Set: v.Set}].Addr != ip("10.244.80.67") {
		t.Errorf("not in force after its own part: %+v", v)
	}
	b.apply(t, compiled("dns", "10.98.0.10", "10.244.80.53"))
	if v, _ := b.frontend("10.98.0.10"); v != dns {
		t.Errorf("unchanged service of the last part: %+v, was %+v", v, dns)
	}
	if _, ok := b.frontend("10.98.0.99"); ok {
		t.Error("a service deleted while the agent was down is still there")
	}
	for k := range st.states.m {
		if k.Addr == ip("10.244.80.66") {
			t.Error("the state of a backend that has gone is still there")
		}
	}
}

// Ids and sets that two frontends claim, and a set with a hole (L9).
func TestServiceRestartOverCorruption(t *testing.T) {
	st, c := newMemStores(), newClock()
	key := func(vip string) maps.ServiceKey {
		return maps.ServiceKey{Addr: ip(vip), Port: 80, Proto: maps.ProtoTCP}
	}
	st.backends.m[maps.BackendKey{Set: 7, Slot: 0}] = maps.Backend{Addr: ip("10.244.80.66"), Port: 8080}
	st.backends.m[maps.BackendKey{Set: 8, Slot: 1}] = maps.Backend{Addr: ip("10.244.80.67"), Port: 8080}
	st.services.m[key("10.98.0.1")] = maps.Service{Id: 4, Set: 7, Count: 1}
	st.services.m[key("10.98.0.2")] = maps.Service{Id: 4, Set: 7, Count: 1}
	b := &serviceBench{memStores: st, clock: c}
	var err error
	if b.s, err = newServices(st.stores(), c.now, func(maps.Addr) {}); err != nil {
		t.Fatal(err)
	}
	st.services.m[key("10.98.0.3")] = maps.Service{Id: 0, Set: 8, Count: 2}
	b.apply(t, compiled("a", "10.98.0.1", "10.244.80.66"))
	b.apply(t, compiled("b", "10.98.0.2", "10.244.80.66"))
	b.apply(t, compiled("c", "10.98.0.3", "10.244.80.67"))
	b.s.buryLeftovers()
	b.advance(setLinger)
	b.sweep(t)
	ids, sets := make(map[uint32]bool), make(map[uint32]bool)
	for _, vip := range []string{"10.98.0.1", "10.98.0.2", "10.98.0.3"} {
		v, _ := b.frontend(vip)
		if v.Id == 0 || ids[v.Id] || sets[v.Set] || v.Count != 1 {
			t.Errorf("%s: %+v", vip, v)
		}
		ids[v.Id], sets[v.Set] = true, true
	}
	if len(st.backends.m) != 3 {
		t.Errorf("backends %v, want one of each", st.backends.m)
	}
}

func TestServiceNoRoom(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	b.backends.size = 3
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66", "10.244.80.67"))
	before, _ := b.frontend("10.98.0.1")
	_, errs := b.s.apply(compiled("web", "10.98.0.1", "10.244.80.68", "10.244.80.69"), false)
	if err := errs[service.Service("default", "web")]; !errors.Is(err, maps.ErrFull) {
		t.Errorf("error %v", err)
	}
	if v, _ := b.frontend("10.98.0.1"); v != before {
		t.Errorf("frontend %+v, want the former %+v", v, before)
	}
	b.advance(setLinger)
	b.sweep(t)
	b.backends.size = 4
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.68", "10.244.80.69"))
	if v, _ := b.frontend("10.98.0.1"); v.Set == before.Set || v.Count != 2 {
		t.Errorf("with room: %+v", v)
	}
	b.advance(setLinger)
	b.sweep(t)
	if len(b.backends.m) != 2 {
		t.Errorf("%d backends, want 2", len(b.backends.m))
	}
}

// Two services with one address and port: the first keeps it, the second is
// told, and has it when the first goes.
func TestServiceConflict(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.apply(t, compiled("a", "10.98.0.1", "10.244.80.66"))
	_, errs := b.s.apply(compiled("b", "10.98.0.1", "10.244.80.67"), false)
	if len(errs) != 1 {
		t.Fatalf("errors %v", errs)
	}
	again := b.apply(t, gone("a"))
	if !slices.Equal(again, []service.Owner{service.Service("default", "b")}) {
		t.Fatalf("to be applied again: %v", again)
	}
	b.apply(t, compiled("b", "10.98.0.1", "10.244.80.67"))
	v, ok := b.frontend("10.98.0.1")
	if !ok || b.backends.m[maps.BackendKey{Set: v.Set}].Addr != ip("10.244.80.67") {
		t.Errorf("frontend %+v", v)
	}
	// Deleted and re-created under another name in one round (S25).
	c := compiled("d", "10.98.0.1", "10.244.80.68")
	for k, x := range gone("b") {
		c[k] = x
	}
	b.apply(t, c)
	v, _ = b.frontend("10.98.0.1")
	if b.backends.m[maps.BackendKey{Set: v.Set}].Addr != ip("10.244.80.68") {
		t.Errorf("frontend %+v", v)
	}
	if _, ok := b.services.m[maps.ServiceKey{Addr: ip("10.98.0.1")}]; !ok {
		t.Error("the address is not owned any more")
	}
}

// A frontend that cannot be switched keeps its set alive.
func TestServiceStuckFrontend(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66"))
	b.services.bad = func(maps.ServiceKey, maps.Service) error { return errors.New("refused") }
	if _, errs := b.s.apply(compiled("web", "10.98.0.1", "10.244.80.67"), false); len(errs) != 1 {
		t.Fatalf("errors %v", errs)
	}
	for range 3 {
		b.advance(2 * setLinger)
		b.sweep(t)
	}
	b.check()
}
