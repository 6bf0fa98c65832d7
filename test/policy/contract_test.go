package policy

import (
	"flag"
	"strings"
	"testing"
)

// The cases share a cluster; each starts without policies.
func TestPolicy(t *testing.T) {
	w := newWorld(t)
	w.run("without policies everything is allowed", func(w *world) {
		if _, denied := w.matrix(); denied > 0 {
			w.Fatalf("the rules deny %d", denied)
		}
	})
	w.run("P1 isolation", (*world).isolation)
	w.run("P2 peers", (*world).peers)
	w.run("P3 replies and ICMP errors", (*world).replies)
	w.run("P4 node and self", (*world).node)
	w.run("P5 pods on the host's network", (*world).hostNetwork)
	w.run("P6 ports", (*world).ports)
	w.run("P6 named ports", (*world).namedPorts)
	w.run("P7 blocks", (*world).blocks)
	w.run("P6 P7 P13 services", (*world).services)
	w.run("P7 clients by NodePorts", (*world).clients)
	w.run("P8 protocols without ports", (*world).protocols)
	w.run("P9 new pods", (*world).newPods)
	w.run("P10 reuse", (*world).reuse)
	w.run("answers to questions", (*world).asks)
	w.run("denials are told of", (*world).tells)
	w.run("P11 changes", (*world).changes)
	w.run("P11 unrelated changes", (*world).unrelated)
	w.run("P16 selectors", (*world).selectors)
	w.run("P17 families", (*world).families)
	w.run("P19 cluster policies", (*world).clusterPolicies)
	w.run("P19 changes and versions", (*world).clusterPolicyChanges)
	w.run("P14 restart", (*world).restart)
	w.run("P14 changes without agents", (*world).missed)
	n := len(w.checked)
	t.Logf("every pair was tried under %d sets of policies", n)
	if all := !strings.Contains(flag.Lookup("test.run").Value.String(), "/"); all && n < 60 {
		t.Error("want 60 and more")
	}
}
