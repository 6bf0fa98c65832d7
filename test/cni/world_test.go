package cni

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	pwmaps "github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

const port = 8080

type world struct {
	*testing.T
	ctx  context.Context
	c    *cluster.Cluster
	sets map[string]pwmaps.Set
}

func newWorld(t *testing.T) *world {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	w := &world{T: t, ctx: ctx, c: cluster.ForTest(t, cluster.Config{}), sets: map[string]pwmaps.Set{}}
	w.must(w.c.Manifests.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}))
	for _, n := range w.c.Nodes {
		w.must(w.c.Manifests.Put(n.Object()))
		// A refusal that the node owes is made, however many there were before.
		w.must(n.Sysctl("net/ipv4/icmp_ratelimit", "0"))
		w.must(n.Sysctl("net/ipv6/icmp/ratelimit", "0"))
	}
	w.must(w.c.StartAgents(ctx))
	for _, n := range w.c.Nodes {
		set, err := pwmaps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
		w.must(err)
		t.Cleanup(func() { _ = set.Close() })
		w.sets[n.NodeName] = set
	}
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) run(name string, fn func(*world)) {
	w.T.Run(name, func(t *testing.T) {
		sub := *w
		sub.T = t
		fn(&sub)
	})
}

// object is a pod as it is before it has addresses, or with those given.
func object(name, node string, addrs ...netip.Addr) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "test"}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "main"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
		p.Status.PodIP, p.Status.Phase = p.Status.PodIPs[0].IP, corev1.PodRunning
	}
	return p
}

// add plugs a pod, writes its addresses to its manifest as a kubelet does,
// and starts its servers.
func (w *world) add(obj *corev1.Pod, ports ...cluster.PortMapping) (*cluster.Pod, error) {
	if err := w.c.Manifests.Put(obj); err != nil {
		return nil, err
	}
	p, err := w.c.AddPod(w.ctx, obj, ports...)
	if err != nil {
		return nil, err
	}
	if err := w.c.Manifests.Put(object(obj.Name, obj.Spec.NodeName, p.Addrs...)); err != nil {
		return nil, err
	}
	return p, mesh.Serve(w.ctx, p.Netns, obj.Name, port)
}

// remove ends a pod and its manifest.
func (w *world) remove(p *cluster.Pod) {
	w.Helper()
	w.must(p.Delete(w.ctx))
	w.must(w.c.Manifests.Delete(object(p.PodName, p.Node.NodeName)))
}

// reach waits until each pod answers each of the callers, in both families
// and protocols, under its own name.
func (w *world) reach(callers []*cluster.Pod, pods []*cluster.Pod) {
	w.Helper()
	var probes []mesh.Probe
	var want []string
	for _, from := range callers {
		for _, to := range pods {
			for _, a := range to.Addrs {
				for _, proto := range []string{"tcp", "udp"} {
					probes = append(probes, mesh.Probe{From: from.Netns, Proto: proto, To: netip.AddrPortFrom(a, port)})
					want = append(want, to.PodName)
				}
			}
		}
	}
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	w.must(cluster.Eventually(ctx, func() error {
		got, err := mesh.Run(ctx, probes, mesh.Dropped(w.sets))
		if err != nil {
			return err
		}
		for i, r := range got {
			if r.Outcome != mesh.Answered || r.Server != want[i] {
				return fmt.Errorf("%v: %s by %q, want %s (%v)", probes[i], r.Outcome, r.Server, want[i], r.Err)
			}
		}
		return nil
	}))
}

// traces is everything of pods that a node holds.
func (w *world) traces(n *cluster.Node) map[string]bool {
	w.Helper()
	out := map[string]bool{}
	set := w.sets[n.NodeName]
	eps, err := set.Endpoints.Dump()
	w.must(err)
	for a := range eps {
		out["pw_endpoints "+pwmaps.KeyString(a)] = true
	}
	addrs, err := set.Addrs.Dump()
	w.must(err)
	for a := range addrs {
		out["pw_addrs "+pwmaps.KeyString(a)] = true
	}
	prefixes, err := set.Prefixes.Dump()
	w.must(err)
	for p := range prefixes {
		out["pw_prefixes "+pwmaps.KeyString(p)] = true
	}
	verdicts, err := set.Policy.Dump()
	w.must(err)
	for k := range verdicts {
		out["pw_policy "+pwmaps.KeyString(k)] = true
	}
	w.must(n.Do(func() error {
		ifis, err := net.Interfaces()
		for _, i := range ifis {
			out["device "+i.Name] = true
		}
		return err
	}))
	for _, args := range [][]string{{"ip", "-4", "route"}, {"ip", "-6", "route"}} {
		text, err := n.Exec(w.ctx, args...)
		w.must(err)
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, "fe80:") {
				out["route "+strings.TrimSpace(line)] = true
			}
		}
	}
	for _, dir := range []string{filepath.Join(n.BPFFS(), "links"), n.StateDir()} {
		w.must(filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				out["file "+path] = true
			}
			return err
		}))
	}
	return out
}

// baseline waits until a node holds what it held before, and nothing else.
func (w *world) baseline(n *cluster.Node, before map[string]bool) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	w.must(cluster.Eventually(ctx, func() error {
		var more, fewer []string
		now := w.traces(n)
		for k := range maps.Keys(now) {
			if !before[k] {
				more = append(more, k)
			}
		}
		for k := range before {
			if !now[k] {
				fewer = append(fewer, k)
			}
		}
		if len(more)+len(fewer) > 0 {
			slices.Sort(more)
			return fmt.Errorf("%s: left over %q, missing %q", n.NodeName, more, fewer)
		}
		return nil
	}))
}
