package service

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/maps"
)

// Labels that take a service, or a slice, away from the node's proxy.
const (
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelHeadless  = "service.kubernetes.io/headless"
)

// Node is where the compiled services will be used, and how.
type Node struct {
	Name string
	// Zone is the label topology.kubernetes.io/zone; empty when unknown.
	Zone string
	// NodePorts is the range that NodePorts are looked for in; one outside is
	// reported and left out. Zero: any.
	NodePorts PortRange
	// MaglevSize is the size of every table, a prime; 0 = by the number of
	// backends. See [MaglevSize].
	MaglevSize uint32
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ Min, Max uint16 }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.Min, r.Max) }

// ParsePortRange reads a range such as 30000-32767.
func ParsePortRange(s string) (PortRange, error) {
	low, high, ok := strings.Cut(strings.TrimSpace(s), "-")
	from, err1 := strconv.ParseUint(low, 10, 16)
	to, err2 := strconv.ParseUint(high, 10, 16)
	if !ok || err1 != nil || err2 != nil || from == 0 || to < from {
		return PortRange{}, fmt.Errorf("%q is no range of ports such as 30000-32767", s)
	}
	return PortRange{uint16(from), uint16(to)}, nil
}

// Has tells whether port is in the range; all ports are in the zero range.
func (r PortRange) Has(port uint16) bool {
	return r == (PortRange{}) || port >= r.Min && port <= r.Max
}

// Kinds of an [Owner].
const (
	KindService = "Service"
	KindPod     = "Pod" // of host ports
)

// Owner is the object that ports belong to.
type Owner struct {
	Kind            string
	Namespace, Name string
}

// Service is the owner of the ports of a service.
func Service(namespace, name string) Owner { return Owner{KindService, namespace, name} }

func (o Owner) String() string { return fmt.Sprintf("%s %s/%s", o.Kind, o.Namespace, o.Name) }

// FrontendKind says what an address and port is to a service.
type FrontendKind uint8

// Kinds of frontends.
const (
	ClusterIP FrontendKind = iota
	NodePort
	LoadBalancerIP
	ExternalIP
	HostPort
)

func (k FrontendKind) String() string {
	return [...]string{"ClusterIP", "NodePort", "LoadBalancer", "ExternalIP", "HostPort"}[k]
}

// External frontends are those that clients outside the cluster use.
func (k FrontendKind) External() bool { return k != ClusterIP }

// Frontend is an address and port that a service answers on. That of a
// NodePort is [NodePortAddr].
type Frontend struct {
	Key  maps.ServiceKey
	Kind FrontendKind
}

// NodePortAddr is the address in the key of a NodePort of a family: the
// unspecified one.
func NodePortAddr(family corev1.IPFamily) netip.Addr {
	if family == corev1.IPv4Protocol {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Port is a service port in one family: frontends and backends are all of
// that family. A dual-stack service port gives two.
type Port struct {
	Owner
	// PortName is the name of the service port; empty when it has none.
	PortName string
	Protocol corev1.Protocol
	Family   corev1.IPFamily
	// Frontends, each once: cluster IPs, NodePort, load-balancer IPs,
	// external IPs; never empty.
	Frontends []Frontend

	// The sets of backends, each sorted by address and port. Internal is for
	// every client of a cluster IP. Cluster and External are those of external
	// frontends: for this cluster's pods and this host, and for everybody
	// else; nil without external frontends.
	Internal, Cluster, External []maps.Backend
	// NoLocalInternal and NoLocalExternal: the set is empty only because the
	// traffic policy is Local and the usable endpoints are on other nodes.
	NoLocalInternal, NoLocalExternal bool

	// KeepSource: externalTrafficPolicy Local.
	KeepSource bool
	// Affinity is how many seconds a client stays with its backend, 0 = none.
	Affinity uint32
	// Restricted load-balancer IPs answer to clients in SourceRanges alone.
	Restricted   bool
	SourceRanges []netip.Prefix
	// Maglev is the size of External's table; 0 = none.
	Maglev uint32
	// States are all endpoints of the port that serve, sorted as the sets.
	States []BackendState
}

// BackendState says what an endpoint is to a port: maps.BackendIn (in Internal),
// maps.BackendCluster (in Cluster), maps.BackendExt (in External, without
// external frontends in Internal), maps.BackendServing.
type BackendState struct {
	Backend maps.Backend
	Flags   uint32
}

// PortKey identifies a [Port] among all services.
type PortKey struct {
	Owner
	PortName string
	Protocol corev1.Protocol
	Family   corev1.IPFamily
}

func (k PortKey) String() string {
	port := k.PortName
	if port != "" {
		port = ":" + port
	}
	kind := ""
	if k.Kind != KindService {
		kind = k.Kind + " "
	}
	return fmt.Sprintf("%s%s/%s%s/%s/%s", kind, k.Namespace, k.Name, port, k.Protocol, k.Family)
}

// Key returns the identity of p, which outlives changes of its addresses,
// its number and its backends.
func (p *Port) Key() PortKey {
	return PortKey{p.Owner, p.PortName, p.Protocol, p.Family}
}

// HasExternal tells whether p has external frontends.
func (p *Port) HasExternal() bool {
	return slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Kind.External() })
}

// Health is what the health check of a load balancer asks for.
type Health struct {
	NodePort uint16
	// LocalEndpoints are the ready endpoints on this node: distinct addresses,
	// of the family that has more.
	LocalEndpoints int
}

// Compiled is a service as the datapath needs it.
type Compiled struct {
	Owner
	// Created orders services that want the same frontend.
	Created time.Time
	// Addrs are the addresses the service owns on every port: cluster IPs.
	Addrs []netip.Addr
	// Ports in the order of the service's ports, then of its addresses.
	Ports []Port
	// Health is set for load balancers with externalTrafficPolicy Local and a
	// healthCheckNodePort.
	Health *Health
}

// OwnerKey is the entry of pw_services that marks addr as owned.
func OwnerKey(addr netip.Addr) maps.ServiceKey {
	return maps.ServiceKey{Addr: maps.ToAddr(addr)}
}

// failer notes what is wrong with a field.
type failer func(field, format string, args ...any)

// Compile compiles svc with the endpoints that the slices name, which are those
// labelled with the service's name in its namespace. A skipped service gives
// the zero Compiled. The error joins everything that had to be left out; the
// Compiled beside it is good.
func Compile(svc *corev1.Service, endpointSlices []*discoveryv1.EndpointSlice, node Node) (Compiled, error) {
	if skipped(svc) {
		return Compiled{}, nil
	}
	var errs []error
	fail := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("Service %s/%s: %s: %w", svc.Namespace, svc.Name, field, fmt.Errorf(format, args...)))
	}
	addrs := clusterIPs(svc, fail)
	vips := externalAddrs(svc, addrs, fail)
	ports := servicePorts(svc, fail)
	ranges := sourceRanges(svc, fail)
	candidates, sliceErrs := collect(endpointSlices, svc.Spec.PublishNotReadyAddresses)
	errs = append(errs, sliceErrs...)
	if len(addrs) == 0 {
		return Compiled{}, errors.Join(errs...)
	}
	out := Compiled{
		Owner: Service(svc.Namespace, svc.Name), Created: svc.CreationTimestamp.Time, Addrs: addrs,
		Health: health(svc, candidates, node),
	}
	internal, external := scopesOf(svc)
	for i := range ports {
		p := &ports[i]
		nodePort := nodePort(svc, p, node, fail)
		for _, family := range families(addrs) {
			port := Port{
				Owner: out.Owner, PortName: p.Name, Protocol: p.Protocol, Family: family,
				Affinity:   affinity(svc),
				KeepSource: external == Local,
			}
			port.frontends(uint16(p.Port), nodePort, addrs, vips)
			port.choose(candidates[portRef{p.Name, p.Protocol, family}].sorted(), internal, external, node)
			port.restrict(svc, ranges)
			out.Ports = append(out.Ports, port)
		}
	}
	return out, errors.Join(errs...)
}

// vip is an external address of a service.
type vip struct {
	addr netip.Addr
	kind FrontendKind
}

// frontends fills in the frontends of p's family.
func (p *Port) frontends(port, nodePort uint16, addrs []netip.Addr, vips []vip) {
	add := func(a netip.Addr, port uint16, kind FrontendKind) {
		if familyOf(a) == p.Family {
			p.Frontends = append(p.Frontends, Frontend{
				Key:  maps.ServiceKey{Addr: maps.ToAddr(a), Port: port, Proto: protoNumber(p.Protocol)},
				Kind: kind,
			})
		}
	}
	for _, a := range addrs {
		add(a, port, ClusterIP)
	}
	if nodePort != 0 {
		add(NodePortAddr(p.Family), nodePort, NodePort)
	}
	for _, v := range vips {
		add(v.addr, port, v.kind)
	}
}

// choose fills in the sets and states.
func (p *Port) choose(endpoints []Endpoint, internal, external Scope, node Node) {
	cluster, local := Choose(endpoints, Cluster, node), Choose(endpoints, Local, node)
	set := func(s Scope) (list []maps.Backend, noLocal bool) {
		from := cluster
		if s == Local {
			from = local
		}
		list = slices.Grow(list, len(from))
		for i := range from {
			list = append(list, from[i].Backend)
		}
		return list, s == Local && len(list) == 0 && len(cluster) > 0
	}
	// Sets that are equal, as they mostly are, are kept once.
	shared := func(list, other []maps.Backend) []maps.Backend {
		if len(list) > 0 && slices.Equal(list, other) {
			return other
		}
		return list
	}
	p.Internal, p.NoLocalInternal = set(internal)
	ext := p.Internal
	if p.HasExternal() {
		p.Cluster, _ = set(Cluster)
		p.Cluster = shared(p.Cluster, p.Internal)
		p.External, p.NoLocalExternal = set(external)
		p.External = shared(shared(p.External, p.Internal), p.Cluster)
		p.Maglev = MaglevSize(node.MaglevSize, len(p.External))
		ext = p.External
	}
	flags := make(map[maps.Backend]uint32, len(endpoints))
	for _, of := range []struct {
		set  []maps.Backend
		flag uint32
	}{{p.Internal, maps.BackendIn}, {p.Cluster, maps.BackendCluster}, {ext, maps.BackendExt}} {
		for _, b := range of.set {
			flags[b] |= of.flag
		}
	}
	p.States = slices.Grow(p.States, len(endpoints))
	for i := range endpoints {
		if e := &endpoints[i]; e.Serving {
			p.States = append(p.States, BackendState{e.Backend, flags[e.Backend] | maps.BackendServing})
		}
	}
}

// restrict fills in the source ranges of p's family. With ranges of the other
// family alone nobody is let in: no client of this one is in a range.
func (p *Port) restrict(svc *corev1.Service, ranges []netip.Prefix) {
	if len(svc.Spec.LoadBalancerSourceRanges) == 0 ||
		!slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Kind == LoadBalancerIP }) {
		return
	}
	p.Restricted = true
	for _, r := range ranges {
		if familyOf(r.Addr()) == p.Family {
			p.SourceRanges = append(p.SourceRanges, r)
		}
	}
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
func clusterIPs(svc *corev1.Service, fail failer) []netip.Addr {
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
func servicePorts(svc *corev1.Service, fail failer) []corev1.ServicePort {
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
