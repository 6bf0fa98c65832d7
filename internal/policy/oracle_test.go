package policy_test

import (
	"net/netip"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/policy"
)

// The oracle reads the API's semantics off the objects, one question at a
// time. It shares nothing with the compiler. Objects are valid ones.

var protoOf = map[string]uint8{"TCP": 6, "UDP": 17, "SCTP": 132}

// question is one verdict: may self send to (egress) or receive from
// (ingress) peer, with this protocol and destination port?
type question struct {
	self  string // namespace/name
	dir   policy.Direction
	peer  netip.Addr
	proto uint8
	port  uint16
}

func oracle(in *policy.Input, q question) bool {
	self := in.Pods[slices.IndexFunc(in.Pods, func(p policy.Pod) bool { return p.Namespace+"/"+p.Name == q.self })]
	if say := oracleTier(in, v1beta1.AdminTier, &self, q); say != "" {
		return say == accept
	}
	isolated := false
	for _, np := range in.Policies {
		if np.Namespace != self.Namespace || !matches(&np.Spec.PodSelector, self.Labels) || !hasType(np, q.dir) {
			continue
		}
		isolated = true
		if q.dir == policy.Ingress {
			for _, r := range np.Spec.Ingress {
				if peersMatch(in, np.Namespace, r.From, q.peer) && portsMatch(r.Ports, &self, q) {
					return true
				}
			}
			continue
		}
		for _, r := range np.Spec.Egress {
			if peersMatch(in, np.Namespace, r.To, q.peer) && portsMatch(r.Ports, podAt(in, q.peer), q) {
				return true
			}
		}
	}
	if isolated {
		return false
	}
	return oracleTier(in, v1beta1.BaselineTier, &self, q) != deny
}

func hasType(np *networkingv1.NetworkPolicy, d policy.Direction) bool {
	if len(np.Spec.PolicyTypes) == 0 {
		return d == policy.Ingress || len(np.Spec.Egress) > 0
	}
	want := networkingv1.PolicyTypeIngress
	if d == policy.Egress {
		want = networkingv1.PolicyTypeEgress
	}
	return slices.Contains(np.Spec.PolicyTypes, want)
}

// podAt returns the pod that owns the address, nil if none does.
func podAt(in *policy.Input, a netip.Addr) *policy.Pod {
	for i := range in.Pods {
		if !in.Pods[i].HostNetwork && slices.Contains(in.Pods[i].Addrs, a) {
			return &in.Pods[i]
		}
	}
	return nil
}

func peersMatch(in *policy.Input, namespace string, peers []networkingv1.NetworkPolicyPeer, a netip.Addr) bool {
	if len(peers) == 0 {
		return true
	}
	pod := podAt(in, a)
	for _, p := range peers {
		if p.IPBlock != nil {
			inside := func(s string) bool { return netip.MustParsePrefix(s).Contains(a) }
			if inside(p.IPBlock.CIDR) && !slices.ContainsFunc(p.IPBlock.Except, inside) {
				return true
			}
			continue
		}
		if pod == nil {
			continue
		}
		if p.NamespaceSelector == nil {
			if pod.Namespace != namespace {
				continue
			}
		} else {
			i := slices.IndexFunc(in.Namespaces, func(n policy.Namespace) bool { return n.Name == pod.Namespace })
			if i < 0 {
				continue
			}
			set := map[string]string{}
			for k, v := range in.Namespaces[i].Labels {
				set[k] = v
			}
			set["kubernetes.io/metadata.name"] = pod.Namespace
			if !matches(p.NamespaceSelector, set) {
				continue
			}
		}
		if p.PodSelector == nil || matches(p.PodSelector, pod.Labels) {
			return true
		}
	}
	return false
}

// portsMatch takes the pod that serves: the destination, nil if it is no pod.
func portsMatch(list []networkingv1.NetworkPolicyPort, dst *policy.Pod, q question) bool {
	if len(list) == 0 {
		return true
	}
	for _, p := range list {
		proto := uint8(6)
		if p.Protocol != nil {
			proto = protoOf[string(*p.Protocol)]
		}
		if proto != q.proto {
			continue
		}
		switch {
		case p.Port == nil:
			return true
		case p.Port.Type == intstr.String:
			if dst == nil {
				continue
			}
			i := slices.IndexFunc(dst.Ports, func(np policy.NamedPort) bool {
				return np.Name == p.Port.StrVal && np.Proto == proto
			})
			if i >= 0 && dst.Ports[i].Port == q.port {
				return true
			}
		case p.EndPort != nil:
			if int32(q.port) >= p.Port.IntVal && int32(q.port) <= *p.EndPort {
				return true
			}
		case int32(q.port) == p.Port.IntVal:
			return true
		}
	}
	return false
}

func matches(sel *metav1.LabelSelector, set map[string]string) bool {
	for k, v := range sel.MatchLabels {
		if got, ok := set[k]; !ok || got != v {
			return false
		}
	}
	for _, e := range sel.MatchExpressions {
		v, has := set[e.Key]
		ok := false
		switch e.Operator {
		case metav1.LabelSelectorOpIn:
			ok = has && slices.Contains(e.Values, v)
		case metav1.LabelSelectorOpNotIn:
			ok = !has || !slices.Contains(e.Values, v)
		case metav1.LabelSelectorOpExists:
			ok = has
		case metav1.LabelSelectorOpDoesNotExist:
			ok = !has
		}
		if !ok {
			return false
		}
	}
	return true
}
