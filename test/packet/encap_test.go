package packet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/tunnel"
)

const (
	vni      = 4096
	innerMTU = 1450
)

// outer is the underlay: IPv4, whatever the pods speak.
func outer() family { return families()[0] }

// header is what stands before a packet from one node to another.
func (w *world) header(from, to netip.Addr, far [6]byte) ([tunnel.HeaderLen]byte, uint16) {
	w.t.Helper()
	h, sum, err := tunnel.Header(tunnel.HeaderInput{Local: from, Peer: to, PeerMAC: far[:], VNI: vni, Port: 4789})
	if err != nil {
		w.t.Fatal(err)
	}
	return h, sum
}

// ways gives both peers tunnel headers, as the agent does once it knows the
// way to them.
func (w *world) ways() {
	w.t.Helper()
	for id, peer := range map[uint32]netip.Addr{nodeIDB: outer().nodeB, nodeIDC: outer().nodeC} {
		far := map[uint32][6]byte{nodeIDB: mac(0xb), nodeIDC: mac(0xc)}[id]
		n := maps.Node{
			Addr: maps.ToAddr(peer), Nexthop: maps.ToAddr(peer), Ifindex: w.index(devWire),
			Mtu: innerMTU, Mac: far, Flags: maps.NodeHeader,
		}
		n.Header, n.HeaderSum = w.header(outer().nodeA, peer, far)
		put(w, w.set.Nodes, id, n)
		put(w, w.set.NodeIDs, maps.ToAddr(peer), id)
	}
}

// wrap puts a frame behind the header that a node sends us.
func (w *world) wrap(from netip.Addr, frame []byte) []byte {
	w.t.Helper()
	h, _ := w.header(from, outer().nodeA, mac(0xa))
	copy(h[62:], frame[12:14])
	out := append(h[:], frame[14:]...)
	binary.BigEndian.PutUint16(out[16:], uint16(len(out)-14))
	binary.BigEndian.PutUint16(out[34:], 0xc123)
	binary.BigEndian.PutUint16(out[38:], uint16(len(out)-34))
	mend(out)
	binary.BigEndian.PutUint16(out[40:], 0)
	return out
}

func (w *world) arrive(from netip.Addr, fr frame) *result {
	w.t.Helper()
	return w.run(w.at(fromNetdev, w.wrap(from, fr.bytes(w.t))))
}

// Packets get the header from us, the first of a flow like the others; those
// that do not fit go to the device.
func TestEncap(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		c := w.conn(40000)
		first := c.send(syn).is(fwdEncap, miss, created)
		w.encapsulated(first, c.out.src, c.answer.src)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		for i, engine := range [][]reason{{hitNew, confirmed}, {hit}, {hit}} {
			c.out.payload = make([]byte, i)
			r := c.send(ack).is(fwdEncap, engine...)
			w.encapsulated(r, c.out.src, c.answer.src)
			// One way through the underlay for all of a flow.
			if !bytes.Equal(r.out[34:36], first.out[34:36]) {
				t.Fatalf("outer source port %x, the first packet's %x", r.out[34:36], first.out[34:36])
			}
		}
		w.bump(slotRemote)
		c.send(ack).is(fwdEncap, stale, hit)
		headers := 20 + 20
		if w.f.v6 {
			headers = 40 + 20
		}
		c.out.payload = make([]byte, innerMTU-headers)
		w.encapsulated(c.send(ack).is(fwdEncap, hit), c.out.src, c.answer.src)
		c.out.payload = make([]byte, innerMTU-headers+1)
		if w.f.v6 {
			w.tooBig(w.at(fromPod, c.out.bytes(t)), innerMTU, hit)
		} else {
			c.send(ack).is(fwdTunnel, hit) // it may be fragmented
		}
		// A segmented packet of a kind that the kernel does not put a header
		// before (a test run's has none): unharmed, to the device.
		s := w.at(fromPod, c.out.bytes(t))
		s.gso = 700
		w.run(s).is(fwdTunnel, hit).leaves(c.out.src, c.answer.src)
		// Packets that make no flow have ports of their own flows, too.
		ports := make(map[uint16]bool)
		for i := range uint16(8) {
			r := w.pod(devClient, tcp(ap(w.f.client, 50000+i), ap(w.f.remote, podPort), rst)).is(fwdEncap, miss)
			ports[binary.BigEndian.Uint16(r.out[34:])] = true
		}
		if len(ports) < 4 {
			t.Fatalf("8 flows have the outer source ports %v", ports)
		}
	})
}

func (w *world) encapsulated(r *result, src, dst netip.AddrPort) {
	w.t.Helper()
	d, ok := decode(r.out)
	sport, dport := d.ports()
	if !ok || d.src != outer().nodeA || d.dst != outer().nodeB || d.proto != maps.ProtoUDP || d.ttl != 64 {
		w.t.Fatalf("outer header: %+v", d)
	}
	if dport != 4789 || sport < 0xc000 || int(binary.BigEndian.Uint16(d.upper[4:])) != len(d.upper) {
		w.t.Fatalf("outer ports %d -> %d, length field %x of %d", sport, dport, d.upper[4:6], len(d.upper))
	}
	if v := binary.BigEndian.Uint64(d.upper[8:]); v != 0x0800000000000000|vni<<8 {
		w.t.Fatalf("VXLAN header %016x", v)
	}
	inner := *r
	inner.out = r.out[tunnelHeader:]
	inner.leaves(src, dst)
	if inner.ttl() != 63 || [6]byte(inner.out[:6]) != mac(0xb) {
		w.t.Fatalf("inner TTL %d, MAC %x", inner.ttl(), inner.out[:6])
	}
}

// The congestion bits are seen outside as well (RFC 6040).
func TestEncapKeepsECN(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		c := w.conn(40000)
		c.send(syn)
		for ecn := range byte(4) {
			c.out.flags = ack
			pkt := c.out.bytes(t)
			if w.f.v6 {
				pkt[15] |= ecn << 4
			} else {
				pkt[15] |= ecn
			}
			mend(pkt)
			r := w.run(w.at(fromPod, pkt)).is(fwdEncap, hitNew)
			if got := r.out[15]; got != ecn {
				t.Fatalf("outer TOS %#x for ECN %d", got, ecn)
			}
		}
	})
}

// Known packets lose the header at the device they arrive on.
func TestDecap(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		c := w.conn(40000)
		c.send(syn)
		c.answer.flags = syn | ack
		r := w.arrive(outer().nodeB, c.answer).is(fwdDecap, hitNew).leaves(c.out.dst, c.out.src)
		c.send(ack).is(fwdEncap, hitNew, confirmed)
		for n := range 4 {
			c.answer.flags, c.answer.payload = ack, make([]byte, n)
			r = w.arrive(outer().nodeB, c.answer).is(fwdDecap, hit).leaves(c.out.dst, c.out.src)
		}
		if len(r.out) != len(r.shot.pkt)-tunnelHeader || r.ttl() != 63 || [6]byte(r.out[:6]) != mac(0x41) {
			t.Fatalf("%d bytes of %d, TTL %d, MAC %x", len(r.out), len(r.shot.pkt), r.ttl(), r.out[:6])
		}
	})
}

// First packets lose it, too, and are judged like those that the device takes.
func TestDecapFirst(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		in := tcp(ap(w.f.remote, 7), ap(w.f.client, podPort), syn)
		r := w.arrive(outer().nodeB, in).is(fwdDecap, miss, created).leaves(in.src, in.dst)
		if len(r.out) != len(r.shot.pkt)-tunnelHeader || r.ttl() != 63 || [6]byte(r.out[:6]) != mac(0x41) {
			t.Fatalf("%d bytes of %d, TTL %d, MAC %x", len(r.out), len(r.shot.pkt), r.ttl(), r.out[:6])
		}
		if e := w.entry(in); at(e.From) != nodePlace(nodeIDB) {
			t.Fatalf("comes from %v", at(e.From))
		}
		c := &conn{w: w, out: in, answer: in.back()}
		c.answer.flags = syn | ack
		w.pod(devClient, c.answer).is(fwdEncap, hitNew)
		in.flags = ack
		w.arrive(outer().nodeB, in).is(fwdDecap, hitNew, confirmed)
		// By another node: a lie, and so is what does not live behind this one.
		w.arrive(outer().nodeC, in).is(spoofedFlow)
		in.src = ap(w.f.remote, 8)
		w.arrive(outer().nodeC, in).is(spoofedSource, miss)
		for _, src := range []netip.Addr{w.f.far, w.f.local, w.f.world, w.f.nodeC, w.f.vip} {
			in.src = ap(src, 8)
			w.arrive(outer().nodeB, in).is(spoofedSource, miss)
		}
		// Policy, at the first packet and when it changes.
		in.src, in.flags = ap(w.f.remote, 9), syn
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 1 })
		w.arrive(outer().nodeB, in).is(ingressDenied, miss)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 0 })
		w.arrive(outer().nodeB, in).is(fwdDecap, miss, created)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 1 })
		w.arrive(outer().nodeB, in).is(ingressDenied, stale)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 0 })
		w.arrive(outer().nodeB, in).is(fwdDecap, stale, hitNew)
	})
}

// Whatever is unusual about a tunnel packet is the device's affair, untouched.
func TestNoDecap(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		b := outer().nodeB
		c := w.conn(40000)
		c.send(syn)
		c.answer.flags = syn | ack
		good := func() []byte { return w.wrap(b, c.answer.bytes(t)) }
		change := func(do func([]byte)) []byte {
			pkt := good()
			do(pkt)
			mend(pkt)
			return pkt
		}
		dying := c.answer
		dying.ttl = 1
		elsewhere := c.answer
		elsewhere.dst = ap(w.f.free, 40001)
		for name, pkt := range map[string][]byte{
			"no peer's address":       w.wrap(outer().world, c.answer.bytes(t)),
			"for no pod":              w.wrap(b, elsewhere.bytes(t)),
			"the last hop":            w.wrap(b, dying.bytes(t)),
			"another VNI":             change(func(p []byte) { p[48]++ }),
			"VXLAN flags":             change(func(p []byte) { p[42] = 0x88 }),
			"no VNI":                  change(func(p []byte) { p[42] = 0 }),
			"congestion":              change(func(p []byte) { p[15] = 3 }),
			"an outer fragment":       change(func(p []byte) { p[20] = 0x20 }),
			"another destination":     change(func(p []byte) { p[33]++ }),
			"a source outside":        change(func(p []byte) { p[61] = 2 }),
			"an inner ARP":            change(func(p []byte) { p[62], p[63] = 8, 6 }),
			"an inner fragment":       w.wrap(b, w.fragment(c.answer.with("payload0"), 0, true)),
			"an inner packet cut off": change(func(p []byte) { p[64] ^= 0x50 }),
			"an ICMP error":           w.wrap(b, icmpError(t, w.f.remote, w.f.client, c.answer.back().bytes(t))),
			"a link message":          w.wrap(b, ethernet(0x88cc, make([]byte, 60))),
		} {
			t.Run(name, func(t *testing.T) {
				w.t = t
				w.run(w.at(fromNetdev, pkt)).is(passed)
			})
		}
		w.t = t
		for n := 43; n < len(good()); n++ {
			pkt := good()[:n]
			setLength(pkt, n-14)
			binary.BigEndian.PutUint16(pkt[38:], uint16(n-34))
			mend(pkt)
			w.run(w.at(fromNetdev, pkt)).is(passed)
		}
		w.run(w.at(fromNetdev, good())).is(fwdDecap, hitNew)
		// The node's own, under whatever address.
		own := udp(ap(w.f.client, 40002), ap(w.f.remote, 7))
		w.run(w.at(toOverlay, own.bytes(t))).is(fwdTunnel, miss, created)
		w.arrive(b, own.back()).is(passed)
	})
}

// The tunnel's port is the tunnel's on this node's tunnel address alone: on
// others it may be a service's or a pod's.
func TestPortOfTheTunnel(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		w.service(w.f.vip, 4789, maps.ProtoUDP, maps.Service{
			Id: 77, Set: setLocal, Count: 1, ExtSet: setLocal, ExtCount: 1, Flags: maps.ServiceExternal,
		})
		call := udp(ap(w.f.world, 7), ap(w.f.vip, 4789))
		w.wire(call).is(fwdLocal, miss, created).leaves(call.src, ap(w.f.local, podPort))
		w.wire(call).is(fwdLocal, hitNew)
		w.wire(udp(ap(w.f.world, 7), ap(w.f.client, 4789))).is(fwdLocal, miss, created)
		w.wire(udp(ap(w.f.remote, 7), ap(w.f.client, 4789))).is(spoofedSource, miss)
		w.wire(udp(ap(outer().world, 7), ap(outer().nodeA, 4789))).is(passed)
		// The answer of a service on the host's network, to a client that
		// calls from this port.
		call = udp(ap(w.f.world, 4789), ap(w.f.vipHost, svcPort))
		w.service(w.f.vipHost, svcPort, maps.ProtoUDP, maps.Service{
			Id: 78, Set: setHost, Count: 1, ExtSet: setHost, ExtCount: 1, Flags: maps.ServiceExternal,
		})
		w.wire(call).is(fwdHost, miss, created)
		answer := udp(ap(w.f.nodeA, podPort), call.src)
		w.run(w.at(toNetdev, answer.bytes(t))).is(fwdWire, hitNew).leaves(call.dst, call.src)
		w.run(w.at(toNetdev, udp(ap(outer().nodeA, 0xc001), ap(outer().nodeB, 4789)).bytes(t))).is(passed)
	})
}

// Directly routed nodes: no header, and the wire speaks for their pods.
func TestDirect(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		n, _, err := w.set.Nodes.Get(nodeIDB)
		if err != nil {
			t.Fatal(err)
		}
		n.Flags = uint16(bpf.DpPwNodeFlagsPW_NODE_DIRECT)
		n.Nexthop6 = maps.ToAddr(families()[1].nodeB)
		put(w, w.set.Nodes, nodeIDB, n)
		c := w.conn(40000)
		c.send(syn).is(fwdDirect, miss, created).leaves(c.out.src, c.answer.src)
		c.answer.flags = syn | ack
		w.wire(c.answer).is(fwdLocal, hitNew).leaves(c.out.dst, c.out.src)
		c.send(ack).is(fwdDirect, hitNew, confirmed)
		if r := c.send(ack).is(fwdDirect, hit); r.ttl() != 63 {
			t.Fatalf("TTL %d", r.ttl())
		}
		in := udp(ap(w.f.remote, 7), ap(w.f.client, podPort))
		w.wire(in).is(fwdLocal, miss, created)
		w.pod(devClient, in.back()).is(fwdDirect, hitNew)
		if e := w.entry(in); at(e.From) != nodePlace(nodeIDB) {
			t.Fatalf("comes from %v", at(e.From))
		}
		// Other nodes' pods still have no business on the wire.
		w.wire(udp(ap(w.f.far, 7), ap(w.f.client, podPort))).is(spoofedSource, miss)
		w.wire(udp(ap(w.f.local, 7), ap(w.f.client, podPort))).is(spoofedSource, miss)
	})
}

// The same client port towards two entry nodes and one backend: two flows,
// and every answer returns by the node its question came through.
func TestSourceOutsideTheCluster(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := tcp(ap(w.f.world, 40000), ap(w.f.client, podPort), syn)
		by := func(node netip.Addr, fr frame) *result {
			pkt := fr.bytes(t)
			s := w.tunnelShot(node, pkt)
			copy(s.pkt[6:], []byte{2, 'p', 'w', 0, 0, 2})
			return w.run(s)
		}
		by(w.f.nodeB, fr).is(fwdLocal, miss, created)
		by(w.f.nodeB, fr).is(fwdLocal, hitNew)
		r := by(w.f.nodeC, fr).is(fwdLocal, miss, portChanged)
		d, _ := decode(r.out)
		port, _ := d.ports()
		for id, answer := range map[uint32]frame{
			nodeIDB: tcp(fr.dst, fr.src, syn|ack),
			nodeIDC: tcp(fr.dst, ap(w.f.world, port), syn|ack),
		} {
			w.pod(devClient, answer).is(fwdTunnel, hitNew).leaves(fr.dst, fr.src)
			if e := w.entry(answer); at(e.To) != nodePlace(id) {
				t.Fatalf("answer goes to %v, want node %d", at(e.To), id)
			}
		}
		// Such a source is never a pod's or a service's.
		for _, src := range []netip.Addr{w.f.remote, w.f.local, w.f.free, w.f.vip} {
			fr.src = ap(src, 1)
			by(w.f.nodeB, fr).is(spoofedSource, miss)
		}
	})
}
