package policy

import "strings"

// P19: tiers, priorities, actions, subjects and peers of
// ClusterNetworkPolicies, with and without NetworkPolicies.
func (w *world) clusterPolicies() {
	red := "subject: {namespaces: {matchLabels: {team: red}}}\n"
	for _, docs := range [][]string{
		// Admin Deny beats a NetworkPolicy that allows.
		{
			"deny-blue\ntier: Admin\npriority: 1\n" + red + "ingress:\n- action: Deny\n  from: [{namespaces: {matchLabels: {team: blue}}}]",
			"x/allow\npodSelector: {}\ningress: [{}]",
		},
		// Admin Accept of one port beats one that isolates.
		{
			"accept-port\ntier: Admin\npriority: 1\n" + red + "ingress:\n- action: Accept\n  from: [{namespaces: {}}]\n  protocols: [{tcp: {destinationPort: {number: 8080}}}]",
			"x/deny\npodSelector: {}",
		},
		// Pass, which skips the rest of its tier: NetworkPolicies decide, or
		// else Baseline.
		{
			"pass-front\ntier: Admin\npriority: 3\n" + red + "ingress:\n- action: Pass\n  from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}}]",
			"deny-pods\ntier: Admin\npriority: 4\n" + red + "ingress:\n- action: Deny\n  from: [{namespaces: {}}]",
			"x/one-port\npodSelector: {matchLabels: {app: b}}\ningress: [{ports: [{port: 8080}]}]",
			"base\ntier: Baseline\npriority: 0\n" + red + "ingress:\n- action: Deny\n  from: [{namespaces: {}}]\n  protocols: [{udp: {destinationPort: {range: {start: 8080, end: 8081}}}}]",
		},
		// Default deny below what namespaces say; lower priorities first.
		{
			"default-deny\ntier: Baseline\npriority: 1000\nsubject: {namespaces: {}}\ningress:\n- action: Deny\n  from: [{namespaces: {}}]",
			"same-app\ntier: Baseline\npriority: 10\nsubject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: b}}}}\ningress:\n- action: Accept\n  from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: b}}}}]",
			"v/own\npodSelector: {matchLabels: {app: a}}\ningress:\n- from: [{podSelector: {}}]",
		},
		// networks hold pods and nodes that are inside of them.
		{"to-b\ntier: Admin\npriority: 1\n" + red + "egress:\n- action: Deny\n  to: [{networks: [10.244.158.0/24, fd00:10:244:9e::/64]}]\n  protocols: [{tcp: {destinationPort: {number: 8080}}}]"},
		{"all-but-pods\ntier: Admin\npriority: 1\n" + red + "egress:\n- action: Pass\n  to: [{namespaces: {}}]\n- action: Deny\n  to: [{networks: [0.0.0.0/0, \"::/0\"]}]"},
		{"no-nodes\ntier: Admin\npriority: 1\nsubject: {namespaces: {}}\negress:\n- action: Deny\n  to: [{nodes: {}}]\n  protocols: [{tcp: {destinationPort: {number: 8081}}}, {udp: {destinationPort: {number: 8080}}}]"},
		// Both ends: what egress accepts, ingress may deny.
		{
			"out\ntier: Admin\npriority: 1\n" + red + "egress:\n- action: Accept\n  to: [{namespaces: {matchLabels: {team: blue}}}]\n- action: Deny\n  to: [{namespaces: {}}]",
			"in\ntier: Admin\npriority: 2\nsubject: {namespaces: {matchLabels: {team: blue}}}\ningress:\n- action: Deny\n  from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: b}}}}]",
		},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
}

// P19: an edit, and the other version of the API.
func (w *world) clusterPolicyChanges() {
	spec := "tier: Admin\npriority: 1\nsubject: {namespaces: {matchLabels: {team: red}}}\ningress:\n- action: %\n  from: [{namespaces: {}}]"
	for _, action := range []string{"Deny", "Accept", "Pass"} {
		w.apply("edited\n"+strings.Replace(spec, "%", action, 1), "x/some\npodSelector: {}\ningress: [{ports: [{port: 8080}]}]")
		w.check()
	}
	w.clear()
	old := "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: old}\nspec:\n  " +
		strings.ReplaceAll(strings.Replace(spec, "%", "Deny", 1), "\n", "\n  ") + "\n"
	w.write("old\n" + strings.Replace(spec, "%", "Deny", 1)) // what is expected, and the file's name
	file, err := w.c.Manifests.File(w.cluster["old"])
	w.must(err)
	w.must(w.c.Manifests.PutRaw(file[len(w.c.Manifests.Dir)+1:], []byte(old)))
	w.settled()
	w.check()
}
