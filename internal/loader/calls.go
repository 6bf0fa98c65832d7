package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
)

// The hooks jump to their slow path by a map, pw_calls, which the kernel
// empties when the last file or process that has it open is gone. So it is
// pinned, each load's own under its id: hooks of one version must never meet
// the slow path of another. It stays for as long as a program may use it,
// which is not until the next load: filters are replaced one by one, and
// packets that are on their way end with the program that they began with.

func callsDir(bpffs string) string { return filepath.Join(bpffs, "calls") }

// pinCalls pins the hooks' way to their slow path, unless it is.
func (d *Datapath) pinCalls(calls *ebpf.Map) error {
	info, err := calls.Info()
	if err != nil {
		return fmt.Errorf("inspect map %s: %w", calls, err)
	}
	id, ok := info.ID()
	if !ok {
		return fmt.Errorf("pin map %s: this kernel tells no ids of maps", calls)
	}
	path := filepath.Join(callsDir(d.cfg.BPFFS), strconv.FormatUint(uint64(id), 10))
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	// Should its pin be gone, the map still remembers it.
	if err := errors.Join(calls.Unpin(), os.MkdirAll(filepath.Dir(path), 0o700), calls.Pin(path)); err != nil {
		return fmt.Errorf("pin map %s at %s: %w", calls, path, err)
	}
	return nil
}

// dropCalls removes what pinCalls left for programs that are gone.
func (d *Datapath) dropCalls() error {
	entries, err := os.ReadDir(callsDir(d.cfg.BPFFS))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("list the slow paths of earlier loads: %w", err)
	}
	if len(entries) == 0 || len(entries) == 1 && d.objs.PwCalls != nil {
		return nil
	}
	used, err := mapsInUse()
	if err != nil {
		return fmt.Errorf("find out which slow paths of earlier loads are in use: %w", err)
	}
	var unused []string
	for _, e := range entries {
		id, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			continue // not ours
		}
		if !used[ebpf.MapID(id)] {
			unused = append(unused, filepath.Join(callsDir(d.cfg.BPFFS), e.Name()))
		}
	}
	if len(unused) == 0 {
		return nil
	}
	if err := awaitPrograms(); err != nil {
		return fmt.Errorf("remove the slow paths of earlier loads: %w", err)
	}
	var errs []error
	for _, path := range unused {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// called are the programs in pw_calls. Some go on from there by the same map: a
// use of it that lasts as long as the map, and says nothing of hooks.
var called = [...]string{"slow", "fragment", "from_ipip"}

// mapsInUse returns the maps of all loaded programs, whosever they are, but for
// those of [called].
func mapsInUse() (map[ebpf.MapID]bool, error) {
	used := make(map[ebpf.MapID]bool)
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return used, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list programs: %w", err)
		}
		id = next
		ids, err := mapsOf(id)
		if errors.Is(err, os.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("maps of program %d: %w", id, err)
		}
		for _, m := range ids {
			used[m] = true
		}
	}
}

func mapsOf(id ebpf.ProgramID) ([]ebpf.MapID, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	if slices.Contains(called[:], info.Name) {
		return nil, nil
	}
	ids, _ := info.MapIDs()
	return ids, nil
}

// awaitPrograms returns when every run of a program that had begun is over.
// The kernel promises this of a change to a map of maps (see
// maybe_wait_bpf_programs in kernel/bpf/syscall.c).
func awaitPrograms() error {
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	defer m.Close()
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner})
	if err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	defer outer.Close()
	if err := outer.Put(uint32(0), m); err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}
