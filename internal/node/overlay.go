package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Overlay is what the tunnel device should be like.
type Overlay struct {
	MAC net.HardwareAddr // nil: not known yet, leave it
	MTU int              // 0: not known yet, leave it
}

// EnsureOverlay makes the tunnel device and returns its ifindex, and whether
// it had to be created. A device of its name that is none of ours in its
// attributes is removed first.
func (m *Manager) EnsureOverlay(o Overlay) (ifindex int, created bool, err error) {
	want := &netlink.Vxlan{
		LinkAttrs:      netlink.LinkAttrs{Name: OverlayName, HardwareAddr: o.MAC, MTU: o.MTU},
		FlowBased:      true,
		Port:           OverlayPort,
		UDP6ZeroCSumTx: true,
		UDP6ZeroCSumRx: true,
	}
	link, err := m.nl.LinkByName(OverlayName)
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing):
		link = nil
	case err != nil:
		return 0, false, fmt.Errorf("look for %s: %w", OverlayName, err)
	}
	if link != nil {
		if why := wrongOverlay(link); why != "" {
			m.log.Warn("the tunnel device has other attributes than ours; making it anew",
				"device", OverlayName, "why", why)
			want.Index = link.Attrs().Index
			if err := m.nl.LinkDel(link); err != nil {
				return 0, false, fmt.Errorf("remove %s (%s): %w", OverlayName, why, err)
			}
			link = nil
		}
	}
	if link == nil {
		if err := m.nl.LinkAdd(want); err != nil {
			return 0, false, fmt.Errorf("create %s: %w", OverlayName, portTaken(err))
		}
		created = true
		if link, err = m.nl.LinkByName(OverlayName); err != nil {
			return 0, false, fmt.Errorf("look for %s: %w", OverlayName, err)
		}
	}
	return link.Attrs().Index, created, m.tuneOverlay(link, o)
}

// wrongOverlay says which attribute that cannot be changed in place differs.
func wrongOverlay(link netlink.Link) string {
	v, ok := link.(*netlink.Vxlan)
	switch {
	case !ok:
		return "it is a " + link.Type() + " device"
	case !v.FlowBased:
		return fmt.Sprintf("it has the fixed VNI %d instead of being external", v.VxlanId)
	case v.Port != OverlayPort:
		return fmt.Sprintf("UDP port %d", v.Port)
	case v.Learning:
		return "it learns addresses"
	case !v.UDP6ZeroCSumRx:
		return "it refuses UDP over IPv6 without checksum"
	}
	return ""
}

func (m *Manager) tuneOverlay(link netlink.Link, o Overlay) error {
	a := link.Attrs()
	var errs []error
	set := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: set %s: %w", OverlayName, what, err))
		}
	}
	if o.MAC != nil && !bytes.Equal(a.HardwareAddr, o.MAC) {
		set("address "+o.MAC.String(), m.nl.LinkSetHardwareAddr(link, o.MAC))
	}
	if o.MTU > 0 && a.MTU != o.MTU {
		set(fmt.Sprintf("MTU %d", o.MTU), m.nl.LinkSetMTU(link, o.MTU))
	}
	if a.RawFlags&unix.IFF_NOARP == 0 {
		set("arp off", m.nl.LinkSetARPOff(link))
	}
	errs = append(errs, m.overlayAddr(link))
	// Answers from the host's own NodePorts come under its own addresses.
	errs = append(errs, m.ourSysctl("net/ipv4/conf/"+OverlayName+"/accept_local", "1"))
	// No link-local address: nobody is asked for on this link.
	errs = append(errs, m.ourSysctl("net/ipv6/conf/"+OverlayName+"/addr_gen_mode", "1"))
	if a.RawFlags&unix.IFF_UP == 0 {
		set("up", portTaken(m.nl.LinkSetUp(link)))
	}
	return errors.Join(errs...)
}

func (m *Manager) overlayAddr(link netlink.Link) error {
	want, err := netlink.ParseAddr(OverlayAddr)
	if err != nil {
		return fmt.Errorf("%s: address %s: %w", OverlayName, OverlayAddr, err)
	}
	want.Scope = unix.RT_SCOPE_LINK
	if err := m.nl.AddrAdd(link, want); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s: add address %s: %w", OverlayName, OverlayAddr, err)
	}
	return nil
}

// portTaken explains the errors that a second VXLAN device brings.
func portTaken(err error) error {
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("another program has UDP port %d for VXLAN; remove its device (see 'ip -d link show type vxlan'): %w", OverlayPort, err)
	}
	return err
}

// RemoveOverlay removes the tunnel device, if there is one.
func (m *Manager) RemoveOverlay() error {
	link, err := m.nl.LinkByName(OverlayName)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil
	}
	if err == nil {
		err = m.nl.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", OverlayName, err)
	}
	return nil
}

// RemovePods removes the host sides of all pods' interfaces, and with them
// the pods' sides.
func (m *Manager) RemovePods() error {
	links, err := m.nl.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		if name := l.Attrs().Name; IsHostVeth(name) && l.Type() == "veth" {
			if err := m.nl.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, fmt.Errorf("remove %s: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}
