package main

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/test/cluster"
)

const (
	// fillPort of the remote service leads to fillListen, and so on, as many
	// as fillPorts: flows that are there to be many, and no others, go there.
	fillPort   = 81
	fillListen = 8090
	fillPorts  = 3

	firstNodePort = 30080 // in the order of nodePortServices

	// maxServices fit into the service range beside those that are called,
	// maxFlows into ports of one client and into podweir's table, which has
	// two entries of each.
	maxServices = 60000
	maxPolicies = 10000
	maxFlows    = 100000
	// portsToFill are the client's for one service port; the others are for
	// what is measured meanwhile.
	portsToFill = 34000
)

func nodePortServices() []string { return []string{"remote", "local"} }

// objects of a setup: those of the manifests, and as many more as it says.
func objects(s setup, three bool, nodes []*corev1.Node) ([]cluster.Object, error) {
	objs, err := cluster.Decode(manifests)
	if err != nil {
		return nil, err
	}
	for _, obj := range objs {
		switch obj := obj.(type) {
		case *corev1.Pod:
			if three && obj.Name == "remote" {
				obj.Labels["calls"] = "outside"
			}
		case *corev1.Service:
			complete(obj, three)
		case *discoveryv1.EndpointSlice:
			if obj.Labels[discoveryv1.LabelServiceName] == "remote" {
				for i := range fillPorts {
					obj.Ports = append(obj.Ports, slicePort(fillName(i), int32(fillListen+i), corev1.ProtocolUDP))
				}
			}
		case *networkingv1.NetworkPolicy:
			allow(obj)
		}
	}
	for _, n := range nodes {
		objs = append(objs, n)
	}
	if three {
		objs = append(objs, outward())
	}
	for i := range s.services - 1 {
		svc, slice := furtherService(i)
		objs = append(objs, svc, slice)
	}
	for i := range s.policies - 1 {
		objs = append(objs, furtherPolicies(i)...)
	}
	return objs, nil
}

func fillName(i int) string { return fmt.Sprintf("fill-%d", i) }

func slicePort(name string, port int32, proto corev1.Protocol) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Port: &port, Protocol: &proto}
}

// complete is what the API server would have filled in, and node ports.
func complete(svc *corev1.Service, three bool) {
	internal := corev1.ServiceInternalTrafficPolicyCluster
	svc.Spec.InternalTrafficPolicy, svc.Spec.SessionAffinity = &internal, corev1.ServiceAffinityNone
	if three {
		svc.Spec.Type, svc.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyCluster
		for i := range svc.Spec.Ports {
			svc.Spec.Ports[i].NodePort = int32(firstNodePort + slices.Index(nodePortServices(), svc.Name))
		}
	}
	if svc.Name == "remote" {
		for i := range fillPorts {
			p := corev1.ServicePort{Name: fillName(i), Protocol: corev1.ProtocolUDP, Port: int32(fillPort + i), TargetPort: intstr.FromInt(fillListen + i)}
			if three {
				p.NodePort = int32(firstNodePort + 10 + i)
			}
			svc.Spec.Ports = append(svc.Spec.Ports, p)
		}
	}
}

func policyPort(proto corev1.Protocol, port int) networkingv1.NetworkPolicyPort {
	p := intstr.FromInt(port)
	return networkingv1.NetworkPolicyPort{Protocol: &proto, Port: &p}
}

func servedPorts() []networkingv1.NetworkPolicyPort {
	return []networkingv1.NetworkPolicyPort{policyPort(corev1.ProtocolTCP, listenPort), policyPort(corev1.ProtocolUDP, listenPort)}
}

// noPods are the host outside and the nodes.
func noPods() networkingv1.NetworkPolicyPeer {
	return networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: netip.PrefixFrom(outside, 24).Masked().String()}}
}

// allow adds to a policy of the manifests what else is called here.
func allow(p *networkingv1.NetworkPolicy) {
	var fill []networkingv1.NetworkPolicyPort
	for i := range fillPorts {
		fill = append(fill, policyPort(corev1.ProtocolUDP, fillListen+i))
	}
	for i := range p.Spec.Ingress {
		p.Spec.Ingress[i].Ports = append(p.Spec.Ingress[i].Ports, fill...)
	}
	for i := range p.Spec.Egress {
		p.Spec.Egress[i].Ports = append(p.Spec.Egress[i].Ports, fill...)
	}
	if len(p.Spec.Ingress) > 0 {
		p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
			From: []networkingv1.NetworkPolicyPeer{noPods()}, Ports: servedPorts(),
		})
	}
}

// outward isolates the pod that calls outside for what it sends, and allows
// that.
func outward() *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "outward"},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"calls": "outside"}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress: []networkingv1.NetworkPolicyEgressRule{{
				To: []networkingv1.NetworkPolicyPeer{noPods()}, Ports: servedPorts(),
			}},
		},
	}
}

// furtherIP is the address of a further service: behind those of the
// manifests in the same range.
func furtherIP(i int) netip.Addr {
	i += 256
	return netip.AddrFrom4([4]byte{10, 98, byte(i >> 8), byte(i)})
}

// furtherService leads to the remote pod.
func furtherService(i int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	name, ip := fmt.Sprintf("further-%05d", i), furtherIP(i).String()
	single := corev1.IPFamilyPolicySingleStack
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single,
			Ports: []corev1.ServicePort{{Name: "tcp", Port: servicePort, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt(listenPort)}},
		},
	}
	complete(svc, false)
	yes, no, node := true, false, "node-b"
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{slicePort("tcp", listenPort, corev1.ProtocolTCP)},
		Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{"10.244.158.65"},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName:   &node,
		}},
	}
	return svc, slice
}

// furtherPolicies select one a server, the other a client, and allow ports of
// their own that nobody calls: each pod has as many policies.
func furtherPolicies(i int) []cluster.Object {
	peers := func(app string) []networkingv1.NetworkPolicyPeer {
		return []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}}}
	}
	ports := []networkingv1.NetworkPolicyPort{policyPort(corev1.ProtocolTCP, 20000+i), policyPort(corev1.ProtocolUDP, 20000+i)}
	policy := func(app string, spec networkingv1.NetworkPolicySpec) *networkingv1.NetworkPolicy {
		spec.PodSelector.MatchLabels = map[string]string{"app": app}
		return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("further-%s-%05d", app, i)}, Spec: spec}
	}
	return []cluster.Object{
		policy("server", networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
			Ingress:     []networkingv1.NetworkPolicyIngressRule{{From: peers("client"), Ports: ports}},
		}),
		policy("client", networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress:      []networkingv1.NetworkPolicyEgressRule{{To: peers("server"), Ports: ports}},
		}),
	}
}

// put hands objects to the API server.
func put(api *fakeapi.Server, objs []cluster.Object) error {
	for _, o := range objs {
		api.Put(o)
	}
	return api.Encode()
}
