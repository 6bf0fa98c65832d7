package packet

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/podweir/podweir/internal/maps"
)

// Protocol numbers (IANA) beside those of package maps.
const (
	protoICMP  = 1
	protoGRE   = 47
	protoICMP6 = 58
)

// TCP flags as they stand in the header.
const (
	fin = 0x01
	syn = 0x02
	rst = 0x04
	psh = 0x08
	ack = 0x10
)

// frame describes a packet to be built. The zero value of a field is a
// sensible packet: TTL 64, no payload, and the device's MAC as destination.
type frame struct {
	src, dst netip.AddrPort // the port of echo messages is their identifier
	proto    uint8
	flags    uint8 // TCP
	reply    bool  // ICMP: echo reply instead of request
	ttl      uint8
	payload  []byte
	noSum    bool // UDP without a checksum
	options  []layers.IPv4Option
}

func ap(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

func tcp(src, dst netip.AddrPort, flags uint8) frame {
	return frame{src: src, dst: dst, proto: maps.ProtoTCP, flags: flags}
}

func udp(src, dst netip.AddrPort) frame {
	return frame{src: src, dst: dst, proto: maps.ProtoUDP, payload: []byte("datagram")}
}

func echo(src, dst netip.Addr, id uint16) frame {
	return frame{src: ap(src, id), dst: ap(dst, 0), proto: protoICMP}
}

// icmpProto is the family's own ICMP.
func (f family) icmpProto() uint8 {
	if f.v6 {
		return protoICMP6
	}
	return protoICMP
}

func (fr frame) with(payload string) frame {
	fr.payload = []byte(payload)
	return fr
}

// bytes builds the frame with right lengths and checksums.
func (fr frame) bytes(t testing.TB) []byte {
	t.Helper()
	v6 := fr.src.Addr().Is6()
	if fr.ttl == 0 {
		fr.ttl = 64
	}
	eth := &layers.Ethernet{
		SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 0xee}, DstMAC: make(net.HardwareAddr, 6),
		EthernetType: layers.EthernetTypeIPv4,
	}
	stack := []gopacket.SerializableLayer{eth}
	proto := layers.IPProtocol(fr.proto)
	if v6 && fr.proto == protoICMP {
		proto = protoICMP6
	}
	var network gopacket.NetworkLayer
	if v6 {
		eth.EthernetType = layers.EthernetTypeIPv6
		ip := &layers.IPv6{
			Version: 6, HopLimit: fr.ttl, NextHeader: proto,
			SrcIP: fr.src.Addr().AsSlice(), DstIP: fr.dst.Addr().AsSlice(),
		}
		stack, network = append(stack, ip), ip
	} else {
		ip := &layers.IPv4{
			Version: 4, TTL: fr.ttl, Protocol: proto, Id: 7, Options: fr.options,
			SrcIP: fr.src.Addr().AsSlice(), DstIP: fr.dst.Addr().AsSlice(),
		}
		stack, network = append(stack, ip), ip
	}
	stack = append(stack, fr.transport(network, v6)...)
	buf := gopacket.NewSerializeBuffer()
	opts := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, opts, append(stack, gopacket.Payload(fr.payload))...); err != nil {
		t.Fatalf("build packet: %v", err)
	}
	// gopacket pads short frames; a cut one must be short of its own bytes.
	out := buf.Bytes()
	if d, ok := decode(out); ok {
		out = out[:d.at+len(d.upper)]
	}
	if fr.noSum {
		at := len(out) - len(fr.payload) - 2
		out[at], out[at+1] = 0, 0
	}
	return out
}

func (fr frame) transport(network gopacket.NetworkLayer, v6 bool) []gopacket.SerializableLayer {
	switch fr.proto {
	case maps.ProtoTCP:
		h := &layers.TCP{
			SrcPort: layers.TCPPort(fr.src.Port()), DstPort: layers.TCPPort(fr.dst.Port()),
			Seq: 1000, Window: 65000, FIN: fr.flags&fin != 0, SYN: fr.flags&syn != 0,
			RST: fr.flags&rst != 0, PSH: fr.flags&psh != 0, ACK: fr.flags&ack != 0,
		}
		h.SetNetworkLayerForChecksum(network)
		return []gopacket.SerializableLayer{h}
	case maps.ProtoUDP:
		h := &layers.UDP{SrcPort: layers.UDPPort(fr.src.Port()), DstPort: layers.UDPPort(fr.dst.Port())}
		h.SetNetworkLayerForChecksum(network)
		return []gopacket.SerializableLayer{h}
	case maps.ProtoSCTP:
		return []gopacket.SerializableLayer{&layers.SCTP{
			SrcPort: layers.SCTPPort(fr.src.Port()), DstPort: layers.SCTPPort(fr.dst.Port()),
			VerificationTag: 42,
		}}
	case protoICMP:
		return fr.echo(network, v6)
	}
	return nil
}

func (fr frame) echo(network gopacket.NetworkLayer, v6 bool) []gopacket.SerializableLayer {
	id := fr.src.Port()
	if fr.reply {
		id = fr.dst.Port()
	}
	if !v6 {
		kind := layers.CreateICMPv4TypeCode(layers.ICMPv4TypeEchoRequest, 0)
		if fr.reply {
			kind = layers.CreateICMPv4TypeCode(layers.ICMPv4TypeEchoReply, 0)
		}
		return []gopacket.SerializableLayer{&layers.ICMPv4{TypeCode: kind, Id: id, Seq: 1}}
	}
	kind := layers.CreateICMPv6TypeCode(layers.ICMPv6TypeEchoRequest, 0)
	if fr.reply {
		kind = layers.CreateICMPv6TypeCode(layers.ICMPv6TypeEchoReply, 0)
	}
	h := &layers.ICMPv6{TypeCode: kind}
	h.SetNetworkLayerForChecksum(network)
	return []gopacket.SerializableLayer{h, &layers.ICMPv6Echo{Identifier: id, SeqNumber: 1}}
}

// icmp builds an ICMP message of any type with a body behind its first four
// bytes. kind is {type, code} of the family of src.
func icmp(t testing.TB, src, dst netip.Addr, kind [2]byte, body []byte) []byte {
	t.Helper()
	proto := uint8(protoICMP)
	if src.Is6() {
		proto = protoICMP6
	}
	msg := append([]byte{kind[0], kind[1], 0, 0}, body...)
	out := frame{src: ap(src, 0), dst: ap(dst, 0), proto: 255, payload: msg}.bytes(t)
	return setProto(out, proto)
}

// setProto changes the upper protocol of a built packet and mends checksums.
func setProto(pkt []byte, proto uint8) []byte {
	if pkt[12] == 0x86 {
		pkt[20] = proto
	} else {
		pkt[23] = proto
	}
	mend(pkt)
	return pkt
}

// An ICMP error about a packet: destination unreachable, port or fragment
// needed / too big, with as much of the quoted packet as fits.
func icmpError(t testing.TB, src, dst netip.Addr, quoted []byte) []byte {
	t.Helper()
	kind := [2]byte{3, 3}
	if src.Is6() {
		kind = [2]byte{1, 4}
	}
	return icmp(t, src, dst, kind, append(make([]byte, 4), quoted[14:]...))
}

// extension is one IPv6 extension header.
type extension struct {
	kind  uint8
	bytes int    // in all
	body  []byte // what follows the first two bytes, else zeros (PadN)
}

// extend puts extension headers before the upper layer of a built packet.
func extend(t testing.TB, pkt []byte, exts ...extension) []byte {
	t.Helper()
	upper := pkt[20]
	out := append([]byte(nil), pkt[:54]...)
	next := 20 // where the type of the following header stands
	for _, e := range exts {
		out[next] = e.kind
		next = len(out)
		h := make([]byte, e.bytes)
		switch e.kind {
		case 44: // fragment: fixed length, second byte reserved
		case 51: // authentication: 32-bit words, minus two
			h[1] = byte(e.bytes/4 - 2)
		default:
			h[1] = byte(e.bytes/8 - 1)
			h[2], h[3] = 1, byte(e.bytes-4) // PadN
		}
		copy(h[2:], e.body)
		out = append(out, h...)
	}
	out[next] = upper
	out = append(out, pkt[54:]...)
	binary.BigEndian.PutUint16(out[18:], uint16(len(out)-54))
	return out
}

// ethernet builds a frame of another ethertype.
func ethernet(kind uint16, body []byte) []byte {
	out := make([]byte, 14, 14+len(body))
	out[11] = 0xee
	binary.BigEndian.PutUint16(out[12:], kind)
	return append(out, body...)
}

func (fr frame) key() maps.FlowKey {
	k := maps.FlowKey{
		Src: maps.ToAddr(fr.src.Addr()), Dst: maps.ToAddr(fr.dst.Addr()),
		Sport: fr.src.Port(), Dport: fr.dst.Port(), Proto: fr.proto,
	}
	switch fr.proto {
	case maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP:
	case protoICMP:
		if fr.src.Addr().Is6() {
			k.Proto = protoICMP6
		}
	default:
		k.Sport, k.Dport = 0, 0
	}
	return k
}

// back is the answer to a packet that arrived as fr.
func (fr frame) back() frame {
	out := fr
	out.src, out.dst = fr.dst, fr.src
	out.reply = !fr.reply
	return out
}

// fragment makes one fragment of a datagram: offset in bytes, more to come.
func (w *world) fragment(fr frame, offset uint16, more bool) []byte {
	w.t.Helper()
	field := offset &^ 7
	pkt := fr.bytes(w.t)
	if w.f.v6 {
		if more {
			field |= 1
		}
		return extend(w.t, pkt, extension{44, 8, []byte{byte(field >> 8), byte(field), 0, 0, 0, 9}})
	}
	field /= 8
	if more {
		field |= 0x2000
	}
	binary.BigEndian.PutUint16(pkt[20:], field)
	mend(pkt)
	return pkt
}
