package tunnel

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// NodeInfo is what the tunnel needs of a Node object.
type NodeInfo struct {
	Name string
	// Addr is the end of the tunnel: the first usable InternalIP, IPv4
	// preferred. Invalid when the node has none: its addresses are known,
	// and what goes there is dropped.
	Addr netip.Addr
	// InternalIPs are all usable ones, in the order of the object.
	InternalIPs []netip.Addr
	// PodCIDRs are masked, in the order of the object.
	PodCIDRs []netip.Prefix
	// MAC is that of the node's podweir.vxlan; nil without Addr.
	MAC net.HardwareAddr
}

// Nodes extracts the nodes, sorted by name. The errors name what could not
// be used; a node with errors is still listed with the rest.
func Nodes(nodes []*corev1.Node) ([]NodeInfo, []error) {
	var errs []error
	// By age: whoever comes first keeps a pod CIDR, whoever comes last has
	// an address.
	byAge := slices.Clone(nodes)
	slices.SortFunc(byAge, func(a, b *corev1.Node) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	out := make([]NodeInfo, 0, len(byAge))
	for _, n := range byAge {
		info := NodeInfo{Name: n.Name}
		info.InternalIPs = internalIPs(n, &errs)
		info.PodCIDRs = podCIDRs(n, &errs)
		out = append(out, info)
	}
	errs = append(errs, resolveAddrs(out)...)
	errs = append(errs, resolveCIDRs(out)...)
	for i := range out {
		n := &out[i]
		n.Addr = tunnelEnd(n.InternalIPs)
		if !n.Addr.IsValid() {
			errs = append(errs, fmt.Errorf("Node %s: status.addresses: no usable InternalIP: its pods cannot be reached until it has one", n.Name))
			continue
		}
		n.MAC = MAC(n.Addr)
	}
	slices.SortFunc(out, func(a, b NodeInfo) int { return cmp.Compare(a.Name, b.Name) })
	return out, errs
}

// MAC returns the hardware address of podweir.vxlan on the node whose tunnel
// ends at addr: locally administered, unicast, the same on every node that
// computes it.
func MAC(addr netip.Addr) net.HardwareAddr {
	b := addr.As16()
	sum := sha256.Sum256(b[:])
	return net.HardwareAddr{0x02, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

func internalIPs(n *corev1.Node, errs *[]error) []netip.Addr {
	var out []netip.Addr
	for i, a := range n.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		ip, err := parseAddr(a.Address)
		if err != nil {
			*errs = append(*errs, fmt.Errorf("Node %s: status.addresses[%d]: %w", n.Name, i, err))
			continue
		}
		if !slices.Contains(out, ip) {
			out = append(out, ip)
		}
	}
	return out
}

func podCIDRs(n *corev1.Node, errs *[]error) []netip.Prefix {
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	var out []netip.Prefix
	for i, s := range cidrs {
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil:
			*errs = append(*errs, fmt.Errorf("Node %s: spec.podCIDRs[%d]: %q is no CIDR", n.Name, i, s))
		case p.Addr().Is4In6() || p.Bits() == 0 || p.Addr().IsMulticast() || p.Addr().IsLoopback():
			*errs = append(*errs, fmt.Errorf("Node %s: spec.podCIDRs[%d]: %s is no range for pods", n.Name, i, s))
		default:
			out = append(out, p.Masked())
		}
	}
	return out
}

// resolveAddrs leaves an address that several nodes claim to the last.
func resolveAddrs(byAge []NodeInfo) []error {
	var errs []error
	owner := map[netip.Addr]*NodeInfo{}
	for i := range byAge {
		n := &byAge[i]
		for _, a := range n.InternalIPs {
			if old, ok := owner[a]; ok {
				old.InternalIPs = slices.DeleteFunc(old.InternalIPs, func(x netip.Addr) bool { return x == a })
				errs = append(errs, fmt.Errorf("Node %s and Node %s: both have the InternalIP %s; used for %s, the newer; delete the Node that is gone", old.Name, n.Name, a, n.Name))
			}
			owner[a] = n
		}
	}
	return errs
}

// resolveCIDRs leaves overlapping pod CIDRs to the first node.
func resolveCIDRs(byAge []NodeInfo) []error {
	var errs []error
	var taken prefixIndex
	for i := range byAge {
		n := &byAge[i]
		var kept []netip.Prefix
		for _, p := range n.PodCIDRs {
			other, node, overlaps := taken.find(p)
			switch {
			case !overlaps:
				taken.add(p, n.Name)
				kept = append(kept, p)
			case node == n.Name:
				errs = append(errs, fmt.Errorf("Node %s: spec.podCIDRs: %s overlaps %s of the same node and is not used", n.Name, p, other))
			default:
				errs = append(errs, fmt.Errorf("Node %s and Node %s: spec.podCIDRs: %s of %s overlaps %s of %s and is not used; give each node a range of its own", node, n.Name, p, n.Name, other, node))
			}
		}
		n.PodCIDRs = kept
	}
	return errs
}

// tunnelEnd returns the first IPv4 address, else the first.
func tunnelEnd(ips []netip.Addr) netip.Addr {
	for _, a := range ips {
		if a.Is4() {
			return a
		}
	}
	if len(ips) > 0 {
		return ips[0]
	}
	return netip.Addr{}
}

// parseAddr parses an address that a node or a pod may have.
func parseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("%q is no IP address", s)
	case a.Zone() != "" || a.Is4In6():
		return netip.Addr{}, fmt.Errorf("%s has a zone or is IPv4-mapped", s)
	case a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast():
		return netip.Addr{}, fmt.Errorf("%s is unspecified, loopback, link-local or multicast and cannot be reached from other hosts", s)
	}
	return a, nil
}
