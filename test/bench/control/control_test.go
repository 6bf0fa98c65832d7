package main

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/realcluster"
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func TestSYN(t *testing.T) {
	pkt := syn(ap("172.31.0.2:40000"), ap("10.98.0.1:80"), 77)
	if tcpChecksum(pkt) != 0 {
		t.Errorf("the checksum is wrong: %x", pkt)
	}
	// An IP header and ports, in what is UDP then; VXLAN and Ethernet.
	tunnelled := syn(ap("172.31.0.2:40000"), ap("172.31.0.3:4789"), 0)[:ipHeader+8]
	tunnelled[9] = 17
	tunnelled = append(append(tunnelled, make([]byte, vxlanHeaders-8)...), pkt...)
	withOptions := append([]byte{0x46}, pkt[1:ipHeader]...)
	withOptions = append(append(withOptions, 1, 1, 1, 1), pkt[ipHeader:]...)
	synAck := append([]byte(nil), pkt...)
	synAck[ipHeader+13] |= 0x10
	for _, c := range []struct {
		name string
		b    []byte
		ok   bool
	}{
		{"plain", pkt, true},
		{"in the tunnel", tunnelled, true},
		{"with options", withOptions, true},
		{"an answer", synAck, false},
		{"cut", pkt[:len(pkt)-1], false},
		{"cut in the tunnel", tunnelled[:len(tunnelled)-1], false},
		{"header alone", pkt[:ipHeader], false},
		{"empty", nil, false},
	} {
		to, seq, ok := parseSYN(c.b)
		if ok != c.ok || ok && (to != ap("10.98.0.1:80") || seq != 77) {
			t.Errorf("%s: %v %d %v", c.name, to, seq, ok)
		}
	}
}

func TestLeadsTo(t *testing.T) {
	s := size{Services: 3, Endpoints: 4}
	for _, c := range []struct {
		to   netip.AddrPort
		want bool
	}{
		{netip.AddrPortFrom(endpointIP(4), backendPort), true},
		{netip.AddrPortFrom(endpointIP(7), backendPort), true},
		{netip.AddrPortFrom(endpointIP(8), backendPort), false}, // of the next service
		{netip.AddrPortFrom(endpointIP(4), servicePort), false},
		{netip.AddrPortFrom(spareIP(70000), backendPort), true},
		{netip.AddrPortFrom(clusterIP(1), servicePort), false},
		{netip.AddrPort{}, false},
	} {
		if got := s.leadsTo(1, c.to); got != c.want {
			t.Errorf("%v: %v", c.to, got)
		}
	}
	// All addresses of the largest sizes are in the range that is routed.
	routed := netip.MustParsePrefix(endpointCIDR)
	for _, a := range []netip.Addr{endpointIP(0), endpointIP(100*1000 - 1), spareIP(1), spareIP(200000)} {
		if !routed.Contains(a) {
			t.Errorf("%v is not in %v", a, routed)
		}
	}
}

func TestMetric(t *testing.T) {
	text := "# HELP x\nx{family=\"IPv4\"} 1.5e+03\nx{family=\"IPv6\"} 2\nxy 3\n"
	for name, want := range map[string]float64{`x{family="IPv4"}`: 1500, `x{family="IPv6"}`: 2, "xy": 3, "x": 0} {
		if got := metric(text, name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestChosen(t *testing.T) {
	all := sizeNames(true)
	if got, err := chosen("sizes", "", all, sizeNames(false)); err != nil || len(got) != 4 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := chosen("sizes", "1x4,2x4", all, nil); err == nil || !strings.Contains(err.Error(), `"2x4"`) {
		t.Errorf("%v", err)
	}
}

func TestBars(t *testing.T) {
	rows := func(cold, change, rss float64) *results {
		r := &results{}
		for _, w := range []row{
			{Subject: podweir, Cold: cold, ChangeP50: change, After: memory{RSS: rss}},
			{Subject: iptables, Cold: 6000, ChangeP50: 1000, After: memory{RSS: 200}},
			{Subject: nftables, Cold: 5000, ChangeP50: 500, After: memory{RSS: 220}},
		} {
			w.size = size{Name: barSize}
			r.Rows = append(r.Rows, &w)
		}
		return r
	}
	for _, c := range []struct {
		name              string
		cold, change, rss float64
		missed            int
	}{
		{"all hold", 900, 2, 100, 0},
		{"slower than one from cold", 5500, 2, 100, 1},
		{"slower than both from cold", 7000, 2, 100, 2},
		{"19 times as fast", 900, 51, 100, 1},
		{"4 times as fast", 900, 120, 100, 2},
		{"more memory", 900, 2, 230, 2},
	} {
		bars := rows(c.cold, c.change, c.rss).bars()
		missed := 0
		for _, b := range bars {
			if !b.Holds {
				missed++
			}
		}
		if len(bars) != 6 || missed != c.missed {
			t.Errorf("%s: %d missed of %d, want %d: %+v", c.name, missed, len(bars), c.missed, bars)
		}
	}
	if bars := (&results{}).bars(); bars != nil {
		t.Errorf("bars of nothing: %v", bars)
	}
}

// smokeOptions measure little.
func smokeOptions(t *testing.T) options {
	t.Helper()
	if err := cluster.Build(t.Context()); err != nil {
		t.Fatal(err)
	}
	return options{repeats: 1, changes: 2, pause: 10 * time.Millisecond, burst: 30, policies: 5, format: "protobuf", iptables: "legacy"}
}

// TestSmoke goes once through everything that is measured, with the real
// kube-proxy, too, where it has been built.
func TestSmoke(t *testing.T) {
	o := smokeOptions(t)
	who := []string{podweir}
	root, err := cluster.Root()
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := realcluster.Default(root)
	if err != nil {
		t.Fatal(err)
	}
	o.kubeProxy = cfg.Bin("kube-proxy")
	switch _, err := os.Stat(o.kubeProxy); {
	case err == nil:
		who = subjectNames()
	case !errors.Is(err, os.ErrNotExist):
		t.Fatal(err)
	default:
		t.Logf("without kube-proxy: %s has not been built", o.kubeProxy)
	}
	for _, s := range []size{
		{Name: "20x4", Services: 20, Endpoints: 4},
		{Name: "1x150", Services: 1, Endpoints: 150},
	} {
		var rows []*row
		for _, subject := range who {
			rows = append(rows, &row{size: s, Subject: subject})
		}
		if err := measure(t.Context(), o, s, rows); err != nil {
			t.Fatalf("%s: %v", s.Name, err)
		}
		for _, r := range rows {
			r.finish()
			if r.Cold <= 0 || r.ColdCPU <= 0 || r.ChangeP50 <= 0 || r.ChangeP99 < r.ChangeP50 || r.Restart <= 0 || r.Start.RSS <= 0 || r.After.GoHeap <= 0 {
				t.Errorf("%s, %s: %+v", s.Name, r.Subject, *r)
			}
			if e := r.Samples[0].Entries; r.Subject == podweir && (e.Frontends != s.Services || e.Backends != s.Services*s.Endpoints || r.Maps <= 0) {
				t.Errorf("%s: %+v, maps %v MiB", s.Name, e, r.Maps)
			}
		}
	}
	p, err := measurePolicies(t.Context(), o)
	if err != nil || p.Pods != 5 || p.Median <= 0 {
		t.Errorf("policies: %+v, %v", p, err)
	}
}

// TestSmokeNotices: services that never come into force are no measurement.
func TestSmokeNotices(t *testing.T) {
	o := smokeOptions(t)
	s := size{Name: "2x4", Services: 2, Endpoints: 4}
	api := fakeapi.New(t)
	s.fill(api, nodes())
	api.Delete(s.slices(1, netip.Addr{})[0])
	b, err := newBench(t.Context(), o, s, api, podweir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	}()
	p, err := b.sub.start()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.sub.ready(t.Context(), p, time.Now()); err != nil {
		t.Fatal(err)
	}
	a := b.sub.(*agent)
	for i, want := range []bool{true, false} {
		to, err := b.probe.ask(netip.AddrPortFrom(clusterIP(i), servicePort), time.Second)
		if err != nil || s.leadsTo(i, to) != want {
			t.Errorf("service %d leads to %v, %v", i, to, err)
		}
	}
	a.size = size{Services: 1, Endpoints: 4}
	if err := a.settled(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	a.size = s
	if e, err := a.check(); err == nil {
		t.Errorf("a service without endpoints passes for one with all: %+v", e)
	}
}
