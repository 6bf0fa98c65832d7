package hostile

import (
	"net/netip"
	"testing"
)

// The cases share a cluster; flows run through all of them.
func TestHostile(t *testing.T) {
	w := newWorld(t)
	w.unharmed()
	w.run("N13 spoofed sources from a pod", (*world).spoofedByPod)
	w.run("N13 spoofed sources from the wire", (*world).spoofedByWire)
	w.run("N13 spoofed sources in the tunnel", (*world).spoofedInTunnel)
	w.run("N13 live tuples", (*world).liveTuples)
	w.run("N13 VXLAN from pods", (*world).podVXLAN)
	w.run("N13 VXLAN from strangers", (*world).strangers)
	w.run("N14 malformed from pods", (*world).malformedByPod)
	w.run("N14 malformed to pods", (*world).malformedToPod)
	w.run("N14 malformed in the tunnel", (*world).malformedInTunnel)
	w.run("N14 link traffic of pods", (*world).linkOfPod)
	w.run("N14 host traffic", (*world).hostTraffic)
	w.run("N14 options and extension headers that are fine", (*world).unusual)
}

// The same lies and nonsense from a pod with filters at the ingress of its
// device: these, and what is over it, lead nothing past the judgement.
func TestHostileFilteredPod(t *testing.T) {
	w := newWorld(t)
	w.filterVillain()
	w.unharmed()
	w.run("N13 spoofed sources from a pod", (*world).spoofedByPod)
	w.run("N13 live tuples", (*world).liveTuples)
	w.run("N13 VXLAN from pods", (*world).podVXLAN)
	w.run("N14 malformed from pods", (*world).malformedByPod)
	w.run("N14 link traffic of pods", (*world).linkOfPod)
	w.run("N14 options and extension headers that are fine", (*world).unusual)
}

// A pod may send from its own addresses alone, whoever is asked.
func (w *world) spoofedByPod() {
	w.families(func(v6 bool) {
		others := []netip.Addr{w.addr("victim", v6), w.addr("peer", v6), w.addr("node-a", v6), w.addr("node-b", v6), w.addr("ext", v6), service(v6)}
		var frames [][]byte
		for _, src := range others {
			for _, dst := range []string{"victim", "peer", "node-a", "node-b", "ext"} {
				if d := w.addr(dst, v6); d != src {
					frames = append(frames, w.fromPod("villain", v6, udp(ap(src, sport), ap(d, port), []byte(mark))...))
					frames = append(frames, w.fromPod("villain", v6, tcp(ap(src, sport), ap(d, port), "S", []byte(mark))...))
				}
			}
		}
		w.counted("foreign source", "villain", "node-a", "drop_spoofed_source", "from_pod", frames...)
		frames = nil
		for _, src := range impossible(v6) {
			frames = append(frames, w.fromPod("villain", v6, udp(ap(src, sport), ap(w.addr("victim", v6), port), []byte(mark))...))
		}
		w.counted("impossible source", "villain", "node-a", "drop_bad_source", "from_pod", frames...)
	})
}

func service(v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr("fd00:10:98::101")
	}
	return netip.MustParseAddr("10.98.1.1")
}

func impossible(v6 bool) []netip.Addr {
	if v6 {
		return []netip.Addr{netip.IPv6Unspecified(), netip.MustParseAddr("::1"), netip.MustParseAddr("ff0e::1")}
	}
	return []netip.Addr{netip.MustParseAddr("0.0.0.1"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("224.0.0.1"), netip.MustParseAddr("255.255.255.255")}
}

// The underlay may not speak for pods, services or the node itself.
func (w *world) spoofedByWire() {
	w.families(func(v6 bool) {
		var frames [][]byte
		for _, src := range []netip.Addr{w.addr("villain", v6), w.addr("peer", v6), w.addr("node-a", v6), service(v6), w.addr("victim", v6)} {
			frames = append(frames, w.fromWire("node-a", v6, udp(ap(src, sport), ap(w.addr("victim", v6), port), []byte(mark))...))
		}
		w.counted("a pod's, the node's or a service's source", "ext", "node-a", "drop_spoofed_source", "from_netdev", frames...)
		frames = nil
		for _, src := range impossible(v6) {
			frames = append(frames, w.fromWire("node-a", v6, udp(ap(src, sport), ap(w.addr("victim", v6), port), []byte(mark))...))
		}
		w.counted("impossible source", "ext", "node-a", "drop_bad_source", "from_netdev", frames...)
	})
}

// A node speaks for what is behind it, and for nobody else.
func (w *world) spoofedInTunnel() {
	outer := w.addr("node-b", false)
	w.families(func(v6 bool) {
		var frames [][]byte
		for _, src := range []netip.Addr{w.addr("villain", v6), w.addr("node-a", v6), w.addr("ext", v6), service(v6), w.addr("victim", v6)} {
			frames = append(frames, w.vxlan(outer, "node-a", vni, v6, udp(ap(src, sport), ap(w.addr("victim", v6), port), []byte(mark))...))
		}
		w.counted("what is not behind that node", "ext", "node-a", "drop_spoofed_source", "from_netdev", frames...)
	})
}

// liveTuples copies the tuples of flows in progress, in both directions, from
// everywhere but their own place.
func (w *world) liveTuples() {
	for i, s := range w.streams {
		r, err := s.Report(w.ctx)
		w.must(err)
		local, remote := netip.MustParseAddrPort(r.Local), netip.MustParseAddrPort(r.Remote)
		v6 := local.Addr().Is6()
		victim := remote.Addr() == w.addr("victim", v6)
		acrossNodes := local.Addr() == w.addr("peer", v6)
		if !victim || !acrossNodes {
			continue
		}
		ask, answer := udp(local, remote, []byte(mark)), udp(remote, local, []byte(mark))
		if i%2 == 0 { // the streams alternate between TCP and UDP
			ask, answer = tcp(local, remote, "A", []byte(mark)), tcp(remote, local, "A", []byte(mark))
		}
		w.counted("the peer's packet from another pod", "villain", "node-a", "drop_spoofed_flow", "from_pod", w.fromPod("villain", v6, ask...))
		w.counted("the victim's packet from another pod", "villain", "node-a", "drop_spoofed_flow", "from_pod", w.fromPod("villain", v6, answer...))
		w.counted("the peer's packet from the wire", "ext", "node-a", "drop_spoofed_flow", "from_netdev", w.fromWire("node-a", v6, ask...))
		w.counted("the victim's packet from the wire", "ext", "node-b", "drop_spoofed_flow", "from_netdev", w.fromWire("node-b", v6, answer...))
		// RST and SYN, too.
		if i%2 == 0 {
			w.counted("a reset from another pod", "villain", "node-a", "drop_spoofed_flow", "from_pod", w.fromPod("villain", v6, tcp(local, remote, "R", []byte(mark))...))
			w.counted("a reset from the wire", "ext", "node-a", "drop_spoofed_flow", "from_netdev", w.fromWire("node-a", v6, tcp(local, remote, "R", []byte(mark))...))
		}
		// From a peer of the tunnel that is no node, and with another VNI.
		w.counted("the peer's packet from a stranger's tunnel", "ext", "node-a", "drop_unknown_peer", "from_overlay", w.vxlan(netip.MustParseAddr("172.31.0.9"), "node-a", vni, v6, ask...))
		w.counted("the peer's packet in another network", "ext", "node-a", "drop_wrong_vni", "from_overlay", w.vxlan(w.addr("node-b", false), "node-a", vni+1, v6, ask...))
	}
}

// podVXLAN: nobody but nodes speaks to a node's tunnel port; between pods
// the port is a port like any other.
func (w *world) podVXLAN() {
	w.families(func(v6 bool) {
		inner := []byte(mark)
		for _, node := range []string{"node-a", "node-b"} {
			w.counted("to the tunnel port of "+node, "villain", "node-a", "drop_pod_vxlan", "from_pod",
				w.fromPod("villain", v6, udp(ap(w.addr("villain", v6), sport), ap(w.addr(node, v6), 4789), inner)...))
		}
	})
	s, err := w.pod("victim").Netns.Serve(w.ctx, "tunnel", 4789)
	w.must(err)
	defer func() { w.must(s.Kill(w.ctx)) }()
	w.families(func(v6 bool) {
		sum, err := w.pod("villain").Send(w.ctx, ap(w.addr("victim", v6), 4789).String(), "-proto", "udp")
		w.must(err)
		if sum.OK != 1 {
			w.Errorf("port 4789 of a pod: %+v", sum.Failure)
		}
	})
}

// strangers: tunnel packets from addresses that are no node, and of other
// networks, in each family of the outer and the inner packet.
func (w *world) strangers() {
	w.families(func(v6 bool) {
		packet := udp(ap(w.addr("peer", v6), sport), ap(w.addr("victim", v6), port), []byte(mark))
		for _, outer := range []string{"172.31.0.9", "172.31.0.1", "10.244.158.65", "fd00:172:31::9"} {
			w.counted("VXLAN from "+outer, "ext", "node-a", "drop_unknown_peer", "from_overlay", w.vxlan(netip.MustParseAddr(outer), "node-a", vni, v6, packet...))
		}
		for _, id := range []uint32{0, 1, vni - 1, vni + 1, 1<<24 - 1} {
			w.counted("another network", "ext", "node-a", "drop_wrong_vni", "from_overlay", w.vxlan(w.addr("node-b", false), "node-a", id, v6, packet...))
		}
	})
}
