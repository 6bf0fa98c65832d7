package packet

import (
	"fmt"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const (
	egressDenied  = bpf.DpPwReasonPW_DROP_POLICY_EGRESS
	ingressDenied = bpf.DpPwReasonPW_DROP_POLICY_INGRESS
)

// try sends one first packet of every protocol and says which may pass.
func (w *world) try(send func(frame) *result, fr frame) (tcpOK, udpOK, sctpOK, icmpOK bool) {
	w.t.Helper()
	ok := func(proto uint8) bool {
		w.t.Helper()
		fr.proto, fr.flags = proto, syn
		clear(w, w.set.FlowsNew)
		r := send(fr)
		why, _ := r.ends()
		if maps.IsDrop(why) {
			if why != egressDenied && why != ingressDenied {
				w.t.Fatalf("dropped for another reason: %v", r)
			}
			w.noEntry(fr)
			return false
		}
		return true
	}
	return ok(maps.ProtoTCP), ok(maps.ProtoUDP), ok(maps.ProtoSCTP), ok(protoICMP)
}

// The exact port decides over its class, the class over the wildcard,
// whatever each of them says; nothing at all means denied.
func TestProbeOrder(t *testing.T) {
	const table, class = 7, 3
	const none = maps.VerdictAllow + maps.VerdictDeny // no such entry
	allow, deny := maps.VerdictAllow, maps.VerdictDeny
	both(t, func(t *testing.T, w *world) {
		w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = table })
		put(w, w.set.PortClass, podPort, class)
		for _, exact := range []uint8{allow, deny, none} {
			for _, byClass := range []uint8{allow, deny, none} {
				for _, wildcard := range []uint8{allow, deny, none} {
					clear(w, w.set.Policy)
					set := func(kind, proto uint8, port uint16, verdict uint8) {
						if verdict != none {
							w.policy(table, idClient, kind, proto, port, verdict)
						}
					}
					set(maps.PolicyPort, maps.ProtoTCP, podPort, exact)
					set(maps.PolicyClass, maps.ProtoTCP, class, byClass)
					set(maps.PolicyAny, 0, 0, wildcard)
					want := deny
					for _, v := range []uint8{wildcard, byClass, exact} {
						if v != none {
							want = v
						}
					}
					fr := frame{src: ap(w.f.client, 1), dst: ap(w.f.local, podPort)}
					tcpOK, udpOK, sctpOK, icmpOK := w.try(func(fr frame) *result { return w.pod(devClient, fr) }, fr)
					if tcpOK != (want == allow) {
						t.Errorf("exact %d class %d any %d: TCP passes: %v", exact, byClass, wildcard, tcpOK)
					}
					// The TCP entries say nothing about others.
					rest := wildcard == allow
					if udpOK != rest || sctpOK != rest || icmpOK != rest {
						t.Errorf("any %d: UDP %v, SCTP %v, ICMP %v", wildcard, udpOK, sctpOK, icmpOK)
					}
				}
			}
		}
	})
}

// The default decides where nothing else is said of a peer, in tables whose
// number says that there is one; and never lets in who has no identity.
func TestDefault(t *testing.T) {
	const class, none = 3, maps.VerdictAllow + maps.VerdictDeny
	allow, deny := maps.VerdictAllow, maps.VerdictDeny
	both(t, func(t *testing.T, w *world) {
		put(w, w.set.PortClass, podPort, class)
		fr := frame{src: ap(w.f.client, 1), dst: ap(w.f.local, podPort)}
		check := func(what string, want bool) {
			t.Helper()
			a, b, c, d := w.try(func(fr frame) *result { return w.pod(devClient, fr) }, fr)
			if a != want || b != want || c != want || d != want {
				t.Errorf("%s: TCP %v, UDP %v, SCTP %v, ICMP %v, want %v", what, a, b, c, d, want)
			}
		}
		for _, table := range []uint32{7, 7 | maps.TableDefault} {
			w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = table })
			for _, byDefault := range []uint8{allow, deny, none} {
				for _, wildcard := range []uint8{allow, deny, none} {
					clear(w, w.set.Policy)
					if byDefault != none {
						w.policy(table, 0, maps.PolicyDefault, 0, 0, byDefault)
					}
					want := byDefault == allow && table != 7
					if wildcard != none {
						w.policy(table, idClient, maps.PolicyAny, 0, 0, wildcard)
						want = wildcard == allow
					}
					check(fmt.Sprintf("table %#x, default %d, any %d", table, byDefault, wildcard), want)
				}
			}
			// One port is denied, the rest is left to the default.
			clear(w, w.set.Policy)
			w.policy(table, 0, maps.PolicyDefault, 0, 0, allow)
			w.policy(table, idClient, maps.PolicyPort, maps.ProtoTCP, podPort, deny)
			w.policy(table, idClient, maps.PolicyClass, maps.ProtoUDP, class, deny)
			a, b, c, d := w.try(func(fr frame) *result { return w.pod(devClient, fr) }, fr)
			if rest := table != 7; a || b || c != rest || d != rest {
				t.Errorf("table %#x: denied TCP %v, UDP %v; left to the default SCTP %v, ICMP %v", table, a, b, c, d)
			}
		}
		// The one that follows the others is not the default of another table.
		clear(w, w.set.Policy)
		w.policy(8|maps.TableDefault, 0, maps.PolicyDefault, 0, 0, allow)
		check("another table's default", false)
		w.policy(7|maps.TableDefault, 0, maps.PolicyDefault, 0, 0, allow)
		check("default", true)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.Identity = maps.IdentityUnknown })
		check("no identity", false)
	})
}

// An entry is for one table, one identity, one protocol, one port.
func TestEntryIsExact(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
		w.edit(w.f.third, func(e *maps.Endpoint) { e.PolicyIn = 8 })
		w.policy(7, idClient, maps.PolicyPort, maps.ProtoSCTP, podPort, maps.VerdictAllow)
		client := func(fr frame) *result { return w.pod(devClient, fr) }
		fr := frame{src: ap(w.f.client, 1), dst: ap(w.f.local, podPort)}
		if a, b, c, d := w.try(client, fr); a || b || !c || d {
			t.Errorf("SCTP rule: TCP %v, UDP %v, SCTP %v, ICMP %v", a, b, c, d)
		}
		fr.dst = ap(w.f.local, podPort+1)
		if a, b, c, d := w.try(client, fr); a || b || c || d {
			t.Error("another port passes")
		}
		fr.dst = ap(w.f.third, podPort)
		if a, b, c, d := w.try(client, fr); a || b || c || d {
			t.Error("another table's rule counts")
		}
		fr = frame{src: ap(w.f.third, 1), dst: ap(w.f.local, podPort)}
		if a, b, c, d := w.try(func(fr frame) *result { return w.pod(devThird, fr) }, fr); a || b || c || d {
			t.Error("another identity passes")
		}
	})
}

// Both ends must allow, each in its own table and direction.
func TestBothEndsMustAllow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := tcp(ap(w.f.client, 1), ap(w.f.local, podPort), syn)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 2 })
		w.pod(devClient, fr).is(egressDenied, miss)
		w.policy(1, idLocal, maps.PolicyPort, maps.ProtoTCP, podPort, maps.VerdictAllow)
		w.pod(devClient, fr).is(ingressDenied, miss)
		w.policy(2, idClient, maps.PolicyPort, maps.ProtoTCP, podPort, maps.VerdictAllow)
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		// Replies pass; what the other side starts is another matter.
		w.pod(devLocal, fr.back()).is(fwdLocal, hitNew)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 3 })
		w.pod(devLocal, fr.back()).is(fwdLocal, stale, hitNew)
		w.pod(devLocal, tcp(ap(w.f.local, 2), ap(w.f.client, podPort), syn)).is(ingressDenied, miss)
	})
}

// The verdict is about the pod behind the service, by its own port.
func TestServiceIsNoBypass(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		via, direct := tcp(ap(f.client, 1), ap(f.vipLocal, svcPort), syn), tcp(ap(f.client, 2), ap(f.local, podPort), syn)
		each := func(want reason, engine ...reason) {
			t.Helper()
			clear(w, w.set.FlowsNew)
			w.pod(devClient, via).is(want, engine...)
			w.pod(devClient, direct).is(want, engine...)
		}
		w.edit(f.local, func(e *maps.Endpoint) { e.PolicyIn = 2 })
		w.policy(2, idClient, maps.PolicyPort, maps.ProtoTCP, svcPort, maps.VerdictAllow) // the wrong port
		each(ingressDenied, miss)
		w.policy(2, idClient, maps.PolicyPort, maps.ProtoTCP, podPort, maps.VerdictAllow)
		each(fwdLocal, miss, created)
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		each(egressDenied, miss)
		w.policy(1, idLocal, maps.PolicyPort, maps.ProtoTCP, svcPort, maps.VerdictAllow)
		w.policy(1, maps.IdentityWorld, maps.PolicyAny, 0, 0, maps.VerdictAllow) // whoever is at the service's address
		each(egressDenied, miss)
		w.policy(1, idLocal, maps.PolicyPort, maps.ProtoTCP, podPort, maps.VerdictAllow)
		each(fwdLocal, miss, created)
	})
}

// Whatever the policies: the node reaches its pods, a pod itself.
func TestNodeAndSelfAlways(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyIn, e.PolicyOut = 1, 1 })
		w.policy(1, maps.IdentityHost, maps.PolicyAny, 0, 0, maps.VerdictDeny)
		w.policy(1, idClient, maps.PolicyAny, 0, 0, maps.VerdictDeny)
		yes := func(name string, a, b, c, d bool) {
			t.Helper()
			if !a || !b || !c || !d {
				t.Errorf("%s: TCP %v, UDP %v, SCTP %v, ICMP %v", name, a, b, c, d)
			}
		}
		// By what it is, not by the address: any source the host may use.
		for _, src := range []frame{{src: ap(f.nodeA, 1)}, {src: ap(f.world, 1)}, {src: ap(f.local, 1)}} {
			src.dst = ap(f.client, podPort)
			a, b, c, d := w.try(func(fr frame) *result { return w.deliver(devClient, "", fr) }, src)
			yes("host to pod", a, b, c, d)
		}
		self := frame{src: ap(f.client, 1), dst: ap(f.client, podPort)}
		a, b, c, d := w.try(func(fr frame) *result { return w.pod(devClient, fr) }, self)
		yes("pod to itself", a, b, c, d)
		// Another node, and this one's address under another's hand, are judged.
		deny := frame{src: ap(f.nodeB, 1), dst: ap(f.client, podPort)}
		if a, b, c, d := w.try(func(fr frame) *result { return w.tunnel(f.nodeB, fr) }, deny); a || b || c || d {
			t.Error("another node passes isolation")
		}
		deny.src = ap(f.world, 1)
		if a, b, c, d := w.try(func(fr frame) *result { return w.deliver(devClient, devWire, fr) }, deny); a || b || c || d {
			t.Error("what the host forwards passes isolation")
		}
		// The pod's own calls to the node are egress like any other.
		w.pod(devClient, udp(ap(f.client, 1), ap(f.nodeA, 53))).is(egressDenied, miss)
	})
}

// Isolation at every place where a packet may meet its first hook.
func TestIsolationAtEveryHook(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, rd := range w.roads() {
			w := newWorld(t, w.f)
			rd := w.road(rd.name)
			fr := tcp(ap(rd.src, 40000), ap(rd.asked, svcPort), syn)
			for _, pod := range []func(*maps.Endpoint){
				func(e *maps.Endpoint) { e.PolicyOut = 1 }, func(e *maps.Endpoint) { e.PolicyIn = 1 },
			} {
				w.fill()
				w.edit(w.f.client, pod)
				w.edit(w.f.local, pod)
				e, _, err := w.set.Endpoints.Get(maps.ToAddr(w.f.client))
				if err != nil {
					t.Fatal(err)
				}
				pods := bpf.DpPwPlaceKindPW_PLACE_POD
				want := rd.out
				switch {
				case e.PolicyOut != 0 && rd.from.kind == pods:
					want = egressDenied
				case e.PolicyIn != 0 && rd.to.kind == pods && rd.from != hostPlace():
					want = ingressDenied
				}
				if why, _ := rd.send(fr).ends(); why != want {
					t.Errorf("%s: %s, want %s", rd.name, maps.ReasonName(why), maps.ReasonName(want))
				}
			}
		}
	})
}

// A packet that missed its flow, as one may while another CPU moves it from
// table to table, is a packet of that flow, not one to be judged as a first.
func TestMissedFlowIsNotRefused(t *testing.T) {
	onOneCPU(t)
	both(t, func(t *testing.T, w *world) {
		fr := udp(ap(w.f.client, 40000), ap(w.f.local, podPort))
		w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
		w.policy(7, idClient, maps.PolicyAny, 0, 0, maps.VerdictAllow)
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		// No generation moves: the flow stands, a first packet would not pass.
		w.policy(7, idClient, maps.PolicyAny, 0, 0, maps.VerdictDeny)
		other := fr
		other.src = ap(w.f.client, 40001)
		again := shot{hook: fromPod, dev: devClient, pkt: fr.bytes(t)}
		w.shoot(again, w.objs.Slow).is(fwdLocal, miss, hitNew)
		w.pod(devClient, fr).is(fwdLocal, hitNew)
		w.pod(devClient, other).is(ingressDenied, miss)
	})
}
