package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/maps"
)

const localPod = "10.244.80.66" // whose policies the cases are about

// blockPolicy lets in a role and all the world but what is excepted.
func blockPolicy(except ...string) *networkingv1.NetworkPolicy {
	np := testPolicy("web", "local", "frontend")
	np.Spec.Ingress = append(np.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
		From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: except}}},
	})
	return np
}

// always checks after every write, once the new table is in force, that what
// is denied stays so.
func (b *peerBench) always(inForce func() bool, denied ...string) {
	b.check = func() {
		for _, peer := range denied {
			if inForce() && b.allows(localPod, peer, 80) {
				b.t.Errorf("after %q: %s is let in", b.lines[len(b.lines)-1], peer)
			}
		}
	}
}

func (b *peerBench) isolated() bool { return b.endpoints_()[ip(localPod)].PolicyIn != 0 }

// wants checks what is allowed in the end.
func (b *peerBench) wants(want map[string]bool) {
	b.t.Helper()
	for peer, ok := range want {
		if got := b.allows(localPod, peer, 80); got != ok {
			b.t.Errorf("%s: allowed %v, want %v", peer, got, ok)
		}
	}
}

// P15: an except that does not fit into pw_prefixes opens nothing: what is
// around it is denied until it does, from the first moment and through
// restarts; the rest of the policy holds all the time.
func TestExceptThatDoesNotFit(t *testing.T) {
	b := newPeerBench(t)
	b.pod("client").Labels["role"] = "frontend"
	b.policies = []*networkingv1.NetworkPolicy{blockPolicy()}
	b.mustApply()
	full := len(b.prefixes.m)
	old := b.endpoints_()[ip(localPod)].PolicyIn
	b.policies = []*networkingv1.NetworkPolicy{blockPolicy("192.0.2.0/24", "198.51.100.0/24")}
	b.compile()
	b.prefixes.size, b.p.prefixesMax = full, full
	b.lines = nil
	b.always(func() bool { return b.endpoints_()[ip(localPod)].PolicyIn != old }, "192.0.2.1", "198.51.100.1")
	reported := func(err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "withheld") || !strings.Contains(err.Error(), "map is full") {
			t.Fatalf("error %v", err)
		}
	}
	reported(b.p.apply(b.last))
	shut := map[string]bool{"10.244.80.65": true, "192.0.2.1": false, "198.51.100.1": false, "203.0.113.1": false}
	b.wants(shut)
	for range 2 { // another agent finds the map as full
		b.restart()
		b.compile()
		b.lines = nil
		b.always(b.isolated, "192.0.2.1", "198.51.100.1")
		reported(b.p.apply(b.last))
		b.wants(shut)
	}
	// Nothing is written over and over, and it is said all the same.
	b.compile()
	b.lines = nil
	if err := b.p.apply(b.last); err == nil || !strings.Contains(err.Error(), "withheld") {
		t.Errorf("error %v", err)
	}
	if i := slices.IndexFunc(b.lines, func(l string) bool { return strings.Contains(l, "pw_policy") }); i >= 0 {
		t.Errorf("written in vain: %q", b.lines)
	}
	// One fits: the other one still opens nothing.
	b.prefixes.size = full + 1
	b.restart()
	b.compile()
	b.lines = nil
	b.always(b.isolated, "192.0.2.1", "198.51.100.1")
	reported(b.p.apply(b.last))
	b.wants(shut)
	// Both do.
	b.prefixes.size = 1000
	b.restart()
	b.compile()
	b.lines = nil
	b.always(b.isolated, "192.0.2.1", "198.51.100.1")
	if err := b.p.apply(b.last); err != nil {
		t.Fatal(err)
	}
	shut["203.0.113.1"] = true
	b.wants(shut)
	if len(b.p.withheld) > 0 {
		t.Errorf("withheld: %v", b.p.withheld)
	}
}

// P15: a pod that a Deny rule names and that does not fit into pw_addrs is not
// let in as one of the rest, in a table that is in use and stays so.
func TestDeniedPodThatDoesNotFit(t *testing.T) {
	b := newPeerBench(t)
	b.pod("client").Labels["role"] = "frontend"
	b.pods = append(b.pods, testPod("first", "node-b", "10.244.158.70", map[string]string{"role": "bad"}))
	b.clusterPolicies = []*v1beta1.ClusterNetworkPolicy{testClusterPolicy("a", "local", "bad", 80)}
	b.mustApply()
	table := b.endpoints_()[ip(localPod)].PolicyIn
	b.wants(map[string]bool{"10.244.80.65": true, "10.244.158.70": false, "10.244.158.71": true, "203.0.113.1": true})

	b.pods = append(b.pods, testPod("second", "node-b", "10.244.158.71", map[string]string{"role": "bad"}))
	b.compile()
	b.addrs.size, b.p.addrsMax = len(b.addrs.m), len(b.addrs.m)
	b.lines, b.check = nil, nil
	gens := b.gen(localPod)
	if err := b.p.apply(b.last); err == nil || !strings.Contains(err.Error(), "withheld") {
		t.Fatalf("error %v", err)
	}
	if now := b.endpoints_()[ip(localPod)].PolicyIn; now != table {
		t.Fatalf("table %#x, before %#x: this shows nothing of tables in use", now, table)
	}
	b.wants(map[string]bool{"10.244.158.70": false, "10.244.158.71": false})
	if b.gen(localPod) == gens {
		t.Error("running flows are not decided again when something is withheld")
	}
	for range 3 {
		b.compile()
		b.always(b.isolated, "10.244.158.70", "10.244.158.71")
		_ = b.p.apply(b.last)
	}
	// A pod less, and there is room.
	b.pods = slices.DeleteFunc(b.pods, func(p *corev1.Pod) bool { return p.Name == "first" })
	for range 2 { // in the first round it goes, in the second the other one comes
		b.compile()
		b.always(b.isolated, "10.244.158.71")
		gens = b.gen(localPod)
		_ = b.p.apply(b.last)
	}
	b.wants(map[string]bool{"10.244.80.65": true, "10.244.158.71": false, "203.0.113.1": true})
	if b.gen(localPod) == gens {
		t.Error("running flows are not decided again when all is put back")
	}
}

// Only what would let somebody in is withheld: not the ports that both may
// use, and nothing where the one taken for another may do more himself.
func TestOnlyWhatOpensIsWithheld(t *testing.T) {
	b := newPeerBench(t)
	b.pods = append(b.pods, testPod("bad", "node-b", "10.244.158.70", map[string]string{"role": "bad"}))
	b.mustApply()
	b.addrs.bad = func(k maps.Addr, _ maps.Peer) error {
		if k == ip("10.244.158.71") {
			return fmt.Errorf("pw_addrs: %w", maps.ErrFull)
		}
		return nil
	}
	port := intstr.FromInt32(80)
	np := testPolicy("web", "local", "bad") // all ports
	np.Spec.Ingress = append(np.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{Ports: []networkingv1.NetworkPolicyPort{{Port: &port}}})
	b.policies = []*networkingv1.NetworkPolicy{np}
	b.pods = append(b.pods, testPod("second", "node-b", "10.244.158.71", map[string]string{"role": "bad"}))
	if err := b.apply(); err == nil || strings.Contains(err.Error(), "withheld") {
		t.Errorf("error %v", err)
	}
	b.wants(map[string]bool{"203.0.113.1": true, "10.244.158.71": true, "10.244.158.70": true})
}

func TestDecidesAsTheDatapath(t *testing.T) {
	b := newPeerBench(t)
	b.classes.m[80] = 3
	b.restart()
	const table = 7 | maps.TableDefault
	entries := map[maps.PolicyKey]maps.PolicyEntry{}
	put := func(k maps.PolicyKey, verdict uint8) {
		k.Table = table
		entries[k] = maps.PolicyEntry{Verdict: verdict}
	}
	put(maps.PolicyKey{Identity: 300, Kind: maps.PolicyPort, Proto: maps.ProtoTCP, Port: 80}, maps.VerdictAllow)
	put(maps.PolicyKey{Identity: 300, Kind: maps.PolicyClass, Proto: maps.ProtoTCP, Port: 3}, maps.VerdictDeny)
	put(maps.PolicyKey{Identity: 300, Kind: maps.PolicyAny}, maps.VerdictAllow)
	put(maps.PolicyKey{Identity: 301, Kind: maps.PolicyAny}, maps.VerdictDeny)
	put(maps.PolicyKey{Kind: maps.PolicyDefault}, maps.VerdictAllow)
	place := maps.PolicyKey{Kind: maps.PolicyPort, Proto: maps.ProtoTCP, Port: 80}
	for _, c := range []struct {
		id   uint32
		less *maps.PolicyKey
		want bool
	}{
		{300, nil, true},
		{300, &maps.PolicyKey{Table: table, Identity: 300, Kind: maps.PolicyPort, Proto: maps.ProtoTCP, Port: 80}, false},
		{301, nil, false},
		{302, nil, true},
		{302, &maps.PolicyKey{Table: table, Kind: maps.PolicyDefault}, false},
		{maps.IdentityUnknown, nil, false},
	} {
		less := map[maps.PolicyKey]bool{}
		if c.less != nil {
			less[*c.less] = true
		}
		if _, got := b.p.decides(entries, less, table, c.id, place); got != c.want {
			t.Errorf("identity %d without %v: %v, want %v", c.id, c.less, got, c.want)
		}
	}
}
