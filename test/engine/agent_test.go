package engine

import (
	"context"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// load sends requests of each kind until stopped, one process a target.
type load struct {
	stop    context.CancelFunc
	results chan result
	n       int
}

type result struct {
	target string
	sum    *probe.Summary
	err    error
}

// startLoad calls the targets, connection after connection, in both
// protocols; each process makes batches until it is told to stop.
func startLoad(ctx context.Context, from *cluster.Netns, targets ...string) *load {
	batch, stop := context.WithCancel(ctx)
	l := &load{stop: stop, results: make(chan result, 100)}
	for _, target := range targets {
		for _, proto := range []string{"tcp", "udp"} {
			l.n++
			go func() {
				total := &probe.Summary{Failed: map[string]int{}}
				var err error
				for err == nil && batch.Err() == nil {
					var s *probe.Summary
					s, err = from.Send(ctx, target, "-proto", proto, "-count", "1000", "-parallel", "4", "-timeout", "10s")
					total.Attempts += s.Attempts
					total.OK += s.OK
					for kind, n := range s.Failed {
						total.Failed[kind] += n
					}
					if total.Failure == nil {
						total.Failure = s.Failure
					}
				}
				l.results <- result{proto + " " + target, total, err}
			}()
		}
	}
	return l
}

// Agents are killed under load and come back (L1): new connections, running
// flows and what they carry do not notice.
func TestAgentsKilledUnderLoad(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	_, err := w.remote.Serve(ctx, "remote", serverPort)
	ok(t, err)
	w.service(t, ctx, "alive", "10.98.0.21", "fd00:10:98::21", w.remote)
	targets := []string{"10.98.0.21:80", "[fd00:10:98::21]:80"}
	var streams []*cluster.Stream
	for _, target := range targets {
		for _, proto := range []string{"tcp", "udp"} {
			s, err := w.client.Stream(ctx, target, "-proto", proto)
			ok(t, err)
			streams = append(streams, s)
		}
	}
	start := time.Now()
	l := startLoad(ctx, w.client.Netns, targets...)
	// Every stream gets on while nobody is there.
	further := func() {
		t.Helper()
		for _, s := range streams {
			r, err := s.Report(ctx)
			ok(t, err)
			_, err = s.Await(ctx, "20 more answers", func(now probe.StreamReport) bool { return now.Received >= r.Received+20 })
			ok(t, err)
		}
	}
	for range 2 {
		further()
		ok(t, w.KillAgents(ctx))
		further()
		ok(t, w.StartAgents(ctx))
	}
	further()
	l.stop()
	attempts := 0
	for range l.n {
		r := <-l.results
		ok(t, r.err)
		attempts += r.sum.Attempts
		if r.sum.OK != r.sum.Attempts || r.sum.Attempts < 1000 {
			t.Errorf("%s: %d of %d, failed %v, first %+v", r.target, r.sum.OK, r.sum.Attempts, r.sum.Failed, r.sum.Failure)
		}
	}
	took := time.Since(start)
	t.Logf("%d requests in %v, %.0f/s", attempts, took.Round(time.Millisecond), float64(attempts)/took.Seconds())
	for _, s := range streams {
		r, err := s.Stop(ctx)
		ok(t, err)
		if r.Lost > 0 || r.Error != "" {
			t.Errorf("stream to %s: %+v", r.Remote, r)
		}
	}
}
