package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/doctor"
	"github.com/podweir/podweir/internal/maps"
)

var update = flag.Bool("update", false, "rewrite the files in testdata")

// run runs the command over m and agent and returns all it printed, with
// its exit status when that is not 0.
func run(m *fakeMaps, agent Agent, args ...string) string {
	var stdout, stderr bytes.Buffer
	status := Run(context.Background(), args, Env{
		OpenMaps: func(bpffs string) (Maps, error) {
			if m == nil {
				return nil, &exitError{exitNoMaps, fmt.Errorf("no datapath under %s: %w", bpffs, fs.ErrNotExist)}
			}
			return m, nil
		},
		DialAgent:   func(string) Agent { return agent },
		DialCluster: planCluster,
		Host:        func(string) doctor.Host { return fakeHost{} },
		Plugged:     func(string) func(context.Context, api.Endpoint) error { return fakePlugged },
		Now:         func() uint64 { return bootTime },
		Version:     "v0.2.0",
		IfName: func(ifindex uint32) string {
			return map[uint32]string{2: "eth0", 7: "pw00000000001", 9: "pw00000000002"}[ifindex]
		},
		Stdout: &stdout, Stderr: &stderr,
	})
	out := stdout.String()
	if stderr.Len() > 0 {
		out += "-- stderr --\n" + stderr.String()
	}
	if status != 0 {
		out += fmt.Sprintf("-- exit status %d --\n", status)
	}
	return out
}

func TestGolden(t *testing.T) {
	empty := &fakeMaps{}
	down := fakeAgent(nil)
	broken := planMaps()
	broken.err = errors.New("pw_flows: reading all entries: input/output error")
	noPolicy := planAgent()
	delete(noPolicy, api.PathPolicy)
	noPods := planAgent()
	delete(noPods, api.PathAllPods)
	tests := []struct {
		name  string
		maps  *fakeMaps
		agent fakeAgent
		args  string
	}{
		{"status", planMaps(), planAgent(), "status"},
		{"status-json", planMaps(), planAgent(), "status -o json"},
		{"status-down", planMaps(), down, "status"},
		{"status-no-maps", nil, planAgent(), "status"},
		{"status-nothing", nil, down, "status"},
		{"doctor", planMaps(), planAgent(), "doctor"},
		{"doctor-json", planMaps(), planAgent(), "doctor -o json"},
		{"doctor-nothing", nil, down, "doctor"},
		{"services", planMaps(), planAgent(), "services"},
		{"services-wide", planMaps(), planAgent(), "services -o wide"},
		{"services-json", planMaps(), planAgent(), "services -o json"},
		{"services-down", planMaps(), down, "services"},
		{"services-empty", empty, planAgent(), "services"},
		{"flows", planMaps(), planAgent(), "flows"},
		{"flows-wide", planMaps(), planAgent(), "flows -o wide"},
		{"flows-json", planMaps(), planAgent(), "flows -o json --proto tcp"},
		{"flows-down", planMaps(), down, "flows"},
		{"flows-empty", empty, planAgent(), "flows"},
		{"flows-partial-agent", planMaps(), noPolicy, "flows --proto udp"},
		{"flows-cluster", planMaps(), down, "flows -o wide --kubeconfig admin"},
		{"flows-cluster-agent", planMaps(), noPods, "flows --kubeconfig admin --from default/client"},
		{"flows-cluster-remote", planMaps(), down, "flows --kubeconfig admin --to default/web-1"},
		{"flows-cluster-service", planMaps(), down, "flows --kubeconfig admin --service default/web:http"},
		{"flows-cluster-unknown", planMaps(), down, "flows --kubeconfig admin --to default/done"},
		{"flows-cluster-away", planMaps(), down, "flows --kubeconfig away --proto tcp"},
		{"flows-cluster-none", planMaps(), down, "flows --kubeconfig missing"},
		{"flows-old-agent", planMaps(), noPods, "flows --proto sctp"},
		{"services-one", planMaps(), planAgent(), "services default/web"},
		{"services-one-port", planMaps(), planAgent(), "services default/web:http -o json"},
		{"services-one-addr", planMaps(), planAgent(), "services 192.0.2.80:80"},
		{"services-one-id", planMaps(), down, "services 21"},
		{"services-one-down", planMaps(), down, "services default/web"},
		{"services-one-unknown", planMaps(), planAgent(), "services default/nothing"},
		{"services-one-cluster", planMaps(), down, "services default/lb --kubeconfig admin"},
		{"services-cluster", planMaps(), down, "services --kubeconfig admin"},
		{"nodes-cluster", planMaps(), down, "nodes --kubeconfig admin"},
		{"endpoints-cluster", planMaps(), down, "endpoints --kubeconfig admin"},
		{"policy-cluster-pod", planMaps(), down, "policy default/local --kubeconfig admin"},
		{"ask-cluster", planMaps(), down, "policy ask --kubeconfig admin --from default/web-1 --to default/local --port 8081"},
		{"ask-cluster-unknown", planMaps(), down, "policy ask --kubeconfig admin --from default/nobody --to default/local --port 8081"},
		{"endpoints", planMaps(), planAgent(), "endpoints"},
		{"endpoints-wide", planMaps(), planAgent(), "endpoints -o wide"},
		{"endpoints-json", planMaps(), planAgent(), "endpoints -o json"},
		{"endpoints-down", planMaps(), down, "endpoints"},
		{"policy", planMaps(), planAgent(), "policy"},
		{"policy-pod", planMaps(), planAgent(), "policy default/local"},
		{"policy-pod-wide", planMaps(), planAgent(), "policy default/local -o wide"},
		{"policy-pod-json", planMaps(), planAgent(), "policy default/local -o json"},
		{"policy-cluster", clusterMaps(), planAgent(), "policy default/local"},
		{"policy-open", planMaps(), planAgent(), "policy fd00:10:244:50::65"},
		{"policy-down", planMaps(), down, "policy 10.244.80.66"},
		{"policy-down-name", planMaps(), down, "policy default/local"},
		{"policy-unknown", planMaps(), planAgent(), "policy default/nobody"},
		{"policy-unknown-addr", planMaps(), planAgent(), "policy 10.244.80.99"},
		{"ask", planMaps(), planAgent(), "policy ask --from default/client --to default/local --port 8080"},
		{"ask-json", planMaps(), planAgent(), "policy ask --from default/client --to default/local --port 8080/tcp -o json"},
		{"ask-isolated", planMaps(), planAgent(), "policy ask --from default/client --to 10.244.80.66 --port 8081"},
		{"ask-left", planMaps(), planAgent(), "policy ask --from default/client --to 10.244.80.66 --port 8082"},
		{"ask-egress", planMaps(), planAgent(), "policy ask --from default/local --to default/client --port 53/udp"},
		{"ask-denied-by-rule", planMaps(), planAgent(), "policy ask --from 192.0.2.9 --to default/local --port 9/udp"},
		{"ask-itself", planMaps(), planAgent(), "policy ask --from default/client --to default/client --port icmp"},
		{"ask-host", planMaps(), planAgent(), "policy ask --from host --to default/local --port 8081"},
		{"ask-service", planMaps(), planAgent(), "policy ask --from 10.244.80.65 --to 10.98.235.247 --port 80"},
		{"ask-service-name", planMaps(), planAgent(), "policy ask --from 10.244.80.65 --to default/web --port 80"},
		{"ask-service-name-cluster", planMaps(), down, "policy ask --kubeconfig admin --from 10.244.80.65 --to default/web --port 80"},
		{"ask-from-service", planMaps(), planAgent(), "policy ask --from default/web --to default/local --port 8080"},
		{"ask-to-nothing", planMaps(), planAgent(), "policy ask --from default/client --to default/nothing --port 80"},
		{"ask-service-json", planMaps(), planAgent(), "policy ask --from 10.244.80.65 --to 10.98.235.247 --port 80 -o json"},
		{"ask-no-backend", planMaps(), planAgent(), "policy ask --from 10.244.80.65 --to 10.98.0.10 --port 53/udp"},
		{"ask-from-remote", planMaps(), planAgent(), "policy ask --from default/web-1 --to default/local --port 8081"},
		{"ask-to-remote", planMaps(), planAgent(), "policy ask --from 10.244.80.65 --to default/web-1 --port 8080"},
		{"ask-remote-service", planMaps(), planAgent(), "policy ask --from default/web-1 --to 10.98.235.247 --port 80"},
		{"ask-remote-to-none", planMaps(), planAgent(), "policy ask --from default/web-1 --to 10.244.80.99 --port 80"},
		{"ask-strangers", planMaps(), planAgent(), "policy ask --from 192.0.2.9 --to 192.0.2.10 --port 80"},
		{"ask-down", planMaps(), down, "policy ask --from 10.244.80.65 --to 10.244.80.66 --port 8080"},
		{"ask-down-name", planMaps(), down, "policy ask --from default/client --to 10.244.80.66 --port 8080"},
		{"ask-unknown", planMaps(), planAgent(), "policy ask --from default/nobody --to 10.244.80.66 --port 8080"},
		{"ask-pending", planMaps(), planAgent(), "policy ask --from default/pending --to 10.244.80.66 --port 8080"},
		{"ask-families", planMaps(), planAgent(), "policy ask --from fd00:10:244:50::65 --to default/local --port 8080"},
		{"ask-no-end", planMaps(), planAgent(), "policy ask --from client --to default/local --port 8080"},
		{"ask-bad-port", planMaps(), planAgent(), "policy ask --from default/client --to default/local --port 80/http"},
		{"ask-flags", planMaps(), planAgent(), "policy ask --from default/client"},
		{"monitor", nil, planAgent(), "monitor"},
		{"monitor-json", nil, planAgent(), "monitor -o json --reason spoofed"},
		{"monitor-pod", nil, planAgent(), "monitor --pod default/client --reason policy"},
		{"monitor-other-pod", nil, planAgent(), "monitor --pod default/web-1"},
		{"monitor-down", planMaps(), down, "monitor"},
		{"monitor-bad-pod", nil, planAgent(), "monitor --pod client"},
		{"version", nil, planAgent(), "version"},
		{"version-json", nil, planAgent(), "version -o json"},
		{"version-down", nil, down, "version"},
		{"nodes", planMaps(), planAgent(), "nodes"},
		{"nodes-json", planMaps(), planAgent(), "nodes -o json"},
		{"nodes-down", planMaps(), down, "nodes"},
		{"metrics", planMaps(), down, "metrics"},
		{"metrics-drops", planMaps(), down, "metrics --drops"},
		{"metrics-json", planMaps(), down, "metrics -o json"},
		{"metrics-empty", empty, down, "metrics"},
		{"no-maps", nil, planAgent(), "flows --bpffs /sys/fs/bpf/elsewhere"},
		{"broken-map", broken, planAgent(), "flows"},
		{"unknown-command", planMaps(), planAgent(), "flow"},
		{"unknown-flag", planMaps(), planAgent(), "flows --colour"},
		{"unknown-output", planMaps(), planAgent(), "flows -o yaml"},
		{"too-many-arguments", planMaps(), planAgent(), "policy one two"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var agent Agent = tt.agent
			got := run(tt.maps, agent, strings.Fields(tt.args)...)
			for line := range strings.Lines(got) {
				if strings.TrimRight(line, " \n") != strings.TrimSuffix(line, "\n") {
					t.Errorf("blanks at the end of %q", line)
				}
			}
			if m := tt.maps; m != nil && m != empty && m.closed > 1 {
				t.Errorf("maps closed %d times", m.closed)
			}
			got = "$ podweir " + tt.args + "\n" + got
			file := filepath.Join("testdata", tt.name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), got); d != "" {
				t.Errorf("(-want +got); go test -update rewrites %s\n%s", file, d)
			}
		})
	}
}

// Filters: the sources of the original directions that are left.
func TestFlowFilters(t *testing.T) {
	const client, local, host, world, sig = "40000", "5000", "#77", "41000", "42000"
	tests := []struct {
		args string
		down bool
		want []string
		err  string
		// status of an error; 0 = failed: the value may be right elsewhere
		status int
	}{
		{args: "--proto tcp", want: []string{client, client, world}},
		{args: "--proto 6", want: []string{client, client, world}},
		{args: "--proto icmpv6", want: []string{host}},
		{args: "--proto sctp", want: []string{sig}},
		{args: "--proto spx", err: "--proto spx: is none of", status: exitUsage},
		{args: "--proto 256", err: "--proto 256: is none of", status: exitUsage},
		{args: "--from 10.244.80.0/33", err: "--from 10.244.80.0/33: is neither an address", status: exitUsage},
		{args: "--to 10.244.80.65:70000", err: "--to 10.244.80.65:70000: is neither an address", status: exitUsage},
		{args: "--to a/b/c", err: "--to a/b/c: is neither an address", status: exitUsage},
		{args: "--service web", err: "--service web: is neither namespace/name", status: exitUsage},
		{args: "--service 0", err: "--service 0: is neither namespace/name", status: exitUsage},
		{args: "--service 10.98.235.0/24", err: "--service 10.98.235.0/24: is neither namespace/name", status: exitUsage},
		{args: "--from 10.244.80.65", want: []string{client, client, local, local}},
		{args: "--from 10.244.80.65:40000", want: []string{client, client}},
		{args: "--from 10.244.80.0/24 --proto udp", want: []string{local, local}},
		{args: "--from default/client", want: []string{client, client, local, local}},
		{args: "--from pw00000000001", want: []string{client, client, local, local}},
		{args: "--from host", want: []string{host}},
		{args: "--from default/local", want: []string{world, sig}},
		{args: "--to default/local", want: []string{local, local}},
		{args: "--to b", want: []string{client, client, sig}},
		{args: "--to 10.98.235.247:80", want: []string{client, client}},
		{args: "--to 10.98.0.12", want: []string{sig}},
		{args: "--to 10.244.158.65", want: []string{client, client, sig}},
		{args: "--to wire", want: []string{world}},
		{args: "--to nowhere", err: "--to nowhere: is neither an address"},
		{args: "--service default/web", want: []string{client, client}},
		{args: "--service default/web:http", want: []string{client, client}},
		{args: "--service default/web:ftp", err: "there is no such service in force"},
		{args: "--service 10.98.235.247:80", want: []string{client, client}},
		{args: "--service 10.98.235.247", want: []string{client, client}},
		{args: "--service 10.98.1.1", err: "no service has this address"},
		{args: "--service 99", want: []string{world}},
		{args: "--from 10.244.80.65 --to 10.244.80.66", want: []string{local, local}},

		{down: true, args: "--from 10.244.80.65 --proto tcp", want: []string{client, client}},
		{down: true, args: "--from pw00000000002", want: []string{world, sig}},
		{down: true, args: "--from default/client", err: "need the agent"},
		{down: true, args: "--service default/web", err: "need the agent"},
		{down: true, args: "--service 12", want: []string{client, client}},
	}
	for _, tt := range tests {
		t.Run(strings.ReplaceAll(tt.args, "/", "|"), func(t *testing.T) {
			agent := planAgent()
			if tt.down {
				agent = nil
			}
			got := run(planMaps(), agent, append([]string{"flows"}, strings.Fields(tt.args)...)...)
			if tt.err != "" {
				if status := max(tt.status, exitFailed); !strings.Contains(got, tt.err) || !strings.Contains(got, fmt.Sprintf("exit status %d ", status)) {
					t.Errorf("want the error %q and exit status %d:\n%s", tt.err, status, got)
				}
				return
			}
			stdout, _, _ := strings.Cut(got, "-- stderr")
			lines := strings.Split(strings.TrimSpace(stdout), "\n")[1:]
			if len(lines) != len(tt.want) {
				t.Fatalf("got %d entries, want %d:\n%s", len(lines), len(tt.want), got)
			}
			for _, port := range tt.want {
				if n := strings.Count(stdout, port); n == 0 {
					t.Errorf("no flow with %s:\n%s", port, got)
				}
			}
		})
	}
}

// A value that is wrong on every node is wrong usage, and said before the maps
// or the agent are asked for anything: with the fakes of neither.
func TestWrongValues(t *testing.T) {
	for args, want := range map[string]string{
		"flows --proto foo":                                "--proto foo: is none of",
		"flows --proto=":                                   "--proto is empty",
		"flows --from=":                                    "--from is empty",
		"flows --from 1.2.3.4/40":                          "--from 1.2.3.4/40",
		"flows --to Web":                                   "",
		"flows --to a/b/c":                                 "--to a/b/c",
		"flows --service web":                              "--service web",
		"monitor --reason foo":                             "--reason foo: is in the name of no reason; they are drop_malformed, ",
		"monitor --reason fwd_local":                       "--reason fwd_local",
		"monitor --reason=":                                "--reason is empty",
		"monitor --pod web":                                "--pod web",
		"monitor --pod a/b/c":                              "--pod a/b/c",
		"monitor --pod /web":                               "--pod /web",
		"policy web":                                       "web: is neither a pod",
		"policy 10.0.0.0/8":                                "10.0.0.0/8: is neither a pod",
		"policy ask --from web --to host --port 80":        "--from web",
		"policy ask --from host --to default/ --port 80":   "--to default/",
		"policy ask --from host --to 10.0.0.0/8 --port 80": "--to 10.0.0.0/8",
		"policy ask --from host --to default/web --port 80/dccp": "--port 80/dccp",
		"policy ask --from host --to default/web --port 0":       "--port 0",
		"status -o yaml":          "-o yaml",
		"status --socket=":        "--socket is empty",
		"services web":            "web: is neither namespace/name",
		"services default/web a":  "accepts at most 1 arg",
		"services --bpffs=":       "--bpffs is empty",
		"metrics --drops=perhaps": "--drops",
	} {
		got := run(nil, fakeAgent(nil), strings.Fields(args)...)
		status := exitUsage
		if want == "" { // may be a device's name
			status = exitNoMaps
		}
		if !strings.Contains(got, want) || !strings.Contains(got, fmt.Sprintf("exit status %d ", status)) {
			t.Errorf("%s: want %q and exit status %d:\n%s", args, want, status, got)
		}
	}
}

func TestSpan(t *testing.T) {
	for in, want := range map[float64]string{
		0: "0.0s", 0.26: "0.3s", 9.94: "9.9s", 12.7: "12s", 192: "3m12s", 3600: "1h0m", 90061: "1d1h",
	} {
		if got := span(in); got != want {
			t.Errorf("span(%v) = %s, want %s", in, got, want)
		}
	}
}

// The real socket client: an answer, an error with a body, one without, no
// agent at all.
func TestSocketAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, `{"node":"a","later":1}`)
	})
	mux.HandleFunc("GET "+api.PathPolicy, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprint(w, `{"error":"not synced yet"}`)
	})
	mux.HandleFunc("GET "+api.PathServices, func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, `{"services":`) })
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })

	agent, ctx := DialAgent(socket), context.Background()
	var status api.Status
	if err := agent.Get(ctx, api.PathStatus, &status); err != nil || status.Node != "a" {
		t.Errorf("status %+v, %v", status, err)
	}
	for path, want := range map[string]string{
		api.PathPolicy:    "/v1/policy: not synced yet",
		api.PathEndpoints: "/v1/endpoints: 404 Not Found",
		api.PathServices:  "/v1/services: unexpected EOF",
	} {
		var down *agentDownError
		err := agent.Get(ctx, path, &struct{}{})
		if err == nil || !strings.Contains(err.Error(), want) || errors.As(err, &down) {
			t.Errorf("%s: got %v, want %s and no agent that is down", path, err, want)
		}
	}

	gone := filepath.Join(t.TempDir(), "gone.sock")
	err = DialAgent(gone).Get(ctx, api.PathStatus, &status)
	var down *agentDownError
	if !errors.As(err, &down) || !strings.Contains(err.Error(), gone) || !strings.Contains(err.Error(), "--socket") || strings.Contains(err.Error(), "http:") {
		t.Errorf("no agent: %v", err)
	}
}

// Not all backends of a large service are asked about, which is said.
func TestAskManyBackends(t *testing.T) {
	m := planMaps()
	for slot := range uint32(100) {
		m.asks[question{"10.244.80.65", "10.98.235.247", maps.ProtoTCP, 443, slot}] = maps.Ask{
			From: maps.Place{Kind: placePod, Id: 7}, To: maps.Place{Kind: placePod, Id: 9}, Service: 12, Backends: 100, Dst: a("10.244.80.66"), Dport: 8443,
			Egress: maps.AskHalf{Identity: 4, Verdict: maps.VerdictAllow}, Ingress: maps.AskHalf{Identity: 4, Verdict: maps.VerdictAllow},
		}
	}
	args := strings.Fields("policy ask --from 10.244.80.65 --to 10.98.235.247 --port 443")
	got := run(m, planAgent(), args...)
	if n := strings.Count(got, ": allowed\n"); n != 64 || !strings.HasSuffix(got, "\nnot asked: 36 more backends of default/web:http\n") {
		t.Errorf("%d answers:\n%s", n, got)
	}
	if got := run(m, planAgent(), append(args, "-o", "json")...); strings.Count(got, `"notAsked": 36`) != 1 {
		t.Error(got)
	}
}
