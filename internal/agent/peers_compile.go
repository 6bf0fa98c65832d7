package agent

import (
	"net/netip"

	"github.com/podweir/podweir/internal/maps"
)

// compileNodes gives the other nodes their ids and says what pw_nodes and
// pw_node_ids shall hold.
func (p *peers) compileNodes(in peerInput) (ids map[string]uint32, errs []error) {
	ids = make(map[string]uint32)
	nodes := make(map[uint32]maps.Node)
	byAddr := make(map[maps.Addr]uint32)
	if in.selfAddr.IsValid() {
		nodes[selfNode] = maps.Node{Addr: maps.ToAddr(in.selfAddr)}
	}
	for _, n := range in.nodes {
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
		if nodes[id], err = nodeEntry(n, in); err != nil {
			errs = append(errs, err)
		}
		byAddr[addr] = id
	}
	p.nodes.Desire(nodes)
	p.nodeIDs.Desire(byAddr)
	return ids, errs
}

// compilePeers joins what the tunnel knows of an address (node and flags)
// with what policy does (identity). An address that only one of them names
// has the rest from the longest prefix around it.
func (p *peers) compilePeers(in peerInput, nodes map[string]uint32) (map[maps.Addr]maps.Peer, map[maps.PrefixKey]maps.Peer, map[maps.Addr]maps.Endpoint) {
	ways := newLPM[maps.Peer]()
	for prefix, t := range in.tunnel.Prefixes {
		if k, err := maps.ToPrefix(prefix); err == nil {
			ways.set(k, maps.Peer{Node: nodes[t.Node], Flags: t.Flags})
		}
	}
	identities := newLPM[uint32]()
	for prefix, id := range in.policy.Prefixes {
		if k, err := maps.ToPrefix(prefix); err == nil {
			identities.set(k, id)
		}
	}
	identity := func(k maps.PrefixKey) uint32 {
		if id, ok := identities.covering(k); ok {
			return id
		}
		return maps.IdentityWorld
	}
	prefixes := make(map[maps.PrefixKey]maps.Peer, len(ways.m)+len(identities.m))
	prefix := func(k maps.PrefixKey) {
		v, _ := ways.covering(k)
		v.Identity = identity(k)
		slot, ok := p.prefixSlots.m[k]
		if !ok {
			slot = p.gens.alloc()
			p.prefixSlots.set(k, slot)
		}
		v.Slot = slot
		prefixes[k] = v
	}
	for k := range ways.m {
		prefix(k)
	}
	for k := range identities.m {
		prefix(k)
	}
	addrs := make(map[maps.Addr]maps.Peer, len(in.tunnel.Addrs))
	p.nodePorts = nil
	addr := func(a netip.Addr) {
		k := maps.ToAddr(a)
		whole := maps.PrefixKey{Len: 128, Addr: k.B}
		v, _ := ways.covering(whole)
		if t, ok := in.tunnel.Addrs[a]; ok {
			v = maps.Peer{Node: nodes[t.Node], Flags: t.Flags}
		}
		id, ok := in.policy.Addrs[a]
		if !ok {
			id = identity(whole)
		}
		v.Identity, v.Slot = id, p.slot(k)
		addrs[k] = v
		if v.Flags&maps.PeerNodePort != 0 {
			p.nodePorts = append(p.nodePorts, k)
		}
	}
	for a := range in.tunnel.Addrs {
		addr(a)
	}
	for a := range in.policy.Addrs {
		if _, done := in.tunnel.Addrs[a]; !done {
			addr(a)
		}
	}
	endpoints := make(map[maps.Addr]maps.Endpoint, len(in.endpoints))
	for a, ep := range in.endpoints {
		k := maps.ToAddr(a)
		tables := in.policy.Endpoints[ep.pod]
		v := maps.Endpoint{
			Id:        ep.ID,
			Ifindex:   uint32(ep.HostIfindex),
			PolicyIn:  tables.In,
			PolicyOut: tables.Out,
			Identity:  addrs[k].Identity,
			Slot:      p.slot(k),
		}
		copy(v.Mac[:], ep.MAC)
		endpoints[k] = v
	}
	return addrs, prefixes, endpoints
}
