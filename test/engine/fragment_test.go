package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// fragments cuts a frame into fragments of at most this much of the datagram.
func fragments(frame []byte, id uint32, size int) [][]byte {
	size &^= 7
	head := 34
	v6 := frame[12] == 0x86
	if v6 {
		head = 54
	}
	var out [][]byte
	for off := head; off < len(frame); off += size {
		part := frame[off:min(off+size, len(frame))]
		at, more := uint16(off-head), off+size < len(frame)
		f := slices.Clone(frame[:head])
		if v6 {
			h := []byte{f[20], 0, 0, 0, 0, 0, 0, 0}
			f[20] = 44
			if more {
				at |= 1
			}
			binary.BigEndian.PutUint16(h[2:], at)
			binary.BigEndian.PutUint32(h[4:], id)
			f = append(f, h...)
			binary.BigEndian.PutUint16(f[18:], uint16(8+len(part)))
		} else {
			at /= 8
			if more {
				at |= 0x2000
			}
			binary.BigEndian.PutUint16(f[16:], uint16(20+len(part)))
			binary.BigEndian.PutUint16(f[18:], uint16(id))
			binary.BigEndian.PutUint16(f[20:], at)
			f[24], f[25] = 0, 0
			binary.BigEndian.PutUint16(f[24:], folded(words(f[14:34])))
		}
		out = append(out, append(f, part...))
	}
	return out
}

// fragmented is a service by cluster IP and NodePort, for UDP.
func (w *world) fragmented(t *testing.T, ctx context.Context, name, v4, v6 string, nodePort int32, pods ...backend) {
	t.Helper()
	objs := service(name, v4, v6, pods...)
	svc := objs[0].(*corev1.Service)
	svc.Spec.Type = corev1.ServiceTypeNodePort
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = nodePort + int32(i)
	}
	ok(t, w.Manifests.Put(objs...))
	t.Cleanup(func() {
		ok(t, w.Manifests.Delete(objs...))
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		w.awaitService(t, ctx, v4, v6, -1)
	})
	w.awaitService(t, ctx, v4, v6, len(pods))
	for _, n := range w.Nodes {
		set := mapsOf(t, n)
		for _, any := range []string{"0.0.0.0", "::"} {
			eventually(t, ctx, func() error {
				_, found, err := set.Services.Get(maps.ServiceKey{Addr: maps.ToAddr(netip.MustParseAddr(any)), Port: uint16(nodePort + 1), Proto: maps.ProtoUDP})
				if err != nil || !found {
					return fmt.Errorf("%s: no NodePort yet: %v", n.NodeName, err)
				}
				return nil
			})
		}
	}
}

// nodeAddr is a node's address of a family.
func nodeAddr(f family, n *cluster.Node) netip.Addr {
	for _, p := range n.Config.Addrs {
		if p.Addr().Is4() == (f.name == "ipv4") {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

var (
	extOf = func(f family) netip.Addr { return f.pick("172.31.0.1", "fd00:172:31::1") }
	sizes = []int{2000, 4000, 8000, 40000}
)

// Datagrams that leave their sender in fragments arrive whole, and so do the
// answers, whatever way their flow goes (N11).
func TestLargeDatagrams(t *testing.T) {
	w := shared(t)
	w.largeDatagrams(t, within(t, 2*time.Minute), w.remote, tunnel.ModeVXLAN)
}

// Fragments, in order and in any other, by every way there is between nodes.
func TestFragmentsByRoutingMode(t *testing.T) {
	for _, mode := range []tunnel.Mode{tunnel.ModeIPIP, tunnel.ModeDirect, tunnel.ModeCrossSubnet} {
		t.Run(string(mode), func(t *testing.T) {
			cfg := cluster.Config{AgentArgs: []string{"--routing-mode", string(mode)}}
			far := mode == tunnel.ModeCrossSubnet
			if far {
				cfg.Nodes = threeNodes()
			}
			w := own(t, cfg)
			ctx := within(t, 4*time.Minute)
			distant := podObject("distant", "node-c", "10.244.90.65", "fd00:10:244:5a::65")
			if far {
				w.moveFar(ctx, t)
				ok(t, w.Manifests.Put(distant))
			}
			ok(t, w.start(ctx))
			remotes := []*cluster.Pod{w.remote}
			if far {
				p, err := w.AddPod(ctx, distant)
				ok(t, err)
				remotes = append(remotes, p)
			}
			for _, p := range remotes {
				t.Run("to "+p.Node.NodeName, func(t *testing.T) {
					t.Run("large datagrams", func(t *testing.T) { w.largeDatagrams(t, ctx, p, mode) })
					t.Run("in any order", func(t *testing.T) { w.fragmentsInAnyOrder(t, ctx, p) })
				})
			}
		})
	}
}

// largeDatagrams has remote on the other node.
func (w *world) largeDatagrams(t *testing.T, ctx context.Context, remote *cluster.Pod, mode tunnel.Mode) {
	b := remote.Node
	w.fragmented(t, ctx, "big-remote", "10.98.11.1", "fd00:10:98::b1", 30110, remote)
	w.fragmented(t, ctx, "big-local", "10.98.11.2", "fd00:10:98::b2", 30120, w.local)
	w.fragmented(t, ctx, "big-self", "10.98.11.3", "fd00:10:98::b3", 30130, w.client)
	for _, f := range families {
		a, client := nodeAddr(f, w.a), f.of(w.client)
		for _, c := range []struct {
			what   string
			from   *cluster.Netns
			to     netip.Addr
			port   uint16
			server *cluster.Netns
			at     netip.Addr
			number uint16
			source netip.Addr // that the server sees
		}{
			{"pod to pod", w.client.Netns, f.of(w.local), serverPort, w.local.Netns, f.of(w.local), serverPort, client},
			{"pod to remote pod", w.client.Netns, f.of(remote), serverPort, remote.Netns, f.of(remote), serverPort, client},
			{"cluster IP, remote backend", w.client.Netns, f.pick("10.98.11.1", "fd00:10:98::b1"), 80, remote.Netns, f.of(remote), serverPort, client},
			{"cluster IP, local backend", w.client.Netns, f.pick("10.98.11.2", "fd00:10:98::b2"), 80, w.local.Netns, f.of(w.local), serverPort, client},
			{"a pod to itself", w.client.Netns, f.pick("10.98.11.3", "fd00:10:98::b3"), 80, w.client.Netns, client, serverPort, a},
			{"pod to another node's NodePort", w.client.Netns, nodeAddr(f, b), 30111, remote.Netns, f.of(remote), serverPort, client},
			{"masqueraded", w.client.Netns, extOf(f), 7777, w.Ext, extOf(f), 7777, a},
			{"to the other node", w.client.Netns, nodeAddr(f, b), 7778, b.Netns, nodeAddr(f, b), 7778, a},
			{"to the own node", w.client.Netns, a, 7778, w.a.Netns, a, 7778, client},
			{"outside to NodePort, remote backend", w.Ext, a, 30111, remote.Netns, f.of(remote), serverPort, extOf(f)},
			{"outside to NodePort, local backend", w.Ext, a, 30121, w.local.Netns, f.of(w.local), serverPort, extOf(f)},
			{"host to its pod", w.a.Netns, f.of(w.local), serverPort, w.local.Netns, f.of(w.local), serverPort, a},
			{"host to remote pod", w.a.Netns, f.of(remote), serverPort, remote.Netns, f.of(remote), serverPort, a},
			{"host to cluster IP, remote backend", w.a.Netns, f.pick("10.98.11.1", "fd00:10:98::b1"), 80, remote.Netns, f.of(remote), serverPort, a},
			{"host to cluster IP, local backend", w.a.Netns, f.pick("10.98.11.2", "fd00:10:98::b2"), 80, w.local.Netns, f.of(w.local), serverPort, a},
		} {
			t.Run(f.name+" "+c.what, func(t *testing.T) {
				before, beforeB := counters(t, w.a), counters(t, b)
				seen := make(chan netip.Addr, 100)
				server := udp(t, c.server, port(c.at, c.number), "", hears(f))
				defer server.Close()
				var again atomic.Int32
				go func() {
					in, buf := make([]byte, 64<<10), make([]byte, 64<<10)
					var last []byte
					var to netip.AddrPort
					for {
						n, from, err := server.ReadFromUDPAddrPort(in)
						switch {
						case errors.Is(err, unix.EMSGSIZE):
							// The answer was too large for its way.
							again.Add(1)
						case err != nil:
							return
						default:
							to, last = from, append(buf[:0], in[:n]...)
							seen <- from.Addr().Unmap()
						}
						_, _ = server.WriteToUDPAddrPort(last, to)
					}
				}()
				if c.from == w.Ext {
					// It is a router as well, and what it was told as a client it
					// would tell others.
					t.Cleanup(func() { ok(t, run(context.Background(), w.Ext, "ip -4 route flush cache\nip -6 route flush cache")) })
				}
				u := udp(t, c.from, "", port(c.to, c.port), nil)
				defer u.Close()
				buf, tooBig, answerer := make([]byte, 64<<10), 0, false
				for i, size := range append(sizes, sizes...) {
					want := bytesOf(byte(i), size)
					_, err := u.Write(want)
					ok(t, err)
					n := 0
					for until := soon(); ; {
						ok(t, u.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
						n, err = u.Read(buf)
						told := errors.Is(err, unix.EMSGSIZE) // the tunnel's MTU, which its host knows by now
						if late := errors.Is(err, os.ErrDeadlineExceeded); late && time.Now().Before(until) {
							// So does the pod that answers, whose way is wider in other modes.
							if answerer || counters(t, w.b).since(beforeB)["drop_too_big/from_pod"] == 0 {
								continue
							}
							told, answerer = true, true
						}
						if !told || c.from != w.Ext {
							break
						}
						_, err = u.Write(want)
						ok(t, err)
						tooBig++
					}
					if err != nil || !bytes.Equal(buf[:n], want) {
						t.Fatalf("datagram of %d bytes: %d came back, %v; node-a %v, node-b %v", size, n, err,
							counters(t, w.a).since(before), counters(t, b).since(beforeB))
					}
					if from := <-seen; from != c.source {
						t.Errorf("the server sees %v, want %v", from, c.source)
					}
				}
				// With direct routing pods have more than the tunnel, by which what
				// came from outside by another node is answered.
				if n := again.Load(); tooBig > 1 || n > 1 || n > 0 && (mode != tunnel.ModeDirect || c.from != w.Ext) {
					t.Errorf("the sender was told the MTU %d times, the server %d times", tooBig, n)
				}
				for n, d := range map[string]counts{"node-a": counters(t, w.a).since(before).drops(), "node-b": counters(t, b).since(beforeB).drops()} {
					for k, v := range d {
						// The rest of what was too large.
						if tooBig > 0 && (k == "drop_too_big/from_netdev" || k == "drop_fragment_before_first/from_overlay") ||
							again.Load() > 0 && (k == "drop_too_big/from_pod" || k == "drop_fragment_before_first/from_overlay") {
							continue
						}
						t.Errorf("%s: %s %d", n, k, v)
					}
				}
			})
		}
		for what, to := range map[string]netip.Addr{
			"local": f.of(w.local), "remote": f.of(remote), "outside": extOf(f), "own node": a, "other node": nodeAddr(f, b),
		} {
			t.Run(f.name+" ping "+what, func(t *testing.T) {
				p, err := w.client.Ping(ctx, to.String(), "-size", "4000")
				if err != nil || p.Received != 1 {
					t.Errorf("large ping to %v: %+v, %v", to, p, err)
				}
			})
		}
	}
	checksumErrors(t, w.client.Netns, w.local.Netns, remote.Netns)
}

// hears has a socket of IPv6 hear that what it sent was too large. IPv4 that
// is in fragments may be fragmented again.
func hears(f family) control {
	if f.name == "ipv4" {
		return nil
	}
	return func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1) }
}

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

// until waits for counters that amount to that.
func until(t *testing.T, n *cluster.Node, before counts, want int, what ...string) {
	t.Helper()
	eventually(t, within(t, patience), func() error {
		got, sum := counters(t, n).since(before), 0
		for _, w := range what {
			sum += got[w]
		}
		if sum != want {
			return fmt.Errorf("%s: %d, want %d; all: %v", what, sum, want, got)
		}
		return nil
	})
}

// A denied datagram is denied in any order of its fragments, at once on a
// flow that runs, and passes when it is allowed again.
func TestPolicyJudgesFragments(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	policy := denyIngress("local")
	t.Cleanup(func() { _ = w.Manifests.Delete(policy) })
	id := uint32(5000)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			server := udp(t, w.local.Netns, port(f.of(w.local), serverPort), "", nil)
			defer server.Close()
			p := packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: f.of(w.local), sport: w.port(), dport: serverPort}
			send := func(fresh, back bool) map[string]bool {
				t.Helper()
				if fresh {
					p.sport = w.port()
				}
				id++
				payload, cut := cutUDP(p, id, 4000)
				if back {
					cut = reversed(cut)
				}
				for _, frame := range cut {
					ok(t, raw.send(frame))
				}
				return map[string]bool{string(payload): true}
			}
			pass := func(fresh, back bool) {
				t.Helper()
				before := counters(t, w.a)
				if !arrives(t, server, send(fresh, back), f.of(w.client)) {
					t.Fatalf("new flow %v, reversed %v: nothing arrives; %v", fresh, back, counters(t, w.a).since(before))
				}
			}
			pass(true, false)
			ok(t, w.Manifests.Put(policy))
			w.isolated(t, ctx, w.local, true)
			for _, fresh := range []bool{false, true, true} {
				before := counters(t, w.a)
				send(fresh, false)
				// Of a flow that was allowed, all know why.
				denied := 3
				if fresh {
					denied = 1
				}
				until(t, w.a, before, 3, "drop_fragment/from_pod", "drop_policy_ingress/from_pod")
				counters(t, w.a).since(before).want(t, "denied", counts{"drop_policy_ingress/from_pod": denied, "fwd_local": 0})
				before = counters(t, w.a)
				send(fresh, true)
				// Behind the reassembly it is what it is in order.
				until(t, w.a, before, 3, "drop_fragment/from_pod", "drop_policy_ingress/from_pod")
				counters(t, w.a).since(before).want(t, "denied, reversed", counts{"fragment_reassembly/from_pod": 3, "drop_policy_ingress/from_pod": denied, "fwd_local": 0})
			}
			ok(t, w.Manifests.Delete(policy))
			w.isolated(t, ctx, w.local, false)
			pass(false, false)
			pass(false, true)
			pass(true, true)
		})
	}
}

// What is known of a datagram is known of the place that its first fragment
// came from: nobody else adds to it, in whatever order.
func TestSpoofedFragments(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	pod, podGW := rawSocket(t, w.local.Netns, "eth0"), hostMAC(t, w.local)
	wire, nodeMAC := rawSocket(t, w.Ext, "eth0"), macOf(t, w.b.Netns, "eth0")
	peer := w.newVTEP(ctx, t, "fragments", "172.31.0.6/24", w.b)
	id := uint32(9000)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			server := udp(t, w.remote.Netns, port(f.of(w.remote), serverPort), "", nil)
			defer server.Close()
			for _, back := range []bool{false, true} {
				id++
				p := packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: f.of(w.remote), sport: w.port(), dport: serverPort}
				payload, cut := cutUDP(p, id, 4000)
				lie := p
				lie.srcMAC, lie.dstMAC = pod.mac, podGW
				_, podLie := cutUDP(lie, id, 4008)
				lie.dstMAC = nodeMAC
				_, wireLie := cutUDP(lie, id, 4008)
				if back {
					cut = reversed(cut)
				}
				before, beforeB := counters(t, w.a), counters(t, w.b)
				ok(t, raw.send(cut[0]))
				for i := range podLie {
					ok(t, pod.send(podLie[len(podLie)-1-i]))
					ok(t, wire.send(wireLie[len(wireLie)-1-i]))
					inner := slices.Clone(podLie[len(podLie)-1-i])
					copy(inner, tunnelMAC(w.b))
					_, err := peer.WriteToUDPAddrPort(vxlan(inner), netip.AddrPortFrom(nodeAddr(families[0], w.b), 4789))
					ok(t, err)
				}
				for hook, n := range map[string]*cluster.Node{"from_pod": w.a, "from_netdev": w.b, "from_overlay": w.b} {
					b := beforeB
					if n == w.a {
						b = before
					}
					until(t, n, b, 3, "drop_spoofed_source/"+hook, "drop_spoofed_flow/"+hook)
				}
				for _, frame := range cut[1:] {
					ok(t, raw.send(frame))
				}
				if !arrives(t, server, map[string]bool{string(payload): true}, f.of(w.client)) {
					t.Fatalf("reversed %v: nothing arrives; node-a %v, node-b %v", back, counters(t, w.a).since(before), counters(t, w.b).since(beforeB))
				}
			}
		})
	}
}

func tunnelMAC(n *cluster.Node) net.HardwareAddr { return tunnel.MAC(n.Config.Addrs[0].Addr()) }

// reassembled sends datagrams last fragment first, from a pod to a pod and to
// its node, and says which did not arrive.
func (w *world) reassembled(t *testing.T, raw *frames, gw net.HardwareAddr, wait time.Duration) (missing []string) {
	t.Helper()
	for _, f := range families {
		for what, to := range map[string]struct {
			at     netip.Addr
			server *cluster.Netns
		}{"pod": {f.of(w.remote), w.remote.Netns}, "node": {nodeAddr(f, w.a), w.a.Netns}} {
			server := udp(t, to.server, port(to.at, 7781), "", nil)
			payload, cut := cutUDP(packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: to.at, sport: w.port(), dport: 7781}, w.id(), 4000)
			for _, frame := range reversed(cut) {
				ok(t, raw.send(frame))
			}
			ok(t, server.SetReadDeadline(time.Now().Add(wait)))
			buf := make([]byte, 64<<10)
			if n, _, err := server.ReadFromUDPAddrPort(buf); err != nil || !bytes.Equal(buf[:n], payload) {
				missing = append(missing, f.name+" to a "+what)
			}
			ok(t, server.Close())
		}
	}
	return missing
}

// The reassembly needs no agent, is the same after a restart, and is made anew
// when its device is gone, by an agent that runs and by the next one (N11, L1).
func TestReassemblyOutlivesTheAgent(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 4*time.Minute)
	ok(t, w.start(ctx))
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	index := func() (i int) {
		ok(t, w.a.Netns.Do(func() error {
			ifi, err := net.InterfaceByName("podweir.frag")
			if err == nil {
				i = ifi.Index
			}
			return err
		}))
		return i
	}
	pass := func(when string) {
		t.Helper()
		before := counters(t, w.a)
		if missing := w.reassembled(t, raw, gw, patience); len(missing) > 0 {
			t.Fatalf("%s: lost %v; %v", when, missing, counters(t, w.a).since(before))
		}
	}
	pass("at first")
	was := index()
	ok(t, w.KillAgents(ctx))
	pass("without an agent")
	ok(t, w.StartAgents(ctx))
	pass("after a restart")
	if now := index(); now != was {
		t.Errorf("a restart made the device anew: index %d, was %d", now, was)
	}
	ok(t, run(ctx, w.a.Netns, "ip link del podweir.frag"))
	eventually(t, ctx, func() error {
		if missing := w.reassembled(t, raw, gw, 200*time.Millisecond); len(missing) > 0 {
			return fmt.Errorf("without its device: lost %v", missing)
		}
		return nil
	})
	ok(t, w.KillAgents(ctx))
	ok(t, run(ctx, w.a.Netns, "ip link del podweir.frag"))
	ok(t, w.StartAgents(ctx))
	pass("after the next agent has made it anew")
}

// Datagrams that never become whole fill what the namespace has for them, and
// nothing else: those in order go on, to pods and to the host.
func TestIncompleteDatagrams(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 3*time.Minute)
	ok(t, w.start(ctx))
	wire, nodeMAC := rawSocket(t, w.Ext, "eth0"), macOf(t, w.a.Netns, "eth0")
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	for _, f := range families {
		before := counters(t, w.a)
		for i := range 6000 {
			// Of six megabytes each family's reassembly holds four.
			p := packet{srcMAC: wire.mac, dstMAC: nodeMAC, src: extOf(f), dst: nodeAddr(f, w.a), sport: 9, dport: 9}
			_, cut := cutUDP(p, uint32(20000+i), 2*1400-8)
			ok(t, wire.send(cut[1]))
		}
		eventually(t, ctx, func() error {
			if n := counters(t, w.a).since(before)["fragment_reassembly/from_netdev"]; n < 5000 {
				return fmt.Errorf("%d fragments went there", n)
			}
			return nil
		})
	}
	for _, f := range families {
		for _, c := range []struct {
			by     *frames
			gw     net.HardwareAddr
			src    netip.Addr
			at     netip.Addr
			server *cluster.Netns
		}{
			{raw, gw, f.of(w.client), f.of(w.remote), w.remote.Netns},
			{raw, gw, f.of(w.client), nodeAddr(f, w.a), w.a.Netns},
			{wire, nodeMAC, extOf(f), nodeAddr(f, w.a), w.a.Netns},
		} {
			server := udp(t, c.server, port(c.at, 7782), "", nil)
			payload, cut := cutUDP(packet{srcMAC: c.by.mac, dstMAC: c.gw, src: c.src, dst: c.at, sport: w.port(), dport: 7782}, w.id(), 4000)
			for _, frame := range cut {
				ok(t, c.by.send(frame))
			}
			if !arrives(t, server, map[string]bool{string(payload): true}, c.src) {
				t.Errorf("from %v to %v: lost", c.src, c.at)
			}
			ok(t, server.Close())
		}
	}
}
