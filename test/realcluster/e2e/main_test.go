//go:build realcluster

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// image has pw-server and pw-client; nodes have it, no registry does.
const image = "podweir-test/tools:1"

// world is a namespace of a test's own.
type world struct {
	*testing.T
	ctx     context.Context
	cluster realcluster.Config
	api     *kubernetes.Clientset
	ns      string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	tree, err := filepath.Abs("../../..")
	must(t, err)
	c, err := realcluster.Default(tree)
	must(t, err)
	rc, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		t.Fatalf("there is no cluster: make cluster: %v", err)
	}
	rc.QPS, rc.Burst = 100, 200
	api, err := kubernetes.NewForConfig(rc)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	ns, err := api.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	must(t, err)
	w := &world{t, ctx, c, api, ns.Name}
	t.Cleanup(func() {
		if t.Failed() {
			w.describe()
		}
		if err := api.CoreV1().Namespaces().Delete(context.WithoutCancel(ctx), ns.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	w.eventually("the account of new pods", func() error {
		_, err := api.CoreV1().ServiceAccounts(ns.Name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// describe logs what one would look at.
func (w *world) describe() {
	for _, args := range []string{"-n " + w.ns + " get pods,services,endpointslices -o wide", "-n " + w.ns + " get events", "-n kube-system get pods -o wide", "get nodes -o wide"} {
		var out bytes.Buffer
		_ = w.cluster.Kubectl(context.Background(), nil, &out, strings.Fields(args)...)
		w.Logf("kubectl %s\n%s", args, out.String())
	}
}

// eventually waits for what the cluster brings about in its own time.
func (w *world) eventually(what string, ok func() error) {
	w.Helper()
	limit := time.Now().Add(90 * time.Second)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(limit) || w.ctx.Err() != nil {
			w.Fatalf("never: %s: %v", what, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// everywhere runs a pod of pw-server on every node and returns them by node.
func (w *world) everywhere(name string) map[string]*corev1.Pod {
	w.Helper()
	labels := map[string]string{"app": name}
	_, err := w.api.AppsV1().DaemonSets(w.ns).Create(w.ctx, &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: new(int64),
					Containers: []corev1.Container{{
						Name: "c", Image: image, ImagePullPolicy: corev1.PullNever,
						ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
							TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8080)}}},
					}},
				},
			},
		},
	}, metav1.CreateOptions{})
	must(w, err)
	nodes, err := w.api.CoreV1().Nodes().List(w.ctx, metav1.ListOptions{})
	must(w, err)
	out := map[string]*corev1.Pod{}
	w.eventually("pods of "+name+" on every node", func() error {
		list, err := w.api.CoreV1().Pods(w.ns).List(w.ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return err
		}
		clear(out)
		for i, p := range list.Items {
			if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			}) {
				out[p.Spec.NodeName] = &list.Items[i]
			}
		}
		if len(out) != len(nodes.Items) {
			return fmt.Errorf("ready on %d of %d", len(out), len(nodes.Items))
		}
		return nil
	})
	return out
}

// service makes one for the pods of everywhere.
func (w *world) service(name string, change func(*corev1.Service)) *corev1.Service {
	w.Helper()
	policy := corev1.IPFamilyPolicyPreferDualStack
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": name}, IPFamilyPolicy: &policy,
			Ports: []corev1.ServicePort{
				{Name: "tcp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolTCP},
				{Name: "udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP},
			},
		},
	}
	if change != nil {
		change(s)
	}
	s, err := w.api.CoreV1().Services(w.ns).Create(w.ctx, s, metav1.CreateOptions{})
	must(w, err)
	return s
}

// from runs pw-client in a pod; nil is the machine, which is outside.
func (w *world) from(pod *corev1.Pod, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(w.ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(w.cluster.Tree, "bin", "pw-client"), args...)
	if pod != nil {
		cmd = exec.CommandContext(ctx, w.cluster.KubectlPath(), append([]string{"--kubeconfig=" + w.cluster.Kubeconfig(), "-n", pod.Namespace, "exec", pod.Name, "--", "pw-client"}, args...)...)
	}
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("pw-client %s: %w: %s%s", strings.Join(args, " "), err, out.String(), said.String())
	}
	return out.Bytes(), nil
}

// reach sends once, and returns what the server saw.
func (w *world) reach(pod *corev1.Pod, proto, target string) (probe.Reply, error) {
	out, err := w.from(pod, "send", "-proto", proto, "-timeout", "3s", target)
	if err != nil {
		return probe.Reply{}, err
	}
	var sum probe.Summary
	if err := json.Unmarshal(out, &sum); err != nil {
		return probe.Reply{}, err
	}
	if sum.First == nil || sum.First.Reply == nil {
		return probe.Reply{}, fmt.Errorf("no reply: %s", out)
	}
	return *sum.First.Reply, nil
}
