package node

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Cover is a device over a pod's host-side veth: a macvlan in passthru mode,
// which takes every unicast frame that the veth would give to the stack. What
// the pod sends gets there when the filters at the veth's ingress had it.
type Cover struct {
	Index int
	Name  string
	Veth  int // its index
}

// cover are the names that they bear: that of the veth with a letter more.
var cover = regexp.MustCompile(`^pwo[0-9a-f]{11}$`)

// IsCover tells covers from other devices.
func IsCover(name string) bool { return cover.MatchString(name) }

// CoverName is the name of the device over a pod's veth.
func CoverName(veth string) string { return "pwo" + strings.TrimPrefix(veth, "pw") }

// Covers are those there are, by the index of the veth.
func (m *Manager) Covers() (map[int]Cover, error) {
	links, err := m.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	out := make(map[int]Cover)
	for _, l := range links {
		if a := l.Attrs(); IsCover(a.Name) && l.Type() == "macvlan" {
			out[a.ParentIndex] = Cover{Index: a.Index, Name: a.Name, Veth: a.ParentIndex}
		}
	}
	return out, nil
}

// MakeCover makes the device over a pod's veth, or finds the one there is. A
// new one is down, see [Manager.RaiseCover]: it drops what it takes.
func (m *Manager) MakeCover(veth int, vethName string) (Cover, error) {
	name := CoverName(vethName)
	link, err := m.nl.LinkByName(name)
	var missing netlink.LinkNotFoundError
	if err != nil && !errors.As(err, &missing) {
		return Cover{}, fmt.Errorf("look for %s: %w", name, err)
	}
	if err == nil {
		if v, ok := link.(*netlink.Macvlan); ok && v.Mode == netlink.MACVLAN_MODE_PASSTHRU && v.ParentIndex == veth {
			return Cover{Index: v.Index, Name: name, Veth: veth}, nil
		}
		m.log.Warn("a device has the name of ours but other attributes; making it anew", "device", name, "type", link.Type())
		if err := m.nl.LinkDel(link); err != nil {
			return Cover{}, fmt.Errorf("remove %s, a %s device in the place of ours: %w", name, link.Type(), err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, veth
	if err := m.nl.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PASSTHRU}); err != nil {
		return Cover{}, fmt.Errorf("put macvlan %s over %s: %w", name, vethName, coverTaken(err))
	}
	if link, err = m.nl.LinkByName(name); err != nil {
		return Cover{}, fmt.Errorf("look for %s: %w", name, err)
	}
	return Cover{Index: link.Attrs().Index, Name: name, Veth: veth}, nil
}

// coverTaken explains the errors that the kernel has for it.
func coverTaken(err error) error {
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("this kernel has no macvlan (CONFIG_MACVLAN, module macvlan): %w", err)
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("another program may have put the pod's device into a bridge, or a macvlan over it; take that away: %w", err)
	}
	return err
}

// RaiseCover brings it up, with the MTU of the veth, and keeps the stack from
// talking there: addresses and neighbours are the veth's.
func (m *Manager) RaiseCover(c Cover) error {
	link, err := m.nl.LinkByIndex(c.Index)
	if err != nil {
		return fmt.Errorf("look for %s: %w", c.Name, err)
	}
	veth, err := m.nl.LinkByIndex(c.Veth)
	if err != nil {
		return fmt.Errorf("look for the device below %s: %w", c.Name, err)
	}
	errs := []error{
		m.ourSysctl("net/ipv6/conf/"+c.Name+"/addr_gen_mode", "1"),
		m.ourSysctl("net/ipv6/conf/"+c.Name+"/disable_ipv6", "1"),
		// The programs ask for routes as from there.
		m.ourSysctl("net/ipv6/conf/"+c.Name+"/forwarding", "1"),
		m.ourSysctl("net/ipv4/conf/"+c.Name+"/forwarding", "1"),
		m.ourSysctl("net/ipv4/conf/"+c.Name+"/rp_filter", "2"),
	}
	if mtu := veth.Attrs().MTU; link.Attrs().MTU != mtu {
		if err := m.nl.LinkSetMTU(link, mtu); err != nil {
			errs = append(errs, fmt.Errorf("%s: set MTU %d: %w", c.Name, mtu, err))
		}
	}
	if link.Attrs().RawFlags&unix.IFF_UP == 0 {
		if err := m.nl.LinkSetUp(link); err != nil {
			errs = append(errs, fmt.Errorf("%s: set up: %w", c.Name, err))
		}
	}
	return errors.Join(errs...)
}

// RemoveCover takes it away; one that is gone, with its veth, is no error.
func (m *Manager) RemoveCover(c Cover) error {
	link, err := m.nl.LinkByIndex(c.Index)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) || err == nil && link.Attrs().Name != c.Name {
		return nil
	}
	if err == nil {
		if err = m.nl.LinkDel(link); errors.Is(err, unix.ENODEV) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", c.Name, err)
	}
	return nil
}
