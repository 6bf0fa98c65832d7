package packet

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const (
	protoIPIP  = 4
	ipipHeader = 20
	ipipMTU    = innerMTU + tunnelHeader - ipipHeader

	podIPIP   = bpf.DpPwReasonPW_DROP_POD_IPIP
	congested = bpf.DpPwReasonPW_DROP_CONGESTED
)

// wrapIPIP puts a packet into IPv4, as any host may (RFC 2003).
func wrapIPIP(t testing.TB, from, to netip.Addr, frame []byte) []byte {
	t.Helper()
	return setProto(udpless(t, from, to, frame[14:]), protoIPIP)
}

// udpless is an IPv4 packet with a body of any kind.
func udpless(t testing.TB, from, to netip.Addr, body []byte) []byte {
	t.Helper()
	fr := netFrame(from, to)
	fr.payload = body
	return fr.bytes(t)
}

func netFrame(from, to netip.Addr) frame {
	return frame{src: ap(from, 0), dst: ap(to, 0), proto: 255}
}

// unwrap takes the outer header off again.
func unwrap(pkt []byte) []byte {
	return append(append([]byte(nil), pkt[:14]...), pkt[14+ipipHeader:]...)
}

// ipip has both peers' IPv4 go in IPv4.
func (w *world) ipip() {
	w.t.Helper()
	w.ways()
	for _, id := range []uint32{nodeIDB, nodeIDC} {
		w.node(id, func(n *maps.Node) { n.Flags |= maps.NodeIPIP })
	}
}

func (w *world) node(id uint32, change func(*maps.Node)) {
	w.t.Helper()
	n, _, err := w.set.Nodes.Get(id)
	if err != nil {
		w.t.Fatal(err)
	}
	change(&n)
	put(w, w.set.Nodes, id, n)
}

func ipv4World(t *testing.T) *world { return newWorld(t, families()[0]) }

func (w *world) arriveIPIP(from netip.Addr, fr frame) *result {
	w.t.Helper()
	return w.run(w.at(fromNetdev, wrapIPIP(w.t, from, w.f.nodeA, fr.bytes(w.t))))
}

func (r *result) inIPIP(src, dst netip.AddrPort) {
	r.t.Helper()
	d, ok := decode(r.out)
	if !ok || d.src != outer().nodeA || d.dst != outer().nodeB || d.proto != protoIPIP || d.ttl != 64 {
		r.t.Fatalf("outer header: %+v", d)
	}
	// Don't fragment, no identification, no options, all of the packet.
	if r.out[14] != 0x45 || binary.BigEndian.Uint32(r.out[18:]) != 0x4000 || int(binary.BigEndian.Uint16(r.out[16:])) != len(r.out)-14 {
		r.t.Fatalf("outer header %x of %d bytes", r.out[14:34], len(r.out))
	}
	inner := *r
	inner.out = unwrap(r.out)
	inner.leaves(src, dst)
	if inner.ttl() != 63 {
		r.t.Fatalf("inner TTL %d", inner.ttl())
	}
}

// IPv4 to a node that takes it so goes in IPv4, the first packet like the
// others; IPv6, errors, what is too large and what has an entry node's mark
// by VXLAN.
func TestIPIPOut(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ipip()
		c := w.conn(40000)
		if w.f.v6 {
			c.send(syn).is(fwdEncap, miss, created)
			return
		}
		c.send(syn).is(fwdIPIP, miss, created).inIPIP(c.out.src, c.answer.src)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		for _, engine := range [][]reason{{hitNew, confirmed}, {hit}, {hit}} {
			c.send(ack).is(fwdIPIP, engine...).inIPIP(c.out.src, c.answer.src)
		}
		w.bump(slotRemote)
		c.send(ack).is(fwdIPIP, stale, hit)
		c.out.payload = make([]byte, ipipMTU-40)
		c.send(ack).is(fwdIPIP, hit).inIPIP(c.out.src, c.answer.src)
		c.out.payload = make([]byte, ipipMTU-40+1)
		c.send(ack).is(fwdTunnel, hit)
		c.out.payload = nil
		// The congestion bits are seen outside as well.
		for ecn := range byte(4) {
			pkt := c.out.bytes(t)
			pkt[15] |= ecn | 0xb8
			mend(pkt)
			if r := w.run(w.at(fromPod, pkt)).is(fwdIPIP, hit); r.out[15] != ecn {
				t.Fatalf("outer TOS %#x for ECN %d", r.out[15], ecn)
			}
		}
		// An error about what came from there.
		w.run(w.at(fromPod, icmpError(t, w.f.client, c.out.dst.Addr(), c.out.back().bytes(t)))).is(fwdTunnel)
		// From outside, with the client's own address.
		call := tcp(ap(w.f.world, 40000), ap(w.f.nodeA, nodePort), syn)
		w.wire(call).is(fwdEncap, miss, created)
		// What the host sends has the device's header.
		w.host(udp(ap(w.f.nodeA, 7), ap(w.f.remote, 7))).is(fwdTunnel, miss, created)
		// A node that is routed to is, and one without a header has none.
		w.node(nodeIDB, func(n *maps.Node) { n.Flags |= maps.NodeDirect })
		c.send(ack).is(fwdDirect, hit)
		w.node(nodeIDB, func(n *maps.Node) { n.Flags = maps.NodeIPIP })
		c.send(ack).is(fwdTunnel, hit)
	})
}

// Whatever way we send, a node's pods may come in IPv4: known flows and first
// packets, judged like those that come by VXLAN.
func TestIPIPIn(t *testing.T) {
	for name, flags := range map[string]uint16{"vxlan": maps.NodeHeader, "ipip": maps.NodeHeader | maps.NodeIPIP, "direct": maps.NodeDirect, "no way": 0} {
		t.Run(name, func(t *testing.T) {
			w := ipv4World(t)
			w.ways()
			for _, id := range []uint32{nodeIDB, nodeIDC} {
				w.node(id, func(n *maps.Node) { n.Flags = flags })
			}
			b, c := outer().nodeB, outer().nodeC
			in := tcp(ap(w.f.remote, 7), ap(w.f.client, podPort), syn)
			r := w.arriveIPIP(b, in).is(fwdDecap, miss, created).leaves(in.src, in.dst)
			if len(r.out) != len(r.shot.pkt)-ipipHeader || r.ttl() != 63 || [6]byte(r.out[:6]) != mac(0x41) {
				t.Fatalf("%d bytes of %d, TTL %d, MAC %x", len(r.out), len(r.shot.pkt), r.ttl(), r.out[:6])
			}
			if e := w.entry(in); at(e.From) != nodePlace(nodeIDB) {
				t.Fatalf("comes from %v", at(e.From))
			}
			conn := &conn{w: w, out: in, answer: in.back()}
			conn.answer.flags = syn | ack
			w.pod(devClient, conn.answer)
			in.flags = ack
			w.arriveIPIP(b, in).is(fwdDecap, hitNew, confirmed)
			for n := range 4 {
				in.payload = make([]byte, n)
				w.arriveIPIP(b, in).is(fwdDecap, hit).leaves(in.src, in.dst)
			}
			// By VXLAN, too, and turned back.
			w.run(w.tunnelShot(b, in.bytes(t))).is(fwdLocal, hit)
			w.arriveIPIP(b, in).is(fwdDecap, hit)
			// By another node: a lie, and so is what does not live behind this one.
			w.arriveIPIP(c, in).is(spoofedFlow)
			in.src = ap(w.f.remote, 8)
			w.arriveIPIP(c, in).is(spoofedSource, miss)
			for _, src := range []netip.Addr{w.f.far, w.f.local, w.f.world, w.f.nodeC, w.f.vip} {
				in.src = ap(src, 8)
				w.arriveIPIP(b, in).is(spoofedSource, miss)
			}
			// Policy, at the first packet and when it changes.
			in.src, in.flags = ap(w.f.remote, 9), syn
			w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 1 })
			w.arriveIPIP(b, in).is(ingressDenied, miss)
			w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 0 })
			w.arriveIPIP(b, in).is(fwdDecap, miss, created)
			w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 1 })
			w.arriveIPIP(b, in).is(ingressDenied, stale)
			// The host's own: by the tunnel's device, as from the tunnel.
			own := udp(ap(w.f.nodeA, 40002), ap(w.f.remote, 7))
			w.host(own).is(fwdTunnel, miss, created)
			w.arriveIPIP(b, own.back()).is(fwdHost, hitNew).leaves(own.dst, own.src)
			w.arriveIPIP(b, udp(ap(w.f.remote, 10), ap(w.f.nodeA, 7))).is(fwdHost, miss, created)
			w.arriveIPIP(c, own.back()).is(spoofedFlow)
			// Nobody here has the address; nothing is sent on.
			w.arriveIPIP(b, udp(ap(w.f.remote, 1), ap(w.f.free, 2))).is(bpf.DpPwReasonPW_DROP_NO_ENDPOINT, miss)
			w.arriveIPIP(b, udp(ap(w.f.remote, 1), ap(w.f.far, 2))).is(bpf.DpPwReasonPW_DROP_NO_ROUTE, miss)
			w.arriveIPIP(b, udp(ap(w.f.remote, 1), ap(w.f.world, 2))).is(bpf.DpPwReasonPW_DROP_NO_ROUTE, miss)
		})
	}
}

// A pod's errors and what ends here.
func TestIPIPEdges(t *testing.T) {
	w := ipv4World(t)
	w.ipip()
	b, a := outer().nodeB, w.f.nodeA
	c := w.conn(40000)
	c.send(syn)
	c.answer.flags = syn | ack
	good := func() []byte { return wrapIPIP(t, b, a, c.answer.bytes(t)) }
	change := func(do func([]byte)) []byte {
		pkt := good()
		do(pkt)
		mend(pkt)
		return pkt
	}
	options := netFrame(b, a)
	options.options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}}
	options.payload = c.answer.bytes(t)[14:]
	dying := c.answer
	dying.ttl = 1
	for name, tt := range map[string]struct {
		pkt  []byte
		want reason
	}{
		"no node's address":           {wrapIPIP(t, w.f.world, a, c.answer.bytes(t)), passed},
		"a fragment of nobody":        {change(func(p []byte) { p[20] = 0x20; copy(p[26:], w.f.world.AsSlice()) }), passed},
		"another destination":         {wrapIPIP(t, b, w.f.router, c.answer.bytes(t)), passed},
		"another tunnel, of hosts":    {wrapIPIP(t, b, a, udp(ap(w.f.world, 1), ap(w.f.router, 2)).bytes(t)), passed},
		"IPv6 inside":                 {wrapIPIP(t, b, a, udp(ap(families()[1].remote, 1), ap(families()[1].client, 2)).bytes(t)), passed},
		"an outer fragment":           {change(func(p []byte) { p[20] = 0x20 }), bpf.DpPwReasonPW_DROP_FRAGMENT},
		"the last outer fragment":     {change(func(p []byte) { p[21] = 9 }), bpf.DpPwReasonPW_DROP_FRAGMENT},
		"an inner fragment":           {wrapIPIP(t, b, a, w.fragment(c.answer.with("payload0"), 0, true)), bpf.DpPwReasonPW_DROP_FRAGMENT},
		"outer options":               {setProto(options.bytes(t), protoIPIP), bpf.DpPwReasonPW_DROP_MALFORMED},
		"an inner length too large":   {change(func(p []byte) { p[36]++ }), bpf.DpPwReasonPW_DROP_MALFORMED},
		"the last hop":                {wrapIPIP(t, b, a, dying.bytes(t)), bpf.DpPwReasonPW_DROP_TTL},
		"an error that nobody caused": {wrapIPIP(t, b, a, icmpError(t, w.f.remote, w.f.client, udp(ap(w.f.client, 1), ap(w.f.remote, 2)).bytes(t))), bpf.DpPwReasonPW_DROP_ICMP_UNRELATED},
		"a multicast":                 {wrapIPIP(t, b, a, udp(ap(w.f.remote, 1), ap(w.f.multicast, 2)).bytes(t)), bpf.DpPwReasonPW_DROP_MULTICAST},
		"no sender":                   {wrapIPIP(t, b, a, udp(ap(netip.MustParseAddr("127.0.0.1"), 1), ap(w.f.client, 2)).bytes(t)), badSource},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			w.run(w.at(fromNetdev, tt.pkt)).ended(tt.want)
		})
	}
	w.t = t
	// Cut anywhere, with lengths that fit: never delivered, never changed.
	for n := 34; n < len(good()); n++ {
		pkt := good()[:n]
		setLength(pkt, n-14)
		mend(pkt)
		if why, _ := w.run(w.at(fromNetdev, pkt)).ends(); why != passed && why != bpf.DpPwReasonPW_DROP_MALFORMED {
			t.Fatalf("cut to %d bytes: %s", n, maps.ReasonName(why))
		}
	}
	// An error about a known flow arrives.
	w.run(w.at(fromNetdev, wrapIPIP(t, b, a, icmpError(t, w.f.remote, w.f.client, c.answer.back().bytes(t))))).is(fwdDecap)
	w.run(w.at(fromNetdev, good())).is(fwdDecap, hitNew)
}

// What the way has marked goes on inside (RFC 6040 4.2).
func TestIPIPCongestion(t *testing.T) {
	w := ipv4World(t)
	w.ipip()
	in := udp(ap(w.f.remote, 7), ap(w.f.client, podPort))
	w.arriveIPIP(outer().nodeB, in).is(fwdDecap, miss, created)
	const notECT, ect1, ect0, ce, dropped = 0, 1, 2, 3, 9
	want := [4][4]byte{ // by inner, then outer
		notECT: {notECT, notECT, notECT, dropped},
		ect1:   {ect1, ect1, ect1, ce},
		ect0:   {ect0, ect1, ect0, ce},
		ce:     {ce, ce, ce, ce},
	}
	for inner := range byte(4) {
		for outside := range byte(4) {
			pkt := in.bytes(t)
			pkt[15] |= inner | 0xb8
			mend(pkt)
			pkt = wrapIPIP(t, outer().nodeB, w.f.nodeA, pkt)
			pkt[15] |= outside
			mend(pkt)
			r := w.run(w.at(fromNetdev, pkt))
			if want[inner][outside] == dropped {
				r.ended(congested)
				continue
			}
			r.is(fwdDecap, hitNew)
			if r.out[15] != want[inner][outside]|0xb8 {
				t.Errorf("inner %d, outer %d: TOS %#x", inner, outside, r.out[15])
			}
		}
	}
}

// No pod speaks to where the tunnels end, under whatever routing mode; to
// other pods it may say what it likes.
func TestPodsIPIP(t *testing.T) {
	w := ipv4World(t)
	inside := udp(ap(w.f.remote, 1), ap(w.f.local, 2)).bytes(t)
	for _, flags := range []uint16{maps.NodeHeader, maps.NodeHeader | maps.NodeIPIP, maps.NodeDirect} {
		w.ways()
		w.node(nodeIDB, func(n *maps.Node) { n.Flags = flags })
		for _, to := range []netip.Addr{w.f.nodeA, w.f.nodeB, w.f.nodeC} {
			w.run(w.at(fromPod, wrapIPIP(t, w.f.client, to, inside))).is(podIPIP, miss)
			w.run(w.at(fromPod, wrapIPIP(t, w.f.nodeB, to, inside))).is(spoofedSource, miss)
		}
		if why, _ := w.run(w.at(fromPod, wrapIPIP(t, w.f.client, w.f.remote, inside))).ends(); maps.IsDrop(why) {
			t.Errorf("to a pod: %s", maps.ReasonName(why))
		}
		w.run(w.at(fromPod, wrapIPIP(t, w.f.client, w.f.local, inside))).ended(fwdLocal)
	}
}

// A node whose packets may come as they are, while ours to it are
// encapsulated.
func TestAcceptUnencapsulated(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		c := w.conn(40000)
		c.send(syn).is(fwdEncap, miss, created)
		c.answer.flags = syn | ack
		w.wire(c.answer).is(spoofedFlow)
		own := udp(ap(w.f.nodeA, 40002), ap(w.f.remote, 7))
		w.host(own).is(fwdTunnel, miss, created)
		w.wire(own.back()).is(passed)
		in := udp(ap(w.f.remote, 7), ap(w.f.client, podPort))
		w.wire(in).is(spoofedSource, miss)

		w.node(nodeIDB, func(n *maps.Node) { n.Flags |= maps.NodePlain })
		w.wire(c.answer).is(fwdLocal, hitNew).leaves(c.out.dst, c.out.src)
		c.send(ack).is(fwdEncap, hitNew, confirmed)
		w.wire(in).is(fwdLocal, miss, created)
		w.pod(devClient, in.back()).is(fwdEncap, hitNew)
		// To the host as if by the tunnel: its routes lead there.
		if r := w.wire(own.back()).is(fwdHost, hitNew); r.mark&0x1000 == 0 || !slices.Equal(r.out[14:], own.back().bytes(t)[14:]) {
			t.Fatalf("mark %#x, left as %x", r.mark, r.out)
		}
		// The others as ever.
		w.wire(udp(ap(w.f.far, 7), ap(w.f.client, podPort))).is(spoofedSource, miss)
		w.wire(udp(ap(w.f.local, 7), ap(w.f.client, podPort))).is(spoofedSource, miss)
	})
}

// A router's word about a packet that went in IPv4: both of what goes so and
// of what goes by VXLAN to that node, less is sent. Only of who is sent IPv4 in
// IPv4 (N10).
func TestIPIPLearnsTheMTU(t *testing.T) {
	w := ipv4World(t)
	w.ipip()
	a, b := outer().nodeA, outer().nodeB
	put(w, w.set.Nodes, 0, maps.Node{Addr: maps.ToAddr(a)})
	put(w, w.set.NodeIDs, maps.ToAddr(b), nodeIDB)
	out := udp(ap(w.f.client, 40000), ap(w.f.remote, podPort))
	pod := func(fr frame) shot { return w.at(fromPod, dontFragment(fr.bytes(t))) }
	tells := func(from netip.Addr, mtu uint32) *result {
		t.Helper()
		quote := wrapIPIP(t, from, b, out.sized(ipipMTU).bytes(t))[14:]
		word := binary.BigEndian.AppendUint32(nil, mtu)
		return w.run(w.at(fromNetdev, icmp(t, w.f.router, a, [2]byte{3, 4}, append(word, quote[:28]...))))
	}
	w.run(pod(out.sized(ipipMTU))).is(fwdIPIP, miss, created)
	w.tooBig(pod(out.sized(ipipMTU+1)), ipipMTU, hitNew)
	tells(w.f.nodeC, 1400).is(passed) // not our packet
	const way = 1400
	tells(a, way).is(passed, pmtu)
	w.run(pod(out.sized(way-ipipHeader))).is(fwdIPIP, hitNew)
	w.tooBig(pod(out.sized(way-ipipHeader+1)), way-ipipHeader, hitNew)
	w.run(pod(udp(out.src, ap(w.f.far, podPort)).sized(ipipMTU))).is(fwdIPIP, miss, created)

	w.node(nodeIDB, func(n *maps.Node) { n.Flags &^= maps.NodeIPIP })
	tells(a, 1300).is(passed)
	w.run(pod(out.sized(way-tunnelHeader))).is(fwdEncap, hitNew)
}
