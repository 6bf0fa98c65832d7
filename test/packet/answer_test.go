package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const (
	refused = bpf.DpPwReasonPW_REFUSED
	ttlSent = bpf.DpPwReasonPW_TTL_SENT
	ttlDrop = bpf.DpPwReasonPW_DROP_TTL
)

// told: the packet became an answer that [result.unanswered] looks at.
func (r *result) told() bool { return r.counts[refused]+r.counts[ttlSent] != 0 }

// refusal is what a closed port answers to a frame, written from the RFCs and
// apart from the datapath; nil if it must not be answered.
func refusal(in []byte) []byte {
	d, ok := decode(in)
	if !ok || d.later(in) || d.src.IsMulticast() || d.src.IsLoopback() || d.src.IsUnspecified() ||
		d.src.Is4() && (d.src.As4()[0] == 0 || d.src.As4()[0] >= 240) {
		return nil
	}
	switch d.proto {
	case maps.ProtoTCP:
		return reset(in, d)
	case maps.ProtoUDP, maps.ProtoSCTP:
		return aboutPacket(in, [2]byte{3, 3}, [2]byte{1, 4}, 0)
	}
	return nil
}

// reset: RFC 9293 3.10.7.1.
func reset(in []byte, d decoded) []byte {
	seg := d.upper
	flags, be := seg[13], binary.BigEndian
	if flags&rst != 0 {
		return nil
	}
	out := make([]byte, 20)
	copy(out, seg[2:4])
	copy(out[2:], seg[:2])
	out[12], out[13] = 5<<4, rst
	if flags&ack != 0 {
		copy(out[4:8], seg[8:12])
		return turned(in, d, d.proto, out)
	}
	size := uint32(len(seg) - int(seg[12]>>4)*4)
	for _, f := range []byte{syn, fin} {
		if flags&f != 0 {
			size++
		}
	}
	out[13] |= ack
	be.PutUint32(out[8:], be.Uint32(seg[4:])+size)
	return turned(in, d, d.proto, out)
}

// aboutPacket is an ICMP error: type and code by family, the second word.
func aboutPacket(in []byte, v4, v6 [2]byte, word uint32) []byte {
	d, _ := decode(in)
	return aboutPacketBy(d.dst, in, v4, v6, word)
}

// aboutPacketBy is the same as said by a router.
func aboutPacketBy(router netip.Addr, in []byte, v4, v6 [2]byte, word uint32) []byte {
	d, _ := decode(in)
	d.dst = router
	kind, proto, most := v4, uint8(protoICMP), 576-20-8
	if d.v6 {
		kind, proto, most = v6, protoICMP6, 1280-40-8
	}
	quote := in[14 : d.at+len(d.upper)]
	msg := binary.BigEndian.AppendUint32([]byte{kind[0], kind[1], 0, 0}, word)
	return turned(in, d, proto, append(msg, quote[:min(len(quote), most)]...))
}

// turned is the frame back to a frame's sender.
func turned(in []byte, d decoded, proto uint8, upper []byte) []byte {
	out := slices.Concat(in[6:12], in[:6], in[12:14])
	if d.v6 {
		out = append(out, 0x60, 0, 0, 0, byte(len(upper)>>8), byte(len(upper)), proto, 64)
	} else {
		n := 20 + len(upper)
		out = append(out, 0x45, 0, byte(n>>8), byte(n), 0, 0, 0x40, 0, 64, proto, 0, 0)
	}
	out = slices.Concat(out, d.dst.AsSlice(), d.src.AsSlice(), upper)
	mend(out)
	return out
}

// answer is what must go back for this packet, nil if nothing.
func (r *result) answer() []byte {
	why, _ := r.ends()
	if why == ttlDrop {
		return r.timeExceeded()
	}
	if why != noBackend && why != noServicePort {
		return nil
	}
	switch r.shot.hook {
	case fromPod, fromNetdev:
	case toOverlay, toNetdev, toLo:
		if r.shot.iif != "" {
			return nil
		}
	default:
		return nil
	}
	return refusal(r.shot.pkt)
}

// timeExceeded is a router's word to the sender of a packet whose time has
// ended at it, under the node's name; nil for errors, which get none.
func (r *result) timeExceeded() []byte {
	d, ok := decode(r.shot.pkt)
	if !ok || egress(r.shot.hook) {
		return nil
	}
	// A protocol without ports may have nothing in it, which is too little to quote.
	if d.at-14+len(d.upper) < 20+8 {
		return nil
	}
	if icmp := d.proto == protoICMP || d.proto == protoICMP6; icmp && len(d.upper) > 0 {
		kind := d.upper[0]
		if d.proto == protoICMP && kind != 0 && kind != 8 && kind < 13 || d.proto == protoICMP6 && (kind < 128 || kind == 137) {
			return nil
		}
	}
	router := families()[0].nodeA
	if d.v6 {
		router = families()[1].nodeA
	}
	want := aboutPacketBy(router, r.shot.pkt, [2]byte{11, 0}, [2]byte{3, 0}, 0)
	if r.shot.hook == fromOverlay && len(r.out) > 12 {
		copy(want, r.out[:12]) // the peer's, see TestTTL
	}
	return want
}

// unanswered checks that there is an answer where one is due and nowhere
// else, and every byte of it.
func (r *result) unanswered() string {
	want := r.answer()
	switch {
	case want == nil && r.told():
		return "answered what must not be"
	case want != nil && r.counts[refused]+r.counts[ttlSent] != 1:
		return "not answered"
	case want != nil && !slices.Equal(r.out, want):
		return fmt.Sprintf("the answer is not\n     %x:", want)
	case want != nil && wrong(r.out) != "":
		return wrong(r.out) + " checksum of the answer is wrong"
	case want != nil && r.mark&^0x1000 != r.shot.mark&^0x1000:
		return "the answer has another mark"
	}
	return ""
}

// Everything that nobody serves is refused the way a host does it. What the
// answer is made of is checked for every packet, see unanswered.
func TestRefusal(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		src, dst := ap(w.f.client, 40000), ap(w.f.vipEmpty, svcPort)
		for flags := range 64 {
			for _, n := range []int{0, 1, 2, 3, 40, 1400} {
				fr := tcp(src, dst, uint8(flags))
				fr.payload = pattern(n)
				r := w.pod(devClient, fr).ended(noBackend)
				if got := r.counts[refused] == 1; got != (flags&rst == 0) {
					t.Fatalf("TCP flags %#x: refused is %v", flags, got)
				}
			}
		}
		fr := udp(src, dst)
		for n := range 1460 {
			// All that is near a limit of ours or of a quote's length.
			if n > 40 && n < 500 || n > 560 && n < 1180 || n > 1250 && n < 1450 {
				continue
			}
			fr.payload = pattern(n)
			w.pod(devClient, fr).is(noBackend, miss, refused)
		}
		fr.noSum = true
		w.pod(devClient, fr).is(noBackend, miss, refused)
		w.pod(devClient, frame{src: src, dst: ap(w.f.vip, 99), proto: maps.ProtoSCTP, payload: pattern(16)}).
			is(noServicePort, miss, refused)
		// The sums that come out as zero or all ones are right, too.
		pkt, edges := tcp(src, dst, syn).bytes(t), 0
		d, _ := decode(pkt)
		for port := range 1 << 16 {
			binary.BigEndian.PutUint16(d.upper, uint16(port))
			if edge(refusal(pkt)) {
				edges++
				w.run(shot{hook: fromPod, dev: devClient, pkt: pkt}).is(noBackend, miss, refused)
			}
		}
		if edges == 0 {
			t.Error("no answer's checksum is zero or all ones")
		}
	})
}

// edge: the transport checksum is 0 or ffff.
func edge(pkt []byte) bool {
	d, _ := decode(pkt)
	at, cover, _, _ := d.field()
	sum := binary.BigEndian.Uint16(cover[at:])
	return sum == 0 || sum == 0xffff
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(251 * (i + n))
	}
	return b
}

// A packet in any shape: options, extension headers, padding, segmentation.
func TestRefusalOfOddPackets(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		src, dst := ap(w.f.client, 40000), ap(w.f.vipEmpty, svcPort)
		for _, fr := range []frame{tcp(src, dst, syn), tcp(src, dst, ack).with("data"), udp(src, dst)} {
			plain := fr.bytes(t)
			for _, pkt := range w.shapes(fr, plain) {
				w.run(shot{hook: fromPod, dev: devClient, pkt: pkt}).is(noBackend, miss, refused)
			}
			big := fr.with(string(pattern(3000))).bytes(t)
			w.run(shot{hook: fromPod, dev: devClient, pkt: big, gso: 1400}).is(noBackend, miss, refused)
		}
		// To the link's broadcast or a group nothing is answered.
		for _, mac := range [][]byte{{255, 255, 255, 255, 255, 255}, {1, 0, 0x5e, 0, 0, 1}} {
			pkt := udp(src, dst).bytes(t)
			copy(pkt, mac)
			if r := w.fire(shot{hook: fromPod, dev: devClient, pkt: pkt, other: true}); r.counts[noBackend] != 1 || r.counts[refused] != 0 {
				t.Errorf("to MAC %x: %v", mac, r)
			}
		}
	})
}

// shapes are a packet's forms on the wire.
func (w *world) shapes(fr frame, plain []byte) [][]byte {
	w.t.Helper()
	out := [][]byte{append(slices.Clone(plain), make([]byte, 11)...)} // padded by the link
	if !w.f.v6 {
		for n := 1; n <= 9; n++ {
			fr.options = append(fr.options, layers.IPv4Option{OptionType: 1, OptionLength: 1},
				layers.IPv4Option{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}})
			if n <= 7 {
				out = append(out, fr.bytes(w.t))
			}
		}
		return out
	}
	for n := 1; n <= 6; n++ {
		exts := slices.Repeat([]extension{{kind: 60, bytes: 8}}, n)
		out = append(out, extend(w.t, plain, exts...))
	}
	return append(out, extend(w.t, plain, extension{kind: 0, bytes: 64}),
		extend(w.t, plain, extension{44, 8, []byte{0, 0, 0, 0, 0, 9}}))
}
