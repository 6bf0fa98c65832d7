package packet

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/packet/parts"
)

const partMTU = 1400

// loadParts loads single functions of the datapath, see package parts.
var loadParts = sync.OnceValues(func() (*parts.PartsPrograms, error) {
	spec, err := parts.LoadParts()
	if err != nil {
		return nil, err
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	if err := spec.Variables["cfg_mtu"].Set(uint32(partMTU)); err != nil {
		return nil, err
	}
	p := &parts.PartsPrograms{}
	if err := spec.LoadAndAssign(p, nil); err != nil {
		return nil, fmt.Errorf("load parts: %w", err)
	}
	return p, nil
})

// alone runs one function on one frame: its action, and the frame after it.
func alone(t *testing.T, p *ebpf.Program, pkt []byte) (uint32, []byte) {
	t.Helper()
	opts := ebpf.RunOptions{Data: slices.Clone(pkt), DataOut: make([]byte, len(pkt)+2048)}
	act, err := p.Run(&opts)
	if err != nil {
		t.Fatal(err)
	}
	return act, opts.DataOut
}

func partsFor(t *testing.T) *parts.PartsPrograms {
	t.Helper()
	p, err := loadParts()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What does not fit is answered with the MTU, whatever it is, unless it may
// be fragmented, is an error itself or comes from or goes to no single host.
func TestTooBig(t *testing.T) {
	p := partsFor(t)
	both(t, func(t *testing.T, w *world) {
		src, dst := ap(w.f.client, 40000), ap(w.f.remote, 80)
		whole := func(fr frame) []byte { return dontFragment(fr.bytes(t)) }
		for _, n := range []int{0, 1, 500, 1231, 1232, 1401, 1440} {
			for _, fr := range []frame{
				tcp(src, dst, ack), tcp(src, dst, rst), udp(src, dst),
				{src: src, dst: dst, proto: maps.ProtoSCTP}, {src: src, dst: dst, proto: protoGRE}, echo(src.Addr(), dst.Addr(), 7),
			} {
				fr.payload = pattern(n + 8)
				pkt := whole(fr)
				want := aboutPacket(pkt, [2]byte{3, 4}, [2]byte{2, 0}, partMTU)
				if act, out := alone(t, p.PartTooBig, pkt); act != actRedirect || !slices.Equal(out, want) {
					t.Fatalf("%d bytes of protocol %d: action %d\n got  %x\n want %x", n, fr.proto, act, out, want)
				}
			}
		}
		if w.f.v6 {
			// Of nothing but its header, and what a link has put behind it.
			pkt := frame{src: src, dst: dst, proto: protoGRE, payload: pattern(600)}.bytes(t)
			copy(pkt[18:20], []byte{0, 0})
			want := aboutPacket(pkt, [2]byte{3, 4}, [2]byte{2, 0}, partMTU)
			if act, out := alone(t, p.PartTooBig, pkt); act != actRedirect || len(out) != 14+40+8+40 || !slices.Equal(out, want) {
				t.Errorf("no payload: action %d\n got  %x\n want %x", act, out, want)
			}
		}
		silent := map[string][]byte{
			"error":     icmpError(t, src.Addr(), dst.Addr(), udp(dst, src).bytes(t)),
			"multicast": whole(udp(src, ap(w.f.multicast, 80))),
			"from all":  whole(udp(ap(w.f.multicast, 80), dst)),
			"redirect":  icmp(t, src.Addr(), dst.Addr(), [2]byte{5, 1}, make([]byte, 60)),
		}
		if w.f.v6 {
			silent["redirect"] = icmp(t, src.Addr(), dst.Addr(), [2]byte{137, 0}, make([]byte, 60))
		} else {
			silent["no DF"] = udp(src, dst).bytes(t)
		}
		for name, pkt := range silent {
			pkt = slices.Clone(pkt)
			if name != "no DF" {
				dontFragment(pkt)
			}
			if act, out := alone(t, p.PartTooBig, pkt); act != actDrop || !slices.Equal(out, pkt) {
				t.Errorf("%s: action %d, %x", name, act, out)
			}
		}
	})
}

// What still counts as encapsulated is answered in the same words, with
// padding behind them, however long it was.
func TestAnswersToNested(t *testing.T) {
	p := partsFor(t)
	both(t, func(t *testing.T, w *world) {
		src, dst := ap(w.f.client, 40000), ap(w.f.remote, 80)
		padding := 34
		if w.f.v6 {
			padding = 54
		}
		for _, n := range []int{0, 1, 8, 33, 34, 35, 53, 54, 55, 500, 1231, 1232, 1440, 3000} {
			for _, fr := range []frame{tcp(src, dst, ack), tcp(src, dst, syn), udp(src, dst)} {
				fr.payload = pattern(n)
				pkt := dontFragment(fr.bytes(t))
				for name, c := range map[string]struct {
					p    *ebpf.Program
					want []byte
				}{
					"refusal": {p.PartRefuseNested, refusal(pkt)},
					"too big": {p.PartTooBigNested, aboutPacket(pkt, [2]byte{3, 4}, [2]byte{2, 0}, partMTU)},
				} {
					act, out := alone(t, c.p, pkt)
					if act != actRedirect || len(out) != len(c.want)+padding || !slices.Equal(out[:len(c.want)], c.want) {
						t.Fatalf("%s, %d bytes of protocol %d: action %d\n got  %x\n want %x", name, n, fr.proto, act, out, c.want)
					}
				}
			}
		}
	})
}

func dontFragment(pkt []byte) []byte {
	if pkt[12] == 0x08 {
		pkt[20] |= 0x40
		mend(pkt)
	}
	return pkt
}

// The MSS is lowered where it stands, at even and odd places, and nothing
// else is touched: not smaller ones, not options that make no sense.
func TestClampMSS(t *testing.T) {
	p := partsFor(t)
	both(t, func(t *testing.T, w *world) {
		limit := uint16(partMTU - 40)
		if w.f.v6 {
			limit -= 20
		}
		mss := func(n uint16) []byte { return []byte{2, 4, byte(n >> 8), byte(n)} }
		fill := func(n int, kind byte) []byte { return slices.Repeat([]byte{kind}, n) }
		stamps := append([]byte{8, 10}, make([]byte, 8)...)
		for _, c := range []struct {
			name  string
			flags uint8
			opts  []byte
			at    int // of the option that is lowered, -1 = none
		}{
			{"SYN", syn, mss(1460), 0},
			{"SYN-ACK", syn | ack, mss(65535), 0},
			{"just above", syn, mss(limit + 1), 0},
			{"exact", syn, mss(limit), -1},
			{"small", syn, mss(536), -1},
			{"no SYN", ack, mss(1460), -1},
			{"none", syn, nil, -1},
			{"others", syn, append(stamps, 1, 1), -1},
			{"second", syn, slices.Concat(stamps, mss(1460), fill(2, 1)), 10},
			{"odd place", syn, slices.Concat(fill(1, 1), mss(1460), fill(3, 0)), 1},
			{"odd place 2", syn, slices.Concat([]byte{3, 3, 7}, mss(9000), fill(1, 0)), 3},
			{"last", syn, slices.Concat(fill(36, 1), mss(1460)), 36},
			{"last, odd", syn, slices.Concat(fill(35, 1), mss(1460), fill(1, 0)), 35},
			{"behind the end", syn, slices.Concat(fill(4, 0), mss(1460)), -1},
			{"length 0", syn, slices.Concat([]byte{9, 0}, mss(1460), fill(2, 0)), -1},
			{"length 1", syn, slices.Concat([]byte{9, 1}, mss(1460), fill(2, 0)), -1},
			{"beyond the header", syn, slices.Concat([]byte{9, 200}, mss(1460), fill(2, 0)), -1},
			{"cut off", syn, slices.Concat(fill(37, 1), []byte{2, 4, 255}), -1},
			{"wrong length", syn, []byte{2, 6, 255, 255, 255, 255, 0, 0}, -1},
			{"all padding", syn, fill(40, 1), -1},
		} {
			t.Run(c.name, func(t *testing.T) {
				for _, payload := range []int{0, 3, 4} {
					pkt := tcp(ap(w.f.client, 40000), ap(w.f.remote, 80), c.flags).with(string(pattern(payload))).bytes(t)
					pkt = withOptions(pkt, c.opts)
					want, act := slices.Clone(pkt), uint32(0)
					if d, _ := decode(want); c.at >= 0 {
						binary.BigEndian.PutUint16(d.upper[20+c.at+2:], limit)
						mend(want)
						act = 1
					}
					got, out := alone(t, p.PartClampMss, pkt)
					if got != act || !slices.Equal(out, want) {
						t.Errorf("returned %d, want %d\n in   %x\n got  %x\n want %x", got, act, pkt, out, want)
					}
				}
			})
		}
		for _, fr := range []frame{udp(ap(w.f.client, 1), ap(w.f.remote, 2)), echo(w.f.client, w.f.remote, 3)} {
			if act, out := alone(t, p.PartClampMss, fr.bytes(t)); act != 0 || !slices.Equal(out, fr.bytes(t)) {
				t.Errorf("not TCP: %d, %x", act, out)
			}
		}
	})
}

// withOptions puts options between a TCP header and its payload.
func withOptions(pkt, opts []byte) []byte {
	d, _ := decode(pkt)
	out := slices.Insert(slices.Clone(pkt), d.at+20, opts...)
	out[d.at+12] = byte(5+len(opts)/4) << 4
	if d.v6 {
		binary.BigEndian.PutUint16(out[18:], uint16(len(out)-54))
	} else {
		binary.BigEndian.PutUint16(out[16:], uint16(len(out)-14))
	}
	mend(out)
	return out
}
