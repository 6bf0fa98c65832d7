package packet

import (
	"encoding/binary"
	"hash/crc32"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// sctpLengths are payloads behind the common header: none, every length of
// the last bits, and those around powers of two, as far as a test run goes.
func sctpLengths() []int {
	var out []int
	for n := range 70 {
		out = append(out, n)
	}
	for _, total := range []int{256, 1024, 1452, 1480, 1501, 2048, 3001, 3400} {
		out = append(out, total-13, total-12, total-11)
	}
	return out
}

// An SCTP service with another target port: packets of every length have the
// CRC that is computed anew from all their bytes, there and back.
func TestSCTPPortTranslation(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		src, vip, real := ap(w.f.client, 40000), ap(w.f.vip, sctpXlate), ap(w.f.third, sctpPort+5)
		first := frame{src: src, dst: vip, proto: maps.ProtoSCTP, payload: []byte{1, 0, 0, 4}}
		w.pod(devClient, first).is(fwdLocal, miss, created).leaves(src, real)
		for _, n := range sctpLengths() {
			data := make([]byte, n)
			for i := range data {
				data[i] = byte(i*i + n)
			}
			there := frame{src: src, dst: vip, proto: maps.ProtoSCTP, payload: data}
			back := frame{src: real, dst: src, proto: maps.ProtoSCTP, payload: data}
			w.sctpIs(w.pod(devClient, there).ended(fwdLocal), there, frame{src: src, dst: real})
			w.sctpIs(w.pod(devThird, back).ended(fwdLocal), back, frame{src: vip, dst: src})
		}
		if e := w.entry(first); !e.confirmed || !e.is(flagXlate) {
			t.Fatalf("the association is not established: %+v", e)
		}
	})
}

// Longer packets than a test run takes: what the CRC is multiplied by for
// every bit of a length, held against CRCs of so many zeros.
func TestSCTPLongPackets(t *testing.T) {
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	var zeros [16]uint32
	if err := spec.Variables["pw_crc_zeros"].Get(&zeros); err != nil {
		t.Fatal(err)
	}
	table := crc32.MakeTable(crc32.Castagnoli)
	for k, got := range zeros {
		// The register holds 1 (bit 31), shifted through 2^k bytes: Update
		// complements before and after.
		if want := ^crc32.Update(^uint32(1<<31), table, make([]byte, 1<<k)); got != want {
			t.Errorf("%d bytes: %#x, want %#x", 1<<k, got, want)
		}
	}
}

// sctpIs holds the packet that left against one that is built as it should be.
func (w *world) sctpIs(r *result, in, want frame) {
	w.t.Helper()
	r.leaves(want.src, want.dst)
	got, ok := decode(r.out)
	if !ok || got.proto != maps.ProtoSCTP {
		w.t.Fatalf("what left is no SCTP packet: %x", r.out)
	}
	in.src, in.dst = want.src, want.dst
	built, _ := decode(in.bytes(w.t))
	if string(got.upper) != string(built.upper) {
		w.t.Fatalf("%d bytes of payload: left as\n%x, want\n%x", len(in.payload), got.upper[:12], built.upper[:12])
	}
}

// What stands around the packet is none of the CRC's: options, extension
// headers, the padding of a short frame.
func TestSCTPPortTranslationFraming(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		src, vip, real := ap(w.f.client, 40000), ap(w.f.vip, sctpXlate), ap(w.f.third, sctpPort+5)
		fr := frame{src: src, dst: vip, proto: maps.ProtoSCTP}
		want := frame{src: src, dst: real}
		for n := range 9 {
			fr.payload = make([]byte, n)
			fr.options = nil
			pkt := fr.bytes(t)
			padded := append(append([]byte(nil), pkt...), "padding of a short frame"...)
			w.sctpIs(w.run(w.at(fromPod, padded)).ended(fwdLocal), fr, want)
			if w.f.v6 {
				w.sctpIs(w.run(w.at(fromPod, extend(t, pkt, extension{kind: 60, bytes: 8 + 8*n}))).ended(fwdLocal), fr, want)
				continue
			}
			for range n + 1 {
				fr.options = append(fr.options, layers.IPv4Option{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}})
			}
			w.sctpIs(w.pod(devClient, fr).ended(fwdLocal), fr, want)
		}
	})
}

// A CRC of 0 is one that is still to be filled in, and stays 0; a wrong one
// stays wrong.
func TestSCTPChecksumThatIsNotThere(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		src, vip, real := ap(w.f.client, 40000), ap(w.f.vip, sctpXlate), ap(w.f.third, sctpPort+5)
		fr := frame{src: src, dst: vip, proto: maps.ProtoSCTP, payload: []byte("chunk")}
		pkt := fr.bytes(t)
		d, _ := decode(pkt)
		right := binary.LittleEndian.Uint32(d.upper[8:])
		clearBytes(d.upper[8:12])
		for _, gso := range []uint32{0, 100} {
			s := w.at(fromPod, pkt)
			s.gso = gso
			r := w.run(s).ended(fwdLocal).leaves(src, real)
			if out, _ := decode(r.out); string(out.upper[8:12]) != "\x00\x00\x00\x00" {
				t.Fatalf("gso %d: the CRC %x appeared", gso, out.upper[8:12])
			}
		}
		binary.LittleEndian.PutUint32(d.upper[8:], right^1)
		if r := w.run(w.at(fromPod, pkt)).ended(fwdLocal); wrong(r.out) == "" {
			t.Fatal("a wrong CRC was made right")
		}
	})
}

// The reply tuple is taken: an SCTP association gets another source port like
// TCP's and UDP's, with the service's port translated or not.
func TestSCTPSourcePort(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		real := ap(w.f.third, sctpPort+5)
		direct := frame{dst: real, proto: maps.ProtoSCTP, payload: []byte("direct")}
		service := frame{dst: ap(w.f.vip, sctpXlate), proto: maps.ProtoSCTP, payload: []byte("by the service")}
		for i, order := range [][2]frame{{service, direct}, {direct, service}} {
			first, second := order[0], order[1]
			first.src = ap(w.f.client, uint16(40000+i))
			second.src = first.src
			w.pod(devClient, first).is(fwdLocal, miss, created).leaves(first.src, real)
			r := w.pod(devClient, second).is(fwdLocal, miss, portChanged)
			d, _ := decode(r.out)
			port, _ := d.ports()
			if !givable(port) {
				t.Fatalf("source port %d", port)
			}
			w.sctpIs(r, second, frame{src: ap(w.f.client, port), dst: real})
			for _, c := range []struct {
				fr frame
				to uint16
			}{{first, first.src.Port()}, {second, port}} {
				answer := frame{src: real, dst: ap(w.f.client, c.to), proto: maps.ProtoSCTP, payload: []byte("answer")}
				w.sctpIs(w.pod(devThird, answer).is(fwdLocal, hitNew), answer, frame{src: c.fr.dst, dst: c.fr.src})
				w.pod(devClient, c.fr).is(fwdLocal, hitNew, confirmed)
			}
		}
	})
}
