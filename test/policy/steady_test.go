package policy

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/mesh"
)

// pair is a call that must come to the same end whatever goes on.
type pair struct {
	from, to string
	port     uint16
}

// steady tries every pair by TCP and UDP in both families, each time with new
// flows, round after round while during runs and for some rounds after it. All
// must come to the end that the rules of now say, in every round.
func (w *world) steady(during func(), pairs ...pair) {
	w.Helper()
	var probes []mesh.Probe
	var want []string
	r := w.rules()
	answered := 0
	for _, p := range pairs {
		for i, dst := range w.addrs(p.to) {
			for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
				probes = append(probes, mesh.Probe{From: w.at(p.from), Proto: strings.ToLower(string(proto)), To: netip.AddrPortFrom(dst, p.port)})
				if r.allowed(w.party(p.from, w.addrs(p.from)[i]), w.party(p.to, dst), proto, int(p.port)) {
					want = append(want, mesh.Answered)
					answered++
				} else {
					want = append(want, mesh.Silent)
				}
			}
		}
	}
	if answered == 0 || answered == len(probes) {
		w.Fatalf("%d of %d pairs are allowed: this shows nothing", answered, len(probes))
	}
	round := func() error {
		ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
		defer cancel()
		got, err := mesh.Run(ctx, probes, w.dropped)
		if err != nil {
			return err
		}
		for i, res := range got {
			if res.Outcome != want[i] {
				return fmt.Errorf("%v: %s %v, want %s", probes[i], res.Outcome, res.Err, want[i])
			}
		}
		return nil
	}
	over := make(chan struct{})
	result := make(chan error, 1)
	rounds := 0
	go func() {
		after := 0
		for after < 5 {
			if err := round(); err != nil {
				result <- fmt.Errorf("round %d: %w", rounds, err)
				return
			}
			rounds++
			select {
			case <-over:
				after++
			default:
			}
		}
		result <- nil
	}()
	during()
	close(over)
	if err := <-result; err != nil {
		w.describe()
		w.Fatal(err)
	}
	w.Logf("%d rounds", rounds)
}

// A change of policies that says nothing of a pair never touches it, however
// many identities, classes and tables it makes anew.
func (w *world) unrelated() {
	w.apply("x/deny-all\npodSelector: {}\npolicyTypes: [Ingress, Egress]",
		"x/in\npodSelector: {}\ningress:\n- from: [{namespaceSelector: {matchLabels: {team: blue}}}]\n  ports: [{port: 8000, endPort: 8080}, {port: 8000, endPort: 8080, protocol: UDP}]")
	w.steady(func() {
		for i := range 12 {
			w.apply(fmt.Sprintf("v/others-%d\npodSelector: {matchLabels: {app: none}}\ningress:\n- from: [{podSelector: {matchLabels: {app: a}}}]", i),
				fmt.Sprintf("x/others-%d\npodSelector: {}\ningress:\n- from: [{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [b%d]}]}}]\n  ports: [{port: %d, endPort: 9000}]", i, i, 8500+i))
			if i%3 == 2 {
				w.remove(fmt.Sprintf("x/others-%d", i))
				w.remove(fmt.Sprintf("x/others-%d", i-1))
			}
		}
	}, pair{"v/a", "x/a", portA}, pair{"v/b", "x/a", portA}, pair{"v/a", "x/b", portA}, pair{"v/a", "x/a", portB}, pair{"z/a", "x/a", portA}, pair{"x/a", "v/a", portA})
}
