package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// A version whose programs want a map of another layout gets a new one. It
// takes the old one's place among the pins right before the hooks get the new
// programs; until then a process that ends leaves all as it was. The old one is
// kept under aside/ until its last entries are over, too. What the next start
// finds there says how far this one came, see [Datapath.resume].

func asideDir(bpffs string) string { return filepath.Join(bpffs, "aside") }

// moved is a map that is exchanged for one of another layout.
type moved struct {
	name     string
	old, new *ebpf.Map
	copies   bool // the old one's entries are entries of the new one
	own      bool // only programs write it
	resumed  bool // programs of an earlier start may have written the new one
	begun    bool // the first copy is over
	pinned   bool // the new one is in its place
	full     bool // the new one did not take all
	seen     *keys
}

// ownedByPrograms: the agent does not fill it, and nobody else can.
func ownedByPrograms(ms *ebpf.MapSpec) bool {
	switch ms.Type {
	case ebpf.LRUHash, ebpf.PerCPUArray, ebpf.RingBuf:
		return true
	}
	return ms.Name == bpf.DpMapPwFlows
}

func (m *moved) close() error { return errors.Join(m.old.Close(), m.new.Close()) }

// findMoved opens the pinned maps whose layouts are not those of spec, and
// makes new ones.
func (d *Datapath) findMoved(spec *ebpf.CollectionSpec) error {
	for name, ms := range spec.Maps {
		if ms.Pinning != ebpf.PinByName || d.isMoved(name) {
			continue
		}
		if err := d.findIfMoved(name, ms); err != nil {
			return err
		}
	}
	// Counts of entries that are not there any more would pass for evictions.
	for _, m := range d.moved {
		if m.name == bpf.DpMapPwFlowsNew && !m.copies && !d.isMoved(bpf.DpMapPwChurn) {
			return d.renew(bpf.DpMapPwChurn, spec.Maps[bpf.DpMapPwChurn])
		}
	}
	return nil
}

func (d *Datapath) isMoved(name string) bool {
	return slices.ContainsFunc(d.moved, func(m *moved) bool { return m.name == name })
}

func (d *Datapath) findIfMoved(name string, ms *ebpf.MapSpec) error {
	old, err := openPin(filepath.Join(mapsDir(d.cfg.BPFFS), name))
	if err != nil || old == nil {
		return err
	}
	different := ms.Compatible(old)
	if err := old.Close(); err != nil || different == nil {
		return err
	}
	if err := d.renew(name, ms); err != nil {
		return err
	}
	m := d.moved[len(d.moved)-1]
	log := d.log.With("map", name, "difference", different)
	switch {
	case m.copies:
		log.Info("pinned map has another layout; its entries are carried over")
	case m.own:
		log.Warn("pinned map has another layout; starting with an empty one")
	default:
		log.Info("pinned map has another layout; programs of before go on with it until the new one is filled")
	}
	return nil
}

// renew makes a new map for a pinned one. What the agent writes is copied right
// away: it goes on from what it finds there.
func (d *Datapath) renew(name string, ms *ebpf.MapSpec) error {
	old, err := openPin(filepath.Join(mapsDir(d.cfg.BPFFS), name))
	if err != nil || old == nil {
		return err
	}
	ms = ms.Copy()
	ms.Pinning = ebpf.PinNone
	fresh, err := ebpf.NewMap(ms)
	if err != nil {
		return errors.Join(fmt.Errorf("make map %s in place of a pinned one of another layout: %w", name, err), old.Close())
	}
	m := &moved{name: name, old: old, new: fresh, copies: canCopy(old, fresh), own: ownedByPrograms(ms)}
	d.moved = append(d.moved, m)
	if !m.own {
		return d.copyFirst(m)
	}
	return nil
}

// openPin opens a pinned map; nil if there is none.
func openPin(path string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return m, nil
}

// replacements are the maps that programs are loaded with in place of those
// that are pinned.
func (d *Datapath) replacements() map[string]*ebpf.Map {
	out := make(map[string]*ebpf.Map)
	for _, m := range d.moved {
		if !m.pinned {
			out[m.name] = m.new
		}
	}
	return out
}

func (d *Datapath) copier(m *moved) *copier {
	c := &copier{from: m.old, to: m.new}
	if m.own {
		if m.seen == nil {
			m.seen = newKeys()
		}
		c.seen = m.seen // the second time, most of it
	}
	flow := m.name == bpf.DpMapPwFlows || m.name == bpf.DpMapPwFlowsNew
	if flow && m.old.ValueSize() == uint32(unsafe.Sizeof(maps.Flow{})) {
		// One that is being removed has no hash; nobody would remove the copy.
		at := unsafe.Offsetof(maps.Flow{}.KeyHash)
		c.skip = func(value []byte) bool { return binary.NativeEndian.Uint32(value[at:]) == 0 }
	}
	return c
}

// copyFirst copies all that there is, for programs that do not run yet.
func (d *Datapath) copyFirst(m *moved) error {
	if !m.copies || m.begun || m.resumed && !m.own {
		return nil
	}
	c := d.copier(m)
	c.missing = m.resumed
	if err := c.run(); err != nil {
		return err
	}
	m.begun, m.full = true, c.lost > 0
	if m.full {
		d.log.Warn("not all entries of a map find room in the one that takes its place",
			"map", m.name, "carried", c.written, "left", c.lost, "room", m.new.MaxEntries())
	}
	return nil
}

// copyRest copies what the programs of before have written since.
func (d *Datapath) copyRest(m *moved) error {
	if !m.copies || !m.own || m.full {
		return nil
	}
	c := d.copier(m)
	c.missing = true
	if err := c.run(); err != nil {
		return err
	}
	d.log.Info("entries carried over", "map", m.name, "last", c.written, "left", c.lost)
	return nil
}

// pin puts a new map in its place; the old one is put aside.
func (d *Datapath) pin(m *moved) error {
	if m.pinned {
		return nil
	}
	place := filepath.Join(mapsDir(d.cfg.BPFFS), m.name)
	aside := filepath.Join(asideDir(d.cfg.BPFFS), m.name)
	if err := os.MkdirAll(filepath.Dir(aside), 0o700); err != nil {
		return fmt.Errorf("put map %s aside: %w", m.name, err)
	}
	// Tried again, it may be there already.
	if err := os.Rename(place, aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("put map %s aside: %w", m.name, err)
	}
	d.step("aside " + m.name)
	if err := m.new.Pin(place); err != nil {
		return fmt.Errorf("pin map %s in place of one of another layout: %w", m.name, err)
	}
	m.pinned = true
	d.step("pinned " + m.name)
	return nil
}

// dropMoved forgets the maps that are put aside. The kernel frees them with the
// last program that uses them.
func (d *Datapath) dropMoved() error {
	var errs []error
	for _, m := range d.moved {
		if err := os.Remove(filepath.Join(asideDir(d.cfg.BPFFS), m.name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove map that is put aside: %w", err))
		}
		errs = append(errs, m.close())
		d.step("dropped " + m.name)
	}
	d.moved = nil
	if err := os.Remove(asideDir(d.cfg.BPFFS)); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		errs = append(errs, fmt.Errorf("remove folder of maps that are put aside: %w", err))
	}
	return errors.Join(errs...)
}

// resume sees to what a start that was ended has put aside. A new map that no
// program uses holds nothing that the old one does not: the old one takes its
// place again, and all begins anew. Else the exchange goes on.
func (d *Datapath) resume(spec *ebpf.CollectionSpec) error {
	entries, err := os.ReadDir(asideDir(d.cfg.BPFFS))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list maps that are put aside: %w", err)
	}
	used, err := mapsInUse()
	if err != nil {
		return fmt.Errorf("find out which maps are in use: %w", err)
	}
	for _, e := range entries {
		if err := d.resumeOne(e.Name(), spec.Maps[e.Name()], used); err != nil {
			return err
		}
	}
	if len(d.moved) == 0 {
		return d.dropMoved()
	}
	return nil
}

func (d *Datapath) resumeOne(name string, ms *ebpf.MapSpec, used map[ebpf.MapID]bool) error {
	place, aside := filepath.Join(mapsDir(d.cfg.BPFFS), name), filepath.Join(asideDir(d.cfg.BPFFS), name)
	now, err := openPin(place)
	if err != nil {
		return err
	}
	inUse := false
	if now != nil {
		info, err := now.Info()
		if err != nil {
			return errors.Join(fmt.Errorf("inspect map %s: %w", name, err), now.Close())
		}
		id, _ := info.ID()
		inUse = used[id]
	}
	if !inUse {
		if now != nil {
			err = now.Close()
		}
		if err = errors.Join(err, os.Rename(aside, place)); err != nil {
			return fmt.Errorf("put map %s back in its place: %w", name, err)
		}
		d.log.Info("an earlier start was ended before it could exchange a map; that of before is back", "map", name)
		return nil
	}
	old, err := openPin(aside)
	if err != nil {
		return errors.Join(err, now.Close())
	}
	m := &moved{name: name, old: old, new: now, copies: canCopy(old, now), resumed: true, pinned: true}
	m.own = ms != nil && ownedByPrograms(ms)
	d.log.Info("an earlier start was ended while it exchanged a map; going on", "map", name)
	if ms != nil && ms.Compatible(now) == nil {
		d.moved = append(d.moved, m)
		return nil
	}
	// Now it is to be exchanged for another one yet.
	return errors.Join(d.copyFirst(m), os.Remove(aside), m.close())
}

// mustHold: the hooks' programs look into maps that the new programs find
// empty.
func (d *Datapath) mustHold() bool {
	return len(d.attached)+len(d.sockets) > 0 && slices.ContainsFunc(d.moved, func(m *moved) bool {
		return !m.copies && !m.own && !m.resumed
	})
}

// Switch has the hooks go on with the programs of this process, where they had
// to wait for maps of another layout: when these are filled. Repeating it is no
// error.
func (d *Datapath) Switch(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.held {
		return nil
	}
	for _, a := range d.attached {
		alive, err := d.alive(a)
		if err != nil {
			return err
		}
		if alive {
			continue
		}
		d.forget(a)
		if _, err := netlink.LinkByIndex(a.key.ifindex); err == nil {
			if err := d.attachOne(a.key, a.device); err != nil {
				return err
			}
		}
	}
	if err := d.takeOver(); err != nil {
		return fmt.Errorf("go on with this version's programs: %w", err)
	}
	d.held = false
	d.log.Info("maps of another layout are filled; programs of this version are in force")
	return nil
}

// takeOver exchanges maps and programs. Flows that begin while some hooks have
// the one table and some the other are known to a part of them alone.
func (d *Datapath) takeOver() error {
	for _, m := range d.moved {
		if err := d.copyFirst(m); err != nil {
			return err
		}
	}
	d.step("copied")
	for _, m := range d.moved {
		if err := d.pin(m); err != nil {
			return err
		}
	}
	if err := d.replaceAll(); err != nil {
		return err
	}
	if len(d.moved) > 0 {
		if err := awaitPrograms(); err != nil {
			return err
		}
		d.step("replaced all")
		for _, m := range d.moved {
			if err := d.copyRest(m); err != nil {
				return err
			}
		}
		d.step("copied the rest")
		if err := d.dropMoved(); err != nil {
			return err
		}
	}
	return d.pinPrograms()
}
