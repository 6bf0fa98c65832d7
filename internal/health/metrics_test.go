package health

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// gathered is every metric with its type, labels and, of histograms, buckets.
func gathered(t *testing.T, c prometheus.Collector) []string {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range families {
		labels := map[string]bool{}
		buckets := ""
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = true
			}
			if h := m.GetHistogram(); h != nil {
				b := h.GetBucket()
				buckets = fmt.Sprintf(" %d buckets %v..%v", len(b), b[0].GetUpperBound(), b[len(b)-1].GetUpperBound())
			}
		}
		names := make([]string, 0, len(labels))
		for l := range labels {
			names = append(names, l)
		}
		slices.Sort(names)
		out = append(out, strings.ToLower(fmt.Sprintf("%s %s{%s}%s", f.GetType(), f.GetName(), strings.Join(names, ","), buckets)))
	}
	return out
}

// S19: kube-proxy's dashboards and alerts find what they look for.
func TestMetricNames(t *testing.T) {
	c := &clock{time.Unix(1e9, 0)}
	p := New(time.Minute, c.now, func() []NoLocal { return []NoLocal{{corev1.IPv4Protocol, false, 1}} })
	var ch Changes
	ch.Slice(testSlice("web", discoveryv1.AddressTypeIPv4, c.t), false)
	for _, full := range []bool{true, false} {
		p.Began()
		p.Queued(ch)
		p.Applied(full, nil)
	}
	ask(t, p, "/healthz")
	ask(t, p, "/livez")
	want := []string{
		"histogram kubeproxy_network_programming_duration_seconds{ip_family} 80 buckets 0.25..300",
		"counter kubeproxy_proxy_healthz_total{code}",
		"counter kubeproxy_proxy_livez_total{code}",
		"histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family} 15 buckets 0.001..16.384",
		"histogram kubeproxy_sync_partial_proxy_rules_duration_seconds{ip_family} 15 buckets 0.001..16.384",
		"histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family} 15 buckets 0.001..16.384",
		"gauge kubeproxy_sync_proxy_rules_endpoint_changes_pending{}",
		"counter kubeproxy_sync_proxy_rules_endpoint_changes_total{}",
		"gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family}",
		"gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family}",
		"gauge kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family,traffic_policy}",
		"gauge kubeproxy_sync_proxy_rules_service_changes_pending{}",
		"counter kubeproxy_sync_proxy_rules_service_changes_total{}",
	}
	if got := gathered(t, p); !slices.Equal(got, want) {
		t.Errorf("metrics:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestChangesMoveMetrics(t *testing.T) {
	p, c := newProxy()
	expect := func(when string, names []string, want string) {
		t.Helper()
		var lines []string
		for l := range strings.Lines(want) {
			lines = append(lines, strings.TrimSpace(l))
		}
		if err := testutil.CollectAndCompare(p, strings.NewReader(strings.Join(lines, "\n")+"\n"), names...); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	counters := []string{
		"kubeproxy_sync_proxy_rules_endpoint_changes_pending", "kubeproxy_sync_proxy_rules_endpoint_changes_total",
		"kubeproxy_sync_proxy_rules_service_changes_pending", "kubeproxy_sync_proxy_rules_service_changes_total",
	}
	state := func(ep, epTotal, svc, svcTotal int) string {
		return fmt.Sprintf(`# HELP kubeproxy_sync_proxy_rules_endpoint_changes_pending Changes of EndpointSlices that are not in force yet.
		# TYPE kubeproxy_sync_proxy_rules_endpoint_changes_pending gauge
		kubeproxy_sync_proxy_rules_endpoint_changes_pending %d
		# HELP kubeproxy_sync_proxy_rules_endpoint_changes_total Changes of EndpointSlices seen.
		# TYPE kubeproxy_sync_proxy_rules_endpoint_changes_total counter
		kubeproxy_sync_proxy_rules_endpoint_changes_total %d
		# HELP kubeproxy_sync_proxy_rules_service_changes_pending Changes of Services that are not in force yet.
		# TYPE kubeproxy_sync_proxy_rules_service_changes_pending gauge
		kubeproxy_sync_proxy_rules_service_changes_pending %d
		# HELP kubeproxy_sync_proxy_rules_service_changes_total Changes of Services seen.
		# TYPE kubeproxy_sync_proxy_rules_service_changes_total counter
		kubeproxy_sync_proxy_rules_service_changes_total %d`, ep, epTotal, svc, svcTotal)
	}
	rounds := func(kind string) int {
		n := 0
		for _, f := range []*prometheus.HistogramVec{p.metrics.rounds, p.metrics.fullRounds, p.metrics.partialRounds} {
			if strings.Contains(nameOf(f), kind) {
				n += observations(t, f, "IPv6")
			}
		}
		return n
	}

	// The first round: everything.
	p.Began()
	ch := Changes{Services: 3}
	ch.Slice(testSlice("web", discoveryv1.AddressTypeIPv4, c.t.Add(-time.Hour)), false)
	p.Queued(ch)
	expect("seen", counters, state(1, 1, 3, 3))
	p.Applied(true, nil)
	expect("applied", counters, state(0, 1, 0, 3))
	if n := observations(t, p.metrics.programming, "IPv4"); n != 0 {
		t.Errorf("a change from before the start was measured %d times", n)
	}
	// A round about something else is no round of the proxy's.
	p.Began()
	p.Applied(false, nil)
	if full, part := rounds("sync_full"), rounds("sync_partial"); full != 1 || part != 0 {
		t.Errorf("%d full rounds and %d partial ones, want 1 and 0", full, part)
	}
	// Changes of both families, applied at the second try, 2 s after.
	ch = Changes{}
	ch.Slice(testSlice("web", discoveryv1.AddressTypeIPv4, c.t), false)
	ch.Slice(testSlice("api", discoveryv1.AddressTypeIPv6, c.t), false)
	ch.Slice(testSlice("gone", discoveryv1.AddressTypeIPv6, c.t), true)
	bad := testSlice("hand", discoveryv1.AddressTypeIPv4, c.t)
	bad.Annotations[corev1.EndpointsLastChangeTriggerTime] = "yesterday"
	ch.Slice(bad, false)
	p.Began()
	p.Queued(ch)
	queued := c.t
	c.advance(time.Second)
	p.Applied(false, errors.New("refused"))
	expect("refused", counters, state(4, 5, 0, 3))
	p.Began()
	c.advance(time.Second)
	p.Applied(false, nil)
	expect("applied at last", counters, state(0, 5, 0, 3))
	for _, f := range []string{"IPv4", "IPv6"} {
		if n, sum := observations(t, p.metrics.programming, f), sumOf(t, p.metrics.programming, f); n != 1 || sum != 2 {
			t.Errorf("%s: programming took %v s in %d changes, want 2 s in 1", f, sum, n)
		}
		if got := testutil.ToFloat64(p.metrics.lastQueued.WithLabelValues(f)); got != float64(queued.Unix()) {
			t.Errorf("%s: last queued %v", f, got)
		}
		if got := testutil.ToFloat64(p.metrics.lastApplied.WithLabelValues(f)); got != float64(c.t.Unix()) {
			t.Errorf("%s: last applied %v", f, got)
		}
	}
	if n, sum := observations(t, p.metrics.partialRounds, "IPv4"), sumOf(t, p.metrics.partialRounds, "IPv4"); n != 1 || sum != 1 {
		t.Errorf("partial rounds: %d, %v s", n, sum)
	}
	// Codes of the answers.
	ask(t, p, "/healthz")
	ask(t, p, "/livez")
	p.SetNode(nil)
	ask(t, p, "/healthz")
	ask(t, p, "/livez")
	for want, m := range map[string]float64{
		"healthz 200: 1": testutil.ToFloat64(p.metrics.healthzTotal.WithLabelValues("200")),
		"healthz 503: 1": testutil.ToFloat64(p.metrics.healthzTotal.WithLabelValues("503")),
		"livez 200: 2":   testutil.ToFloat64(p.metrics.livezTotal.WithLabelValues("200")),
		"livez 503: 0":   testutil.ToFloat64(p.metrics.livezTotal.WithLabelValues("503")),
	} {
		if !strings.HasSuffix(want, fmt.Sprintf(": %v", m)) {
			t.Errorf("%s, not %v", want, m)
		}
	}
}

func nameOf(v *prometheus.HistogramVec) string {
	ch := make(chan *prometheus.Desc, 1)
	v.Describe(ch)
	return (<-ch).String()
}

// histogram reads one histogram of a vector.
func histogram(t *testing.T, v *prometheus.HistogramVec, family string) (n uint64, sum float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(v)
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		for _, m := range f.GetMetric() {
			if m.GetLabel()[0].GetValue() == family {
				return m.GetHistogram().GetSampleCount(), m.GetHistogram().GetSampleSum()
			}
		}
	}
	return 0, 0
}

func observations(t *testing.T, v *prometheus.HistogramVec, family string) int {
	t.Helper()
	n, _ := histogram(t, v, family)
	return int(n)
}

func sumOf(t *testing.T, v *prometheus.HistogramVec, family string) float64 {
	t.Helper()
	_, sum := histogram(t, v, family)
	return sum
}
