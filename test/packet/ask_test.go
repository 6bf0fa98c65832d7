package packet

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// ask has the datapath answer about a packet that is not sent.
func (w *world) ask(fr frame, slot uint32) maps.Ask {
	w.t.Helper()
	a, err := maps.NewAsker(w.objs.Ask).Ask(maps.Ask{Key: fr.key(), Slot: slot})
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// all asks about every backend that the packet may go to.
func (w *world) askAll(fr frame) []maps.Ask {
	w.t.Helper()
	all := []maps.Ask{w.ask(fr, 0)}
	for slot := uint32(1); slot < all[0].Backends; slot++ {
		all = append(all, w.ask(fr, slot))
	}
	return all
}

// half is what one end's table is expected to say.
func half(table, identity, rule uint32, verdict uint8) maps.AskHalf {
	return maps.AskHalf{Table: table, Identity: identity, Rule: rule, Verdict: verdict}
}

// Both halves of the answer, with the rules that gave them, whatever the
// first of them says.
func TestAskHalves(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		w.edit(f.local, func(e *maps.Endpoint) { e.PolicyIn = 2 })
		fr := tcp(ap(f.client, 40000), ap(f.vipLocal, svcPort), syn)
		check := func(fr frame, why reason, egress, ingress maps.AskHalf) {
			t.Helper()
			a := w.ask(fr, 0)
			if reason(a.Reason) != why || a.Egress != egress || a.Ingress != ingress {
				t.Errorf("%s, egress %+v, ingress %+v; want %s, %+v, %+v", maps.ReasonName(reason(a.Reason)),
					a.Egress, a.Ingress, maps.ReasonName(why), egress, ingress)
			}
		}
		deny, allow := maps.VerdictDeny, maps.VerdictAllow
		check(fr, egressDenied, half(1, idLocal, 0, deny), half(2, idClient, 0, deny))
		w.policy(2, idClient, maps.PolicyPort, maps.ProtoTCP, podPort, allow)
		check(fr, egressDenied, half(1, idLocal, 0, deny), half(2, idClient, 201, allow))
		w.policy(1, idLocal, maps.PolicyAny, 0, 0, allow)
		check(fr, 0, half(1, idLocal, 103, allow), half(2, idClient, 201, allow))
		w.policy(2, idClient, maps.PolicyPort, maps.ProtoTCP, podPort, deny)
		check(fr, ingressDenied, half(1, idLocal, 103, allow), half(2, idClient, 201, deny))

		a := w.ask(fr, 0)
		if maps.FromAddr(a.Dst) != f.local || a.Dport != podPort || a.Service != 11 || a.Backends != 1 {
			t.Errorf("leads to %v port %d, service %d with %d backends", maps.FromAddr(a.Dst), a.Dport, a.Service, a.Backends)
		}
		// From another node only this node's half is asked; the node itself,
		// and a pod that calls itself, are not judged.
		from := func(src netip.Addr) frame { return tcp(ap(src, 40000), ap(f.local, podPort), syn) }
		check(from(f.remote), ingressDenied, maps.AskHalf{}, half(2, idRemote, 0, deny))
		check(from(f.nodeA), 0, maps.AskHalf{}, maps.AskHalf{})
		check(from(f.local), 0, maps.AskHalf{}, maps.AskHalf{})
		check(tcp(ap(f.client, 1), ap(f.remote, podPort), syn), egressDenied, half(1, idRemote, 0, deny), maps.AskHalf{})
	})
}

// sendFrom sends a packet where the packets of its source come from.
func (w *world) sendFrom(fr frame) *result {
	f := w.f
	switch fr.src.Addr() {
	case f.client:
		return w.pod(devClient, fr)
	case f.local:
		return w.pod(devLocal, fr)
	case f.third:
		return w.pod(devThird, fr)
	case f.remote, f.remoteFree, f.nodeB:
		return w.tunnel(f.nodeB, fr)
	case f.far, f.nodeC:
		return w.tunnel(f.nodeC, fr)
	case f.nodeA:
		return w.host(fr)
	}
	return w.wire(fr)
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// randomPolicy gives the pods of the node tables, and these entries whose
// rules are told apart by their numbers.
func (w *world) randomPolicy(r *rand.Rand) {
	w.t.Helper()
	clear(w, w.set.Policy)
	for _, pod := range []netip.Addr{w.f.client, w.f.local, w.f.third} {
		w.edit(pod, func(e *maps.Endpoint) {
			e.PolicyIn, e.PolicyOut = pick(r, 0, 1, 2, uint32(3)), pick(r, 0, 1, 2, uint32(3))
		})
	}
	for rule := range uint32(24) {
		k := maps.PolicyKey{
			Table:    1 + r.Uint32N(3),
			Identity: pick(r, idClient, idLocal, idThird, idRemote, maps.IdentityWorld, maps.IdentityPod, maps.IdentityRemoteNode, maps.IdentityHost),
			Kind:     pick(r, maps.PolicyPort, maps.PolicyPort, maps.PolicyClass, maps.PolicyAny),
		}
		if k.Kind != maps.PolicyAny {
			k.Proto = pick(r, maps.ProtoTCP, maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP)
		}
		if k.Kind == maps.PolicyPort {
			k.Port = pick[uint16](r, podPort, svcPort, sctpPort)
		}
		put(w, w.set.Policy, k, maps.PolicyEntry{Rule: 1000 + rule, Verdict: pick(r, maps.VerdictAllow, maps.VerdictAllow, maps.VerdictDeny)})
	}
}

// What ask says is what becomes of a packet, in every respect, and asking
// leaves no trace.
func TestAskAgreesWithPackets(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	both(t, func(t *testing.T, w *world) {
		r, f := rand.New(rand.NewPCG(seed, 0)), w.f
		// A service with affinity, which only packets may give to a client.
		w.service(f.vip, svcPort, maps.ProtoTCP, maps.Service{Id: 1, Set: setBoth, Count: 2, Affinity: 3600})
		sources := []netip.Addr{f.client, f.client, f.local, f.third, f.remote, f.remoteFree, f.far, f.nodeA, f.nodeB, f.nodeC, f.world, f.free, f.lost, f.unowned, f.multicast}
		targets := []netip.Addr{
			f.client, f.local, f.third, f.free, f.remote, f.remoteFree, f.far, f.lost, f.nodeA, f.nodeB, f.nodeC, f.world, f.router,
			f.vip, f.vipLocal, f.vipRemote, f.vipEmpty, f.vipEmpty, f.vipHost, f.lb, f.unowned, f.multicast,
		}
		seen := make(map[reason]int)
		for range 40 {
			w.randomPolicy(r)
			clear(w, w.set.FlowsNew)
			clear(w, w.set.Affinity)
			clear(w, w.set.AffinityIn)
			before := w.counters()
			c := w.readCluster()
			var frames []frame
			var answers [][]maps.Ask
			for port := range uint16(100) {
				fr := frame{
					src: ap(pick(r, sources...), 1024+port),
					dst: ap(pick(r, targets...), pick[uint16](r, svcPort, svcPort, podPort, podPort, 4789, sctpPort, nodePort)),
				}
				fr.proto, fr.flags = pick(r, maps.ProtoTCP, maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP, protoICMP), syn
				if fr.proto == protoICMP {
					fr = echo(fr.src.Addr(), fr.dst.Addr(), fr.src.Port())
				}
				all := w.askAll(fr)
				w.sameBackends(c, fr, all)
				switch {
				case fr.proto == maps.ProtoUDP && fr.dst.Port() == 4789 && all[0].From.Kind == maps.PlaceWire:
					// Taken for the tunnel's before it is anybody's.
				case all[0].From.Kind == maps.PlaceHost && all[0].To.Kind == maps.PlaceHost && all[0].Service == 0:
					// Never meets the tunnel's device.
				default:
					frames, answers = append(frames, fr), append(answers, all)
				}
			}
			if len(dump(w, w.set.FlowsNew)) != 0 || len(dump(w, w.set.Affinity)) != 0 || len(dump(w, w.set.AffinityIn)) != 0 {
				t.Fatal("asking left entries behind")
			}
			if d := cmp.Diff(before, w.counters(), cmp.AllowUnexported(row{})); d != "" {
				t.Fatalf("asking was counted: %s", d)
			}
			for i, fr := range frames {
				why, _ := w.sendFrom(fr).ends()
				seen[why]++
				w.agrees(fr, answers[i], why)
			}
		}
		for _, why := range []reason{egressDenied, ingressDenied, fwdLocal, fwdTunnel, fwdWire, fwdHost, passed, noBackend, spoofedSource} {
			if seen[why] < 10 {
				t.Errorf("only %d packets ended as %s", seen[why], maps.ReasonName(why))
			}
		}
		t.Logf("%v", seen)
	})
}

// sameBackends: the answers are about those that the caller may be given.
func (w *world) sameBackends(c *cluster, fr frame, said []maps.Ask) {
	w.t.Helper()
	if said[0].Reason != 0 && said[0].Backends == 0 {
		return // dropped before, or because there is none
	}
	_, want := c.choices(fr.key(), bpf.DpPwPlaceKind(said[0].From.Kind))
	var got []netip.AddrPort
	for _, a := range said {
		if a.Service != 0 {
			got = append(got, ap(maps.FromAddr(a.Dst), a.Dport))
		}
	}
	if !slices.Equal(got, want) {
		w.t.Fatalf("%v -> %v protocol %d: asked about %v, want %v", fr.src, fr.dst, fr.proto, got, want)
	}
}

// agrees: one of the answers, that about the backend which was chosen, says
// what became of the packet.
func (w *world) agrees(fr frame, said []maps.Ask, why reason) {
	w.t.Helper()
	e, created := w.find(fr.key())
	for _, a := range said {
		switch {
		case maps.IsDrop(why):
			if reason(a.Reason) == why {
				return
			}
		case a.Reason != 0:
		case why == passed:
			if a.To.Kind == maps.PlaceNone {
				return
			}
		case created:
			rule := a.Ingress.Rule
			if rule == 0 {
				rule = a.Egress.Rule
			}
			from := e.From
			if from.Kind == maps.PlaceWire {
				from.Id = 0 // any device
			}
			if a.Dst == e.Dst && a.Dport == e.Dport && a.From == from && a.To == e.To && a.Service == e.Service && rule == e.Rule {
				return
			}
		}
	}
	w.t.Fatalf("%v -> %v protocol %d ended as %s (flow %v %+v), but ask said %+v", fr.src, fr.dst, fr.proto,
		maps.ReasonName(why), created, e.Flow, said)
}
