package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const (
	limit     = 100e6 / 8 // bytes a second
	limitedIf = "pwslimited"
	shaper    = "pwifb"
)

// limit adds a pod to node a whose programs are on a device over its veth, and
// limits what it sends and is sent, as the bandwidth plugin does.
func (w *world) limit(ctx context.Context) (err error) {
	if w.limited, err = w.a.addPod("limited", 67); err != nil {
		return err
	}
	p := w.limited
	w.a.pods = w.a.pods[:len(w.a.pods)-1] // its hooks are others
	if err := w.a.do(func() error { return w.a.putOver(ctx, p) }); err != nil {
		return err
	}
	if err := w.fillLimited(); err != nil {
		return err
	}
	if err := w.a.do(func() error { return errors.Join(shape(p), programsOf(p)) }); err != nil {
		return err
	}
	return p.do(func() error { return echoServer(ctx) })
}

// putOver moves what the node has for a pod to a device over its veth.
func (n *node) putOver(ctx context.Context, p *pod) error {
	veth := p.ifindex
	link, err := netlink.LinkByIndex(veth)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetDown(link); err != nil { // its routes go, too
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = limitedIf, veth
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PASSTHRU}); err != nil {
		return fmt.Errorf("put a macvlan over %s: %w", p.device, err)
	}
	over, err := netlink.LinkByName(limitedIf)
	if err != nil {
		return err
	}
	p.ifindex = over.Attrs().Index
	if err := errors.Join(n.dp.AttachWire(ctx, veth, p.device), n.dp.AttachPod(ctx, p.ifindex, limitedIf),
		netlink.LinkSetUp(link), netlink.LinkSetUp(over)); err != nil {
		return err
	}
	for _, a := range []netip.Addr{p.addr, p.addr6} {
		if err := reach(p.ifindex, a, p.mac, netlink.SCOPE_LINK, a); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) fillLimited() error {
	p, m := w.limited, w.a.maps()
	var errs []error
	for _, a := range []netip.Addr{p.addr, p.addr6} {
		e := maps.Endpoint{Id: 67, Ifindex: uint32(p.ifindex), Identity: maps.IdentityPod, Slot: p.slot, Flags: maps.EndpointQdisc}
		copy(e.Mac[:], p.mac)
		errs = append(errs, m.Endpoints.Put(maps.ToAddr(a), e),
			m.Addrs.Put(maps.ToAddr(a), maps.Peer{Identity: maps.IdentityPod, Slot: p.slot, Flags: maps.PeerPod}))
	}
	return errors.Join(errs...)
}

// shape is what the bandwidth plugin does on the host.
func shape(p *pod) error {
	veth, err := netlink.LinkByName(p.device)
	if err != nil {
		return err
	}
	if err := netlink.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: shaper}}); err != nil {
		return fmt.Errorf("make %s: %w", shaper, err)
	}
	ifb, err := netlink.LinkByName(shaper)
	if err != nil {
		return err
	}
	errs := []error{netlink.LinkSetUp(ifb)}
	for _, l := range []netlink.Link{veth, ifb} {
		errs = append(errs, netlink.QdiscAdd(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			Rate:       limit, Buffer: 1 << 20, Limit: 4 << 20,
		}))
	}
	errs = append(errs, netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: veth.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
	}}))
	errs = append(errs, netlink.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: veth.Attrs().Index, Parent: netlink.MakeHandle(0xffff, 0), Priority: 1, Protocol: unix.ETH_P_ALL},
		ClassId:     netlink.MakeHandle(1, 1),
		Actions:     []netlink.Action{netlink.NewMirredAction(ifb.Attrs().Index)},
	}))
	return errors.Join(errs...)
}

// programsOf: who asks which programs a device has is told.
func programsOf(p *pod) error {
	veth, err := netlink.LinkByName(p.device)
	if err != nil {
		return err
	}
	for index, want := range map[int]string{veth.Attrs().Index: "[from_pod_wire]", p.ifindex: "[from_pod to_pod]"} {
		if got, err := loader.Programs(index); err != nil || fmt.Sprint(got) != want {
			return fmt.Errorf("device %d has programs %v, want %s: %w", index, got, want, err)
		}
	}
	return nil
}

// checkLimited: all ways of the pod's, through the limit.
func (w *world) checkLimited(v6 bool) error {
	p := w.limited
	var before, after uint64
	sent := func(n *uint64) error {
		return w.a.do(func() error {
			l, err := netlink.LinkByName(shaper)
			if err == nil {
				*n = l.Attrs().Statistics.TxPackets
			}
			return err
		})
	}
	if err := sent(&before); err != nil {
		return err
	}
	grown, err := w.a.growth(func() error {
		return errors.Join(
			p.converse(w.local.ip(v6), podPort), p.converse(w.remote.ip(v6), podPort), p.converse(w.a.ip(v6), podPort),
			p.tcpEcho(netip.AddrPortFrom(w.local.ip(v6), podPort), 1<<20), p.tcpEcho(netip.AddrPortFrom(w.remote.ip(v6), podPort), 1<<20),
			w.client.converse(p.ip(v6), podPort), w.a.converse(p.ip(v6), podPort), w.client.ping(p.ip(v6), 2),
			p.refused(netip.AddrPortFrom(localService.ip(v6), closed)))
	})
	if err != nil {
		return err
	}
	if err := sent(&after); err != nil {
		return err
	}
	if after-before < 100 {
		return fmt.Errorf("%d of its packets went through the limit", after-before)
	}
	return errors.Join(w.sealed(v6),
		grown.want(-20, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6),
		grown.want(-5, bpf.DpPwReasonPW_FWD_HOST, fromPod, v6),
		grown.want(-5, bpf.DpPwReasonPW_FWD_LOCAL, toPod, v6))
}

// sealed: frames for all on the link are judged like others, and the stack gets
// nothing below what is over the veth. Only IPv6 counts by device.
func (w *world) sealed(v6 bool) error {
	if !v6 {
		return nil
	}
	p := w.limited
	err := p.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return know(eth0.Attrs().Index, gateway6, net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1})
	})
	if err != nil {
		return err
	}
	if err := p.converse(w.a.ip(true), podPort); err != nil {
		return fmt.Errorf("in frames for all: %w", err)
	}
	return w.a.do(func() error {
		data, err := os.ReadFile("/proc/thread-self/net/dev_snmp6/" + p.device)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "Ip6InReceives" {
				if f[1] != "0" {
					return fmt.Errorf("the stack has got %s packets from %s", f[1], p.device)
				}
				return nil
			}
		}
		return fmt.Errorf("nothing is counted for %s: %s", p.device, data)
	})
}
