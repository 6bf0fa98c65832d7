package engine

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

// TCP flags.
const (
	fin = 1
	syn = 2
	rst = 4
	psh = 8
	ack = 16
)

// packet is one to send by hand: Ethernet, IP, TCP or UDP.
type packet struct {
	srcMAC, dstMAC net.HardwareAddr
	src, dst       netip.Addr
	sport, dport   uint16
	proto          byte
	tos            byte
	flags          byte // TCP
	seq, ack       uint32
	payload        []byte
}

func words(b []byte) (s uint32) {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	return s
}

func folded(s uint32) uint16 {
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

// frame is the packet with right lengths and checksums.
func (p packet) frame() []byte {
	var l4 []byte
	at := 6
	if p.proto == 6 {
		l4 = make([]byte, 20, 20+len(p.payload))
		binary.BigEndian.PutUint32(l4[4:], p.seq)
		binary.BigEndian.PutUint32(l4[8:], p.ack)
		l4[12], l4[13] = 5<<4, p.flags
		binary.BigEndian.PutUint16(l4[14:], 65535)
		at = 16
	} else {
		l4 = make([]byte, 8, 8+len(p.payload))
		binary.BigEndian.PutUint16(l4[4:], uint16(8+len(p.payload)))
	}
	if p.proto == protoIPIP {
		l4 = p.payload
	} else {
		binary.BigEndian.PutUint16(l4, p.sport)
		binary.BigEndian.PutUint16(l4[2:], p.dport)
		l4 = append(l4, p.payload...)
		pseudo := words(p.src.AsSlice()) + words(p.dst.AsSlice()) + uint32(p.proto) + uint32(len(l4))
		sum := folded(pseudo + words(l4))
		if p.proto == 17 && sum == 0 {
			sum = 0xffff // 0 says that there is none, RFC 768, and over IPv6 there must be one
		}
		binary.BigEndian.PutUint16(l4[at:], sum)
	}

	f := make([]byte, 14, 14+40+len(l4))
	copy(f, p.dstMAC)
	copy(f[6:], p.srcMAC)
	if p.src.Is4() {
		f[12], f[13] = 8, 0
		ip := make([]byte, 20)
		ip[0], ip[1], ip[8], ip[9] = 0x45, p.tos, 64, p.proto
		binary.BigEndian.PutUint16(ip[2:], uint16(20+len(l4)))
		copy(ip[12:], p.src.AsSlice())
		copy(ip[16:], p.dst.AsSlice())
		binary.BigEndian.PutUint16(ip[10:], folded(words(ip)))
		f = append(f, ip...)
	} else {
		f[12], f[13] = 0x86, 0xdd
		ip := make([]byte, 40)
		binary.BigEndian.PutUint32(ip, 6<<28|uint32(p.tos)<<20)
		binary.BigEndian.PutUint16(ip[4:], uint16(len(l4)))
		ip[6], ip[7] = p.proto, 64
		copy(ip[8:], p.src.AsSlice())
		copy(ip[24:], p.dst.AsSlice())
		f = append(f, ip...)
	}
	return append(f, l4...)
}

// vxlan puts the header of our VNI before an inner frame.
func vxlan(inner []byte) []byte {
	return append([]byte{8, 0, 0, 0, 0, 0x10, 0, 0}, inner...)
}

// macOf is the hardware address of a device.
func macOf(t testing.TB, n *cluster.Netns, device string) (mac net.HardwareAddr) {
	t.Helper()
	ok(t, n.Do(func() error {
		ifi, err := net.InterfaceByName(device)
		if err == nil {
			mac = ifi.HardwareAddr
		}
		return err
	}))
	return mac
}

// hostDevice is the host's end of a pod's veth.
func hostDevice(p *cluster.Pod) string {
	for _, ifi := range p.Result.Interfaces {
		if ifi.Sandbox == "" {
			return ifi.Name
		}
	}
	return "missing"
}

// hostMAC is what a pod's packets are addressed to: the host's end.
func hostMAC(t testing.TB, p *cluster.Pod) net.HardwareAddr {
	t.Helper()
	return macOf(t, p.Node.Netns, hostDevice(p))
}

// patience is how long anything may take that a moment suffices for, on a
// machine with many times as much to do as it has processors.
const patience = 45 * time.Second

// soon is a deadline far beyond what any packet takes.
func soon() time.Time { return time.Now().Add(patience) }
