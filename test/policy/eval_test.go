package policy

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// party is one end of a probe: a pod, or a host (a node, or the outside).
type party struct {
	pod  *corev1.Pod // nil: a host
	node string      // the pod's node, the node itself, "" outside
	addr netip.Addr
}

// rules evaluates policies as their APIs document them, one pair at a time and
// without any state.
type rules struct {
	policies   []*networkingv1.NetworkPolicy
	cluster    []*v1beta1.ClusterNetworkPolicy
	namespaces map[string]map[string]string
}

func matches(sel *metav1.LabelSelector, set map[string]string) bool {
	s, err := metav1.LabelSelectorAsSelector(sel)
	return err == nil && s.Matches(labels.Set(set))
}

// allowed says whether src may open proto/port (the destination's own port).
func (r rules) allowed(src, dst party, proto corev1.Protocol, port int) bool {
	switch {
	case src.addr == dst.addr:
		return true // a pod and itself
	case src.pod == nil && dst.pod != nil && src.node == dst.node:
		return true // the node and its own pods
	}
	return r.side(src, dst, networkingv1.PolicyTypeEgress, proto, port) &&
		r.side(dst, src, networkingv1.PolicyTypeIngress, proto, port)
}

// side is the verdict of one end's policies about the other.
func (r rules) side(own, peer party, direction networkingv1.PolicyType, proto corev1.Protocol, port int) bool {
	if own.pod == nil {
		return true
	}
	egress := direction == networkingv1.PolicyTypeEgress
	switch r.tier(v1beta1.AdminTier, own, peer, egress, proto, port) {
	case v1beta1.ClusterNetworkPolicyRuleActionAccept:
		return true
	case v1beta1.ClusterNetworkPolicyRuleActionDeny:
		return false
	}
	isolated := false
	for _, p := range r.policies {
		if p.Namespace != own.pod.Namespace || !matches(&p.Spec.PodSelector, own.pod.Labels) {
			continue
		}
		types := p.Spec.PolicyTypes
		if len(types) == 0 {
			types = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			if len(p.Spec.Egress) > 0 {
				types = append(types, networkingv1.PolicyTypeEgress)
			}
		}
		if !slices.Contains(types, direction) {
			continue
		}
		isolated = true
		if direction == networkingv1.PolicyTypeIngress {
			for _, rule := range p.Spec.Ingress {
				if r.ports(rule.Ports, own, proto, port) && r.peers(p.Namespace, rule.From, peer) {
					return true
				}
			}
			continue
		}
		for _, rule := range p.Spec.Egress {
			if r.ports(rule.Ports, peer, proto, port) && r.peers(p.Namespace, rule.To, peer) {
				return true
			}
		}
	}
	if isolated {
		return false
	}
	return r.tier(v1beta1.BaselineTier, own, peer, egress, proto, port) != v1beta1.ClusterNetworkPolicyRuleActionDeny
}

func (r rules) ports(list []networkingv1.NetworkPolicyPort, dst party, proto corev1.Protocol, port int) bool {
	if len(list) == 0 {
		return true
	}
	for _, p := range list {
		want := corev1.ProtocolTCP
		if p.Protocol != nil {
			want = *p.Protocol
		}
		switch {
		case want != proto:
		case p.Port == nil:
			return true
		case p.Port.Type == intstr.String:
			if dst.serves(p.Port.StrVal, proto, port) {
				return true
			}
		case p.EndPort != nil && int(p.Port.IntVal) <= port && port <= int(*p.EndPort):
			return true
		case int(p.Port.IntVal) == port:
			return true
		}
	}
	return false
}

// serves: a port has this name there, in this protocol.
func (p party) serves(name string, proto corev1.Protocol, port int) bool {
	return p.pod != nil && slices.ContainsFunc(p.pod.Spec.Containers[0].Ports, func(c corev1.ContainerPort) bool {
		return c.Name == name && c.Protocol == proto && int(c.ContainerPort) == port
	})
}

func (r rules) peers(namespace string, list []networkingv1.NetworkPolicyPeer, peer party) bool {
	if len(list) == 0 {
		return true
	}
	for _, p := range list {
		if p.IPBlock != nil {
			in := netip.MustParsePrefix(p.IPBlock.CIDR).Contains(peer.addr)
			for _, e := range p.IPBlock.Except {
				in = in && !netip.MustParsePrefix(e).Contains(peer.addr)
			}
			if in {
				return true
			}
			continue
		}
		if peer.pod == nil {
			continue
		}
		if p.NamespaceSelector == nil && peer.pod.Namespace != namespace ||
			p.NamespaceSelector != nil && !matches(p.NamespaceSelector, r.namespaces[peer.pod.Namespace]) ||
			p.PodSelector != nil && !matches(p.PodSelector, peer.pod.Labels) {
			continue
		}
		return true
	}
	return false
}
