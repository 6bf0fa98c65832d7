package services

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// Backends are replaced one by one, as a Deployment does it, while clients
// open a connection every millisecond: not one of them fails.
func TestRollingBackends(t *testing.T) {
	w := shared(t)
	const port = 8092
	pods := []string{"back-a", "back-b", "pod-a", "pod-b"}
	servers := map[string]*cluster.Process{}
	start := func(name string) {
		p, err := w.callers[name].ns.Serve(w.ctx, name, port)
		w.must(err)
		servers[name] = p
	}
	start(pods[0])
	start(pods[1])
	s := service{name: "rolling", n: 220, ends: pods[0] + " " + pods[1], target: port}
	w.put(s)
	type client struct {
		*cluster.Process
		what string
	}
	var clients []client
	for i, c := range []struct{ from, at string }{
		{"pod-a", "cluster"}, {"node-a", "cluster"}, {"out", "lb"}, {"out", "node@node-b"}, {"node-b", "lb"}, {"pod-b", "node@node-a"},
	} {
		target := s.frontend(w, c.at, i%2 == 1).String()
		p, err := w.callers[c.from].ns.Start(w.ctx, "pw-client", "send", "-every", fmt.Sprintf("%dms", 1+5*min(i, 1)), "-count", "1000000", "-timeout", "20s", target)
		w.must(err)
		clients = append(clients, client{p, c.from + " by " + c.at + " " + target})
	}
	for i := range pods {
		leaving, staying, coming := pods[i], pods[(i+1)%4], pods[(i+2)%4]
		start(coming)
		s.ends = fmt.Sprintf("%s!terminating %s %s", leaving, staying, coming)
		w.write(s)
		w.settled()
		w.must(cluster.Eventually(w.ctx, func() error { return w.drained(leaving, port) }))
		s.ends = staying + " " + coming
		w.write(s)
		w.settled()
		w.must(servers[leaving].Kill(w.ctx))
	}
	for _, c := range clients {
		var sum probe.Summary
		w.must(c.Signal(syscall.SIGTERM))
		if err := c.JSON(w.ctx, &sum); err != nil {
			w.Fatalf("%s: %v", c.what, err)
		}
		w.Logf("%s: %d connections, %v", c.what, sum.Attempts, sum.Servers)
		if sum.OK != sum.Attempts || len(sum.Servers) != len(pods) {
			w.Errorf("%s: %d of %d failed: %v, first %+v", c.what, sum.Attempts-sum.OK, sum.Attempts, sum.Failed, sum.Failure)
		}
	}
}

// drained says whether no connection to a pod's port is open.
func (w *world) drained(pod string, port int) error {
	return w.callers[pod].ns.Do(func() error {
		for _, file := range []string{"tcp", "tcp6"} {
			data, err := os.ReadFile("/proc/thread-self/net/" + file)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(data)) {
				f := strings.Fields(line)
				const established, synRecv = "01", "03"
				if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && (f[3] == established || f[3] == synRecv) {
					return fmt.Errorf("%s has a connection: %s", pod, line)
				}
			}
		}
		return nil
	})
}
