package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// What plain kernel forwarding needs, as a simple network plugin would set it
// up: veth pairs, host routes, permanent neighbours, and either a static
// VXLAN device or routes to the other node. No filter, no connection tracking.
const (
	vxlanName = "vx0"
	vxlanID   = 4096
	vxlanPort = 4789
	vxlanCost = 50 // of the header, off the MTU
	wireMTU   = 1500
)

var (
	gateway4 = netip.MustParseAddr("169.254.1.1")
	gateway6 = netip.MustParseAddr("fe80::1")
)

func mac(last byte) net.HardwareAddr { return net.HardwareAddr{2, 'k', 'b', 0, 0, last} }

func host(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

func handle(n *cluster.Netns) (*netlink.Handle, netns.NsHandle, error) {
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return nil, ns, err
	}
	h, err := netlink.NewHandleAt(ns)
	return h, ns, err
}

func (t *topology) plugKernel(tunnel bool) error {
	for i, n := range t.c.Nodes {
		for key, value := range map[string]string{
			"net/ipv4/ip_forward":             "1",
			"net/ipv6/conf/all/forwarding":    "1",
			"net/ipv4/conf/all/rp_filter":     "0",
			"net/ipv4/conf/default/rp_filter": "0",
		} {
			if err := n.Sysctl(key, value); err != nil {
				return err
			}
		}
		h, ns, err := handle(n.Netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		defer h.Close()
		if err := t.kernelPods(h, n, tunnel); err != nil {
			return fmt.Errorf("%s: %w", n.NodeName, err)
		}
		if tunnel {
			if err := kernelTunnel(h, n, byte(i+1)); err != nil {
				return fmt.Errorf("%s: %w", n.NodeName, err)
			}
		}
		for j, peer := range t.c.Nodes {
			switch {
			case j == i:
				continue
			case tunnel:
				err = kernelPeer(h, peer, byte(j+1))
			default:
				err = kernelRoutes(h, peer)
			}
			if err != nil {
				return fmt.Errorf("%s to %s: %w", n.NodeName, peer.NodeName, err)
			}
		}
	}
	return nil
}

// kernelPods plugs a node's pods by veth pairs and host routes.
func (t *topology) kernelPods(h *netlink.Handle, n *cluster.Node, tunnel bool) error {
	last := byte(0x10)
	for name, obj := range t.objs {
		if obj.Spec.NodeName != n.NodeName {
			continue
		}
		pod, err := t.c.NewSandbox(obj)
		if err != nil {
			return err
		}
		t.pods[name] = pod
		ph, pns, err := handle(pod.Netns)
		if err != nil {
			return err
		}
		defer pns.Close()
		defer ph.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr, attrs.MTU = "veth-"+name, mac(last), wireMTU
		if tunnel {
			attrs.MTU -= vxlanCost
		}
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerHardwareAddr: mac(last + 1), PeerNamespace: netlink.NsFd(pns)}
		if err := h.LinkAdd(veth); err != nil {
			return fmt.Errorf("veth of %s: %w", name, err)
		}
		inside, err := ph.LinkByName("eth0")
		if err != nil {
			return err
		}
		outside, err := h.LinkByName(attrs.Name)
		if err != nil {
			return err
		}
		in, out := inside.Attrs().Index, outside.Attrs().Index
		errs := []error{ph.LinkSetMTU(inside, attrs.MTU), ph.LinkSetUp(inside), h.LinkSetUp(outside)}
		for _, ip := range obj.Status.PodIPs {
			a := netip.MustParseAddr(ip.IP)
			gw, all := gateway4, &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
			if a.Is6() {
				gw, all = gateway6, &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
			}
			errs = append(errs,
				ph.AddrAdd(inside, &netlink.Addr{IPNet: host(a), Flags: unix.IFA_F_NODAD}),
				ph.NeighSet(neighbour(in, gw, mac(last))),
				h.RouteAdd(&netlink.Route{LinkIndex: out, Dst: host(a), Scope: netlink.SCOPE_LINK}),
				h.NeighSet(neighbour(out, a, mac(last+1))),
				ph.RouteAdd(&netlink.Route{LinkIndex: in, Dst: all, Gw: gw.AsSlice(), Flags: int(netlink.FLAG_ONLINK)}),
			)
		}
		if err := errors.Join(errs...); err != nil {
			return fmt.Errorf("pod %s: %w", name, err)
		}
		last += 2
	}
	return nil
}

func neighbour(device int, a netip.Addr, m net.HardwareAddr) *netlink.Neigh {
	family := unix.AF_INET
	if a.Is6() {
		family = unix.AF_INET6
	}
	return &netlink.Neigh{LinkIndex: device, Family: family, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: m}
}

// kernelTunnel makes a node's VXLAN device. It has the first address of the
// node's pod range, as plugins give it one: what the node itself sends to pods
// of others is answered through the tunnel, too.
func kernelTunnel(h *netlink.Handle, n *cluster.Node, own byte) error {
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = vxlanName, mac(own), wireMTU-vxlanCost
	dev := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: vxlanID, Port: vxlanPort, VtepDevIndex: eth0.Attrs().Index,
		SrcAddr: n.Config.Addrs[0].Addr().AsSlice(),
	}
	if err := h.LinkAdd(dev); err != nil {
		return fmt.Errorf("vxlan device: %w", err)
	}
	vx, err := h.LinkByName(vxlanName)
	if err != nil {
		return err
	}
	return errors.Join(
		h.AddrAdd(vx, &netlink.Addr{IPNet: host(n.Config.PodCIDRs[0].Addr())}),
		h.LinkSetUp(vx),
	)
}

// vtep is a peer's next hop: it exists as a neighbour only.
func vtep(other byte, v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf("fe80::2:%d", other))
	}
	return netip.AddrFrom4([4]byte{169, 254, 2, other})
}

// kernelPeer leads a peer's pod ranges into the VXLAN device with static
// neighbours and forwarding entries.
func kernelPeer(h *netlink.Handle, peer *cluster.Node, other byte) error {
	vx, err := h.LinkByName(vxlanName)
	if err != nil {
		return err
	}
	i := vx.Attrs().Index
	errs := []error{h.NeighAppend(&netlink.Neigh{
		LinkIndex: i, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF,
		IP: peer.Config.Addrs[0].Addr().AsSlice(), HardwareAddr: mac(other),
	})}
	for _, cidr := range peer.Config.PodCIDRs {
		via := vtep(other, cidr.Addr().Is6())
		errs = append(errs, h.NeighSet(neighbour(i, via, mac(other))), routeVia(h, i, cidr, via))
	}
	return errors.Join(errs...)
}

func kernelRoutes(h *netlink.Handle, peer *cluster.Node) error {
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return err
	}
	var errs []error
	for _, cidr := range peer.Config.PodCIDRs {
		for _, a := range peer.Config.Addrs {
			if a.Addr().Is4() == cidr.Addr().Is4() {
				errs = append(errs, routeVia(h, eth0.Attrs().Index, cidr, a.Addr()))
			}
		}
	}
	return errors.Join(errs...)
}

func routeVia(h *netlink.Handle, device int, dst netip.Prefix, via netip.Addr) error {
	return h.RouteAdd(&netlink.Route{
		LinkIndex: device, Gw: via.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
		Dst: &net.IPNet{IP: dst.Addr().AsSlice(), Mask: net.CIDRMask(dst.Bits(), dst.Addr().BitLen())},
	})
}
