package agent

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/maps"
)

// P12: with a thousand policies, a label change that one of them mentions
// writes what it writes with ten.
func TestLabelChangeWrites(t *testing.T) {
	writes := func(policies int) map[string]int {
		b := newPeerBench(t)
		b.policies = append(b.policies, testPolicy("mine", "local", "mine"))
		for i := range policies - 1 {
			b.policies = append(b.policies, testPolicy(fmt.Sprint("other", i), "client", fmt.Sprint("role", i)))
		}
		for i := range policies {
			b.pods = append(b.pods, testPod(fmt.Sprint("p", i), "node-b", fmt.Sprintf("10.244.%d.%d", 159+i/250, 1+i%250), map[string]string{"role": fmt.Sprint("role", i)}))
		}
		b.compile()
		if err := b.p.apply(b.last); err != nil {
			t.Fatal(err)
		}
		got := make(map[string]int)
		change := func(what, pod string, labels map[string]string) {
			b.pod(pod).Labels = labels
			b.compile()
			b.lines, b.check = nil, nil
			if err := b.p.apply(b.last); err != nil {
				t.Fatal(err)
			}
			for _, l := range b.lines {
				if strings.Contains(l, "pw_policy") {
					got[what+": pw_policy"]++
				}
			}
			got[what] = len(b.lines)
		}
		change("the first", "p1", map[string]string{"role": "mine"})
		change("the second", "p2", map[string]string{"role": "mine"})
		change("one goes", "p1", nil)
		change("the last goes", "p2", nil)
		return got
	}
	few, many := writes(10), writes(1000)
	t.Logf("writes: %v", many)
	for what, n := range many {
		if n != few[what] || n > 12 {
			t.Errorf("%s: %d writes with 1000 policies, %d with 10", what, n, few[what])
		}
	}
}

// scaled is a loop with pods elsewhere and endpoints here, all in force.
func scaled(b *testing.B, pods, local int) *agentBench {
	bench := &agentBench{t: b, dp: newFakeDatapath(b), stack: newFakeStack()}
	bench.newTables()
	bench.cluster()
	txn := bench.tables.DB.WriteTxn(bench.tables.Pods)
	var endpoints []endpoint.Endpoint
	for i := range pods {
		p := testPod(fmt.Sprint("pod", i), "node-b", fmt.Sprintf("10.245.%d.%d", i>>8, i&255), map[string]string{"role": fmt.Sprint("role", i/10)})
		if i < local {
			p.Spec.NodeName, p.Labels = "node-a", map[string]string{"app": fmt.Sprint("app", i)}
			endpoints = append(endpoints, endpoint.Endpoint{
				ID: uint32(i + 1), ContainerID: p.Name, IfName: "eth0", Namespace: "default", Pod: p.Name, UID: string(p.UID),
				Addrs: []netip.Addr{netip.MustParseAddr(p.Status.PodIP)}, HostIfindex: 10 + i, MAC: []byte{2, 0, 0, 0, byte(i >> 8), byte(i)},
			})
		}
		if _, _, err := bench.tables.Pods.Insert(txn, p); err != nil {
			b.Fatal(err)
		}
	}
	txn.Commit()
	bench.startWith(endpoints...)
	bench.done()
	bench.await("everything in force", func() bool { return bench.a.full && bench.a.peers.addrs.Len() > pods })
	return bench
}

// policies replaces all by n of them, of which i is about app i%local and admits a
// role that ten pods elsewhere have.
func (b *agentBench) policies(n, local int) {
	txn := b.tables.DB.WriteTxn(b.tables.Policies)
	defer txn.Commit()
	if err := b.tables.Policies.DeleteAll(txn); err != nil {
		b.t.Fatal(err)
	}
	for i := range n {
		np := testPolicy(fmt.Sprint("p", i), fmt.Sprint("app", i%local), fmt.Sprint("role", local/10+i%179))
		if _, _, err := b.tables.Policies.Insert(txn, np); err != nil {
			b.t.Fatal(err)
		}
	}
}

// BenchmarkPolicies is P18: 200 pods of this node get three policies each, all
// at once; from the objects in the tables to the last verdict in the map.
func BenchmarkPolicies(b *testing.B) {
	const local = 200
	for _, pods := range []int{2000, 20000} {
		b.Run(fmt.Sprintf("%d pods", pods), func(b *testing.B) {
			bench := scaled(b, pods, local)
			isolated := func(want int) func() bool {
				return func() bool {
					n := 0
					for _, ep := range bench.a.peers.endpoints.All() {
						if ep.PolicyIn != 0 {
							n++
						}
					}
					return n == want && len(bench.a.peers.policy.All()) == 3*want
				}
			}
			for b.Loop() {
				bench.policies(3*local, local)
				bench.await("all isolated", isolated(local))
				b.StopTimer()
				bench.policies(0, local)
				bench.await("none", isolated(0))
				b.StartTimer()
			}
		})
	}
}

// BenchmarkPodEvent is a label change of a pod, with policies present that do
// and do not mention it: from the table to the map, and the loop's time of it.
func BenchmarkPodEvent(b *testing.B) {
	const local = 100
	for _, size := range []struct{ pods, policies int }{{2000, 10}, {20000, 10}, {20000, 1000}} {
		b.Run(fmt.Sprintf("%d pods/%d policies", size.pods, size.policies), func(b *testing.B) {
			bench := scaled(b, size.pods, local)
			bench.policies(size.policies, local)
			addr := netip.MustParseAddr("192.0.2.1")
			var rounds, took = uint64(0), time.Duration(0)
			identity := func() (id uint32) {
				v, _ := bench.a.peers.addrs.Actual(maps.ToAddr(addr))
				return v.Identity
			}
			relabel := func(role string) {
				bench.put(testPod("guest", "node-b", addr.String(), map[string]string{"role": role}))
			}
			relabel("role10")
			bench.await("the policies", func() bool { return identity() >= maps.IdentityFirstDynamic })
			if err := bench.a.do(b.Context(), func() { rounds, took = bench.a.stats.rounds, bench.a.stats.total }); err != nil {
				b.Fatal(err)
			}
			changes := 0
			for b.Loop() {
				for _, role := range []string{"nobody", "role10"} {
					relabel(role)
					bench.await(role, func() bool { return (identity() >= maps.IdentityFirstDynamic) == (role != "nobody") })
					changes++
				}
			}
			if err := bench.a.do(b.Context(), func() { rounds, took = bench.a.stats.rounds-rounds, bench.a.stats.total-took }); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Microseconds())/float64(rounds), "µs/round")
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(changes), "µs/change")
			b.ReportMetric(0, "ns/op")
		})
	}
}
