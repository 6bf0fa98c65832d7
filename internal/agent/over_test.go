package agent

import (
	"context"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
)

// A pod with a device over its veth from the beginning is known by that one
// everywhere; others' filters on the veth are no reason to do anything.
func TestOver(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.put(testPod("client", "node-a", "10.244.80.65", nil))
	b.done()
	ep := testEndpoint("client", "", "10.244.80.65")
	ep.HostIfName, ep.Over, ep.OverIfindex = "pw0123456789a", "pws0123456789a", 12
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	have, ok, err := b.dp.set.Endpoints.Get(ip("10.244.80.65"))
	if err != nil || !ok || have.Ifindex != 12 || have.Flags&maps.EndpointQdisc == 0 {
		t.Errorf("its entry: %+v, %v, %v", have, ok, err)
	}
	if got := b.a.podOnDevice(12); got != "default/client" {
		t.Errorf("device 12 is of %q", got)
	}
	b.await("the pod", func() bool {
		never := func(what string) { t.Errorf("a step without need: %s", what) }
		b.dp.steps, b.stack.steps = never, never
		return b.a.full
	})
	b.stack.event(func() { b.stack.qdiscs = map[int]node.Qdisc{11: {In: "filters", Out: "tbf"}} })
	b.await("its qdiscs", func() bool { return b.a.world.qdiscs[11].In != "" })
	s, err := b.a.Status(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	roles := map[string]string{}
	for _, d := range s.Devices {
		roles[d.Name] = d.Role + " " + d.Qdisc + " " + d.Filters + d.Bypassed
	}
	if roles[ep.Over] != "pod  " || roles[ep.HostIfName] != "wire tbf filters" {
		t.Errorf("status says %q", roles)
	}
	if list := b.a.EndpointList().Endpoints; len(list) != 1 || list[0].HostIfName != ep.Over || list[0].HostIfindex != 12 {
		t.Errorf("endpoints %+v", list)
	}
}
