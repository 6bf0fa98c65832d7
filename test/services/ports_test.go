package services

import (
	"context"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// A client that calls a service, and the service's backend by the backend's
// own address, from one port: to the backend both are one tuple, unless one of
// them comes from another port. Each answer comes from whom was asked, one
// after the other and at the same time.
func TestServiceAndBackendFromOnePort(t *testing.T) {
	t.Parallel()
	// The kernel itself refuses a second socket of one tuple: packets alone.
	w := own(t, "--routing-mode", "direct", "--cgroup", "none")
	pod := service{name: "one-port-pod", n: 240, ends: "back-b"}
	host := service{name: "one-port-host", n: 241, ends: "node-a"}
	w.put(pod)
	w.put(host)
	port := 20000
	for _, c := range []struct {
		from string
		svc  service
		at   string
	}{
		{"node-a", pod, "cluster"},
		{"node-a", pod, "lb"},
		{"pod-a", pod, "cluster"},
		{"node-b", host, "cluster"},
		{"node-b", host, "node@node-a"},
		{"out", host, "node@node-a"},
		{"out", host, "lb"},
		{"out-b", host, "node@node-b"},
	} {
		w.T.Run(c.from+" by "+c.at, func(t *testing.T) {
			w.sub(t).each(func(w *world, proto string, v6 bool) {
				targets := [2]netip.AddrPort{
					c.svc.frontend(w, c.at, v6),
					netip.AddrPortFrom(w.addr(c.svc.ends, v6), cluster.ServerPort),
				}
				port++
				for i := range 4 {
					w.from(c.from, proto, targets[i%2], port, c.svc.ends)
				}
				for first := range 2 {
					port++
					w.atOnce(c.from, proto, port, targets[first], targets[1-first])
				}
			})
		})
	}
}

// from makes one call from a port.
func (w *world) from(who, proto string, target netip.AddrPort, port int, server string) {
	w.Helper()
	before, err := w.read()
	w.must(err)
	r, err := w.callers[who].call(w.ctx, probe.Call{Proto: proto, Target: target.String(), SPort: port, Timeout: patience})
	w.must(err)
	if a := r.Attempts[0]; !a.OK || a.Reply.Server != server || a.Remote != target.String() {
		w.Errorf("from port %d to %v: %+v\n%s", port, target, a, w.traces(a.Local, before))
	}
}

// atOnce has two conversations from one port.
func (w *world) atOnce(who, proto string, port int, targets ...netip.AddrPort) {
	w.Helper()
	var open []*cluster.Stream
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	before, err := w.read()
	w.must(err)
	alive := func() {
		w.Helper()
		for i, s := range open {
			r, err := s.Report(ctx)
			w.must(err)
			goal := r.Received + 3
			r, err = s.Await(ctx, "answers", func(r probe.StreamReport) bool { return r.Received >= goal || r.Error != "" })
			if err != nil || r.Error != "" {
				w.Fatalf("from port %d to %v, first %v: %v, %+v\n%s", port, targets[i], targets[0], err, r, w.traces(r.Local, before))
			}
		}
	}
	for _, target := range targets {
		s, err := w.callers[who].ns.Stream(w.ctx, target.String(), "-proto", proto, "-interval", "10ms", "-sport", strconv.Itoa(port))
		if err != nil {
			w.Fatalf("from port %d to %v, first %v: %v", port, target, targets[0], err)
		}
		open = append(open, s)
		alive()
	}
	alive()
	for i, s := range open {
		r, err := s.Stop(w.ctx)
		if err != nil || r.Error != "" {
			w.Errorf("from port %d to %v, first %v: %v, %+v", port, targets[i], targets[0], err, r)
		}
	}
}
