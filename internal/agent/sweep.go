package agent

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/maps"
)

const (
	sweepEvery = 15 * time.Second
	// sweepBatch entries are looked at, then sweepPause is made, so that a
	// table of a million flows costs no more than a small part of a core.
	sweepBatch = 4096
	sweepPause = 5 * time.Millisecond
)

// sweeper removes expired flows, so that the tables hold what lives and an
// idle node's are empty. It only picks candidates: whether a flow goes is
// decided by the datapath's own program, which excludes packets that revive
// it meanwhile. The datapath does not depend on the sweeper.
type sweeper struct {
	flows, flowsNew flowMap
	timeout         func(maps.FlowKey, maps.Flow) time.Duration
	remove          func([]maps.FlowKey) (int, error)
	now             func() (time.Duration, error) // CLOCK_MONOTONIC
	pause           func(context.Context)
	log             *slog.Logger

	evicted evictions

	confirmed, fresh, removed atomic.Uint64 // entries seen by the last walk; flows removed in all
}

type flowMap interface {
	Each(func(maps.FlowKey, maps.Flow) error) error
}

func newSweeper(set maps.Set, timeout func(maps.FlowKey, maps.Flow) time.Duration, remove func([]maps.FlowKey) (int, error), log *slog.Logger) *sweeper {
	return &sweeper{
		evicted: evictions{entries: set.FlowsNew, churn: set.Churn},
		flows:   set.Flows, flowsNew: set.FlowsNew, timeout: timeout, remove: remove, log: log,
		now: monotonic,
		pause: func(ctx context.Context) {
			t := time.NewTimer(sweepPause)
			defer t.Stop()
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		},
	}
}

func monotonic() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, err
	}
	return time.Duration(ts.Nano()), nil
}

// run sweeps until ctx ends.
func (s *sweeper) run(ctx context.Context) {
	if err := s.evicted.count(ctx, s.pause); err != nil && ctx.Err() == nil {
		s.log.Error("count of evicted flows", "error", err)
	}
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := s.sweep(ctx); err != nil && ctx.Err() == nil {
			s.log.Error("sweep of expired flows", "error", err)
		}
	}
}

// sweep walks both tables once.
func (s *sweeper) sweep(ctx context.Context) error {
	confirmed, err1 := s.walk(ctx, s.flows)
	fresh, err2 := s.walk(ctx, s.flowsNew)
	s.confirmed.Store(confirmed)
	s.fresh.Store(fresh)
	// Apart, for what is being swept comes and goes in the walk.
	return errors.Join(err1, err2, s.evicted.count(ctx, s.pause))
}

func (s *sweeper) walk(ctx context.Context, m flowMap) (entries uint64, err error) {
	now, err := s.now()
	if err != nil {
		return 0, err
	}
	seen := 0
	var idle []maps.FlowKey
	flush := func() error {
		n, err := s.remove(idle)
		s.removed.Add(uint64(n))
		idle = idle[:0]
		return err
	}
	err = m.Each(func(k maps.FlowKey, f maps.Flow) error {
		if now-time.Duration(f.LastSeen) > s.timeout(k, f) {
			idle = append(idle, k)
		} else {
			entries++
		}
		if seen++; seen%sweepBatch != 0 {
			return nil
		}
		if err := flush(); err != nil {
			return err
		}
		s.pause(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var err error
		now, err = s.now()
		return err
	})
	return entries, errors.Join(err, flush())
}
