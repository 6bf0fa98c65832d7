package policy_test

import (
	"fmt"
	gomaps "maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/internal/policy"
)

// generator makes up clusters from a small universe, so that things overlap.
type generator struct{ r *rand.Rand }

func newGenerator(seed uint64) generator {
	return generator{rand.New(rand.NewPCG(seed, 1))}
}

func key(p *policy.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
}

func pick[T any](g generator, list ...T) T { return list[g.r.IntN(len(list))] }

func (g generator) chance(percent int) bool { return g.r.IntN(100) < percent }

var (
	namespaceNames = []string{"red", "green", "blue"}
	labelKeys      = []string{"app", "tier", "env"}
	labelValues    = []string{"x", "y", "z"}
	portNames      = []string{"http", "metrics"}
	cidrs          = []string{
		"0.0.0.0/0", "::/0", "::/64", "10.0.0.0/8", "10.244.0.0/16", "10.244.80.0/24",
		"10.244.80.64/26", "10.244.80.66/32", "10.244.158.64/27", "172.31.0.0/24", "172.31.0.2/32",
		"192.0.2.0/24", "192.0.2.128/25", "192.0.2.192/26", "192.0.2.7/32", "128.0.0.0/1",
		"fd00::/8", "fd00:10:244::/48", "fd00:10:244:50::/64", "fd00:10:244:50::42/128", "2001:db8::/32", "2001:db8:1::/48",
	}
	numbers = []int32{1, 53, 80, 81, 443, 8080, 8081, 8090, 65535}
)

func (g generator) labels() map[string]string {
	set := map[string]string{}
	for _, k := range labelKeys {
		if g.chance(60) {
			set[k] = pick(g, labelValues...)
		}
	}
	return set
}

func (g generator) selector() metav1.LabelSelector {
	var s metav1.LabelSelector
	if g.chance(25) {
		return s
	}
	if g.chance(60) {
		s.MatchLabels = map[string]string{pick(g, labelKeys...): pick(g, labelValues...)}
	}
	if g.chance(40) {
		e := metav1.LabelSelectorRequirement{
			Key: pick(g, labelKeys...),
			Operator: pick(g, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn,
				metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist),
		}
		if e.Operator == metav1.LabelSelectorOpIn || e.Operator == metav1.LabelSelectorOpNotIn {
			e.Values = []string{pick(g, labelValues...), pick(g, labelValues...)}
		}
		s.MatchExpressions = append(s.MatchExpressions, e)
	}
	return s
}

func (g generator) namespaceSelector() metav1.LabelSelector {
	s := g.selector()
	if g.chance(20) {
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{
			Key:      "kubernetes.io/metadata.name",
			Operator: pick(g, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn),
			Values:   []string{pick(g, namespaceNames...)},
		}}
	}
	return s
}

func (g generator) block() *networkingv1.IPBlock {
	b := &networkingv1.IPBlock{CIDR: pick(g, cidrs...)}
	cidr := netip.MustParsePrefix(b.CIDR)
	for _, s := range cidrs {
		e := netip.MustParsePrefix(s)
		if e != cidr && e.Bits() > cidr.Bits() && cidr.Contains(e.Addr()) && g.chance(25) {
			b.Except = append(b.Except, s)
		}
	}
	return b
}

func (g generator) peers() []networkingv1.NetworkPolicyPeer {
	var out []networkingv1.NetworkPolicyPeer
	for range g.r.IntN(4) {
		var p networkingv1.NetworkPolicyPeer
		kind := g.r.IntN(5)
		if kind >= 3 {
			p.IPBlock = g.block()
		}
		if kind == 0 || kind == 2 {
			s := g.selector()
			p.PodSelector = &s
		}
		if kind == 1 || kind == 2 {
			s := g.namespaceSelector()
			p.NamespaceSelector = &s
		}
		out = append(out, p)
	}
	return out
}

func (g generator) ports() []networkingv1.NetworkPolicyPort {
	var out []networkingv1.NetworkPolicyPort
	for range g.r.IntN(4) {
		var p networkingv1.NetworkPolicyPort
		if g.chance(70) {
			proto := pick(g, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
			p.Protocol = &proto
		}
		switch g.r.IntN(6) {
		case 0:
		case 1:
			v := intstr.FromString(pick(g, portNames...))
			p.Port = &v
		case 2, 3:
			v := intstr.FromInt32(pick(g, numbers...))
			p.Port = &v
		default:
			lo, hi := pick(g, numbers...), pick(g, numbers...)
			lo, hi = min(lo, hi), max(lo, hi)
			v := intstr.FromInt32(lo)
			p.Port, p.EndPort = &v, &hi
		}
		out = append(out, p)
	}
	return out
}

func (g generator) policy(namespace, name string) *networkingv1.NetworkPolicy {
	np := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	np.Spec.PodSelector = g.selector()
	np.Spec.PolicyTypes = pick(g, nil, nil,
		[]networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Egress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	for range g.r.IntN(3) {
		np.Spec.Ingress = append(np.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: g.peers(), Ports: g.ports()})
	}
	for range g.r.IntN(3) {
		np.Spec.Egress = append(np.Spec.Egress, networkingv1.NetworkPolicyEgressRule{To: g.peers(), Ports: g.ports()})
	}
	return np
}

func (g generator) namedPorts() []policy.NamedPort {
	var out []policy.NamedPort
	for _, n := range portNames {
		for _, proto := range []uint8{6, 17} {
			if g.chance(40) {
				out = append(out, policy.NamedPort{Name: n, Proto: proto, Port: uint16(pick(g, numbers...))})
			}
		}
	}
	return out
}

// pod makes pod n; even ones are of this node.
func (g generator) pod(n int) policy.Pod {
	p := policy.Pod{
		Namespace: pick(g, namespaceNames...), Name: fmt.Sprintf("pod%d", n), UID: types.UID(fmt.Sprint(n, g.r.Uint64())),
		Created: time.Unix(int64(n), 0), Labels: g.labels(), Ports: g.namedPorts(), Local: n%2 == 0,
	}
	v4, v6 := "10.244.158.%d", "fd00:10:244:9e::%x"
	if p.Local {
		v4, v6 = "10.244.80.%d", "fd00:10:244:50::%x"
	}
	p.Addrs = []netip.Addr{netip.MustParseAddr(fmt.Sprintf(v4, 64+n))}
	if g.chance(50) {
		p.Addrs = append(p.Addrs, netip.MustParseAddr(fmt.Sprintf(v6, 64+n)))
	}
	if g.chance(10) {
		p.HostNetwork, p.Addrs = true, []netip.Addr{nodeAddrs[n%2]}
	}
	return p
}

var nodeAddrs = []netip.Addr{netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("172.31.0.3")}

func (g generator) input() *policy.Input {
	in := &policy.Input{Nodes: []policy.Node{
		{Name: "a", Self: true, Labels: g.labels(), Addrs: []netip.Addr{nodeAddrs[0], netip.MustParseAddr("fd00:31::2")}, Devices: []netip.Addr{
			nodeAddrs[0], netip.MustParseAddr("172.31.0.9"),
		}},
		{Name: "b", Labels: g.labels(), Addrs: []netip.Addr{nodeAddrs[1]}},
	}}
	for _, n := range namespaceNames {
		if g.chance(95) {
			in.Namespaces = append(in.Namespaces, policy.Namespace{Name: n, Labels: g.labels()})
		}
	}
	for n := range 2 + g.r.IntN(8) {
		in.Pods = append(in.Pods, g.pod(n))
	}
	for n := range g.r.IntN(6) {
		in.Policies = append(in.Policies, g.policy(pick(g, namespaceNames...), fmt.Sprintf("p%d", n)))
	}
	if g.chance(70) {
		for n := range g.r.IntN(5) {
			in.ClusterPolicies = append(in.ClusterPolicies, g.clusterPolicy(fmt.Sprintf("c%d", n)))
		}
	}
	return in
}

// mutate returns a copy of in with up to five things changed.
func (g generator) mutate(in *policy.Input) *policy.Input {
	n := &policy.Input{
		Pods: slices.Clone(in.Pods), Namespaces: slices.Clone(in.Namespaces),
		Nodes: slices.Clone(in.Nodes), Policies: slices.Clone(in.Policies), ClusterPolicies: slices.Clone(in.ClusterPolicies),
	}
	for range 1 + g.r.IntN(5) {
		switch g.r.IntN(14) {
		case 10, 11, 12:
			g.mutateCluster(n)
		case 13: // labels of a node
			n.Nodes[g.r.IntN(len(n.Nodes))].Labels = g.labels()
		case 0, 1: // labels of a pod
			if i := len(n.Pods); i > 0 {
				n.Pods[g.r.IntN(i)].Labels = g.labels()
			}
		case 2: // another pod at the same place
			if i := len(n.Pods); i > 0 {
				i = g.r.IntN(i)
				var id int
				fmt.Sscanf(n.Pods[i].Name, "pod%d", &id)
				n.Pods[i] = g.pod(id)
			}
		case 3: // a pod comes or goes
			if i := len(n.Pods); i > 0 && g.chance(50) {
				i = g.r.IntN(i)
				n.Pods = slices.Delete(n.Pods, i, i+1)
				break
			}
			for id := range 12 {
				if !slices.ContainsFunc(n.Pods, func(p policy.Pod) bool { return p.Name == fmt.Sprintf("pod%d", id) }) {
					n.Pods = append(n.Pods, g.pod(id))
					break
				}
			}
		case 4: // labels of a namespace
			if i := len(n.Namespaces); i > 0 {
				n.Namespaces[g.r.IntN(i)].Labels = g.labels()
			}
		case 5: // a policy comes
			for id := range 8 {
				name := fmt.Sprintf("p%d", id)
				if !slices.ContainsFunc(n.Policies, func(p *networkingv1.NetworkPolicy) bool { return p.Name == name }) {
					n.Policies = append(n.Policies, g.policy(pick(g, namespaceNames...), name))
					break
				}
			}
		case 6: // a policy goes
			if i := len(n.Policies); i > 0 {
				i = g.r.IntN(i)
				n.Policies = slices.Delete(n.Policies, i, i+1)
			}
		case 7: // two pods swap their labels
			if i := len(n.Pods); i > 1 {
				a, b := &n.Pods[g.r.IntN(i)], &n.Pods[g.r.IntN(i)]
				a.Labels, b.Labels = b.Labels, a.Labels
			}
		default: // a policy is edited, wholly or in one place
			if i := len(n.Policies); i > 0 {
				i = g.r.IntN(i)
				old := n.Policies[i]
				np := g.policy(old.Namespace, old.Name)
				if g.chance(50) {
					np.Spec.PodSelector = old.Spec.PodSelector
					np.Spec.PolicyTypes = old.Spec.PolicyTypes
					if g.chance(50) {
						np.Spec.Ingress = old.Spec.Ingress
					} else {
						np.Spec.Egress = old.Spec.Egress
					}
				}
				n.Policies[i] = np
			}
		}
	}
	return n
}

// space is what tells states apart: all endpoints and addresses, the edges of
// all blocks, the edges of all ports.
type space struct {
	selves []string
	addrs  []netip.Addr
	ports  []port
}

type port struct {
	proto uint8
	port  uint16
}

func (s *space) size() int { return len(s.selves) * 2 * len(s.addrs) * len(s.ports) }

// at returns question i.
func (s *space) at(i int) question {
	p := s.ports[i%len(s.ports)]
	i /= len(s.ports)
	a := s.addrs[i%len(s.addrs)]
	i /= len(s.addrs)
	return question{self: s.selves[i/2], dir: policy.Direction(i % 2), peer: a, proto: p.proto, port: p.port}
}

// newSpace has the local pods of the first input and the addresses of all.
func newSpace(ins ...*policy.Input) *space {
	s := &space{ports: []port{{1, 0}, {58, 0}}}
	for _, c := range cidrs {
		p := netip.MustParsePrefix(c).Masked()
		last := p.Addr().AsSlice()
		for i := p.Bits(); i < len(last)*8; i++ {
			last[i/8] |= 1 << (7 - i%8)
		}
		end, _ := netip.AddrFromSlice(last)
		s.addrs = append(s.addrs, p.Addr(), p.Addr().Prev(), end, end.Next())
	}
	for _, in := range ins {
		for _, n := range in.Nodes {
			s.addrs = append(s.addrs, slices.Concat(n.Addrs, n.Devices)...)
		}
		for _, p := range in.Pods {
			s.addrs = append(s.addrs, p.Addrs...)
		}
	}
	slices.SortFunc(s.addrs, netip.Addr.Compare)
	s.addrs = slices.DeleteFunc(slices.Compact(s.addrs), func(a netip.Addr) bool { return !a.IsValid() || a.Is4In6() })
	edges := map[uint16]bool{}
	for _, n := range numbers {
		for _, e := range []uint16{uint16(n - 1), uint16(n), uint16(n + 1)} {
			edges[e] = true
		}
	}
	for _, proto := range []uint8{6, 17, 132} {
		for _, e := range slices.Sorted(gomaps.Keys(edges)) {
			s.ports = append(s.ports, port{proto, e})
		}
	}
	for _, p := range ins[0].Pods {
		if p.Local && !p.HostNetwork {
			s.selves = append(s.selves, p.Namespace+"/"+p.Name)
		}
	}
	return s
}
