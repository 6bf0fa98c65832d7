package policy_test

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/policy"
)

// many returns n pods of the cluster, the first local ones here, in groups of
// ten with a label of their own.
func many(n, local int) *policy.Input {
	in := cluster()
	in.Pods = nil
	for i := range n {
		in.Pods = append(in.Pods, policy.Pod{
			Namespace: "default", Name: fmt.Sprint("pod", i), Local: i < local,
			Labels: map[string]string{"app": fmt.Sprint("app", i/10), "all": "yes"},
			Addrs:  []netip.Addr{netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})},
		})
	}
	return in
}

func specs(t testing.TB, in *policy.Input, n int, spec func(i int) string) {
	for i := range n {
		in.Policies = append(in.Policies, networkPolicy(t, fmt.Sprintf("p%04d", i), spec(i)))
	}
}

func BenchmarkCompile(b *testing.B) {
	b.Run("50000 members of one set", func(b *testing.B) {
		in := many(50000, 100)
		specs(b, in, 1, func(int) string {
			return `{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {all: "yes"}}}]}]}`
		})
		run(b, in)
	})
	b.Run("1000 policies on one pod", func(b *testing.B) {
		in := many(10000, 1)
		specs(b, in, 1000, func(i int) string {
			return fmt.Sprintf(`{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: app%d}}}], ports: [{port: %d}]}]}`, i, 1+i)
		})
		run(b, in)
	})
	b.Run("200 pods with 3 policies each", func(b *testing.B) {
		in := many(10000, 200)
		for i := range in.Pods {
			in.Pods[i].Labels["pod"] = fmt.Sprint(i)
		}
		specs(b, in, 600, func(i int) string {
			return fmt.Sprintf(`{podSelector: {matchLabels: {pod: "%d"}}, ingress: [{from: [{podSelector: {matchLabels: {app: app%d}}}], ports: [{port: 80}, {port: 8000, endPort: %d}]}]}`, i/3, i, 8001+i%7)
		})
		run(b, in)
	})
	b.Run("default deny of the cluster and 50 exceptions", func(b *testing.B) {
		in := many(10000, 100)
		specs(b, in, 100, func(i int) string { // tell the pods apart
			return fmt.Sprintf(`{podSelector: {matchLabels: {app: app0}}, ingress: [{from: [{podSelector: {matchLabels: {app: app%d}}}], ports: [{port: 80}]}]}`, 10*i)
		})
		list := []string{`{tier: Baseline, priority: 1000, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}`}
		for i := range 50 {
			list = append(list, fmt.Sprintf(`{tier: Admin, priority: %d, subject: {namespaces: {}}, ingress: [{action: Accept, from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: app%d}}}}], protocols: [{tcp: {destinationPort: {number: %d}}}]}]}`, i, 10*i, 8000+i))
		}
		in.ClusterPolicies = clusterPolicies(b, list...)
		run(b, in)
	})
	b.Run("2000 blocks", func(b *testing.B) {
		in := many(10000, 100)
		specs(b, in, 1, func(int) string {
			s := `{podSelector: {}, egress: [{to: [`
			for i := range 2000 {
				s += fmt.Sprintf(`{ipBlock: {cidr: 10.%d.%d.0/%d}},`, i%250, i/8, 16+i%8)
			}
			return s + `]}]}`
		})
		run(b, in)
	})
}

// busy is a node with local pods of n, each under its share of the policies.
// Policy i admits the pods with app=app<i> to one of them.
func busy(tb testing.TB, n, local, policies int) *policy.Input {
	in := many(n, local)
	for i := range local {
		in.Pods[i].Labels = map[string]string{"server": fmt.Sprint(i)}
	}
	specs(tb, in, policies, func(i int) string {
		return fmt.Sprintf(`{podSelector: {matchLabels: {server: "%d"}}, ingress: [{from: [{podSelector: {matchLabels: {app: app%d}}}], ports: [{port: 80}]}]}`, i%local, 100+i)
	})
	return in
}

// writes counts the entries of maps that an output makes differ.
func writes(out *policy.Output, gone map[uint32]policy.Table) int {
	n := len(out.Delta.Addrs) + len(out.Early.Addrs) + 2*len(out.Transitional) + len(out.Delta.Added) + len(out.Delta.Removed)
	for _, t := range out.Delta.NewTables {
		n += len(out.Tables[t])
	}
	for _, t := range out.Delta.GoneTables {
		n += len(gone[t])
	}
	return n
}

// event is a change of a cluster, there and back.
type event struct {
	name        string
	there, back func(in *policy.Input) policy.Changes
}

func relabel(labels map[string]string) func(*policy.Input) policy.Changes {
	return func(in *policy.Input) policy.Changes {
		p := in.Pods[len(in.Pods)-1]
		p.Labels = labels
		return policy.Changes{Pods: []policy.Pod{p}}
	}
}

func guest(local bool, labels map[string]string) func(*policy.Input) policy.Changes {
	return func(*policy.Input) policy.Changes {
		return policy.Changes{Pods: []policy.Pod{{
			Namespace: "default", Name: "guest", Labels: labels, Local: local,
			Addrs: []netip.Addr{netip.MustParseAddr("10.245.0.1")},
		}}}
	}
}

func noGuest(*policy.Input) policy.Changes {
	return policy.Changes{Gone: []types.NamespacedName{{Namespace: "default", Name: "guest"}}}
}

var events = []event{
	{"another label, that no policy names", relabel(map[string]string{"app": "x", "unique": "1"}), relabel(map[string]string{"app": "x", "unique": "2"})},
	{"another label, that one policy names", relabel(map[string]string{"app": "app100"}), relabel(map[string]string{"app": "x"})},
	{"a label that makes an identity", relabel(map[string]string{"app": "app5000"}), relabel(map[string]string{"app": "x"})},
	{"a pod elsewhere", guest(false, map[string]string{"app": "app100"}), noGuest},
	{"a pod here", guest(true, map[string]string{"server": "1"}), noGuest},
}

// BenchmarkEvent is what one event costs: half of there and back.
func BenchmarkEvent(b *testing.B) {
	for _, size := range []struct{ pods, policies int }{{2000, 10}, {20000, 10}, {20000, 1000}, {50000, 1000}} {
		for _, e := range events {
			b.Run(fmt.Sprintf("%d pods/%d policies/%s", size.pods, size.policies, e.name), func(b *testing.B) {
				in := busy(b, size.pods, 100, size.policies-1)
				in.Policies = append(in.Policies, networkPolicy(b, "one", `{podSelector: {matchLabels: {server: "0"}}, ingress: [{from: [{podSelector: {matchLabels: {app: app5000}}}]}]}`))
				c := policy.NewCompiler(nil)
				out := c.Compile(policy.Changes{Pods: in.Pods, Rest: in})
				n, events := 0, 0
				for b.Loop() {
					for _, change := range []func(*policy.Input) policy.Changes{e.there, e.back} {
						old := out.Tables
						out = c.Compile(change(in))
						n += writes(&out, old)
						events++
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(events)/1000, "µs/event")
				b.ReportMetric(float64(n)/float64(events), "writes/event")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkPolicies is what it costs when 200 pods of this node get three
// policies each, all at once, among many pods: what is new to every pod.
func BenchmarkPolicies(b *testing.B) {
	for _, pods := range []int{2000, 20000} {
		b.Run(fmt.Sprintf("%d pods", pods), func(b *testing.B) {
			with := busy(b, pods, 200, 600)
			without := &policy.Input{Namespaces: with.Namespaces, Nodes: with.Nodes}
			c := policy.NewCompiler(nil)
			c.Compile(policy.Changes{Pods: with.Pods, Rest: without})
			for b.Loop() {
				c.Compile(policy.Changes{Rest: with})
				b.StopTimer()
				c.Compile(policy.Changes{Rest: without})
				b.StartTimer()
			}
		})
	}
}

func run(b *testing.B, in *policy.Input) {
	prev := policy.Compile(*in, nil).State
	entries := 0
	for b.Loop() {
		out := policy.Compile(*in, prev)
		entries = 0
		for _, t := range out.Tables {
			entries += len(t)
		}
	}
	b.ReportMetric(float64(entries), "entries")
}
