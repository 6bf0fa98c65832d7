package packet

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const (
	tooBigDrop = bpf.DpPwReasonPW_DROP_TOO_BIG
	tooBigSent = bpf.DpPwReasonPW_TOO_BIG_SENT
	pmtu       = bpf.DpPwReasonPW_PMTU_LEARNED
)

// sized is the frame with as much payload as makes an IP packet of n bytes.
func (fr frame) sized(n int) frame {
	headers := 20 + 8
	if fr.proto == maps.ProtoTCP {
		headers = 20 + 20
	}
	if fr.src.Addr().Is6() {
		headers += 20
	}
	return fr.with(string(pattern(n - headers)))
}

// narrow gives a node another MTU and flags.
func (w *world) narrow(id uint32, mtu uint16, flags uint16) {
	w.t.Helper()
	n, _, err := w.set.Nodes.Get(id)
	if err != nil {
		w.t.Fatal(err)
	}
	n.Mtu, n.Flags = mtu, flags
	n.Nexthop6 = maps.ToAddr(families()[1].nodeB)
	put(w, w.set.Nodes, id, n)
}

// tooBig sends a packet that must come back as the news of that MTU, under
// the node's name, quoting what was sent.
func (w *world) tooBig(s shot, mtu uint32, engine ...reason) {
	w.t.Helper()
	r := w.fire(s)
	want := aboutPacketBy(w.f.nodeA, r.shot.pkt, [2]byte{3, 4}, [2]byte{2, 0}, mtu)
	if r.action != actRedirect || !slices.Equal(r.out, want) {
		w.t.Fatalf("%v, action %d\n got  %x\n want %x", r, r.action, r.out, want)
	}
	r.is(tooBigDrop, append(engine, tooBigSent)...)
}

// What a pod sends to another node's pod and does not fit the way is answered
// with its MTU, as a flow's first packet and later, directly and by a service,
// in one piece and to be segmented; what may be fragmented is, by the device.
func TestTooBigForTheTunnel(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		pod := func(fr frame) shot { return w.at(fromPod, dontFragment(fr.bytes(t))) }
		out := udp(ap(w.f.client, 40000), ap(w.f.remote, podPort))
		w.tooBig(pod(out.sized(innerMTU+1)), innerMTU, miss, created)
		w.run(pod(out.sized(innerMTU))).is(fwdEncap, hitNew)
		w.tooBig(pod(out.sized(innerMTU+1)), innerMTU, hitNew)
		if !w.f.v6 {
			w.pod(devClient, out.sized(innerMTU+1)).is(fwdTunnel, hitNew)
		}
		seg := tcp(ap(w.f.client, 40001), ap(w.f.remote, podPort), ack)
		s := pod(seg.sized(2 * 1380))
		s.gso = 1380
		w.run(s).is(fwdTunnel, miss, created, bpf.DpPwReasonPW_FLOW_MIDSTREAM) // see TestEncap
		s.gso = 1420
		w.tooBig(s, innerMTU, hitNew)

		// The way is narrower by now, to that node alone.
		const mtu = 1340
		w.narrow(nodeIDB, mtu, maps.NodeHeader)
		w.tooBig(pod(out.sized(innerMTU)), mtu, hitNew)
		w.run(pod(out.sized(mtu))).is(fwdEncap, hitNew)
		w.run(pod(udp(out.src, ap(w.f.far, podPort)).sized(innerMTU))).is(fwdEncap, miss, created)

		// A service's client is told about the packet that it sent itself.
		asked := tcp(ap(w.f.client, 40002), ap(w.f.vipRemote, svcPort), syn)
		w.pod(devClient, asked).is(fwdEncap, miss, created)
		asked.flags = ack
		w.tooBig(pod(asked.sized(innerMTU)), mtu, hitNew)

		// Without a header, the device's way is no other.
		w.narrow(nodeIDB, mtu, 0)
		w.tooBig(pod(out.sized(innerMTU)), mtu, hitNew)
		w.run(pod(out.sized(mtu))).is(fwdTunnel, hitNew)

		// IPv6 cannot live with less than 1280: the device cuts.
		w.narrow(nodeIDB, 1200, maps.NodeHeader)
		if w.f.v6 {
			w.tooBig(pod(out.sized(1281)), 1280, hitNew)
			w.run(pod(out.sized(1280))).is(fwdTunnel, hitNew)
		} else {
			w.tooBig(pod(out.sized(1201)), 1200, hitNew)
		}
	})
}

// A directly routed way has room for the header that is not there, its device
// no more than it says; nobody cuts what is too big.
func TestTooBigForADirectWay(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		w.narrow(nodeIDB, 1350, maps.NodeHeader|maps.NodeDirect)
		most := uint32(1400)
		if w.f.v6 {
			most = 1500 // of the device: the way to IPv6 addresses is another
		}
		out := udp(ap(w.f.client, 40000), ap(w.f.remote, podPort))
		pod := func(fr frame) shot { return w.at(fromPod, dontFragment(fr.bytes(t))) }
		w.run(pod(out.sized(int(most)))).is(fwdDirect, miss, created)
		w.tooBig(pod(out.sized(int(most)+1)), most, hitNew)
		if !w.f.v6 {
			w.pod(devClient, out.sized(int(most)+1)).is(tooBigDrop, hitNew)
		}
	})
}

// A router's word about a packet of the tunnel itself: the node's entry is
// lowered, and the next packet too large is answered with what is left. It
// must be about a packet that this node may have sent, to a node that it
// knows; everything is left to the kernel, too.
func TestLearnsTheTunnelsMTU(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		both(t, func(t *testing.T, w *world) {
			under, head, router := families()[0], 50, netip.MustParseAddr("172.31.0.1")
			if v6 {
				under, head, router = families()[1], 70, netip.MustParseAddr("fd00:172:31::1")
			}
			w.ways()
			put(w, w.set.Nodes, 0, maps.Node{Addr: maps.ToAddr(under.nodeA)})
			put(w, w.set.NodeIDs, maps.ToAddr(under.nodeB), nodeIDB)
			inner := udp(ap(w.f.client, 40000), ap(w.f.remote, podPort)).sized(1400).bytes(t)
			vxlan := slices.Concat([]byte{8, 0, 0, 0, 0, 0x10, 0, 0}, inner)
			sent := func(change func(*frame)) []byte {
				fr := udp(ap(under.nodeA, 0xc123), ap(under.nodeB, 4789)).with(string(vxlan))
				change(&fr)
				return fr.bytes(t)[14:]
			}
			asSent := sent(func(*frame) {})
			kind := [2]byte{3, 4}
			if v6 {
				kind = [2]byte{2, 0}
			}
			tells := func(kind [2]byte, mtu uint32, quote []byte) *result {
				t.Helper()
				word := binary.BigEndian.AppendUint32(nil, mtu)
				return w.run(w.at(fromNetdev, icmp(t, router, under.nodeA, kind, append(word, quote[:min(len(quote), 500)]...))))
			}
			entry := func() uint16 {
				n, _, err := w.set.Nodes.Get(nodeIDB)
				if err != nil {
					t.Fatal(err)
				}
				return n.Mtu
			}
			nothing := func(what string, r *result) {
				t.Helper()
				r.is(passed)
				if entry() != innerMTU {
					t.Fatalf("%s: the node's MTU is %d", what, entry())
				}
			}
			nothing("unreachable", tells([2]byte{kind[0] - 2*map[bool]byte{true: 1}[v6] + map[bool]byte{true: 1}[v6], 1}, 1400, asSent))
			nothing("no more than before", tells(kind, uint32(innerMTU+head), asSent))
			nothing("no MTU", tells(kind, 0, asSent))
			nothing("another port", tells(kind, 1400, sent(func(fr *frame) { fr.dst = ap(under.nodeB, 4790) })))
			nothing("an unknown node", tells(kind, 1400, sent(func(fr *frame) { fr.dst = ap(under.world, 4789) })))
			nothing("not our packet", tells(kind, 1400, sent(func(fr *frame) { fr.src = ap(under.nodeC, 1) })))
			spare := sent(func(fr *frame) { fr.src = ap(under.nodeC, 0xc123) })
			nothing("by no end of our tunnels", w.run(w.at(fromNetdev, icmp(t, router, under.nodeC, kind, append([]byte{0, 0, 5, 0x78}, spare[:500]...)))))
			wrongVNI := slices.Clone(vxlan)
			wrongVNI[5]++
			nothing("another VNI", tells(kind, 1400, sent(func(fr *frame) { fr.payload = wrongVNI })))
			nothing("the quote ends before the VNI", tells(kind, 1400, asSent[:len(asSent)-len(vxlan)+4]))

			tells(kind, 1400, asSent).is(passed, pmtu)
			if want := uint16(1400 - head); entry() != want {
				t.Fatalf("the node's MTU is %d, want %d", entry(), want)
			}
			w.tooBig(w.at(fromPod, dontFragment(inner)), uint32(1400-head), miss, created)
			tells(kind, 1450, asSent).is(passed) // never up
			tells(kind, 68, asSent).is(passed, pmtu)
			least := uint16(552 - head)
			if v6 {
				least = uint16(1280 - head)
			}
			if entry() != least {
				t.Fatalf("the node's MTU is %d, want %d", entry(), least)
			}
		})
	}
}
