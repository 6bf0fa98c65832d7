package endpoint

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// dumpAttempts bounds how often a listing is repeated that other changes
// interrupted.
const dumpAttempts = 10

// dump lists through f until the listing is consistent.
func dump[T any](f func() ([]T, error)) ([]T, error) {
	var out []T
	var err error = netlink.ErrDumpInterrupted
	for i := 0; i < dumpAttempts && errors.Is(err, netlink.ErrDumpInterrupted); i++ {
		out, err = f()
	}
	return out, err
}

// hostDifferences compares the host's half of ep with what it should be.
func hostDifferences(h *netlink.Handle, ep Endpoint) ([]string, error) {
	link, err := linkByName(h, ep.HostIfName)
	if err != nil {
		return nil, err
	}
	if link == nil {
		return []string{fmt.Sprintf("interface %s is missing", ep.HostIfName)}, nil
	}
	if got := link.Attrs().Index; got != ep.HostIfindex {
		return []string{fmt.Sprintf("interface %s was re-created: its index is %d, not %d", ep.HostIfName, got, ep.HostIfindex)}, nil
	}
	diffs := linkDifferences(link, ep.HostIfName, ep.HostMAC, ep.MTU, 0)
	addrs, err := addrDifferences(h, link)
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, addrs...)
	over, err := overDifferences(h, ep)
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, over...)
	device, _ := ep.Device()
	neighs, err := neighDifferences(h, device, hostNeighs(ep))
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, neighs...)
	for _, r := range hostRoutes(ep) {
		got, err := h.RouteGetWithOptions(r.Dst.IP, &netlink.RouteGetOptions{FIBMatch: true})
		if err == nil && len(got) == 1 && got[0].LinkIndex == r.LinkIndex && got[0].Dst != nil && prefixOf(got[0].Dst) == prefixOf(r.Dst) {
			continue
		}
		diffs = append(diffs, fmt.Sprintf("the host has no route to %s over %s", r.Dst.IP, device))
	}
	return diffs, nil
}

// addrDifferences names the addresses of a device of the host, which should
// have none.
func addrDifferences(h *netlink.Handle, link netlink.Link) (diffs []string, err error) {
	name := link.Attrs().Name
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		diffs = append(diffs, fmt.Sprintf("interface %s has address %s, should have none", name, a.IPNet))
	}
	return diffs, nil
}

// podDifferences compares the pod's half of ep with what it should be; toldMTU
// is [Request.MTU].
func podDifferences(h *netlink.Handle, ep Endpoint, toldMTU int) ([]string, error) {
	link, err := linkByName(h, ep.IfName)
	if err != nil {
		return nil, fmt.Errorf("in the pod: %w", err)
	}
	if link == nil {
		return []string{fmt.Sprintf("interface %s is missing in the pod", ep.IfName)}, nil
	}
	if veth, ok := link.(*netlink.Veth); !ok || veth.ParentIndex != ep.HostIfindex {
		return []string{fmt.Sprintf("interface %s in the pod is not the peer of %s", ep.IfName, ep.HostIfName)}, nil
	}
	name := ep.IfName + " in the pod"
	diffs := linkDifferences(link, name, ep.MAC, ep.MTU, toldMTU)
	lo, err := linkByName(h, "lo")
	if err != nil {
		return nil, fmt.Errorf("in the pod: %w", err)
	}
	if lo == nil || lo.Attrs().Flags&net.FlagUp == 0 {
		diffs = append(diffs, "interface lo in the pod is down")
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range ep.Addrs {
		if !slices.ContainsFunc(addrs, func(x netlink.Addr) bool { return prefixOf(x.IPNet) == single(a) }) {
			diffs = append(diffs, fmt.Sprintf("address %s is missing on %s", single(a), name))
		}
	}
	neighs, err := neighDifferences(h, name, podNeighs(ep, link.Attrs().Index))
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, neighs...)
	routes, err := dump(func() ([]netlink.Route, error) { return h.RouteList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list routes of %s: %w", name, err)
	}
	for _, want := range podRoutes(ep, link.Attrs().Index) {
		same := func(r netlink.Route) bool {
			return r.Family == want.Family && destination(r) == destination(want) && r.Gw.Equal(want.Gw) &&
				(want.MTU == 0 || r.MTU == want.MTU)
		}
		if !slices.ContainsFunc(routes, same) {
			text := "route to " + destination(want).String()
			if want.Gw != nil {
				text += " via " + want.Gw.String()
			}
			if want.MTU != 0 {
				text += fmt.Sprintf(" with MTU %d", want.MTU)
			}
			diffs = append(diffs, fmt.Sprintf("%s is missing on %s", text, name))
		}
	}
	return diffs, nil
}

func linkDifferences(link netlink.Link, name string, mac net.HardwareAddr, mtu, toldMTU int) []string {
	var diffs []string
	attrs := link.Attrs()
	if attrs.Flags&net.FlagUp == 0 {
		diffs = append(diffs, fmt.Sprintf("interface %s is down", name))
	}
	if attrs.HardwareAddr.String() != mac.String() {
		diffs = append(diffs, fmt.Sprintf("interface %s has MAC %s, not %s", name, attrs.HardwareAddr, mac))
	}
	smaller := attrs.MTU < mtu && (attrs.MTU == toldMTU || toldMTU == MTUNotTold)
	if attrs.MTU != mtu && !smaller {
		diffs = append(diffs, fmt.Sprintf("interface %s has MTU %d, not %d", name, attrs.MTU, mtu))
	}
	return diffs
}

func neighDifferences(h *netlink.Handle, name string, want []netlink.Neigh) ([]string, error) {
	var diffs []string
	for _, w := range want {
		have, err := dump(func() ([]netlink.Neigh, error) { return h.NeighList(w.LinkIndex, w.Family) })
		if err != nil {
			return nil, fmt.Errorf("list neighbours of %s: %w", name, err)
		}
		same := func(n netlink.Neigh) bool {
			return n.IP.Equal(w.IP) && n.State&netlink.NUD_PERMANENT != 0 && n.HardwareAddr.String() == w.HardwareAddr.String()
		}
		if !slices.ContainsFunc(have, same) {
			diffs = append(diffs, fmt.Sprintf("permanent neighbour %s with MAC %s is missing on %s", w.IP, w.HardwareAddr, name))
		}
	}
	return diffs, nil
}

// prefixOf converts; what is no prefix gives the zero value.
func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}
	}
	a = a.Unmap()
	return netip.PrefixFrom(a, ones-(bits-a.BitLen()))
}

// destination is what r leads to; listings may leave a default route's empty.
func destination(r netlink.Route) netip.Prefix {
	if r.Dst != nil {
		return prefixOf(r.Dst)
	}
	if r.Family == netlink.FAMILY_V4 {
		return defaultPrefix(netip.IPv4Unspecified())
	}
	return defaultPrefix(netip.IPv6Unspecified())
}
