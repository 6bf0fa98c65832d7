package node

import (
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"sort"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// OverlayName is the name of the tunnel device.
const OverlayName = "podweir.vxlan"

// FragName is the name of the device behind which the kernel reassembles
// fragments, see package loader.
const FragName = "podweir.frag"

// OverlayAddr is an address of the tunnel device, without meaning: the
// kernel's reverse-path filter, in its loose mode too, refuses what arrives by
// a device without an address unless the way back leads out of that very
// device. Clients from outside and services' answers to the host do.
const OverlayAddr = "169.254.1.1/32"

// Loopback is the name of the loopback device.
const Loopback = "lo"

// OverlayPort is the UDP port of VXLAN (RFC 7348).
const OverlayPort = 4789

// hostVeth are the names that host-side veths of pods bear.
var hostVeth = regexp.MustCompile(`^pw[0-9a-f]{11}$`)

// IsHostVeth tells the host side of a pod's interface from other devices.
func IsHostVeth(name string) bool { return hostVeth.MatchString(name) }

// overVeth are those of devices over such veths that are the pod's then.
var overVeth = regexp.MustCompile(`^pws[0-9a-f]{11}$`)

// IsPodDevice tells devices of pods, which endpoints make, from others: veths
// and what may be over them from the beginning.
func IsPodDevice(name string) bool { return IsHostVeth(name) || overVeth.MatchString(name) }

// Manager reads and writes the node's network stack.
type Manager struct {
	log   *slog.Logger
	nl    *netlink.Handle
	ns    netns.NsHandle
	state sysctlState
	proc  string // /proc/sys, or where it can be written
}

// New makes a Manager for the thread's network namespace. stateDir holds the
// record of changed sysctls.
func New(stateDir, sysctls string, log *slog.Logger) (*Manager, error) {
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("open own network namespace: %w", err)
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		_ = ns.Close()
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	if sysctls == "" {
		sysctls = "/proc/sys"
	}
	m := &Manager{log: log, nl: h, ns: ns, proc: sysctls}
	if err := m.state.open(stateDir); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Close ends the use of the Manager. Everything it set up stays.
func (m *Manager) Close() {
	m.nl.Close()
	_ = m.ns.Close()
}

// Device is one network device and its addresses.
type Device struct {
	Index int
	Name  string
	MTU   int
	Up    bool
	// Addrs without the link-local ones of IPv6 and those of the host alone
	// (127.0.0.0/8, ::1).
	Addrs []netip.Addr
	// Source4 and Source6 are the addresses that the kernel would send under
	// by this device: the first that is global, no secondary one and not
	// deprecated.
	Source4, Source6 netip.Addr
	// Default: a default route leaves by it, of the main table or, with
	// Ethernet headers, any other.
	Default bool
	// Routed: some route leaves by it that pods' packets could take. Of
	// devices with Ethernet headers alone, which the programs expect.
	Routed bool
	// Uplink: it leads to the world or to other nodes; see [Outside].
	Uplink bool
}

// Devices lists all devices, ordered by index, pods' veths and what is over them left out.
func (m *Manager) Devices() ([]Device, error) {
	links, err := m.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	byIndex := make(map[int]*Device, len(links))
	ether := make(map[int]bool)
	var out []*Device
	for _, l := range links {
		a := l.Attrs()
		if IsPodDevice(a.Name) || IsCover(a.Name) {
			continue
		}
		d := &Device{Index: a.Index, Name: a.Name, MTU: a.MTU, Up: a.RawFlags&unix.IFF_UP != 0}
		byIndex[a.Index] = d
		ether[a.Index] = a.EncapType == "ether"
		out = append(out, d)
	}
	addrs, err := m.nl.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		d := byIndex[a.LinkIndex]
		if !ok || d == nil || d.Name == OverlayName || d.Name == FragName {
			continue
		}
		ip = ip.Unmap()
		if ip.IsLoopback() || ip.Is6() && ip.IsLinkLocalUnicast() {
			continue
		}
		if a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED {
			continue // another host has it
		}
		d.Addrs = append(d.Addrs, ip)
		if source := d.source(ip); !source.IsValid() && isSource(a) {
			*source = ip
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := m.nl.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if r.Type != unix.RTN_UNICAST || r.Table == unix.RT_TABLE_LOCAL || r.Protocol == RouteProtocol || ofLink(r) {
				continue
			}
			hops := []int{r.LinkIndex}
			for _, hop := range r.MultiPath {
				hops = append(hops, hop.LinkIndex)
			}
			for _, index := range hops {
				if d := byIndex[index]; d != nil {
					d.Default = d.Default || isDefault(r) && (r.Table == unix.RT_TABLE_MAIN || ether[index])
					d.Routed = d.Routed || ether[index]
				}
			}
		}
	}
	sorted := make([]Device, 0, len(out))
	for _, d := range out {
		sorted = append(sorted, *d)
	}
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].Index < sorted[j].Index })
	return sorted, nil
}

// source is where the source of ip's family is kept.
func (d *Device) source(ip netip.Addr) *netip.Addr {
	if ip.Is4() {
		return &d.Source4
	}
	return &d.Source6
}

// isSource tells addresses that the kernel sends under from those it only
// answers on. Temporary IPv6 addresses bear the flag of secondary ones.
func isSource(a netlink.Addr) bool {
	return a.Scope == unix.RT_SCOPE_UNIVERSE && a.Flags&(unix.IFA_F_SECONDARY|unix.IFA_F_DEPRECATED|unix.IFA_F_TENTATIVE) == 0
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0 && r.Dst.IP.IsUnspecified()
}

// ofLink tells routes that only the device's own link can be meant by.
func ofLink(r netlink.Route) bool {
	return r.Dst != nil && (r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast())
}

// Addrs are the addresses of all devices, each once: the node's own.
func Addrs(devices []Device) []netip.Addr {
	seen := make(map[netip.Addr]bool)
	var out []netip.Addr
	for _, d := range devices {
		for _, a := range d.Addrs {
			if !seen[a] {
				seen[a] = true
				out = append(out, a)
			}
		}
	}
	return out
}

// Outside picks the devices by which packets of pods may leave. Uplinks are
// those that lead to the world and to other nodes: that hold one of the node's
// addresses or a default route. Others have some route: answers to what pods
// send there arrive by them.
func Outside(devices []Device, nodeAddrs []netip.Addr) []Device {
	want := make(map[netip.Addr]bool, len(nodeAddrs))
	for _, a := range nodeAddrs {
		want[a] = true
	}
	var out []Device
	for _, d := range devices {
		if d.Name == Loopback || d.Name == OverlayName || d.Name == FragName || IsPodDevice(d.Name) {
			continue
		}
		take := d.Default
		for _, a := range d.Addrs {
			take = take || want[a]
		}
		d.Uplink = take
		if take || d.Routed {
			out = append(out, d)
		}
	}
	return out
}

// Uplinks are those of the devices that [Outside] has picked as such.
func Uplinks(outside []Device) (out []Device) {
	for _, d := range outside {
		if d.Uplink {
			out = append(out, d)
		}
	}
	return out
}

// Holding finds the device that has an address.
func Holding(devices []Device, addr netip.Addr) (Device, bool) {
	for _, d := range devices {
		for _, a := range d.Addrs {
			if a == addr {
				return d, true
			}
		}
	}
	return Device{}, false
}
