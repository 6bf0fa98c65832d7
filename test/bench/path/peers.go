package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/realcluster"
)

// peerOptions are those of "peers".
type peerOptions struct {
	builds    int
	rounds    int
	scale     float64
	cpu       int
	phases    string
	modes     string
	paths     string
	workloads string
	services  string
	policies  string
	flows     string
	iptables  string
	json      string
	svg       string
	from      string
	markdown  bool
}

// serverCPU is the other one of two processes.
func (o peerOptions) serverCPU() int {
	if o.cpu > 0 {
		return o.cpu - 1
	}
	return 1
}

func peerFlags(args []string) (o peerOptions, err error) {
	f := flag.NewFlagSet("pw-bench-path peers", flag.ContinueOnError)
	names := func(all []string) string { return "comma-separated; default: all of " + strings.Join(all, ", ") }
	var phases, modes, paths, loads []string
	for _, p := range allPhases(defaultSizes()) {
		phases = append(phases, p.name)
	}
	for _, m := range peerModes() {
		modes = append(modes, m.name)
	}
	for _, w := range allWays() {
		paths = append(paths, w.name)
	}
	for _, w := range append(oneLoads(), twoLoads()...) {
		loads = append(loads, w.name)
	}
	f.IntVar(&o.builds, "builds", 3, "how often the topologies are built anew: where their memory lies is worth some per cent")
	f.IntVar(&o.rounds, "rounds", 5, "how often everything is measured per build; fewer than 5 in all are no figures to quote")
	f.Float64Var(&o.scale, "scale", 1, "length of a measurement, 1 = some 10 ms")
	f.IntVar(&o.cpu, "cpu", runtime.NumCPU()-1, "CPU that measures; a server that is a process of its own has the one before")
	f.StringVar(&o.phases, "phases", "", names(phases))
	f.StringVar(&o.modes, "modes", "", names(modes)+"; "+baseline+" is always there")
	f.StringVar(&o.paths, "paths", "", names(paths))
	f.StringVar(&o.workloads, "workloads", "", names(loads))
	f.StringVar(&o.services, "services", "", "sizes of phase services; default: 1,1000,10000")
	f.StringVar(&o.policies, "policies", "", "sizes of phase policies; default: 1,1000")
	f.StringVar(&o.flows, "flows", "", "sizes of phase flows; default: 1,100000")
	f.StringVar(&o.iptables, "iptables", "legacy", "which iptables kube-proxy finds, legacy or nft: that takes minutes to load 10,000 services")
	f.StringVar(&o.json, "json", "", "file to write all figures to")
	f.StringVar(&o.svg, "svg", "", "folder to write a plot of each path to")
	f.StringVar(&o.from, "from", "", "file of an earlier run to print instead of measuring")
	f.BoolVar(&o.markdown, "markdown", false, "prints the tables as Markdown")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("%q is no flag", f.Arg(0))
	}
	if o.iptables != "legacy" && o.iptables != "nft" {
		return o, fmt.Errorf("--iptables is legacy or nft, not %q", o.iptables)
	}
	if o.builds < 1 || o.rounds < 1 || o.scale <= 0 {
		return o, errors.New("--builds and --rounds are at least 1, --scale more than 0")
	}
	return o, nil
}

func runPeers(ctx context.Context, args []string) error {
	o, err := peerFlags(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	var res *peerResults
	if o.from != "" {
		if res, err = readResults(o.from); err != nil {
			return err
		}
	} else {
		phases, err := choosePhases(o)
		if err != nil {
			return err
		}
		if res, err = measurePeers(ctx, o, phases, os.Stderr); err != nil {
			return err
		}
		if o.json != "" {
			if err := res.write(o.json); err != nil {
				return err
			}
		}
	}
	if o.markdown {
		res.markdown(os.Stdout)
	} else {
		res.print(os.Stdout)
	}
	if o.svg != "" {
		return res.plot(o.svg)
	}
	return nil
}

func readResults(path string) (*peerResults, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	res := &peerResults{}
	if err := json.Unmarshal(data, res); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if res.Schema != schema {
		return nil, fmt.Errorf("%s: schema %d, this program reads %d: measure anew", path, res.Schema, schema)
	}
	return res, nil
}

// kubeProxy is where the program is: the cache that clusters of real nodes
// use, which is told to build it if it is not there.
func kubeProxy(ctx context.Context, out io.Writer) (string, error) {
	root, err := cluster.Root()
	if err != nil {
		return "", err
	}
	c, err := realcluster.Default(root)
	if err != nil {
		return "", err
	}
	c.Out = func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	return c.Bin("kube-proxy"), c.Build(ctx, "kube-proxy")
}

// measurePeers measures phase by phase; what it is at is written to out.
func measurePeers(ctx context.Context, o peerOptions, phases []phase, out io.Writer) (*peerResults, error) {
	if runtime.NumCPU() < 2 || o.cpu < 0 || o.cpu >= runtime.NumCPU() {
		return nil, fmt.Errorf("--cpu %d of %d: a machine with two CPUs at least is needed, and one that it has", o.cpu, runtime.NumCPU())
	}
	programs := proxyPrograms{iptables: o.iptables}
	for _, p := range phases {
		for _, s := range p.setups {
			if s.proxy != "" && programs.kubeProxy == "" {
				var err error
				if programs.kubeProxy, err = kubeProxy(ctx, out); err != nil {
					return nil, err
				}
			}
		}
	}
	res := newPeerResults(ctx, o)
	for _, p := range phases {
		start := time.Now()
		for range o.builds {
			if err := measurePhase(ctx, o, p, programs, res, out); err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
		}
		fmt.Fprintf(out, "%s: %d rounds in %.0f s\n", p.name, o.builds*o.rounds, time.Since(start).Seconds())
	}
	res.finish()
	return res, nil
}

func measurePhase(ctx context.Context, o peerOptions, p phase, programs proxyPrograms, res *peerResults, out io.Writer) (err error) {
	var worlds []*world
	defer func() {
		for _, w := range worlds {
			err = errors.Join(err, w.close())
		}
	}()
	for _, s := range p.setups {
		up, cancel := context.WithTimeout(ctx, bringUp)
		start := time.Now()
		w, err := buildWorld(up, s, p.three, programs)
		cancel()
		if w != nil {
			worlds = append(worlds, w)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.label(), err)
		}
		fmt.Fprintf(out, "%s: %s is up after %.1f s\n", p.name, s.label(), time.Since(start).Seconds())
	}
	for round := range o.rounds {
		for _, w := range worlds {
			if err := w.fill(ctx, o); err != nil {
				return fmt.Errorf("%s: %w", w.setup.label(), err)
			}
		}
		for _, y := range p.ways {
			for _, load := range p.loads {
				apart := steady
				if strings.HasPrefix(load.name, "two-") {
					apart = steadyTwo
				}
				samples, err := steadyRound(apart, round, len(worlds), func(i int) (sample, error) {
					s, err := worlds[i].measure(ctx, o, y, load, out)
					if err != nil {
						err = fmt.Errorf("%s, %s, %s: %w", y.name, load.name, worlds[i].setup.label(), err)
					}
					return s, err
				}, res.unsteady)
				if err != nil {
					return err
				}
				res.Measured++
				for i, w := range worlds {
					res.add(p, y, load, w.setup, samples[i])
				}
			}
		}
	}
	return nil
}
