package tunnel

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

func TestHeader(t *testing.T) {
	local, peer := netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("172.31.0.3")
	h, sum, err := Header(HeaderInput{Local: local, Peer: peer, PeerMAC: MAC(peer), VNI: 4096, Port: 4789})
	if err != nil {
		t.Fatal(err)
	}
	p := gopacket.NewPacket(h[:], layers.LayerTypeEthernet, gopacket.NoCopy)
	ip := p.Layer(layers.LayerTypeIPv4).(*layers.IPv4)
	got := []any{ip.SrcIP.String(), ip.DstIP.String(), ip.TTL, ip.Protocol}
	want := []any{"172.31.0.2", "172.31.0.3", uint8(64), layers.IPProtocolUDP}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("outer IPv4 (-want +got):\n%s", d)
	}
	if h[16]|h[17]|h[24]|h[25] != 0 {
		t.Errorf("length and checksum are % x and % x, want zeros", h[16:18], h[24:26])
	}
	if h[36] != 0x12 || h[37] != 0xb5 {
		t.Errorf("UDP destination port: % x, want 4789", h[36:38])
	}
	if d := cmp.Diff([]byte{8, 0, 0, 0, 0, 0x10, 0, 0}, h[42:50]); d != "" {
		t.Errorf("VXLAN header with VNI 4096 (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]byte(MAC(peer)), h[50:56]); d != "" {
		t.Errorf("inner destination (-want +got):\n%s", d)
	}
	// The sum over the header plus the complement of itself is all ones.
	s := uint32(sum) + uint32(^sum)
	if s != 0xffff {
		t.Errorf("sum %#x folded wrongly", sum)
	}
	var plain uint32
	for i := 14; i < 34; i += 2 {
		plain += uint32(h[i])<<8 | uint32(h[i+1])
	}
	for plain > 0xffff {
		plain = plain&0xffff + plain>>16
	}
	if swapped := sum<<8 | sum>>8; uint16(plain) != swapped && uint16(plain) != sum {
		t.Errorf("header sum = %#x, want %#x in network order", sum, plain)
	}
}

func TestHeaderRefuses(t *testing.T) {
	v4, v6 := netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("fd00::2")
	for name, in := range map[string]HeaderInput{
		"IPv6 peer":  {Local: v4, Peer: v6, PeerMAC: MAC(v6)},
		"IPv6 local": {Local: v6, Peer: v4, PeerMAC: MAC(v4)},
		"no MAC":     {Local: v4, Peer: v4},
		"wide VNI":   {Local: v4, Peer: v4, PeerMAC: MAC(v4), VNI: 1 << 24},
	} {
		if _, _, err := Header(in); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestHeaderMTU(t *testing.T) {
	for device, want := range map[int]uint16{1500: 1450, 9000: 8950, 40: 0, 70000: 0xffff} {
		if got := HeaderMTU(device); got != want {
			t.Errorf("HeaderMTU(%d) = %d, want %d", device, got, want)
		}
	}
}
