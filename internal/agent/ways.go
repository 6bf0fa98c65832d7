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

// readWays asks the kernel how it reaches the other nodes: the tunnel's
// endpoints and, where pods may be routed to directly, the other family's
// addresses too. Peers are dirty when an answer differs from the last.
func (a *Agent) readWays() {
	w := &a.world
	overlay := 0
	for _, d := range w.devices {
		if d.Name == node.OverlayName {
			overlay = d.Index
		}
	}
	a.readLearned()
	ways := make(map[netip.Addr]node.Way, len(w.nodes))
	var errs []error
	for _, n := range w.nodes {
		if n.Name == a.opt.NodeName || !n.Addr.IsValid() {
			continue
		}
		addrs := []netip.Addr{n.Addr}
		if a.opt.Mode.Routes() {
			addrs = n.InternalIPs
		}
		for _, addr := range addrs {
			way, ok, err := a.stack.Way(addr)
			if err != nil {
				errs = append(errs, fmt.Errorf("Node %s: %w", n.Name, err))
			}
			if l, known := w.learned[addr]; known && addr == n.Addr {
				way.MTU = min(way.MTU, l.mtu+way.MTU-tunnel.TunnelMTU(way.MTU, addr))
			}
			if ok && way.Device != overlay {
				ways[addr] = way
			}
		}
	}
	a.problem("ways to nodes", "", errors.Join(errs...))
	if !maps.Equal(ways, w.ways) {
		w.ways = ways
		a.dirty.peers = true
	}
}

// directWays are the ways to a node by which its pods of each family are
// routed to. ok is false when they go through the tunnel; err says why they
// must although the mode asks for routing.
func directWays(n tunnel.NodeInfo, mode tunnel.Mode, ways map[netip.Addr]node.Way) (v4, v6 node.Way, ok bool, err error) {
	if !mode.Routes() {
		return v4, v6, false, nil
	}
	by := make(map[bool]node.Way) // is IPv4
	for _, addr := range n.InternalIPs {
		if way, known := ways[addr]; known && !by[addr.Is4()].Nexthop.IsValid() {
			by[addr.Is4()] = way
		}
	}
	v4, v6 = by[true], by[false]
	for _, cidr := range n.PodCIDRs {
		way := by[cidr.Addr().Is4()]
		if !way.Nexthop.IsValid() {
			if mode == tunnel.ModeDirect {
				err = fmt.Errorf("Node %s: no way to an address of the family of its pod range %s; its pods are reached through the tunnel", n.Name, cidr)
			}
			return v4, v6, false, err
		}
		if !mode.Direct(way.Onlink) {
			return v4, v6, false, nil
		}
	}
	if v4.Nexthop.IsValid() && v6.Nexthop.IsValid() && v4.Device != v6.Device {
		return v4, v6, false, fmt.Errorf("Node %s: IPv4 and IPv6 lead there by different devices; its pods are reached through the tunnel", n.Name)
	}
	return v4, v6, true, nil
}

// nodeEntry is what pw_nodes holds of a peer. Without a way or over IPv6 it
// has no header, and the tunnel device sends.
func nodeEntry(n tunnel.NodeInfo, in peerInput) (dpmaps.Node, error) {
	v := dpmaps.Node{Addr: dpmaps.ToAddr(n.Addr)}
	copy(v.Mac[:], n.MAC)
	v4, v6, direct, err := directWays(n, in.mode, in.ways)
	if direct {
		v.Flags = dpmaps.NodeDirect
		v.Nexthop, v.Nexthop6 = dpmaps.ToAddr(v4.Nexthop), dpmaps.ToAddr(v6.Nexthop)
		v.Ifindex = uint32(max(v4.Device, v6.Device))
	}
	if in.plain {
		v.Flags |= dpmaps.NodePlain
	}
	way, ok := in.ways[n.Addr]
	if !ok {
		return v, err
	}
	v.Mtu = uint16(max(0, min(tunnel.TunnelMTU(way.MTU, n.Addr), 0xffff)))
	if !n.Addr.Is4() || !in.selfAddr.Is4() || direct && v.Nexthop != dpmaps.ToAddr(way.Nexthop) {
		return v, err
	}
	header, sum, herr := tunnel.Header(tunnel.HeaderInput{
		Local: in.selfAddr, Peer: n.Addr, PeerMAC: n.MAC, VNI: in.vni, Port: node.OverlayPort,
	})
	if herr != nil {
		return v, errors.Join(err, fmt.Errorf("Node %s: %w", n.Name, herr))
	}
	v.Header, v.HeaderSum = header, sum
	v.Ifindex = uint32(way.Device)
	v.Nexthop = dpmaps.ToAddr(way.Nexthop)
	v.Mtu = tunnel.HeaderMTU(way.MTU)
	v.Flags |= dpmaps.NodeHeader
	if in.mode.IPIP() && !direct {
		v.Flags |= dpmaps.NodeIPIP
	}
	return v, err
}

// hostRoute is the host's own route for one that the tunnel's compiler asks
// for.
func (a *Agent) hostRoute(r tunnel.Route) node.Route {
	w := &a.world
	n := node.Route{Dst: r.Dst, Blackhole: r.Kind == tunnel.RouteBlackhole}
	if n.Blackhole {
		return n
	}
	v4 := r.Dst.Addr().Is4()
	for _, ip := range w.self.InternalIPs {
		if ip.Is4() == v4 {
			n.Src = ip
			break
		}
	}
	for _, peer := range w.nodes {
		if peer.Name != r.Node {
			continue
		}
		if way4, way6, direct, _ := directWays(peer, a.opt.Mode, w.ways); direct {
			way := way6
			if v4 {
				way = way4
			}
			n.Via, n.Device = way.Nexthop, way.Device
		}
	}
	return n
}
