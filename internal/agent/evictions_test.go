package agent

import (
	"context"
	"errors"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// fakeChurn is pw_churn in memory.
type fakeChurn struct {
	n     maps.ChurnCount
	found uint64
	err   error
}

func (f *fakeChurn) Read() (maps.ChurnCount, error) {
	return maps.ChurnCount{Inserted: f.n.Inserted + f.found, Removed: f.n.Removed}, f.err
}

func (f *fakeChurn) AddFound(n uint64) error {
	f.found += n
	return f.err
}

// crowd is a table of n entries; what happens while it is being read is in
// during.
type crowd struct {
	n      int
	during func()
}

func (c *crowd) Each(fn func(maps.FlowKey, maps.Flow) error) error {
	for i := range c.n {
		if err := fn(maps.FlowKey{Sport: uint16(i)}, maps.Flow{}); err != nil {
			return err
		}
	}
	if c.during != nil {
		c.during()
	}
	return nil
}

func TestEvictions(t *testing.T) {
	for _, step := range []struct {
		name          string
		start, during maps.ChurnCount // start: since the maps were made; during: in the walk
		present       int
		found         uint64 // from an earlier agent
		want, now     uint64 // total; entries found in all
	}{
		{name: "nothing ever", want: 0},
		{name: "all there", start: maps.ChurnCount{Inserted: 100}, present: 100},
		{name: "removed ones are not evicted", start: maps.ChurnCount{Inserted: 100, Removed: 40}, present: 60},
		{name: "a flood", start: maps.ChurnCount{Inserted: 100_000, Removed: 20}, present: 65_536, want: 100_000 - 20 - 65_536},
		{name: "inserted in the walk, seen", start: maps.ChurnCount{Inserted: 100}, during: maps.ChurnCount{Inserted: 5}, present: 105},
		{name: "inserted in the walk, not seen", start: maps.ChurnCount{Inserted: 100}, during: maps.ChurnCount{Inserted: 5}, present: 100},
		{name: "removed in the walk, seen", start: maps.ChurnCount{Inserted: 100}, during: maps.ChurnCount{Removed: 7}, present: 100},
		{name: "removed in the walk, not seen", start: maps.ChurnCount{Inserted: 100}, during: maps.ChurnCount{Removed: 7}, present: 93},
		{name: "entries from before the counts", present: 500, now: 500},
		{name: "the same, some counted", start: maps.ChurnCount{Inserted: 30, Removed: 10}, present: 500, now: 480},
		{name: "the same, after a restart", start: maps.ChurnCount{Inserted: 30, Removed: 10}, found: 480, present: 490, want: 10, now: 480},
		{name: "the same, all of them gone", start: maps.ChurnCount{Inserted: 30, Removed: 510}, found: 480, now: 480},
	} {
		t.Run(step.name, func(t *testing.T) {
			c := &fakeChurn{n: step.start, found: step.found}
			table := &crowd{n: step.present, during: func() {
				c.n.Inserted += step.during.Inserted
				c.n.Removed += step.during.Removed
			}}
			e := &evictions{entries: table, churn: c}
			if err := e.count(t.Context(), func(context.Context) {}); err != nil {
				t.Fatal(err)
			}
			if got := e.total.Load(); got != step.want || c.found != step.now || !e.known.Load() {
				t.Errorf("%d evicted and %d found, want %d and %d", got, c.found, step.want, step.now)
			}
		})
	}
}

// The count never falls, catches up, and costs nothing where nothing moves.
func TestEvictionsOverTime(t *testing.T) {
	c := &fakeChurn{n: maps.ChurnCount{Inserted: 100}}
	table := &crowd{n: 60}
	e := &evictions{entries: table, churn: c}
	pauses := 0
	count := func(want uint64) {
		t.Helper()
		if err := e.count(t.Context(), func(context.Context) { pauses++ }); err != nil {
			t.Fatal(err)
		}
		if got := e.total.Load(); got != want {
			t.Errorf("%d evicted, want %d", got, want)
		}
	}
	count(40)
	table.n = 0 // not read again: no insert, no eviction
	count(40)
	table.n = 61
	c.n.Inserted += 21
	table.during = func() { c.n.Removed += 30 }
	count(40) // 30 of those removed were seen before: in doubt, nothing
	table.during, table.n = nil, 31
	c.n.Inserted++
	count(61)
	c.n.Inserted += 3 * sweepBatch
	table.n += 3 * sweepBatch
	count(61)
	if pauses != 3 {
		t.Errorf("%d pauses", pauses)
	}

	// What could not be read is not known, and no change.
	c.err = errors.New("no")
	if err := e.count(t.Context(), func(context.Context) {}); err == nil || e.total.Load() != 61 {
		t.Errorf("%v, %d evicted", err, e.total.Load())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.err = nil
	c.n.Inserted += 1000
	if err := e.count(ctx, func(context.Context) {}); !errors.Is(err, context.Canceled) || e.total.Load() != 61 {
		t.Errorf("%v, %d evicted", err, e.total.Load())
	}
}
