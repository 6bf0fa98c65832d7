package table_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/table"
)

func newTables(t *testing.T) *table.Tables {
	t.Helper()
	tables, err := table.New()
	if err != nil {
		t.Fatal(err)
	}
	return tables
}

func insert[Obj any](t *testing.T, tables *table.Tables, tbl statedb.RWTable[Obj], objs ...Obj) {
	t.Helper()
	txn := tables.DB.WriteTxn(tbl)
	for _, o := range objs {
		if _, _, err := tbl.Insert(txn, o); err != nil {
			t.Fatal(err)
		}
	}
	txn.Commit()
}

func names[Obj metav1.Object](seq func(func(Obj, statedb.Revision) bool)) string {
	var out []string
	for o := range seq {
		out = append(out, o.GetNamespace()+"/"+o.GetName())
	}
	return strings.Join(out, " ")
}

func pod(ns, name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	p.Spec.NodeName = node
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}

func TestPodIndexes(t *testing.T) {
	tables := newTables(t)
	shared := pod("default", "host1", "a", "172.31.0.2")
	insert(t, tables, tables.Pods,
		pod("default", "web", "a", "10.244.80.65", "fd00:10:244:50::41"),
		pod("default", "web2", "b", "10.244.158.65", "not an address"),
		pod("def", "web", "", "::ffff:10.244.80.66"),
		shared, pod("other", "host2", "a", "172.31.0.2"))
	txn := tables.DB.ReadTxn()

	for _, c := range []struct {
		what, got, want string
	}{
		{"by IPv4", names(tables.Pods.List(txn, table.PodsByIP(netip.MustParseAddr("10.244.80.65")))), "default/web"},
		{"by IPv6", names(tables.Pods.List(txn, table.PodsByIP(netip.MustParseAddr("fd00:10:244:50::41")))), "default/web"},
		{"v4-mapped stored", names(tables.Pods.List(txn, table.PodsByIP(netip.MustParseAddr("10.244.80.66")))), "def/web"},
		{"v4-mapped asked", names(tables.Pods.List(txn, table.PodsByIP(netip.MustParseAddr("::ffff:10.244.80.65")))), "default/web"},
		{"shared", names(tables.Pods.List(txn, table.PodsByIP(netip.MustParseAddr("172.31.0.2")))), "default/host1 other/host2"},
		{"unknown", names(tables.Pods.List(txn, table.PodsByIP(netip.MustParseAddr("10.9.9.9")))), ""},
		{"by node", names(tables.Pods.List(txn, table.PodsByNode("b"))), "default/web2"},
		{"no node", names(tables.Pods.List(txn, table.PodsByNode(""))), ""},
		{"namespace", names(tables.Pods.Prefix(txn, table.InNamespace[*corev1.Pod]("def"))), "def/web"},
		{"by name", names(tables.Pods.List(txn, table.ByName[*corev1.Pod]("default", "web"))), "default/web"},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, c.got, c.want)
		}
	}
}

func TestSlicesByService(t *testing.T) {
	tables := newTables(t)
	slice := func(ns, name, svc string) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
		if svc != "" {
			s.Labels = map[string]string{discoveryv1.LabelServiceName: svc}
		}
		return s
	}
	insert(t, tables, tables.Slices,
		slice("default", "web-1", "web"), slice("default", "web-2", "web"),
		slice("default", "web2-1", "web2"), slice("other", "web-1", "web"), slice("default", "none", ""))
	got := names(tables.Slices.List(tables.DB.ReadTxn(), table.SlicesByService("default", "web")))
	if got != "default/web-1 default/web-2" {
		t.Errorf("slices of default/web: %q", got)
	}

	// A slice that changes its service leaves the old one.
	insert(t, tables, tables.Slices, slice("default", "web-2", "web2"))
	got = names(tables.Slices.List(tables.DB.ReadTxn(), table.SlicesByService("default", "web")))
	if got != "default/web-1" {
		t.Errorf("slices of default/web after the move: %q", got)
	}
}

func TestSyncedNeedsEveryTableOfASource(t *testing.T) {
	tables := newTables(t)
	if tables.Synced(tables.DB.ReadTxn()) {
		t.Fatal("synced without a source")
	}
	in, err := tables.RegisterSource("a test")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tables.RegisterSource("another"); err == nil || !strings.Contains(err.Error(), "a test") {
		t.Errorf("a second source: got %v, want an error that names the first", err)
	}

	steps := []struct {
		table statedb.TableMeta
		done  func(statedb.WriteTxn)
	}{
		{tables.Pods, in.Pods}, {tables.Namespaces, in.Namespaces}, {tables.Nodes, in.Nodes},
		{tables.Services, in.Services}, {tables.Slices, in.Slices}, {tables.Policies, in.Policies},
		{tables.ServiceCIDRs, in.ServiceCIDRs}, {tables.ClusterPolicies, in.ClusterPolicies},
	}
	for _, s := range steps {
		if tables.Synced(tables.DB.ReadTxn()) {
			t.Fatalf("synced before %s", s.table.Name())
		}
		cancelled, cancel := context.WithCancel(context.Background())
		cancel()
		if err := tables.WaitSynced(cancelled); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), s.table.Name()) {
			t.Fatalf("wait: got %v, want one that names %s", err, s.table.Name())
		}
		txn := tables.DB.WriteTxn(s.table)
		s.done(txn)
		s.done(txn)
		txn.Commit()
	}
	if err := tables.WaitSynced(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !tables.Synced(tables.DB.ReadTxn()) {
		t.Fatal("not synced after all tables")
	}
}

func TestProblems(t *testing.T) {
	tables := newTables(t)
	list := func() string {
		var out []string
		for p := range tables.Problems.All(tables.DB.ReadTxn()) {
			out = append(out, p.Owner+" "+p.String())
		}
		return strings.Join(out, "; ")
	}
	a := table.Problem{Object: "Service default/web", File: "web.yaml", Line: 7, Err: "bad"}
	b := table.Problem{Object: "Service default/b", Err: "bad"}

	added, gone := tables.SetProblems("dir", []table.Problem{a, a, b})
	if len(added) != 2 || len(gone) != 0 {
		t.Errorf("added %v, gone %v", added, gone)
	}
	tables.SetProblems("agent", []table.Problem{{Err: "full"}})
	if want := "agent full; dir Service default/b: bad; dir web.yaml:7: Service default/web: bad"; list() != want {
		t.Errorf("problems:\n%s\nwant\n%s", list(), want)
	}

	// The same again writes nothing and wakes nobody.
	_, watch := tables.Problems.AllWatch(tables.DB.ReadTxn())
	tables.SetProblems("dir", []table.Problem{b, a})
	select {
	case <-watch:
		t.Error("an unchanged set of problems woke a watcher")
	default:
	}

	// A line that moves keeps the time.
	first, _, _ := tables.Problems.Get(tables.DB.ReadTxn(), table.ProblemsByOwner("agent"))
	for p := range tables.Problems.List(tables.DB.ReadTxn(), table.ProblemsByOwner("dir")) {
		if p.Line == 7 {
			first = p
		}
	}
	moved := a
	moved.Line = 9
	added, gone = tables.SetProblems("dir", []table.Problem{moved})
	if len(added) != 0 || len(gone) != 1 || gone[0].Object != b.Object {
		t.Errorf("after the move: added %v, gone %v", added, gone)
	}
	now, _, ok := tables.Problems.Get(tables.DB.ReadTxn(), table.ProblemsByOwner("dir"))
	if !ok || now.Line != 9 || !now.Since.Equal(first.Since) {
		t.Errorf("moved problem: %+v, want line 9 since %v", now, first.Since)
	}

	tables.SetProblems("dir", nil)
	if want := "agent full"; list() != want {
		t.Errorf("problems at the end: %q, want %q", list(), want)
	}
}
