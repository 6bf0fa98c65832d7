package packet

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/maps"
)

// BenchmarkFirstPacket is what a first packet costs with few rules and with
// many on the pod it is for: one that is denied, since that creates nothing
// and the next is a first packet too. Each round measures all; the figures
// are medians, and ratios to one rule within a round.
func BenchmarkFirstPacket(b *testing.B) {
	const repeat = 20000
	rules := []int{1, 1000, 10000}
	for _, f := range families() {
		b.Run(f.name, func(b *testing.B) {
			w := newWorld(b, f)
			all := make(map[maps.PolicyKey]maps.PolicyEntry)
			for i, n := range rules {
				for r := range n {
					all[maps.PolicyKey{Table: uint32(10 + i), Identity: 5000 + uint32(r/100), Kind: maps.PolicyPort, Proto: maps.ProtoTCP, Port: uint16(1000 + r%100)}] =
						maps.PolicyEntry{Rule: uint32(r + 1), Verdict: maps.VerdictAllow}
				}
			}
			if err := w.set.Policy.PutAll(all); err != nil {
				b.Fatal(err)
			}
			fr := tcp(ap(w.f.client, 1), ap(w.f.local, podPort), syn)
			w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 10 })
			if why, _ := w.pod(devClient, fr).ends(); why != ingressDenied {
				b.Fatalf("%v", why)
			}
			pkt := fr.bytes(b)
			copy(pkt, w.devs[devClient].mac)
			took := make([][]float64, len(rules))
			ratios := make([][]float64, len(rules))
			for b.Loop() {
				for i := range rules {
					w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = uint32(10 + i) })
					start := time.Now()
					act, err := w.objs.FromPod.Run(&ebpf.RunOptions{Data: pkt, Repeat: repeat, Context: &skBuff{Ifindex: w.index(devClient)}})
					if err != nil || act != actDrop {
						b.Fatalf("%d rules: action %d, %v", rules[i], act, err)
					}
					took[i] = append(took[i], float64(time.Since(start).Nanoseconds())/repeat)
				}
				for i := range rules {
					ratios[i] = append(ratios[i], took[i][len(took[i])-1]/took[0][len(took[0])-1])
				}
			}
			w.noEntry(fr)
			for i, n := range rules {
				slices.Sort(took[i])
				slices.Sort(ratios[i])
				b.ReportMetric(took[i][len(took[i])/2], fmt.Sprintf("ns/%d-rules", n))
				b.ReportMetric(ratios[i][len(ratios[i])/2], fmt.Sprintf("ratio/%d-rules", n))
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
