package source

import (
	networkingv1 "k8s.io/api/networking/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func (v *validator) policy(p *networkingv1.NetworkPolicy) {
	spec := field.NewPath("spec")
	v.selector(spec.Child("podSelector"), &p.Spec.PodSelector)
	for i, t := range p.Spec.PolicyTypes {
		v.oneOf(spec.Child("policyTypes").Index(i), string(t), "Ingress", "Egress")
	}
	for i, rule := range p.Spec.Ingress {
		path := spec.Child("ingress").Index(i)
		v.policyPorts(path.Child("ports"), rule.Ports)
		v.policyPeers(path.Child("from"), rule.From)
	}
	for i, rule := range p.Spec.Egress {
		path := spec.Child("egress").Index(i)
		v.policyPorts(path.Child("ports"), rule.Ports)
		v.policyPeers(path.Child("to"), rule.To)
	}
}

func (v *validator) selector(path *field.Path, s *metav1.LabelSelector) {
	v.errs = append(v.errs, metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, path)...)
}

func (v *validator) policyPorts(path *field.Path, ports []networkingv1.NetworkPolicyPort) {
	for i, p := range ports {
		at := path.Index(i)
		v.protocol(at.Child("protocol"), *p.Protocol)
		if p.Port != nil {
			v.portOrName(at.Child("port"), *p.Port)
		}
		if p.EndPort == nil {
			continue
		}
		end := at.Child("endPort")
		switch {
		case p.Port == nil:
			v.errs = append(v.errs, field.Required(at.Child("port"), "a range needs its first port"))
		case p.Port.Type == intstr.String:
			v.bad(end, *p.EndPort, "a range cannot begin at a named port: write port as a number")
		case *p.EndPort < p.Port.IntVal:
			v.bad(end, *p.EndPort, "must not be less than port")
		default:
			v.port(end, *p.EndPort)
		}
	}
}

func (v *validator) policyPeers(path *field.Path, peers []networkingv1.NetworkPolicyPeer) {
	for i, p := range peers {
		at := path.Index(i)
		selects := p.PodSelector != nil || p.NamespaceSelector != nil
		switch {
		case p.IPBlock == nil && !selects:
			v.errs = append(v.errs, field.Required(at, "write a podSelector, a namespaceSelector or an ipBlock"))
		case p.IPBlock != nil && selects:
			v.errs = append(v.errs, field.Forbidden(at, "an ipBlock stands alone: write the selectors as a peer of their own"))
		}
		if p.PodSelector != nil {
			v.selector(at.Child("podSelector"), p.PodSelector)
		}
		if p.NamespaceSelector != nil {
			v.selector(at.Child("namespaceSelector"), p.NamespaceSelector)
		}
		if p.IPBlock == nil {
			continue
		}
		block := at.Child("ipBlock")
		outer := v.cidr(block.Child("cidr"), p.IPBlock.CIDR)
		for j, e := range p.IPBlock.Except {
			ex := block.Child("except").Index(j)
			inner := v.cidr(ex, e)
			if outer.IsValid() && inner.IsValid() && (inner.Bits() <= outer.Bits() || !outer.Contains(inner.Addr())) {
				v.bad(ex, e, "must lie within cidr "+outer.String()+" and be smaller")
			}
		}
	}
}
