package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

func podMTU(ctx context.Context, t *testing.T, p *cluster.Pod, want int) {
	t.Helper()
	out, err := p.Exec(ctx, "ip", "link", "show", "eth0")
	ok(t, err)
	if !strings.Contains(out, fmt.Sprintf(" mtu %d ", want)) {
		t.Errorf("MTU of %s: %s, want %d", p.PodName, out, want)
	}
}

// exchange is TCP and UDP from one namespace to a pod, directly and, for
// pods, by a service. It returns what the tap saw.
func exchange(ctx context.Context, t *testing.T, w *world, from *cluster.Netns, to backend, f family, n int) []*cluster.Packet {
	t.Helper()
	server := to.(*cluster.Pod)
	at := port(f.of(to), serverPort)
	tap, err := w.Tap(ctx)
	ok(t, err)
	l := listen(t, server.Netns, at, nil)
	transfer(ctx, t, from, l, at, n, nil)
	ok(t, l.Close())
	defer echoUDP(t, server.Netns, at).Close()
	u := udp(t, from, "", at, nil)
	datagrams(t, u, 20, 1200)
	// What was sent has passed the tap when the last answer is in it.
	_, err = tap.Find(ctx, "last answer", func(p *cluster.Packet) bool {
		l := p.Last()
		return l != nil && l.Proto == 17 && l.SPort == serverPort && len(l.Payload) == 1
	})
	ok(t, err)
	ok(t, tap.Close())
	for _, p := range tap.Matching(func(p *cluster.Packet) bool { return len(p.BadChecksums) > 0 }) {
		t.Errorf("on the wire: %v", p)
	}
	return tap.Packets()
}

// carried counts the packets between pods, in a tunnel and bare, and the
// fragments, which there must be none of.
func carried(t *testing.T, packets []*cluster.Packet, a, b netip.Addr) (tunnelled, bare int) {
	t.Helper()
	for _, p := range packets {
		l := p.Last()
		if l == nil {
			continue
		}
		if p.Outer.Fragment || l.Fragment {
			t.Errorf("fragment: %v", p)
		}
		if l.Src != a && l.Src != b {
			continue
		}
		if p.Inner != nil {
			tunnelled++
		} else {
			bare++
		}
	}
	return tunnelled, bare
}

// Direct routing (N5, Never): nothing is encapsulated, pods have the node's
// MTU, the host reaches remote pods, services work.
func TestDirectRouting(t *testing.T) {
	w := own(t, cluster.Config{AgentArgs: []string{"--routing-mode", "direct"}})
	ctx := within(t, 2*time.Minute)
	ok(t, w.start(ctx))
	podMTU(ctx, t, w.client, 1500)
	w.service(t, ctx, "web", "10.98.0.1", "fd00:10:98::1", w.remote)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			before := counters(t, w.a)
			tunnelled, bare := carried(t, exchange(ctx, t, w, w.client.Netns, w.remote, f, 1<<20), f.of(w.client), f.of(w.remote))
			got := counters(t, w.a).since(before)
			if tunnelled > 0 || bare < 50 {
				t.Errorf("%d packets in a tunnel, %d bare", tunnelled, bare)
			}
			if got["fwd_direct/from_pod/"+f.name] < 30 || got["fwd_local/from_netdev/"+f.name] < 30 || got["fwd_tunnel"]+got["fwd_encap"]+got["fwd_decap"] != 0 || len(got.drops()) > 0 {
				t.Errorf("%v", got)
			}
			// A whole packet of the node's MTU.
			headers := 28
			if f.name == "ipv6" {
				headers = 48
			}
			echoUDP(t, w.remote.Netns, port(f.of(w.remote), 8090))
			datagrams(t, udp(t, w.client.Netns, "", port(f.of(w.remote), 8090), nil), 1, 1500-headers)

			// A service from a pod and from the host, and the host to the pod.
			vip := f.pick("10.98.0.1", "fd00:10:98::1")
			l := listen(t, w.remote.Netns, port(f.of(w.remote), serverPort), nil)
			transfer(ctx, t, w.client.Netns, l, port(vip, 80), 1<<18, nil)
			transfer(ctx, t, w.a.Netns, l, port(f.of(w.remote), serverPort), 1<<18, nil)
			transfer(ctx, t, w.a.Netns, l, port(vip, 80), 1<<18, nil)
		})
	}
	t.Run("sources", func(t *testing.T) { directSources(ctx, t, w) })
	t.Run("unallocated", func(t *testing.T) { w.unallocated(ctx, t) })
	checksumErrors(t, w.client.Netns, w.remote.Netns, w.a.Netns, w.b.Netns)
}

// directSources: with direct routing a pod's packet arrives bare, and nothing on it says
// which host sent it. Checked: sources that live on this node, this node's
// own addresses, services, and nobody's. Not checked: whether a host on the
// wire that uses the address of another node's pod, or of another node, is
// that node. Who wants that needs a network that filters, or the tunnel.
func directSources(ctx context.Context, t *testing.T, w *world) {
	wire := rawSocket(t, w.Ext, "eth0")
	mac := macOf(t, w.a.Netns, "eth0")
	server := udp(t, w.client.Netns, port(w.client.IPv4(), serverPort), "", nil)
	inject := func(src string) counts {
		t.Helper()
		before := counters(t, w.a)
		ok(t, wire.send(packet{
			srcMAC: wire.mac, dstMAC: mac, src: netip.MustParseAddr(src), dst: w.client.IPv4(),
			sport: 5000, dport: serverPort, proto: 17, payload: []byte(src),
		}.frame()))
		var got counts
		eventually(t, ctx, func() error {
			got = counters(t, w.a).since(before)
			if len(got.drops()) == 0 && got["fwd_local/from_netdev"] == 0 {
				return fmt.Errorf("nothing became of it: %v", got)
			}
			return nil
		})
		return got
	}
	for src, reason := range map[string]string{
		"10.244.80.66": "drop_spoofed_source", // a pod of this node
		"10.244.80.99": "drop_spoofed_source", // this node's range, nobody
		"172.31.0.2":   "drop_spoofed_source", // this node
		"10.98.0.1":    "drop_spoofed_source", // the service range
		"127.0.0.1":    "drop_bad_source",
		"224.0.0.1":    "drop_bad_source",
	} {
		if got := inject(src); got[reason+"/from_netdev"] != 1 || got["fwd_local"] != 0 {
			t.Errorf("from %s: %v, want %s", src, got, reason)
		}
	}
	buf := make([]byte, 100)
	for _, src := range []string{"10.244.158.65", "10.244.158.99", "172.31.0.3", "172.31.0.1"} {
		if got := inject(src); got["fwd_local/from_netdev"] != 1 {
			t.Errorf("from %s: %v, want it delivered: a host like any on the wire", src, got)
			continue
		}
		ok(t, server.SetReadDeadline(soon()))
		n, _, err := server.ReadFromUDP(buf)
		if err != nil || string(buf[:n]) != src {
			t.Errorf("from %s: %q, %v", src, buf[:n], err)
		}
	}
}

// unallocated: what is for an address of a node's pod range that no pod has
// ends on that node (N2), from its own pods and from another's.
func (w *world) unallocated(ctx context.Context, t *testing.T) {
	for _, f := range families {
		nobody := f.pick("10.244.80.200", "fd00:10:244:50::c8")
		for _, c := range []struct {
			from  *cluster.Pod
			times int // that it is seen on the underlay
		}{{w.client, 0}, {w.remote, 1}} {
			t.Run(f.name+" from "+c.from.PodName, func(t *testing.T) {
				tap, err := w.Tap(ctx)
				ok(t, err)
				defer tap.Close()
				_, err = udp(t, c.from.Netns, "", port(nobody, serverPort), nil).Write([]byte("anybody?"))
				ok(t, err)
				seen := func(p *cluster.Packet) bool {
					l := p.Last()
					return l != nil && l.Proto == unix.IPPROTO_UDP && l.Dst == nobody
				}
				if c.times > 0 {
					_, err = tap.Find(ctx, "a packet to nobody", seen)
					ok(t, err)
				}
				for range 2 { // what was sent on has passed the tap before the second
					_, err = w.a.Ping(ctx, "172.31.0.1")
					ok(t, err)
				}
				eventually(t, ctx, func() error {
					pings := tap.Matching(func(p *cluster.Packet) bool {
						return p.Outer != nil && p.Inner == nil && p.Outer.Proto == unix.IPPROTO_ICMP && p.Outer.Src == nodeAddr(families[0], w.a)
					})
					if len(pings) < 2 {
						return errors.New("the capture is behind")
					}
					return nil
				})
				if got := tap.Matching(seen); len(got) != c.times {
					t.Errorf("%d packets on the underlay, want %d: %v", len(got), c.times, got)
				}
			})
		}
	}
}

// threeNodes are the plan's two and one for moveFar.
func threeNodes() []cluster.NodeConfig {
	return append(cluster.DefaultNodes(), cluster.NodeConfig{
		Name:     "node-c",
		Addrs:    []netip.Prefix{netip.MustParsePrefix("172.31.1.2/24"), netip.MustParsePrefix("fd00:172:31:1::2/64")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.90.0/24"), netip.MustParsePrefix("fd00:10:244:5a::/64")},
	})
}

// moveFar takes the third node from the switch to the router's other side.
func (w *world) moveFar(ctx context.Context, t *testing.T) {
	t.Helper()
	far := w.Node("node-c")
	for key, value := range map[string]string{"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1"} {
		ok(t, w.Ext.Sysctl(key, value))
	}
	ok(t, run(ctx, far.Netns, "ip link del eth0"))
	ok(t, run(ctx, w.Ext, `
		ip link add eth1 type veth peer name eth0 netns `+far.Name+`
		ip link set eth1 up
		ip addr add 172.31.1.1/24 dev eth1
		ip addr add fd00:172:31:1::1/64 dev eth1 nodad`))
	ok(t, run(ctx, far.Netns, `
		ip link set eth0 up
		ip addr add 172.31.1.2/24 dev eth0
		ip addr add fd00:172:31:1::2/64 dev eth0 nodad
		ip route add default via 172.31.1.1
		ip route add default via fd00:172:31:1::1`))
}

// Cross-subnet (N5): nodes on one link route, a node behind a router gets the
// tunnel, in both directions and by services.
func TestCrossSubnet(t *testing.T) {
	w := own(t, cluster.Config{Nodes: threeNodes(), AgentArgs: []string{"--routing-mode", "cross-subnet"}})
	ctx := within(t, 2*time.Minute)
	w.moveFar(ctx, t)
	obj := podObject("distant", "node-c", "10.244.90.65", "fd00:10:244:5a::65")
	ok(t, w.Manifests.Put(obj))
	ok(t, w.start(ctx))
	distant, err := w.AddPod(ctx, obj)
	ok(t, err)
	for _, p := range []*cluster.Pod{w.client, w.remote, distant} {
		podMTU(ctx, t, p, 1450)
	}
	w.service(t, ctx, "far", "10.98.0.2", "fd00:10:98::2", distant)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			tunnelled, bare := carried(t, exchange(ctx, t, w, w.client.Netns, w.remote, f, 1<<20), f.of(w.client), f.of(w.remote))
			if tunnelled > 0 || bare < 50 {
				t.Errorf("on one link: %d packets in a tunnel, %d bare", tunnelled, bare)
			}
			for _, way := range []struct{ from, to *cluster.Pod }{{w.client, distant}, {distant, w.remote}} {
				tunnelled, bare = carried(t, exchange(ctx, t, w, way.from.Netns, way.to, f, 1<<20), f.of(way.from), f.of(way.to))
				if tunnelled < 50 || bare > 0 {
					t.Errorf("%s to %s, by a router: %d packets in a tunnel, %d bare", way.from.PodName, way.to.PodName, tunnelled, bare)
				}
			}
			got := counters(t, w.a)
			if got["fwd_direct/from_pod/"+f.name] < 30 || got["fwd_encap/from_pod/"+f.name] < 30 || len(got.drops()) > 0 {
				t.Errorf("%v", got)
			}
			l := listen(t, distant.Netns, port(f.of(distant), serverPort), nil)
			vip := f.pick("10.98.0.2", "fd00:10:98::2")
			transfer(ctx, t, w.client.Netns, l, port(vip, 80), 1<<18, nil)
			transfer(ctx, t, w.a.Netns, l, port(vip, 80), 1<<18, nil)
			transfer(ctx, t, w.b.Netns, l, port(f.of(distant), serverPort), 1<<18, nil)
			ok(t, l.Close())
			l = listen(t, w.remote.Netns, port(f.of(w.remote), serverPort), nil)
			transfer(ctx, t, w.a.Netns, l, port(f.of(w.remote), serverPort), 1<<18, nil)
		})
	}
	// Bare packets are not taken from behind the router, tunnelled ones not
	// refused: the node there is known as one to be reached by the tunnel.
	wire := rawSocket(t, w.Ext, "eth0")
	before := counters(t, w.a)
	ok(t, wire.send(packet{
		srcMAC: wire.mac, dstMAC: macOf(t, w.a.Netns, "eth0"), src: distant.IPv4(), dst: w.client.IPv4(),
		sport: 5000, dport: serverPort, proto: 17, payload: []byte("bare"),
	}.frame()))
	eventually(t, ctx, func() error {
		if got := counters(t, w.a).since(before); got["drop_spoofed_source/from_netdev"] != 1 {
			return fmt.Errorf("a tunnelled node's pod, bare on the wire: %v", got)
		}
		return nil
	})
	checksumErrors(t, w.client.Netns, w.remote.Netns, distant.Netns, w.a.Netns)
}
