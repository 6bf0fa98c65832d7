package agent

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// serveBench serves what the agent of a bench answers.
func serveBench(t *testing.T, b *agentBench) func(path string) (int, string) {
	t.Helper()
	sweep := newSweeper(b.dp.set, func(maps.FlowKey, maps.Flow) time.Duration { return time.Minute },
		func([]maps.FlowKey) (int, error) { return 0, nil }, b.a.log)
	sweep.evicted.total.Store(7)
	sweep.evicted.known.Store(true)
	public, err := b.a.publicHandler(newCollector(b.a, b.dp.set, sweep, "1.2.3"))
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(b.a.socketHandler(public, http.NotFoundHandler(), func(s *api.Status) { s.Version = "1.2.3" }))
	t.Cleanup(srv.Close)
	return func(path string) (int, string) {
		t.Helper()
		r, err := srv.Client().Get(srv.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(body)
	}
}

func TestHealth(t *testing.T) {
	b := newAgentBench(t)
	get := serveBench(t, b)
	if code, body := get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz %d %s", code, body)
	}
	b.await("a round", func() bool { return b.a.stats.rounds > 0 })
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "pods") {
		t.Errorf("/readyz before the tables are complete: %d %s", code, body)
	}
	b.done()
	b.await("a full round", func() bool { return b.a.full })
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "Node node-a") {
		t.Errorf("/readyz without own Node: %d %s", code, body)
	}
	b.cluster()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	if code, body := get("/readyz"); code != http.StatusOK {
		t.Errorf("/readyz %d %s", code, body)
	}
	b.stop()
	if code, body := get("/healthz"); code != http.StatusServiceUnavailable {
		t.Errorf("/healthz of a loop that ended: %d %s", code, body)
	}
}

func TestAnswers(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	pod := testPod("client", "node-a", "", map[string]string{"app": "client"})
	gone := testPod("gone", "node-b", "10.244.158.66", nil)
	gone.Status.Phase = corev1.PodSucceeded
	onHost := testPod("on-host", "node-b", "172.31.0.3", nil)
	onHost.Spec.HostNetwork = true
	b.put(pod, onHost, testPod("web-1", "node-b", "10.244.158.66", nil), gone, testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65"))
	txn := b.tables.DB.WriteTxn(b.tables.Policies)
	_, _, err := b.tables.Policies.Insert(txn, testPolicy("only-frontends", "client", "frontend"))
	txn.Commit()
	if err != nil {
		t.Fatal(err)
	}
	b.done()
	if err := b.a.eps.Up(t.Context(), testEndpoint("client", "uid-client", "10.244.80.65")); err != nil {
		t.Fatal(err)
	}
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	get := serveBench(t, b)
	read := func(path string, into any) {
		t.Helper()
		code, body := get(path)
		if err := json.Unmarshal([]byte(body), into); err != nil || code != http.StatusOK {
			t.Errorf("%s: %d %s: %v", path, code, body, err)
		}
	}
	var status api.Status
	read(api.PathStatus, &status)
	if status.Node != "node-a" || !status.Ready || !status.Synced || status.Version != "1.2.3" || status.MTU != 1450 || len(status.Nodes) != 2 {
		t.Errorf("status %+v", status)
	}
	if n := status.Nodes[1]; n.Name != "node-b" || n.ID == 0 || n.Self {
		t.Errorf("node %+v", n)
	}
	var services api.Services
	read(api.PathServices, &services)
	if len(services.Services) != 1 || services.Services[0].Backends[0] != netip.MustParseAddrPort("10.244.158.65:8080") ||
		services.Services[0].Slices != 1 || services.Services[0].Endpoints != 1 {
		t.Errorf("services %+v", services)
	}
	var endpoints api.Endpoints
	read(api.PathEndpoints, &endpoints)
	if len(endpoints.Endpoints) != 1 || endpoints.Endpoints[0].Pod != "client" {
		t.Errorf("endpoints %+v", endpoints)
	}
	var pol api.Policy
	read(api.PathPolicy, &pol)
	if len(pol.Endpoints) != 1 || pol.Endpoints[0].Ingress == 0 || pol.Endpoints[0].Egress != 0 || pol.Endpoints[0].Policies[0] != "default/only-frontends" {
		t.Errorf("policy %+v", pol)
	}
	if e := pol.Endpoints[0]; len(e.IngressPolicies) != 1 || len(e.EgressPolicies) != 0 {
		t.Errorf("policies by direction: %+v", e)
	}
	for _, r := range pol.Rules {
		if r.Text != "default/only-frontends ingress[0]" {
			t.Errorf("rule %+v", r)
		}
	}
	for _, query := range []string{"?name=default/web-1", "?addr=10.244.158.66"} {
		var pods api.Pods
		read(api.PathPods+query, &pods)
		if len(pods.Pods) != 1 || pods.Pods[0].Name != "web-1" || pods.Pods[0].Node != "node-b" || len(pods.Pods[0].Addrs) != 1 {
			t.Errorf("%s: %+v", query, pods)
		}
	}
	if code, body := get(api.PathPods); code == http.StatusOK || !strings.Contains(body, "NAMESPACE/NAME") {
		t.Errorf("pods of no name: %d %s", code, body)
	}
	// Every pod with an address of its own, a line each.
	_, body := get(api.PathAllPods)
	all := map[string]bool{}
	for line := range strings.Lines(body) {
		var p api.Pod
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		for _, addr := range p.Addrs {
			all[p.Namespace+"/"+p.Name+" on "+p.Node+": "+addr.String()] = true
		}
	}
	if want := map[string]bool{"default/remote on node-b: 10.244.158.65": true, "default/web-1 on node-b: 10.244.158.66": true}; !reflect.DeepEqual(all, want) {
		t.Errorf("all pods %v, want %v", all, want)
	}
	code, body := get("/metrics")
	for _, want := range []string{
		`podweir_map_entries{map="pw_services"} 2`,
		`podweir_map_capacity{map="pw_services"} 65536`,
		`podweir_build_info{goversion="` + runtime.Version() + `",version="1.2.3"} 1`,
		"podweir_flow_evictions_total 7", "podweir_ready 1", "podweir_problems 0", "podweir_scrape_error 0",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("/metrics (%d) lacks %q", code, want)
		}
	}
}

// Every map tells how large it is, and all but those that metrics.md names how
// full.
func TestMetricsOfMaps(t *testing.T) {
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	row := func(metric string) string {
		_, rest, _ := strings.Cut(string(doc), "| `"+metric+"{map}`")
		line, _, _ := strings.Cut(rest, "\n")
		return line
	}
	b := newAgentBench(t)
	b.await("a round", func() bool { return b.a.stats.rounds > 0 })
	code, body := serveBench(t, b)("/metrics")
	for name := range spec.Maps {
		if !strings.HasPrefix(name, "pw_") {
			continue
		}
		size := strings.Contains(body, `podweir_map_capacity{map="`+name+`"}`)
		used := strings.Contains(body, `podweir_map_entries{map="`+name+`"}`)
		noSize, unused := strings.Contains(row("podweir_map_capacity"), "`"+name+"`"), strings.Contains(row("podweir_map_entries"), "`"+name+"`")
		if size == noSize || used == (noSize || unused) {
			t.Errorf("%s: capacity %v, entries %v (%d), which docs/metrics.md says otherwise", name, size, used, code)
		}
	}
}

func TestSocketInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	if err := socketInUse(path); err != nil {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if err := socketInUse(path); err == nil || !strings.Contains(err.Error(), "another agent") {
		t.Errorf("live socket: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := socketInUse(path); err != nil {
		t.Errorf("socket of a dead agent: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := socketInUse(file); err == nil {
		t.Error("a file that is no socket passes for one")
	}
}

func TestDoEndsWithItsContext(t *testing.T) {
	b := newAgentBench(t)
	b.stop()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.a.do(ctx, func() { t.Error("ran") }); err == nil {
		t.Error("a question to a loop that ended was answered")
	}
}
