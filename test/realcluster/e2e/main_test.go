//go:build realcluster

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/podweir/podweir/test/realcluster"
)

const (
	// image has pw-server and pw-client; nodes have it, no registry does.
	image  = "podweir-test/tools:1"
	system = "kube-system"
	port   = 8080 // of pw-server in pods
)

// world is a namespace, what runs in it, and the ways to look at the cluster.
// The tests of one file share one; what each adds goes with it.
type world struct {
	*testing.T
	ctx     context.Context
	cluster realcluster.Config
	config  *rest.Config
	api     *kubernetes.Clientset
	ns      string
	nodes   []node
	callers *callers
}

// node is one of the cluster's.
type node struct {
	name string
	ips  [2]string // IPv4, IPv6
}

func (w *world) node(name string) node {
	w.Helper()
	i := slices.IndexFunc(w.nodes, func(n node) bool { return n.name == name })
	if i < 0 {
		w.Fatalf("there is no node %s", name)
	}
	return w.nodes[i]
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
	rc.QPS, rc.Burst = 200, 400
	api, err := kubernetes.NewForConfig(rc)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	t.Cleanup(cancel)
	w := &world{T: t, ctx: ctx, cluster: c, config: rc, api: api, callers: newCallers()}
	list, err := api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	must(t, err)
	for _, n := range list.Items {
		own := node{name: n.Name}
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				own.ips[family(ip)] = a.Address
			}
		}
		w.nodes = append(w.nodes, own)
	}
	if len(w.nodes) < 3 {
		t.Fatalf("these tests are for three nodes, the cluster has %d", len(w.nodes))
	}
	ns := w.namespace(nil)
	w.ns = ns
	t.Cleanup(func() {
		if t.Failed() {
			w.describe()
		}
		w.callers.end()
	})
	return w
}

// namespace makes one that lives as long as the test.
func (w *world) namespace(labels map[string]string) string {
	w.Helper()
	ns, err := w.api.CoreV1().Namespaces().Create(w.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-", Labels: labels}}, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() {
		if err := w.api.CoreV1().Namespaces().Delete(context.WithoutCancel(w.ctx), ns.Name, metav1.DeleteOptions{}); err != nil {
			w.Error(err)
		}
	})
	w.eventually("the account of new pods", func() error {
		_, err := w.api.CoreV1().ServiceAccounts(ns.Name).Get(w.ctx, "default", metav1.GetOptions{})
		return err
	})
	return ns.Name
}

// each runs tests of a world at the same time.
func (w *world) each(tests map[string]func(*world)) {
	w.Helper()
	w.Run("all", func(t *testing.T) {
		for name, test := range tests {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(w.with(t))
			})
		}
	})
}

// with is the same world for a part of the test.
func (w *world) with(t *testing.T) *world {
	own := *w
	own.T = t
	return &own
}

// step runs a part of a test that changes what others depend on.
func (w *world) step(name string, test func(*world)) {
	w.Helper()
	w.Run(name, func(t *testing.T) { test(w.with(t)) })
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func family(ip netip.Addr) int {
	if ip.Unmap().Is4() {
		return 0
	}
	return 1
}

func at(addr string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port)).String()
}

// host is the address of an address and port, IPv4 as such.
func host(addrPort string) string {
	ap, err := netip.ParseAddrPort(addrPort)
	if err != nil {
		return addrPort
	}
	return ap.Addr().Unmap().WithZone("").String()
}

// describe logs what one would look at.
func (w *world) describe() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, args := range []string{
		"-n " + w.ns + " get pods,services,endpointslices,networkpolicies -o wide", "-n " + w.ns + " get events", "-n kube-system get pods -o wide", "get nodes -o wide",
	} {
		var out bytes.Buffer
		err := w.cluster.Kubectl(ctx, nil, &out, strings.Fields(args)...)
		w.Logf("kubectl %s (%v)\n%s", args, err, out.String())
	}
	w.together(func(n node) {
		for _, args := range []string{"status", "doctor", "metrics --drops", "services", "flows"} {
			out, err := w.podweir(ctx, n.name, strings.Fields(args)...)
			w.Logf("%s: podweir %s (%v)\n%s", n.name, args, err, head(out, 150))
		}
		if a := w.agent(ctx, n.name); a != nil {
			var out bytes.Buffer
			_ = w.cluster.Kubectl(ctx, nil, &out, "-n", system, "logs", "--tail=40", a.Name, "-c", "agent")
			w.Logf("%s: log of the agent\n%s", n.name, out.String())
		}
	})
}

// head is the first lines of a text: flows are many.
func head(text []byte, lines int) []byte {
	all := bytes.SplitAfter(text, []byte("\n"))
	if len(all) <= lines {
		return text
	}
	return fmt.Appendf(bytes.Join(all[:lines], nil), "and %d lines more\n", len(all)-lines)
}

const patience = 90 * time.Second

// eventually waits for what the cluster brings about in its own time.
func (w *world) eventually(what string, ok func() error) {
	w.Helper()
	if err := w.await(ok); err != nil {
		w.Fatalf("never: %s: %v", what, err)
	}
}

// await is eventually for those who go on without.
func (w *world) await(ok func() error) error { return w.awaitFor(patience, ok) }

func (w *world) awaitFor(patience time.Duration, ok func() error) error {
	limit := time.Now().Add(patience)
	for {
		err := ok()
		if err == nil {
			return nil
		}
		if time.Now().After(limit) || w.ctx.Err() != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// pods follows the pods of a namespace and selector until they are as wanted.
func (w *world) pods(ns, selector, what string, ok func([]corev1.Pod) error) []corev1.Pod {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 3*time.Minute)
	defer cancel()
	var why error
	for ctx.Err() == nil {
		list, err := w.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			why = err
			continue
		}
		have := map[string]corev1.Pod{}
		for _, p := range list.Items {
			have[p.Name] = p
		}
		check := func() ([]corev1.Pod, bool) {
			var all []corev1.Pod
			for _, p := range have {
				all = append(all, p)
			}
			slices.SortFunc(all, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
			why = ok(all)
			return all, why == nil
		}
		if all, good := check(); good {
			return all
		}
		events, err := w.api.CoreV1().Pods(ns).Watch(ctx, metav1.ListOptions{LabelSelector: selector, ResourceVersion: list.ResourceVersion})
		if err != nil {
			why = err
			continue
		}
		for e := range events.ResultChan() {
			p, is := e.Object.(*corev1.Pod)
			if !is {
				break
			}
			have[p.Name] = *p
			if e.Type == watch.Deleted {
				delete(have, p.Name)
			}
			if len(events.ResultChan()) > 0 {
				continue
			}
			if all, good := check(); good {
				events.Stop()
				return all
			}
		}
		events.Stop()
	}
	w.Fatalf("never: %s: %v", what, why)
	return nil
}

// agent is the running one of a node; nil if there is none.
func (w *world) agent(ctx context.Context, node string) *corev1.Pod {
	list, err := w.api.CoreV1().Pods(system).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=podweir", FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil
	}
	for i := range list.Items {
		if p := &list.Items[i]; p.DeletionTimestamp == nil && len(p.Status.ContainerStatuses) > 0 {
			return p
		}
	}
	return nil
}

// readyAgents waits for all agents, and returns them by node.
func (w *world) readyAgents() map[string]*corev1.Pod {
	w.Helper()
	out := map[string]*corev1.Pod{}
	for _, p := range w.pods(system, "app.kubernetes.io/name=podweir", "agents", allReady(len(w.nodes))) {
		out[p.Spec.NodeName] = &p
	}
	return out
}

// podweir runs the operator's command in the agent's pod of a node.
func (w *world) podweir(ctx context.Context, node string, args ...string) ([]byte, error) {
	a := w.agent(ctx, node)
	if a == nil {
		return nil, errors.New("no agent on " + node)
	}
	return w.output(ctx, inPod(a), append([]string{"podweir"}, args...)...)
}

// podweirJSON is the same, for its JSON.
func (w *world) podweirJSON(node string, to any, args ...string) error {
	out, err := w.podweir(w.ctx, node, append(args, "-o", "json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal(out, to)
}

// together runs f for all nodes at the same time.
func (w *world) together(f func(node)) {
	var wg sync.WaitGroup
	for _, n := range w.nodes {
		wg.Go(func() { f(n) })
	}
	wg.Wait()
}

// dialIn connects from a node's own network.
func (w *world) dialIn(node string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		return w.cluster.Dial(ctx, node, network, addr)
	}
}

// kubectl as administrator.
func (w *world) kubectl(args ...string) (string, error) {
	var out bytes.Buffer
	err := w.cluster.Kubectl(context.WithoutCancel(w.ctx), nil, &out, args...)
	return out.String(), err
}

func (w *world) apply(manifest string) {
	w.Helper()
	must(w, w.cluster.Kubectl(w.ctx, strings.NewReader(manifest), io.Discard, "apply", "-f", "-"))
}
