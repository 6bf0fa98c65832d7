package contract

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// enough connections that two backends are both met but once in 10^19 runs.
const enough = "64"

// A pod calls a service: both backends answer, each sees the pod's own
// address, and the pod never sees another address than the service's.
func TestS1PodToClusterIP(t *testing.T) {
	w := shared(t)
	families(t, func(t *testing.T, v6 bool) {
		for _, proto := range protos() {
			t.Run(proto, func(t *testing.T) {
				ctx := within(t, 60*time.Second)
				target := vip(pick(v6, web4, web6), 80)
				seen, err := w.client.Capture(ctx, "eth0")
				ok(t, err)
				defer seen.Close()
				s := send(t, ctx, w.client.Netns, proto, target, "-count", enough, "-parallel", "4")
				own := ip(w.client, v6).String()
				if s.Peers[own] != s.OK {
					t.Errorf("backends saw %v, want %s alone", s.Peers, own)
				}
				if len(s.Servers) != 2 || s.Servers["local"] == 0 || s.Servers["remote"] == 0 {
					t.Errorf("answered by %v, want the backend of this node and that of the other", s.Servers)
				}
				pod := w.local
				if s.First.Reply.Server == "remote" {
					pod = w.remote
				}
				if want := at(ip(pod, v6), cluster.ServerPort).String(); s.First.Reply.Local != want {
					t.Errorf("%s was called as %s, want %s", pod.PodName, s.First.Reply.Local, want)
				}
				service := netip.MustParseAddrPort(target)
				replies := 0
				for _, p := range seen.Packets() {
					h := p.Last()
					if h == nil || h.Proto != protoNumber(proto) {
						continue
					}
					if p.Outgoing && at(h.Dst, h.DPort) != service || !p.Outgoing && at(h.Src, h.SPort) != service {
						t.Errorf("in the pod: %v", p)
					}
					if !p.Outgoing {
						replies++
					}
				}
				if replies < s.OK {
					t.Errorf("%d packets came back for %d answers", replies, s.OK)
				}
			})
		}
	})
}

// A process of a node calls a service; and a backend may be a process of a
// node (a pod with the host's network).
func TestS1HostToClusterIP(t *testing.T) {
	w := shared(t)
	families(t, func(t *testing.T, v6 bool) {
		for _, n := range w.Nodes {
			for _, proto := range protos() {
				t.Run(n.NodeName+" "+proto, func(t *testing.T) {
					ctx := within(t, 60*time.Second)
					s := send(t, ctx, n.Netns, proto, vip(pick(v6, web4, web6), 80), "-count", enough, "-parallel", "32")
					if own := nodeAddr(n, v6).String(); s.Peers[own] != s.OK {
						t.Errorf("backends saw %v, want %s alone", s.Peers, own)
					}
					if len(s.Servers) != 2 {
						t.Errorf("answered by %v, want both backends", s.Servers)
					}
				})
			}
		}
	})
}

func TestS1HostNetworkBackend(t *testing.T) {
	w := shared(t)
	ctx := within(t, 90*time.Second)
	const port = 9091
	for _, n := range w.Nodes {
		p, err := n.Serve(ctx, n.NodeName, port)
		ok(t, err)
		t.Cleanup(func() { ok(t, p.Kill(context.Background())) })
	}
	addrs := map[bool][]netip.Addr{}
	for _, v6 := range []bool{false, true} {
		addrs[v6] = []netip.Addr{nodeAddr(w.a, v6), nodeAddr(w.b, v6)}
	}
	w.put(t,
		clusterIP("hosts", []string{"10.98.1.1", "fd00:10:98::101"}, bothPorts(90)...),
		endpointSlice("hosts-v4", "hosts", bothSlicePorts(port), addrs[false]...),
		endpointSlice("hosts-v6", "hosts", bothSlicePorts(port), addrs[true]...))
	families(t, func(t *testing.T, v6 bool) {
		for _, proto := range protos() {
			t.Run(proto, func(t *testing.T) {
				target := vip(pick(v6, "10.98.1.1", "fd00:10:98::101"), 90)
				w.inForce(t, ctx, proto, target, at(addrs[v6][0], port), at(addrs[v6][1], port))
				s := send(t, ctx, w.client.Netns, proto, target, "-count", enough, "-parallel", "4")
				if len(s.Servers) != 2 {
					t.Errorf("answered by %v, want both nodes", s.Servers)
				}
				// Its own node sees the pod, the other one this node.
				own, node := ip(w.client, v6).String(), addrs[v6][0].String()
				if s.Peers[own] != s.Servers["node-a"] || s.Peers[node] != s.Servers["node-b"] {
					t.Errorf("answered by %v, which saw %v; want node-a to see %s and node-b %s", s.Servers, s.Peers, own, node)
				}
				// A host process reaches both under its own address; on the
				// way the host itself sees the service's.
				for name, from := range map[string]*cluster.Netns{"socket": w.a.Netns, "way": w.a.InCgroupOf(w.Ext)} {
					s = send(t, ctx, from, proto, target, "-count", enough, "-parallel", "4")
					self, called := addrs[v6][0].String(), pick(v6, "10.98.1.1", "fd00:10:98::101")
					want := map[string]int{self: s.Servers["node-b"], called: s.Servers["node-a"]}
					if proto == "tcp" && name == "socket" {
						want = map[string]int{self: s.OK}
					}
					if len(s.Servers) != 2 || fmt.Sprint(s.Peers) != fmt.Sprint(want) {
						t.Errorf("from node-a, %s: answered by %v, which saw %v, want %v", name, s.Servers, s.Peers, want)
					}
				}
			})
		}
	})
}

// A host calls a NodePort at its own address, and the backend is a process of
// another node: the answer comes from outside under the host's own address.
func TestS1OwnNodePortToAnotherHost(t *testing.T) {
	w := shared(t)
	ctx := within(t, 90*time.Second)
	p, err := w.b.Serve(ctx, w.b.NodeName, deafPort+1)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Kill(context.Background())) })
	ips := []string{"10.98.1.2", "fd00:10:98::102"}
	w.put(t, nodePorts("own", ips, 30690, 30691),
		endpointSlice("own-v4", "own", bothSlicePorts(deafPort+1), nodeAddr(w.b, false)),
		endpointSlice("own-v6", "own", bothSlicePorts(deafPort+1), nodeAddr(w.b, true)))
	families(t, func(t *testing.T, v6 bool) {
		w.inForce(t, ctx, "udp", vip(pick(v6, ips[0], ips[1]), 85), at(nodeAddr(w.b, v6), deafPort+1))
		w.settled(t, ctx)
		for i, proto := range []string{"udp", "tcp"} {
			s := send(t, ctx, w.a.Netns, proto, at(nodeAddr(w.a, v6), uint16(30690+i)).String())
			if own := nodeAddr(w.a, v6).String(); s.Peers[own] != s.OK {
				t.Errorf("%s: %s saw %v, want %s alone", proto, w.b.NodeName, s.Peers, own)
			}
		}
	})
}

func nodeAddr(n *cluster.Node, v6 bool) netip.Addr {
	for _, p := range n.Config.Addrs {
		if p.Addr().Is6() == v6 {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

// What is sent to an address of the service range that no service owns, or to
// a port that a service lacks, ends here, with a reason of its own: the one is
// dropped, the other refused, and not a packet of it leaves the node.
func TestS8NoService(t *testing.T) {
	w := shared(t)
	// Somebody outside who believes that the service range is behind node-a.
	ctx := within(t, 60*time.Second)
	for _, r := range [][]string{{"10.98.0.0/16", "172.31.0.2"}, {"fd00:10:98::/112", "fd00:172:31::2"}} {
		_, err := w.Ext.Exec(ctx, "ip", "route", "replace", r[0], "via", r[1])
		ok(t, err)
		t.Cleanup(func() {
			if _, err := w.Ext.Exec(t.Context(), "ip", "route", "del", r[0]); err != nil && t.Context().Err() == nil {
				t.Error(err)
			}
		})
	}
	for _, c := range []struct {
		name, addr4, addr6 string
		port               uint16
		reason             string
	}{
		{"address", "10.98.77.77", "fd00:10:98::7777", 80, "drop_no_service"},
		{"port", web4, web6, 81, "drop_no_service_port"},
	} {
		families(t, func(t *testing.T, v6 bool) {
			for _, from := range []struct {
				name string
				ns   *cluster.Netns
				hook string
			}{{"pod", w.client.Netns, "from_pod"}, {"host", w.a.Netns, "to_overlay"}, {"outside", w.Ext, "to_overlay"}} {
				reason := c.reason
				if from.name == "outside" && reason == "drop_no_service_port" {
					from.hook = "from_netdev"
				}
				for _, proto := range protos() {
					t.Run(c.name+" "+from.name+" "+proto, func(t *testing.T) {
						dst := netip.MustParseAddr(pick(v6, c.addr4, c.addr6))
						tap, err := w.Tap(ctx)
						ok(t, err)
						defer tap.Close()
						before := readCounters(t, w.a)
						if reason == "drop_no_service" {
							silent(t, ctx, from.ns, proto, at(dst, c.port).String())
							atLeast(t, w.a, before, reason, from.hook, v6, 1)
						} else {
							w.rejected(t, ctx, from.ns, from.hook, proto, at(dst, c.port).String(), reason, v6)
						}
						w.closingPing(t, ctx, tap)
						leaked := tap.Matching(func(p *cluster.Packet) bool {
							h := p.Last()
							return h != nil && h.Dst == dst && !fromOutside(p)
						})
						if len(leaked) > 0 {
							t.Errorf("on the underlay: %v", leaked[0])
						}
					})
				}
			}
		})
	}
}

// fromOutside: sent by the client outside itself.
func fromOutside(p *cluster.Packet) bool {
	return p.Outer.Src == netip.MustParseAddr("172.31.0.1") || p.Outer.Src == netip.MustParseAddr("fd00:172:31::1")
}

// closingPing waits until the tap has seen all that was sent before: a frame
// sent after the others arrives after them.
func (w *world) closingPing(t *testing.T, ctx context.Context, tap *cluster.Capture) {
	t.Helper()
	for _, node := range w.Nodes {
		_, err := node.Ping(ctx, "172.31.0.1")
		ok(t, err)
		src := nodeAddr(node, false)
		_, err = tap.Find(ctx, "closing ping", func(p *cluster.Packet) bool {
			return p.Outer != nil && p.Inner == nil && p.Outer.Proto == 1 && p.Outer.Src == src
		})
		ok(t, err)
	}
}

// TCP and UDP services on one address and port have backends of their own.
func TestS10ProtocolsAreIndependent(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	slicesOf := func(proto string) []cluster.Object {
		if proto == "tcp" {
			return slicesFor("mixed-t", "mixed", bothSlicePorts(cluster.ServerPort)[:1], w.local)
		}
		return slicesFor("mixed-u", "mixed", bothSlicePorts(cluster.ServerPort)[1:], w.remote)
	}
	w.put(t, clusterIP("mixed", []string{"10.98.10.1", "fd00:10:98::a01"}, bothPorts(80)...))
	w.put(t, slicesOf("tcp")...)
	w.put(t, slicesOf("udp")...)
	want := map[string]*cluster.Pod{"tcp": w.local, "udp": w.remote}
	check := func(t *testing.T, v6 bool, protos ...string) {
		target := vip(pick(v6, "10.98.10.1", "fd00:10:98::a01"), 80)
		for _, proto := range protos {
			w.inForce(t, ctx, proto, target, atAll(v6, want[proto])...)
			s := send(t, ctx, w.client.Netns, proto, target, "-count", "16")
			if s.Servers[want[proto].PodName] != s.OK {
				t.Errorf("%s: answered by %v, want %s alone", proto, s.Servers, want[proto].PodName)
			}
		}
	}
	families(t, func(t *testing.T, v6 bool) { check(t, v6, "tcp", "udp") })
	// One without a backend leaves the other as it is.
	for _, gone := range protos() {
		ok(t, w.Manifests.Delete(slicesOf(gone)...))
		families(t, func(t *testing.T, v6 bool) {
			target := vip(pick(v6, "10.98.10.1", "fd00:10:98::a01"), 80)
			w.inForce(t, ctx, gone, target)
			w.rejected(t, ctx, w.client.Netns, "from_pod", gone, target, "drop_no_backend", v6)
			check(t, v6, map[string]string{"tcp": "udp", "udp": "tcp"}[gone])
		})
		ok(t, w.Manifests.Put(slicesOf(gone)...))
	}
}

// Services that are not this proxy's: nothing of them reaches the datapath,
// whether they came so or became so.
func TestS20SkippedServices(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	ips := []string{"10.98.20.1", "fd00:10:98::1401"}
	for _, c := range []struct {
		name   string
		change func(*corev1.Service)
	}{
		{"service-proxy-name", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "another"}
		}},
		{"headless label", func(s *corev1.Service) {
			s.Labels = map[string]string{corev1.IsHeadlessService: ""}
		}},
		{"headless", func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
		}},
		{"ExternalName", func(s *corev1.Service) {
			s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.org"}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain := clusterIP("skipped", ips, bothPorts(80)...)
			w.put(t, plain)
			w.put(t, slicesFor("skipped", "skipped", bothSlicePorts(cluster.ServerPort), w.local)...)
			works := func() {
				t.Helper()
				for _, v6 := range []bool{false, true} {
					target := vip(pick(v6, ips[0], ips[1]), 80)
					w.inForce(t, ctx, "tcp", target, atAll(v6, w.local)...)
					send(t, ctx, w.client.Netns, "tcp", target)
				}
			}
			works()
			skipped := plain.DeepCopy()
			c.change(skipped)
			ok(t, w.Manifests.Put(skipped))
			for _, v6 := range []bool{false, true} {
				target := vip(pick(v6, ips[0], ips[1]), 80)
				for _, proto := range protos() {
					w.absent(t, ctx, proto, target)
				}
				before := readCounters(t, w.a)
				silent(t, ctx, w.client.Netns, "tcp", target)
				atLeast(t, w.a, before, "drop_no_service", "from_pod", v6, 1)
			}
			if out, err := w.a.Podweir(ctx, "services"); err != nil || strings.Contains(out, "skipped") {
				t.Errorf("podweir services: %v\n%s", err, out)
			}
			ok(t, w.Manifests.Put(plain))
			works()
		})
	}
}

// Endpoints that are not ready count if the service says so; several slices,
// written by hand for a service without selector, with several ports each.
func TestS21Slices(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	// A second server in two pods, so that an address has two ports.
	const second = 9092
	for _, p := range []*cluster.Pod{w.local, w.remote} {
		srv, err := p.Serve(ctx, p.PodName+"-second", second)
		ok(t, err)
		t.Cleanup(func() { ok(t, srv.Kill(context.Background())) })
	}
	ports := []corev1.ServicePort{
		svcPort("one", corev1.ProtocolTCP, 80), svcPort("two", corev1.ProtocolTCP, 81), svcPort("one-u", corev1.ProtocolUDP, 80),
	}
	ips := []string{"10.98.21.1", "fd00:10:98::1501"}
	svc := clusterIP("byhand", ips, ports...)
	w.put(t, svc)
	all := []discoveryv1.EndpointPort{
		slicePort("one", corev1.ProtocolTCP, cluster.ServerPort), slicePort("two", corev1.ProtocolTCP, second),
		slicePort("one-u", corev1.ProtocolUDP, cluster.ServerPort),
	}
	// Three slices per family: two overlap (the key is address and port),
	// the third has one port only.
	w.put(t, slicesFor("byhand-1", "byhand", all, w.local)...)
	w.put(t, slicesFor("byhand-2", "byhand", all, w.local, w.remote)...)
	w.put(t, slicesFor("byhand-3", "byhand", all[:1], w.other)...)
	answers := func(t *testing.T, proto string, v6 bool, port uint16, want ...string) {
		t.Helper()
		s := send(t, ctx, w.client.Netns, proto, vip(pick(v6, ips[0], ips[1]), port), "-count", enough, "-parallel", "4")
		if got := slices.Sorted(maps.Keys(s.Servers)); !slices.Equal(got, want) {
			t.Errorf("%s port %d: answered by %v, want %v", proto, port, s.Servers, want)
		}
	}
	families(t, func(t *testing.T, v6 bool) {
		addr := pick(v6, ips[0], ips[1])
		w.inForce(t, ctx, "tcp", vip(addr, 80), atAll(v6, w.local, w.remote, w.other)...)
		w.inForce(t, ctx, "udp", vip(addr, 80), atAll(v6, w.local, w.remote)...)
		w.inForce(t, ctx, "tcp", vip(addr, 81), at(ip(w.local, v6), second), at(ip(w.remote, v6), second))
		answers(t, "tcp", v6, 80, "local", "other", "remote")
		answers(t, "udp", v6, 80, "local", "remote")
		answers(t, "tcp", v6, 81, "local-second", "remote-second")
	})
	// Slices change at run time: one goes, one gets another endpoint.
	ok(t, w.Manifests.Delete(slicesFor("byhand-2", "byhand", all, w.local, w.remote)...))
	ok(t, w.Manifests.Put(slicesFor("byhand-3", "byhand", all[:1], w.remote)...))
	families(t, func(t *testing.T, v6 bool) {
		addr := pick(v6, ips[0], ips[1])
		w.inForce(t, ctx, "tcp", vip(addr, 80), atAll(v6, w.local, w.remote)...)
		w.inForce(t, ctx, "tcp", vip(addr, 81), at(ip(w.local, v6), second))
		answers(t, "tcp", v6, 80, "local", "remote")
		answers(t, "tcp", v6, 81, "local-second")
	})

	// Not ready: no backend, unless the service publishes such addresses.
	no := false
	for _, o := range slicesFor("byhand-1", "byhand", all, w.local) {
		s := o.(*discoveryv1.EndpointSlice)
		s.Endpoints[0].Conditions.Ready = &no
		ok(t, w.Manifests.Put(s))
	}
	ok(t, w.Manifests.Delete(slicesFor("byhand-3", "byhand", all[:1], w.remote)...))
	families(t, func(t *testing.T, v6 bool) {
		w.inForce(t, ctx, "tcp", vip(pick(v6, ips[0], ips[1]), 80))
		w.rejected(t, ctx, w.client.Netns, "from_pod", "tcp", vip(pick(v6, ips[0], ips[1]), 80), "drop_no_backend", v6)
	})
	publish := svc.DeepCopy()
	publish.Spec.PublishNotReadyAddresses = true
	ok(t, w.Manifests.Put(publish))
	families(t, func(t *testing.T, v6 bool) {
		w.inForce(t, ctx, "tcp", vip(pick(v6, ips[0], ips[1]), 80), atAll(v6, w.local)...)
		answers(t, "tcp", v6, 80, "local")
	})
}

// Backends are chosen evenly: chi-square over 10,000 connections to four.
func TestS32Evenness(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	const second = 9093
	srv, err := w.remote.Serve(ctx, "remote-second", second)
	ok(t, err)
	t.Cleanup(func() { ok(t, srv.Kill(context.Background())) })
	ips := []string{"10.98.32.1", "fd00:10:98::2001"}
	w.put(t, clusterIP("even", ips, bothPorts(80)...))
	w.put(t, slicesFor("even-1", "even", bothSlicePorts(cluster.ServerPort), w.local, w.remote, w.other)...)
	w.put(t, slicesFor("even-2", "even", bothSlicePorts(second), w.remote)...)
	// Many source ports, so that few tuples come twice (one that is still
	// remembered keeps its backend and is no new choice), and none of those
	// that other cases use: a reply tuple that is taken costs a flow its port.
	ports := readSysctl(t, w.client.Netns, "net/ipv4/ip_local_port_range")
	ok(t, w.client.Sysctl("net/ipv4/ip_local_port_range", "1024 32767"))
	t.Cleanup(func() { ok(t, w.client.Sysctl("net/ipv4/ip_local_port_range", ports)) })
	families(t, func(t *testing.T, v6 bool) {
		target := vip(pick(v6, ips[0], ips[1]), 80)
		w.inForce(t, ctx, "udp", target, append(atAll(v6, w.local, w.remote, w.other), at(ip(w.remote, v6), second))...)
		s := send(t, ctx, w.client.Netns, "udp", target, "-count", "10000", "-parallel", "8")
		chi, expected := 0.0, float64(s.OK)/4
		for _, name := range []string{"local", "remote", "other", "remote-second"} {
			d := float64(s.Servers[name]) - expected
			chi += d * d / expected
		}
		t.Logf("%v: chi-square %.2f", s.Servers, chi)
		// Three degrees of freedom: an even choice is above once in 10^7.
		if chi > 35.4 || len(s.Servers) != 4 {
			t.Errorf("uneven: %v, chi-square %.1f", s.Servers, chi)
		}
	})
}

// A backend that leaves the list gets no new connection, while its
// established ones go on.
func TestS23BackendRemoved(t *testing.T) {
	w := shared(t)
	families(t, func(t *testing.T, v6 bool) {
		for _, leaving := range []*cluster.Pod{w.local, w.remote} {
			t.Run(leaving.PodName, func(t *testing.T) {
				ctx := within(t, 60*time.Second)
				staying := w.other
				ips := []string{"10.98.23.1", "fd00:10:98::1701"}
				target := vip(pick(v6, ips[0], ips[1]), 80)
				w.put(t, clusterIP("drain", ips, bothPorts(80)...))
				list := slicesFor("drain", "drain", bothSlicePorts(cluster.ServerPort), leaving)
				w.put(t, list...)
				w.inForce(t, ctx, "tcp", target, atAll(v6, leaving)...)
				stream, err := w.client.Stream(ctx, target)
				ok(t, err)
				ok(t, w.Manifests.Put(slicesFor("drain", "drain", bothSlicePorts(cluster.ServerPort), staying)...))
				w.inForce(t, ctx, "tcp", target, atAll(v6, staying)...)
				for _, proto := range protos() {
					s := send(t, ctx, w.client.Netns, proto, target, "-count", "32")
					if s.Servers[staying.PodName] != s.OK {
						t.Errorf("%s: answered by %v, want %s alone", proto, s.Servers, staying.PodName)
					}
				}
				progress(t, ctx, stream, 20)
				rep, err := stream.Stop(ctx)
				ok(t, err)
				if rep.Lost > 0 || rep.Error != "" || !slices.Equal(rep.Servers, []string{leaving.PodName}) {
					t.Errorf("the established connection: %+v", rep)
				}
				ok(t, w.Manifests.Delete(list...))
			})
		}
	})
}

// progress awaits so many more answers.
func progress(t *testing.T, ctx context.Context, s *cluster.Stream, more uint64) {
	t.Helper()
	r, err := s.Report(ctx)
	ok(t, err)
	goal := r.Received + more
	_, err = s.Await(ctx, fmt.Sprintf("%d answers", goal), func(r probe.StreamReport) bool { return r.Received >= goal })
	ok(t, err)
}

// Service ranges: of the flag, and of ServiceCIDR objects as they come and go.
func TestS33ServiceRange(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	families(t, func(t *testing.T, v6 bool) {
		t.Run("outside of all ranges", func(t *testing.T) {
			// Pods reach it all the same.
			addr := pick(v6, "10.96.5.5", "fd00:10:96::5")
			w.put(t, clusterIP("stray", []string{addr}, bothPorts(80)...))
			w.put(t, endpointSlice("stray", "stray", bothSlicePorts(cluster.ServerPort), ip(w.remote, v6)))
			w.inForce(t, ctx, "tcp", vip(addr, 80), atAll(v6, w.remote)...)
			send(t, ctx, w.client.Netns, "tcp", vip(addr, 80))
		})
		t.Run("flag", func(t *testing.T) {
			before := readCounters(t, w.a)
			silent(t, ctx, w.client.Netns, "udp", vip(pick(v6, "10.98.200.1", "fd00:10:98::c801"), 53))
			atLeast(t, w.a, before, "drop_no_service", "from_pod", v6, 1)
		})
		t.Run("object", func(t *testing.T) {
			prefix := pick(v6, "10.99.0.0/16", "fd00:10:99::/112")
			target := vip(pick(v6, "10.99.0.9", "fd00:10:99::9"), 53)
			dst := netip.MustParseAddrPort(target).Addr()
			leaks := func(p *cluster.Packet) bool { return p.Outer != nil && p.Outer.Dst == dst }
			// Without the object the address is one of the world.
			tap, err := w.Tap(ctx)
			ok(t, err)
			defer tap.Close()
			silent(t, ctx, w.client.Netns, "udp", target)
			_, err = tap.Find(ctx, "packet to the world", leaks)
			ok(t, err)

			obj := serviceCIDR("more", prefix)
			w.put(t, obj)
			for _, n := range w.Nodes {
				eventually(t, ctx, func() error { return hasRoute(n, prefix, "podweir.vxlan") })
			}
			tap2, err := w.Tap(ctx)
			ok(t, err)
			defer tap2.Close()
			for _, from := range []struct {
				ns   *cluster.Netns
				hook string
			}{{w.client.Netns, "from_pod"}, {w.a.Netns, "to_overlay"}} {
				before := readCounters(t, w.a)
				silent(t, ctx, from.ns, "udp", target)
				atLeast(t, w.a, before, "drop_no_service", from.hook, v6, 1)
			}
			w.closingPing(t, ctx, tap2)
			if l := tap2.Matching(leaks); len(l) > 0 {
				t.Errorf("on the underlay: %v", l[0])
			}
			// A host process reaches a service in that range.
			frontend := netip.MustParseAddrPort(target).Addr().String()
			w.put(t, clusterIP("in-range", []string{frontend}, bothPorts(80)...))
			w.put(t, endpointSlice("in-range", "in-range", bothSlicePorts(cluster.ServerPort), ip(w.remote, v6)))
			w.inForce(t, ctx, "tcp", vip(frontend, 80), atAll(v6, w.remote)...)
			send(t, ctx, w.a.Netns, "tcp", vip(frontend, 80))
			send(t, ctx, w.client.Netns, "tcp", vip(frontend, 80))

			ok(t, w.Manifests.Delete(obj))
			for _, n := range w.Nodes {
				eventually(t, ctx, func() error {
					if hasRoute(n, prefix, "podweir.vxlan") == nil {
						return fmt.Errorf("%s still has a route to %s", n.NodeName, prefix)
					}
					return nil
				})
			}
		})
	})
}
