package policy_test

import (
	"fmt"
	gomaps "maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
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
// of everything: all of it but the numbers of identities, tables and rules.
func checkSame(t *testing.T, whole, got *policy.Output) {
	t.Helper()
	there, back := map[uint32]uint32{}, map[uint32]uint32{}
	same := func(a, b uint32) bool {
		if _, ok := there[a]; !ok {
			there[a] = b
		}
		if _, ok := back[b]; !ok {
			back[b] = a
		}
		return there[a] == b && back[b] == a
	}
	if len(whole.Addrs) != len(got.Addrs) || len(whole.Prefixes) != len(got.Prefixes) || len(whole.Endpoints) != len(got.Endpoints) {
		t.Fatalf("addresses, prefixes, endpoints: %d %d %d, of changes %d %d %d", len(whole.Addrs), len(whole.Prefixes), len(whole.Endpoints),
			len(got.Addrs), len(got.Prefixes), len(got.Endpoints))
	}
	for a, id := range whole.Addrs {
		if other, ok := got.Addrs[a]; !ok || !same(id, other) {
			t.Fatalf("%s: %d, of changes %d", a, id, other)
		}
	}
	for p, id := range whole.Prefixes {
		if other, ok := got.Prefixes[p]; !ok || !same(id, other) {
			t.Fatalf("%s: %d, of changes %d", p, id, other)
		}
	}
	table := func(o *policy.Output, n uint32, identity func(uint32) uint32) map[maps.PolicyKey]string {
		out := make(map[maps.PolicyKey]string)
		for k, e := range o.Tables[n] {
			if k.Table != n {
				t.Fatalf("%+v in table %d", k, n)
			}
			k.Table, k.Identity = n&maps.TableDefault, identity(k.Identity)
			out[k] = fmt.Sprint(e.Verdict, o.Rules[e.Rule])
		}
		return out
	}
	for name, a := range whole.Endpoints {
		b, ok := got.Endpoints[name]
		if !ok || !slices.Equal(a.InPolicies, b.InPolicies) || !slices.Equal(a.OutPolicies, b.OutPolicies) {
			t.Fatalf("%s: %+v, of changes %+v", name, a, b)
		}
		for _, n := range [][2]uint32{{a.In, b.In}, {a.Out, b.Out}} {
			renamed := func(id uint32) uint32 {
				if to, ok := there[id]; ok {
					return to
				}
				return id // one of the fixed, that nobody has
			}
			if d := cmp.Diff(table(whole, n[0], renamed), table(got, n[1], func(id uint32) uint32 { return id })); (n[0] == 0) != (n[1] == 0) || d != "" {
				t.Fatalf("%s: tables %d, of changes %d (-everything +changes)\n%s", name, n[0], n[1], d)
			}
		}
	}
	if !slices.Equal(whole.PortClasses, got.PortClasses) || !slices.Equal(whole.Problems, got.Problems) {
		t.Fatalf("%v %v, of changes %v %v", whole.PortClasses, whole.Problems, got.PortClasses, got.Problems)
	}
}

// checkDelta holds what an output says of itself against the one before.
func checkDelta(t *testing.T, old, out *policy.Output) {
	t.Helper()
	addrs := map[netip.Addr]bool{}
	for a, id := range out.Addrs {
		if was, ok := old.Addrs[a]; !ok || was != id {
			addrs[a] = true
		}
	}
	for a := range old.Addrs {
		if _, ok := out.Addrs[a]; !ok {
			addrs[a] = true
		}
	}
	for _, a := range out.Delta.Addrs {
		if !addrs[a] {
			t.Fatalf("%s did not change", a)
		}
		delete(addrs, a)
	}
	if len(addrs) > 0 || out.Delta.Prefixes != !gomaps.Equal(old.Prefixes, out.Prefixes) {
		t.Fatalf("not told: %v, or of prefixes (told: %v)", addrs, out.Delta.Prefixes)
	}
	now := policy.Table{}
	for n, entries := range old.Tables {
		if !slices.Contains(out.Delta.GoneTables, n) {
			gomaps.Copy(now, entries)
		}
	}
	for _, n := range out.Delta.NewTables {
		if _, ok := old.Tables[n]; ok {
			t.Fatalf("table %d is not new", n)
		}
		gomaps.Copy(now, out.Tables[n])
	}
	gomaps.Copy(now, out.Delta.Added)
	for _, k := range out.Delta.Removed {
		delete(now, k)
	}
	want := policy.Table{}
	for _, entries := range out.Tables {
		gomaps.Copy(want, entries)
	}
	if !gomaps.Equal(want, now) {
		t.Fatalf("tables by what was told (-want +got)\n%s", cmp.Diff(want, now))
	}
}

// TestIncremental runs through long lives of clusters, mostly of pods alone.
func TestIncremental(t *testing.T) {
	local, few := 0, 0
	for seed := range uint64(12) {
		g := newGenerator(seed)
		in := g.input()
		for n := len(in.Pods); n < 40; n++ {
			in.Pods = append(in.Pods, g.pod(n))
		}
		c := policy.NewCompiler(nil)
		whole := policy.Compile(*in, nil)
		got := c.Compile(policy.Changes{Pods: in.Pods, Rest: in})
		checkSame(t, &whole, &got)
		for range 40 {
			next := g.mutate(in)
			if g.chance(70) {
				next = &policy.Input{Pods: slices.Clone(in.Pods), Namespaces: in.Namespaces, Nodes: in.Nodes, Policies: in.Policies, ClusterPolicies: in.ClusterPolicies}
				g.mutatePod(next)
				if g.chance(20) { // one of them has it
					next.Pods[0].Addrs = next.Pods[g.r.IntN(len(next.Pods))].Addrs
				}
			}
			ch := changes(g, in, next)
			addrs := len(whole.Addrs)
			whole = policy.Compile(*next, whole.State)
			was := got
			was.Addrs = gomaps.Clone(got.Addrs)
			got = c.Compile(ch)
			checkSame(t, &whole, &got)
			checkDelta(t, &was, &got)
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

// mutatePod lets a pod come, go, or change its labels or ports.
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
	case 2:
		p.Ports = g.namedPorts()
	default:
		p.Labels = gomaps.Clone(p.Labels)
		p.Labels[pick(g, labelKeys...)] = pick(g, labelValues...)
	}
}
