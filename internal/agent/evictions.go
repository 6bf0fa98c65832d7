package agent

import (
	"context"
	"sync/atomic"

	"github.com/podweir/podweir/internal/maps"
)

// churn is the count of what was put into pw_flows_new and taken out.
type churn interface {
	Read() (maps.ChurnCount, error)
	AddFound(n uint64) error
}

// evictions finds out how many unconfirmed flow entries the kernel has pushed
// out. The count starts with the maps, not with the agent; it never falls.
type evictions struct {
	entries flowMap
	churn   churn

	last  maps.ChurnCount
	known atomic.Bool // total has been counted once
	total atomic.Uint64
}

// count brings total up to date. pause is called every sweepBatch entries.
func (e *evictions) count(ctx context.Context, pause func(context.Context)) error {
	before, err := e.churn.Read()
	if err != nil {
		return err
	}
	if e.known.Load() && before == e.last {
		return nil // nobody inserted, nothing was pushed out
	}
	present := uint64(0)
	err = e.entries.Each(func(maps.FlowKey, maps.Flow) error {
		if present++; present%sweepBatch == 0 {
			pause(ctx)
		}
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	after, err := e.churn.Read()
	if err != nil {
		return err
	}
	evicted, uncounted := maps.Evicted(before, after, present)
	if uncounted > 0 {
		if err := e.churn.AddFound(uncounted); err != nil {
			return err
		}
		before.Inserted += uncounted
	}
	e.total.Store(max(e.total.Load(), evicted))
	e.last = before
	e.known.Store(true)
	return nil
}
