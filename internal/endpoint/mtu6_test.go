package endpoint_test

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
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
	route := func() (r netlink.Route) {
		ns.Do(t, func() error {
			list, err := netlink.RouteListFiltered(unix.AF_INET6, &netlink.Route{Gw: net.ParseIP("fe80::1")}, netlink.RT_FILTER_GW)
			if err == nil && len(list) == 1 {
				r = list[0]
			}
			return err
		})
		return r
	}
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
