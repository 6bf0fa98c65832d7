package services

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/tools/probe"
)

// sticky gives a service session affinity; 0: the default time.
func sticky(seconds int32) func(*world, *corev1.Service) {
	return func(_ *world, s *corev1.Service) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		if seconds != 0 {
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
		}
	}
}

// each runs a case once per family and protocol.
func (w *world) each(fn func(w *world, proto string, v6 bool)) {
	w.Helper()
	for _, proto := range []string{"tcp", "udp"} {
		for _, v6 := range []bool{false, true} {
			w.T.Run(fmt.Sprintf("%s %s", proto, map[bool]string{false: "IPv4", true: "IPv6"}[v6]), func(t *testing.T) {
				fn(w.sub(t), proto, v6)
			})
		}
	}
}

// who answers count calls, by number of answers.
func (w *world) who(from string, s service, at, proto string, v6 bool, count int) map[string]int {
	w.Helper()
	call := probe.Call{Proto: proto, Target: s.frontend(w, at, v6).String(), Count: count, Timeout: patience}
	r, err := w.callers[from].call(w.ctx, call)
	w.must(err)
	out := map[string]int{}
	for _, a := range r.Attempts {
		if !a.OK {
			w.Fatalf("%s calls %s by %s %s: %s %s", from, s.name, at, call.Target, a.Kind, a.Error)
		}
		out[a.Reply.Server]++
	}
	return out
}

// one is who answers all of them.
func (w *world) one(from string, s service, at, proto string, v6 bool) string {
	w.Helper()
	got := w.who(from, s, at, proto, v6, 5)
	if len(got) != 1 {
		w.Fatalf("%s calls %s by %s %s: answered by %v, want one of them", from, s.name, at, proto, got)
	}
	for server := range got {
		return server
	}
	return ""
}

// A client stays with its backend, by whatever address it calls; until that
// is gone, and not because another comes or an unrelated service changes.
func TestS14Affinity(t *testing.T) { shared(t).affinity() }

func (w *world) affinity() {
	w.Helper()
	s := service{name: "sticky", n: 200, ends: "back-a back-b pod-b", change: sticky(0)}
	w.put(s)
	type client struct{ from, proto, v6 string }
	first := map[client]string{}
	// Addresses that lead each client through one node.
	frontends := map[string][]string{
		"pod-a":  {"cluster", "lb", "ext", "node@node-a", "node@node-b"},
		"node-a": {"cluster", "lb", "ext", "node@node-a", "node@node-b"},
		"out":    {"lb", "ext", "node@node-a", "cluster", "lb"},
		"out-b":  {"lb", "ext", "node@node-b", "cluster", "lb"},
	}
	all := func(w *world, ends string) {
		w.each(func(w *world, proto string, v6 bool) {
			for from, ats := range frontends {
				for _, at := range ats {
					c := client{from, proto, fmt.Sprint(v6)}
					server := w.one(from, s, at, proto, v6)
					if was := first[c]; was != "" && was != server {
						w.Errorf("%s by %s: answered by %s, it was %s before (of %s)", from, at, server, was, ends)
					}
					first[c] = server
				}
			}
		})
	}
	all(w, s.ends)
	// A backend more.
	s.ends += " pod-a"
	w.write(s)
	w.settled()
	all(w, s.ends)
	// One that is out of use, and at last gone: who had it gets another, the
	// others stay. One on its way out still serves, and gets no new connection.
	moved := 0
	for _, ends := range []string{"back-a!terminating back-b pod-b pod-a", "back-a back-b!unready pod-b pod-a", "back-a back-b pod-a"} {
		s.ends = ends
		w.write(s)
		w.settled()
		for c, server := range first {
			if !slices.Contains(strings.Fields(ends), server) {
				delete(first, c)
				moved++
			}
		}
		all(w, ends)
		for c, server := range first {
			if !slices.Contains(strings.Fields(ends), server) {
				w.Errorf("endpoints %q: %+v is answered by %s", ends, c, server)
			}
		}
	}
	s.ends = "back-a"
	w.write(s)
	w.settled()
	clear(first)
	all(w, s.ends)
	w.Logf("%d times a client lost its backend, then all of them did", moved)
}

// After the time without a connection the choice is free again.
func TestS14Timeout(t *testing.T) {
	w := shared(t)
	s := service{name: "short", n: 201, ends: "back-a back-b pod-b", change: sticky(1)}
	w.put(s)
	w.each(func(w *world, proto string, v6 bool) {
		w.Parallel()
		const times = 20 // the same of three every time: once in 10^9
		was := w.one("pod-a", s, "cluster", proto, v6)
		for range times {
			// The clock of the datapath ticks every few milliseconds.
			time.Sleep(1050 * time.Millisecond)
			if now := w.one("pod-a", s, "cluster", proto, v6); now != was {
				return
			}
		}
		w.Errorf("answered by %s after every pause", was)
	})
}

// Each connection begins the time anew.
func TestS14TimeBeginsAnew(t *testing.T) {
	w := shared(t)
	const timeout, pause, rounds = 2 * time.Second, 500 * time.Millisecond, 9
	s := service{name: "anew", n: 202, ends: "back-a back-b pod-b", change: sticky(int32(timeout / time.Second))}
	w.put(s)
	w.each(func(w *world, proto string, v6 bool) {
		w.Parallel()
		was := ""
		for n, last := 0, time.Now(); n < rounds; n++ {
			server := w.one("pod-a", s, "cluster", proto, v6)
			// A machine that made us late proves nothing.
			if late := time.Since(last) > timeout-pause; late || n == 0 {
				n, was = 0, server
			}
			if server != was {
				w.Fatalf("answered by %s, then by %s", was, server)
			}
			last = time.Now()
			time.Sleep(pause)
		}
	})
}
