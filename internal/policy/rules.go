package policy

import (
	"cmp"
	"fmt"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// policy is a NetworkPolicy or ClusterNetworkPolicy, checked.
type policy struct {
	tier            Tier
	namespace, name string
	selects         *peer
	// about are the directions, by Direction, that it says something of: a
	// NetworkPolicy isolates in them.
	about [2]bool
	rules [2][]rule
	shut  bool // this is its closed reading
}

func (p *policy) ref() PolicyRef { return PolicyRef{p.tier, p.namespace, p.name} }

type action uint8

const (
	actionDeny action = iota // also of what is none
	actionAccept
	actionPass
)

// rule is about what matches one of the peers and one of the ports.
type rule struct {
	index    int
	name     string // ClusterNetworkPolicy
	action   action
	anyPeer  bool
	peers    []*peer
	anyPort  bool
	portSets []ports
}

type portKind uint8

const (
	portExact portKind = iota
	portRanged
	portAll // every port of the protocol
	portNamed
)

// ports is an element of a rule's ports.
type ports struct {
	kind  portKind
	proto uint8
	rng   portRange // portExact: lo
	name  string    // portNamed
}

// portName is a port's name as policies mention it.
type portName struct {
	name  string
	proto uint8
}

// parser checks policies and collects their problems.
type parser struct {
	object   string
	problems *[]Problem
	checking bool // the object is not in force yet: see CheckCluster
}

func (p parser) problem(field, format string, args ...any) {
	*p.problems = append(*p.problems, Problem{Object: p.object, Field: field, Err: fmt.Sprintf(format, args...)})
}

// parsed are the policies, checked, each object once.
type parsed struct {
	objects  map[any]checked
	network  []*networkingv1.NetworkPolicy
	cluster  []*v1beta1.ClusterNetworkPolicy
	policies []*policy
	problems []Problem
}

type checked struct {
	policy   *policy
	problems []Problem
}

// set takes the policies of in; false: they are those that it had.
//
// NetworkPolicies go by namespace and name, ClusterNetworkPolicies in the order
// in which they are asked, but for what their tiers say. Of equal priorities,
// among which the API lets us choose, the first by name counts: the same on
// all nodes.
func (ps *parsed) set(in *Input) bool {
	if ps.objects != nil && slices.Equal(ps.network, in.Policies) && slices.Equal(ps.cluster, in.ClusterPolicies) {
		return false
	}
	ps.network, ps.cluster = slices.Clone(in.Policies), slices.Clone(in.ClusterPolicies)
	old := ps.objects
	ps.objects = make(map[any]checked, len(ps.network)+len(ps.cluster))
	ps.policies, ps.problems = nil, nil
	take := func(object any, name string, check func(parser) *policy) {
		c, ok := old[object]
		if !ok {
			c.policy = check(parser{object: name, problems: &c.problems})
		}
		ps.objects[object] = c
		ps.policies = append(ps.policies, c.policy)
		ps.problems = append(ps.problems, c.problems...)
	}
	for _, np := range slices.SortedFunc(slices.Values(ps.network), func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}) {
		take(np, "NetworkPolicy "+np.Namespace+"/"+np.Name, func(p parser) *policy { return p.policy(np) })
	}
	for _, cnp := range slices.SortedFunc(slices.Values(ps.cluster), func(a, b *v1beta1.ClusterNetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Spec.Priority, b.Spec.Priority), cmp.Compare(a.Name, b.Name))
	}) {
		take(cnp, "ClusterNetworkPolicy "+cnp.Name, func(p parser) *policy { return p.clusterPolicy(cnp) })
	}
	return true
}

func (p parser) policy(np *networkingv1.NetworkPolicy) *policy {
	pol := &policy{tier: TierNetworkPolicy, namespace: np.Namespace, name: np.Name}
	valid := 0
	for i, t := range np.Spec.PolicyTypes {
		switch t {
		case networkingv1.PolicyTypeIngress:
			pol.about[Ingress] = true
		case networkingv1.PolicyTypeEgress:
			pol.about[Egress] = true
		default:
			p.problem(fmt.Sprintf("spec.policyTypes[%d]", i), "%q is neither Ingress nor Egress; ignored", t)
			continue
		}
		valid++
	}
	if valid == 0 {
		pol.about[Ingress] = true
		pol.about[Egress] = len(np.Spec.Egress) > 0
	}
	for i, r := range np.Spec.Ingress {
		pol.rules[Ingress] = append(pol.rules[Ingress],
			p.rule(np.Namespace, fmt.Sprintf("spec.ingress[%d]", i), "from", i, r.From, r.Ports))
	}
	for i, r := range np.Spec.Egress {
		pol.rules[Egress] = append(pol.rules[Egress],
			p.rule(np.Namespace, fmt.Sprintf("spec.egress[%d]", i), "to", i, r.To, r.Ports))
	}
	pods, err := selector(&np.Spec.PodSelector)
	if err != nil {
		p.problem("spec.podSelector", "%v; every pod of the namespace is isolated and nothing is allowed until this is mended", err)
		pods = labels.Everything()
		pol.rules = [2][]rule{}
	}
	pol.selects = podPeer(np.Namespace, nil, pods)
	return pol
}

func (p parser) rule(namespace, field, peersField string, index int, peers []networkingv1.NetworkPolicyPeer, list []networkingv1.NetworkPolicyPort) rule {
	r := rule{index: index, action: actionAccept, anyPeer: len(peers) == 0, anyPort: len(list) == 0}
	for i := range peers {
		if pr := p.peer(namespace, fmt.Sprintf("%s.%s[%d]", field, peersField, i), &peers[i]); pr != nil {
			r.peers = append(r.peers, pr)
		}
	}
	for i := range list {
		if ps, ok := p.ports(fmt.Sprintf("%s.ports[%d]", field, i), &list[i]); ok {
			r.portSets = append(r.portSets, ps)
		}
	}
	return r
}

// peer returns nil for one that makes no sense.
func (p parser) peer(namespace, field string, np *networkingv1.NetworkPolicyPeer) *peer {
	selects := np.PodSelector != nil || np.NamespaceSelector != nil
	switch {
	case np.IPBlock != nil && selects:
		p.problem(field, "has an ipBlock and selectors; matches nothing, make two peers of it")
		return nil
	case np.IPBlock != nil:
		b := p.block(field+".ipBlock", np.IPBlock)
		if b == nil {
			return nil
		}
		return &peer{key: b.key(), block: b}
	case !selects:
		p.problem(field, "has neither selector nor ipBlock; matches nothing, use an empty namespaceSelector for all pods")
		return nil
	}
	pod, err := selector(np.PodSelector)
	if err != nil {
		p.problem(field+".podSelector", "%v; the peer matches nothing", err)
		return nil
	}
	if np.NamespaceSelector == nil {
		return podPeer(namespace, nil, pod)
	}
	ns, err := selector(np.NamespaceSelector)
	if err != nil {
		p.problem(field+".namespaceSelector", "%v; the peer matches nothing", err)
		return nil
	}
	return podPeer(namespace, ns, pod)
}

// ports returns false for an element that makes no sense.
func (p parser) ports(field string, np *networkingv1.NetworkPolicyPort) (ports, bool) {
	ps := ports{proto: 6}
	if np.Protocol != nil {
		var ok bool
		if ps.proto, ok = protoNumber(*np.Protocol); !ok {
			p.problem(field+".protocol", "%q is none of TCP, UDP, SCTP; the element matches nothing", *np.Protocol)
			return ps, false
		}
	}
	switch {
	case np.Port == nil && np.EndPort != nil:
		p.problem(field+".endPort", "needs port; the element matches nothing")
		return ps, false
	case np.Port == nil:
		ps.kind = portAll
		return ps, true
	case np.Port.Type == intstr.String:
		if np.EndPort != nil {
			p.problem(field+".endPort", "cannot go with the name %q in port; the element matches nothing", np.Port.StrVal)
			return ps, false
		}
		if errs := validation.IsValidPortName(np.Port.StrVal); len(errs) > 0 {
			p.problem(field+".port", "%q is no port name: %s; the element matches nothing", np.Port.StrVal, errs[0])
			return ps, false
		}
		ps.kind, ps.name = portNamed, np.Port.StrVal
		return ps, true
	}
	lo := np.Port.IntVal
	hi := lo
	if np.EndPort != nil {
		hi = *np.EndPort
	}
	switch {
	case lo < 1 || lo > 65535:
		p.problem(field+".port", "%d is not in 1-65535; the element matches nothing", lo)
		return ps, false
	case hi < lo || hi > 65535:
		p.problem(field+".endPort", "%d is not in %d-65535; the element matches nothing", hi, lo)
		return ps, false
	case hi > lo:
		ps.kind = portRanged
	}
	ps.rng = portRange{uint16(lo), uint16(hi)}
	return ps, true
}
