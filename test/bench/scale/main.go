// Command pw-bench-scale measures the control plane of services: how long the
// agent's process takes to bring a cluster of a given size into the kernel's
// maps, what one change costs, and how much memory all of it takes. See
// docs/performance.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

type options struct {
	repeats int
	changes int
	burst   int
	json    string
	sizes   string
	pods    bool
	format  string
	bin     string
	profile string
}

func main() {
	var o options
	flag.IntVar(&o.repeats, "repeats", 3, "how often everything is measured")
	flag.IntVar(&o.changes, "changes", 200, "changes of one endpoint, one after the other")
	flag.IntVar(&o.burst, "burst", 800, "changes of one endpoint that come at once")
	flag.StringVar(&o.json, "json", "", "file to write the figures to")
	flag.StringVar(&o.sizes, "sizes", "", "comma-separated; default: all of "+strings.Join(sizeNames(), ", "))
	flag.BoolVar(&o.pods, "pods", false, "endpoints have Pod objects, too")
	flag.StringVar(&o.format, "format", "protobuf", "what the API server speaks: protobuf, or json for one that has nothing else")
	flag.StringVar(&o.bin, "bin", "", "bin folder of another build to measure")
	flag.StringVar(&o.profile, "profiles", "", "folder to write profiles of the agent to: heap, and of processor time while it starts, which costs a little itself")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "pw-bench-scale:", err)
		os.Exit(1)
	}
}

func sizeNames() (out []string) {
	for _, s := range sizes() {
		out = append(out, s.Name)
	}
	return out
}

func run(ctx context.Context, o options) error {
	if o.repeats < 1 || o.changes < 1 || o.burst < 0 {
		return errors.New("--repeats and --changes are at least 1, --burst at least 0")
	}
	if o.format != "protobuf" && o.format != "json" {
		return fmt.Errorf("--format is protobuf or json, not %q", o.format)
	}
	var chosen []size
	for _, s := range sizes() {
		if o.sizes == "" || strings.Contains(","+o.sizes+",", ","+s.Name+",") {
			s.Pods = o.pods
			chosen = append(chosen, s)
		}
	}
	if o.sizes != "" && len(chosen) != len(strings.Split(o.sizes, ",")) {
		return fmt.Errorf("--sizes %s: there are %s", o.sizes, strings.Join(sizeNames(), ", "))
	}
	res := newResults(o)
	for _, s := range chosen {
		r := &row{size: s}
		res.Rows = append(res.Rows, r)
		if err := measure(ctx, o, s, r); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		r.finish()
		fmt.Fprintf(os.Stderr, "%s measured\n", s.Name)
	}
	res.print(os.Stdout)
	if o.json != "" {
		return res.write(o.json)
	}
	return nil
}
