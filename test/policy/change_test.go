package policy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

// flow is a connection that stays open.
type flow interface {
	// received counts what has come through so far.
	received(context.Context) (uint64, error)
}

type called struct{ *cluster.Stream }

func (c called) received(ctx context.Context) (uint64, error) {
	r, err := c.Report(ctx)
	return r.Received, err
}

// pushed counts bytes that the server sends while the client says nothing:
// packets of the reply direction alone.
type pushed struct{ n *atomic.Uint64 }

func (p pushed) received(context.Context) (uint64, error) { return p.n.Load(), nil }

// push opens one connection and has the accepting side talk on it.
func (w *world) push(from, to string, addr netip.Addr, port int) flow {
	w.Helper()
	l, err := mesh.Listen(w.ctx, w.netns(to), port)
	w.must(err)
	w.Cleanup(func() { _ = l.Close() })
	c, err := mesh.Dial(w.ctx, w.netns(from), "tcp", netip.AddrPortFrom(addr, uint16(port)).String())
	w.must(err)
	s, err := l.Accept()
	w.must(err)
	w.Cleanup(func() { _, _ = c.Close(), s.Close() })
	go func() {
		t := time.NewTicker(5 * time.Millisecond)
		defer t.Stop()
		for range t.C {
			if _, err := s.Write([]byte("tick\n")); err != nil {
				return
			}
		}
	}()
	p := pushed{new(atomic.Uint64)}
	go count(c, p.n)
	return p
}

func count(c net.Conn, n *atomic.Uint64) {
	buf := make([]byte, 4096)
	for {
		k, err := c.Read(buf)
		if err != nil {
			return
		}
		n.Add(uint64(k))
	}
}

// flows opens connections between two pods: TCP and UDP that ask and answer,
// and TCP that is pushed, in both families.
func (w *world) flows(from, to string, port int) []flow {
	w.Helper()
	var out []flow
	for i, addr := range w.addrs(to) {
		for _, proto := range []string{"tcp", "udp"} {
			s, err := w.netns(from).Stream(w.ctx, netip.AddrPortFrom(addr, uint16(port)).String(), "-proto", proto)
			w.must(err)
			w.Cleanup(func() { _ = s.Kill(context.WithoutCancel(w.ctx)) })
			out = append(out, called{s})
		}
		out = append(out, w.push(from, to, addr, port+1+i))
	}
	return out
}

func (w *world) amounts(flows []flow) []uint64 {
	w.Helper()
	out := make([]uint64, len(flows))
	for i, f := range flows {
		n, err := f.received(w.ctx)
		w.must(err)
		out[i] = n
	}
	return out
}

// stopped: once the denial is in force, nothing arrives on any flow while
// packets go on being dropped.
func (w *world) stopped(flows []flow) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	w.must(cluster.Eventually(ctx, func() error {
		w.dropsMore(5) // what was on its way has arrived
		before := w.amounts(flows)
		w.dropsMore(40)
		for i, n := range w.amounts(flows) {
			if n != before[i] {
				return fmt.Errorf("flow %d goes on under denial: %d, then %d", i, before[i], n)
			}
		}
		return nil
	}))
}

func (w *world) dropsMore(n uint64) {
	w.Helper()
	start, err := w.dropped()
	w.must(err)
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	w.must(cluster.Eventually(ctx, func() error {
		now, err := w.dropped()
		if err == nil && now-start < n {
			err = fmt.Errorf("policy dropped %d packets, waiting for %d", now-start, n)
		}
		return err
	}))
}

// goOn: each flow delivers again.
func (w *world) goOn(flows []flow) {
	w.Helper()
	before := w.amounts(flows)
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	for i, f := range flows {
		w.must(cluster.Eventually(ctx, func() error {
			n, err := f.received(ctx)
			if err == nil && n < before[i]+3 {
				err = fmt.Errorf("flow %d does not go on: %d, then %d", i, before[i], n)
			}
			return err
		}))
	}
}

// serveLong starts the servers of flows that stay open.
func (w *world) serveLong(key string, port int) {
	w.Helper()
	p, err := w.netns(key).Serve(w.ctx, key, port)
	w.must(err)
	w.Cleanup(func() { _ = p.Kill(context.WithoutCancel(w.ctx)) })
}

// P11: labels, namespace labels, edits and deletions of policies act on new
// and established flows, and flows go on when they may again.
func (w *world) changes() {
	w.serveLong("x/b", 9000)
	w.serveLong("x/c", 9000)
	// Across nodes, and on one.
	flows := append(w.flows("v/a", "x/b", 9000), w.flows("v/a", "x/c", 9000)...)
	w.goOn(flows)
	podLabel := func(value string) {
		w.pods["v/a"].Labels["role"] = value
		w.must(w.c.Manifests.Put(w.pods["v/a"]))
		w.settled()
	}
	nsLabel := func(value string) {
		w.namespaces["v"]["role"] = value
		w.putNamespace("v")
		w.settled()
	}
	defer func() {
		delete(w.pods["v/a"].Labels, "role")
		delete(w.namespaces["v"], "role")
		w.must(w.c.Manifests.Put(w.pods["v/a"]))
		w.putNamespace("v")
	}()
	const byPod = "x/in\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {}, podSelector: {matchLabels: {role: friend}}}]"
	const byNamespace = "x/in\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {matchLabels: {role: friend}}}]"
	const closed = "v/out\npodSelector: {matchLabels: {app: a}}\npolicyTypes: [Egress]\negress:\n- to: [{podSelector: {}}]"
	const open = "v/out\npodSelector: {matchLabels: {app: a}}\npolicyTypes: [Egress]\negress:\n- to: [{namespaceSelector: {}}]"
	for _, step := range []struct {
		what    string
		do      func()
		allowed bool
	}{
		{"policy written", func() { w.apply(byPod) }, false},
		{"pod labelled", func() { podLabel("friend") }, true},
		{"pod labelled otherwise", func() { podLabel("foe") }, false},
		{"policy deleted", func() { w.remove("x/in") }, true},
		{"by namespace", func() { w.apply(byNamespace) }, false},
		{"namespace labelled", func() { nsLabel("friend") }, true},
		{"namespace labelled otherwise", func() { nsLabel("foe") }, false},
		{"policy edited", func() { w.apply("x/in\npodSelector: {}\ningress: [{}]") }, true},
		{"egress closed", func() { w.apply(closed) }, false},
		{"egress edited", func() { w.apply(open) }, true},
	} {
		start := time.Now()
		step.do()
		if step.allowed {
			w.goOn(flows)
		} else {
			w.stopped(flows)
		}
		w.amid()
		if w.Failed() {
			w.Fatalf("after: %s", step.what)
		}
		w.Logf("%s: %v", step.what, time.Since(start).Round(time.Millisecond))
	}
}

// P9: a new pod is isolated before its first packet, in both directions. Its
// process and its peer send from before the interface is there.
func (w *world) newPods() {
	w.apply("x/deny-new\npodSelector: {matchLabels: {app: new}}\npolicyTypes: [Ingress, Egress]")
	for _, node := range []string{"node-a", "node-b"} {
		obj := w.newPod("x", "new-"+node, node, "app=new")
		key := "x/" + obj.Name
		sandbox, err := w.c.NewSandbox(obj)
		w.must(err)
		ctx, cancel := context.WithCancel(w.ctx)
		var heard atomic.Uint64
		var wg sync.WaitGroup
		const port = 9100
		for _, at := range []string{key, "v/a", "v/b"} {
			for i, network := range []string{"udp4", "udp6"} {
				var u *net.UDPConn
				w.must(w.netns(at).Do(func() (err error) {
					u, err = net.ListenUDP(network, &net.UDPAddr{Port: port})
					return err
				}))
				context.AfterFunc(ctx, func() { _ = u.Close() })
				var targets []netip.AddrPort
				for _, to := range []string{key, "v/a", "v/b"} {
					// The new pod with everybody, everybody with it.
					if to != at && (to == key || at == key) {
						targets = append(targets, netip.AddrPortFrom(w.addrs(to)[i], port))
					}
				}
				wg.Go(func() {
					for ctx.Err() == nil {
						for _, to := range targets {
							_, _ = u.WriteToUDPAddrPort([]byte("first"), to)
						}
						time.Sleep(100 * time.Microsecond) // the CPUs are few
					}
				})
				wg.Go(func() {
					buf := make([]byte, 64)
					for ctx.Err() == nil {
						if n, _, err := u.ReadFromUDPAddrPort(buf); err == nil && n > 0 {
							heard.Add(1)
						}
					}
				})
			}
		}
		var ips []string
		for _, ip := range obj.Status.PodIPs {
			ips = append(ips, ip.IP)
		}
		err = sandbox.Add(w.ctx, ips...)
		w.must(err)
		w.dropsMore(200)
		if n := heard.Load(); n > 0 {
			w.Errorf("%d packets got through to or from the new pod on %s", n, node)
		}
		// The same sockets talk once the policy goes: they were real.
		w.remove("x/deny-new")
		w.must(cluster.Eventually(w.ctx, func() error {
			if heard.Load() < 100 {
				return errors.New("nothing is heard without the policy")
			}
			return nil
		}))
		w.apply("x/deny-new\npodSelector: {matchLabels: {app: new}}\npolicyTypes: [Ingress, Egress]")
		cancel()
		wg.Wait()
		w.forget(key)
	}
}

// forget ends a pod and its manifest.
func (w *world) forget(key string) {
	w.Helper()
	obj := w.pods[key]
	w.must(w.c.Pod(obj.Namespace, obj.Name).Delete(w.ctx))
	w.must(w.c.Manifests.Delete(obj))
	delete(w.pods, key)
	w.settled()
}

// P10: a completed pod owns no address, the next owner inherits nothing, and
// the late end of the old one takes nothing away.
func (w *world) reuse() {
	w.apply("x/friends\npodSelector: {matchLabels: {app: b}}\ningress:\n- from: [{podSelector: {matchLabels: {app: job}}}]",
		"x/job\npodSelector: {matchLabels: {app: job}}\npolicyTypes: [Ingress]",
		"v/new\npodSelector: {matchLabels: {app: heir}}\npolicyTypes: [Egress]\negress:\n- to: [{namespaceSelector: {matchLabels: {team: red}}}]")
	job := w.newPod("x", "job", "node-a", "app=job")
	jobPod, err := w.c.AddPod(w.ctx, job)
	w.must(err)
	w.must(mesh.Serve(w.ctx, jobPod.Netns, "x/job", portA, portB))
	w.settled()
	w.check()

	// It completes; its sandbox goes, its object stays.
	job = job.DeepCopy()
	job.Status.Phase = corev1.PodSucceeded
	w.must(w.c.Manifests.Put(job))
	delete(w.pods, "x/job")
	w.must(jobPod.Del(w.ctx))
	w.settled()
	heir := w.newPod("v", "heir", "node-a", "app=heir")
	heir.Status.PodIPs, heir.Status.PodIP = job.Status.PodIPs, job.Status.PodIP
	w.must(w.c.Manifests.Put(heir))
	heirPod, err := w.c.AddPod(w.ctx, heir)
	w.must(err)
	w.must(mesh.Serve(w.ctx, heirPod.Netns, "v/heir", portA, portB))
	w.settled()
	w.check()

	// The late end of the old one: DEL again, then its object.
	w.must(jobPod.Delete(w.ctx))
	w.settled()
	w.check()
	w.must(w.c.Manifests.Delete(job))
	w.settled()
	w.check()
	w.forget("v/heir")
}

// P14: agents killed and started again under default deny: in every round of
// new flows the allowed ones pass and the denied ones do not.
func (w *world) restart() {
	w.apply(denyAll, "x/some\npodSelector: {}\npolicyTypes: [Ingress, Egress]\ningress:\n- from: [{namespaceSelector: {matchLabels: {team: blue}}}]\n  ports: [{port: 8080}, {port: 8080, protocol: UDP}]\negress:\n- to: [{namespaceSelector: {matchLabels: {team: blue}}, podSelector: {matchLabels: {app: b}}}]")
	w.steady(func() {
		w.must(w.c.KillAgents(w.ctx))
		w.must(w.c.StartAgents(w.ctx))
		w.settled()
		for _, n := range w.c.Nodes {
			w.must(n.RestartAgent(w.ctx))
		}
		w.settled()
	}, pair{"v/a", "x/a", portA}, pair{"v/a", "x/a", portB}, pair{"v/a", "x/b", portA}, pair{"v/b", "x/a", portB},
		pair{"x/a", "v/b", portA}, pair{"x/a", "v/a", portA}, pair{"ext", "x/b", portA}, pair{"z/a", "x/a", portA}, pair{"x/a", "x/c", portA})
	w.check()
	w.clear()
	w.matrix()
}

// P14: a policy written while no agent runs is in force when it is back.
func (w *world) missed() {
	w.must(w.c.KillAgents(w.ctx))
	w.pods["v/a"].Labels["late"] = "yes"
	w.must(w.c.Manifests.Put(w.pods["v/a"]))
	w.write("x/late\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {}, podSelector: {matchLabels: {late: 'yes'}}}]")
	w.must(w.c.StartAgents(w.ctx))
	w.settled()
	w.check()
	delete(w.pods["v/a"].Labels, "late")
	w.must(w.c.Manifests.Put(w.pods["v/a"]))
	w.settled()
	w.matrix()
}
