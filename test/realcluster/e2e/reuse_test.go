//go:build realcluster

package e2e

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/podweir/podweir/test/tools/probe"
)

// P10: a pod's name is used again while the kubelet still takes its predecessor
// down, with other labels each time. Every one is what its own labels say from
// its first packet on, and nothing late takes that away.
func TestNamesUsedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n, far := w.nodes[0], w.nodes[1]
	target := w.run(w.ns, pod("target", far.name, map[string]string{"app": "target"}))[0]
	w.policy("shut", "shut", networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}})
	var uids []string
	for i := range 6 {
		app := []string{"open", "shut"}[i%2]
		p := w.run(w.ns, pod("again", n.name, map[string]string{"app": app}))[0]
		if slices.Contains(uids, string(p.UID)) {
			t.Fatalf("round %d: the same pod", i)
		}
		uids = append(uids, string(p.UID))
		check := func(when string) {
			for fam := range 2 {
				for _, call := range []struct {
					from place
					to   *corev1.Pod
				}{{inPod(p), target}, {inPod(target), p}} {
					to := at(call.to.Status.PodIPs[fam].IP, port)
					err := w.fails(call.from, "tcp", to, probe.Timeout)
					if app == "open" {
						_, err = w.reach(call.from, "tcp", to)
					}
					if err != nil {
						w.Errorf("round %d, %s, %s: %v", i, app, when, err)
					}
				}
			}
		}
		check("ready")
		// The agent has heard of the predecessor's end, and DEL has come.
		w.eventually("one endpoint by that name", func() error {
			var list struct {
				Endpoints []struct {
					Pod, UID string
					Missing  bool
				}
			}
			if err := w.podweirJSON(n.name, &list, "endpoints"); err != nil {
				return err
			}
			have := 0
			for _, e := range list.Endpoints {
				if e.Pod == w.ns+"/again" {
					have++
				}
			}
			if have != 1 {
				return fmt.Errorf("%d of them", have)
			}
			return nil
		})
		check("after its predecessor's DEL")
		w.remove(w.ns, p.Name)
	}
}
