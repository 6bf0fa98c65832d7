package engine

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

const protoIPIP = 4

// inIPIP counts the packets between two addresses by what carries them;
// fragments there must be none of.
func inIPIP(t *testing.T, packets []*cluster.Packet, a, b netip.Addr) (ipip, vxlan, bare int) {
	t.Helper()
	for _, p := range packets {
		l := p.Last()
		if l == nil || l.Src != a && l.Src != b {
			continue
		}
		if p.Outer.Fragment || l.Fragment {
			t.Errorf("fragment: %v", p)
		}
		switch {
		case p.Inner == nil:
			bare++
		case p.Outer.Proto == protoIPIP:
			ipip++
			// Not to be fragmented on the way, by a node's address, TTL of its own.
			if p.Outer.TTL != 64 || p.Frame[14] != 0x45 || p.Frame[20] != 0x40 || p.Frame[21] != 0 || !strings.HasPrefix(p.Outer.Src.String(), "172.31.0.") {
				t.Errorf("outer header % x: %v", p.Frame[14:34], p)
			}
		default:
			vxlan++
		}
	}
	return ipip, vxlan, bare
}

// IPv4 in IPv4: whatever the devices on the way leave to each other, what
// arrives is what was sent, in IPv4 alone, past the devices on both nodes.
func TestIPIP(t *testing.T) {
	w := own(t, cluster.Config{AgentArgs: []string{"--routing-mode", "ipip"}})
	ctx := within(t, 4*time.Minute)
	ok(t, w.start(ctx))
	podMTU(ctx, t, w.client, 1480)
	out, err := w.client.Exec(ctx, "ip", "-6", "route", "show", "default")
	ok(t, err)
	if !strings.Contains(out, "mtu 1450") {
		t.Errorf("default route of IPv6, which goes by VXLAN: %q, want an MTU of 1450", out)
	}
	w.service(t, ctx, "web", "10.98.0.1", "fd00:10:98::1", w.remote)
	offload := func(pods, nodes string) {
		t.Helper()
		for _, n := range []*cluster.Netns{w.client.Netns, w.remote.Netns} {
			ok(t, run(context.Background(), n, "ethtool -K eth0 "+pods))
		}
		for _, n := range []*cluster.Node{w.a, w.b} {
			ok(t, run(context.Background(), n.Netns, "ethtool -K eth0 "+nodes))
		}
	}
	for _, f := range families {
		for _, c := range []struct{ name, pods, nodes string }{
			{"as it is", "tx on tso on gso on", "tx on tso on gso on gro off"},
			{"pods compute checksums", "tx off", "tx on tso on gso on gro off"},
			{"nodes compute checksums", "tx on tso on gso on", "tx off gro off"},
			{"segmented on the wire", "tx on tso on gso on", "tx on tso off gso off gro off"},
			{"segmented on the wire, put together", "tx on tso on gso on", "tx on tso off gso off gro on"},
		} {
			t.Run(f.name+" "+c.name, func(t *testing.T) {
				offload(c.pods, c.nodes)
				before, beforeB := counters(t, w.a), counters(t, w.b)
				packets := exchange(ctx, t, w, w.client.Netns, w.remote, f, 1<<20)
				ipip, vxlan, bare := inIPIP(t, packets, f.of(w.client), f.of(w.remote))
				got, gotB := counters(t, w.a).since(before), counters(t, w.b).since(beforeB)
				sent := got["fwd_ipip/from_pod/"+f.name]
				if f.name == "ipv6" {
					ipip, vxlan, sent = vxlan, ipip, got["fwd_encap/from_pod/"+f.name]
				}
				if ipip < 50 || vxlan+bare > 0 {
					t.Errorf("%d packets as they should, %d otherwise, %d bare", ipip, vxlan, bare)
				}
				if sent < 30 || gotB["fwd_decap/from_netdev/"+f.name] < 30 || got["fwd_tunnel"]+gotB["fwd_tunnel"]+got["fwd_local/from_overlay"]+gotB["fwd_local/from_overlay"] != 0 || len(got.drops())+len(gotB.drops()) > 0 {
					t.Errorf("first node %v\nsecond %v", got, gotB)
				}
			})
		}
	}
	offload("tx on tso on gso on", "tx on tso on gso on gro off")
	for _, f := range families {
		t.Run(f.name+" ways", func(t *testing.T) { w.ipipWays(ctx, t, f) })
	}
	t.Run("datagrams in one packet", func(t *testing.T) { w.ipipSegments(t) })
	t.Run("sources", func(t *testing.T) { w.ipipSources(ctx, t) })
	t.Run("unallocated", func(t *testing.T) { w.unallocated(ctx, t) })
	t.Run("a pod that forwards", w.podThatForwards)
	checksumErrors(t, w.client.Netns, w.remote.Netns, w.a.Netns, w.b.Netns)
}

// ipipWays: full packets, services, the host to a pod and back, a pod to the
// other host.
func (w *world) ipipWays(ctx context.Context, t *testing.T, f family) {
	most := 1480 - 28
	if f.name == "ipv6" {
		most = 1450 - 48
	}
	way := map[string]string{"ipv4": "fwd_ipip", "ipv6": "fwd_encap"}[f.name] + "/from_pod"
	echoUDP(t, w.remote.Netns, port(f.of(w.remote), 8090))
	u := udp(t, w.client.Netns, "", port(f.of(w.remote), 8090), nil)
	datagrams(t, u, 1, 100)
	before := counters(t, w.a)
	datagrams(t, u, 1, most)
	counters(t, w.a).since(before).want(t, "a full packet", counts{way: 1})

	vip := f.pick("10.98.0.1", "fd00:10:98::1")
	l := listen(t, w.remote.Netns, port(f.of(w.remote), serverPort), nil)
	transfer(ctx, t, w.client.Netns, l, port(vip, 80), 1<<18, nil)
	transfer(ctx, t, w.a.Netns, l, port(f.of(w.remote), serverPort), 1<<18, nil)
	transfer(ctx, t, w.a.Netns, l, port(vip, 80), 1<<18, nil)
	host := listen(t, w.b.Netns, port(nodeAddr(f, w.b), 8091), nil)
	transfer(ctx, t, w.client.Netns, host, port(nodeAddr(f, w.b), 8091), 1<<18, nil)
	datagrams(t, udp(t, w.a.Netns, "", port(f.of(w.remote), 8090), nil), 3, 1400)
}

// ipipSegments: one write of many datagrams (UDP_SEGMENT).
func (w *world) ipipSegments(t *testing.T) {
	w.segments(t, w.remote.IPv4(), counts{"fwd_ipip/from_pod": 1}, counts{"fwd_decap/from_netdev": 1})
}

// ipipSources: from nodes alone, with what lives there; never from a pod.
func (w *world) ipipSources(ctx context.Context, t *testing.T) {
	server := udp(t, w.client.Netns, port(w.client.IPv4(), serverPort), "", nil)
	wire, pod := rawSocket(t, w.Ext, "eth0"), rawSocket(t, w.remote.Netns, "eth0")
	toA := macOf(t, w.a.Netns, "eth0")
	gw := hostMAC(t, w.remote)
	a, b := w.a.Config.Addrs[0].Addr(), w.b.Config.Addrs[0].Addr()
	inner := func(src netip.Addr) []byte {
		p := packet{src: src, dst: w.client.IPv4(), sport: 5000, dport: serverPort, proto: 17, payload: []byte(src.String())}
		return p.frame()[14:]
	}
	for _, c := range []struct {
		name   string
		by     *frames
		outer  packet
		inside netip.Addr
		node   *cluster.Node
		want   string
	}{
		{"nobody", wire, packet{srcMAC: wire.mac, dstMAC: toA, src: netip.MustParseAddr("172.31.0.1"), dst: a}, w.remote.IPv4(), w.a, "pass/from_netdev"},
		{"a node, with this node's pod", wire, packet{srcMAC: wire.mac, dstMAC: toA, src: b, dst: a}, w.client.IPv4(), w.a, "drop_spoofed_source/from_netdev"},
		{"a node, with the world's", wire, packet{srcMAC: wire.mac, dstMAC: toA, src: b, dst: a}, netip.MustParseAddr("203.0.113.7"), w.a, "drop_spoofed_source/from_netdev"},
		{"a pod", pod, packet{srcMAC: pod.mac, dstMAC: gw, src: w.remote.IPv4(), dst: a}, w.remote.IPv4(), w.b, "drop_pod_ipip/from_pod"},
		{"a pod as its node", pod, packet{srcMAC: pod.mac, dstMAC: gw, src: b, dst: a}, w.remote.IPv4(), w.b, "drop_spoofed_source/from_pod"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.outer.proto, c.outer.payload = protoIPIP, inner(c.inside)
			before := counters(t, c.node)
			ok(t, c.by.send(c.outer.frame()))
			eventually(t, ctx, func() error {
				if got := counters(t, c.node).since(before); got[c.want] == 0 {
					return fmt.Errorf("%v, want %s", got, c.want)
				}
				return nil
			})
		})
	}
	// The only one that gets through, after all of them.
	honest := packet{srcMAC: wire.mac, dstMAC: toA, src: b, dst: a, proto: protoIPIP, payload: inner(w.remote.IPv4())}
	ok(t, wire.send(honest.frame()))
	buf := make([]byte, 100)
	ok(t, server.SetReadDeadline(soon()))
	n, from, err := server.ReadFromUDP(buf)
	if err != nil || string(buf[:n]) != w.remote.IPv4().String() || from.Port != 5000 {
		t.Errorf("first that arrived: %q from %v, %v", buf[:n], from, err)
	}
	ok(t, server.SetReadDeadline(time.Now()))
	if n, _, err := server.ReadFromUDP(buf); err == nil {
		t.Errorf("and %q", buf[:n])
	}
}
