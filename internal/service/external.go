package service

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// externalAddrs returns the load-balancer and external IPs to answer on, each
// once. One that is also a cluster IP of the service is left to that; one
// that is both stays a load-balancer IP, with its source ranges.
func externalAddrs(svc *corev1.Service, clusterIPs []netip.Addr, fail failer) []vip {
	seen := map[netip.Addr]bool{}
	has := map[corev1.IPFamily]bool{}
	for _, a := range clusterIPs {
		seen[a] = true
		has[familyOf(a)] = true
	}
	var out []vip
	add := func(a netip.Addr, kind FrontendKind) {
		if !seen[a] {
			seen[a] = true
			out = append(out, vip{a, kind})
		}
	}
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		for i, in := range svc.Status.LoadBalancer.Ingress {
			// By host name, or by a proxy that itself calls the service: nothing
			// of it arrives here under that address.
			if in.IP == "" || in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP {
				continue
			}
			a, err := parseAddr(in.IP)
			if err != nil {
				fail(fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i), "%w", err)
				continue
			}
			// A load balancer may serve a family that the service lacks by
			// translating; that is no business of the node.
			add(a, LoadBalancerIP)
		}
	}
	for i, s := range svc.Spec.ExternalIPs {
		field := fmt.Sprintf("spec.externalIPs[%d]", i)
		a, err := parseAddr(s)
		switch {
		case err != nil:
			fail(field, "%w", err)
		case !has[familyOf(a)]:
			fail(field, "%s is not used: the service has no %s cluster IP", a, familyOf(a))
		default:
			add(a, ExternalIP)
		}
	}
	return out
}

// nodePort returns the NodePort of p; 0 = none.
func nodePort(svc *corev1.Service, p *corev1.ServicePort, node Node, fail failer) uint16 {
	if p.NodePort == 0 || svc.Spec.Type != corev1.ServiceTypeNodePort && svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return 0
	}
	field := "spec.ports"
	for i := range svc.Spec.Ports {
		if q := &svc.Spec.Ports[i]; q.Port == p.Port && q.Name == p.Name {
			field = fmt.Sprintf("spec.ports[%d].nodePort", i)
			break
		}
	}
	switch {
	case p.NodePort < 1 || p.NodePort > 65535:
		fail(field, "%d is no port number", p.NodePort)
	case !node.NodePorts.Has(uint16(p.NodePort)):
		fail(field, "%d is outside the range of NodePorts %s; give the agent the API server's --service-node-port-range", p.NodePort, node.NodePorts)
	default:
		return uint16(p.NodePort)
	}
	return 0
}

// sourceRanges returns the usable ranges of both families. What is none lets
// nobody in.
func sourceRanges(svc *corev1.Service, fail failer) []netip.Prefix {
	var out []netip.Prefix
	seen := map[netip.Prefix]bool{}
	for i, s := range svc.Spec.LoadBalancerSourceRanges {
		field := fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i)
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		switch {
		case err != nil:
			fail(field, "%q is no range such as 192.0.2.0/24; it lets nobody in", s)
		case p.Addr().Is4In6():
			fail(field, "%s is an IPv4 range in IPv6 form; write it as IPv4; it lets nobody in", s)
		case !seen[p.Masked()]:
			seen[p.Masked()] = true
			out = append(out, p.Masked())
		}
	}
	return out
}

// affinity returns the seconds of session affinity ClientIP; 0 = none.
func affinity(svc *corev1.Service) uint32 {
	if svc.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil && *c.ClientIP.TimeoutSeconds > 0 {
		return uint32(*c.ClientIP.TimeoutSeconds)
	}
	return uint32(corev1.DefaultClientIPServiceAffinitySeconds)
}

// health returns what the load balancer's health check is to be told.
func health(svc *corev1.Service, candidates map[portRef]candidateSet, node Node) *Health {
	port := svc.Spec.HealthCheckNodePort
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || port < 1 || port > 65535 ||
		svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return nil
	}
	local := map[corev1.IPFamily]map[netip.Addr]bool{}
	most := 0
	for ref, set := range candidates {
		for at, e := range set {
			if !e.Ready || node.Name == "" || e.Node != node.Name {
				continue
			}
			if local[ref.family] == nil {
				local[ref.family] = map[netip.Addr]bool{}
			}
			local[ref.family][at.Addr()] = true
		}
		most = max(most, len(local[ref.family]))
	}
	return &Health{NodePort: uint16(port), LocalEndpoints: most}
}
