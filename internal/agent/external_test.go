package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/service"
)

// external makes a load balancer of the address plan: backends here and on
// other nodes, externalTrafficPolicy Local if local is set.
type external struct {
	name     string
	port     uint16 // NodePort
	here     []string
	others   []string
	local    bool
	ranges   []string
	affinity uint32
	created  time.Time
}

const lbIP = "192.0.2.1"

func (e external) compiled() map[service.Owner]service.Compiled {
	list := func(addrs []string) (out []maps.Backend) {
		for _, a := range addrs {
			out = append(out, maps.Backend{Addr: ip(a), Port: 8080})
		}
		return out
	}
	all := list(slices.Concat(e.here, e.others))
	p := service.Port{
		Owner: service.Service("default", e.name), Protocol: corev1.ProtocolTCP, Family: corev1.IPv4Protocol,
		Frontends: []service.Frontend{
			{Key: key("10.98.0.1", 80), Kind: service.ClusterIP},
			{Key: key("0.0.0.0", e.port), Kind: service.NodePort},
			{Key: key(lbIP, 80), Kind: service.LoadBalancerIP},
		},
		Internal: all, Cluster: all, External: all, Affinity: e.affinity, Maglev: service.MaglevSize(0, len(all)),
	}
	flags := maps.BackendIn | maps.BackendExt | maps.BackendServing
	if e.local {
		p.External, p.KeepSource = list(e.here), true
		p.NoLocalExternal = len(e.here) == 0 && len(all) > 0
		p.Maglev = service.MaglevSize(0, len(p.External))
	}
	for _, b := range all {
		f := flags
		if e.local && !slices.Contains(p.External, b) {
			f &^= maps.BackendExt
		}
		p.States = append(p.States, service.BackendState{Backend: b, Flags: f})
	}
	for _, r := range e.ranges {
		p.Restricted = true
		p.SourceRanges = append(p.SourceRanges, netip.MustParsePrefix(r))
	}
	return map[service.Owner]service.Compiled{p.Owner: {
		Owner: p.Owner, Created: e.created, Addrs: []netip.Addr{netip.MustParseAddr("10.98.0.1")}, Ports: []service.Port{p},
	}}
}

func key(addr string, port uint16) maps.ServiceKey {
	return maps.ServiceKey{Addr: ip(addr), Port: port, Proto: maps.ProtoTCP}
}

func (b *serviceBench) empty(t *testing.T) {
	t.Helper()
	b.advance(setLinger)
	b.sweep(t)
	s := b.s
	if n := len(b.services.m) + len(b.backends.m) + len(b.maglev.m) + len(b.states.m) + len(b.ranges.m); n != 0 {
		t.Errorf("left over in maps: %v %v %v %v %v", b.services.m, b.backends.m, b.maglev.m, b.states.m, b.ranges.m)
	}
	if n := len(s.ports) + len(s.claims) + len(s.addrOwners) + len(s.ids) + len(s.sets) +
		len(s.statesOf) + len(s.waiting) + len(s.wants) + len(s.graves); n != 0 {
		t.Errorf("left over: %+v", s)
	}
}

func addrs(list ...string) (out []maps.Addr) {
	for _, a := range list {
		out = append(out, ip(a))
	}
	return out
}

func (b *serviceBench) lostAre(t *testing.T, want ...string) {
	t.Helper()
	got := slices.Clone(b.lost)
	less := func(a, b maps.Addr) int { return strings.Compare(string(a.B[:]), string(b.B[:])) }
	slices.SortFunc(got, less)
	w := addrs(want...)
	slices.SortFunc(w, less)
	if !slices.Equal(got, w) {
		t.Errorf("flows to %d addresses decided again, want those to %v", len(got), want)
	}
}

// Sets that are equal are one, with the Maglev table on it; others are not.
func TestServiceSets(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	web := external{name: "web", port: 30080, here: []string{"10.244.80.66", "10.244.80.67"}, others: []string{"10.244.158.65"}}
	b.apply(t, web.compiled())
	// What was sent to those addresses before.
	b.lostAre(t, "0.0.0.0", lbIP)
	b.advance(setLinger)
	b.sweep(t)
	cip, np, lb := b.services.m[key("10.98.0.1", 80)], b.services.m[key("0.0.0.0", 30080)], b.services.m[key(lbIP, 80)]
	want := maps.Service{Id: 1, Set: 1, Count: 3, ExtSet: 1, ExtCount: 3}
	if cip != want {
		t.Errorf("cluster IP %+v, want %+v", cip, want)
	}
	want.Maglev, want.Flags = 1021, maps.ServiceExternal
	if np != want || lb != want {
		t.Errorf("NodePort %+v, load balancer %+v, want %+v", np, lb, want)
	}
	if len(b.backends.m) != 3 || len(b.maglev.m) != 16 || len(b.states.m) != 3 {
		t.Errorf("%d backends, %d chunks, %d states", len(b.backends.m), len(b.maglev.m), len(b.states.m))
	}
	// Local: a second set, with a table of its own; the old set stays for the
	// others, and its table is no concern of theirs.
	web.local, web.affinity, web.ranges = true, 60, []string{"203.0.113.0/24"}
	b.apply(t, web.compiled())
	b.lostAre(t)
	np, lb = b.services.m[key("0.0.0.0", 30080)], b.services.m[key(lbIP, 80)]
	want = maps.Service{Id: 1, Set: 1, Count: 3, ExtSet: 2, ExtCount: 2, Maglev: 1021, Affinity: 60,
		Flags: maps.ServiceExternal | maps.ServiceKeepSource}
	if np != want {
		t.Errorf("NodePort %+v, want %+v", np, want)
	}
	want.Flags |= maps.ServiceSourceRanges
	if lb != want {
		t.Errorf("load balancer %+v, want %+v", lb, want)
	}
	if f := b.states.m[stateKey(1, maps.Backend{Addr: ip("10.244.158.65"), Port: 8080})]; f != maps.BackendIn|maps.BackendServing {
		t.Errorf("state %d", f)
	}
	if len(b.ranges.m) != 1 {
		t.Errorf("ranges %v", b.ranges.m)
	}
	for k := range b.ranges.m {
		raw := k.Addr
		if k.Len != 32+96+24 || raw != ip("203.0.113.0").B || k.Service == 0 {
			t.Errorf("range %+v", k)
		}
	}
	// None here any more.
	web.here = nil
	b.apply(t, web.compiled())
	b.lostAre(t, "10.244.80.66", "10.244.80.67")
	np = b.services.m[key("0.0.0.0", 30080)]
	if np.ExtSet != 0 || np.ExtCount != 0 || np.Maglev != 0 || np.Flags&maps.ServiceNoLocalExt == 0 || np.Count != 1 {
		t.Errorf("NodePort %+v", np)
	}
	// What made them removed is remembered until no packet can have seen it.
	b.lost = nil
	b.advance(setLinger)
	b.sweep(t)
	b.lostAre(t, "10.244.80.66", "10.244.80.67")
	if len(b.backends.m) != 1 || len(b.maglev.m) != 0 {
		t.Errorf("after a second %d backends and %d chunks", len(b.backends.m), len(b.maglev.m))
	}
	b.apply(t, gone("web"))
	b.lostAre(t, "10.244.158.65")
	b.empty(t)
}

// The order of writes: what is referred to first, then frontends; the state
// of a backend that went is removed before its generation moves.
func TestServiceOrder(t *testing.T) {
	st := newMemStores()
	b := newServiceBench(t, st, newClock())
	b.s.buryLeftovers()
	web := external{name: "web", port: 30080, here: []string{"10.244.80.66"}, others: []string{"10.244.158.65"}, ranges: []string{"203.0.113.0/24"}}
	b.apply(t, web.compiled())
	rank := func(l string) int {
		for i, prefix := range []string{
			"put pw_backends", "put pw_maglev", "put pw_backend_st", "put pw_src_ranges", "put pw_services",
			"delete pw_services", "delete pw_backend_st", "delete pw_src_ranges",
		} {
			if strings.HasPrefix(l, prefix+" ") {
				return i
			}
		}
		return -1
	}
	inOrder := func(from int) {
		t.Helper()
		for i := from + 1; i < len(st.lines); i++ {
			if rank(st.lines[i]) < rank(st.lines[i-1]) {
				t.Errorf("%q after %q", st.lines[i], st.lines[i-1])
			}
		}
	}
	inOrder(0)
	n := len(st.lines)
	b.s.changed = func(a maps.Addr) {
		for k := range st.states.m {
			if k.Addr == a {
				t.Error("the generation moves while the backend still has a state")
			}
		}
		for _, v := range st.services.m {
			for i := range v.Count {
				if st.backends.m[maps.BackendKey{Set: v.Set, Slot: i}].Addr == a {
					t.Error("the generation moves while a frontend still leads to the backend")
				}
			}
		}
		b.lost = append(b.lost, a)
	}
	web.others, web.ranges = []string{"10.244.158.66"}, []string{"198.51.100.0/24"}
	b.apply(t, web.compiled())
	b.lostAre(t, "10.244.158.65")
	inOrder(n)
	if len(st.ranges.m) != 1 {
		t.Errorf("ranges %v", st.ranges.m)
	}
}

// S25: a frontend that leads elsewhere, or nowhere, has the flows to all
// backends behind it decided again, those that the backend outlives too.
func TestServiceFrontendMoves(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	web := external{name: "web", port: 30080, here: []string{"10.244.80.66"}, others: []string{"10.244.158.65"}}
	b.apply(t, web.compiled())
	b.lostAre(t, "0.0.0.0", lbIP)
	web.port = 30081
	b.apply(t, web.compiled())
	b.lostAre(t, "0.0.0.0", "10.244.80.66", "10.244.158.65")
	// Re-created under another name, with the same addresses, in one round.
	c := external{name: "new", port: 30081, here: []string{"10.244.80.66"}, others: []string{"10.244.158.65"}}.compiled()
	for k, v := range gone("web") {
		c[k] = v
	}
	b.apply(t, c)
	b.lostAre(t, "10.244.80.66", "10.244.158.65")
	if v := b.services.m[key(lbIP, 80)]; v.Id != 2 {
		t.Errorf("load balancer %+v", v)
	}
	b.apply(t, gone("new"))
	b.empty(t)
}

// A restart finds everything as it was and writes nothing; what changed
// meanwhile is changed, and flows over it decided again (S25, S30).
func TestServiceRestartExternal(t *testing.T) {
	st, c := newMemStores(), newClock()
	b := newServiceBench(t, st, c)
	web := external{name: "web", port: 30080, here: []string{"10.244.80.66", "10.244.80.67"}, others: []string{"10.244.158.65"},
		local: true, affinity: 60, ranges: []string{"203.0.113.0/24"}}
	b.apply(t, web.compiled())
	before, n := b.services.m[key(lbIP, 80)], len(st.lines)

	b = newServiceBench(t, st, c)
	b.apply(t, web.compiled())
	b.s.buryLeftovers()
	b.advance(setLinger)
	b.sweep(t)
	if len(st.lines) != n {
		t.Errorf("written: %v", st.lines[n:])
	}
	b.lostAre(t)
	if len(b.s.tables.pending) != 0 {
		t.Error("entries are kept of tables that are as they should be")
	}

	b = newServiceBench(t, st, c)
	web.port, web.here = 30081, []string{"10.244.80.66", "10.244.80.68"}
	b.apply(t, web.compiled())
	b.s.buryLeftovers()
	// Those behind the NodePort that went, new ones too.
	b.lostAre(t, "0.0.0.0", "10.244.80.66", "10.244.80.67", "10.244.80.68", "10.244.158.65")
	if v := b.services.m[key(lbIP, 80)]; v.Id != before.Id || v.Set == before.Set || v.ExtSet == before.ExtSet {
		t.Errorf("load balancer %+v, was %+v", v, before)
	}
	b.advance(setLinger)
	b.sweep(t)
	if len(b.backends.m) != 5 || len(b.maglev.m) != 16 || len(b.states.m) != 3 || len(b.ranges.m) != 1 {
		t.Errorf("%d backends, %d chunks, %d states, %d ranges", len(b.backends.m), len(b.maglev.m), len(b.states.m), len(b.ranges.m))
	}

	// Deleted while the agent was down.
	b = newServiceBench(t, st, c)
	b.apply(t, nil)
	b.s.buryLeftovers()
	b.lostAre(t, "10.244.80.66", "10.244.80.68", "10.244.158.65")
	b.empty(t)
}

// With the table's map full, a service works without one; with no room for
// the states it stays as it was.
func TestServiceExternalNoRoom(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	owner := service.Service("default", "web")
	web := external{name: "web", port: 30080, here: []string{"10.244.80.66"}, others: []string{"10.244.158.65"}}
	b.maglev.size = 8
	_, errs := b.s.apply(web.compiled(), false)
	if !errors.Is(errs[owner], maps.ErrFull) {
		t.Errorf("error %v", errs[owner])
	}
	v := b.services.m[key(lbIP, 80)]
	if v.ExtCount != 2 || v.Maglev != 0 {
		t.Errorf("load balancer %+v", v)
	}
	b.advance(setLinger)
	b.sweep(t)
	n := len(b.lines)
	if _, errs = b.s.apply(web.compiled(), false); onlyNoTable(errs[owner]) != 1021 {
		t.Errorf("error %v", errs[owner])
	}
	if len(b.lines) != n {
		t.Errorf("another try without room wrote %v", b.lines[n:])
	}
	b.maglev.size = 1000
	b.apply(t, web.compiled())
	if v = b.services.m[key(lbIP, 80)]; v.Maglev != 1021 {
		t.Errorf("with room: %+v", v)
	}
	b.advance(setLinger)
	b.sweep(t)
	if len(b.maglev.m) != 16 || len(b.backends.m) != 2 {
		t.Errorf("%d chunks, %d backends", len(b.maglev.m), len(b.backends.m))
	}
	b.states.size = 2
	web.others, b.lost = []string{"10.244.158.66"}, nil
	if _, errs = b.s.apply(web.compiled(), false); !errors.Is(errs[owner], maps.ErrFull) {
		t.Errorf("error %v", errs[owner])
	}
	if got := b.services.m[key(lbIP, 80)]; got != v {
		t.Errorf("load balancer %+v, want the former %+v", got, v)
	}
	b.lostAre(t)
	if _, ok := b.states.m[stateKey(v.Id, maps.Backend{Addr: ip("10.244.158.65"), Port: 8080})]; !ok {
		t.Error("the former backend has no state")
	}
	b.states.size = 100
	b.apply(t, gone("web"))
	b.empty(t)
}

// Two services with one NodePort in one round: the older has it, whatever
// their names, after a restart too.
func TestServiceConflictByAge(t *testing.T) {
	st, c := newMemStores(), newClock()
	both := external{name: "a", port: 30080, here: []string{"10.244.80.66"}, created: time.Unix(200, 0)}.compiled()
	for k, v := range (external{name: "b", port: 30080, here: []string{"10.244.80.67"}, created: time.Unix(100, 0)}).compiled() {
		both[k] = v
	}
	for range 5 {
		b := newServiceBench(t, st, c)
		_, errs := b.s.apply(both, false)
		if len(errs) != 1 || errs[service.Service("default", "a")] == nil {
			t.Errorf("errors %v", errs)
		}
		v := st.services.m[key("0.0.0.0", 30080)]
		if st.backends.m[maps.BackendKey{Set: v.Set}].Addr != ip("10.244.80.67") {
			t.Errorf("NodePort %+v", v)
		}
	}
}

// Ports of something that is no service, here a pod's host port, under the
// name of one.
func TestPortsOfAnotherOwner(t *testing.T) {
	b := newServiceBench(t, newMemStores(), newClock())
	b.s.buryLeftovers()
	b.apply(t, compiled("web", "10.98.0.1", "10.244.80.66"))
	pod := service.Owner{Kind: service.KindPod, Namespace: "default", Name: "web"}
	one := []maps.Backend{{Addr: ip("10.244.80.66"), Port: 8080}}
	p := service.Port{
		Owner: pod, PortName: "http", Protocol: corev1.ProtocolTCP, Family: corev1.IPv4Protocol,
		Frontends: []service.Frontend{{Key: key("172.31.0.2", 8888), Kind: service.HostPort}},
		Cluster:   one, External: one,
		States: []service.BackendState{{Backend: one[0], Flags: maps.BackendIn | maps.BackendExt | maps.BackendServing}},
	}
	b.apply(t, map[service.Owner]service.Compiled{pod: {Owner: pod, Ports: []service.Port{p}}})
	v, svc := b.services.m[key("172.31.0.2", 8888)], b.services.m[key("10.98.0.1", 80)]
	if v.Id == svc.Id || v.Set == 0 || v.Set != v.ExtSet || v.Count != 1 || v.Flags != maps.ServiceExternal {
		t.Errorf("host port %+v, service %+v", v, svc)
	}
	b.apply(t, map[service.Owner]service.Compiled{pod: {}})
	if _, ok := b.services.m[key("172.31.0.2", 8888)]; ok || len(b.states.m) != 1 {
		t.Errorf("the pod went: %v %v", b.services.m, b.states.m)
	}
	b.apply(t, gone("web"))
	b.empty(t)
}

// 10,000 load balancers of 4 backends, all at once and then one change (S31).
func BenchmarkServices10000(b *testing.B) {
	all := make(map[service.Owner]service.Compiled)
	one := func(i int) map[service.Owner]service.Compiled {
		c := external{name: fmt.Sprint("web-", i), port: uint16(20000 + i),
			here: []string{"10.244.80.66", "10.244.80.67"}, others: []string{"10.244.158.65", "10.244.158.66"}}.compiled()
		for _, x := range c {
			for j, addr := range []string{fmt.Sprintf("10.98.%d.%d", i/256, i%256), "", fmt.Sprintf("192.0.%d.%d", i/256, i%256)} {
				if addr != "" {
					x.Ports[0].Frontends[j].Key.Addr = ip(addr)
				}
			}
		}
		return c
	}
	for i := range 10000 {
		for k, v := range one(i) {
			all[k] = v
		}
	}
	for b.Loop() {
		st := newMemStores()
		for _, size := range []*int{&st.services.size, &st.backends.size, &st.maglev.size, &st.states.size} {
			*size = 1 << 20
		}
		s, err := newServices(st.stores(), time.Now, func(maps.Addr) {})
		if err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		if _, errs := s.apply(all, false); len(errs) != 0 {
			b.Fatal(errs)
		}
		s.buryLeftovers()
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/all")
		c := one(7)
		for _, x := range c {
			x.Ports[0].Internal = x.Ports[0].Internal[:3]
			x.Ports[0].States = x.Ports[0].States[:3]
		}
		start = time.Now()
		if _, errs := s.apply(c, false); len(errs) != 0 {
			b.Fatal(errs)
		}
		b.ReportMetric(float64(time.Since(start).Microseconds()), "us/change")
	}
}

// One changed endpoint touches the entries of its own service.
func TestServiceChangeIsLocal(t *testing.T) {
	st := newMemStores()
	b := newServiceBench(t, st, newClock())
	b.s.buryLeftovers()
	b.apply(t, compiled("other", "10.98.0.9", "10.244.80.9"))
	web := external{name: "web", port: 30080, here: []string{"10.244.80.66"}, others: []string{"10.244.158.65"}}
	b.apply(t, web.compiled())
	n := len(st.lines)
	web.others = append(web.others, "10.244.158.66")
	b.apply(t, web.compiled())
	// 3 backends, 16 chunks, 1 state, 3 frontends.
	if got := st.lines[n:]; len(got) != 23 {
		t.Errorf("%d writes: %v", len(got), got)
	}
	b.lostAre(t)
}

// S31: among a thousand services, the change of one endpoint writes entries of
// its own service alone.
func TestChangeAmongAThousand(t *testing.T) {
	st := newMemStores()
	b := newServiceBench(t, st, newClock())
	check := st.check
	st.check = nil // it looks at everything at every write
	b.s.buryLeftovers()
	all := map[service.Owner]service.Compiled{}
	vip := func(i int) string { return fmt.Sprintf("10.98.%d.%d", 1+i/250, 1+i%250) }
	for i := range 1000 {
		for o, c := range compiled(fmt.Sprintf("s%d", i), vip(i),
			fmt.Sprintf("10.244.%d.%d", 1+i/250, 1+i%250), fmt.Sprintf("10.245.%d.%d", 1+i/250, 1+i%250)) {
			all[o] = c
		}
	}
	b.apply(t, all)
	if got := len(st.services.m); got != 2000 { // and the addresses
		t.Fatalf("%d entries of frontends", got)
	}
	st.check = check
	n := len(st.lines)
	old, _ := b.frontend(vip(500))
	b.apply(t, compiled("s500", vip(500), "10.244.3.1", "10.246.0.1"))
	now, _ := b.frontend(vip(500))
	for range 3 { // the old set, when nothing reads it any more
		b.advance(setLinger)
		b.sweep(t)
	}
	var want []string
	line := func(format string, args ...any) { want = append(want, fmt.Sprintf(format, args...)) }
	for slot := range 2 {
		line("put pw_backends set %d slot %d", now.Set, slot)
		line("delete pw_backends set %d slot %d", old.Set, slot)
	}
	line("put pw_services %s:80/tcp", vip(500))
	line("put pw_backend_st 10.246.0.1:8080 of service %d", now.Id)
	line("delete pw_backend_st 10.245.3.1:8080 of service %d", now.Id)
	got := slices.Clone(st.lines[n:])
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("one change wrote\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
