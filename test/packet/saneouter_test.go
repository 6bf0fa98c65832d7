package packet

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/podweir/podweir/internal/maps"
)

// unIPIP: the packet was taken out of an IPv4 header.
func (r *result) unIPIP() bool {
	return r.shot.hook == fromNetdev && r.action != actNext && isIPIP(r.shot.pkt)
}

// wrongOuter checks the header that was put before a packet, or taken off.
func (r *result) wrongOuter(in []byte) string {
	switch {
	case r.counts[fwdEncap] != 0:
		return r.wrongVXLAN(in)
	case r.counts[fwdIPIP] != 0:
		return r.wrongIPIP(in)
	case r.unIPIP():
		// RFC 6040 4.2: by inner, then outer; -1 is a drop.
		want := [4][4]int{{0, 0, 0, -1}, {1, 1, 1, 3}, {2, 1, 2, 3}, {3, 3, 3, 3}}[in[15]&3][r.shot.pkt[15]&3]
		if int(r.out[15]&3) != want || r.out[15]&^3 != in[15]&^3 {
			return fmt.Sprintf("a TOS of %#x in one of %#x became %#x", in[15], r.shot.pkt[15], r.out[15])
		}
	}
	return ""
}

func (r *result) wrongVXLAN(in []byte) string {
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
	case !bytes.Equal(out[62:64], in[12:14]):
		return "the inner frame is of another kind"
	case r.shot.gso == 0 && len(in)-14 > innerMTU:
		return fmt.Sprintf("%d bytes under a tunnel header", len(in)-14)
	}
	return r.wrongECN(in)
}

// wrongIPIP: whole IPv4 packets alone, never errors, nothing that may be cut.
func (r *result) wrongIPIP(in []byte) string {
	d, ok := decode(r.out)
	a, _ := decode(in)
	switch {
	case !ok || d.v6 || len(d.header) != 20 || d.proto != protoIPIP || d.ttl != 64 || len(d.upper) != len(r.out)-34:
		return "the IPv4 header is none of ours"
	case d.src != outer().nodeA || d.dst != outer().nodeB && d.dst != outer().nodeC:
		return fmt.Sprintf("the IPv4 header goes from %v to %v", d.src, d.dst)
	case binary.BigEndian.Uint32(r.out[18:]) != 0x4000:
		return "the IPv4 header is numbered, or may be cut"
	case a.v6 || a.fragment || quoteOf(in) != nil:
		return "what IPv4 does not carry was put into it"
	case r.shot.gso == 0 && len(in)-14 > ipipMTU:
		return fmt.Sprintf("%d bytes under an IPv4 header", len(in)-14)
	}
	return r.wrongECN(in)
}

func (r *result) wrongECN(in []byte) string {
	ecn := in[15] & 3
	if in[12] == 0x86 {
		ecn = in[15] >> 4 & 3
	}
	if r.out[15] != ecn {
		return fmt.Sprintf("an outer TOS of %#x for ECN %d", r.out[15], ecn)
	}
	return ""
}

// ---- fragments -------------------------------------------------------------
