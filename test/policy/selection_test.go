package policy

// P1: a pod is isolated per direction, by the policies that select it and
// list that type.
func (w *world) isolation() {
	for _, docs := range [][]string{
		// Type Ingress by default, Egress only with egress rules.
		{"x/default-types\npodSelector: {matchLabels: {app: a}}\ningress: []"},
		{"x/default-egress\npodSelector: {matchLabels: {app: a}}\negress: [{}]\ningress: []"},
		{"x/egress-rule\npodSelector: {matchLabels: {app: b}}\negress:\n- to: [{podSelector: {matchLabels: {app: a}}}]"},
		// Egress alone, listed: ingress stays open.
		{"x/deny-egress\npodSelector: {}\npolicyTypes: [Egress]"},
		{"x/deny-ingress\npodSelector: {}\npolicyTypes: [Ingress]"},
		{"x/deny-all\npodSelector: {}\npolicyTypes: [Ingress, Egress]"},
		// Rules of a type that is not listed do not count.
		{"x/unlisted\npodSelector: {}\npolicyTypes: [Egress]\ningress: [{}]"},
		// An empty rule: everything, from anywhere.
		{"x/deny\npodSelector: {}\npolicyTypes: [Ingress]", "x/any-source\npodSelector: {matchLabels: {app: b}}\ningress: [{}]"},
		// ports empty is all of them, ports: [{}] every TCP port.
		{"x/ports-empty\npodSelector: {}\ningress:\n- ports: []\n  from: [{podSelector: {}}]"},
		{"x/ports-tcp\npodSelector: {}\ningress:\n- ports: [{}]"},
		{"x/ports-udp\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- ports: [{protocol: UDP}]"},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
}

// P2: within a peer AND, between peers OR; policies add up; both ends must
// allow.
func (w *world) peers() {
	for _, docs := range [][]string{
		{"x/and\npodSelector: {}\ningress:\n- from:\n  - podSelector: {matchLabels: {app: a}}\n    namespaceSelector: {matchLabels: {team: blue}}"},
		{"x/or\npodSelector: {}\ningress:\n- from:\n  - podSelector: {matchLabels: {app: a}}\n  - namespaceSelector: {matchLabels: {team: blue}}"},
		{"x/own-namespace\npodSelector: {}\ningress:\n- from: [{podSelector: {}}]"},
		{"x/own-namespace-out\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{podSelector: {matchLabels: {app: b}}}]"},
		{"x/all-namespaces\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {}}]"},
		// Two policies, two rules: the sum.
		{
			"x/one\npodSelector: {matchLabels: {app: b}}\ningress:\n- from: [{podSelector: {matchLabels: {app: a}}}]\n  ports: [{port: 8080}]",
			"x/two\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {matchLabels: {team: blue}}}]\n  ports: [{port: 8081, protocol: UDP}]\n- from: [{podSelector: {matchLabels: {app: c}}}]",
		},
		// Egress of one end, ingress of the other.
		{
			"x/out\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{namespaceSelector: {matchLabels: {team: blue}}}]\n- to: [{podSelector: {matchLabels: {app: b}}}]",
			"x/in\npodSelector: {matchLabels: {app: b}}\ningress:\n- from: [{podSelector: {matchLabels: {app: c}}}]",
			"v/in\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: a}}}]\n  ports: [{port: 8080}]",
		},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
}

// P6: ports are the pod's; endPort is included. (That a service's port is
// not what counts is shown by P13.)
func (w *world) ports() {
	for _, docs := range [][]string{
		{"x/one-port\npodSelector: {}\ningress:\n- ports: [{port: 8080}]"},
		{"x/one-port-udp\npodSelector: {}\ningress:\n- ports: [{port: 8081, protocol: UDP}]"},
		{"x/range-last\npodSelector: {}\ningress:\n- ports: [{port: 8000, endPort: 8080}]"},
		{"x/range-first\npodSelector: {}\ningress:\n- ports: [{port: 8081, endPort: 9000}]"},
		{"x/range-both\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- ports: [{port: 8080, endPort: 8081, protocol: UDP}]"},
		{"x/range-neither\npodSelector: {}\ningress:\n- ports: [{port: 8082, endPort: 9000}, {port: 1, endPort: 8079}]"},
		{"x/range-of-one\npodSelector: {}\ningress:\n- ports: [{port: 8080, endPort: 8080}]"},
		// Several ports and peers, overlapping ranges of two policies.
		{
			"x/overlap-1\npodSelector: {}\ningress:\n- ports: [{port: 8000, endPort: 8080}]\n  from: [{podSelector: {}}]",
			"x/overlap-2\npodSelector: {}\ningress:\n- ports: [{port: 8080, endPort: 8090}]\n  from: [{namespaceSelector: {matchLabels: {team: blue}}}]",
		},
		// SCTP isolates TCP and is not read as TCP (P8).
		{"x/sctp\npodSelector: {}\ningress:\n- ports: [{port: 8080, protocol: SCTP}]"},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
}

// P7: blocks match whatever is inside, pods and nodes included; an except
// trims its own block alone. The parties outside are the matrix's "ext".
func (w *world) blocks() {
	podA := w.addrs("x/a")
	for _, docs := range [][]string{
		{"x/outside\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 172.31.0.1/32}}, {ipBlock: {cidr: 'fd00:172:31::1/128'}}]"},
		{"x/nodes-and-outside\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 172.31.0.0/24}}, {ipBlock: {cidr: 'fd00:172:31::/64'}}]"},
		{"x/pods-of-node-a\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 10.244.80.0/24}}, {ipBlock: {cidr: 'fd00:10:244:50::/64'}}]"},
		{"x/egress\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{ipBlock: {cidr: 172.31.0.0/24, except: [172.31.0.2/32]}}, {ipBlock: {cidr: 'fd00:172:31::/64', except: ['fd00:172:31::2/128']}}]"},
		{"x/all-but-pod\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 0.0.0.0/0, except: [" + podA[0].String() + "/32]}}, {ipBlock: {cidr: '::/0', except: ['" + podA[1].String() + "/128']}}]"},
		// One family alone: the other has nothing.
		{"x/ipv4-only\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 0.0.0.0/0}}]"},
		// What one block excepts another allows, in one rule and in two policies.
		{"x/overlap\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 10.244.0.0/16, except: [10.244.80.0/24]}}, {ipBlock: {cidr: " + podA[0].String() + "/32}}]"},
		{
			"x/overlap-1\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.244.80.0/24]}}]\n  ports: [{port: 8080}]",
			"x/overlap-2\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: 10.244.80.0/24, except: [" + podA[0].String() + "/32]}}]\n  ports: [{port: 8081}]",
		},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
}

// P16: every operator, and the name every namespace carries.
func (w *world) selectors() {
	for _, sel := range []string{
		"podSelector: {matchExpressions: [{key: app, operator: In, values: [a, c]}]}",
		"podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [a]}]}",
		"podSelector: {matchExpressions: [{key: tier, operator: NotIn, values: [front]}]}", // also those without the key
		"podSelector: {matchExpressions: [{key: tier, operator: Exists}]}",
		"podSelector: {matchExpressions: [{key: tier, operator: DoesNotExist}]}",
		"podSelector: {matchLabels: {app: a}, matchExpressions: [{key: tier, operator: Exists}]}",
		"namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: v}}",
		"namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [v]}]}",
		"namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [blue, green]}]}, podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [b]}]}",
		"namespaceSelector: {matchExpressions: [{key: team, operator: DoesNotExist}]}",
	} {
		w.apply("x/selector\npodSelector: {matchExpressions: [{key: app, operator: Exists}]}\ningress:\n- from: [{" + sel + "}]")
		w.check()
	}
	// The policy's own selector.
	for _, sel := range []string{
		"{matchExpressions: [{key: app, operator: In, values: [b]}]}",
		"{matchExpressions: [{key: app, operator: NotIn, values: [b]}]}",
		"{matchExpressions: [{key: tier, operator: DoesNotExist}]}",
	} {
		w.apply("x/selector\npodSelector: " + sel)
		w.check()
	}
}
