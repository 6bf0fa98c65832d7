package policy

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// answer is what of 'podweir policy ask -o json' is compared.
type answer struct {
	Source, Destination struct{ Addr netip.Addr }
	Verdict             string
	Partial             bool
	Egress, Ingress     answerHalf
}

type answerHalf struct {
	Asked         bool
	Table, RuleID uint32
	Verdict, Rule string
	Policies      []string
}

// ask asks a node about a pair, in both families.
func (w *world) ask(node, from, to, port string) []answer {
	w.Helper()
	end := func(key string) string {
		switch {
		case key == node:
			return "host"
		case w.pods[key] != nil:
			return key
		}
		return w.addrs(key)[0].String()
	}
	out, err := w.c.Node(node).Podweir(w.ctx, "policy", "ask", "--from", end(from), "--to", end(to), "--port", port, "-o", "json")
	w.must(err)
	var body struct{ Answers []answer }
	w.must(json.Unmarshal([]byte(out), &body))
	if len(body.Answers) == 0 {
		w.Fatalf("no answer: %s", out)
	}
	return body.Answers
}

// asks: what ask says on the nodes of both ends is what packets meet there,
// as the matrix has just shown, and it names who is to blame.
func (w *world) asks() {
	w.apply(
		"x/out\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{namespaceSelector: {matchLabels: {team: blue}}}]\n- to: [{podSelector: {matchLabels: {app: b}}}]\n  ports: [{port: 8080}]",
		"x/in\npodSelector: {matchLabels: {app: b}}\ningress:\n- from: [{podSelector: {matchLabels: {app: c}}}]\n- from: [{ipBlock: {cidr: 172.31.0.1/32}}]\n  ports: [{port: 8081}]",
		"v/in\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: a}}}]\n  ports: [{port: 8080, protocol: UDP}, {port: 8080}]",
	)
	w.check()
	rules := w.rules()
	verdicts, i := map[string]int{}, 0
	for _, from := range w.everyone() {
		for _, to := range w.everyone() {
			if w.pods[from] == nil && w.pods[to] == nil {
				continue
			}
			var nodes []string
			for _, key := range []string{from, to} {
				if p := w.pods[key]; p != nil && !slices.Contains(nodes, p.Spec.NodeName) {
					nodes = append(nodes, p.Spec.NodeName)
				}
			}
			port, number, proto := "8080/tcp", portA, corev1.ProtocolTCP
			if i++; i%3 == 0 {
				port, number, proto = "8081/udp", portB, corev1.ProtocolUDP
			}
			said := map[netip.Addr]bool{} // by the source: allowed on every node that decides
			for _, node := range nodes {
				for _, a := range w.ask(node, from, to, port) {
					before, ok := said[a.Source.Addr]
					said[a.Source.Addr] = a.Verdict == "allowed" && (before || !ok)
					w.plausible(node, from, to, a)
					verdicts[a.Verdict]++
				}
			}
			for i, src := range w.addrs(from) {
				allowed, ok := said[src]
				want := rules.allowed(w.party(from, src), w.party(to, w.addrs(to)[i]), proto, number)
				if ok && allowed != want {
					w.Errorf("%s (%v) -> %s %s: asked on %v, allowed %v, want %v", from, src, to, port, nodes, allowed, want)
				}
			}
			if _, ok := said[w.addrs(from)[0]]; !ok {
				w.Errorf("%s -> %s: no answer for IPv4: %v", from, to, said)
			}
		}
	}
	if verdicts["allowed"] == 0 || verdicts["denied"] == 0 || len(verdicts) != 2 {
		w.Errorf("verdicts: %v", verdicts)
	}
}

// plausible: the node has asked its own pods' halves and no others, and every
// verdict of an isolated pod has a policy behind it.
func (w *world) plausible(node, from, to string, a answer) {
	w.Helper()
	here := func(key string) bool { return w.pods[key] != nil && w.pods[key].Spec.NodeName == node }
	self := from == to
	if want := here(from) && !self; a.Egress.Asked != want {
		w.Errorf("%s: %s -> %s: egress asked: %v", node, from, to, a.Egress.Asked)
	}
	if want := here(to) && !self && from != node; a.Ingress.Asked != want {
		w.Errorf("%s: %s -> %s: ingress asked: %v", node, from, to, a.Ingress.Asked)
	}
	elsewhere := w.pods[from] != nil && !here(from) || w.pods[to] != nil && !here(to)
	if elsewhere && !a.Partial {
		w.Errorf("%s: %s -> %s: does not say that another node decides as well", node, from, to)
	}
	for key, h := range map[string]answerHalf{from: a.Egress, to: a.Ingress} {
		if h.Table == 0 {
			continue
		}
		if len(h.Policies) == 0 {
			w.Errorf("%s: %s is isolated by nobody", node, key)
		}
		switch policy, _, _ := strings.Cut(h.Rule, " "); {
		case h.Verdict == "deny" && h.RuleID == 0:
		case h.Verdict == "allow" && slices.Contains(h.Policies, policy) && w.policies[policy] != nil:
		default:
			w.Errorf("%s: %s: verdict %s by %q of %v", node, key, h.Verdict, h.Rule, h.Policies)
		}
	}
}
