package health

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
)

// NoLocal is a number of service ports that have endpoints, but none that a
// Local traffic policy allows on this node.
type NoLocal struct {
	Family   corev1.IPFamily
	External bool // externalTrafficPolicy; else internalTrafficPolicy
	Count    int
}

// metrics are kube-proxy's. Names, types, labels and buckets are those of
// v1.35.
type metrics struct {
	rounds, fullRounds, partialRounds, programming *prometheus.HistogramVec
	endpointsPending, servicesPending              prometheus.Gauge
	endpointsTotal, servicesTotal                  prometheus.Counter
	lastApplied, lastQueued                        *prometheus.GaugeVec
	healthzTotal, livezTotal                       *prometheus.CounterVec
	noLocal                                        *prometheus.Desc
	countNoLocal                                   func() []NoLocal
}

const (
	subsystem    = "kubeproxy"
	labelFamily  = "ip_family"
	labelPolicy  = "traffic_policy"
	labelCode    = "code"
	noLocalName  = subsystem + "_sync_proxy_rules_no_local_endpoints_total"
	policyInside = "internal"
	policyOut    = "external"
)

// programmingBuckets: fine where the objective lies, then ever coarser.
func programmingBuckets() []float64 {
	b := []float64{0.25, 0.5}
	for _, part := range []struct{ start, width, n int }{{1, 1, 59}, {60, 5, 12}, {120, 30, 7}} {
		b = append(b, prometheus.LinearBuckets(float64(part.start), float64(part.width), part.n)...)
	}
	return b
}

func newMetrics(noLocal func() []NoLocal) *metrics {
	hist := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Subsystem: subsystem, Name: name, Help: help, Buckets: buckets}, []string{labelFamily})
	}
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Subsystem: subsystem, Name: name, Help: help}
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts(opts(name, help)))
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts(opts(name, help)))
	}
	stamp := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts(opts(name, help)), []string{labelFamily})
	}
	codes := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), []string{labelCode})
	}
	seconds := prometheus.ExponentialBuckets(0.001, 2, 15)
	return &metrics{
		rounds:           hist("sync_proxy_rules_duration_seconds", "Duration of rounds that applied changes of Services or EndpointSlices.", seconds),
		fullRounds:       hist("sync_full_proxy_rules_duration_seconds", "Duration of rounds that applied every Service.", seconds),
		partialRounds:    hist("sync_partial_proxy_rules_duration_seconds", "Duration of rounds that applied the Services that changed.", seconds),
		programming:      hist("network_programming_duration_seconds", "Time from what changed an EndpointSlice to the change being in force.", programmingBuckets()),
		endpointsPending: gauge("sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices that are not in force yet."),
		endpointsTotal:   counter("sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices seen."),
		servicesPending:  gauge("sync_proxy_rules_service_changes_pending", "Changes of Services that are not in force yet."),
		servicesTotal:    counter("sync_proxy_rules_service_changes_total", "Changes of Services seen."),
		lastApplied:      stamp("sync_proxy_rules_last_timestamp_seconds", "When a round last left nothing unapplied."),
		lastQueued:       stamp("sync_proxy_rules_last_queued_timestamp_seconds", "When a change was last seen."),
		healthzTotal:     codes("proxy_healthz_total", "Answers of /healthz by status."),
		livezTotal:       codes("proxy_livez_total", "Answers of /livez by status."),
		noLocal: prometheus.NewDesc(noLocalName, "Service ports with a Local traffic policy and no endpoint on this node.",
			[]string{labelFamily, labelPolicy}, nil),
		countNoLocal: noLocal,
	}
}

func (m *metrics) queued(now time.Time, services, slices int) {
	m.servicesTotal.Add(float64(services))
	m.servicesPending.Add(float64(services))
	m.endpointsTotal.Add(float64(slices))
	m.endpointsPending.Add(float64(slices))
	stampAll(m.lastQueued, now)
}

func (m *metrics) round(took time.Duration, full bool) {
	kind := m.partialRounds
	if full {
		kind = m.fullRounds
	}
	for _, f := range families() {
		m.rounds.WithLabelValues(string(f)).Observe(took.Seconds())
		kind.WithLabelValues(string(f)).Observe(took.Seconds())
	}
}

func (m *metrics) applied(now time.Time) {
	m.servicesPending.Set(0)
	m.endpointsPending.Set(0)
	stampAll(m.lastApplied, now)
}

func (m *metrics) programmed(f corev1.IPFamily, took time.Duration) {
	m.programming.WithLabelValues(string(f)).Observe(took.Seconds())
}

func (m *metrics) healthz(code int) { m.healthzTotal.WithLabelValues(strconv.Itoa(code)).Inc() }
func (m *metrics) livez(code int)   { m.livezTotal.WithLabelValues(strconv.Itoa(code)).Inc() }

func stampAll(g *prometheus.GaugeVec, now time.Time) {
	for _, f := range families() {
		g.WithLabelValues(string(f)).Set(float64(now.UnixNano()) / float64(time.Second))
	}
}

func (m *metrics) all() []prometheus.Collector {
	return []prometheus.Collector{
		m.rounds, m.fullRounds, m.partialRounds, m.programming,
		m.endpointsPending, m.endpointsTotal, m.servicesPending, m.servicesTotal,
		m.lastApplied, m.lastQueued, m.healthzTotal, m.livezTotal,
	}
}

// Describe implements [prometheus.Collector].
func (p *Proxy) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range p.metrics.all() {
		c.Describe(ch)
	}
	ch <- p.metrics.noLocal
}

// Collect implements [prometheus.Collector].
func (p *Proxy) Collect(ch chan<- prometheus.Metric) {
	for _, c := range p.metrics.all() {
		c.Collect(ch)
	}
	if p.metrics.countNoLocal == nil {
		return
	}
	for _, n := range p.metrics.countNoLocal() {
		policy := policyInside
		if n.External {
			policy = policyOut
		}
		ch <- prometheus.MustNewConstMetric(p.metrics.noLocal, prometheus.GaugeValue, float64(n.Count), string(n.Family), policy)
	}
}
