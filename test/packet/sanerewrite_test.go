package packet

import (
	"encoding/binary"
	"fmt"

	"github.com/podweir/podweir/internal/maps"
)

// whole: all headers are there that an action may need.
func (d decoded) whole(gso bool) bool {
	n := len(d.upper)
	if d.fragment {
		return true // of a first one, all that is here was looked at
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
func translated(in, out []byte, gso, mss, ecn bool) string {
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
	may[15] = may[15] || ecn
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
