package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/test/cluster"
)

// running are long-lived flows from the client to everything it may call.
type running struct {
	w       *world
	streams []*cluster.Stream
	names   []string
	client  *cluster.Capture
	peers   []*cluster.Capture
}

func (w *world) runFlows(t *testing.T, ctx context.Context) *running {
	t.Helper()
	r := &running{w: w}
	var err error
	r.client, err = w.client.Capture(ctx, "eth0")
	ok(t, err)
	t.Cleanup(func() { r.client.Close() })
	for _, p := range []*cluster.Pod{w.local, w.remote} {
		c, err := p.Capture(ctx, "eth0")
		ok(t, err)
		t.Cleanup(func() { c.Close() })
		r.peers = append(r.peers, c)
	}
	for _, v6 := range []bool{false, true} {
		for _, proto := range protos() {
			for _, target := range []string{
				vip(pick(v6, web4, web6), 80),
				at(ip(w.remote, v6), cluster.ServerPort).String(),
				at(ip(w.local, v6), cluster.ServerPort).String(),
			} {
				s, err := w.client.Stream(ctx, target, "-proto", proto)
				ok(t, err)
				r.streams = append(r.streams, s)
				r.names = append(r.names, proto+" "+target)
			}
		}
	}
	return r
}

// progress awaits so many more answers of every flow.
func (r *running) progress(t *testing.T, ctx context.Context, more uint64) {
	t.Helper()
	for _, s := range r.streams {
		progress(t, ctx, s, more)
	}
}

// stop ends the flows: not a packet may be missing, by the numbers in the
// messages and by what was captured at both ends.
func (r *running) stop(t *testing.T, ctx context.Context) {
	t.Helper()
	for i, s := range r.streams {
		rep, err := s.Stop(ctx)
		ok(t, err)
		if rep.Lost > 0 || rep.Error != "" || len(rep.Servers) != 1 {
			t.Errorf("%s: %+v", r.names[i], rep)
		}
	}
	if err := r.w.lossless(ctx, r.client, r.peers...); err != nil {
		t.Errorf("packets are missing: %v", err)
	}
}

// Both agents are killed in the middle of traffic and started again: no
// packet of an established flow is lost, new flows are served throughout.
func TestL1KillAgents(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	r := w.runFlows(t, ctx)
	r.progress(t, ctx, 10)
	ok(t, w.KillAgents(ctx))
	t.Cleanup(func() { w.ensureAgents(t) })
	r.progress(t, ctx, 50)
	for _, v6 := range []bool{false, true} {
		send(t, ctx, w.other.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-count", "16")
	}
	ok(t, w.StartAgents(ctx))
	r.progress(t, ctx, 50)
	r.stop(t, ctx)
}

// ensureAgents starts what a failed case left stopped.
func (w *world) ensureAgents(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for _, n := range w.Nodes {
		if n.Agent() == nil {
			if err := n.StartAgent(ctx); err != nil {
				t.Error(err)
			}
		}
	}
}

// Services change while no agent runs. After the start the datapath is as the
// objects are; on the way there, what did not change was never without its
// backends.
func TestL1ServicesChangeDuringRestart(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	ips := map[string][]string{
		"moves": {"10.98.40.1", "fd00:10:98::2801"},
		"goes":  {"10.98.40.2", "fd00:10:98::2802"},
		"comes": {"10.98.40.3", "fd00:10:98::2803"},
		"empty": {"10.98.40.4", "fd00:10:98::2804"},
	}
	service := func(name string, p ...*cluster.Pod) []cluster.Object {
		return append(slicesFor(name, name, bothSlicePorts(cluster.ServerPort), p...), clusterIP(name, ips[name], bothPorts(80)...))
	}
	target := func(name string, v6 bool) string { return vip(pick(v6, ips[name][0], ips[name][1]), 80) }
	for _, name := range []string{"moves", "goes", "empty"} {
		w.put(t, service(name, w.local)...)
		for _, v6 := range []bool{false, true} {
			w.inForce(t, ctx, "udp", target(name, v6), atAll(v6, w.local)...)
		}
	}
	r := w.runFlows(t, ctx)
	moving, err := w.client.Stream(ctx, target("moves", false))
	ok(t, err)

	ok(t, w.KillAgents(ctx))
	t.Cleanup(func() { w.ensureAgents(t) })
	ok(t, w.Manifests.Put(service("moves", w.remote)...))
	ok(t, w.Manifests.Delete(service("goes", w.local)...))
	ok(t, w.Manifests.Delete(slicesFor("empty", "empty", nil, w.local)...)) // the service stays
	w.put(t, service("comes", w.remote)...)

	// Look all the time: nothing is programmed before all lists are in.
	stop, looked := make(chan struct{}), make(chan error, 1)
	go func() {
		var bad error
		pace := time.NewTicker(2 * time.Millisecond) // not faster: the others need the CPU
		defer pace.Stop()
		for n := 0; ; n++ {
			select {
			case <-pace.C:
			case <-stop:
				if n < 10 && bad == nil {
					bad = fmt.Errorf("looked %d times only", n)
				}
				looked <- bad
				return
			}
			for _, node := range w.Nodes {
				for _, v6 := range []bool{false, true} {
					got, known, err := backends(node, "tcp", vip(pick(v6, web4, web6), 80))
					if bad == nil && (err != nil || !known || len(got) != 2) {
						bad = fmt.Errorf("%s: during the restart web has %v (known: %v, %w)", node.NodeName, got, known, err)
					}
				}
			}
		}
	}()
	ok(t, w.StartAgents(ctx))
	for _, v6 := range []bool{false, true} {
		// Ready means that all of it is in force.
		for _, n := range w.Nodes {
			if got, _, err := backends(n, "tcp", target("moves", v6)); err != nil || !slices.Equal(got, atAll(v6, w.remote)) {
				t.Errorf("%s is ready, but moves has %v (%v)", n.NodeName, got, err)
			}
			if got, known, err := backends(n, "tcp", target("goes", v6)); err != nil || known {
				t.Errorf("%s is ready, but goes has %v (%v)", n.NodeName, got, err)
			}
			if got, known, err := backends(n, "tcp", target("empty", v6)); err != nil || !known || len(got) > 0 {
				t.Errorf("%s is ready, but empty has %v (%v)", n.NodeName, got, err)
			}
		}
		for _, name := range []string{"moves", "comes"} {
			if s := send(t, ctx, w.client.Netns, "tcp", target(name, v6), "-count", "8"); s.Servers["remote"] != 8 {
				t.Errorf("%s: answered by %v", name, s.Servers)
			}
		}
		before := readCounters(t, w.a)
		silent(t, ctx, w.client.Netns, "tcp", target("goes", v6))
		atLeast(t, w.a, before, "drop_no_service", "from_pod", v6, 1)
		w.rejected(t, ctx, w.client.Netns, "from_pod", "tcp", target("empty", v6), "drop_no_backend", v6)
	}
	close(stop)
	ok(t, <-looked)
	progress(t, ctx, moving, 20)
	rep, err := moving.Stop(ctx)
	ok(t, err)
	if rep.Lost > 0 || !slices.Equal(rep.Servers, []string{"local"}) {
		t.Errorf("the connection that was open: %+v", rep)
	}
	r.progress(t, ctx, 20)
	r.stop(t, ctx)
}

// Ready only when programs are attached, all lists in and all of it applied;
// until then the answer names what is missing.
func TestL6Ready(t *testing.T) {
	w := own(t, cluster.Config{Nodes: cluster.DefaultNodes()[:1]})
	ctx := within(t, 60*time.Second)
	node := w.a
	started := make(chan error, 1)
	go func() { started <- node.StartAgent(ctx) }()
	waitsFor := func(words ...string) {
		t.Helper()
		eventually(t, ctx, func() error {
			code, body, err := node.AgentGet(ctx, "/readyz")
			if err != nil {
				return err
			}
			for _, word := range words {
				if code != http.StatusServiceUnavailable || !strings.Contains(body, word) {
					return fmt.Errorf("/readyz: %d %q, want 503 that names %q", code, body, word)
				}
			}
			return nil
		})
	}
	waitsFor("Node node-a")
	ok(t, w.Manifests.Put(object[cluster.Object](w, "default"), object[cluster.Object](w, "web"))) // other objects do not make it ready
	waitsFor("Node node-a")
	select {
	case err := <-started:
		t.Fatalf("ready, though the Node is missing: %v", err)
	default:
	}
	ok(t, w.Manifests.Put(w.objs...))
	ok(t, <-started)
	// Now, without waiting any more, all of it is there.
	for _, v6 := range []bool{false, true} {
		if got, known, err := backends(node, "tcp", vip(pick(v6, web4, web6), 80)); err != nil || !known || len(got) != 2 {
			t.Errorf("ready, but web has %v (known: %v, %v)", got, known, err)
		}
	}
	for _, hook := range []string{"eth0 ingress from_netdev", "podweir.vxlan ingress from_overlay", "podweir.vxlan egress to_overlay"} {
		if got := programs(t, node); got[hook] != 1 {
			t.Errorf("ready, but %s is not attached: %v", hook, got)
		}
	}
	ok(t, hasRoute(node, "10.244.158.0/24", "podweir.vxlan"))
	ok(t, hasRoute(node, "10.98.0.0/16", "podweir.vxlan"))

	// The last device that leads outside goes: not ready any more.
	_, err := node.Exec(ctx, "ip", "addr", "flush", "dev", "eth0", "scope", "global")
	ok(t, err)
	_, err = node.Exec(ctx, "ip", "route", "flush", "default")
	ok(t, err)
	_, err = node.Exec(ctx, "ip", "-6", "route", "flush", "default")
	ok(t, err)
	waitsFor("no device")
}

// status asks an agent for what it knows of itself.
func status(t *testing.T, ctx context.Context, n *cluster.Node) (s api.Status) {
	t.Helper()
	code, body, err := n.AgentGet(ctx, api.PathStatus)
	ok(t, err)
	if code != http.StatusOK {
		t.Fatalf("%s: %d %s", api.PathStatus, code, body)
	}
	ok(t, json.Unmarshal([]byte(body), &s))
	return s
}

// Objects and interfaces that cannot be used are reported, with the place of
// the fault, and nothing else suffers.
func TestL10BadObjectsAndInterfaces(t *testing.T) {
	w := shared(t)
	ctx := within(t, 90*time.Second)
	r := w.runFlows(t, ctx)
	bad := map[string]string{
		"bad-syntax.yaml": "apiVersion: v1\nkind: Service\nmetadata:\n\tname: tab\n",
		"bad-port.yaml": `apiVersion: v1
kind: Service
metadata: {name: badport, namespace: default}
spec:
  clusterIP: 10.98.50.1
  clusterIPs: [10.98.50.1]
  ports:
  - {name: t, protocol: TCP, port: 99999}
---
apiVersion: v1
kind: Service
metadata: {name: neighbour, namespace: default}
spec:
  clusterIP: 10.98.50.2
  clusterIPs: [10.98.50.2]
  ports:
  - {name: t, protocol: TCP, port: 80}
`,
	}
	for name, text := range bad {
		ok(t, w.Manifests.PutRaw(name, []byte(text)))
		t.Cleanup(func() { ok(t, w.removeRaw(name)) })
	}
	// A good change beside the bad ones is applied; so is the good document
	// in the file with the bad one.
	w.put(t, endpointSlice("neighbour", "neighbour", bothSlicePorts(cluster.ServerPort)[:1], w.remote.IPv4()))
	w.inForce(t, ctx, "tcp", "10.98.50.2:80", atAll(false, w.remote)...)
	send(t, ctx, w.client.Netns, "tcp", "10.98.50.2:80")

	// A pod whose device another program has removed, and a route of another
	// program where ours should be.
	obj := pod("unlucky", "node-a", "10.244.80.99", "fd00:10:244:50::99")
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	host := hostSide(t, p).Attrs().Name
	_, err = w.a.Exec(ctx, "ip", "link", "del", host)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Delete(context.Background())) })
	_, err = w.a.Exec(ctx, "ip", "route", "add", "blackhole", "10.97.0.0/16")
	ok(t, err)
	t.Cleanup(func() {
		_, err := w.a.Exec(context.Background(), "ip", "route", "del", "blackhole", "10.97.0.0/16")
		ok(t, err)
	})
	w.put(t, serviceCIDR("taken", "10.97.0.0/16"))

	for _, want := range []struct {
		object, file, word string
		line               bool
	}{
		{"", "bad-syntax.yaml", "", true},
		{"Service default/badport", "bad-port.yaml", "99999", true},
		{"", "", "10.97.0.0/16", false},
		{"", "", host, false},
	} {
		eventually(t, ctx, func() error {
			all := status(t, ctx, w.a).Problems
			for _, p := range all {
				if strings.Contains(p.Object, want.object) && strings.HasSuffix(p.File, want.file) && strings.Contains(p.Error, want.word) && (p.Line > 0 || !want.line) {
					return nil
				}
			}
			return fmt.Errorf("node-a reports no problem like %+v: %+v", want, all)
		})
	}
	if code, body, err := w.a.AgentGet(ctx, "/readyz"); err != nil || code != http.StatusOK {
		t.Errorf("/readyz: %d %s %v", code, body, err)
	}
	// New pods, services and connections as ever.
	next := pod("next", "node-a", "10.244.80.100", "fd00:10:244:50::100")
	w.put(t, next)
	q, err := w.AddPod(ctx, next)
	ok(t, err)
	for _, v6 := range []bool{false, true} {
		send(t, ctx, q.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-count", "8")
	}
	ok(t, q.Delete(ctx))
	r.progress(t, ctx, 10)
	r.stop(t, ctx)
}
