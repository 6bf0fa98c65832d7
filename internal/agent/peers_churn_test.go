package agent

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func testPort(n int) *intstr.IntOrString {
	p := intstr.FromInt32(int32(n))
	return &p
}

// sizes is how much is kept, in the maps and about them. (pw_port_class is an
// array, and tells the ranges before the last change apart as well.)
func (b *peerBench) sizes() map[string]int {
	return map[string]int{
		"pw_nodes": len(b.nodes_()), "pw_node_ids": len(b.nodeIDs.m), "pw_addrs": len(b.addrs.m),
		"pw_prefixes": len(b.prefixes.m), "pw_endpoints": len(b.endpoints_()), "pw_policy": len(b.policy.m),
		"slots": len(b.p.slots), "slots of prefixes": len(b.p.prefixSlots.m),
		"slots in use": len(b.p.gens.used), "withheld": len(b.p.withheld),
	}
}

func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// L8: 5,000 pods come and go, each with labels of its own, some of a role that
// a policy names, some with a policy, a block and a port range of their own:
// everything is back at its size, and so is memory.
func TestPeersChurn(t *testing.T) {
	const batch = 100
	b := newPeerBench(t)
	b.policies = []*networkingv1.NetworkPolicy{testPolicy("web", "local", "frontend")}
	b.mustApply()
	b.lines, b.check = nil, nil
	before := b.sizes()
	var heap uint64
	for n := 0; n < 5000; n += batch {
		pods, policies := slices.Clone(b.pods), slices.Clone(b.policies)
		for i := n; i < n+batch; i++ {
			labels := map[string]string{"pod": fmt.Sprint(i), "role": []string{"frontend", "backend"}[i%2]}
			b.pods = append(b.pods, testPod(fmt.Sprint("churn", i), "node-b", fmt.Sprintf("10.244.158.%d", 100+i%batch), labels))
		}
		np := blockPolicy(fmt.Sprintf("198.51.%d.0/24", n/batch))
		np.Name = fmt.Sprint("churn", n)
		end, port := int32(9000+n), testPort(8000)
		np.Spec.Ingress[0].From[0].PodSelector.MatchLabels = map[string]string{"pod": fmt.Sprint(n)}
		np.Spec.Ingress[0].Ports = []networkingv1.NetworkPolicyPort{{Port: port, EndPort: &end}}
		b.policies = append(b.policies, np)
		b.compile()
		if err := b.p.apply(b.last); err != nil {
			t.Fatal(err)
		}
		if got := b.sizes(); got["pw_addrs"] != before["pw_addrs"]+batch || got["pw_policy"] <= before["pw_policy"] ||
			got["pw_prefixes"] <= before["pw_prefixes"] {
			t.Fatalf("%v, before %v: this shows nothing", got, before)
		}
		b.pods, b.policies = pods, policies
		b.compile()
		if err := b.p.apply(b.last); err != nil {
			t.Fatal(err)
		}
		for what, size := range b.sizes() {
			if size != before[what] {
				t.Fatalf("after %d pods: %s: %d, before %d", n+batch, what, size, before[what])
			}
		}
		b.lines = nil
		if n == 10*batch {
			heap = heapInUse()
		}
	}
	if now := heapInUse(); now > heap+heap/4+1<<20 {
		t.Errorf("memory: %d bytes after 1,000 pods, %d after 5,000", heap, now)
	}
}

// A pod changes sides in the very change in which a policy does, so that it is
// denied before and after: in no order of writes but the right one is it never
// let in. What allows both sides never denies it.
func TestPeersSwapSides(t *testing.T) {
	b := newPeerBench(t)
	for i, role := range []string{"front", "back"} {
		b.pods = append(b.pods, testPod(role, "node-b", fmt.Sprintf("10.244.158.%d", 70+i), map[string]string{"role": role}))
	}
	both := []*networkingv1.NetworkPolicy{testPolicy("front", "client", "front"), testPolicy("back", "client", "back")}
	sides := []string{"front", "back"}
	for round := range 6 {
		b.pod("remote").Labels = map[string]string{"role": sides[(round+1)%2]}
		b.policies = append(slices.Clone(both), testPolicy("web", "local", sides[round%2]))
		b.compile()
		b.lines, b.check = nil, nil
		if round > 0 {
			b.check = func() {
				last := b.lines[len(b.lines)-1]
				if b.allows(localPod, "10.244.158.65", 80) {
					t.Errorf("after %q: let in by neither state", last)
				}
				if !b.allows("10.244.80.65", "10.244.158.65", 80) {
					t.Errorf("after %q: denied by neither state", last)
				}
			}
		}
		if err := b.p.apply(b.last); err != nil {
			t.Fatal(err)
		}
		b.wants(map[string]bool{"10.244.158.65": false, "10.244.158.70": round%2 == 0, "10.244.158.71": round%2 == 1})
	}
}
