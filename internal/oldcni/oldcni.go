package oldcni

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/netfilter"
)

// View is what a node shows.
type View struct {
	Tables  []netfilter.Table
	Devices []Device
	Routes  []Route
}

// Trouble is one thing that is there, and what it does.
type Trouble struct{ Object, Text, WayOut string }

// Troubles are what there is to say; ranges are those of all nodes' pods.
func (v View) Troubles(ranges []netip.Prefix) []Trouble {
	out := deviceTroubles(v.Devices, ranges)
	out = append(out, routeTroubles(v.Routes, ranges)...)
	return append(out, ruleTroubles(v.Tables)...)
}

// Look reads this node. What was read is right even with an error, which names
// what could not be.
func Look() (v View, err error) {
	runtime.LockOSThread() // all of it is about one network namespace
	defer runtime.UnlockOSThread()
	var errs []error
	v.Tables, err = netfilter.Read()
	errs = append(errs, err)
	links, err := netlink.LinkList()
	if err != nil {
		return v, errors.Join(append(errs, fmt.Errorf("devices: %w", err))...)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range links {
		d := Device{Name: l.Attrs().Name, Kind: l.Type(), Master: names[l.Attrs().MasterIndex], Up: l.Attrs().Flags&net.FlagUp != 0}
		if x, ok := l.(*netlink.Vxlan); ok {
			d.Port = x.Port
		}
		if d.Name == "tunl0" {
			addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
			if err != nil {
				errs = append(errs, fmt.Errorf("addresses of %s: %w", d.Name, err))
			}
			for _, a := range addrs {
				if ip, ok := netip.AddrFromSlice(a.IP.To4()); ok {
					d.Addrs = append(d.Addrs, ip)
				}
			}
		}
		v.Devices = append(v.Devices, d)
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			errs = append(errs, fmt.Errorf("routes: %w", err))
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue // the default route
			}
			ip, ok := netip.AddrFromSlice(r.Dst.IP)
			if ones, bits := r.Dst.Mask.Size(); ok && bits > 0 {
				dst := netip.PrefixFrom(ip.Unmap(), ones)
				v.Routes = append(v.Routes, Route{dst, names[r.LinkIndex], int(r.Protocol)})
			}
		}
	}
	return v, errors.Join(errs...)
}
