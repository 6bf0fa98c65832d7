package agent

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/table"
)

// problemOwner is under which the loop's problems stand in the table.
const problemOwner = "agent"

// collect makes a slice of a query's objects.
func collect[T any](seq iter.Seq2[T, statedb.Revision]) []T {
	var out []T
	for o := range seq {
		out = append(out, o)
	}
	return out
}

// problem notes what is wrong with one thing, or that it is well again.
func (a *Agent) problem(about, object string, err error) {
	if err == nil {
		delete(a.problems, about)
		return
	}
	list := problems(object, err)
	if object == "" {
		for i := range list {
			list[i].Err = about + ": " + list[i].Err
		}
	}
	a.problems[about] = list
}

// problems makes one problem of each error, joined ones taken apart.
func problems(object string, errs ...error) []table.Problem {
	var out []table.Problem
	for _, err := range errs {
		if err == nil {
			continue
		}
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			out = append(out, problems(object, joined.Unwrap()...)...)
			continue
		}
		out = append(out, table.Problem{Object: object, Err: err.Error()})
	}
	return out
}

// finished pods own no address.
func finished(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// policyPods are the pods that own addresses: those of other nodes by their
// status, those of this node by their endpoint alone.
func policyPods(pods []*corev1.Pod, self string, local endpointRound) []policy.Pod {
	out := make([]policy.Pod, 0, len(pods))
	for _, p := range pods {
		name := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
		if local.pods[name] != nil {
			continue
		}
		if finished(p) || p.Spec.NodeName == self && !p.Spec.HostNetwork {
			continue
		}
		out = append(out, policy.FromPod(p, false))
	}
	for name, p := range local.pods {
		pp := policy.FromPod(p, true)
		pp.Namespace, pp.Name = name.Namespace, name.Name
		pp.Addrs = local.addrs[name]
		pp.HostNetwork = false
		out = append(out, pp)
	}
	return out
}

func policyNamespaces(list []*corev1.Namespace) []policy.Namespace {
	out := make([]policy.Namespace, 0, len(list))
	for _, n := range list {
		out = append(out, policy.Namespace{Name: n.Name, Labels: n.Labels})
	}
	return out
}

// policyNodes has every address of every node; of this node those of its
// devices too.
func policyNodes(list []*corev1.Node, self string, hostAddrs []netip.Addr) []policy.Node {
	out := make([]policy.Node, 0, len(list)+1)
	seen := false
	for _, n := range list {
		pn := policy.Node{Name: n.Name, Self: n.Name == self, Labels: n.Labels}
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil && !slices.Contains(pn.Addrs, ip.Unmap()) {
				pn.Addrs = append(pn.Addrs, ip.Unmap())
			}
		}
		if pn.Self {
			seen = true
			pn.Devices = hostAddrs
		}
		out = append(out, pn)
	}
	if !seen {
		out = append(out, policy.Node{Name: self, Self: true, Devices: hostAddrs})
	}
	return out
}
