package loader

import (
	"errors"
	"fmt"
	"hash/maphash"
	"reflect"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// copyBatch is how many entries one system call moves.
const copyBatch = 4096

// canCopy says whether the entries of one map are entries of the other as they
// are. Counters of each CPU and rings are not among those that are copied.
func canCopy(from, to *ebpf.Map) bool {
	kind := func(m *ebpf.Map) ebpf.MapType {
		if m.Type() == ebpf.LRUHash {
			return ebpf.Hash
		}
		return m.Type()
	}
	switch kind(from) {
	case ebpf.Hash, ebpf.Array, ebpf.LPMTrie:
	default:
		return false
	}
	return kind(from) == kind(to) && from.KeySize() == to.KeySize() && from.ValueSize() == to.ValueSize()
}

// copied says what became of a map's entries.
type copied struct {
	written int
	lost    int // found no room
}

// copier copies entries between maps that [canCopy] allows it for.
type copier struct {
	from, to *ebpf.Map
	// missing: entries that are there already stay, for programs write them.
	missing bool
	skip    func(value []byte) bool // entries that are none; nil: there are no such
	seen    *keys                   // leave out those that are in it, and add the others; nil: none
	copied
}

// keys is a set of keys, by hashes that are long enough to tell them apart.
type keys struct {
	seed maphash.Seed
	set  map[uint64]struct{}
}

func newKeys() *keys { return &keys{seed: maphash.MakeSeed(), set: make(map[uint64]struct{})} }

// add reports whether the key is new to the set.
func (k *keys) add(key []byte) bool {
	h := maphash.Bytes(k.seed, key)
	_, known := k.set[h]
	k.set[h] = struct{}{}
	return !known
}

// run goes through the whole map once, however much is written meanwhile.
func (c *copier) run() error {
	var err error
	if c.from.Type() == ebpf.LPMTrie {
		err = c.oneByOne() // their batches came late
	} else {
		err = c.inBatches()
	}
	if err != nil {
		return fmt.Errorf("copy entries of %v: %w", c.from, err)
	}
	// The kernel makes room in these for whatever comes.
	if c.to.Type() == ebpf.LRUHash {
		over := max(c.written-int(c.to.MaxEntries()), 0)
		c.written, c.lost = c.written-over, c.lost+over
	}
	return nil
}

func (c *copier) oneByOne() error {
	var key, value []byte
	it := c.from.Iterate()
	for it.Next(&key, &value) {
		if err := c.put(key, value); err != nil {
			return err
		}
	}
	return it.Err()
}

// column is room for the keys, or values, of a batch: as the map's methods want
// them, and as bytes.
type column struct {
	rows  reflect.Value
	bytes []byte
	size  int
}

func newColumn(n, size int) column {
	rows := reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(size, reflect.TypeFor[byte]())), n, n)
	return column{rows: rows, bytes: unsafe.Slice((*byte)(rows.UnsafePointer()), n*size), size: size}
}

func (c column) part(i, j int) any { return c.rows.Slice(i, j).Interface() }
func (c column) row(i int) []byte  { return c.bytes[i*c.size : (i+1)*c.size] }
func (c column) move(to, from int) { copy(c.row(to), c.row(from)) }
func (c column) all() any          { return c.rows.Interface() }
func (c *copier) columns(n int) (keys, values column) {
	return newColumn(n, int(c.from.KeySize())), newColumn(n, int(c.from.ValueSize()))
}

func (c *copier) inBatches() error {
	size := copyBatch
	keys, values := c.columns(size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := c.from.BatchLookup(&cursor, keys.all(), values.all(), nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist) // with data, all the same
		if errors.Is(err, unix.ENOSPC) && size < int(c.from.MaxEntries()) {
			// One bucket holds more than the buffers do.
			size *= 4
			keys, values = c.columns(size)
			continue
		}
		if err != nil && !last {
			return err
		}
		if err := c.write(keys, values, n); err != nil {
			return err
		}
		if last || n == 0 {
			return nil
		}
	}
}

// write writes n entries.
func (c *copier) write(keys, values column, n int) error {
	kept := 0
	for i := range n {
		if c.skip != nil && c.skip(values.row(i)) || c.seen != nil && !c.seen.add(keys.row(i)) {
			continue
		}
		if kept != i {
			keys.move(kept, i)
			values.move(kept, i)
		}
		kept++
	}
	n = kept
	for i := 0; i < n; {
		// Batches know no BPF_NOEXIST, and the map that is full takes none.
		if !c.missing && c.lost == 0 {
			done, err := c.to.BatchUpdate(keys.part(i, n), values.part(i, n), nil)
			if err == nil {
				done = n - i
			}
			i += done
			c.written += done
			if i >= n {
				return nil
			}
		}
		// What a batch stops at says by itself what is wrong with it.
		if err := c.put(keys.row(i), values.row(i)); err != nil {
			return err
		}
		i++
	}
	return nil
}

// put writes one entry. That there is no room for it is noted, and no error.
func (c *copier) put(key, value []byte) error {
	flags := ebpf.UpdateAny
	if c.missing {
		flags = ebpf.UpdateNoExist
	}
	err := c.to.Update(key, value, flags)
	switch {
	case err == nil:
		c.written++
	case errors.Is(err, ebpf.ErrKeyExist):
	case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENOSPC):
		c.lost++ // of an array: those that it ends before
	default:
		return fmt.Errorf("write key %x: %w", key, err)
	}
	return nil
}
