package contract

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// clusterIP makes a service with these addresses.
func clusterIP(name string, ips []string, ports ...corev1.ServicePort) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ips[0], ClusterIPs: ips, Ports: ports},
	}
	for _, ip := range ips {
		if netip.MustParseAddr(ip).Is4() {
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv4Protocol)
		} else {
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv6Protocol)
		}
	}
	policy := corev1.IPFamilyPolicyPreferDualStack
	s.Spec.IPFamilyPolicy = &policy
	return s
}

func svcPort(name string, proto corev1.Protocol, port int32) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: proto, Port: port}
}

// both are the ports of a service with TCP and UDP on one number.
func bothPorts(port int32) []corev1.ServicePort {
	return []corev1.ServicePort{svcPort("t", corev1.ProtocolTCP, port), svcPort("u", corev1.ProtocolUDP, port)}
}

func slicePort(name string, proto corev1.Protocol, port int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Protocol: &proto, Port: &port}
}

func bothSlicePorts(port int32) []discoveryv1.EndpointPort {
	return []discoveryv1.EndpointPort{slicePort("t", corev1.ProtocolTCP, port), slicePort("u", corev1.ProtocolUDP, port)}
}

// endpointSlice makes one slice of a service; the family is the addresses'.
func endpointSlice(name, service string, ports []discoveryv1.EndpointPort, addrs ...netip.Addr) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       ports,
	}
	for _, a := range addrs {
		if a.Is6() {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}})
	}
	return s
}

// slicesFor makes one slice per family over the same pods.
func slicesFor(name, service string, ports []discoveryv1.EndpointPort, pods ...*cluster.Pod) []cluster.Object {
	var v4, v6 []netip.Addr
	for _, p := range pods {
		v4, v6 = append(v4, p.IPv4()), append(v6, p.IPv6())
	}
	return []cluster.Object{
		endpointSlice(name+"-v4", service, ports, v4...),
		endpointSlice(name+"-v6", service, ports, v6...),
	}
}

// put writes objects for the duration of the case.
func (w *world) put(t *testing.T, objs ...cluster.Object) {
	t.Helper()
	ok(t, w.Manifests.Put(objs...))
	t.Cleanup(func() {
		if err := w.Manifests.Delete(objs...); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		for _, o := range objs {
			svc, is := o.(*corev1.Service)
			if !is {
				continue
			}
			for _, addr := range svc.Spec.ClusterIPs {
				w.absent(t, ctx, strings.ToLower(string(svc.Spec.Ports[0].Protocol)), vip(addr, uint16(svc.Spec.Ports[0].Port)))
			}
		}
		w.settled(t, ctx)
	})
}

// settled waits until the round that each agent is in, if any, is over: its
// loop answers between two rounds only.
func (w *world) settled(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, n := range w.Nodes {
		if code, body, err := n.AgentGet(ctx, "/healthz"); err != nil || code != 200 {
			t.Errorf("%s: /healthz: %d %s, %v", n.NodeName, code, body, err)
		}
	}
}

// restore puts objects that all share back when the case ends.
func (w *world) restore(t *testing.T, objs ...cluster.Object) {
	t.Helper()
	t.Cleanup(func() {
		if err := w.Manifests.Put(objs...); err != nil {
			t.Error(err)
		}
	})
}

// object finds one of examples/basic, a copy to change.
func object[T cluster.Object](w *world, name string) T {
	for _, o := range w.objs {
		if x, is := o.(T); is && x.GetName() == name {
			return x.DeepCopyObject().(T)
		}
	}
	panic("no such object: " + name)
}

func protoNumber(proto string) uint8 {
	if proto == "udp" {
		return maps.ProtoUDP
	}
	return maps.ProtoTCP
}

// backends reads what the datapath of a node has behind a frontend, sorted;
// known says that the frontend exists.
func backends(n *cluster.Node, proto, frontend string) (out []netip.AddrPort, known bool, err error) {
	set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
	if err != nil {
		return nil, false, err
	}
	defer set.Close()
	ap := netip.MustParseAddrPort(frontend)
	svc, known, err := set.Services.Get(maps.ServiceKey{Addr: maps.ToAddr(ap.Addr()), Port: ap.Port(), Proto: protoNumber(proto)})
	if err != nil || !known {
		return nil, false, err
	}
	for slot := range svc.Count {
		be, there, err := set.Backends.Get(maps.BackendKey{Set: svc.Set, Slot: slot})
		if err != nil {
			return nil, true, err
		}
		if !there {
			return nil, true, fmt.Errorf("set %d of %s lacks slot %d", svc.Set, frontend, slot)
		}
		out = append(out, netip.AddrPortFrom(maps.FromAddr(be.Addr), be.Port))
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out, true, nil
}

// inForce awaits that every node has exactly these backends.
func (w *world) inForce(t *testing.T, ctx context.Context, proto, frontend string, want ...netip.AddrPort) {
	t.Helper()
	slices.SortFunc(want, netip.AddrPort.Compare)
	for _, n := range w.Nodes {
		eventually(t, ctx, func() error {
			got, known, err := backends(n, proto, frontend)
			if err == nil && (!known || !slices.Equal(got, want)) {
				err = fmt.Errorf("%s: %s %s has %v (known: %v), want %v", n.NodeName, proto, frontend, got, known, want)
			}
			return err
		})
	}
}

// absent awaits that no node has the frontend.
func (w *world) absent(t *testing.T, ctx context.Context, proto, frontend string) {
	t.Helper()
	for _, n := range w.Nodes {
		eventually(t, ctx, func() error {
			_, known, err := backends(n, proto, frontend)
			if err == nil && known {
				err = fmt.Errorf("%s: %s %s is there", n.NodeName, proto, frontend)
			}
			return err
		})
	}
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// atAll is the servers' port of each pod, in one family.
func atAll(v6 bool, pods ...*cluster.Pod) (out []netip.AddrPort) {
	for _, p := range pods {
		out = append(out, at(ip(p, v6), cluster.ServerPort))
	}
	return out
}

func ip(p *cluster.Pod, v6 bool) netip.Addr {
	if v6 {
		return p.IPv6()
	}
	return p.IPv4()
}

// vip is address and port for a command line.
func vip(addr string, port uint16) string {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), port).String()
}

// families runs a case once per family.
func families(t *testing.T, fn func(t *testing.T, v6 bool)) {
	t.Helper()
	for _, v6 := range []bool{false, true} {
		name := "IPv4"
		if v6 {
			name = "IPv6"
		}
		t.Run(name, func(t *testing.T) { fn(t, v6) })
	}
}

// pick is the address of one family.
func pick(v6 bool, addr4, addr6 string) string {
	if v6 {
		return addr6
	}
	return addr4
}

// pod makes a running pod with these addresses.
func pod(name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "podweir/pw-server"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	p.Status.PodIP = ips[0]
	return p
}
