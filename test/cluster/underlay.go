package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The switch's bridge and its tap, a pair of which one end is a port.
const (
	bridgeName = "br0"
	tapPort    = "tap0"
	tapName    = "tap1"
)

// netlink returns a handle bound to the namespace; close it after use.
func (n *Netns) netlink() (*netlink.Handle, error) {
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", n.Name, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return nil, fmt.Errorf("netlink in %s: %w", n.Name, err)
	}
	return h, nil
}

// makeSwitch builds the underlay: a bridge that floods. It learns nothing
// (learning off and ageing 0), so that every node sees the frames for others.
func (c *Cluster) makeSwitch(ctx context.Context) (err error) {
	if c.Switch, err = c.newNetns("switch"); err != nil {
		return err
	}
	// The switch itself has nothing to say.
	if err := c.Switch.Sysctl("net/ipv6/conf/default/disable_ipv6", "1"); err != nil {
		return err
	}
	h, err := c.Switch.netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	ageing, snooping := uint32(0), false
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = bridgeName, c.cfg.MTU
	br := &netlink.Bridge{LinkAttrs: attrs, AgeingTime: &ageing, MulticastSnooping: &snooping}
	if err := h.LinkAdd(br); err != nil {
		return fmt.Errorf("bridge in %s: %w", c.Switch.Name, err)
	}
	if err := h.LinkSetUp(br); err != nil {
		return err
	}
	attrs = netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = tapPort, c.cfg.MTU
	if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: tapName}); err != nil {
		return fmt.Errorf("tap in %s: %w", c.Switch.Name, err)
	}
	tap, err := h.LinkByName(tapName)
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(tap); err != nil {
		return err
	}
	if err := plug(h, tapPort); err != nil {
		return err
	}
	return errors.Join(c.Switch.awaitUp(ctx, tapName), c.Switch.awaitUp(ctx, tapPort))
}

// awaitUp waits until a device is operational. Until the kernel has worked
// off the carrier event, some time after both ends of a veth are up, packets
// sent are dropped and a bridge port does not forward.
func (n *Netns) awaitUp(ctx context.Context, device string) error {
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return err
	}
	defer ns.Close()
	updates, done := make(chan netlink.LinkUpdate, 256), make(chan struct{})
	defer close(done)
	// The list of what exists comes first, then changes.
	err = netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{Namespace: &ns, ListExisting: true})
	if err != nil {
		return fmt.Errorf("watch devices in %s: %w", n.Name, err)
	}
	for {
		select {
		case u, ok := <-updates:
			if !ok {
				return fmt.Errorf("watching devices in %s ended", n.Name)
			}
			if a := u.Attrs(); a.Name == device && a.OperState == netlink.OperUp {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("%s in %s does not come up: %w", device, n.Name, ctx.Err())
		}
	}
}

// plug makes a device a port of the bridge.
func plug(h *netlink.Handle, port string) error {
	br, err := h.LinkByName(bridgeName)
	if err != nil {
		return err
	}
	link, err := h.LinkByName(port)
	if err != nil {
		return err
	}
	return errors.Join(
		h.LinkSetMaster(link, br),
		h.LinkSetLearning(link, false),
		h.LinkSetFlood(link, true),
		h.LinkSetUp(link),
	)
}

// attach gives a namespace an eth0 on the switch with these addresses and
// default routes via the gateway of each family it has.
func (c *Cluster) attach(ctx context.Context, n *Netns, port string, addrs []netip.Prefix, gateways []netip.Addr) error {
	h, err := n.netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	sw, err := netns.GetFromPath(c.Switch.Path())
	if err != nil {
		return err
	}
	defer sw.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "eth0", c.cfg.MTU
	// The namespace of the peer is given at creation: no name is ever taken
	// in the wrong namespace.
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: port, PeerNamespace: netlink.NsFd(sw)}
	if err := h.LinkAdd(veth); err != nil {
		return fmt.Errorf("eth0 of %s: %w", n.Name, err)
	}
	swh, err := c.Switch.netlink()
	if err != nil {
		return err
	}
	defer swh.Close()
	if err := plug(swh, port); err != nil {
		return fmt.Errorf("port %s of the switch: %w", port, err)
	}
	if err := n.configure(h, addrs, gateways); err != nil {
		return err
	}
	return errors.Join(n.awaitUp(ctx, "eth0"), c.Switch.awaitUp(ctx, port), n.awaitAddrs(ctx, addrs))
}

// makeWire joins two nodes by one veth pair: nothing but the nodes costs
// anything on the way, as measurements want it.
func (c *Cluster) makeWire(ctx context.Context) error {
	if len(c.cfg.Nodes) != 2 {
		return fmt.Errorf("a wire joins two nodes, not %d", len(c.cfg.Nodes))
	}
	for _, nc := range c.cfg.Nodes {
		n, err := c.newNode(nc)
		if err != nil {
			return fmt.Errorf("node %s: %w", nc.Name, err)
		}
		c.Nodes = append(c.Nodes, n)
	}
	far, err := netns.GetFromPath(c.Nodes[1].Path())
	if err != nil {
		return err
	}
	defer far.Close()
	for i, n := range c.Nodes {
		h, err := n.netlink()
		if err != nil {
			return err
		}
		defer h.Close()
		if i == 0 {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.MTU = "eth0", c.cfg.MTU
			if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(far)}); err != nil {
				return fmt.Errorf("wire between %s and %s: %w", n.NodeName, c.Nodes[1].NodeName, err)
			}
		}
		if err := n.configure(h, n.Config.Addrs, nil); err != nil {
			return err
		}
	}
	for _, n := range c.Nodes {
		if err := errors.Join(n.awaitUp(ctx, "eth0"), n.awaitAddrs(ctx, n.Config.Addrs)); err != nil {
			return err
		}
	}
	return nil
}

// configure brings a namespace's eth0 up with its addresses and routes.
func (n *Netns) configure(h *netlink.Handle, addrs []netip.Prefix, gateways []netip.Addr) error {
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(eth0); err != nil {
		return err
	}
	for _, p := range addrs {
		ipn := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
		if err := h.AddrAdd(eth0, &netlink.Addr{IPNet: ipn}); err != nil {
			return fmt.Errorf("address %v of %s: %w", p, n.Name, err)
		}
	}
	for _, gw := range gateways {
		if !contains(addrs, gw) {
			continue
		}
		dst := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
		if gw.Is6() {
			dst = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
		}
		r := &netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: dst, Gw: gw.AsSlice()}
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("default route of %s via %v: %w", n.Name, gw, err)
		}
	}
	return nil
}

// awaitAddrs waits until the kernel answers for IPv6 addresses: it joins the
// groups of their neighbour solicitations some time after they were added,
// even without duplicate address detection, and ends "tentative" then.
func (n *Netns) awaitAddrs(ctx context.Context, addrs []netip.Prefix) error {
	missing := map[netip.Addr]bool{}
	for _, p := range addrs {
		if p.Addr().Is6() {
			missing[p.Addr()] = true
		}
	}
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return err
	}
	defer ns.Close()
	updates, done := make(chan netlink.AddrUpdate, 256), make(chan struct{})
	defer close(done)
	err = netlink.AddrSubscribeWithOptions(updates, done, netlink.AddrSubscribeOptions{Namespace: &ns, ListExisting: true})
	if err != nil {
		return fmt.Errorf("watch addresses in %s: %w", n.Name, err)
	}
	for len(missing) > 0 {
		select {
		case u, ok := <-updates:
			if !ok {
				return fmt.Errorf("watching addresses in %s ended", n.Name)
			}
			if a, ok := netip.AddrFromSlice(u.LinkAddress.IP); ok && u.NewAddr && u.Flags&unix.IFA_F_TENTATIVE == 0 {
				delete(missing, a)
			}
		case <-ctx.Done():
			return fmt.Errorf("addresses of %s are not ready: %v: %w", n.Name, missing, ctx.Err())
		}
	}
	return nil
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(a) && p.Addr() != a {
			return true
		}
	}
	return false
}
