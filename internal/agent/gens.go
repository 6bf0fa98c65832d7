package agent

import (
	"errors"
	"time"
)

const (
	// slotConstant never moves: what depends on nothing refers to it.
	slotConstant = 0
	// slotShared is what everything gets that finds no slot of its own.
	slotShared = 1
	slotFirst  = 2

	// slotRest is how long a freed slot is left alone. Its generation has
	// moved, so that nothing refers to it wrongly even sooner; the rest makes
	// what one sees in the maps easier to follow.
	slotRest = time.Minute
)

// genStore is pw_gens.
type genStore interface {
	Each(func(slot, gen uint32) error) error
	TryPutAll(map[uint32]uint32) map[uint32]error
	MaxEntries() int
}

// generations hands out slots of pw_gens and moves their generations. The
// agent is the only writer of the map.
type generations struct {
	store genStore
	now   func() time.Time
	gens  map[uint32]uint32 // what the map holds, zeros left out
	used  map[uint32]struct{}
	next  uint32 // slots from here on were never used in this run
	freed []freedSlot
	moved map[uint32]struct{} // to be incremented by flush
	total uint64              // increments in all
}

type freedSlot struct {
	slot uint32
	at   time.Time
}

func newGenerations(store genStore, now func() time.Time) (*generations, error) {
	g := &generations{
		store: store, now: now, next: slotFirst,
		gens:  make(map[uint32]uint32),
		used:  make(map[uint32]struct{}),
		moved: make(map[uint32]struct{}),
	}
	err := store.Each(func(slot, gen uint32) error {
		if gen != 0 {
			g.gens[slot] = gen
		}
		return nil
	})
	return g, err
}

// adopt takes over a slot that an earlier run gave out. It refuses one that
// is out of range or has another owner already: the caller allocates a new
// one then.
func (g *generations) adopt(slot uint32) bool {
	if slot == slotShared {
		return true
	}
	if slot < slotFirst || int(slot) >= g.store.MaxEntries() {
		return false
	}
	if _, taken := g.used[slot]; taken {
		return false
	}
	g.used[slot] = struct{}{}
	return true
}

// alloc gives out a slot. With none left it is the shared one.
func (g *generations) alloc() uint32 {
	for ; int(g.next) < g.store.MaxEntries(); g.next++ {
		if _, taken := g.used[g.next]; !taken {
			slot := g.next
			g.next++
			g.used[slot] = struct{}{}
			return slot
		}
	}
	if len(g.freed) > 0 && g.now().Sub(g.freed[0].at) >= slotRest {
		slot := g.freed[0].slot
		g.freed = g.freed[1:]
		g.used[slot] = struct{}{}
		return slot
	}
	return slotShared
}

// release takes a slot back and moves its generation, so that what refers to
// it is decided anew.
func (g *generations) release(slot uint32) {
	g.bump(slot)
	if slot < slotFirst {
		return
	}
	// It stays in used until alloc comes by it again: next has passed it.
	if _, ok := g.used[slot]; ok {
		delete(g.used, slot)
		if slot < g.next {
			g.freed = append(g.freed, freedSlot{slot, g.now()})
		}
	}
}

// bump moves the generation of a slot at the next flush.
func (g *generations) bump(slot uint32) {
	if slot != slotConstant && int(slot) < g.store.MaxEntries() {
		g.moved[slot] = struct{}{}
	}
}

// flush writes the generations that moved. Those that cannot be written stay
// to be written by the next flush.
func (g *generations) flush() error {
	if len(g.moved) == 0 {
		return nil
	}
	puts := make(map[uint32]uint32, len(g.moved))
	for slot := range g.moved {
		puts[slot] = g.gens[slot] + 1
	}
	failed := g.store.TryPutAll(puts)
	var errs []error
	for slot, gen := range puts {
		if err := failed[slot]; err != nil {
			errs = append(errs, err)
			continue
		}
		g.gens[slot] = gen
		delete(g.moved, slot)
		g.total++
	}
	return errors.Join(errs...)
}
