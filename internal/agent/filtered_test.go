package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/table"
)

// The steps by which filters at a pod's ingress get their say, and lose it: at
// none of them is a packet left to the filters that nobody would take.
func TestFiltered(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testPod("client", "node-a", "10.244.80.65", nil))
	b.done()
	ep := testEndpoint("client", "", "10.244.80.65")
	ep.HostIfName = "pw0123456789a"
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	var steps []string
	step := func(what string) {
		m, err := b.dp.set.Filtered.Dump()
		if err != nil {
			t.Error(err)
		}
		if _, on := m[11]; on {
			what += ", left to the filters"
		}
		steps = append(steps, what)
	}
	b.await("the pod", func() bool {
		b.dp.steps, b.stack.steps = step, step
		return b.a.full
	})
	reported := func() bool {
		return slices.ContainsFunc(b.a.problems["pods' own limits"], func(p table.Problem) bool {
			return p.Object == "Pod default/client" && strings.Contains(p.Err, "pw0123456789a") && strings.Contains(p.Err, "no macvlan")
		})
	}
	is := func(what string, on bool, bypassed bool, want ...string) {
		t.Helper()
		b.await(what, func() bool {
			m, err := b.dp.set.Filtered.Dump()
			if err != nil {
				t.Fatal(err)
			}
			ready := len(m) == 0
			if on {
				ready = len(m) == 2 && m[11] == 1011 && m[1011] == 11
			}
			return ready && reported() == bypassed && len(steps) >= len(want)
		})
		s, err := b.a.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range s.Devices {
			if d.Role == "pod" && ((d.Filters != "") != on || (d.Bypassed != "") != bypassed) {
				t.Errorf("%s: status says %+v", what, d)
			}
		}
		b.await(what, func() bool {
			if fmt.Sprint(steps) != fmt.Sprint(want) {
				t.Errorf("%s: steps %q, want %q", what, steps, want)
			}
			steps = nil
			return true
		})
	}
	filters := map[int]node.Qdisc{11: {In: "filters"}}
	b.stack.event(func() { b.stack.qdiscs = filters })
	is("filters", true, false, "filter 11 true", "make pwo0123456789a", "raise pwo0123456789a")
	// Somebody takes it away.
	b.stack.event(func() { delete(b.stack.covers, 11) })
	is("it is made again", true, false, "filter 11 true, left to the filters", "make pwo0123456789a, left to the filters", "raise pwo0123456789a, left to the filters")
	b.stack.event(func() { b.stack.noCover = errors.New("this kernel has no macvlan") })
	is("it cannot be made", false, true, "filter 11 true, left to the filters", "remove pwo0123456789a")
	b.stack.event(func() { b.stack.noCover = nil })
	is("it can", true, false, "filter 11 true", "make pwo0123456789a", "raise pwo0123456789a")
	b.stack.event(func() { b.stack.qdiscs = nil })
	is("no filters", false, false, "remove pwo0123456789a", "filter 11 false")
	// Nothing to do costs nothing.
	b.stack.event(func() { b.stack.steps = func(string) { t.Error("a step without need") } })
	is("no filters still", false, false)
}
