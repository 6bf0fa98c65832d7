package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podweir/podweir/test/bench/report"
)

func two(v float64) string { return fmt.Sprintf("%.2f", v) }

// group is a table's worth of cells: one path of one phase.
type group struct {
	phase, title, path string
	setups, metrics    []string // in order of appearance
}

func (r *peerResults) groups() (out []*group) {
	for _, c := range r.Cells {
		i := slices.IndexFunc(out, func(g *group) bool { return g.phase == c.Phase && g.path == c.Path })
		if i < 0 {
			i = len(out)
			out = append(out, &group{phase: c.Phase, title: c.Title, path: c.Path})
		}
		g := out[i]
		if !slices.Contains(g.setups, c.Setup) {
			g.setups = append(g.setups, c.Setup)
		}
		if !slices.Contains(g.metrics, c.Metric) {
			g.metrics = append(g.metrics, c.Metric)
		}
	}
	return out
}

// verdicts are what the bars of a row say.
func (r *peerResults) verdicts(g *group, metric string) string {
	var out []string
	faster := map[string][2]int{} // of those held, of all
	var setups []string
	for _, b := range r.Bars {
		if b.Phase != g.phase || b.Path != g.path || b.Metric != metric {
			continue
		}
		if !strings.HasPrefix(b.Against, "kube-proxy") {
			out = append(out, fmt.Sprintf("%s / %s %s: %s %s", b.Setup, b.Against, b.limit(), two(b.Ratio.Median), b.verdict()))
			continue
		}
		n := faster[b.Setup]
		if n[1] == 0 {
			setups = append(setups, b.Setup)
		}
		n[1]++
		if b.Held {
			n[0]++
		} else {
			out = append(out, fmt.Sprintf("faster than %s: %s missed", b.Against, two(b.Ratio.Median)))
		}
		faster[b.Setup] = n
	}
	held := 0
	for _, s := range setups {
		if n := faster[s]; n[0] == n[1] {
			held++
		}
	}
	if held > 0 && held == len(setups) {
		out = append(out, "faster than kube-proxy: held")
	}
	return strings.Join(out, "; ")
}

// tables has one of each path: ratios to the floor, and what it took itself.
func (r *peerResults) tables() (out []report.Table) {
	for _, g := range r.groups() {
		t := report.Table{Title: fmt.Sprintf("%s, %s", g.path, g.title), Head: []string{"", baseline}}
		for _, s := range g.setups {
			if s != baseline {
				t.Head = append(t.Head, s)
			}
		}
		t.Head = append(t.Head, "bar")
		for _, m := range g.metrics {
			var row []string
			for _, s := range g.setups {
				c := r.cell(g.phase, g.path, m, s)
				switch {
				case s == baseline:
					row = append([]string{m, fmt.Sprintf("%.0f %s", c.Median, c.Unit)}, row...)
				case c == nil || c.Ratio == nil:
					row = append(row, "-")
				default:
					row = append(row, c.Ratio.String())
				}
			}
			t.Rows = append(t.Rows, append(row, r.verdicts(g, m)))
		}
		out = append(out, t)
	}
	return out
}

// barTable is all bars, those against kube-proxy summed up.
func (r *peerResults) barTable() report.Table {
	t := report.Table{Title: "Bars", Head: []string{"", "path", "row", "limit", "median [quartiles]", ""}}
	held, all := 0, 0
	for _, b := range r.Bars {
		if strings.HasPrefix(b.Against, "kube-proxy") {
			all++
			if b.Held {
				held++
				continue
			}
		}
		t.Rows = append(t.Rows, []string{b.What, b.Path, b.Metric + ", " + b.Setup + " / " + b.Against, b.limit(), b.Ratio.String(), b.verdict()})
	}
	if all > 0 {
		t.Rows = append(t.Rows, []string{"faster than kube-proxy", "all", fmt.Sprintf("%d of %d rows", held, all), "<= 1.00", "", map[bool]string{true: "held", false: "missed"}[held == all]})
	}
	return t
}

// rivals of a podweir setup: the kernel doing the same job, and kube-proxy at
// the same size.
func rivals(c *cell) []string {
	out := []string{baseline}
	for _, m := range allModes() {
		if m.name == c.Mode && m.against != "" && m.against != baseline {
			out = append(out, m.against)
		}
	}
	for _, peer := range []string{iptablesMode, nftablesMode} {
		out = append(out, strings.Replace(c.Setup, c.Mode, peer, 1))
	}
	return out
}

// losses are all rows in which podweir is slower than somebody, by half a per
// cent or more. Where the better quartile is on the wrong side of 1, too, that
// is clear; those come first.
func (r *peerResults) losses() report.Table {
	t := report.Table{Title: "Where podweir loses", Head: []string{"path", "row", "podweir", "against", "median [quartiles]", ""}}
	var within [][]string
	for _, c := range r.Cells {
		if !strings.HasPrefix(c.Mode, "podweir-") {
			continue
		}
		least := 1.005
		if c.MoreBetter {
			least = 0.995
		}
		for _, rival := range rivals(c) {
			ratio := c.against(r.cell(c.Phase, c.Path, c.Metric, rival))
			if ratio == nil || !c.worse(ratio.Median, least) {
				continue
			}
			row := []string{c.Path, c.Metric, c.Setup, rival, ratio.String()}
			better := ratio.Q1
			if c.MoreBetter {
				better = ratio.Q3
			}
			if c.worse(better, 1) {
				t.Rows = append(t.Rows, append(row, "clear"))
			} else {
				within = append(within, append(row, "within the spread"))
			}
		}
	}
	t.Rows = append(t.Rows, within...)
	if len(t.Rows) == 0 {
		t.Rows = append(t.Rows, []string{"nowhere", "", "", "", "", ""})
	}
	return t
}

func (r *peerResults) header() string {
	few := ""
	if r.Builds*r.Rounds < 5 {
		few = " Fewer than 5 rounds: no figures to quote."
	}
	return fmt.Sprintf("IPv4, kernel %s, %d CPUs, kube-proxy %s, %s, %s, %d builds of %d rounds. Ratios to %s = 1.00 in the same round: median [quartiles]; "+
		"lower is better, but for MiB/s. Rows named two-... are of two processes on two CPUs, the others of one thread, whose time is CPU time.%s\n",
		r.Kernel, r.CPUs, r.KubeProxy, r.IPTables, r.NFTables, r.Builds, r.Rounds, baseline, few)
}

func (r *peerResults) pace(out io.Writer) {
	fmt.Fprintf(out, "%d rounds measured again because the machine's pace changed.\n", r.Repeated)
	if r.Unsteady > r.Measured/4 {
		fmt.Fprintf(out, "In %d rounds of %d it never held: a busy machine; run it again.\n", r.Unsteady, r.Measured)
	}
}

func (r *peerResults) each(out io.Writer, write func(report.Table, io.Writer)) {
	fmt.Fprintln(out, r.header())
	for _, t := range append(r.tables(), r.barTable(), r.losses()) {
		write(t, out)
	}
	r.pace(out)
}

func (r *peerResults) print(out io.Writer)    { r.each(out, report.Table.Print) }
func (r *peerResults) markdown(out io.Writer) { r.each(out, report.Table.Markdown) }

func (r *peerResults) write(path string) error { return report.WriteJSON(path, r) }

// charts are a plot of each path.
func (r *peerResults) charts() map[string]report.Chart {
	out := map[string]report.Chart{}
	for _, g := range r.groups() {
		c := report.Chart{
			Title: g.path + ", " + g.title, Axis: "ratio to " + baseline + "; lower is better, but for MiB/s", Line: 1, Most: 3,
			Note: fmt.Sprintf("medians and quartiles of %d rounds, kernel %s, %d CPUs", r.Builds*r.Rounds, r.Kernel, r.CPUs),
		}
		for _, m := range g.metrics {
			row := report.Group{Label: m}
			for _, s := range g.setups {
				cell := r.cell(g.phase, g.path, m, s)
				if cell == nil || cell.Ratio == nil {
					continue
				}
				if s == baseline {
					row.Label = m + ", " + cell.Unit
					continue
				}
				row.Bars = append(row.Bars, report.Bar{Series: s, Value: cell.Ratio.Median, Low: cell.Ratio.Q1, High: cell.Ratio.Q3})
			}
			c.Groups = append(c.Groups, row)
		}
		out[g.phase+"-"+g.path+".svg"] = c
	}
	return out
}

// plot writes them into a folder.
func (r *peerResults) plot(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, c := range r.charts() {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if err := errors.Join(c.SVG(f), f.Close()); err != nil {
			return err
		}
	}
	return nil
}
