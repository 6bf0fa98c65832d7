package engine

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

func podObject(name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID("uid-" + name),
			Labels: map[string]string{"pod": name},
		},
		Spec:   corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "none"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ips[0]},
	}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}

// podObjects are the pods of the address plan, on the nodes there are.
func (w *world) podObjects() []cluster.Object {
	objs := []cluster.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "default", Labels: map[string]string{corev1.LabelMetadataName: "default"},
	}}}
	for _, p := range []*corev1.Pod{
		podObject("client", "node-a", "10.244.80.65", "fd00:10:244:50::65"),
		podObject("local", "node-a", "10.244.80.66", "fd00:10:244:50::66"),
		podObject("remote", "node-b", "10.244.158.65", "fd00:10:244:9e::65"),
		podObject("other", "node-b", "10.244.158.66", "fd00:10:244:9e::66"),
	} {
		if w.Node(p.Spec.NodeName) != nil {
			objs = append(objs, p)
		}
	}
	return objs
}

// nodeObject is a node that runs no agent of ours.
func nodeObject(name string, addrs []netip.Addr, cidrs []netip.Prefix) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	for _, p := range cidrs {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
	}
	if len(cidrs) > 0 {
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	}
	return n
}

// backend is a pod of ours or of a kernel node.
type backend interface {
	IPv4() netip.Addr
	IPv6() netip.Addr
}

// service is a dual-stack service of port 80, TCP and UDP, and its slices:
// port 8080 of these pods.
func service(name, v4, v6 string, pods ...backend) []cluster.Object {
	policy := corev1.IPFamilyPolicyPreferDualStack
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: v4, ClusterIPs: []string{v4, v6},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, IPFamilyPolicy: &policy,
			Ports: []corev1.ServicePort{
				{Name: "t", Protocol: corev1.ProtocolTCP, Port: 80},
				{Name: "u", Protocol: corev1.ProtocolUDP, Port: 80},
			},
		},
	}
	objs := []cluster.Object{s}
	for _, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: name + "-" + strings.ToLower(string(kind)),
				Labels: map[string]string{discoveryv1.LabelServiceName: name},
			},
			AddressType: kind,
		}
		for _, p := range s.Spec.Ports {
			number := int32(serverPort)
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &number})
		}
		for _, p := range pods {
			addr := p.IPv4()
			if kind == discoveryv1.AddressTypeIPv6 {
				addr = p.IPv6()
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr.String()}})
		}
		objs = append(objs, slice)
	}
	return objs
}

// service puts a service of these pods for the duration of the test and waits
// until every node has it.
func (w *world) service(t testing.TB, ctx context.Context, name, v4, v6 string, pods ...backend) {
	t.Helper()
	objs := service(name, v4, v6, pods...)
	ok(t, w.Manifests.Put(objs...))
	t.Cleanup(func() {
		ok(t, w.Manifests.Delete(objs...))
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		w.awaitService(t, ctx, v4, v6, -1)
	})
	w.awaitService(t, ctx, v4, v6, len(pods))
}

// awaitService waits until each node's maps have that many backends for all
// four frontends; -1: until they are gone.
func (w *world) awaitService(t testing.TB, ctx context.Context, v4, v6 string, backends int) {
	t.Helper()
	for _, n := range w.Nodes {
		set := mapsOf(t, n)
		for _, addr := range []string{v4, v6} {
			for _, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
				key := maps.ServiceKey{Addr: maps.ToAddr(netip.MustParseAddr(addr)), Port: 80, Proto: proto}
				eventually(t, ctx, func() error {
					svc, found, err := set.Services.Get(key)
					switch {
					case err != nil:
						return err
					case backends < 0 && found, backends >= 0 && (!found || int(svc.Count) != backends):
						return fmt.Errorf("%s: %v: found %v, %d backends", n.NodeName, key, found, svc.Count)
					}
					return nil
				})
			}
		}
	}
}

// awaitPeer waits until a node knows an address as a pod or a node.
func awaitPeer(t testing.TB, ctx context.Context, n *cluster.Node, addr netip.Addr) {
	t.Helper()
	set := mapsOf(t, n)
	eventually(t, ctx, func() error {
		if _, found, err := set.Addrs.Get(maps.ToAddr(addr)); err != nil || !found {
			return fmt.Errorf("%s does not know %v: %v", n.NodeName, addr, err)
		}
		return nil
	})
}
