package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/health"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
)

// proxyAnswers asks kube-proxy's health server.
func proxyAnswers(t *testing.T, b *agentBench, path string) int {
	t.Helper()
	w := httptest.NewRecorder()
	b.a.health.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return w.Code
}

func wantMetrics(t *testing.T, get func(string) (int, string), when string, lines ...string) {
	t.Helper()
	_, body := get("/metrics")
	for _, l := range lines {
		if !strings.Contains(body, l+"\n") {
			name, _, _ := strings.Cut(l, " ")
			t.Errorf("%s: no %q among\n%s", when, l, linesWith(body, name))
		}
	}
}

func linesWith(body, name string) string {
	var out []string
	for l := range strings.Lines(body) {
		if strings.HasPrefix(l, name) {
			out = append(out, l)
		}
	}
	return strings.Join(out, "")
}

// S19: what the loop sees and applies is what the proxy's health and its
// metrics say.
func TestHealthFollowsTheLoop(t *testing.T) {
	b := newAgentBench(t)
	get := serveBench(t, b)
	b.cluster()
	b.put(testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65"))
	b.done()
	b.await("a full round", func() bool { return b.a.full })
	b.await("the end of it", func() bool { return b.a.stats.rounds > 0 && b.a.services.frontends.Len() == 2 })
	wantMetrics(t, get, "at the start",
		"kubeproxy_sync_proxy_rules_service_changes_total 1", "kubeproxy_sync_proxy_rules_service_changes_pending 0",
		"kubeproxy_sync_proxy_rules_endpoint_changes_total 1", "kubeproxy_sync_proxy_rules_endpoint_changes_pending 0",
		`kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1`)

	// A change, with the time of its cause.
	slice := testSlice("web-1", "web", "10.244.158.65", "10.244.158.66")
	slice.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)}
	b.put(slice)
	b.await("both backends", func() bool { return b.frontend("10.98.0.1").Count == 2 })
	wantMetrics(t, get, "after a change",
		"kubeproxy_sync_proxy_rules_endpoint_changes_total 2", "kubeproxy_sync_proxy_rules_endpoint_changes_pending 0",
		`kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1`,
		`kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"} 1`)

	// One that the map refuses stays pending, and is no problem any more when
	// a later one is written.
	restore := refuseBackends(b)
	b.put(testSlice("web-1", "web", "10.244.158.67"))
	b.await("the refusal", func() bool { return b.a.behind() != nil })
	wantMetrics(t, get, "after a refusal", "kubeproxy_sync_proxy_rules_endpoint_changes_pending 1")
	restore()
	b.put(testSlice("web-1", "web", "10.244.158.68"))
	b.await("applied", func() bool { return b.a.behind() == nil })
	wantMetrics(t, get, "after the next",
		"kubeproxy_sync_proxy_rules_endpoint_changes_pending 0", "kubeproxy_sync_proxy_rules_endpoint_changes_total 4")

	// A bad object is its own fault, not the proxy's.
	rival := testService("rival", "10.98.0.1")
	b.put(rival)
	b.await("the conflict", func() bool { return len(b.a.problems["Service default/rival"]) > 0 })
	wantMetrics(t, get, "with two services on one address",
		"kubeproxy_sync_proxy_rules_service_changes_pending 0", "kubeproxy_sync_proxy_rules_service_changes_total 2")

	for _, c := range []struct {
		node           *corev1.Node
		what           string
		healthz, livez int
	}{
		{testNode("node-a", "172.31.0.2", "10.244.80.0/24"), "ready", 200, 200},
		{testNode("node-a", "172.31.0.2", "10.244.80.0/24"), "tainted", 503, 200},
	} {
		if c.what == "tainted" {
			c.node.Spec.Taints = []corev1.Taint{{Key: health.TaintToBeDeleted, Effect: corev1.TaintEffectNoSchedule}}
			b.put(c.node)
		}
		b.await(c.what, func() bool { return proxyAnswers(t, b, "/healthz") == c.healthz })
		if got := proxyAnswers(t, b, "/livez"); got != c.livez {
			t.Errorf("%s: /livez says %d", c.what, got)
		}
	}
}

// refuseBackends has the map of backends refuse everything until restored.
func refuseBackends(b *agentBench) (restore func()) {
	b.t.Helper()
	var good *reconcile.Table[maps.BackendKey, maps.Backend]
	b.await("exchange the map", func() bool {
		bad := newMem[maps.BackendKey, maps.Backend]("pw_backends", &journal{})
		bad.bad = func(maps.BackendKey, maps.Backend) error { return errors.New("refused") }
		good, b.a.services.backends = b.a.services.backends, reconcile.New(bad)
		return true
	})
	return func() {
		b.t.Helper()
		b.await("put the map back", func() bool { b.a.services.backends = good; return true })
	}
}

// S18, S19: a change that waits for too long is told by /healthz, /livez and
// every health check, however many endpoints there are, until it is applied.
func TestAgentBehindIsUnhealthy(t *testing.T) {
	var ahead atomic.Int64
	b := newAgentBenchAt(t, func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	b.cluster()
	port := freePort(t)
	b.put(testService("web", "10.98.0.1", local(int32(port))), at("node-a", testSlice("web-1", "web", "10.244.80.65")))
	b.done()
	type answer struct {
		check          int
		healthy        bool
		healthz, livez int
	}
	expect := func(what string, want answer) {
		t.Helper()
		b.await(what, func() bool {
			got := answer{healthz: proxyAnswers(t, b, "/healthz"), livez: proxyAnswers(t, b, "/livez")}
			code, body := askCheck(t, port)
			got.check, got.healthy = code, body.ServiceProxyHealthy
			return got == want
		})
	}
	expect("in force", answer{200, true, 200, 200})
	restore := refuseBackends(b)
	b.put(at("node-a", testSlice("web-1", "web", "10.244.80.65", "10.244.80.66")))
	b.await("the refusal", func() bool { return b.a.behind() != nil })
	expect("not waiting for long", answer{200, true, 200, 200})
	ahead.Store(int64(health.DefaultTimeout))
	expect("waiting for too long", answer{503, false, 503, 503})
	restore()
	b.put(at("node-a", testSlice("web-1", "web", "10.244.80.65", "10.244.80.67")))
	expect("applied at last", answer{200, true, 200, 200})
}

// freePort is one that nothing listens on.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// askCheck asks the health check of a service; 0: nobody listens.
func askCheck(t *testing.T, port uint16) (code int, body checkBody) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
	if err != nil {
		return 0, body
	}
	defer r.Body.Close()
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, body
}

type checkBody struct {
	LocalEndpoints      int
	ServiceProxyHealthy bool
}

// S19
func TestNoLocalEndpointsMetric(t *testing.T) {
	b := newAgentBench(t)
	get := serveBench(t, b)
	b.cluster()
	b.done()
	b.await("a full round", func() bool { return b.a.full })
	key := func(addr string, port uint16) maps.ServiceKey {
		return maps.ServiceKey{Addr: ip(addr), Port: port, Proto: maps.ProtoTCP}
	}
	b.await("write", func() bool {
		f := b.a.services.frontends
		f.Set(key("10.98.0.1", 80), maps.Service{Id: 1, Flags: maps.ServiceNoLocal | maps.ServiceNoLocalExt})
		f.Set(key("10.98.0.2", 80), maps.Service{Id: 2})
		f.Set(key("::", 30080), maps.Service{Id: 2, Flags: maps.ServiceExternal | maps.ServiceNoLocalExt})
		f.Set(key("192.0.2.1", 80), maps.Service{Id: 2, Flags: maps.ServiceExternal | maps.ServiceNoLocalExt})
		f.Set(key("fd00:10:98::1", 80), maps.Service{Id: 3})
		f.Set(key("::", 30081), maps.Service{Id: 3, Flags: maps.ServiceExternal | maps.ServiceNoLocalExt})
		f.Set(key("10.98.0.3", 80), maps.Service{Id: 4, Flags: maps.ServiceNoLocal})
		return f.Upsert().Err() == nil
	})
	wantMetrics(t, get, "by family and policy",
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 2`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 1`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="internal"} 0`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="external"} 1`)
}

func local(port int32) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = port
	}
}

// at puts every endpoint of a slice on a node.
func at(node string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	for i := range s.Endpoints {
		s.Endpoints[i].NodeName = &node
	}
	return s
}

// terminating endpoints serve still.
func terminating(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	yes, no := true, false
	for i := range s.Endpoints {
		s.Endpoints[i].Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
	}
	return s
}

// S17, S18
func TestHealthCheckNodePort(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	squatter, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer squatter.Close()
	taken, port := int32(netip.MustParseAddrPort(squatter.Addr().String()).Port()), freePort(t)
	expect := func(what string, code, endpoints int) {
		t.Helper()
		b.await(what, func() bool {
			gotCode, body := askCheck(t, port)
			return gotCode == code && body.LocalEndpoints == endpoints
		})
	}

	b.put(testService("web", "10.98.0.1", local(int32(port))), testService("squatted", "10.98.0.2", local(taken)),
		at("node-a", testSlice("web-1", "web", "10.244.80.65", "10.244.80.66")),
		at("node-b", testSlice("web-2", "web", "10.244.158.65")))
	b.done()
	expect("two local endpoints", 200, 2)
	b.await("the problem of the other", func() bool {
		list := b.a.problems["health check of Service default/squatted"]
		return len(list) == 1 && list[0].Object == "Service default/squatted" && strings.Contains(list[0].Err, fmt.Sprint(taken))
	})
	b.put(terminating(at("node-a", testSlice("web-1", "web", "10.244.80.65", "10.244.80.66"))))
	expect("only terminating ones", 503, 0)
	b.put(at("node-a", testSlice("web-1", "web", "10.244.80.65")))
	expect("a ready one again", 200, 1)
	// No check where the policy is not Local.
	b.put(testService("web", "10.98.0.1", local(int32(port)), func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}))
	expect("no server", 0, 0)
	b.put(testService("web", "10.98.0.1", local(int32(port))))
	expect("a server again", 200, 1)
	b.stop()
	if code, _ := askCheck(t, port); code != 0 {
		t.Error("the server outlives the agent")
	}
}
