package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/podweir/podweir/test/bench/report"
)

// results are all samples of a run and what was made of them. Times are in
// milliseconds, memory in MiB unless named otherwise.
type results struct {
	Kernel   string          `json:"kernel"`
	CPUs     int             `json:"cpus"`
	Format   string          `json:"format"`
	Repeats  int             `json:"repeats"`
	Pause    float64         `json:"pause"` // before each change
	Tools    []string        `json:"tools"` // versions of what kube-proxy uses
	Time     time.Time       `json:"time"`
	Rows     []*row          `json:"rows"`
	Policies *policiesResult `json:"policies,omitempty"`
	Bars     []bar           `json:"bars"`
}

// row is one size of a cluster and who programs it. The figures are medians of
// the repeats, those of changes over the changes of all repeats.
type row struct {
	size
	Subject    string   `json:"subject"`
	Cold       float64  `json:"cold"`
	ColdCPU    float64  `json:"coldCPU"`
	ChangeP50  float64  `json:"changeP50"`
	ChangeP99  float64  `json:"changeP99"`
	ChangeCPU  float64  `json:"changeCPU"`
	Burst      float64  `json:"burst"`
	Restart    float64  `json:"restart"`
	RestartCPU float64  `json:"restartCPU"`
	Start      memory   `json:"memoryAfterStart"`
	After      memory   `json:"memoryAfterChanges"`
	Restarted  memory   `json:"memoryAfterRestart"`
	Maps       float64  `json:"maps"`
	Samples    []sample `json:"samples"`
}

// sample is one repeat.
type sample struct {
	Cold       float64           `json:"cold"`    // process start to all services in force
	ColdCPU    float64           `json:"coldCPU"` // of the process, until it is ready
	Entries    entries           `json:"entries"`
	Changes    []float64         `json:"changes"`   // sorted
	ChangeCPU  float64           `json:"changeCPU"` // of one
	Burst      float64           `json:"burst"`
	Restart    float64           `json:"restart"` // process start to ready, or the first sync
	RestartCPU float64           `json:"restartCPU"`
	Start      memory            `json:"memoryAfterStart"`
	After      memory            `json:"memoryAfterChanges"`
	Restarted  memory            `json:"memoryAfterRestart"`
	MapBytes   map[string]uint64 `json:"mapBytes"`
}

// entries are what the maps hold.
type entries struct {
	Frontends int `json:"frontends"`
	Backends  int `json:"backends"`
	States    int `json:"states"`
	Maglev    int `json:"maglevChunks"`
}

func newResults(o options) *results {
	return &results{
		Kernel: report.KernelRelease(), CPUs: runtime.NumCPU(), Format: o.format,
		Repeats: o.repeats, Pause: ms(o.pause), Time: time.Now().UTC(),
	}
}

func (r *row) finish() {
	median := func(of func(*sample) float64) float64 {
		var all []float64
		for i := range r.Samples {
			all = append(all, of(&r.Samples[i]))
		}
		return report.Median(all)
	}
	mem := func(of func(*sample) *memory) memory {
		return memory{
			RSS:     median(func(s *sample) float64 { return of(s).RSS }),
			Files:   median(func(s *sample) float64 { return of(s).Files }),
			Peak:    median(func(s *sample) float64 { return of(s).Peak }),
			GoHeap:  median(func(s *sample) float64 { return of(s).GoHeap }),
			GoTotal: median(func(s *sample) float64 { return of(s).GoTotal }),
		}
	}
	r.Cold = median(func(s *sample) float64 { return s.Cold })
	r.ColdCPU = median(func(s *sample) float64 { return s.ColdCPU })
	r.ChangeCPU = median(func(s *sample) float64 { return s.ChangeCPU })
	r.Burst = median(func(s *sample) float64 { return s.Burst })
	r.Restart = median(func(s *sample) float64 { return s.Restart })
	r.RestartCPU = median(func(s *sample) float64 { return s.RestartCPU })
	r.Start = mem(func(s *sample) *memory { return &s.Start })
	r.After = mem(func(s *sample) *memory { return &s.After })
	r.Restarted = mem(func(s *sample) *memory { return &s.Restarted })
	r.Maps = median(func(s *sample) float64 {
		var sum uint64
		for _, n := range s.MapBytes {
			sum += n
		}
		return float64(sum) / mib
	})
	var changes []float64
	for _, s := range r.Samples {
		changes = append(changes, s.Changes...)
	}
	slices.Sort(changes)
	r.ChangeP50, r.ChangeP99 = report.Quantile(changes, 0.5), report.Quantile(changes, 0.99)
}

func (r *results) print(out io.Writer) {
	fmt.Fprintf(out, "Kernel %s, %d CPUs, %s, medians of %d repeats. Milliseconds; CPU is the process's user and system time.\n",
		r.Kernel, r.CPUs, r.Format, r.Repeats)
	fmt.Fprintf(out, "kube-proxy as shipped, with its minSyncPeriod of 1 s; changes are %.1f s apart, so that it does not wait. %s\n\n",
		r.Pause/1000, strings.Join(r.Tools, ", "))
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "services x endpoints\t\tcold\tCPU\tchange p50\tp99\tCPU\tburst\trestart\tCPU\t")
	for _, w := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%.0f\t%.2f\t%.2f\t%.1f\t%s\t%.0f\t%.0f\t\n", w.Name, w.Subject,
			w.Cold, w.ColdCPU, w.ChangeP50, w.ChangeP99, w.ChangeCPU, known(w.Burst), w.Restart, w.RestartCPU)
	}
	fmt.Fprintln(t)
	fmt.Fprintln(t, "MiB\t\tRSS\tof it files\tpeak\tGo heap\tafter changes: RSS\tpeak\tGo heap\trestarted: RSS\tpeak\tmaps\t")
	for _, w := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%s\t\n", w.Name, w.Subject,
			w.Start.RSS, w.Start.Files, w.Start.Peak, w.Start.GoHeap, w.After.RSS, w.After.Peak, w.After.GoHeap,
			w.Restarted.RSS, w.Restarted.Peak, known(w.Maps))
	}
	_ = t.Flush()
	if r.Policies != nil {
		fmt.Fprintf(out, "\n%d pods x 3 policies at once, to the last verdict met by a packet: %.0f ms (of %d: %.0f to %.0f)\n",
			r.Policies.Pods, r.Policies.Median, len(r.Policies.Samples), slices.Min(r.Policies.Samples), slices.Max(r.Policies.Samples))
	}
	if len(r.Bars) > 0 {
		fmt.Fprintln(out)
	}
	for _, b := range r.Bars {
		verdict := "MISSED"
		if b.Holds {
			verdict = "holds"
		}
		fmt.Fprintf(out, "%-7s %s\n", verdict, b.What)
	}
}

// known is a figure, or a dash where there is none.
func known(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", v)
}

func (r *results) write(path string) error { return report.WriteJSON(path, r) }
