package policy_test

import (
	"cmp"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/policy"
)

// The part of the oracle for ClusterNetworkPolicies. Objects are valid ones,
// but for peers that are none of those we know, which the API has an answer to.

type (
	cnp       = v1beta1.ClusterNetworkPolicy
	cnpPeer   = v1beta1.ClusterNetworkPolicyEgressPeer
	cnpPorts  = v1beta1.ClusterNetworkPolicyProtocol
	cnpAction = v1beta1.ClusterNetworkPolicyRuleAction
)

const (
	accept = v1beta1.ClusterNetworkPolicyRuleActionAccept
	deny   = v1beta1.ClusterNetworkPolicyRuleActionDeny
	pass   = v1beta1.ClusterNetworkPolicyRuleActionPass
)

// cnpRule is a rule of either direction.
type cnpRule struct {
	action    cnpAction
	peers     []cnpPeer
	protocols []cnpPorts
}

func rulesOf(p *cnp, d policy.Direction) (out []cnpRule) {
	if d == policy.Egress {
		for _, r := range p.Spec.Egress {
			out = append(out, cnpRule{r.Action, r.To, r.Protocols})
		}
		return out
	}
	for _, r := range p.Spec.Ingress {
		var peers []cnpPeer
		for _, f := range r.From {
			peers = append(peers, cnpPeer{Namespaces: f.Namespaces, Pods: f.Pods})
		}
		out = append(out, cnpRule{r.Action, peers, r.Protocols})
	}
	return out
}

// unknown says that one of the peers is of a kind we do not know.
func (r *cnpRule) unknown() bool {
	return slices.ContainsFunc(r.peers, func(p cnpPeer) bool {
		return p.Namespaces == nil && p.Pods == nil && p.Nodes == nil && p.Networks == nil
	})
}

// oracleTier returns what the tier says of the question: "" if it leaves it to
// the next one.
func oracleTier(in *policy.Input, tier v1beta1.Tier, self *policy.Pod, q question) cnpAction {
	var list []*cnp
	for _, p := range in.ClusterPolicies {
		if p.Spec.Tier == tier {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b *cnp) int {
		return cmp.Or(int(a.Spec.Priority-b.Spec.Priority), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range list {
		selected, sure := isSubject(in, &p.Spec.Subject, self)
		if !selected {
			continue
		}
		for _, r := range rulesOf(p, q.dir) {
			switch {
			case r.action == accept && (r.unknown() || !sure):
			case r.action == pass && !sure, r.unknown():
				return deny
			case r.matches(in, self, q):
				if r.action == pass {
					return ""
				}
				return r.action
			}
		}
	}
	return ""
}

// labelsOf returns the labels of a namespace, nil if it is not known.
func labelsOf(in *policy.Input, namespace string) map[string]string {
	i := slices.IndexFunc(in.Namespaces, func(n policy.Namespace) bool { return n.Name == namespace })
	if i < 0 {
		return nil
	}
	set := map[string]string{"kubernetes.io/metadata.name": namespace}
	for k, v := range in.Namespaces[i].Labels {
		set[k] = v
	}
	return set
}

// isSubject says whether a policy is about the pod. It is not sure of a pod
// whose namespace is not known yet, unless every namespace is meant.
func isSubject(in *policy.Input, s *v1beta1.ClusterNetworkPolicySubject, pod *policy.Pod) (selected, sure bool) {
	ns, pods := s.Namespaces, &metav1.LabelSelector{}
	if s.Pods != nil {
		ns, pods = &s.Pods.NamespaceSelector, &s.Pods.PodSelector
	}
	if !matches(pods, pod.Labels) {
		return false, true
	}
	if len(ns.MatchLabels)+len(ns.MatchExpressions) == 0 {
		return true, true
	}
	set := labelsOf(in, pod.Namespace)
	if set == nil {
		return true, false
	}
	return matches(ns, set), true
}

func (r *cnpRule) matches(in *policy.Input, self *policy.Pod, q question) bool {
	if !slices.ContainsFunc(r.peers, func(p cnpPeer) bool {
		return p.Namespaces != nil && podMatches(in, p.Namespaces, nil, q.peer) ||
			p.Pods != nil && podMatches(in, &p.Pods.NamespaceSelector, &p.Pods.PodSelector, q.peer) ||
			p.Nodes != nil && nodeMatches(in, p.Nodes, q.peer) ||
			slices.ContainsFunc(p.Networks, func(c v1beta1.CIDR) bool { return netip.MustParsePrefix(string(c)).Contains(q.peer) })
	}) {
		return false
	}
	if len(r.protocols) == 0 {
		return true
	}
	server := self
	if q.dir == policy.Egress {
		server = podAt(in, q.peer)
	}
	return slices.ContainsFunc(r.protocols, func(p cnpPorts) bool {
		switch {
		case p.TCP != nil:
			return q.proto == 6 && inPort(p.TCP.DestinationPort, q.port)
		case p.UDP != nil:
			return q.proto == 17 && inPort(p.UDP.DestinationPort, q.port)
		case p.SCTP != nil:
			return q.proto == 132 && inPort(p.SCTP.DestinationPort, q.port)
		}
		if server == nil {
			return false
		}
		i := slices.IndexFunc(server.Ports, func(np policy.NamedPort) bool {
			return np.Name == p.DestinationNamedPort && np.Proto == q.proto
		})
		return i >= 0 && server.Ports[i].Port == q.port
	})
}

func inPort(p *v1beta1.Port, port uint16) bool {
	if p.Range != nil {
		return p.Range.Start <= int32(port) && int32(port) <= p.Range.End
	}
	return p.Number == int32(port)
}

func podMatches(in *policy.Input, ns, pods *metav1.LabelSelector, a netip.Addr) bool {
	pod := podAt(in, a)
	if pod == nil {
		return false
	}
	set := labelsOf(in, pod.Namespace)
	return set != nil && matches(ns, set) && (pods == nil || matches(pods, pod.Labels))
}

func nodeMatches(in *policy.Input, sel *metav1.LabelSelector, a netip.Addr) bool {
	return slices.ContainsFunc(in.Nodes, func(n policy.Node) bool {
		return slices.Contains(n.Addrs, a) && matches(sel, n.Labels)
	})
}
