package node

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Way is how the kernel would send to an address now.
type Way struct {
	Device  int        // index
	Nexthop netip.Addr // the address itself when it is on the link
	MTU     int        // of the device or, if that is less, of the route, set or learned
	Link    int        // MTU of the device alone
	Onlink  bool       // no router between
}

// Way asks the kernel's routing table for the way to addr. ok is false when
// there is none, or none that leaves by a device (local, blackhole).
func (m *Manager) Way(addr netip.Addr) (w Way, ok bool, err error) {
	routes, err := m.nl.RouteGet(addr.AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return Way{}, false, nil
	}
	if err != nil {
		return Way{}, false, fmt.Errorf("ask for the route to %s: %w", addr, err)
	}
	if len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return Way{}, false, nil
	}
	r := routes[0]
	link, err := m.nl.LinkByIndex(r.LinkIndex)
	if err != nil {
		return Way{}, false, fmt.Errorf("route to %s: look up device %d: %w", addr, r.LinkIndex, err)
	}
	mtu := link.Attrs().MTU
	w = Way{Device: r.LinkIndex, Nexthop: addr, MTU: mtu, Link: mtu, Onlink: true}
	if gw, valid := netip.AddrFromSlice(r.Gw); valid && !gw.IsUnspecified() {
		w.Nexthop, w.Onlink = gw.Unmap(), false
	}
	if r.MTU > 0 && r.MTU < w.MTU {
		w.MTU = r.MTU
	}
	return w, true, nil
}
