package packet

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"slices"

	"github.com/podweir/podweir/internal/maps"
)

// decoded is a packet as this test's own reader sees it, written apart from
// the datapath's parser so that the two can disagree.
type decoded struct {
	v6       bool
	src, dst netip.Addr
	ttl      uint8
	proto    uint8
	fragment bool
	at       int    // offset of the upper layer in the frame
	upper    []byte // as long as the IP header says
	header   []byte // IPv4 header
}

func decode(pkt []byte) (decoded, bool) {
	if len(pkt) < 14 {
		return decoded{}, false
	}
	switch binary.BigEndian.Uint16(pkt[12:]) {
	case 0x0800:
		return decode4(pkt)
	case 0x86dd:
		return decode6(pkt)
	}
	return decoded{}, false
}

func decode4(pkt []byte) (decoded, bool) {
	ip := pkt[14:]
	if len(ip) < 20 || ip[0]>>4 != 4 {
		return decoded{}, false
	}
	header, total := int(ip[0]&15)*4, int(binary.BigEndian.Uint16(ip[2:]))
	if header < 20 || total < header || total > len(ip) {
		return decoded{}, false
	}
	return decoded{
		src: netip.AddrFrom4([4]byte(ip[12:16])), dst: netip.AddrFrom4([4]byte(ip[16:20])),
		ttl: ip[8], proto: ip[9], fragment: binary.BigEndian.Uint16(ip[6:])&0x3fff != 0,
		at: 14 + header, upper: ip[header:total], header: ip[:header],
	}, true
}

func decode6(pkt []byte) (decoded, bool) {
	ip := pkt[14:]
	if len(ip) < 40 || ip[0]>>4 != 6 {
		return decoded{}, false
	}
	end := 40 + int(binary.BigEndian.Uint16(ip[4:]))
	if end > len(ip) {
		return decoded{}, false
	}
	d := decoded{
		v6: true, src: netip.AddrFrom16([16]byte(ip[8:24])), dst: netip.AddrFrom16([16]byte(ip[24:40])),
		ttl: ip[7], proto: ip[6],
	}
	at := 40
	for {
		size := 8
		switch d.proto {
		case 0, 43, 60, 51, 44:
			if at+8 > end {
				return decoded{}, false
			}
		default:
			d.at, d.upper = 14+at, ip[at:end]
			return d, true
		}
		switch d.proto {
		case 44:
			field := binary.BigEndian.Uint16(ip[at+2:])
			d.fragment = d.fragment || field&0xfff9 != 0
			if field&0xfff8 != 0 { // what follows is the middle of something
				d.proto = ip[at]
				d.at, d.upper = 14+at+8, ip[at+8:end]
				return d, true
			}
		case 51:
			size = (int(ip[at+1]) + 2) * 4
		default:
			size = (int(ip[at+1]) + 1) * 8
		}
		d.proto = ip[at]
		at += size
		if at > end {
			return decoded{}, false
		}
	}
}

// ports reads the first four bytes of the upper layer.
func (d decoded) ports() (uint16, uint16) {
	if len(d.upper) < 4 {
		return 0, 0
	}
	return binary.BigEndian.Uint16(d.upper), binary.BigEndian.Uint16(d.upper[2:])
}

func onesSum(sum uint64, b []byte) uint64 {
	for ; len(b) >= 2; b = b[2:] {
		sum += uint64(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return sum
}

func (d decoded) pseudo(length int) uint64 {
	sum := onesSum(0, d.src.AsSlice())
	sum = onesSum(sum, d.dst.AsSlice())
	return sum + uint64(d.proto) + uint64(length)
}

// field is where the upper layer's checksum stands and what it covers.
func (d decoded) field() (at int, cover []byte, pseudo, ok bool) {
	switch {
	case d.fragment:
		return 0, nil, false, false
	case d.proto == maps.ProtoTCP && len(d.upper) >= 20:
		return 16, d.upper, true, true
	case d.proto == maps.ProtoUDP && len(d.upper) >= 8:
		n := int(binary.BigEndian.Uint16(d.upper[4:]))
		if n < 8 || n > len(d.upper) {
			return 0, nil, false, false
		}
		return 6, d.upper[:n], true, true
	case d.proto == protoICMP && !d.v6 && len(d.upper) >= 8:
		return 2, d.upper, false, true
	case d.proto == protoICMP6 && d.v6 && len(d.upper) >= 8:
		return 2, d.upper, true, true
	}
	return 0, nil, false, false
}

// wrong says which checksum of a packet is wrong when it is computed anew,
// "" if all are right or the packet has none that could be found.
func wrong(pkt []byte) string {
	d, ok := decode(pkt)
	if !ok {
		return ""
	}
	if !d.v6 && onesSum(0, d.header) != 0xffff {
		return "IPv4 header"
	}
	if d.proto == maps.ProtoSCTP && !d.fragment && len(d.upper) >= 12 {
		c := append([]byte(nil), d.upper...)
		clearBytes(c[8:12])
		if crc32.Checksum(c, crc32.MakeTable(crc32.Castagnoli)) != binary.LittleEndian.Uint32(d.upper[8:]) {
			return "SCTP"
		}
		return ""
	}
	at, cover, pseudo, ok := d.field()
	if !ok {
		return ""
	}
	if d.proto == maps.ProtoUDP && cover[at] == 0 && cover[at+1] == 0 {
		return "" // none
	}
	sum := uint64(0)
	if pseudo {
		sum = d.pseudo(len(cover))
	}
	if onesSum(sum, cover) != 0xffff {
		return "transport"
	}
	return ""
}

// quoteOf is the packet that an ICMP error quotes, as a frame; nil if it is
// none.
func quoteOf(pkt []byte) []byte {
	d, ok := decode(pkt)
	if !ok || len(d.upper) < 8 {
		return nil
	}
	kind := d.upper[0]
	switch {
	case !d.v6 && d.proto == protoICMP && (kind == 3 || kind == 4 || kind == 11 || kind == 12):
	case d.v6 && d.proto == protoICMP6 && kind < 128:
	default:
		return nil
	}
	return append(slices.Clone(pkt[:14]), d.upper[8:]...)
}

// quoted is whose packet an ICMP error is about; an echo's identifier is the
// port of who asked.
func quoted(pkt []byte) (src, dst netip.AddrPort) {
	d, ok := decode(quoteOf(pkt))
	if !ok {
		return src, dst
	}
	src, dst = ap(d.src, 0), ap(d.dst, 0)
	switch {
	case hasPorts(d.proto):
		sport, dport := d.ports()
		src, dst = ap(d.src, sport), ap(d.dst, dport)
	case (d.proto == protoICMP || d.proto == protoICMP6) && len(d.upper) >= 8:
		id := binary.BigEndian.Uint16(d.upper[4:])
		if kind := d.upper[0]; kind == 0 || kind == 129 {
			dst = ap(d.dst, id)
		} else {
			src = ap(d.src, id)
		}
	}
	return src, dst
}

// wrongQuote is wrong for what an ICMP error quotes, as far as it goes. The
// CRC of SCTP is left as it was.
func wrongQuote(pkt []byte) string {
	q := quoteOf(pkt)
	if len(q) >= 34 && q[14]>>4 == 4 {
		if n := 14 + int(q[14]&15)*4; n >= 34 && n <= len(q) && onesSum(0, q[14:n]) != 0xffff {
			return "quoted IPv4 header"
		}
	}
	if d, ok := decode(q); ok && d.proto != maps.ProtoSCTP {
		return wrong(q)
	}
	return ""
}

// mend computes a packet's checksums anew, as far as it has any.
func mend(pkt []byte) {
	d, ok := decode(pkt)
	if !ok {
		return
	}
	if !d.v6 {
		clearBytes(d.header[10:12])
		binary.BigEndian.PutUint16(d.header[10:], ^uint16(onesSum(0, d.header)))
	}
	at, cover, pseudo, ok := d.field()
	if !ok {
		return
	}
	clearBytes(cover[at : at+2])
	sum := uint64(0)
	if pseudo {
		sum = d.pseudo(len(cover))
	}
	binary.BigEndian.PutUint16(cover[at:], ^uint16(onesSum(sum, cover)))
}

func clearBytes(b []byte) {
	for i := range b {
		b[i] = 0
	}
}
