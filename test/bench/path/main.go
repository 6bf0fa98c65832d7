// Command pw-bench-path measures what the path between two pods costs: plain
// kernel forwarding with no filter at all, over VXLAN, routed and on one node,
// against podweir in each of its routing modes with everything on. "peers"
// as the first argument measures podweir beside kube-proxy as well, by more
// paths and at more sizes. See docs/performance.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	repeats   int
	builds    int
	family    int
	cpu       int
	scale     float64
	json      string
	modes     string
	workloads string
	compare   string
	streams   int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 && os.Args[1] == "peers" {
		if err := runPeers(ctx, os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "pw-bench-path peers:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.IntVar(&o.builds, "builds", 3, "how often the topologies are built anew: where their memory lies is worth some per cent")
	flag.IntVar(&o.repeats, "repeats", 7, "rounds per build; a round measures every mode and workload once")
	flag.IntVar(&o.family, "family", 4, "4 or 6: addresses of the pods")
	flag.IntVar(&o.cpu, "cpu", runtime.NumCPU()-1, "CPU that measures")
	flag.Float64Var(&o.scale, "scale", 1, "length of a measurement, 1 = some 10 ms")
	flag.StringVar(&o.json, "json", "", "file to write the figures to")
	flag.StringVar(&o.modes, "modes", "", "comma-separated; default: all of "+strings.Join(modeNames(), ", "))
	flag.StringVar(&o.workloads, "workloads", "", "comma-separated; default: udp,crr,rr,bulk")
	flag.StringVar(&o.compare, "compare", "", "bin folder of another build: its podweir modes are measured too, as other-*")
	flag.IntVar(&o.streams, "streams", 0, "instead of all that: iperf3 for so many seconds over each mode, family, setting of offloads and way")
	flag.Parse()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "pw-bench-path:", err)
		os.Exit(1)
	}
}

// choose keeps those of all whose names are in the comma-separated list.
func choose[T any](what, list string, all []T, name func(T) string) ([]T, error) {
	if list == "" {
		return all, nil
	}
	var out []T
	for n := range strings.SplitSeq(list, ",") {
		i := slices.IndexFunc(all, func(t T) bool { return name(t) == n })
		if i < 0 {
			return nil, fmt.Errorf("%q is no %s", n, what)
		}
		if slices.ContainsFunc(out, func(t T) bool { return name(t) == n }) {
			return nil, fmt.Errorf("%s %q is named twice; --repeats measures more often", what, n)
		}
		out = append(out, all[i])
	}
	return out, nil
}

func run(ctx context.Context, o options) error {
	if o.family != 4 && o.family != 6 || o.repeats < 1 || o.builds < 1 || o.scale <= 0 {
		return errors.New("--family is 4 or 6, --repeats and --builds at least 1, --scale more than 0")
	}
	modes, err := choose("mode", o.modes, allModes(), func(m mode) string { return m.name })
	if err != nil {
		return err
	}
	if o.streams < 0 {
		return errors.New("--streams is a number of seconds")
	}
	if o.streams > 0 {
		return runStreams(ctx, o, modes)
	}
	loads, err := choose("workload", o.workloads, workloads(), func(w workload) string { return w.name })
	if err != nil {
		return err
	}
	if o.compare != "" {
		modes = append(modes, others(modes, o.compare)...)
	}
	res := newResults(o, modes, loads)
	for range o.builds {
		if err := runBuild(ctx, o, modes, loads, res); err != nil {
			return err
		}
	}
	res.finish()
	res.print(os.Stdout)
	if o.json != "" {
		return res.write(o.json)
	}
	return nil
}

// bringUp is how long a topology may take on a machine that is busy.
const bringUp = 3 * time.Minute

// runBuild measures all rounds of one build.
func runBuild(ctx context.Context, o options, modes []mode, loads []workload, res *results) (err error) {
	b := &bench{o: o, tops: map[string]*topology{}}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, m := range modes {
		if b.tops[m.topology] != nil {
			continue
		}
		up, cancel := context.WithTimeout(ctx, bringUp)
		t, err := buildTopology(up, m)
		cancel()
		if t != nil {
			b.tops[m.topology] = t
		}
		if err != nil {
			return fmt.Errorf("%s: %w", m.topology, err)
		}
	}
	for round := range o.repeats {
		for _, w := range loads {
			if err := b.round(ctx, round, modes, w, res); err != nil {
				return err
			}
		}
	}
	return nil
}

type bench struct {
	o    options
	tops map[string]*topology
}

// steady is how far the two probes that enclose a round may lie apart, and
// tries how often a round is measured until they do not. Two processes meet
// by chance: what they do is never that steady.
const (
	steady    = 0.08
	steadyTwo = 0.25
	tries     = 4
)

// round measures every mode once under one workload, between two probes: the
// first mode once more, before and after. When the machine's pace changed
// meanwhile (somebody else began or ceased to use the core's other half) the
// round says nothing and is repeated. The last try counts in any case. The
// probes are no figures: a mode that was measured twice, or always first,
// would not be measured like the others.
func (b *bench) round(ctx context.Context, round int, modes []mode, w workload, res *results) error {
	samples, err := steadyRound(steady, round, len(modes), func(i int) (sample, error) {
		s, err := b.measure(ctx, modes[i], w)
		if err != nil {
			err = fmt.Errorf("%s, %s: %w", modes[i].name, w.name, err)
		}
		return s, err
	}, res.unsteady)
	if err != nil {
		return err
	}
	for i, m := range modes {
		res.add(m.name, w.name, samples[i])
	}
	return nil
}

// steadyRound does that for anything measured by its number. unsteady hears
// of every try without a steady pace, and whether that one counts.
func steadyRound(apart float64, round, count int, measure func(int) (sample, error), unsteady func(counted bool)) ([]sample, error) {
	for try := 1; ; try++ {
		before, err := measure(0)
		if err != nil {
			return nil, err
		}
		samples := make([]sample, count)
		// Another order each time, so that nobody always comes first.
		for k := range count {
			i := (k + round + try) % count
			if samples[i], err = measure(i); err != nil {
				return nil, err
			}
		}
		after, err := measure(0)
		if err != nil {
			return nil, err
		}
		if max(before.P50, after.P50) > (1+apart)*min(before.P50, after.P50) {
			unsteady(try == tries)
			if try < tries {
				continue
			}
		}
		return samples, nil
	}
}

func (b *bench) close() error {
	var errs []error
	for _, t := range b.tops {
		errs = append(errs, t.close())
	}
	return errors.Join(errs...)
}
