package endpoint_test

import (
	"fmt"
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
)

// Where IPv6 has less room than the interface, its default route says so; CHECK
// wants it, across a restart, too.
func TestIPv6RouteCarriesItsMTU(t *testing.T) {
	b := newBench(t)
	b.mtu6 = mtu - 30
	req, ns := b.request("web", "10.244.80.65", "fd00:10:244:50::65")
	if ep := b.add(req); ep.MTU != mtu || ep.MTU6 != mtu-30 {
		t.Fatalf("MTU %d, of IPv6 %d", ep.MTU, ep.MTU6)
	}
	route := func() netlink.Route { return defaultRoute6(t, ns) }
	if got := route().MTU; got != mtu-30 {
		t.Errorf("default route has MTU %d", got)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	if err := b.restart(); err != nil {
		t.Fatal(err)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	r := route()
	r.MTU = 0
	ns.Do(t, func() error { return netlink.RouteReplace(&r) })
	expectCode(t, b.Check(t.Context(), req), endpoint.CodeDiffers, "::/0 via fe80::1 with MTU 1420")
}

// defaultRoute6 is what a pod's IPv6 leaves by.
func defaultRoute6(t *testing.T, ns *endpointtest.Netns) (r netlink.Route) {
	t.Helper()
	ns.Do(t, func() error {
		list, err := netlink.RouteListFiltered(unix.AF_INET6, &netlink.Route{Gw: net.ParseIP("fe80::1")}, netlink.RT_FILTER_GW)
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("%d default routes: %v", len(list), list)
		}
		if err == nil {
			r = list[0]
		}
		return err
	})
	return r
}

// The routing mode of a node changes, or its device's MTU in a mode where IPv6
// has less room: the IPv6 default route of a running pod has an MTU as long as
// it differs from that of the interface, and the interface's afterwards.
func TestIPv6RouteFollowsItsMTU(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web", "10.244.80.65", "fd00:10:244:50::65")
	ep := b.add(req)
	smaller, smallerNs := b.request("smaller", "10.244.80.66", "fd00:10:244:50::66")
	b.add(smaller)
	for _, c := range []struct {
		what      string
		mtu, mtu6 int
		route     int // 0 = nothing of its own
		away      bool
	}{
		{"from VXLAN to ipip", 1480, 1450, 1450, false},
		{"the same again", 1480, 1450, 1450, false},
		{"ipip, the device grows", 8980, 8950, 8950, false},
		{"ipip, the device shrinks", 1380, 1350, 1350, false},
		{"ipip, the least that IPv6 takes", 1300, 1280, 1280, false},
		{"ipip, the device grows while the agent is away", 1480, 1450, 1450, true},
		{"from ipip to direct", 1500, 1500, 0, false},
		{"from direct to ipip", 1480, 1450, 1450, false},
		{"IPv6 alone has less room", 1480, 1400, 1400, false},
		{"IPv6 alone has more room", 1480, 1450, 1450, false},
		{"IPv6 has as much", 1480, 1480, 0, false},
		{"from direct to ipip while the agent is away", 1480, 1450, 1450, true},
		{"from ipip to VXLAN", 1450, 1450, 0, false},
		{"from VXLAN to direct", 1500, 1500, 0, false},
	} {
		b.mtu, b.mtu6 = c.mtu, c.mtu6
		if c.away {
			if err := b.restart(); err != nil {
				t.Fatal(err)
			}
		} else if mended, err := b.Repair(t.Context()); err != nil || len(mended) > 0 {
			t.Fatalf("%s: mended %v, %v", c.what, mended, err)
		}
		if got, want := b.mtus(ns, req.Key()), fmt.Sprintf("pod %d, host %d, record %d", c.mtu, c.mtu, c.mtu); got != want {
			t.Errorf("%s: %s, want %s", c.what, got, want)
		}
		if got := defaultRoute6(t, ns).MTU; got != c.route {
			t.Errorf("%s: the route's MTU is %d, want %d", c.what, got, c.route)
		}
		if err := b.Check(t.Context(), req); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
		b.expectTraffic(ns, ep)
	}
	// CHECK wants the MTU of now, neither that of before nor none.
	b.mtu, b.mtu6 = 1480, 1450
	if _, err := b.Repair(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, has := range []int{1480, 1400, 0} {
		r := defaultRoute6(t, ns)
		r.MTU = has
		ns.Do(t, func() error { return netlink.RouteReplace(&r) })
		expectCode(t, b.Check(t.Context(), req), endpoint.CodeDiffers, "::/0 via fe80::1 with MTU 1450")
	}
	// Whoever made a pod's own MTU smaller still is not told to send more.
	smallerNs.Do(t, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, 1300)
	})
	for _, mtu6 := range []int{1400, 1290} {
		b.mtu6 = mtu6
		if _, err := b.Repair(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, want := b.mtus(smallerNs, smaller.Key()), "pod 1300, host 1480, record 1480"; got != want {
			t.Errorf("made smaller by hand: %s, want %s", got, want)
		}
		if got := defaultRoute6(t, smallerNs).MTU; got > 1300 || mtu6 < 1300 && got != mtu6 {
			t.Errorf("made smaller by hand, IPv6 has %d: the route's MTU is %d", mtu6, got)
		}
	}
	b.del(smaller)
	b.del(req)
	b.expectNothing()
}
