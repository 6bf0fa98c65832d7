//go:build realcluster

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/podweir/podweir/test/tools/probe"
)

// Agents, the API server and nodes come and go.
func TestLifecycle(t *testing.T) {
	w := newWorld(t)
	l := &lifecycleWorld{world: w}
	l.web = w.everywhere("web", nil)
	l.shut = w.everywhere("shut", nil)
	l.svc = w.service("web", "web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	w.policy("shut", "shut", networkingv1.NetworkPolicySpec{})
	for _, p := range l.web {
		for _, ip := range l.svc.Spec.ClusterIPs {
			w.first(inPod(p), at(ip, 80))
		}
		for _, q := range l.shut {
			w.eventually("default deny", func() error { return w.fails(inPod(p), "tcp", at(q.Status.PodIP, port), probe.Timeout) })
		}
	}
	w.step("OlderVersion", l.older)
	w.step("Upgraded", l.upgraded)
	w.step("AgentsKilled", l.killed)
	w.step("APIServerAway", l.apiServerAway)
	w.step("NodeCutOff", l.cutOff)
	w.step("Leftovers", l.leftovers)
	w.step("NodeLost", l.nodeLost)
	w.step("NodeDeleted", l.nodeDeleted)
	w.step("Uninstalled", l.uninstalled)
}

type lifecycleWorld struct {
	*world
	web  map[string]*corev1.Pod
	shut map[string]*corev1.Pod // isolated: nobody gets in
	svc  *corev1.Service
	kept []corev1.Pod // what the older version has started
}

// everything is what goes on while something happens: pods and nodes that call
// the service, clients outside at every node's NodePort, and pods that call
// where they are not let in.
type everything struct {
	served, denied []*load
}

// pace is how often each of a node's callers calls: its pod by the ClusterIPs of
// both families, the node itself, and clients outside by the node's port, at its
// addresses of both families.
type pace struct {
	pod4, pod6, node, outside time.Duration
	flags                     []string
}

var (
	steady = pace{5 * time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond, nil}
	// busy is 2,700 a second on three nodes, and what a slow machine is late with
	// is made up for. A caller has ports for twice its share, each for a minute.
	busy = pace{5 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 5 * time.Millisecond, []string{"-parallel", "8", "-arrears", "30s"}}
)

func (l *lifecycleWorld) start(w *world, p pace) everything {
	w.Helper()
	var e everything
	call := func(from place, to string, every time.Duration) {
		e.served = append(e.served, w.load(from, to, append([]string{"-interval", every.String()}, p.flags...)...))
	}
	for i, n := range w.nodes {
		next := w.nodes[(i+1)%len(w.nodes)]
		vip := func(fam int) string { return at(l.svc.Spec.ClusterIPs[fam], 80) }
		call(inPod(l.web[n.name]), vip(0), p.pod4)
		call(inPod(l.web[n.name]), vip(1), p.pod6)
		call(onNode(n), vip(0), p.node)
		for _, ip := range n.ips {
			call(outside, at(ip, l.svc.Spec.Ports[0].NodePort), p.outside)
		}
		for _, to := range []*corev1.Pod{l.shut[n.name], l.shut[next.name]} {
			e.denied = append(e.denied, w.load(inPod(l.web[n.name]), at(to.Status.PodIPs[i%2].IP, port), "-interval", "50ms", "-parallel", "4", "-timeout", "1s"))
		}
	}
	// Under way before anything happens.
	for _, x := range e.served {
		w.eventually(x.name, func() error {
			sum, err := x.soFar()
			if err == nil && sum.OK < 20 {
				err = fmt.Errorf("%+v", sum)
			}
			return err
		})
	}
	return e
}

// sent is how many requests each caller has made, and since when.
func (e everything) sent() (out []probe.Summary, err error) {
	for _, x := range e.served {
		sum, err := x.soFar()
		if err != nil {
			return nil, err
		}
		out = append(out, sum)
	}
	return out, nil
}

// rate is how many requests a second there were from then until now, and how
// many in all.
func (e everything) rate(then []probe.Summary) (perSecond float64, all int, err error) {
	now, err := e.sent()
	if err != nil {
		return 0, 0, err
	}
	for i, sum := range now {
		n, took := sum.Attempts, sum.Took
		if then != nil {
			n, took = n-then[i].Attempts, took-then[i].Took
		}
		perSecond += float64(n) / took.Seconds()
		all += n
	}
	return perSecond, all, nil
}

// end: nobody was refused, and nobody let in (L1, P14).
func (e everything) end(w *world) {
	w.Helper()
	w.none(e.served)
	tried := 0
	for _, x := range e.denied {
		sum, err := x.end()
		tried += sum.Attempts
		if err != nil && sum.Attempts == 0 {
			w.Errorf("%s: %v", x.name, err)
		}
		if sum.OK > 0 {
			w.Errorf("%s: let in %d times of %d", x.name, sum.OK, sum.Attempts)
		}
	}
	if tried == 0 {
		w.Error("nothing was tried where nobody is let in")
	}
}

// L1, P14: all agents are killed, and pods that are created meanwhile start.
func (l *lifecycleWorld) killed(w *world) {
	before := w.readyAgents()
	e := l.start(w, steady)
	for _, n := range w.nodes {
		w.kill(n, before[n.name])
	}
	w.run(w.ns, pod("meanwhile", w.nodes[0].name, nil))
	for node, a := range w.readyAgents() {
		if was := before[node].Status.ContainerStatuses[0].RestartCount; a.UID != before[node].UID || a.Status.ContainerStatuses[0].RestartCount != was+1 {
			w.Errorf("the agent of %s was started %d times anew, want once", node, a.Status.ContainerStatuses[0].RestartCount-was)
		}
	}
	e.end(w)
}

// kill ends an agent as a crash does, and waits until another is there.
func (w *world) kill(n node, agent *corev1.Pod) {
	w.Helper()
	id := strings.TrimPrefix(agent.Status.ContainerStatuses[0].ContainerID, "containerd://")
	_, err := w.output(w.ctx, onNode(n), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", id)
	must(w, err)
	w.pods(system, "app.kubernetes.io/name=podweir", "the agent of "+n.name+" comes back", func(all []corev1.Pod) error {
		for i := range all {
			if p := &all[i]; p.UID == agent.UID && isReady(p) && !strings.HasSuffix(p.Status.ContainerStatuses[0].ContainerID, id) {
				return nil
			}
		}
		return errors.New("not ready")
	})
}

// L5, L6: while there is no API server everything goes on, with an agent that
// starts meanwhile, too; that one is not ready before it has heard of
// everything.
func (l *lifecycleWorld) apiServerAway(w *world) {
	agents := w.readyAgents()
	n := w.nodes[0]
	e := l.start(w, steady)
	must(w, w.cluster.StopPart("kube-apiserver"))
	back := false
	defer func() {
		if !back {
			must(w, w.cluster.StartPart(background(w), "kube-apiserver"))
		}
	}()
	ready := func(want int) error {
		body, status, err := w.get(n.name, "127.0.0.1:9964", "/readyz")
		if err == nil && status != want {
			err = fmt.Errorf("/readyz says %d, want %d: %s", status, want, body)
		}
		return err
	}
	id := strings.TrimPrefix(agents[n.name].Status.ContainerStatuses[0].ContainerID, "containerd://")
	_, err := w.output(w.ctx, onNode(n), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", id)
	must(w, err)
	w.eventually("an agent without an API server", func() error { return ready(http.StatusServiceUnavailable) })
	// New connections through each way, with no agent that knows anything.
	for _, x := range e.served {
		sum, err := x.soFar()
		must(w, err)
		w.eventually(x.name+" goes on", func() error {
			now, err := x.soFar()
			if err == nil && now.OK < sum.OK+50 {
				err = fmt.Errorf("%d, before %d", now.OK, sum.OK)
			}
			return err
		})
	}
	must(w, ready(http.StatusServiceUnavailable))
	must(w, w.cluster.StartPart(w.ctx, "kube-apiserver"))
	back = true
	w.eventually("ready with the API server", func() error { return ready(http.StatusOK) })
	e.end(w)
	w.readyAgents()
	// Changes are followed again, on every node.
	svc := w.service("after-api", "web", nil)
	for _, p := range l.web {
		w.first(inPod(p), at(svc.Spec.ClusterIP, 80))
	}
}

// S30: what goes while a node hears nothing from the API server is applied
// when it does.
func (l *lifecycleWorld) cutOff(w *world) {
	app := map[string]string{"app": "cut"}
	old := w.run(w.ns, pod("cut-1", w.nodes[0].name, app), pod("cut-2", w.nodes[2].name, app))
	svc := w.service("cut", "cut", nil)
	n := w.nodes[1]
	from := inPod(l.web[n.name])
	for _, p := range l.web {
		w.first(inPod(p), at(svc.Spec.ClusterIP, 80))
	}
	gone := at(old[0].Status.PodIP, port)
	lists := func(node, backend string) (bool, error) {
		out, err := w.podweir(w.ctx, node, "services", "-o", "json")
		return strings.Contains(string(out), `"`+backend+`"`), err
	}
	has, err := lists(n.name, gone)
	if err != nil || !has {
		w.Fatalf("podweir services on %s does not list %s (%v)", n.name, gone, err)
	}
	mend, err := w.cluster.Cut(w.ctx, n.name)
	must(w, err)
	mended := false
	defer func() {
		if !mended {
			must(w, mend())
		}
	}()
	w.remove(w.ns, "cut-1")
	fresh := w.run(w.ns, pod("cut-3", w.nodes[2].name, app))[0]
	w.eventually("a node that hears it", func() error {
		has, err := lists(w.nodes[0].name, gone)
		if err == nil && has {
			err = errors.New("the removed endpoint is still there")
		}
		return err
	})
	if has, err := lists(n.name, gone); err != nil || !has {
		w.Errorf("%s is not cut off: it has heard of the removal (%v)", n.name, err)
	}
	must(w, mend())
	mended = true
	w.eventually("the removal", func() error {
		has, err := lists(n.name, gone)
		if err == nil && has {
			err = errors.New("the removed endpoint is still there")
		}
		return err
	})
	w.eventually("what came meanwhile", func() error {
		list, err := w.calls(from, probe.Call{Proto: "tcp", Target: at(svc.Spec.ClusterIP, 80), Servers: 2, Most: 60})
		seen := map[string]bool{}
		for _, a := range list {
			err = errors.Join(err, attemptError(a))
			if a.OK {
				seen[a.Reply.Server] = true
			}
		}
		if err == nil && (!seen[fresh.Name] || !seen["cut-2"]) {
			err = fmt.Errorf("answered by %v", seen)
		}
		return err
	})
}

// L4: rules of a kube-proxy that was here before are named, and removed on
// request, in the agent's pod.
func (l *lifecycleWorld) leftovers(w *world) {
	n := w.nodes[1]
	run := func(args ...string) {
		w.Helper()
		if _, err := w.output(background(w), onNode(n), args...); err != nil {
			w.Error(err)
		}
	}
	doctor := func() string {
		out, _ := w.podweir(w.ctx, n.name, "doctor")
		return string(out)
	}
	if out := doctor(); strings.Contains(out, "WARN leftovers") {
		w.Errorf("a kube-proxy where none was:\n%s", out)
	}
	run("iptables", "-t", "nat", "-N", "KUBE-SERVICES")
	run("nft", "add", "table", "ip6", "kube-proxy")
	run("nft", "add", "chain", "ip6", "kube-proxy", "services")
	out := doctor()
	for _, want := range []string{"KUBE-SERVICES", "table ip6 kube-proxy", "kube-proxy --cleanup"} {
		if !strings.Contains(out, want) {
			w.Errorf("podweir doctor does not say %q:\n%s", want, out)
		}
	}
	a := w.agent(w.ctx, n.name)
	if a == nil {
		w.Fatal("no agent on " + n.name)
	}
	if out, err := w.output(background(w), inPod(a), "podweir-agent", "cleanup", "--kube-proxy"); err != nil {
		w.Fatalf("%v\n%s", err, out)
	}
	if out := doctor(); strings.Contains(out, "WARN leftovers") {
		w.Errorf("after the cleanup:\n%s", out)
	}
}
