package main

import (
	"context"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/podweir/podweir/test/bench/report"
	"github.com/podweir/podweir/test/realcluster"
)

// schema of the file that peers writes: docs/performance.md has it.
const schema = 1

// peerResults are all figures of a run and what was made of them.
type peerResults struct {
	Schema    int       `json:"schema"`
	Kernel    string    `json:"kernel"`
	CPUs      int       `json:"cpus"`
	KubeProxy string    `json:"kubeProxy"`
	IPTables  string    `json:"iptables"`
	NFTables  string    `json:"nftables"`
	Time      time.Time `json:"time"`
	Builds    int       `json:"builds"`
	Rounds    int       `json:"rounds"` // of each build
	Scale     float64   `json:"scale"`
	Measured  int       `json:"measured"` // rounds of one workload on one path
	Repeated  int       `json:"repeated"` // of them, measured again
	Unsteady  int       `json:"unsteady"` // counted although the pace changed
	Cells     []*cell   `json:"cells"`
	Bars      []bar     `json:"bars"`
}

// A cell is one metric of one setup on one path.
type cell struct {
	Phase      string    `json:"phase"`
	Title      string    `json:"title"`
	Path       string    `json:"path"`
	Metric     string    `json:"metric"`
	Unit       string    `json:"unit"`
	MoreBetter bool      `json:"moreIsBetter,omitempty"`
	Setup      string    `json:"setup"` // the mode, and its size if that is not 1
	Mode       string    `json:"mode"`
	Services   int       `json:"services"`
	Policies   int       `json:"policies"`
	Flows      int       `json:"flows"`
	Median     float64   `json:"median"`
	Q1         float64   `json:"q1"`
	Q3         float64   `json:"q3"`
	Min        float64   `json:"min"`
	Max        float64   `json:"max"`
	Ratio      *spread   `json:"ratio"` // to the floor of the same round
	Values     []float64 `json:"values"`
}

// A metric is one figure of a sample.
type metric struct {
	name, unit string
	more       bool // is better
	pick       func(sample) float64
}

func p50(s sample) float64 { return s.P50 }
func p99(s sample) float64 { return s.P99 }

// spentCPU is the CPU time of an operation, of both processes if there are
// two.
func spentCPU(s sample) float64 { return s.CPU }

// mibs is the throughput of a stream whose samples are ns per KiB.
func mibs(s sample) float64 { return 1e9 / s.P50 / 1024 }

// metrics of a workload. In one thread elapsed time is CPU time.
func metrics(load string) []metric {
	switch name, two := strings.CutPrefix(load, "two-"); {
	case name == "udp" && two:
		return []metric{{"two-udp cpu", "ns/packet", false, spentCPU}}
	case strings.HasPrefix(name, "bulk") && two:
		return []metric{{load, "MiB/s", true, mibs}, {load + " cpu", "ns/KiB", false, spentCPU}}
	case two:
		return []metric{{load + " p50", "ns", false, p50}, {load + " p99", "ns", false, p99}, {load + " cpu", "ns", false, spentCPU}}
	case name == "udp":
		return []metric{{"udp", "ns/packet", false, p50}}
	case strings.HasPrefix(name, "bulk"):
		return []metric{{load, "ns/KiB", false, p50}}
	case name == "first":
		return []metric{{"first", "ns", false, p50}}
	default:
		return []metric{{load + " p50", "ns", false, p50}, {load + " p99", "ns", false, p99}}
	}
}

func newPeerResults(ctx context.Context, o peerOptions) *peerResults {
	version := func(args ...string) string {
		out, err := exec.CommandContext(ctx, args[0], args[1:]...).Output()
		if err != nil {
			return "unknown"
		}
		return strings.TrimSpace(string(out))
	}
	return &peerResults{
		Schema: schema, Kernel: report.KernelRelease(), CPUs: runtime.NumCPU(), KubeProxy: realcluster.Version,
		IPTables: version("xtables-"+o.iptables+"-multi", "iptables", "--version"), NFTables: version("nft", "--version"),
		Time: time.Now().UTC(), Builds: o.builds, Rounds: o.rounds, Scale: o.scale,
	}
}

func (r *peerResults) unsteady(counted bool) {
	if counted {
		r.Unsteady++
	} else {
		r.Repeated++
	}
}

func (r *peerResults) cell(phase, path, metric, setup string) *cell {
	i := slices.IndexFunc(r.Cells, func(c *cell) bool {
		return c.Phase == phase && c.Path == path && c.Metric == metric && c.Setup == setup
	})
	if i < 0 {
		return nil
	}
	return r.Cells[i]
}

func (r *peerResults) add(p phase, y way, load workload, s setup, got sample) {
	for _, m := range metrics(load.name) {
		c := r.cell(p.name, y.name, m.name, s.label())
		if c == nil {
			c = &cell{
				Phase: p.name, Title: p.title, Path: y.name, Metric: m.name, Unit: m.unit, MoreBetter: m.more,
				Setup: s.label(), Mode: s.name, Services: s.services, Policies: s.policies, Flows: s.flows,
			}
			r.Cells = append(r.Cells, c)
		}
		c.Values = append(c.Values, m.pick(got))
	}
}

// spreadOf sorts what it is given.
func spreadOf(values []float64) *spread {
	slices.Sort(values)
	return &spread{report.Quantile(values, 0.5), report.Quantile(values, 0.25), report.Quantile(values, 0.75)}
}

// against is the ratio of two cells, taken within each round: what disturbs a
// whole round cancels out.
func (c *cell) against(base *cell) *spread {
	if c == nil || base == nil || len(c.Values) != len(base.Values) || len(c.Values) == 0 {
		return nil
	}
	var all []float64
	for i, v := range c.Values {
		if base.Values[i] > 0 {
			all = append(all, v/base.Values[i])
		}
	}
	if len(all) == 0 {
		return nil
	}
	return spreadOf(all)
}

// worse tells whether a ratio is on the wrong side of a limit.
func (c *cell) worse(ratio, limit float64) bool {
	if c.MoreBetter {
		return ratio < limit
	}
	return ratio > limit
}

func (r *peerResults) finish() {
	for _, c := range r.Cells {
		sorted := slices.Sorted(slices.Values(c.Values))
		s := spreadOf(sorted)
		c.Median, c.Q1, c.Q3, c.Min, c.Max = s.Median, s.Q1, s.Q3, sorted[0], sorted[len(sorted)-1]
		c.Ratio = c.against(r.cell(c.Phase, c.Path, c.Metric, baseline))
	}
	r.Bars = r.judge()
}

// A bar is what is expected of a row, and what came of it.
type bar struct {
	What    string  `json:"what"`
	Phase   string  `json:"phase"`
	Path    string  `json:"path"`
	Metric  string  `json:"metric"`
	Setup   string  `json:"setup"`
	Against string  `json:"against"`
	Limit   float64 `json:"limit"`
	AtLeast bool    `json:"atLeast,omitempty"` // else at most
	Ratio   spread  `json:"ratio"`
	Held    bool    `json:"held"`
}

func (b bar) verdict() string {
	if b.Held {
		return "held"
	}
	return "missed"
}

func (b bar) limit() string {
	if b.AtLeast {
		return ">= " + two(b.Limit)
	}
	return "<= " + two(b.Limit)
}

// an expectation is a bar that has not been looked at: "" is every one.
type expectation struct {
	what, phase, path, metric, setup, against string
	limit                                     float64
}

func expectations() []expectation {
	const tunnel, same = "tunnel, policy at both ends, against the kernel's without", "one node, against the kernel's without"
	remote, local := "cluster-ip-remote", "cluster-ip-local"
	out := []expectation{
		{tunnel, "ways", remote, "udp", vxlanMode, baseline, 0.77},
		{tunnel, "ways", remote, "crr p50", vxlanMode, baseline, 0.88},
		{tunnel, "ways", remote, "rr p50", vxlanMode, baseline, 0.80},
		{tunnel, "ways", remote, "bulk", vxlanMode, baseline, 0.78},
		{tunnel, "ways", remote, "two-crr p50", vxlanMode, baseline, 0.97},
		{tunnel, "ways", remote, "two-bulk", vxlanMode, baseline, 1.3},
		{same, "ways", local, "udp", vxlanMode, baseline, 0.95},
		{same, "ways", local, "crr p50", vxlanMode, baseline, 1.0},
	}
	for _, m := range []string{"udp", "crr p50", "rr p50", "bulk"} {
		out = append(out, expectation{"routed is as good as tunnelled", "ways", remote, m, directMode, vxlanMode, 1.0})
	}
	return append(out,
		expectation{"many services cost what one does", "services", "", "", vxlanMode + ", 10000 services", vxlanMode, 1.03},
		expectation{"many policies cost what one does", "policies", "", "first", vxlanMode + ", 1000 policies", vxlanMode, 1.15},
		expectation{"many flows cost what one does", "flows", "", "", vxlanMode + ", 100000 flows", vxlanMode, 1.15},
	)
}

// judge holds every row against what is expected of it.
func (r *peerResults) judge() (out []bar) {
	look := func(c *cell, what, against string, limit float64) {
		base := r.cell(c.Phase, c.Path, c.Metric, against)
		ratio := c.against(base)
		if ratio == nil {
			return
		}
		out = append(out, bar{
			What: what, Phase: c.Phase, Path: c.Path, Metric: c.Metric, Setup: c.Setup, Against: against,
			Limit: limit, AtLeast: c.MoreBetter, Ratio: *ratio, Held: !c.worse(ratio.Median, limit),
		})
	}
	for _, e := range expectations() {
		for _, c := range r.Cells {
			if c.Phase == e.phase && c.Setup == e.setup && (e.path == "" || c.Path == e.path) &&
				(e.metric == c.Metric || e.metric == "" && !strings.HasSuffix(c.Metric, " p99")) {
				look(c, e.what, e.against, e.limit)
			}
		}
	}
	for _, c := range r.Cells {
		if c.Mode != vxlanMode {
			continue
		}
		for _, peer := range []string{iptablesMode, nftablesMode} {
			look(c, "faster than kube-proxy", strings.Replace(c.Setup, vxlanMode, peer, 1), 1.0)
		}
	}
	return out
}
