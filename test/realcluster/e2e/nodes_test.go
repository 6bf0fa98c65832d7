//go:build realcluster

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/test/tools/probe"
)

// walk has every pod reach every other, itself by its service, in both
// families, and from outside.
func (l *lifecycleWorld) walk(w *world) {
	w.Helper()
	for _, from := range l.web {
		for _, to := range l.web {
			for _, ip := range to.Status.PodIPs {
				for _, proto := range []string{"tcp", "udp"} {
					w.eventually("after it", func() error {
						_, err := w.reach(inPod(from), proto, at(ip.IP, port))
						return err
					})
				}
			}
		}
		for _, ip := range l.svc.Spec.ClusterIPs {
			w.eventually("all backends", func() error { return l.allAnswer(w, inPod(from), at(ip, 80)) })
		}
	}
	for _, n := range w.nodes {
		for _, ip := range n.ips {
			w.eventually("from outside", func() error { return l.allAnswer(w, outside, at(ip, l.svc.Spec.Ports[0].NodePort)) })
			w.eventually("from the node", func() error { return l.allAnswer(w, onNode(n), at(ip, l.svc.Spec.Ports[0].NodePort)) })
		}
	}
	for _, q := range l.shut {
		for _, from := range l.web {
			if err := w.fails(inPod(from), "tcp", at(q.Status.PodIP, port), probe.Timeout); err != nil {
				w.Error(err)
			}
		}
	}
}

func (l *lifecycleWorld) allAnswer(w *world, from place, target string) error {
	list, err := w.calls(from, probe.Call{Proto: "tcp", Target: target, Servers: len(l.web), Most: 60})
	seen := map[string]bool{}
	for _, a := range list {
		if e := attemptError(a); e != nil {
			return errors.Join(err, fmt.Errorf("%s to %s: %w", from.name, target, e))
		}
		seen[a.Reply.Server] = true
	}
	if err == nil && len(seen) != len(l.web) {
		err = fmt.Errorf("%s to %s: answered by %v", from.name, target, seen)
	}
	return err
}

// refound: pods of the node have been started anew.
func (l *lifecycleWorld) refound(w *world) {
	w.Helper()
	l.web, l.shut = w.found("web"), w.found("shut")
}

// nodeReady waits for a node to be so, or not.
func (w *world) nodeReady(name string, want bool) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 3*time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		list, err := w.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err != nil {
			continue
		}
		for _, n := range list.Items {
			for _, c := range n.Status.Conditions {
				if c.Type == corev1.NodeReady && (c.Status == corev1.ConditionTrue) == want {
					return
				}
			}
		}
		events, err := w.api.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name, ResourceVersion: list.ResourceVersion})
		if err != nil {
			continue
		}
		<-events.ResultChan()
		events.Stop()
	}
	w.Fatalf("node %s does not become ready=%v", name, want)
}

// A node loses its power and comes back. The others lose nothing; a service
// goes round it when the control plane has seen.
func (l *lifecycleWorld) nodeLost(w *world) {
	n := w.nodes[2]
	app := map[string]string{"app": "steady"}
	w.run(w.ns, pod("steady-1", w.nodes[0].name, app), pod("steady-2", w.nodes[1].name, app))
	steady := w.service("steady", "steady", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	var loads []*load
	for _, other := range w.nodes[:2] {
		from := inPod(l.web[other.name])
		w.first(from, at(steady.Spec.ClusterIP, 80))
		loads = append(loads, w.load(from, at(steady.Spec.ClusterIP, 80), "-interval", "10ms"),
			w.load(outside, at(other.ips[0], steady.Spec.Ports[0].NodePort), "-interval", "10ms"))
	}
	must(w, w.cluster.PowerOff(w.ctx, n.name))
	up := false
	defer func() {
		if !up {
			must(w, w.cluster.PowerOn(background(w), n.name))
		}
	}()
	w.nodeReady(n.name, false)
	lost := l.web[n.name].Name
	w.eventually("the service goes round the node", func() error {
		list, err := w.calls(inPod(l.web[w.nodes[0].name]), probe.Call{Proto: "tcp", Target: at(l.svc.Spec.ClusterIP, 80), Count: 40, Timeout: 2 * time.Second})
		for _, a := range list {
			err = errors.Join(err, attemptError(a))
			if a.OK && a.Reply.Server == lost {
				err = errors.New("the lost one answers")
			}
		}
		return err
	})
	must(w, w.cluster.PowerOn(w.ctx, n.name))
	up = true
	w.nodeReady(n.name, true)
	w.readyAgents()
	l.refound(w)
	l.walk(w)
	w.none(loads)
}

// The Node object is deleted and comes back with the kubelet's registration,
// with another range of addresses, it may be.
func (l *lifecycleWorld) nodeDeleted(w *world) {
	n := w.nodes[2]
	knows := func(want bool) error {
		for _, other := range w.nodes[:2] {
			out, err := w.podweir(w.ctx, other.name, "nodes")
			if err != nil {
				return err
			}
			if strings.Contains(string(out), n.name+" ") != want {
				return fmt.Errorf("podweir nodes on %s:\n%s", other.name, out)
			}
		}
		return nil
	}
	must(w, knows(true))
	// S19: it tells load balancers while it is being deleted and when it is gone;
	// services work on.
	says := func(want int) error {
		var errs []error
		for path, status := range map[string]int{"/healthz": want, "/livez": http.StatusOK} {
			_, got, err := w.get("", at(n.ips[0], 10256), path)
			if err == nil && got != status {
				err = fmt.Errorf("%s of %s says %d, want %d", path, n.name, got, status)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	finalizers := func(value string) {
		w.Helper()
		_, err := w.api.CoreV1().Nodes().Patch(background(w), n.name, types.MergePatchType, []byte(`{"metadata":{"finalizers":`+value+`}}`), metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			w.Fatal(err)
		}
	}
	w.eventually("well", func() error { return says(http.StatusOK) })
	finalizers(`["podweir.test/wait"]`)
	defer finalizers("null")
	must(w, w.api.CoreV1().Nodes().Delete(w.ctx, n.name, metav1.DeleteOptions{}))
	w.eventually("about to be deleted", func() error { return says(http.StatusServiceUnavailable) })
	must(w, knows(true))
	finalizers("null")
	w.eventually("peers forget the node", func() error { return knows(false) })
	if err := says(http.StatusServiceUnavailable); err != nil {
		w.Errorf("deleted: %v", err)
	}
	must(w, w.cluster.RestartKubelet(n.name))
	w.eventually("the kubelet registers", func() error {
		_, err := w.api.CoreV1().Nodes().Get(w.ctx, n.name, metav1.GetOptions{})
		return err
	})
	w.nodeReady(n.name, true)
	// As one does with a node that has lost its identity: its pods start anew.
	l.restartPods(w, n)
	w.eventually("peers know the node", func() error { return knows(true) })
	w.readyAgents()
	w.eventually("well again", func() error { return says(http.StatusOK) })
	l.refound(w)
	l.walk(w)
}

// restartPods deletes the pods of a node's pod network, so that others take
// their places.
func (l *lifecycleWorld) restartPods(w *world, n node) {
	w.Helper()
	list, err := w.api.CoreV1().Pods("").List(w.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	must(w, err)
	for _, p := range list.Items {
		if !p.Spec.HostNetwork {
			w.remove(p.Namespace, p.Name)
		}
	}
}
