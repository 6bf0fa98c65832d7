package policy

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	pwmaps "github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

// frontends maps the ports of every service of the cases to the pod's: the
// numbers cross over, so that one taken for the other shows.
var frontends = map[int32]int32{80: portA, portB: portA, portA: portB}

// putService gives a pod a service of its own, in both families.
func (w *world) putService(key string) []netip.Addr {
	w.Helper()
	w.hosts++
	vips := []netip.Addr{
		netip.MustParseAddr(fmt.Sprintf("10.98.7.%d", w.hosts)),
		netip.MustParseAddr(fmt.Sprintf("fd00:10:98::7%02x", w.hosts)),
	}
	p := w.pods[key]
	meta := metav1.ObjectMeta{Namespace: p.Namespace, Name: "svc-" + p.Name}
	svc := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, ClusterIP: vips[0].String(), ClusterIPs: []string{vips[0].String(), vips[1].String()},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
	}}
	var slicePorts []discoveryv1.EndpointPort
	for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		for port, target := range frontends {
			name := fmt.Sprintf("%s-%d", strings.ToLower(string(proto)), port)
			svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: name, Protocol: proto, Port: port})
			slicePorts = append(slicePorts, discoveryv1.EndpointPort{Name: &name, Protocol: &proto, Port: &target})
		}
	}
	objs := []cluster.Object{svc}
	for i, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		m := meta
		m.Name += "-" + strings.ToLower(string(kind))
		m.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
		objs = append(objs, &discoveryv1.EndpointSlice{
			ObjectMeta: m, AddressType: kind, Ports: slicePorts,
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{p.Status.PodIPs[i].IP}}},
		})
	}
	w.must(w.c.Manifests.Put(objs...))
	w.Cleanup(func() {
		if err := w.c.Manifests.Delete(objs...); err != nil {
			w.Error(err)
		}
	})
	return vips
}

// throughServices calls every service from every pod and compares with the
// verdict about its backend, address and port.
func (w *world) throughServices(vips map[string][]netip.Addr) {
	w.Helper()
	var probes []mesh.Probe
	var want []bool
	var to []string
	r := w.rules()
	allowed := 0
	for key, list := range vips {
		for _, from := range w.everyone() {
			if w.pods[from] == nil || from == key {
				continue
			}
			for i, vip := range list {
				for port, target := range frontends {
					for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
						ok := r.allowed(w.party(from, w.addrs(from)[i]), w.party(key, w.addrs(key)[i]), proto, int(target))
						probes = append(probes, mesh.Probe{From: w.at(from), Proto: strings.ToLower(string(proto)), To: netip.AddrPortFrom(vip, uint16(port))})
						want, to = append(want, ok), append(to, from+" -> service of "+key)
						if ok {
							allowed++
						}
					}
				}
			}
		}
	}
	for i, res := range w.probe(probes) {
		if ok := res.Outcome == mesh.Answered; ok != want[i] || !ok && res.Outcome != mesh.Silent {
			w.Errorf("%s %v: %s %v, want allowed %v", to[i], probes[i], res.Outcome, res.Err, want[i])
		}
	}
	if allowed == 0 || allowed == len(probes) {
		w.Errorf("%d of %d allowed: this shows nothing", allowed, len(probes))
	}
}

// P13: a service's address is no way around, P6: the port that counts is the
// pod's, P7: the address that counts on egress is the pod's.
func (w *world) services() {
	vips := map[string][]netip.Addr{}
	for _, key := range []string{"x/a", "x/b", "v/a"} {
		vips[key] = w.putService(key)
	}
	// The nodes hear of services apart from policies.
	for _, list := range vips {
		for _, vip := range list {
			for _, from := range []string{"x/c", "v/b"} {
				w.must(cluster.Eventually(w.ctx, func() error {
					res := w.probe([]mesh.Probe{{From: w.netns(from), Proto: "tcp", To: netip.AddrPortFrom(vip, 80)}})[0]
					if res.Outcome != mesh.Answered {
						return fmt.Errorf("%v from %s: %s %v", vip, from, res.Outcome, res.Err)
					}
					return nil
				}))
			}
		}
	}
	var blocks []string
	for _, list := range vips {
		for _, vip := range list {
			blocks = append(blocks, fmt.Sprintf("{ipBlock: {cidr: '%s/%d'}}", vip, vip.BitLen()))
		}
	}
	slices.Sort(blocks)
	b := w.addrs("x/b")
	for _, docs := range [][]string{
		{"x/in\npodSelector: {}\ningress:\n- from: [{podSelector: {matchLabels: {app: c}}}]"},
		{"x/port\npodSelector: {}\ningress:\n- ports: [{port: 8080}]"},
		{"x/range\npodSelector: {}\ningress:\n- ports: [{port: 8081, endPort: 8090, protocol: UDP}]"},
		{"x/out\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{podSelector: {matchLabels: {app: a}}}]\n  ports: [{port: 8080}]"},
		{"x/out-block\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{ipBlock: {cidr: " + b[0].String() + "/32}}, {ipBlock: {cidr: '" + b[1].String() + "/128'}}]"},
		// The services' own addresses in a block allow nothing.
		{"x/vip-block\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [" + strings.Join(blocks, ", ") + "]"},
	} {
		w.apply(docs...)
		w.throughServices(vips)
		w.check()
		w.clear()
	}
}

// P7: what comes by a NodePort is judged by the client's own address, whichever
// node it enters by, and wherever the backend is: never by the node's.
func (w *world) clients() {
	ext, other := w.addrs("ext"), w.addrs("node-a")
	nodePorts := map[string]uint16{"x/a": 30080, "x/b": 30081}
	for key, port := range nodePorts {
		w.putService(key)
		w.must(cluster.Edit(w.c.Manifests, w.pods[key].Namespace, "svc-"+w.pods[key].Name, func(svc *corev1.Service) {
			svc.Spec.Type = corev1.ServiceTypeNodePort
			svc.Spec.Ports = slices.DeleteFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port != 80 })
			for i := range svc.Spec.Ports {
				svc.Spec.Ports[i].NodePort = int32(port)
			}
		}))
	}
	var probes []mesh.Probe
	var to []string
	for key, port := range nodePorts {
		for _, node := range []string{"node-a", "node-b"} {
			for _, addr := range w.addrs(node) {
				for _, proto := range []string{"tcp", "udp"} {
					probes = append(probes, mesh.Probe{From: w.c.Ext, Proto: proto, To: netip.AddrPortFrom(addr, port)})
					to = append(to, key)
				}
			}
		}
	}
	try := func(doc string, allowed bool, limit time.Duration) error {
		for i, res := range w.probeFor(limit, probes) {
			want := mesh.Silent
			if allowed {
				want = mesh.Answered
			}
			if res.Outcome != want || allowed && (res.Server != to[i] || !slices.Contains(ext, res.Peer)) {
				return fmt.Errorf("%q: %v for %s: %s by %q, which saw %v, %v; want %s", doc, probes[i], to[i], res.Outcome, res.Server, res.Peer, res.Err, want)
			}
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	w.must(cluster.Eventually(ctx, func() error { return try("", true, time.Second) }))
	for _, c := range []struct {
		from    string
		allowed bool
	}{
		{just(ext), true}, {allBut(ext), false}, {just(other), false}, {allBut(other), true},
		{"[{namespaceSelector: {}}]", false},
		{"[{ipBlock: {cidr: 172.31.0.0/24}}, {ipBlock: {cidr: 'fd00:172:31::/64'}}]", true},
	} {
		doc := "x/clients\npodSelector: {}\ningress:\n- from: " + c.from + "\n  ports: [{port: 8080}, {port: 8080, protocol: UDP}]"
		w.apply(doc)
		if err := try(doc, c.allowed, 10*time.Second); err != nil {
			w.Error(err)
		}
		w.clear()
	}
}

// P17: both addresses of a pod are one and the same to policy.
func (w *world) families() {
	w.apply("x/mixed\npodSelector: {}\ningress:\n- from: [{podSelector: {matchLabels: {tier: front}}}]\n  ports: [{port: 8080}]\n- from: [{namespaceSelector: {matchLabels: {team: blue}}}]",
		"v/out\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{podSelector: {}}]")
	w.check()
	for key, p := range w.pods {
		a := w.addrs(key)
		for node, set := range w.sets {
			if node == p.Spec.NodeName {
				var e [2]struct{ id, in, out, identity uint32 }
				for i := range e {
					got, ok, err := set.Endpoints.Get(pwmaps.ToAddr(a[i]))
					w.must(err)
					if !ok {
						w.Fatalf("%s lacks the endpoint of %s %v", node, key, a[i])
					}
					e[i] = struct{ id, in, out, identity uint32 }{got.Id, got.PolicyIn, got.PolicyOut, got.Identity}
				}
				if e[0] != e[1] {
					w.Errorf("%s on its node: IPv4 %+v, IPv6 %+v", key, e[0], e[1])
				}
				continue
			}
			four, ok4, err := set.Addrs.Get(pwmaps.ToAddr(a[0]))
			w.must(err)
			six, ok6, err := set.Addrs.Get(pwmaps.ToAddr(a[1]))
			w.must(err)
			if !ok4 || !ok6 || four.Identity != six.Identity {
				w.Errorf("%s as %s sees it: IPv4 %+v %v, IPv6 %+v %v", key, node, four, ok4, six, ok6)
			}
		}
	}
}
