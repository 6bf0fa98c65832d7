package policy_test

import (
	"fmt"
	"slices"

	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/policy"
)

func (g generator) namespacedPod() *v1beta1.NamespacedPod {
	return &v1beta1.NamespacedPod{NamespaceSelector: g.namespaceSelector(), PodSelector: g.selector()}
}

func (g generator) cnpPeer(d policy.Direction) (p cnpPeer) {
	kinds := 3
	if d == policy.Egress {
		kinds = 6
	}
	if g.chance(2) {
		return p // of a kind that is not known
	}
	switch g.r.IntN(kinds) {
	case 0:
		s := g.namespaceSelector()
		p.Namespaces = &s
	case 1, 2:
		p.Pods = g.namespacedPod()
	case 3:
		s := g.selector()
		p.Nodes = &s
	default:
		for range 1 + g.r.IntN(3) {
			p.Networks = append(p.Networks, v1beta1.CIDR(pick(g, cidrs...)))
		}
	}
	return p
}

func (g generator) cnpPorts(names bool) (out []cnpPorts) {
	for range g.r.IntN(4) {
		if names && g.chance(25) {
			out = append(out, cnpPorts{DestinationNamedPort: pick(g, portNames...)})
			continue
		}
		port := &v1beta1.Port{Number: pick(g, numbers...)}
		if lo, hi := pick(g, numbers...), pick(g, numbers...); lo < hi && g.chance(80) {
			port = &v1beta1.Port{Range: &v1beta1.PortRange{Start: lo, End: hi}}
		}
		switch g.r.IntN(4) {
		case 0:
			out = append(out, cnpPorts{UDP: &v1beta1.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}})
		case 1:
			out = append(out, cnpPorts{SCTP: &v1beta1.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}})
		default:
			out = append(out, cnpPorts{TCP: &v1beta1.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}})
		}
	}
	return out
}

func (g generator) cnpRule(d policy.Direction) cnpRule {
	r := cnpRule{action: pick(g, accept, accept, deny, deny, pass)}
	pods := true
	for range 1 + g.r.IntN(3) {
		p := g.cnpPeer(d)
		pods = pods && p.Nodes == nil && p.Networks == nil
		r.peers = append(r.peers, p)
	}
	r.protocols = g.cnpPorts(pods)
	return r
}

func (g generator) clusterPolicy(name string) *cnp {
	p := &cnp{}
	p.Name = name
	p.Spec.Tier = pick(g, v1beta1.AdminTier, v1beta1.BaselineTier)
	p.Spec.Priority = pick[int32](g, 0, 1, 10, 1000)
	if g.chance(50) {
		s := g.namespaceSelector()
		p.Spec.Subject.Namespaces = &s
	} else {
		p.Spec.Subject.Pods = g.namespacedPod()
	}
	for range g.r.IntN(4) {
		r := g.cnpRule(policy.Ingress)
		in := v1beta1.ClusterNetworkPolicyIngressRule{Action: r.action, Protocols: r.protocols}
		for _, p := range r.peers {
			in.From = append(in.From, v1beta1.ClusterNetworkPolicyIngressPeer{Namespaces: p.Namespaces, Pods: p.Pods})
		}
		p.Spec.Ingress = append(p.Spec.Ingress, in)
	}
	for range g.r.IntN(4) {
		r := g.cnpRule(policy.Egress)
		p.Spec.Egress = append(p.Spec.Egress,
			v1beta1.ClusterNetworkPolicyEgressRule{Action: r.action, To: r.peers, Protocols: r.protocols})
	}
	return p
}

// mutateCluster changes one ClusterNetworkPolicy: it comes, goes, is edited,
// wholly or in one place, or changes places with others.
func (g generator) mutateCluster(n *policy.Input) {
	i := len(n.ClusterPolicies)
	if i > 0 {
		i = g.r.IntN(i)
	}
	switch {
	case len(n.ClusterPolicies) == 0 || g.chance(25):
		name := fmt.Sprintf("c%d", g.r.IntN(6))
		if !slices.ContainsFunc(n.ClusterPolicies, func(p *cnp) bool { return p.Name == name }) {
			n.ClusterPolicies = append(n.ClusterPolicies, g.clusterPolicy(name))
		}
	case g.chance(30):
		n.ClusterPolicies = slices.Delete(n.ClusterPolicies, i, i+1)
	default:
		old, p := n.ClusterPolicies[i], g.clusterPolicy(n.ClusterPolicies[i].Name)
		switch g.r.IntN(4) {
		case 0: // its priority alone
			spec := old.Spec
			spec.Priority = p.Spec.Priority
			p.Spec = spec
		case 1: // its subject alone
			spec := old.Spec
			spec.Subject = p.Spec.Subject
			p.Spec = spec
		case 2:
			p.Spec.Tier, p.Spec.Priority, p.Spec.Subject, p.Spec.Egress = old.Spec.Tier, old.Spec.Priority, old.Spec.Subject, old.Spec.Egress
		}
		n.ClusterPolicies[i] = p
	}
}

// unknownPeers says that some rule has a peer that makes it fail closed.
func unknownPeers(in *policy.Input) bool {
	return slices.ContainsFunc(in.ClusterPolicies, func(p *cnp) bool {
		for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
			for _, r := range rulesOf(p, d) {
				if r.unknown() {
					return true
				}
			}
		}
		return false
	})
}
