package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
)

// verdict is one expectation: may local do this with the peer?
type verdict struct {
	dir   policy.Direction
	peer  string
	proto uint8
	port  uint16
	want  bool
}

const (
	in, out        = policy.Ingress, policy.Egress
	icmp, tcp, udp = uint8(1), maps.ProtoTCP, maps.ProtoUDP
	sctp           = maps.ProtoSCTP
)

// TestContract has a policy of the pod local for every case, and what it means.
func TestContract(t *testing.T) {
	const local = `podSelector: {matchLabels: {app: local}}`
	cases := map[string]struct {
		specs    []string
		verdicts []verdict
	}{
		"P1 no policy": {nil, []verdict{
			{in, addrClient, tcp, 80, true}, {out, addrWorld, udp, 53, true}, {in, addrNodeA, icmp, 0, true},
		}},
		"P1 another pod's policy": {[]string{`{podSelector: {matchLabels: {app: client}}}`}, []verdict{
			{in, addrClient, tcp, 80, true}, {out, addrClient, tcp, 80, true},
		}},
		"P1 no rules deny all, ingress only": {[]string{`{` + local + `, ingress: []}`}, []verdict{
			{in, addrClient, tcp, 80, false}, {in, addrRemote6, tcp, 80, false}, {in, addrWorld, udp, 1, false},
			{in, addrNodeB, tcp, 80, false}, {in, addrClient, icmp, 0, false}, {out, addrClient, tcp, 80, true},
		}},
		"P1 empty podSelector selects all": {[]string{`{podSelector: {}}`}, []verdict{{in, addrClient, tcp, 80, false}}},
		"P1 egress rules imply the type": {[]string{`{` + local + `, egress: [{to: [{podSelector: {}}]}]}`}, []verdict{
			{out, addrRemote, tcp, 1, true}, {out, addrWorld, tcp, 1, false}, {in, addrClient, tcp, 1, false},
		}},
		"P1 types leave rules of others out": {[]string{`{` + local + `, policyTypes: [Egress], ingress: [{}]}`}, []verdict{
			{in, addrWorld, tcp, 1, true}, {out, addrClient, tcp, 1, false},
		}},
		"P1 missing from is any source": {[]string{`{` + local + `, ingress: [{ports: [{port: 80}]}]}`}, []verdict{
			{in, addrClient, tcp, 80, true}, {in, addrWorld, tcp, 80, true}, {in, addrWorld6, tcp, 80, true},
			{in, addrNodeA, tcp, 80, true}, {in, addrNodeB, tcp, 80, true}, {in, addrRemote6, tcp, 80, true},
			{in, addrClient, tcp, 81, false},
		}},
		"P1 empty ports are all": {[]string{`{` + local + `, ingress: [{from: [{podSelector: {}}], ports: []}]}`}, []verdict{
			{in, addrClient, tcp, 1, true}, {in, addrClient, sctp, 65535, true}, {in, addrClient, icmp, 0, true}, {in, addrWorld, tcp, 1, false},
		}},
		"P1 an empty port is any of TCP": {[]string{`{` + local + `, ingress: [{ports: [{}]}]}`}, []verdict{
			{in, addrWorld, tcp, 1, true}, {in, addrWorld, tcp, 65535, true}, {in, addrWorld, udp, 1, false}, {in, addrWorld, icmp, 0, false},
		}},
		"P2 both selectors are AND": {[]string{`{` + local + `, ingress: [{from: [{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: remote}}}]}]}`}, []verdict{
			{in, addrRemote, tcp, 80, true}, {in, addrClient, tcp, 80, false},
		}},
		"P2 two peers are OR": {[]string{`{` + local + `, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}}, {podSelector: {matchLabels: {app: remote}}}]}]}`}, []verdict{
			{in, addrRemote, tcp, 80, true}, {in, "10.244.158.70", tcp, 80, true}, {in, addrClient, tcp, 80, false},
		}},
		"P2 podSelector alone is the policy's namespace": {[]string{`{` + local + `, ingress: [{from: [{podSelector: {}}]}]}`}, []verdict{
			{in, addrClient, tcp, 80, true}, {in, "10.244.158.70", tcp, 80, false},
		}},
		"P2 policies add up": {[]string{`{` + local + `}`, `{` + local + `, ingress: [{ports: [{port: 80}]}]}`, `{` + local + `, ingress: [{ports: [{port: 81}]}]}`}, []verdict{
			{in, addrClient, tcp, 80, true}, {in, addrClient, tcp, 81, true}, {in, addrClient, tcp, 82, false},
		}},
		"P5 hostNetwork pods by no label": {[]string{`{` + local + `, ingress: [{from: [{namespaceSelector: {}}]}], egress: [{to: [{namespaceSelector: {}}]}]}`}, []verdict{
			{in, addrNodeB, tcp, 80, false}, {out, addrNodeB, tcp, 80, false}, {in, addrRemote, tcp, 80, true},
		}},
		"P6 endPort is inclusive": {[]string{`{` + local + `, ingress: [{ports: [{port: 8000, endPort: 8010}, {port: 8005, endPort: 8020, protocol: UDP}]}]}`}, []verdict{
			{in, addrClient, tcp, 7999, false}, {in, addrClient, tcp, 8000, true}, {in, addrClient, tcp, 8010, true}, {in, addrClient, tcp, 8011, false},
			{in, addrClient, udp, 8004, false}, {in, addrClient, udp, 8005, true}, {in, addrClient, udp, 8020, true}, {in, addrClient, udp, 8021, false},
		}},
		"P6 names at the isolated pod": {[]string{`{` + local + `, ingress: [{ports: [{port: http}]}]}`}, []verdict{
			{in, addrClient, tcp, 8080, true}, {in, addrClient, tcp, 80, false}, {in, addrClient, udp, 8080, false},
		}},
		"P6 names at each destination": {[]string{`{` + local + `, egress: [{ports: [{port: http}]}]}`}, []verdict{
			{out, addrClient, tcp, 80, true}, {out, addrClient, tcp, 9090, false}, {out, addrRemote, tcp, 9090, true},
			{out, addrRemote6, tcp, 9090, true}, {out, addrWorld, tcp, 80, false}, {out, addrNodeB, tcp, 80, false},
		}},
		"P6 a name nobody serves": {[]string{`{` + local + `, ingress: [{ports: [{port: nosuch}]}], egress: [{ports: [{port: nosuch}]}]}`}, []verdict{
			{in, addrClient, tcp, 8080, false}, {out, addrClient, tcp, 80, false},
		}},
		"P7 except trims its own block": {[]string{`{` + local + `, egress: [{to: [{ipBlock: {cidr: 192.0.2.0/24, except: [192.0.2.0/25]}}, {ipBlock: {cidr: 192.0.2.0/28}}]}]}`}, []verdict{
			{out, addrWorld, tcp, 1, true}, {out, "192.0.2.16", tcp, 1, false}, {out, "192.0.2.128", tcp, 1, true}, {out, "192.0.3.0", tcp, 1, false},
		}},
		"P7 blocks hold pods and nodes": {[]string{`{` + local + `, ingress: [{from: [{ipBlock: {cidr: 10.244.158.0/24}}, {ipBlock: {cidr: 172.31.0.0/24, except: [172.31.0.2/32]}}]}]}`}, []verdict{
			{in, addrRemote, tcp, 1, true}, {in, addrRemote6, tcp, 1, false}, {in, addrClient, tcp, 1, false},
			{in, addrNodeB, tcp, 1, true}, {in, addrNodeA, tcp, 1, false},
		}},
		"P7 ::/0 is not IPv4": {[]string{`{` + local + `, egress: [{to: [{ipBlock: {cidr: "::/0"}}]}]}`}, []verdict{
			{out, addrWorld6, tcp, 1, true}, {out, addrRemote6, tcp, 1, true}, {out, addrWorld, tcp, 1, false}, {out, addrRemote, tcp, 1, false},
		}},
		"P7 0.0.0.0/0 is not IPv6": {[]string{`{` + local + `, egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}`}, []verdict{
			{out, addrWorld, tcp, 1, true}, {out, addrWorld6, tcp, 1, false},
		}},
		"P8 SCTP is not TCP": {[]string{`{` + local + `, ingress: [{ports: [{port: 80, protocol: SCTP}]}]}`}, []verdict{
			{in, addrClient, sctp, 80, true}, {in, addrClient, tcp, 80, false}, {in, addrClient, udp, 80, false},
		}},
		"P16 operators": {[]string{`{` + local + `, ingress: [
			{from: [{podSelector: {matchExpressions: [{key: app, operator: In, values: [client, x]}]}}], ports: [{port: 1}]},
			{from: [{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [client]}]}}], ports: [{port: 2}]},
			{from: [{podSelector: {matchExpressions: [{key: app, operator: Exists}]}}], ports: [{port: 3}]},
			{from: [{podSelector: {matchExpressions: [{key: nosuch, operator: DoesNotExist}]}}], ports: [{port: 4}]},
			{from: [{podSelector: {matchExpressions: [{key: nosuch, operator: NotIn, values: [x]}]}}], ports: [{port: 5}]},
			{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: other}}}], ports: [{port: 6}]}]}`}, []verdict{
			{in, addrClient, tcp, 1, true}, {in, addrRemote, tcp, 1, false}, {in, addrClient, tcp, 2, false}, {in, addrRemote, tcp, 2, true},
			{in, addrClient, tcp, 3, true}, {in, addrClient, tcp, 4, true}, {in, addrClient, tcp, 5, true},
			{in, addrClient, tcp, 6, false}, {in, "10.244.158.70", tcp, 6, true},
		}},
		"P17 both families alike": {[]string{`{` + local + `, ingress: [{from: [{podSelector: {matchLabels: {app: client}}}]}]}`}, []verdict{
			{in, addrClient, tcp, 1, true}, {in, addrClient6, tcp, 1, true}, {in, addrRemote, tcp, 1, false}, {in, addrRemote6, tcp, 1, false},
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			input := cluster()
			input.Pods = append(input.Pods,
				policy.Pod{Namespace: "other", Name: "stranger", Addrs: []netip.Addr{netip.MustParseAddr("10.244.158.70")}},
				policy.Pod{Namespace: "default", Name: "onhost", HostNetwork: true, Labels: map[string]string{"app": "remote"},
					Addrs: []netip.Addr{netip.MustParseAddr(addrNodeB)}})
			for i, spec := range c.specs {
				input.Policies = append(input.Policies, networkPolicy(t, string(rune('a'+i)), spec))
			}
			judged(t, input, c.verdicts)
		})
	}
}

// judged compiles policies, loads them and asks for verdicts at both addresses.
func judged(t *testing.T, input *policy.Input, verdicts []verdict) {
	t.Helper()
	o := policy.Compile(*input, nil)
	if len(o.Problems) > 0 {
		t.Fatal(o.Problems)
	}
	d := load(&o, input)
	for _, v := range verdicts {
		for _, self := range []string{addrLocal, addrLocal6} {
			if got := ask(d, self, v.dir, v.peer, v.proto, v.port); got != v.want {
				t.Errorf("%v %s proto %d port %d at %s: %v, want %v", v.dir, v.peer, v.proto, v.port, self, got, v.want)
			}
		}
	}
}

func TestProblems(t *testing.T) {
	const local = `podSelector: {matchLabels: {app: local}}`
	// The rest of each policy allows port 1; nothing else may be allowed.
	rest := `, ingress: [{ports: [{port: 1}]}, %]}`
	for rule, field := range map[string]string{
		`{from: [{podSelector: {matchExpressions: [{key: a, operator: Nope}]}}]}`: "spec.ingress[1].from[0].podSelector",
		`{from: [{namespaceSelector: {matchLabels: {"a b": c}}}]}`:                "spec.ingress[1].from[0].namespaceSelector",
		`{from: [{}]}`: "spec.ingress[1].from[0]",
		`{from: [{ipBlock: {cidr: 10.0.0.0/33}}]}`:                 "spec.ingress[1].from[0].ipBlock.cidr",
		`{from: [{ipBlock: {cidr: "::ffff:10.0.0.0/104"}}]}`:       "spec.ingress[1].from[0].ipBlock.cidr",
		`{from: [{ipBlock: {cidr: 0.0.0.0/0, except: [x]}}]}`:      "spec.ingress[1].from[0].ipBlock.except[0]",
		`{from: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]}`: "spec.ingress[1].from[0]",
		`{ports: [{endPort: 80}]}`:                                 "spec.ingress[1].ports[0].endPort",
		`{ports: [{port: 80, endPort: 79}]}`:                       "spec.ingress[1].ports[0].endPort",
		`{ports: [{port: 80, endPort: 70000}]}`:                    "spec.ingress[1].ports[0].endPort",
		`{ports: [{port: http, endPort: 80}]}`:                     "spec.ingress[1].ports[0].endPort",
		`{ports: [{port: "80"}]}`:                                  "spec.ingress[1].ports[0].port",
		`{ports: [{port: 0}]}`:                                     "spec.ingress[1].ports[0].port",
		`{ports: [{port: 65536}]}`:                                 "spec.ingress[1].ports[0].port",
		`{ports: [{protocol: ICMP}]}`:                              "spec.ingress[1].ports[0].protocol",
	} {
		input := cluster()
		input.Policies = append(input.Policies, networkPolicy(t, "bad", "{"+local+strings.Replace(rest, "%", rule, 1)))
		o := policy.Compile(*input, nil)
		if len(o.Problems) != 1 || o.Problems[0].Object != "NetworkPolicy default/bad" || o.Problems[0].Field != field {
			t.Errorf("%s: %v, want a problem of %s", rule, o.Problems, field)
		}
		d := load(&o, input)
		if !ask(d, addrLocal, in, addrClient, tcp, 1) {
			t.Errorf("%s: the rest of the policy is not in force", rule)
		}
		for _, peer := range []string{addrClient, addrWorld, addrNodeB} {
			for _, port := range []uint16{79, 80, 443} {
				if ask(d, addrLocal, in, peer, tcp, port) {
					t.Errorf("%s: allows %s port %d", rule, peer, port)
				}
			}
		}
	}
}

func TestBadPodSelectorIsolatesTheNamespace(t *testing.T) {
	input := cluster()
	np := networkPolicy(t, "bad", `{ingress: [{}]}`)
	np.Spec.PodSelector = metav1.LabelSelector{MatchLabels: map[string]string{"a b": "c"}}
	input.Policies = append(input.Policies, np)
	o := policy.Compile(*input, nil)
	if len(o.Problems) != 1 || o.Problems[0].Field != "spec.podSelector" {
		t.Fatal(o.Problems)
	}
	if ask(load(&o, input), addrLocal, in, addrClient, tcp, 80) {
		t.Error("a policy that may select the pod does not isolate it")
	}
}

func TestAddressConflicts(t *testing.T) {
	at := netip.MustParseAddr(addrRemote)
	pod := func(name string, local bool, created int64, uid types.UID) policy.Pod {
		return policy.Pod{Namespace: "default", Name: name, Local: local, Created: time.Unix(created, 0), UID: uid,
			Labels: map[string]string{"app": name}, Addrs: []netip.Addr{at}}
	}
	for name, pods := range map[string][]policy.Pod{ // the first owns the address
		"created later": {pod("a", false, 2, "a"), pod("b", false, 1, "z")},
		"greater UID":   {pod("a", false, 1, "z"), pod("b", false, 1, "a")},
		"endpoint here": {pod("a", true, 1, "a"), pod("b", false, 2, "z")},
	} {
		for range 2 {
			input := cluster()
			input.Pods = append(slices.Clone(pods), input.Pods[:2]...)
			input.Policies = append(input.Policies, networkPolicy(t, "p",
				`{podSelector: {matchLabels: {app: local}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]}`))
			o := policy.Compile(*input, nil)
			if len(o.Problems) != 1 || o.Problems[0].Object != "Pod default/b" {
				t.Errorf("%s: %v, want a problem of pod b", name, o.Problems)
			}
			if !ask(load(&o, input), addrLocal, in, addrRemote, tcp, 80) {
				t.Errorf("%s: the address is not a's", name)
			}
			slices.Reverse(pods)
		}
	}
	input := cluster()
	input.Pods[2].Addrs = []netip.Addr{netip.MustParseAddr(addrNodeB)}
	o := policy.Compile(*input, nil)
	if len(o.Problems) != 1 || o.Addrs[netip.MustParseAddr(addrNodeB)] != maps.IdentityRemoteNode {
		t.Errorf("a pod took a node's address: %v", o.Problems)
	}
}

func TestRules(t *testing.T) {
	input := cluster()
	input.Policies = append(input.Policies,
		networkPolicy(t, "b", `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`),
		networkPolicy(t, "a", `{podSelector: {}, ingress: [{ports: [{port: 81}]}, {ports: [{port: 80}]}, {ports: [{port: 80}]}]}`))
	o := policy.Compile(*input, nil)
	d := load(&o, input)
	ep := o.Endpoints[types.NamespacedName{Namespace: "default", Name: "local"}]
	e := d.policy[maps.PolicyKey{Table: ep.In, Identity: maps.IdentityWorld, Port: 80, Proto: tcp, Kind: maps.PolicyPort}]
	if got, want := o.Rules[e.Rule], (policy.RuleRef{PolicyRef: policy.PolicyRef{Tier: policy.TierNetworkPolicy, Namespace: "default", Name: "a"}, Direction: in, Index: 1}); e.Rule == 0 || got != want {
		t.Errorf("rule %d is %v, want %v", e.Rule, got, want)
	}
	if got := fmt.Sprint(ep.InPolicies); got != "[default/a default/b]" || ep.OutPolicies != nil {
		t.Errorf("policies of the endpoint: %v, %v", ep.InPolicies, ep.OutPolicies)
	}
	if client := o.Endpoints[types.NamespacedName{Namespace: "default", Name: "client"}]; client.In != ep.In || len(o.Tables) != 1 {
		t.Errorf("pods of the same policies have tables %d and %d", client.In, ep.In)
	}
}

func TestLabelsNobodyNamesCostNothing(t *testing.T) {
	input := cluster()
	input.Policies = append(input.Policies,
		networkPolicy(t, "here", `{podSelector: {matchLabels: {app: local}}, ingress: [{from: [{podSelector: {matchLabels: {app: client}}}]}]}`),
		// Selects no pod of this node.
		networkPolicy(t, "there", `{podSelector: {matchLabels: {app: remote}}, ingress: [{from: [{ipBlock: {cidr: 192.0.2.0/24}}], ports: [{port: 1, endPort: 9}]}]}`))
	o := policy.Compile(*input, nil)
	if got := o.Addrs[netip.MustParseAddr(addrRemote)]; got != maps.IdentityPod {
		t.Errorf("remote has identity %d", got)
	}
	if len(o.Prefixes) > 0 || len(o.PortClasses) > 0 || len(o.Tables) != 1 {
		t.Errorf("a policy of elsewhere left %v %v %v", o.Prefixes, o.PortClasses, o.Tables)
	}
}

func TestFromPod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	port := func(name string, n int32) []corev1.ContainerPort {
		return []corev1.ContainerPort{{Name: name, ContainerPort: n}}
	}
	got := policy.FromPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "local", UID: "u"},
		Spec: corev1.PodSpec{
			Containers:     []corev1.Container{{Ports: port("http", 8080)}, {Ports: port("http", 9)}, {Ports: port("", 7)}},
			InitContainers: []corev1.Container{{Ports: port("init", 1)}, {Ports: port("proxy", 2), RestartPolicy: &always}},
		},
		Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: addrLocal}, {IP: addrLocal6}}},
	}, true)
	want := []policy.NamedPort{{Name: "http", Proto: 6, Port: 8080}, {Name: "http", Proto: 6, Port: 9}, {Name: "proxy", Proto: 6, Port: 2}}
	if !slices.Equal(got.Ports, want) || len(got.Addrs) != 2 || !got.Local {
		t.Errorf("%+v", got)
	}
}
