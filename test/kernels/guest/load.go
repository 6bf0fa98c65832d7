package main

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
)

// loadAll loads every program and map on its own account, unpinned, tells
// what the verifier made of them and runs the program that is never attached.
func loadAll() error {
	spec, err := loader.Spec(loader.Config{OverlayIfindex: 1})
	if err != nil {
		return err
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			return fmt.Errorf("%w\n%-40v", err, ve)
		}
		return err
	}
	defer coll.Close()
	for name, p := range coll.Programs {
		info, err := p.Info()
		if err != nil {
			return fmt.Errorf("program %s: %w", name, err)
		}
		insns, ok := info.VerifiedInstructions()
		if !ok {
			return fmt.Errorf("program %s: the kernel does not tell how much it verified", name)
		}
		logf("program %s: %d instructions verified", name, insns)
	}
	for name, m := range coll.Maps {
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
		if _, ok := info.BTFID(); !ok && name[0] != '.' {
			return fmt.Errorf("map %s has no BTF", name)
		}
	}
	return sweepNothing(coll.Programs[bpf.DpProgSweep])
}

func sweepNothing(p *ebpf.Program) error {
	if p == nil {
		return errors.New("no program sweep")
	}
	frame := make([]byte, 14+40)
	removed, err := p.Run(&ebpf.RunOptions{Data: frame})
	if err != nil {
		return fmt.Errorf("run program sweep: %w", err)
	}
	if removed != 0 {
		return fmt.Errorf("program sweep removed %d flows from an empty table", removed)
	}
	return nil
}
