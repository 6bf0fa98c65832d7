package agent

import (
	"net/netip"
	"slices"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
)

// leaving is what flows of the world depend on besides its addresses: how the
// node's routes lead there, and which addresses the node has.
type leaving struct {
	known  bool
	routes uint64 // see [node.Manager.WorldRoutes]
	addrs  []netip.Addr
	moved  bool // the flows have not been told yet
}

// readLeaving notes whether something of it has changed. After a start it
// has: nobody knows what happened before.
func (a *Agent) readLeaving() {
	l := &a.world.leaving
	routes, err := a.stack.WorldRoutes()
	a.problem("ways to the world", "", err)
	if err != nil {
		return // keep what was known; the next event or tick reads it again
	}
	addrs := node.Addrs(a.world.devices)
	l.moved = l.moved || !l.known || routes != l.routes || !slices.Equal(addrs, l.addrs)
	l.known, l.routes, l.addrs = true, routes, addrs
}

// followLeaving has every flow from or to what is reached by the node's own
// routes decided again with its next packet. By then the programs are on the
// devices that the routes lead to.
func (a *Agent) followLeaving() {
	if a.world.leaving.moved {
		a.peers.bumpWorld()
		a.world.leaving.moved = false
	}
}

// bumpWorld moves the generations of all that is neither of this node nor
// behind a tunnel: the world, and the other nodes' own addresses.
func (p *peers) bumpWorld() {
	const inside = maps.PeerPod | maps.PeerHost | maps.PeerService | maps.PeerLocal
	for k, v := range p.addrs.All() {
		if v.Flags&inside == 0 {
			p.gens.bump(p.slots[k])
		}
	}
	for k, v := range p.prefixes.All() {
		if v.Flags&inside == 0 {
			p.gens.bump(p.prefixSlots.m[k])
		}
	}
}
