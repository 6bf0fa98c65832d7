package packet

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// mutate spoils a packet in one to four ways, and sometimes mends its
// checksums afterwards so that it is wrong but valid.
func mutate(r *rand.Rand, pkt []byte) []byte {
	out := append([]byte(nil), pkt...)
	for range 1 + r.IntN(4) {
		at := 12 + r.IntN(len(out)-12)
		switch r.IntN(7) {
		case 0:
			out[at] ^= 1 << r.IntN(8)
		case 1:
			out[at] = byte(r.Uint32())
		case 2:
			out[at] = [...]byte{0, 1, 0x7f, 0x80, 0xff, 44, 60}[r.IntN(7)]
		case 3: // headers, where it hurts
			out[min(14+r.IntN(60), len(out)-1)] = byte(r.Uint32())
		case 4:
			if n := 54 + r.IntN(len(out)); n < len(out) {
				out = out[:n]
			}
		case 5:
			out = append(out, make([]byte, r.IntN(64))...)
		case 6:
			if len(out) > 60 {
				setLength(out, 40+r.IntN(len(out)))
			}
		}
	}
	if r.IntN(2) == 0 {
		mend(out)
	}
	return out
}

// A tunnel packet that the datapath takes out of its header itself fares as it
// would behind the device, whatever is in it and whichever flow it is of.
func TestDecapIsTheDevices(t *testing.T) {
	const packets = 4000
	both(t, func(t *testing.T, w *world) {
		w.fill()
		w.ways()
		// Peers that nobody may be, and a pod that hears nobody.
		w.edit(w.f.third, func(e *maps.Endpoint) { e.PolicyIn = 1 })
		var seeds [][]byte
		for _, dst := range []netip.Addr{w.f.client, w.f.third, w.f.free, w.f.nodeA, w.f.vip, w.f.world} {
			for _, src := range []netip.Addr{w.f.remote, w.f.nodeB, w.f.far, w.f.local, w.f.world, w.f.vip} {
				for _, fr := range []frame{
					tcp(ap(src, 1000), ap(dst, podPort), syn).with("payload"),
					tcp(ap(src, 1000), ap(dst, podPort), ack),
					tcp(ap(src, 1000), ap(dst, podPort), syn|ack),
					tcp(ap(src, 1000), ap(dst, podPort), rst),
					udp(ap(src, 1000), ap(dst, podPort)),
					echo(src, dst, 9).with("payload"),
					{src: ap(src, 1000), dst: ap(dst, podPort), proto: maps.ProtoSCTP},
				} {
					seeds = append(seeds, fr.bytes(t))
				}
			}
		}
		r := rand.New(rand.NewPCG(7, 42))
		stripped := 0
		for range packets {
			pkt := seeds[r.IntN(len(seeds))]
			if r.IntN(3) > 0 {
				pkt = mutate(r, pkt)
			}
			if len(pkt) > 3000 {
				pkt = pkt[:3000]
			}
			for len(pkt) < 54 {
				pkt = append(pkt, 0)
			}
			ask := tcp(ap(w.f.client, podPort), ap(w.f.remote, 1000), syn)
			again := r.IntN(2) == 0 // of a flow from here that is known
			reset := func() {
				clear(w, w.set.Flows)
				clear(w, w.set.FlowsNew)
				if again {
					w.pod(devClient, ask).is(fwdEncap, miss, created)
				}
			}
			reset()
			got := w.run(w.at(fromNetdev, w.wrap(outer().nodeB, pkt)))
			if got.counts[passed] != 0 {
				continue
			}
			stripped++
			reset()
			want := w.run(w.tunnelShot(outer().nodeB, pkt))
			a, _ := got.ends()
			b, _ := want.ends()
			if a == fwdDecap {
				a = fwdLocal
			}
			if a != b || got.action != want.action || !maps.IsDrop(a) && !bytes.Equal(got.out, want.out) {
				t.Fatalf("%v, behind the device %v\n in  %x\n out %x\n and %x", got, want, pkt, got.out, want.out)
			}
		}
		if stripped < packets/20 {
			t.Errorf("only %d of %d packets were taken out", stripped, packets)
		}
		t.Logf("%d of %d packets were taken out", stripped, packets)
	})
}
