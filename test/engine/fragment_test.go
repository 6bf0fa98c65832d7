package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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
