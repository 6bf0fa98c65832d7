package services

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/cluster"
)

// service is a load balancer's service with every kind of address, port 80
// by TCP and UDP, unless change says otherwise.
type service struct {
	name string
	// ends are its endpoints: somebody's name, with "!" and the conditions
	// terminating, stopped (terminating and not serving) or unready, "@" and
	// the zone that it is a hint for, "%" and the node.
	ends   string
	local  string // words internal and external: those traffic policies are Local
	change func(w *world, s *corev1.Service)
	n      int               // number outside of the table
	target int32             // port of the endpoints, default that of the servers
	protos []corev1.Protocol // default TCP and UDP
}

// number is a service's place in the table: its addresses and NodePort.
func (s service) number() int {
	if s.n != 0 {
		return s.n
	}
	return 1 + slices.IndexFunc(table, func(t service) bool { return t.name == s.name })
}

// address of one kind: cluster, lb or ext.
func (s service) address(kind string, v6 bool) netip.Addr {
	n := s.number()
	form := map[string][2]string{
		"cluster": {"10.98.1.%d", "fd00:10:98::1%02x"},
		"lb":      {"192.0.2.%d", "fd00:10:1b::%x"},
		"ext":     {"198.51.100.%d", "fd00:10:ef::%x"},
	}[kind]
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf(form[1], n))
	}
	return netip.MustParseAddr(fmt.Sprintf(form[0], n))
}

func (s service) nodePort() int32 { return int32(30100 + s.number()) }

// frontend is the target of a row: cluster, lb, ext, or node@ and who it is
// that has the address.
func (s service) frontend(w *world, at string, v6 bool) netip.AddrPort {
	if who, is := strings.CutPrefix(at, "node@"); is {
		return netip.AddrPortFrom(w.addr(who, v6), uint16(s.nodePort()))
	}
	return netip.AddrPortFrom(s.address(at, v6), 80)
}

func (s service) objects(w *world, change func(*corev1.Service)) []cluster.Object {
	meta := metav1.ObjectMeta{Namespace: "default", Name: s.name}
	both := corev1.IPFamilyPolicyPreferDualStack
	svc := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &both,
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
	}}
	for _, v6 := range []bool{false, true} {
		svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, s.address("cluster", v6).String())
		svc.Spec.ExternalIPs = append(svc.Spec.ExternalIPs, s.address("ext", v6).String())
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: s.address("lb", v6).String()})
	}
	svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
	var ports []discoveryv1.EndpointPort
	target := int32(cluster.ServerPort)
	if s.target != 0 {
		target = s.target
	}
	protos := s.protos
	if protos == nil {
		protos = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP}
	}
	for _, proto := range protos {
		name := strings.ToLower(string(proto))
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: name, Protocol: proto, Port: 80, NodePort: s.nodePort()})
		ports = append(ports, discoveryv1.EndpointPort{Name: &name, Protocol: &proto, Port: &target})
	}
	if strings.Contains(s.local, "internal") {
		policy := corev1.ServiceInternalTrafficPolicyLocal
		svc.Spec.InternalTrafficPolicy = &policy
	}
	if strings.Contains(s.local, "external") {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if s.change != nil {
		s.change(w, svc)
	}
	if change != nil {
		change(svc)
	}
	return append([]cluster.Object{svc}, s.slices(w, ports)...)
}

// slices are one per family.
func (s service) slices(w *world, ports []discoveryv1.EndpointPort) []cluster.Object {
	var out []cluster.Object
	for i, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: s.name + "-" + strings.ToLower(string(kind)),
				Labels: map[string]string{discoveryv1.LabelServiceName: s.name},
			},
			AddressType: kind, Ports: ports,
		}
		for _, end := range strings.Fields(s.ends) {
			slice.Endpoints = append(slice.Endpoints, endpoint(w, end, i == 1))
		}
		out = append(out, slice)
	}
	return out
}

func endpoint(w *world, end string, v6 bool) discoveryv1.Endpoint {
	yes, no := true, false
	end, hintNode, _ := strings.Cut(end, "%")
	end, hintZone, _ := strings.Cut(end, "@")
	name, condition, _ := strings.Cut(end, "!")
	e := discoveryv1.Endpoint{Addresses: []string{w.addr(name, v6).String()}}
	if hintNode+hintZone != "" {
		e.Hints = &discoveryv1.EndpointHints{}
	}
	if hintNode != "" {
		e.Hints.ForNodes = []discoveryv1.ForNode{{Name: hintNode}}
	}
	if hintZone != "" {
		e.Hints.ForZones = []discoveryv1.ForZone{{Name: hintZone}}
	}
	switch condition {
	case "":
		e.Conditions = discoveryv1.EndpointConditions{Ready: &yes}
	case "terminating":
		e.Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
	case "stopped":
		e.Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &no, Terminating: &yes}
	case "unready":
		e.Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &no}
	default:
		w.Fatalf("%q: no such condition", end)
	}
	for _, l := range layout {
		if l.name == name {
			e.NodeName = &l.node
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: name}
		}
	}
	for _, n := range w.Nodes {
		if n.NodeName == name {
			e.NodeName = &n.NodeName
		}
	}
	return e
}
