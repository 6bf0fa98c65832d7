package node

import (
	"fmt"
	"hash/fnv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// WorldRoutes is a number that stands for how the node reaches what is not
// of the cluster: every route and rule of both families, ours and those of
// pods' devices left out. As long as it is the same, so are the ways.
func (m *Manager) WorldRoutes() (uint64, error) {
	links, err := m.nl.LinkList()
	if err != nil {
		return 0, fmt.Errorf("list devices: %w", err)
	}
	ours := make(map[int]bool)
	for _, l := range links {
		name := l.Attrs().Name
		ours[l.Attrs().Index] = IsPodDevice(name) || name == OverlayName || name == FragName
	}
	// The order of the kernel's lists says nothing: the hashes are added.
	var sum uint64
	add := func(format string, args ...any) {
		h := fnv.New64a()
		fmt.Fprintf(h, format, args...)
		sum += h.Sum64()
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := m.nl.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return 0, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if r.Table == unix.RT_TABLE_LOCAL || r.Protocol == RouteProtocol || ours[r.LinkIndex] {
				continue
			}
			via, hops := "", ""
			if r.Via != nil {
				via = r.Via.String()
			}
			for _, h := range r.MultiPath {
				hops += fmt.Sprint(h.LinkIndex, h.Gw, h.Hops, h.Flags, ";")
			}
			add("route %d %d %v %v %s %d %d %d %d %d %s", family, r.Table, r.Dst, r.Gw, via, r.LinkIndex, r.Priority, r.Type, r.Tos, r.Flags, hops)
		}
		rules, err := m.nl.RuleList(family)
		if err != nil {
			return 0, fmt.Errorf("list rules: %w", err)
		}
		for _, r := range rules {
			add("rule %d %s mark %d iif %s oif %s", family, r.String(), r.Mark, r.IifName, r.OifName)
		}
	}
	return sum, nil
}
