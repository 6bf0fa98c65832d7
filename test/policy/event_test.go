package policy

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

// monitor runs 'podweir monitor' on a node.
func (w *world) monitor(node string, args ...string) *cluster.Process {
	w.Helper()
	n := w.c.Node(node)
	p, err := n.Start(w.ctx, append([]string{"podweir", "--socket", n.Socket(), "monitor"}, args...)...)
	w.must(err)
	w.Cleanup(func() { _ = p.Kill(context.WithoutCancel(w.ctx)) })
	return p
}

// line is what the monitor says next, while fn makes it happen again and
// again: the monitor may not listen yet when it happens first.
func (w *world) line(p *cluster.Process, fn func()) string {
	w.Helper()
	for range 100 {
		fn()
		ctx, cancel := context.WithTimeout(w.ctx, 200*time.Millisecond)
		line, err := p.Line(ctx)
		cancel()
		if err == nil {
			return line
		}
		if !errors.Is(err, context.DeadlineExceeded) || w.ctx.Err() != nil {
			w.Fatalf("monitor: %v\n%s", err, p.Stderr())
		}
	}
	w.Fatalf("the monitor says nothing\n%s", p.Stderr())
	return ""
}

// tells: every denial is told of on the node that denies, to all who listen,
// with the pods and the policies that are to blame.
func (w *world) tells() {
	w.apply(
		"x/deny\npodSelector: {matchLabels: {app: b}}\npolicyTypes: [Ingress]",
		"x/out\npodSelector: {matchLabels: {app: c}}\npolicyTypes: [Egress]",
	)
	try := func(from, to string) func() {
		return func() {
			w.Helper()
			w.probe([]mesh.Probe{{From: w.at(from), Proto: "udp", To: netip.AddrPortFrom(w.addrs(to)[0], portA)}})
		}
	}
	check := func(p *cluster.Process, from, to string, port uint16, direction, policy string, fn func()) {
		w.Helper()
		var ev api.Event
		w.must(json.Unmarshal([]byte(w.line(p, fn)), &ev))
		pod := to
		if direction == "egress" {
			pod = from
		}
		d := ev.Denied
		if d == nil || d.Direction != direction || d.Pod != pod || d.Source.Pod != from || d.Destination.Pod != to ||
			d.Destination.Addr != w.addrs(to)[0] || d.Destination.Port != port || ev.Reason != "drop_policy_"+direction ||
			!slices.Equal(ev.Policies, []string{policy}) || ev.RuleID != 0 || ev.Table == 0 || ev.Text != "isolated by "+policy+", no rule allows" {
			w.Errorf("%s -> %s: told %+v, denied %+v", from, to, ev, d)
		}
		if age := time.Since(ev.Time); age < 0 || age > time.Minute {
			w.Errorf("it happened %v ago", age)
		}
	}
	b := w.monitor("node-b", "-o", "json", "--reason", "policy", "--pod", "x/b")
	check(b, "x/a", "x/b", portA, "ingress", "x/deny", try("x/a", "x/b"))
	// Another listener, in words; and egress, told of where the source is.
	words := w.monitor("node-a", "--reason", "drop_policy")
	a := w.monitor("node-a", "-o", "json", "--pod", "v/a")
	check(a, "x/c", "v/a", portA, "egress", "x/out", try("x/c", "v/a"))
	if got, want := w.line(words, try("x/c", "v/a")), ": egress of x/c: isolated by x/out, no rule allows"; !strings.HasSuffix(got, want) ||
		!strings.Contains(got, " drop_policy_egress udp x/c ("+w.addrs("x/c")[0].String()) {
		w.Errorf("in words: %q, want an end of %q", got, want)
	}

	// A flow that ran before it was denied.
	const long = 9100
	w.serveLong("v/b", long)
	to := netip.AddrPortFrom(w.addrs("v/b")[0], long)
	s, err := w.netns("x/a").Stream(w.ctx, to.String(), "-proto", "udp")
	w.must(err)
	w.Cleanup(func() { _ = s.Kill(context.WithoutCancel(w.ctx)) })
	vb := w.monitor("node-b", "-o", "json", "--pod", "v/b")
	w.apply("v/later\npodSelector: {}\npolicyTypes: [Ingress]")
	check(vb, "x/a", "v/b", long, "ingress", "v/later", func() {})
}
