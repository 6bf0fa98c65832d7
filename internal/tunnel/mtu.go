package tunnel

import "net/netip"

// What stands between a device's frame and the packet of a pod.
const (
	ipipLen    = 20      // IPv4
	vxlanLen   = 50      // IPv4, UDP, VXLAN, Ethernet
	vxlanLenV6 = 50 + 20 // the same over IPv6
)

// MTU is how large an IP packet may be, by who sends it.
type MTU struct {
	// Pod is that of pods' interfaces.
	Pod int
	// Pod6 is that of pods' IPv6. It is less than Pod where IPv4 alone has
	// the small header of ipip, and then belongs on their IPv6 routes.
	Pod6 int
	// Tunnel is that of podweir.vxlan, which is kept in every mode: the
	// host's own packets and all that no other way takes go by it.
	Tunnel int
}

// MTU returns what a device with the MTU device leaves, given an address of
// the family that the tunnel's outer packets have.
func (m Mode) MTU(device int, outer netip.Addr) MTU {
	out := MTU{Tunnel: TunnelMTU(device, outer)}
	out.Pod, out.Pod6 = out.Tunnel, out.Tunnel
	switch {
	case !m.Encapsulates():
		out.Pod, out.Pod6 = device, device
	case m.IPIP() && outer.Unmap().Is4():
		out.Pod = device - ipipLen
	}
	return out
}

// FixedMTU is what becomes of it when the operator has set that of pods.
func (m Mode) FixedMTU(pod int, auto MTU) MTU {
	out := MTU{Pod: pod, Pod6: pod, Tunnel: pod}
	if m.IPIP() && auto.Tunnel > 0 {
		out.Tunnel = min(pod, auto.Tunnel)
		out.Pod6 = out.Tunnel
	}
	return out
}

// TunnelMTU is what a VXLAN header leaves of a device's MTU.
func TunnelMTU(device int, outer netip.Addr) int {
	if outer.Unmap().Is4() {
		return device - vxlanLen
	}
	return device - vxlanLenV6
}
