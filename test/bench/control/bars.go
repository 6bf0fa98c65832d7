package main

import "fmt"

// bar is what a run should show, and whether it did.
type bar struct {
	What  string `json:"what"`
	Holds bool   `json:"holds"`
}

// barSize is the cluster that the bars are about.
const barSize = "10000x4"

// changeBar is how many times as fast a change has to be as in one of
// kube-proxy's modes.
type changeBar struct {
	subject string
	times   float64
}

func changeBars() []changeBar { return []changeBar{{iptables, 20}, {nftables, 5}} }

// bars compares podweir with kube-proxy, as far as both were measured.
func (r *results) bars() (out []bar) {
	find := func(subject string) *row {
		for _, w := range r.Rows {
			if w.Name == barSize && w.Subject == subject {
				return w
			}
		}
		return nil
	}
	own := find(podweir)
	if own == nil {
		return nil
	}
	add := func(holds bool, format string, args ...any) {
		out = append(out, bar{Holds: holds, What: barSize + ": " + fmt.Sprintf(format, args...)})
	}
	for _, b := range changeBars() {
		w := find(b.subject)
		if w == nil {
			continue
		}
		add(own.Cold < w.Cold, "cold %.0f ms, %s %.0f ms: %.1f times as fast", own.Cold, b.subject, w.Cold, w.Cold/own.Cold)
		times := w.ChangeP50 / own.ChangeP50
		add(times >= b.times, "a change %.2f ms, %s %.0f ms: %.0f times as fast, at least %.0f", own.ChangeP50, b.subject, w.ChangeP50, times, b.times)
		add(own.After.RSS < w.After.RSS, "RSS %.0f MiB, %s %.0f MiB", own.After.RSS, b.subject, w.After.RSS)
	}
	if r.Policies != nil {
		const most = 1000
		out = append(out, bar{
			Holds: r.Policies.Median < most,
			What:  fmt.Sprintf("policies in force after %.0f ms, at most %d ms", r.Policies.Median, most),
		})
	}
	return out
}
