package main

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/podweir/podweir/internal/maps"
)

// Generation slots, besides each pod's own.
const (
	slotNodes = 8
	slotWide  = 9
)

var (
	serviceRange  = netip.MustParsePrefix("10.98.0.0/16")
	serviceRange6 = netip.MustParsePrefix("fd00:10:98::/112")
)

// service is a cluster address with one backend.
type service struct {
	addr, addr6 netip.Addr
	set         uint32
	backend     func(*world) *pod
}

var (
	localService = service{
		netip.MustParseAddr("10.98.235.247"), netip.MustParseAddr("fd00:10:98::f7"), 1,
		func(w *world) *pod { return w.local },
	}
	remoteService = service{
		netip.MustParseAddr("10.98.235.248"), netip.MustParseAddr("fd00:10:98::f8"), 2,
		func(w *world) *pod { return w.remote },
	}
)

const (
	servicePort = 80
	nodePort    = 30080 // and the number of the service
)

func (s service) ip(v6 bool) netip.Addr {
	if v6 {
		return s.addr6
	}
	return s.addr
}

// fill writes what the agents of both nodes would have in their maps.
func (w *world) fill() error {
	return errors.Join(w.a.know(w, w.b), w.b.know(w, w.a), w.useHeader(false))
}

func (n *node) know(w *world, other *node) error {
	m := n.maps()
	var errs []error
	put := func(err error) { errs = append(errs, err) }
	for _, p := range []*pod{w.client, w.local, w.remote} {
		for _, a := range []netip.Addr{p.addr, p.addr6} {
			peer := maps.Peer{Identity: maps.IdentityPod, Slot: p.slot, Flags: maps.PeerPod}
			if p.node == n {
				ep := maps.Endpoint{
					Id: p.slot, Ifindex: uint32(p.ifindex), Identity: maps.IdentityPod,
					Slot: p.slot, Mac: [6]byte(p.mac),
				}
				put(m.Endpoints.Put(maps.ToAddr(a), ep))
			} else {
				peer.Slot += 16
				peer.Node = other.id
			}
			put(m.Addrs.Put(maps.ToAddr(a), peer))
		}
	}
	for _, v6 := range []bool{false, true} {
		put(m.Addrs.Put(maps.ToAddr(n.ip(v6)), maps.Peer{
			Identity: maps.IdentityHost, Slot: slotNodes, Flags: maps.PeerHost | maps.PeerNodePort | maps.PeerInternal,
		}))
		put(m.Addrs.Put(maps.ToAddr(other.ip(v6)), maps.Peer{
			Identity: maps.IdentityRemoteNode, Slot: slotNodes, Node: other.id, Flags: maps.PeerNode | maps.PeerNodePort,
		}))
	}
	for prefix, peer := range map[netip.Prefix]maps.Peer{
		n.cidr:       {Identity: maps.IdentityPod, Flags: maps.PeerPod | maps.PeerLocal},
		n.cidr6:      {Identity: maps.IdentityPod, Flags: maps.PeerPod | maps.PeerLocal},
		other.cidr:   {Identity: maps.IdentityPod, Node: other.id, Flags: maps.PeerPod},
		other.cidr6:  {Identity: maps.IdentityPod, Node: other.id, Flags: maps.PeerPod},
		serviceRange: {Flags: maps.PeerService}, serviceRange6: {Flags: maps.PeerService},
		netip.PrefixFrom(netip.IPv6Unspecified(), 0): {Identity: maps.IdentityWorld},
	} {
		peer.Slot = slotWide
		key, err := maps.ToPrefix(prefix)
		put(err)
		put(m.Prefixes.Put(key, peer))
	}
	put(m.NodeIDs.Put(maps.ToAddr(other.addr), other.id))
	own := maps.DevAddrs{V4: maps.ToAddr(n.addr), V6: maps.ToAddr(n.addr6)}
	put(errors.Join(m.DevAddrs.Put(0, own), m.DevAddrs.Put(uint32(n.wire), own)))
	for _, s := range []service{localService, remoteService} {
		for _, v6 := range []bool{false, true} {
			put(n.addService(s, s.backend(w), v6))
		}
	}
	return errors.Join(errs...)
}

func (n *node) addService(s service, backend *pod, v6 bool) error {
	m, addr, set := n.maps(), maps.ToAddr(s.ip(v6)), s.set*2
	if v6 {
		set++
	}
	errs := []error{
		m.Backends.Put(maps.BackendKey{Set: set}, maps.Backend{Addr: maps.ToAddr(backend.ip(v6)), Port: podPort}),
		m.Services.Put(maps.ServiceKey{Addr: addr}, maps.Service{Flags: maps.ServiceAddrOwned}),
	}
	for _, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
		key := maps.ServiceKey{Addr: addr, Port: servicePort, Proto: proto}
		svc := maps.Service{Id: set, Set: set, Count: 1, ExtSet: set, ExtCount: 1}
		errs = append(errs, m.Services.Put(key, svc),
			m.BackendStates.Put(
				maps.BackendStateKey{Addr: maps.ToAddr(backend.ip(v6)), Service: set, Port: podPort},
				maps.BackendIn|maps.BackendCluster|maps.BackendExt|maps.BackendServing))
		// The same as a NodePort.
		key.Addr, key.Port = maps.ToAddr(zeroOf(s.ip(v6))), nodePort+uint16(s.set)
		svc.Flags = maps.ServiceExternal
		errs = append(errs, m.Services.Put(key, svc))
	}
	return errors.Join(errs...)
}

// useHeader switches both nodes between the tunnel device and headers that
// the programs put on and take off themselves.
func (w *world) useHeader(own bool) error {
	return errors.Join(w.a.setPeer(w.b, own), w.b.setPeer(w.a, own))
}

// useIPIP has IPv4 go in IPv4, or not.
func (w *world) useIPIP(on bool) error {
	set := func(n, other *node) error {
		peer, _, err := n.maps().Nodes.Get(other.id)
		if err != nil {
			return err
		}
		peer.Flags = maps.NodeHeader
		if on {
			peer.Flags |= maps.NodeIPIP
		}
		return n.maps().Nodes.Put(other.id, peer)
	}
	return errors.Join(set(w.a, w.b), set(w.b, w.a))
}

func (n *node) setPeer(other *node, own bool) error {
	peer := maps.Node{
		Addr: maps.ToAddr(other.addr), Nexthop: maps.ToAddr(other.addr),
		Nexthop6: maps.ToAddr(other.addr6), Ifindex: uint32(n.wire), Mac: [6]byte(other.tunMAC),
	}
	if own {
		peer.Mtu, peer.Flags = podMTU, maps.NodeHeader
		peer.Header, peer.HeaderSum = n.header(other)
	}
	self := maps.Node{Addr: maps.ToAddr(n.addr)}
	return errors.Join(n.maps().Nodes.Put(0, self), n.maps().Nodes.Put(other.id, peer))
}

// header is struct pw_node's: see bpf/types.h.
func (n *node) header(other *node) (h [64]byte, sum uint16) {
	src, dst := n.addr.As4(), other.addr.As4()
	binary.BigEndian.PutUint16(h[12:], 0x0800)
	ip := h[14:34]
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	binary.BigEndian.PutUint16(h[36:], vxlanPort)
	h[42] = 0x08
	binary.BigEndian.PutUint32(h[46:], vni<<8)
	copy(h[50:], other.tunMAC)
	copy(h[56:], []byte{0x02, 'p', 'w', 0, 0, 0x01})
	binary.BigEndian.PutUint16(h[62:], 0x0800)
	var total uint32
	for i := 0; i < len(ip); i += 2 {
		total += uint32(binary.NativeEndian.Uint16(ip[i:]))
	}
	for total>>16 != 0 {
		total = total&0xffff + total>>16
	}
	return h, uint16(total)
}

// bump tells a node's programs that something about a pod changed.
func (n *node) bump(slot uint32) error {
	gen, _, err := n.maps().Gens.Get(slot)
	if err != nil {
		return err
	}
	return n.maps().Gens.Put(slot, gen+1)
}
