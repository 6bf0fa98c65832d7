package policy_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
)

// clusterPolicies reads specs, named a, b and so on.
func clusterPolicies(t testing.TB, specs ...string) []*cnp {
	t.Helper()
	var out []*cnp
	for i, spec := range specs {
		p := &cnp{}
		p.Name = string(rune('a'+i%26)) + strings.Repeat("z", i/26)
		if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
			t.Fatalf("policy %s: %v", p.Name, err)
		}
		out = append(out, p)
	}
	return out
}

// about is a spec about the pod local.
func about(tier string, priority int, rules string) string {
	return fmt.Sprintf(`{tier: %s, priority: %d, subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: local}}}}, %s}`, tier, priority, rules)
}

const (
	fromAll    = `from: [{namespaces: {}}]`
	fromClient = `from: [{pods: {namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: client}}}}]`
	toWorld    = `to: [{networks: [192.0.2.0/24, "2001:db8::/32"]}]`
	tcp80      = `protocols: [{tcp: {destinationPort: {number: 80}}}]`
)

// P19: tiers, priorities, actions, and every kind of subject, peer and
// protocol.
func TestContractCluster(t *testing.T) {
	isolate := `{podSelector: {matchLabels: {app: local}}}`
	allowAll := `{podSelector: {matchLabels: {app: local}}, ingress: [{}], egress: [{}]}`
	cases := map[string]struct {
		cluster, namespaced []string
		verdicts            []verdict
	}{
		"Admin Deny beats NetworkPolicy": {[]string{about("Admin", 1, `ingress: [{action: Deny, `+fromClient+`}]`)}, []string{allowAll}, []verdict{
			{in, addrClient, tcp, 80, false}, {in, addrClient6, icmp, 0, false}, {in, addrRemote, tcp, 80, true}, {in, addrWorld, tcp, 80, true}, {out, addrClient, tcp, 80, true},
		}},
		"Admin Accept beats NetworkPolicy": {[]string{about("Admin", 1, `ingress: [{action: Accept, `+fromClient+`, `+tcp80+`}]`)}, []string{isolate}, []verdict{
			{in, addrClient, tcp, 80, true}, {in, addrClient, tcp, 81, false}, {in, addrClient, icmp, 0, false}, {in, addrRemote, tcp, 80, false},
		}},
		"Pass leaves it to NetworkPolicy": {[]string{
			about("Admin", 1, `ingress: [{action: Pass, `+fromClient+`}]`), about("Admin", 2, `ingress: [{action: Deny, `+fromAll+`}]`),
		}, []string{`{podSelector: {matchLabels: {app: local}}, ingress: [{ports: [{port: 80}]}]}`}, []verdict{
			{in, addrClient, tcp, 80, true}, {in, addrClient, tcp, 81, false}, {in, addrRemote, tcp, 80, false},
		}},
		"Pass over both tiers allows": {[]string{
			about("Admin", 1, `ingress: [{action: Pass, `+fromClient+`}]`), about("Admin", 2, `ingress: [{action: Deny, `+fromAll+`}]`),
			about("Baseline", 1, `ingress: [{action: Pass, `+fromClient+`}]`), about("Baseline", 2, `ingress: [{action: Deny, `+fromAll+`}]`),
		}, nil, []verdict{{in, addrClient, tcp, 80, true}, {in, addrRemote, tcp, 80, false}, {in, addrWorld, tcp, 80, true}}},
		"Baseline denies by default": {[]string{about("Baseline", 1, `ingress: [{action: Accept, `+fromClient+`}, {action: Deny, `+fromAll+`}]`)}, nil, []verdict{
			{in, addrClient, tcp, 80, true}, {in, addrRemote, tcp, 80, false}, {in, addrRemote6, icmp, 0, false}, {in, addrWorld, tcp, 80, true}, {in, addrNodeB, tcp, 80, true},
		}},
		"NetworkPolicy ends before Baseline": {[]string{about("Baseline", 0, `ingress: [{action: Deny, `+fromAll+`}]`)}, []string{allowAll}, []verdict{
			{in, addrClient, tcp, 80, true},
		}},
		"NetworkPolicy that isolates is final": {[]string{about("Baseline", 0, `ingress: [{action: Accept, `+fromAll+`}]`)}, []string{isolate}, []verdict{
			{in, addrClient, tcp, 80, false},
		}},
		"lower priorities first": {[]string{
			about("Admin", 1000, `ingress: [{action: Deny, `+fromAll+`}]`), about("Admin", 0, `ingress: [{action: Accept, `+fromClient+`}]`),
		}, nil, []verdict{{in, addrClient, tcp, 80, true}, {in, addrRemote, tcp, 80, false}}},
		"equal priorities by name": {[]string{
			about("Admin", 5, `ingress: [{action: Accept, `+fromClient+`}]`), about("Admin", 5, `ingress: [{action: Deny, `+fromAll+`}]`),
		}, nil, []verdict{{in, addrClient, tcp, 80, true}, {in, addrRemote, tcp, 80, false}}},
		"rules in their order": {[]string{
			about("Admin", 5, `ingress: [{action: Deny, `+fromClient+`, `+tcp80+`}, {action: Accept, `+fromAll+`}, {action: Deny, `+fromAll+`}]`),
		}, nil, []verdict{{in, addrClient, tcp, 80, false}, {in, addrClient, tcp, 81, true}, {in, addrClient, udp, 80, true}, {in, addrRemote, tcp, 80, true}}},
		"Deny of one port of an allowed range": {[]string{
			about("Admin", 5, `ingress: [{action: Deny, `+fromAll+`, protocols: [{tcp: {destinationPort: {number: 8005}}}]}, {action: Accept, `+fromAll+`, protocols: [{tcp: {destinationPort: {range: {start: 8000, end: 8010}}}}]}, {action: Deny, `+fromAll+`}]`),
		}, nil, []verdict{
			{in, addrClient, tcp, 7999, false}, {in, addrClient, tcp, 8000, true}, {in, addrClient, tcp, 8005, false}, {in, addrClient, tcp, 8010, true},
			{in, addrClient, tcp, 8011, false}, {in, addrClient, udp, 8001, false},
		}},
		"Deny of a range around an allowed port": {[]string{
			about("Admin", 5, `ingress: [{action: Deny, `+fromAll+`, protocols: [{tcp: {destinationPort: {range: {start: 8000, end: 8010}}}}]}]`),
		}, []string{`{podSelector: {matchLabels: {app: local}}, ingress: [{ports: [{port: 8005}, {port: 9000}]}]}`}, []verdict{
			{in, addrClient, tcp, 8005, false}, {in, addrClient, tcp, 9000, true}, {in, addrWorld, tcp, 8005, true},
		}},
		"protocols are apart": {[]string{about("Admin", 5, `ingress: [{action: Deny, `+fromAll+`, protocols: [{udp: {destinationPort: {number: 80}}}, {sctp: {destinationPort: {number: 81}}}]}]`)}, nil, []verdict{
			{in, addrClient, udp, 80, false}, {in, addrClient, tcp, 80, true}, {in, addrClient, sctp, 80, true}, {in, addrClient, sctp, 81, false}, {in, addrClient, icmp, 0, true},
		}},
		"named ports, ingress": {[]string{about("Admin", 5, `ingress: [{action: Deny, `+fromAll+`, protocols: [{destinationNamedPort: http}, {destinationNamedPort: nosuch}]}]`)}, nil, []verdict{
			{in, addrClient, tcp, 8080, false}, {in, addrClient, udp, 8080, true}, {in, addrClient, tcp, 80, true},
		}},
		"named ports, egress": {[]string{about("Admin", 5, `egress: [{action: Deny, to: [{namespaces: {}}], protocols: [{destinationNamedPort: http}]}]`)}, nil, []verdict{
			{out, addrClient, tcp, 80, false}, {out, addrRemote, tcp, 80, true}, {out, addrRemote6, tcp, 9090, false}, {out, addrWorld, tcp, 80, true},
		}},
		"networks hold what is in the cluster": {[]string{about("Admin", 5, `egress: [{action: Deny, to: [{networks: [10.244.158.0/24, 172.31.0.0/24]}]}]`)}, nil, []verdict{
			{out, addrRemote, tcp, 80, false}, {out, addrRemote, icmp, 0, false}, {out, addrRemote6, tcp, 80, true}, {out, addrNodeB, tcp, 80, false}, {out, addrClient, tcp, 80, true}, {out, addrWorld, tcp, 80, true},
		}},
		"networks with pods passed": {[]string{about("Admin", 5, `egress: [{action: Pass, to: [{namespaces: {}}]}, {action: Deny, to: [{networks: [0.0.0.0/0]}]}]`)}, nil, []verdict{
			{out, addrRemote, tcp, 80, true}, {out, addrWorld, tcp, 80, false}, {out, addrNodeB, tcp, 80, false}, {out, addrWorld6, tcp, 80, true},
		}},
		"nodes by labels and status": {[]string{about("Admin", 5, `egress: [{action: Deny, to: [{nodes: {matchLabels: {zone: b}}}]}]`)}, nil, []verdict{
			{out, addrNodeB, tcp, 80, false}, {out, addrNodeA, tcp, 80, true}, {out, addrRemote, tcp, 80, true},
		}},
		"all nodes, not their devices": {[]string{about("Admin", 5, `egress: [{action: Deny, to: [{nodes: {}}]}]`)}, nil, []verdict{
			{out, addrNodeB, tcp, 80, false}, {out, addrNodeA, tcp, 80, false}, {out, "172.17.0.1", tcp, 80, true}, {out, addrWorld, tcp, 80, true},
		}},
		"pods on the host's network are no pods": {[]string{about("Admin", 5, `ingress: [{action: Deny, `+fromAll+`}], egress: [{action: Deny, to: [{namespaces: {}}]}]`)}, nil, []verdict{
			{in, addrNodeB, tcp, 80, true}, {out, addrNodeB, tcp, 80, true}, {in, addrRemote, tcp, 80, false},
		}},
		"subject by namespaces": {[]string{`{tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, ingress: [{action: Deny, ` + fromAll + `}]}`}, nil, []verdict{
			{in, addrClient, tcp, 80, false},
		}},
		"subject of other namespaces": {[]string{`{tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: blue}}}, ingress: [{action: Deny, ` + fromAll + `}]}`}, nil, []verdict{
			{in, addrClient, tcp, 80, true},
		}},
		"no rules in a direction say nothing": {[]string{about("Admin", 5, `egress: [{action: Deny, `+toWorld+`}]`)}, []string{isolate}, []verdict{
			{out, addrWorld, tcp, 1, false}, {out, addrWorld6, udp, 1, false}, {out, addrRemote, tcp, 1, true}, {in, addrClient, tcp, 1, false},
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			input := cluster()
			input.Nodes[0].Devices = []netip.Addr{netip.MustParseAddr("172.17.0.1")}
			input.Nodes[1].Labels = map[string]string{"zone": "b"}
			input.Pods = append(input.Pods, policy.Pod{Namespace: "default", Name: "onhost", HostNetwork: true, Addrs: []netip.Addr{netip.MustParseAddr(addrNodeB)}})
			for i, spec := range c.namespaced {
				input.Policies = append(input.Policies, networkPolicy(t, string(rune('a'+i)), spec))
			}
			input.ClusterPolicies = clusterPolicies(t, c.cluster...)
			judged(t, input, c.verdicts)
		})
	}
}

// P19: what makes no sense, or is of a later version of the API, fails closed
// as the API says: an Accept rule matches nothing, Deny and Pass rules deny
// everything; rules before it and other policies hold.
func TestClusterRulesFailClosed(t *testing.T) {
	for part, field := range map[string]string{
		`to: [{}]`: "to[0]",
		`to: []`:   "to",
		`to: [{namespaces: {}, networks: [10.0.0.0/8]}]`:                                                         "to[0]",
		`to: [{namespaces: {matchLabels: {"a b": c}}}]`:                                                          "to[0].namespaces",
		`to: [{pods: {namespaceSelector: {}, podSelector: {matchExpressions: [{key: a, operator: Nope}]}}}]`:     "to[0].pods.podSelector",
		`to: [{nodes: {matchExpressions: [{key: a, operator: In}]}}]`:                                            "to[0].nodes",
		`to: [{networks: [10.0.0.0/8, 10.0.0.0/33]}]`:                                                            "to[0].networks[1]",
		`to: [{domainNames: [example.org]}]`:                                                                     "to[0].domainNames",
		`to: [{namespaces: {}}], protocols: [{}]`:                                                                "protocols[0]",
		`to: [{namespaces: {}}], protocols: [{tcp: {}}]`:                                                         "protocols[0].tcp.destinationPort",
		`to: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 70000}}}]`:                         "protocols[0].tcp.destinationPort",
		`to: [{namespaces: {}}], protocols: [{udp: {destinationPort: {range: {start: 9, end: 8}}}}]`:             "protocols[0].udp.destinationPort",
		`to: [{namespaces: {}}], protocols: [{udp: {destinationPort: {number: 9, range: {start: 9, end: 10}}}}]`: "protocols[0].udp.destinationPort",
		`to: [{namespaces: {}}], protocols: [{destinationNamedPort: "80"}]`:                                      "protocols[0].destinationNamedPort",
		`to: [{networks: [10.0.0.0/8]}], protocols: [{destinationNamedPort: http}]`:                              "protocols[0].destinationNamedPort",
	} {
		for action, want := range map[string]bool{"Accept": true, "Deny": false, "Pass": false} {
			input := cluster()
			// An Accept rule that matches nothing leaves it to the default,
			// which allows.
			input.ClusterPolicies = clusterPolicies(t, about("Baseline", 1, `egress: [{action: Accept, to: [{networks: [192.0.2.0/24]}]}, {action: `+action+`, `+part+`}]`))
			o := policy.Compile(*input, nil)
			if len(o.Problems) != 1 || o.Problems[0].Object != "ClusterNetworkPolicy a" || o.Problems[0].Field != "spec.egress[1]."+field {
				t.Errorf("%s %s: %v, want a problem of %s", action, part, o.Problems, field)
			}
			d := load(&o, input)
			for _, peer := range []string{addrRemote, addrRemote6, addrNodeB, addrWorld6} {
				for _, proto := range []uint8{tcp, udp, icmp} {
					if got := ask(d, addrLocal, out, peer, proto, 80); got != want {
						t.Errorf("%s %s: %s protocol %d allowed: %v", action, part, peer, proto, got)
					}
				}
			}
			if !ask(d, addrLocal, out, addrWorld, tcp, 80) || !ask(d, addrLocal, in, addrClient, tcp, 80) {
				t.Errorf("%s %s: the rule before it, or the other direction, does not hold", action, part)
			}
			// And an Accept rule does accept nothing.
			input.ClusterPolicies[0].Spec.Egress = append(input.ClusterPolicies[0].Spec.Egress,
				clusterPolicies(t, about("Baseline", 1, `egress: [{action: Deny, to: [{networks: [0.0.0.0/0, "::/0"]}]}]`))[0].Spec.Egress...)
			o = policy.Compile(*input, nil)
			if ask(load(&o, input), addrLocal, out, addrRemote, tcp, 80) {
				t.Errorf("%s %s: accepts", action, part)
			}
		}
	}
}

// A policy of which it is not known to whom it applies opens nothing.
func TestClusterPolicyFailsClosed(t *testing.T) {
	rules := `ingress: [{action: Accept, ` + fromClient + `, ` + tcp80 + `}, {action: Deny, ` + fromAll + `, protocols: [{tcp: {destinationPort: {number: 81}}}]}]`
	for spec, field := range map[string]string{
		`tier: Admin, subject: {}`:                                      "spec.subject",
		`tier: Admin, subject: {namespaces: {matchLabels: {"a b": c}}}`: "spec.subject.namespaces",
		`tier: Future, subject: {namespaces: {}}`:                       "spec.tier",
		`tier: Admin, subject: {pods: {namespaceSelector: {matchLabels: {team: nobody}}, podSelector: {}}, namespaces: {}}`:  "spec.subject",
		`tier: Admin, subject: {pods: {namespaceSelector: {}, podSelector: {matchExpressions: [{key: a, operator: Nope}]}}}`: "spec.subject.pods.podSelector",
	} {
		input := cluster()
		input.Policies = append(input.Policies, networkPolicy(t, "web", `{podSelector: {matchLabels: {app: local}}, ingress: [{ports: [{port: 81}, {port: 82}]}]}`))
		input.ClusterPolicies = clusterPolicies(t, `{priority: 1, `+spec+`, `+rules+`}`)
		o := policy.Compile(*input, nil)
		if len(o.Problems) != 1 || o.Problems[0].Field != field {
			t.Errorf("%s: %v, want a problem of %s", spec, o.Problems, field)
		}
		d := load(&o, input)
		for port, want := range map[uint16]bool{80: false, 81: false, 82: true} {
			if got := ask(d, addrLocal, in, addrClient, tcp, port); got != want {
				t.Errorf("%s: port %d allowed: %v", spec, port, got)
			}
		}
		if ask(d, addrClient, in, addrRemote, tcp, 81) || !ask(d, addrClient, in, addrRemote, tcp, 82) {
			t.Errorf("%s: the Deny rule, and it alone, is to hold for every pod", spec)
		}
	}
}

// A pod whose namespace is not known yet is not open in the meantime.
func TestClusterPolicyBeforeTheNamespace(t *testing.T) {
	input := cluster()
	input.ClusterPolicies = clusterPolicies(t, `{tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, egress: [{action: Deny, to: [{networks: [0.0.0.0/0]}]}]}`)
	for _, known := range []bool{true, false} {
		if !known {
			input.Namespaces = input.Namespaces[1:]
		}
		o := policy.Compile(*input, nil)
		if ask(load(&o, input), addrLocal, out, addrWorld, tcp, 80) {
			t.Errorf("namespace known: %v: not denied", known)
		}
	}
}

// A verdict names the rule that made it, a denial the first one.
func TestClusterRules(t *testing.T) {
	input := cluster()
	input.Policies = append(input.Policies, networkPolicy(t, "web", `{podSelector: {matchLabels: {app: local}}, ingress: [{ports: [{port: 82}]}]}`))
	input.ClusterPolicies = clusterPolicies(t,
		about("Admin", 2, `ingress: [{action: Deny, name: no-ssh, `+fromAll+`, protocols: [{tcp: {destinationPort: {number: 22}}}]}, {action: Accept, `+fromClient+`, `+tcp80+`}, {action: Deny, `+fromClient+`}]`))
	o := policy.Compile(*input, nil)
	d := load(&o, input)
	ep := o.Endpoints[types.NamespacedName{Namespace: "default", Name: "local"}]
	if got := fmt.Sprint(ep.InPolicies); got != "[ClusterNetworkPolicy a (Admin) default/web]" || ep.Out != 0 {
		t.Errorf("policies %s, out %d", got, ep.Out)
	}
	for _, c := range []struct {
		peer string
		port uint16
		want string
	}{
		{addrClient, 22, `ClusterNetworkPolicy a (Admin) ingress[0] "no-ssh"`},
		{addrClient, 80, "ClusterNetworkPolicy a (Admin) ingress[1]"},
		{addrClient, 81, "ClusterNetworkPolicy a (Admin) ingress[2]"},
		{addrRemote, 22, `ClusterNetworkPolicy a (Admin) ingress[0] "no-ssh"`},
		{addrRemote, 82, "default/web ingress[0]"},
		{addrRemote, 83, ""},
	} {
		e := d.entry(netip.MustParseAddr(addrLocal), question{dir: in, peer: netip.MustParseAddr(c.peer), proto: tcp, port: c.port})
		got := ""
		if e.Rule != 0 {
			got = o.Rules[e.Rule].String()
		}
		if got != c.want {
			t.Errorf("%s port %d: rule %q, want %q", c.peer, c.port, got, c.want)
		}
	}
}

// A policy about the whole cluster costs no entry per identity, and a pod that
// it does not single out changes no table.
func TestDefaultKeepsTablesSmall(t *testing.T) {
	input := cluster()
	input.Pods = input.Pods[:2]
	for i := range 500 {
		input.Pods = append(input.Pods, policy.Pod{Namespace: "default", Name: fmt.Sprint("p", i),
			Labels: map[string]string{"app": fmt.Sprint("app", i)}, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 1 + byte(i>>8), byte(i)})}})
	}
	// Peers that tell all the pods apart, of another pod's policy.
	var peers []string
	for i := range 500 {
		peers = append(peers, fmt.Sprintf("{podSelector: {matchLabels: {app: app%d}}}", i))
	}
	input.Policies = append(input.Policies, networkPolicy(t, "many", `{podSelector: {matchLabels: {app: client}}, ingress: [{from: [`+strings.Join(peers, ",")+`]}]}`))
	input.ClusterPolicies = clusterPolicies(t, about("Baseline", 1, `ingress: [{action: Accept, `+fromClient+`}, {action: Deny, `+fromAll+`}], egress: [{action: Deny, `+toWorld+`}]`))
	first := policy.Compile(*input, nil)
	local := types.NamespacedName{Namespace: "default", Name: "local"}
	for _, n := range []uint32{first.Endpoints[local].In, first.Endpoints[local].Out} {
		if len(first.Tables[n]) > 10 {
			t.Errorf("table %d has %d entries", n, len(first.Tables[n]))
		}
	}
	input.Pods = append(input.Pods, policy.Pod{Namespace: "default", Name: "new", Labels: map[string]string{"app": "other"}, Addrs: []netip.Addr{netip.MustParseAddr("10.244.9.9")}})
	second := policy.Compile(*input, first.State)
	if a, b := first.Endpoints[local], second.Endpoints[local]; a.In != b.In || a.Out != b.Out {
		t.Errorf("tables %d, %d became %d, %d", a.In, a.Out, b.In, b.Out)
	}
	if second.Addrs[netip.MustParseAddr("10.244.9.9")] == maps.IdentityWorld {
		t.Error("the new pod has no identity of a pod")
	}
}
