// Command pw-bench-control measures the control plane of services beside the
// real kube-proxy's in both of its modes: how long a process takes to bring a
// cluster of a given size into force on a node, what one change costs, and how
// much memory all of it takes; and how long policies take. See
// docs/performance.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/realcluster"
)

type options struct {
	repeats   int
	changes   int
	pause     time.Duration
	burst     int
	json      string
	sizes     string
	subjects  string
	policies  int
	pods      bool
	format    string
	bin       string
	kubeProxy string
	iptables  string
	profile   string
}

func main() {
	var o options
	flag.IntVar(&o.repeats, "repeats", 3, "how often everything is measured")
	flag.IntVar(&o.changes, "changes", 10, "changes of one endpoint in each repeat, one after the other")
	flag.DurationVar(&o.pause, "pause", 1300*time.Millisecond, "before each change; kube-proxy does nothing for a second after it has done something")
	flag.IntVar(&o.burst, "burst", 800, "changes of one endpoint that come at once; podweir alone")
	flag.StringVar(&o.json, "json", "", "file to write the figures to")
	flag.StringVar(&o.sizes, "sizes", "", "comma-separated, of "+strings.Join(sizeNames(true), ", ")+"; default: "+strings.Join(sizeNames(false), ", "))
	flag.StringVar(&o.subjects, "subjects", strings.Join(subjectNames(), ","), "comma-separated: who is measured")
	flag.IntVar(&o.policies, "policies", 200, "pods that get three policies each at once; 0: not measured")
	flag.BoolVar(&o.pods, "pods", false, "endpoints have Pod objects, too")
	flag.StringVar(&o.format, "format", "protobuf", "what the API server speaks: protobuf, or json for one that has nothing else")
	flag.StringVar(&o.bin, "bin", "", "bin folder of another build to measure")
	flag.StringVar(&o.kubeProxy, "kube-proxy", "", "its program; default: "+realcluster.Version+", built where it is not yet")
	flag.StringVar(&o.iptables, "iptables", "legacy", "legacy or nft: which of the two programs named iptables kube-proxy is given in its mode of that name")
	flag.StringVar(&o.profile, "profiles", "", "folder to write profiles of the agent to: heap, and of processor time while it starts, which costs a little itself")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "pw-bench-control:", err)
		os.Exit(1)
	}
}

func sizeNames(extra bool) (out []string) {
	for _, s := range sizes() {
		if extra || !s.extra {
			out = append(out, s.Name)
		}
	}
	return out
}

// chosen checks a list of names against those there are.
func chosen(flag, list string, all, standard []string) ([]string, error) {
	if list == "" {
		return standard, nil
	}
	names := strings.Split(list, ",")
	for _, n := range names {
		if !slices.Contains(all, n) {
			return nil, fmt.Errorf("--%s: there is no %q: there are %s", flag, n, strings.Join(all, ", "))
		}
	}
	return names, nil
}

func run(ctx context.Context, o options) error {
	if o.repeats < 1 || o.changes < 1 || o.burst < 0 || o.pause < 0 {
		return errors.New("--repeats and --changes are at least 1, --burst and --pause at least 0")
	}
	if o.policies < 0 || o.policies > maxPolicyPods {
		return fmt.Errorf("--policies is 0 to %d", maxPolicyPods)
	}
	if o.format != "protobuf" && o.format != "json" {
		return fmt.Errorf("--format is protobuf or json, not %q", o.format)
	}
	if o.iptables != "legacy" && o.iptables != "nft" {
		return fmt.Errorf("--iptables is legacy or nft, not %q", o.iptables)
	}
	names, err := chosen("sizes", o.sizes, sizeNames(true), sizeNames(false))
	if err != nil {
		return err
	}
	who, err := chosen("subjects", o.subjects, subjectNames(), subjectNames())
	if err != nil {
		return err
	}
	res := newResults(o)
	if slices.Contains(who, iptables) || slices.Contains(who, nftables) {
		if o.kubeProxy, err = kubeProxy(ctx, o.kubeProxy); err != nil {
			return err
		}
		if res.Tools, err = tools(ctx, o); err != nil {
			return err
		}
	}
	for _, s := range sizes() {
		if !slices.Contains(names, s.Name) {
			continue
		}
		s.Pods = o.pods
		var rows []*row
		for _, subject := range who {
			rows = append(rows, &row{size: s, Subject: subject})
		}
		res.Rows = append(res.Rows, rows...)
		if err := measure(ctx, o, s, rows); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		for _, r := range rows {
			r.finish()
		}
		fmt.Fprintf(os.Stderr, "%s measured\n", s.Name)
	}
	if o.policies > 0 && slices.Contains(who, podweir) {
		if res.Policies, err = measurePolicies(ctx, o); err != nil {
			return fmt.Errorf("policies: %w", err)
		}
	}
	res.Bars = res.bars()
	res.print(os.Stdout)
	if o.json != "" {
		return res.write(o.json)
	}
	return nil
}

// kubeProxy is the program to compare with.
func kubeProxy(ctx context.Context, path string) (string, error) {
	if path != "" {
		_, err := os.Stat(path)
		return path, err
	}
	tree, err := cluster.Root()
	if err != nil {
		return "", fmt.Errorf("%w; or name kube-proxy by --kube-proxy", err)
	}
	cfg, err := realcluster.Default(tree)
	if err != nil {
		return "", err
	}
	cfg.Out = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	return cfg.Bin("kube-proxy"), cfg.Build(ctx, "kube-proxy")
}

// tools are the versions of kube-proxy and what it calls.
func tools(ctx context.Context, o options) (out []string, err error) {
	for _, c := range [][]string{{o.kubeProxy, "--version"}, {"iptables-" + o.iptables, "-V"}, {"nft", "-v"}} {
		text, err := exec.CommandContext(ctx, c[0], c[1:]...).Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(c, " "), err)
		}
		name, version, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
		if c[0] == o.kubeProxy { // says "Kubernetes v..."
			name = "kube-proxy"
		}
		out = append(out, name+" "+version)
	}
	return out, nil
}
