package agent

import (
	"net/netip"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/tunnel"
)

// compileNodes gives the other nodes their ids and says what pw_nodes,
// pw_node_v6 and pw_node_ids shall hold.
func (p *peers) compileNodes(in peerInput) (ids map[string]uint32, errs []error) {
	ids = make(map[string]uint32)
	nodes := make(map[uint32]maps.Node)
	byAddr := make(map[maps.Addr]uint32)
	v6 := make(map[uint32]maps.NodeV6)
	if in.selfAddr.IsValid() {
		nodes[selfNode] = maps.Node{Addr: maps.ToAddr(in.selfAddr)}
	}
	for _, n := range in.nodes {
		if n.Name == in.self {
			v6[selfNode] = nodeV6(n)
		}
		if n.Name == in.self || !n.Addr.IsValid() {
			continue
		}
		addr := maps.ToAddr(n.Addr)
		id, err := p.ids.get(n.Name, addr)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ids[n.Name] = id
		v6[id] = nodeV6(n)
		if nodes[id], err = nodeEntry(n, in); err != nil {
			errs = append(errs, err)
		}
		byAddr[addr] = id
	}
	p.nodes.Desire(nodes)
	p.nodesV6.Desire(v6)
	p.nodeIDs.Desire(byAddr)
	return ids, errs
}

// nodeV6 is what pw_node_v6 holds of a node: what precedes the last 32 bits of
// its pods' addresses and of its own. Every agent must come to the same of a
// node, for one writes by it and the other reads.
func nodeV6(n tunnel.NodeInfo) (v maps.NodeV6) {
	head := func(a netip.Addr) maps.Addr {
		p, _ := a.Prefix(96)
		return maps.ToAddr(p.Addr())
	}
	for _, p := range n.PodCIDRs {
		if p.Addr().Is6() {
			v.Pods = head(p.Masked().Addr())
			break
		}
	}
	for _, a := range n.InternalIPs {
		if a.Is6() {
			v.Host = head(a)
			break
		}
	}
	return v
}

// compiledPeers is what the maps of addresses shall hold.
type compiledPeers struct {
	addrs     map[maps.Addr]maps.Peer
	prefixes  map[maps.PrefixKey]maps.Peer
	endpoints map[maps.Addr]maps.Endpoint

	deltas bool        // addrs and prefixes are those that may be different
	gone   []maps.Addr // of addrs, then
}

// compilePeers joins what the tunnel knows of an address (node and flags)
// with what policy does (identity). An address that only one of them names
// has the rest from the longest prefix around it. deltas: prefixes are as they
// were, and so are addresses that no Delta names.
func (p *peers) compilePeers(in peerInput, deltas bool) compiledPeers {
	c := compiledPeers{deltas: deltas}
	if deltas {
		c.addrs = make(map[maps.Addr]maps.Peer, len(in.tunnel.Delta.Addrs)+len(in.policy.Delta.Addrs))
		for _, list := range [][]netip.Addr{in.tunnel.Delta.Addrs, in.policy.Delta.Addrs} {
			for _, a := range list {
				k := maps.ToAddr(a)
				v, ok := p.peer(in, a, k)
				if !ok {
					c.gone = append(c.gone, k)
					continue
				}
				c.addrs[k] = v
			}
		}
	} else {
		c.prefixes = p.compilePrefixes(in)
		c.addrs = make(map[maps.Addr]maps.Peer, len(in.tunnel.Addrs))
		p.nodePorts = make(map[maps.Addr]struct{})
		for a := range in.tunnel.Addrs {
			k := maps.ToAddr(a)
			c.addrs[k], _ = p.peer(in, a, k)
		}
		for a := range in.policy.Addrs {
			if _, done := in.tunnel.Addrs[a]; !done {
				k := maps.ToAddr(a)
				c.addrs[k], _ = p.peer(in, a, k)
			}
		}
	}
	c.endpoints = make(map[maps.Addr]maps.Endpoint, len(in.endpoints))
	for a, ep := range in.endpoints {
		k := maps.ToAddr(a)
		tables := in.policy.Endpoints[ep.pod]
		peer, ok := c.addrs[k]
		if !ok && deltas {
			peer, _ = p.addrs.Desired(k)
		}
		_, device := ep.Device()
		v := maps.Endpoint{
			Id:        ep.ID,
			Ifindex:   uint32(device),
			PolicyIn:  tables.In,
			PolicyOut: tables.Out,
			Identity:  peer.Identity,
			Slot:      p.slot(k),
		}
		copy(v.Mac[:], ep.MAC)
		// What is over the veth has no peer to redirect to.
		if ep.Over != "" || in.qdiscs[ep.HostIfindex].Out != "" {
			v.Flags |= maps.EndpointQdisc
		}
		c.endpoints[k] = v
	}
	return c
}

// compilePrefixes joins what is known of prefixes.
func (p *peers) compilePrefixes(in peerInput) map[maps.PrefixKey]maps.Peer {
	p.ways, p.identities = newLPM[maps.Peer](), newLPM[uint32]()
	for prefix, t := range in.tunnel.Prefixes {
		if k, err := maps.ToPrefix(prefix); err == nil {
			p.ways.set(k, maps.Peer{Node: p.byName[t.Node], Flags: t.Flags})
		}
	}
	for prefix, id := range in.policy.Prefixes {
		if k, err := maps.ToPrefix(prefix); err == nil {
			p.identities.set(k, id)
		}
	}
	prefixes := make(map[maps.PrefixKey]maps.Peer, len(p.ways.m)+len(p.identities.m))
	prefix := func(k maps.PrefixKey) {
		v, _ := p.ways.covering(k)
		v.Identity = p.identity(k)
		slot, ok := p.prefixSlots.m[k]
		if !ok {
			slot = p.gens.alloc()
			p.prefixSlots.set(k, slot)
		}
		v.Slot = slot
		prefixes[k] = v
	}
	for k := range p.ways.m {
		prefix(k)
	}
	for k := range p.identities.m {
		prefix(k)
	}
	return prefixes
}

// identity of what is in a prefix and has none of its own.
func (p *peers) identity(k maps.PrefixKey) uint32 {
	if id, ok := p.identities.covering(k); ok {
		return id
	}
	return maps.IdentityWorld
}

// peer is the entry of an address; false: it has none. compilePrefixes comes
// first.
func (p *peers) peer(in peerInput, a netip.Addr, k maps.Addr) (maps.Peer, bool) {
	whole := maps.PrefixKey{Len: 128, Addr: k.B}
	delete(p.nodePorts, k)
	t, isPeer := in.tunnel.Addrs[a]
	id, isMember := in.policy.Addrs[a]
	if !isPeer && !isMember {
		return maps.Peer{}, false
	}
	v := maps.Peer{Node: p.byName[t.Node], Flags: t.Flags}
	if !isPeer {
		v, _ = p.ways.covering(whole)
	}
	if !isMember {
		id = p.identity(whole)
	}
	v.Identity, v.Slot = id, p.slot(k)
	if v.Flags&maps.PeerNodePort != 0 {
		p.nodePorts[k] = struct{}{}
	}
	return v, true
}
