package packet

import (
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
)

const (
	spoofedFlow   = bpf.DpPwReasonPW_DROP_SPOOFED_FLOW
	spoofedSource = bpf.DpPwReasonPW_DROP_SPOOFED_SOURCE
	badSource     = bpf.DpPwReasonPW_DROP_BAD_SOURCE
)

// Nobody but its ends may speak on a live flow, wherever the copy comes from;
// and the flow is none the worse for the attempt.
func TestSpoofedFlow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000).open()
		c.answer.flags = ack
		c.out.flags = ack
		for name, r := range map[string]*result{
			"the initiator's tuple from another pod":      w.pod(devThird, c.out),
			"the answer's tuple from another pod":         w.pod(devThird, c.answer),
			"the answer's tuple from another tunnel peer": w.tunnel(w.f.nodeC, c.answer),
			"the answer's tuple from the wire":            w.wire(c.answer),
		} {
			t.Run(name, func(t *testing.T) {
				r.t = t
				r.is(spoofedFlow)
			})
		}
		c.send(ack).is(fwdTunnel, hit)
		c.reply(ack).is(fwdLocal, hit)
	})
}

func TestSpoofedFlowOfHostAndWire(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		host := udp(ap(w.f.nodeA, 40000), ap(w.f.client, podPort))
		w.deliver(devClient, "", host).is(fwdLocal, miss, created)
		w.wire(host).is(spoofedFlow)
		w.tunnel(w.f.nodeB, host).is(spoofedFlow)
		w.pod(devThird, host).is(spoofedFlow)
		w.deliver(devClient, "", host).is(fwdLocal, hitNew)

		world := udp(ap(w.f.world, 40000), ap(w.f.client, podPort))
		w.wire(world).is(fwdLocal, miss, created)
		w.tunnel(w.f.nodeB, world).is(spoofedFlow)
		w.pod(devThird, world).is(spoofedFlow)
		// The wire is one place: another device will do.
		w.run(shot{hook: fromNetdev, dev: devWire2, pkt: world.bytes(t)}).is(fwdLocal, hitNew)
	})
}

func TestSpoofedSource(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		to := ap(f.client, podPort)
		fromPods := []netip.Addr{f.local, f.free, f.remote, f.nodeA, f.nodeB, f.world, f.vip}
		for _, src := range fromPods {
			for _, dst := range []netip.Addr{f.local, f.remote, f.world, f.nodeA, f.vip, f.client} {
				fr := udp(ap(src, 1000), ap(dst, svcPort))
				w.pod(devClient, fr).is(spoofedSource, miss)
				w.noEntry(fr)
			}
		}
		// Through the tunnel: only what lives behind that node.
		for _, src := range []netip.Addr{f.client, f.local, f.free, f.far, f.nodeA, f.nodeC, f.world, f.vip, f.lost} {
			w.tunnel(f.nodeB, udp(ap(src, 1000), to)).is(spoofedSource, miss)
		}
		// By the wire: no pods, no nodes, no services.
		for _, src := range []netip.Addr{f.client, f.local, f.free, f.remote, f.remoteFree, f.nodeA, f.nodeB, f.vip, f.lost} {
			w.wire(udp(ap(src, 1000), to)).is(spoofedSource, miss)
		}
		w.wire(udp(ap(f.world, 1000), to)).is(fwdLocal, miss, created)
	})
}

func TestBadSource(t *testing.T) {
	bad := map[bool][]string{
		false: {"0.0.0.0", "0.1.2.3", "127.0.0.1", "127.9.9.9", "224.0.0.1", "255.255.255.255"},
		true:  {"::", "::1", "ff02::1", "ff0e::1"},
	}
	both(t, func(t *testing.T, w *world) {
		for _, src := range bad[w.f.v6] {
			fr := udp(ap(netip.MustParseAddr(src), 1000), ap(w.f.client, podPort))
			w.wire(fr).is(badSource, miss)
			w.tunnel(w.f.nodeB, fr).is(badSource, miss)
			fr.dst = ap(w.f.remote, podPort)
			w.pod(devClient, fr).is(badSource, miss)
			w.noEntry(fr)
		}
	})
}

// An ICMP error under a false name, or about somebody else's flow.
func TestSpoofedICMPError(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		out := udp(ap(f.client, 40000), ap(f.remote, podPort))
		w.pod(devClient, out).is(fwdTunnel, miss, created)
		quote := out.bytes(t)
		w.run(w.tunnelShot(f.nodeB, icmpError(t, f.world, f.client, quote))).is(spoofedSource)
		w.run(w.tunnelShot(f.nodeB, icmpError(t, f.far, f.client, quote))).is(spoofedSource)
		for _, src := range []netip.Addr{f.remote, f.local, f.nodeA, f.vip} {
			w.run(w.at(fromNetdev, icmpError(t, src, f.client, quote))).is(spoofedSource)
		}
		w.run(shot{hook: fromPod, dev: devThird, pkt: icmpError(t, f.remote, f.client, quote)}).is(spoofedSource)
		// Under their own name, but no part of the flow.
		unrelated := bpf.DpPwReasonPW_DROP_ICMP_UNRELATED
		w.run(shot{hook: fromPod, dev: devThird, pkt: icmpError(t, f.third, f.client, quote)}).is(unrelated)
		w.run(w.tunnelShot(f.nodeC, icmpError(t, f.nodeC, f.client, quote))).is(unrelated)
		w.run(w.at(fromNetdev, icmpError(t, f.world, f.client, quote))).is(unrelated)
	})
}
