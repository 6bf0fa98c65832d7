package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// prober asks a node's dataplane where it leads packets: it sends a SYN from
// one node to a service's address and sees on the other node's device whom the
// SYN is for by then. Every SYN has a source port and a sequence number of its
// own; the number is what it is known by, since no translation changes it.
type prober struct {
	out, in int // raw IP socket, packet socket
	vxlan   int // so that nobody refuses the tunnel's packets
	src     netip.Addr
	n       uint32
	buf     [2048]byte
}

// newProber sends from one node, whose packets arrive at eth0 of the other.
func newProber(from, to *cluster.Node, src netip.Addr) (*prober, error) {
	p := &prober{out: -1, in: -1, vxlan: -1, src: src, n: 1}
	err := from.Do(func() (err error) {
		if p.out, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			return fmt.Errorf("raw socket: %w", err)
		}
		return nil
	})
	if err == nil {
		err = to.Do(func() (err error) {
			if p.vxlan, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
				err = unix.Bind(p.vxlan, &unix.SockaddrInet4{Port: vxlanPort})
			}
			if err != nil {
				return fmt.Errorf("socket of the tunnel's port: %w", err)
			}
			ifi, err := net.InterfaceByName("eth0")
			if err != nil {
				return fmt.Errorf("eth0: %w", err)
			}
			proto := binary.NativeEndian.Uint16([]byte{unix.ETH_P_IP >> 8, unix.ETH_P_IP & 0xff})
			if p.in, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
				return fmt.Errorf("packet socket: %w", err)
			}
			return unix.Bind(p.in, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: ifi.Index})
		})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("probe from %s to %s: %w", from.NodeName, to.NodeName, err), p.close())
	}
	return p, nil
}

func (p *prober) close() error {
	var err error
	for _, fd := range []int{p.out, p.in, p.vxlan} {
		if fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	return err
}

// ask sends one SYN and waits for it at the other end. A packet that does not
// get there in time, or has no way to go, is an answer too: the zero value.
func (p *prober) ask(service netip.AddrPort, wait time.Duration) (netip.AddrPort, error) {
	p.n++
	// Ports below 1024 and the NodePort range are left alone.
	sport := uint16(1024 + p.n%18000)
	pkt := syn(netip.AddrPortFrom(p.src, sport), service, p.n)
	err := unix.Sendto(p.out, pkt, 0, &unix.SockaddrInet4{Addr: service.Addr().As4()})
	switch err {
	case nil:
	case unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EPERM, unix.ECONNREFUSED, unix.ENOBUFS:
		return netip.AddrPort{}, nil
	default:
		return netip.AddrPort{}, fmt.Errorf("send a SYN to %v: %w", service, err)
	}
	for end := time.Now().Add(wait); ; {
		n, _, err := unix.Recvfrom(p.in, p.buf[:], 0)
		switch {
		case err == nil:
			if to, seq, ok := parseSYN(p.buf[:n]); ok && seq == p.n {
				return to, nil
			}
			continue
		case err == unix.EINTR || err == unix.ENETDOWN:
			continue
		case err != unix.EAGAIN:
			return netip.AddrPort{}, fmt.Errorf("wait for a SYN to %v: %w", service, err)
		}
		left := time.Until(end)
		if left <= 0 {
			return netip.AddrPort{}, nil
		}
		ts := unix.NsecToTimespec(left.Nanoseconds())
		if _, err := unix.Ppoll([]unix.PollFd{{Fd: int32(p.in), Events: unix.POLLIN}}, &ts, nil); err != nil && err != unix.EINTR {
			return netip.AddrPort{}, fmt.Errorf("wait for a SYN to %v: %w", service, err)
		}
	}
}

const (
	ipHeader, tcpHeader = 20, 20
	vxlanPort           = 4789
	vxlanHeaders        = 8 + 8 + 14 // UDP, VXLAN, Ethernet
)

// syn is an IPv4 packet; the kernel fills in the header's checksum.
func syn(src, dst netip.AddrPort, seq uint32) []byte {
	b := make([]byte, ipHeader+tcpHeader)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	s, d := src.Addr().As4(), dst.Addr().As4()
	copy(b[12:], s[:])
	copy(b[16:], d[:])
	t := b[ipHeader:]
	binary.BigEndian.PutUint16(t[0:], src.Port())
	binary.BigEndian.PutUint16(t[2:], dst.Port())
	binary.BigEndian.PutUint32(t[4:], seq)
	t[12], t[13] = tcpHeader/4<<4, 2 // length, SYN
	binary.BigEndian.PutUint16(t[14:], 65535)
	binary.BigEndian.PutUint16(t[16:], tcpChecksum(b))
	return b
}

// tcpChecksum of an IPv4 packet without options whose checksum field is 0.
func tcpChecksum(b []byte) uint16 {
	sum := uint32(unix.IPPROTO_TCP) + uint32(len(b)-ipHeader)
	for i := 12; i < len(b); i += 2 { // addresses, then the segment
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// parseSYN reads whom an IPv4 packet is for, if it is one that syn made; if it
// is one of the tunnel's, whom the packet inside is for.
func parseSYN(b []byte) (to netip.AddrPort, seq uint32, ok bool) {
	t, ok := transport(b, unix.IPPROTO_UDP)
	if ok && len(t) > vxlanHeaders && binary.BigEndian.Uint16(t[2:]) == vxlanPort {
		b = t[vxlanHeaders:]
	}
	if t, ok = transport(b, unix.IPPROTO_TCP); !ok || len(t) < tcpHeader || t[13]&0x12 != 2 {
		return to, 0, false
	}
	to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:20])), binary.BigEndian.Uint16(t[2:]))
	return to, binary.BigEndian.Uint32(t[4:]), true
}

// transport is what follows the header of an IPv4 packet of a protocol, 8
// bytes at least.
func transport(b []byte, proto byte) ([]byte, bool) {
	if len(b) < ipHeader || b[0]>>4 != 4 || b[9] != proto {
		return nil, false
	}
	hlen := int(b[0]&15) * 4
	if hlen < ipHeader || len(b) < hlen+8 {
		return nil, false
	}
	return b[hlen:], true
}
