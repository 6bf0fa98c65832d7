package policy_test

import (
	gomaps "maps"
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/policy"
)

// change compiles two inputs one after the other, whole and what changed, and
// checks every moment in between, about every question. It returns what the
// moments were like.
func change(t *testing.T, oldIn, newIn *policy.Input) transitionStats {
	t.Helper()
	var stats transitionStats
	for seed := range uint64(20) {
		old := policy.Compile(*oldIn, nil)
		out := policy.Compile(*newIn, old.State)
		if seed%2 == 1 {
			c := policy.NewCompiler(nil)
			old = c.Compile(policy.Changes{Pods: oldIn.Pods, Rest: oldIn})
			old.Addrs = gomaps.Clone(old.Addrs) // the compiler goes on with it
			out = c.Compile(policy.Changes{Pods: newIn.Pods, Rest: newIn})
		}
		d, final := load(&old, oldIn), load(&out, newIn)
		var samples []sampled
		for _, p := range oldIn.Pods {
			if !p.Local {
				continue
			}
			for _, peer := range newIn.Pods {
				for _, dir := range []policy.Direction{policy.Ingress, policy.Egress} {
					for _, port := range []uint16{79, 80, 84, 85, 90, 91, 443} {
						q := question{p.Namespace + "/" + p.Name, dir, peer.Addrs[0], 6, port}
						a := p.Addrs[0]
						samples = append(samples, sampled{q, a, d.allows(a, q), final.allows(a, q)})
					}
				}
			}
		}
		checkChange(t, newGenerator(seed), &old, &out, d, final, samples, &stats)
	}
	return stats
}

// people returns a cluster with servers s1 and s2 here and peers elsewhere.
func people(t *testing.T, labels map[string]string, policies ...string) *policy.Input {
	t.Helper()
	in := cluster()
	in.Pods = nil
	for i, name := range []string{"s1", "s2", "p1", "p2", "p3"} {
		in.Pods = append(in.Pods, policy.Pod{
			Namespace: "default", Name: name, Local: name[0] == 's',
			Labels: map[string]string{"app": labels[name]},
			Addrs:  []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 80, byte(65 + i)})},
		})
	}
	for i, spec := range policies {
		in.Policies = append(in.Policies, networkPolicy(t, string(rune('a'+i)), spec))
	}
	return in
}

func from(selects, allows, ports string) string {
	return `{podSelector: {matchLabels: {app: ` + selects + `}}, ingress: [{from: [{podSelector: {matchLabels: {app: ` +
		allows + `}}}], ports: [` + ports + `]}]}`
}

func TestChangeLabelsAndRulesAtOnce(t *testing.T) {
	// p1 turns from back to front while s1 turns from allowing front to allowing back: p1
	// is allowed neither before nor after. s2 keeps both identities in force.
	both := `{podSelector: {matchLabels: {app: two}}, ingress: [{from: [{podSelector: {matchLabels: {app: front}}}]}, {from: [{podSelector: {matchLabels: {app: back}}}]}]}`
	before := people(t, map[string]string{"s1": "one", "s2": "two", "p1": "back", "p2": "front", "p3": "back"}, from("one", "front", ""), both)
	after := people(t, map[string]string{"s1": "one", "s2": "two", "p1": "front", "p2": "front", "p3": "back"}, from("one", "back", ""), both)
	if s := change(t, before, after); s.needless > 0 {
		t.Errorf("denied in between what is allowed before and after: %+v", s)
	}
}

func TestChangeSwapsTables(t *testing.T) {
	// s1 and s2 swap their tables, which stay, and p1 changes sides: to s1 it
	// is a stranger before and after.
	one, two := from("one", "front", ""), from("two", "back", "")
	before := people(t, map[string]string{"s1": "one", "s2": "two", "p1": "back", "p2": "front", "p3": "back"}, one, two)
	after := people(t, map[string]string{"s1": "two", "s2": "one", "p1": "front", "p2": "front", "p3": "back"}, one, two)
	change(t, before, after)
}

func TestChangeRanges(t *testing.T) {
	labels := map[string]string{"s1": "one", "s2": "two", "p1": "front"}
	whole := `{port: 80, endPort: 90}`
	for name, to := range map[string]string{
		"cut in two":  `{port: 80, endPort: 84}, {port: 85, endPort: 90}`,
		"grown":       `{port: 79, endPort: 91}`,
		"shrunk":      `{port: 80, endPort: 84}`,
		"any port":    `{protocol: TCP}`,
		"exact ports": `{port: 80}, {port: 85}, {port: 90}`,
		"other rule":  `{port: 443}`,
	} {
		for _, pair := range [][2]string{{whole, to}, {to, whole}} {
			t.Run(name, func(t *testing.T) {
				s := change(t, people(t, labels, from("one", "front", pair[0])), people(t, labels, from("one", "front", pair[1])))
				if s.needless > 0 {
					t.Errorf("denied in between what is allowed before and after: %+v", s)
				}
			})
		}
	}
}

func TestChangeFirstAndLastPolicy(t *testing.T) {
	labels := map[string]string{"s1": "one", "s2": "two", "p1": "front", "p2": "back"}
	without, with := people(t, labels), people(t, labels, from("one", "front", ""))
	for _, pair := range [][2]*policy.Input{{without, with}, {with, without}} {
		if s := change(t, pair[0], pair[1]); s.needless > 0 {
			t.Errorf("denied in between what is allowed before and after: %+v", s)
		}
	}
}

func TestLabelChangeTouchesNoTable(t *testing.T) {
	// P12: a pod that moves between classes that exist changes its own
	// identity and nothing else.
	one := from("one", "front", "") // s2 tells back from the rest
	before := people(t, map[string]string{"s1": "one", "s2": "two", "p1": "front", "p2": "front", "p3": "back"}, one, from("two", "back", ""))
	after := people(t, map[string]string{"s1": "one", "s2": "two", "p1": "back", "p2": "front", "p3": "back"}, one, from("two", "back", ""))
	old := policy.Compile(*before, nil)
	out := policy.Compile(*after, old.State)
	for n := range old.Tables {
		if _, ok := out.Tables[n]; !ok {
			t.Errorf("table %d is gone", n)
		}
	}
	var moved []netip.Addr
	for a, id := range out.Addrs {
		if old.Addrs[a] != id {
			moved = append(moved, a)
		}
	}
	if len(moved) != 1 || moved[0] != before.Pods[2].Addrs[0] {
		t.Errorf("moved: %v, want p1 alone", moved)
	}
	if len(out.Transitional) > 0 || len(out.Early.Addrs) > 0 {
		t.Errorf("more to do than to move one address: %v %v", out.Transitional, out.Early)
	}
}

func TestNumbersAreNotReused(t *testing.T) {
	labels := map[string]string{"s1": "one", "s2": "two", "p1": "front"}
	with := people(t, labels, from("one", "front", `{port: 80, endPort: 90}`))
	without := people(t, labels)
	first := policy.Compile(*with, nil)
	gone := policy.Compile(*without, first.State)
	again := policy.Compile(*with, gone.State)
	id := func(o policy.Output) uint32 { return o.Addrs[with.Pods[2].Addrs[0]] }
	if id(first) == id(again) {
		t.Errorf("identity %d is used again", id(first))
	}
	for n := range again.Tables {
		if _, ok := first.Tables[n]; ok {
			t.Errorf("table %d is used again", n)
		}
	}
	if first.PortClasses[0].Class == again.PortClasses[0].Class && len(gone.PortClasses) == 0 {
		t.Errorf("class %d is used again", first.PortClasses[0].Class)
	}
}

func TestChangeLeavesATableWithADefault(t *testing.T) {
	// s1 goes from a table that s2 keeps to another one, and p1 from one
	// identity that its table denies to a new one that its next table denies:
	// what the first table says of anybody is not for p1.
	deny := func(who, whom string) string {
		return `{tier: Admin, priority: 1, subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {set: ` + whom +
			`}}}}, ingress: [{action: Deny, from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: ` + who + `}}}}]}]}`
	}
	state := func(s1, p1 string, policies ...string) *policy.Input {
		in := people(t, map[string]string{"p1": p1, "p2": "none", "p3": "back"})
		in.Pods[0].Labels = map[string]string{"set": s1}
		in.Pods[1].Labels = map[string]string{"set": "a"}
		in.ClusterPolicies = clusterPolicies(t, policies...)
		return in
	}
	before := state("a", "back", deny("back", "a"))
	after := state("b", "front", deny("back", "a"), deny("front", "b"))
	change(t, before, after)
	change(t, after, before)
}

func TestChangeLeavesATableThatIsExtended(t *testing.T) {
	// s1 goes from the table of s2 to that of s3 while p1 becomes the first
	// whom the former admits: to s1 it is a stranger before and after.
	policies := []string{from("one", "front", ""), from("two", "back", "")}
	before := people(t, map[string]string{"s1": "one", "s2": "one", "p1": "none", "p2": "none", "p3": "back"}, policies...)
	after := people(t, map[string]string{"s1": "two", "s2": "one", "p1": "front", "p2": "none", "p3": "back"}, policies...)
	for _, in := range []*policy.Input{before, after} { // the same objects: nothing else is different
		in.Pods = append(in.Pods, policy.Pod{
			Namespace: "default", Name: "s3", Local: true, Labels: map[string]string{"app": "two"},
			Addrs: []netip.Addr{netip.MustParseAddr("10.244.80.80")},
		})
		in.Policies = before.Policies
	}
	change(t, before, after)
	change(t, after, before)
}
