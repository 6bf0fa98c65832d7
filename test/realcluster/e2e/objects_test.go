//go:build realcluster

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func isReady(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// allReady wants so many pods, all of them ready.
func allReady(n int) func([]corev1.Pod) error {
	return func(pods []corev1.Pod) error {
		ready := 0
		for i := range pods {
			if isReady(&pods[i]) {
				ready++
			}
		}
		if ready != n || len(pods) != n {
			return fmt.Errorf("%d pods, %d ready, want %d", len(pods), ready, n)
		}
		return nil
	}
}

// server is the container of a pw-server.
func server(args ...string) corev1.Container {
	return corev1.Container{
		Name: "c", Image: image, ImagePullPolicy: corev1.PullNever, Args: args,
		Ports: []corev1.ContainerPort{{Name: "main", ContainerPort: port}, {Name: "main-udp", ContainerPort: port, Protocol: corev1.ProtocolUDP}},
		ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, FailureThreshold: 5, TimeoutSeconds: 5, ProbeHandler: corev1.ProbeHandler{
			TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(port)}}},
	}
}

func podSpec(node string, c corev1.Container) corev1.PodSpec {
	return corev1.PodSpec{
		NodeName: node, TerminationGracePeriodSeconds: new(int64), AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{c},
		Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
	}
}

// pod is a pw-server on a node.
func pod(name, node string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: podSpec(node, server())}
}

// run creates pods, waits until they are ready and removes them with the test.
func (w *world) run(ns string, pods ...*corev1.Pod) []*corev1.Pod {
	w.Helper()
	var names []string
	for _, p := range pods {
		_, err := w.api.CoreV1().Pods(ns).Create(w.ctx, p, metav1.CreateOptions{})
		must(w, err)
		names = append(names, p.Name)
		w.Cleanup(func() { w.remove(ns, p.Name) })
	}
	var out []*corev1.Pod
	w.pods(ns, "", "pods "+strings.Join(names, ", "), func(all []corev1.Pod) error {
		out = make([]*corev1.Pod, len(names))
		for i := range all {
			if j := slices.Index(names, all[i].Name); j >= 0 && isReady(&all[i]) && len(all[i].Status.PodIPs) == 2 {
				out[j] = all[i].DeepCopy()
			}
		}
		if i := slices.Index(out, nil); i >= 0 {
			return fmt.Errorf("%s is not ready", names[i])
		}
		return nil
	})
	return out
}

func (w *world) remove(ns, pod string) {
	w.Helper()
	err := w.api.CoreV1().Pods(ns).Delete(context.WithoutCancel(w.ctx), pod, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	if err != nil && !apierrors.IsNotFound(err) {
		w.Error(err)
	}
}

// everywhere runs a pw-server on every node, by a DaemonSet, and returns them
// by node. change may be nil.
func (w *world) everywhere(name string, change func(*corev1.PodTemplateSpec)) map[string]*corev1.Pod {
	w.Helper()
	// Pods of a test's own may have the same app, and are not the controller's.
	app, set := map[string]string{"app": name, "set": name}, map[string]string{"set": name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: app}, Spec: podSpec("", server())}
	if change != nil {
		change(&template)
	}
	_, err := w.api.AppsV1().DaemonSets(w.ns).Create(w.ctx, &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: set}, Template: template},
	}, metav1.CreateOptions{})
	must(w, err)
	return w.found(name)
}

// found returns the pods of a DaemonSet by node, when all are ready.
func (w *world) found(name string) map[string]*corev1.Pod {
	w.Helper()
	out := map[string]*corev1.Pod{}
	for _, p := range w.pods(w.ns, labels.Set{"set": name}.String(), "pods of "+name+" on every node", allReady(len(w.nodes))) {
		out[p.Spec.NodeName] = &p
	}
	return out
}

// service makes one for the pods of the name, and changes it before that.
func (w *world) service(name, app string, change func(*corev1.Service)) *corev1.Service {
	w.Helper()
	policy := corev1.IPFamilyPolicyPreferDualStack
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: &policy,
			Ports: []corev1.ServicePort{
				{Name: "tcp", Port: 80, TargetPort: intstr.FromInt32(port), Protocol: corev1.ProtocolTCP},
				{Name: "udp", Port: 80, TargetPort: intstr.FromInt32(port), Protocol: corev1.ProtocolUDP},
			},
		},
	}
	if app != "" {
		s.Spec.Selector = map[string]string{"app": app}
	}
	if change != nil {
		change(s)
	}
	s, err := w.api.CoreV1().Services(w.ns).Create(w.ctx, s, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() {
		err := w.api.CoreV1().Services(w.ns).Delete(context.WithoutCancel(w.ctx), s.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			w.Error(err)
		}
	})
	return s
}

// edit changes a service, against whatever others write at the same time.
func (w *world) edit(name string, change func(*corev1.Service)) *corev1.Service {
	w.Helper()
	var out *corev1.Service
	w.eventually("service "+name+" is changed", func() error {
		s, err := w.api.CoreV1().Services(w.ns).Get(w.ctx, name, metav1.GetOptions{})
		must(w, err)
		change(s)
		out, err = w.api.CoreV1().Services(w.ns).Update(w.ctx, s, metav1.UpdateOptions{})
		if err != nil && !apierrors.IsConflict(err) {
			w.Fatal(err)
		}
		return err
	})
	return out
}

// deployment runs so many pw-servers somewhere, and waits for them; change may
// be nil.
func (w *world) deployment(name string, replicas int32, change func(*corev1.PodTemplateSpec)) *appsv1.Deployment {
	w.Helper()
	app := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: app}, Spec: podSpec("", server())}
	template.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
		MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway, LabelSelector: &metav1.LabelSelector{MatchLabels: app},
	}}
	if change != nil {
		change(&template)
	}
	_, err := w.api.AppsV1().Deployments(w.ns).Create(w.ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       appsv1.DeploymentSpec{Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: app}, Template: template},
	}, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() {
		if err := w.api.AppsV1().Deployments(w.ns).Delete(context.WithoutCancel(w.ctx), name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			w.Error(err)
		}
	})
	w.pods(w.ns, labels.Set(app).String(), "pods of "+name, allReady(int(replicas)))
	d, err := w.api.AppsV1().Deployments(w.ns).Get(w.ctx, name, metav1.GetOptions{})
	must(w, err)
	return d
}

// roll replaces all pods of a deployment.
func (w *world) roll(d *appsv1.Deployment) {
	w.Helper()
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"rolled":"%d"}}}}}`, time.Now().UnixNano())
	d, err := w.api.AppsV1().Deployments(w.ns).Patch(w.ctx, d.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	must(w, err)
	for w.ctx.Err() == nil {
		o, err := w.api.AppsV1().Deployments(w.ns).Get(w.ctx, d.Name, metav1.GetOptions{})
		must(w, err)
		want := *o.Spec.Replicas
		if s := o.Status; s.ObservedGeneration >= d.Generation && s.UpdatedReplicas == want && s.Replicas == want && s.ReadyReplicas == want {
			break
		}
		events, err := w.api.AppsV1().Deployments(w.ns).Watch(w.ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + d.Name, ResourceVersion: o.ResourceVersion})
		must(w, err)
		<-events.ResultChan()
		events.Stop()
	}
	if w.ctx.Err() != nil {
		w.Fatalf("deployment %s is not rolled in time", d.Name)
	}
	// Those that take their leave.
	w.pods(w.ns, metav1.FormatLabelSelector(d.Spec.Selector), "the old pods are gone", allReady(int(*d.Spec.Replicas)))
}
