package policy_test

import (
	gomaps "maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
)

// transitionStats counts what the checked moments were like.
type transitionStats struct {
	moments, changed, needless int
	extended                   int // changes that let a table stay and differ
}

// sampled is a question with the answers before and after a change.
type sampled struct {
	question
	self     netip.Addr
	old, new bool
}

// sequence compiles step after step and checks each, and each change: all of
// it, or what changed.
func sequence(t *testing.T, g generator, in *policy.Input, steps int, whole bool, stats *transitionStats) {
	t.Helper()
	c := policy.NewCompiler(nil)
	out := c.Compile(policy.Changes{Pods: in.Pods, Rest: in})
	for range steps {
		next := g.mutate(in)
		if len(in.Pods) > 0 && !whole && g.chance(80) {
			next = &policy.Input{Pods: slices.Clone(in.Pods), Namespaces: in.Namespaces, Nodes: in.Nodes, Policies: in.Policies, ClusterPolicies: in.ClusterPolicies}
			g.mutatePod(next)
		}
		prev, ch := out.State, changes(g, in, next)
		old := load(&out, in)
		was := out
		was.Addrs = gomaps.Clone(out.Addrs) // the compiler goes on with it
		if g.chance(15) {                   // the agent restarts
			prev = policy.Restore(snapshot(&out, in))
			c, ch = policy.NewCompiler(prev), policy.Changes{Pods: next.Pods, Rest: next}
			was.Rules = nil
		}
		if whole {
			c, ch = policy.NewCompiler(prev), policy.Changes{Pods: next.Pods, Rest: next}
		}
		nout := c.Compile(ch)
		checkAgainstOracle(t, g, next, &nout, 300)
		new := load(&nout, next)
		checkDelta(t, &was, &nout)
		checkChange(t, g, &was, &nout, old, new, sample(g, in, next, old, new), stats)
		if whole {
			checkStable(t, next, &nout)
		}
		if len(nout.Delta.Added) > 0 || len(nout.Delta.Removed) > 0 {
			stats.extended++
		}
		in, out = next, nout
	}
}

func snapshot(out *policy.Output, in *policy.Input) policy.Snapshot {
	d := load(out, in)
	return policy.Snapshot{
		Addrs: out.Addrs, Prefixes: out.Prefixes, Policy: d.policy,
		PortClasses: out.PortClasses, Endpoints: d.tables,
	}
}

// checkStable compiles the same input again: nothing may change.
func checkStable(t *testing.T, in *policy.Input, out *policy.Output) {
	t.Helper()
	again := policy.Compile(*in, out.State)
	for _, c := range []struct {
		what string
		a, b any
	}{
		{"Addrs", out.Addrs, again.Addrs}, {"Prefixes", out.Prefixes, again.Prefixes},
		{"Tables", out.Tables, again.Tables}, {"PortClasses", out.PortClasses, again.PortClasses},
		{"Endpoints", out.Endpoints, again.Endpoints},
	} {
		if !reflect.DeepEqual(c.a, c.b) {
			t.Fatalf("%s changed though the input did not:\n%v\n%v", c.what, c.a, c.b)
		}
	}
	if len(again.Transitional)+len(again.Early.Addrs)+len(again.Early.Prefixes) > 0 {
		t.Fatalf("nothing changed, yet there is something to change over: %v %v", again.Transitional, again.Early)
	}
}

// checkChange brings d, which holds old, to final, which holds out, in the
// order of the package comment, each step in random order, and asks after
// every write.
func checkChange(t *testing.T, g generator, old, out *policy.Output, d, final *datapath, samples []sampled, stats *transitionStats) {
	t.Helper()

	has := numbersOf(out)
	had := numbersOf(old)
	for n, entries := range out.Tables {
		for k, e := range entries {
			if was, ok := old.Tables[n][k]; old.Tables[n] != nil && (!ok && had[k.Identity] || ok && was != e) {
				t.Fatalf("table %d changed under its number: %+v", n, k)
			}
		}
		for k := range old.Tables[n] {
			if _, ok := entries[k]; !ok && has[k.Identity] {
				t.Fatalf("table %d changed under its number: no %+v", n, k)
			}
		}
	}
	for k := range out.Transitional {
		if _, ok := out.Tables[k.Table][k]; ok {
			t.Fatalf("transitional %+v is an entry for good", k)
		}
		if _, ok := old.Tables[k.Table][k]; ok {
			t.Fatalf("transitional %+v is an old entry", k)
		}
	}

	check := func(step string) {
		t.Helper()
		stats.moments++
		for _, s := range samples {
			got := d.allows(s.self, s.question)
			if got && !s.old && !s.new {
				t.Fatalf("%s: %+v allowed, by neither state (identity %d, tables %v)\nearly %v\ntransitional %v",
					step, s.question, d.identity(s.peer), d.tables[s.self], out.Early, out.Transitional)
			}
			if s.old != s.new {
				stats.changed++
			}
			if !got && s.old && s.new {
				stats.needless++
			}
		}
	}
	shuffled := func(step string, writes []func()) {
		t.Helper()
		g.r.Shuffle(len(writes), func(i, j int) { writes[i], writes[j] = writes[j], writes[i] })
		for _, w := range writes {
			w()
			check(step)
		}
	}

	// 1
	for _, entries := range out.Tables {
		gomaps.Copy(d.policy, entries)
	}
	gomaps.Copy(d.policy, out.Transitional)
	check("tables")
	// 2: ports that are asked about one by one, then the rest
	var writes []func()
	asked := map[uint16]bool{}
	for _, s := range samples {
		if d.class[s.port] != final.class[s.port] && !asked[s.port] {
			asked[s.port] = true
			writes = append(writes, func() { d.class[s.port] = final.class[s.port] })
		}
	}
	shuffled("classes", writes)
	d.class = final.class
	// 3
	writes = nil
	for a, id := range out.Early.Addrs {
		writes = append(writes, func() { d.addrs[a] = id })
	}
	for p, id := range out.Early.Prefixes {
		writes = append(writes, func() { d.setPrefix(p, id) })
	}
	shuffled("early", writes)
	// 4
	writes = nil
	for a, tables := range final.tables {
		writes = append(writes, func() { d.tables[a] = tables })
	}
	shuffled("endpoints", writes)
	// 5
	writes = nil
	for a := range d.addrs {
		if id, ok := out.Addrs[a]; !ok {
			writes = append(writes, func() { delete(d.addrs, a) })
		} else if d.addrs[a] != id {
			writes = append(writes, func() { d.addrs[a] = id })
		}
	}
	for a, id := range out.Addrs {
		if _, ok := d.addrs[a]; !ok {
			writes = append(writes, func() { d.addrs[a] = id })
		}
	}
	for p, id := range out.Prefixes {
		writes = append(writes, func() { d.setPrefix(p, id) })
	}
	for k := range d.prefixes {
		p := maps.FromPrefix(k)
		if _, ok := out.Prefixes[p]; !ok {
			writes = append(writes, func() { d.delPrefix(p) })
		}
	}
	shuffled("identities", writes)
	// 7
	for k := range d.policy {
		if _, ok := out.Tables[k.Table][k]; !ok {
			delete(d.policy, k)
		}
	}
	for k := range out.Transitional {
		delete(d.policy, k)
	}
	check("clean-up")
	if !reflect.DeepEqual(d.policy, final.policy) || !reflect.DeepEqual(d.addrs, final.addrs) || !reflect.DeepEqual(d.prefixes, final.prefixes) {
		t.Fatal("the change does not end at the new state")
	}
}

// sample picks questions about pods that are there before and after, most of
// them about addresses that change.
func sample(g generator, oldIn, newIn *policy.Input, d, final *datapath) []sampled {
	all := newSpace(oldIn, newIn)
	var out []sampled
	moving := 0
	for range 4000 {
		if all.size() == 0 || len(out) >= 250 {
			break
		}
		q := all.at(g.r.IntN(all.size()))
		same := func(p policy.Pod) bool { return p.Namespace+"/"+p.Name == q.self && p.Local && !p.HostNetwork }
		i, j := slices.IndexFunc(oldIn.Pods, same), slices.IndexFunc(newIn.Pods, same)
		if i < 0 || j < 0 || !slices.Contains(newIn.Pods[j].Addrs, oldIn.Pods[i].Addrs[0]) {
			continue
		}
		moves := d.identity(q.peer) != final.identity(q.peer)
		if !moves && len(out)-moving > 120 {
			continue
		}
		if moves {
			moving++
		}
		self := oldIn.Pods[i].Addrs[0]
		out = append(out, sampled{q, self, d.allows(self, q), final.allows(self, q)})
	}
	return out
}

func TestSequences(t *testing.T) {
	for _, whole := range []bool{true, false} {
		var stats transitionStats
		for seed := range uint64(100) {
			g := newGenerator(seed)
			sequence(t, g, g.input(), 8, whole, &stats)
		}
		t.Logf("%+v", stats)
		if stats.needless > 0 || stats.changed == 0 || (stats.extended == 0) != whole {
			t.Error("denied in between what is allowed before and after, or nothing changed")
		}
	}
}
