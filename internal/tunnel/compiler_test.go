package tunnel

import (
	"fmt"
	gomaps "maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestIncremental: whatever changes, what comes of the changes is what comes
// of everything.
func TestIncremental(t *testing.T) {
	cheap := 0
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 1))
		any := func(list ...string) string { return list[r.IntN(len(list))] }
		address := func() string { return fmt.Sprintf("10.244.158.%d", 64+r.IntN(8)) }
		pods := make(map[types.NamespacedName]*corev1.Pod)
		rest := Input{Self: "a"}
		c := NewCompiler()
		old := Output{}
		for step := range 60 {
			var ch Changes
			for range 1 + r.IntN(3) {
				p := pod(fmt.Sprint("p", r.IntN(12)), any("a", "b", "c", "z"), any(address(), address(), "172.31.0.3", "bad"), created(r.Int64N(3)))
				p.UID = types.UID(fmt.Sprint(r.IntN(3)))
				if r.IntN(10) == 0 {
					p.Status.Phase = corev1.PodSucceeded
				}
				n := name(p)
				if ch.Gone = append(ch.Gone, n); r.IntN(4) == 0 {
					delete(pods, n)
					ch.Pods = slices.DeleteFunc(ch.Pods, func(q *corev1.Pod) bool { return name(q) == n })
					continue
				}
				pods[n] = p
				ch.Pods = append(ch.Pods, p)
			}
			if step == 0 || r.IntN(5) == 0 {
				objects := []*corev1.Node{nodeA()}
				if r.IntN(5) > 0 {
					objects = append(objects, nodeB())
				}
				if r.IntN(2) == 0 {
					objects = append(objects, node("c", any("172.31.0.4", "172.31.0.5", "x"), "10.244.10.0/24"))
				}
				rest.Nodes, _ = Nodes(objects)
				rest.HostAddrs = []netip.Addr{addr("172.31.0.2"), addr(any("10.1.1.1", address()))}
				rest.ServiceCIDRs = []netip.Prefix{pfx(any("10.98.0.0/16", "10.244.158.0/24"))}
				rest.Local = map[netip.Addr]types.NamespacedName{addr(address()): {Namespace: "default", Name: fmt.Sprint("p", r.IntN(12))}}
				ch.Rest = &rest
			} else if r.IntN(2) == 0 {
				ch.Rest = &rest // as it was
			}
			in := rest
			in.Pods = slices.Collect(gomaps.Values(pods))
			want := Compile(in)
			got := c.Compile(ch)
			var moved, said []string
			for a, p := range want.Addrs {
				if was, ok := old.Addrs[a]; !ok || was != p {
					moved = append(moved, a.String())
				}
			}
			for a := range old.Addrs {
				if _, ok := want.Addrs[a]; !ok {
					moved = append(moved, a.String())
				}
			}
			for _, a := range got.Delta.Addrs {
				said = append(said, a.String())
			}
			slices.Sort(moved)
			slices.Sort(said)
			if d := cmp.Diff(moved, said); d != "" {
				t.Fatalf("seed %d, step %d: addresses that changed (-did +said)\n%s", seed, step, d)
			}
			if p, rt := !gomaps.Equal(old.Prefixes, want.Prefixes), !slices.Equal(old.Routes, want.Routes); got.Delta.Prefixes != p || got.Delta.Routes != rt {
				t.Fatalf("seed %d, step %d: prefixes %v, routes %v changed, it says %v, %v", seed, step, p, rt, got.Delta.Prefixes, got.Delta.Routes)
			}
			if !gomaps.Equal(want.Addrs, got.Addrs) || !gomaps.Equal(want.Prefixes, got.Prefixes) ||
				!slices.Equal(want.Routes, got.Routes) || !slices.Equal(want.HostAddrs, got.HostAddrs) || fmt.Sprint(want.Errs) != fmt.Sprint(got.Errs) {
				t.Fatalf("seed %d, step %d: everything\n%v\nchanges\n%v", seed, step, want, got)
			}
			if len(moved) > 0 && len(moved) < len(want.Addrs)/2 {
				cheap++
			}
			old = want
		}
	}
	if cheap == 0 {
		t.Error("nothing changed a little")
	}
}

// BenchmarkNodeEvent is a node that joins and leaves a cluster of many pods.
func BenchmarkNodeEvent(b *testing.B) {
	objects := []*corev1.Node{nodeA(), nodeB()}
	c := NewCompiler()
	var ch Changes
	for i := range 20000 {
		ch.Pods = append(ch.Pods, pod(fmt.Sprint("p", i), "b", fmt.Sprintf("10.128.%d.%d", i>>8, i&255)))
	}
	input := func(objects ...*corev1.Node) *Input {
		in := Input{Self: "a"}
		in.Nodes, _ = Nodes(objects)
		return &in
	}
	ch.Rest = input(objects...)
	c.Compile(ch)
	joined := append(objects, node("c", "172.31.0.4", "10.244.10.0/24"))
	for b.Loop() {
		c.Compile(Changes{Rest: input(joined...)})
		c.Compile(Changes{Rest: input(objects...)})
	}
}
