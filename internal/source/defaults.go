package source

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func setType(obj object, apiVersion, kindName string) {
	obj.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(apiVersion, kindName))
}

// setDefaults fills in the fields that the API server fills in and that the
// dataplane reads, so that a short manifest means here what it means there.
func setDefaults(obj object) {
	switch o := obj.(type) {
	case *corev1.Namespace:
		// Policies select namespaces by this label.
		if _, ok := o.Labels[corev1.LabelMetadataName]; !ok {
			if o.Labels == nil {
				o.Labels = map[string]string{}
			}
			o.Labels[corev1.LabelMetadataName] = o.Name
		}
	case *corev1.Node:
		if len(o.Spec.PodCIDRs) == 0 && o.Spec.PodCIDR != "" {
			o.Spec.PodCIDRs = []string{o.Spec.PodCIDR}
		}
		if o.Spec.PodCIDR == "" && len(o.Spec.PodCIDRs) > 0 {
			o.Spec.PodCIDR = o.Spec.PodCIDRs[0]
		}
	case *corev1.Pod:
		defaultPod(o)
	case *corev1.Service:
		defaultService(o)
	case *discoveryv1.EndpointSlice:
		for i := range o.Ports {
			setIfNil(&o.Ports[i].Protocol, corev1.ProtocolTCP)
			setIfNil(&o.Ports[i].Name, "")
		}
	case *networkingv1.NetworkPolicy:
		defaultPolicy(o)
	}
}

func setIfNil[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}

func setIfZero[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

func defaultPod(p *corev1.Pod) {
	for _, containers := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range containers {
			ports := containers[i].Ports
			for j := range ports {
				setIfZero(&ports[j].Protocol, corev1.ProtocolTCP)
				if p.Spec.HostNetwork {
					setIfZero(&ports[j].HostPort, ports[j].ContainerPort)
				}
			}
		}
	}
	if len(p.Status.PodIPs) == 0 && p.Status.PodIP != "" {
		p.Status.PodIPs = []corev1.PodIP{{IP: p.Status.PodIP}}
	}
	if p.Status.PodIP == "" && len(p.Status.PodIPs) > 0 {
		p.Status.PodIP = p.Status.PodIPs[0].IP
	}
	setIfZero(&p.Status.Phase, corev1.PodPending)
}

func defaultService(s *corev1.Service) {
	setIfZero(&s.Spec.Type, corev1.ServiceTypeClusterIP)
	setIfZero(&s.Spec.SessionAffinity, corev1.ServiceAffinityNone)
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		setIfNil(&s.Spec.SessionAffinityConfig, corev1.SessionAffinityConfig{})
		setIfNil(&s.Spec.SessionAffinityConfig.ClientIP, corev1.ClientIPConfig{})
		setIfNil(&s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds, corev1.DefaultClientIPServiceAffinitySeconds)
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		setIfZero(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == (intstr.IntOrString{}) {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	setIfNil(&s.Spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	if s.Spec.Type != corev1.ServiceTypeClusterIP || len(s.Spec.ExternalIPs) > 0 {
		setIfZero(&s.Spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		setIfNil(&s.Spec.AllocateLoadBalancerNodePorts, true)
	}
	if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP != "" {
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	}
	if s.Spec.ClusterIP == "" && len(s.Spec.ClusterIPs) > 0 {
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	}
	if len(s.Spec.IPFamilies) == 0 {
		for _, ip := range s.Spec.ClusterIPs {
			if addr, err := netip.ParseAddr(ip); err == nil {
				s.Spec.IPFamilies = append(s.Spec.IPFamilies, family(addr))
			}
		}
	}
	if s.Spec.IPFamilyPolicy == nil {
		policy := corev1.IPFamilyPolicySingleStack
		if len(s.Spec.IPFamilies) > 1 {
			policy = corev1.IPFamilyPolicyRequireDualStack
		}
		s.Spec.IPFamilyPolicy = &policy
	}
	for i := range s.Status.LoadBalancer.Ingress {
		if in := &s.Status.LoadBalancer.Ingress[i]; in.IP != "" {
			setIfNil(&in.IPMode, corev1.LoadBalancerIPModeVIP)
		}
	}
}

func family(addr netip.Addr) corev1.IPFamily {
	if addr.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func defaultPolicy(p *networkingv1.NetworkPolicy) {
	if len(p.Spec.PolicyTypes) == 0 {
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(p.Spec.Egress) > 0 {
			p.Spec.PolicyTypes = append(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
	for _, rule := range p.Spec.Ingress {
		for i := range rule.Ports {
			setIfNil(&rule.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	}
	for _, rule := range p.Spec.Egress {
		for i := range rule.Ports {
			setIfNil(&rule.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	}
}
