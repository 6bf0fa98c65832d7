package engine

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// What a service's packets look like between nodes (N4), the device's and
// ours alike: outer addresses of the nodes, UDP 4789, VNI 4096, the tuple
// translated, every checksum right, an outer TTL and MACs the other end takes.
func TestOnTheWire(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	w.service(t, ctx, "wire", "10.98.0.22", "fd00:10:98::22", w.remote)
	a, b := w.a.Config.Addrs[0].Addr(), w.b.Config.Addrs[0].Addr()
	for _, f := range families {
		for _, tx := range []string{"on", "off"} {
			t.Run(f.name+" tx "+tx, func(t *testing.T) {
				for _, p := range []*cluster.Pod{w.client, w.remote} {
					ok(t, run(ctx, p.Netns, "ethtool -K eth0 tx "+tx))
				}
				tap, err := w.Tap(ctx)
				ok(t, err)
				number, at := w.port(), port(f.of(w.remote), serverPort)
				c, s := pair(ctx, t, w.client, w.remote, port(f.of(w.client), number), at, port(f.pick("10.98.0.22", "fd00:10:98::22"), 80))
				for i := range 5 {
					ok(t, say(c, s, fmt.Sprintf("request %d", i)))
					ok(t, say(s, c, fmt.Sprintf("answer %d", i)))
				}
				_, err = tap.Find(ctx, "last answer", func(p *cluster.Packet) bool { return bytes.Contains(p.Frame, []byte("answer 4")) })
				ok(t, err)
				ok(t, tap.Close())
				n := map[netip.Addr]int{}
				for _, p := range tap.Matching(func(p *cluster.Packet) bool {
					l := p.Last()
					return l != nil && (l.SPort == number || l.DPort == number)
				}) {
					if p.Inner == nil {
						t.Errorf("bare: %v", p)
						continue
					}
					from, to, inner := a, b, *p.Inner
					src, dst, sport, dport := f.of(w.client), f.of(w.remote), number, uint16(serverPort)
					if p.Outer.Src == b {
						from, to, src, dst, sport, dport = b, a, dst, src, dport, sport
					}
					n[p.Outer.Src]++
					if p.Outer.Src != from || p.Outer.Dst != to || p.Outer.DPort != 4789 || p.VNI != 4096 || p.Outer.TTL != 64 ||
						inner.Src != src || inner.Dst != dst || inner.SPort != sport || inner.DPort != dport || len(p.BadChecksums) > 0 {
						t.Errorf("%v", p)
					}
					if !bytes.Equal(p.InnerDstMAC, tunnel.MAC(to)) {
						t.Errorf("inner MAC %v, want %v: %v", p.InnerDstMAC, tunnel.MAC(to), p)
					}
				}
				if n[a] < 7 || n[b] < 6 {
					t.Errorf("packets by sender: %v", n)
				}
			})
		}
	}
	for _, p := range []*cluster.Pod{w.client, w.remote} {
		ok(t, run(ctx, p.Netns, "ethtool -K eth0 tx on"))
	}
}

// Full packets of a bulk transfer cross the tunnel without a fragment and
// all but without retransmission (N12).
func TestBulk(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	_, err := w.remote.Serve(ctx, "bulk", 8180)
	ok(t, err)
	for _, f := range families {
		for _, receive := range []string{"-receive=false", "-receive=true"} {
			t.Run(f.name+" "+receive, func(t *testing.T) {
				tap, err := w.Tap(ctx)
				ok(t, err)
				// A busy machine overruns a queue now and then: the best of a
				// few transfers tells whether the path itself loses anything.
				var r *probe.BulkReport
				for range 5 {
					r, err = w.client.Bulk(ctx, port(f.of(w.remote), 8180), receive, "-bytes", "8000000", "-timeout", "20s")
					ok(t, err)
					if r.Retransmits <= 5 {
						break
					}
					t.Logf("%d retransmits, once more", r.Retransmits)
				}
				mss := uint32(1450 - 40 - 12)
				if f.name == "ipv6" {
					mss -= 20
				}
				if !r.CRCMatches || r.Retransmits > 5 || r.MSS != mss {
					t.Errorf("%+v, want a segment size of %d", r, mss)
				}
				ok(t, tap.Close())
				for _, p := range tap.Matching(func(p *cluster.Packet) bool { return p.Outer != nil && p.Outer.Fragment }) {
					t.Fatalf("fragment: %v", p)
				}
			})
		}
	}
}

// Frames that make no sense, or that no pod may send (N14): each is dropped
// with its reason, reaches nobody, and the pod goes on as before.
func TestMalformed(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	honest := packet{srcMAC: raw.mac, dstMAC: gw, src: w.client.IPv4(), dst: w.remote.IPv4(), sport: 1, dport: 2, proto: 17, payload: []byte("MALFORMED")}
	honest6 := honest
	honest6.src, honest6.dst = w.client.IPv6(), w.remote.IPv6()
	change := func(p packet, fn func(f []byte) []byte) []byte { return fn(p.frame()) }
	capture, err := w.remote.Capture(ctx, "eth0")
	ok(t, err)
	tcp := honest
	tcp.proto, tcp.flags = 6, syn
	for _, c := range []struct {
		name, reason string
		frame        []byte
	}{
		{"IPv4 header cut", "drop_malformed", change(honest, func(f []byte) []byte { return f[:14+12] })},
		{"IPv4 header of 16 bytes", "drop_malformed", change(honest, func(f []byte) []byte { f[14] = 0x44; return f })},
		{"IPv4 length beyond the frame", "drop_malformed", change(honest, func(f []byte) []byte { f[17] += 50; return f })},
		{"UDP header cut", "drop_malformed", change(honest, func(f []byte) []byte { f[17] = 24; return f[:14+24] })},
		{"UDP length beyond the packet", "drop_malformed", change(honest, func(f []byte) []byte { f[14+20+5] = 200; return f })},
		{"TCP header of 8 bytes", "drop_malformed", change(tcp, func(f []byte) []byte { f[14+20+12] = 2 << 4; return f })},
		{"IPv4 fragment that does not end at eight bytes", "drop_malformed", change(honest, func(f []byte) []byte { f[20] = 0x20; return f })},
		{"IPv6 header cut", "drop_malformed", change(honest6, func(f []byte) []byte { return f[:14+30] })},
		{"IPv6 length beyond the frame", "drop_malformed", change(honest6, func(f []byte) []byte { f[19] += 50; return f })},
		{"v4-mapped IPv6", "drop_v4_mapped", change(honest6, func(f []byte) []byte {
			copy(f[14+24:], []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 244, 158, 65})
			return f
		})},
		{"LLDP", "drop_unknown_l3", append(append([]byte{1, 0x80, 0xc2, 0, 0, 0xe}, raw.mac...), append([]byte{0x88, 0xcc}, make([]byte, 46)...)...)},
		{"VLAN", "drop_unknown_l3", change(honest, func(f []byte) []byte {
			return append(append(append([]byte(nil), f[:12]...), 0x81, 0, 0, 5), f[12:]...)
		})},
		{"multicast", "drop_multicast", change(honest, func(f []byte) []byte { p := honest; p.dst = netip.MustParseAddr("224.0.0.251"); return p.frame() })},
	} {
		before := counters(t, w.a)
		ok(t, raw.send(c.frame))
		eventually(t, ctx, func() error {
			got := counters(t, w.a).since(before)
			if got[c.reason+"/from_pod"] != 1 || len(got.drops()) != 1 {
				return fmt.Errorf("%s: want one %s: %v", c.name, c.reason, got)
			}
			return nil
		})
	}
	defer echoUDP(t, w.remote.Netns, port(w.remote.IPv4(), serverPort)).Close()
	datagrams(t, udp(t, w.client.Netns, "", port(w.remote.IPv4(), serverPort), nil), 2, 100)
	for _, p := range capture.Matching(func(p *cluster.Packet) bool { return strings.Contains(string(p.Frame), "MALFORMED") }) {
		t.Errorf("delivered: %v", p)
	}
	ok(t, capture.Close())
}
