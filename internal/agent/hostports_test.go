package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/tunnel"
)

func withPorts(ep endpoint.Endpoint, ports ...endpoint.PortMapping) endpoint.Endpoint {
	ep.PortMappings = ports
	return ep
}

func hostPort(hostIP string, port uint16) endpoint.PortMapping {
	m := endpoint.PortMapping{HostPort: port, ContainerPort: 8080, Protocol: "TCP"}
	if hostIP != "" {
		m.HostIP = netip.MustParseAddr(hostIP)
	}
	return m
}

// hostPortLeads says where a host port leads; empty when it is none.
func (b *agentBench) hostPortLeads(addr string, port uint16) string {
	b.t.Helper()
	v, ok, err := b.dp.set.Services.Get(maps.ServiceKey{Addr: ip(addr), Port: port, Proto: maps.ProtoTCP})
	if err != nil {
		b.t.Fatal(err)
	}
	if !ok {
		return ""
	}
	if v.Flags != maps.ServiceExternal|maps.ServiceKeepSource || v.Set != v.ExtSet || v.Count != 1 || v.ExtCount != 1 {
		b.t.Errorf("%s:%d: %+v", addr, port, v)
	}
	be, _, err := b.dp.set.Backends.Get(maps.BackendKey{Set: v.Set})
	if err != nil {
		b.t.Fatal(err)
	}
	return netip.AddrPortFrom(maps.FromAddr(be.Addr), be.Port).String()
}

func (b *agentBench) wantHostPort(when, addr string, port uint16, want string) {
	b.t.Helper()
	if got := b.hostPortLeads(addr, port); got != want {
		b.t.Errorf("%s: %s:%d leads to %q, want %q", when, addr, port, got, want)
	}
}

// In force when Up returns, gone when Down does; they follow the node's
// addresses and outlive a restart.
func TestHostPorts(t *testing.T) {
	const web = "10.244.80.65:8080"
	b := newAgentBench(t)
	b.cluster()
	b.put(testPod("client", "node-a", "", nil), testPod("other", "node-a", "", nil))
	b.done()
	ep := withPorts(testEndpoint("client", "", "10.244.80.65"), hostPort("", 8888), hostPort("192.0.2.7", 9999))
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	b.wantHostPort("after Up", "172.31.0.2", 8888, web)
	b.wantHostPort("an address the node lacks", "192.0.2.7", 9999, "")
	b.await("a problem that names it", func() bool {
		list := b.a.problems["Pod default/client"]
		return len(list) == 1 && list[0].Object == "Pod default/client" && strings.Contains(list[0].Err, "192.0.2.7:9999")
	})
	other := withPorts(testEndpoint("other", "", "10.244.80.66"), hostPort("", 7777))
	other.ID, other.HostIfindex = 2, 12
	if err := b.a.eps.Up(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	b.wantHostPort("after Up", "172.31.0.2", 7777, "10.244.80.66:8080")

	b.stack.add(node.Device{Index: 5, Name: "eth1", MTU: 1500, Up: true, Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.7")}})
	b.await("the new address", func() bool {
		return b.hostPortLeads("192.0.2.7", 9999) == web && len(b.a.problems["Pod default/client"]) == 0
	})
	b.wantHostPort("with a new address", "192.0.2.7", 8888, web)
	b.wantHostPort("with a new address", "172.31.0.2", 9999, "")

	before, err := b.dp.set.Services.Dump()
	if err != nil {
		t.Fatal(err)
	}
	b.stop()
	b.newTables()
	b.cluster()
	b.put(testPod("client", "node-a", "", nil), testPod("other", "node-a", "", nil))
	b.startWith(ep, other)
	b.done()
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	b.await("the end of the leftovers", func() bool { return b.a.full && len(b.a.services.graves) == 0 })
	after, err := b.dp.set.Services.Dump()
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(before) != fmt.Sprint(after) || len(after) != 5 {
		t.Errorf("before the restart %v, after %v", before, after)
	}

	for _, ep := range []endpoint.Endpoint{ep, other} {
		if err := b.a.eps.Down(t.Context(), ep); err != nil {
			t.Fatal(err)
		}
		if got := b.hostPortLeads("172.31.0.2", ep.PortMappings[0].HostPort); got != "" {
			t.Errorf("after Down of %s: %s", ep.Pod, got)
		}
	}
	if n := b.count("pw_services", size(b.dp.set.Services)); n != 0 {
		t.Errorf("%d frontends are left", n)
	}
}

// Ports of loopback addresses are for sockets: without those they are a problem
// of the pod's, which starts all the same.
func TestHostPortsOfLoopback(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testPod("client", "node-a", "", nil), testPod("other", "node-a", "", nil))
	b.done()
	ep := withPorts(testEndpoint("client", "", "10.244.80.65"), hostPort("127.0.0.1", 8888))
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	b.wantHostPort("with sockets", "127.0.0.1", 8888, "10.244.80.65:8080")
	b.await("sockets are left alone", func() bool { b.a.opt.NoSockets = true; return true })
	if err := b.a.eps.Up(t.Context(), withPorts(testEndpoint("other", "", "10.244.80.66"), hostPort("127.0.0.1", 7777))); err != nil {
		t.Fatal(err)
	}
	b.wantHostPort("without sockets", "127.0.0.1", 7777, "")
	b.await("the problem", func() bool {
		list := b.a.problems["Pod default/other"]
		return len(list) == 1 && strings.Contains(list[0].Err, "--cgroup")
	})
}

// A service that has the address and port keeps it, and the pod starts; a map
// that refuses is a reason not to.
func TestHostPortsThatCannotBeHad(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testPod("client", "node-a", "", nil), testPod("other", "node-a", "", nil),
		testService("web", "10.98.0.1", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"172.31.0.2"} }),
		testSlice("web-1", "web", "10.244.158.65"))
	b.done()
	b.await("the service", func() bool { return b.frontend("172.31.0.2").Count == 1 })
	had := b.frontend("172.31.0.2")
	ep := withPorts(testEndpoint("client", "", "10.244.80.65"), hostPort("", 80), hostPort("", 81))
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Errorf("a service has one of the ports: %v", err)
	}
	if got := b.frontend("172.31.0.2"); got != had {
		t.Errorf("the service's frontend became %+v", got)
	}
	b.wantHostPort("the other port", "172.31.0.2", 81, "10.244.80.65:8080")
	b.await("the conflict", func() bool {
		list := b.a.problems["Pod default/client"]
		return len(list) == 1 && strings.Contains(list[0].Err, "172.31.0.2") && strings.Contains(list[0].Err, "belongs to default/web")
	})
	// It becomes free.
	txn := b.tables.DB.WriteTxn(b.tables.Services)
	_, _, err := b.tables.Services.Delete(txn, testService("web", ""))
	txn.Commit()
	if err != nil {
		t.Fatal(err)
	}
	b.await("the port", func() bool { return b.frontend("172.31.0.2").Flags&maps.ServiceKeepSource != 0 })
	b.wantHostPort("without the service", "172.31.0.2", 80, "10.244.80.65:8080")

	var good *reconcile.Table[maps.BackendKey, maps.Backend]
	b.await("exchange the map", func() bool {
		bad := newMem[maps.BackendKey, maps.Backend]("pw_backends", &journal{})
		bad.bad = func(maps.BackendKey, maps.Backend) error { return errors.New("refused") }
		good, b.a.services.backends = b.a.services.backends, reconcile.New(bad)
		return true
	})
	other := withPorts(testEndpoint("other", "", "10.244.80.66"), hostPort("", 82))
	other.ID, other.HostIfindex = 2, 12
	if err := b.a.eps.Up(t.Context(), other); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("with a map that refuses: %v", err)
	}
	b.await("put the map back", func() bool { b.a.services.backends = good; return true })
	if err := b.a.eps.Down(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := b.a.eps.Up(t.Context(), other); err != nil {
		t.Errorf("once it takes it: %v", err)
	}
	b.wantHostPort("once it takes it", "172.31.0.2", 82, "10.244.80.66:8080")
}

func TestHostPortAddrs(t *testing.T) {
	in := peerInput{tunnel: tunnel.Output{HostAddrs: []netip.Addr{
		netip.MustParseAddr("10.98.0.10"), // a service's, on a device of the node
		netip.MustParseAddr("172.31.0.2"),
		netip.MustParseAddr("fd00::2"),
	}}}
	if got := hostPortAddrs(in, []netip.Prefix{netip.MustParsePrefix("10.98.0.0/16")}); fmt.Sprint(got) != "[172.31.0.2 fd00::2]" {
		t.Errorf("%v", got)
	}
}
