package reconcile

import (
	"errors"
	"fmt"
	"iter"
	"sort"
	"time"

	gomaps "maps"

	"github.com/podweir/podweir/internal/maps"
)

const (
	backoffMin = time.Second
	backoffMax = time.Minute
)

// Store is the map behind a table; [maps.Map] is one.
type Store[K comparable, V any] interface {
	Name() string
	Dump() (map[K]V, error)
	TryPutAll(map[K]V) map[K]error
	TryDeleteAll([]K) map[K]error
}

// Table is the desired and the actual state of one map. Where the two are the
// same, which is nearly everywhere, the entry is kept once.
type Table[K comparable, V comparable] struct {
	store  Store[K, V]
	actual map[K]V
	dirty  map[K]want[V] // where the desired state may be another
	failed map[K]failure
	now    func() time.Time
}

// want is a desired entry; not there: none is.
type want[V comparable] struct {
	v     V
	there bool
}

type failure struct {
	err   error
	delay time.Duration
	next  time.Time
}

// Result says what a phase did.
type Result[K comparable] struct {
	Added   []K // were not in the map before
	Changed []K // were, with another value
	Removed []K
	Errs    map[K]error // of the keys tried in this phase
}

// errorsShown is how many errors of one phase are spelled out.
const errorsShown = 5

// Err joins the errors of the phase; of many, the first few and their number.
func (r Result[K]) Err() error {
	list := make([]error, 0, len(r.Errs))
	for _, err := range r.Errs {
		list = append(list, err)
	}
	if n := len(list); n > errorsShown {
		sort.Slice(list, func(i, j int) bool { return list[i].Error() < list[j].Error() })
		list = append(list[:errorsShown], fmt.Errorf("and %d more entries", n-errorsShown))
	}
	return errors.Join(list...)
}

// Touched are the keys whose entry is now another one than before.
func (r Result[K]) Touched() []K {
	out := make([]K, 0, len(r.Added)+len(r.Changed)+len(r.Removed))
	out = append(out, r.Added...)
	out = append(out, r.Changed...)
	return append(out, r.Removed...)
}

// New makes a table over an empty shadow; call [Table.Load] to read the map.
func New[K comparable, V comparable](store Store[K, V]) *Table[K, V] {
	return &Table[K, V]{
		store:  store,
		actual: make(map[K]V),
		dirty:  make(map[K]want[V]),
		failed: make(map[K]failure),
		now:    time.Now,
	}
}

// Load reads the map into the shadow. What it finds there and nobody has
// asked for yet is removed by the next [Table.Prune].
func (t *Table[K, V]) Load() error {
	actual, err := t.store.Dump()
	if err != nil {
		return fmt.Errorf("adopt what is in the map: %w", err)
	}
	for k, v := range t.actual { // desired so far
		if _, ok := t.dirty[k]; !ok {
			t.dirty[k] = want[V]{v, true}
		}
	}
	t.actual = actual
	for k := range actual {
		if _, ok := t.dirty[k]; !ok {
			t.dirty[k] = want[V]{}
		}
	}
	return nil
}

// Desire replaces the whole desired state.
func (t *Table[K, V]) Desire(desired map[K]V) {
	for k, v := range desired {
		if old, ok := t.Desired(k); !ok || old != v {
			t.Set(k, v)
			delete(t.failed, k) // another value: worth a try at once
		}
	}
	for k := range t.actual {
		if _, ok := desired[k]; !ok {
			t.Delete(k)
		}
	}
	for k := range t.dirty {
		if _, ok := desired[k]; !ok {
			t.Delete(k)
		}
	}
}

// Set desires one entry, without looking at the others.
func (t *Table[K, V]) Set(k K, v V) {
	if old, ok := t.Desired(k); ok && old != v {
		delete(t.failed, k)
	}
	t.touch(k, want[V]{v, true})
}

func (t *Table[K, V]) touch(k K, w want[V]) { t.dirty[k] = w }

// settled is called when keys were taken from those marked. A map that was
// large once takes its memory, and is slow to walk, when it is nearly empty: it
// begins anew when it is empty.
func (t *Table[K, V]) settled() {
	if len(t.dirty) == 0 {
		t.dirty = make(map[K]want[V])
	}
}

// Delete desires that an entry is gone.
func (t *Table[K, V]) Delete(k K) { t.touch(k, want[V]{}) }

// Desired is what is asked for under a key.
func (t *Table[K, V]) Desired(k K) (V, bool) {
	if w, ok := t.dirty[k]; ok {
		return w.v, w.there
	}
	return t.Actual(k)
}

// Actual is what the map holds under a key.
func (t *Table[K, V]) Actual(k K) (V, bool) {
	v, ok := t.actual[k]
	return v, ok
}

// Err says why a key is not as desired; nil when it is, or when nobody tried
// yet.
func (t *Table[K, V]) Err(k K) error { return t.failed[k].err }

// All is the shadow: read it, never change it.
func (t *Table[K, V]) All() map[K]V { return t.actual }

// Unsettled are the keys whose desired state may be another than the actual
// one.
func (t *Table[K, V]) Unsettled() iter.Seq[K] { return gomaps.Keys(t.dirty) }

// Len is how many entries the map holds.
func (t *Table[K, V]) Len() int { return len(t.actual) }

// Upsert writes what is missing or differs.
func (t *Table[K, V]) Upsert() Result[K] {
	return t.UpsertIf(func(K, V) bool { return true })
}

// UpsertIf is Upsert for the entries that are to be written now.
func (t *Table[K, V]) UpsertIf(is func(K, V) bool) Result[K] {
	defer t.settled()
	now := t.now()
	var puts map[K]V
	for k, w := range t.dirty {
		v := w.v
		if !w.there {
			continue
		}
		if old, ok := t.actual[k]; ok && old == v {
			delete(t.dirty, k)
			delete(t.failed, k)
			continue
		}
		if f, ok := t.failed[k]; ok && now.Before(f.next) || !is(k, v) {
			continue
		}
		if puts == nil {
			puts = make(map[K]V)
		}
		puts[k] = v
	}
	var r Result[K]
	if len(puts) == 0 {
		return r
	}
	r.Errs = t.store.TryPutAll(puts)
	for k, v := range puts {
		if err := r.Errs[k]; err != nil {
			t.fail(k, err, now)
			continue
		}
		if _, ok := t.actual[k]; ok {
			r.Changed = append(r.Changed, k)
		} else {
			r.Added = append(r.Added, k)
		}
		t.actual[k] = v
		delete(t.dirty, k)
		delete(t.failed, k)
	}
	return r
}

// Prune removes what is there and not desired.
func (t *Table[K, V]) Prune() Result[K] {
	return t.PruneIf(func(K, V) bool { return true })
}

// PruneIf is Prune for the entries that are to be removed now.
func (t *Table[K, V]) PruneIf(is func(K, V) bool) Result[K] {
	defer t.settled()
	now := t.now()
	var keys []K
	for k, w := range t.dirty {
		if w.there {
			continue
		}
		v, ok := t.actual[k]
		if !ok {
			delete(t.dirty, k)
			delete(t.failed, k)
			continue
		}
		if f, ok := t.failed[k]; ok && now.Before(f.next) || !is(k, v) {
			continue
		}
		keys = append(keys, k)
	}
	var r Result[K]
	if len(keys) == 0 {
		return r
	}
	r.Errs = t.store.TryDeleteAll(keys)
	for _, k := range keys {
		if err := r.Errs[k]; err != nil {
			t.fail(k, err, now)
			continue
		}
		r.Removed = append(r.Removed, k)
		delete(t.actual, k)
		delete(t.dirty, k)
		delete(t.failed, k)
	}
	if len(r.Removed) > 0 {
		for k, f := range t.failed { // there is room again
			if errors.Is(f.err, maps.ErrFull) {
				f.next = now
				t.failed[k] = f
			}
		}
	}
	return r
}

// Apply is Desire, Upsert and Prune in one.
func (t *Table[K, V]) Apply(desired map[K]V) (upserted, pruned Result[K]) {
	t.Desire(desired)
	return t.Upsert(), t.Prune()
}

func (t *Table[K, V]) fail(k K, err error, now time.Time) {
	f := t.failed[k]
	f.err = err
	f.delay = min(max(f.delay*2, backoffMin), backoffMax)
	f.next = now.Add(f.delay)
	t.failed[k] = f
}

// Failed are the keys that could not be brought to their desired state, and
// why. The map is the caller's.
func (t *Table[K, V]) Failed() map[K]error {
	out := make(map[K]error, len(t.failed))
	for k, f := range t.failed {
		out[k] = f.err
	}
	return out
}

// NextRetry is when a failed key is due again; false if none failed.
func (t *Table[K, V]) NextRetry() (time.Time, bool) {
	var next time.Time
	for _, f := range t.failed {
		if next.IsZero() || f.next.Before(next) {
			next = f.next
		}
	}
	return next, !next.IsZero()
}
