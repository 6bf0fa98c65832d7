package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// RouteProtocol marks our routes ('ip route show proto 112'). It lies in the
// range that no routing daemon has claimed.
const RouteProtocol = netlink.RouteProtocol(0x70)

// Route is a host route of the dataplane.
type Route struct {
	Dst netip.Prefix
	// Blackhole drops; otherwise the route leads into the tunnel device, or
	// by Device to Via, a router on its link or the node itself.
	Blackhole bool
	Via       netip.Addr
	Device    int
	// Src is the address that host processes send from; zero = the kernel's
	// choice.
	Src netip.Addr
}

// SyncRoutes brings our routes to want: adds, changes and removes, returning
// how many. Errors are joined; a route that fails stops no other.
func (m *Manager) SyncRoutes(want []Route, overlay int) (changes int, err error) {
	var errs []error
	desired := make(map[netip.Prefix]Route, len(want))
	for _, r := range want {
		desired[r.Dst.Masked()] = r
	}
	have := make(map[netip.Prefix]netlink.Route)
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := m.ownRoutes(family)
		if err != nil {
			return 0, err
		}
		for _, r := range list {
			dst, ok := routeDst(r, family)
			r.Family = family
			if _, double := have[dst]; !ok || double {
				// Not made by this code: nothing that we want looks so.
				errs = append(errs, m.delRoute(r))
				changes++
				continue
			}
			have[dst] = r
		}
	}
	for dst, r := range have {
		w, ok := desired[dst]
		if ok && sameRoute(r, w, overlay) {
			delete(desired, dst)
			continue
		}
		if ok {
			// Put the new one in place of the old without a moment between;
			// only for IPv6 are routes of different kinds no replacements of
			// each other.
			n := m.kernelRoute(w, overlay)
			var err error
			if dst.Addr().Is6() && r.Type != n.Type {
				if err = m.delRoute(r); err == nil {
					err = m.nl.RouteAdd(n)
				}
			} else {
				err = m.nl.RouteReplace(n)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("route %s: change: %w", dst, err))
			} else {
				changes++
			}
			delete(desired, dst)
			continue
		}
		errs = append(errs, m.delRoute(r))
		changes++
	}
	for dst, w := range desired {
		if err := m.nl.RouteAdd(m.kernelRoute(w, overlay)); err != nil {
			if errors.Is(err, unix.EEXIST) {
				err = fmt.Errorf("another program's route stands there (see 'ip route show %s'); it is left alone: %w", dst, err)
			} else if errors.Is(err, unix.EINVAL) && w.Src.IsValid() {
				err = fmt.Errorf("is the source %s an address of this node? %w", w.Src, err)
			}
			errs = append(errs, fmt.Errorf("route %s: add: %w", dst, err))
			continue
		}
		changes++
	}
	return changes, errors.Join(errs...)
}

// RemoveRoutes removes every route of ours that does not lead to a pod's
// device.
func (m *Manager) RemoveRoutes() error {
	_, err := m.SyncRoutes(nil, 0)
	return err
}

// ownRoutes are our routes in the main table, pods' host routes left out:
// those belong to the endpoints.
func (m *Manager) ownRoutes(family int) ([]netlink.Route, error) {
	list, err := m.nl.RouteListFiltered(family,
		&netlink.Route{Table: unix.RT_TABLE_MAIN, Protocol: RouteProtocol},
		netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, fmt.Errorf("list own routes: %w", err)
	}
	veth := make(map[int]bool)
	links, err := m.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		veth[l.Attrs().Index] = IsPodDevice(l.Attrs().Name)
	}
	out := list[:0]
	for _, r := range list {
		if !veth[r.LinkIndex] {
			out = append(out, r)
		}
	}
	return out, nil
}

func (m *Manager) delRoute(r netlink.Route) error {
	if r.Type != unix.RTN_UNICAST {
		r.LinkIndex = 0 // the kernel reports lo, but does not take it
	}
	if err := m.nl.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("route %s: remove: %w", r.Dst, err)
	}
	return nil
}

func (m *Manager) kernelRoute(r Route, overlay int) *netlink.Route {
	dst := r.Dst.Masked()
	out := &netlink.Route{
		Dst:      &net.IPNet{IP: dst.Addr().AsSlice(), Mask: net.CIDRMask(dst.Bits(), dst.Addr().BitLen())},
		Protocol: RouteProtocol,
		Table:    unix.RT_TABLE_MAIN,
		Type:     unix.RTN_UNICAST,
	}
	if r.Blackhole {
		out.Type = unix.RTN_BLACKHOLE
		return out
	}
	if r.Via.IsValid() {
		out.LinkIndex = r.Device
		out.Gw = r.Via.AsSlice()
	} else {
		out.LinkIndex = overlay
		out.Scope = netlink.SCOPE_LINK
	}
	if r.Src.IsValid() {
		out.Src = r.Src.AsSlice()
	}
	return out
}

func routeDst(r netlink.Route, family int) (netip.Prefix, bool) {
	if r.Dst == nil {
		if family == netlink.FAMILY_V4 {
			return netip.PrefixFrom(netip.IPv4Unspecified(), 0), true
		}
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0), true
	}
	ip, ok := netip.AddrFromSlice(r.Dst.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	if family == netlink.FAMILY_V4 {
		ip = ip.Unmap()
	}
	ones, _ := r.Dst.Mask.Size()
	return netip.PrefixFrom(ip, ones), true
}

func sameRoute(have netlink.Route, want Route, overlay int) bool {
	if want.Blackhole {
		return have.Type == unix.RTN_BLACKHOLE
	}
	src, _ := netip.AddrFromSlice(have.Src)
	gw, _ := netip.AddrFromSlice(have.Gw)
	device := overlay
	if want.Via.IsValid() {
		device = want.Device
	}
	return have.Type == unix.RTN_UNICAST && have.LinkIndex == device &&
		gw.Unmap() == want.Via && src.Unmap() == want.Src
}
