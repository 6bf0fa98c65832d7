package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	pw "github.com/podweir/podweir/internal/maps"
)

// fake is a map of a given size in which some keys cannot be written.
type fake struct {
	m    map[int]string
	size int
	bad  map[int]error
	ops  int
}

func (f *fake) Name() string { return "fake" }

func (f *fake) Dump() (map[int]string, error) { return maps.Clone(f.m), nil }

func (f *fake) Each(each func(int, string) error) error {
	for k, v := range f.m {
		if err := each(k, v); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) TryPutAll(entries map[int]string) map[int]error {
	errs := make(map[int]error)
	for _, k := range slices.Sorted(maps.Keys(entries)) {
		f.ops++
		_, have := f.m[k]
		switch {
		case f.bad[k] != nil:
			errs[k] = f.bad[k]
		case !have && len(f.m) >= f.size:
			errs[k] = fmt.Errorf("fake: write %d: %w", k, pw.ErrFull)
		default:
			f.m[k] = entries[k]
		}
	}
	return errs
}

func (f *fake) TryDeleteAll(keys []int) map[int]error {
	errs := make(map[int]error)
	for _, k := range keys {
		f.ops++
		if f.bad[k] != nil {
			errs[k] = f.bad[k]
			continue
		}
		delete(f.m, k)
	}
	return errs
}

func newFake(size int, m map[int]string) *fake {
	if m == nil {
		m = make(map[int]string)
	}
	return &fake{m: m, size: size, bad: make(map[int]error)}
}

func TestAdoptAndDiff(t *testing.T) {
	f := newFake(10, map[int]string{1: "a", 2: "b", 3: "c"})
	tab := New[int, string](f)
	if err := tab.Load(); err != nil {
		t.Fatal(err)
	}
	tab.Desire(map[int]string{1: "a", 2: "B", 4: "d"})
	up := tab.Upsert()
	if !slices.Equal(up.Added, []int{4}) || !slices.Equal(up.Changed, []int{2}) || up.Err() != nil {
		t.Errorf("upsert: %+v", up)
	}
	if f.m[3] != "c" {
		t.Error("upsert removed something")
	}
	if down := tab.Prune(); !slices.Equal(down.Removed, []int{3}) {
		t.Errorf("prune: %+v", down)
	}
	if want := map[int]string{1: "a", 2: "B", 4: "d"}; !maps.Equal(f.m, want) {
		t.Errorf("map %v, want %v", f.m, want)
	}
	if f.ops != 3 {
		t.Errorf("%d operations, want one per difference: 3", f.ops)
	}
	if up, down := tab.Apply(map[int]string{1: "a", 2: "B", 4: "d"}); len(up.Touched())+len(down.Touched()) != 0 || f.ops != 3 {
		t.Error("a second round wrote again")
	}
}

func TestSetDelete(t *testing.T) {
	f := newFake(10, map[int]string{1: "a"})
	tab := New[int, string](f)
	if err := tab.Load(); err != nil {
		t.Fatal(err)
	}
	tab.Set(1, "a")
	tab.Set(2, "b")
	tab.Upsert()
	tab.Prune()
	if f.ops != 1 || f.m[2] != "b" || f.m[1] != "a" {
		t.Errorf("%d operations, map %v", f.ops, f.m)
	}
	tab.Delete(1)
	tab.Delete(7) // was never there
	if up := tab.Upsert(); len(up.Touched()) != 0 {
		t.Errorf("upsert: %+v", up)
	}
	if down := tab.Prune(); !slices.Equal(down.Removed, []int{1}) || f.ops != 2 {
		t.Errorf("prune: %+v, %d operations", down, f.ops)
	}
	if _, ok := tab.Actual(1); ok || tab.Len() != 1 {
		t.Error("the shadow still has it")
	}
}

func TestOneBadEntry(t *testing.T) {
	f := newFake(10, nil)
	f.bad[2] = errors.New("refused")
	tab := New[int, string](f)
	now := time.Unix(1000, 0)
	tab.now = func() time.Time { return now }
	tab.Desire(map[int]string{1: "a", 2: "b", 3: "c"})
	up := tab.Upsert()
	if len(up.Added) != 2 || up.Errs[2] == nil {
		t.Fatalf("upsert: %+v", up)
	}
	next, ok := tab.NextRetry()
	if !ok || next != now.Add(backoffMin) {
		t.Fatalf("retry at %v %v", next, ok)
	}
	ops := f.ops
	if tab.Upsert(); f.ops != ops {
		t.Error("tried again before its time")
	}
	now = next
	if tab.Upsert(); f.ops != ops+1 {
		t.Error("not tried again at its time")
	}
	if next, _ := tab.NextRetry(); next != now.Add(2*backoffMin) {
		t.Errorf("second delay %v", next.Sub(now))
	}
	// Another value is tried at once.
	delete(f.bad, 2)
	tab.Set(2, "B")
	if up := tab.Upsert(); !slices.Equal(up.Added, []int{2}) {
		t.Errorf("upsert: %+v", up)
	}
	if len(tab.Failed()) != 0 {
		t.Errorf("still failed: %v", tab.Failed())
	}
	// A failing removal stays due and stops nothing either.
	f.bad[2] = errors.New("refused")
	tab.Desire(map[int]string{})
	if down := tab.Prune(); len(down.Removed) != 2 || down.Errs[2] == nil {
		t.Errorf("prune: %+v", down)
	}
	delete(f.bad, 2)
	now = now.Add(backoffMax)
	if down := tab.Prune(); !slices.Equal(down.Removed, []int{2}) {
		t.Errorf("prune again: %+v", down)
	}
}

func TestRoomAgain(t *testing.T) {
	f := newFake(2, nil)
	tab := New[int, string](f)
	now := time.Unix(1000, 0)
	tab.now = func() time.Time { return now }
	tab.Desire(map[int]string{1: "a", 2: "b", 3: "c"})
	if up := tab.Upsert(); !errors.Is(up.Err(), pw.ErrFull) {
		t.Fatalf("upsert: %+v", up)
	}
	tab.Delete(1)
	tab.Prune()
	if up := tab.Upsert(); !slices.Equal(up.Added, []int{3}) {
		t.Errorf("after room was made: %+v", up)
	}
}

func TestArray(t *testing.T) {
	f := newFake(10, map[int]string{0: "", 1: "x", 2: "", 3: "y"})
	tab := New(Array[int, string](f))
	if err := tab.Load(); err != nil {
		t.Fatal(err)
	}
	if tab.Len() != 2 {
		t.Errorf("%d entries, want the 2 that are not zero", tab.Len())
	}
	tab.Apply(map[int]string{3: "y", 2: "z"})
	if want := map[int]string{0: "", 1: "", 2: "z", 3: "y"}; !maps.Equal(f.m, want) {
		t.Errorf("array %v, want %v", f.m, want)
	}
}
