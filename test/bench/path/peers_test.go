package main

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/podweir/podweir/test/cluster"
)

// fake are results of two rounds: udp of the floor, podweir and both proxies
// on the path of the bars, and the throughput of two processes.
func fake(t *testing.T, podweir, iptables, nftables float64) *peerResults {
	t.Helper()
	r := &peerResults{Schema: schema, Builds: 1, Rounds: 2}
	p := allPhases(defaultSizes())[0]
	y := wireWays()[2]
	for _, pace := range []float64{100, 200} { // the machine's changes
		for _, s := range pickModes(baseline, vxlanMode, iptablesMode, nftablesMode) {
			factor := map[string]float64{baseline: 1, vxlanMode: podweir, iptablesMode: iptables, nftablesMode: nftables}[s.name]
			one := sample{P50: pace * factor, P99: 2 * pace * factor, CPU: pace * factor}
			r.add(p, y, workload{name: "udp"}, s, one)
			r.add(p, y, workload{name: "two-bulk"}, s, one)
		}
	}
	r.finish()
	return r
}

func TestRatiosAreTakenWithinRounds(t *testing.T) {
	r := fake(t, 0.7, 1.2, 1.1)
	c := r.cell("ways", "cluster-ip-remote", "udp", vxlanMode)
	if c == nil || math.Abs(c.Ratio.Median-0.7) > 1e-9 || math.Abs(c.Ratio.Q3-c.Ratio.Q1) > 1e-9 {
		t.Fatalf("ratio of a mode that is 0.7 in each round: %+v", c)
	}
	if c.Median != 105 || c.Min != 70 || c.Max != 140 || !slices.Equal(c.Values, []float64{70, 140}) {
		t.Errorf("medians of 70 and 140: %+v", c)
	}
	b := r.cell("ways", "cluster-ip-remote", "two-bulk", vxlanMode)
	if !b.MoreBetter || math.Abs(b.Ratio.Median-1/0.7) > 1e-9 {
		t.Errorf("throughput of a stream that takes 0.7 of the time: %+v", b)
	}
	if r.cell("ways", "cluster-ip-remote", "two-bulk cpu", baseline).Ratio.Median != 1 {
		t.Error("the floor is not 1")
	}
}

func verdictsOf(r *peerResults) (out []string) {
	for _, b := range r.Bars {
		out = append(out, b.Metric+" / "+b.Against+" "+b.limit()+" "+b.verdict())
	}
	return out
}

func TestBars(t *testing.T) {
	for _, c := range []struct {
		name                        string
		podweir, iptables, nftables float64
		want                        []string
	}{
		{"all held", 0.7, 1.2, 1.1, []string{
			"udp / kernel-vxlan <= 0.77 held", "two-bulk / kernel-vxlan >= 1.30 held",
			"udp / kube-proxy-iptables <= 1.00 held", "udp / kube-proxy-nftables <= 1.00 held",
			"two-bulk / kube-proxy-iptables >= 1.00 held", "two-bulk / kube-proxy-nftables >= 1.00 held",
			"two-bulk cpu / kube-proxy-iptables <= 1.00 held", "two-bulk cpu / kube-proxy-nftables <= 1.00 held",
		}},
		{"slower than one", 0.8, 0.9, 0.79, []string{
			"udp / kernel-vxlan <= 0.77 missed", "two-bulk / kernel-vxlan >= 1.30 missed",
			"udp / kube-proxy-iptables <= 1.00 held", "udp / kube-proxy-nftables <= 1.00 missed",
			"two-bulk / kube-proxy-iptables >= 1.00 held", "two-bulk / kube-proxy-nftables >= 1.00 missed",
			"two-bulk cpu / kube-proxy-iptables <= 1.00 held", "two-bulk cpu / kube-proxy-nftables <= 1.00 missed",
		}},
	} {
		if got := verdictsOf(fake(t, c.podweir, c.iptables, c.nftables)); !slices.Equal(got, c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
}

// Every bar is about something that is measured.
func TestExpectationsAreMeasured(t *testing.T) {
	measured := map[string]bool{}
	for _, p := range allPhases(defaultSizes()) {
		for _, y := range p.ways {
			for _, l := range p.loads {
				for _, m := range metrics(l.name) {
					for _, s := range p.setups {
						measured[p.name+"/"+y.name+"/"+m.name+"/"+s.label()] = true
						measured[p.name+"//"+m.name+"/"+s.label()] = true
						measured[p.name+"///"+s.label()] = true
					}
				}
			}
		}
	}
	for _, e := range expectations() {
		for _, s := range []string{e.setup, e.against} {
			if key := e.phase + "/" + e.path + "/" + e.metric + "/" + s; !measured[key] {
				t.Errorf("%s: nobody measures %s", e.what, key)
			}
		}
	}
}

func TestTables(t *testing.T) {
	r := fake(t, 0.8, 0.9, 0.79)
	var out bytes.Buffer
	r.markdown(&out)
	for _, want := range []string{
		"Fewer than 5 rounds",
		"| udp | 150 ns/packet | 0.80 [0.80 0.80] | 0.90 [0.90 0.90] | 0.79 [0.79 0.79] | podweir-vxlan / kernel-vxlan <= 0.77: 0.80 missed; faster than kube-proxy-nftables: 1.01 missed |",
		"| faster than kube-proxy | all | 3 of 6 rows | <= 1.00 |  | missed |",
		"| cluster-ip-remote | two-bulk | podweir-vxlan | kube-proxy-nftables | 0.99 [0.99 0.99] | clear |",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "| podweir-vxlan | kernel-vxlan | 0.80") {
		t.Errorf("a row that is won is among the lost:\n%s", out.String())
	}
	out.Reset()
	fake(t, 0.7, 1.2, 1.1).print(&out)
	if !strings.Contains(out.String(), "nowhere") || !strings.Contains(out.String(), "faster than kube-proxy: held") {
		t.Errorf("all rows are won:\n%s", out.String())
	}
}

// What was written can be printed and drawn later.
func TestResultsAreReadBack(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "bench.json")
	r := fake(t, 0.8, 0.9, 0.79)
	if err := r.write(file); err != nil {
		t.Fatal(err)
	}
	back, err := readResults(file)
	if err != nil {
		t.Fatal(err)
	}
	var was, is bytes.Buffer
	r.print(&was)
	back.print(&is)
	if was.String() != is.String() {
		t.Errorf("read back:\n%s\nwant\n%s", is.String(), was.String())
	}
	if err := back.plot(filepath.Join(dir, "plots")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "plots", "ways-cluster-ip-remote.svg")); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(file, []byte(`{"schema": 99}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readResults(file); err == nil || !strings.Contains(err.Error(), "schema 99") {
		t.Errorf("another schema: %v", err)
	}
}

func TestChoosePhases(t *testing.T) {
	for _, c := range []struct {
		args  string
		want  string // phases, with their numbers of setups, ways and workloads
		error string
	}{
		{args: "--modes podweir-vxlan,kube-proxy-nftables --paths cluster-ip-remote --workloads udp,crr --phases ways,services", want: "ways 3 1 2, services 7 1 2"},
		{args: "--workloads udp,two-rr", want: "ways 8 4 2, outside 5 3 2, host 5 1 2, services 10 1 1, policies 3 1 1, flows 5 1 1"},
		{args: "--phases outside --paths off-cluster", want: "outside 5 1 11"},
		{args: "--phases services --services 1,50", want: "services 7 1 5"},
		{args: "--phases flows --flows 300", want: "flows 4 1 4"},
		{args: "--phases flows", want: "flows 5 1 4"},
		{args: "--phases policies --paths off-cluster", error: "nothing is left"},
		{args: "--modes nonsense", error: `"nonsense" is no mode`},
		{args: "--paths nonsense", error: `"nonsense" is no path`},
		{args: "--services 0", error: `"0" is no number`},
		{args: "--services 5,5", error: "5 is there twice"},
		{args: "--flows 100001", error: "from 1 to 100000"},
		{args: "--rounds 0", error: "at least 1"},
		{args: "--iptables none", error: "legacy or nft"},
		{args: "more", error: `"more" is no flag`},
	} {
		o, err := peerFlags(strings.Fields(c.args))
		var got []string
		if err == nil {
			var phases []phase
			phases, err = choosePhases(o)
			for _, p := range phases {
				got = append(got, strings.Join([]string{p.name, strconv.Itoa(len(p.setups)), strconv.Itoa(len(p.ways)), strconv.Itoa(len(p.loads))}, " "))
			}
		}
		if c.error != "" {
			if err == nil || !strings.Contains(err.Error(), c.error) {
				t.Errorf("%s: error %v, want one with %q", c.args, err, c.error)
			}
			continue
		}
		if err != nil || strings.Join(got, ", ") != c.want {
			t.Errorf("%s: %v, %v, want %s", c.args, got, err, c.want)
		}
	}
}

func TestCountRules(t *testing.T) {
	iptables := `*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.98.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.98.1.0/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-B
-A KUBE-SVC-A ! -s 10.244.0.0/16 -d 10.98.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
`
	nftables := `table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.98.0.10 . tcp . 80 : goto service-A, 10.98.0.10 . udp . 80 : goto service-B,
			     10.98.1.0 . tcp . 80 : goto service-C }
	}
}
`
	if n := countRules("iptables", iptables); n != 2 {
		t.Errorf("iptables: %d, want 2", n)
	}
	if n := countRules("nftables", nftables); n != 3 {
		t.Errorf("nftables: %d, want 3", n)
	}
}

func TestObjects(t *testing.T) {
	s := setup{services: 300, policies: 4}
	objs, err := objects(s, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	ips, policies := map[string]bool{}, map[string]int{}
	for _, o := range objs {
		switch o := o.(type) {
		case *corev1.Service:
			if ips[o.Spec.ClusterIP] {
				t.Errorf("%s is there twice", o.Spec.ClusterIP)
			}
			ips[o.Spec.ClusterIP] = true
		case *networkingv1.NetworkPolicy:
			policies[o.Spec.PodSelector.MatchLabels["app"]]++
		}
	}
	// The manifests have two services, one more than the first of the size.
	if len(ips) != 301 {
		t.Errorf("%d services, want 301", len(ips))
	}
	if policies["client"] != 4 || policies["server"] != 4 {
		t.Errorf("policies by pod: %v, want 4 of each", policies)
	}
}

// Packets that did not take the fast path are noticed.
func TestCheckWayNotices(t *testing.T) {
	for _, s := range peerModes() {
		if !s.podweir {
			continue
		}
		for _, y := range allWays() {
			for _, l := range append(oneLoads(), twoLoads()...) {
				if err := checkWay(s.on(y), l, 1<<20, counts{}); err == nil {
					t.Errorf("%s, %s, %s: no packet was counted, and nobody minds", s.name, y.name, l.name)
				}
			}
		}
	}
}

// inNamespaces is for tests that measure in real ones.
func inNamespaces(t *testing.T) context.Context {
	t.Helper()
	t.Setenv("PW_PATH_MODEST", "1")
	if testing.Short() {
		t.Skip("it needs namespaces")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	t.Cleanup(cancel)
	if err := cluster.Build(ctx); err != nil {
		t.Fatal(err)
	}
	return ctx
}

// A bench of all modes as small as can be, on real namespaces. Each
// measurement checks for itself that the packets went the way that it is
// about: see world.measure.
func TestPeersSmoke(t *testing.T) {
	ctx := inNamespaces(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "bench.json")
	for _, args := range []string{
		"--phases ways --paths cluster-ip-remote,cluster-ip-local --workloads udp,first,crr,bulk8,two-udp,two-crr,two-rr,two-bulk8",
		"--phases outside,host --workloads udp,crr,two-rr",
		"--phases services,policies,flows --workloads first --services 40 --policies 5 --flows 300",
	} {
		o, err := peerFlags(strings.Fields(args + " --builds 1 --rounds 1 --scale 0.05"))
		if err != nil {
			t.Fatal(err)
		}
		phases, err := choosePhases(o)
		if err != nil {
			t.Fatal(err)
		}
		res, err := measurePeers(ctx, o, phases, t.Output())
		if err != nil {
			t.Fatal(err)
		}
		want := 0
		for _, p := range phases {
			for _, l := range p.loads {
				want += len(p.setups) * len(p.ways) * len(metrics(l.name))
			}
		}
		if len(res.Cells) != want {
			t.Errorf("%s: %d cells, want %d", args, len(res.Cells), want)
		}
		for _, c := range res.Cells {
			if len(c.Values) != 1 || c.Median <= 0 || c.Ratio == nil {
				t.Errorf("%s, %s, %s: %+v", c.Path, c.Metric, c.Setup, c)
			}
		}
		if err := errors.Join(res.write(file), res.plot(dir)); err != nil {
			t.Error(err)
		}
	}
	runs, err := cluster.Runs()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		if r.PID == os.Getpid() {
			t.Errorf("run %s (%s) is left", r.ID, r.Label)
		}
	}
}

// What a setup is called is checked against the kernel.
func TestRulesAreChecked(t *testing.T) {
	ctx := inNamespaces(t)
	program, err := kubeProxy(ctx, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range pickModes(baseline, iptablesMode, nftablesMode) {
		w, err := buildWorld(ctx, s, false, proxyPrograms{program, "legacy"})
		if w != nil {
			defer func() {
				if err := w.close(); err != nil {
					t.Error(err)
				}
			}()
		}
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		// iptables comes last: to ask it for rules makes tables where none were.
		for _, other := range []string{"", "nftables", "iptables"} {
			w.setup.proxy = other
			if err := w.checkRules(ctx); (err == nil) != (other == s.proxy) {
				t.Errorf("%s, taken for %q: %v", s.name, other, err)
			}
		}
		w.setup.proxy = s.proxy
	}
}
