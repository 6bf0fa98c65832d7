package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/podweir/podweir/test/bench/report"
)

type results struct {
	Kernel  string    `json:"kernel"`
	CPUs    int       `json:"cpus"`
	Time    time.Time `json:"time"`
	Figures []figure  `json:"figures"`
}

// figure is the median of one benchmark's results, in nanoseconds.
type figure struct {
	Bench    string            `json:"bench"`
	Params   map[string]string `json:"params"`
	Run      float64           `json:"run"`
	Repeated float64           `json:"repeated,omitempty"`
	Samples  []float64         `json:"samples"`
}

func (f figure) key() string {
	out := f.Bench
	for _, k := range slices.Sorted(maps.Keys(f.Params)) {
		out += "/" + k + "=" + f.Params[k]
	}
	return out
}

// figures are medians, in the order in which the benchmarks ran.
func figures(all []line) (out []figure) {
	at := map[string]int{}
	repeated := map[string][]float64{}
	for _, l := range all {
		f := figure{Bench: l.Bench, Params: l.Params}
		i, ok := at[f.key()]
		if !ok {
			i = len(out)
			at[f.key()] = i
			out = append(out, f)
		}
		out[i].Samples = append(out[i].Samples, l.Values["ns/run"])
		if v, ok := l.Values["ns/repeated"]; ok {
			repeated[f.key()] = append(repeated[f.key()], v)
		}
	}
	for i := range out {
		out[i].Run = report.Median(out[i].Samples)
		out[i].Repeated = report.Median(repeated[out[i].key()])
	}
	return out
}

func (r results) print(out io.Writer) {
	fmt.Fprintf(out, "Kernel %s, %d CPUs. Nanoseconds of a run, without what a program that does nothing takes.\n\n", r.Kernel, r.CPUs)
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "hook\tpath\tIPv4\tIPv6\tIPv4, repeated\tIPv6, repeated\t")
	find := func(f figure, family string) figure {
		for _, o := range r.Figures {
			if o.Bench == f.Bench && o.Params["hook"] == f.Params["hook"] && o.Params["path"] == f.Params["path"] && o.Params["family"] == family {
				return o
			}
		}
		return figure{}
	}
	var others []figure
	for _, f := range r.Figures {
		switch {
		case f.Params["hook"] == "":
			others = append(others, f)
		case f.Params["family"] == "IPv4":
			six := find(f, "IPv6")
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", f.Params["hook"], f.Params["path"], ns(f.Run), ns(six.Run), ns(f.Repeated), ns(six.Repeated))
		}
	}
	_ = t.Flush()
	if len(others) > 0 {
		fmt.Fprintln(out)
	}
	for _, f := range others {
		fmt.Fprintf(t, "%s\t%s\t\n", strings.ReplaceAll(f.key(), "/", " "), ns(f.Run))
	}
	_ = t.Flush()
}

func ns(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", v)
}
