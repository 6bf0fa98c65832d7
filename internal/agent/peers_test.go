package agent

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/tunnel"
)

// peerBench is node-a's view of a small cluster, compiled by the real
// packages and applied to maps in memory.
type peerBench struct {
	*memStores
	*clock
	t         *testing.T
	p         *peers
	tunnels   *tunnel.Compiler
	policing  *policy.Compiler
	known     []types.NamespacedName // pods that the compilers were told of
	nodes     []*corev1.Node
	pods      []*corev1.Pod
	policies  []*networkingv1.NetworkPolicy
	endpoints map[string]endpoint.Endpoint // by pod name
	last      peerInput

	clusterPolicies []*v1beta1.ClusterNetworkPolicy

	copied        []*networkingv1.NetworkPolicy // what the compilers have of them
	clusterCopied []*v1beta1.ClusterNetworkPolicy
}

func newPeerBench(t *testing.T) *peerBench {
	b := &peerBench{memStores: newMemStores(), clock: newClock(), t: t, endpoints: make(map[string]endpoint.Endpoint)}
	b.nodes = []*corev1.Node{
		testNode("node-a", "172.31.0.2", "10.244.80.0/24"),
		testNode("node-b", "172.31.0.3", "10.244.158.0/24"),
	}
	b.addLocal("client", "10.244.80.65")
	b.addLocal("local", "10.244.80.66")
	b.pods = append(b.pods, testPod("remote", "node-b", "10.244.158.65", nil))
	b.restart()
	return b
}

func testNode(name, addr, cidr string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.NodeSpec{PodCIDR: cidr, PodCIDRs: []string{cidr}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr}}},
	}
}

func testPod(name, node, addr string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), Labels: labels},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: addr, PodIPs: []corev1.PodIP{{IP: addr}}},
	}
}

// denyAll isolates the pods with a label; allow names the label of peers.
func testPolicy(name, app, allow string) *networkingv1.NetworkPolicy {
	np := &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		},
	}
	if allow != "" {
		np.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"role": allow}},
		}}}}
	}
	return np
}

func (b *peerBench) addLocal(name, addr string) {
	b.pods = append(b.pods, testPod(name, "node-a", addr, map[string]string{"app": name}))
	n := len(b.endpoints) + 1
	b.endpoints[name] = endpoint.Endpoint{
		ID: uint32(n), ContainerID: name, IfName: "eth0", Namespace: "default", Pod: name, UID: "uid-" + name,
		Addrs: []netip.Addr{netip.MustParseAddr(addr)}, HostIfindex: 10 + n, MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(n)},
	}
}

func (b *peerBench) pod(name string) *corev1.Pod {
	for i, p := range b.pods {
		if p.Name == name {
			b.pods[i] = p.DeepCopy()
			return b.pods[i]
		}
	}
	b.t.Fatalf("no pod %s", name)
	return nil
}

// restart reads everything back from the maps, as a new process does.
func (b *peerBench) restart() {
	b.t.Helper()
	var err error
	if b.p, err = newPeers(b.stores(), b.now); err != nil {
		b.t.Fatal(err)
	}
	b.tunnels, b.policing = tunnel.NewCompiler(), policy.NewCompiler(b.p.restored())
}

func (b *peerBench) apply() error {
	b.t.Helper()
	b.compile()
	b.lines = nil
	b.check = b.whole
	if err := b.p.apply(b.last); err != nil {
		return err
	}
	// Given everything instead of the changes, there is nothing to write.
	lines := b.lines
	everything := b.last
	everything.deltas = false
	everything.policy.Early, everything.policy.Transitional = policy.Early{}, nil
	if err := b.p.apply(everything); err != nil || len(b.lines) > len(lines) {
		b.t.Errorf("not all that changed was applied: %v %v", err, b.lines[len(lines):])
	}
	b.lines = lines
	return nil
}

func (b *peerBench) compile() {
	b.t.Helper()
	eps := newEndpoints()
	var list []endpoint.Endpoint
	for _, ep := range b.endpoints {
		list = append(list, ep)
	}
	eps.seed(list)
	local := eps.collect(func(n types.NamespacedName) *corev1.Pod {
		for _, p := range b.pods {
			if p.Name == n.Name {
				return p
			}
		}
		return nil
	})
	nodes, errs := tunnel.Nodes(b.nodes)
	for _, err := range errs {
		b.t.Error(err)
	}
	host := []netip.Addr{netip.MustParseAddr("172.31.0.2")}
	byAddr := make(map[netip.Addr]types.NamespacedName)
	for a, ep := range local.byAddr {
		byAddr[a] = ep.pod
	}
	pods, gone := localPods(local), b.known
	b.known = nil
	for _, p := range b.pods {
		n := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
		b.known = append(b.known, n)
		if local.pods[n] == nil && !finished(p) && p.Spec.NodeName != "node-a" {
			pods = append(pods, policy.FromPod(p, false))
		}
	}
	b.last = peerInput{
		self: "node-a", nodes: nodes, endpoints: local.byAddr, deltas: true,
		tunnel: b.tunnels.Compile(tunnel.Changes{Pods: b.pods, Gone: gone, Rest: &tunnel.Input{
			Self: "node-a", Nodes: nodes, HostAddrs: host, Local: byAddr,
			ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.98.0.0/16")},
		}}),
		policy: b.policing.Compile(policy.Changes{Pods: pods, Gone: gone, Rest: &policy.Input{
			Namespaces: []policy.Namespace{{Name: "default"}},
			Nodes:      policyNodes(b.nodes, "node-a", host),
			Policies:   copies(b.policies, &b.copied),

			ClusterPolicies: copies(b.clusterPolicies, &b.clusterCopied),
		}}),
	}
}

// copies has another object for each that was edited in place since the last.
func copies[T interface{ DeepCopy() T }](list []T, last *[]T) []T {
	out := make([]T, len(list))
	for i := range list {
		if i < len(*last) && reflect.DeepEqual(list[i], (*last)[i]) {
			out[i] = (*last)[i]
		} else {
			out[i] = list[i].DeepCopy()
		}
	}
	*last = out
	return out
}

func (b *peerBench) mustApply() {
	b.t.Helper()
	if err := b.apply(); err != nil {
		b.t.Fatal(err)
	}
}

// whole says whether what a packet could find at this moment fits together.
func (b *peerBench) whole() {
	b.t.Helper()
	last := b.lines[len(b.lines)-1]
	for k, v := range b.addrs.m {
		if v.Node != 0 && b.nodes_()[v.Node] == (maps.Node{}) {
			b.t.Errorf("after %q: %s is behind node %d, which is not there", last, maps.KeyString(k), v.Node)
		}
	}
	for _, id := range b.nodeIDs.m {
		if b.nodes_()[id] == (maps.Node{}) {
			b.t.Errorf("after %q: pw_node_ids names node %d, which is not there", last, id)
		}
	}
	for k, v := range b.endpoints_() {
		for _, n := range []uint32{v.PolicyIn, v.PolicyOut} {
			for key := range b.last.policy.Tables[n] {
				if _, ok := b.policy.m[key]; !ok {
					b.t.Errorf("after %q: %s has table %d, which lacks %s", last, maps.KeyString(k), n, maps.KeyString(key))
				}
			}
		}
	}
}

func (b *peerBench) nodes_() map[uint32]maps.Node            { return b.memStores.nodes.m }
func (b *peerBench) endpoints_() map[maps.Addr]maps.Endpoint { return b.memStores.endpoints.m }

// gen is the generation that flows with an address remember.
func (b *peerBench) gen(addr string) uint32 {
	b.t.Helper()
	v, ok := b.addrs.m[ip(addr)]
	if !ok {
		b.t.Fatalf("%s is not in pw_addrs", addr)
	}
	return b.gens.m[v.Slot]
}

func TestPeersFirstFill(t *testing.T) {
	b := newPeerBench(t)
	b.mustApply()
	if len(b.addrs.m) != 5 || len(b.endpoints_()) != 2 || len(b.nodes_()) != 1 || len(b.nodeIDs.m) != 1 {
		t.Errorf("addrs %d endpoints %d nodes %d ids %d", len(b.addrs.m), len(b.endpoints_()), len(b.nodes_()), len(b.nodeIDs.m))
	}
	remote := b.addrs.m[ip("10.244.158.65")]
	if remote.Node == 0 || remote.Flags != maps.PeerPod || remote.Identity != maps.IdentityPod {
		t.Errorf("remote %+v", remote)
	}
	n := b.nodes_()[remote.Node]
	if n.Addr != ip("172.31.0.3") || n.Mac == [6]uint8{} {
		t.Errorf("node %+v", n)
	}
	ep := b.endpoints_()[ip("10.244.80.65")]
	if ep.Slot != b.addrs.m[ip("10.244.80.65")].Slot || ep.Id == 0 || ep.Ifindex == 0 || ep.Identity != maps.IdentityPod {
		t.Errorf("endpoint %+v", ep)
	}
	if own := b.prefixes.m[pfx("10.244.80.0/24")]; own.Flags != maps.PeerPod|maps.PeerLocal || own.Node != 0 {
		t.Errorf("own range %+v", own)
	}
	if world := b.prefixes.m[pfx("::/0")]; world.Identity != maps.IdentityWorld || world.Flags != 0 {
		t.Errorf("world %+v", world)
	}
	slots := make(map[uint32]bool)
	for k, v := range b.addrs.m {
		if v.Slot < slotFirst || slots[v.Slot] {
			t.Errorf("%s: slot %d", maps.KeyString(k), v.Slot)
		}
		slots[v.Slot] = true
	}
	b.mustApply()
	if len(b.lines) != 0 {
		t.Errorf("nothing changed, written all the same: %v", b.lines)
	}
}

func TestPeersRestartWritesNothing(t *testing.T) {
	b := newPeerBench(t)
	b.mustApply()
	b.restart()
	b.mustApply()
	if len(b.lines) != 0 {
		t.Errorf("restart wrote %v", b.lines)
	}
	// Leftovers of what went meanwhile go; the slot's generation moves.
	slot := b.addrs.m[ip("10.244.158.65")].Slot
	gen := b.gens.m[slot]
	b.pods = b.pods[:2]
	b.restart()
	b.mustApply()
	if _, ok := b.addrs.m[ip("10.244.158.65")]; ok || b.gens.m[slot] == gen {
		t.Errorf("the remote pod is still there, or its generation did not move: %v", b.lines)
	}
}

// Everything that a verdict or a way depends on moves a generation, after it
// was written.
func TestPeersMoveGenerations(t *testing.T) {
	b := newPeerBench(t)
	b.mustApply()
	moved := func(what, addr string, change func()) {
		t.Helper()
		before := b.gen(addr)
		change()
		b.mustApply()
		if b.gen(addr) == before {
			t.Errorf("%s: the generation of %s did not move", what, addr)
		}
		slot := fmt.Sprintf("put pw_gens %d", b.addrs.m[ip(addr)].Slot)
		at := slices.Index(b.lines, slot)
		for i, l := range b.lines {
			if i > at && (strings.Contains(l, " "+addr) && !strings.HasPrefix(l, "delete")) {
				t.Errorf("%s: %q comes after the generation moved", what, l)
			}
		}
	}
	moved("isolated by a policy", "10.244.80.66", func() {
		b.policies = []*networkingv1.NetworkPolicy{testPolicy("web", "local", "frontend")}
	})
	moved("label matches a policy in force", "10.244.80.65", func() {
		b.pod("client").Labels["role"] = "frontend"
	})
	moved("remote pod becomes an allowed one", "10.244.158.65", func() {
		b.pod("remote").Labels = map[string]string{"role": "frontend"}
	})
	moved("veth made anew", "10.244.80.66", func() {
		ep := b.endpoints["local"]
		ep.HostIfindex = 99
		b.endpoints["local"] = ep
	})
	moved("pod moved to another node", "10.244.158.65", func() {
		b.nodes = append(b.nodes, testNode("node-c", "172.31.0.4", "10.244.9.0/24"))
		b.pod("remote").Spec.NodeName = "node-c"
	})
	moved("node got another address", "10.244.158.65", func() {
		b.nodes[2] = testNode("node-c", "172.31.0.44", "10.244.9.0/24")
	})
	// An address that the range around it stood for until now.
	prefix := b.prefixes.m[pfx("10.244.158.0/24")]
	before := b.gens.m[prefix.Slot]
	b.pods = append(b.pods, testPod("new", "node-b", "10.244.158.70", nil))
	b.mustApply()
	if b.gens.m[prefix.Slot] == before {
		t.Error("flows to a pod that was only a range before would keep their old verdict")
	}
	// What did not change did not move.
	untouched := b.gen("10.244.80.65")
	b.pods = b.pods[:len(b.pods)-1]
	b.mustApply()
	if b.gen("10.244.80.65") != untouched {
		t.Error("a pod that has nothing to do with it was decided anew")
	}
}

func TestPeersPolicyOrder(t *testing.T) {
	b := newPeerBench(t)
	b.policies = []*networkingv1.NetworkPolicy{testPolicy("web", "local", "frontend")}
	b.pod("client").Labels["role"] = "frontend"
	b.mustApply()
	old := b.endpoints_()[ip("10.244.80.66")]
	if old.PolicyIn == 0 || old.PolicyOut != 0 {
		t.Fatalf("endpoint %+v", old)
	}
	b.policies[0] = testPolicy("web", "local", "other")
	b.mustApply()
	v := b.endpoints_()[ip("10.244.80.66")]
	if v.PolicyIn == old.PolicyIn {
		t.Fatal("the table was changed in place")
	}
	for k := range b.policy.m {
		if k.Table == old.PolicyIn {
			t.Errorf("old table is still there: %s", maps.KeyString(k))
		}
	}
	flip := slices.Index(b.lines, "put pw_endpoints 10.244.80.66")
	for i, l := range b.lines {
		isOld := strings.HasPrefix(l, fmt.Sprintf("delete pw_policy table %d ", old.PolicyIn))
		isNew := strings.HasPrefix(l, fmt.Sprintf("put pw_policy table %d ", v.PolicyIn))
		if isOld && i < flip || isNew && i > flip {
			t.Errorf("%q on the wrong side of the flip (%d, %d)", l, i, flip)
		}
	}
	// A restart over isolation keeps it at every step: whole checks.
	b.restart()
	b.check = func() {
		if b.endpoints_()[ip("10.244.80.66")].PolicyIn == 0 {
			t.Errorf("after %q: not isolated", b.lines[len(b.lines)-1])
		}
	}
	b.mustApply()
	for k := range b.policy.m {
		if k.Table == v.PolicyIn {
			t.Errorf("a table of the earlier run is left: %s", maps.KeyString(k))
		}
	}
}

// Corrupted maps: two addresses with one slot, an endpoint with another slot
// than its address, a node id twice, a prefix with the constant slot.
func TestPeersRepair(t *testing.T) {
	b := newPeerBench(t)
	b.mustApply()
	remote, local := b.addrs.m[ip("10.244.158.65")], b.addrs.m[ip("10.244.80.66")]
	remote.Slot = local.Slot
	b.addrs.m[ip("10.244.158.65")] = remote
	ep := b.endpoints_()[ip("10.244.80.65")]
	ep.Slot = 77777777
	b.endpoints_()[ip("10.244.80.65")] = ep
	b.nodes_()[5] = b.nodes_()[remote.Node]
	b.nodeIDs.m[ip("192.0.2.1")] = 5
	own := b.prefixes.m[pfx("10.244.80.0/24")]
	own.Slot = slotConstant
	b.prefixes.m[pfx("10.244.80.0/24")] = own
	b.restart()
	b.mustApply()
	slots := make(map[uint32]string)
	for k, v := range b.addrs.m {
		if other := slots[v.Slot]; other != "" || v.Slot < slotFirst {
			t.Errorf("%s and %s: slot %d", maps.KeyString(k), other, v.Slot)
		}
		slots[v.Slot] = maps.KeyString(k)
	}
	for k, v := range b.prefixes.m {
		if other := slots[v.Slot]; other != "" || v.Slot < slotFirst {
			t.Errorf("%s and %s: slot %d", maps.KeyString(k), other, v.Slot)
		}
		slots[v.Slot] = maps.KeyString(k)
	}
	for k, v := range b.endpoints_() {
		if v.Slot != b.addrs.m[k].Slot {
			t.Errorf("%s: endpoint slot %d, address slot %d", maps.KeyString(k), v.Slot, b.addrs.m[k].Slot)
		}
	}
	if len(b.nodes_()) != 1 || len(b.nodeIDs.m) != 1 {
		t.Errorf("nodes %v ids %v", b.nodes_(), b.nodeIDs.m)
	}
}

// One entry that is refused stops nothing else.
func TestPeersOneBadEntry(t *testing.T) {
	b := newPeerBench(t)
	b.addrs.bad = func(k maps.Addr, _ maps.Peer) error {
		if k == ip("10.244.158.65") {
			return errors.New("pw_addrs: refused")
		}
		return nil
	}
	if err := b.apply(); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("error %v", err)
	}
	if len(b.addrs.m) != 4 || len(b.endpoints_()) != 2 {
		t.Errorf("the rest is not in force: %d addrs, %d endpoints", len(b.addrs.m), len(b.endpoints_()))
	}
	if at := b.p.nextRetry(); at.IsZero() {
		t.Error("it will not be tried again")
	}
	// The pod goes before it could be written: its slot is given back.
	b.pods = b.pods[:2]
	b.mustApply()
	if len(b.p.slots) != 4 {
		t.Errorf("%d slots in use, want 4", len(b.p.slots))
	}
}
