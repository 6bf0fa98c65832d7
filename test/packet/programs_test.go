package packet

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// ported gives copies of a packet other source ports; a packet in VXLAN, its
// inner one.
type ported struct {
	pkt []byte
	at  int // of the frame that has the ports
	off int // of the source port in the packet
}

func newPorted(pkt []byte) *ported {
	p := &ported{pkt: slices.Clone(pkt)}
	d, _ := decode(p.pkt)
	if _, dport := d.ports(); d.proto == maps.ProtoUDP && dport == 4789 {
		p.at = tunnelHeader
		d, _ = decode(p.pkt[p.at:])
	}
	p.off = p.at + d.at
	return p
}

func (p *ported) from(port uint16) []byte {
	binary.BigEndian.PutUint16(p.pkt[p.off:], port)
	mend(p.pkt[p.at:])
	return p.pkt
}

// empty removes all flows.
func (w *world) empty() {
	w.t.Helper()
	clear(w, w.set.Flows)
	clear(w, w.set.FlowsNew)
}

const runs = 1000

// world prepares a world for the way, and gives its packets.
func (v way) world(t testing.TB, f family) (w *world, s shot, pkt func(i int) []byte) {
	t.Helper()
	d, err := v.datapath()
	if err != nil {
		t.Fatal(err)
	}
	w = &world{t: t, f: f, datapath: d}
	w.fill()
	s = v.prepare(w)
	copy(s.pkt, w.devs[s.dev].mac)
	if !v.fresh {
		return w, s, func(int) []byte { return s.pkt }
	}
	p := newPorted(s.pkt)
	return w, s, func(i int) []byte { return p.from(uint16(10000 + i)) }
}

func (v way) bench(b *testing.B, f family) {
	w, s, pkt := v.world(b, f)
	sw := newStopwatch(w, s)
	withStats(b)
	var took []float64
	for b.Loop() {
		if v.fresh {
			w.empty()
		}
		before := w.counters()
		took = append(took, sw.batch(runs, pkt))
		w.eachCounted(runs, false, before, v.counts)
	}
	b.ReportMetric(median(took), "ns/run")
	if v.again > 0 {
		before := w.counters()
		got := sw.repeated(s.pkt, v.again)
		w.eachCounted(rounds(v.again)*v.again, true, before, v.counts)
		b.ReportMetric(got, "ns/repeated")
	}
	b.ReportMetric(0, "ns/op")
}

func (v way) datapath() (*datapath, error) {
	if v.load != nil {
		return v.load()
	}
	return standard()
}

// TestWays sees that each way's packets take it, over and over, so that
// benchmarks measure what they say.
func TestWays(t *testing.T) {
	const few = 300
	for _, v := range ways() {
		for _, f := range families() {
			if v.only4 && f.v6 {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s/%s", v.hook, v.path, f.name), func(t *testing.T) {
				w, s, pkt := v.world(t, f)
				if hook := maps.HookName(s.hook); hook != v.hook {
					t.Fatalf("the packet is one of %s", hook)
				}
				if v.fresh {
					w.empty()
				}
				sw := newStopwatch(w, s)
				withStats(t)
				before := w.counters()
				sw.batch(few, pkt)
				w.eachCounted(few, false, before, v.counts)
				if v.again > 0 {
					before := w.counters()
					sw.repeated(s.pkt, v.again)
					w.eachCounted(rounds(v.again)*v.again, true, before, v.counts)
				}
			})
		}
	}
}

// BenchmarkPrograms is what a packet costs at each hook and on each path, in
// the program and all that it calls.
func BenchmarkPrograms(b *testing.B) {
	for _, v := range ways() {
		for _, f := range families() {
			if v.only4 && f.v6 {
				continue
			}
			b.Run(fmt.Sprintf("hook=%s/path=%s/family=%s", v.hook, v.path, f.name), func(b *testing.B) { v.bench(b, f) })
		}
	}
}

// BenchmarkNothing is what is subtracted from all others: a program that does
// nothing, as the kernel accounts for it.
func BenchmarkNothing(b *testing.B) {
	w := newWorld(b, families()[0])
	s := w.at(fromPod, tcp(ap(w.f.client, 4000), ap(w.f.local, podPort), syn).bytes(b))
	sw := newStopwatch(w, s)
	withStats(b)
	var took []float64
	for b.Loop() {
		for range runs {
			took = append(took, sw.once(sw.null, s.pkt))
		}
	}
	b.ReportMetric(median(took), "ns/run")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkLiveFlows is an established packet of any of so many flows.
func BenchmarkLiveFlows(b *testing.B) {
	for _, n := range []int{1, 1000, 100000} {
		b.Run(fmt.Sprintf("flows=%d", n), func(b *testing.B) {
			d, err := big()
			if err != nil {
				b.Fatal(err)
			}
			w := &world{t: b, f: families()[0], datapath: d}
			w.fill()
			fr := tcp(ap(w.f.client, 0), ap(w.f.local, podPort), syn)
			syns := w.shots(fromPod, devClient, fr)
			answers := w.shots(fromPod, devLocal, tcp(fr.dst, fr.src, syn|ack))
			const ports = 40000
			tuple := func(i int) (client, server netip.AddrPort) {
				return ap(w.f.client, uint16(10000+i%ports)), ap(w.f.local, uint16(podPort+i/ports))
			}
			for i := range n {
				c, s := tuple(i)
				syns.send(c, s)
				answers.send(s, c)
			}
			fr.flags = ack
			acks := w.shots(fromPod, devClient, fr)
			for i := range n {
				c, s := tuple(i)
				acks.send(c, s)
			}
			sw := newStopwatch(w, shot{hook: fromPod, dev: devClient, pkt: acks.pkt})
			r := rand.New(rand.NewPCG(1, 2))
			withStats(b)
			var took []float64
			for b.Loop() {
				before := w.counters()
				took = append(took, sw.batch(runs, func(int) []byte {
					c, s := tuple(r.IntN(n))
					binary.BigEndian.PutUint16(acks.pkt[34:], c.Port())
					binary.BigEndian.PutUint16(acks.pkt[36:], s.Port())
					mend(acks.pkt)
					return acks.pkt
				}))
				w.eachCounted(runs, false, before, []reason{fwdLocal, hit})
			}
			b.ReportMetric(median(took), "ns/run")
			b.ReportMetric(0, "ns/op")
			w.empty()
		})
	}
}

// BenchmarkManyServices is a first packet to the cluster IP of any of so many
// services, each with a backend set of its own.
func BenchmarkManyServices(b *testing.B) {
	for _, n := range []int{1, 1000, 10000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			w := newWorld(b, families()[0])
			vip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 98, byte(64 + i>>8), byte(i)}) }
			for i := range n {
				set := uint32(1000 + i)
				w.backends(set, ap(w.f.local, podPort), ap(w.f.third, podPort))
				w.service(vip(i), svcPort, maps.ProtoTCP, maps.Service{Id: set, Set: set, Count: 2})
			}
			s := w.at(fromPod, tcp(ap(w.f.client, 4000), ap(vip(0), svcPort), syn).bytes(b))
			copy(s.pkt, w.devs[s.dev].mac)
			p := newPorted(s.pkt)
			sw := newStopwatch(w, s)
			r := rand.New(rand.NewPCG(1, 2))
			withStats(b)
			var took []float64
			for b.Loop() {
				w.empty()
				before := w.counters()
				took = append(took, sw.batch(runs, func(i int) []byte {
					copy(p.pkt[30:], vip(r.IntN(n)).AsSlice())
					return p.from(uint16(10000 + i))
				}))
				w.eachCounted(runs, false, before, []reason{fwdLocal, miss, created})
			}
			b.ReportMetric(median(took), "ns/run")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkManyPolicies is an allowed first packet to a pod that so many
// policies select, each of which lets other clients in.
func BenchmarkManyPolicies(b *testing.B) {
	const table = 9
	for _, n := range []int{1, 1000} {
		b.Run(fmt.Sprintf("policies=%d", n), func(b *testing.B) {
			w := newWorld(b, families()[0])
			for i := range n {
				w.policy(table, uint32(5000+i), maps.PolicyPort, maps.ProtoTCP, podPort, maps.VerdictAllow)
			}
			w.policy(table, idClient, maps.PolicyPort, maps.ProtoTCP, podPort, maps.VerdictAllow)
			w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = table })
			s := w.at(fromPod, tcp(ap(w.f.client, 4000), ap(w.f.local, podPort), syn).bytes(b))
			copy(s.pkt, w.devs[s.dev].mac)
			p := newPorted(s.pkt)
			sw := newStopwatch(w, s)
			withStats(b)
			var took []float64
			for b.Loop() {
				w.empty()
				before := w.counters()
				took = append(took, sw.batch(runs, func(i int) []byte { return p.from(uint16(10000 + i)) }))
				w.eachCounted(runs, false, before, []reason{fwdLocal, miss, created})
			}
			b.ReportMetric(median(took), "ns/run")
			b.ReportMetric(0, "ns/op")
		})
	}
}
