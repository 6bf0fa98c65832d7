package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ErrFull is wrapped by errors about a map that has no room for a key.
var ErrFull = errors.New("map is full")

// batchSize is how many entries one system call moves.
const batchSize = 1024

// Map is a typed view of one kernel map. Errors name the map and the key.
// A Map may be copied; it does not own the file descriptor unless it comes
// from [OpenPinned].
type Map[K comparable, V any] struct {
	m     *ebpf.Map
	name  string
	order func(a, b K) int // that entries are written in; nil: any
}

// Wrap gives m its Go types. The sizes of K and V must be those of m: they
// are, for the types of this package.
func Wrap[K comparable, V any](m *ebpf.Map, name string) Map[K, V] {
	return Map[K, V]{m: m, name: name}
}

// ordered is a view that writes entries in an order: when a map has no room
// for all of them, which are in is then no matter of chance.
func (m Map[K, V]) ordered(compare func(a, b K) int) Map[K, V] {
	m.order = compare
	return m
}

// Name is the name that bpftool shows.
func (m Map[K, V]) Name() string { return m.name }

// MaxEntries is the size the map was created with.
func (m Map[K, V]) MaxEntries() int { return int(m.m.MaxEntries()) }

// Get reads one entry; false means that there is none.
func (m Map[K, V]) Get(k K) (V, bool, error) {
	var v V
	err := m.m.Lookup(&k, &v)
	switch {
	case err == nil:
		return v, true, nil
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return v, false, nil
	}
	return v, false, m.keyErr("read", k, err)
}

// Put writes one entry, new or not.
func (m Map[K, V]) Put(k K, v V) error {
	if err := m.m.Update(&k, &v, ebpf.UpdateAny); err != nil {
		return m.keyErr("write", k, err)
	}
	return nil
}

// Delete removes one entry. That it is absent already is no error.
func (m Map[K, V]) Delete(k K) error {
	if err := m.m.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return m.keyErr("delete", k, err)
	}
	return nil
}

// PutAll writes every entry. Those that fail do not stop the others; the
// error joins what happened to each.
func (m Map[K, V]) PutAll(entries map[K]V) error {
	return joined(m.TryPutAll(entries))
}

// TryPutAll is [Map.PutAll] with the errors by key; nil when all went well.
func (m Map[K, V]) TryPutAll(entries map[K]V) map[K]error {
	keys := make([]K, 0, len(entries))
	for k := range entries {
		keys = append(keys, k)
	}
	if m.order != nil {
		slices.SortFunc(keys, m.order)
	}
	vals := make([]V, 0, len(entries))
	for _, k := range keys {
		vals = append(vals, entries[k])
	}
	return eachBatch(len(keys),
		func(i, j int) (int, error) {
			return m.m.BatchUpdate(keys[i:j], vals[i:j], nil)
		},
		func(i int) (K, error) { return keys[i], m.Put(keys[i], vals[i]) })
}

// DeleteAll removes every key, absent ones included; one that fails does not
// stop the others.
func (m Map[K, V]) DeleteAll(keys []K) error {
	return joined(m.TryDeleteAll(keys))
}

// TryDeleteAll is [Map.DeleteAll] with the errors by key.
func (m Map[K, V]) TryDeleteAll(keys []K) map[K]error {
	return eachBatch(len(keys),
		func(i, j int) (int, error) { return m.m.BatchDelete(keys[i:j], nil) },
		func(i int) (K, error) { return keys[i], m.Delete(keys[i]) })
}

// eachBatch runs batch over 0..n in pieces. Where a batch stops, single does
// that one entry (which says what is wrong with it, or that nothing is) and
// batches go on behind it; kernels that have no batch operation for the map
// get single for everything.
func eachBatch[K comparable](n int, batch func(i, j int) (int, error), single func(i int) (K, error)) map[K]error {
	var errs map[K]error
	one := func(i int) {
		if k, err := single(i); err != nil {
			if errs == nil {
				errs = make(map[K]error)
			}
			errs[k] = err
		}
	}
	batches := n > 1
	for i := 0; i < n; {
		if batches {
			done, err := batch(i, min(i+batchSize, n))
			i += max(done, 0)
			if err == nil || i >= n {
				continue
			}
			batches = !batchUnsupported(err)
		}
		one(i)
		i++
	}
	return errs
}

func batchUnsupported(err error) bool {
	return errors.Is(err, ebpf.ErrNotSupported) ||
		errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)
}

func joined[K comparable](errs map[K]error) error {
	list := make([]error, 0, len(errs))
	for _, err := range errs {
		list = append(list, err)
	}
	return errors.Join(list...)
}

// Dump reads the whole map. What is written meanwhile may or may not be in it.
func (m Map[K, V]) Dump() (map[K]V, error) {
	out := make(map[K]V)
	err := m.Each(func(k K, v V) error {
		out[k] = v
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Each calls fn with every entry, in no order, until fn returns an error. It
// holds a few thousand entries in memory at most; fn may delete entries.
func (m Map[K, V]) Each(fn func(K, V) error) error {
	if m.m.Type() != ebpf.LPMTrie {
		started, err := m.eachBatched(fn)
		if err == nil || started || !batchUnsupported(err) {
			return err
		}
	}
	var (
		k K
		v V
	)
	it := m.m.Iterate()
	for it.Next(&k, &v) {
		if err := fn(k, v); err != nil {
			return err
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("%s: reading all entries: %w", m.name, err)
	}
	return nil
}

// eachBatched reports whether fn was called, so that the caller knows
// whether another way may still be tried.
func (m Map[K, V]) eachBatched(fn func(K, V) error) (started bool, err error) {
	size := batchSize
	keys, vals := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.m.BatchLookup(&cursor, keys, vals, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist) // with data, all the same
		if errors.Is(err, unix.ENOSPC) && size < m.MaxEntries()+batchSize {
			// One bucket holds more than the buffers do.
			size *= 4
			keys, vals = make([]K, size), make([]V, size)
			continue
		}
		if err != nil && !last {
			return started, fmt.Errorf("%s: reading all entries: %w", m.name, err)
		}
		for i := range n {
			started = true
			if err := fn(keys[i], vals[i]); err != nil {
				return started, err
			}
		}
		if last || n == 0 {
			return started, nil
		}
	}
}

// Close closes the file descriptor; the map lives on while it is pinned.
func (m Map[K, V]) Close() error {
	if m.m == nil {
		return nil
	}
	return m.m.Close()
}

func (m Map[K, V]) keyErr(verb string, k K, err error) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%s: %s %s: %w (%d entries); what did not fit is tried again when entries go",
			m.name, verb, KeyString(k), ErrFull, m.MaxEntries())
	}
	return fmt.Errorf("%s: %s %s: %w", m.name, verb, KeyString(k), err)
}

// KeyString prints a key of any map the way a person would write it.
func KeyString(key any) string {
	switch k := key.(type) {
	case Addr:
		return FromAddr(k).String()
	case PrefixKey:
		return FromPrefix(k).String()
	case ServiceKey:
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(FromAddr(k.Addr), k.Port), ProtoName(k.Proto))
	case BackendKey:
		return fmt.Sprintf("set %d slot %d", k.Set, k.Slot)
	case BackendStateKey:
		return fmt.Sprintf("%s of service %d", netip.AddrPortFrom(FromAddr(k.Addr), k.Port), k.Service)
	case MaglevKey:
		return fmt.Sprintf("set %d chunk %d", k.Set, k.Chunk)
	case SrcRangeKey:
		id, p := FromSrcRange(k)
		return fmt.Sprintf("%s of service %d", FromPrefix(p), id)
	case FlowKey:
		return fmt.Sprintf("%s -> %s %s via %d", netip.AddrPortFrom(FromAddr(k.Src), k.Sport),
			netip.AddrPortFrom(FromAddr(k.Dst), k.Dport), ProtoName(k.Proto), k.Via)
	case PolicyKey:
		return fmt.Sprintf("table %d identity %d %s %s %d", k.Table, k.Identity,
			PolicyKindName(k.Kind), ProtoName(k.Proto), k.Port)
	}
	return fmt.Sprint(key)
}

// ProtoName names an IP protocol: "tcp", or its number.
func ProtoName(proto uint8) string {
	switch proto {
	case 0:
		return "any"
	case 1:
		return "icmp"
	case ProtoTCP:
		return "tcp"
	case ProtoUDP:
		return "udp"
	case 58:
		return "icmpv6"
	case ProtoSCTP:
		return "sctp"
	}
	return strings.ToLower(fmt.Sprintf("proto%d", proto))
}
