package contract

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// hostSide finds the device of a node at the other end of a pod's eth0.
func hostSide(t *testing.T, p *cluster.Pod) (link netlink.Link) {
	t.Helper()
	var parent int
	ok(t, netlinkIn(p.Netns, func(h *netlink.Handle) error {
		eth0, err := h.LinkByName("eth0")
		if err == nil {
			parent = eth0.Attrs().ParentIndex
		}
		return err
	}))
	ok(t, netlinkIn(p.Node.Netns, func(h *netlink.Handle) (err error) {
		link, err = h.LinkByIndex(parent)
		return err
	}))
	return link
}

// neighbour finds a permanent neighbour's address, nil if there is none.
func neighbour(h *netlink.Handle, link netlink.Link, a netip.Addr) (net.HardwareAddr, error) {
	list, err := h.NeighList(link.Attrs().Index, familyOf(a))
	for _, n := range list {
		if n.IP.Equal(a.AsSlice()) && n.State == netlink.NUD_PERMANENT {
			return n.HardwareAddr, nil
		}
	}
	return nil, err
}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

// The pod's side: its addresses and no other, the way out, neighbours that
// nobody has to be asked for, the MTU that the tunnel leaves.
func TestN1PodInterface(t *testing.T) {
	w := shared(t)
	for _, p := range []*cluster.Pod{w.client, w.local, w.remote, w.other} {
		t.Run(p.PodName, func(t *testing.T) {
			host := hostSide(t, p)
			ok(t, netlinkIn(p.Netns, func(h *netlink.Handle) error {
				eth0, err := h.LinkByName("eth0")
				if err != nil {
					return err
				}
				if got := eth0.Attrs().MTU; got != 1450 {
					t.Errorf("MTU %d, want 1450: the node's 1500 without VXLAN over IPv4", got)
				}
				addrs, err := h.AddrList(eth0, netlink.FAMILY_ALL)
				if err != nil {
					return err
				}
				want := []string{p.IPv4().String() + "/32", p.IPv6().String() + "/128"}
				var got []string
				for _, a := range addrs {
					got = append(got, a.IPNet.String())
					if a.IP.To4() == nil && (a.Flags&unix.IFA_F_NODAD == 0 || a.Flags&unix.IFA_F_TENTATIVE != 0) {
						t.Errorf("address %v has flags %#x: want nodad and not tentative", a.IPNet, a.Flags)
					}
				}
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Errorf("addresses %v, want %v", got, want)
				}
				for _, gw := range []string{"169.254.1.1", "fe80::1"} {
					a := netip.MustParseAddr(gw)
					mac, err := neighbour(h, eth0, a)
					if err != nil || !bytes.Equal(mac, host.Attrs().HardwareAddr) {
						t.Errorf("permanent neighbour %s is %v (%v), want the host side's %v", gw, mac, err, host.Attrs().HardwareAddr)
					}
					routes, err := h.RouteList(eth0, familyOf(a))
					if err != nil {
						return err
					}
					if !slices.ContainsFunc(routes, func(r netlink.Route) bool {
						ones := 0
						if r.Dst != nil {
							ones, _ = r.Dst.Mask.Size()
						}
						return ones == 0 && r.Gw.Equal(a.AsSlice())
					}) {
						t.Errorf("no default route via %s: %v", gw, routes)
					}
					if a.Is4() && !slices.ContainsFunc(routes, func(r netlink.Route) bool {
						return r.Dst != nil && r.Dst.String() == gw+"/32" && r.Scope == netlink.SCOPE_LINK
					}) {
						t.Errorf("%s is not on the link: %v", gw, routes)
					}
				}
				return nil
			}))
		})
	}
}

// The host's side: named after the pod, without address, a route to each
// address of the pod; and the node's own pod CIDRs lead nowhere else.
func TestN2HostSide(t *testing.T) {
	w := shared(t)
	name := regexp.MustCompile(`^pw[0-9a-f]{11}$`)
	seen := map[string]string{}
	for _, p := range []*cluster.Pod{w.client, w.local, w.remote, w.other} {
		t.Run(p.PodName, func(t *testing.T) {
			host := hostSide(t, p)
			if n := host.Attrs().Name; !name.MatchString(n) || seen[n] != "" {
				t.Errorf("name %q (of %q too)", n, seen[n])
			}
			seen[host.Attrs().Name] = p.PodName
			var mac net.HardwareAddr
			ok(t, netlinkIn(p.Netns, func(h *netlink.Handle) error {
				eth0, err := h.LinkByName("eth0")
				if err == nil {
					mac = eth0.Attrs().HardwareAddr
				}
				return err
			}))
			ok(t, netlinkIn(p.Node.Netns, func(h *netlink.Handle) error {
				addrs, err := h.AddrList(host, netlink.FAMILY_ALL)
				if err != nil || len(addrs) > 0 {
					t.Errorf("addresses %v, want none (%v)", addrs, err)
				}
				for _, a := range p.Addrs {
					if got, err := neighbour(h, host, a); err != nil || !bytes.Equal(got, mac) {
						t.Errorf("permanent neighbour %v is %v (%v), want the pod's %v", a, got, err, mac)
					}
				}
				return nil
			}))
			for _, a := range p.Addrs {
				ok(t, hasRoute(p.Node, netip.PrefixFrom(a, a.BitLen()).String(), host.Attrs().Name))
			}
		})
	}
	for _, n := range w.Nodes {
		for _, p := range n.Config.PodCIDRs {
			ok(t, hasRoute(n, p.String(), ""))
		}
	}
	ok(t, hasRoute(w.a, "10.244.158.0/24", "podweir.vxlan"))
	ok(t, hasRoute(w.a, "fd00:10:244:9e::/64", "podweir.vxlan"))
}

// A packet to an address of a pod CIDR that no pod has ends on that node.
func TestN2UnallocatedAddress(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	for _, r := range [][]string{{"10.244.80.0/24", "172.31.0.2"}, {"fd00:10:244:50::/64", "fd00:172:31::2"}} {
		_, err := w.Ext.Exec(ctx, "ip", "route", "replace", r[0], "via", r[1])
		ok(t, err)
		t.Cleanup(func() {
			_, err := w.Ext.Exec(context.Background(), "ip", "route", "del", r[0])
			ok(t, err)
		})
	}
	families(t, func(t *testing.T, v6 bool) {
		dst := netip.MustParseAddr(pick(v6, "10.244.80.200", "fd00:10:244:50::c8"))
		for _, from := range []struct {
			name, hook string // of node-a; "" = the kernel's blackhole
			ns         *cluster.Netns
			travels    bool // from where the packet has to come to node-a
		}{
			{"pod", "from_pod", w.client.Netns, false},
			{"pod of the other node", "from_overlay", w.other.Netns, true},
			{"host", "", w.a.Netns, false},
			{"other host", "from_overlay", w.b.Netns, true},
			{"outside", "", w.Ext, true},
		} {
			t.Run(from.name, func(t *testing.T) {
				tap, err := w.Tap(ctx)
				ok(t, err)
				defer tap.Close()
				before := readCounters(t, w.a)
				s, err := from.ns.Send(ctx, at(dst, 80).String(), "-proto", "udp", "-timeout", "300ms")
				ok(t, err)
				if s.OK > 0 {
					t.Errorf("answered: %+v", s)
				}
				if from.hook != "" {
					atLeast(t, w.a, before, "drop_no_endpoint", from.hook, v6, 1)
				}
				w.closingPing(t, ctx, tap)
				seen := tap.Matching(func(p *cluster.Packet) bool { return p.Last() != nil && p.Last().Dst == dst && p.Last().Proto == 17 })
				if want := map[bool]int{false: 0, true: 1}[from.travels]; len(seen) != want {
					t.Errorf("%d packets on the underlay, want %d: %v", len(seen), want, seen)
				}
			})
		}
	})
}

// What two pods of one node say to each other is on no wire.
func TestN3SameNode(t *testing.T) {
	w := shared(t)
	families(t, func(t *testing.T, v6 bool) {
		for _, proto := range protos() {
			t.Run(proto, func(t *testing.T) {
				ctx := within(t, 30*time.Second)
				tap, err := w.Tap(ctx)
				ok(t, err)
				defer tap.Close()
				eth0, err := w.a.Capture(ctx, "eth0")
				ok(t, err)
				defer eth0.Close()
				before := readCounters(t, w.a)
				s := send(t, ctx, w.client.Netns, proto, at(ip(w.local, v6), cluster.ServerPort).String(), "-count", "10")
				if s.Peers[ip(w.client, v6).String()] != 10 {
					t.Errorf("the pod saw %v", s.Peers)
				}
				atLeast(t, w.a, before, "fwd_local", "from_pod", v6, 20)
				w.closingPing(t, ctx, tap)
				for _, c := range []*cluster.Capture{tap, eth0} {
					for _, p := range c.Packets() {
						if l := p.Last(); l != nil && (slices.Contains(w.local.Addrs, l.Dst) || slices.Contains(w.local.Addrs, l.Src)) {
							t.Fatalf("on the underlay: %v", p)
						}
					}
				}
			})
		}
	})
}

// A pod that is made anew, with another MAC behind the same address and the
// same interface name, and another pod that gets an address again: the first
// connection works, from each side.
func TestN19Renewal(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	first := []struct {
		from *cluster.Netns
		what string
	}{{w.client.Netns, "pod of the same node"}, {w.remote.Netns, "pod of the other node"}, {w.a.Netns, "own host"}, {w.b.Netns, "other host"}}
	check := func(name string, p *cluster.Pod) {
		t.Helper()
		srv, err := p.Serve(ctx, name, cluster.ServerPort)
		ok(t, err)
		defer func() { ok(t, srv.Kill(ctx)) }()
		for _, v6 := range []bool{false, true} {
			for _, from := range first {
				for _, proto := range protos() {
					// The same source port, so that the tuple is one that
					// the flow table has seen with the pod before.
					s := send(t, ctx, from.from, proto, at(ip(p, v6), cluster.ServerPort).String(), "-sport", "41000")
					if s.Servers[name] != 1 {
						t.Errorf("%s from %s: answered by %v, want %s", proto, from.what, s.Servers, name)
					}
				}
			}
			// And outwards.
			send(t, ctx, p.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-sport", "42000")
		}
	}
	obj := pod("renewed", "node-a", "10.244.80.90", "fd00:10:244:50::90")
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	check("first", p)
	name, addrs := hostSide(t, p).Attrs().Name, p.Addrs

	// The same pod again: same device name, same addresses.
	ok(t, p.Delete(ctx))
	p, err = w.AddPod(ctx, obj)
	ok(t, err)
	if again := hostSide(t, p).Attrs().Name; again != name || !slices.Equal(p.Addrs, addrs) {
		t.Errorf("device %s with %v, want %s with %v", again, p.Addrs, name, addrs)
	}
	check("second", p)
	ok(t, p.Delete(ctx))
	ok(t, w.Manifests.Delete(obj))

	// Another pod gets the addresses.
	heir := pod("heir", "node-a", "10.244.80.90", "fd00:10:244:50::90")
	w.put(t, heir)
	p, err = w.AddPod(ctx, heir)
	ok(t, err)
	check("heir", p)
	ok(t, p.Delete(ctx))
	ok(t, w.Manifests.Delete(heir))

	// The addresses move to the other node.
	moved := pod("moved", "node-b", "10.244.158.90", "fd00:10:244:9e::90")
	w.put(t, moved)
	p, err = w.AddPod(ctx, moved)
	ok(t, err)
	check("moved", p)
	ok(t, p.Delete(ctx))
}

// Neighbours of the underlay that are forgotten or change their MAC.
func TestN19NeighbourChanges(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	flush := func(ctx context.Context) {
		t.Helper()
		for _, n := range w.Nodes {
			_, err := n.Exec(ctx, "ip", "neigh", "flush", "dev", "eth0")
			ok(t, err)
		}
	}
	stream, err := w.client.Stream(ctx, at(w.remote.IPv4(), cluster.ServerPort).String())
	ok(t, err)
	connect := func() {
		t.Helper()
		for _, v6 := range []bool{false, true} {
			// No retry hides the loss of the first packet: a lost SYN takes
			// a second.
			s, err := w.client.Send(ctx, at(ip(w.remote, v6), cluster.ServerPort).String(), "-proto", "udp", "-timeout", "5s")
			ok(t, err)
			if s.OK != 1 {
				t.Errorf("first packet: %+v", s)
			}
		}
		progress(t, ctx, stream, 5)
	}
	flush(ctx)
	connect()
	setMAC := func(mac net.HardwareAddr) (old net.HardwareAddr) {
		t.Helper()
		ok(t, netlinkIn(w.b.Netns, func(h *netlink.Handle) error {
			eth0, err := h.LinkByName("eth0")
			if err != nil {
				return err
			}
			old = eth0.Attrs().HardwareAddr
			return h.LinkSetHardwareAddr(eth0, mac)
		}))
		return old
	}
	old := setMAC(net.HardwareAddr{2, 0, 0, 0, 0, 0x77})
	t.Cleanup(func() { setMAC(old); flush(context.Background()) })
	flush(ctx)
	connect()
	rep, err := stream.Stop(ctx)
	ok(t, err)
	if rep.Lost > 0 || rep.Error != "" {
		t.Errorf("the established connection: %+v", rep)
	}
}
