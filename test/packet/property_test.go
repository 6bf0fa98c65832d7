package packet

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	pwmaps "github.com/podweir/podweir/internal/maps"
)

// try plays a whole sequence: the number of the step that went wrong, and how.
func (e *engine) try(seq sequence) (int, string) {
	e.w.t.Helper()
	e.reset()
	for i, s := range seq.steps {
		if msg := e.play(&seq, s); msg != "" {
			return i, msg
		}
	}
	return len(seq.steps) - 1, e.counted()
}

// fail reports a sequence that went wrong, after leaving out of it all that
// can be left out.
func (e *engine) fail(seq sequence, at int, msg string) {
	e.w.t.Helper()
	seq.steps = seq.steps[:at+1]
	for size := len(seq.steps) / 2; size > 0; {
		smaller := false
		for i := 0; i+size <= len(seq.steps); i++ {
			shorter := sequence{seq.talks, slices.Delete(slices.Clone(seq.steps), i, i+size)}
			if n, m := e.try(shorter); m != "" {
				seq.steps, msg, smaller = shorter.steps[:n+1], m, true
				i--
			}
		}
		if !smaller {
			size /= 2
		}
	}
	if _, m := e.try(seq); m != "" {
		msg = m
	}
	var b strings.Builder
	for _, s := range seq.steps {
		fmt.Fprintf(&b, "  %v\n", s)
	}
	e.w.t.Fatalf("%s\nafter the steps (conversations %v):\n%sand the packets:\n  %s",
		msg, seq.talks, b.String(), strings.Join(e.trail, "\n  "))
}

var (
	modelSeed  = flag.Uint64("model.seed", 0, "seed of the flow engine's random sequences; 0 = the time")
	modelCount = flag.Int("model.sequences", 1500, "how many random sequences, per family and table size")
)

// The real programs do what the rules say, packet after packet.
func TestEngine(t *testing.T) {
	seed := *modelSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	for _, f := range families() {
		for name, crowded := range map[string]bool{"room": false, "crowded": true} {
			t.Run(f.name+"/"+name, func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(len(name))))
				e := newEngine(t, f, crowded)
				count := *modelCount
				if crowded {
					count /= 4
				}
				for n := range count {
					b := make([]byte, headLen+stepLen*(10+r.IntN(40)))
					for i := range b {
						b[i] = byte(r.Uint32())
					}
					seq := readSequence(b)
					if at, msg := e.try(seq); msg != "" {
						t.Logf("seed %d, sequence %d", seed, n)
						e.fail(seq, at, msg)
					}
				}
				e.summary(t)
			})
		}
	}
}

// summary says how often what was reached.
func (e *engine) summary(t *testing.T) {
	var out []string
	for why, n := range e.seen {
		out = append(out, fmt.Sprintf("%s %d", pwmaps.ReasonName(why), n))
	}
	slices.Sort(out)
	t.Logf("%d packets: %s", e.packets, strings.Join(out, ", "))
}

// FuzzEngine does the same with the fuzzer's choice of sequences.
// Coverage depends on what the datapath chooses, so that little is gained from
// making inputs smaller: run it with -fuzzminimizetime 10x.
func FuzzEngine(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 20 {
		b := make([]byte, headLen+stepLen*30)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(byte(i), b)
	}
	var e *engine // of the last run, if it is of the kind that is wanted
	var kind byte
	for which := range byte(4) {
		e, kind = newEngine(f, families()[which&1], which&2 != 0), which
	}
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		if len(b) > headLen+stepLen*200 {
			b = b[:headLen+stepLen*200]
		}
		if which &= 3; which != kind {
			e, kind = newEngine(t, families()[which&1], which&2 != 0), which
		}
		e.w.t = t
		seq := readSequence(b)
		if at, msg := e.try(seq); msg != "" {
			e.fail(seq, at, msg)
		}
	})
}
