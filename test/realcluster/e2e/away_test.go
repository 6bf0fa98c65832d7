//go:build realcluster

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A node whose agent is away for as long as one likes: pods go, and their
// kubelet is done with them; pods that come wait for it; the others go on. When
// it is back nothing of those that went is left.
func TestAgentAway(t *testing.T) {
	w := newWorld(t)
	n, other := w.nodes[2], w.nodes[0]
	pods := w.run(w.ns, pod("stays", n.name, map[string]string{"app": "away"}), pod("leaves", n.name, nil), pod("caller", other.name, nil))
	stays, leaves, caller := pods[0], pods[1], pods[2]
	svc := w.service("away", "away", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	vip, nodePort := at(svc.Spec.ClusterIP, 80), at(n.ips[0], svc.Spec.Ports[0].NodePort)
	for _, from := range []place{inPod(stays), inPod(caller), onNode(n)} {
		w.first(from, vip)
	}
	w.first(outside, nodePort)

	back := w.takeAgent(n)
	loads := []*load{w.load(inPod(caller), vip, "-interval", "20ms"), w.load(outside, nodePort, "-interval", "20ms"), w.load(onNode(n), vip, "-interval", "20ms")}
	// Not before its sandbox has been taken down, and so DEL has succeeded, is
	// the object gone.
	one := int64(1)
	must(w, w.api.CoreV1().Pods(w.ns).Delete(w.ctx, leaves.Name, metav1.DeleteOptions{GracePeriodSeconds: &one}))
	w.eventually("the kubelet is done with it", func() error {
		_, err := w.api.CoreV1().Pods(w.ns).Get(w.ctx, leaves.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New(leaves.Name+" is there"))
	})
	comes := pod("comes", n.name, nil)
	_, err := w.api.CoreV1().Pods(w.ns).Create(w.ctx, comes, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() { w.remove(w.ns, comes.Name) })
	w.eventually("a pod that comes is told why it waits", func() error {
		list, err := w.api.CoreV1().Events(w.ns).List(w.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + comes.Name})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == "FailedCreatePodSandBox" && strings.Contains(e.Message, "podweir") {
				return nil
			}
		}
		return fmt.Errorf("%d events", len(list.Items))
	})
	back()
	w.pods(w.ns, "", comes.Name+" starts", func(all []corev1.Pod) error {
		for i := range all {
			if all[i].Name == comes.Name && isReady(&all[i]) {
				return nil
			}
		}
		return errors.New("not ready")
	})
	w.none(loads)
	w.eventually("nothing is left of what went", func() error {
		var list struct {
			Endpoints []struct {
				Pod     string
				Addrs   []string
				Missing bool
			}
		}
		if err := w.podweirJSON(n.name, &list, "endpoints"); err != nil {
			return err
		}
		seen := map[string]bool{}
		for _, e := range list.Endpoints {
			seen[e.Pod] = !e.Missing
		}
		if seen[w.ns+"/"+leaves.Name] || !seen[w.ns+"/"+stays.Name] || !seen[w.ns+"/"+comes.Name] {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
	if _, err := w.reach(inPod(caller), "tcp", at(stays.Status.PodIP, port)); err != nil {
		w.Error(err)
	}
}

// takeAgent has no agent run on a node, until back is called or the test ends.
// Those of other nodes stay as they are.
func (w *world) takeAgent(n node) (back func()) {
	w.Helper()
	const mark = "podweir.test/away"
	label := func(value string) {
		_, err := w.api.CoreV1().Nodes().Patch(background(w), n.name, types.MergePatchType, []byte(`{"metadata":{"labels":{"`+mark+`":`+value+`}}}`), metav1.PatchOptions{})
		must(w, err)
	}
	sets := w.api.AppsV1().DaemonSets(system)
	was, err := sets.Get(w.ctx, "podweir", metav1.GetOptions{})
	must(w, err)
	spec := func(strategy, affinity string) {
		_, err := sets.Patch(background(w), "podweir", types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"updateStrategy":%s,"template":{"spec":{"affinity":%s}}}}`, strategy, affinity), metav1.PatchOptions{})
		must(w, err)
	}
	done := false
	back = func() {
		if done {
			return
		}
		done = true
		label("null")
		// The template is that of before, so the agents that were left alone are its.
		spec(`{"type":"OnDelete","rollingUpdate":null}`, "null")
		spec(fmt.Sprintf(`{"type":"RollingUpdate","rollingUpdate":{"maxUnavailable":%d,"maxSurge":0}}`, was.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue()), "null")
		w.readyAgents()
	}
	w.Cleanup(back)
	label(`"yes"`)
	spec(`{"type":"OnDelete","rollingUpdate":null}`, `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"`+mark+`","operator":"DoesNotExist"}]}]}}}`)
	w.pods(system, "app.kubernetes.io/name=podweir", "no agent on "+n.name, func(all []corev1.Pod) error {
		for _, p := range all {
			if p.Spec.NodeName == n.name {
				return errors.New("it is there")
			}
		}
		return nil
	})
	return back
}
