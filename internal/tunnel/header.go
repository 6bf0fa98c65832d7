package tunnel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
)

// Layout of the header that stands before an inner IP packet on the wire:
// Ethernet, IPv4 (RFC 791), UDP, VXLAN (RFC 7348), inner Ethernet. The same
// offsets are in bpf/types.h.
const (
	HeaderLen  = 64
	headerIP   = 14
	headerUDP  = 34
	headerVXL  = 42
	headerMAC  = 50
	encapLen   = HeaderLen - 14
	outerTTL   = 64
	vxlanValid = 0x08
)

// SourceMAC is the inner Ethernet source of frames between nodes.
var SourceMAC = [6]byte{0x02, 'p', 'w', 0, 0, 1}

// HeaderInput is what a tunnel header is made of.
type HeaderInput struct {
	Local, Peer netip.Addr       // outer addresses, IPv4
	PeerMAC     net.HardwareAddr // of the peer's podweir.vxlan
	VNI         uint32
	Port        uint16 // UDP destination port
}

// Header returns the template of the header towards a peer and the ones'
// complement sum of its IPv4 header, in network byte order read as the
// machine's own. Lengths, identification, checksums, the UDP source port and
// the outer Ethernet addresses are zero: the datapath and the neighbour
// table fill them in. Only IPv4 underlays have one.
func Header(in HeaderInput) (h [HeaderLen]byte, sum uint16, err error) {
	if !in.Local.Is4() || !in.Peer.Is4() {
		return h, 0, fmt.Errorf("tunnel header from %v to %v: both ends must be IPv4", in.Local, in.Peer)
	}
	if len(in.PeerMAC) != 6 {
		return h, 0, fmt.Errorf("tunnel header to %v: %q is no Ethernet address", in.Peer, in.PeerMAC)
	}
	if in.VNI >= 1<<24 {
		return h, 0, fmt.Errorf("tunnel header to %v: VNI %d has more than 24 bits", in.Peer, in.VNI)
	}
	binary.BigEndian.PutUint16(h[12:], 0x0800)
	ip := h[headerIP:headerUDP]
	ip[0] = 0x45
	ip[6] = 0x40 // don't fragment: routers say what is too big, see bpf/icmp.h
	ip[8] = outerTTL
	ip[9] = 17
	local, peer := in.Local.As4(), in.Peer.As4()
	copy(ip[12:], local[:])
	copy(ip[16:], peer[:])
	binary.BigEndian.PutUint16(h[headerUDP+2:], in.Port)
	h[headerVXL] = vxlanValid
	binary.BigEndian.PutUint32(h[headerVXL+4:], in.VNI<<8)
	copy(h[headerMAC:], in.PeerMAC)
	copy(h[headerMAC+6:], SourceMAC[:])
	binary.BigEndian.PutUint16(h[headerMAC+12:], 0x0800)

	var s uint32
	for i := 0; i < len(ip); i += 2 {
		s += uint32(binary.NativeEndian.Uint16(ip[i:]))
	}
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return h, uint16(s), nil
}

// HeaderMTU is how many bytes of inner IP packet fit a frame of a device
// under a header of [Header]; 0 if none do.
func HeaderMTU(device int) uint16 {
	n := device - encapLen
	if n < 0 {
		return 0
	}
	return uint16(min(n, 0xffff))
}
