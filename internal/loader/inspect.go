package loader

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Programs names the datapath's programs on a device's hooks, whoever
// attached them, by tcx or as filters.
func Programs(ifindex int) (names []string, err error) {
	for _, egress := range []bool{false, true} {
		ids, err := programsOn(ifindex, egress)
		if err != nil {
			return nil, fmt.Errorf("device with index %d: %w", ifindex, err)
		}
		for _, id := range ids {
			p, err := ebpf.NewProgramFromID(id)
			if errors.Is(err, os.ErrNotExist) {
				continue // gone meanwhile
			}
			if err != nil {
				return nil, fmt.Errorf("program %d on device with index %d: %w", id, ifindex, err)
			}
			info, err := p.Info()
			_ = p.Close()
			if err != nil {
				return nil, fmt.Errorf("program %d on device with index %d: %w", id, ifindex, err)
			}
			if h, ours := hookByName(info.Name); ours && h.egress == egress {
				names = append(names, info.Name)
			}
		}
	}
	return names, nil
}

// xdpOn is the generic XDP program of a device, if there is one.
func xdpOn(ifindex int) []ebpf.ProgramID {
	dev, err := netlink.LinkByIndex(ifindex)
	if err != nil || dev.Attrs().Xdp == nil || !dev.Attrs().Xdp.Attached {
		return nil
	}
	return []ebpf.ProgramID{ebpf.ProgramID(dev.Attrs().Xdp.ProgId)}
}

func programsOn(ifindex int, egress bool) (ids []ebpf.ProgramID, err error) {
	attach, key := ebpf.AttachTCXIngress, hookKey{ifindex, hook{}}
	if egress {
		attach, key.hook.egress = ebpf.AttachTCXEgress, true
	}
	r, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: attach})
	// The kernel is asked how many, then which: others may attach in between.
	for range 10 {
		if !errors.Is(err, unix.ENOSPC) {
			break
		}
		r, err = link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: attach})
	}
	switch {
	case err == nil:
		for _, p := range r.Programs {
			ids = append(ids, p.ID)
		}
	// A kernel without tcx does not know what it is asked for.
	case !errors.Is(err, ebpf.ErrNotSupported) && !errors.Is(err, unix.EINVAL):
		return nil, fmt.Errorf("list programs: %w", err)
	}
	if !egress {
		ids = append(ids, xdpOn(ifindex)...)
	}
	dev := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	filters, err := netlink.FilterList(dev, filterParent(key))
	if err != nil {
		return ids, nil // no such qdisc: no filter
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			ids = append(ids, ebpf.ProgramID(b.Id))
		}
	}
	return ids, nil
}

// Pinned names the programs that links are pinned of, by device.
func Pinned(bpffs string) (map[int][]string, error) {
	entries, err := os.ReadDir(linksDir(bpffs))
	if err != nil {
		return nil, fmt.Errorf("list pinned links: %w", err)
	}
	out := make(map[int][]string)
	for _, e := range entries {
		if key, ok := parsePin(e.Name()); ok && !isGuardPin(e.Name()) {
			out[key.ifindex] = append(out[key.ifindex], key.hook.program)
		}
	}
	for _, list := range out {
		slices.Sort(list)
	}
	return out, nil
}
