package agent

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/oldcni"
	"github.com/podweir/podweir/internal/table"
)

// leftoversEvery is how often what a kube-proxy and another CNI plugin may have
// left is looked for. A node that they did not go from has tens of thousands of
// chains.
const leftoversEvery = time.Minute

// leftovers looks for what somebody has left; ranges are those of all pods.
// What was found is right even with an error.
type leftovers struct {
	of   string
	find func(ctx context.Context, ranges []netip.Prefix) ([]table.Problem, error)
}

// of kube-proxy and of CNI plugins.
func allLeftovers() []leftovers {
	return []leftovers{
		{"a kube-proxy", func(ctx context.Context, _ []netip.Prefix) ([]table.Problem, error) {
			left, err := kubeproxy.Find(ctx)
			return proxyProblems(left), err
		}},
		{"another CNI plugin", func(_ context.Context, ranges []netip.Prefix) ([]table.Problem, error) {
			view, err := oldcni.Look()
			return pluginProblems(view, ranges), err
		}},
	}
}

func proxyProblems(left kubeproxy.Leftovers) (out []table.Problem) {
	for _, t := range left.Troubles() {
		out = append(out, table.Problem{Object: t.Object, Err: t.Text + "; " + t.WayOut})
	}
	return out
}

func pluginProblems(view oldcni.View, ranges []netip.Prefix) (out []table.Problem) {
	for _, t := range view.Troubles(ranges) {
		out = append(out, table.Problem{Object: t.Object, Err: t.Text + "; " + t.WayOut})
	}
	return out
}

// watchLeftovers keeps a problem for everything that somebody has left on this
// node, from the start on until it is gone. Each tick is another look.
func (a *Agent) watchLeftovers(ctx context.Context, l leftovers, tick <-chan time.Time) {
	for {
		var ranges []netip.Prefix
		_ = a.do(ctx, func() { // the loop ends with ctx
			for _, n := range a.world.nodes {
				ranges = append(ranges, n.PodCIDRs...)
			}
		})
		list, err := l.find(ctx, ranges)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			list = append(list, problems("", fmt.Errorf("what %s may have left cannot be read: %w", l.of, err))...)
		}
		_ = a.do(ctx, func() {
			a.problems["leftovers of "+l.of] = list
			if a.full { // the first round publishes them otherwise
				a.publish()
			}
		})
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
	}
}

// mostStrangers is how many pods are named.
const mostStrangers = 10

// strangerKey tells a pod from another of its name.
type strangerKey struct {
	name types.NamespacedName
	uid  types.UID
}

// strangerWatch keeps a problem for pods of this node that podweir did not
// plug. Two looks in a row have to see a pod: one that ends, or whose sandbox is
// made anew, has no endpoint for a moment.
type strangerWatch struct{ before map[strangerKey]bool }

// run looks at each tick.
func (w *strangerWatch) run(ctx context.Context, a *Agent, tick <-chan time.Time) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick:
			_ = a.do(ctx, func() { w.look(a) }) // the loop ends with ctx
		}
	}
}

// look is for the loop.
func (w *strangerWatch) look(a *Agent) {
	if !a.full {
		return
	}
	now := map[strangerKey]bool{}
	var list []table.Problem
	more := 0
	for _, p := range a.strangers(a.tables.DB.ReadTxn()) {
		key := strangerKey{types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, p.UID}
		now[key] = true
		switch {
		case !w.before[key]:
		case len(list) == mostStrangers:
			more++
		default:
			list = append(list, table.Problem{Object: "Pod " + p.Namespace + "/" + p.Name, Err: fmt.Sprintf(
				"podweir did not plug it: it runs with what another CNI plugin gave it (%s), and what other pods and services send to it is lost; "+
					"delete it, so that it starts anew under podweir", p.Status.PodIP)})
		}
	}
	if more > 0 {
		list = append(list, table.Problem{Err: fmt.Sprintf("and %d pods more of this node run with what another CNI plugin gave them", more)})
	}
	w.before = now
	a.problems["pods of another CNI plugin"] = list
	a.publish()
}

// strangers are the pods that run on this node with an address and without an
// endpoint, by name. While its sandbox is gone and cannot be made, a pod is said
// to run with the address it had: a condition tells that it has no sandbox.
func (a *Agent) strangers(txn statedb.ReadTxn) (out []*corev1.Pod) {
	for p := range a.tables.Pods.List(txn, table.PodsByNode(a.opt.NodeName)) {
		if p.Spec.HostNetwork || p.Status.Phase != corev1.PodRunning || !p.DeletionTimestamp.IsZero() || len(table.PodIPs(p)) == 0 || withoutSandbox(p) {
			continue
		}
		if a.world.local.pods[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] == nil {
			out = append(out, p)
		}
	}
	return out
}

func withoutSandbox(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionFalse
	})
}
