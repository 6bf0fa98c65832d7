package contract

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// The service of examples/basic.
const (
	web4 = "10.98.235.247"
	web6 = "fd00:10:98::ebf7"
)

// world is a cluster with the objects of examples/basic.
type world struct {
	*cluster.Cluster
	a, b                         *cluster.Node
	client, local, remote, other *cluster.Pod // client and local live on a
	objs                         []cluster.Object
}

// sharedWorld is what most cases run in; it ends with the process.
var sharedWorld struct {
	once sync.Once
	w    *world
	err  error
}

func TestMain(m *testing.M) {
	// However long it takes; the cases are bounded, and find it done.
	if err := cluster.Build(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if w := sharedWorld.w; w != nil {
		if err := w.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared is the common cluster. A case leaves it as it found it.
func shared(t *testing.T) *world {
	t.Helper()
	sharedWorld.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
		defer cancel()
		w := &world{}
		if w.Cluster, sharedWorld.err = cluster.New(ctx, cluster.Config{Label: "contract"}); sharedWorld.err != nil {
			return
		}
		sharedWorld.w = w
		sharedWorld.err = w.bringUp(ctx)
	})
	if sharedWorld.err != nil {
		t.Fatal(sharedWorld.err)
	}
	w := sharedWorld.w
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range w.Nodes {
				t.Logf("agent of %s:\n%s", n.NodeName, n.LogTail())
			}
		}
	})
	return w
}

// own is a cluster of one case; nothing is started yet.
func own(t *testing.T, cfg cluster.Config) *world {
	t.Helper()
	w := &world{Cluster: cluster.ForTest(t, cfg)}
	if err := w.load(); err != nil {
		t.Fatal(err)
	}
	return w
}

// load reads the objects of examples/basic.
func (w *world) load() (err error) {
	root, err := cluster.Root()
	if err != nil {
		return err
	}
	w.a, w.b = w.Node("node-a"), w.Node("node-b")
	w.objs, err = cluster.Load(filepath.Join(root, "examples", "basic"))
	return err
}

// bringUp starts agents, plugs the pods and starts a server in each.
func (w *world) bringUp(ctx context.Context) error {
	if err := w.load(); err != nil {
		return err
	}
	if err := w.Manifests.Put(w.objs...); err != nil {
		return err
	}
	if err := w.StartAgents(ctx); err != nil {
		return err
	}
	return w.plug(ctx)
}

// plug adds the pods of the objects, with a server in each.
func (w *world) plug(ctx context.Context) error {
	if err := w.AddPods(ctx, w.objs...); err != nil {
		return err
	}
	for _, obj := range w.objs {
		if pod, ok := obj.(*corev1.Pod); ok {
			// Servers outlive the case that brought the cluster up.
			if _, err := w.Pod(pod.Namespace, pod.Name).Serve(context.Background(), pod.Name, cluster.ServerPort); err != nil {
				return err
			}
		}
	}
	w.client, w.local = w.Pod("default", "client"), w.Pod("default", "local")
	w.remote, w.other = w.Pod("default", "remote"), w.Pod("default", "other")
	return nil
}

// within bounds a case: generously, for the machine may be busy.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until fn succeeds.
func eventually(t *testing.T, ctx context.Context, fn func() error) {
	t.Helper()
	ok(t, cluster.Eventually(ctx, fn))
}

// protos are those that a service is tested with.
func protos() []string { return []string{"tcp", "udp"} }

// send has a namespace call a target; every call must succeed.
func send(t *testing.T, ctx context.Context, from *cluster.Netns, proto, target string, options ...string) *probe.Summary {
	t.Helper()
	s, err := from.Send(ctx, target, append([]string{"-proto", proto, "-timeout", "5s"}, options...)...)
	ok(t, err)
	if s.OK != s.Attempts || s.OK == 0 {
		t.Fatalf("%s %s from %s: %d of %d succeeded, failed %v, first %+v", proto, target, from.Name, s.OK, s.Attempts, s.Failed, s.Failure)
	}
	return s
}

// silent has a namespace call a target that must give no answer at all.
func silent(t *testing.T, ctx context.Context, from *cluster.Netns, proto, target string) {
	t.Helper()
	s, err := from.Send(ctx, target, "-proto", proto, "-timeout", "300ms")
	ok(t, err)
	if s.Failed[probe.Timeout] != 1 {
		t.Errorf("%s %s from %s: want silence, got %+v", proto, target, from.Name, s)
	}
}

// counterKey is one counter of a node.
type counterKey struct {
	reason, hook string
	v6           bool
}

// counters of one node, as the datapath counts.
type counters map[counterKey]uint64

func readCounters(t *testing.T, n *cluster.Node) counters {
	t.Helper()
	set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
	ok(t, err)
	defer set.Close()
	samples, err := set.Metrics.Read()
	ok(t, err)
	c := counters{}
	for _, s := range samples {
		c[counterKey{maps.ReasonName(s.Reason), maps.HookName(s.Hook), s.IPv6}] += s.Packets
	}
	return c
}

func (c counters) since(old counters) counters { return cluster.Since(c, old) }

// of sums one reason over hooks ("" = all), one family.
func (c counters) of(reason, hook string, v6 bool) (n uint64) {
	for k, v := range c {
		if k.reason == reason && (hook == "" || k.hook == hook) && k.v6 == v6 {
			n += v
		}
	}
	return n
}

// drops are all counted drops.
func (c counters) drops() counters {
	out := counters{}
	for k, v := range c {
		if strings.HasPrefix(k.reason, "drop_") {
			out[k] = v
		}
	}
	return out
}

func (c counters) String() string {
	var parts []string
	for k, v := range c {
		family := "4"
		if k.v6 {
			family = "6"
		}
		parts = append(parts, fmt.Sprintf("%s/%s/%s=%d", k.reason, k.hook, family, v))
	}
	return "{" + strings.Join(parts, " ") + "}"
}

// atLeast awaits a counter: programs count before the sender knows.
func atLeast(t *testing.T, n *cluster.Node, old counters, reason, hook string, v6 bool, want uint64) {
	t.Helper()
	if got := readCounters(t, n).since(old); got.of(reason, hook, v6) < want {
		t.Errorf("%s: %s at %q counted %d, want %d or more (IPv6 %v); all: %v", n.NodeName, reason, hook, got.of(reason, hook, v6), want, v6, got)
	}
}
