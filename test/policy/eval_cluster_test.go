package policy

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// tier is what a tier's policies say of one end: the action of the first rule
// that matches; none or Pass leave it to the next tier. The cases use no two
// policies of equal priority, no named ports, and of nodes all.
func (r rules) tier(tier v1beta1.Tier, own, peer party, egress bool, proto corev1.Protocol, port int) v1beta1.ClusterNetworkPolicyRuleAction {
	list := slices.DeleteFunc(slices.Clone(r.cluster), func(p *v1beta1.ClusterNetworkPolicy) bool { return p.Spec.Tier != tier })
	slices.SortFunc(list, func(a, b *v1beta1.ClusterNetworkPolicy) int { return int(a.Spec.Priority - b.Spec.Priority) })
	for _, p := range list {
		s := p.Spec.Subject
		if !r.selects(s.Namespaces, s.Pods, own.pod) {
			continue
		}
		for _, rule := range p.Spec.Ingress {
			if !egress && protocolsMatch(rule.Protocols, proto, port) && slices.ContainsFunc(rule.From, func(f v1beta1.ClusterNetworkPolicyIngressPeer) bool {
				return r.selects(f.Namespaces, f.Pods, peer.pod)
			}) {
				return rule.Action
			}
		}
		for _, rule := range p.Spec.Egress {
			if egress && protocolsMatch(rule.Protocols, proto, port) && slices.ContainsFunc(rule.To, func(t v1beta1.ClusterNetworkPolicyEgressPeer) bool {
				return r.selects(t.Namespaces, t.Pods, peer.pod) || t.Nodes != nil && peer.pod == nil && peer.node != "" ||
					slices.ContainsFunc(t.Networks, func(c v1beta1.CIDR) bool { return netip.MustParsePrefix(string(c)).Contains(peer.addr) })
			}) {
				return rule.Action
			}
		}
	}
	return ""
}

func (r rules) selects(namespaces *metav1.LabelSelector, pods *v1beta1.NamespacedPod, pod *corev1.Pod) bool {
	if pod == nil {
		return false
	}
	return namespaces != nil && matches(namespaces, r.namespaces[pod.Namespace]) ||
		pods != nil && matches(&pods.NamespaceSelector, r.namespaces[pod.Namespace]) && matches(&pods.PodSelector, pod.Labels)
}

func protocolsMatch(list []v1beta1.ClusterNetworkPolicyProtocol, proto corev1.Protocol, port int) bool {
	if len(list) == 0 {
		return true
	}
	in := func(p *v1beta1.Port) bool {
		return int(p.Number) == port || p.Range != nil && int(p.Range.Start) <= port && port <= int(p.Range.End)
	}
	return slices.ContainsFunc(list, func(p v1beta1.ClusterNetworkPolicyProtocol) bool {
		return proto == corev1.ProtocolTCP && p.TCP != nil && in(p.TCP.DestinationPort) ||
			proto == corev1.ProtocolUDP && p.UDP != nil && in(p.UDP.DestinationPort)
	})
}
