package agent

import (
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
)

// What the node reaches by its own routes is decided again when these or its
// addresses change; pods and services are not, nor is anything by an event
// that changed neither.
func TestWorldFollowsRoutesAndAddresses(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	b.await("ready", func() bool { return b.a.full })
	world := maps.PrefixKey{Len: 0}
	type gens struct{ world, otherNode, remotePod uint32 }
	read := func() (g gens) {
		p := b.a.peers
		slot, ok := p.prefixSlots.m[world]
		if !ok {
			t.Error("the world has no slot")
		}
		g.world = p.gens.gens[slot]
		g.otherNode = p.gens.gens[p.slots[maps.ToAddr(netip.MustParseAddr("172.31.0.3"))]]
		g.remotePod = p.gens.gens[p.slots[maps.ToAddr(netip.MustParseAddr("10.244.158.65"))]]
		return g
	}
	var before gens
	b.await("generations", func() bool { before = read(); return before.world > 0 })
	event := func(what string, change func(*fakeStack), moves bool) {
		t.Helper()
		rounds := uint64(0)
		b.await("rounds", func() bool { rounds = b.a.stats.rounds; return true })
		b.stack.mu.Lock()
		change(b.stack)
		b.stack.mu.Unlock()
		b.stack.events <- struct{}{}
		b.await(what, func() bool { return b.a.stats.rounds > rounds && (!moves || read().world > before.world) })
		var now gens
		b.await(what, func() bool { now = read(); return true })
		if !moves && now != before || moves && (now.otherNode == before.otherNode || now.remotePod != before.remotePod) {
			t.Errorf("%s: generations %+v, then %+v", what, before, now)
		}
		before = now
	}
	event("a route changes", func(s *fakeStack) { s.world++ }, true)
	event("nothing of it changes", func(*fakeStack) {}, false)
	event("an address comes", func(s *fakeStack) {
		s.list = append(s.list, node.Device{Index: 3, Name: "eth1", MTU: 1500, Up: true, Addrs: []netip.Addr{netip.MustParseAddr("172.30.0.2")}})
	}, true)
	event("an address goes", func(s *fakeStack) { s.list = s.list[:1] }, true)
}
