//go:build realcluster

package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// L1, L2, P14: an older version takes the place of this one, by another image in
// the overlay. Its programs and maps are others; so is the plugin.
func (l *lifecycleWorld) older(w *world) {
	must(w, w.cluster.ImportOlder(w.ctx))
	l.exchanged(w, func() error { return w.cluster.Install(w.ctx, realcluster.Installation{Image: realcluster.OlderImage}) })
	for _, n := range w.nodes {
		if v := w.version(n); !strings.HasPrefix(v, "older") {
			w.Errorf("the agent of %s is of version %s", n.name, v)
		}
	}
	// What it has started is there for the one that comes.
	for _, n := range w.nodes {
		_, err := w.api.CoreV1().Pods(w.ns).Create(w.ctx, pod("kept-"+n.name, n.name, map[string]string{"app": "kept"}), metav1.CreateOptions{})
		must(w, err)
	}
	l.kept = w.pods(w.ns, "app=kept", "pods that the older version starts", allReady(len(w.nodes)))
	l.new(w, l.kept)
}

// L1, L2, P14: and this version that of the older one, by the command that goes
// back to what was before.
func (l *lifecycleWorld) upgraded(w *world) {
	l.exchanged(w, func() error {
		_, err := w.kubectl("-n", system, "rollout", "undo", "daemonset/podweir")
		return err
	})
	for _, n := range w.nodes {
		if v := w.version(n); strings.HasPrefix(v, "older") {
			w.Errorf("the agent of %s is of version %s", n.name, v)
		}
		w.noProblem(n)
	}
	for node, a := range w.readyAgents() {
		if took, err := w.startToReady(a); err != nil {
			w.Errorf("%s: %v", node, err)
		} else {
			w.Logf("BAR %s: agent from start to ready, under load: %.2f s", node, took.Seconds())
		}
		log, err := w.api.CoreV1().Pods(system).GetLogs(a.Name, &corev1.PodLogOptions{Container: "agent"}).DoRaw(w.ctx)
		must(w, err)
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, "another layout") {
				w.Logf("%s: %s", node, line)
			}
		}
	}
	if l.kept == nil {
		w.Fatal("there are no pods of the older version")
	}
	l.new(w, l.kept)
	l.new(w, []corev1.Pod{*w.run(w.ns, pod("after-upgrade", w.nodes[1].name, nil))[0]})
	for _, p := range l.kept {
		w.remove(w.ns, p.Name)
	}
}

// exchanged has all agents replaced under 2,000 requests a second, and long
// flows: none of the requests is lost, no connection ends.
func (l *lifecycleWorld) exchanged(w *world, by func() error) {
	w.Helper()
	before := w.readyAgents()
	n := w.nodes[0]
	ports := l.svc.Spec.Ports
	streams := []*stream{
		w.stream(inPod(l.web[n.name]), "tcp", at(l.svc.Spec.ClusterIPs[0], 80)),
		w.stream(inPod(l.web[n.name]), "tcp", at(l.svc.Spec.ClusterIPs[1], 80)),
		w.stream(inPod(l.web[n.name]), "udp", at(l.svc.Spec.ClusterIPs[0], 80)),
		w.stream(inPod(l.web[n.name]), "tcp", at(l.web[w.nodes[1].name].Status.PodIP, port)),
		w.stream(onNode(n), "tcp", at(l.svc.Spec.ClusterIPs[0], 80)),
		w.stream(outside, "tcp", at(n.ips[0], ports[0].NodePort)),
		w.stream(outside, "tcp", at(n.ips[1], ports[0].NodePort)),
		w.stream(outside, "udp", at(w.nodes[1].ips[0], ports[1].NodePort)),
	}
	e := l.start(w, busy)
	// What the machine can do is seen before anything happens. One that others
	// keep busy is held to what it can.
	const least = 2000
	reaches := func(since []probe.Summary) error {
		rate, _, err := e.rate(since)
		if err == nil && rate < least {
			err = fmt.Errorf("%.0f requests a second", rate)
		}
		return err
	}
	able := w.awaitFor(15*time.Second, func() error { return reaches(nil) })
	since, err := e.sent()
	must(w, err)
	if err := by(); err != nil {
		w.Error(err)
	}
	if _, err := w.kubectl("-n", system, "rollout", "status", "daemonset/podweir", "--timeout=240s"); err != nil {
		w.Error(err)
	}
	rate, requests, err := e.rate(since)
	must(w, err)
	w.Logf("BAR while all agents were replaced: %d requests, %.0f a second", requests, rate)
	for _, s := range streams {
		if err := s.moves(); err != nil {
			w.Error(err)
		}
	}
	if able != nil {
		w.Logf("BAR this machine does not do %d requests a second with nothing happening: %v", least, able)
	} else if err := w.await(func() error { return reaches(since) }); err != nil {
		// Those that a machine is late with are made up for.
		w.Errorf("%v, want %d, from before the first agent ends until after the last is ready", err, least)
	}
	e.end(w)
	for _, s := range streams {
		if r, err := last[probe.StreamReport](s.s, s.name); err != nil || r.Lost > 0 || r.Error != "" {
			w.Errorf("%s, which ran all the time: %+v (%v)", s.name, r, err)
		}
	}
	for node, a := range w.readyAgents() {
		if a.UID == before[node].UID {
			w.Errorf("the agent of %s was not replaced", node)
		}
	}
}

// new: each of these pods is reached from every node, and reaches the service.
func (l *lifecycleWorld) new(w *world, pods []corev1.Pod) {
	w.Helper()
	for i := range pods {
		p := &pods[i]
		for fam, ip := range p.Status.PodIPs {
			for _, from := range l.web {
				if _, err := w.reach(inPod(from), "tcp", at(ip.IP, port)); err != nil {
					w.Error(err)
				}
			}
			w.first(inPod(p), at(l.svc.Spec.ClusterIPs[fam], 80))
		}
	}
}

// version is what a node's agent says that it is.
func (w *world) version(n node) string {
	w.Helper()
	all, err := w.metrics(n.name)
	must(w, err)
	label := regexp.MustCompile(`^podweir_build_info\{(?:.*,)?version="([^"]*)"`)
	for name := range all {
		if m := label.FindStringSubmatch(name); m != nil {
			return m[1]
		}
	}
	w.Fatalf("%s does not say which version it is", n.name)
	return ""
}
