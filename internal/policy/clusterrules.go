package policy

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/maps"
)

// CheckCluster returns what is wrong with an object that is not in force yet,
// as the API server would: what it accepts and we do not support is not.
func CheckCluster(cnp *v1beta1.ClusterNetworkPolicy) []Problem {
	var problems []Problem
	parser{object: "ClusterNetworkPolicy " + cnp.Name, problems: &problems, checking: true}.clusterPolicy(cnp)
	return problems
}

// consequence is a problem with what becomes of it.
func (p parser) consequence(field, reason, consequence string) {
	if !p.checking {
		reason += "; " + consequence
	}
	p.problem(field, "%s", reason)
}

func (p parser) clusterPolicy(cnp *v1beta1.ClusterNetworkPolicy) *policy {
	pol := &policy{name: cnp.Name}
	if n := cnp.Spec.Priority; n < 0 || n > 1000 {
		p.consequence("spec.priority", fmt.Sprintf("%d is not in 0-1000", n), "taken as it stands")
	}
	for i, r := range cnp.Spec.Ingress {
		peers := make([]v1beta1.ClusterNetworkPolicyEgressPeer, len(r.From))
		for j, from := range r.From {
			peers[j] = v1beta1.ClusterNetworkPolicyEgressPeer{Namespaces: from.Namespaces, Pods: from.Pods}
		}
		pol.rules[Ingress] = append(pol.rules[Ingress],
			p.clusterRule(fmt.Sprintf("spec.ingress[%d]", i), "from", i, r.Name, r.Action, peers, r.Protocols))
	}
	for i, r := range cnp.Spec.Egress {
		pol.rules[Egress] = append(pol.rules[Egress],
			p.clusterRule(fmt.Sprintf("spec.egress[%d]", i), "to", i, r.Name, r.Action, r.To, r.Protocols))
	}
	for d := range pol.rules {
		pol.about[d] = len(pol.rules[d]) > 0
	}
	known := true
	switch cnp.Spec.Tier {
	case v1beta1.AdminTier:
		pol.tier = TierAdmin
	case v1beta1.BaselineTier:
		pol.tier = TierBaseline
	default:
		p.consequence("spec.tier", fmt.Sprintf("%q is neither Admin nor Baseline", cnp.Spec.Tier), closedReading+", in tier Admin")
		known = false
	}
	if !p.subject(pol, &cnp.Spec.Subject) {
		known = false
	}
	if !known {
		return pol.closed()
	}
	return pol
}

// closedReading is how a policy counts of which it is not known whom it is
// about, or when it is asked: see [policy.closed].
const closedReading = "its Deny rules hold, its Pass rules deny everything and its Accept rules match nothing until this is mended"

// subject says whom the policy selects; false if that cannot be told, and
// whoever may be meant is selected.
func (p parser) subject(pol *policy, s *v1beta1.ClusterNetworkPolicySubject) bool {
	ok := true
	read := func(field string, sel *metav1.LabelSelector) labels.Selector {
		out, err := selector(sel)
		if err != nil {
			p.consequence("spec.subject."+field, err.Error(), "every value is taken to match, and "+closedReading)
			ok = false
			return labels.Everything()
		}
		return out
	}
	switch {
	case s.Namespaces != nil && s.Pods == nil:
		pol.selects = podPeer("", read("namespaces", s.Namespaces), labels.Everything())
	case s.Pods != nil && s.Namespaces == nil:
		pol.selects = podPeer("", read("pods.namespaceSelector", &s.Pods.NamespaceSelector),
			read("pods.podSelector", &s.Pods.PodSelector))
	default:
		p.consequence("spec.subject", "is not one of namespaces and pods: both, neither, or of a later version of the API",
			"every pod of the cluster is selected, and "+closedReading)
		pol.selects = podPeer("", labels.Everything(), labels.Everything())
		ok = false
	}
	return ok
}

// clusterRule parses a rule. One with a part that makes no sense, or that a
// later version of the API may have, fails closed as the API says of peers: an
// Accept rule matches nothing, any other denies everything.
func (p parser) clusterRule(field, peersField string, index int, name string, action v1beta1.ClusterNetworkPolicyRuleAction,
	peers []v1beta1.ClusterNetworkPolicyEgressPeer, protocols []v1beta1.ClusterNetworkPolicyProtocol,
) rule {
	r := rule{index: index, name: name, anyPort: len(protocols) == 0}
	consequence := "the rule denies everything until this is mended"
	switch action {
	case v1beta1.ClusterNetworkPolicyRuleActionAccept:
		r.action = actionAccept
		consequence = "the rule matches nothing until this is mended"
	case v1beta1.ClusterNetworkPolicyRuleActionDeny:
		r.action = actionDeny
	case v1beta1.ClusterNetworkPolicyRuleActionPass:
		r.action = actionPass
	}
	good := true
	bad := func(field, format string, args ...any) {
		p.consequence(field, fmt.Sprintf(format, args...), consequence)
		good = false
	}
	switch action {
	case v1beta1.ClusterNetworkPolicyRuleActionAccept, v1beta1.ClusterNetworkPolicyRuleActionDeny, v1beta1.ClusterNetworkPolicyRuleActionPass:
	default:
		bad(field+".action", "%q is none of Accept, Deny, Pass", action)
	}
	if len(peers) == 0 {
		bad(field+"."+peersField, "needs a peer, such as namespaces: {} for all pods")
	}
	pods := true
	for i := range peers {
		at := fmt.Sprintf("%s.%s[%d]", field, peersField, i)
		list, isPods := p.clusterPeer(at, &peers[i], bad)
		r.peers = append(r.peers, list...)
		pods = pods && isPods
	}
	for i := range protocols {
		at := fmt.Sprintf("%s.protocols[%d]", field, i)
		r.portSets = append(r.portSets, clusterPorts(at, &protocols[i], bad)...)
		if protocols[i].DestinationNamedPort != "" && !pods {
			bad(at+".destinationNamedPort", "is for rules whose peers are pods alone: networks, nodes and domain names have no named ports")
		}
	}
	if good {
		return r
	}
	return r.closed()
}

// clusterPeer returns the peers that one stands for, and whether it is pods.
func (p parser) clusterPeer(field string, cp *v1beta1.ClusterNetworkPolicyEgressPeer, bad func(field, format string, args ...any)) (list []*peer, pods bool) {
	read := func(field string, sel *metav1.LabelSelector) labels.Selector {
		out, err := selector(sel)
		if err != nil {
			bad(field, "%v", err)
			return labels.Nothing()
		}
		return out
	}
	set := 0
	if cp.Namespaces != nil {
		set++
		list = append(list, podPeer("", read(field+".namespaces", cp.Namespaces), labels.Everything()))
	}
	if cp.Pods != nil {
		set++
		list = append(list, podPeer("", read(field+".pods.namespaceSelector", &cp.Pods.NamespaceSelector),
			read(field+".pods.podSelector", &cp.Pods.PodSelector)))
	}
	pods = set > 0
	if cp.Nodes != nil {
		set++
		list = append(list, nodePeer(read(field+".nodes", cp.Nodes)))
	}
	if len(cp.Networks) > 0 {
		set++
		for i, cidr := range cp.Networks {
			prefix, err := parseCIDR(string(cidr))
			if err != nil {
				bad(fmt.Sprintf("%s.networks[%d]", field, i), "%v", err)
				continue
			}
			b := &block{cidr: prefix}
			list = append(list, &peer{key: b.key(), block: b})
		}
	}
	if len(cp.DomainNames) > 0 {
		set++
		if p.checking {
			return list, false
		}
		bad(field+".domainNames", "is not supported, names are not looked up; use networks")
	}
	switch {
	case set == 0:
		bad(field, "is none of namespaces, pods, nodes and networks: a peer of a later version of the API, or empty")
	case set > 1:
		bad(field, "is several peers in one; make a list of them")
	}
	return list, pods
}

// clusterPorts returns what one element of protocols matches.
func clusterPorts(field string, cp *v1beta1.ClusterNetworkPolicyProtocol, bad func(field, format string, args ...any)) []ports {
	var out []ports
	set := 0
	protocol := func(name string, proto uint8, port *v1beta1.Port) {
		set++
		at := field + "." + name + ".destinationPort"
		if port == nil {
			bad(at, "is missing: it is all that can be matched here")
			return
		}
		lo, hi := port.Number, port.Number
		if port.Range != nil {
			if port.Number != 0 {
				bad(at, "has both number and range; write one of them")
				return
			}
			lo, hi = port.Range.Start, port.Range.End
		}
		switch {
		case lo < 1 || hi > 65535 || hi < lo:
			bad(at, "%d-%d is no range in 1-65535", lo, hi)
		case lo == hi:
			out = append(out, ports{kind: portExact, proto: proto, rng: portRange{uint16(lo), uint16(hi)}})
		default:
			out = append(out, ports{kind: portRanged, proto: proto, rng: portRange{uint16(lo), uint16(hi)}})
		}
	}
	if cp.TCP != nil {
		protocol("tcp", maps.ProtoTCP, cp.TCP.DestinationPort)
	}
	if cp.UDP != nil {
		protocol("udp", maps.ProtoUDP, cp.UDP.DestinationPort)
	}
	if cp.SCTP != nil {
		protocol("sctp", maps.ProtoSCTP, cp.SCTP.DestinationPort)
	}
	if name := cp.DestinationNamedPort; name != "" {
		set++
		if errs := validation.IsValidPortName(name); len(errs) > 0 {
			bad(field+".destinationNamedPort", "%q is no port name: %s", name, errs[0])
		}
		for _, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP} {
			out = append(out, ports{kind: portNamed, proto: proto, name: name})
		}
	}
	switch {
	case set == 0:
		bad(field, "is none of tcp, udp, sctp and destinationNamedPort: of a later version of the API, or empty")
	case set > 1:
		bad(field, "is several protocols in one; make a list of them")
	}
	return out
}

// closed is the rule if nothing is known of what it matches.
func (r rule) closed() rule {
	if r.action == actionAccept {
		return rule{index: r.index, name: r.name, action: actionAccept}
	}
	return rule{index: r.index, name: r.name, action: actionDeny, anyPeer: true, anyPort: true}
}

// closed is the policy if it is not known to whom it applies, or when: what it
// would open it does not, and what would skip other rules denies.
func (p *policy) closed() *policy {
	out := *p
	out.shut = true
	for d := range p.rules {
		out.rules[d] = make([]rule, len(p.rules[d]))
		for i, r := range p.rules[d] {
			if r.action != actionDeny {
				r = r.closed()
			}
			out.rules[d][i] = r
		}
	}
	return &out
}
