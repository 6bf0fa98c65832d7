package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
)

// Compile compiles in. prev is the State of the previous output, which the
// maps hold by now; nil if there is none. Neither is changed.
func Compile(in Input, prev *State) Output {
	if prev == nil {
		prev = newState()
	}
	st := prev.successor()
	var out Output

	owners := ownAddresses(in, &out.Problems)
	policies := slices.Concat(parsePolicies(in.Policies, &out.Problems),
		parseClusterPolicies(in.ClusterPolicies, &out.Problems))
	nsLabels := namespaceLabels(in.Namespaces)

	var local []*Pod
	for i := range in.Pods {
		if p := &in.Pods[i]; p.Local && !p.HostNetwork {
			local = append(local, p)
		}
	}
	f := findInForce(local, policies, nsLabels, prev, st)
	st.ports, st.nextClass = prev.ports.next(f.ranges, prev.nextClass)

	ids := newIdentities(f, nsLabels, prev, st)
	st.prefixes = ids.prefixes()
	st.addrs = make(map[netip.Addr]uint32, len(owners.order))
	for _, a := range owners.order {
		o := owners.of[a]
		var class podClass
		switch {
		case o.pod != nil:
			class = ids.class(o.pod)
		case o.node != nil:
			class = ids.nodeClass(o.node)
		}
		st.addrs[a] = ids.address(o.kind, class, a)
	}

	out.Endpoints = make(map[types.NamespacedName]Endpoint, len(local))
	for _, p := range local {
		out.Endpoints[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] = Endpoint{}
	}
	x := &expander{ids: ids, ports: st.ports, rule: func(r RuleRef) uint32 { return st.ruleNumber(prev, r) }}
	for _, g := range f.groups {
		n := st.number(prev, x.expand(g))
		refs := g.policyRefs()
		for _, p := range g.pods {
			key := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
			ep := out.Endpoints[key]
			if g.direction == Ingress {
				ep.In, ep.InPolicies = n, refs
			} else {
				ep.Out, ep.OutPolicies = n, refs
			}
			out.Endpoints[key] = ep
		}
	}
	for _, p := range local {
		ep := out.Endpoints[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}]
		for _, a := range p.Addrs {
			st.endpoints[a.Unmap()] = [2]uint32{ep.In, ep.Out}
		}
	}

	out.Addrs, out.Prefixes, out.Tables = st.addrs, st.prefixes, st.tables
	out.PortClasses = st.ports.list
	out.Early, out.Transitional = changeOver(prev, st)
	out.Rules = make(map[uint32]RuleRef, len(st.rules))
	for _, rules := range []map[RuleRef]uint32{prev.rules, st.rules} {
		for r, n := range rules {
			out.Rules[n] = r
		}
	}
	out.State = st
	return out
}

// owner is who an address belongs to: a node, or a pod. The addresses of a
// node's devices are its own, but no selector finds it by them.
type owner struct {
	kind uint32
	pod  *Pod
	node *Node
}

type owners struct {
	of    map[netip.Addr]owner
	order []netip.Addr // as in the input, so that numbers come out the same
}

// ownAddresses decides who owns each address; see [Pod].
func ownAddresses(in Input, problems *[]Problem) owners {
	o := owners{of: make(map[netip.Addr]owner)}
	set := func(a netip.Addr, w owner) {
		if _, ok := o.of[a]; !ok {
			o.order = append(o.order, a)
		}
		o.of[a] = w
	}
	for i := range in.Nodes {
		n := &in.Nodes[i]
		w := owner{kind: maps.IdentityRemoteNode, node: n}
		if n.Self {
			w.kind = maps.IdentityHost
		}
		own := func(a netip.Addr) {
			a = a.Unmap().WithZone("")
			if o.of[a].kind != maps.IdentityHost { // this node goes before others
				set(a, w)
			}
		}
		for _, a := range n.Addrs {
			own(a)
		}
		w.node = nil
		for _, a := range n.Devices {
			if !slices.Contains(n.Addrs, a) {
				own(a)
			}
		}
	}
	for i := range in.Pods {
		p := &in.Pods[i]
		if p.HostNetwork {
			continue
		}
		for _, a := range p.Addrs {
			a = a.Unmap().WithZone("")
			w, taken := o.of[a]
			switch {
			case !taken || w.pod == p:
			case w.pod == nil:
				conflict(problems, p, a, "a node")
				continue
			case !beats(p, w.pod):
				conflict(problems, p, a, "pod "+w.pod.Namespace+"/"+w.pod.Name)
				continue
			default:
				conflict(problems, w.pod, a, "pod "+p.Namespace+"/"+p.Name)
			}
			set(a, owner{kind: maps.IdentityPod, pod: p})
		}
	}
	return o
}

func conflict(problems *[]Problem, p *Pod, a netip.Addr, who string) {
	*problems = append(*problems, Problem{
		Object: "Pod " + p.Namespace + "/" + p.Name,
		Field:  "status.podIPs",
		Err:    fmt.Sprintf("%s is owned by %s; the claim is ignored", a, who),
	})
}

// beats says that p, and not q, owns an address that both claim.
func beats(p, q *Pod) bool {
	if p.Local != q.Local {
		return p.Local
	}
	return cmp.Or(p.Created.Compare(q.Created), cmp.Compare(p.UID, q.UID)) > 0
}

// ruleNumber returns the number of a rule.
func (st *State) ruleNumber(prev *State, r RuleRef) uint32 {
	if n, ok := st.rules[r]; ok {
		return n
	}
	n, ok := prev.rules[r]
	if !ok {
		n = st.nextRule
		st.nextRule++
	}
	st.rules[r] = n
	return n
}
