package packet

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// otherRouter stands on the second device's link.
func otherRouter(f family) netip.Addr {
	if f.v6 {
		return netip.MustParseAddr("fd00:172:30::1")
	}
	return netip.MustParseAddr("172.30.0.1")
}

// otherUplink has the world reached by the second device, for the rest of the
// test.
func (w *world) otherUplink(t *testing.T) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	hop := otherRouter(w.f)
	bits := hop.BitLen()
	link := &netlink.Route{LinkIndex: w.devs[devWire2].index, Scope: netlink.SCOPE_LINK,
		Dst: &net.IPNet{IP: hop.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
	must(netlink.RouteAdd(link))
	world := &netlink.Route{LinkIndex: link.LinkIndex, Gw: hop.AsSlice(),
		Dst: &net.IPNet{IP: w.f.world.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
	must(netlink.RouteAdd(world))
	t.Cleanup(func() {
		must(netlink.RouteDel(world))
		must(netlink.RouteDel(link))
	})
}

// A flow to the world follows a route that has changed, under the address that
// it has, and its answers are taken from there.
func TestWayOutFollowsTheRoute(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		out := tcp(ap(f.client, 40000), ap(f.world, 443), syn)
		sent, _ := decode(w.pod(devClient, out).is(fwdWire, miss, created).out)
		port, _ := sent.ports()
		in := tcp(out.dst, ap(f.nodeA, port), syn|ack)
		w.wire(in).is(fwdLocal, hitNew)
		out.flags, in.flags = ack, ack
		w.pod(devClient, out).is(fwdWire, hitNew, confirmed)

		w.otherUplink(t)
		w.pod(devClient, out).is(fwdWire, hit) // nobody has said so yet
		w.bump(slotWorld)
		w.pod(devClient, out).is(fwdWire, stale, hit).leaves(in.dst, out.dst)
		e := w.entry(out)
		if at(e.To) != (place{w.wirePlace().kind, w.index(devWire2)}) || maps.FromAddr(e.Nexthop) != otherRouter(f) {
			t.Fatalf("goes to %v by %v", at(e.To), maps.FromAddr(e.Nexthop))
		}
		w.run(shot{hook: fromNetdev, dev: devWire2, pkt: in.bytes(t)}).is(fwdLocal, hit).leaves(in.src, out.src)
	})
}

// What came in from outside is answered by the route of now, whichever
// direction notices first.
func TestWayBackFollowsTheRoute(t *testing.T) {
	for _, first := range []string{"client", "answer"} {
		t.Run(first, func(t *testing.T) {
			both(t, func(t *testing.T, w *world) {
				f := w.f
				out := tcp(ap(f.world, 40000), ap(f.lb, svcPort), syn)
				in := tcp(ap(f.remote, podPort), out.src, syn|ack)
				w.wire(out).is(fwdTunnel, miss, created)
				w.tunnel(f.nodeB, in).is(fwdWire, hitNew)
				out.flags, in.flags = ack, ack
				w.wire(out).is(fwdTunnel, hitNew, confirmed)
				w.otherUplink(t)
				w.bump(slotWorld)
				if first == "client" {
					w.wire(out).is(fwdTunnel, stale, hit)
					w.tunnel(f.nodeB, in).is(fwdWire, hit).leaves(out.dst, out.src)
				} else {
					w.tunnel(f.nodeB, in).is(fwdWire, stale, hit).leaves(out.dst, out.src)
				}
				e := w.entry(in)
				if at(e.To) != (place{w.wirePlace().kind, w.index(devWire2)}) || maps.FromAddr(e.Nexthop) != otherRouter(f) {
					t.Fatalf("answers go to %v by %v", at(e.To), maps.FromAddr(e.Nexthop))
				}
				w.wire(out).is(fwdTunnel, hit)
			})
		})
	}
}

// A flow under an address that the node has no more is over: its next packet
// begins another, under the address of now.
func TestAddressToSendUnderIsGone(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		second := f.nodeC // the node's other address, for this once
		w.addr(second, maps.Peer{Identity: maps.IdentityHost, Slot: slotNodeB, Flags: maps.PeerHost})
		own := maps.DevAddrs{V4: maps.ToAddr(second), V6: maps.ToAddr(second)}
		put(w, w.set.DevAddrs, w.index(devWire), own)
		out := udp(ap(f.client, 40000), ap(f.world, 53))
		sent, _ := decode(w.pod(devClient, out).is(fwdWire, miss, created).out)
		port, _ := sent.ports()
		if sent.src != second {
			t.Fatalf("left under %v", sent.src)
		}
		// Another address is the one to send under; the old one is still there.
		own = maps.DevAddrs{V4: maps.ToAddr(f.nodeA), V6: maps.ToAddr(f.nodeA)}
		put(w, w.set.DevAddrs, w.index(devWire), own)
		w.bump(slotWorld)
		w.pod(devClient, out).is(fwdWire, stale, hitNew).leaves(ap(second, port), out.dst)

		w.addr(second, maps.Peer{Identity: maps.IdentityWorld, Slot: slotWorld})
		w.bump(slotWorld)
		sent, _ = decode(w.pod(devClient, out).is(fwdWire, stale, takenOver, miss, created).out)
		if port, _ = sent.ports(); sent.src != f.nodeA {
			t.Fatalf("left under %v", sent.src)
		}
		w.wire(udp(out.dst, ap(f.nodeA, port))).is(fwdLocal, hitNew).leaves(out.dst, out.src)
	})
}

// What does not fit the device towards the world is answered with its MTU, as
// a flow's first packet and later; what may be fragmented is dropped, because
// nobody does it.
func TestTooBigForTheUplink(t *testing.T) {
	const mtu = 1400
	const tooBig, told = bpf.DpPwReasonPW_DROP_TOO_BIG, bpf.DpPwReasonPW_TOO_BIG_SENT
	both(t, func(t *testing.T, w *world) {
		w.otherUplink(t)
		link, err := netlink.LinkByName(devWire2)
		if err != nil {
			t.Fatal(err)
		}
		was := link.Attrs().MTU
		if err := netlink.LinkSetMTU(link, mtu); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netlink.LinkSetMTU(link, was); err != nil {
				t.Error(err)
			}
		})
		room := mtu - 28
		if w.f.v6 {
			room -= 20
		}
		out := udp(ap(w.f.client, 40000), ap(w.f.world, 53))
		fits, over := out.with(string(pattern(room))), dontFragment(out.with(string(pattern(room+50))).bytes(t))
		answered := func(engine ...reason) {
			t.Helper()
			r := w.fire(w.at(fromPod, over))
			if want := aboutPacketBy(w.f.nodeA, r.shot.pkt, [2]byte{3, 4}, [2]byte{2, 0}, mtu); r.action != actRedirect || !slices.Equal(r.out, want) {
				t.Fatalf("action %d\n got  %x\n want %x", r.action, r.out, want)
			}
			r.is(tooBig, append(engine, told)...)
		}
		answered(miss, created)
		w.pod(devClient, fits).is(fwdWire, hitNew)
		answered(hitNew)
		if !w.f.v6 {
			w.pod(devClient, out.with(string(pattern(room+1)))).is(tooBig, hitNew)
		}
	})
}
