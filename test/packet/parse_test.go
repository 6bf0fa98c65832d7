package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/tunnel"
)

const (
	malformed   = bpf.DpPwReasonPW_DROP_MALFORMED
	unknownL3   = bpf.DpPwReasonPW_DROP_UNKNOWN_L3
	extHeaders  = bpf.DpPwReasonPW_DROP_EXT_HEADERS
	v4Mapped    = bpf.DpPwReasonPW_DROP_V4MAPPED
	multicasted = bpf.DpPwReasonPW_DROP_MULTICAST
)

// proper is a packet of every protocol that is fine at a hook.
func (w *world) proper(h hook) []frame {
	f := w.f
	src, dst := f.client, f.local
	switch h {
	case toPod:
		src, dst = f.nodeA, f.client
	case fromNetdev:
		src, dst = f.world, f.client
	case fromOverlay:
		src, dst = f.remote, f.client
	case toOverlay:
		src, dst = f.nodeA, f.remote
	}
	return []frame{
		tcp(ap(src, 1000), ap(dst, podPort), syn).with("payload"),
		udp(ap(src, 1000), ap(dst, podPort)),
		echo(src, dst, 9).with("payload"),
		{src: ap(src, 1000), dst: ap(dst, podPort), proto: maps.ProtoSCTP},
	}
}

// expect runs a packet that no flow may come of.
func (w *world) expect(h hook, pkt []byte, want reason) {
	w.t.Helper()
	s := w.at(h, pkt)
	r := w.run(s)
	if why, _ := r.ends(); why != want {
		w.t.Fatalf("%s: %v, want %s: %x", maps.HookName(h), r, maps.ReasonName(want), pkt)
	}
	if r.counts[created] != 0 {
		w.t.Fatalf("%s: a flow came of it: %v: %x", maps.HookName(h), r, pkt)
	}
}

// setLength writes the IP header's length field.
func setLength(pkt []byte, n int) {
	if pkt[12] == 0x86 {
		binary.BigEndian.PutUint16(pkt[18:], uint16(n-40))
		return
	}
	binary.BigEndian.PutUint16(pkt[16:], uint16(n))
}

// Cut anywhere, a packet is never followed, and never left to the kernel
// once its destination can be read.
func TestTruncated(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		header := 34
		if w.f.v6 {
			header = 54
		}
		upper := map[uint8]int{maps.ProtoTCP: 20, maps.ProtoUDP: 8, protoICMP: 8, maps.ProtoSCTP: 12}
		for _, h := range hooks() {
			for _, fr := range w.proper(h) {
				whole := fr.bytes(t)
				for n := 14; n < len(whole); n++ {
					want := malformed
					if h == fromNetdev && n < header {
						want = passed // not known to be for a pod
					}
					s := w.at(h, whole)
					s.cut = n
					w.run(s).is(want)
					// Cut, and the length field made to fit.
					if n < header || n >= header+upper[fr.proto] {
						continue
					}
					cut := append([]byte(nil), whole[:n]...)
					setLength(cut, n-14)
					mend(cut)
					w.expect(h, cut, malformed)
				}
			}
		}
	})
}

func TestBadLengths(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		l4, length := 34, 16
		if w.f.v6 {
			l4, length = 54, 18
		}
		set16 := func(at, v int) func([]byte) {
			return func(p []byte) { binary.BigEndian.PutUint16(p[at:], uint16(v)) }
		}
		type change struct {
			name  string
			proto uint8 // 0 = any
			do    func([]byte)
			v     int // 4 or 6 alone; 0 = both
		}
		for _, c := range []change{
			{"version 5", 0, func(p []byte) { p[14] = 0x55 }, 0},
			{"version of the other family", 0, func(p []byte) { p[14] ^= 0x20 }, 0},
			{"header of 16 bytes", 0, func(p []byte) { p[14] = 0x44 }, 4},
			{"header longer than the packet", 0, set16(length, 20), 4},
			{"shorter than its header", 0, set16(length, 19), 4},
			{"longer than the frame", 0, set16(length, 1400), 0},
			{"nothing behind the header", 0, set16(length, 0), 6},
			{"data offset 4", maps.ProtoTCP, func(p []byte) { p[l4+12] = 0x40 }, 0},
			{"data offset behind the end", maps.ProtoTCP, func(p []byte) { p[l4+12] = 0xf0 }, 0},
			{"UDP length 7", maps.ProtoUDP, set16(l4+4, 7), 0},
			{"UDP length 0", maps.ProtoUDP, set16(l4+4, 0), 0},
			{"UDP length behind the end", maps.ProtoUDP, set16(l4+4, 17), 0},
			{"ICMP of the other family", protoICMP, func(p []byte) {
				setProto(p, map[bool]uint8{false: protoICMP6, true: protoICMP}[w.f.v6])
			}, 0},
		} {
			if c.v == 4 && w.f.v6 || c.v == 6 && !w.f.v6 {
				continue
			}
			for _, h := range hooks() {
				for _, fr := range w.proper(h) {
					if c.proto != 0 && fr.proto != c.proto {
						continue
					}
					pkt := fr.bytes(t)
					c.do(pkt)
					want := malformed
					if h == fromNetdev && c.name[:7] == "version" {
						want = passed // not even an address can be read
					}
					t.Run(c.name, func(t *testing.T) {
						w.t = t
						w.expect(h, pkt, want)
					})
				}
			}
		}
	})
}

// The length of a segment that is still to be cut up may be left out.
func TestGSOLengths(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		pkt := w.proper(fromPod)[0].with(string(make([]byte, 1500))).bytes(t)
		s := w.at(fromPod, pkt)
		s.gso = 700
		w.run(s).is(fwdLocal, miss, created)
	})
}

// Options are stepped over; what stands behind them is what counts.
func TestIPOptions(t *testing.T) {
	w := newWorld(t, families()[0])
	for n := 1; n <= 40; n++ {
		fr := tcp(ap(w.f.client, uint16(n)), ap(w.f.vipLocal, svcPort), syn)
		for range n {
			fr.options = append(fr.options, layers.IPv4Option{OptionType: 1})
		}
		w.pod(devClient, fr).is(fwdLocal, miss, created).leaves(fr.src, ap(w.f.local, podPort))
		in := tcp(ap(w.f.local, podPort), fr.src, syn|ack)
		in.options = fr.options
		w.pod(devLocal, in).is(fwdLocal, hitNew).leaves(fr.dst, fr.src)
	}
}

// Extension headers are walked, up to a bound, and stay in place.
func TestExtensionHeaders(t *testing.T) {
	w := newWorld(t, families()[1])
	hbh, routing, dest := extension{kind: 0, bytes: 8}, extension{kind: 43, bytes: 24}, extension{kind: 60, bytes: 8}
	auth, atomic := extension{kind: 51, bytes: 24}, extension{kind: 44, bytes: 8, body: []byte{0, 0, 1, 2, 3, 4}}
	port := uint16(1000)
	for _, chain := range [][]extension{
		{hbh}, {dest}, {routing}, {auth}, {atomic}, {hbh, routing, dest}, {hbh, atomic, auth, dest},
		{hbh, dest, routing, atomic, auth}, {hbh, dest, routing, atomic, dest, dest},
	} {
		port++
		for _, fr := range []frame{
			tcp(ap(w.f.client, port), ap(w.f.vipLocal, svcPort), syn),
			udp(ap(w.f.client, port), ap(w.f.vipLocal, svcPort)),
		} {
			pkt := extend(t, fr.bytes(t), chain...)
			r := w.run(w.at(fromPod, pkt)).is(fwdLocal, miss, created).leaves(fr.src, ap(w.f.local, podPort))
			if len(r.out) != len(pkt) {
				t.Fatalf("%d bytes of %d left", len(r.out), len(pkt))
			}
			// The same flow without them.
			w.pod(devClient, fr).is(fwdLocal, hitNew)
		}
	}
	for name, chain := range map[string][]extension{
		"seven headers":    {hbh, dest, dest, dest, dest, dest, dest},
		"one long header":  {{kind: 60, bytes: 128}},
		"the longest":      {{kind: 60, bytes: 2048}},
		"three long ones":  {{kind: 60, bytes: 40}, {kind: 60, bytes: 40}, {kind: 60, bytes: 48}},
		"a long AH header": {{kind: 51, bytes: 1028}},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			for _, h := range hooks() {
				w.expect(h, extend(t, w.proper(h)[0].bytes(t), chain...), extHeaders)
			}
		})
	}
	// Six are accepted, whatever comes behind them.
	six := []extension{hbh, dest, dest, dest, dest, dest}
	none := frame{src: ap(w.f.client, 0), dst: ap(w.f.local, 0), proto: 59}
	w.run(w.at(fromPod, extend(t, none.bytes(t), six...))).is(fwdLocal, miss, created)
	// Cut inside the chain, with the length made to fit.
	for _, h := range hooks() {
		whole := extend(t, w.proper(h)[0].bytes(t), hbh, routing, auth)
		for n := 54; n < 54+8+24+24+20; n++ {
			cut := append([]byte(nil), whole[:n]...)
			setLength(cut, n-14)
			w.expect(h, cut, malformed)
		}
	}
}

// What is neither IPv4 nor IPv6 is none of a pod's business.
func TestOtherEtherTypes(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		inner := w.proper(fromPod)[0].bytes(t)
		kinds := map[string][]byte{
			"LLDP":         ethernet(0x88cc, make([]byte, 46)),
			"VLAN tag":     ethernet(0x8100, append([]byte{0, 5, inner[12], inner[13]}, inner[14:]...)),
			"QinQ":         ethernet(0x88a8, append([]byte{0, 5, 0x81, 0}, inner[14:]...)),
			"MPLS":         ethernet(0x8847, inner[14:]),
			"PPPoE":        ethernet(0x8864, inner[14:]),
			"802.3 length": ethernet(46, make([]byte, 46)),
			"zero":         ethernet(0, make([]byte, 46)),
			"EAPOL":        ethernet(0x888e, nil),
		}
		for name, pkt := range kinds {
			t.Run(name, func(t *testing.T) {
				w.t = t
				for _, h := range hooks() {
					want := unknownL3
					if h == fromNetdev {
						want = passed
					}
					w.expect(h, pkt, want)
				}
			})
		}
		arp := ethernet(0x0806, make([]byte, 28))
		for h, want := range map[hook]reason{
			fromPod: passed, toPod: passed, fromNetdev: passed,
			fromOverlay: multicasted, toOverlay: multicasted,
		} {
			w.expect(h, arp, want)
			w.expect(h, arp[:14], want)
		}
	})
}

// The link's own messages pass on the link they are for, and nowhere else.
func TestNeighbourDiscovery(t *testing.T) {
	w := newWorld(t, families()[1])
	f := w.f
	a := netip.MustParseAddr
	linkLocal, gateway, solicited := a("fe80::42"), a("fe80::1"), a("ff02::1:ff00:41")
	none := map[hook]reason{
		fromPod: passed, toPod: passed, fromNetdev: passed, fromOverlay: multicasted, toOverlay: multicasted,
	}
	kinds := []byte{130, 131, 132, 133, 134, 135, 136, 137, 143}
	for i := range 2 * len(kinds) {
		kind := kinds[i%len(kinds)]
		if i == len(kinds) { // isolated in both directions, and all the same
			w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut, e.PolicyIn = 1, 1 })
		}
		for _, c := range []struct{ src, dst netip.Addr }{
			{linkLocal, gateway}, {f.client, gateway}, {linkLocal, solicited}, {a("::"), solicited},
			{f.client, a("ff02::16")}, {linkLocal, a("ff02::1")},
		} {
			pkt := icmp(t, c.src, c.dst, [2]byte{kind, 0}, make([]byte, 20))
			for h, want := range none {
				w.expect(h, pkt, want)
			}
		}
	}
	// The same types between addresses that are routed would be forwarded by
	// the host: they are packets like any other, source and policy included.
	for _, kind := range []byte{130, 133, 135, 136, 137, 143} {
		solicit := func(src, dst netip.Addr) []byte {
			return icmp(t, src, dst, [2]byte{kind, 0}, make([]byte, 20))
		}
		w.expect(fromPod, solicit(f.client, f.local), bpf.DpPwReasonPW_DROP_POLICY_EGRESS)
		w.expect(fromPod, solicit(f.client, f.world), bpf.DpPwReasonPW_DROP_POLICY_EGRESS)
		w.expect(fromPod, solicit(f.local, f.remote), spoofedSource)
		w.expect(fromNetdev, solicit(f.world, f.client), bpf.DpPwReasonPW_DROP_POLICY_INGRESS)
		w.expect(fromOverlay, solicit(f.remote, f.client), bpf.DpPwReasonPW_DROP_POLICY_INGRESS)
		s := w.at(toPod, solicit(f.world, f.client))
		s.iif = devWire
		w.run(s).is(bpf.DpPwReasonPW_DROP_POLICY_INGRESS, miss)
	}
}

// A v4-mapped address on the wire would be taken for IPv4 by every map.
func TestV4Mapped(t *testing.T) {
	w := newWorld(t, families()[1])
	for _, mapped := range []string{"::ffff:10.244.80.66", "::ffff:10.244.158.65", "::ffff:8.8.8.8", "::ffff:127.0.0.1"} {
		for _, h := range hooks() {
			for i, fr := range w.proper(h) {
				pkt := fr.bytes(t)
				m := netip.MustParseAddr(mapped).As16()
				copy(pkt[22+16*(i%2):], m[:])
				mend(pkt)
				w.expect(h, pkt, v4Mapped)
			}
		}
	}
}

func TestMulticastAndBroadcast(t *testing.T) {
	groups := map[bool][]string{
		false: {"224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1"},
		true:  {"ff02::1", "ff02::fb", "ff05::2", "ff0e::1234"},
	}
	both(t, func(t *testing.T, w *world) {
		for _, group := range groups[w.f.v6] {
			for _, h := range hooks() {
				want := multicasted
				if h == fromNetdev {
					want = passed
				}
				fr := w.proper(h)[1]
				fr.dst = ap(netip.MustParseAddr(group), 5353)
				w.expect(h, fr.bytes(t), want)
			}
		}
	})
}

// Frames for other machines, which a bridge floods, are not looked at on the
// node's devices; a pod's are, whatever MAC it writes.
func TestForeignMAC(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		s := w.at(fromNetdev, w.proper(fromNetdev)[0].bytes(t))
		s.other = true
		copy(s.pkt, []byte{2, 9, 9, 9, 9, 9})
		if r := w.run(s); r.action != actNext {
			t.Fatalf("action %d", int32(r.action))
		}
		w.noEntry(w.proper(fromNetdev)[0])
		for _, fr := range []frame{w.proper(fromPod)[0], tcp(ap(w.f.client, 9), ap(w.f.nodeA, 9), syn)} {
			s = w.at(fromPod, fr.bytes(t))
			s.other = true
			copy(s.pkt, []byte{2, 9, 9, 9, 9, 9})
			w.run(s)
			w.entry(fr)
		}
	})
}

// What a hook of ours has decided is not decided again: the mark says so,
// and goes no further.
func TestMarkIsTakenOnce(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, h := range []hook{toPod, toOverlay} {
			s := w.at(h, w.proper(h)[0].bytes(t))
			s.mark = 0x1000 | 0x4001
			if r := w.run(s); r.mark != 0x4001 || r.action != actNext {
				t.Fatalf("%s: action %d, mark %#x", maps.HookName(h), int32(r.action), r.mark)
			}
			w.noEntry(w.proper(h)[0])
			// Others' marks mean nothing here, and are left alone.
			s.mark = 0xc000
			if r := w.run(s); r.counts[created] != 1 || r.mark&^0x1000 != 0xc000 {
				t.Fatalf("%s: %v, mark %#x", maps.HookName(h), r, r.mark)
			}
		}
	})
}

func TestTTL(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, ttl := range []uint8{1, 2, 255} {
			for _, rd := range w.roads() {
				t.Run(fmt.Sprintf("%s %d", rd.name, ttl), func(t *testing.T) {
					w := newWorld(t, w.f)
					rd := w.road(rd.name)
					fr := tcp(ap(rd.src, 40000), ap(rd.asked, svcPort), syn)
					fr.ttl = ttl
					r := rd.send(fr)
					routed := r.shot.hook != toPod && r.shot.hook != toOverlay && rd.out != fwdHost
					switch {
					case routed && ttl == 1:
						r.ended(ttlDrop)
						if r.counts[ttlSent] != 1 {
							t.Fatalf("its sender is not told: %v", r)
						}
						if src, dst := [6]byte(r.out[6:12]), [6]byte(r.out[:6]); r.shot.hook == fromOverlay && (dst != mac(0xb) || src != tunnel.SourceMAC) {
							t.Fatalf("back to MAC %x from %x", dst, src)
						}
					case routed:
						if r.ended(rd.out); r.ttl() != ttl-1 {
							t.Fatalf("left with %d", r.ttl())
						}
					default: // the stack's, or not a router's step
						if r.ended(rd.out); r.ttl() != ttl {
							t.Fatalf("left with %d", r.ttl())
						}
					}
				})
			}
		}
	})
}
