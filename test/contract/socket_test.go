package contract

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// socketPrograms counts the programs at the sockets of a node's processes.
func socketPrograms(t *testing.T, n *cluster.Node) map[string]int {
	t.Helper()
	dir, err := os.Open(n.Cgroup())
	ok(t, err)
	defer dir.Close()
	out := map[string]int{}
	for _, attach := range []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCgroupInetSockRelease,
		ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername,
	} {
		res, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: attach})
		ok(t, err)
		for _, p := range res.Programs {
			prog, err := ebpf.NewProgramFromID(p.ID)
			ok(t, err)
			info, err := prog.Info()
			prog.Close()
			ok(t, err)
			out[info.Name]++
		}
	}
	return out
}

// socketWorld is a service of every kind with one backend.
type socketWorld struct {
	*world
	cluster4, cluster6, lb4, lb6 string
	nodePort                     uint16
}

func newSocketWorld(t *testing.T, ctx context.Context, backend map[bool]netip.AddrPort) *socketWorld {
	t.Helper()
	w := &socketWorld{
		world: shared(t), nodePort: 30181,
		cluster4: "10.98.50.1", cluster6: "fd00:10:98::3201", lb4: "198.51.100.50", lb6: "2001:db8:50::1",
	}
	svc := clusterIP("sock", []string{w.cluster4, w.cluster6}, bothPorts(80)...)
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = int32(w.nodePort)
	}
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: w.lb4}, {IP: w.lb6}}
	objs := []cluster.Object{svc}
	for v6, be := range backend {
		objs = append(objs, endpointSlice(fmt.Sprintf("sock-%v", v6), "sock", bothSlicePorts(int32(be.Port())), be.Addr()))
	}
	w.put(t, objs...)
	for v6, be := range backend {
		for _, proto := range protos() {
			for _, target := range w.targets(v6)[:3] { // NodePorts are written with them
				w.inForce(t, ctx, proto, target, be)
			}
		}
	}
	return w
}

// targets are a service's addresses: cluster IP, the load balancer's, the
// NodePort (as a key, for the first three), that of this node and another's.
func (w *socketWorld) targets(v6 bool) []string {
	return []string{
		vip(pick(v6, w.cluster4, w.cluster6), 80), vip(pick(v6, w.lb4, w.lb6), 80),
		vip(pick(v6, "0.0.0.0", "::"), w.nodePort),
		at(nodeAddr(w.a, v6), w.nodePort).String(), at(nodeAddr(w.b, v6), w.nodePort).String(),
	}
}

// known counts the sockets that are told whom they called.
func (w *socketWorld) known(t *testing.T) (n int) {
	t.Helper()
	set, err := maps.OpenPinned(filepath.Join(w.a.BPFFS(), "maps"), true)
	ok(t, err)
	defer set.Close()
	ok(t, set.SockRev.Each(func(uint64, maps.SockAsked) error { n++; return nil }))
	return n
}

// called are the targets that a process can call.
func (w *socketWorld) called(v6 bool) []string { return slices.Delete(w.targets(v6), 2, 3) }

// call has a process call over TCP and wants it translated so many times at
// the socket. Either way it sees whom it called, and closed sockets are
// forgotten; of MPTCP the kernel shows neither the name nor the end.
func (w *socketWorld) call(t *testing.T, ctx context.Context, from *cluster.Netns, target string, v6 bool, translated uint64, options ...string) *probe.Summary {
	t.Helper()
	before, known := readCounters(t, w.a), w.known(t)
	s := send(t, ctx, from, "tcp", target, options...)
	mptcp := slices.Contains(options, "mptcp")
	if after := w.known(t); after != known && !mptcp {
		t.Errorf("%s from %s: %d sockets are known, %d were before", target, from.Name, after, known)
	}
	if got := readCounters(t, w.a).since(before); got.of("sock_translated", "socket", v6) != translated {
		t.Errorf("%s from %s: translated at the socket %d times, want %d; all %v", target, from.Name, got.of("sock_translated", "socket", v6), translated, got)
	}
	if s.First.Remote != target && !mptcp {
		t.Errorf("%s from %s: the peer is called %s", target, from.Name, s.First.Remote)
	}
	return s
}

// direct checks the flow of a call: from the host to the backend as they are.
func (w *socketWorld) direct(t *testing.T, s *probe.Summary, backend netip.AddrPort) {
	t.Helper()
	if s.First.Reply.Local != backend.String() {
		t.Errorf("answered at %s, want %v", s.First.Reply.Local, backend)
	}
	if s.First.Reply.Peer != s.First.Local {
		t.Errorf("the server sees %s, the client has %s", s.First.Reply.Peer, s.First.Local)
	}
	local := netip.MustParseAddrPort(s.First.Local)
	set, err := maps.OpenPinned(filepath.Join(w.a.BPFFS(), "maps"), true)
	ok(t, err)
	defer set.Close()
	key := maps.FlowKey{
		Src: maps.ToAddr(local.Addr()), Sport: local.Port(),
		Dst: maps.ToAddr(backend.Addr()), Dport: backend.Port(), Proto: maps.ProtoTCP,
	}
	f, known, err := set.Flows.Get(key)
	if err == nil && !known {
		f, known, err = set.FlowsNew.Get(key)
	}
	if err != nil || !known || f.Service != 0 || slices.Contains(maps.FlowFlagNames(f.Flags), "xlate") {
		t.Errorf("flow from %v to %v: %+v (known: %v, %v), want one without translation", local, backend, f, known, err)
	}
}

// The host's TCP is translated at connect(), by whatever address of the
// service; every other socket keeps the address that it asked for.
func TestSocketsOfTheHost(t *testing.T) {
	ctx := within(t, 120*time.Second)
	base := shared(t)
	w := newSocketWorld(t, ctx, map[bool]netip.AddrPort{
		false: atAll(false, base.remote)[0], true: atAll(true, base.remote)[0],
	})
	host := w.a.Netns
	families(t, func(t *testing.T, v6 bool) {
		backend := atAll(v6, w.remote)[0]
		for _, target := range w.called(v6) {
			w.direct(t, w.call(t, ctx, host, target, v6, 1), backend)
			// Bound first, and a port used again at once.
			own := nodeAddr(w.a, v6).String()
			for range 2 {
				w.direct(t, w.call(t, ctx, host, target, v6, 1, "-source", own, "-sport", "23456"), backend)
			}
			w.call(t, ctx, host, target, v6, 1, "-socket", "mptcp")
			w.call(t, ctx, host.InCgroupOf(w.Ext), target, v6, 0)
			before := readCounters(t, w.a)
			send(t, ctx, host, "udp", target)
			if n := readCounters(t, w.a).since(before).of("sock_translated", "", v6); n != 0 {
				t.Errorf("UDP to %s: translated at the socket %d times", target, n)
			}
			// A pod's process is one of the pod's, whatever its cgroup.
			w.call(t, ctx, w.client.InCgroupOf(host), target, v6, 0)
		}
		// The wildcard is a frontend's key, not an address of the service.
		for _, loopback := range []string{pick(v6, "127.0.0.1", "::1"), pick(v6, "0.0.0.0", "::")} {
			before := readCounters(t, w.a)
			s, err := host.Send(ctx, vip(loopback, w.nodePort))
			ok(t, err)
			if n := readCounters(t, w.a).since(before).of("sock_translated", "", v6); n != 0 || s.Failed[probe.Refused] != 1 {
				t.Errorf("NodePort on %s: translated %d times, %+v", loopback, n, s)
			}
		}
	})
	t.Run("v4-mapped", func(t *testing.T) {
		for _, target := range w.called(false) {
			w.direct(t, w.call(t, ctx, host, target, false, 1, "-socket", "mapped"), atAll(false, w.remote)[0])
		}
	})
	status, err := w.a.Podweir(ctx, "status")
	ok(t, err)
	if !strings.Contains(status, "translated at connect(), cgroup "+w.a.Cgroup()) {
		t.Errorf("podweir status says nothing of the sockets:\n%s", status)
	}
}

// A host port of a loopback address is for TCP of the host's own processes,
// whatever address of the node they have, and for nobody else.
func TestHostPortOnLoopback(t *testing.T) {
	ctx := within(t, 60*time.Second)
	w := &socketWorld{world: shared(t)}
	obj := pod("on-loopback", "node-a", "10.244.80.77", "fd00:10:244:50::4d")
	w.put(t, obj)
	const hostPort = 18777
	mapping := func(hostIP string) cluster.PortMapping {
		return cluster.PortMapping{HostPort: hostPort, ContainerPort: cluster.ServerPort, Protocol: "tcp", HostIP: hostIP}
	}
	p, err := w.AddPod(ctx, obj, mapping("127.0.0.1"), mapping("::1"))
	ok(t, err)
	t.Cleanup(func() { ok(t, errors.Join(p.Delete(context.Background()), w.Manifests.Delete(obj))) })
	_, err = p.Serve(ctx, "on-loopback", cluster.ServerPort)
	ok(t, err)
	host := w.a.Netns
	refused := func(what string, from *cluster.Netns, target string, options ...string) {
		t.Helper()
		s, err := from.Send(ctx, target, options...)
		ok(t, err)
		if s.Failed[probe.Refused] != 1 {
			t.Errorf("%s to %s: %+v, want it refused", what, target, s)
		}
	}
	families(t, func(t *testing.T, v6 bool) {
		target := vip(pick(v6, "127.0.0.1", "::1"), hostPort)
		backend := netip.AddrPortFrom(netip.MustParseAddr(pick(v6, "10.244.80.77", "fd00:10:244:50::4d")), cluster.ServerPort)
		w.direct(t, w.call(t, ctx, host, target, v6, 1), backend)
		own := nodeAddr(w.a, v6).String()
		if s := w.call(t, ctx, host, target, v6, 1, "-source", own); s.First.Reply.Peer != s.First.Local {
			t.Errorf("under %s: the pod sees %s", own, s.First.Reply.Peer)
		}
		refused("UDP", host, target, "-proto", "udp")
		refused("the host, as loopback itself", host, target, "-source", pick(v6, "127.0.0.1", "::1"))
		refused("a process of another node's cgroup", host.InCgroupOf(w.Ext), target)
		refused("a pod", w.client.Netns, target)
		refused("another node", w.b.Netns, target)
		refused("the host, by its address", host, vip(own, hostPort))
	})
	ok(t, p.Delete(ctx))
	refused("after the pod", host, vip("127.0.0.1", hostPort))
}

// A backend that is no pod: another node, or the very host that calls.
func TestSocketsToHosts(t *testing.T) {
	ctx := within(t, 90*time.Second)
	const port = 9095
	for _, to := range []string{"node-b", "node-a"} {
		t.Run(to, func(t *testing.T) {
			node := shared(t).Node(to)
			p, err := node.Serve(ctx, to, port)
			ok(t, err)
			t.Cleanup(func() { ok(t, p.Kill(context.Background())) })
			w := newSocketWorld(t, ctx, map[bool]netip.AddrPort{
				false: at(nodeAddr(node, false), port), true: at(nodeAddr(node, true), port),
			})
			families(t, func(t *testing.T, v6 bool) {
				for _, target := range w.called(v6) {
					for range 2 {
						s := w.call(t, ctx, w.a.Netns, target, v6, 1, "-sport", "23457")
						if s.First.Reply.Local != at(nodeAddr(node, v6), port).String() || s.First.Reply.Peer != at(nodeAddr(w.a, v6), 23457).String() {
							t.Errorf("%s: %+v", target, s.First.Reply)
						}
					}
					w.call(t, ctx, w.a.InCgroupOf(w.Ext), target, v6, 0)
				}
			})
		})
	}
}

// What is not plain at a socket is left to the way of the packets.
func TestSocketsLeftAlone(t *testing.T) {
	ctx := within(t, 120*time.Second)
	base := shared(t)
	host := base.a.Netns
	ips := []string{"10.98.51.1", "fd00:10:98::3301"}
	plain := &socketWorld{world: base}

	t.Run("no backend", func(t *testing.T) {
		base.put(t, clusterIP("sock-nobody", ips, bothPorts(80)...))
		families(t, func(t *testing.T, v6 bool) {
			target := vip(pick(v6, ips[0], ips[1]), 80)
			base.inForce(t, ctx, "tcp", target)
			before := readCounters(t, base.a)
			base.rejected(t, ctx, host, "to_overlay", "tcp", target, "drop_no_backend", v6)
			if n := readCounters(t, base.a).since(before).of("sock_translated", "", v6); n != 0 {
				t.Errorf("translated at the socket %d times", n)
			}
		})
	})
	t.Run("affinity", func(t *testing.T) {
		svc := clusterIP("sock-sticky", ips, bothPorts(80)...)
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		base.put(t, append(slicesFor("sock-sticky", "sock-sticky", bothSlicePorts(cluster.ServerPort), base.local, base.remote), svc)...)
		families(t, func(t *testing.T, v6 bool) {
			target := vip(pick(v6, ips[0], ips[1]), 80)
			base.inForce(t, ctx, "tcp", target, atAll(v6, base.local, base.remote)...)
			first := plain.call(t, ctx, host, target, v6, 0, "-count", "8")
			// The same client, known before the route is.
			bound := plain.call(t, ctx, host, target, v6, 8, "-count", "8", "-source", nodeAddr(base.a, v6).String())
			if len(first.Servers) != 1 || fmt.Sprint(first.Servers) != fmt.Sprint(bound.Servers) {
				t.Errorf("served by %v on the way, by %v at the socket, want one and the same", first.Servers, bound.Servers)
			}
		})
	})
	t.Run("source ranges", func(t *testing.T) {
		svc := clusterIP("sock-ranges", ips, bothPorts(80)...)
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		lb := []string{"198.51.100.51", "2001:db8:51::1"}
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: lb[0]}, {IP: lb[1]}}
		svc.Spec.LoadBalancerSourceRanges = []string{nodeAddr(base.a, false).String() + "/32", "fd00:dead::/64"}
		base.put(t, append(slicesFor("sock-ranges", "sock-ranges", bothSlicePorts(cluster.ServerPort), base.remote), svc)...)
		for i, v6 := range []bool{false, true} {
			base.inForce(t, ctx, "tcp", vip(lb[i], 80), atAll(v6, base.remote)...)
		}
		plain.call(t, ctx, host, vip(lb[0], 80), false, 0)
		before := readCounters(t, base.a)
		silent(t, ctx, host, "tcp", vip(lb[1], 80))
		atLeast(t, base.a, before, "drop_source_range", "", true, 1)
	})
	t.Run("backend that is a frontend", func(t *testing.T) {
		families(t, func(t *testing.T, v6 bool) {
			base.put(t, clusterIP("sock-twice", []string{pick(v6, ips[0], ips[1])}, bothPorts(80)...))
			web := at(netip.MustParseAddr(pick(v6, web4, web6)), 80)
			base.put(t, endpointSlice("sock-twice", "sock-twice", bothSlicePorts(80), web.Addr()))
			target := vip(pick(v6, ips[0], ips[1]), 80)
			base.inForce(t, ctx, "tcp", target, web)
			// Never translated twice, at the socket no more than on the way.
			before := readCounters(t, base.a)
			silent(t, ctx, host, "tcp", target)
			atLeast(t, base.a, before, "drop_no_service", "to_overlay", v6, 1)
			if n := readCounters(t, base.a).since(before).of("sock_translated", "", v6); n != 0 {
				t.Errorf("translated at the socket %d times", n)
			}
		})
	})
}

// The programs outlive the agent, and a new one replaces them in place.
func TestSocketsOutliveTheAgent(t *testing.T) {
	ctx := within(t, 90*time.Second)
	base := shared(t)
	w := &socketWorld{world: base}
	target := vip(web4, 80)
	s, err := base.a.Stream(ctx, target)
	ok(t, err)
	want := map[string]int{"connect4": 1, "connect6": 1, "getpeername4": 1, "getpeername6": 1, "sock_release": 1}
	check := func(when string) {
		t.Helper()
		if got := socketPrograms(t, base.a); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: programs at sockets %v, want %v", when, got, want)
		}
		w.call(t, ctx, base.a.Netns, target, false, 4, "-count", "4")
	}
	check("before")
	ok(t, base.a.KillAgent(ctx))
	t.Cleanup(func() { base.ensureAgents(t) })
	check("killed")
	ok(t, base.a.StartAgent(ctx))
	check("started again")
	progress(t, ctx, s, 5)
	rep, err := s.Stop(ctx)
	ok(t, err)
	if rep.Lost > 0 || rep.Error != "" || rep.Remote != target {
		t.Errorf("the connection from before: %+v", rep)
	}
}

// Without the programs, everything works by the way of the packets.
func TestWithoutSockets(t *testing.T) {
	w := own(t, cluster.Config{NoSockets: true})
	ctx := within(t, 90*time.Second)
	ok(t, w.bringUp(ctx))
	if got := socketPrograms(t, w.a); len(got) > 0 {
		t.Errorf("attached: %v", got)
	}
	for _, v6 := range []bool{false, true} {
		before := readCounters(t, w.a)
		s := send(t, ctx, w.a.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-count", "16")
		if got := readCounters(t, w.a).since(before); got.of("sock_translated", "", v6) != 0 || s.OK != 16 {
			t.Errorf("%+v, counted %v", s, got)
		}
	}
	status, err := w.a.Podweir(ctx, "status")
	ok(t, err)
	if !strings.Contains(status, "translated on the way") {
		t.Errorf("podweir status:\n%s", status)
	}
}
