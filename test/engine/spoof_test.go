package engine

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// vtep is a tunnel peer in user space: a registered node whose packets the
// test writes.
type vtep struct {
	*net.UDPConn
	node netip.Addr
	to   *cluster.Node
}

// newVTEP adds a node with this address that is nothing but a socket.
func (w *world) newVTEP(ctx context.Context, t *testing.T, name, addr string, to *cluster.Node) *vtep {
	t.Helper()
	host := w.host(t, ctx, name, netip.MustParsePrefix(addr))
	// The node may be behind the router.
	ok(t, run(ctx, host, "ip route replace default via "+extOf(families[0]).String()))
	v := &vtep{node: netip.MustParsePrefix(addr).Addr(), to: to}
	obj := nodeObject(name, []netip.Addr{v.node}, nil)
	ok(t, w.Manifests.Put(obj))
	t.Cleanup(func() { ok(t, w.Manifests.Delete(obj)) })
	v.UDPConn = udp(t, host, port(v.node, 4789), "", nil)
	awaitPeer(t, ctx, to, v.node)
	return v
}

// send sends an inner packet to the peer's node.
func (v *vtep) send(t *testing.T, p packet) {
	t.Helper()
	addr := v.to.Config.Addrs[0].Addr()
	p.dstMAC = tunnel.MAC(addr)
	if p.srcMAC == nil {
		p.srcMAC = tunnel.MAC(v.node)
	}
	_, err := v.WriteToUDPAddrPort(vxlan(p.frame()), netip.AddrPortFrom(addr, 4789))
	ok(t, err)
}

// A packet with the tuple of a live flow from a place that is not the flow's
// (N13): another pod, the wire, another tunnel peer. It is counted and never
// delivered, and the flow goes on.
func TestSpoofedLiveTuples(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	peer := w.newVTEP(ctx, t, "peer", "172.31.0.5/24", w.a)
	pod, wire := rawSocket(t, w.local.Netns, "eth0"), rawSocket(t, w.Ext, "eth0")
	podGW, nodeMAC := hostMAC(t, w.local), macOf(t, w.a.Netns, "eth0")
	for _, f := range families {
		for _, proto := range []byte{6, 17} {
			t.Run(fmt.Sprint(f.name, " protocol ", proto), func(t *testing.T) {
				here, there := f.of(w.client), f.of(w.remote)
				to, number := port(there, serverPort), w.port()
				var conn net.Conn
				if proto == 6 {
					echoTCP(t, w.remote.Netns, to)
					c, err := dial(ctx, w.client.Netns, port(here, number), to, nil)
					ok(t, err)
					t.Cleanup(func() { c.(*net.TCPConn).SetLinger(0); c.Close() })
					conn = c
				} else {
					defer echoUDP(t, w.remote.Netns, to).Close()
					conn = udp(t, w.client.Netns, port(here, number), to, nil)
				}
				ok(t, talk(conn, "one"))
				ok(t, talk(conn, "two"))
				onClient, err := w.client.Capture(ctx, "eth0")
				ok(t, err)
				onRemote, err := w.remote.Capture(ctx, "eth0")
				ok(t, err)
				forward := packet{src: here, dst: there, sport: number, dport: serverPort, proto: proto, flags: ack | psh, payload: []byte("SPOOFED forward")}
				reply := packet{src: there, dst: here, sport: serverPort, dport: number, proto: proto, flags: ack | psh, payload: []byte("SPOOFED reply")}
				before := counters(t, w.a)
				for _, p := range []packet{forward, reply} {
					p.srcMAC, p.dstMAC = pod.mac, podGW
					ok(t, pod.send(p.frame()))
				}
				reset := reply // would end the flow
				reset.flags = rst | ack
				for _, p := range []packet{reply, reset} {
					p.srcMAC, p.dstMAC = wire.mac, nodeMAC
					ok(t, wire.send(p.frame()))
					p.srcMAC = nil
					peer.send(t, p)
				}
				// From the wire, and out of the peer's tunnel.
				want := counts{"drop_spoofed_flow/from_pod": 2, "drop_spoofed_flow/from_netdev": 4}
				eventually(t, ctx, func() error {
					got := counters(t, w.a).since(before)
					for k, v := range want {
						if got[k] != v {
							return fmt.Errorf("%s is %d, want %d; drops %v", k, got[k], v, got.drops())
						}
					}
					return nil
				})
				for i := range 3 {
					ok(t, talk(conn, fmt.Sprint("afterwards ", i)))
				}
				_, err = onClient.Find(ctx, "last answer", func(p *cluster.Packet) bool { return bytes.Contains(p.Frame, []byte("afterwards 2")) && !p.Outgoing })
				ok(t, err)
				for _, c := range []*cluster.Capture{onClient, onRemote} {
					for _, p := range c.Matching(func(p *cluster.Packet) bool { return bytes.Contains(p.Frame, []byte("SPOOFED")) }) {
						t.Errorf("delivered: %v", p)
					}
					ok(t, c.Close())
				}
			})
		}
	}
}

// The rest of N13: a pod under a name that is nobody's flow, a pod that
// speaks to a node's tunnel port, a tunnel peer that is no node, a wrong VNI,
// and somebody else's pod by the tunnel.
func TestSpoofedSources(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	stranger := w.host(t, ctx, "stranger", netip.MustParsePrefix("172.31.0.66/24"))
	outside := udp(t, stranger, "", "172.31.0.2:4789", nil)
	peer := w.newVTEP(ctx, t, "peer2", "172.31.0.6/24", w.a)
	pod := rawSocket(t, w.local.Netns, "eth0")
	gw := hostMAC(t, w.local)
	kernel := w.kernel.v4
	base := packet{srcMAC: pod.mac, dstMAC: gw, src: w.local.IPv4(), dst: w.client.IPv4(), sport: 5, dport: 6, proto: 17, payload: []byte("SPOOFED")}
	capture, err := w.client.Capture(ctx, "eth0")
	ok(t, err)
	check := func(what, reason string, send func()) {
		t.Helper()
		before := counters(t, w.a)
		send()
		eventually(t, ctx, func() error {
			if got := counters(t, w.a).since(before); got[reason] != 1 {
				return fmt.Errorf("%s: want one %s, got drops %v", what, reason, got.drops())
			}
			return nil
		})
	}
	for _, src := range []string{"10.244.80.65", "10.244.80.200", "10.244.158.65", "172.31.0.2", "8.8.8.8"} {
		check("pod as "+src, "drop_spoofed_source/from_pod", func() {
			p := base
			p.src = netip.MustParseAddr(src)
			ok(t, pod.send(p.frame()))
		})
	}
	for _, dst := range []string{"172.31.0.2", "172.31.0.3"} {
		check("pod to the tunnel port of "+dst, "drop_pod_vxlan/from_pod", func() {
			p := base
			p.dst, p.dport, p.payload = netip.MustParseAddr(dst), 4789, vxlan(base.frame())
			ok(t, pod.send(p.frame()))
		})
	}
	inner := base
	inner.src, inner.dstMAC = kernel, tunnel.MAC(w.a.Config.Addrs[0].Addr())
	check("tunnel from a stranger", "drop_unknown_peer/from_overlay", func() {
		_, err := outside.Write(vxlan(inner.frame()))
		ok(t, err)
	})
	check("a node for another node's pod", "drop_spoofed_source/from_netdev", func() {
		p := inner
		p.srcMAC = nil
		peer.send(t, p)
	})
	check("a node for a pod of ours", "drop_spoofed_source/from_netdev", func() {
		p := inner
		p.srcMAC, p.src = nil, w.local.IPv4()
		peer.send(t, p)
	})
	check("wrong VNI", "drop_wrong_vni/from_overlay", func() {
		p := inner
		p.src = peer.node
		frame := vxlan(p.frame())
		frame[6] = 1
		_, err := peer.WriteToUDPAddrPort(frame, netip.MustParseAddrPort("172.31.0.2:4789"))
		ok(t, err)
	})
	// A last, honest one: the capture has seen everything before it.
	echo := udp(t, w.client.Netns, port(w.client.IPv4(), serverPort), "", nil)
	_, err = udp(t, w.local.Netns, "", port(w.client.IPv4(), serverPort), nil).Write([]byte("honest"))
	ok(t, err)
	ok(t, echo.SetReadDeadline(soon()))
	_, _, err = echo.ReadFromUDP(make([]byte, 100))
	ok(t, err)
	for _, p := range capture.Matching(func(p *cluster.Packet) bool { return bytes.Contains(p.Frame, []byte("SPOOFED")) }) {
		t.Errorf("delivered: %v", p)
	}
	ok(t, capture.Close())
}
