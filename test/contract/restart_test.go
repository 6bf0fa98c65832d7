package contract

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/cluster"
)

// callers make new connections from everywhere to everything; some have one
// that stays beside those.
type callers struct {
	all     []*cluster.Caller
	streams map[int]*cluster.Stream // by the place in all
}

// nodePort makes of a service one that nodes answer for, too.
func nodePort(s *corev1.Service, ports ...int32) *corev1.Service {
	s.Spec.Type = corev1.ServiceTypeNodePort
	for i, p := range ports {
		s.Spec.Ports[i].NodePort = p
	}
	return s
}

// call starts one client: two hundred calls a second, if the machine lets it,
// so that the twelve of a test make more than two thousand.
func (c *callers) call(t *testing.T, ctx context.Context, from *cluster.Netns, proto, target string, stays bool) {
	t.Helper()
	call, err := from.Caller(ctx, target, "-proto", proto, "-timeout", "30s", "-interval", "5ms", "-parallel", "4")
	ok(t, err)
	c.all = append(c.all, call)
	if !stays {
		return
	}
	s, err := from.Stream(ctx, target, "-proto", proto, "-interval", "20ms")
	ok(t, err)
	if c.streams == nil {
		c.streams = map[int]*cluster.Stream{}
	}
	c.streams[len(c.all)-1] = s
}

// progress awaits more calls and answers of every client, none of which failed.
func (c *callers) progress(t *testing.T, ctx context.Context, calls int) {
	t.Helper()
	errs := make([]error, len(c.all))
	var wg sync.WaitGroup
	for i, call := range c.all {
		wg.Go(func() { errs[i] = call.Progress(ctx, calls) })
	}
	wg.Wait()
	ok(t, errors.Join(errs...))
	for _, s := range c.streams {
		progress(t, ctx, s, 3)
	}
}

// stop ends all: not one call may have failed, not one message be missing.
func (c *callers) stop(t *testing.T, ctx context.Context) {
	t.Helper()
	total, rate, longest := 0, 0.0, time.Duration(0)
	for i, call := range c.all {
		s, err := call.Stop(ctx)
		ok(t, err)
		if s.OK != s.Attempts || s.OK == 0 {
			t.Errorf("from %s to %s: %d of %d calls failed: %v, first %+v", call.From, call.Target, s.Attempts-s.OK, s.Attempts, s.Failed, s.Failure)
		}
		total, rate, longest = total+s.Attempts, rate+float64(s.Attempts)/s.Took.Seconds(), max(longest, s.Longest)
		if c.streams[i] == nil {
			continue
		}
		rep, err := c.streams[i].Stop(ctx)
		ok(t, err)
		if rep.Lost > 0 || rep.Error != "" || len(rep.Servers) != 1 {
			t.Errorf("from %s to %s, the connection that stayed: %+v", call.From, call.Target, rep)
		}
	}
	t.Logf("%d calls of %d clients, %.0f a second, the slowest took %v", total, len(c.all), rate, longest.Round(time.Millisecond))
}

// Agents are stopped, killed, killed while they start, and started again,
// while clients of every kind open connections: not one fails, and none that
// was open before misses an answer, while no agent runs neither.
func TestL1RestartsUnderLoad(t *testing.T) {
	w := shared(t)
	ctx := within(t, 240*time.Second)
	const port = 30101
	ips := []string{"10.98.41.1", "fd00:10:98::2901"}
	w.put(t, nodePort(clusterIP("loaded", ips, bothPorts(80)...), port, port))
	w.put(t, slicesFor("loaded", "loaded", bothSlicePorts(cluster.ServerPort), w.local, w.remote)...)
	c := &callers{}
	for _, v6 := range []bool{false, true} {
		for _, proto := range protos() {
			service := vip(pick(v6, ips[0], ips[1]), 80)
			w.inForce(t, ctx, proto, service, atAll(v6, w.local, w.remote)...)
			stays := v6 == (proto == "udp") // some of them
			own := at(nodeAddr(w.a, v6), port).String()
			c.call(t, ctx, w.client.Netns, proto, service, stays)
			c.call(t, ctx, w.Ext, proto, own, stays)
			if proto == "tcp" {
				c.call(t, ctx, w.a.Netns, proto, service, stays)
				c.call(t, ctx, w.a.Netns, proto, own, stays)
			}
		}
	}
	t.Cleanup(func() { w.ensureAgents(t) })
	const some = 20
	ok(t, w.StopAgents(ctx))
	c.progress(t, ctx, some) // while no agent runs
	ok(t, w.StartAgents(ctx))
	c.progress(t, ctx, some)

	ok(t, w.KillAgents(ctx))
	c.progress(t, ctx, some)
	ok(t, w.BeginAgents(ctx)) // one that is killed in the middle of its start
	ok(t, w.KillAgents(ctx))
	c.progress(t, ctx, some)

	// One after the other, as an upgrade does.
	for _, n := range w.Nodes {
		ok(t, n.StartAgent(ctx))
		c.progress(t, ctx, some)
	}
	c.stop(t, ctx)
}
