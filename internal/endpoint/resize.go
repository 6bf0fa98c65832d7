package endpoint

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// resize brings both halves of an endpoint to the MTU that new pods get, and
// the host's half back to it. The half that takes what the other sends is
// never the smaller one: a veth drops what is too large for its receiver. The
// pod's half follows only where it has the MTU that it was given, or more
// than there is now: whoever made it smaller had a reason.
//
// The IPv6 default route follows where it has an MTU of its own, and loses it
// where there is none any more.
//
// TCP that is running follows by itself: the kernel cuts segments by the
// device's MTU, and the datapath tells the other end.
func (m *Manager) resize(h *netlink.Handle, e *entry, host netlink.Link) ([]string, error) {
	ep := m.endpointOf(e)
	mtu, mtu6 := m.cfg.MTU(), m.mtu6(m.cfg.MTU())
	if mtu == 0 {
		mtu, mtu6 = ep.MTU, ep.MTU6
	}
	if mtu == ep.MTU && mtu6 == ep.MTU6 {
		if host.Attrs().MTU == mtu {
			return nil, nil
		}
		was := host.Attrs().MTU
		return []string{fmt.Sprintf("%s: MTU was %d, now %d", ep.HostIfName, was, mtu)}, setMTU(h, host, mtu)
	}
	pod, err := m.openPod(ep.Netns)
	if err != nil {
		return nil, fmt.Errorf("MTU %d: %w", mtu, err)
	}
	defer pod.close()
	inPod, err := linkByName(pod.h, ep.IfName)
	if err == nil && inPod == nil {
		err = fmt.Errorf("interface %s is missing in the pod", ep.IfName)
	}
	if err != nil {
		return nil, fmt.Errorf("MTU %d: %w", mtu, err)
	}
	if host.Attrs().MTU < mtu {
		if err := setMTU(h, host, mtu); err != nil {
			return nil, err
		}
	}
	has := inPod.Attrs().MTU
	if has == ep.MTU || has > mtu {
		if err := setMTU(pod.h, inPod, mtu); err != nil {
			return nil, fmt.Errorf("in the pod: %w", err)
		}
		has = mtu
	}
	if host.Attrs().MTU > mtu {
		if err := setMTU(h, host, mtu); err != nil {
			return nil, err
		}
	}
	was := ep.MTU
	ep.MTU = mtu
	if err := configureOver(h, ep); err != nil {
		return nil, err
	}
	if mtu6 != ep.MTU6 {
		ep.MTU6 = mtu6
		if err := resizeRoutes(pod.h, ep, inPod.Attrs().Index, has); err != nil {
			return nil, fmt.Errorf("in the pod: %w", err)
		}
	}
	if err := m.save(e, ep, phaseReady); err != nil {
		return nil, err
	}
	if o, ok := m.cfg.Regenerator.(Observer); ok {
		o.Changed(ep)
	}
	m.log.Info("endpoint follows the node's MTU", "endpoint", ep.String(), "mtu", mtu, "was", was)
	return nil, nil
}

// resizeRoutes writes the MTU of IPv6 to its routes in a pod whose interface
// has that one: a route that said more would be believed, and what is sent by
// it does not fit through the interface.
func resizeRoutes(h *netlink.Handle, ep Endpoint, index, has int) error {
	if has < ep.MTU6 {
		ep.MTU6 = 0
	}
	for _, r := range podRoutes(ep, index) {
		if r.Family != unix.AF_INET6 {
			continue
		}
		if err := h.RouteReplace(&r); err != nil {
			return fmt.Errorf("route to %s with MTU %d: %w", r.Dst, r.MTU, err)
		}
	}
	return nil
}

// resizeNew catches up with a change that came while the endpoint was made:
// from now on [Manager.Repair] sees it. What fails here is tried again there.
func (m *Manager) resizeNew(e *entry, ep Endpoint) Endpoint {
	if mtu := m.cfg.MTU(); mtu == 0 || mtu == ep.MTU && m.mtu6(mtu) == ep.MTU6 {
		return ep
	}
	h, err := newHandle()
	if err == nil {
		defer h.Close()
		var link netlink.Link
		if link, err = h.LinkByName(ep.HostIfName); err == nil {
			_, err = m.resize(h, e, link)
		}
	}
	if err != nil {
		m.log.Warn("a new endpoint does not follow the node's MTU yet", "endpoint", ep.String(), "err", err)
	}
	return m.endpointOf(e)
}

// mtu6 is the MTU of a pod's IPv6 routes; 0 = that of its interface.
func (m *Manager) mtu6(mtu int) int {
	if m.cfg.MTU6 == nil {
		return 0
	}
	if n := m.cfg.MTU6(); n < mtu {
		return n
	}
	return 0
}

func setMTU(h *netlink.Handle, link netlink.Link, mtu int) error {
	if err := h.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("set MTU of %s to %d: %w", link.Attrs().Name, mtu, err)
	}
	return nil
}
