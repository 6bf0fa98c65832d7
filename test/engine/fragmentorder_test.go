package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

// orders are ways in which the fragments of two datagrams can arrive.
func orders(a, b [][]byte) map[string][][]byte {
	rev := func(f [][]byte) [][]byte { r := slices.Clone(f); slices.Reverse(r); return r }
	var mixed, reversed [][]byte
	for i := range a {
		mixed = append(mixed, a[i], b[i])
		reversed = append(reversed, a[len(a)-1-i], b[len(b)-1-i])
	}
	return map[string][][]byte{
		"in order":              slices.Concat(a, b),
		"interleaved":           mixed,
		"reversed":              slices.Concat(rev(a), rev(b)),
		"reversed, interleaved": reversed,
		"second before first":   slices.Concat([][]byte{a[1], a[0]}, a[2:], [][]byte{b[1], b[0]}, b[2:]),
		"first last":            slices.Concat(a[1:], a[:1], b[1:], b[:1]),
		"one reversed":          slices.Concat(a, rev(b)),
	}
}

// Fragments in any order, of several datagrams at a time: translated and
// judged as one (N11). Where the kernel must put them in order first, it does.
func TestFragmentsInAnyOrder(t *testing.T) {
	w := shared(t)
	w.fragmentsInAnyOrder(t, within(t, 2*time.Minute), w.remote)
}

// The same of a pod whose device has filters at its ingress, which all of them
// pass on their way to the reassembly.
func TestFragmentsOfAFilteredPod(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 4*time.Minute)
	ok(t, w.start(ctx))
	dev := hostDevice(w.client)
	ok(t, run(ctx, w.a.Netns, `
		ip link add shaper up type ifb
		tc qdisc add dev `+dev+` ingress
		tc filter add dev `+dev+` parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev shaper`))
	eventually(t, ctx, func() error {
		if entries, err := mapsOf(t, w.a).Filtered.Dump(); err != nil || len(entries) != 2 {
			return fmt.Errorf("the pod's filters: %v, %v", entries, err)
		}
		return nil
	})
	w.fragmentsInAnyOrder(t, ctx, w.remote)
	w.largestDatagrams(t)
}

// The largest there are, last fragment first, with any TTL that passes two
// nodes, and IPv4 that may not be fragmented any more, too.
func TestLargestDatagramsReversed(t *testing.T) { shared(t).largestDatagrams(t) }

func (w *world) largestDatagrams(t *testing.T) {
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	for _, f := range families {
		for _, to := range []struct {
			what   string
			at     netip.Addr
			server *cluster.Netns
		}{{"pod", f.of(w.local), w.local.Netns}, {"remote pod", f.of(w.remote), w.remote.Netns}, {"node", nodeAddr(f, w.a), w.a.Netns}} {
			server := udp(t, to.server, port(to.at, 7783), "", nil)
			ok(t, server.SetReadBuffer(4<<20))
			for _, ttl := range []byte{3, 64, 255} {
				for _, whole := range []bool{false, true} {
					size := 65535 - 8
					if f.name == "ipv4" {
						size -= 20
					}
					p := packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: to.at, sport: w.port(), dport: 7783, proto: 17, payload: bytesOf(ttl, size)}
					cut := fragments(p.frame(), w.id(), 1400)
					for _, frame := range cut {
						if f.name == "ipv6" {
							frame[21] = ttl
							continue
						}
						frame[22] = ttl
						if whole {
							frame[20] |= 0x40
						}
						frame[24], frame[25] = 0, 0
						binary.BigEndian.PutUint16(frame[24:], folded(words(frame[14:34])))
					}
					before := counters(t, w.a)
					for _, frame := range reversed(cut) {
						ok(t, raw.send(frame))
					}
					if !arrives(t, server, map[string]bool{string(p.payload): true}, f.of(w.client)) {
						t.Errorf("%s to a %s, TTL %d, not to be fragmented %v: lost; %v", f.name, to.what, ttl, whole, counters(t, w.a).since(before))
					}
				}
			}
			ok(t, server.Close())
		}
	}
}

// hostBackend is a node that serves by itself.
type hostBackend struct{ *cluster.Node }

func (h hostBackend) IPv4() netip.Addr { return nodeAddr(families[0], h.Node) }

func (h hostBackend) IPv6() netip.Addr { return nodeAddr(families[1], h.Node) }

// A sender of fragments: how its frames leave, and where they are first seen.
type fragSender struct {
	send     func(frame []byte) error
	mac, gw  net.HardwareAddr
	src      netip.Addr
	node     *cluster.Node
	hook     string
	from, to uint16 // ports of a flow that is there, else 0
}

func (w *world) fragmentsInAnyOrder(t *testing.T, ctx context.Context, remote *cluster.Pod) {
	b := remote.Node
	w.fragmented(t, ctx, "any-remote", "10.98.11.4", "fd00:10:98::b4", 30140, remote)
	w.fragmented(t, ctx, "any-local", "10.98.11.5", "fd00:10:98::b5", 30150, w.local)
	w.fragmented(t, ctx, "any-own-host", "10.98.11.6", "fd00:10:98::b6", 30160, hostBackend{w.a})
	w.fragmented(t, ctx, "any-other-host", "10.98.11.7", "fd00:10:98::b7", 30170, hostBackend{b})
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	wire, nodeMAC := rawSocket(t, w.Ext, "eth0"), macOf(t, w.a.Netns, "eth0")
	entry := w.newVTEP(ctx, t, "entry", "172.31.0.7/24", b)
	for _, f := range families {
		client, a := f.of(w.client), nodeAddr(f, w.a)
		pod := fragSender{send: raw.send, mac: raw.mac, gw: gw, src: client, node: w.a, hook: "from_pod"}
		out := fragSender{send: wire.send, mac: wire.mac, gw: nodeMAC, src: extOf(f), node: w.a, hook: "from_netdev"}
		// What an entry node says of what it passes on, see bpf/dsr.h.
		tunnelled := fragSender{
			send: func(frame []byte) error {
				_, err := entry.WriteToUDPAddrPort(vxlan(frame), netip.AddrPortFrom(nodeAddr(families[0], b), 4789))
				return err
			},
			src: extOf(f), node: b, hook: "from_overlay",
		}
		via, named, namedHost := tunnelled, tunnelled, tunnelled
		via.mac, via.gw = net.HardwareAddr{2, 'p', 'w', 0, 0, 2}, tunnelMAC(b)
		addr := f.of(remote).AsSlice()
		named.mac = net.HardwareAddr{2, 'p', 'w', serverPort >> 8, serverPort & 0xff, 3}
		named.gw = append(net.HardwareAddr{2, 'p'}, addr[len(addr)-4:]...)
		namedHost.mac = net.HardwareAddr{2, 'p', 'w', serverPort >> 8, serverPort & 0xff, 4}
		addr = nodeAddr(f, b).AsSlice()
		namedHost.gw = append(net.HardwareAddr{2, 'p'}, addr[len(addr)-4:]...)
		for _, c := range []struct {
			what   string
			by     fragSender
			to     netip.Addr
			port   uint16
			server *cluster.Netns
			at     netip.Addr
			number uint16
			source netip.Addr
		}{
			{"pod to pod", pod, f.of(w.local), serverPort, w.local.Netns, f.of(w.local), serverPort, client},
			{"pod to remote pod", pod, f.of(remote), serverPort, remote.Netns, f.of(remote), serverPort, client},
			{"cluster IP, remote backend", pod, f.pick("10.98.11.4", "fd00:10:98::b4"), 80, remote.Netns, f.of(remote), serverPort, client},
			{"cluster IP, local backend", pod, f.pick("10.98.11.5", "fd00:10:98::b5"), 80, w.local.Netns, f.of(w.local), serverPort, client},
			{"cluster IP, backend on its host", pod, f.pick("10.98.11.6", "fd00:10:98::b6"), 80, w.a.Netns, a, serverPort, client},
			{"cluster IP, backend on another host", pod, f.pick("10.98.11.7", "fd00:10:98::b7"), 80, b.Netns, nodeAddr(f, b), serverPort, a},
			{"another node's NodePort", pod, nodeAddr(f, b), 30141, remote.Netns, f.of(remote), serverPort, client},
			{"masqueraded", pod, extOf(f), 7777, w.Ext, extOf(f), 7777, a},
			{"pod to its node", pod, a, 7778, w.a.Netns, a, 7778, client},
			{"outside to NodePort, local backend", out, a, 30151, w.local.Netns, f.of(w.local), serverPort, extOf(f)},
			{"outside to NodePort, remote backend", out, a, 30141, remote.Netns, f.of(remote), serverPort, extOf(f)},
			{"outside to NodePort, backend on the host", out, a, 30161, w.a.Netns, a, serverPort, extOf(f)},
			{"outside to NodePort, backend on another host", out, a, 30171, b.Netns, nodeAddr(f, b), serverPort, extOf(f)},
			{"outside to the node itself", out, a, 7778, w.a.Netns, a, 7778, extOf(f)},
			{"answer to what left masqueraded", w.masqueraded(t, f, out), a, 0, w.client.Netns, client, 7776, extOf(f)},
			{"by an entry node", via, f.of(remote), serverPort, remote.Netns, f.of(remote), serverPort, extOf(f)},
			{"by an entry node that names the backend", named, f.pick("10.98.11.4", "fd00:10:98::b4"), 80, remote.Netns, f.of(remote), serverPort, extOf(f)},
			{"by an entry node, to the host", via, nodeAddr(f, b), serverPort, b.Netns, nodeAddr(f, b), serverPort, extOf(f)},
			{"by an entry node that names the host", namedHost, f.pick("10.98.11.7", "fd00:10:98::b7"), 80, b.Netns, nodeAddr(f, b), serverPort, extOf(f)},
		} {
			t.Run(f.name+" "+c.what, func(t *testing.T) {
				server := udp(t, c.server, port(c.at, c.number), "", nil)
				defer server.Close()
				for _, last := range []int{0, 8} { // the last fragment's length: as it comes, or eight bytes
					size := 4000
					if last != 0 {
						size = 2*1400 + last - 8
					}
					for name := range orders([][]byte{nil, nil, nil}, [][]byte{nil, nil, nil}) {
						p := packet{
							srcMAC: c.by.mac, dstMAC: c.by.gw, src: c.by.src, dst: c.to, sport: w.port(), dport: c.port, proto: 17,
						}
						if c.by.to != 0 {
							p.sport, p.dport = c.by.from, c.by.to
						}
						var cut [2][][]byte
						missing := map[string]bool{}
						for i := range cut {
							id := w.id()
							p.payload = bytesOf(byte(id), size)
							missing[string(p.payload)] = true
							cut[i] = fragments(p.frame(), id, 1400)
						}
						before, beforeB := counters(t, w.a), counters(t, b)
						beforeSeen := counters(t, c.by.node)
						for _, frame := range orders(cut[0], cut[1])[name] {
							ok(t, c.by.send(frame))
						}
						for len(missing) > 0 {
							if !arrives(t, server, missing, c.source) {
								t.Fatalf("%s, %d bytes: %d datagrams missing; node-a %v, node-b %v", name, size, len(missing),
									counters(t, w.a).since(before), counters(t, b).since(beforeB))
							}
						}
						got := counters(t, c.by.node).since(beforeSeen)
						if up := got["fragment_reassembly/"+c.by.hook]; (up != 0) != (name != "in order" && name != "interleaved") {
							t.Errorf("%s: %d fragments went to the kernel's reassembly", name, up)
						}
						for n, d := range map[string]counts{"node-a": counters(t, w.a).since(before).drops(), "node-b": counters(t, b).since(beforeB).drops()} {
							for k, v := range d {
								t.Errorf("%s: %s: %s %d", name, n, k, v)
							}
						}
					}
				}
			})
		}
	}
}

// masqueraded opens a flow from a pod's port 7776 to outside, under the node's
// address, and returns whoever answers it.
func (w *world) masqueraded(t *testing.T, f family, by fragSender) fragSender {
	t.Helper()
	server := udp(t, w.Ext, port(extOf(f), 7775), "", nil)
	defer server.Close()
	u := udp(t, w.client.Netns, port(f.of(w.client), 7776), port(extOf(f), 7775), nil)
	defer u.Close()
	_, err := u.Write([]byte("to be answered"))
	ok(t, err)
	ok(t, server.SetReadDeadline(soon()))
	_, from, err := server.ReadFromUDPAddrPort(make([]byte, 100))
	ok(t, err)
	by.from, by.to = 7775, from.Port()
	return by
}

// arrives reads one datagram that is missing.
func arrives(t *testing.T, server *net.UDPConn, missing map[string]bool, source netip.Addr) bool {
	t.Helper()
	buf := make([]byte, 64<<10)
	ok(t, server.SetReadDeadline(soon()))
	n, from, err := server.ReadFromUDPAddrPort(buf)
	if err != nil {
		return false
	}
	if !missing[string(buf[:n])] {
		t.Fatalf("a datagram of %d bytes that nobody sent", n)
	}
	if got := from.Addr().Unmap(); got != source {
		t.Errorf("the server sees %v, want %v", got, source)
	}
	delete(missing, string(buf[:n]))
	return true
}

// cutUDP are the fragments of a datagram.
func cutUDP(p packet, id uint32, size int) (payload []byte, cut [][]byte) {
	p.proto, p.payload = 17, bytesOf(byte(id), size)
	return p.payload, fragments(p.frame(), id, 1400)
}

func reversed(f [][]byte) [][]byte {
	r := slices.Clone(f)
	slices.Reverse(r)
	return r
}
