package source

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/fakeapi"
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

func testLog(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// run starts a source that stops before the test ends.
func run(t *testing.T, s Source) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

// within is the time a test gives an event to come.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// await waits until a table satisfies a condition on its objects by key.
func await[Obj metav1.Object](t *testing.T, tables *table.Tables, tbl statedb.Table[Obj], what string, ok func(map[string]Obj) bool) map[string]Obj {
	t.Helper()
	ctx := within(t)
	for {
		seq, watch := tbl.AllWatch(tables.DB.ReadTxn())
		have := map[string]Obj{}
		for o := range seq {
			have[table.Key(o.GetNamespace(), o.GetName())] = o
		}
		if ok(have) {
			return have
		}
		select {
		case <-watch:
		case <-ctx.Done():
			t.Fatalf("table %s: %s did not come about; it has %v", tbl.Name(), what, keysOf(have))
		}
	}
}

func keysOf[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func exactly[Obj any](keys ...string) func(map[string]Obj) bool {
	slices.Sort(keys)
	return func(have map[string]Obj) bool { return slices.Equal(keysOf(have), keys) }
}

func waitSynced(t *testing.T, tables *table.Tables) {
	t.Helper()
	if err := tables.WaitSynced(within(t)); err != nil {
		t.Fatal(err)
	}
}

func meta(ns, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{}}
}

func slice(name, svc string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: meta("default", name), AddressType: discoveryv1.AddressTypeIPv4}
	s.Labels[discoveryv1.LabelServiceName] = svc
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func fill(s *fakeapi.Server) {
	s.Put(
		&corev1.Namespace{ObjectMeta: meta("", "default")},
		&corev1.Node{ObjectMeta: meta("", "a"), Spec: corev1.NodeSpec{PodCIDR: "10.244.80.0/24"}},
		&corev1.Pod{ObjectMeta: meta("default", "web"), Status: corev1.PodStatus{PodIP: "10.244.80.65"}},
		&corev1.Service{ObjectMeta: meta("default", "web"), Spec: corev1.ServiceSpec{ClusterIP: "10.98.235.247"}},
		slice("web-1", "web", "10.244.80.66"), slice("web-2", "web", "10.244.158.65"),
		&networkingv1.NetworkPolicy{ObjectMeta: meta("default", "deny")},
		&v1beta1.ClusterNetworkPolicy{ObjectMeta: meta("", "deny")},
		&networkingv1.ServiceCIDR{ObjectMeta: meta("", "kubernetes"), Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.98.0.0/16"}}},
	)
}

// modes runs a test against servers that can stream lists and that cannot.
func modes(t *testing.T, test func(t *testing.T, s *fakeapi.Server)) {
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("watchlist=%v", streams), func(t *testing.T) {
			t.Parallel()
			s := fakeapi.New(t)
			s.SetWatchList(streams)
			test(t, s)
		})
	}
}

func client(t *testing.T, rc *rest.Config) *Client {
	t.Helper()
	c, err := NewClient(rc)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestAPIFollowsChanges(t *testing.T) {
	modes(t, func(t *testing.T, s *fakeapi.Server) {
		tables := newTables(t)
		fill(s)
		run(t, NewAPI(client(t, s.Config()), tables, testLog(t)))
		waitSynced(t, tables)
		txn := tables.DB.ReadTxn()
		for tbl, want := range map[statedb.TableMeta]int{
			tables.Namespaces: 1, tables.Nodes: 1, tables.Pods: 1, tables.Services: 1,
			tables.Slices: 2, tables.Policies: 1, tables.ServiceCIDRs: 1,
		} {
			if got := tbl.NumObjects(txn); got != want {
				t.Errorf("%s: %d objects, want %d", tbl.Name(), got, want)
			}
		}
		s.Put(slice("web-3", "web", "10.244.80.67"), slice("web-1", "other"))
		s.Delete(slice("web-2", "web"))
		await(t, tables, tables.Slices, "the changes", func(have map[string]*discoveryv1.EndpointSlice) bool {
			return exactly[*discoveryv1.EndpointSlice]("default/web-1", "default/web-3")(have) &&
				have["default/web-1"].Labels[discoveryv1.LabelServiceName] == "other"
		})
	})
}

// Nothing is reported synced while any one list is not in (S29).
func TestAPISyncedOnlyWithEveryList(t *testing.T) {
	modes(t, func(t *testing.T, s *fakeapi.Server) {
		tables := newTables(t)
		fill(s)
		s.HoldLists()
		run(t, NewAPI(client(t, s.Config()), tables, testLog(t)))
		for _, step := range []struct {
			resource string
			table    statedb.TableMeta
		}{
			{fakeapi.EndpointSlices, tables.Slices}, {fakeapi.Pods, tables.Pods}, {fakeapi.Nodes, tables.Nodes},
			{fakeapi.Namespaces, tables.Namespaces}, {fakeapi.NetworkPolicies, tables.Policies},
			{fakeapi.ClusterPolicies, tables.ClusterPolicies}, {fakeapi.ServiceCIDRs, tables.ServiceCIDRs}, {fakeapi.Services, tables.Services},
		} {
			if txn := tables.DB.ReadTxn(); tables.Synced(txn) || step.table.NumObjects(txn) != 0 {
				t.Fatalf("before the list of %s: synced %v, %d objects", step.resource, tables.Synced(txn), step.table.NumObjects(txn))
			}
			s.ReleaseLists(step.resource)
			_, watch := step.table.Initialized(tables.DB.ReadTxn())
			select {
			case <-watch:
			case <-within(t).Done():
				t.Fatalf("the list of %s did not come in", step.resource)
			}
			if step.table.NumObjects(tables.DB.ReadTxn()) == 0 {
				t.Errorf("table %s is complete and empty", step.table.Name())
			}
		}
		waitSynced(t, tables)
	})
}

// What is removed while the watch is cut goes (S30), whether the watch can go
// on where it was or has to begin again with a list.
func TestAPIRemovalsWhileCut(t *testing.T) {
	for _, forget := range []bool{false, true} {
		t.Run(fmt.Sprintf("gone=%v", forget), func(t *testing.T) {
			modes(t, func(t *testing.T, s *fakeapi.Server) {
				tables := newTables(t)
				fill(s)
				run(t, NewAPI(client(t, s.Config()), tables, testLog(t)))
				waitSynced(t, tables)
				// A watch that brought an event goes on after a cut; one that
				// brought none so soon would begin again with a list.
				s.Await(t, fakeapi.EndpointSlices, func(st fakeapi.Stats) bool { return st.Open == 1 })
				s.Put(slice("web-1", "web", "10.244.80.67"))
				await(t, tables, tables.Slices, "an event", func(have map[string]*discoveryv1.EndpointSlice) bool {
					return have["default/web-1"].Endpoints[0].Addresses[0] == "10.244.80.67"
				})

				s.HoldWatches(fakeapi.EndpointSlices)
				s.HoldLists(fakeapi.EndpointSlices)
				s.CutWatches(fakeapi.EndpointSlices)
				s.Await(t, fakeapi.EndpointSlices, func(st fakeapi.Stats) bool { return st.Open == 0 })
				s.Delete(slice("web-1", "web"))
				s.Put(slice("web-2", "web", "10.244.158.66"), slice("web-3", "web", "10.244.158.67"))
				if forget {
					s.Forget(fakeapi.EndpointSlices)
				}
				if got := tables.Slices.NumObjects(tables.DB.ReadTxn()); got != 2 {
					t.Errorf("%d slices while cut, want the 2 of before", got)
				}
				s.ReleaseWatches(fakeapi.EndpointSlices)
				if forget {
					s.ReleaseLists(fakeapi.EndpointSlices)
				}
				await(t, tables, tables.Slices, "the removal", func(have map[string]*discoveryv1.EndpointSlice) bool {
					return exactly[*discoveryv1.EndpointSlice]("default/web-2", "default/web-3")(have) &&
						have["default/web-2"].Endpoints[0].Addresses[0] == "10.244.158.66"
				})
				if !tables.Synced(tables.DB.ReadTxn()) {
					t.Error("no longer synced")
				}
			})
		})
	}
}

func TestAPIDelayedEventsComeInOrder(t *testing.T) {
	s := fakeapi.New(t)
	tables := newTables(t)
	fill(s)
	run(t, NewAPI(client(t, s.Config()), tables, testLog(t)))
	waitSynced(t, tables)
	s.HoldEvents(fakeapi.Pods)
	web := &corev1.Pod{ObjectMeta: meta("default", "web")}
	s.Delete(web)
	web.UID = "again"
	s.Put(web, &corev1.Pod{ObjectMeta: meta("default", "new")})
	s.ReleaseEvents(fakeapi.Pods)
	await(t, tables, tables.Pods, "the pod made again", func(have map[string]*corev1.Pod) bool {
		return len(have) == 2 && have["default/web"].UID == "again"
	})
}

// A server older than the ServiceCIDR API does not keep the agent waiting, and
// one that learns it later is heard.
func TestAPIWithoutServiceCIDRs(t *testing.T) {
	modes(t, func(t *testing.T, s *fakeapi.Server) {
		tables := newTables(t)
		fill(s)
		s.Fail(404, fakeapi.ServiceCIDRs)
		src := NewAPI(client(t, s.Config()), tables, testLog(t)).(*apiSource)
		src.askAgain = 10 * time.Millisecond
		run(t, src)
		waitSynced(t, tables)
		if n := tables.ServiceCIDRs.NumObjects(tables.DB.ReadTxn()); n != 0 {
			t.Fatalf("%d service ranges from a server without", n)
		}
		if n := tables.Problems.NumObjects(tables.DB.ReadTxn()); n != 0 {
			t.Errorf("an absent API is no problem, but %d stand", n)
		}
		s.Fail(0, fakeapi.ServiceCIDRs)
		await(t, tables, tables.ServiceCIDRs, "the range", exactly[*networkingv1.ServiceCIDR]("kubernetes"))
	})
}

// ClusterNetworkPolicies have to be installed. A server without them does not
// keep the agent waiting, one that learns them later is heard, in the version
// that it has, and one that unlearns them has none.
func TestAPIClusterPolicies(t *testing.T) {
	for _, version := range []string{"v1beta1", "v1alpha2"} {
		t.Run(version, func(t *testing.T) {
			modes(t, func(t *testing.T, s *fakeapi.Server) {
				tables := newTables(t)
				s.SetVersion("policy.networking.k8s.io/"+version, fakeapi.ClusterPolicies)
				fill(s)
				s.Fail(404, fakeapi.ClusterPolicies)
				src := NewAPI(client(t, s.Config()), tables, testLog(t)).(*apiSource)
				src.lookEvery = 10 * time.Millisecond // and not the list itself, for two minutes
				run(t, src)
				waitSynced(t, tables)
				if n := tables.ClusterPolicies.NumObjects(tables.DB.ReadTxn()); n != 0 {
					t.Fatalf("%d policies from a server without", n)
				}
				if n := tables.Problems.NumObjects(tables.DB.ReadTxn()); n != 0 {
					t.Errorf("an absent API is no problem, but %d stand", n)
				}
				s.Await(t, fakeapi.ClusterPolicies, func(st fakeapi.Stats) bool { return st.Looks > 1 && st.Lists+st.Watches == 0 })
				s.Fail(0, fakeapi.ClusterPolicies)
				await(t, tables, tables.ClusterPolicies, "the policy", exactly[*v1beta1.ClusterNetworkPolicy]("deny"))
				p := &v1beta1.ClusterNetworkPolicy{ObjectMeta: meta("", "more")}
				p.Spec.Tier, p.Spec.Priority = v1beta1.BaselineTier, 7
				s.Put(p)
				got := await(t, tables, tables.ClusterPolicies, "another", exactly[*v1beta1.ClusterNetworkPolicy]("deny", "more"))["more"]
				if got.Spec.Tier != v1beta1.BaselineTier || got.Spec.Priority != 7 {
					t.Errorf("%+v", got.Spec)
				}
				s.Fail(404, fakeapi.ClusterPolicies)
				s.CutWatches(fakeapi.ClusterPolicies)
				s.Forget(fakeapi.ClusterPolicies)
				await(t, tables, tables.ClusterPolicies, "none", exactly[*v1beta1.ClusterNetworkPolicy]())
			})
		})
	}
}

// What the server says of its groups is asked for as little as it takes.
func TestServes(t *testing.T) {
	const group = "/apis/policy.networking.k8s.io"
	versions := func(list ...string) string {
		out := []string{}
		for _, v := range list {
			out = append(out, `{"groupVersion":"policy.networking.k8s.io/`+v+`","version":"`+v+`"}`)
		}
		return `{"kind":"APIGroup","apiVersion":"v1","name":"policy.networking.k8s.io","versions":[` + strings.Join(out, ",") + `]}`
	}
	const with, without = `{"kind":"APIResourceList","resources":[{"name":"clusternetworkpolicies"}]}`, `{"kind":"APIResourceList","resources":[{"name":"adminnetworkpolicies"}]}`
	for _, c := range []struct {
		name     string
		answers  map[string]string // a number is a status
		want     bool
		fails    bool
		requests int
	}{
		{"no group", nil, false, false, 1},
		{"other versions", map[string]string{group: versions("v1alpha1")}, false, false, 1},
		{"other kinds", map[string]string{group: versions("v1beta1", "v1alpha2"), group + "/v1beta1": without, group + "/v1alpha2": without}, false, false, 3},
		{"the best version", map[string]string{group: versions("v1alpha2", "v1beta1"), group + "/v1beta1": with}, true, false, 2},
		{"another", map[string]string{group: versions("v1alpha2"), group + "/v1alpha2": with}, true, false, 2},
		{"gone meanwhile", map[string]string{group: versions("v1beta1")}, false, false, 2},
		{"forbidden", map[string]string{group: "403"}, false, true, 1},
		{"in trouble", map[string]string{group: versions("v1beta1"), group + "/v1beta1": "500"}, false, true, 2},
		{"nonsense", map[string]string{group: "<html>"}, false, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			var requests atomic.Int32
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				requests.Add(1)
				answer, ok := c.answers[req.URL.Path]
				if !ok {
					answer = "404"
				}
				if status, err := strconv.Atoi(answer); err == nil {
					w.WriteHeader(status)
					return
				}
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, answer)
			}))
			defer s.Close()
			i := slices.IndexFunc(kinds(), func(k kind) bool { return k.name == "ClusterNetworkPolicy" })
			got, err := client(t, &rest.Config{Host: s.URL, QPS: -1}).serves(t.Context(), kinds()[i])
			if got != c.want || (err != nil) != c.fails {
				t.Errorf("%v, %v; want %v, an error: %v", got, err, c.want, c.fails)
			}
			if n := int(requests.Load()); n != c.requests {
				t.Errorf("%d requests, want %d", n, c.requests)
			}
		})
	}
}

func TestAPIErrorsAreProblems(t *testing.T) {
	s := fakeapi.New(t)
	tables := newTables(t)
	fill(s)
	s.Fail(403, fakeapi.Services)
	run(t, NewAPI(client(t, s.Config()), tables, testLog(t)))
	p := awaitProblems(t, tables, "the refusal", func(p []string) bool { return len(p) == 1 })
	if !strings.HasPrefix(strings.TrimPrefix(p[0], "cannot list"), " services") && !strings.HasPrefix(strings.TrimPrefix(p[0], "cannot watch"), " services") || !strings.Contains(p[0], "grant the agent's account") {
		t.Errorf("problem %q", p[0])
	}
	if tables.Synced(tables.DB.ReadTxn()) {
		t.Error("synced without services")
	}
	s.Fail(0, fakeapi.Services)
	waitSynced(t, tables)
	awaitProblems(t, tables, "the end of it", func(p []string) bool { return len(p) == 0 })
}

// A server that nobody answers for is a problem that says so, from the start.
func TestAPIUnreachableIsAProblem(t *testing.T) {
	tables := newTables(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil { // from now on connections are refused
		t.Fatal(err)
	}
	run(t, NewAPI(client(t, &rest.Config{Host: "http://" + addr}), tables, testLog(t)))
	p := awaitProblems(t, tables, "the cause", func(p []string) bool { return len(p) == 8 })
	if !strings.Contains(p[0], "connection refused") || !strings.Contains(p[0], "goes on trying") {
		t.Errorf("problem %q", p[0])
	}
}

func awaitProblems(t *testing.T, tables *table.Tables, what string, ok func([]string) bool) []string {
	t.Helper()
	ctx := within(t)
	for {
		seq, watch := tables.Problems.AllWatch(tables.DB.ReadTxn())
		var have []string
		for p := range seq {
			have = append(have, p.String())
		}
		if ok(have) {
			return have
		}
		select {
		case <-watch:
		case <-ctx.Done():
			t.Fatalf("problems: %s did not come about:\n%s", what, strings.Join(have, "\n"))
		}
	}
}

// A change that trimming removes, such as a node's heartbeat, wakes nobody.
func TestTrimmedChangesAreNotWritten(t *testing.T) {
	s := fakeapi.New(t)
	tables := newTables(t)
	node := &corev1.Node{ObjectMeta: meta("", "a"), Spec: corev1.NodeSpec{PodCIDR: "10.244.80.0/24"}}
	node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet"}}
	node.Annotations = map[string]string{"node.alpha.kubernetes.io/ttl": "0", "podweir.io/kept": "yes"}
	s.Put(node)
	run(t, NewAPI(client(t, s.Config()), tables, testLog(t)))
	waitSynced(t, tables)
	before, rev, _ := tables.Nodes.Get(tables.DB.ReadTxn(), table.ByName[*corev1.Node]("", "a"))
	if len(before.ManagedFields) != 0 || len(before.Annotations) != 1 {
		t.Errorf("not trimmed: %+v", before.ObjectMeta)
	}

	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.Now()}}
	s.Put(node)
	// The second change, which counts, comes after the first.
	other := &corev1.Node{ObjectMeta: meta("", "b")}
	s.Put(other)
	await(t, tables, tables.Nodes, "node b", exactly[*corev1.Node]("a", "b"))
	if _, now, _ := tables.Nodes.Get(tables.DB.ReadTxn(), table.ByName[*corev1.Node]("", "a")); now != rev {
		t.Error("a heartbeat was written to the table")
	}
	node.Spec.PodCIDR = "10.244.81.0/24"
	s.Put(node)
	await(t, tables, tables.Nodes, "the new range", func(have map[string]*corev1.Node) bool {
		return have["a"].Spec.PodCIDR == "10.244.81.0/24"
	})
}

func TestOneSourcePerTables(t *testing.T) {
	tables := newTables(t)
	if _, err := NewDir(t.TempDir(), tables, testLog(t)); err != nil {
		t.Fatal(err)
	}
	err := NewAPI(client(t, fakeapi.New(t).Config()), tables, testLog(t)).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "manifests in") {
		t.Errorf("a second source: %v", err)
	}
}
