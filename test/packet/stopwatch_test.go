package packet

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/maps"
)

// stopwatch measures single runs of a program: the kernel says how long all
// runs of it took and how many there were, before and after each. So every
// run gets the packet as it was, unlike those of one repeated test run. What
// that costs itself, a program that does nothing costs, too.
type stopwatch struct {
	w          *world
	prog, null *ebpf.Program
	ctx        skBuff
	out        []byte
}

func newStopwatch(w *world, s shot) *stopwatch {
	w.t.Helper()
	sw := &stopwatch{w: w, prog: w.program(s.hook), null: w.nothing(), ctx: skBuff{Ifindex: w.index(s.dev), Mark: s.mark}}
	if s.hook == fromOverlay {
		var err error
		if sw.prog, err = w.gate(s.tunnel); err != nil {
			w.t.Fatal(err)
		}
		// Its gate leads to nothing.
		other := *w.datapath
		other.gates = map[tunnelKey]*ebpf.Program{}
		other.jump, err = ebpf.NewMap(&ebpf.MapSpec{
			Name: "nowhere", Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 8,
			Contents: []ebpf.MapKV{{Key: uint32(0), Value: sw.null}},
		})
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { other.jump.Close() })
		if sw.null, err = other.gate(s.tunnel); err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { sw.null.Close() })
	}
	sw.out = make([]byte, len(s.pkt)+512)
	return sw
}

// nothing is a program that lets everything by.
func (w *world) nothing() *ebpf.Program {
	w.t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "nothing", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { p.Close() })
	return p
}

func (sw *stopwatch) total(p *ebpf.Program) (time.Duration, uint64) {
	st, err := p.Stats()
	if err != nil {
		sw.w.t.Fatal(err)
	}
	return st.Runtime, st.RunCount
}

func (sw *stopwatch) once(p *ebpf.Program, pkt []byte) float64 {
	t0, n0 := sw.total(p)
	ctx := sw.ctx
	if _, err := p.Run(&ebpf.RunOptions{Data: pkt, DataOut: sw.out, Context: &ctx}); err != nil {
		sw.w.t.Fatal(err)
	}
	t1, n1 := sw.total(p)
	if n1 != n0+1 {
		sw.w.t.Fatalf("the kernel counted %d runs of one: are statistics switched on?", n1-n0)
	}
	return float64((t1 - t0).Nanoseconds())
}

// batch runs all packets, each behind one run of nothing, and gives the
// median of the differences.
func (sw *stopwatch) batch(n int, pkt func(i int) []byte) float64 {
	took := make([]float64, n)
	null := make([]float64, n)
	for i := range n {
		p := pkt(i)
		null[i] = sw.once(sw.null, p)
		took[i] = sw.once(sw.prog, p)
	}
	return median(took) - median(null)
}

// repeated is the second way to measure: the kernel repeats the run on one
// packet, for ways that leave it so that this makes no difference.
func (sw *stopwatch) repeated(pkt []byte, times int) float64 {
	one := func(p *ebpf.Program) float64 {
		ctx := sw.ctx
		start := time.Now()
		if _, err := p.Run(&ebpf.RunOptions{Data: pkt, Repeat: uint32(times), Context: &ctx}); err != nil {
			sw.w.t.Fatal(err)
		}
		return float64(time.Since(start).Nanoseconds()) / float64(times)
	}
	var took, null []float64
	for range rounds(times) {
		null = append(null, one(sw.null))
		took = append(took, one(sw.prog))
	}
	return median(took) - median(null)
}

func rounds(times int) int { return max(21, 20000/times) }

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// withStats has the kernel account for the runs of programs meanwhile.
func withStats(t testing.TB) {
	t.Helper()
	c, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		t.Fatalf("statistics of programs: %v", err)
	}
	t.Cleanup(func() { c.Close() })
}

// eachCounted fails unless each of n packets was counted as said, and no other
// fate of a packet was. more: a signal may have had some of them repeated.
func (w *world) eachCounted(n int, more bool, before map[row]uint64, want []reason) {
	w.t.Helper()
	got := map[reason]uint64{}
	for r, v := range w.counters() {
		if v -= before[r]; v > 0 {
			got[r.reason] += v
		}
	}
	for _, r := range want {
		if got[r] < uint64(n) || got[r] > uint64(n) && !more {
			w.t.Fatalf("%d packets, %s counted %d times: %v", n, maps.ReasonName(r), got[r], names(got))
		}
		delete(got, r)
	}
	for r := range got {
		if maps.IsDrop(r) || r == miss || r == stale || r == created {
			w.t.Fatalf("%d packets, and %s was counted: %v", n, maps.ReasonName(r), names(got))
		}
	}
}

func names(counts map[reason]uint64) (out []string) {
	for r, n := range counts {
		out = append(out, fmt.Sprintf("%s=%d", maps.ReasonName(r), n))
	}
	slices.Sort(out)
	return out
}
