package packet

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/loader"
)

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
