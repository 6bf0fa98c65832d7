package packet

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// place is what an entry says of an end of a flow.
type place struct {
	kind bpf.DpPwPlaceKind
	id   uint32
}

func (w *world) podPlace(dev string) place {
	return place{bpf.DpPwPlaceKindPW_PLACE_POD, w.index(dev)}
}

func (w *world) wirePlace() place {
	return place{bpf.DpPwPlaceKindPW_PLACE_WIRE, w.index(devWire)}
}

func nodePlace(id uint32) place { return place{bpf.DpPwPlaceKindPW_PLACE_NODE, id} }
func hostPlace() place          { return place{kind: bpf.DpPwPlaceKindPW_PLACE_HOST} }

func at(p maps.Place) place { return place{bpf.DpPwPlaceKind(p.Kind), p.Id} }

// road is a way through the node: from where to where, which hook each
// direction meets first, and what is expected there.
type road struct {
	name     string
	from, to place
	src      netip.Addr
	asked    netip.Addr // the address the initiator calls
	real     netip.Addr // who gets it; another one behind a service
	send     func(frame) *result
	answer   func(frame) *result
	out, in  reason // outcome of the two directions
	service  uint32 // 0 = none
	snat     bool   // it goes on under this node's address
}

func (w *world) roads() []road {
	f := w.f
	client := func(fr frame) *result { return w.pod(devClient, fr) }
	local := func(fr frame) *result { return w.pod(devLocal, fr) }
	nodeB := func(fr frame) *result { return w.tunnel(f.nodeB, fr) }
	hostTo := func(fr frame) *result { return w.deliver(devClient, "", fr) }
	forwarded := func(fr frame) *result { return w.deliver(devClient, devWire2, fr) }
	pc, pl := w.podPlace(devClient), w.podPlace(devLocal)
	return []road{
		{"pod to pod of this node", pc, pl, f.client, f.local, f.local, client, local, fwdLocal, fwdLocal, 0, false},
		{"pod to remote pod", pc, nodePlace(nodeIDB), f.client, f.remote, f.remote, client, nodeB, fwdTunnel, fwdLocal, 0, false},
		{"pod to service, local backend", pc, pl, f.client, f.vipLocal, f.local, client, local, fwdLocal, fwdLocal, 11, false},
		{"pod to service, remote backend", pc, nodePlace(nodeIDB), f.client, f.vipRemote, f.remote, client, nodeB, fwdTunnel, fwdLocal, 12, false},
		{"pod to service on this node's host", pc, hostPlace(), f.client, f.vipHost, f.nodeA, client, hostTo, fwdHost, fwdLocal, 14, false},
		{"tunnel to pod", nodePlace(nodeIDB), pc, f.remote, f.client, f.client, nodeB, client, fwdLocal, fwdTunnel, 0, false},
		{"other node to pod", nodePlace(nodeIDB), pc, f.nodeB, f.client, f.client, nodeB, client, fwdLocal, fwdTunnel, 0, false},
		{"wire to pod", w.wirePlace(), pc, f.world, f.client, f.client, w.wire, client, fwdLocal, fwdWire, 0, false},
		{"wire to pod through the stack", place{bpf.DpPwPlaceKindPW_PLACE_WIRE, w.index(devWire2)}, pc, f.world, f.client, f.client, forwarded, client, fwdLocal, fwdWire, 0, false},
		{"host to pod", hostPlace(), pc, f.nodeA, f.client, f.client, hostTo, client, fwdLocal, fwdHost, 0, false},
		{"host to remote pod", hostPlace(), nodePlace(nodeIDB), f.nodeA, f.remote, f.remote, w.host, nodeB, fwdTunnel, fwdHost, 0, false},
		{"host to service, local backend", hostPlace(), pl, f.nodeA, f.vipLocal, f.local, w.host, local, fwdLocal, fwdHost, 11, false},
		{"host to service, remote backend", hostPlace(), nodePlace(nodeIDB), f.nodeA, f.vipRemote, f.remote, w.host, nodeB, fwdTunnel, fwdHost, 12, false},
		{"pod to host", pc, hostPlace(), f.client, f.nodeA, f.nodeA, client, hostTo, fwdHost, fwdLocal, 0, false},
		{"pod to other node", pc, w.wirePlace(), f.client, f.nodeB, f.nodeB, client, w.wire, fwdWire, fwdLocal, 0, true},
		{"pod to world", pc, w.wirePlace(), f.client, f.world, f.world, client, w.wire, fwdWire, fwdLocal, 0, true},
	}
}

// check asserts the packet of one direction: outcome, addresses, TTL.
func (w *world) check(r *result, want reason, src, dst netip.AddrPort, engine ...reason) {
	w.t.Helper()
	r.is(want, engine...).leaves(src, dst)
	ingress := r.shot.hook != toPod && r.shot.hook != toOverlay
	ttl := uint8(64)
	if ingress && want != fwdHost {
		ttl = 63
	}
	if got := r.ttl(); got != ttl {
		w.t.Fatalf("left with TTL %d, want %d", got, ttl)
	}
	if r.v6 != w.f.v6 {
		w.t.Fatalf("counted under the wrong family")
	}
	w.macs(r, want, dst.Addr())
}

// macs asserts the frame's addresses: the pod's, or the far tunnel device's.
func (w *world) macs(r *result, want reason, dst netip.Addr) {
	w.t.Helper()
	next := map[netip.Addr][6]byte{
		w.f.client: mac(0x41), w.f.local: mac(0x42), w.f.third: mac(0x43),
		w.f.remote: mac(0xb), w.f.nodeB: mac(0xb), w.f.far: mac(0xc), w.f.nodeC: mac(0xc),
	}[dst]
	rewritten := want == fwdTunnel || want == fwdLocal && r.action == actRedirect
	if rewritten && ([6]byte(r.out[:6]) != next || [6]byte(r.out[6:12]) != [6]byte{2, 'p', 'w', 0, 0, 1}) {
		w.t.Fatalf("frame to %v has MACs %x", dst, r.out[:12])
	}
	if !rewritten && string(r.out[:12]) != string(r.shot.pkt[:12]) {
		w.t.Fatalf("frame that goes on by itself has MACs %x", r.out[:12])
	}
	mark := r.shot.hook != toPod && want == fwdTunnel && r.shot.hook != toOverlay ||
		want == fwdLocal && r.shot.hook == toOverlay || want == fwdWire && r.action == actRedirect ||
		want == fwdHost && r.action == actRedirect
	if mark != (r.mark&0x1000 != 0) {
		w.t.Fatalf("left with mark %#x; the next hook must not decide again: %v", r.mark, mark)
	}
}

// entries asserts both entries of a flow against its road.
func (w *world) entries(rd road, first, answer frame, inTable bool) {
	w.t.Helper()
	fwd, rev := w.entry(first), w.entry(answer)
	if fwd.confirmed != inTable || rev.confirmed != inTable {
		w.t.Fatalf("entries confirmed: %v and %v, want %v", fwd.confirmed, rev.confirmed, inTable)
	}
	if at(fwd.From) != rd.from && rd.from.kind != bpf.DpPwPlaceKindPW_PLACE_WIRE || at(fwd.To) != rd.to {
		w.t.Fatalf("entry goes %v -> %v, want %v -> %v", at(fwd.From), at(fwd.To), rd.from, rd.to)
	}
	back := rd.from
	if back.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE {
		back = w.wirePlace() // by the route, whichever device it came in by
	}
	if at(rev.From) != rd.to || at(rev.To) != back {
		w.t.Fatalf("reply entry goes %v -> %v, want %v -> %v", at(rev.From), at(rev.To), rd.to, back)
	}
	for _, e := range []entry{fwd, rev} {
		hop := w.f.router
		if rd.real == w.f.nodeB {
			hop = w.f.nodeB
		}
		if e.To.Kind == uint8(bpf.DpPwPlaceKindPW_PLACE_WIRE) && maps.FromAddr(e.Nexthop) != hop {
			w.t.Fatalf("next hop %v, want %v", maps.FromAddr(e.Nexthop), hop)
		}
		if e.is(flagXlate) != (rd.service != 0 || rd.snat) || e.Service != rd.service && rd.service != 0 {
			w.t.Fatalf("entry of service %d, flags %v", e.Service, maps.FlowFlagNames(e.Flags))
		}
		if e.Verdict != maps.VerdictAllow {
			w.t.Fatalf("verdict %s", maps.VerdictName(e.Verdict))
		}
	}
	if fwd.is(flagReply) || !rev.is(flagReply) {
		w.t.Fatal("the entries mistake their direction")
	}
}

// begin sends a flow's first packet. What got through the road has the source
// that the node gave it, if it gave it one: one of its own, and a port of
// those that are nobody's.
func (w *world) begin(rd road, first, got frame) frame {
	w.t.Helper()
	r := rd.send(first)
	if rd.snat {
		d, ok := decode(r.out)
		if !ok || d.src != w.f.nodeA {
			w.t.Fatalf("left under %v, want %v", d.src, w.f.nodeA)
		}
		got.src = ap(d.src, first.src.Port())
		switch first.proto {
		case maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP:
			port, _ := d.ports()
			got.src = ap(d.src, port)
		case protoICMP:
			got.src = ap(d.src, binary.BigEndian.Uint16(d.upper[4:]))
		}
		if port := got.src.Port(); translatable(first.key()) && !givable(port) {
			w.t.Fatalf("left with port %d", port)
		}
	}
	w.check(r, rd.out, got.src, got.dst, miss, created)
	return got
}

func TestRoadsTCP(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, rd := range w.roads() {
			t.Run(rd.name, func(t *testing.T) {
				w := newWorld(t, w.f)
				rd := w.road(rd.name)
				first := tcp(ap(rd.src, 40000), ap(rd.asked, svcPort), syn)
				if rd.service == 0 {
					first.dst = ap(rd.asked, podPort)
				}
				got := w.begin(rd, first, tcp(first.src, ap(rd.real, podPort), syn)) // as the other end sees it
				answer := got.back()
				w.entries(rd, first, answer, false)
				answer.flags = syn | ack
				w.check(rd.answer(answer), rd.in, first.dst, first.src, hitNew)
				first.flags = ack
				w.check(rd.send(first), rd.out, got.src, got.dst, hitNew, confirmed)
				w.entries(rd, first, answer, true)
				for range 3 {
					first.flags, answer.flags = ack|psh, ack|psh
					w.check(rd.send(first.with("odd")), rd.out, got.src, got.dst, hit)
					w.check(rd.answer(answer.with("even")), rd.in, first.dst, first.src, hit)
				}
			})
		}
	})
}

// road finds a road again in a fresh world.
func (w *world) road(name string) road {
	w.t.Helper()
	for _, rd := range w.roads() {
		if rd.name == name {
			return rd
		}
	}
	w.t.Fatalf("no road %q", name)
	return road{}
}

func TestRoadsUDP(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, rd := range w.roads() {
			t.Run(rd.name, func(t *testing.T) {
				w := newWorld(t, w.f)
				rd := w.road(rd.name)
				first := udp(ap(rd.src, 40000), ap(rd.asked, svcPort))
				if rd.service == 0 {
					first.dst = ap(rd.asked, podPort)
				} else {
					rd.service += 10
				}
				got := w.begin(rd, first, udp(first.src, ap(rd.real, podPort)))
				answer := got.back()
				// Without a reply nothing is confirmed, however often it is sent.
				w.check(rd.send(first), rd.out, got.src, got.dst, hitNew)
				w.entries(rd, first, answer, false)
				w.check(rd.answer(answer), rd.in, first.dst, first.src, hitNew)
				w.check(rd.answer(answer), rd.in, first.dst, first.src, hitNew)
				w.check(rd.send(first), rd.out, got.src, got.dst, hitNew, confirmed)
				w.entries(rd, first, answer, true)
				w.check(rd.send(first), rd.out, got.src, got.dst, hit)
				w.check(rd.answer(answer), rd.in, first.dst, first.src, hit)
			})
		}
	})
}

// Echo is followed by its identifier; protocols without ports by addresses.
func TestRoadsWithoutPorts(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, rd := range w.roads() {
			if rd.service != 0 {
				continue
			}
			t.Run(rd.name, func(t *testing.T) {
				w := newWorld(t, w.f)
				rd := w.road(rd.name)
				for _, id := range []uint16{7, 8} {
					first := echo(rd.src, rd.asked, id)
					got := w.begin(rd, first, first)
					answer := got.back()
					w.check(rd.answer(answer), rd.in, first.dst, first.src, hitNew)
					// However long it goes on, an echo is never confirmed.
					w.check(rd.send(first), rd.out, got.src, first.dst, hitNew)
					w.check(rd.answer(answer), rd.in, first.dst, first.src, hitNew)
					w.entries(rd, first, answer, false)
				}
				first := frame{src: ap(rd.src, 0), dst: ap(rd.asked, 0), proto: protoGRE, payload: []byte("x")}
				got := w.begin(rd, first, first)
				w.check(rd.answer(got.back()), rd.in, first.dst, first.src, hitNew)
				first.proto = maps.ProtoSCTP
				first.src, first.dst = ap(rd.src, 5), ap(rd.asked, 6)
				got = w.begin(rd, first, first)
				w.check(rd.answer(got.back()), rd.in, first.dst, first.src, hitNew)
				w.check(rd.send(first), rd.out, got.src, first.dst, hitNew, confirmed)
			})
		}
	})
}
