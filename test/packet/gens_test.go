package packet

import (
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// A moved generation is noticed once, by whichever direction comes first,
// and the other one is brought up to date with it.
func TestGenerationIsCheckedOnce(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000).open()
		for _, slot := range []uint32{slotClient, slotRemote} {
			w.bump(slot)
			c.send(ack).is(fwdTunnel, stale, hit)
			c.send(ack).is(fwdTunnel, hit)
			c.reply(ack).is(fwdLocal, hit)
			w.bump(slot)
			c.reply(ack).is(fwdLocal, stale, hit)
			c.reply(ack).is(fwdLocal, hit)
			c.send(ack).is(fwdTunnel, hit)
		}
		// What the flow was not decided from does not matter to it.
		for _, slot := range []uint32{slotLocal, slotShared, slotNodeB, slotWorld} {
			w.bump(slot)
		}
		c.send(ack).is(fwdTunnel, hit)
	})
}

// A policy reaches established connections in both directions, and lets them
// go on, translated as before, when it is taken back.
func TestPolicyChangeOnEstablished(t *testing.T) {
	for _, side := range []struct {
		name   string
		why    reason
		change func(*world, uint32)
	}{
		{"egress", bpf.DpPwReasonPW_DROP_POLICY_EGRESS, func(w *world, table uint32) {
			w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyOut = table })
		}},
		{"ingress", bpf.DpPwReasonPW_DROP_POLICY_INGRESS, func(w *world, table uint32) {
			w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = table })
		}},
	} {
		t.Run(side.name, func(t *testing.T) {
			both(t, func(t *testing.T, w *world) {
				out := tcp(ap(w.f.client, 40000), ap(w.f.vipLocal, svcPort), syn)
				in := tcp(ap(w.f.local, podPort), out.src, syn|ack)
				send := func() *result { return w.pod(devClient, out) }
				answer := func() *result { return w.pod(devLocal, in) }
				send().is(fwdLocal, miss, created)
				answer().is(fwdLocal, hitNew)
				out.flags, in.flags = ack, ack
				send().is(fwdLocal, hitNew, confirmed)

				side.change(w, 9)
				send().is(side.why, stale)
				send().is(side.why)
				answer().is(side.why)
				if e := w.entry(out); e.Verdict != maps.VerdictDeny || reason(e.Reason) != side.why {
					t.Fatalf("entry says %s, %d", maps.VerdictName(e.Verdict), e.Reason)
				}
				side.change(w, 0)
				answer().is(fwdLocal, stale, hit).leaves(out.dst, out.src)
				send().is(fwdLocal, hit).leaves(out.src, in.src)

				// The same, first noticed by the answering side.
				side.change(w, 9)
				answer().is(side.why, stale)
				send().is(side.why)
				side.change(w, 0)
				send().is(fwdLocal, stale, hit).leaves(out.src, in.src)
				answer().is(fwdLocal, hit).leaves(out.dst, out.src)
			})
		})
	}
}

// The rule that spoke is kept with the flow, before and after a change.
func TestRuleIsKept(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 3 })
		w.policy(3, idClient, maps.PolicyPort, maps.ProtoUDP, podPort, maps.VerdictAllow)
		fr := udp(ap(w.f.client, 40000), ap(w.f.local, podPort))
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		if e := w.entry(fr); e.Rule != 301 {
			t.Fatalf("rule %d, want 301", e.Rule)
		}
		w.policy(3, idClient, maps.PolicyPort, maps.ProtoUDP, podPort, maps.VerdictDeny)
		w.bump(slotLocal)
		w.pod(devClient, fr).is(bpf.DpPwReasonPW_DROP_POLICY_INGRESS, stale)
		if e := w.entry(fr); e.Rule != 301 {
			t.Fatalf("rule %d, want 301", e.Rule)
		}
	})
}

// A remote pod that moved to another node: the flow follows at once.
func TestRouteFollowsNode(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000).open()
		w.addr(w.f.remote, maps.Peer{Identity: idRemote, Slot: slotRemote, Node: nodeIDC, Flags: maps.PeerPod})
		w.bump(slotRemote)
		c.send(ack).is(fwdTunnel, stale, hit)
		if e := w.entry(c.out); at(e.To) != nodePlace(nodeIDC) {
			t.Fatalf("goes to %v", at(e.To))
		}
		// Answers are expected from there, and from there only.
		c.reply(ack).is(spoofedFlow)
		w.tunnel(w.f.nodeC, c.answer).is(fwdLocal, hit)
	})
}

// An address that vanished stops its flows with the reason of the place.
func TestDestinationVanishes(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := udp(ap(w.f.client, 40000), ap(w.f.local, podPort))
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		e, _, err := w.set.Endpoints.Get(maps.ToAddr(w.f.local))
		if err != nil {
			t.Fatal(err)
		}
		del(w, w.set.Endpoints, maps.ToAddr(w.f.local))
		w.bump(slotLocal)
		w.pod(devClient, fr).is(bpf.DpPwReasonPW_DROP_NO_ENDPOINT, stale)
		// Back again under another index, MAC and slot: the flow goes on.
		e.Ifindex, e.Mac, e.Slot = w.index(devThird), mac(0x43), slotThird
		w.endpoint(w.f.local, e)
		w.bump(slotLocal)
		w.bump(slotShared)
		r := w.pod(devClient, fr).is(fwdLocal, stale, hitNew)
		if [6]byte(r.out[:6]) != mac(0x43) {
			t.Fatalf("delivered to MAC %x", r.out[:6])
		}
		if e := w.entry(fr); at(e.To) != w.podPlace(devThird) {
			t.Fatalf("goes to %v", at(e.To))
		}
	})
}

// An address given to another pod starts anew, in both directions.
func TestAddressReuse(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		out := tcp(ap(w.f.client, 40000), ap(w.f.remote, podPort), syn)
		w.pod(devClient, out).is(fwdTunnel, miss, created)
		w.tunnel(w.f.nodeB, out.back()).is(fwdLocal, hitNew)

		// The pod behind devClient goes, its address appears behind devThird.
		w.edit(w.f.client, func(e *maps.Endpoint) { e.Ifindex, e.Mac = w.index(devThird), mac(0x43) })
		r := w.pod(devThird, out).is(fwdTunnel, takenOver, miss, created)
		if e := w.entry(out); at(e.From) != w.podPlace(devThird) {
			t.Fatalf("comes from %v", at(e.From))
		}
		// Answers go to the new pod, the old device speaks for nobody.
		in := out.back()
		in.flags = syn | ack
		r = w.tunnel(w.f.nodeB, in).is(fwdLocal, hitNew)
		if [6]byte(r.out[:6]) != mac(0x43) {
			t.Fatalf("delivered to MAC %x", r.out[:6])
		}
		w.pod(devClient, out).is(spoofedFlow)
	})
}

// First noticed by the answering side, the old flow ends as well: its packet
// is judged as one of no known flow.
func TestAddressReuseSeenByTheAnswer(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		out := tcp(ap(w.f.client, 40000), ap(w.f.vipRemote, svcPort), syn)
		w.pod(devClient, out).is(fwdTunnel, miss, created)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.Ifindex, e.Mac = w.index(devThird), mac(0x43) })
		in := tcp(ap(w.f.remote, podPort), out.src, syn|ack)
		r := w.tunnel(w.f.nodeB, in).is(fwdLocal, stale, takenOver, miss)
		if [6]byte(r.out[:6]) != mac(0x43) {
			t.Fatalf("delivered to MAC %x", r.out[:6])
		}
		w.noEntry(out)
		w.noEntry(in)
	})
}
