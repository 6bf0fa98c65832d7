package source

import (
	"strings"

	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func (v *validator) service(s *corev1.Service) {
	spec := field.NewPath("spec")
	v.oneOf(spec.Child("type"), string(s.Spec.Type), "ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
	v.servicePorts(s)
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		if s.Spec.ExternalName == "" {
			v.errs = append(v.errs, field.Required(spec.Child("externalName"), "write the name that the service stands for"))
		}
		return
	}
	v.clusterIPs(s)
	v.external(s)
	if s.Spec.LoadBalancerIP != "" {
		v.ip(spec.Child("loadBalancerIP"), s.Spec.LoadBalancerIP)
	}
	v.oneOf(spec.Child("internalTrafficPolicy"), string(*s.Spec.InternalTrafficPolicy), "Cluster", "Local")
	v.oneOf(spec.Child("sessionAffinity"), string(s.Spec.SessionAffinity), "None", "ClientIP")
	if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		if t := *c.ClientIP.TimeoutSeconds; t < 1 || t > 86400 {
			v.bad(spec.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), t, "must be from 1 to 86400")
		}
	}
	if d := s.Spec.TrafficDistribution; d != nil {
		v.oneOf(spec.Child("trafficDistribution"), *d, "PreferClose", "PreferSameZone", "PreferSameNode")
	}
}

// external checks what concerns clients outside the cluster.
func (v *validator) external(s *corev1.Service) {
	spec := field.NewPath("spec")
	balanced := s.Spec.Type == corev1.ServiceTypeLoadBalancer
	v.ips(spec.Child("externalIPs"), s.Spec.ExternalIPs, 0)
	ranges := spec.Child("loadBalancerSourceRanges")
	if len(s.Spec.LoadBalancerSourceRanges) > 0 && !balanced {
		v.errs = append(v.errs, field.Forbidden(ranges, "only load balancers have them: write type: LoadBalancer, or use a NetworkPolicy"))
	}
	for i, r := range s.Spec.LoadBalancerSourceRanges {
		v.cidr(ranges.Index(i), strings.TrimSpace(r)) // as the API server does
	}
	policy := spec.Child("externalTrafficPolicy")
	switch {
	case s.Spec.ExternalTrafficPolicy == "":
	case s.Spec.Type == corev1.ServiceTypeClusterIP && len(s.Spec.ExternalIPs) == 0:
		v.errs = append(v.errs, field.Forbidden(policy, "a ClusterIP service without externalIPs has no clients outside: write internalTrafficPolicy, or another type"))
	default:
		v.oneOf(policy, string(s.Spec.ExternalTrafficPolicy), "Cluster", "Local")
	}
	check := spec.Child("healthCheckNodePort")
	switch {
	case s.Spec.HealthCheckNodePort == 0:
	case !balanced || s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal:
		v.errs = append(v.errs, field.Forbidden(check, "only a service of type LoadBalancer with externalTrafficPolicy: Local has one"))
	default:
		v.port(check, s.Spec.HealthCheckNodePort)
	}
	for i, in := range s.Status.LoadBalancer.Ingress {
		path := field.NewPath("status", "loadBalancer", "ingress").Index(i)
		if in.IP != "" {
			v.ip(path.Child("ip"), in.IP)
		}
		if in.IPMode != nil {
			v.oneOf(path.Child("ipMode"), string(*in.IPMode), "VIP", "Proxy")
		}
	}
}

func (v *validator) servicePorts(s *corev1.Service) {
	path := field.NewPath("spec", "ports")
	headless := s.Spec.ClusterIP == corev1.ClusterIPNone
	if len(s.Spec.Ports) == 0 && !headless && s.Spec.Type != corev1.ServiceTypeExternalName {
		v.errs = append(v.errs, field.Required(path, "write the ports of the service"))
	}
	type portKey struct {
		protocol corev1.Protocol
		port     int32
	}
	ports, names, nodePorts := map[portKey]bool{}, map[string]bool{}, map[portKey]bool{}
	for i, p := range s.Spec.Ports {
		at := path.Index(i)
		v.port(at.Child("port"), p.Port)
		v.protocol(at.Child("protocol"), p.Protocol)
		v.portOrName(at.Child("targetPort"), p.TargetPort)
		if p.Name == "" && len(s.Spec.Ports) > 1 {
			v.errs = append(v.errs, field.Required(at.Child("name"), "each of several ports needs a name"))
		}
		if p.Name != "" {
			v.rule(at.Child("name"), p.Name, validation.IsDNS1123Label)
			if names[p.Name] {
				v.errs = append(v.errs, field.Duplicate(at.Child("name"), p.Name))
			}
			names[p.Name] = true
		}
		if ports[portKey{p.Protocol, p.Port}] {
			v.errs = append(v.errs, field.Duplicate(at.Child("port"), p.Port))
		}
		ports[portKey{p.Protocol, p.Port}] = true
		if p.NodePort == 0 {
			if s.Spec.Type == corev1.ServiceTypeNodePort {
				v.errs = append(v.errs, field.Required(at.Child("nodePort"), "nothing allocates NodePorts for manifests: write one, by default from 30000 to 32767"))
			}
			continue
		}
		v.port(at.Child("nodePort"), p.NodePort)
		if s.Spec.Type == corev1.ServiceTypeClusterIP {
			v.errs = append(v.errs, field.Forbidden(at.Child("nodePort"), "a ClusterIP service has none: write type: NodePort"))
		}
		if nodePorts[portKey{p.Protocol, p.NodePort}] {
			v.errs = append(v.errs, field.Duplicate(at.Child("nodePort"), p.NodePort))
		}
		nodePorts[portKey{p.Protocol, p.NodePort}] = true
	}
}

func (v *validator) clusterIPs(s *corev1.Service) {
	spec := field.NewPath("spec")
	one, all := spec.Child("clusterIP"), spec.Child("clusterIPs")
	switch {
	case s.Spec.ClusterIP == "":
		v.errs = append(v.errs, field.Required(one, "nothing allocates service addresses for manifests: write one, or None for a headless service"))
		return
	case s.Spec.ClusterIP != s.Spec.ClusterIPs[0]:
		v.bad(one, s.Spec.ClusterIP, "must be the first of clusterIPs")
		return
	case s.Spec.ClusterIP == corev1.ClusterIPNone:
		if len(s.Spec.ClusterIPs) > 1 {
			v.bad(all, s.Spec.ClusterIPs, "a headless service has None alone")
		}
		if s.Spec.Type != corev1.ServiceTypeClusterIP {
			v.bad(one, s.Spec.ClusterIP, "a service of type "+string(s.Spec.Type)+" cannot be headless")
		}
		return
	}
	v.perFamily(all, s.Spec.ClusterIPs, 2)
	for i, ip := range s.Spec.ClusterIPs {
		at := all.Index(i)
		if i == 0 {
			at = one
		}
		v.ip(at, ip)
	}
	for i, f := range s.Spec.IPFamilies {
		at := spec.Child("ipFamilies").Index(i)
		v.oneOf(at, string(f), "IPv4", "IPv6")
		if i >= len(s.Spec.ClusterIPs) {
			continue
		}
		if addr, err := netip.ParseAddr(s.Spec.ClusterIPs[i]); err == nil && family(addr) != f {
			v.bad(at, f, "clusterIPs has an address of the other family in this place")
		}
	}
}
