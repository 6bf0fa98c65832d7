package agent

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const flowConfirmed = uint8(bpf.DpPwFlowFlagsPW_F_CONFIRMED)

const (
	sweepEvery = 15 * time.Second
	// sweepBatch entries are looked at, then sweepPause is made, so that a
	// table of a million flows costs no more than a small part of a core.
	sweepBatch = 4096
	sweepPause = 5 * time.Millisecond
	// sweepSlack is how much later than the datapath the sweeper calls a flow
	// expired: the datapath may take an expired slot over at any moment.
	sweepSlack = 2 * time.Second
)

// sweeper removes expired flows, so that the tables hold what lives and an
// idle node's are empty. The datapath does not depend on it.
type sweeper struct {
	flows, flowsNew flowMap
	timeout         func(maps.FlowKey, maps.Flow) time.Duration
	now             func() (time.Duration, error) // CLOCK_MONOTONIC
	pause           func(context.Context)
	log             *slog.Logger

	confirmed, fresh, removed atomic.Uint64 // entries seen by the last walk; removed in all
}

type flowMap interface {
	Each(func(maps.FlowKey, maps.Flow) error) error
	Get(maps.FlowKey) (maps.Flow, bool, error)
	Delete(maps.FlowKey) error
}

func newSweeper(set maps.Set, timeout func(maps.FlowKey, maps.Flow) time.Duration, log *slog.Logger) *sweeper {
	return &sweeper{
		flows: set.Flows, flowsNew: set.FlowsNew, timeout: timeout, log: log,
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
	return errors.Join(err1, err2)
}

func (s *sweeper) walk(ctx context.Context, m flowMap) (entries uint64, err error) {
	now, err := s.now()
	if err != nil {
		return 0, err
	}
	seen := 0
	err = m.Each(func(k maps.FlowKey, f maps.Flow) error {
		if seen++; seen%sweepBatch == 0 {
			s.pause(ctx)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			var err error
			if now, err = s.now(); err != nil {
				return err
			}
		}
		if !s.expired(k, f, now) {
			entries++
			return nil
		}
		return s.remove(m, k, now)
	})
	return entries, err
}

// remove deletes one entry after looking at it again: it may have been used,
// or taken over by another flow, since the walk read it. Its twin goes when
// the walk comes to it.
func (s *sweeper) remove(m flowMap, k maps.FlowKey, now time.Duration) error {
	f, ok, err := m.Get(k)
	if err != nil || !ok || !s.expired(k, f, now) {
		return err
	}
	s.removed.Add(1)
	return m.Delete(k)
}

// expired: idle for too long in both directions.
func (s *sweeper) expired(k maps.FlowKey, f maps.Flow, now time.Duration) bool {
	if s.idle(k, f, f.LastSeen, now) < 0 {
		return false
	}
	if _, moved, err := s.flows.Get(k); err == nil && moved && f.Flags&flowConfirmed == 0 {
		return true // the copy that was left behind when the flow was confirmed
	}
	last, err := s.twinSeen(k, f)
	return err == nil && s.idle(k, f, last, now) >= 0
}

// idle is by how much an entry last seen then has outlived its timeout.
func (s *sweeper) idle(k maps.FlowKey, f maps.Flow, lastSeen uint64, now time.Duration) time.Duration {
	return now - time.Duration(lastSeen) - s.timeout(k, f) - sweepSlack
}

// twinSeen is when the other direction was last seen, in whichever table; 0
// if it is in none.
func (s *sweeper) twinSeen(k maps.FlowKey, f maps.Flow) (uint64, error) {
	twin := twinKey(k, f)
	var last uint64
	for _, m := range []flowMap{s.flows, s.flowsNew} {
		t, ok, err := m.Get(twin)
		if err != nil {
			return 0, err
		}
		if ok {
			last = max(last, t.LastSeen)
		}
	}
	return last, nil
}

func twinKey(k maps.FlowKey, f maps.Flow) maps.FlowKey {
	return maps.FlowKey{
		Src: f.Dst, Dst: f.Src, Sport: f.Dport, Dport: f.Sport,
		Via: f.TwinVia, Proto: k.Proto,
	}
}
