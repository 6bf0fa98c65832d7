package agent

import (
	"context"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podweir/podweir/internal/maps"
)

// collector reads the counters from the maps when it is asked: nothing is
// copied or kept.
type collector struct {
	agent *Agent
	set   maps.Set
	sweep *sweeper

	packets, bytes, events       *prometheus.Desc
	entries, capacity            *prometheus.Desc
	rounds, roundTime, lastRound *prometheus.Desc
	compiled, bumps              *prometheus.Desc
	removed, evicted             *prometheus.Desc
	problems, ready, readErrors  *prometheus.Desc
	build                        *prometheus.Desc
	version                      string
}

func newCollector(a *Agent, set maps.Set, sweep *sweeper, version string) *collector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("podweir_"+name, help, labels, nil)
	}
	return &collector{
		agent: a, set: set, sweep: sweep, version: version,
		packets:    d("packets_total", "Packets by what became of them.", "reason", "hook", "family"),
		events:     d("flow_events_total", "What the flow engine did with packets, and entries it swept.", "event", "hook", "family"),
		bytes:      d("bytes_total", "Bytes by what became of them.", "reason", "hook", "family"),
		entries:    d("map_entries", "Entries of a map; flows as of the last sweep.", "map"),
		capacity:   d("map_capacity", "Entries a map has room for.", "map"),
		rounds:     d("sync_rounds_total", "Rounds of compiling and applying."),
		roundTime:  d("sync_seconds_total", "Time spent in rounds."),
		lastRound:  d("sync_last_seconds", "Duration of the last round."),
		compiled:   d("services_compiled_total", "Services compiled."),
		bumps:      d("generations_moved_total", "Generations moved."),
		removed:    d("flows_expired_total", "Flow entries removed by the sweeper."),
		evicted:    d("flow_evictions_total", "Unconfirmed flow entries pushed out by newer ones, as of the last sweep."),
		problems:   d("problems", "Objects and devices that cannot be used at present."),
		ready:      d("ready", "1 when the agent is ready."),
		readErrors: d("scrape_error", "1 when something could not be read for this scrape."),
		build:      d("build_info", "1; the agent's version and the Go it was built with.", "version", "goversion"),
	}
}

// Describe implements [prometheus.Collector].
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.packets, c.bytes, c.events, c.entries, c.capacity, c.rounds, c.roundTime, c.lastRound,
		c.compiled, c.bumps, c.removed, c.evicted, c.problems, c.ready, c.readErrors, c.build,
	} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	failed := 0.0
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	gauge(c.build, 1, c.version, runtime.Version())
	samples, err := c.set.Metrics.Read()
	if err != nil {
		failed = 1
	}
	for _, s := range samples {
		labels := []string{maps.ReasonName(s.Reason), maps.HookName(s.Hook), s.Family()}
		if maps.IsEvent(s.Reason) {
			counter(c.events, float64(s.Packets), labels...)
			continue
		}
		counter(c.packets, float64(s.Packets), labels...)
		counter(c.bytes, float64(s.Bytes), labels...)
	}
	gauge(c.entries, float64(c.sweep.confirmed.Load()), c.set.Flows.Name())
	gauge(c.entries, float64(c.sweep.fresh.Load()), c.set.FlowsNew.Name())
	counter(c.removed, float64(c.sweep.removed.Load()))
	// The count outlives the agent: before it is known, 0 would be a lie.
	if c.sweep.evicted.known.Load() {
		counter(c.evicted, float64(c.sweep.evicted.total.Load()))
	}
	for name, n := range c.set.Capacities() {
		gauge(c.capacity, float64(n), name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), doTimeout)
	defer cancel()
	v, err := c.agent.view(ctx)
	if err != nil {
		gauge(c.readErrors, 1)
		return
	}
	for name, n := range v.sizes {
		gauge(c.entries, float64(n), name)
	}
	counter(c.rounds, float64(v.rounds))
	counter(c.roundTime, v.total.Seconds())
	gauge(c.lastRound, v.last.Seconds())
	counter(c.compiled, float64(v.services))
	counter(c.bumps, float64(v.bumps))
	gauge(c.problems, float64(v.problems))
	ready := 0.0
	if v.ready {
		ready = 1
	}
	gauge(c.ready, ready)
	gauge(c.readErrors, failed)
}
