package packet

import (
	"math/bits"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// dropCase provokes one reason.
type dropCase struct {
	why  reason
	v6   bool // IPv6 alone knows it
	v4   bool // IPv4 alone
	fire func(w *world) *result
}

func dropCases() []dropCase {
	return []dropCase{
		{why: bpf.DpPwReasonPW_DROP_MALFORMED, fire: func(w *world) *result {
			pkt := udp(ap(w.f.client, 1), ap(w.f.local, 2)).bytes(w.t)
			return w.run(w.at(fromPod, pkt[:len(pkt)-9]))
		}},
		{why: bpf.DpPwReasonPW_DROP_UNKNOWN_L3, fire: func(w *world) *result {
			return w.run(w.at(fromPod, ethernet(0x88cc, make([]byte, 46))))
		}},
		{why: bpf.DpPwReasonPW_DROP_FRAGMENT, fire: func(w *world) *result {
			// An answer alone, whose first part finds no flow.
			fr := tcp(ap(w.f.client, 1), ap(w.f.local, 2), syn|ack).with(string(pattern(76)))
			w.run(w.at(fromPod, w.fragment(fr, 0, true))).ended(fwdLocal)
			return w.run(w.at(fromPod, w.fragment(fr, 96, false)))
		}},
		{why: bpf.DpPwReasonPW_DROP_FRAGMENT_BEFORE_FIRST, fire: func(w *world) *result {
			return w.run(w.at(fromPod, w.fragment(udp(ap(w.f.client, 1), ap(w.f.local, 2)), 16, false)))
		}},
		{why: bpf.DpPwReasonPW_DROP_EXT_HEADERS, v6: true, fire: func(w *world) *result {
			pkt := udp(ap(w.f.client, 1), ap(w.f.local, 2)).bytes(w.t)
			return w.run(w.at(fromPod, extend(w.t, pkt, extension{kind: 60, bytes: 160})))
		}},
		{why: bpf.DpPwReasonPW_DROP_V4MAPPED, v6: true, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(netip.MustParseAddr("::ffff:10.244.80.66"), 2)))
		}},
		{why: spoofedSource, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.local, 1), ap(w.f.remote, 2)))
		}},
		{why: spoofedFlow, fire: func(w *world) *result {
			fr := udp(ap(w.f.client, 1), ap(w.f.remote, 2))
			w.pod(devClient, fr).is(fwdTunnel, miss, created)
			return w.pod(devThird, fr)
		}},
		{why: badSource, fire: func(w *world) *result {
			src := netip.MustParseAddr("127.0.0.1")
			if w.f.v6 {
				src = netip.IPv6Loopback()
			}
			return w.wire(udp(ap(src, 1), ap(w.f.client, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_UNKNOWN_PEER, fire: func(w *world) *result {
			return w.tunnel(w.f.world, udp(ap(w.f.remote, 1), ap(w.f.client, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_WRONG_VNI, fire: func(w *world) *result {
			s := w.tunnelShot(w.f.nodeB, udp(ap(w.f.remote, 1), ap(w.f.client, 2)).bytes(w.t))
			s.tunnel.vni = 4097
			return w.run(s)
		}},
		{why: bpf.DpPwReasonPW_DROP_POD_VXLAN, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.nodeB, 4789)))
		}},
		{why: podIPIP, fire: func(w *world) *result {
			fr := frame{src: ap(w.f.client, 0), dst: ap(w.f.nodeB, 0), proto: protoIPIP, payload: make([]byte, 40)}
			return w.pod(devClient, fr)
		}},
		{why: congested, v4: true, fire: func(w *world) *result {
			pkt := wrapIPIP(w.t, w.f.nodeB, w.f.nodeA, udp(ap(w.f.remote, 1), ap(w.f.client, 2)).bytes(w.t))
			pkt[15] |= 3
			mend(pkt)
			return w.run(w.at(fromNetdev, pkt))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_SERVICE, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.unowned, svcPort)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.vip, 81)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_BACKEND, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.vipEmpty, svcPort)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_ENDPOINT, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.free, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_ROUTE, fire: func(w *world) *result {
			return w.tunnel(w.f.nodeB, udp(ap(w.f.remote, 1), ap(w.f.far, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_NODE, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.lost, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_POLICY_EGRESS, fire: func(w *world) *result {
			w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.local, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_POLICY_INGRESS, fire: func(w *world) *result {
			w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 1 })
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.local, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_FLOW_COLLISION, fire: func(w *world) *result {
			// A protocol without ports by two entry nodes: it has nothing
			// that could be changed to get out of the way.
			by := func(node netip.Addr) *result {
				fr := frame{src: ap(w.f.world, 0), dst: ap(w.f.client, 0), proto: protoGRE, payload: []byte("x")}
				s := w.tunnelShot(node, fr.bytes(w.t))
				copy(s.pkt[6:], []byte{2, 'p', 'w', 0, 0, 2})
				return w.run(s)
			}
			by(w.f.nodeB).is(fwdLocal, miss, created)
			return by(w.f.nodeC)
		}},
		{why: bpf.DpPwReasonPW_DROP_FLOW_INSERT, fire: func(w *world) *result {
			w.crowded()
			w.conn(40000).send(syn).is(fwdTunnel, miss, created)
			c := w.conn(40001)
			c.send(syn).is(fwdTunnel, miss, created)
			return w.conn(40002).send(syn)
		}},
		{why: bpf.DpPwReasonPW_DROP_TTL, fire: func(w *world) *result {
			fr := udp(ap(w.f.client, 1), ap(w.f.local, 2))
			fr.ttl = 1
			return w.pod(devClient, fr)
		}},
		{why: bpf.DpPwReasonPW_DROP_ICMP_UNRELATED, fire: func(w *world) *result {
			quote := udp(ap(w.f.client, 1), ap(w.f.remote, 2)).bytes(w.t)
			return w.run(w.tunnelShot(w.f.nodeB, icmpError(w.t, w.f.remote, w.f.client, quote)))
		}},
		{why: bpf.DpPwReasonPW_DROP_MULTICAST, fire: func(w *world) *result {
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.multicast, 5353)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_LOCAL_INTERNAL, fire: func(w *world) *result {
			w.service(w.f.vip, 7000, maps.ProtoUDP, maps.Service{Id: 60, Flags: maps.ServiceNoLocal | maps.ServiceNoLocalExt})
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.vip, 7000)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_LOCAL_EXTERNAL, fire: func(w *world) *result {
			w.service(w.f.lb, 7000, maps.ProtoUDP, maps.Service{
				Id: 60, Set: setLocal, Count: 1, Flags: maps.ServiceExternal | maps.ServiceNoLocalExt,
			})
			w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.lb, 7000))).ended(fwdLocal)
			return w.wire(udp(ap(w.f.world, 1), ap(w.f.lb, 7000)))
		}},
		{why: bpf.DpPwReasonPW_DROP_SOURCE_RANGE, fire: func(w *world) *result {
			w.service(w.f.lb, 7000, maps.ProtoUDP, maps.Service{
				Id: 60, Set: setLocal, Count: 1, ExtSet: setLocal, ExtCount: 1,
				Flags: maps.ServiceExternal | maps.ServiceSourceRanges,
			})
			k := maps.SrcRangeKey{Len: 32 + 128, Service: swap32(60), Addr: w.f.client.As16()}
			put(w, w.set.SrcRanges, k, 1)
			w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.lb, 7000))).ended(fwdLocal)
			return w.wire(udp(ap(w.f.world, 1), ap(w.f.lb, 7000)))
		}},
		{why: bpf.DpPwReasonPW_DROP_NO_SOURCE, fire: func(w *world) *result {
			clear(w, w.set.DevAddrs)
			return w.pod(devClient, udp(ap(w.f.client, 1), ap(w.f.world, 2)))
		}},
		{why: bpf.DpPwReasonPW_DROP_STRAY, fire: func(w *world) *result {
			return w.pod(devClient, tcp(ap(w.f.client, 1), ap(w.f.world, 2), rst))
		}},
	}
}

// swap32 is v in network byte order.
func swap32(v uint32) uint32 { return bits.ReverseBytes32(v) }

// notProvoked lists the reasons that no packet brings about, and why.
func notProvoked() map[reason]string {
	return map[reason]string{
		bpf.DpPwReasonPW_DROP_HELPER:   "a kernel helper refuses what was checked before: only a bug does that",
		bpf.DpPwReasonPW_DROP_TOO_BIG:  "reserved: no program uses it yet",
		bpf.DpPwReasonPW_DROP_UNJUDGED: "no tc program drops so: TestHostileIfb",
		bpf.DpPwReasonPW_DROP_NO_PORT:  "takes a datapath with few ports: TestPortsRunOut",
	}
}

func TestDrops(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, c := range dropCases() {
			if c.v6 && !w.f.v6 || c.v4 && w.f.v6 {
				continue
			}
			t.Run(maps.ReasonName(c.why), func(t *testing.T) {
				w := newWorld(t, w.f)
				r := c.fire(w).ended(c.why)
				// Some are answered: run has checked what with.
				if r.counts[c.why] != 1 || r.action != actDrop && !r.told() {
					t.Fatalf("action %d, %v", int32(r.action), r)
				}
				if r.v6 != w.f.v6 && c.why != bpf.DpPwReasonPW_DROP_UNKNOWN_L3 {
					t.Fatal("counted under the wrong family")
				}
			})
		}
	})
}

// A reason that is added to the datapath needs a packet that provokes it.
func TestEveryDropReasonHasACase(t *testing.T) {
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("pw_reason", &enum); err != nil {
		t.Fatal(err)
	}
	provoked := make(map[reason]bool)
	for _, c := range dropCases() {
		provoked[c.why] = true
	}
	for _, v := range enum.Values {
		if !strings.HasPrefix(v.Name, "PW_DROP_") {
			continue
		}
		why := reason(v.Value)
		excuse := notProvoked()[why]
		if provoked[why] == (excuse != "") {
			t.Errorf("%s: has a case: %v, excuse: %q", v.Name, provoked[why], excuse)
		}
	}
}
