package loader

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/node"
)

// A fragment that is ahead of its datagram's first has no ports. The programs
// send such datagrams to podweir.frag, the host's end of a veth pair whose far
// end is in a network namespace without a name, where there is nothing else:
// no address but lo's, and a default route back. The kernel reassembles what arrives at a
// namespace, before it is routed, for as long as somebody asks for it, such as
// a netfilter link with this flag (kernel 6.6), and cuts it again when it is
// sent on. The pinned links hold the namespace; nothing else does.

// nfDefrag is BPF_F_NETFILTER_IP_DEFRAG.
const nfDefrag = 1 << 0

// The kernel reassembles at priority -400 and wants whoever asks for it to
// come later.
const defragPriority = -399

const (
	fragPeer = "peer"
	// The largest that a veth pair takes: nothing that came does not fit.
	fragMTU = 65535
)

// Both ends have fixed addresses: the programs write them, see bpf/frag.h.
func fragMAC() net.HardwareAddr     { return net.HardwareAddr{0x02, 'p', 'w', 'f', 0, 1} }
func fragPeerMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 'p', 'w', 'f', 0, 2} }

// Pins of the links in the namespace. What the names begin with has no index,
// see [parsePin].
const (
	fragPin      = "frag"
	fragPin4     = fragPin + "-4"
	fragPin6     = fragPin + "-6"
	fragPinEnter = fragPin + "-enter"
	fragPinLeave = fragPin + "-leave"
)

func fragPins() []string { return []string{fragPin4, fragPin6, fragPinEnter, fragPinLeave} }

func isFragPin(name string) bool { return slices.Contains(fragPins(), name) }

// hasIPv6 says whether this kernel has IPv6 at all: one that was started
// without (ipv6.disable=1) knows no address, route or sysctl of it.
func (d *Datapath) hasIPv6() (bool, error) {
	_, err := os.Stat(filepath.Join(d.sysctls(), "net/ipv6/conf"))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for IPv6: %w", err)
	}
	return true, nil
}

// formerDefragPins are those of links in the host's own namespace, by which
// earlier versions had all that the host forwards reassembled.
func formerDefragPins() []string { return []string{"defrag-4", "defrag-6"} }

// errNoReassembly is that of a kernel that does not do it for us.
var errNoReassembly = errors.New("this kernel does not reassemble for netfilter links (6.6 does): fragments ahead of their datagram's first are dropped")

// fragPrograms are the programs in the namespace. They share nothing with
// those of the hooks, which are loaded when its device is known.
type fragPrograms struct{ enter, leave, netfilter *ebpf.Program }

func loadFragPrograms() (p fragPrograms, err error) {
	spec, err := bpf.LoadDp()
	if err != nil {
		return p, fmt.Errorf("read embedded datapath: %w", err)
	}
	if p.netfilter, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "pw_defrag", Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1 /* NF_ACCEPT */), asm.Return()},
	}); err != nil {
		return fragPrograms{}, fmt.Errorf("%w: %w", errNoReassembly, err)
	}
	if p.enter, err = ebpf.NewProgram(spec.Programs["frag_enter"]); err == nil {
		p.leave, err = ebpf.NewProgram(spec.Programs["frag_leave"])
	}
	if err != nil {
		return fragPrograms{}, errors.Join(fmt.Errorf("load programs of the reassembly: %w", err), p.close())
	}
	return p, nil
}

func (p fragPrograms) close() error {
	var errs []error
	for _, prog := range []*ebpf.Program{p.enter, p.leave, p.netfilter} {
		if prog != nil {
			errs = append(errs, prog.Close())
		}
	}
	return errors.Join(errs...)
}

// ensureReassembly has a namespace for the reassembly of fragments behind
// podweir.frag, and returns the index of that device; 0 and [errNoReassembly]
// if the kernel can't. why says what was wrong with one that had to be made
// anew.
func (d *Datapath) ensureReassembly() (ifindex int, why string, err error) {
	if d.frag.netfilter == nil {
		if d.frag, err = loadFragPrograms(); err != nil {
			return 0, "", err
		}
	}
	p := d.frag
	dev, why, err := d.wrongReassembly(p)
	if err != nil || why == "" {
		return dev, "", err
	}
	if err := d.removeReassembly(); err != nil {
		return 0, why, err
	}
	if ifindex, err = d.makeReassembly(p, dev); err != nil {
		return 0, why, errors.Join(err, d.removeReassembly())
	}
	return ifindex, why, nil
}

// wrongReassembly says what is wrong with the namespace that is there, and the
// index of its device, which the next should have, too.
func (d *Datapath) wrongReassembly(p fragPrograms) (ifindex int, why string, err error) {
	dev, err := netlink.LinkByName(node.FragName)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return d.cfg.FragIfindex, "there is no device", nil
	}
	if err != nil {
		return 0, "", fmt.Errorf("look for %s: %w", node.FragName, err)
	}
	a := dev.Attrs()
	switch {
	case dev.Type() != "veth":
		return a.Index, "it is a " + dev.Type() + " device", nil
	case a.MTU != fragMTU || !bytes.Equal(a.HardwareAddr, fragMAC()):
		return a.Index, "it has another MTU or address", nil
	case a.RawFlags&(unix.IFF_UP|unix.IFF_RUNNING) != unix.IFF_UP|unix.IFF_RUNNING:
		return a.Index, "it, or its far end, is down", nil
	}
	v6, err := d.hasIPv6()
	if err != nil {
		return 0, "", err
	}
	for _, name := range fragPins() {
		if name == fragPin6 && !v6 {
			continue
		}
		var prog *ebpf.Program
		switch name {
		case fragPinEnter:
			prog = p.enter
		case fragPinLeave:
			prog = p.leave
		}
		if why, err := d.wrongFragLink(name, prog, a.ParentIndex); err != nil || why != "" {
			return a.Index, why, err
		}
	}
	return a.Index, "", nil
}

// wrongFragLink says what is wrong with a pinned link, which is to be of that
// program, if it is one of the far end, on the device with that index.
func (d *Datapath) wrongFragLink(name string, prog *ebpf.Program, peer int) (why string, err error) {
	l, err := link.LoadPinnedLink(filepath.Join(linksDir(d.cfg.BPFFS), name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return "link " + name + " is not pinned", nil
	}
	if err != nil {
		return fmt.Sprintf("what is pinned as link %s is none: %v", name, err), nil
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return "", fmt.Errorf("inspect link %s: %w", name, err)
	}
	if prog == nil {
		if info.Type != link.NetfilterType {
			return "link " + name + " is another", nil
		}
		return "", nil
	}
	if tcx := info.TCX(); tcx == nil || int(tcx.Ifindex) != peer {
		return "program " + name + " is not attached to its far end", nil
	}
	have, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return "", fmt.Errorf("program of link %s: %w", name, err)
	}
	defer have.Close()
	is, err := have.Info()
	if err != nil {
		return "", fmt.Errorf("program of link %s: %w", name, err)
	}
	want, err := prog.Info()
	if err != nil {
		return "", fmt.Errorf("program of link %s: %w", name, err)
	}
	if is.Tag != want.Tag {
		return "program " + name + " is of another version", nil
	}
	return "", nil
}

// makeReassembly makes the namespace and what leads there. index is what the
// device's should be, 0 if that is all the same.
func (d *Datapath) makeReassembly(p fragPrograms, index int) (ifindex int, err error) {
	host, err := netns.Get()
	if err != nil {
		return 0, fmt.Errorf("own network namespace: %w", err)
	}
	defer host.Close()
	done := make(chan error, 1)
	go func() {
		// The thread is given back only if it is in its old namespace again;
		// otherwise it ends with this goroutine.
		runtime.LockOSThread()
		done <- func() error {
			// Not the host's: the caller may have entered another.
			own, err := netns.Get()
			if err != nil {
				return fmt.Errorf("network namespace of a thread: %w", err)
			}
			defer own.Close()
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("make a network namespace for the reassembly of fragments: %w", err)
			}
			err = d.fillReassembly(p, host, index)
			if back := netns.Set(own); back != nil {
				return errors.Join(err, fmt.Errorf("leave the namespace for the reassembly of fragments: %w", back))
			}
			runtime.UnlockOSThread()
			return err
		}()
	}()
	if err := <-done; err != nil {
		return 0, err
	}
	dev, err := netlink.LinkByName(node.FragName)
	if err != nil {
		return 0, fmt.Errorf("look for %s: %w", node.FragName, err)
	}
	return dev.Attrs().Index, nil
}

// fillReassembly works in the new namespace.
func (d *Datapath) fillReassembly(p fragPrograms, host netns.NsHandle, index int) error {
	v6, err := d.hasIPv6()
	if err != nil {
		return err
	}
	sysctls := [][2]string{
		{"net/ipv4/conf/all/rp_filter", "0"}, {"net/ipv4/conf/default/rp_filter", "0"},
		{"net/ipv4/conf/all/send_redirects", "0"}, {"net/ipv4/conf/default/send_redirects", "0"},
		{"net/ipv4/ip_forward", "1"},
	}
	if v6 {
		sysctls = append(sysctls, [][2]string{
			{"net/ipv6/conf/default/addr_gen_mode", "1"}, {"net/ipv6/conf/default/accept_ra", "0"},
			{"net/ipv6/conf/default/disable_ipv6", "0"}, {"net/ipv6/conf/all/forwarding", "1"},
		}...)
	}
	for _, s := range sysctls {
		path := filepath.Join(d.sysctls(), s[0])
		if err := os.WriteFile(path, []byte(s[1]), 0o644); err != nil {
			return fmt.Errorf("reassembly of fragments: set sysctl %s to %s: %w", path, s[1], err)
		}
	}
	here, err := netns.Get()
	if err != nil {
		return fmt.Errorf("network namespace of the reassembly: %w", err)
	}
	defer here.Close()
	inside, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink in the reassembly's namespace: %w", err)
	}
	defer inside.Close()
	outside, err := netlink.NewHandleAt(host, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer outside.Close()
	peer, err := pairReassembly(outside, inside, here, index, v6)
	if err != nil {
		return err
	}
	if err := routeReassembly(inside, peer, v6); err != nil {
		return err
	}
	return d.attachReassembly(p, peer, v6)
}

// pairReassembly makes the two devices and returns the index of the far one.
func pairReassembly(outside, inside *netlink.Handle, here netns.NsHandle, index int, v6 bool) (peer int, err error) {
	pair := netlink.NewVeth(netlink.LinkAttrs{Name: node.FragName, Index: index, MTU: fragMTU, HardwareAddr: fragMAC(), TxQLen: -1})
	pair.PeerName, pair.PeerMTU, pair.PeerHardwareAddr = fragPeer, fragMTU, fragPeerMAC()
	pair.PeerNamespace = netlink.NsFd(int(here))
	err = outside.LinkAdd(pair)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) && index != 0 {
		pair.Index = 0 // somebody has the index by now
		err = outside.LinkAdd(pair)
	}
	if err != nil {
		return 0, fmt.Errorf("create %s: %w", node.FragName, err)
	}
	far, err := inside.LinkByName(fragPeer)
	if err == nil {
		err = inside.LinkSetUp(far)
	}
	if err != nil {
		return 0, fmt.Errorf("far end of %s: %w", node.FragName, err)
	}
	near, err := outside.LinkByName(node.FragName)
	if err == nil && v6 {
		// No address: nobody is asked for on this link.
		err = outside.LinkSetIP6AddrGenMode(near, addrGenNone)
	}
	if err == nil {
		err = outside.LinkSetUp(near)
	}
	if err != nil {
		return 0, fmt.Errorf("set up %s: %w", node.FragName, err)
	}
	return far.Attrs().Index, nil
}

const addrGenNone = 1 // IN6_ADDR_GEN_MODE_NONE

// routeReassembly leads everything back by the device that it came in by.
func routeReassembly(inside *netlink.Handle, peer int, v6 bool) error {
	// Without any local address IPv4 takes every gateway for a broadcast's.
	lo, err := inside.LinkByName(node.Loopback)
	if err == nil {
		err = inside.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("reassembly of fragments: %s: %w", node.Loopback, err)
	}
	gateways := []net.IP{net.IPv4(169, 254, 1, 1).To4()}
	if v6 {
		gateways = append(gateways, net.ParseIP("fe80::1"))
	}
	for _, gw := range gateways {
		family, bits := netlink.FAMILY_V4, 32
		if gw.To4() == nil {
			family, bits = netlink.FAMILY_V6, 128
		}
		if err := inside.NeighSet(&netlink.Neigh{
			LinkIndex: peer, Family: family, State: netlink.NUD_PERMANENT, IP: gw, HardwareAddr: fragMAC(),
		}); err != nil {
			return fmt.Errorf("reassembly of fragments: neighbour %v: %w", gw, err)
		}
		if err := inside.RouteReplace(&netlink.Route{
			LinkIndex: peer, Gw: gw, Flags: int(netlink.FLAG_ONLINK),
			Dst: &net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)},
		}); err != nil {
			return fmt.Errorf("reassembly of fragments: default route by %v: %w", gw, err)
		}
	}
	return nil
}

// attachReassembly attaches, and pins, what the namespace lives by.
func (d *Datapath) attachReassembly(p fragPrograms, peer int, v6 bool) error {
	pin := func(name string, l link.Link, err error) error {
		if err != nil {
			return fmt.Errorf("link %s: %w", name, err)
		}
		defer l.Close()
		if err := l.Pin(filepath.Join(linksDir(d.cfg.BPFFS), name)); err != nil {
			return fmt.Errorf("pin link %s: %w", name, err)
		}
		return nil
	}
	families := map[string]link.NetfilterProtocolFamily{fragPin4: link.NetfilterProtoIPv4}
	if v6 {
		families[fragPin6] = link.NetfilterProtoIPv6
	}
	for name, family := range families {
		l, err := link.AttachNetfilter(link.NetfilterOptions{
			Program: p.netfilter, ProtocolFamily: family, Hook: link.NetfilterInetPreRouting,
			Priority: defragPriority, NetfilterFlags: nfDefrag,
		})
		if err != nil {
			return fmt.Errorf("%w: family %d: %w", errNoReassembly, family, err)
		}
		if err := pin(name, l, nil); err != nil {
			return err
		}
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: peer, Program: p.enter, Attach: ebpf.AttachTCXIngress})
	if err := pin(fragPinEnter, l, err); err != nil {
		return err
	}
	l, err = link.AttachTCX(link.TCXOptions{Interface: peer, Program: p.leave, Attach: ebpf.AttachTCXEgress})
	return pin(fragPinLeave, l, err)
}

func (d *Datapath) sysctls() string {
	if d.cfg.Sysctls == "" {
		return "/proc/sys"
	}
	return d.cfg.Sysctls
}

func (d *Datapath) removeReassembly() error { return removeReassembly(d.cfg.BPFFS) }

// removeReassembly removes device and links, and with them the namespace.
func removeReassembly(bpffs string) error {
	var errs []error
	for _, name := range append(fragPins(), formerDefragPins()...) {
		errs = append(errs, dropPin(filepath.Join(linksDir(bpffs), name)))
	}
	dev, err := netlink.LinkByName(node.FragName)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return errors.Join(errs...)
	}
	if err == nil {
		err = netlink.LinkDel(dev)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		errs = append(errs, fmt.Errorf("remove %s: %w", node.FragName, err))
	}
	return errors.Join(errs...)
}

// dropPin detaches and unpins a link, if it is there.
func dropPin(path string) error {
	err := detachPinned(path)
	if e := os.Remove(path); e != nil && !errors.Is(e, os.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("remove pinned link: %w", e))
	}
	return err
}

// startReassembly is what a load does before it loads: what cannot be made
// leaves the node without, until [Datapath.verifyReassembly] can.
func (d *Datapath) startReassembly() error {
	var errs []error
	for _, name := range formerDefragPins() {
		errs = append(errs, dropPin(filepath.Join(linksDir(d.cfg.BPFFS), name)))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	index, why, err := d.ensureReassembly()
	switch {
	case errors.Is(err, errNoReassembly):
		d.log.Info("no reassembly of fragments", "reason", err)
		d.noReassembly = true
	case err != nil:
		d.log.Error("no reassembly of fragments for now: those ahead of their datagram's first are dropped", "error", err)
	case why != "":
		d.log.Info("made the namespace where fragments are reassembled", "device", node.FragName, "ifindex", index, "reason", why)
	}
	d.cfg.FragIfindex = index
	return nil
}

// verifyReassembly makes the namespace anew when something is wrong with it.
// It returns what was.
func (d *Datapath) verifyReassembly() (repaired []string, err error) {
	if d.noReassembly {
		return nil, nil
	}
	index, why, err := d.ensureReassembly()
	if why != "" && err == nil {
		repaired = []string{fmt.Sprintf("the namespace behind %s, for the reassembly of fragments, was made anew: %s", node.FragName, why)}
	}
	if index != d.cfg.FragIfindex {
		cfg := d.cfg
		cfg.FragIfindex = index
		err = errors.Join(err, d.reload(cfg))
	}
	return repaired, errors.Join(err, d.attachFrag())
}

// attachFrag attaches from_frag, where there is a reassembly.
func (d *Datapath) attachFrag() error {
	if d.cfg.FragIfindex == 0 {
		return nil
	}
	return d.attachOne(hookKey{d.cfg.FragIfindex, hookFromFrag}, node.FragName)
}
