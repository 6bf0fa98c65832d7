package services

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/tools/probe"
)

// zone says where a node is; "" takes the label away.
func (w *world) zone(node, zone string) {
	w.Helper()
	obj := w.Node(node).Object()
	if zone != "" {
		obj.Labels[corev1.LabelTopologyZone] = zone
	}
	w.must(w.Manifests.Put(obj))
}

// only checks by whom somebody's calls are answered: by all of these. By TCP: a
// datagram from a port that was used shortly before stays with its backend.
func (w *world) only(what, from string, s service, at string, v6 bool, want string) {
	w.Helper()
	servers := strings.Fields(want)
	call := probe.Call{Proto: "tcp", Target: s.frontend(w, at, v6).String(), Count: few, Servers: len(servers), Most: enough}
	r, err := w.callers[from].call(w.ctx, call)
	w.must(err)
	got := map[string]bool{}
	for _, a := range r.Attempts {
		if !a.OK {
			w.Fatalf("%s: %s by %s: %s %s", what, from, at, a.Kind, a.Error)
		}
		got[a.Reply.Server] = true
	}
	if list := slices.Sorted(maps.Keys(got)); !slices.Equal(list, servers) {
		w.Errorf("%s: %s by %s: answered by %v, want %v", what, from, at, list, servers)
	}
}

// Hints lead everybody to the endpoints of its own zone or node, if all of
// them have hints and one is for it; the choice moves with the node's zone and
// the endpoints' (S16).
func TestS16Topology(t *testing.T) {
	w := shared(t)
	w.Cleanup(func() {
		for _, n := range w.Nodes {
			w.zone(n.NodeName, "")
		}
	})
	w.zone("node-a", "east")
	w.zone("node-b", "west")
	s := service{name: "near-by", n: 205, ends: "back-a@east back-b@west", change: func(_ *world, svc *corev1.Service) {
		near := corev1.ServiceTrafficDistributionPreferSameZone
		svc.Spec.TrafficDistribution = &near
	}}
	w.put(s)
	// In node-a's view, and in node-b's.
	expect := func(what, a, b string) {
		w.Helper()
		w.settled()
		for _, v6 := range []bool{false, true} {
			for _, at := range []string{"cluster", "lb", "node@node-a"} {
				w.only(what, "pod-a", s, at, v6, a)
				w.only(what, "pod-b", s, at, v6, b)
				w.only(what, "node-a", s, at, v6, a)
			}
			w.only(what, "out", s, "node@node-a", v6, a)
			w.only(what, "out-b", s, "lb", v6, b)
		}
	}
	step := func(what, ends, a, b string) {
		w.Helper()
		s.ends = ends
		w.write(s)
		expect(what, a, b)
	}
	expect("each in its zone", "back-a", "back-b")
	w.zone("node-a", "west")
	expect("node-a has moved", "back-b", "back-b")
	step("the endpoints have changed places", "back-a@west back-b@east", "back-a", "back-a")
	step("one without a hint", "back-a@west back-b", "back-a back-b", "back-a back-b")
	w.zone("node-b", "north")
	step("none for node-b's zone", "back-a@west back-b@east", "back-a", "back-a back-b")
	step("hints for nodes go first", "back-a@west%node-b back-b@west%node-a", "back-b", "back-a")
	step("none for node-b", "back-a@west%node-a back-b@west%node-a", "back-a back-b", "back-a back-b")
	step("one zone's endpoint is on its way out", "back-a!terminating@west back-b@east", "back-b", "back-b")
	w.zone("node-a", "")
	step("a node without a zone", "back-a@west back-b@east", "back-a back-b", "back-a back-b")
}

// Affinity does not lead out of the set that a traffic policy leaves: a client
// that has been at a backend of another node by one address stays on its own
// node by the other, and with one backend there.
func TestS14AffinityWithinTrafficPolicies(t *testing.T) {
	w := shared(t)
	ends := "back-a pod-a back-b pod-b"
	on := map[string][]string{"node-a": {"back-a", "pod-a"}, "node-b": {"back-b", "pod-b"}}
	for _, c := range []struct {
		local, narrow, wide string // a policy, an address that obeys it and one that does not
		callers             map[string]string
		n                   int
	}{
		{"internal", "cluster", "lb", map[string]string{"pod-a": "node-a", "pod-b": "node-b", "node-a": "node-a", "node-b": "node-b"}, 206},
		{"external", "lb", "cluster", map[string]string{"out": "node-a", "out-b": "node-b"}, 207},
	} {
		w.T.Run(c.local, func(t *testing.T) {
			w := w.sub(t)
			s := service{name: "sticky-" + c.local, n: c.n, ends: ends, local: c.local, change: sticky(0)}
			w.put(s)
			w.each(func(w *world, proto string, v6 bool) {
				for from, node := range c.callers {
					w.one(from, s, c.wide, proto, v6)
					was := w.one(from, s, c.narrow, proto, v6)
					if !slices.Contains(on[node], was) {
						w.Errorf("%s by %s: answered by %s, which is not on %s", from, c.narrow, was, node)
					}
					if now := w.one(from, s, c.narrow, proto, v6); now != was {
						w.Errorf("%s by %s: answered by %s, then by %s", from, c.narrow, was, now)
					}
				}
			})
			// Without the one that a client had, the other one of its node.
			s.ends = "pod-a back-b pod-b"
			w.write(s)
			w.settled()
			w.each(func(w *world, proto string, v6 bool) {
				for from, node := range c.callers {
					if got := w.one(from, s, c.narrow, proto, v6); !slices.Contains(on[node], got) || got == "back-a" {
						w.Errorf("%s by %s: answered by %s", from, c.narrow, got)
					}
				}
			})
		})
	}
}

// A process of a node that sends from an address that only this node knows as
// its own: a virtual one, of a bridge of its own, on lo. Other nodes see the
// node's address; a pod of this node sees it as it is.
func TestHostUnderAnotherAddress(t *testing.T) {
	w := shared(t)
	w.know("virtual", "10.99.0.1", "fd00:99::1")
	a := w.Node("node-a")
	for _, v6 := range []bool{false, true} {
		addr := w.addr("virtual", v6)
		w.on(a.Netns, "ip addr add %v/%d dev lo", addr, addr.BitLen())
		w.Cleanup(func() {
			if _, err := a.Exec(context.Background(), "ip", "addr", "del", addr.String(), "dev", "lo"); err != nil {
				w.Error(err)
			}
		})
	}
	s := service{name: "virtual", n: 208, ends: "back-a"}
	w.put(s) // by then the agent knows the addresses, too
	for end, sees := range map[string]string{"back-a": "virtual", "back-b": "node-a", "node-b": "node-a", "ext": "node-a"} {
		s.ends = end
		w.write(s)
		w.settled()
		w.each(func(w *world, proto string, v6 bool) {
			for _, at := range []string{"cluster", "lb", "node@node-a", "node@node-b"} {
				target := s.frontend(w, at, v6)
				before, err := w.read()
				w.must(err)
				r, err := w.callers["node-a"].call(w.ctx, probe.Call{Proto: proto, Target: target.String(), Source: w.addr("virtual", v6).String(), Timeout: 3 * time.Second})
				w.must(err)
				if got := r.Attempts[0]; !got.OK || got.Reply.Server != end || addrOf(got.Reply.Peer) != w.addr(sees, v6) || got.Remote != target.String() {
					w.Errorf("to %s by %s: %+v (%+v), want the backend to see %s\n%s", end, at, got, got.Reply, sees, w.traces(got.Local, before))
				}
			}
		})
	}
}

// A backend that is taken out keeps the connections that it has, whoever
// called it and by whatever address, and gets no other (S23).
func TestS23DrainsTCP(t *testing.T) {
	w := shared(t)
	s := service{name: "drains", n: 213, ends: "back-b"}
	w.put(s)
	var flows []flow
	frontends := map[string][]string{
		"pod-a": {"cluster", "lb", "node@node-a", "node@node-b"}, "pod-b": {"cluster", "node@node-a"},
		"node-a": {"cluster", "lb", "node@node-a", "node@node-b"}, "node-b": {"cluster", "lb"},
		"out": {"lb", "ext", "node@node-a", "node@node-b", "cluster"}, "out-b": {"lb", "node@node-b"},
	}
	for from, ats := range frontends {
		for _, at := range ats {
			for _, v6 := range []bool{false, true} {
				target := s.frontend(w, at, v6)
				st, err := w.callers[from].ns.Stream(w.ctx, target.String(), "-proto", "tcp", "-interval", "20ms")
				w.must(err)
				flows = append(flows, flow{st, from + " by " + at + " " + target.String()})
			}
		}
	}
	w.answeredBy(flows, "back-b")
	for _, ends := range []string{"back-b!terminating back-a", "back-b!stopped back-a", "back-a", "", "back-a"} {
		s.ends = ends
		w.write(s)
		w.settled()
		w.answeredBy(flows, "back-b")
		if ends == "" {
			continue
		}
		for from, ats := range frontends {
			for _, at := range ats {
				for _, v6 := range []bool{false, true} {
					if got := w.who(from, s, at, "tcp", v6, 1); got["back-a"] != 1 {
						w.Errorf("endpoints %q: %s by %s: a new connection was answered by %v", ends, from, at, got)
					}
				}
			}
		}
	}
	for _, f := range flows {
		r, err := f.Stop(w.ctx)
		if err != nil || r.Error != "" {
			w.Errorf("%s: %v, %+v", f.what, err, r)
		}
	}
}
