package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inNewNetns runs the test in a network namespace of its own, which ends with
// the thread. "eth0" is a veth with the addresses of node a.
func inNewNetns(t *testing.T) *Manager {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	m, err := New(t.TempDir(), "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", MTU: 1500}, PeerName: "peer0"}
	if err := m.nl.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lo", "eth0", "peer0"} {
		up(t, m, name)
	}
	return m
}

func up(t *testing.T, m *Manager, name string) {
	t.Helper()
	l, err := m.nl.LinkByName(name)
	if err == nil {
		err = m.nl.LinkSetUp(l)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func addAddr(t *testing.T, m *Manager, dev, cidr string) {
	t.Helper()
	l, err := m.nl.LinkByName(dev)
	if err != nil {
		t.Fatal(err)
	}
	ip, n, err := net.ParseCIDR(cidr)
	if err != nil {
		t.Fatal(err)
	}
	n.IP = ip
	if err := m.nl.AddrAdd(l, &netlink.Addr{IPNet: n, Flags: unix.IFA_F_NODAD}); err != nil {
		t.Fatal(err)
	}
}

func TestDevices(t *testing.T) {
	m := inNewNetns(t)
	addAddr(t, m, "eth0", "172.31.0.2/24")
	addAddr(t, m, "eth0", "fd00:172:31::2/64")
	addAddr(t, m, "lo", "192.0.2.9/32") // an address announced by a router
	for _, name := range []string{"pw0123456789a", "docker0"} {
		if err := m.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	addAddr(t, m, "docker0", "172.17.0.1/16")
	devices, err := m.Devices()
	if err != nil {
		t.Fatal(err)
	}
	names := func(list []Device) (out []string) {
		for _, d := range list {
			out = append(out, d.Name)
		}
		return out
	}
	if got := names(Outside(devices, []netip.Addr{netip.MustParseAddr("172.31.0.2")})); fmt.Sprint(got) != "[eth0]" {
		t.Errorf("outside devices %v, want eth0", got)
	}
	got := make(map[string]bool)
	for _, a := range Addrs(devices) {
		got[a.String()] = true
	}
	for _, a := range []string{"172.31.0.2", "fd00:172:31::2", "192.0.2.9", "172.17.0.1"} {
		if !got[a] {
			t.Errorf("%s is not among the node's addresses %v", a, got)
		}
	}
	if len(got) != 4 {
		t.Errorf("addresses %v: more than those given", got)
	}
	// One that some route leaves by is no uplink, but pods' packets may take
	// it. A device without Ethernet headers is no place for the programs.
	if err := m.nl.LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN}); err != nil {
		t.Fatal(err)
	}
	addAddr(t, m, "tun0", "10.9.0.1/24")
	up(t, m, "tun0")
	up(t, m, "docker0")
	if devices, err = m.Devices(); err != nil {
		t.Fatal(err)
	}
	out := Outside(devices, []netip.Addr{netip.MustParseAddr("172.31.0.2")})
	if got := fmt.Sprint(names(out), names(Uplinks(out))); got != "[eth0 docker0] [eth0]" {
		t.Errorf("outside devices and uplinks %v", got)
	}
	tun, err := m.nl.LinkByName("tun0")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.nl.RouteAdd(&netlink.Route{LinkIndex: tun.Attrs().Index, Scope: netlink.SCOPE_LINK, Table: 102,
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}); err != nil {
		t.Fatal(err)
	}
	// A default route makes a device an uplink, whatever its address and
	// whatever the table.
	peer, err := m.nl.LinkByName("peer0")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.nl.RouteAdd(&netlink.Route{LinkIndex: peer.Attrs().Index, Scope: netlink.SCOPE_LINK, Table: 101,
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}); err != nil {
		t.Fatal(err)
	}
	if devices, err = m.Devices(); err != nil {
		t.Fatal(err)
	}
	if got := names(Uplinks(Outside(devices, nil))); fmt.Sprint(got) != "[peer0]" {
		t.Errorf("uplinks %v, want peer0 for its default route", got)
	}
	if d, ok := Holding(devices, netip.MustParseAddr("fd00:172:31::2")); !ok || d.Name != "eth0" || d.MTU != 1500 {
		t.Errorf("holder %+v %v", d, ok)
	}
}

// What the kernel sends under: no secondary, deprecated or temporary address,
// and none that is good on the link alone.
func TestSources(t *testing.T) {
	m := inNewNetns(t)
	l, err := m.nl.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	add := func(cidr string, change func(*netlink.Addr)) {
		t.Helper()
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			t.Fatal(err)
		}
		if a.IP.To4() == nil {
			a.Flags = unix.IFA_F_NODAD
		}
		if change != nil {
			change(a)
		}
		if err := m.nl.AddrAdd(l, a); err != nil {
			t.Fatalf("%s: %v", cidr, err)
		}
	}
	source := func() string {
		t.Helper()
		devices, err := m.Devices()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range devices {
			if d.Name == "eth0" {
				return fmt.Sprint(d.Source4, " ", d.Source6)
			}
		}
		t.Fatal("no eth0")
		return ""
	}
	for _, step := range []struct {
		cidr   string
		change func(*netlink.Addr)
		want   string
	}{
		{"169.254.7.7/16", func(a *netlink.Addr) { a.Scope = unix.RT_SCOPE_LINK }, "invalid IP invalid IP"},
		{"172.31.0.2/24", nil, "172.31.0.2 invalid IP"},
		{"172.31.0.9/24", nil, "172.31.0.2 invalid IP"}, // becomes a secondary one
		{"192.0.2.2/24", nil, "172.31.0.2 invalid IP"},
		{"fd00:172:31::d/64", func(a *netlink.Addr) { a.PreferedLft, a.ValidLft = 0, 3600 }, "172.31.0.2 invalid IP"},
		{"fd00:172:31::2/64", nil, "172.31.0.2 fd00:172:31::2"},
	} {
		add(step.cidr, step.change)
		if got := source(); got != step.want {
			t.Errorf("with %s: got %s, want %s", step.cidr, got, step.want)
		}
	}
}

func TestOverlay(t *testing.T) {
	m := inNewNetns(t)
	mac := net.HardwareAddr{2, 0, 172, 31, 0, 2}
	index, created, err := m.EnsureOverlay(Overlay{})
	if err != nil || !created {
		t.Fatal(created, err)
	}
	again, created, err := m.EnsureOverlay(Overlay{MAC: mac, MTU: 1450})
	if err != nil || created || again != index {
		t.Fatalf("second time: ifindex %d (was %d), created %v, %v", again, index, created, err)
	}
	check := func() {
		t.Helper()
		l, err := m.nl.LinkByName(OverlayName)
		if err != nil {
			t.Fatal(err)
		}
		a, v := l.Attrs(), l.(*netlink.Vxlan)
		if a.HardwareAddr.String() != mac.String() || a.MTU != 1450 || a.RawFlags&(unix.IFF_UP|unix.IFF_NOARP) != unix.IFF_UP|unix.IFF_NOARP {
			t.Errorf("device %+v", a)
		}
		if !v.FlowBased || v.Port != OverlayPort || v.Learning || !v.UDP6ZeroCSumRx {
			t.Errorf("vxlan %+v", v)
		}
		addrs, err := m.nl.AddrList(l, netlink.FAMILY_ALL)
		if err != nil || len(addrs) != 1 || addrs[0].IPNet.String() != OverlayAddr {
			t.Errorf("addresses %v, %v; want that of the device alone", addrs, err)
		}
	}
	check()
	// An old device with other attributes, and a device of another kind.
	for _, wrong := range []netlink.Link{
		&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: OverlayName}, VxlanId: 7, Port: 8472},
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: OverlayName}},
	} {
		if err := m.RemoveOverlay(); err != nil {
			t.Fatal(err)
		}
		if err := m.nl.LinkAdd(wrong); err != nil {
			t.Fatal(err)
		}
		l, err := m.nl.LinkByName(OverlayName)
		if err != nil {
			t.Fatal(err)
		}
		index, created, err := m.EnsureOverlay(Overlay{MAC: mac, MTU: 1450})
		if err != nil || !created || index != l.Attrs().Index {
			t.Errorf("over a %s: ifindex %d (was %d), created %v, %v", wrong.Type(), index, l.Attrs().Index, created, err)
		}
		check()
	}
	// Somebody changes what can be changed in place.
	l, err := m.nl.LinkByName(OverlayName)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.nl.LinkSetDown(l), m.nl.LinkSetMTU(l, 1300)); err != nil {
		t.Fatal(err)
	}
	if _, created, err := m.EnsureOverlay(Overlay{MAC: mac, MTU: 1450}); err != nil || created {
		t.Error(created, err)
	}
	check()
	if err := errors.Join(m.RemoveOverlay(), m.RemoveOverlay()); err != nil {
		t.Errorf("removing twice: %v", err)
	}
}

func TestOverlayPortTaken(t *testing.T) {
	m := inNewNetns(t)
	if err := m.nl.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "vxlan.other"}, FlowBased: true, Port: OverlayPort}); err != nil {
		t.Fatal(err)
	}
	up(t, m, "vxlan.other")
	_, _, err := m.EnsureOverlay(Overlay{})
	if err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("error %v does not say that the port is taken", err)
	}
}

func TestRoutes(t *testing.T) {
	m := inNewNetns(t)
	index, _, err := m.EnsureOverlay(Overlay{MTU: 1450})
	if err != nil {
		t.Fatal(err)
	}
	want := []Route{
		{Dst: netip.MustParsePrefix("10.244.158.0/24"), Src: netip.MustParseAddr("172.31.0.2")},
		{Dst: netip.MustParsePrefix("10.98.0.0/16"), Src: netip.MustParseAddr("172.31.0.2")},
		{Dst: netip.MustParsePrefix("fd00:10:244:9e::/64"), Src: netip.MustParseAddr("fd00:172:31::2")},
		{Dst: netip.MustParsePrefix("10.244.80.0/24"), Blackhole: true},
		{Dst: netip.MustParsePrefix("fd00:10:244:50::/64"), Blackhole: true},
	}
	// The address is not there yet: those routes fail, the others stand.
	if n, err := m.SyncRoutes(want, index); n != 2 || err == nil || !strings.Contains(err.Error(), "172.31.0.2") {
		t.Errorf("without address: %d changes, %v", n, err)
	}
	addAddr(t, m, "eth0", "172.31.0.2/24")
	addAddr(t, m, "eth0", "fd00:172:31::2/64")
	if n, err := m.SyncRoutes(want, index); n != 3 || err != nil {
		t.Errorf("with address: %d changes, %v", n, err)
	}
	if n, err := m.SyncRoutes(want, index); n != 0 || err != nil {
		t.Errorf("again: %d changes, %v", n, err)
	}
	r, err := m.nl.RouteGet(net.ParseIP("10.244.158.65"))
	if err != nil || len(r) != 1 || r[0].LinkIndex != index || !r[0].Src.Equal(net.ParseIP("172.31.0.2")) {
		t.Errorf("route to a remote pod: %v, %v", r, err)
	}
	if r, err = m.nl.RouteGet(net.ParseIP("fd00:10:244:9e::41")); err != nil || r[0].LinkIndex != index {
		t.Errorf("route to a remote pod: %v, %v", r, err)
	}
	if r, err := m.nl.RouteGet(net.ParseIP("10.244.80.99")); err == nil {
		t.Errorf("an address that no pod has is routed: %v", r)
	}
	// A node's range becomes ours and the other way round.
	want[0], want[3] = Route{Dst: want[0].Dst, Blackhole: true}, Route{Dst: want[3].Dst, Src: want[1].Src}
	want[2], want[4] = Route{Dst: want[2].Dst, Blackhole: true}, Route{Dst: want[4].Dst}
	if n, err := m.SyncRoutes(want, index); n != 4 || err != nil {
		t.Errorf("kinds swapped: %d changes, %v", n, err)
	}
	if n, err := m.SyncRoutes(want, index); n != 0 || err != nil {
		t.Errorf("kinds swapped, again: %d changes, %v", n, err)
	}
	if r, err := m.nl.RouteGet(net.ParseIP("fd00:10:244:9e::41")); err == nil {
		t.Errorf("a blackhole routes: %v", r)
	}
	// Another program's route stands in the way: left alone, named.
	eth0, err := m.nl.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	foreign := &netlink.Route{LinkIndex: eth0.Attrs().Index, Protocol: unix.RTPROT_STATIC,
		Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: net.IPv4(10, 99, 0, 0).To4(), Mask: net.CIDRMask(16, 32)}}
	if err := m.nl.RouteAdd(foreign); err != nil {
		t.Fatal(err)
	}
	_, err = m.SyncRoutes(append(want, Route{Dst: netip.MustParsePrefix("10.99.0.0/16")}), index)
	if err == nil || !strings.Contains(err.Error(), "10.99.0.0/16") || !errors.Is(err, unix.EEXIST) {
		t.Errorf("error %v does not name the route in the way", err)
	}
	if err := m.RemoveRoutes(); err != nil {
		t.Fatal(err)
	}
	if left, err := m.ownRoutes(netlink.FAMILY_ALL); err != nil || len(left) != 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	if r, err := m.nl.RouteGet(net.ParseIP("10.99.0.1")); err != nil || r[0].LinkIndex != eth0.Attrs().Index {
		t.Errorf("the other program's route: %v, %v", r, err)
	}
}

func TestSysctls(t *testing.T) {
	m := inNewNetns(t)
	if _, _, err := m.EnsureOverlay(Overlay{}); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		t.Helper()
		v, err := m.readSysctl(name)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if err := m.writeSysctl("net/ipv4/ip_forward", "0"); err != nil {
		t.Fatal(err)
	}
	const ra = "net/ipv6/conf/eth0/accept_ra"
	if err := m.writeSysctl(ra, "1"); err != nil {
		t.Fatal(err)
	}
	outside := []Device{{Name: "eth0", Uplink: true}, {Name: "gone0", Uplink: true}, {Name: "peer0"}}
	if err := m.SyncSysctls(outside); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"net/ipv6/conf/peer0/accept_ra":  "1",
		"net/ipv6/conf/peer0/forwarding": "1",
		"net/ipv4/ip_forward":            "1",
		"net/ipv6/conf/all/forwarding":   "1",
		ra:                               "2",
		"net/ipv4/conf/" + OverlayName + "/rp_filter":      "2",
		"net/ipv4/conf/" + OverlayName + "/send_redirects": "0",
		"net/ipv4/conf/all/send_redirects":                 "0",
		"net/ipv4/conf/eth0/forwarding":                    "1",
		"net/ipv6/conf/eth0/forwarding":                    "1",
		"net/ipv4/conf/" + OverlayName + "/forwarding":     "1",
		"net/ipv6/conf/" + OverlayName + "/forwarding":     "1",
	}
	for name, v := range want {
		if got := read(name); got != v {
			t.Errorf("%s = %s, want %s", name, got, v)
		}
	}
	// Reset by another program, found again; the first old value is kept.
	if err := errors.Join(m.writeSysctl("net/ipv4/conf/eth0/forwarding", "0"), m.writeSysctl("net/ipv6/conf/eth0/forwarding", "0"),
		m.SyncSysctls(outside)); err != nil {
		t.Fatal(err)
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		if got := read("net/" + family + "/conf/eth0/forwarding"); got != "1" {
			t.Errorf("%s forwarding of eth0 alone is %s after a reset", family, got)
		}
	}
	if err := errors.Join(m.writeSysctl("net/ipv4/ip_forward", "0"),
		m.writeSysctl("net/ipv4/conf/"+OverlayName+"/rp_filter", "1"), m.SyncSysctls(outside)); err != nil {
		t.Fatal(err)
	}
	for name, v := range want {
		if got := read(name); got != v {
			t.Errorf("%s = %s after a reset, want %s", name, got, v)
		}
	}
	// The record outlives the process; what another program changed since is
	// not restored.
	again := &Manager{log: m.log, proc: m.proc}
	if err := again.state.open(filepath.Dir(m.state.file)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.writeSysctl("net/ipv6/conf/all/forwarding", "0"), again.RestoreSysctls()); err != nil {
		t.Fatal(err)
	}
	for name, v := range map[string]string{"net/ipv4/ip_forward": "0", ra: "1", "net/ipv6/conf/all/forwarding": "0"} {
		if got := read(name); got != v {
			t.Errorf("%s = %s after cleanup, want %s", name, got, v)
		}
	}
	if _, err := os.Stat(m.state.file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the record is still there: %v", err)
	}
}

func TestWatch(t *testing.T) {
	m := inNewNetns(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	events, err := m.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	expect := func(what string, f func()) {
		t.Helper()
		for len(events) > 0 {
			<-events
		}
		f()
		select {
		case <-events:
		case <-ctx.Done():
			t.Fatalf("no event after %s", what)
		}
	}
	expect("an address", func() { addAddr(t, m, "eth0", "172.31.0.2/24") })
	expect("a device", func() {
		if _, _, err := m.EnsureOverlay(Overlay{}); err != nil {
			t.Fatal(err)
		}
	})
	expect("a rule", func() {
		rule := netlink.NewRule()
		rule.Family, rule.Table, rule.Priority = unix.AF_INET, 100, 1000
		if err := m.nl.RuleAdd(rule); err != nil {
			t.Fatal(err)
		}
	})
	expect("a qdisc", func() {
		if err := m.nl.QdiscAdd(tbf(t, m, "peer0")); err != nil {
			t.Fatal(err)
		}
	})
	expect("a sysctl", func() {
		old, err := m.readSysctl("net/ipv4/ip_forward")
		if err != nil {
			t.Fatal(err)
		}
		if err := m.writeSysctl("net/ipv4/ip_forward", map[string]string{"0": "1", "1": "0"}[old]); err != nil {
			t.Fatal(err)
		}
	})
}

func TestWay(t *testing.T) {
	m := inNewNetns(t)
	addAddr(t, m, "eth0", "172.31.0.2/24")
	eth0, err := m.nl.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.nl.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: net.IPv4(172, 31, 0, 1), MTU: 1400,
		Dst: &net.IPNet{IP: net.IPv4(172, 31, 9, 0).To4(), Mask: net.CIDRMask(24, 32)}}); err != nil {
		t.Fatal(err)
	}
	way := func(s string) (Way, bool) {
		t.Helper()
		w, ok, err := m.Way(netip.MustParseAddr(s))
		if err != nil {
			t.Error(err)
		}
		return w, ok
	}
	index := eth0.Attrs().Index
	if w, ok := way("172.31.0.3"); !ok || w != (Way{Device: index, Nexthop: netip.MustParseAddr("172.31.0.3"), MTU: 1500, Link: 1500, Onlink: true}) {
		t.Errorf("neighbour: %+v %v", w, ok)
	}
	if w, ok := way("172.31.9.3"); !ok || w != (Way{Device: index, Nexthop: netip.MustParseAddr("172.31.0.1"), MTU: 1400, Link: 1500}) {
		t.Errorf("behind a router: %+v %v", w, ok)
	}
	for _, none := range []string{"172.31.0.2", "192.0.2.1"} {
		if w, ok := way(none); ok {
			t.Errorf("%s: %+v", none, w)
		}
	}
}
