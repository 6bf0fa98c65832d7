package main

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

const (
	namespace = "default"
	selfNode  = "node-a"
	// firstNodePort is where the range begins that agents are given.
	firstNodePort = 20000
	lastNodePort  = 32767
	servicePort   = 80
	backendPort   = 8080
	serviceCIDR   = "10.98.0.0/16"
	endpointCIDR  = "10.128.0.0/9"
	// sliceSize is how many endpoints the controller puts into a slice.
	sliceSize = 100
)

// size is a cluster to measure: services, each with as many endpoints.
type size struct {
	Name      string `json:"name"`
	Services  int    `json:"services"`
	Endpoints int    `json:"endpointsEach"`
	NodePort  bool   `json:"nodePort,omitempty"`
	Pods      bool   `json:"pods,omitempty"` // the endpoints have Pod objects
	extra     bool   // measured only when it is named
}

func sizes() []size {
	return []size{
		{Name: "1x4", Services: 1, Endpoints: 4},
		{Name: "1000x4", Services: 1000, Endpoints: 4},
		{Name: "10000x4", Services: 10000, Endpoints: 4},
		{Name: "1x5000", Services: 1, Endpoints: 5000},
		{Name: "10000x4-nodeport", Services: 10000, Endpoints: 4, NodePort: true, extra: true},
		{Name: "1000x100", Services: 1000, Endpoints: 100, extra: true},
	}
}

// clusterIP of a service, counted from 0: below 10.98.0.0/16.
func clusterIP(i int) netip.Addr {
	i++
	return netip.AddrFrom4([4]byte{10, 98, byte(i >> 8), byte(i)})
}

// endpointIP is the address of an endpoint, counted over all services.
func endpointIP(i int) netip.Addr {
	i += 256
	return netip.AddrFrom4([4]byte{10, 128 + byte(i>>16), byte(i >> 8), byte(i)})
}

// spareIP are addresses that only changes use.
func spareIP(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 200 + byte(i>>16), byte(i >> 8), byte(i)})
}

// leadsTo tells whether a packet to a service may be led to an address: one of
// its endpoints, or one that a change gave it.
func (s size) leadsTo(i int, to netip.AddrPort) bool {
	if to.Port() != backendPort || !to.Addr().Is4() {
		return false
	}
	if a := to.Addr().As4(); a[0] == 10 && a[1] >= 200 {
		return true
	}
	for n := range s.Endpoints {
		if endpointIP(i*s.Endpoints+n) == to.Addr() {
			return true
		}
	}
	return false
}

func serviceName(i int) string { return fmt.Sprintf("service-%05d", i) }

func (s size) service(i int) *corev1.Service {
	ip := clusterIP(i).String()
	single := corev1.IPFamilyPolicySingleStack
	cluster := corev1.ServiceInternalTrafficPolicyCluster
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: serviceName(i),
			Labels: map[string]string{"app.kubernetes.io/name": serviceName(i), "app.kubernetes.io/managed-by": "bench"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single,
			InternalTrafficPolicy: &cluster, SessionAffinity: corev1.ServiceAffinityNone,
			Selector: map[string]string{"app.kubernetes.io/name": serviceName(i)},
			Ports:    []corev1.ServicePort{{Name: "http", Port: servicePort, Protocol: corev1.ProtocolTCP}},
		},
	}
	svc.Spec.Ports[0].TargetPort.IntVal = backendPort
	if s.NodePort {
		svc.Spec.Type = corev1.ServiceTypeNodePort
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		svc.Spec.Ports[0].NodePort = int32(firstNodePort + i)
	}
	return svc
}

// frontends are the keys of a service in pw_services.
func (s size) frontends(i int) []maps.ServiceKey {
	out := []maps.ServiceKey{{Addr: maps.ToAddr(clusterIP(i)), Port: servicePort, Proto: maps.ProtoTCP}}
	if s.NodePort {
		out = append(out, maps.ServiceKey{
			Addr: maps.ToAddr(netip.IPv4Unspecified()), Port: uint16(firstNodePort + i), Proto: maps.ProtoTCP,
		})
	}
	return out
}

// podName of an endpoint, as a Deployment would name it.
func podName(i, n int) string { return fmt.Sprintf("%s-7d4b9c6f5-%05d", serviceName(i), n) }

func nodeName(ip netip.Addr) string { return fmt.Sprintf("node-%d-%d", ip.As4()[1], ip.As4()[2]) }

// slices of a service: the endpoints that the size says. extra, if any, takes
// the place of the first endpoint.
func (s size) slices(i int, extra netip.Addr) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	yes, no := true, false
	name, port, proto := "http", int32(backendPort), corev1.ProtocolTCP
	for n := range s.Endpoints {
		if n%sliceSize == 0 {
			out = append(out, &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: namespace, Name: fmt.Sprintf("%s-%03d", serviceName(i), n/sliceSize),
					Labels: map[string]string{
						discoveryv1.LabelServiceName: serviceName(i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
						"app.kubernetes.io/name": serviceName(i),
					},
				},
				AddressType: discoveryv1.AddressTypeIPv4,
				Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
			})
		}
		ip := endpointIP(i*s.Endpoints + n)
		if n == 0 && extra.IsValid() {
			ip = extra
		}
		node := nodeName(ip)
		last := out[len(out)-1]
		last.Endpoints = append(last.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{ip.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName:   &node,
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: podName(i, n)},
		})
	}
	return out
}

func (s size) pods(i int) (out []*corev1.Pod) {
	for n := range s.Endpoints {
		ip := endpointIP(i*s.Endpoints + n)
		out = append(out, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: podName(i, n),
				Labels: map[string]string{"app.kubernetes.io/name": serviceName(i), "pod-template-hash": "7d4b9c6f5"},
			},
			Spec: corev1.PodSpec{
				NodeName:   nodeName(ip),
				Containers: []corev1.Container{{Name: "main", Image: "registry.example/main:1", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: backendPort}}}},
			},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip.String(), PodIPs: []corev1.PodIP{{IP: ip.String()}}},
		})
	}
	return out
}

// fill puts all objects of a cluster of this size.
func (s size) fill(api *fakeapi.Server, nodes []cluster.NodeConfig) {
	objs := []fakeapi.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}}
	for _, n := range nodes {
		objs = append(objs, (&cluster.Node{NodeName: n.Name, Config: n}).Object())
	}
	for i := range s.Services {
		objs = append(objs, s.service(i))
		for _, slice := range s.slices(i, netip.Addr{}) {
			objs = append(objs, slice)
		}
		if s.Pods {
			for _, p := range s.pods(i) {
				objs = append(objs, p)
			}
		}
	}
	api.Put(objs...)
}
