package agent

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

type sweepBench struct {
	s            *sweeper
	flows, fresh *mem[maps.FlowKey, maps.Flow]
	now          time.Duration
}

func newSweepBench(t *testing.T) *sweepBench {
	t.Helper()
	timeouts, err := loader.LoadTimeouts()
	if err != nil {
		t.Fatal(err)
	}
	j := &journal{}
	b := &sweepBench{
		flows: newMem[maps.FlowKey, maps.Flow]("pw_flows", j),
		fresh: newMem[maps.FlowKey, maps.Flow]("pw_flows_new", j),
		now:   1000 * time.Second,
	}
	b.s = &sweeper{
		flows: b.flows, flowsNew: b.fresh, timeout: timeouts.For, log: slog.New(slog.DiscardHandler),
		now:   func() (time.Duration, error) { return b.now, nil },
		pause: func(context.Context) {},
	}
	return b
}

// udp makes both entries of a translated flow, seen so long ago.
func (b *sweepBench) udp(m *mem[maps.FlowKey, maps.Flow], port uint16, flags uint8, orig, reply time.Duration) (fwd, rev maps.FlowKey) {
	fwd = maps.FlowKey{Src: ip("10.244.80.65"), Dst: ip("10.98.0.1"), Sport: port, Dport: 80, Proto: maps.ProtoUDP}
	rev = maps.FlowKey{Src: ip("10.244.80.66"), Dst: ip("10.244.80.65"), Sport: 8080, Dport: port, Proto: maps.ProtoUDP}
	m.m[fwd] = maps.Flow{Src: rev.Dst, Dst: rev.Src, Sport: port, Dport: 8080, Flags: flags, LastSeen: uint64(b.now - orig)}
	m.m[rev] = maps.Flow{Src: fwd.Dst, Dst: fwd.Src, Sport: 80, Dport: port, Flags: flags, LastSeen: uint64(b.now - reply)}
	return fwd, rev
}

func TestSweep(t *testing.T) {
	b := newSweepBench(t)
	const long, short = 1 * time.Hour >> 2, time.Second
	dead, deadReply := b.udp(b.flows, 1, flowConfirmed, long, long)
	oneWay, oneWayReply := b.udp(b.flows, 2, flowConfirmed, long, short)
	live, _ := b.udp(b.flows, 3, flowConfirmed, short, short)
	// Confirmed, while the copies in the other table were left to age.
	b.udp(b.fresh, 3, 0, long, long)
	newOne, _ := b.udp(b.fresh, 4, 0, short, short)
	b.udp(b.fresh, 5, 0, 40*time.Second, 40*time.Second)
	if err := b.s.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		m    *mem[maps.FlowKey, maps.Flow]
		k    maps.FlowKey
		want bool
	}{
		"idle":                    {b.flows, dead, false},
		"idle, reply":             {b.flows, deadReply, false},
		"idle in one direction":   {b.flows, oneWay, true},
		"its other direction":     {b.flows, oneWayReply, true},
		"live":                    {b.flows, live, true},
		"copy of a confirmed one": {b.fresh, live, false},
		"new":                     {b.fresh, newOne, true},
	} {
		if _, ok := c.m.m[c.k]; ok != c.want {
			t.Errorf("%s: there %v, want %v", what, ok, c.want)
		}
	}
	if c, f, r := b.s.confirmed.Load(), b.s.fresh.Load(), b.s.removed.Load(); c != 4 || f != 2 || r != 6 {
		t.Errorf("counted %d confirmed, %d new, %d removed", c, f, r)
	}
}

// used is a table in which an entry is used between the walk and the delete.
type used struct {
	*mem[maps.FlowKey, maps.Flow]
	now uint64
}

func (u used) Get(k maps.FlowKey) (maps.Flow, bool, error) {
	f, ok := u.m[k]
	if ok {
		f.LastSeen = u.now
		u.m[k] = f
	}
	return f, ok, nil
}

func TestSweepLooksAgain(t *testing.T) {
	b := newSweepBench(t)
	k, _ := b.udp(b.flows, 1, flowConfirmed, time.Hour>>2, time.Hour>>2)
	for other := range b.flows.m {
		if other != k {
			delete(b.flows.m, other)
		}
	}
	b.s.flows = used{b.flows, uint64(b.now)}
	if err := b.s.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, ok := b.flows.m[k]; !ok {
		t.Error("an entry that was used meanwhile is gone")
	}
}

func TestSweepStops(t *testing.T) {
	b := newSweepBench(t)
	for i := range 2 * sweepBatch {
		b.udp(b.flows, uint16(i), flowConfirmed, time.Second, time.Second)
	}
	ctx, cancel := context.WithCancel(t.Context())
	pauses := 0
	b.s.pause = func(context.Context) { pauses++; cancel() }
	if err := b.s.sweep(ctx); !errors.Is(err, context.Canceled) || pauses == 0 {
		t.Errorf("%v after %d pauses", err, pauses)
	}
}
