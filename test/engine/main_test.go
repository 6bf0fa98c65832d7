package engine

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// world is two podweir nodes with two pods each, and a kernel node.
type world struct {
	*cluster.Cluster
	a, b                         *cluster.Node
	client, local, remote, other *cluster.Pod // client and local on a
	kernel                       *kernelNode
	ports, ids                   atomic.Uint32
	hosts                        map[string]*cluster.Netns
}

// host is a machine that is no node; it lives as long as the cluster.
func (w *world) host(t testing.TB, ctx context.Context, name string, addrs ...netip.Prefix) *cluster.Netns {
	t.Helper()
	if w.hosts[name] == nil {
		n, err := w.AddHost(ctx, name, addrs...)
		ok(t, err)
		if w.hosts == nil {
			w.hosts = map[string]*cluster.Netns{}
		}
		w.hosts[name] = n
	}
	return w.hosts[name]
}

// port is a client's port that no flow has had yet: outside the range the
// kernel takes ports from, and that of translated ones.
func (w *world) port() uint16 { return uint16(30000 + w.ports.Add(1)) }

// id is an identification that no datagram of these tests has had yet.
func (w *world) id() uint32 { return 1000 + w.ids.Add(1) }

// sharedWorld is what most cases run in; it ends with the process.
var sharedWorld struct {
	once sync.Once
	w    *world
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if w := sharedWorld.w; w != nil {
		if err := w.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared is the common cluster: vxlan over IPv4.
func shared(t testing.TB) *world {
	t.Helper()
	sharedWorld.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if sharedWorld.err = cluster.Build(ctx); sharedWorld.err != nil {
			return
		}
		w := &world{}
		if w.Cluster, sharedWorld.err = cluster.New(ctx, cluster.Config{Label: "engine"}); sharedWorld.err != nil {
			return
		}
		sharedWorld.w = w
		sharedWorld.err = w.bringUp(ctx, kernelNet4)
	})
	ok(t, sharedWorld.err)
	w := sharedWorld.w
	w.logsOnFailure(t)
	return w
}

// own is a cluster of one test, which runs beside others that have their own:
// most of the time each of them waits for something. Those of the common
// cluster are over by then.
func own(t *testing.T, cfg cluster.Config) *world {
	t.Helper()
	t.Parallel()
	w := &world{Cluster: cluster.ForTest(t, cfg)}
	w.a, w.b = w.Node("node-a"), w.Node("node-b")
	return w
}

func (w *world) logsOnFailure(t testing.TB) {
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range w.Nodes {
				t.Logf("agent of %s:\n%s", n.NodeName, n.LogTail())
			}
		}
	})
}

// bringUp writes objects, starts agents and plugs the pods.
func (w *world) bringUp(ctx context.Context, k kernelNet) (err error) {
	w.a, w.b = w.Node("node-a"), w.Node("node-b")
	if w.kernel, err = newKernelNode(ctx, w.Cluster, k); err != nil {
		return err
	}
	if err := w.Manifests.Put(w.kernel.objects()...); err != nil {
		return err
	}
	return w.start(ctx)
}

// start writes the objects of the nodes and their pods, starts the agents
// and plugs the pods.
func (w *world) start(ctx context.Context) error {
	objs := w.podObjects()
	for _, n := range w.Nodes {
		objs = append(objs, n.Object())
	}
	if err := w.Manifests.Put(objs...); err != nil {
		return err
	}
	if err := w.StartAgents(ctx); err != nil {
		return err
	}
	if err := w.AddPods(ctx, objs...); err != nil {
		return err
	}
	w.client, w.local = w.Pod("default", "client"), w.Pod("default", "local")
	w.remote, w.other = w.Pod("default", "remote"), w.Pod("default", "other")
	return nil
}

// plannedPods are those of the address plan.
func (w *world) plannedPods() []*cluster.Pod {
	return []*cluster.Pod{w.client, w.local, w.remote, w.other}
}

// within bounds a case: generously, for the machine may be busy.
func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until fn succeeds.
func eventually(t testing.TB, ctx context.Context, fn func() error) {
	t.Helper()
	ok(t, cluster.Eventually(ctx, fn))
}

// run executes commands, one per line, in a namespace.
func run(ctx context.Context, n *cluster.Netns, lines string) error {
	for line := range strings.Lines(lines) {
		if args := strings.Fields(line); len(args) > 0 {
			if _, err := n.Exec(ctx, args...); err != nil {
				return err
			}
		}
	}
	return nil
}

// mapsOf opens a node's maps for writing, as long as the test lasts.
func mapsOf(t testing.TB, n *cluster.Node) maps.Set {
	t.Helper()
	set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), false)
	ok(t, err)
	t.Cleanup(func() { ok(t, set.Close()) })
	return set
}

// counts are counters by "reason", "reason/hook" and "reason/hook/family".
type counts map[string]int

// counters reads a node's counters.
func counters(t testing.TB, n *cluster.Node) counts {
	t.Helper()
	set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
	ok(t, err)
	defer set.Close()
	samples, err := set.Metrics.Read()
	ok(t, err)
	c := counts{}
	for _, s := range samples {
		reason, hook := maps.ReasonName(s.Reason), maps.HookName(s.Hook)
		for _, key := range []string{reason, reason + "/" + hook, reason + "/" + hook + "/" + s.Family()} {
			c[key] += int(s.Packets)
		}
	}
	return c
}

// since is what happened between two readings.
func (c counts) since(before counts) counts { return cluster.Since(c, before) }

// drops are the drop reasons alone, by hook. What the host's stack says to
// the link of the tunnel device, whenever it likes, is not counted.
func (c counts) drops() counts {
	d := counts{}
	for k, v := range c {
		if strings.HasPrefix(k, "drop_") && strings.Count(k, "/") == 1 && k != "drop_multicast/to_overlay" {
			d[k] = v
		}
	}
	return d
}

// want compares some counters with what they must be.
func (c counts) want(t testing.TB, what string, want counts) {
	t.Helper()
	for k, v := range want {
		if c[k] != v {
			t.Errorf("%s: %s is %d, want %d; all: %v", what, k, c[k], v, c)
		}
	}
}

// family is one of the two address families of a test.
type family struct {
	name string
	of   func(backend) netip.Addr
}

var families = []family{{"ipv4", backend.IPv4}, {"ipv6", backend.IPv6}}

// pick is one of two addresses, the family's.
func (f family) pick(v4, v6 string) netip.Addr {
	if f.name == "ipv4" {
		return netip.MustParseAddr(v4)
	}
	return netip.MustParseAddr(v6)
}

func port(a netip.Addr, p uint16) string { return netip.AddrPortFrom(a, p).String() }
