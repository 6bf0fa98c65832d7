package packet

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const (
	frameVia  = uint8(bpf.DpPwFramePW_FRAME_VIA)
	framePod  = uint8(bpf.DpPwFramePW_FRAME_POD)
	frameHost = uint8(bpf.DpPwFramePW_FRAME_HOST)

	noRoute    = bpf.DpPwReasonPW_DROP_NO_ROUTE
	noEndpoint = bpf.DpPwReasonPW_DROP_NO_ENDPOINT
	tcpClosed  = finOrig | finReply
)

// withDSR is a datapath with --external-source dsr and little room for flows
// that are not confirmed.
var withDSR = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{DSR: true, FlowsMax: 4096, FlowsNewMax: 1024})
})

func bothDSR(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			d, err := withDSR()
			if err != nil {
				t.Fatal(err)
			}
			w := &world{t: t, f: f, datapath: d}
			w.fill()
			w.ways()
			test(t, w)
		})
	}
}

// name is how a frame names a backend.
func name(backend netip.AddrPort, kind uint8) (macs [12]byte) {
	a := backend.Addr().As16()
	copy(macs[:], append([]byte{2, 'p'}, a[12:]...))
	copy(macs[6:], []byte{2, 'p', 'w', byte(backend.Port() >> 8), byte(backend.Port()), kind})
	return macs
}

// named is a frame out of the tunnel of a node that names a backend.
func (w *world) named(node netip.Addr, backend netip.AddrPort, kind uint8, pkt []byte) *result {
	w.t.Helper()
	s := w.tunnelShot(node, pkt)
	macs := name(backend, kind)
	copy(s.pkt, macs[:])
	s.other = true // it is no device's address
	return w.run(s)
}

// arriveNamed is the same where the tunnel's header is still on.
func (w *world) arriveNamed(node netip.Addr, backend netip.AddrPort, kind uint8, fr frame) *result {
	w.t.Helper()
	s := w.at(fromNetdev, w.wrap(node, fr.bytes(w.t)))
	macs := name(backend, kind)
	copy(s.pkt[tunnelHeader:], macs[:])
	mend(s.pkt)
	return w.run(s)
}

// names asserts what the frame that left says, and that its packet is as it was.
func (r *result) names(backend netip.AddrPort, kind uint8, fr frame) *result {
	r.t.Helper()
	inner := r.out
	if r.counts[fwdEncap] != 0 {
		inner = r.out[tunnelHeader:]
	}
	if want := name(backend, kind); [12]byte(inner[:12]) != want {
		r.t.Fatalf("the frame has MACs %x, want %x", inner[:12], want)
	}
	in := *r
	in.out = inner
	in.leaves(fr.src, fr.dst)
	if in.ttl() != 63 {
		r.t.Fatalf("left with TTL %d", in.ttl())
	}
	return r
}

// via asserts that the frame's packet is translated and returns by this node.
func (r *result) via(src, dst netip.AddrPort) {
	r.t.Helper()
	inner := *r
	inner.out = r.out[tunnelHeader:]
	inner.leaves(src, dst)
	if got := inner.out[6:12]; !slices.Equal(got, []byte{2, 'p', 'w', 0, 0, frameVia}) {
		r.t.Fatalf("the frame's source is %x", got)
	}
}

func (w *world) confirmedFlows() int {
	w.t.Helper()
	all, err := w.set.Flows.Dump()
	if err != nil {
		w.t.Fatal(err)
	}
	return len(all)
}

// At the entry node: the packet as it came, in a frame that names the backend;
// the flow confirmed by what the client says next, for no answer is seen;
// closed by its FIN; and no flood takes its place, or stands beside it.
func TestDSREntry(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f, be := w.f, ap(w.f.remote, podPort)
		fr := tcp(ap(f.world, 40000), ap(f.lb, svcPort), syn)
		send := func(flags uint8) *result { fr.flags = flags; return w.wire(fr) }
		send(syn).is(fwdEncap, miss, created).names(be, framePod, fr)
		e := w.entry(fr)
		if e.Frame != framePod || maps.FromAddr(e.Nexthop) != f.remote || at(e.To) != nodePlace(nodeIDB) || e.is(flagXlate) {
			t.Fatalf("entry %+v", e)
		}
		send(syn).is(fwdEncap, hitNew).names(be, framePod, fr) // once more: no proof of anything
		send(ack).is(fwdEncap, hitNew, confirmed).names(be, framePod, fr)
		send(ack|psh).is(fwdEncap, hit).names(be, framePod, fr)

		standing := w.confirmedFlows()
		flood := fr
		for i := range uint16(3000) {
			flood.src = ap(f.world, 1024+i)
			flood.flags = syn
			w.wire(flood).is(fwdEncap, miss, created)
		}
		// ACKs of nothing, each twice: picked up in the middle, and not kept.
		flood.flags = ack
		for i := range uint16(600) {
			flood.src = ap(f.world, 50000+i)
			w.wire(flood).ended(fwdEncap)
			w.wire(flood).is(fwdEncap, hitNew).names(be, framePod, flood)
		}
		if n := w.confirmedFlows(); n != standing {
			t.Fatalf("%d confirmed entries, %d before the flood", n, standing)
		}
		send(ack).is(fwdEncap, hit).names(be, framePod, fr)
		w.bump(slotRemote)
		send(ack).is(fwdEncap, stale, hit).names(be, framePod, fr)
		w.bump(slotWorld)
		send(ack).is(fwdEncap, stale, hit).names(be, framePod, fr)

		send(fin|ack).is(fwdEncap, hit)
		if got := w.entry(fr).Tcp; got != tcpClosed {
			t.Fatalf("after the client's FIN: %v", maps.TCPStateNames(got))
		}
		send(ack).is(fwdEncap, hit) // of what the backend still says
		send(syn).is(fwdEncap, takenOver, miss, created)
		send(rst).is(fwdEncap, hitNew)
		send(syn).is(fwdEncap, takenOver, miss, created)
	})
}

// A datagram's flow is confirmed by the next, and gets another backend when
// its own is gone; a TCP connection keeps it.
func TestDSREntryReselects(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f, old := w.f, ap(w.f.remote, podPort)
		dgram, seg := udp(ap(f.world, 40000), ap(f.nodeA, nodePort)), tcp(ap(f.world, 40000), ap(f.nodeA, nodePort), syn)
		w.wire(dgram).is(fwdEncap, miss, created).names(old, framePod, dgram)
		w.wire(dgram).is(fwdEncap, hitNew, confirmed).names(old, framePod, dgram)
		w.wire(seg).is(fwdEncap, miss, created)
		seg.flags = ack
		w.wire(seg).is(fwdEncap, hitNew, confirmed)

		w.backends(setFree, ap(f.far, podPort))
		for proto, id := range map[uint8]uint32{maps.ProtoUDP: 25, maps.ProtoTCP: 15} {
			w.service(w.anyNode(), nodePort, proto, maps.Service{Id: id, Set: setBoth, Count: 2, ExtSet: setFree, ExtCount: 1, Flags: maps.ServiceExternal})
			w.state(id, old, 0)
		}
		w.bump(slotRemote)
		far := ap(f.far, podPort)
		r := w.wire(dgram).is(fwdEncap, stale, reselected, takenOver, miss, created)
		r.names(far, framePod, dgram)
		w.wire(seg).is(fwdEncap, stale, hit).names(old, framePod, seg)
		seg.flags = syn
		w.wire(seg).is(fwdEncap, takenOver, miss, created).names(far, framePod, seg)
	})
}

// What a frame cannot say, and whose answers have to come back, takes the
// ordinary way.
func TestDSREntryFallsBack(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f, be := w.f, ap(w.f.remote, podPort)
		node := tcp(ap(f.nodeC, 40000), ap(f.nodeA, nodePort), syn)
		w.wire(node).is(fwdEncap, miss, created).via(node.src, be)
		inside := tcp(ap(f.world, 40000), ap(f.vipRemote, svcPort), syn)
		w.wire(inside).is(fwdEncap, miss, created).via(inside.src, be)
		out := tcp(ap(f.world, 40001), ap(f.lb, svcPort), syn)
		if f.v6 {
			put(w, w.set.NodesV6, nodeIDB, maps.NodeV6{})
			w.wire(out).is(fwdEncap, miss, created).via(out.src, be)
			odd := netip.MustParseAddr("fd00:10:244:9e:1::41")
			w.fill()
			w.ways()
			w.addr(odd, maps.Peer{Identity: idRemote, Slot: slotRemote, Node: nodeIDB, Flags: maps.PeerPod})
			w.backends(setRemote, ap(odd, podPort))
			w.wire(out).is(fwdEncap, miss, created).via(out.src, ap(odd, podPort))
		}
		// On the network of another node.
		out.src = ap(f.world, 40002)
		w.backends(setRemote, ap(f.nodeB, podPort))
		kind := framePod
		if f.v6 {
			kind = frameHost
		}
		w.wire(out).is(fwdEncap, miss, created).names(ap(f.nodeB, podPort), kind, out)
	})
}

// At the backend's node: translated, answered by the wire under the service's
// address, known from then on, and judged by the client's own address.
func TestDSRBackend(t *testing.T) {
	const clamped = bpf.DpPwReasonPW_MSS_CLAMPED
	bothDSR(t, func(t *testing.T, w *world) {
		f, be := w.f, ap(w.f.local, podPort)
		out := tcp(ap(f.world, 40000), ap(f.nodeB, nodePort), syn)
		answer := tcp(be, out.src, syn|ack)
		mss := func(fr frame) []byte { return withOptions(fr.bytes(t), []byte{2, 4, 0x05, 0xb4}) }
		announced := func(r *result) int {
			d, _ := decode(r.out)
			return int(binary.BigEndian.Uint16(d.upper[22:]))
		}
		// The client's own limit is none of the tunnel's.
		r := w.named(f.nodeB, be, framePod, mss(out)).is(fwdLocal, miss, created).leaves(out.src, be)
		if got := announced(r); got != 0x5b4 {
			t.Fatalf("the SYN says %d", got)
		}
		e := w.entry(out)
		if e.Entry != nodeIDB || at(e.From) != nodePlace(nodeIDB) || at(e.To) != w.podPlace(devLocal) {
			t.Fatalf("entry %+v", e)
		}
		r = w.run(shot{hook: fromPod, dev: devLocal, pkt: mss(answer)}).is(fwdWire, hitNew, clamped).leaves(out.dst, out.src)
		want := innerMTU - 40
		if f.v6 {
			want -= 20
		}
		if got := announced(r); got != want {
			t.Fatalf("the SYN-ACK says %d, want %d", got, want)
		}
		out.flags, answer.flags = ack, ack
		decapsulates := func(engine ...reason) {
			t.Helper()
			w.arriveNamed(outer().nodeB, be, framePod, out).is(fwdDecap, engine...).leaves(out.src, be)
		}
		decapsulates(hitNew, confirmed)
		decapsulates(hit)
		w.pod(devLocal, answer).is(fwdWire, hit).leaves(out.dst, out.src)
		for _, slot := range []uint32{slotWorld, slotLocal} {
			w.bump(slot)
			w.arriveNamed(outer().nodeB, be, framePod, out).is(passed) // to the device
			w.named(f.nodeB, be, framePod, out.bytes(t)).is(fwdLocal, stale, hit).leaves(out.src, be)
			decapsulates(hit)
			w.bump(slot)
			w.pod(devLocal, answer).is(fwdWire, stale, hit).leaves(out.dst, out.src)
			w.named(f.nodeB, be, framePod, out.bytes(t)).is(fwdLocal, hit)
		}
		// Another backend, says the entry node, whatever it is about.
		third := ap(f.third, podPort)
		if got := w.arriveNamed(outer().nodeB, third, framePod, out); got.counts[passed] != 1 {
			t.Fatalf("a frame that names another backend: %v", got)
		}
		w.named(f.nodeB, third, framePod, out.bytes(t)).is(fwdLocal, takenOver, miss, created, midstream).leaves(out.src, third)
		w.pod(devThird, tcp(third, out.src, ack)).is(fwdWire, hitNew).leaves(out.dst, out.src)
		// The same client by another node: a load balancer has moved it.
		w.named(f.nodeC, third, framePod, out.bytes(t)).is(fwdLocal, takenOver, miss, created, midstream).leaves(out.src, third)

		w.edit(f.local, func(e *maps.Endpoint) { e.PolicyIn = 9 })
		out.src = ap(f.world, 40001)
		w.named(f.nodeB, be, framePod, out.bytes(t)).is(bpf.DpPwReasonPW_DROP_POLICY_INGRESS, miss)
		w.policy(9, maps.IdentityWorld, maps.PolicyAny, 0, 0, maps.VerdictAllow)
		w.named(f.nodeB, be, framePod, out.bytes(t)).is(fwdLocal, miss, created, midstream)
	})
}

// One client port to two frontends and one backend: both get their answers.
func TestDSRBackendTellsFrontendsApart(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f, be := w.f, ap(w.f.local, podPort)
		first := udp(ap(f.world, 40000), ap(f.nodeB, nodePort))
		second := udp(first.src, ap(f.lb, svcPort))
		w.named(f.nodeB, be, framePod, first.bytes(t)).is(fwdLocal, miss, created).leaves(first.src, be)
		r := w.named(f.nodeB, be, framePod, second.bytes(t)).is(fwdLocal, miss, portChanged)
		d, _ := decode(r.out)
		port, _ := d.ports()
		w.pod(devLocal, udp(be, first.src)).is(fwdWire, hitNew).leaves(first.dst, first.src)
		w.pod(devLocal, udp(be, ap(f.world, port))).is(fwdWire, hitNew).leaves(second.dst, second.src)
	})
}

// Nobody but a node may name a backend, and none that is not here.
func TestDSRIsNoRoadElsewhere(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f, be := w.f, ap(w.f.local, podPort)
		out := udp(ap(f.world, 40000), ap(f.lb, svcPort))
		pkt := out.bytes(t)
		w.named(f.nodeB, ap(f.free, podPort), framePod, pkt).is(noEndpoint, miss)
		if f.v6 {
			w.named(f.nodeB, ap(f.nodeB, podPort), frameHost, pkt).is(noRoute, miss)
			w.named(f.nodeB, ap(f.nodeB, podPort), framePod, pkt).is(noEndpoint, miss)
		}
		if !f.v6 {
			for _, who := range []netip.Addr{f.remote, f.far, f.nodeB, f.nodeC, f.world} {
				w.named(f.nodeB, ap(who, podPort), framePod, pkt).is(noRoute, miss)
			}
			w.named(f.nodeB, ap(f.vip, svcPort), framePod, pkt).is(noService, miss)
		}
		w.run(shot{hook: fromOverlay, dev: devOverlay, tunnel: tunnelKey{maps.ToAddr(f.router), vni}, pkt: pkt}).is(bpf.DpPwReasonPW_DROP_UNKNOWN_PEER)
		w.named(f.router, be, framePod, pkt).is(bpf.DpPwReasonPW_DROP_UNKNOWN_PEER)
		for _, src := range []netip.Addr{f.remote, f.client, f.nodeA, f.vip, f.free} {
			w.named(f.nodeB, be, framePod, udp(ap(src, 40000), out.dst).bytes(t)).is(spoofedSource, miss)
		}
		w.named(f.nodeB, be, framePod, echo(f.world, f.lb, 7).bytes(t)).is(bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT, miss)
		w.noEntry(out)
		// Without a name, and with one where none is read: what it is without.
		w.tunnel(f.nodeB, out).is(spoofedSource, miss)
		macs := name(be, framePod)
		for _, s := range []shot{
			{hook: fromPod, dev: devThird, pkt: udp(ap(f.third, 40000), ap(f.remote, podPort)).bytes(t)},
			{hook: fromPod, dev: devThird, pkt: udp(ap(f.third, 40001), ap(f.vipRemote, svcPort)).bytes(t)},
		} {
			copy(s.pkt, macs[:])
			w.run(s).is(fwdEncap, miss, created)
		}
		liar := shot{hook: fromPod, dev: devThird, pkt: slices.Clone(pkt)}
		copy(liar.pkt, macs[:])
		w.run(liar).is(spoofedSource, miss)

		// On a live flow, too.
		w.named(f.nodeB, be, framePod, pkt).is(fwdLocal, miss, created)
		w.pod(devThird, out).is(spoofedFlow)
		w.named(f.router, be, framePod, pkt).is(bpf.DpPwReasonPW_DROP_UNKNOWN_PEER)
		w.run(w.at(fromNetdev, w.wrap(f4(f.router), pkt))).ended(passed) // the device asks who that is
		w.named(f.nodeB, be, framePod, pkt).is(fwdLocal, hitNew)
	})
}

func f4(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	return families()[0].router
}

// A router's word about an answer goes to the service's address, which is the
// entry node's: it goes on to the backend, in a frame that names it, and comes
// to it about its own packet.
func TestDSRErrors(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f, be := w.f, ap(w.f.remote, podPort)
		out := udp(ap(f.world, 40000), ap(f.lb, svcPort))
		w.wire(out).is(fwdEncap, miss, created)
		about := icmpError(t, f.router, f.lb, out.back().bytes(t))
		r := w.run(w.at(fromNetdev, about)).is(fwdTunnel)
		r.names(be, framePod, frame{src: ap(f.router, 0), dst: ap(f.lb, 0)})
		w.run(w.at(fromNetdev, icmpError(t, f.router, f.lb, udp(out.dst, ap(f.world, 40009)).bytes(t)))).is(passed)

		// The other end.
		w.fill()
		w.ways()
		be = ap(f.local, podPort)
		out = udp(ap(f.world, 40000), ap(f.nodeB, nodePort))
		w.named(f.nodeB, be, framePod, out.bytes(t)).is(fwdLocal, miss, created)
		r = w.named(f.nodeB, be, framePod, icmpError(t, f.router, f.nodeB, out.back().bytes(t))).is(fwdLocal).leaves(ap(f.router, 0), ap(f.local, 0))
		if src, dst := quoted(r.out); src != be || dst != out.src {
			t.Fatalf("it quotes %v -> %v", src, dst)
		}
		w.named(f.nodeC, be, framePod, icmpError(t, f.router, f.nodeB, out.back().bytes(t))).is(unrelated)
		// An address that several nodes are reached by: the error meets this one.
		shared := udp(ap(f.world, 40001), ap(f.lb, svcPort))
		w.named(f.nodeB, be, framePod, shared.bytes(t)).is(fwdLocal, miss, created)
		r = w.run(w.at(fromNetdev, icmpError(t, f.router, f.lb, shared.back().bytes(t)))).is(fwdLocal).leaves(ap(f.router, 0), ap(f.local, 0))
		if src, dst := quoted(r.out); src != be || dst != shared.src {
			t.Fatalf("it quotes %v -> %v", src, dst)
		}
		// What the backend says of the client's packet leaves by the wire.
		r = w.run(shot{hook: fromPod, dev: devLocal, pkt: icmpError(t, f.local, f.world, udp(out.src, be).bytes(t))}).is(fwdWire).leaves(ap(f.nodeB, 0), ap(f.world, 0))
		if src, dst := quoted(r.out); src != out.src || dst != out.dst {
			t.Fatalf("it quotes %v -> %v", src, dst)
		}
	})
}

// A datagram in fragments goes in frames that all name its backend, is put
// together there, and answered in fragments by the wire.
func TestDSRFragments(t *testing.T) {
	bothDSR(t, func(t *testing.T, w *world) {
		f := w.f
		out := udp(ap(f.world, 40000), ap(f.lb, svcPort)).with(string(pattern(1000)))
		want := name(ap(f.remote, podPort), framePod)
		for id := range uint32(2) {
			var left [][]byte
			for _, part := range cut(out.bytes(t), id, 496) {
				r := w.run(w.at(fromNetdev, part)).ended(fwdEncap)
				if got := [12]byte(r.inner()[:12]); got != want {
					t.Fatalf("the frame has MACs %x, want %x", got, want)
				}
				left = append(left, r.inner())
			}
			if got := join(t, left); wrong(got) != "" || !slices.Equal(got[34:], out.bytes(t)[34:]) && !f.v6 {
				t.Fatalf("%s: left as %x", wrong(got), got)
			}
		}

		w.fill()
		w.ways()
		be := ap(f.local, podPort)
		reached := func(parts, arrived [][]byte, dst netip.AddrPort) {
			t.Helper()
			got := join(t, arrived)
			d, _ := decode(got)
			if _, port := d.ports(); wrong(got) != "" || ap(d.dst, port) != dst || len(arrived) != len(parts) {
				t.Fatalf("%s, to %v port %d: %x", wrong(got), d.dst, port, got)
			}
		}
		for id := range uint32(2) {
			var there, back [][]byte
			parts := cut(out.bytes(t), id, 496)
			for i, part := range parts {
				r := w.named(f.nodeB, be, framePod, part).ended(fwdLocal)
				if first := id == 0 && i == 0; r.counts[created] != 0 != first {
					t.Fatalf("fragment %d of datagram %d: %v", i, id, r)
				}
				there = append(there, r.out)
			}
			reached(parts, there, be)
			parts = cut(udp(be, out.src).with(string(pattern(1000))).bytes(t), id, 496)
			for _, part := range parts {
				back = append(back, w.run(shot{hook: fromPod, dev: devLocal, pkt: part}).ended(fwdWire).out)
			}
			reached(parts, back, out.src)
			if d, _ := decode(back[1]); d.src != f.lb {
				t.Fatalf("answered by %v", d.src)
			}
		}
		// Another name, in the middle of it; ahead of the first; and a liar's.
		parts := cut(out.bytes(t), 7, 496)
		w.named(f.nodeB, be, framePod, parts[0]).ended(fwdLocal)
		w.named(f.nodeB, ap(f.third, podPort), framePod, parts[1]).is(fragmentLost)
		w.named(f.nodeC, be, framePod, parts[1]).is(beforeFirst)
		w.named(f.nodeB, be, framePod, cut(out.bytes(t), 8, 496)[1]).is(beforeFirst)
		liar := udp(ap(f.remote, 40000), out.dst).with(string(pattern(1000)))
		w.named(f.nodeB, be, framePod, cut(liar.bytes(t), 9, 496)[0]).is(spoofedSource, miss)
	})
}
