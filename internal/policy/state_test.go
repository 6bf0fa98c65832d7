package policy_test

import (
	"math"
	"net/netip"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
)

// L9: whatever numbers a damaged map holds, counting on from them never comes
// to table 0, which isolates nobody.
func TestDamagedNumbersOpenNothing(t *testing.T) {
	addr := netip.MustParseAddr("10.244.80.65")
	peers := []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}
	in := policy.Input{
		Namespaces: []policy.Namespace{{Name: "default"}},
		Pods: []policy.Pod{{
			Namespace: "default", Name: "web", Local: true, Addrs: []netip.Addr{addr},
		}},
		Policies: []*networkingv1.NetworkPolicy{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "both"},
			Spec: networkingv1.NetworkPolicySpec{
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
				Ingress:     []networkingv1.NetworkPolicyIngressRule{{From: peers}},
			},
		}},
	}
	for _, n := range []uint32{math.MaxUint32, math.MaxUint32 - 1, math.MaxUint32 - 2} {
		out := policy.Compile(in, policy.Restore(policy.Snapshot{
			Addrs:     map[netip.Addr]uint32{addr: n},
			Policy:    policy.Table{{Table: n, Identity: n, Kind: maps.PolicyAny}: {Verdict: maps.VerdictAllow, Rule: n}},
			Endpoints: map[netip.Addr][2]uint32{addr: {n, n}},
		}))
		for name, ids := range out.Endpoints {
			if ids.In == 0 || ids.Out == 0 || ids.In == n || ids.Out == n {
				t.Errorf("after %#x: %v has tables %d and %d", n, name, ids.In, ids.Out)
			}
		}
		if id := out.Addrs[addr]; id < maps.IdentityFirstDynamic || id == n {
			t.Errorf("after %#x: identity %d", n, id)
		}
	}
}
