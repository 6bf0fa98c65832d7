package loader

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Our filters on a clsact qdisc: found by handle, priority and name, so that
// a restart replaces them in place and others' filters are never taken for
// ours.
const (
	filterPriority = 1
	filterHandle   = 0x7077
	filterPrefix   = "podweir_"
)

func filterParent(key hookKey) uint32 {
	if key.hook.egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// replaceFilter puts p on a clsact hook in place of our earlier program. The
// qdisc is added when missing and never removed: others may use it.
func replaceFilter(key hookKey, p *ebpf.Program) error {
	err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: key.ifindex, Parent: netlink.HANDLE_CLSACT,
		Handle: netlink.MakeHandle(0xffff, 0),
	}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact qdisc to device %d: %w", key.ifindex, err)
	}
	if err := netlink.FilterReplace(ourFilter(key, p.FD())); err != nil {
		return fmt.Errorf("set filter %s on device %d: %w", key.hook.program, key.ifindex, err)
	}
	return nil
}

func ourFilter(key hookKey, fd int) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: key.ifindex, Parent: filterParent(key), Handle: filterHandle,
			Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: fd, Name: filterPrefix + key.hook.program, DirectAction: true,
	}
}

func findFilter(key hookKey) (*netlink.BpfFilter, error) {
	dev := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: key.ifindex}}
	filters, err := netlink.FilterList(dev, filterParent(key))
	if err != nil {
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil, nil // no device, or no such qdisc: no filter
		}
		return nil, fmt.Errorf("list filters of device %d: %w", key.ifindex, err)
	}
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if ok && b.Handle == filterHandle && b.Name == filterPrefix+key.hook.program {
			return b, nil
		}
	}
	return nil, nil
}

func hasFilter(key hookKey) (bool, error) {
	f, err := findFilter(key)
	return f != nil, err
}

func deleteFilter(key hookKey) error {
	f, err := findFilter(key)
	if err != nil || f == nil {
		return err
	}
	if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete filter %s of device %d: %w", key.hook.program, key.ifindex, err)
	}
	return nil
}

// adoptFilters takes over the filters of an earlier process, which have their
// programs still.
func (d *Datapath) adoptFilters() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		for _, h := range allHooks() {
			key := hookKey{l.Attrs().Index, h}
			if h.xdp || d.attached[key] != nil {
				continue
			}
			is, err := hasFilter(key)
			if err != nil {
				return err
			}
			if is {
				d.attached[key] = &attachment{key: key, device: l.Attrs().Name}
			}
		}
	}
	return nil
}

// removeFilters deletes our filters from every device of this namespace.
func removeFilters() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		for _, h := range allHooks() {
			errs = append(errs, deleteFilter(hookKey{l.Attrs().Index, h}))
		}
	}
	return errors.Join(errs...)
}
