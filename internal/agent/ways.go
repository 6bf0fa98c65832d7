package agent

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"

	dpmaps "github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/tunnel"
)

// readWays asks the kernel how it reaches the other nodes. Peers are dirty
// when an answer differs from the last.
func (a *Agent) readWays() {
	w := &a.world
	ways := make(map[netip.Addr]node.Way, len(w.nodes))
	var errs []error
	for _, n := range w.nodes {
		if n.Name == a.opt.NodeName || !n.Addr.IsValid() {
			continue
		}
		way, ok, err := a.stack.Way(n.Addr)
		if err != nil {
			errs = append(errs, fmt.Errorf("Node %s: %w", n.Name, err))
		}
		if ok && way.Device != w.overlay {
			ways[n.Addr] = way
		}
	}
	a.problem("ways to nodes", "", errors.Join(errs...))
	if !maps.Equal(ways, w.ways) {
		w.ways = ways
		a.dirty.peers = true
	}
}

// nodeEntry is what pw_nodes holds of a peer. Without a way or over IPv6 it
// has no header, and the tunnel device sends.
func nodeEntry(n tunnel.NodeInfo, self netip.Addr, vni uint32, ways map[netip.Addr]node.Way) dpmaps.Node {
	v := dpmaps.Node{Addr: dpmaps.ToAddr(n.Addr)}
	copy(v.Mac[:], n.MAC)
	way, ok := ways[n.Addr]
	if !ok {
		return v
	}
	header, sum, err := tunnel.Header(tunnel.HeaderInput{
		Local: self, Peer: n.Addr, PeerMAC: n.MAC, VNI: vni, Port: node.OverlayPort,
	})
	if err != nil {
		return v
	}
	v.Header, v.HeaderSum = header, sum
	v.Ifindex = uint32(way.Device)
	v.Nexthop = dpmaps.ToAddr(way.Nexthop)
	v.Mtu = tunnel.HeaderMTU(way.MTU)
	return v
}
