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
	for i, c := range []struct{ name, clients string }{
		{"cluster IP", "pod-a:cluster node-a:cluster"},
		{"NodePort from outside", "out:node@node-a out-b:node@node-b"},
		{"load balancer from outside", "out:lb out-b:lb"},
		{"host process", "node-a:node@node-b node-b:lb"},
		{"pod by NodePort", "pod-a:node@node-b pod-b:node@node-a"},
	} {
		for _, v6 := range []bool{false, true} {
			t.Run(c.name+" "+family(v6, "IPv4", "IPv6"), func(t *testing.T) {
				shared(t).roll(8092+i, v6, strings.Fields(c.clients))
			})
		}
	}
}

// roll replaces every backend of a service while each of the clients, FROM:AT,
// calls it.
func (w *world) roll(port int, v6 bool, callers []string) {
	w.Helper()
	pods := []string{"back-a", "back-b", "pod-a", "pod-b"}
	servers := map[string]*cluster.Process{}
	start := func(name string) {
		p, err := w.callers[name].ns.Serve(w.ctx, name, port)
		w.must(err)
		servers[name] = p
	}
	start(pods[0])
	start(pods[1])
	s := service{name: "rolling", n: 220, ends: pods[0] + " " + pods[1], target: int32(port)}
	w.put(s)
	type client struct {
		*cluster.Process
		what string
	}
	var clients []client
	for _, c := range callers {
		from, at, _ := strings.Cut(c, ":")
		target := s.frontend(w, at, v6).String()
		p, err := w.callers[from].ns.Start(w.ctx, "pw-client", "send", "-every", "1ms", "-count", "1000000", "-timeout", "20s", target)
		w.must(err)
		clients = append(clients, client{p, from + " by " + at + " " + target})
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
	for _, p := range servers {
		w.must(p.Kill(w.ctx))
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
