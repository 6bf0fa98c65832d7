package packet

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
)

// A flow that entered from outside is limited to the tunnel when it is known,
// too: the slow path does it, and the packet is one of the flow all the same.
func TestKnownFlowIsLimited(t *testing.T) {
	const clamped, tooBig, told = bpf.DpPwReasonPW_MSS_CLAMPED, bpf.DpPwReasonPW_DROP_TOO_BIG, bpf.DpPwReasonPW_TOO_BIG_SENT
	both(t, func(t *testing.T, w *world) {
		w.ways()
		most := uint16(innerMTU - 40)
		if w.f.v6 {
			most -= 20
		}
		mss := func(fr frame) []byte { return withOptions(fr.bytes(t), []byte{2, 4, 0x05, 0xb4}) }
		limited := func(r *result) {
			t.Helper()
			d, _ := decode(r.inner())
			if got := binary.BigEndian.Uint16(d.upper[22:]); got != most {
				t.Fatalf("MSS %d, want %d", got, most)
			}
		}
		sent := tcp(ap(w.f.world, 40000), ap(w.f.lb, svcPort), syn)
		r := w.run(w.at(fromNetdev, mss(sent))).is(fwdEncap, miss, created, clamped)
		limited(r)
		back := w.talk(r, sent, ap(w.f.remote, podPort)).back()
		back.flags = syn | ack
		limited(w.run(w.tunnelShot(w.f.nodeB, mss(back))).is(fwdWire, hitNew, clamped).leaves(sent.dst, sent.src))

		sent.flags = ack
		w.wire(sent).is(fwdEncap, hitNew, confirmed)
		fits := sent.with(string(pattern(int(most))))
		w.wire(fits).is(fwdEncap, hit)
		pkt := dontFragment(sent.with(string(pattern(int(most) + 1))).bytes(t))
		r = w.fire(w.at(fromNetdev, pkt))
		if want := aboutPacket(r.shot.pkt, [2]byte{3, 4}, [2]byte{2, 0}, innerMTU); r.action != actRedirect || !slices.Equal(r.out, want) {
			t.Fatalf("action %d\n got  %x\n want %x", r.action, r.out, want)
		}
		r.is(tooBig, hit, told)
		if !w.f.v6 {
			// It may be fragmented, which the device does.
			w.wire(sent.with(string(pattern(int(most)+1)))).is(fwdTunnel, hit)
		}
	})
}

// Whoever sends from outside gets so many errors and no more; resets, and
// what pods are told, are not limited. After a while there are errors again.
func TestErrorsAreLimited(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			d, err := loadAs(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024}, func(spec *ebpf.CollectionSpec) {
				if err := spec.Variables["cfg_errors_per_sec"].Set(uint32(10)); err != nil {
					t.Fatal(err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			w := &world{t: t, f: f, datapath: d}
			w.fill()
			outside := udp(ap(f.world, 40000), ap(f.vipEmpty, svcPort))
			const sent, burst = 400, 50
			began, told := time.Now(), 0
			for range sent {
				r := w.fire(w.at(fromNetdev, outside.bytes(t))).ended(noBackend)
				if r.counts[refused] != 0 {
					told++
				}
			}
			// One CPU or another: each has a burst, and ten more a second.
			if most := 2 * (burst + 2 + int(10*time.Since(began).Seconds())); told < burst || told > most {
				t.Fatalf("%d of %d answered, want %d at least and %d at most", told, sent, burst, most)
			}
			for range 100 {
				w.wire(tcp(outside.src, outside.dst, syn)).is(noBackend, miss, refused)
				w.pod(devClient, udp(ap(f.client, 40000), outside.dst)).is(noBackend, miss, refused)
			}
			until := time.Now().Add(10 * time.Second)
			for w.fire(w.at(fromNetdev, outside.bytes(t))).counts[refused] == 0 {
				if time.Now().After(until) {
					t.Fatal("no error any more")
				}
			}
			if err := d.objs.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
