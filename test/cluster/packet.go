package cluster

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

const protoIPIP = 4

// Header is one IP packet's tuple as it was on the wire.
type Header struct {
	Src, Dst     netip.Addr
	Proto        uint8 // of the transport header, behind extension headers
	SPort, DPort uint16
	TTL          uint8
	Flags        string // TCP: some of SAFRP
	ICMPType     uint8
	ICMPCode     uint8
	Fragment     bool
	Payload      []byte // of the transport
}

func (h *Header) String() string {
	if h == nil {
		return "-"
	}
	proto := map[uint8]string{1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6"}[h.Proto]
	switch h.Proto {
	case 6, 17:
		s := fmt.Sprintf("%s %v > %v", proto, netip.AddrPortFrom(h.Src, h.SPort), netip.AddrPortFrom(h.Dst, h.DPort))
		if h.Flags != "" {
			s += " [" + h.Flags + "]"
		}
		return fmt.Sprintf("%s len %d", s, len(h.Payload))
	case 1, 58:
		return fmt.Sprintf("%s %v > %v type %d code %d", proto, h.Src, h.Dst, h.ICMPType, h.ICMPCode)
	}
	return fmt.Sprintf("IP protocol %d %v > %v", h.Proto, h.Src, h.Dst)
}

// Packet is a captured frame, decoded.
type Packet struct {
	Time     time.Time
	Outgoing bool // sent by the captured device, not received
	Frame    []byte

	SrcMAC, DstMAC net.HardwareAddr
	Outer          *Header // nil: not IP
	Inner          *Header // nil: neither VXLAN nor IPv4 in IPv4
	VNI            uint32
	InnerSrcMAC    net.HardwareAddr
	InnerDstMAC    net.HardwareAddr

	// BadChecksums names each checksum that is wrong. One that the sender
	// left to its device (checksum offload) must hold the sum of the pseudo
	// header, which is what the device starts from; Offloaded says so.
	BadChecksums []string
	Offloaded    bool
	Layers       gopacket.Packet
}

// Last is the innermost IP header.
func (p *Packet) Last() *Header {
	if p.Inner != nil {
		return p.Inner
	}
	return p.Outer
}

func (p *Packet) String() string {
	var s string
	switch {
	case p.Outer == nil:
		s = fmt.Sprintf("%v > %v, %d bytes", p.SrcMAC, p.DstMAC, len(p.Frame))
	case p.Inner == nil:
		s = p.Outer.String()
	case p.Outer.Proto == protoIPIP:
		s = fmt.Sprintf("%v > %v IPIP { %v }", p.Outer.Src, p.Outer.Dst, p.Inner)
	default:
		s = fmt.Sprintf("%v > %v VXLAN %d { %v }", p.Outer.Src, p.Outer.Dst, p.VNI, p.Inner)
	}
	if len(p.BadChecksums) > 0 {
		s += " BAD " + strings.Join(p.BadChecksums, ", ")
	}
	return s
}

// decode reads a frame; partial is the kernel's word that the innermost
// transport checksum was still to be filled in.
func decode(at time.Time, frame []byte, partial bool) *Packet {
	p := &Packet{Time: at, Frame: frame}
	// Checksums are verified on a copy, because a partial inner checksum is
	// filled in there before an outer one that covers it is looked at.
	work := append([]byte(nil), frame...)
	p.Layers = gopacket.NewPacket(work, layers.LayerTypeEthernet, gopacket.DecodeOptions{NoCopy: true})
	var headers []*Header
	var sums []checksum
	var ip gopacket.NetworkLayer
	for _, l := range p.Layers.Layers() {
		switch l := l.(type) {
		case *layers.Ethernet:
			if p.SrcMAC == nil {
				p.SrcMAC, p.DstMAC = l.SrcMAC, l.DstMAC
			} else {
				p.InnerSrcMAC, p.InnerDstMAC = l.SrcMAC, l.DstMAC
			}
		case *layers.IPv4:
			h := &Header{Proto: uint8(l.Protocol), TTL: l.TTL, Payload: l.Payload}
			h.Src, _ = netip.AddrFromSlice(l.SrcIP.To4())
			h.Dst, _ = netip.AddrFromSlice(l.DstIP.To4())
			h.Fragment = l.FragOffset != 0 || l.Flags&layers.IPv4MoreFragments != 0
			headers, ip = append(headers, h), l
			if fold(sum(l.Contents, 0)) != 0xffff {
				p.BadChecksums = append(p.BadChecksums, fmt.Sprintf("IPv4 header %v > %v", h.Src, h.Dst))
			}
		case *layers.IPv6:
			h := &Header{Proto: uint8(l.NextHeader), TTL: l.HopLimit, Payload: l.Payload}
			h.Src, _ = netip.AddrFromSlice(l.SrcIP)
			h.Dst, _ = netip.AddrFromSlice(l.DstIP)
			headers, ip = append(headers, h), l
		case *layers.IPv6Fragment:
			h := headers[len(headers)-1]
			h.Fragment, h.Proto = true, uint8(l.NextHeader)
		case *layers.TCP:
			h := transport(headers, 6, uint16(l.SrcPort), uint16(l.DstPort), l.Payload)
			for _, f := range []struct {
				set  bool
				name string
			}{{l.SYN, "S"}, {l.ACK, "A"}, {l.FIN, "F"}, {l.RST, "R"}, {l.PSH, "P"}} {
				if f.set {
					h.Flags += f.name
				}
			}
			sums = append(sums, checksum{h, ip, 16})
		case *layers.UDP:
			h := transport(headers, 17, uint16(l.SrcPort), uint16(l.DstPort), l.Payload)
			sums = append(sums, checksum{h, ip, 6})
		case *layers.ICMPv4:
			h := transport(headers, 1, 0, 0, l.Payload)
			h.ICMPType, h.ICMPCode = l.TypeCode.Type(), l.TypeCode.Code()
			sums = append(sums, checksum{h, ip, 2})
		case *layers.ICMPv6:
			h := transport(headers, 58, 0, 0, l.Payload)
			h.ICMPType, h.ICMPCode = l.TypeCode.Type(), l.TypeCode.Code()
			sums = append(sums, checksum{h, ip, 2})
		case *layers.VXLAN:
			p.VNI = l.VNI
		}
	}
	if len(headers) > 0 {
		p.Outer = headers[0]
	}
	if len(headers) > 1 && (p.Layers.Layer(layers.LayerTypeVXLAN) != nil || headers[0].Proto == protoIPIP) {
		p.Inner = headers[1]
	}
	p.verify(sums, partial)
	return p
}

func transport(headers []*Header, proto uint8, sport, dport uint16, payload []byte) *Header {
	h := headers[len(headers)-1]
	h.Proto, h.SPort, h.DPort, h.Payload = proto, sport, dport, payload
	return h
}

// checksum is a transport checksum to verify.
type checksum struct {
	h   *Header
	ip  gopacket.NetworkLayer
	off int // in the transport header
}

// verify goes from the inside out.
func (p *Packet) verify(sums []checksum, partial bool) {
	for i := len(sums) - 1; i >= 0; i-- {
		c := sums[i]
		data := c.ip.LayerPayload()
		if c.h.Fragment || len(data) < c.off+2 {
			continue
		}
		// The transport may lie behind extension headers, at the same end.
		if t := p.transportOf(i); t != nil {
			data = t
		}
		var pseudo uint32
		if c.h.Proto != 1 {
			pseudo = sum(c.h.Src.AsSlice(), sum(c.h.Dst.AsSlice(), uint32(c.h.Proto)+uint32(len(data))))
		}
		field := data[c.off : c.off+2]
		stored := binary.BigEndian.Uint16(field)
		switch {
		case c.h.Proto == 17 && stored == 0:
			// None: allowed over IPv4, and over IPv6 for tunnels (RFC 6935).
			if c.h.Src.Is6() && p.Inner == nil {
				p.BadChecksums = append(p.BadChecksums, "no UDP checksum over IPv6")
			}
		case partial && stored == fold(pseudo):
			p.Offloaded = true
			binary.BigEndian.PutUint16(field, 0)
			binary.BigEndian.PutUint16(field, ^fold(sum(data, pseudo)))
		case fold(sum(data, pseudo)) != 0xffff:
			p.BadChecksums = append(p.BadChecksums, "transport of "+c.h.String())
		}
	}
}

// transportOf returns the bytes of the i-th transport layer, header included.
func (p *Packet) transportOf(i int) []byte {
	n := 0
	for _, l := range p.Layers.Layers() {
		switch l.(type) {
		case *layers.TCP, *layers.UDP, *layers.ICMPv4, *layers.ICMPv6:
			if n == i {
				c, pl := l.LayerContents(), l.LayerPayload()
				return c[: len(c)+len(pl) : len(c)+len(pl)]
			}
			n++
		}
	}
	return nil
}

// sum adds 16-bit words in network order to a running sum (RFC 1071).
func sum(b []byte, s uint32) uint32 {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(b[0])<<8 | uint32(b[1])
		s = s&0xffff + s>>16
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	return s
}

// fold brings a running sum to 16 bits.
func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return uint16(s)
}
