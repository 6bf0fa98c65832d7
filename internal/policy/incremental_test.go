package policy_test

import (
	"fmt"
	gomaps "maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/policy"
)

// changes is what differs between two inputs, and sometimes what does not.
func changes(g generator, in, next *policy.Input) policy.Changes {
	var ch policy.Changes
	old := make(map[types.NamespacedName]policy.Pod)
	for _, p := range in.Pods {
		old[key(&p)] = p
	}
	for _, p := range next.Pods {
		if was, ok := old[key(&p)]; !ok || !reflect.DeepEqual(was, p) || g.chance(5) {
			ch.Pods = append(ch.Pods, p)
		}
		delete(old, key(&p))
	}
	for name := range old {
		ch.Gone = append(ch.Gone, name)
	}
	rest := func(in *policy.Input) policy.Input { in2 := *in; in2.Pods = nil; return in2 }
	if !reflect.DeepEqual(rest(in), rest(next)) || g.chance(10) {
		ch.Rest = next
	}
	return ch
}

// checkSame compares what a Compiler makes of changes with what Compile makes
// of everything: to the number.
func checkSame(t *testing.T, whole, got policy.Output) {
	t.Helper()
	for _, o := range []*policy.Output{&whole, &got} {
		slices.SortFunc(o.Delta.Addrs, netip.Addr.Compare)
		slices.Sort(o.Delta.NewTables)
		slices.Sort(o.Delta.GoneTables)
	}
	if same(&whole, &got) {
		return
	}
	t.Fatalf("(-everything compiled, +changes compiled)\n%s", cmp.Diff(whole, got, cmpopts.EquateEmpty(),
		cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.IgnoreFields(policy.Output{}, "State", "Work")))
}

// same is the comparison without the words, which take their time.
func same(a, b *policy.Output) bool {
	return gomaps.Equal(a.Addrs, b.Addrs) && gomaps.Equal(a.Prefixes, b.Prefixes) && gomaps.Equal(a.Rules, b.Rules) &&
		gomaps.EqualFunc(a.Tables, b.Tables, gomaps.Equal[policy.Table, policy.Table]) && slices.Equal(a.PortClasses, b.PortClasses) &&
		gomaps.Equal(a.Early.Addrs, b.Early.Addrs) && gomaps.Equal(a.Early.Prefixes, b.Early.Prefixes) &&
		gomaps.Equal(a.Transitional, b.Transitional) && slices.Equal(a.Problems, b.Problems) &&
		gomaps.EqualFunc(a.Endpoints, b.Endpoints, func(a, b policy.Endpoint) bool {
			return a.In == b.In && a.Out == b.Out && slices.Equal(a.InPolicies, b.InPolicies) && slices.Equal(a.OutPolicies, b.OutPolicies)
		}) &&
		slices.Equal(a.Delta.Addrs, b.Delta.Addrs) && a.Delta.Prefixes == b.Delta.Prefixes &&
		slices.Equal(a.Delta.NewTables, b.Delta.NewTables) && slices.Equal(a.Delta.GoneTables, b.Delta.GoneTables)
}

// TestIncremental runs through long lives of clusters, mostly of pods alone.
func TestIncremental(t *testing.T) {
	local, few := 0, 0
	for seed := range uint64(60) {
		g := newGenerator(seed)
		in := g.input()
		for n := len(in.Pods); n < 40; n++ {
			in.Pods = append(in.Pods, g.pod(n))
		}
		c := policy.NewCompiler(nil)
		whole := policy.Compile(*in, nil)
		checkSame(t, whole, c.Compile(policy.Changes{Pods: in.Pods, Rest: in}))
		for range 40 {
			next := g.mutate(in)
			if g.chance(70) {
				next = &policy.Input{Pods: slices.Clone(in.Pods), Namespaces: in.Namespaces, Nodes: in.Nodes, Policies: in.Policies, ClusterPolicies: in.ClusterPolicies}
				g.mutatePod(next)
			}
			ch := changes(g, in, next)
			addrs := len(whole.Addrs)
			whole = policy.Compile(*next, whole.State)
			got := c.Compile(ch)
			checkSame(t, whole, got)
			if got.Work.Addrs < addrs/2 {
				few++
				if slices.ContainsFunc(ch.Pods, func(p policy.Pod) bool { return p.Local }) {
					local++
				}
			}
			in = next
		}
	}
	t.Logf("%d changes looked at few addresses, %d of them of a pod of this node", few, local)
	if few == 0 || local == 0 {
		t.Error("every change was compiled from the start")
	}
}

// mutatePod lets a pod come, go, change its labels or its address.
func (g generator) mutatePod(in *policy.Input) {
	i := g.r.IntN(len(in.Pods))
	switch p := &in.Pods[i]; g.r.IntN(5) {
	case 0:
		in.Pods = slices.Delete(in.Pods, i, i+1)
	case 1:
		n := 40 + g.r.IntN(100)
		if !slices.ContainsFunc(in.Pods, func(p policy.Pod) bool { return p.Name == fmt.Sprint("pod", n) }) {
			in.Pods = append(in.Pods, g.pod(n))
		}
	case 2: // that of another pod: one of them has it
		p.Addrs = in.Pods[g.r.IntN(len(in.Pods))].Addrs
	case 3:
		p.Ports = g.namedPorts()
	default:
		p.Labels = gomaps.Clone(p.Labels)
		p.Labels[pick(g, labelKeys...)] = pick(g, labelValues...)
	}
}
