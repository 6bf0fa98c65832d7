package policy_test

import (
	"fmt"
	"net/netip"
	"testing"

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
