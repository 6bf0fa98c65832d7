package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/maps"
)

// load loads and attaches both nodes' datapaths, fills their maps, and runs
// the program that is never attached.
func (w *world) load(ctx context.Context) error {
	for _, n := range []*node{w.a, w.b} {
		if err := n.do(func() error { return n.start(ctx) }); err != nil {
			return err
		}
		if !w.kernel.hasNetfilter() {
			continue
		}
		if err := n.guarded(); err != nil {
			return err
		}
	}
	if err := w.fill(); err != nil {
		return err
	}
	if removed, err := w.a.dp.Sweep(make([]maps.FlowKey, 3)); err != nil || removed != 0 {
		return errors.Join(err, fmt.Errorf("program sweep removed %d flows from an empty table", removed))
	}
	if err := mapsHaveBTF(filepath.Join(w.a.bpffs, "maps")); err != nil {
		return err
	}
	return w.serve(ctx)
}

func mapsHaveBTF(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, e.Name()), nil)
		if err != nil {
			return fmt.Errorf("map %s: %w", e.Name(), err)
		}
		if m.Type() == ebpf.RingBuf {
			m.Close()
			continue // it has neither keys nor values
		}
		info, err := m.Info()
		m.Close()
		if err != nil {
			return fmt.Errorf("map %s: %w", e.Name(), err)
		}
		if _, ok := info.BTFID(); !ok {
			return fmt.Errorf("map %s has no BTF", e.Name())
		}
	}
	return nil
}
