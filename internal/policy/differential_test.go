package policy_test

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/policy"
)

// selfAddr returns an address of the pod.
func selfAddr(in *policy.Input, self string) netip.Addr {
	for i := range in.Pods {
		if p := &in.Pods[i]; p.Namespace+"/"+p.Name == self {
			return p.Addrs[0]
		}
	}
	panic("no pod " + self)
}

// checkAgainstOracle asks n random questions, or all if n is 0.
func checkAgainstOracle(t *testing.T, g generator, in *policy.Input, out *policy.Output, n int) {
	t.Helper()
	d := load(out, in)
	all := newSpace(in)
	if all.size() == 0 {
		return
	}
	ask := func(q question) {
		if got, want := d.allows(selfAddr(in, q.self), q), oracle(in, q); got != want {
			dump, _ := json.MarshalIndent(in, "", " ")
			t.Fatalf("%+v: compiled %v, oracle %v\nidentity %d\nendpoint %+v\n%s",
				q, got, want, d.identity(q.peer), out.Endpoints, dump)
		}
	}
	if n == 0 {
		for i := range all.size() {
			ask(all.at(i))
		}
		return
	}
	for range n {
		ask(all.at(g.r.IntN(all.size())))
	}
}

func TestDifferential(t *testing.T) {
	for seed := range uint64(2000) {
		g := newGenerator(seed)
		in := g.input()
		out := policy.Compile(*in, nil)
		if (len(out.Problems) > 0) != unknownPeers(in) {
			t.Fatalf("seed %d: %v", seed, out.Problems)
		}
		n := 300
		if seed%100 == 0 {
			n = 0
		}
		checkAgainstOracle(t, g, in, &out, n)
	}
}

func FuzzDifferential(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		g := newGenerator(seed)
		in := g.input()
		out := policy.Compile(*in, nil)
		checkAgainstOracle(t, g, in, &out, 2000)
		sequence(t, g, in, 4, seed%2 == 0, &transitionStats{})
	})
}
