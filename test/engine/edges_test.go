package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// receiveAll reads datagrams until all have come, in any order of arrival,
// and compares them with parts of what was sent.
func receiveAll(u *net.UDPConn, sent []byte, size int) error {
	missing := map[string]int{}
	for off := 0; off < len(sent); off += size {
		missing[string(sent[off:min(off+size, len(sent))])]++
	}
	buf := make([]byte, 64<<10)
	for len(missing) > 0 {
		if err := u.SetReadDeadline(soon()); err != nil {
			return err
		}
		n, _, err := u.ReadFromUDP(buf)
		if err != nil {
			return fmt.Errorf("%d datagrams missing: %w", len(missing), err)
		}
		if missing[string(buf[:n])] == 0 {
			return fmt.Errorf("a datagram of %d bytes that nobody sent", n)
		}
		if missing[string(buf[:n])]--; missing[string(buf[:n])] == 0 {
			delete(missing, string(buf[:n]))
		}
	}
	return nil
}

// segments writes many datagrams at once, to the remote pod's address. The
// first write, too, is one packet, which both nodes count.
func (w *world) segments(t *testing.T, to netip.Addr, atA, atB counts) {
	t.Helper()
	const size = 1200
	server := udp(t, w.remote.Netns, port(to, serverPort), "", nil)
	c := udp(t, w.client.Netns, "", port(to, serverPort), func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
	})
	for i := range 3 {
		data := bytesOf(byte(i), 20*size+7)
		before, beforeB := counters(t, w.a), counters(t, w.b)
		if _, err := c.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := receiveAll(server, data, size); err != nil {
			t.Errorf("write %d: %v", i, err)
		}
		counters(t, w.a).since(before).want(t, fmt.Sprintf("write %d", i), atA)
		counters(t, w.b).since(beforeB).want(t, fmt.Sprintf("write %d", i), atB)
	}
}

// One write of many datagrams (UDP_SEGMENT) leaves as one packet past the
// device, and comes out as the datagrams it is made of.
func TestUDPSegmentation(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			capture, err := w.remote.Capture(ctx, "eth0")
			ok(t, err)
			// Inwards by the device: see pw_decap.
			w.segments(t, f.of(w.remote), counts{"fwd_encap/from_pod": 1}, counts{"fwd_local/from_overlay": 1, "fwd_decap": 0})
			badPackets(t, f.name, capture)
			ok(t, capture.Close())
		})
	}
}

// A pod whose MTU somebody raised sends packets that do not fit under a tunnel
// header: it is told how large they may be, and then goes past the device.
// What IPv4 lets be fragmented the device takes, and fragments the outer packet.
func TestPacketsThatDoNotFit(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	pods := []*cluster.Pod{w.client, w.remote}
	raise := func(mtu string) {
		for _, p := range pods {
			ok(t, run(context.Background(), p.Netns, "ip link set eth0 mtu "+mtu))
			ok(t, run(context.Background(), p.Node.Netns, "ip link set "+hostDevice(p)+" mtu "+mtu))
		}
	}
	// Agents would bring the hosts' halves back.
	ok(t, w.KillAgents(ctx))
	t.Cleanup(func() {
		raise("1450")
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		ok(t, w.StartAgents(ctx))
	})
	raise("1500")
	for _, p := range pods { // what they were told earlier
		ok(t, run(ctx, p.Netns, "ip -4 route flush cache\nip -6 route flush cache"))
	}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			to := port(f.of(w.remote), serverPort)
			l := listen(t, w.remote.Netns, to, nil)
			before := counters(t, w.a)
			transfer(ctx, t, w.client.Netns, l, to, 1<<20, nil)
			got := counters(t, w.a).since(before)
			if got["fwd_tunnel/from_pod"] != 0 || got["fwd_encap/from_pod"] < 10 || got["too_big_sent/from_pod/"+f.name] == 0 {
				t.Errorf("TCP: told the MTU, and past the device from then on: %v", got)
			}
			// Both have been told now.
			echoUDP(t, w.remote.Netns, to)
			mayCut, mayNot := udp(t, w.client.Netns, "", to, deaf(f, false)), udp(t, w.client.Netns, "", to, deaf(f, true))
			most := f.payloadOf(1450)
			datagrams(t, mayCut, 1, 1000)
			for _, size := range []int{most, most + 1, most + 50} {
				what := fmt.Sprintf("datagram of %d", size)
				if f.name == "ipv4" {
					way := "fwd_tunnel/from_pod"
					if size == most {
						way = "fwd_encap/from_pod"
					}
					before := counters(t, w.a)
					datagrams(t, mayCut, 1, size)
					counters(t, w.a).since(before).want(t, what, counts{way: 1, "drop_too_big": 0})
				}
				if size == most {
					before := counters(t, w.a)
					datagrams(t, mayNot, 1, size)
					counters(t, w.a).since(before).want(t, what+", in one piece", counts{"fwd_encap/from_pod": 1, "drop_too_big": 0})
					continue
				}
				before := counters(t, w.a)
				_, err := mayNot.Write(make([]byte, size))
				ok(t, err)
				ok(t, mayNot.SetReadDeadline(soon()))
				if n, err := mayNot.Read(make([]byte, 1)); !errors.Is(err, unix.EMSGSIZE) {
					t.Errorf("%s, in one piece: %d, %v", what, n, err)
				}
				counters(t, w.a).since(before).want(t, what+", in one piece", counts{
					"drop_too_big/from_pod": 1, "too_big_sent/from_pod": 1, "fwd_tunnel/from_pod": 0, "fwd_encap/from_pod": 0,
				})
			}
		})
	}
}

// deaf makes a socket send by the device's MTU whatever it was told of the
// way's; in one piece or, IPv4 alone, such that it may be fragmented.
func deaf(f family, whole bool) control {
	return func(fd int) error {
		switch {
		case f.name == "ipv6":
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE)
		case whole:
			return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_INTERFACE)
	}
}

// A pod that runs a tunnel of its own to another pod (N23): its packets are
// encapsulated already, which the kernel does not do twice to a packet on our
// behalf, so they go through the device.
func TestPodsOwnTunnel(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	for _, f := range families {
		for _, dstport := range []int{4789, 8472} {
			t.Run(fmt.Sprint(f.name, " ", dstport), func(t *testing.T) {
				up := func(p, peer *cluster.Pod, n int) {
					ok(t, run(ctx, p.Netns, fmt.Sprintf(`
						ip link add own type vxlan id 7 dstport %d local %v remote %v dev eth0
						ip link set own mtu 1300 up
						ip addr add 192.0.2.%d/24 dev own
						ip addr add 2001:db8::%d/64 dev own nodad`, dstport, f.of(p), f.of(peer), n, n)))
					t.Cleanup(func() { ok(t, run(context.Background(), p.Netns, "ip link del own")) })
				}
				up(w.client, w.remote, 1)
				up(w.remote, w.client, 2)
				for _, to := range []string{"192.0.2.2:8080", "[2001:db8::2]:8080"} {
					l := listen(t, w.remote.Netns, to, nil)
					before := counters(t, w.a)
					transfer(ctx, t, w.client.Netns, l, to, 1<<20, nil)
					l.Close()
					got := counters(t, w.a).since(before)
					if got["fwd_tunnel/from_pod"] < 10 || len(got.drops()) > 0 {
						t.Errorf("to %s: %v", to, got)
					}
				}
			})
		}
	}
	checksumErrors(t, w.client.Netns, w.remote.Netns)
}

// Such a packet for an address that nobody serves is refused like any other:
// its sender hears of it, however the kernel counts what it has inside. All of
// them have a checksum to be written, which lands nowhere in the answer.
func TestPodsOwnTunnelRefused(t *testing.T) {
	w := shared(t)
	ctx := within(t, time.Minute)
	nobody := service("nobody", "10.98.0.77", "fd00:10:98::77")
	svc := nobody[0].(*corev1.Service)
	svc.Spec.Ports = []corev1.ServicePort{{Name: "own", Port: 8472, Protocol: corev1.ProtocolUDP}}
	ok(t, w.Manifests.Put(svc))
	t.Cleanup(func() { ok(t, w.Manifests.Delete(svc)) })
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			to := f.pick("10.98.0.77", "fd00:10:98::77")
			ok(t, run(ctx, w.client.Netns, fmt.Sprintf(`
				ip link add own type vxlan id 7 dstport 8472 local %v remote %v dev eth0
				ip link set own mtu 1300 up
				ip addr add 192.0.2.1/24 dev own
				ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev own`, f.of(w.client), to)))
			t.Cleanup(func() { ok(t, run(context.Background(), w.client.Netns, "ip link del own")) })
			eventually(t, ctx, func() error {
				before := counters(t, w.a)
				probe := udp(t, w.client.Netns, "", port(to, 8472), nil)
				defer probe.Close()
				if _, err := probe.Write([]byte("hello")); err != nil {
					return err
				}
				if counters(t, w.a).since(before)["refused/from_pod"] == 0 {
					return errors.New("not refused yet")
				}
				return nil
			})
			u := udp(t, w.client.Netns, "", "192.0.2.2:9", nil)
			for _, n := range []int{100, 1200} {
				heard := unreachables(t, w.client.Netns, f)
				_, err := u.Write(bytesOf(7, n))
				ok(t, err)
				eventually(t, ctx, func() error {
					if unreachables(t, w.client.Netns, f) == heard {
						return fmt.Errorf("%d bytes inside: not refused", n)
					}
					return nil
				})
			}
		})
	}
	checksumErrors(t, w.client.Netns)
}

// unreachables is how many such errors a namespace has received.
func unreachables(t testing.TB, n *cluster.Netns, f family) int {
	t.Helper()
	got, err := n.SNMP()
	ok(t, err)
	if f.name == "ipv6" {
		return int(got["Icmp6InDestUnreachs"])
	}
	return int(got["Icmp:InDestUnreachs"])
}

// Congestion marks: what the inner packet says stands in the outer header
// (RFC 6040), and a mark that the outer packet picked up on its way reaches
// the inner one, by the kernel's device.
func TestCongestionMarks(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			here, there := f.of(w.client), f.of(w.kernel)
			server := udp(t, w.client.Netns, port(here, serverPort), "", nil)
			c := udp(t, w.kernel.pod, port(there, 5000), port(here, serverPort), nil)
			exchange := func() {
				t.Helper()
				buf := make([]byte, 100)
				_, err := c.Write([]byte("hello"))
				ok(t, err)
				ok(t, server.SetReadDeadline(soon()))
				_, from, err := server.ReadFromUDP(buf)
				ok(t, err)
				_, err = server.WriteToUDP([]byte("hello"), from)
				ok(t, err)
				ok(t, c.SetReadDeadline(soon()))
				_, err = c.Read(buf)
				ok(t, err)
			}
			exchange()
			// Outwards: each mark is in both headers.
			raw, err := server.SyscallConn()
			ok(t, err)
			for mark := range 4 {
				tap, err := w.Tap(ctx)
				ok(t, err)
				ok(t, raw.Control(func(fd uintptr) {
					if f.name == "ipv4" {
						err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, mark)
					} else {
						err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_TCLASS, mark)
					}
				}))
				ok(t, err)
				before := counters(t, w.a)
				exchange()
				counters(t, w.a).since(before).want(t, "marked answer", counts{"fwd_encap/from_pod": 1})
				p, err := tap.Find(ctx, "answer", func(p *cluster.Packet) bool { return p.Inner != nil && p.Inner.Src == here && p.Inner.DPort == 5000 })
				ok(t, err)
				if outer, inner := ecn(p.Frame[14:]), ecn(p.Frame[64:]); outer != mark || inner != mark {
					t.Errorf("mark %d: outer %d, inner %d", mark, outer, inner)
				}
				ok(t, tap.Close())
			}
			// Inwards: an outer mark, on a flow that is known.
			vtep := udp(t, w.kernel.host, "", "172.31.0.2:4789", func(fd int) error {
				return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, 3)
			})
			for _, inner := range []struct{ sent, got int }{{1, 3}, {2, 3}, {3, 3}} {
				capture, err := w.client.Capture(ctx, "eth0")
				ok(t, err)
				pk := packet{
					src: there, dst: here, sport: 5000, dport: serverPort, proto: 17, tos: byte(inner.sent),
					payload: []byte("marked"), dstMAC: tunnel.MAC(w.a.Config.Addrs[0].Addr()), srcMAC: tunnel.MAC(w.kernel.underlay),
				}
				before := counters(t, w.a)
				_, err = vtep.Write(vxlan(pk.frame()))
				ok(t, err)
				buf := make([]byte, 100)
				ok(t, server.SetReadDeadline(soon()))
				n, _, err := server.ReadFromUDP(buf)
				if err != nil || !bytes.Equal(buf[:n], []byte("marked")) {
					t.Fatalf("%q, %v", buf[:n], err)
				}
				counters(t, w.a).since(before).want(t, "marked outside", counts{"fwd_decap": 0, "fwd_local/from_overlay": 1})
				p, err := capture.Find(ctx, "marked packet", func(p *cluster.Packet) bool { return p.Outer != nil && p.Outer.SPort == 5000 })
				ok(t, err)
				if got := ecn(p.Frame[14:]); got != inner.got {
					t.Errorf("inner mark %d under an outer 3 arrived as %d, want %d", inner.sent, got, inner.got)
				}
				ok(t, capture.Close())
			}
		})
	}
}

// ecn reads the mark of an IP header.
func ecn(ip []byte) int {
	if ip[0]>>4 == 4 {
		return int(ip[1] & 3)
	}
	return int(binary.BigEndian.Uint16(ip)>>4) & 3
}

// IPv4 options and IPv6 extension headers do not keep packets off the fast
// path, and arrive as they were sent.
func TestOptionsAndExtensionHeaders(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	nops := func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x01\x01\x01\x01\x00")
	}
	header := func(option int) control {
		return func(fd int) error {
			// Next header, length, one experimental option (RFC 4727; to
			// be skipped by who does not know it) that fills 16 bytes.
			return unix.SetsockoptString(fd, unix.IPPROTO_IPV6, option, "\x00\x01\x1e\x0c\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
		}
	}
	both := func(fd int) error {
		if err := header(unix.IPV6_HOPOPTS)(fd); err != nil {
			return err
		}
		return header(unix.IPV6_DSTOPTS)(fd)
	}
	for _, c := range []struct {
		name  string
		f     family
		set   control
		extra int // bytes between the IP header and the transport's
	}{
		{"ipv4 options", families[0], nops, 8},
		{"destination options", families[1], header(unix.IPV6_DSTOPTS), 16},
		{"hop-by-hop and destination options", families[1], both, 32},
	} {
		t.Run(c.name, func(t *testing.T) {
			to := port(c.f.of(w.remote), serverPort)
			l := listen(t, w.remote.Netns, to, nil)
			capture, err := w.remote.Capture(ctx, "eth0")
			ok(t, err)
			before, beforeB := counters(t, w.a), counters(t, w.b)
			transfer(ctx, t, w.client.Netns, l, to, 1<<20, c.set)
			echoUDP(t, w.remote.Netns, to)
			datagrams(t, udp(t, w.client.Netns, "", to, c.set), 20, 1300)
			got, gotB := counters(t, w.a).since(before), counters(t, w.b).since(beforeB)
			if got["fwd_tunnel"] != 0 || got["fwd_encap/from_pod"] < 30 || gotB["fwd_local/from_overlay"] != 0 || gotB["fwd_decap"] < 30 {
				t.Errorf("want all past the device: %v; %v", got, gotB)
			}
			badPackets(t, c.name, capture)
			p, err := capture.Find(ctx, "datagram", func(p *cluster.Packet) bool {
				return p.Outer != nil && p.Outer.Proto == 17 && p.Outer.DPort == serverPort
			})
			ok(t, err)
			headers := 20
			if c.f.name == "ipv6" {
				headers = 40
			}
			if got := len(p.Frame) - 14 - 8 - len(p.Outer.Payload); got != headers+c.extra {
				t.Errorf("%d bytes of IP headers arrived, want %d", got, headers+c.extra)
			}
			ok(t, capture.Close())
		})
	}
}
