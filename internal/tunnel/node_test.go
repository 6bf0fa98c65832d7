package tunnel

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func addr(s string) netip.Addr  { return netip.MustParseAddr(s) }
func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func created(second int64) func(*metav1.ObjectMeta) {
	return func(m *metav1.ObjectMeta) { m.CreationTimestamp = metav1.NewTime(time.Unix(second, 0)) }
}

// node makes a Node: addresses are InternalIPs, prefixes pod CIDRs.
func node(name string, parts ...any) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			if strings.Contains(p, "/") {
				n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p)
			} else {
				n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: p})
			}
		case corev1.NodeAddress:
			n.Status.Addresses = append(n.Status.Addresses, p)
		case func(*metav1.ObjectMeta):
			p(&n.ObjectMeta)
		case func(*corev1.Node):
			p(n)
		default:
			panic(fmt.Sprintf("part %T", p))
		}
	}
	return n
}

func nodeA() *corev1.Node {
	return node("a", "172.31.0.2", "10.244.80.0/24", "fd00:10:244:50::/64")
}

func nodeB() *corev1.Node {
	return node("b", "172.31.0.3", "10.244.158.0/24", "fd00:10:244:9e::/64")
}

func describeNode(n NodeInfo) string {
	s := n.Name + " " + n.Addr.String()
	for _, a := range n.InternalIPs {
		s += " ip=" + a.String()
	}
	for _, p := range n.PodCIDRs {
		s += " cidr=" + p.String()
	}
	return s
}

func checkErrs(t *testing.T, got []error, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("got %d errors, want %d: %v", len(got), len(want), got)
	}
	for i := range want {
		if !strings.Contains(got[i].Error(), want[i]) {
			t.Errorf("error %d: got %q, want it to contain %q", i, got[i], want[i])
		}
	}
}

func TestNodes(t *testing.T) {
	tests := []struct {
		name  string
		nodes []*corev1.Node
		want  []string
		errs  []string
	}{
		{
			name:  "sorted by name",
			nodes: []*corev1.Node{nodeB(), nodeA()},
			want: []string{
				"a 172.31.0.2 ip=172.31.0.2 cidr=10.244.80.0/24 cidr=fd00:10:244:50::/64",
				"b 172.31.0.3 ip=172.31.0.3 cidr=10.244.158.0/24 cidr=fd00:10:244:9e::/64",
			},
		},
		{
			name: "InternalIP only, IPv4 preferred, each once",
			nodes: []*corev1.Node{node("a",
				corev1.NodeAddress{Type: corev1.NodeHostName, Address: "a"},
				corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "203.0.113.1"},
				"fd00::2", "172.31.0.2", "172.31.0.9", "172.31.0.2")},
			want: []string{"a 172.31.0.2 ip=fd00::2 ip=172.31.0.2 ip=172.31.0.9"},
		},
		{
			name:  "IPv6 alone",
			nodes: []*corev1.Node{node("a", "fd00::2", "fd00:10:244:50::/64")},
			want:  []string{"a fd00::2 ip=fd00::2 cidr=fd00:10:244:50::/64"},
		},
		{
			name:  "podCIDR alone, host bits cleared",
			nodes: []*corev1.Node{node("a", "172.31.0.2", func(n *corev1.Node) { n.Spec.PodCIDR = "10.244.80.7/24" })},
			want:  []string{"a 172.31.0.2 ip=172.31.0.2 cidr=10.244.80.0/24"},
		},
		{
			name:  "without pod CIDRs",
			nodes: []*corev1.Node{node("a", "172.31.0.2")},
			want:  []string{"a 172.31.0.2 ip=172.31.0.2"},
		},
		{
			name:  "without InternalIP",
			nodes: []*corev1.Node{node("a", "10.244.80.0/24"), nodeB()},
			want: []string{
				"a invalid IP cidr=10.244.80.0/24",
				"b 172.31.0.3 ip=172.31.0.3 cidr=10.244.158.0/24 cidr=fd00:10:244:9e::/64",
			},
			errs: []string{"Node a: status.addresses: no usable InternalIP"},
		},
		{
			name:  "bad parts are named, the rest is used",
			nodes: []*corev1.Node{node("a", "172.31.0", "127.0.0.1", "::ffff:1.2.3.4", "fe80::1", "172.31.0.2", "10.244.80.0/33", "0.0.0.0/0", "10.244.80.0/24")},
			want:  []string{"a 172.31.0.2 ip=172.31.0.2 cidr=10.244.80.0/24"},
			errs: []string{
				`Node a: status.addresses[0]: "172.31.0" is no IP address`, "addresses[1]: 127.0.0.1", "addresses[2]", "addresses[3]",
				`spec.podCIDRs[0]: "10.244.80.0/33" is no CIDR`, "spec.podCIDRs[1]: 0.0.0.0/0 is no range for pods",
			},
		},
		{
			name: "overlapping pod CIDRs stay with the older node",
			nodes: []*corev1.Node{
				node("a", "172.31.0.2", "10.244.0.0/16", created(20)),
				node("b", "172.31.0.3", "10.244.158.0/24", created(10)),
			},
			want: []string{
				"a 172.31.0.2 ip=172.31.0.2",
				"b 172.31.0.3 ip=172.31.0.3 cidr=10.244.158.0/24",
			},
			errs: []string{"Node b and Node a: spec.podCIDRs: 10.244.0.0/16 of a overlaps 10.244.158.0/24 of b"},
		},
		{
			name:  "of one age: the first by name",
			nodes: []*corev1.Node{node("b", "172.31.0.3", "10.244.80.0/24"), node("a", "172.31.0.2", "10.244.80.0/24")},
			want:  []string{"a 172.31.0.2 ip=172.31.0.2 cidr=10.244.80.0/24", "b 172.31.0.3 ip=172.31.0.3"},
			errs:  []string{"Node a and Node b: spec.podCIDRs"},
		},
		{
			name:  "overlap within a node",
			nodes: []*corev1.Node{node("a", "172.31.0.2", "10.244.80.0/24", "10.244.80.128/25")},
			want:  []string{"a 172.31.0.2 ip=172.31.0.2 cidr=10.244.80.0/24"},
			errs:  []string{"Node a: spec.podCIDRs: 10.244.80.128/25 overlaps 10.244.80.0/24 of the same node"},
		},
		{
			name: "one address of two nodes goes to the newer",
			nodes: []*corev1.Node{
				node("new", "172.31.0.2", created(20)),
				node("old", "172.31.0.2", "10.244.80.0/24", created(10)),
			},
			want: []string{"new 172.31.0.2 ip=172.31.0.2", "old invalid IP cidr=10.244.80.0/24"},
			errs: []string{"Node old and Node new: both have the InternalIP 172.31.0.2; used for new", "Node old: status.addresses: no usable"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, errs := Nodes(tt.nodes)
			var lines []string
			for _, n := range got {
				lines = append(lines, describeNode(n))
				if n.Addr.IsValid() != (n.MAC != nil) {
					t.Errorf("Node %s: addr %s, MAC %s", n.Name, n.Addr, n.MAC)
				}
			}
			if d := cmp.Diff(tt.want, lines); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
			checkErrs(t, errs, tt.errs)
		})
	}
}

func TestMAC(t *testing.T) {
	a, b := MAC(addr("172.31.0.2")), MAC(addr("172.31.0.3"))
	if a[0] != 0x02 || len(a) != 6 {
		t.Errorf("%s is not locally administered unicast", a)
	}
	if a.String() == b.String() {
		t.Errorf("both nodes get %s", a)
	}
	if a.String() != MAC(addr("::ffff:172.31.0.2")).String() {
		t.Error("the mapped form gives another address")
	}
	// The two ends compute it apart from each other, perhaps in different
	// versions: it must never change.
	if got := a.String(); got != "02:56:e9:54:be:78" {
		t.Errorf("the address of 172.31.0.2 changed to %s", got)
	}
}
