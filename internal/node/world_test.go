package node

import (
	"context"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The number changes with every route and rule that may lead a packet
// elsewhere, comes back with them, and does not know ours.
func TestWorldRoutes(t *testing.T) {
	m := inNewNetns(t)
	addAddr(t, m, "eth0", "172.31.0.2/24")
	addAddr(t, m, "eth0", "fd00:172:31::2/64")
	eth0, err := m.nl.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	index := eth0.Attrs().Index
	cidr := func(s string) *net.IPNet {
		_, n, err := net.ParseCIDR(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	read := func() uint64 {
		t.Helper()
		n, err := m.WorldRoutes()
		must(err)
		return n
	}
	// The kernel works off the carrier of a new pair later, and with it routes
	// to link-local addresses.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, dev := range []string{"eth0", "peer0"} {
		for {
			l, err := m.nl.LinkByName(dev)
			must(err)
			routes, err := m.nl.RouteList(l, netlink.FAMILY_V6)
			must(err)
			if l.Attrs().OperState == netlink.OperUp && slices.ContainsFunc(routes, func(r netlink.Route) bool {
				return r.Dst != nil && r.Dst.String() == "fe80::/64"
			}) {
				break
			}
			must(ctx.Err())
			time.Sleep(time.Millisecond)
		}
	}
	start := read()
	differs := func(what string, change func()) {
		t.Helper()
		before := read()
		change()
		if read() == before {
			t.Errorf("%s made no difference", what)
		}
	}
	def := &netlink.Route{LinkIndex: index, Gw: net.ParseIP("172.31.0.1")}
	differs("a default route", func() { must(m.nl.RouteAdd(def)) })
	def2 := &netlink.Route{LinkIndex: index, Gw: net.ParseIP("172.31.0.9")}
	differs("another next hop", func() { must(m.nl.RouteReplace(def2)) })
	def6 := &netlink.Route{LinkIndex: index, Gw: net.ParseIP("fd00:172:31::1")}
	differs("an IPv6 default route", func() { must(m.nl.RouteAdd(def6)) })
	other := &netlink.Route{LinkIndex: index, Gw: net.ParseIP("172.31.0.1"), Dst: cidr("203.0.113.0/24"), Table: 100}
	differs("a route of another table", func() { must(m.nl.RouteAdd(other)) })
	rule := netlink.NewRule()
	rule.Family, rule.Table, rule.Src, rule.Priority = unix.AF_INET, 100, cidr("10.244.80.0/24"), 1000
	differs("a rule", func() { must(m.nl.RuleAdd(rule)) })

	before := read()
	own := &netlink.Route{LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: cidr("10.244.80.7/32"), Protocol: RouteProtocol}
	must(m.nl.RouteAdd(own))
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pw0123456789a"}, PeerName: "peer1"}
	must(m.nl.LinkAdd(veth))
	up(t, m, "pw0123456789a")
	if read() != before {
		t.Error("a route to a pod and its device made a difference")
	}
	must(m.nl.LinkDel(veth))
	must(m.nl.RouteDel(own))

	must(m.nl.RuleDel(rule))
	must(m.nl.RouteDel(other))
	must(m.nl.RouteDel(def6))
	must(m.nl.RouteDel(def2))
	if read() != start {
		t.Error("everything is as it was, the number is not")
	}
	differs("a device that goes down", func() {
		must(m.nl.LinkSetDown(eth0))
	})
}
