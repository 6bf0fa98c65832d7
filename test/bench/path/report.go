package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/podweir/podweir/test/bench/report"
)

// results are all samples of a run and what was made of them.
type results struct {
	Kernel   string    `json:"kernel"`
	CPUs     int       `json:"cpus"`
	Family   int       `json:"family"`
	Builds   int       `json:"builds"`
	Repeats  int       `json:"repeats"`
	Time     time.Time `json:"time"`
	Repeated int       `json:"repeated"` // rounds measured again
	Unsteady int       `json:"unsteady"` // rounds counted although the pace changed
	Rows     []*row    `json:"rows"`

	modes []mode
	loads []workload
}

// row is one mode under one workload. A ratio is taken within each round, and
// the median is over the rounds: what disturbs a whole round cancels out.
type row struct {
	Mode     string   `json:"mode"`
	Workload string   `json:"workload"`
	Unit     string   `json:"unit"`
	Median   float64  `json:"median"` // of the rounds' medians
	Min      float64  `json:"min"`
	Max      float64  `json:"max"`
	Ratio    *spread  `json:"ratio,omitempty"`    // to kernel-vxlan
	OwnRatio *spread  `json:"ownRatio,omitempty"` // to the kernel mode of the same job
	Against  string   `json:"against,omitempty"`
	Rounds   []sample `json:"rounds"`
}

type spread struct {
	Median float64 `json:"median"`
	Q1     float64 `json:"q1"`
	Q3     float64 `json:"q3"`
}

func newResults(o options, modes []mode, loads []workload) *results {
	r := &results{Kernel: report.KernelRelease(), CPUs: runtime.NumCPU(), Family: o.family, Builds: o.builds, Repeats: o.repeats, Time: time.Now().UTC(), modes: modes, loads: loads}
	for _, w := range loads {
		for _, m := range modes {
			r.Rows = append(r.Rows, &row{Mode: m.name, Workload: w.name, Unit: w.unit, Against: m.against})
		}
	}
	return r
}

func (r *results) rounds() int { return len(r.loads) * r.Builds * r.Repeats }

func (r *results) unsteady(counted bool) {
	if counted {
		r.Unsteady++
	} else {
		r.Repeated++
	}
}

func (r *results) row(mode, workload string) *row {
	for _, w := range r.Rows {
		if w.Mode == mode && w.Workload == workload {
			return w
		}
	}
	return nil
}

func (r *results) add(mode, workload string, s sample) {
	w := r.row(mode, workload)
	w.Rounds = append(w.Rounds, s)
}

func (w *row) medians() []float64 {
	var out []float64
	for _, s := range w.Rounds {
		out = append(out, s.P50)
	}
	return out
}

func ratio(w, base *row) *spread {
	if base == nil {
		return nil
	}
	var all []float64
	for i, s := range w.Rounds {
		all = append(all, s.P50/base.Rounds[i].P50)
	}
	slices.Sort(all)
	return &spread{report.Quantile(all, 0.5), report.Quantile(all, 0.25), report.Quantile(all, 0.75)}
}

func (r *results) finish() {
	for _, w := range r.Rows {
		all := w.medians()
		slices.Sort(all)
		w.Median, w.Min, w.Max = report.Quantile(all, 0.5), all[0], all[len(all)-1]
		w.Ratio = ratio(w, r.row(baseline, w.Workload))
		if w.Against != "" {
			w.OwnRatio = ratio(w, r.row(w.Against, w.Workload))
		}
	}
}

func (r *results) print(out io.Writer) {
	fmt.Fprintf(out, "IPv%d, kernel %s, %d CPUs, %d builds of %d rounds. Ratios, lower is better: median [quartiles] of the rounds.\n\n", r.Family, r.Kernel, r.CPUs, r.Builds, r.Repeats)
	r.table(out, "to "+baseline+" = 1.00", false, func(w *row) string { return w.Ratio.String() })
	r.table(out, "to the same job", true, func(w *row) string { return w.OwnRatio.String() })
	r.table(out, "medians (min - max)", false, func(w *row) string { return fmt.Sprintf("%.0f (%.0f - %.0f)", w.Median, w.Min, w.Max) })
	fmt.Fprintf(out, "%d rounds measured again because the machine's pace changed.\n", r.Repeated)
	if r.Unsteady > r.rounds()/4 {
		fmt.Fprintf(out, "In %d rounds of %d it never held: a busy machine; run it again.\n", r.Unsteady, r.rounds())
	}
}

func (s *spread) String() string {
	if s == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f [%.2f %.2f]", s.Median, s.Q1, s.Q3)
}

func (r *results) table(out io.Writer, title string, own bool, cell func(*row) string) {
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprint(t, title)
	for _, w := range r.loads {
		fmt.Fprintf(t, "\t%s %s", w.name, w.unit)
	}
	fmt.Fprintln(t)
	for _, m := range r.modes {
		if own && m.against == "" {
			continue
		}
		fmt.Fprint(t, m.name)
		if own && m.against != "" {
			fmt.Fprint(t, " / ", m.against)
		}
		for _, w := range r.loads {
			fmt.Fprint(t, "\t", cell(r.row(m.name, w.name)))
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush()
	fmt.Fprintln(out)
}

func (r *results) write(path string) error { return report.WriteJSON(path, r) }
