package policy_test

import (
	"net/netip"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/podweir/podweir/internal/policy"
)

// The cluster of the address plan: this node is a.
const (
	addrClient  = "10.244.80.65"
	addrClient6 = "fd00:10:244:50::41"
	addrLocal   = "10.244.80.66"
	addrLocal6  = "fd00:10:244:50::42"
	addrRemote  = "10.244.158.65"
	addrRemote6 = "fd00:10:244:9e::41"
	addrNodeA   = "172.31.0.2"
	addrNodeB   = "172.31.0.3"
	addrWorld   = "192.0.2.7"
	addrWorld6  = "2001:db8::7"
)

// cluster returns client and local on node a and remote on node b, in
// namespace default with a label app of their name, serving names.
func cluster() *policy.Input {
	pod := func(name string, local bool, http uint16, addrs ...string) policy.Pod {
		p := policy.Pod{Namespace: "default", Name: name, Labels: map[string]string{"app": name}, Local: local}
		for _, a := range addrs {
			p.Addrs = append(p.Addrs, netip.MustParseAddr(a))
		}
		p.Ports = []policy.NamedPort{{Name: "http", Proto: 6, Port: http}}
		return p
	}
	return &policy.Input{
		Namespaces: []policy.Namespace{{Name: "default", Labels: map[string]string{"team": "red"}}, {Name: "other", Labels: map[string]string{"team": "blue"}}},
		Nodes: []policy.Node{
			{Name: "a", Self: true, Addrs: []netip.Addr{netip.MustParseAddr(addrNodeA)}},
			{Name: "b", Addrs: []netip.Addr{netip.MustParseAddr(addrNodeB)}},
		},
		Pods: []policy.Pod{
			pod("client", true, 80, addrClient, addrClient6),
			pod("local", true, 8080, addrLocal, addrLocal6),
			pod("remote", false, 9090, addrRemote, addrRemote6),
		},
	}
}

// networkPolicy reads the spec of a policy.
func networkPolicy(t testing.TB, name, spec string) *networkingv1.NetworkPolicy {
	t.Helper()
	np := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if err := yaml.UnmarshalStrict([]byte(spec), &np.Spec); err != nil {
		t.Fatalf("policy %s: %v", name, err)
	}
	return np
}

// ask returns what the pod with address self may do about the peer.
func ask(d *datapath, self string, dir policy.Direction, peer string, proto uint8, port uint16) bool {
	return d.allows(netip.MustParseAddr(self), question{dir: dir, peer: netip.MustParseAddr(peer), proto: proto, port: port})
}
