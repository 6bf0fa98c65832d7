package tunnel

import (
	"fmt"
	gomaps "maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
)

// pod makes a Pod in namespace default; strings are its addresses.
func pod(name, node string, parts ...any) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{NodeName: node},
	}
	for _, part := range parts {
		switch part := part.(type) {
		case string:
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: part})
		case corev1.PodPhase:
			p.Status.Phase = part
		case func(*metav1.ObjectMeta):
			part(&p.ObjectMeta)
		case func(*corev1.Pod):
			part(p)
		default:
			panic(fmt.Sprintf("part %T", part))
		}
	}
	return p
}

func describePeer(p Peer) string {
	var words []string
	for _, f := range []struct {
		bit  uint32
		name string
	}{{maps.PeerPod, "pod"}, {maps.PeerNode, "node"}, {maps.PeerHost, "host"}, {maps.PeerService, "service"}, {maps.PeerLocal, "local"}} {
		if p.Flags&f.bit != 0 {
			words = append(words, f.name)
		}
	}
	if p.Flags == 0 {
		words = append(words, "world")
	}
	if p.Node != "" {
		words = append(words, "->"+p.Node)
	}
	if p.Pod.Name != "" {
		words = append(words, p.Pod.String())
	}
	if p.UID != "" {
		words = append(words, string(p.UID))
	}
	return strings.Join(words, " ")
}

func describeOutput(o Output) (addrs, prefixes, routes []string) {
	for a, p := range o.Addrs {
		addrs = append(addrs, fmt.Sprintf("%s %s", a, describePeer(p)))
	}
	for a, p := range o.Prefixes {
		prefixes = append(prefixes, fmt.Sprintf("%s %s", a, describePeer(p)))
	}
	for _, r := range o.Routes {
		routes = append(routes, fmt.Sprintf("%s %s", r.Dst, r.Kind))
	}
	slices.Sort(addrs)
	slices.Sort(prefixes)
	return addrs, prefixes, routes
}

func mustNodes(t *testing.T, nodes ...*corev1.Node) []NodeInfo {
	t.Helper()
	out, errs := Nodes(nodes)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	return out
}

// The fixed plan: two nodes, a client and a local pod on a, one pod on b.
func TestCompilePlan(t *testing.T) {
	in := Input{
		Self:  "a",
		Nodes: mustNodes(t, nodeA(), nodeB()),
		Pods: []*corev1.Pod{
			pod("client", "a", "10.244.80.65", "fd00:10:244:50::65"),
			pod("local", "a", "10.244.80.66"),
			pod("remote", "b", "10.244.158.65", "fd00:10:244:9e::65"),
		},
		HostAddrs:    []netip.Addr{addr("172.31.0.2"), addr("127.0.0.1"), addr("::1"), addr("fe80::2%eth0")},
		ServiceCIDRs: []netip.Prefix{pfx("10.98.0.0/16"), pfx("fd00:10:98::/112")},
		Local: map[netip.Addr]types.NamespacedName{
			addr("10.244.80.65"):       {Namespace: "default", Name: "client"},
			addr("fd00:10:244:50::65"): {Namespace: "default", Name: "client"},
		},
	}
	addrs, prefixes, routes := describeOutput(Compile(in))
	if d := cmp.Diff([]string{
		"10.244.158.65 pod ->b default/remote uid-remote",
		"10.244.80.65 pod local default/client uid-client",
		"172.31.0.2 host",
		"172.31.0.3 node ->b",
		"fd00:10:244:50::65 pod local default/client uid-client",
		"fd00:10:244:9e::65 pod ->b default/remote uid-remote",
	}, addrs); d != "" {
		t.Errorf("addresses (-want +got)\n%s", d)
	}
	if d := cmp.Diff([]string{
		"10.244.158.0/24 pod ->b",
		"10.244.80.0/24 pod local",
		"10.98.0.0/16 service",
		"::/0 world",
		"fd00:10:244:50::/64 pod local",
		"fd00:10:244:9e::/64 pod ->b",
		"fd00:10:98::/112 service",
	}, prefixes); d != "" {
		t.Errorf("prefixes (-want +got)\n%s", d)
	}
	if d := cmp.Diff([]string{
		"10.98.0.0/16 overlay",
		"10.244.80.0/24 blackhole",
		"10.244.158.0/24 overlay",
		"fd00:10:98::/112 overlay",
		"fd00:10:244:50::/64 blackhole",
		"fd00:10:244:9e::/64 overlay",
	}, routes); d != "" {
		t.Errorf("routes (-want +got)\n%s", d)
	}
}

func TestCompileAddrs(t *testing.T) {
	hostNet := func(p *corev1.Pod) { p.Spec.HostNetwork = true }
	uid := func(u string) func(*metav1.ObjectMeta) { return func(m *metav1.ObjectMeta) { m.UID = types.UID(u) } }
	tests := []struct {
		name  string
		self  string
		nodes []*corev1.Node
		pods  []*corev1.Pod
		host  []string
		local map[string]string
		want  []string
		errs  []string
	}{
		{
			name: "pods with the host's network, completed ones and those without an address have none",
			pods: []*corev1.Pod{
				pod("hostnet", "b", "172.31.0.3", hostNet),
				pod("done", "b", "10.244.158.70", corev1.PodSucceeded),
				pod("failed", "b", "10.244.158.71", corev1.PodFailed),
				pod("pending", "b", corev1.PodPending),
				pod("starting", "b", "10.244.158.72", corev1.PodPending),
			},
			want: []string{"10.244.158.72 pod ->b default/starting uid-starting", "172.31.0.3 node ->b"},
		},
		{
			name: "an address twice in one status",
			pods: []*corev1.Pod{pod("p", "b", "10.244.158.70", "10.244.158.70")},
			want: []string{"10.244.158.70 pod ->b default/p uid-p", "172.31.0.3 node ->b"},
		},
		{
			name: "podIP alone",
			pods: []*corev1.Pod{pod("p", "b", func(p *corev1.Pod) { p.Status.PodIP = "10.244.158.70" })},
			want: []string{"10.244.158.70 pod ->b default/p uid-p", "172.31.0.3 node ->b"},
		},
		{
			name: "a bad address does not take the good one along",
			pods: []*corev1.Pod{pod("p", "b", "10.244.158", "127.0.0.1", "fd00:10:244:9e::70")},
			want: []string{"172.31.0.3 node ->b", "fd00:10:244:9e::70 pod ->b default/p uid-p"},
			errs: []string{`Pod default/p: status.podIPs: "10.244.158" is no IP address`, "127.0.0.1 is unspecified, loopback"},
		},
		{
			name: "pods on unknown nodes are pods that cannot be reached",
			pods: []*corev1.Pod{
				pod("p2", "c", "10.244.90.2"), pod("p1", "c", "10.244.90.1"), pod("p3", "", "10.244.90.3"),
				pod("quiet", "c"),
			},
			want: []string{
				"10.244.90.1 pod default/p1 uid-p1", "10.244.90.2 pod default/p2 uid-p2",
				"10.244.90.3 pod default/p3 uid-p3", "172.31.0.3 node ->b",
			},
			errs: []string{"Pod default/p1 and 1 more: on Node c, which is not among", "Pod default/p3: spec.nodeName is empty"},
		},
		{
			name:  "pods on a node without an address cannot be reached",
			nodes: []*corev1.Node{nodeA(), node("b", "10.244.158.0/24")},
			pods:  []*corev1.Pod{pod("p", "b", "10.244.158.70")},
			want:  []string{"10.244.158.70 pod default/p uid-p"},
		},
		{
			name:  "all addresses of another node lead through the tunnel",
			nodes: []*corev1.Node{nodeA(), node("b", "172.31.0.3", "172.31.1.3", "fd00::3")},
			want:  []string{"172.31.0.3 node ->b", "172.31.1.3 node ->b", "fd00::3 node ->b"},
		},
		{
			name:  "local pods by what the CNI made, not by their status",
			pods:  []*corev1.Pod{pod("client", "a", "10.244.80.99"), pod("other", "a", "10.244.80.98")},
			local: map[string]string{"10.244.80.65": "client", "10.244.80.67": "early"},
			want: []string{
				"10.244.80.65 pod local default/client uid-client", "10.244.80.67 pod local default/early",
				"172.31.0.3 node ->b",
			},
		},
		{
			name:  "a remote claim of a local pod's address",
			pods:  []*corev1.Pod{pod("thief", "b", "10.244.80.65", created(99))},
			local: map[string]string{"10.244.80.65": "client"},
			want:  []string{"10.244.80.65 pod local default/client", "172.31.0.3 node ->b"},
			errs:  []string{"Pod default/thief: its address 10.244.80.65 is that of Pod default/client of this node"},
		},
		{
			name: "two pods with one address: the newer",
			pods: []*corev1.Pod{
				pod("new", "b", "10.244.158.70", created(20)), pod("old", "b", "10.244.158.70", "10.244.158.71", created(10)),
			},
			want: []string{
				"10.244.158.70 pod ->b default/new uid-new", "10.244.158.71 pod ->b default/old uid-old", "172.31.0.3 node ->b",
			},
			errs: []string{"Pod default/old: its address 10.244.158.70 is that of Pod default/new"},
		},
		{
			name: "two pods with one address and age: the greater UID",
			pods: []*corev1.Pod{
				pod("p1", "b", "10.244.158.70", uid("1")), pod("p2", "b", "10.244.158.70", uid("2")),
			},
			want: []string{"10.244.158.70 pod ->b default/p2 2", "172.31.0.3 node ->b"},
			errs: []string{"Pod default/p1: its address 10.244.158.70 is that of Pod default/p2"},
		},
		{
			name: "a completed pod's address passes on without an error",
			pods: []*corev1.Pod{
				pod("done", "b", "10.244.158.70", corev1.PodSucceeded, created(20)), pod("next", "b", "10.244.158.70", created(10)),
			},
			want: []string{"10.244.158.70 pod ->b default/next uid-next", "172.31.0.3 node ->b"},
		},
		{
			name:  "the host keeps its addresses",
			host:  []string{"172.31.0.2", "10.244.158.70", "172.31.0.3", "169.254.20.10", "::ffff:192.0.2.1"},
			pods:  []*corev1.Pod{pod("p", "b", "10.244.158.70")},
			local: map[string]string{"172.31.0.2": "client"},
			want:  []string{"10.244.158.70 host", "169.254.20.10 host", "172.31.0.2 host", "172.31.0.3 host", "192.0.2.1 host"},
			errs: []string{
				"Pod default/client: its address 172.31.0.2 is also on a device of this node",
				"Node b: its InternalIP 172.31.0.3 is an address of this node's devices",
				"Pod default/p: its address 10.244.158.70 is an address of this node's devices",
			},
		},
		{
			name: "a pod with a node's address",
			pods: []*corev1.Pod{pod("p", "b", "172.31.0.3")},
			want: []string{"172.31.0.3 node ->b"},
			errs: []string{"Pod default/p: its address 172.31.0.3 is an address of Node b"},
		},
		{
			name:  "this node is not in the list",
			nodes: []*corev1.Node{nodeB()},
			pods:  []*corev1.Pod{pod("remote", "b", "10.244.158.65"), pod("client", "a", "10.244.80.65")},
			local: map[string]string{"10.244.80.65": "client"},
			host:  []string{"172.31.0.2"},
			want: []string{
				"10.244.158.65 pod ->b default/remote uid-remote", "10.244.80.65 pod local default/client uid-client",
				"172.31.0.2 host", "172.31.0.3 node ->b",
			},
			errs: []string{"Node a: is this node and not among the Node objects"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.nodes == nil {
				tt.nodes = []*corev1.Node{nodeA(), nodeB()}
			}
			nodes, _ := Nodes(tt.nodes)
			in := Input{Self: "a", Nodes: nodes, Pods: tt.pods, Local: map[netip.Addr]types.NamespacedName{}}
			for _, a := range tt.host {
				in.HostAddrs = append(in.HostAddrs, addr(a))
			}
			for a, name := range tt.local {
				in.Local[addr(a)] = types.NamespacedName{Namespace: "default", Name: name}
			}
			out := Compile(in)
			got, _, _ := describeOutput(out)
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
			checkErrs(t, out.Errs, tt.errs)
		})
	}
}

func TestCompileRanges(t *testing.T) {
	tests := []struct {
		name     string
		nodes    []*corev1.Node
		services []string
		want     []string // prefixes other than ::/0
		routes   []string
		errs     []string
	}{
		{
			name:   "nodes without pod CIDRs",
			nodes:  []*corev1.Node{node("a", "172.31.0.2"), node("b", "172.31.0.3")},
			want:   nil,
			routes: nil,
		},
		{
			name:   "the range of a node without an address is routed, to be dropped there and counted",
			nodes:  []*corev1.Node{nodeA(), node("b", "10.244.158.0/24")},
			want:   []string{"10.244.158.0/24 pod", "10.244.80.0/24 pod local", "fd00:10:244:50::/64 pod local"},
			routes: []string{"10.244.80.0/24 blackhole", "10.244.158.0/24 overlay", "fd00:10:244:50::/64 blackhole"},
		},
		{
			name:   "a range two nodes claim is there once",
			nodes:  []*corev1.Node{node("a", "172.31.0.2", "10.244.80.0/24"), node("b", "172.31.0.3", "10.244.80.0/25")},
			want:   []string{"10.244.80.0/24 pod local"},
			routes: []string{"10.244.80.0/24 blackhole"},
		},
		{
			name:     "service ranges: masked, each once, nested ones kept",
			nodes:    []*corev1.Node{node("a", "172.31.0.2")},
			services: []string{"10.98.3.4/16", "10.98.0.0/16", "10.98.8.0/24"},
			want:     []string{"10.98.0.0/16 service", "10.98.8.0/24 service"},
			routes:   []string{"10.98.0.0/16 overlay", "10.98.8.0/24 overlay"},
		},
		{
			name:     "service ranges that overlap pod CIDRs",
			nodes:    []*corev1.Node{node("a", "172.31.0.2", "10.244.80.0/24"), node("b", "172.31.0.3", "10.244.158.0/24")},
			services: []string{"10.244.80.0/24", "10.244.158.128/25", "10.0.0.0/8", "0.0.0.0/0", "10.98.0.0/16"},
			want:     []string{"10.244.158.0/24 pod ->b", "10.244.80.0/24 pod local", "10.98.0.0/16 service"},
			routes:   []string{"10.98.0.0/16 overlay", "10.244.80.0/24 blackhole", "10.244.158.0/24 overlay"},
			errs: []string{
				"service range 10.244.80.0/24: overlaps the pod CIDR 10.244.80.0/24 of Node a",
				"service range 10.244.158.128/25: overlaps the pod CIDR 10.244.158.0/24 of Node b",
				"service range 10.0.0.0/8: overlaps",
				"service range 0.0.0.0/0: is no range for services",
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			nodes, _ := Nodes(tt.nodes)
			in := Input{Self: "a", Nodes: nodes}
			for _, s := range tt.services {
				in.ServiceCIDRs = append(in.ServiceCIDRs, pfx(s))
			}
			out := Compile(in)
			_, got, routes := describeOutput(out)
			got = slices.DeleteFunc(got, func(s string) bool { return s == "::/0 world" })
			if len(got) == 0 {
				got = nil
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("prefixes (-want +got)\n%s", d)
			}
			if d := cmp.Diff(tt.routes, routes); d != "" {
				t.Errorf("routes (-want +got)\n%s", d)
			}
			checkErrs(t, out.Errs, tt.errs)
		})
	}
}

// A node that changes its address: the same peers, by name; only the node's
// own address and what derives from it differ.
func TestNodeAddressChange(t *testing.T) {
	pods := []*corev1.Pod{pod("remote", "b", "10.244.158.65")}
	before := Compile(Input{Self: "a", Nodes: mustNodes(t, nodeA(), nodeB()), Pods: pods})
	moved := nodeB()
	moved.Status.Addresses[0].Address = "172.31.0.33"
	nodes := mustNodes(t, nodeA(), moved)
	after := Compile(Input{Self: "a", Nodes: nodes, Pods: pods})

	if nodes[1].Addr != addr("172.31.0.33") || nodes[1].MAC.String() == MAC(addr("172.31.0.3")).String() {
		t.Errorf("tunnel end %s %s", nodes[1].Addr, nodes[1].MAC)
	}
	if _, ok := after.Addrs[addr("172.31.0.3")]; ok {
		t.Error("the old address is still a node's")
	}
	if p := after.Addrs[addr("172.31.0.33")]; p.Node != "b" || p.Flags != maps.PeerNode|maps.PeerNodePort {
		t.Errorf("the new address is %+v", p)
	}
	if a := addr("10.244.158.65"); before.Addrs[a] != after.Addrs[a] {
		t.Errorf("the pod changed from %+v to %+v", before.Addrs[a], after.Addrs[a])
	}
	if d := cmp.Diff(before.Routes, after.Routes, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Errorf("routes (-before +after)\n%s", d)
	}
}

// Ranges that are not masqueraded: nodes in them, too; pods and services stay
// what they are, and nothing else changes.
func TestPlainRanges(t *testing.T) {
	in := Input{
		Self: "a", Nodes: mustNodes(t, nodeA(), nodeB()), HostAddrs: []netip.Addr{addr("172.31.0.2")},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.98.0.0/16")},
	}
	without := Compile(in)
	in.Plain = []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.31.0.3/32"), netip.MustParsePrefix("10.244.80.0/28"), netip.MustParsePrefix("10.98.0.0/16"), netip.MustParsePrefix("10.98.7.0/24"), netip.MustParsePrefix("2001:db8::/32"),
	}
	c := NewCompiler()
	c.Compile(Changes{Rest: &Input{Self: in.Self, Nodes: in.Nodes, HostAddrs: in.HostAddrs, ServiceCIDRs: in.ServiceCIDRs}})
	with := c.Compile(Changes{Rest: &in})
	if !with.Delta.Prefixes || !slices.Equal(with.Delta.Addrs, []netip.Addr{addr("172.31.0.3")}) {
		t.Errorf("the change is %+v", with.Delta)
	}
	want := gomaps.Clone(without.Prefixes)
	want[netip.MustParsePrefix("10.0.0.0/8")], want[netip.MustParsePrefix("172.31.0.3/32")], want[netip.MustParsePrefix("2001:db8::/32")] =
		Peer{Flags: maps.PeerPlain}, Peer{Flags: maps.PeerPlain}, Peer{Flags: maps.PeerPlain}
	if !gomaps.Equal(with.Prefixes, want) {
		t.Errorf("prefixes %v", with.Prefixes)
	}
	if p := with.Addrs[addr("172.31.0.3")]; p.Flags&^maps.PeerPlain != without.Addrs[addr("172.31.0.3")].Flags || p.Flags&maps.PeerPlain == 0 {
		t.Errorf("the node in the range is %+v", p)
	}
	if p := with.Addrs[addr("172.31.0.2")]; p != without.Addrs[addr("172.31.0.2")] {
		t.Errorf("the node outside is %+v", p)
	}
}

// N6: whatever comes first, the end is the same.
func TestOrderDoesNotMatter(t *testing.T) {
	nodes := []*corev1.Node{
		nodeA(), nodeB(), node("c", "172.31.0.3", "10.244.80.0/25", created(5)), node("d"), node("e", "x", "10.244.0.0/16"),
	}
	pods := []*corev1.Pod{
		pod("p1", "b", "10.244.158.70"), pod("p2", "b", "10.244.158.70"), pod("p3", "z", "10.244.158.71"),
		pod("p4", "y", "10.244.158.72"), pod("p5", "b", "bad"), pod("p6", "b", "172.31.0.3"), pod("p7", "z", "10.244.158.73"),
	}
	compile := func() string {
		infos, errs := Nodes(nodes)
		out := Compile(Input{
			Self: "a", Nodes: infos, Pods: pods, ServiceCIDRs: []netip.Prefix{pfx("10.244.80.0/30")},
			HostAddrs: []netip.Addr{addr("10.0.0.1"), addr("10.0.0.2")},
			Local: map[netip.Addr]types.NamespacedName{
				addr("10.0.0.1"): {Namespace: "default", Name: "l1"}, addr("10.0.0.2"): {Namespace: "default", Name: "l2"},
			},
		})
		addrs, prefixes, routes := describeOutput(out)
		return strings.Join(slices.Concat(addrs, prefixes, routes), "\n") + fmt.Sprint(errs, out.Errs)
	}
	want := compile()
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		r.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		r.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
		if d := cmp.Diff(want, compile()); d != "" {
			t.Fatalf("(-want +got)\n%s", d)
		}
	}
}

func BenchmarkCompile100000Pods(b *testing.B) {
	var pods []*corev1.Pod
	for i := range 100000 {
		p := pod(fmt.Sprint("p", i), "b", fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255))
		pods = append(pods, p)
	}
	nodes, _ := Nodes([]*corev1.Node{nodeA(), node("b", "172.31.0.3", "10.0.0.0/15")})
	for b.Loop() {
		if out := Compile(Input{Self: "a", Nodes: nodes, Pods: pods}); len(out.Addrs) < 100000 {
			b.Fatal(out.Errs)
		}
	}
}
