package endpoint

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Wirer is a [Datapath] whose programs may stand in the way of an ingress
// qdisc on the host's half of a pod's veth, as the one for a limit on what the
// pod sends. Where they do, an endpoint of [Request.SendLimited] has its programs
// on a device over the host's half.
type Wirer interface {
	TakesIngress() bool
	// AttachWire attaches what the host's half has then: nothing that the pod
	// sends reaches the stack but by the device over it. Like
	// [Datapath.AttachPod] it runs while both halves are down, and repeating it
	// is no error.
	AttachWire(ctx context.Context, ifindex int, name string) error
}

// OverName is the name of the device over the host's half of a pod's veth.
func OverName(hostIf string) string { return "pws" + strings.TrimPrefix(hostIf, "pw") }

// Device is the pod's device of the host, where programs, routes and neighbours
// are: the host's half of the veth, or what is over it.
func (e Endpoint) Device() (name string, index int) {
	if e.Over != "" {
		return e.Over, e.OverIfindex
	}
	return e.HostIfName, e.HostIfindex
}

// needsOver tells whether a device has to be over the host's half.
func (m *Manager) needsOver(req Request) bool {
	w, ok := m.cfg.Datapath.(Wirer)
	return ok && req.SendLimited && w.TakesIngress()
}

// wireSysctls are further ones of the host's half that has a device over it:
// frames for all on the link are no way to the host's sockets.
func wireSysctls() []sysctl {
	return append(hostSysctls(),
		sysctl{"ipv4", "drop_unicast_in_l2_multicast", "1"},
		sysctl{"ipv6", "drop_unicast_in_l2_multicast", "1"})
}

// setHostSysctls sets those of the host's half and of what is over it.
func (m *Manager) setHostSysctls(ep Endpoint) (changed []string, err error) {
	if ep.Over == "" {
		return m.setSysctls(ep.HostIfName, hostSysctls())
	}
	if changed, err = m.setSysctls(ep.HostIfName, wireSysctls()); err != nil {
		return changed, err
	}
	more, err := m.setSysctls(ep.Over, hostSysctls())
	return append(changed, more...), err
}

func (m *Manager) hostSysctlDifferences(ep Endpoint) ([]string, error) {
	if ep.Over == "" {
		return m.sysctlDifferences(ep.HostIfName, hostSysctls())
	}
	diffs, err := m.sysctlDifferences(ep.HostIfName, wireSysctls())
	if err != nil {
		return nil, err
	}
	more, err := m.sysctlDifferences(ep.Over, hostSysctls())
	return append(diffs, more...), err
}

// attach puts the programs in place.
func (m *Manager) attach(ctx context.Context, ep Endpoint) error {
	if ep.Over != "" {
		w, ok := m.cfg.Datapath.(Wirer)
		if !ok {
			return fmt.Errorf("%s: the datapath cannot leave it to %s", ep.HostIfName, ep.Over)
		}
		if err := w.AttachWire(ctx, ep.HostIfindex, ep.HostIfName); err != nil {
			return fmt.Errorf("attach the datapath to %s: %w", ep.HostIfName, err)
		}
	}
	name, index := ep.Device()
	if err := m.cfg.Datapath.AttachPod(ctx, index, name); err != nil {
		return fmt.Errorf("attach the datapath to %s: %w", name, err)
	}
	return nil
}

// attached asks a datapath that can tell.
func (m *Manager) attached(ctx context.Context, p Prober, ep Endpoint) error {
	_, index := ep.Device()
	err := p.Attached(ctx, index)
	if ep.Over != "" {
		err = errors.Join(err, p.Attached(ctx, ep.HostIfindex))
	}
	return err
}

// createOver makes the device over the host's half of ep, down: a macvlan in
// passthru mode, whose MAC and MTU are the veth's.
func createOver(h *netlink.Handle, ep *Endpoint) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = ep.Over, ep.HostIfindex
	err := h.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PASSTHRU})
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("this kernel has no macvlan (CONFIG_MACVLAN, module macvlan), without which it limits nothing that a pod sends: %w", err)
	}
	if err != nil {
		return fmt.Errorf("put macvlan %s over %s: %w", ep.Over, ep.HostIfName, err)
	}
	link, err := linkByName(h, ep.Over)
	if err == nil && link == nil {
		err = fmt.Errorf("interface %s vanished while it was created", ep.Over)
	}
	if err != nil {
		return err
	}
	ep.OverIfindex = link.Attrs().Index
	return nil
}

// overOf returns the device over the host's half, or nil if it is not there, or
// none that takes all that the pod sends.
func overOf(h *netlink.Handle, ep Endpoint) (over, other netlink.Link, err error) {
	link, err := linkByName(h, ep.Over)
	if err != nil || link == nil {
		return nil, nil, err
	}
	v, ok := link.(*netlink.Macvlan)
	if !ok || v.Mode != netlink.MACVLAN_MODE_PASSTHRU || v.ParentIndex != ep.HostIfindex || v.Index != ep.OverIfindex {
		return nil, link, nil
	}
	return link, nil, nil
}

// mendOver makes the device over the host's half anew if it is gone. Until it
// has its programs it is down, and what the pod sends ends there.
func (m *Manager) mendOver(h *netlink.Handle, e *entry) ([]string, error) {
	ep := m.endpointOf(e)
	if ep.Over == "" {
		return nil, nil
	}
	over, other, err := overOf(h, ep)
	if err != nil || over != nil {
		return nil, err
	}
	if other != nil {
		if err := deleteLink(h, other); err != nil {
			return nil, err
		}
	}
	if err := createOver(h, &ep); err != nil {
		return nil, err
	}
	if err := m.save(e, ep, phaseReady); err != nil {
		return nil, err
	}
	m.change(func() { e.attached, e.up = false, false })
	return []string{fmt.Sprintf("%s: %s was gone from over it, made again", ep.HostIfName, ep.Over)}, nil
}

// configureOver brings it up, and to the MTU of the host's half: the kernel
// makes it smaller with that, and not larger again.
func configureOver(h *netlink.Handle, ep Endpoint) error {
	if ep.Over == "" {
		return nil
	}
	over, _, err := overOf(h, ep)
	if err == nil && over == nil {
		err = fmt.Errorf("interface %s over %s is gone", ep.Over, ep.HostIfName)
	}
	if err != nil {
		return err
	}
	if over.Attrs().MTU != ep.MTU {
		if err := setMTU(h, over, ep.MTU); err != nil {
			return err
		}
	}
	if err := h.LinkSetUp(over); err != nil {
		return fmt.Errorf("set %s up: %w", ep.Over, err)
	}
	return nil
}

// overDifferences compares it with what it should be.
func overDifferences(h *netlink.Handle, ep Endpoint) ([]string, error) {
	if ep.Over == "" {
		return nil, nil
	}
	over, _, err := overOf(h, ep)
	if err != nil {
		return nil, err
	}
	if over == nil {
		return []string{fmt.Sprintf("interface %s over %s is missing", ep.Over, ep.HostIfName)}, nil
	}
	diffs := linkDifferences(over, ep.Over, ep.HostMAC, ep.MTU, 0)
	addrs, err := addrDifferences(h, over)
	return append(diffs, addrs...), err
}

// detachOver forgets the programs of the device over a host's half that is
// gone, and it with that, unless another device has its index by now.
func (m *Manager) detachOver(ctx context.Context, ep Endpoint) error {
	if ep.OverIfindex == 0 {
		return nil
	}
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	if other, err := linkByIndex(h, ep.OverIfindex); err != nil || other != nil {
		return err
	}
	if err := m.cfg.Datapath.Detach(ctx, ep.OverIfindex); err != nil {
		return fmt.Errorf("detach the datapath from %s (index %d): %w", ep.Over, ep.OverIfindex, err)
	}
	return nil
}
