package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/loader"
)

// tcHook is one side of a device.
type tcHook struct {
	node    string
	ifindex int
	egress  bool
}

// expected is the program that belongs on each hook.
func (w *world) expected() map[tcHook]string {
	want := map[tcHook]string{}
	for _, n := range []*node{w.a, w.b} {
		want[tcHook{n.name, n.wire, false}] = "from_netdev"
		want[tcHook{n.name, n.wire, true}] = "to_netdev"
		want[tcHook{n.name, loopback, true}] = "to_lo"
		want[tcHook{n.name, n.overlay, false}] = "from_overlay"
		want[tcHook{n.name, n.overlay, true}] = "to_overlay"
		for _, p := range n.pods {
			want[tcHook{n.name, p.ifindex, false}] = "from_pod"
			want[tcHook{n.name, p.ifindex, true}] = "to_pod"
		}
	}
	return want
}

// programs asks the kernel what is attached.
func (w *world) programs() (map[tcHook][]ebpf.ProgramID, error) {
	found := map[tcHook][]ebpf.ProgramID{}
	for _, n := range []*node{w.a, w.b} {
		err := n.do(func() error {
			for h := range w.expected() {
				if h.node != n.name {
					continue
				}
				ids, err := w.programsAt(h)
				if err != nil {
					return fmt.Errorf("programs of %v: %w", h, err)
				}
				found[h] = ids
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

func (w *world) programsAt(h tcHook) ([]ebpf.ProgramID, error) {
	var ids []ebpf.ProgramID
	if w.kernel.hasTCX() {
		attach := ebpf.AttachTCXIngress
		if h.egress {
			attach = ebpf.AttachTCXEgress
		}
		result, err := link.QueryPrograms(link.QueryOptions{Target: h.ifindex, Attach: attach})
		if err != nil {
			return nil, err
		}
		for _, p := range result.Programs {
			ids = append(ids, p.ID)
		}
		return ids, nil
	}
	dev, err := netlink.LinkByIndex(h.ifindex)
	if err != nil {
		return nil, err
	}
	parent := uint32(netlink.HANDLE_MIN_INGRESS)
	if h.egress {
		parent = netlink.HANDLE_MIN_EGRESS
	}
	filters, err := netlink.FilterList(dev, parent)
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		if f, ok := f.(*netlink.BpfFilter); ok {
			ids = append(ids, ebpf.ProgramID(f.Id))
		}
	}
	return ids, nil
}

// attached wants exactly our program on every hook.
func (w *world) attached() error {
	found, err := w.programs()
	if err != nil {
		return err
	}
	var errs []error
	verified := map[string]uint32{}
	for h, name := range w.expected() {
		if len(found[h]) != 1 {
			errs = append(errs, fmt.Errorf("%v has %d programs, want one", h, len(found[h])))
			continue
		}
		p, err := ebpf.NewProgramFromID(found[h][0])
		if err != nil {
			return err
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			return err
		}
		if insns, ok := info.VerifiedInstructions(); ok {
			verified[name] = insns
		}
		if info.Name != name {
			errs = append(errs, fmt.Errorf("%v has program %s, want %s", h, info.Name, name))
		}
	}
	logf("instructions verified: %v", verified)
	return errors.Join(errs...)
}

// remove detaches everything, checks that it is gone, and cleans up.
func (w *world) remove(ctx context.Context) error {
	nodes := []*node{w.a, w.b}
	for _, n := range nodes {
		err := n.do(func() error {
			errs := []error{n.dp.Detach(ctx, n.wire), n.dp.Detach(ctx, n.overlay)}
			// One by Detach, the others by Cleanup.
			errs = append(errs, n.dp.Detach(ctx, n.pods[0].ifindex), n.dp.Close())
			return errors.Join(append(errs, loader.Cleanup(n.bpffs))...)
		})
		if err != nil {
			return err
		}
		if left, err := filepath.Glob(filepath.Join(n.bpffs, "*")); err != nil || len(left) > 0 {
			return errors.Join(err, fmt.Errorf("still pinned: %v", left))
		}
		if _, err := os.Stat(n.bpffs); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("folder %s is still there: %v", n.bpffs, err)
		}
	}
	found, err := w.programs()
	if err != nil {
		return err
	}
	for h, ids := range found {
		if len(ids) > 0 {
			return fmt.Errorf("%v still has programs %v", h, ids)
		}
	}
	spaces := []*space{w.client.space, w.local.space, w.remote.space}
	if w.limited != nil {
		spaces = append(spaces, w.limited.space)
	}
	for _, s := range append(spaces, w.a.space, w.b.space) {
		if err := s.close(); err != nil {
			return err
		}
	}
	return nil
}
