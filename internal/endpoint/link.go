package endpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// linkByName returns nil without an error if there is no such interface.
func linkByName(h *netlink.Handle, name string) (netlink.Link, error) {
	link, err := h.LinkByName(name)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up interface %s: %w", name, err)
	}
	return link, nil
}

// linkByIndex returns nil without an error if there is no such interface.
func linkByIndex(h *netlink.Handle, index int) (netlink.Link, error) {
	link, err := h.LinkByIndex(index)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up interface %d: %w", index, err)
	}
	return link, nil
}

// deleteLink removes an interface; one that is gone is no error.
func deleteLink(h *netlink.Handle, link netlink.Link) error {
	err := h.LinkDel(link)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove interface %s: %w", link.Attrs().Name, err)
	}
	return nil
}

// createVeth makes the pair of ep with both halves down, the pod's half in
// the pod's namespace, and returns the host's half.
func createVeth(host *netlink.Handle, podNetns int, ep *Endpoint) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = ep.HostIfName
	attrs.MTU = ep.MTU
	attrs.HardwareAddr = ep.HostMAC
	veth := netlink.NewVeth(attrs)
	veth.PeerName = ep.IfName
	veth.PeerHardwareAddr = ep.MAC
	veth.PeerMTU = uint32(ep.MTU)
	veth.PeerNamespace = netlink.NsFd(podNetns)
	if err := host.LinkAdd(veth); err != nil {
		return nil, fmt.Errorf("create veth %s with peer %s in %s: %w", ep.HostIfName, ep.IfName, ep.Netns, err)
	}
	link, err := linkByName(host, ep.HostIfName)
	if err == nil && link == nil {
		err = fmt.Errorf("interface %s vanished while it was created", ep.HostIfName)
	}
	if err != nil {
		return nil, err
	}
	ep.HostIfindex = link.Attrs().Index
	return link, nil
}

// sysctl is one setting of an interface.
type sysctl struct{ family, name, value string }

// hostSysctls are those of the host's half.
func hostSysctls() []sysctl {
	return []sysctl{
		{"ipv4", "rp_filter", "2"},
		{"ipv4", "send_redirects", "0"},
		{"ipv4", "proxy_arp", "0"},
		{"ipv4", "forwarding", "1"},
		{"ipv6", "disable_ipv6", "0"},
		{"ipv6", "addr_gen_mode", "1"}, // no link-local address
		{"ipv6", "accept_ra", "0"},
		{"ipv6", "forwarding", "1"},
	}
}

// podSysctls are those of the pod's half.
func podSysctls() []sysctl {
	return []sysctl{
		{"ipv6", "disable_ipv6", "0"},
		{"ipv6", "addr_gen_mode", "1"},
		{"ipv6", "accept_ra", "0"},
	}
}

// setSysctls sets what differs for an interface of the network namespace that
// the calling thread is in, and returns what it changed. A kernel without
// IPv6 has no IPv6 settings.
func (m *Manager) setSysctls(iface string, want []sysctl) (changed []string, err error) {
	for _, s := range want {
		path := m.sysctlPath(iface, s)
		old, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) && s.family == "ipv6" && !haveIPv6() {
			continue
		}
		if err != nil {
			return changed, fmt.Errorf("sysctl: %w", err)
		}
		was := strings.TrimSpace(string(old))
		if was == s.value {
			continue
		}
		if err := os.WriteFile(path, []byte(s.value), 0o644); err != nil {
			return changed, fmt.Errorf("sysctl: set %s to %s: %w", path, s.value, err)
		}
		changed = append(changed, fmt.Sprintf("net.%s.conf.%s.%s was %s, now %s", s.family, iface, s.name, was, s.value))
	}
	return changed, nil
}

// sysctlDifferences tells which settings of an interface are not as they should
// be.
func (m *Manager) sysctlDifferences(iface string, want []sysctl) ([]string, error) {
	var diffs []string
	for _, s := range want {
		data, err := os.ReadFile(m.sysctlPath(iface, s))
		if errors.Is(err, fs.ErrNotExist) {
			continue // so is the interface, or IPv6, which others tell of
		}
		if err != nil {
			return nil, fmt.Errorf("sysctl: %w", err)
		}
		if is := strings.TrimSpace(string(data)); is != s.value {
			diffs = append(diffs, fmt.Sprintf("net.%s.conf.%s.%s is %s, not %s", s.family, iface, s.name, is, s.value))
		}
	}
	return diffs, nil
}

func (m *Manager) sysctlPath(iface string, s sysctl) string {
	return filepath.Join(cmp.Or(m.cfg.Sysctls, "/proc/sys"), "net", s.family, "conf", iface, s.name)
}

func haveIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6/conf")
	return err == nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// podRoutes are the routes inside the pod: IPv4 reaches its gateway on the
// link first; IPv6 knows that link-local addresses are there.
func podRoutes(ep Endpoint, index int) []netlink.Route {
	var out []netlink.Route
	for _, a := range ep.Addrs {
		gw := Gateway(a)
		def := netlink.Route{LinkIndex: index, Gw: gw.AsSlice(), Dst: ipNet(defaultPrefix(a)), Family: family(a)}
		if a.Is4() {
			out = append(out, netlink.Route{LinkIndex: index, Dst: ipNet(single(gw)), Scope: netlink.SCOPE_LINK, Family: family(a)})
			def.Flags = int(netlink.FLAG_ONLINK)
		} else {
			def.MTU = ep.MTU6
		}
		out = append(out, def)
	}
	return out
}

func defaultPrefix(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

func podNeighs(ep Endpoint, index int) []netlink.Neigh {
	var out []netlink.Neigh
	for _, a := range ep.Addrs {
		out = append(out, permanent(Gateway(a), ep.HostMAC, index))
	}
	return out
}

func hostRoutes(ep Endpoint) []netlink.Route {
	var out []netlink.Route
	_, index := ep.Device()
	for _, a := range ep.Addrs {
		out = append(out, netlink.Route{LinkIndex: index, Dst: ipNet(single(a)), Scope: netlink.SCOPE_LINK, Family: family(a)})
	}
	return out
}

func hostNeighs(ep Endpoint) []netlink.Neigh {
	var out []netlink.Neigh
	_, index := ep.Device()
	for _, a := range ep.Addrs {
		out = append(out, permanent(a, ep.MAC, index))
	}
	return out
}

func permanent(a netip.Addr, mac net.HardwareAddr, index int) netlink.Neigh {
	return netlink.Neigh{
		LinkIndex: index, Family: family(a), State: netlink.NUD_PERMANENT,
		IP: a.AsSlice(), HardwareAddr: mac,
	}
}

// applyNeighs and applyRoutes replace what differs.
func applyNeighs(h *netlink.Handle, neighs []netlink.Neigh) error {
	for _, n := range neighs {
		if err := h.NeighSet(&n); err != nil {
			return fmt.Errorf("set neighbour %s: %w", n.IP, err)
		}
	}
	return nil
}

func applyRoutes(h *netlink.Handle, routes []netlink.Route) error {
	for _, r := range routes {
		if err := h.RouteReplace(&r); err != nil {
			return fmt.Errorf("set route to %s: %w", r.Dst, err)
		}
	}
	return nil
}

// configurePod brings the pod's half up with addresses, routes and
// neighbours. The thread need not be in the pod's namespace, h is.
func configurePod(h *netlink.Handle, ep Endpoint) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo in the pod: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up in the pod: %w", err)
	}
	link, err := h.LinkByName(ep.IfName)
	if err != nil {
		return fmt.Errorf("interface %s in the pod: %w", ep.IfName, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up in the pod: %w", ep.IfName, err)
	}
	for _, a := range ep.Addrs {
		addr := &netlink.Addr{IPNet: ipNet(single(a))}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("set address %s on %s in the pod: %w", a, ep.IfName, err)
		}
	}
	index := link.Attrs().Index
	if err := applyNeighs(h, podNeighs(ep, index)); err != nil {
		return fmt.Errorf("in the pod: %w", err)
	}
	if err := applyRoutes(h, podRoutes(ep, index)); err != nil {
		return fmt.Errorf("in the pod: %w", err)
	}
	return nil
}

// configureHost brings the host's half up with its settings, neighbours and
// routes.
func configureHost(h *netlink.Handle, ep Endpoint, link netlink.Link) error {
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", ep.HostIfName, err)
	}
	if err := configureOver(h, ep); err != nil {
		return err
	}
	name, _ := ep.Device()
	if err := applyNeighs(h, hostNeighs(ep)); err != nil {
		return fmt.Errorf("on %s: %w", name, err)
	}
	if err := applyRoutes(h, hostRoutes(ep)); err != nil {
		return fmt.Errorf("on %s: %w", name, err)
	}
	return nil
}
