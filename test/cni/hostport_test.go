package cni

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	pwmaps "github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

const (
	nodeA4, nodeA6 = "172.31.0.2", "fd00:172:31::2"
	second4        = "172.31.0.22" // an address that node-a gets later
)

// both maps a host port in both protocols.
func both(hostIP string, hostPort int) []cluster.PortMapping {
	return []cluster.PortMapping{
		{HostPort: hostPort, ContainerPort: port, Protocol: "tcp", HostIP: hostIP},
		{HostPort: hostPort, ContainerPort: port, Protocol: "udp", HostIP: hostIP},
	}
}

// call is who asks which address for a host port, and what has to come of it.
type call struct {
	from *cluster.Netns
	to   string
	want string     // who answers; empty = refused
	peer netip.Addr // whom the pod sees; the zero Addr = not looked at
}

// attempt makes every call once, in both protocols.
func attempt(ctx context.Context, list []call) error {
	var probes []mesh.Probe
	var want []call
	for _, c := range list {
		for _, proto := range []string{"tcp", "udp"} {
			probes = append(probes, mesh.Probe{From: c.from, Proto: proto, To: netip.MustParseAddrPort(c.to)})
			want = append(want, c)
		}
	}
	got, err := mesh.Run(ctx, probes, nil)
	if err != nil {
		return err
	}
	var errs []error
	for i, r := range got {
		outcome := mesh.Answered
		if want[i].want == "" {
			outcome = mesh.Refused
		}
		if r.Outcome != outcome || r.Server != want[i].want {
			errs = append(errs, fmt.Errorf("%v: %s by %q, want %s by %q (%v)", probes[i], r.Outcome, r.Server, outcome, want[i].want, r.Err))
		} else if p := want[i].peer; p.IsValid() && r.Peer != p {
			errs = append(errs, fmt.Errorf("%v: the pod saw %v, want %v", probes[i], r.Peer, p))
		}
	}
	return errors.Join(errs...)
}

// calls takes no second try.
func (w *world) calls(when string, list []call) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
	defer cancel()
	if err := attempt(ctx, list); err != nil {
		w.Errorf("%s: %v", when, err)
	}
}

// await tries until all is as it should be, for what the agent hears of by
// itself.
func (w *world) await(when string, list []call) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	if err := cluster.Eventually(ctx, func() error {
		once, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return attempt(once, list)
	}); err != nil {
		w.Fatalf("%s: %v", when, err)
	}
}

// frontends is how many ports the services and pods of a node have.
func (w *world) frontends(n *cluster.Node) []string {
	w.Helper()
	all, err := w.sets[n.NodeName].Services.Dump()
	w.must(err)
	var out []string
	for k := range maps.Keys(all) {
		out = append(out, pwmaps.KeyString(k))
	}
	slices.Sort(out)
	return out
}

// A port of the node leads to the pod that asked for it, for everybody, from
// ADD to DEL, whether the agent runs or not.
func (w *world) hostPorts() {
	a, b := w.c.Node("node-a"), w.c.Node("node-b")
	before, none := w.traces(a), w.frontends(a)
	near, err := w.add(object("near", "node-a"))
	w.must(err)
	far, err := w.add(object("far", "node-b"))
	w.must(err)
	ports := slices.Concat(both("", 8888), both(nodeA4, 9999), both("::", 9996))
	web, err := w.add(object("web", "node-a"), ports...)
	w.must(err)
	w.must(web.Check(w.ctx))

	nodeB := map[bool]netip.Addr{true: b.Config.Addrs[0].Addr(), false: b.Config.Addrs[1].Addr()}
	all := func(at string, want string) []call {
		v4 := !strings.HasPrefix(at, "[")
		own, of := netip.MustParseAddrPort(at).Addr(), func(p *cluster.Pod) netip.Addr {
			if v4 {
				return p.IPv4()
			}
			return p.IPv6()
		}
		ext := netip.MustParseAddr("172.31.0.1")
		if !v4 {
			ext = netip.MustParseAddr("fd00:172:31::1")
		}
		node := a.Config.Addrs[0].Addr()
		if !v4 {
			node = a.Config.Addrs[1].Addr()
		}
		return []call{
			{w.c.Ext, at, want, ext},
			{a.Netns, at, want, own},
			{b.Netns, at, want, nodeB[v4]},
			{near.Netns, at, want, of(near)},
			{far.Netns, at, want, nodeB[v4]},
			{web.Netns, at, want, node},
		}
	}
	at4, at6 := fmt.Sprintf("%s:8888", nodeA4), fmt.Sprintf("[%s]:8888", nodeA6)
	whole := slices.Concat(all(at4, "web"), all(at6, "web"), all(nodeA4+":9999", "web"), []call{
		{w.c.Ext, fmt.Sprintf("[%s]:9999", nodeA6), "", netip.Addr{}}, // of IPv4 alone
		{w.c.Ext, nodeA4 + ":9996", "", netip.Addr{}},                 // of IPv6 alone
		{w.c.Ext, fmt.Sprintf("[%s]:9996", nodeA6), "web", netip.Addr{}},
		{w.c.Ext, "172.31.0.3:8888", "", netip.Addr{}}, // another node's
	})
	w.calls("after ADD", whole)

	// A port is one pod's; the other one harms nothing.
	rival := object("rival", "node-a")
	w.must(w.c.Manifests.Put(rival))
	for _, ports := range [][]cluster.PortMapping{both("", 8888), both(nodeA4, 8888), both("0.0.0.0", 9999)} {
		p, err := w.c.AddPod(w.ctx, rival, ports...)
		if err == nil || !strings.Contains(err.Error(), "default/web") {
			w.Errorf("ADD with %v: %v, want an error that names default/web", ports, err)
		}
		if p == nil {
			p = w.c.Pod("default", "rival")
		}
		w.must(p.Delete(w.ctx))
	}
	// Neither is one for another address of the node in the way.
	second, err := w.add(rival, both(second4, 9999)...)
	w.must(err)
	_, err = a.Exec(w.ctx, "ip", "addr", "add", second4+"/24", "dev", "eth0")
	w.must(err)
	w.await("a new address of the node", []call{
		{w.c.Ext, second4 + ":9999", "rival", netip.Addr{}}, {w.c.Ext, second4 + ":8888", "web", netip.Addr{}},
	})
	_, err = a.Exec(w.ctx, "ip", "addr", "del", second4+"/24", "dev", "eth0")
	w.must(err)
	w.remove(second)
	w.calls("after the rival", whole)

	w.hostPortPolicy(near, at4)

	// The agent's death and return make no difference.
	w.must(a.KillAgent(w.ctx))
	w.calls("without the agent", whole)
	w.must(a.StartAgent(w.ctx))
	w.calls("after the restart", whole)
	w.must(web.Check(w.ctx))
	web.PortMappings = ports[:2]
	if err := web.Check(w.ctx); err == nil || !strings.Contains(err.Error(), "port mappings") {
		w.Errorf("CHECK with other port mappings: %v", err)
	}

	w.remove(web)
	w.calls("after DEL", []call{
		{w.c.Ext, at4, "", netip.Addr{}}, {w.c.Ext, at6, "", netip.Addr{}}, {w.c.Ext, nodeA4 + ":9999", "", netip.Addr{}},
		{a.Netns, at4, "", netip.Addr{}}, {a.Netns, at6, "", netip.Addr{}},
		{b.Netns, at4, "", netip.Addr{}}, {near.Netns, at4, "", netip.Addr{}}, {near.Netns, at6, "", netip.Addr{}},
	})
	if got := w.frontends(a); !slices.Equal(got, none) {
		w.Errorf("frontends after DEL: %v, before ADD %v", got, none)
	}
	w.remove(near)
	w.remove(far)
	w.baseline(a, before)
}

// The pod's ingress policy judges what comes by a host port by the client's own
// address and the pod's port.
func (w *world) hostPortPolicy(near *cluster.Pod, at string) {
	w.Helper()
	policy := &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "outside-only"},
		Spec: networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{
				From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "172.31.0.1/32"}}},
				Ports: []networkingv1.NetworkPolicyPort{
					{Protocol: new(corev1.ProtocolTCP), Port: new(intstr.FromInt32(port))},
					{Protocol: new(corev1.ProtocolUDP), Port: new(intstr.FromInt32(port))},
				},
			}},
		},
	}
	expect := func(when, want string) {
		w.Helper()
		ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
		defer cancel()
		w.must(cluster.Eventually(ctx, func() error {
			var probes []mesh.Probe
			for _, from := range []*cluster.Netns{w.c.Ext, near.Netns} {
				for _, proto := range []string{"tcp", "udp"} {
					probes = append(probes, mesh.Probe{From: from, Proto: proto, To: netip.MustParseAddrPort(at)})
				}
			}
			r, err := mesh.Run(ctx, probes, mesh.Dropped(w.sets))
			if err != nil {
				return err
			}
			got := fmt.Sprint(r[0].Outcome, r[1].Outcome, r[2].Outcome, r[3].Outcome)
			if got != fmt.Sprint(mesh.Answered, mesh.Answered, want, want) {
				return fmt.Errorf("%s: %+v", when, r)
			}
			return nil
		}))
	}
	w.must(w.c.Manifests.Put(policy))
	expect("with a policy", mesh.Silent)
	w.must(w.c.Manifests.Delete(policy))
	expect("without it", mesh.Answered)
}

// What ran to a port before it was a pod's, or was another's, goes to the pod
// that has it now, UDP over the very tuple.
func (w *world) hostPortReused() {
	a, b := w.c.Node("node-a"), w.c.Node("node-b")
	near, err := w.add(object("near", "node-a"))
	w.must(err)
	far, err := w.add(object("far", "node-b"))
	w.must(err)
	callers := []*cluster.Netns{w.c.Ext, a.Netns, b.Netns, near.Netns, far.Netns}
	ask := func(when, want string) {
		w.Helper()
		for _, from := range callers {
			for _, at := range []string{nodeA4 + ":8887", fmt.Sprintf("[%s]:8887", nodeA6)} {
				for _, proto := range []string{"tcp", "udp"} {
					timeout := "5s"
					if want == "" {
						timeout = "200ms"
					}
					s, err := from.Send(w.ctx, at, "-proto", proto, "-sport", "41000", "-timeout", timeout)
					w.must(err)
					got := ""
					if s.First != nil {
						got = s.First.Reply.Server
					}
					if got != want {
						w.Errorf("%s: %s %s from %s: answered by %q, want %q (%+v)", when, proto, at, from.Name, got, want, s.Failure)
					}
				}
			}
		}
	}
	ask("before", "")
	for _, name := range []string{"first", "second"} {
		obj := object(name, "node-a")
		w.must(w.c.Manifests.Put(obj))
		p, err := w.c.AddPod(w.ctx, obj, both("", 8887)...)
		w.must(err)
		_, err = p.Serve(w.ctx, name, port)
		w.must(err)
		ask("after ADD", name)
		w.remove(p)
	}
	ask("after", "")
	w.remove(near)
	w.remove(far)
}

// The port of an address goes before the port of all: the host port has it on
// its node, the NodePort on the others, and there too when the pod is gone.
func (w *world) hostPortAndNodePort() {
	const number = 30088
	far, err := w.add(object("far", "node-b"))
	w.must(err)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "everywhere"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: "10.98.22.1", ClusterIPs: []string{"10.98.22.1"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
		},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "everywhere-1", Labels: map[string]string{discoveryv1.LabelServiceName: "everywhere"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{far.IPv4().String()}}},
	}
	for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		name := strings.ToLower(string(proto))
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: name, Protocol: proto, Port: 80, NodePort: number})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: new(name), Protocol: new(proto), Port: new(int32(port))})
	}
	w.must(w.c.Manifests.Put(svc, slice))
	at := func(onA, onB string) (list []call) {
		for _, from := range []*cluster.Netns{w.c.Ext, w.c.Node("node-a").Netns, far.Netns} {
			list = append(list, call{from: from, to: fmt.Sprintf("%s:%d", nodeA4, number), want: onA})
		}
		return append(list, call{from: w.c.Ext, to: fmt.Sprintf("172.31.0.3:%d", number), want: onB})
	}
	w.await("the NodePort alone", at("far", "far"))
	web, err := w.add(object("web", "node-a"), both("", number)...)
	w.must(err)
	byPod := at("web", "far")
	byPod[2].want = "far" // the pod's own node translates NodePorts, and knows no host ports of others
	w.calls("with the pod", byPod)
	w.remove(web)
	w.calls("without the pod", at("far", "far"))
	w.must(w.c.Manifests.Delete(svc, slice))
	w.remove(far)
}
