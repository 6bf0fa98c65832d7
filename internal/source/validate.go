package source

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/policy"
)

// validate checks what the dataplane reads of an object, and that the API
// server would check too. Every error names its field.
func validate(obj object, k kind) field.ErrorList {
	var v validator
	meta := field.NewPath("metadata")
	nameRule := validation.IsDNS1123Subdomain
	switch k.name {
	case "Namespace", "Service":
		nameRule = validation.IsDNS1123Label
	}
	v.rule(meta.Child("name"), obj.GetName(), nameRule)
	switch {
	case !k.clusterWide:
		v.rule(meta.Child("namespace"), obj.GetNamespace(), validation.IsDNS1123Label)
	case obj.GetNamespace() != "":
		v.bad(meta.Child("namespace"), obj.GetNamespace(), "a "+k.name+" belongs to no namespace: remove the field")
	}
	v.errs = append(v.errs, metavalidation.ValidateLabels(obj.GetLabels(), meta.Child("labels"))...)

	spec := field.NewPath("spec")
	switch o := obj.(type) {
	case *corev1.Namespace:
		if got := o.Labels[corev1.LabelMetadataName]; got != o.Name {
			v.bad(meta.Child("labels").Key(corev1.LabelMetadataName), got, "must be the namespace's name: remove the label")
		}
	case *corev1.Node:
		v.cidrs(spec.Child("podCIDRs"), o.Spec.PodCIDRs)
		if len(o.Spec.PodCIDRs) > 0 && o.Spec.PodCIDR != o.Spec.PodCIDRs[0] {
			v.bad(spec.Child("podCIDR"), o.Spec.PodCIDR, "must be the first of podCIDRs")
		}
		for i, a := range o.Status.Addresses {
			path := field.NewPath("status", "addresses").Index(i)
			switch a.Type {
			case corev1.NodeInternalIP, corev1.NodeExternalIP:
				v.ip(path.Child("address"), a.Address)
			case corev1.NodeHostName, corev1.NodeInternalDNS, corev1.NodeExternalDNS:
			default:
				v.oneOf(path.Child("type"), string(a.Type), "InternalIP", "ExternalIP", "Hostname", "InternalDNS", "ExternalDNS")
			}
		}
	case *networkingv1.ServiceCIDR:
		if len(o.Spec.CIDRs) == 0 {
			v.errs = append(v.errs, field.Required(spec.Child("cidrs"), "write the service range of one family or of both"))
		}
		v.cidrs(spec.Child("cidrs"), o.Spec.CIDRs)
		for i, s := range o.Spec.CIDRs {
			if p, err := netip.ParsePrefix(s); err == nil && p.Masked() != p {
				v.bad(spec.Child("cidrs").Index(i), s, "has bits set after its prefix length: write "+p.Masked().String())
			}
		}
	case *corev1.Pod:
		v.pod(o)
	case *corev1.Service:
		v.service(o)
	case *discoveryv1.EndpointSlice:
		v.slice(o)
	case *networkingv1.NetworkPolicy:
		v.policy(o)
	case *v1beta1.ClusterNetworkPolicy:
		for _, p := range policy.CheckCluster(o) {
			v.errs = append(v.errs, field.Forbidden(field.NewPath(p.Field), p.Err))
		}
	}
	return v.errs
}

type validator struct{ errs field.ErrorList }

func (v *validator) bad(path *field.Path, value any, why string) {
	v.errs = append(v.errs, field.Invalid(path, value, why))
}

func (v *validator) rule(path *field.Path, value string, rule func(string) []string) {
	if why := rule(value); len(why) > 0 {
		v.bad(path, value, strings.Join(why, "; "))
	}
}

func (v *validator) oneOf(path *field.Path, value string, allowed ...string) {
	if !slices.Contains(allowed, value) {
		v.errs = append(v.errs, field.NotSupported(path, value, allowed))
	}
}

func (v *validator) ip(path *field.Path, s string) netip.Addr {
	addr, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		v.bad(path, s, "not an IP address: write one like 10.244.80.65 or fd00::41")
		return netip.Addr{}
	case addr.Zone() != "":
		v.bad(path, s, "an address with a zone is good on one machine only: write it without")
	case addr.Is4In6():
		v.bad(path, s, "an IPv4 address in IPv6 form: write "+addr.Unmap().String())
	}
	return addr
}

func (v *validator) ips(path *field.Path, list []string, max int) {
	for i, s := range list {
		v.ip(path.Index(i), s)
	}
	if max > 0 {
		v.perFamily(path, list, max)
	}
}

// perFamily checks that a list has at most two members, of two families.
func (v *validator) perFamily(path *field.Path, list []string, max int) {
	if len(list) > max {
		v.errs = append(v.errs, field.TooMany(path, len(list), max))
		return
	}
	if len(list) == 2 && strings.Contains(list[0], ":") == strings.Contains(list[1], ":") {
		v.bad(path.Index(1), list[1], "both are of one family: write one IPv4 and one IPv6")
	}
}

func (v *validator) cidr(path *field.Path, s string) netip.Prefix {
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		v.bad(path, s, "not a range of addresses: write one like 10.244.80.0/24 or fd00:10:244:50::/64")
		return netip.Prefix{}
	case p.Addr().Is4In6():
		v.bad(path, s, "an IPv4 range in IPv6 form: write it as IPv4")
	}
	return p.Masked()
}

func (v *validator) cidrs(path *field.Path, list []string) {
	for i, s := range list {
		v.cidr(path.Index(i), s)
	}
	v.perFamily(path, list, 2)
}

func (v *validator) port(path *field.Path, port int32) {
	if port < 1 || port > 65535 {
		v.bad(path, port, "must be from 1 to 65535")
	}
}

func (v *validator) portOrName(path *field.Path, p intstr.IntOrString) {
	if p.Type == intstr.Int {
		v.port(path, p.IntVal)
		return
	}
	v.rule(path, p.StrVal, validation.IsValidPortName)
}

func (v *validator) protocol(path *field.Path, p corev1.Protocol) {
	v.oneOf(path, string(p), "TCP", "UDP", "SCTP")
}

func (v *validator) pod(p *corev1.Pod) {
	spec, status := field.NewPath("spec"), field.NewPath("status")
	if p.Spec.NodeName != "" {
		v.rule(spec.Child("nodeName"), p.Spec.NodeName, validation.IsDNS1123Subdomain)
	}
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"initContainers", p.Spec.InitContainers}, {"containers", p.Spec.Containers}} {
		for i, c := range list.containers {
			for j, port := range c.Ports {
				path := spec.Child(list.name).Index(i).Child("ports").Index(j)
				v.port(path.Child("containerPort"), port.ContainerPort)
				if port.HostPort != 0 {
					v.port(path.Child("hostPort"), port.HostPort)
				}
				if port.Name != "" {
					v.rule(path.Child("name"), port.Name, validation.IsValidPortName)
				}
				v.protocol(path.Child("protocol"), port.Protocol)
			}
		}
	}
	v.oneOf(status.Child("phase"), string(p.Status.Phase), "Pending", "Running", "Succeeded", "Failed", "Unknown")
	var ips []string
	for _, ip := range p.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	for i, ip := range ips {
		v.ip(status.Child("podIPs").Index(i).Child("ip"), ip)
	}
	v.perFamily(status.Child("podIPs"), ips, 2)
	if len(ips) > 0 && p.Status.PodIP != ips[0] {
		v.bad(status.Child("podIP"), p.Status.PodIP, "must be the first of podIPs")
	}
}

func (v *validator) slice(s *discoveryv1.EndpointSlice) {
	v.oneOf(field.NewPath("addressType"), string(s.AddressType), "IPv4", "IPv6", "FQDN")
	for i, e := range s.Endpoints {
		path := field.NewPath("endpoints").Index(i)
		if len(e.Addresses) == 0 {
			v.errs = append(v.errs, field.Required(path.Child("addresses"), "write the endpoint's address"))
		}
		for j, a := range e.Addresses {
			if s.AddressType == discoveryv1.AddressTypeFQDN {
				continue
			}
			at := path.Child("addresses").Index(j)
			if addr := v.ip(at, a); addr.IsValid() && string(family(addr)) != string(s.AddressType) {
				v.bad(at, a, "the slice is of addressType "+string(s.AddressType)+": move it to a slice of the other family")
			}
		}
		if e.NodeName != nil {
			v.rule(path.Child("nodeName"), *e.NodeName, validation.IsDNS1123Subdomain)
		}
	}
	names := map[string]bool{}
	for i, p := range s.Ports {
		path := field.NewPath("ports").Index(i)
		if names[*p.Name] {
			v.errs = append(v.errs, field.Duplicate(path.Child("name"), *p.Name))
		}
		names[*p.Name] = true
		if *p.Name != "" {
			v.rule(path.Child("name"), *p.Name, validation.IsDNS1123Label)
		}
		if p.Port != nil {
			v.port(path.Child("port"), *p.Port)
		}
		v.protocol(path.Child("protocol"), *p.Protocol)
	}
}
