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

// revisions are those of the tables that are read whole, when they were.
type revisions struct {
	namespaces, policies, clusterPolicies, cidrs, nodes statedb.Revision
}

// readRest reads what policies are about besides pods; nil: nothing of it is
// different.
func (a *Agent) readRest(txn statedb.ReadTxn, hostAddrs []netip.Addr) *policy.Input {
	namespaces, watch := a.tables.Namespaces.AllWatch(txn)
	a.watch.namespaces = watch
	policies, watch := a.tables.Policies.AllWatch(txn)
	a.watch.policies = watch
	clusterPolicies, watch := a.tables.ClusterPolicies.AllWatch(txn)
	a.watch.clusterPolicies = watch
	cidrs, watch := a.tables.ServiceCIDRs.AllWatch(txn)
	a.watch.cidrs = watch
	nodes, watch := a.tables.Nodes.AllWatch(txn)
	a.watch.nodes = watch

	now := revisions{
		a.tables.Namespaces.Revision(txn), a.tables.Policies.Revision(txn), a.tables.ClusterPolicies.Revision(txn),
		a.tables.ServiceCIDRs.Revision(txn), a.tables.Nodes.Revision(txn),
	}
	if a.read == now && a.peers.applied && slices.Equal(a.hostAddrs, hostAddrs) {
		return nil
	}
	a.read, a.hostAddrs = now, hostAddrs
	a.world.cidrs = a.serviceCIDRs(collect(cidrs))
	return &policy.Input{
		Namespaces: policyNamespaces(collect(namespaces)),
		Nodes:      policyNodes(collect(nodes), a.opt.NodeName, hostAddrs),
		Policies:   collect(policies),

		ClusterPolicies: collect(clusterPolicies),
	}
}

// podChanges are the pods that are not as the last round had them.
type podChanges struct {
	objects []*corev1.Pod // for the tunnel
	deleted []types.NamespacedName
	owners  []policy.Pod // for policy: those that own addresses
	gone    []types.NamespacedName
}

// changedPods reads the changes. Pods of other nodes own addresses by their
// status, those of this node by their endpoint alone: these may be different
// without a change of the object, and are few.
func (a *Agent) changedPods(txn statedb.ReadTxn) podChanges {
	var out podChanges
	local := a.world.local
	remote := func(name types.NamespacedName, p *corev1.Pod) {
		if p == nil || finished(p) || p.Spec.NodeName == a.opt.NodeName && !p.Spec.HostNetwork {
			out.gone = append(out.gone, name)
			return
		}
		out.owners = append(out.owners, policy.FromPod(p, false))
	}
	changed, watch := a.pods.Next(txn)
	a.watch.pods = watch
	for ch := range changed {
		name := types.NamespacedName{Namespace: ch.Object.Namespace, Name: ch.Object.Name}
		p := ch.Object
		if ch.Deleted {
			p = nil
			out.deleted = append(out.deleted, name)
		} else {
			out.objects = append(out.objects, p)
		}
		if local.pods[name] == nil {
			remote(name, p)
		}
	}
	for name := range a.localPods {
		if local.pods[name] == nil {
			p, _, _ := a.tables.Pods.Get(txn, table.ByName[*corev1.Pod](name.Namespace, name.Name))
			remote(name, p)
		}
	}
	a.localPods = local.pods
	out.owners = append(out.owners, localPods(local)...)
	return out
}

// localPods are the pods of this node's endpoints.
func localPods(local endpointRound) []policy.Pod {
	out := make([]policy.Pod, 0, len(local.pods))
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
