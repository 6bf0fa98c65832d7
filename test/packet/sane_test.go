package packet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// insane says what is wrong with a packet's fate, beyond what broken says of
// all; "" if nothing is. With hostile maps the addresses mean nothing.
func (w *world) insane(r *result, hostile bool) string {
	if r.mark&^0x1000 != r.shot.mark&^0x1000 {
		return fmt.Sprintf("the mark %#x became %#x", r.shot.mark, r.mark)
	}
	if r.skipped() {
		return r.untouched()
	}
	why, ok := r.ends()
	switch {
	case !ok:
		return fmt.Sprintf("not exactly one outcome: %v", r)
	case why == passed:
		if msg := r.untouched(); msg != "" {
			return msg
		}
		if hostile {
			return ""
		}
		return w.wrongPass(r)
	case why == reassembly:
		if hostile {
			return ""
		}
		return w.wrongRise(r)
	case r.told():
		return "" // see unanswered
	case maps.IsDrop(why):
		if hostile {
			return ""
		}
		return w.wrongDrop(r, why)
	}
	in, out := r.frames()
	if msg := translated(in, out, r.shot.gso != 0, r.counts[clamped] != 0, r.unIPIP()); msg != "" {
		return msg
	}
	if msg := r.aged(in, out, why); msg != "" {
		return msg
	}
	if msg := r.wrongOuter(in); msg != "" {
		return msg
	}
	if hostile {
		return ""
	}
	return w.wrongForward(r, in, out, why)
}

// sized gives a packet that is too large for its length field a length.
func sized(pkt []byte) []byte {
	at, n := 16, len(pkt)-14
	if len(pkt) > 54 && pkt[12] == 0x86 {
		at, n = 18, len(pkt)-54
	}
	if len(pkt) < 34 || pkt[at] != 0 || pkt[at+1] != 0 {
		return pkt
	}
	out := slices.Clone(pkt)
	binary.BigEndian.PutUint16(out[at:], uint16(n))
	return out
}

const clamped = bpf.DpPwReasonPW_MSS_CLAMPED

func (r *result) untouched() string {
	if !bytes.Equal(r.out, r.shot.pkt) {
		return "a packet left to the kernel was changed"
	}
	return ""
}

// frames are the packet as it came and as it went on, without tunnel headers.
func (r *result) frames() (in, out []byte) {
	in, out = r.shot.pkt, r.out
	if r.counts[fwdEncap] != 0 && len(out) >= tunnelHeader {
		out = out[tunnelHeader:]
	}
	if r.counts[fwdIPIP] != 0 && len(out) >= 14+ipipHeader {
		out = unwrap(out)
	}
	switch {
	case r.unIPIP():
		in = unwrap(in)
	case r.counts[fwdDecap] != 0 && len(in) >= tunnelHeader:
		in = in[tunnelHeader:]
	}
	return in, out
}

// nodeOf is the id of the node with that address, of whichever family.
func (w *world) nodeOf(a netip.Addr) uint32 {
	switch a {
	case w.f.nodeB, outer().nodeB:
		return nodeIDB
	case w.f.nodeC, outer().nodeC:
		return nodeIDC
	}
	return 0
}

// wrongRise: what the kernel is given to reassemble is in fragments, from who
// it says, as far as the place tells, for somebody it routes to, and unchanged
// but for its frame and TTL.
func (w *world) wrongRise(r *result) string {
	in, f := r.shot.pkt, w.f
	d, ok := decode(in)
	if src, dst, six := ends(in); !ok && six && len(in) >= 62 && src.Is6() && in[20] == 44 && binary.BigEndian.Uint16(in[56:])&0xfff9 != 0 {
		// What stands behind the fragment header is looked at when it is whole.
		d.src, d.dst, d.v6, d.fragment, ok = src, dst, src.Is6(), true, true
	}
	if !ok || !d.fragment || !w.defrags {
		return "reassembled without need or use"
	}
	if d.dst.IsMulticast() || f.podsA.Contains(d.dst) && !f.here(d.dst) {
		return fmt.Sprintf("reassembled for %v", d.dst)
	}
	ttl := 22
	if d.v6 {
		ttl = 21
	}
	back := slices.Clone(r.out)
	copy(back, in[:12])
	back[ttl] = in[ttl]
	if !d.v6 {
		copy(back[24:26], in[24:26])
	}
	if !slices.Equal(back, in) || r.out[ttl] < 2 || r.mark != r.shot.mark {
		return "what is reassembled was changed"
	}
	if d.v6 != f.v6 {
		return ""
	}
	switch r.shot.hook {
	case fromPod:
		if d.src != f.client {
			return fmt.Sprintf("a pod's fragment from %v was reassembled", d.src)
		}
	case fromNetdev:
		if f.clustered(d.src) || never(d.src) {
			return fmt.Sprintf("the wire's fragment from %v to %v was reassembled", d.src, d.dst)
		}
	case fromOverlay:
		return w.notBehind(r, in, d.src, maps.FromAddr(r.shot.tunnel.peer))
	default:
		return "the host's own fragment was reassembled"
	}
	return ""
}

// says is what a frame of the tunnel says of its packet: [frameVia], a kind of
// name, or nothing.
func says(frame []byte) uint8 {
	if slices.Equal(frame[6:9], []byte{2, 'p', 'w'}) && frame[11] >= frameVia && frame[11] <= frameHost {
		return frame[11]
	}
	return 0
}

// ---- who may send what where ---------------------------------------------

// pods: is it an address that a pod has, or may have?
func (f family) pods(a netip.Addr) bool {
	for _, p := range []netip.Prefix{f.podsA, f.podsB, f.podsC, f.podsLost} {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// here: is it a pod of this node?
func (f family) here(a netip.Addr) bool { return a == f.client || a == f.local || a == f.third }

// clustered: nobody outside may use it as a source.
func (f family) clustered(a netip.Addr) bool {
	return f.pods(a) || f.services.Contains(a) || a == f.nodeA
}

// never may be nobody's source.
func never(a netip.Addr) bool {
	return a.IsMulticast() || a.IsLoopback() || a.IsUnspecified() || a.Is4() && (a.As4()[0] == 0 || a.As4()[0] >= 224)
}

// linkLocal: ARP, and IPv6 neighbour discovery and MLD to the link, are for
// who is on the link.
func linkLocal(pkt []byte) bool {
	if len(pkt) < 14 || binary.BigEndian.Uint16(pkt[12:]) == 0x0806 {
		return len(pkt) >= 14
	}
	d, ok := decode(pkt)
	return ok && d.v6 && d.proto == protoICMP6 && len(d.upper) >= 8 &&
		(d.upper[0] >= 130 && d.upper[0] <= 137 || d.upper[0] == 143) &&
		(d.dst.IsLinkLocalUnicast() || d.dst.IsLinkLocalMulticast() || d.dst.IsInterfaceLocalMulticast())
}

// mapped: such addresses are not for the wire.
func mapped(pkt []byte) bool {
	return len(pkt) >= 54 && pkt[12] == 0x86 && pkt[13] == 0xdd && pkt[14]>>4 == 6 &&
		(netip.AddrFrom16([16]byte(pkt[22:38])).Is4In6() || netip.AddrFrom16([16]byte(pkt[38:54])).Is4In6())
}

// ends reads the addresses even of what is otherwise no packet.
func ends(pkt []byte) (src, dst netip.Addr, ok bool) {
	switch {
	case len(pkt) >= 34 && pkt[12] == 8 && pkt[13] == 0 && pkt[14]>>4 == 4:
		return netip.AddrFrom4([4]byte(pkt[26:30])), netip.AddrFrom4([4]byte(pkt[30:34])), true
	case len(pkt) >= 54 && pkt[12] == 0x86 && pkt[13] == 0xdd && pkt[14]>>4 == 6:
		return netip.AddrFrom16([16]byte(pkt[22:38])), netip.AddrFrom16([16]byte(pkt[38:54])), true
	}
	return src, dst, false
}

// wrongPass: what is left to the kernel is from and to no pod, or the link's.
// On the node's devices and to itself the host is its own master.
func (w *world) wrongPass(r *result) string {
	in, f := r.shot.pkt, w.f
	src, dst, ok := ends(in)
	switch r.shot.hook {
	case fromPod, toPod:
		host := r.shot.hook == toPod && r.shot.iif == "" // an ICMP error of the node's own
		if !linkLocal(in) && !host {
			return "a pod's packet was left to the kernel"
		}
	case fromOverlay, toOverlay:
		host := r.shot.hook == toOverlay && r.shot.iif == "" && quoteOf(in) != nil
		if !host {
			return "a packet of the tunnel was left to the kernel"
		}
	case fromNetdev:
		if ok && f.here(dst) && !linkLocal(in) {
			return fmt.Sprintf("a packet from %v to the pod %v was left to the kernel", src, dst)
		}
		if mapped(in) {
			return "an IPv4-mapped address was left to the kernel"
		}
	}
	return ""
}

// wrongDrop: on the node's devices, and to itself, what is of no pod, no
// service and no flow is the host's.
func (w *world) wrongDrop(r *result, why reason) string {
	if r.shot.hook != fromNetdev && r.shot.hook != toNetdev && r.shot.hook != toLo {
		return ""
	}
	in, f := r.shot.pkt, w.f
	_, dst, ok := ends(in)
	if mapped(in) {
		return ""
	}
	stranger := dst == f.world || dst == f.router || dst == f.nodeC || dst == outer().nodeC
	if !ok || linkLocal(in) || stranger && r.shot.hook == fromNetdev {
		return fmt.Sprintf("what is the host's was dropped: %s", maps.ReasonName(why))
	}
	return ""
}

// wrongForward: nobody speaks for others, and nobody reaches what nobody may.
func (w *world) wrongForward(r *result, in, out []byte, why reason) string {
	f := w.f
	a, _ := decode(in)
	b, _ := decode(out)
	if mapped(in) {
		return "an IPv4-mapped address was sent on"
	}
	if linkLocal(in) {
		return "what is the link's was sent on"
	}
	if a.dst.IsMulticast() || a.dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return fmt.Sprintf("sent on to %v", a.dst)
	}
	if a.v6 != f.v6 {
		return ""
	}
	if _, set := r.counts[fwdDecap]; !set && r.shot.hook != toPod && r.shot.hook != toOverlay && r.shot.hook != toNetdev && r.shot.hook != toLo && never(a.src) {
		return fmt.Sprintf("sent on from %v", a.src)
	}
	if msg := w.wrongLater(r, in); msg != "" {
		return msg
	}
	if f.here(b.dst) && why != fwdLocal && why != fwdDecap || !f.here(b.dst) && (why == fwdLocal || why == fwdDecap) {
		return fmt.Sprintf("%s to %v", maps.ReasonName(why), b.dst)
	}
	if f.services.Contains(b.dst) && why != fwdHost {
		return fmt.Sprintf("sent on to %v, a service", b.dst)
	}
	switch r.shot.hook {
	case fromPod:
		if a.src != f.client {
			return fmt.Sprintf("a pod's packet from %v was sent on", a.src)
		}
		if sport, dport := a.ports(); a.proto == maps.ProtoUDP && !a.later(in) && dport == 4789 && (b.dst == f.nodeA || b.dst == f.nodeB || b.dst == f.nodeC) {
			return fmt.Sprintf("a pod reached a node's tunnel port from %d", sport)
		}
	case fromNetdev:
		if r.counts[fwdDecap] != 0 || len(in) != len(r.shot.pkt) {
			return w.wrongTunnelled(r, a)
		}
		if n := says(out); n > frameVia && (why != fwdEncap && why != fwdTunnel || !w.dsr || f.clustered(a.src)) {
			return fmt.Sprintf("a frame that says %d leaves", n)
		}
		if f.clustered(a.src) {
			return fmt.Sprintf("from the wire %v was believed", a.src)
		}
	case fromOverlay:
		from := maps.FromAddr(r.shot.tunnel.peer)
		if r.shot.tunnel.vni != vni || from != f.nodeB && from != f.nodeC && from != outer().nodeB && from != outer().nodeC {
			return fmt.Sprintf("a packet of %v was taken out of the tunnel", from)
		}
		if n := says(in); n > frameVia && quoteOf(in) == nil && !bytes.Equal(in[2:6], b.dst.AsSlice()[len(b.dst.AsSlice())-4:]) {
			return fmt.Sprintf("%x was named, and %v got it", in[2:6], b.dst)
		}
		return w.notBehind(r, in, a.src, from)
	}
	return ""
}

// wrongTunnelled: the header that was taken off was a node's, and what is in
// it lives behind that node.
func (w *world) wrongTunnelled(r *result, inner decoded) string {
	d, ok := decode(r.shot.pkt)
	switch {
	case !ok || d.src != outer().nodeB && d.src != outer().nodeC:
	case r.unIPIP():
		return w.notBehind(r, make([]byte, 12), inner.src, d.src)
	case d.proto == maps.ProtoUDP && len(d.upper) >= 16 && binary.BigEndian.Uint32(d.upper[8:]) == 0x08000000 && binary.BigEndian.Uint32(d.upper[12:]) == vni<<8:
		return w.notBehind(r, r.shot.pkt[tunnelHeader:], inner.src, d.src)
	}
	return "a tunnel header was taken off that no node of ours wrote"
}

// notBehind: an address of the cluster is where its node is; one from outside
// has the mark of an entry node, or the name that it gives a backend, unless the
// flow is known as one of that node's.
func (w *world) notBehind(r *result, frame []byte, src, node netip.Addr) string {
	f := w.f
	isB := node == f.nodeB || node == outer().nodeB
	good := isB && (f.podsB.Contains(src) || src == f.nodeB) || !isB && (f.podsC.Contains(src) || src == f.nodeC)
	if says(frame) != 0 || r.counts[hit]+r.counts[hitNew] == 1 {
		good = good && says(frame) == 0 || !f.clustered(src)
	}
	if !good {
		return fmt.Sprintf("%v was believed to be behind %v", src, node)
	}
	return ""
}
