package policy_test

import (
	"fmt"
	gomaps "maps"
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
)

// numbersOf returns the identities that addresses may have.
func numbersOf(out *policy.Output) map[uint32]bool {
	m := map[uint32]bool{maps.IdentityWorld: true, maps.IdentityHost: true, maps.IdentityRemoteNode: true, maps.IdentityPod: true}
	for _, id := range out.Prefixes {
		m[id] = true
	}
	for _, id := range out.Addrs {
		m[id] = true
	}
	return m
}

// P12: labels that no policy names make no identities, and cost nothing.
func TestUniqueLabelsMakeNoIdentities(t *testing.T) {
	in := busy(t, 5000, 20, 100)
	out := policy.Compile(*in, nil)
	for i := range in.Pods {
		in.Pods[i].Labels = gomaps.Clone(in.Pods[i].Labels)
		in.Pods[i].Labels["pod-template-hash"] = fmt.Sprint("unique", i)
	}
	unique := policy.Compile(*in, out.State)
	if a, b := len(numbersOf(&out)), len(numbersOf(&unique)); a != b || a < 100 || a > 110 {
		t.Errorf("%d identities, with a unique label on each pod %d", a, b)
	}
	if n := len(unique.Delta.Addrs) + len(unique.Delta.NewTables) + len(unique.Transitional); n != 0 {
		t.Errorf("the labels made %d entries differ", n)
	}
}

// P12, P18: what an event costs, in entries written and in what is looked at
// to know them, depends neither on the pods nor on the policies that do not
// mention it.
func TestEventCost(t *testing.T) {
	type cost struct{ writes, addrs, groups int }
	costs := func(pods, policies int) map[string]cost {
		in := busy(t, pods, 21, policies)
		in.Pods[20].Labels = map[string]string{"server": "mine"}
		in.Policies = append(in.Policies, networkPolicy(t, "mine",
			`{podSelector: {matchLabels: {server: mine}}, ingress: [{from: [{podSelector: {matchLabels: {app: mine}}}], ports: [{port: 80}]}]}`))
		c := policy.NewCompiler(nil)
		out := c.Compile(policy.Changes{Pods: in.Pods, Rest: in})
		if groups := out.Work.Groups; groups != 21 {
			t.Fatalf("%d groups", groups)
		}
		got := make(map[string]cost)
		tell := func(what string, ch policy.Changes) {
			old := out.Tables
			out = c.Compile(ch)
			got[what] = cost{writes(&out, old), out.Work.Addrs, out.Work.Groups}
		}
		last := in.Pods[len(in.Pods)-1]
		label := func(p policy.Pod, v string) policy.Changes {
			p.Labels = map[string]string{"app": v}
			return policy.Changes{Pods: []policy.Pod{p}}
		}
		c.Compile(label(last, "somebody")) // whose label may be one that is named
		tell("a label that nobody names", label(last, "nobody"))
		tell("the first one that a policy names", label(last, "mine"))
		tell("the second", label(in.Pods[len(in.Pods)-2], "mine"))
		tell("not the last", label(last, "nobody"))
		tell("the last", label(in.Pods[len(in.Pods)-2], "nobody"))
		tell("a pod comes", guest(false, map[string]string{"app": "nobody"})(in))
		tell("and goes", noGuest(in))
		tell("a pod here comes", guest(true, map[string]string{"server": "mine"})(in))
		tell("and goes from here", noGuest(in))
		tell("nothing", policy.Changes{Rest: in})
		return got
	}
	small, large := costs(2000, 21), costs(5000, 1000)
	for what, c := range large {
		t.Logf("%s: %+v", what, c)
		if c != small[what] {
			t.Errorf("%s: %+v; with few pods and policies %+v", what, c, small[what])
		}
		if c.writes > 6 || c.addrs > 1 || c.groups > 1 {
			t.Errorf("%s: %+v", what, c)
		}
	}
}

// P18: fifty thousand members of one set are one entry.
func TestMembersOfOneSet(t *testing.T) {
	in := many(50000, 1)
	specs(t, in, 1, func(int) string {
		return `{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {all: "yes"}}}]}]}`
	})
	out := policy.Compile(*in, nil)
	table := out.Tables[out.Endpoints[key(&in.Pods[0])].In]
	if len(table) != 1 || out.Addrs[in.Pods[0].Addrs[0]] != out.Addrs[netip.AddrFrom4([4]byte{10, 244, 195, 79})] {
		t.Errorf("%d entries", len(table))
	}
}
