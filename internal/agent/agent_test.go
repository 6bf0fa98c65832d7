package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/ipam"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/table"
)

// agentBench is the loop of node-a over tables that the test fills.
type agentBench struct {
	t      testing.TB
	tables *table.Tables
	dp     *fakeDatapath
	stack  *fakeStack
	a      *Agent
	now    func() time.Time // its clock; nil = the real one
	done   func()           // marks the tables complete
	stop   func()           // stops the loop and waits
}

func newAgentBench(t *testing.T) *agentBench {
	t.Helper()
	return newAgentBenchAt(t, nil)
}

func newAgentBenchAt(t *testing.T, now func() time.Time) *agentBench {
	t.Helper()
	b := &agentBench{t: t, now: now, dp: newFakeDatapath(t), stack: newFakeStack()}
	b.newTables()
	b.start()
	return b
}

func (b *agentBench) newTables() {
	b.t.Helper()
	var err error
	if b.tables, err = table.New(); err != nil {
		b.t.Fatal(err)
	}
	in, err := b.tables.RegisterSource("the test")
	if err != nil {
		b.t.Fatal(err)
	}
	tables := b.tables
	b.done = func() { tables.MarkComplete(in) }
}

func (b *agentBench) start() { b.startWith() }

// startWith starts the loop with the endpoints of an earlier run.
func (b *agentBench) startWith(endpoints ...endpoint.Endpoint) {
	b.t.Helper()
	var err error
	b.a, err = New(Options{NodeName: "node-a", VNI: 4096, Now: b.now, Log: slog.New(slog.DiscardHandler)},
		b.tables, b.dp, b.stack, new(ipam.Allocator))
	if err != nil {
		b.t.Fatal(err)
	}
	b.a.eps.seed(endpoints)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	a := b.a
	go func() { ended <- a.Run(ctx) }()
	var once sync.Once
	b.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-ended; err != nil {
				b.t.Errorf("the loop ended with %v", err)
			}
		})
	}
	b.t.Cleanup(b.stop)
}

// put writes objects into their tables.
func (b *agentBench) put(objs ...any) {
	b.t.Helper()
	for _, o := range objs {
		var err error
		switch o := o.(type) {
		case *corev1.Pod:
			txn := b.tables.DB.WriteTxn(b.tables.Pods)
			_, _, err = b.tables.Pods.Insert(txn, o)
			txn.Commit()
		case *corev1.Node:
			txn := b.tables.DB.WriteTxn(b.tables.Nodes)
			_, _, err = b.tables.Nodes.Insert(txn, o)
			txn.Commit()
		case *corev1.Namespace:
			txn := b.tables.DB.WriteTxn(b.tables.Namespaces)
			_, _, err = b.tables.Namespaces.Insert(txn, o)
			txn.Commit()
		case *corev1.Service:
			txn := b.tables.DB.WriteTxn(b.tables.Services)
			_, _, err = b.tables.Services.Insert(txn, o)
			txn.Commit()
		case *discoveryv1.EndpointSlice:
			txn := b.tables.DB.WriteTxn(b.tables.Slices)
			_, _, err = b.tables.Slices.Insert(txn, o)
			txn.Commit()
		default:
			b.t.Fatalf("no table for %T", o)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *agentBench) cluster() {
	b.t.Helper()
	b.put(testNode("node-a", "172.31.0.2", "10.244.80.0/24"), testNode("node-b", "172.31.0.3", "10.244.158.0/24"),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		testPod("remote", "node-b", "10.244.158.65", nil))
}

// await waits, round by round, until ok.
func (b *agentBench) await(what string, ok func() bool) {
	b.t.Helper()
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	for {
		done := false
		if err := b.a.do(b.t.Context(), func() { done = ok() }); err != nil {
			b.t.Fatalf("%s: %v", what, err)
		}
		if done {
			return
		}
		select {
		case <-b.a.rounds:
		case <-limit.C:
			b.t.Fatalf("never: %s", what)
		}
	}
}

func (b *agentBench) count(what string, n func() (int, error)) int {
	b.t.Helper()
	got, err := n()
	if err != nil {
		b.t.Fatalf("%s: %v", what, err)
	}
	return got
}

func size[K comparable, V any](m maps.Map[K, V]) func() (int, error) {
	return func() (int, error) {
		all, err := m.Dump()
		return len(all), err
	}
}

func testService(name, vip string, mod ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: vip, ClusterIPs: []string{vip},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	for _, f := range mod {
		f(s)
	}
	return s
}

func testSlice(name, service string, addrs ...string) *discoveryv1.EndpointSlice {
	port, portName, proto := int32(8080), "http", corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &proto}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func testEndpoint(name, uid, addr string) endpoint.Endpoint {
	return endpoint.Endpoint{
		ID: 1, ContainerID: "c-" + name, IfName: "eth0", Namespace: "default", Pod: name, UID: uid,
		Addrs: []netip.Addr{netip.MustParseAddr(addr)}, HostIfindex: 11, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	}
}

func (b *agentBench) frontend(vip string) maps.Service {
	b.t.Helper()
	v, _, err := b.dp.set.Services.Get(maps.ServiceKey{Addr: ip(vip), Port: 80, Proto: maps.ProtoTCP})
	if err != nil {
		b.t.Fatal(err)
	}
	return v
}

// S29, L6: nothing is written, and nobody told that all is well, before
// every table is complete.
func TestNothingBeforeSynced(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testService("web", "10.98.0.1"))
	// What is waited for is known by the loop's first round.
	b.await("a round", func() bool { return b.a.stats.rounds > 0 })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := b.a.eps.Up(ctx, testEndpoint("client", "", "10.244.80.65"))
	if err == nil || !strings.Contains(err.Error(), "endpointslices") || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Up says %v, not what it waits for", err)
	}
	if err := b.a.eps.Down(t.Context(), testEndpoint("client", "", "10.244.80.65")); err != nil {
		t.Errorf("Down: %v", err)
	}
	for what, n := range map[string]func() (int, error){
		"pw_services": size(b.dp.set.Services), "pw_addrs": size(b.dp.set.Addrs), "pw_prefixes": size(b.dp.set.Prefixes),
	} {
		if got := b.count(what, n); got != 0 {
			t.Errorf("%s has %d entries before the tables are complete", what, got)
		}
	}
	if why := b.a.NotReady(); len(why) == 0 || len(b.dp.devices()) != 0 {
		t.Errorf("ready %v, attached %v", why, b.dp.devices())
	}
	// The endpoint lists come last: no moment with "no endpoints".
	b.put(testSlice("web-1", "web", "10.244.158.65"))
	b.done()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	if v := b.frontend("10.98.0.1"); v.Count != 1 {
		t.Errorf("frontend %+v", v)
	}
	if got := b.dp.devices(); fmt.Sprint(got) != "[eth0 podweir.vxlan]" {
		t.Errorf("attached to %v", got)
	}
	if last := b.stack.overlays[len(b.stack.overlays)-1]; last.MTU != 1450 || last.MAC == nil || b.a.MTU() != 1450 {
		t.Errorf("overlay %+v, MTU of pods %d", last, b.a.MTU())
	}
	if len(b.stack.routes) != 2 || b.dp.overlay != 7 {
		t.Errorf("routes %+v, overlay %d", b.stack.routes, b.dp.overlay)
	}
}

func TestEndpointUpAndDown(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	ep := testEndpoint("client", "uid-client", "10.244.80.65")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.a.eps.Up(ctx, ep); err == nil || !strings.Contains(err.Error(), "Pod default/client is not among the objects") {
		t.Errorf("without its Pod: %v", err)
	}
	other := testPod("client", "node-a", "10.244.80.65", nil)
	other.UID = "another"
	b.put(other)
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.a.eps.Up(ctx, ep); err == nil || !strings.Contains(err.Error(), "another pod of that name") {
		t.Errorf("with another Pod of its name: %v", err)
	}
	if n := b.count("pw_endpoints", size(b.dp.set.Endpoints)); n != 0 {
		t.Errorf("%d endpoints are left of refused ones", n)
	}
	// Its Pod comes while Up waits.
	up := make(chan error, 1)
	go func() { up <- b.a.eps.Up(t.Context(), ep) }()
	b.put(testPod("client", "node-a", "", nil))
	if err := <-up; err != nil {
		t.Fatal(err)
	}
	v, ok, err := b.dp.set.Endpoints.Get(ip("10.244.80.65"))
	if err != nil || !ok || v.Ifindex != 11 || v.Id != 1 {
		t.Errorf("when Up returned: %+v %v %v", v, ok, err)
	}
	if p, ok, err := b.dp.set.Addrs.Get(ip("10.244.80.65")); err != nil || !ok || p.Slot != v.Slot {
		t.Errorf("when Up returned: %+v %v %v", p, ok, err)
	}
	// CHECK asks the kernel, not what was once written there.
	if err := b.a.eps.InForce(t.Context(), ep); err != nil {
		t.Errorf("in force: %v", err)
	}
	for want, harm := range map[string]func() error{
		"no entry":      func() error { return b.dp.set.Endpoints.Delete(ip("10.244.80.65")) },
		"another entry": func() error { return b.dp.set.Endpoints.Put(ip("10.244.80.65"), maps.Endpoint{Ifindex: 99}) },
	} {
		if err := harm(); err != nil {
			t.Fatal(err)
		}
		if err := b.a.eps.InForce(t.Context(), ep); err == nil || !strings.Contains(err.Error(), want+" of 10.244.80.65") {
			t.Errorf("%s: %v", want, err)
		}
		if err := b.dp.set.Endpoints.Put(ip("10.244.80.65"), v); err != nil {
			t.Fatal(err)
		}
	}
	gen, _, err := b.dp.set.Gens.Get(v.Slot)
	if err != nil {
		t.Fatal(err)
	}
	// The Pod object goes first: the endpoint stays until the plugin says so.
	txn := b.tables.DB.WriteTxn(b.tables.Pods)
	_, _, err = b.tables.Pods.Delete(txn, testPod("client", "", "", nil))
	txn.Commit()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Errorf("a known endpoint without its Pod object: %v", err)
	}
	if err := b.a.eps.Down(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := b.dp.set.Endpoints.Get(ip("10.244.80.65")); ok || err != nil {
		t.Errorf("when Down returned it was still there: %v", err)
	}
	if now, _, err := b.dp.set.Gens.Get(v.Slot); err != nil || now == gen {
		t.Errorf("generation %d did not move on removal, %v", now, err)
	}
	if err := b.a.eps.Down(t.Context(), ep); err != nil {
		t.Errorf("Down again: %v", err)
	}
}

// Pods get addresses when it is known which of them are the node's own, and
// how large packets may be.
func TestAddressesComeLast(t *testing.T) {
	b := newAgentBench(t)
	own := netip.MustParseAddr("10.244.80.9")
	b.stack.mu.Lock()
	b.stack.list[0].Addrs = append(b.stack.list[0].Addrs, own)
	b.stack.unread = errors.New("refused")
	b.stack.mu.Unlock()
	b.cluster()
	b.done()
	b.await("a round over all objects", func() bool { return b.a.full })
	if _, err := b.a.ipam.Allocate("early"); !errors.Is(err, ipam.ErrNoCIDR) {
		t.Errorf("before the node's addresses are known: %v", err)
	}
	b.stack.mu.Lock()
	b.stack.unread = nil
	b.stack.mu.Unlock()
	b.stack.events <- struct{}{}
	b.await("a range", func() bool { return b.a.ipam.Ready() == nil })
	if _, err := b.a.ipam.Allocate("late", own); !errors.Is(err, ipam.ErrReserved) {
		t.Errorf("the node's own address: %v", err)
	}
	if b.a.MTU() == 0 {
		t.Error("an address can be had before the MTU is known")
	}
}

// L2, L6: this version's programs come when all is in the maps, and before
// the agent is ready.
func TestSwitchAfterFirstFullRound(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65"))
	var asked, early int
	fails := true
	b.dp.onSwitch = func() error {
		asked++
		if b.frontend("10.98.0.1").Count != 1 {
			early++
		}
		if fails {
			return errors.New("refused")
		}
		return nil
	}
	b.done()
	b.await("not ready because of the programs", func() bool {
		return strings.Contains(strings.Join(b.a.NotReady(), ";"), "earlier version")
	})
	b.dp.mu.Lock()
	if asked == 0 || early > 0 {
		t.Errorf("asked %d times, %d of them before the maps were filled", asked, early)
	}
	fails = false
	b.dp.mu.Unlock()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
}

// L10: one bad device, one bad object.
func TestOneBadThing(t *testing.T) {
	b := newAgentBench(t)
	b.dp.bad["eth1"] = errors.New("refused")
	b.cluster()
	b.put(testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65"),
		testService("bad", "10.98.0.300"))
	b.done()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	b.stack.add(node.Device{Index: 3, Name: "eth1", MTU: 1500, Up: true, Default: true})
	b.await("not ready because of eth1", func() bool {
		return strings.Contains(strings.Join(b.a.NotReady(), ";"), "eth1")
	})
	if v := b.frontend("10.98.0.1"); v.Count != 1 {
		t.Errorf("the good service suffers: %+v", v)
	}
	s, err := b.a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, p := range s.Problems {
		all = append(all, p.Object+": "+p.Error)
	}
	text := strings.Join(all, "\n")
	for _, want := range []string{"device eth1: attach: refused", "Service default/bad", "10.98.0.300"} {
		if !strings.Contains(text, want) {
			t.Errorf("problems do not name %q:\n%s", want, text)
		}
	}
	// Mended: nothing of it is left.
	b.put(testService("bad", "10.98.0.3"))
	b.dp.mu.Lock()
	delete(b.dp.bad, "eth1")
	b.dp.mu.Unlock()
	b.stack.events <- struct{}{}
	b.await("ready again, without problems", func() bool {
		return len(b.a.NotReady()) == 0 && b.tables.Problems.NumObjects(b.tables.DB.ReadTxn()) == 0
	})
}

// A restart deletes nothing before its tables are complete, and what is gone
// afterwards.
func TestRestart(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65"),
		testService("old", "10.98.0.2"), testSlice("old-1", "old", "10.244.158.66"))
	b.done()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	web := b.frontend("10.98.0.1")
	before := b.count("pw_services", size(b.dp.set.Services))
	b.stop()

	b.newTables()
	b.start()
	b.put(testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65"))
	b.await("a round without tables", func() bool { return b.a.stats.rounds > 0 })
	if n := b.count("pw_services", size(b.dp.set.Services)); n != before {
		t.Errorf("%d frontends before the tables are complete, were %d", n, before)
	}
	b.cluster()
	b.done()
	b.await("first full round", func() bool { return b.a.full })
	if v := b.frontend("10.98.0.1"); v != web {
		t.Errorf("frontend %+v, was %+v", v, web)
	}
	if v := b.frontend("10.98.0.2"); v != (maps.Service{}) {
		t.Errorf("a service that went while the agent was down: %+v", v)
	}
	b.await("its backends are gone, a second later", func() bool { return b.a.services.backends.Len() == 1 })
}

// A load balancer in the kernel's maps, through the loop: its frontends and
// sets, the nodes' addresses, and what this node sends under.
func TestLoadBalancer(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	slice := testSlice("web-1", "web", "10.244.158.65", "10.244.158.66")
	for i := range slice.Endpoints {
		slice.Endpoints[i].NodeName = new("node-b")
	}
	b.put(slice, testService("web", "10.98.0.1", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = 30080
		s.Spec.LoadBalancerSourceRanges = []string{"203.0.113.0/24"}
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	}))
	b.done()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	get := func(addr string, port uint16) maps.Service {
		t.Helper()
		v, ok, err := b.dp.set.Services.Get(maps.ServiceKey{Addr: ip(addr), Port: port, Proto: maps.ProtoTCP})
		if err != nil || !ok {
			t.Errorf("%s port %d: %v %v", addr, port, ok, err)
		}
		return v
	}
	np, lb := get("0.0.0.0", 30080), get("192.0.2.1", 80)
	if np.Count != 2 || np.ExtSet != np.Set || np.Maglev != 1021 || np.Flags != maps.ServiceExternal || lb.Flags != maps.ServiceExternal|maps.ServiceSourceRanges {
		t.Errorf("NodePort %+v, load balancer %+v", np, lb)
	}
	for what, n := range map[string]struct {
		size func() (int, error)
		want int
	}{
		"pw_maglev": {size(b.dp.set.Maglev), 16}, "pw_backend_st": {size(b.dp.set.BackendStates), 2},
		"pw_src_ranges": {size(b.dp.set.SrcRanges), 1}, "pw_services": {size(b.dp.set.Services), 4},
	} {
		if got := b.count(what, n.size); got != n.want {
			t.Errorf("%s has %d entries, want %d", what, got, n.want)
		}
	}
	for _, addr := range []string{"172.31.0.2", "172.31.0.3"} {
		if p, _, err := b.dp.set.Addrs.Get(ip(addr)); err != nil || p.Flags&maps.PeerNodePort == 0 {
			t.Errorf("%s: %+v, %v: NodePorts do not answer", addr, p, err)
		}
	}
	for _, index := range []uint32{0, 2} {
		if d, _, err := b.dp.set.DevAddrs.Get(index); err != nil || d.V4 != ip("172.31.0.2") || d.V6 != (maps.Addr{}) {
			t.Errorf("device %d sends under %+v, %v", index, d, err)
		}
	}
	// Another device: it has an entry before its programs run.
	b.stack.add(node.Device{Index: 3, Name: "eth1", MTU: 1500, Up: true, Default: true, Source4: netip.MustParseAddr("192.0.2.30")})
	b.await("eth1 is attached", func() bool { return len(b.dp.devices()) == 3 })
	if d, _, err := b.dp.set.DevAddrs.Get(3); err != nil || d.V4 != ip("192.0.2.30") {
		t.Errorf("eth1 sends under %+v, %v", d, err)
	}
	// A second NodePort: flows to the nodes' addresses are decided again.
	gens := func() (out [2]uint32) {
		for i, addr := range []string{"172.31.0.2", "172.31.0.3"} {
			p, _, err := b.dp.set.Addrs.Get(ip(addr))
			if err == nil {
				out[i], _, err = b.dp.set.Gens.Get(p.Slot)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	before := gens()
	b.put(testService("two", "10.98.0.2", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30081
	}))
	b.await("another NodePort", func() bool { return b.a.services.frontends.Len() == 7 })
	if now := gens(); now[0] == before[0] || now[1] == before[1] {
		t.Errorf("generations %v, were %v", now, before)
	}
	b.put(testSlice("web-1", "web"))
	b.await("no endpoints", func() bool { return b.a.services.states.Len() == 0 })
	if lb = get("192.0.2.1", 80); lb.Count != 0 || lb.ExtCount != 0 || lb.Maglev != 0 || lb.Flags&maps.ServiceNoLocalExt != 0 {
		t.Errorf("without endpoints %+v", lb)
	}
}

// The first round takes the services in parts: of all, the oldest gets a
// frontend that several want, and a restart moves nothing.
func TestFirstRoundInParts(t *testing.T) {
	const last = 2 * partSize // and one more in a third part
	vip := func(i int) string { return fmt.Sprintf("10.98.%d.%d", 1+i/250, 1+i%250) }
	start := time.Unix(1e9, 0)
	b := newAgentBench(t)
	fill := func() {
		b.cluster()
		for i := range last + 1 {
			name := fmt.Sprintf("s%05d", i)
			b.put(testService(name, vip(i), func(s *corev1.Service) {
				s.CreationTimestamp = metav1.NewTime(start.Add(time.Duration(i) * time.Second))
			}))
		}
		// Last by name, but before the one that sorts first.
		oldest := testService("zzz", vip(last), func(s *corev1.Service) { s.CreationTimestamp = metav1.NewTime(start) })
		b.put(oldest, testSlice("zzz-1", "zzz", "10.244.158.65"))
		b.done()
		b.await("the first round", func() bool { return b.a.full })
	}
	fill()
	if got := b.count("frontends", size(b.dp.set.Services)); got != 2*(last+1) { // and the addresses
		t.Fatalf("%d entries of frontends, want %d", got, 2*(last+1))
	}
	was, err := b.dp.set.Services.Dump()
	if err != nil {
		t.Fatal(err)
	}
	if v := b.frontend(vip(last)); v.Count != 1 {
		t.Errorf("the frontend that two services want is not the older one's: %+v", v)
	}
	b.stop()
	b.newTables()
	b.start()
	fill()
	now, err := b.dp.set.Services.Dump()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(was, now) {
		t.Error("a restart moved frontends")
	}
}
