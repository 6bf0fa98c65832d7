package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const (
	podMTU    = 1450
	vxlanPort = 4789
	vni       = 4096
	podPort   = 8080 // every pod and node echoes here
	closed    = 8081
	denied    = 8082 // a pod's port that a policy denies
)

// world is two nodes: a with two pods, b with one.
type world struct {
	kernel  kernel
	a, b    *node
	client  *pod // on a
	local   *pod // on a
	remote  *pod // on b
	limited *pod // on a, see limit
}

// node is a network namespace with a device towards the other node, a tunnel
// device and a datapath of its own.
type node struct {
	*space
	id              uint32 // index of pw_nodes on the other node
	addr, addr6     netip.Addr
	cidr, cidr6     netip.Prefix
	wire, overlay   int // ifindex
	wireMAC, tunMAC net.HardwareAddr
	pods            []*pod
	bpffs           string
	dp              *loader.Datapath
}

type pod struct {
	*space
	node        *node
	addr, addr6 netip.Addr
	mac, host   net.HardwareAddr // of the pod's and the node's end
	ifindex     int              // of the node's end
	device      string
	slot        uint32
}

func (p *pod) ip(v6 bool) netip.Addr {
	if v6 {
		return p.addr6
	}
	return p.addr
}

func (n *node) ip(v6 bool) netip.Addr {
	if v6 {
		return n.addr6
	}
	return n.addr
}

func newWorld(bpffs string, k kernel) (*world, error) {
	w := &world{kernel: k}
	var err error
	w.a, err = newNode("node-a", 1, "172.31.0.2", "10.244.80.0/24", "fd00:10:244:50::/64")
	if err != nil {
		return nil, err
	}
	w.b, err = newNode("node-b", 2, "172.31.0.3", "10.244.158.0/24", "fd00:10:244:9e::/64")
	if err != nil {
		return nil, err
	}
	if err := connect(w.a, w.b); err != nil {
		return nil, err
	}
	for _, p := range []struct {
		to   **pod
		node *node
		name string
		host byte
	}{{&w.client, w.a, "client", 65}, {&w.local, w.a, "local", 66}, {&w.remote, w.b, "remote", 65}} {
		if *p.to, err = p.node.addPod(p.name, p.host); err != nil {
			return nil, err
		}
	}
	for _, n := range []*node{w.a, w.b} {
		n.bpffs = filepath.Join(bpffs, n.name)
	}
	return w, nil
}

func newNode(name string, id uint32, addr, cidr, cidr6 string) (*node, error) {
	s, err := newSpace(name)
	if err != nil {
		return nil, err
	}
	n := &node{
		space: s, id: id, addr: netip.MustParseAddr(addr),
		cidr: netip.MustParsePrefix(cidr), cidr6: netip.MustParsePrefix(cidr6),
	}
	n.addr6 = netip.MustParseAddr(fmt.Sprintf("fd00:172:31::%d", n.addr.As4()[3]))
	n.wireMAC = net.HardwareAddr{2, 0, 0, 0, 1, byte(id)}
	n.tunMAC = net.HardwareAddr{2, 0, 0, 0, 2, byte(id)}
	return n, s.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
}

// connect makes the wire between two nodes, their tunnel devices and routes.
func connect(a, b *node) error {
	err := a.do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "eth0", HardwareAddr: a.wireMAC, MTU: 1500},
			PeerName:  "eth0", PeerHardwareAddr: b.wireMAC, PeerMTU: 1500,
			PeerNamespace: netlink.NsFd(b.ns.Fd()),
		})
	})
	if err != nil {
		return fmt.Errorf("make the wire: %w", err)
	}
	for _, n := range [][2]*node{{a, b}, {b, a}} {
		if err := n[0].do(func() error { return n[0].setUp(n[1]) }); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) setUp(other *node) error {
	var err error
	if n.wire, err = raise("eth0", netip.PrefixFrom(n.addr, 24), netip.PrefixFrom(n.addr6, 64)); err != nil {
		return err
	}
	err = netlink.LinkAdd(&netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: "podweir.vxlan", HardwareAddr: n.tunMAC, MTU: podMTU},
		FlowBased: true, Port: vxlanPort, UDP6ZeroCSumRx: true, UDP6ZeroCSumTx: true,
	})
	if err != nil {
		return fmt.Errorf("make podweir.vxlan: %w", err)
	}
	dev, err := netlink.LinkByName("podweir.vxlan")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetARPOff(dev); err != nil {
		return fmt.Errorf("podweir.vxlan: %w", err)
	}
	// As the agent does: answers under this node's own addresses arrive by it.
	if n.overlay, err = raise("podweir.vxlan", netip.MustParsePrefix("169.254.1.1/32")); err != nil {
		return err
	}
	for _, switched := range []string{
		"ipv4/conf/podweir.vxlan/accept_local", "ipv4/ip_forward", "ipv6/conf/all/forwarding",
	} {
		if err := os.WriteFile("/proc/sys/net/"+switched, []byte("1"), 0); err != nil {
			return fmt.Errorf("switch on: %w", err)
		}
	}
	for _, dst := range []netip.Prefix{other.cidr, other.cidr6, serviceRange, serviceRange6} {
		r := &netlink.Route{
			LinkIndex: n.overlay, Dst: ipNet(dst), Src: n.ip(dst.Addr().Is6()).AsSlice(),
			Scope: netlink.SCOPE_LINK,
		}
		if dst.Addr().Is6() {
			r.Scope = netlink.SCOPE_UNIVERSE
		}
		if err := netlink.RouteAdd(r); err != nil {
			return fmt.Errorf("route %v: %w", dst, err)
		}
	}
	return nil
}

// raise gives a device addresses and sets it up; it returns its index.
func raise(name string, addrs ...netip.Prefix) (int, error) {
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return 0, err
	}
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.Addr().AsSlice(), Mask: net.CIDRMask(a.Bits(), a.Addr().BitLen())}}
		if a.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(dev, addr); err != nil {
			return 0, fmt.Errorf("address %v of %s: %w", a, name, err)
		}
	}
	if err := netlink.LinkSetUp(dev); err != nil {
		return 0, fmt.Errorf("set %s up: %w", name, err)
	}
	return dev.Attrs().Index, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

var (
	gateway  = netip.MustParseAddr("169.254.1.1")
	gateway6 = netip.MustParseAddr("fe80::1")
)

// addPod makes a pod and its devices, routes and neighbours as the CNI
// plugin does.
func (n *node) addPod(name string, host byte) (*pod, error) {
	s, err := newSpace(name)
	if err != nil {
		return nil, err
	}
	a4, a6 := n.cidr.Addr().As4(), n.cidr6.Addr().As16()
	a4[3], a6[15] = host, host
	p := &pod{
		space: s, node: n, addr: netip.AddrFrom4(a4), addr6: netip.AddrFrom16(a6),
		mac:  net.HardwareAddr{2, 0, 0, byte(n.id), 3, host},
		host: net.HardwareAddr{2, 0, 0, byte(n.id), 4, host}, device: "pw" + name,
		slot: 16 + uint32(len(n.pods)),
	}
	n.pods = append(n.pods, p)
	if err := n.do(func() error { return p.attachTo(n) }); err != nil {
		return nil, err
	}
	return p, s.do(p.setUp)
}

func (p *pod) attachTo(n *node) error {
	err := netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: p.device, HardwareAddr: p.host, MTU: podMTU},
		PeerName:  "eth0", PeerHardwareAddr: p.mac, PeerMTU: podMTU,
		PeerNamespace: netlink.NsFd(p.ns.Fd()),
	})
	if err != nil {
		return fmt.Errorf("make %s: %w", p.device, err)
	}
	if p.ifindex, err = raise(p.device); err != nil {
		return err
	}
	for _, a := range []netip.Addr{p.addr, p.addr6} {
		if err := reach(p.ifindex, a, p.mac, netlink.SCOPE_LINK, a); err != nil {
			return err
		}
	}
	return nil
}

// reach makes a neighbour known and routes one address to its device.
func reach(ifindex int, dst netip.Addr, mac net.HardwareAddr, scope netlink.Scope, neigh netip.Addr) error {
	if dst.Is6() {
		scope = netlink.SCOPE_UNIVERSE
	}
	err := netlink.RouteAdd(&netlink.Route{
		LinkIndex: ifindex, Dst: ipNet(netip.PrefixFrom(dst, dst.BitLen())), Scope: scope,
	})
	if err != nil {
		return fmt.Errorf("route %v: %w", dst, err)
	}
	return know(ifindex, neigh, mac)
}

func know(ifindex int, addr netip.Addr, mac net.HardwareAddr) error {
	err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: ifindex, IP: addr.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
	})
	if err != nil {
		return fmt.Errorf("neighbour %v: %w", addr, err)
	}
	return nil
}

func (p *pod) setUp() error {
	if _, err := raise("lo"); err != nil {
		return err
	}
	index, err := raise("eth0", netip.PrefixFrom(p.addr, 32), netip.PrefixFrom(p.addr6, 128))
	if err != nil {
		return err
	}
	for _, gw := range []netip.Addr{gateway, gateway6} {
		if err := know(index, gw, p.host); err != nil {
			return err
		}
		err := netlink.RouteAdd(&netlink.Route{
			LinkIndex: index, Gw: gw.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
			Dst: ipNet(netip.PrefixFrom(zeroOf(gw), 0)),
		})
		if err != nil {
			return fmt.Errorf("default route by %v: %w", gw, err)
		}
	}
	return nil
}

func zeroOf(a netip.Addr) netip.Addr {
	if a.Is6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// loopback is the index of lo in every namespace.
const loopback = 1

// start loads the datapath, over what is pinned already, and attaches it.
func (n *node) start(ctx context.Context) error {
	dp, err := loader.Load(ctx, loader.Config{
		BPFFS: n.bpffs, OverlayIfindex: n.overlay, VNI: vni, FlowsMax: 4096, FlowsNewMax: 4096,
	})
	if err != nil {
		return err
	}
	n.dp = dp
	errs := []error{
		dp.AttachOverlay(ctx, n.overlay, "podweir.vxlan"), dp.AttachNetdev(ctx, n.wire, "eth0"),
		dp.AttachLoopback(ctx, loopback, "lo"),
	}
	for _, p := range n.pods {
		errs = append(errs, dp.AttachPod(ctx, p.ifindex, p.device))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err = dp.Verify(ctx)
	return err
}

// guarded: what passes from_pod by is dropped on kernels that can.
func (n *node) guarded() error {
	for _, name := range []string{"0-from_pod", "0-to_pod"} {
		if _, err := os.Stat(filepath.Join(n.bpffs, "links", name)); err != nil {
			return fmt.Errorf("the guard is not attached: %w", err)
		}
	}
	return nil
}

func (n *node) maps() maps.Set { return n.dp.Maps() }
