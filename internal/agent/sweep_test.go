package agent

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const flowConfirmed = uint8(bpf.DpPwFlowFlagsPW_F_CONFIRMED)

type sweepBench struct {
	s            *sweeper
	flows, fresh *mem[maps.FlowKey, maps.Flow]
	churn        fakeChurn
	now          time.Duration
	named        []maps.FlowKey // to be removed
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
		evicted: evictions{entries: b.fresh, churn: &b.churn},
		flows:   b.flows, flowsNew: b.fresh, timeout: timeouts.For, log: slog.New(slog.DiscardHandler),
		now:   func() (time.Duration, error) { return b.now, nil },
		pause: func(context.Context) {},
		remove: func(keys []maps.FlowKey) (int, error) {
			b.named = append(b.named, keys...)
			return len(keys), nil
		},
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

// The walk picks what has outlived its timeout, each by its own protocol and
// state; whether it goes is for the datapath to say.
func TestSweep(t *testing.T) {
	b := newSweepBench(t)
	const long, short = 15 * time.Minute, time.Second
	dead, deadReply := b.udp(b.flows, 1, flowConfirmed, long, long)
	oneWay, _ := b.udp(b.flows, 2, flowConfirmed, long, short)
	b.udp(b.flows, 3, flowConfirmed, short, short)
	b.udp(b.fresh, 4, 0, short, short)
	unanswered, unansweredReply := b.udp(b.fresh, 5, 0, 40*time.Second, 40*time.Second)
	b.udp(b.flows, 6, flowConfirmed, 40*time.Second, 40*time.Second) // confirmed ones live longer
	if err := b.s.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := map[maps.FlowKey]bool{dead: true, deadReply: true, oneWay: true, unanswered: true, unansweredReply: true}
	for _, k := range b.named {
		if !want[k] {
			t.Errorf("%s was named", maps.KeyString(k))
		}
		delete(want, k)
	}
	for k := range want {
		t.Errorf("%s was not named", maps.KeyString(k))
	}
	if c, f, r := b.s.confirmed.Load(), b.s.fresh.Load(), b.s.removed.Load(); c != 5 || f != 2 || r != 5 {
		t.Errorf("counted %d confirmed, %d new, %d removed", c, f, r)
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
