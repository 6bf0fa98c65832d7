package agent

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/maps"
)

// testClusterPolicy denies what a role sends to an app's pods.
func testClusterPolicy(name, app, role string, port int32) *v1beta1.ClusterNetworkPolicy {
	pods := func(k, v string) *v1beta1.NamespacedPod {
		return &v1beta1.NamespacedPod{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{k: v}}}
	}
	return &v1beta1.ClusterNetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1beta1.ClusterNetworkPolicySpec{
			Tier: v1beta1.AdminTier, Priority: 1, Subject: v1beta1.ClusterNetworkPolicySubject{Pods: pods("app", app)},
			Ingress: []v1beta1.ClusterNetworkPolicyIngressRule{{
				Action: v1beta1.ClusterNetworkPolicyRuleActionDeny,
				From:   []v1beta1.ClusterNetworkPolicyIngressPeer{{Pods: pods("role", role)}},
				Protocols: []v1beta1.ClusterNetworkPolicyProtocol{
					{TCP: &v1beta1.ClusterNetworkPolicyProtocolTCP{DestinationPort: &v1beta1.Port{Number: port}}},
				},
			}},
		},
	}
}

// denials are the entries of pw_policy that close, by table.
func (b *peerBench) denials() (closing, opening map[uint32]int) {
	closing, opening = make(map[uint32]int), make(map[uint32]int)
	for k, e := range b.policy.m {
		if isDenial(k, e) {
			closing[k.Table]++
		} else {
			opening[k.Table]++
		}
	}
	return closing, opening
}

// Denials are written before what they narrow, and removed after it: at every
// moment a table that allows anything has all of its denials.
func TestPeersDenialsFirst(t *testing.T) {
	b := newPeerBench(t)
	b.pod("client").Labels["role"] = "frontend"
	b.pod("remote").Labels = map[string]string{"role": "frontend", "app": "remote"}
	most := make(map[uint32]int) // denials that a table came to have
	order := func() {
		closing, opening := b.denials()
		for n := range opening {
			if closing[n] < most[n] {
				t.Fatalf("after %q: table %d allows with %d of %d denials", b.lines[len(b.lines)-1], n, closing[n], most[n])
			}
		}
	}
	changed := 0
	for port := range int32(20) {
		b.clusterPolicies = []*v1beta1.ClusterNetworkPolicy{
			testClusterPolicy("a", "local", "frontend", 80+port), testClusterPolicy("b", "local", "frontend", 8080),
		}
		b.compile()
		for n, table := range b.last.policy.Tables {
			most[n] = 0
			for k, e := range table {
				if isDenial(k, e) {
					most[n]++
				}
			}
			changed++
		}
		b.lines = nil
		b.check = order
		if err := b.p.apply(b.last); err != nil {
			t.Fatal(err)
		}
		if n := b.endpoints_()[ip("10.244.80.66")].PolicyIn; n&maps.TableDefault == 0 || most[n] < 2 {
			t.Fatalf("table %#x with %d denials", n, most[n])
		}
	}
	if changed < 20 || len(b.policy.m) > 10 {
		t.Errorf("%d tables, %d entries left", changed, len(b.policy.m))
	}
}

// P15: a table that lacks one of its denials, because the map is full, allows
// nothing; so it does again when there is room.
func TestPeersDenialsThatDoNotFit(t *testing.T) {
	b := newPeerBench(t)
	b.pod("client").Labels["role"] = "frontend"
	b.clusterPolicies = []*v1beta1.ClusterNetworkPolicy{
		testClusterPolicy("a", "local", "frontend", 80), testClusterPolicy("b", "local", "frontend", 81),
	}
	b.policy.size = 1
	b.compile()
	if err := b.p.apply(b.last); err == nil {
		t.Fatal("a full map is no error")
	}
	in := b.endpoints_()[ip("10.244.80.66")].PolicyIn
	closing, opening := b.denials()
	if in == 0 || closing[in] != 1 || opening[in] != 0 {
		t.Fatalf("table %#x: %d denials, %d allowances; want one and none", in, closing[in], opening[in])
	}
	if b.p.nextRetry().IsZero() {
		t.Error("it will not be tried again")
	}
	b.policy.size = 100
	b.restart()
	b.mustApply()
	in = b.endpoints_()[ip("10.244.80.66")].PolicyIn
	if closing, opening = b.denials(); closing[in] != 2 || opening[in] == 0 {
		t.Errorf("table %#x: %d denials, %d allowances after there was room", in, closing[in], opening[in])
	}
}

// Nor does a table in use that a denial of a change does not fit into: the pod
// remote is denied before the change and after it, and all the time between.
func TestPeersTransitionalDenialsThatDoNotFit(t *testing.T) {
	b := newPeerBench(t)
	b.pod("client").Labels["role"] = "frontend"
	b.pod("remote").Labels = map[string]string{"role": "frontend"}
	b.clusterPolicies = []*v1beta1.ClusterNetworkPolicy{testClusterPolicy("a", "local", "frontend", 80)}
	b.mustApply()
	old := b.endpoints_()[ip("10.244.80.66")].PolicyIn
	b.pod("remote").Labels["role"] = "other"
	b.clusterPolicies[0] = testClusterPolicy("a", "local", "other", 80)
	refused := 0
	b.policy.bad = func(k maps.PolicyKey, e maps.PolicyEntry) error {
		if k.Table == old && isDenial(k, e) {
			refused++
			return maps.ErrFull
		}
		return nil
	}
	b.compile()
	b.check = func() {
		if b.allows("10.244.80.66", "10.244.158.65", 80) {
			t.Errorf("after %q: allowed", b.lines[len(b.lines)-1])
		}
	}
	b.lines = nil
	if err := b.p.apply(b.last); err == nil || refused == 0 {
		t.Fatalf("error %v after %d refusals", err, refused)
	}
	if !b.allows("10.244.80.66", "10.244.80.65", 80) || b.endpoints_()[ip("10.244.80.66")].PolicyIn == old {
		t.Error("the change is not in force")
	}
}

// allows looks a verdict about TCP up as the datapath does.
func (b *peerBench) allows(self, peer string, port uint16) bool {
	table, identity := b.endpoints_()[ip(self)].PolicyIn, b.identity(ip(peer))
	for _, k := range []maps.PolicyKey{
		{Identity: identity, Kind: maps.PolicyPort, Proto: maps.ProtoTCP, Port: port},
		{Identity: identity, Kind: maps.PolicyClass, Proto: maps.ProtoTCP, Port: b.classes.m[uint32(port)]},
		{Identity: identity, Kind: maps.PolicyAny},
		{Kind: maps.PolicyDefault},
	} {
		k.Table = table
		if e, ok := b.policy.m[k]; ok && (k.Kind != maps.PolicyDefault || table&maps.TableDefault != 0) {
			return e.Verdict == maps.VerdictAllow
		}
	}
	return table == 0
}

// identity looks an address up as the datapath does.
func (b *peerBench) identity(k maps.Addr) uint32 {
	if v, ok := b.endpoints_()[k]; ok {
		return v.Identity
	}
	if v, ok := b.addrs.m[k]; ok {
		return v.Identity
	}
	around := newLPM[uint32]()
	for p, v := range b.prefixes.m {
		around.set(p, v.Identity)
	}
	if id, ok := around.lookup(k.B, 128); ok {
		return id
	}
	return maps.IdentityWorld
}
