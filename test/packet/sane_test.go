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

// What must hold for every packet at every hook, whatever is in it and in the
// maps: written from the contract (docs/behaviour.md) and on this test's own
// reader of packets. A rule that changes, such as what becomes of fragments or
// who answers when a TTL is used up, has one place here.

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
	case r.counts[tooBigSent] != 0:
		return r.wrongAnswer()
	case maps.IsDrop(why):
		if hostile {
			return ""
		}
		return w.wrongDrop(r, why)
	}
	in, out := r.frames()
	if msg := translated(in, out, r.shot.gso != 0, r.counts[clamped] != 0); msg != "" {
		return msg
	}
	if msg := r.aged(in, out, why); msg != "" {
		return msg
	}
	if r.counts[fwdEncap] != 0 {
		if msg := r.wrongOuter(); msg != "" {
			return msg
		}
	}
	if hostile {
		return ""
	}
	return w.wrongForward(r, in, out, why)
}

// wrongAnswer checks what is sent back instead of a packet: an ICMP error about
// it, to its sender.
func (r *result) wrongAnswer() string {
	in, ok1 := decode(r.shot.pkt)
	out, ok2 := decode(r.out)
	quote := quoteOf(r.out)
	switch {
	case r.action != actRedirect:
		return fmt.Sprintf("the answer is not sent: action %d", int32(r.action))
	case !ok2 || wrong(r.out) != "" || out.at+len(out.upper) != len(r.out):
		return "the answer is no packet, or its checksum is wrong"
	case !ok1 || out.dst != in.src || never(in.src) || in.dst.IsMulticast() || in.later(r.shot.pkt) || quoteOf(r.shot.pkt) != nil:
		return fmt.Sprintf("an answer to %v where none may be", out.dst)
	case quote == nil || len(quote) <= 42 || r.counts[clamped] == 0 && !bytes.HasPrefix(r.shot.pkt[14:], quote[14:]):
		return "the answer does not quote the packet"
	}
	return ""
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
	if r.counts[fwdDecap] != 0 && len(in) >= tunnelHeader {
		in = in[tunnelHeader:]
	}
	return in, out
}

// whole: all headers are there that an action may need.
func (d decoded) whole(gso bool) bool {
	n := len(d.upper)
	if d.fragment {
		return true // ports are another packet's
	}
	switch d.proto {
	case maps.ProtoTCP:
		return n >= 20 && d.upper[12]>>4 >= 5 && int(d.upper[12]>>4)*4 <= n
	case maps.ProtoUDP:
		if n < 8 {
			return false
		}
		said := int(binary.BigEndian.Uint16(d.upper[4:]))
		return said >= 8 && said <= n || gso
	case maps.ProtoSCTP:
		return n >= 12
	case protoICMP, protoICMP6:
		return n >= 8 && (d.proto == protoICMP6) == d.v6
	}
	return true
}

// later: not the first fragment, which has the upper header.
func (d decoded) later(pkt []byte) bool {
	if !d.fragment {
		return false
	}
	if !d.v6 {
		return binary.BigEndian.Uint16(pkt[20:])&0x1fff != 0
	}
	for next, at := pkt[20], 54; at+8 <= len(pkt) && at < d.at; {
		size := (int(pkt[at+1]) + 1) * 8
		switch next {
		case 44:
			if binary.BigEndian.Uint16(pkt[at+2:])&0xfff8 != 0 {
				return true
			}
			size = 8
		case 51:
			size = (int(pkt[at+1]) + 2) * 4
		}
		next, at = pkt[at], at+size
	}
	return false
}

// translated: out is in with nothing changed but what a translation changes,
// and every checksum exactly as right, or as wrong, as it was.
func translated(in, out []byte, gso, mss bool) string {
	if len(in) != len(out) {
		return fmt.Sprintf("%d bytes became %d", len(in), len(out))
	}
	a, ok := decode(in)
	if !ok || !a.whole(gso) {
		return "acted on headers that are not there"
	}
	b, ok := decode(out)
	if !ok {
		return "what left is no packet"
	}
	may := mayChange(in, a, mss)
	for i := range in {
		if in[i] != out[i] && !may[i] {
			return fmt.Sprintf("byte %d changed from %#x to %#x", i, in[i], out[i])
		}
	}
	if !a.v6 && residue(onesSum(0, a.header)) != residue(onesSum(0, b.header)) {
		return "the IPv4 header's checksum does not follow the change"
	}
	if a.fragment {
		return "" // covers what is in other packets
	}
	at, cover, pseudo, ok := a.field()
	if !ok {
		return ""
	}
	_, after, _, _ := b.field()
	if len(after) != len(cover) {
		return "the checksum covers another length"
	}
	none := func(c []byte) bool { return c[at] == 0 && c[at+1] == 0 }
	if a.proto == maps.ProtoUDP && none(cover) {
		if !none(after) {
			return "a datagram without a checksum got one"
		}
		return ""
	}
	if a.proto == maps.ProtoUDP && none(after) {
		return "a datagram lost its checksum"
	}
	sums := [2]uint64{}
	for i, d := range []decoded{a, b} {
		if pseudo {
			sums[i] = d.pseudo(len(cover))
		}
	}
	if residue(onesSum(sums[0], cover)) != residue(onesSum(sums[1], after)) {
		return "the transport checksum does not follow the change"
	}
	return ""
}

// residue is a ones' complement sum with one kind of zero.
func residue(sum uint64) uint64 { return sum % 0xffff }

// mayChange marks the bytes that a translation may change.
func mayChange(pkt []byte, d decoded, mss bool) []bool {
	may := make([]bool, len(pkt))
	mark := func(from, to int) {
		for i := from; i < min(to, len(may)); i++ {
			may[i] = true
		}
	}
	mark(0, 12) // the link's addresses
	markIP := func(at int, v6 bool) {
		if v6 {
			mark(at+7, at+8)
			mark(at+8, at+40)
			return
		}
		mark(at+8, at+9)
		mark(at+10, at+20)
	}
	markUpper := func(at int, proto uint8, kind byte) {
		switch proto {
		case maps.ProtoTCP:
			mark(at, at+4)
			mark(at+16, at+18)
		case maps.ProtoUDP:
			mark(at, at+4)
			mark(at+6, at+8)
		case maps.ProtoSCTP:
			mark(at, at+4)
			mark(at+8, at+12)
		case protoICMP, protoICMP6:
			mark(at+2, at+4)
			if kind == 0 || kind == 8 || kind == 128 || kind == 129 {
				mark(at+4, at+6)
			}
		}
	}
	markIP(14, d.v6)
	if d.later(pkt) {
		return may
	}
	kind := byte(255)
	if len(d.upper) > 0 {
		kind = d.upper[0]
	}
	markUpper(d.at, d.proto, kind)
	if mss && d.proto == maps.ProtoTCP && d.upper[13]&syn != 0 {
		markMSS(may, d)
	}
	if q := quoteOf(pkt); q != nil {
		at := d.at + 8
		ip := q[14:]
		markIP(at, d.v6)
		up, proto := at+40, uint8(255)
		if d.v6 && len(ip) >= 40 {
			proto = ip[6]
		} else if !d.v6 && len(ip) >= 20 {
			up, proto = at+int(ip[0]&15)*4, ip[9]
		}
		kind = 255
		if up < len(pkt) {
			kind = pkt[up]
		}
		markUpper(up, proto, kind)
	}
	return may
}

// markMSS marks the value of the option, wherever a segment has it.
func markMSS(may []bool, d decoded) {
	for i := 20; i+4 <= min(int(d.upper[12]>>4)*4, len(d.upper)); i++ {
		if d.upper[i] == 2 && d.upper[i+1] == 4 {
			may[d.at+i+2], may[d.at+i+3] = true, true
		}
	}
}

// aged: a router takes one of the TTL, the host's own stack does so itself.
func (r *result) aged(in, out []byte, why reason) string {
	a, _ := decode(in)
	b, _ := decode(out)
	want := a.ttl
	if !egress(r.shot.hook) && why != fwdHost {
		if a.ttl <= 1 {
			return fmt.Sprintf("sent on with a TTL of %d", a.ttl)
		}
		want--
	}
	if b.ttl != want {
		return fmt.Sprintf("a TTL of %d became %d", a.ttl, b.ttl)
	}
	return ""
}

// wrongOuter checks the header that was put before a packet.
func (r *result) wrongOuter() string {
	out, be := r.out, binary.BigEndian
	d, ok := decode(out)
	switch {
	case !ok || d.v6 || len(d.header) != 20 || d.proto != maps.ProtoUDP || len(d.upper) < 16:
		return "the tunnel header is none"
	case len(d.upper) != len(out)-34 || int(be.Uint16(d.upper[4:])) != len(d.upper):
		return "the tunnel header says another length"
	case be.Uint16(d.upper[2:]) != 4789 || be.Uint32(d.upper[8:]) != 0x08000000 || be.Uint32(d.upper[12:]) != vni<<8:
		return "the tunnel header is not ours"
	case d.src != outer().nodeA || d.dst != outer().nodeB && d.dst != outer().nodeC:
		return fmt.Sprintf("the tunnel header goes from %v to %v", d.src, d.dst)
	case !bytes.Equal(out[62:64], r.shot.pkt[12:14]):
		return "the inner frame is of another kind"
	}
	return ""
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
		if sport, dport := a.ports(); a.proto == maps.ProtoUDP && !a.fragment && dport == 4789 && (b.dst == f.nodeA || b.dst == f.nodeB || b.dst == f.nodeC) {
			return fmt.Sprintf("a pod reached a node's tunnel port from %d", sport)
		}
	case fromNetdev:
		if r.counts[fwdDecap] != 0 || len(in) != len(r.shot.pkt) {
			return w.wrongTunnelled(r, a)
		}
		if f.clustered(a.src) {
			return fmt.Sprintf("from the wire %v was believed", a.src)
		}
	case fromOverlay:
		from := maps.FromAddr(r.shot.tunnel.peer)
		if r.shot.tunnel.vni != vni || from != f.nodeB && from != f.nodeC && from != outer().nodeB && from != outer().nodeC {
			return fmt.Sprintf("a packet of %v was taken out of the tunnel", from)
		}
		return w.notBehind(r.shot.pkt, a.src, from)
	}
	return ""
}

// wrongTunnelled: the header that was taken off was a node's, and what is in
// it lives behind that node.
func (w *world) wrongTunnelled(r *result, inner decoded) string {
	d, ok := decode(r.shot.pkt)
	if !ok || d.proto != maps.ProtoUDP || len(d.upper) < 16 || d.src != outer().nodeB && d.src != outer().nodeC ||
		binary.BigEndian.Uint32(d.upper[8:]) != 0x08000000 || binary.BigEndian.Uint32(d.upper[12:]) != vni<<8 {
		return "a tunnel header was taken off that no node of ours wrote"
	}
	return w.notBehind(r.shot.pkt[tunnelHeader:], inner.src, d.src)
}

// notBehind: an address of the cluster is where its node is; one from outside
// has the mark of an entry node.
func (w *world) notBehind(frame []byte, src, node netip.Addr) string {
	f := w.f
	isB := node == f.nodeB || node == outer().nodeB
	good := isB && (f.podsB.Contains(src) || src == f.nodeB) || !isB && (f.podsC.Contains(src) || src == f.nodeC)
	if slices.Equal(frame[6:12], []byte{0x02, 'p', 'w', 0, 0, 0x02}) {
		good = !f.clustered(src)
	}
	if !good {
		return fmt.Sprintf("%v was believed to be behind %v", src, node)
	}
	return ""
}
