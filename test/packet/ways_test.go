package packet

import (
	"net/netip"
	"sync"

	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

// way is a packet at a hook, whose cost BenchmarkPrograms measures.
type way struct {
	hook, path string
	load       func() (*datapath, error) // nil: standard
	only4      bool
	// prepare brings the world to where the packet takes its path, and says
	// which packet that is.
	prepare func(w *world) shot
	// What each run must count.
	counts []reason
	// fresh packets each begin a flow of their own: all have other ports.
	fresh bool
	// again: a run leaves the packet so that the next run takes the same path;
	// so many times.
	again int
}

// big is a datapath with room for as many flows as a busy node has.
var big = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 1 << 19, FlowsNewMax: 1 << 18})
})

func ways() []way {
	c := func(port uint16, w *world) netip.AddrPort { return ap(w.f.client, port) }
	est := func(out, in shot, w *world, from, to frame) {
		from.flags = syn
		out.pkt = from.bytes(w.t)
		w.run(out)
		to.flags = syn | ack
		in.pkt = to.bytes(w.t)
		w.run(in)
		from.flags = ack
		out.pkt = from.bytes(w.t)
		w.run(out)
	}
	pod := func(dev string) shot { return shot{hook: fromPod, dev: dev} }
	wire := shot{hook: fromNetdev, dev: devWire}
	with := func(s shot, w *world, fr frame) shot {
		s.pkt = fr.bytes(w.t)
		return s
	}
	// established opens a connection and gives its next packet.
	established := func(out, in shot, w *world, fr, answer frame) shot {
		est(out, in, w, fr, answer)
		fr.flags = ack
		fr.ttl = 255
		return with(out, w, fr)
	}
	answered := func(out, in shot, w *world, fr, answer frame) shot {
		est(out, in, w, fr, answer)
		answer.flags = ack
		return with(in, w, answer)
	}
	local := func(w *world) (frame, frame) {
		fr := tcp(c(4000, w), ap(w.f.local, podPort), syn)
		return fr, fr.back()
	}
	remote := func(w *world) (frame, frame) {
		fr := tcp(c(4000, w), ap(w.f.remote, podPort), syn)
		return fr, fr.back()
	}
	return []way{
		{hook: "from_pod", path: "established", counts: []reason{fwdLocal, hit}, again: 200, prepare: func(w *world) shot {
			fr, back := local(w)
			return established(pod(devClient), pod(devLocal), w, fr, back)
		}},
		{hook: "from_pod", path: "established-encap", counts: []reason{fwdEncap, hit}, prepare: func(w *world) shot {
			w.ways()
			fr, back := remote(w)
			return established(pod(devClient), w.tunnelShot(w.f.nodeB, nil), w, fr, back)
		}},
		{hook: "from_pod", path: "established-ipip", only4: true, counts: []reason{fwdIPIP, hit}, prepare: func(w *world) shot {
			w.ipip()
			fr, back := remote(w)
			return established(pod(devClient), w.tunnelShot(w.f.nodeB, nil), w, fr, back)
		}},
		{hook: "from_pod", path: "established-clusterip", counts: []reason{fwdLocal, hit}, prepare: func(w *world) shot {
			fr := tcp(c(4000, w), ap(w.f.vipLocal, svcPort), syn)
			return established(pod(devClient), pod(devLocal), w, fr, tcp(ap(w.f.local, podPort), fr.src, ack))
		}},
		{hook: "from_pod", path: "reply-clusterip", counts: []reason{fwdLocal, hit}, prepare: func(w *world) shot {
			fr := tcp(c(4000, w), ap(w.f.vipLocal, svcPort), syn)
			return answered(pod(devClient), pod(devLocal), w, fr, tcp(ap(w.f.local, podPort), fr.src, ack))
		}},
		{hook: "from_pod", path: "established-masquerade", counts: []reason{fwdWire, hit}, prepare: func(w *world) shot {
			fr, back := outside(w)
			return established(pod(devClient), wire, w, fr, back)
		}},
		{hook: "from_pod", path: "first", fresh: true, counts: []reason{fwdLocal, miss, created}, prepare: func(w *world) shot {
			fr, _ := local(w)
			return with(pod(devClient), w, fr)
		}},
		{hook: "from_pod", path: "first-clusterip", fresh: true, counts: []reason{fwdLocal, miss, created}, prepare: func(w *world) shot {
			return with(pod(devClient), w, tcp(c(4000, w), ap(w.f.vipLocal, svcPort), syn))
		}},
		{hook: "from_pod", path: "first-masquerade", fresh: true, counts: []reason{fwdWire, miss, created}, prepare: func(w *world) shot {
			return with(pod(devClient), w, tcp(c(4000, w), ap(w.f.world, 443), syn))
		}},
		{hook: "from_pod", path: "first-denied", counts: []reason{ingressDenied, miss}, again: 1000, prepare: func(w *world) shot {
			w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
			fr, _ := local(w)
			return with(pod(devClient), w, fr)
		}},
		{hook: "from_pod", path: "fragment-later", counts: []reason{fwdLocal}, prepare: func(w *world) shot {
			parts := cut(udp(c(5000, w), ap(w.f.local, podPort)).with(string(pattern(1500))).bytes(w.t), 77, 496)
			for _, part := range parts[:2] {
				w.run(shot{hook: fromPod, dev: devClient, pkt: part}).ended(fwdLocal)
			}
			return shot{hook: fromPod, dev: devClient, pkt: parts[1]}
		}},
		{hook: "from_netdev", path: "decap", counts: []reason{fwdDecap, hit}, prepare: func(w *world) shot {
			w.ways()
			fr, back := remote(w)
			est(pod(devClient), w.tunnelShot(w.f.nodeB, nil), w, fr, back)
			back.flags = ack
			return w.at(fromNetdev, w.wrap(outer().nodeB, back.bytes(w.t)))
		}},
		{hook: "from_netdev", path: "decap-first", fresh: true, counts: []reason{fwdDecap, miss, created}, prepare: func(w *world) shot {
			w.ways()
			return w.at(fromNetdev, w.wrap(outer().nodeB, tcp(ap(w.f.remote, 4000), c(podPort, w), syn).bytes(w.t)))
		}},
		{hook: "from_netdev", path: "decap-ipip", only4: true, counts: []reason{fwdDecap, hit}, prepare: func(w *world) shot {
			w.ipip()
			fr, back := remote(w)
			est(pod(devClient), w.tunnelShot(w.f.nodeB, nil), w, fr, back)
			back.flags = ack
			return w.at(fromNetdev, wrapIPIP(w.t, w.f.nodeB, w.f.nodeA, back.bytes(w.t)))
		}},
		{hook: "from_netdev", path: "established-nodeport", counts: []reason{fwdEncap, hit}, prepare: func(w *world) shot {
			w.ways()
			fr := tcp(ap(w.f.world, 40000), ap(w.f.nodeA, nodePort), syn)
			return established(wire, w.tunnelShot(w.f.nodeB, nil), w, fr, tcp(ap(w.f.remote, podPort), fr.src, ack))
		}},
		{hook: "from_netdev", path: "first-nodeport", fresh: true, counts: []reason{fwdEncap, miss, created}, prepare: func(w *world) shot {
			w.ways()
			return with(wire, w, tcp(ap(w.f.world, 4000), ap(w.f.nodeA, nodePort), syn))
		}},
		{hook: "from_netdev", path: "reply-masquerade", counts: []reason{fwdLocal, hit}, prepare: func(w *world) shot {
			fr, back := outside(w)
			return answered(pod(devClient), wire, w, fr, back)
		}},
		{hook: "from_netdev", path: "established-dsr", load: withDSR, counts: []reason{fwdEncap, hit}, prepare: func(w *world) shot {
			w.ways()
			fr := tcp(ap(w.f.world, 40000), ap(w.f.lb, svcPort), syn)
			w.wire(fr)
			fr.flags = ack
			w.wire(fr)
			return with(wire, w, fr)
		}},
		{hook: "from_netdev", path: "not-ours", counts: []reason{passed}, again: 1000, prepare: func(w *world) shot {
			return with(wire, w, tcp(ap(w.f.world, 40000), ap(w.f.nodeA, 22), ack))
		}},
		{hook: "from_overlay", path: "established", counts: []reason{fwdLocal, hit}, prepare: func(w *world) shot {
			fr, back := remote(w)
			return answered(pod(devClient), w.tunnelShot(w.f.nodeB, nil), w, fr, back)
		}},
		{hook: "from_overlay", path: "reply-nodeport", counts: []reason{fwdWire, hit}, prepare: func(w *world) shot {
			fr := tcp(ap(w.f.world, 40000), ap(w.f.nodeA, nodePort), syn)
			return answered(wire, w.tunnelShot(w.f.nodeB, nil), w, fr, tcp(ap(w.f.remote, podPort), fr.src, ack))
		}},
		{hook: "to_pod", path: "established", counts: []reason{fwdLocal, hit}, again: 1000, prepare: func(w *world) shot {
			fr := tcp(ap(w.f.nodeA, 40000), c(podPort, w), syn)
			return established(shot{hook: toPod, dev: devClient}, pod(devClient), w, fr, fr.back())
		}},
		{hook: "to_overlay", path: "established", counts: []reason{fwdTunnel, hit}, prepare: func(w *world) shot {
			fr := tcp(ap(w.f.nodeA, 40000), ap(w.f.remote, podPort), syn)
			return established(shot{hook: toOverlay, dev: devOverlay}, w.tunnelShot(w.f.nodeB, nil), w, fr, fr.back())
		}},
		{hook: "to_netdev", path: "not-ours", counts: []reason{passed}, again: 1000, prepare: func(w *world) shot {
			return with(shot{hook: toNetdev, dev: devWire}, w, tcp(ap(w.f.nodeA, 40000), ap(w.f.world, 443), ack))
		}},
		{hook: "to_lo", path: "not-ours", counts: []reason{passed}, again: 1000, prepare: func(w *world) shot {
			return with(shot{hook: toLo, dev: devLo}, w, tcp(ap(w.f.nodeA, 40000), ap(w.f.nodeA, 22), ack))
		}},
	}
}

// outside is a packet to the world, which has left, and the answer to it: to
// the port that it left under.
func outside(w *world) (frame, frame) {
	fr := tcp(ap(w.f.client, 4000), ap(w.f.world, 443), syn)
	left := w.pod(devClient, fr).ended(fwdWire).left()
	return fr, tcp(fr.dst, left, syn|ack)
}
