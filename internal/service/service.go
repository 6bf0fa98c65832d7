package service

import (
	"errors"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/maps"
)

// Labels that take a service, or a slice, away from the node's proxy.
const (
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelHeadless  = "service.kubernetes.io/headless"
)

// Node is where the compiled services will be used.
type Node struct {
	Name string
	// Zone is the label topology.kubernetes.io/zone; empty when unknown.
	Zone string
}

// Port is a service port in one family: frontends and backends are all of
// that family. A dual-stack service port gives two.
type Port struct {
	Namespace, Name string
	// PortName is the name of the service port; empty when it has none.
	PortName string
	Protocol corev1.Protocol
	Family   corev1.IPFamily
	// Frontends in the order of the service's addresses; never empty.
	Frontends []maps.ServiceKey
	// Backends are the usable ones, sorted by address and port, each once.
	Backends []maps.Backend
}

// PortKey identifies a [Port] among all services.
type PortKey struct {
	Namespace, Name, PortName string
	Protocol                  corev1.Protocol
	Family                    corev1.IPFamily
}

func (k PortKey) String() string {
	port := k.PortName
	if port != "" {
		port = ":" + port
	}
	return fmt.Sprintf("%s/%s%s/%s/%s", k.Namespace, k.Name, port, k.Protocol, k.Family)
}

// Key returns the identity of p, which outlives changes of its addresses,
// its number and its backends.
func (p *Port) Key() PortKey {
	return PortKey{p.Namespace, p.Name, p.PortName, p.Protocol, p.Family}
}

// Compiled is a service as the datapath needs it.
type Compiled struct {
	Namespace, Name string
	// Addrs are the addresses the service owns on every port.
	Addrs []netip.Addr
	// Ports in the order of the service's ports, then of its addresses.
	Ports []Port
}

// OwnerKey is the entry of pw_services that marks addr as owned.
func OwnerKey(addr netip.Addr) maps.ServiceKey {
	return maps.ServiceKey{Addr: maps.ToAddr(addr)}
}

// Compile compiles svc with the endpoints that slices name; slices are those
// labelled with the service's name in its namespace. A skipped service gives
// the zero Compiled. The error joins everything that had to be left out; the
// Compiled beside it is good.
func Compile(svc *corev1.Service, slices []*discoveryv1.EndpointSlice, node Node) (Compiled, error) {
	if skipped(svc) {
		return Compiled{}, nil
	}
	var errs []error
	fail := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("Service %s/%s: %s: %w", svc.Namespace, svc.Name, field, fmt.Errorf(format, args...)))
	}
	addrs := clusterIPs(svc, fail)
	ports := servicePorts(svc, fail)
	candidates, sliceErrs := collect(slices, svc.Spec.PublishNotReadyAddresses)
	errs = append(errs, sliceErrs...)

	out := Compiled{Namespace: svc.Namespace, Name: svc.Name, Addrs: addrs}
	if len(addrs) == 0 {
		return Compiled{}, errors.Join(errs...)
	}
	scope := scopeOf(svc)
	for _, p := range ports {
		for _, family := range families(addrs) {
			port := Port{
				Namespace: svc.Namespace, Name: svc.Name, PortName: p.Name,
				Protocol: p.Protocol, Family: family,
			}
			for _, a := range addrs {
				if familyOf(a) == family {
					port.Frontends = append(port.Frontends, maps.ServiceKey{
						Addr: maps.ToAddr(a), Port: uint16(p.Port), Proto: protoNumber(p.Protocol),
					})
				}
			}
			from := candidates[portRef{p.Name, p.Protocol, family}]
			for _, e := range Choose(from.sorted(), scope, node) {
				port.Backends = append(port.Backends, e.Backend)
			}
			out.Ports = append(out.Ports, port)
		}
	}
	return out, errors.Join(errs...)
}

// skipped: headless and external-name services, services without an address
// yet, and those that a label gives to another proxy.
func skipped(svc *corev1.Service) bool {
	if svc.Spec.Type == corev1.ServiceTypeExternalName || otherProxy(svc.Labels) {
		return true
	}
	ips := svc.Spec.ClusterIPs
	if len(ips) == 0 {
		ips = []string{svc.Spec.ClusterIP}
	}
	return ips[0] == "" || ips[0] == corev1.ClusterIPNone
}

func otherProxy(labels map[string]string) bool {
	_, named := labels[labelProxyName]
	_, headless := labels[labelHeadless]
	return named || headless
}

// clusterIPs returns the usable cluster IPs, in their order, each once.
func clusterIPs(svc *corev1.Service, fail func(field, format string, args ...any)) []netip.Addr {
	ips, field := svc.Spec.ClusterIPs, "spec.clusterIPs[%d]"
	if len(ips) == 0 {
		ips, field = []string{svc.Spec.ClusterIP}, "spec.clusterIP"
	}
	var out []netip.Addr
	seen := map[netip.Addr]bool{}
	for i, s := range ips {
		at := field
		if len(svc.Spec.ClusterIPs) > 0 {
			at = fmt.Sprintf(field, i)
		}
		a, err := parseAddr(s)
		switch {
		case err != nil:
			fail(at, "%w", err)
		case seen[a]:
			fail(at, "%s stands there twice", a)
		default:
			seen[a] = true
			out = append(out, a)
		}
	}
	return out
}

// servicePorts returns the usable ports with their protocols filled in.
func servicePorts(svc *corev1.Service, fail func(field, format string, args ...any)) []corev1.ServicePort {
	type number struct {
		port  int32
		proto corev1.Protocol
	}
	type name struct {
		name  string
		proto corev1.Protocol
	}
	numbers, names := map[number]int{}, map[name]int{}
	var out []corev1.ServicePort
	for i, p := range svc.Spec.Ports {
		field := fmt.Sprintf("spec.ports[%d]", i)
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP
		}
		if protoNumber(p.Protocol) == 0 {
			fail(field+".protocol", "%q is none of TCP, UDP and SCTP", p.Protocol)
			continue
		}
		if p.Port < 1 || p.Port > 65535 {
			fail(field+".port", "%d is no port number", p.Port)
			continue
		}
		if first, ok := numbers[number{p.Port, p.Protocol}]; ok {
			fail(field, "%s port %d is spec.ports[%d] already", p.Protocol, p.Port, first)
			continue
		}
		if first, ok := names[name{p.Name, p.Protocol}]; ok {
			fail(field+".name", "%q is the name of spec.ports[%d] already; slices could not tell them apart", p.Name, first)
			continue
		}
		numbers[number{p.Port, p.Protocol}], names[name{p.Name, p.Protocol}] = i, i
		out = append(out, p)
	}
	return out
}

// parseAddr parses an address that a service or an endpoint may have.
func parseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("%q is no IP address", s)
	case a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("%s has a zone", s)
	case a.Is4In6():
		return netip.Addr{}, fmt.Errorf("%s is an IPv4-mapped IPv6 address; write %s", s, a.Unmap())
	case a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast(),
		a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return netip.Addr{}, fmt.Errorf("%s is unspecified, loopback, link-local, multicast or broadcast and cannot be reached from other hosts", s)
	}
	return a, nil
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// families returns the families of addrs in the order they first appear.
func families(addrs []netip.Addr) []corev1.IPFamily {
	var out []corev1.IPFamily
	seen := map[corev1.IPFamily]bool{}
	for _, a := range addrs {
		if f := familyOf(a); !seen[f] {
			seen[f] = true
			out = append(out, f)
		}
	}
	return out
}

// protoNumber returns the number of p as it stands in keys; 0 for others.
func protoNumber(p corev1.Protocol) uint8 {
	switch p {
	case corev1.ProtocolTCP:
		return maps.ProtoTCP
	case corev1.ProtocolUDP:
		return maps.ProtoUDP
	case corev1.ProtocolSCTP:
		return maps.ProtoSCTP
	}
	return 0
}
