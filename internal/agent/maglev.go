package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
)

// maglevChunks is the map behind; [maps.Map] is one.
type maglevChunks interface {
	reconcile.ArrayStore[maps.MaglevKey, maps.Maglev]
	MaxEntries() int
}

// maglevTable stands for a Maglev table of which only the map holds the
// entries: those of ten thousand services are more than all else that is known
// of them.
type maglevTable struct {
	chunks uint32
	sum    uint64 // of what is in them
}

// maglevStore is pw_maglev by whole tables, under the numbers of their sets.
// Entries to be written wait in pending; a table is written whole or not at
// all.
type maglevStore struct {
	maglevChunks
	seed    maphash.Seed
	pending map[uint32][]maps.Maglev
	waiting int               // chunks in pending
	held    map[uint32]chunks // in the map, by set
	total   int               // of them
}

// chunks of a table: how many, and one more than the largest number.
type chunks struct{ n, end uint32 }

func newMaglevStore(s maglevChunks) *maglevStore {
	return &maglevStore{
		maglevChunks: s, seed: maphash.MakeSeed(),
		pending: make(map[uint32][]maps.Maglev),
		held:    make(map[uint32]chunks),
	}
}

// table is what stands for the entries of a table.
func (s *maglevStore) table(entries []maps.Maglev) (t maglevTable) {
	for i := range entries {
		t.add(s, uint32(i), &entries[i])
	}
	return t
}

// prepare takes the entries of a table that is to be written.
func (s *maglevStore) prepare(set uint32, entries []maps.Maglev) {
	s.forget(set)
	s.pending[set] = entries
	s.waiting += len(entries)
}

// forget drops the entries of a table that is not wanted any more.
func (s *maglevStore) forget(set uint32) {
	s.waiting -= len(s.pending[set])
	delete(s.pending, set)
}

// fits says whether there is room for one more table of a size, which costs
// much to be computed and found without room afterwards.
func (s *maglevStore) fits(size uint32) bool {
	n := (int(size) + len(maps.Maglev{}.Slot) - 1) / len(maps.Maglev{}.Slot)
	return s.total+s.waiting+n <= s.MaxEntries()
}

// noTableError says that a Maglev table of this size found no room. Backends
// are chosen evenly then.
type noTableError struct {
	size uint32
	err  error
}

func (e noTableError) Error() string {
	return fmt.Sprintf("no Maglev table of %d entries, other nodes may choose other backends: %v", e.size, e.err)
}

func (e noTableError) Unwrap() error { return e.err }

// full is the error about a table that does not fit.
func (s *maglevStore) full(size uint32) error {
	return noTableError{size, fmt.Errorf("%s: %w (%d pieces of %d); it is made when others go", s.Name(), maps.ErrFull, s.MaxEntries(), len(maps.Maglev{}.Slot))}
}

// onlyNoTable is the smallest size that found no room if err is about nothing
// else; 0 if it is.
func onlyNoTable(err error) (size uint32) {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			n := onlyNoTable(e)
			if n == 0 {
				return 0
			}
			if size == 0 || n < size {
				size = n
			}
		}
		return size
	}
	var e noTableError
	if errors.As(err, &e) {
		return e.size
	}
	return 0
}

// add adds a chunk; the order makes no difference.
func (t *maglevTable) add(s *maglevStore, chunk uint32, v *maps.Maglev) {
	var buf [4 + 2*len(v.Slot)]byte
	binary.NativeEndian.PutUint32(buf[:], chunk)
	for i, slot := range v.Slot {
		binary.NativeEndian.PutUint16(buf[4+2*i:], slot)
	}
	t.chunks++
	t.sum += maphash.Bytes(s.seed, buf[:])
}

// Dump implements [reconcile.Store].
func (s *maglevStore) Dump() (map[uint32]maglevTable, error) {
	out := make(map[uint32]maglevTable)
	held, total := make(map[uint32]chunks), 0
	err := s.Each(func(k maps.MaglevKey, v maps.Maglev) error {
		t := out[k.Set]
		t.add(s, k.Chunk, &v)
		out[k.Set] = t
		held[k.Set] = chunks{held[k.Set].n + 1, max(held[k.Set].end, k.Chunk+1)}
		total++
		return nil
	})
	if err != nil {
		return nil, err
	}
	s.held, s.total = held, total
	return out, nil
}

// tablesAtOnce is how many tables are written in one go.
const tablesAtOnce = 64

// TryPutAll implements [reconcile.Store].
func (s *maglevStore) TryPutAll(tables map[uint32]maglevTable) map[uint32]error {
	errs := make(map[uint32]error)
	var sets []uint32
	flush := func() {
		s.put(sets, errs)
		sets = sets[:0]
	}
	for set := range tables {
		if sets = append(sets, set); len(sets) == tablesAtOnce {
			flush()
		}
	}
	flush()
	return errs
}

func (s *maglevStore) put(sets []uint32, errs map[uint32]error) {
	entries := make(map[maps.MaglevKey]maps.Maglev)
	for _, set := range sets {
		for i, v := range s.pending[set] {
			entries[maps.MaglevKey{Set: set, Chunk: uint32(i)}] = v
		}
	}
	for k, err := range s.maglevChunks.TryPutAll(entries) {
		errs[k.Set] = err // one says it all
	}
	for _, set := range sets {
		n := uint32(len(s.pending[set]))
		s.total += int(n) - int(s.held[set].n)
		s.held[set] = chunks{n, n}
		if errs[set] != nil {
			errs[set] = errors.Join(errs[set], s.remove(set))
			continue
		}
		s.forget(set)
	}
}

// TryDeleteAll implements [reconcile.Store].
func (s *maglevStore) TryDeleteAll(sets []uint32) map[uint32]error {
	errs := make(map[uint32]error)
	for _, set := range sets {
		s.forget(set)
		if err := s.remove(set); err != nil {
			errs[set] = err
		}
	}
	return errs
}

// remove removes the chunks of a set from the map.
func (s *maglevStore) remove(set uint32) error {
	keys := make([]maps.MaglevKey, s.held[set].end)
	for i := range keys {
		keys[i] = maps.MaglevKey{Set: set, Chunk: uint32(i)}
	}
	for _, err := range s.maglevChunks.TryDeleteAll(keys) {
		return err // the table is tried again as a whole
	}
	s.total -= int(s.held[set].n)
	delete(s.held, set)
	return nil
}
