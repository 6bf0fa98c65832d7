//go:build realcluster

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/test/tools/probe"
)

// What is broken on purpose is named by "podweir doctor", run in the agent's
// pod as one would, and no more once it is mended.
func TestDoctor(t *testing.T) {
	w := newWorld(t)
	n := w.nodes[0]
	web := w.run(w.ns, pod("web", n.name, map[string]string{"app": "web"}))[0]
	// says returns the finding that names all of these.
	says := func(w *world, node string, words ...string) error {
		out, _ := w.podweir(w.ctx, node, "doctor")
		for line := range strings.Lines(string(out)) {
			all := true
			for _, word := range words {
				all = all && strings.Contains(line, word)
			}
			if all {
				return nil
			}
		}
		return fmt.Errorf("podweir doctor on %s has no line with %q:\n%s", node, words, out)
	}
	silent := func(w *world, node string, words ...string) error {
		if says(w, node, words...) == nil {
			return fmt.Errorf("podweir doctor on %s still says %q", node, words)
		}
		return nil
	}
	w.step("Well", func(w *world) {
		for _, n := range w.nodes {
			w.eventually("nothing fails", func() error { return silent(w, n.name, "FAIL") })
			for _, check := range []string{"agent", "maps", "programs", "sysctls", "mtu", "pods", "dns"} {
				if err := says(w, n.name, "ok ", check); err != nil {
					w.Error(err)
				}
			}
		}
	})
	// O1: the address, route or interface of a pod.
	w.step("PodRoute", func(w *world) {
		for _, ip := range web.Status.PodIPs {
			family := "-4"
			if strings.Contains(ip.IP, ":") {
				family = "-6"
			}
			// The agent puts it back: as often as that is quicker.
			w.eventually("the route is missed", func() error {
				if _, err := w.output(w.ctx, onNode(n), "ip", family, "route", "del", ip.IP); err != nil && !strings.Contains(err.Error(), "No such process") {
					return err
				}
				return says(w, n.name, "FAIL", "pods", w.ns+"/"+web.Name, ip.IP)
			})
			w.eventually("the route comes back", func() error {
				if _, err := w.reach(onNode(n), "tcp", at(ip.IP, port)); err != nil {
					return err
				}
				return silent(w, n.name, "FAIL")
			})
		}
	})
	// O1, O5: it is policy.
	w.step("Policy", func(w *world) {
		caller := w.run(w.ns, pod("caller", n.name, nil))[0]
		denied := func(w *world, node string) error {
			return says(w, node, "WARN", "policy", w.ns+"/"+web.Name, w.ns+"/shut")
		}
		w.load(inPod(caller), at(web.Status.PodIP, port), "-interval", "50ms", "-parallel", "4", "-timeout", "1s")
		if err := silent(w, n.name, "WARN", "policy", w.ns+"/"+web.Name); err != nil {
			w.Error(err)
		}
		w.policy("shut", "web", networkingv1.NetworkPolicySpec{})
		w.eventually("it is named", func() error { return denied(w, n.name) })
		must(w, w.unpolicy("shut"))
		w.eventually("it is mended", func() error { return silent(w, n.name, "WARN", "policy", w.ns+"/"+web.Name) })
	})
	// O3: pod addresses work, the service does not.
	w.step("Endpoints", func(w *world) {
		svc := w.service("wrong", "webb", nil)
		for _, n := range w.nodes {
			w.eventually("it is named", func() error { return says(w, n.name, "WARN", "services", w.ns+"/wrong", "no usable endpoint") })
		}
		if err := w.fails(inPod(web), "tcp", at(svc.Spec.ClusterIP, 80), probe.Refused); err != nil {
			w.Error(err)
		}
		w.edit("wrong", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		for _, n := range w.nodes {
			w.eventually("it is mended", func() error { return silent(w, n.name, w.ns+"/wrong") })
		}
		w.first(inPod(web), at(svc.Spec.ClusterIP, 80))
	})
	// O4: cluster IPs work, names do not.
	w.step("DNS", func(w *world) {
		patch := func(to string) {
			w.Helper()
			_, err := w.api.CoreV1().Services(system).Patch(background(w), "kube-dns", types.JSONPatchType, []byte(to), metav1.PatchOptions{})
			must(w, err)
		}
		whole := func() {
			patch(`[{"op":"replace","path":"/spec/selector","value":{"k8s-app":"kube-dns"}},{"op":"replace","path":"/spec/ports/0/targetPort","value":53}]`)
		}
		defer whole()
		resolves := func() error {
			_, err := w.output(w.ctx, inPod(web), "pw-client", "lookup", "-timeout", "3s", "kubernetes.default.svc.cluster.local.")
			return err
		}
		must(w, resolves())
		for _, fault := range []struct{ patch, says string }{
			{`[{"op":"replace","path":"/spec/ports/0/targetPort","value":5353}]`, "None of its endpoints answers"},
			{`[{"op":"replace","path":"/spec/selector","value":{"k8s-app":"nobody"}}]`, "no usable endpoint"},
		} {
			patch(fault.patch)
			for _, n := range w.nodes {
				w.eventually("it is named", func() error { return says(w, n.name, "FAIL", "dns", "kube-system/kube-dns", fault.says) })
			}
			if resolves() == nil {
				w.Error(errors.New("names are resolved all the same"))
			}
			whole()
			for _, n := range w.nodes {
				w.eventually("it is mended", func() error { return silent(w, n.name, "FAIL") })
			}
			w.eventually("names are resolved again", resolves)
		}
	})
}
