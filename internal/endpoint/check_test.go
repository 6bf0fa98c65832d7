package endpoint_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/endpoint"
)

func TestCheckNamesEveryDifference(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web", "10.244.80.65", "fd00:10:244:50::65")
	var ep endpoint.Endpoint
	host := func() netlink.Link {
		l, err := netlink.LinkByName(ep.HostIfName)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	inPod := func(f func(eth0 netlink.Link) error) {
		ns.Do(t, func() error {
			eth0, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return f(eth0)
		})
	}
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	delAddr := func(s string) func() {
		return func() {
			inPod(func(l netlink.Link) error {
				a, err := netlink.ParseAddr(s)
				if err != nil {
					return err
				}
				return netlink.AddrDel(l, a)
			})
		}
	}
	delRoute := func(dst, gw string) func() {
		return func() {
			inPod(func(l netlink.Link) error {
				n, err := netlink.ParseIPNet(dst)
				if err != nil {
					return err
				}
				scope := netlink.SCOPE_UNIVERSE
				if gw == "" {
					scope = netlink.SCOPE_LINK
				}
				return netlink.RouteDel(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: n, Gw: net.ParseIP(gw), Scope: scope})
			})
		}
	}
	for name, c := range map[string]struct {
		harm  func()
		texts []string
	}{
		"host interface gone": {func() { must(netlink.LinkDel(host())) }, []string{"is missing", "eth0"}},
		"host interface down": {func() { must(netlink.LinkSetDown(host())) }, []string{"is down", "no route to 10.244.80.65"}},
		"host address": {func() {
			a, err := netlink.ParseAddr("192.0.2.1/24")
			must(err)
			must(netlink.AddrAdd(host(), a))
		}, []string{"192.0.2.1", "should have none"}},
		"host route": {func() {
			must(netlink.RouteDel(&netlink.Route{LinkIndex: ep.HostIfindex, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: net.IPv4(10, 244, 80, 65).To4(), Mask: net.CIDRMask(32, 32)}}))
		}, []string{"no route to 10.244.80.65"}},
		"host neighbour": {func() {
			must(netlink.NeighDel(&netlink.Neigh{LinkIndex: ep.HostIfindex, IP: net.ParseIP("fd00:10:244:50::65")}))
		}, []string{"neighbour fd00:10:244:50::65", ep.HostIfName}},
		"programs": {func() { b.fakes.Forget(ep.HostIfindex) }, []string{"programs", "not attached"}},
		"policy":   {func() { b.fakes.ForgetPolicy(req.Key()) }, []string{"policy is not in force"}},
		"host IPv6 route": {func() {
			must(netlink.RouteDel(&netlink.Route{LinkIndex: ep.HostIfindex, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: net.ParseIP("fd00:10:244:50::65"), Mask: net.CIDRMask(128, 128)}}))
		}, []string{"no route to fd00:10:244:50::65"}},
		"host MTU": {func() { must(netlink.LinkSetMTU(host(), 1400)) }, []string{ep.HostIfName, "MTU 1400, not 1450"}},
		"host MAC": {func() {
			must(netlink.LinkSetHardwareAddr(host(), net.HardwareAddr{2, 0, 0, 0, 0, 9}))
		}, []string{ep.HostIfName, "MAC 02:00:00:00:00:09"}},
		"host interface renamed": {func() {
			must(netlink.LinkSetDown(host()))
			must(netlink.LinkSetName(host(), "stranger"))
		}, []string{"is missing"}},
		"host IPv4 setting": {func() {
			must(os.WriteFile("/proc/sys/net/ipv4/conf/"+ep.HostIfName+"/forwarding", []byte("0"), 0o644))
		}, []string{".forwarding is 0, not 1"}},
		"host IPv6 setting": {func() {
			must(os.WriteFile("/proc/sys/net/ipv6/conf/"+ep.HostIfName+"/accept_ra", []byte("2"), 0o644))
		}, []string{".accept_ra is 2, not 0"}},
		"pod's loopback": {func() {
			inPod(func(netlink.Link) error {
				lo, err := netlink.LinkByName("lo")
				must(err)
				return netlink.LinkSetDown(lo)
			})
		}, []string{"lo in the pod is down"}},
		"pod interface down": {func() { inPod(netlink.LinkSetDown) }, []string{"eth0 in the pod is down"}},
		"IPv6 in the pod": {func() {
			inPod(func(netlink.Link) error {
				return os.WriteFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", []byte("1"), 0o644)
			})
		}, []string{"address fd00:10:244:50::65/128 is missing", "::/0 via fe80::1"}},
		"pod interface": {func() { inPod(netlink.LinkDel) }, []string{"eth0 is missing in the pod"}},
		"pod interface replaced": {func() {
			inPod(func(l netlink.Link) error {
				must(netlink.LinkSetDown(l))
				must(netlink.LinkSetName(l, "old"))
				return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}})
			})
		}, []string{"not the peer"}},
		"MTU": {func() { inPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1400) }) }, []string{"MTU 1400, not 1450"}},
		"MAC": {func() {
			inPod(func(l netlink.Link) error {
				return netlink.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 9})
			})
		}, []string{"MAC 02:00:00:00:00:09"}},
		"IPv4 address":  {delAddr("10.244.80.65/32"), []string{"address 10.244.80.65/32 is missing"}},
		"IPv6 address":  {delAddr("fd00:10:244:50::65/128"), []string{"address fd00:10:244:50::65/128 is missing"}},
		"IPv4 default":  {delRoute("0.0.0.0/0", "169.254.1.1"), []string{"0.0.0.0/0 via 169.254.1.1"}},
		"IPv6 default":  {delRoute("::/0", "fe80::1"), []string{"::/0 via fe80::1"}},
		"gateway route": {delRoute("169.254.1.1/32", ""), []string{"169.254.1.1/32 is missing"}},
		"pod neighbour": {func() {
			inPod(func(l netlink.Link) error {
				return netlink.NeighDel(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.ParseIP("169.254.1.1")})
			})
		}, []string{"neighbour 169.254.1.1", ep.HostMAC.String()}},
		"pod neighbour's MAC": {func() {
			inPod(func(l netlink.Link) error {
				return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.ParseIP("fe80::1"), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}})
			})
		}, []string{"neighbour fe80::1"}},
		"host neighbour not permanent": {func() {
			must(netlink.NeighSet(&netlink.Neigh{LinkIndex: ep.HostIfindex, IP: net.ParseIP("10.244.80.65"), State: netlink.NUD_REACHABLE, HardwareAddr: ep.MAC}))
		}, []string{"neighbour 10.244.80.65", ep.HostIfName}},
	} {
		t.Run(name, func(t *testing.T) {
			ep = b.add(req)
			if err := b.Check(t.Context(), req); err != nil {
				t.Fatalf("before: %v", err)
			}
			c.harm()
			expectCode(t, b.Check(t.Context(), req), endpoint.CodeDiffers, append(c.texts, "default/web")...)
			b.del(req)
			ns.Do(t, func() error {
				if l, err := netlink.LinkByName("eth0"); err == nil {
					return netlink.LinkDel(l) // the bridge of one case
				}
				return nil
			})
			b.expectNothing()
			if l, err := netlink.LinkByName("stranger"); err == nil {
				t.Errorf("%s is left", l.Attrs().Name)
			}
		})
	}
	b.add(req)
	// A plugin behind this one may make the MTU smaller, and says so.
	inPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1300) })
	tuned := req
	for told, ok := range map[int]bool{1300: true, 1450: false, 1400: false, 0: false, endpoint.MTUNotTold: true} {
		tuned.MTU = told
		if err := b.Check(t.Context(), tuned); (err == nil) != ok {
			t.Errorf("told of MTU %d: %v", told, err)
		}
	}
	inPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1500) })
	for _, tuned.MTU = range []int{1500, endpoint.MTUNotTold} {
		expectCode(t, b.Check(t.Context(), tuned), endpoint.CodeDiffers, "MTU 1500, not 1450")
	}
	inPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) })
	wrong := req
	wrong.Addrs = []netip.Addr{netip.MustParseAddr("10.244.80.99")}
	expectCode(t, b.Check(t.Context(), wrong), endpoint.CodeDiffers, "10.244.80.99", "10.244.80.65")
	unknown := req
	unknown.ContainerID = "unknown"
	expectCode(t, b.Check(t.Context(), unknown), endpoint.CodeUnknownContainer, "unknown")
	gone := req
	gone.Netns = "/nowhere"
	expectCode(t, b.Check(t.Context(), gone), endpoint.CodeBadNetns, "/nowhere")
	b.del(req)
	b.expectNothing()
}

func TestRepairMendsTheHostSide(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web")
	ep := b.add(req)
	if mended, err := b.Repair(t.Context()); err != nil || len(mended) > 0 {
		t.Errorf("nothing is broken: %v, %v", mended, err)
	}
	sysctl := "/proc/sys/net/ipv4/conf/" + ep.HostIfName + "/rp_filter"
	if err := os.WriteFile(sysctl, []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	link, err := netlink.LinkByName(ep.HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetDown(link); err != nil { // takes the routes and neighbours along
		t.Fatal(err)
	}
	b.fakes.Forget(ep.HostIfindex)
	mended, err := b.Repair(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(mended, "\n")
	for _, text := range []string{"rp_filter was 1, now 2", "is down", "no route to", "programs attached again"} {
		if !strings.Contains(all, text) {
			t.Errorf("%q is not among what was mended:\n%s", text, all)
		}
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	b.expectTraffic(ns, ep)
	b.del(req)
	b.expectNothing()
}

func TestAPodWithoutProgramsIsCutOff(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web")
	ep := b.add(req)
	b.fakes.Forget(ep.HostIfindex)
	broken := errors.New("broken on purpose")
	b.fakes.Hook = func(_ context.Context, call string, _ endpoint.Endpoint) error {
		if call == "attach" {
			return broken
		}
		return nil
	}
	if err := b.restart(); !errors.Is(err, broken) {
		t.Errorf("Restore reports %v", err)
	}
	if _, err := b.Repair(t.Context()); !errors.Is(err, broken) {
		t.Errorf("Repair reports %v", err)
	}
	link, err := netlink.LinkByName(ep.HostIfName)
	if err != nil || link.Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("the interface is up without programs (%v)", err)
	}
	b.fakes.Hook = nil
	if _, err := b.Repair(t.Context()); err != nil {
		t.Error(err)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	b.expectTraffic(ns, ep)
	b.del(req)
	b.expectNothing()
}
