package packet

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/btf"
	"github.com/gopacket/gopacket/layers"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

// said is an ICMP error: who says it to whom, about which packet.
type said struct {
	by, to netip.Addr
	about  frame
}

// errorAt is how the errors of one place reach the datapath.
type errorAt func(pkt []byte) shot

func (w *world) errorFromPod(dev string) errorAt {
	return func(pkt []byte) shot { return shot{hook: fromPod, dev: dev, pkt: pkt} }
}

func (w *world) errorFromNode(node netip.Addr) errorAt {
	return func(pkt []byte) shot { return w.tunnelShot(node, pkt) }
}

func (w *world) errorVia(node netip.Addr) errorAt {
	return func(pkt []byte) shot {
		s := w.tunnelShot(node, pkt)
		copy(s.pkt[6:], []byte{2, 'p', 'w', 0, 0, 2})
		return s
	}
}

func (w *world) errorAt(h hook) errorAt {
	return func(pkt []byte) shot { return w.at(h, pkt) }
}

// kinds of errors: port unreachable, the path's MTU, time exceeded, and a
// parameter's problem.
func (f family) errorKinds() [][2]byte {
	if f.v6 {
		return [][2]byte{{1, 4}, {2, 0}, {3, 0}, {4, 0}}
	}
	return [][2]byte{{3, 3}, {3, 4}, {11, 0}, {12, 0}}
}

// bytes builds the error with the first n bytes of what it quotes.
func (s said) bytes(t testing.TB, kind [2]byte, n int, ttl uint8) []byte {
	t.Helper()
	quote := s.about.bytes(t)[14:]
	if s.about.proto == maps.ProtoSCTP {
		// Its CRC is left as it was, and here it never was right.
		clearBytes(quote[len(quote)-len(s.about.payload)-4 : len(quote)-len(s.about.payload)])
	}
	pkt := icmp(t, s.by, s.to, kind, append([]byte{0, 0, 5, 0x14}, quote[:n]...))
	if s.by.Is6() {
		pkt[21] = ttl
	} else {
		pkt[22] = ttl
	}
	mend(pkt)
	return pkt
}

// becomes asserts, for every kind of error and for quotes of every length,
// that one of them leaves as the other, every byte of it built anew.
func (w *world) becomes(at errorAt, in said, out reason, want said) {
	w.t.Helper()
	whole, l4 := len(in.about.bytes(w.t))-14, 20+4*len(optionWords(in.about))
	if w.f.v6 {
		l4 = 40
	}
	least := 4
	switch in.about.proto {
	case protoICMP:
		least = 8
	case protoGRE:
		least = 0
	}
	for i, kind := range w.f.errorKinds() {
		for n := l4 + least; n <= whole; n++ {
			if i != 0 && n != whole && n != l4+8 {
				continue
			}
			r := w.run(at(in.bytes(w.t, kind, n, 64))).is(out)
			ttl := uint8(64)
			if !egress(r.shot.hook) && out != fwdHost {
				ttl--
			}
			built := want.bytes(w.t, kind, n, ttl)
			if at := map[uint8]int{maps.ProtoTCP: 16, maps.ProtoUDP: 6}[in.about.proto]; at != 0 && n == l4+at+1 {
				// Half a checksum stays as it is.
				built[len(built)-1] = r.shot.pkt[len(r.shot.pkt)-1]
				mend(built)
			}
			if !slices.Equal(r.out[14:], built[14:]) {
				w.t.Fatalf("%s, kind %v, %d bytes quoted: left as\n     %x\nwant %x\nin   %x",
					maps.HookName(r.shot.hook), kind, n, r.out[14:], built[14:], r.shot.pkt[14:])
			}
		}
	}
}

func optionWords(fr frame) (words []int) {
	for _, o := range fr.options {
		if o.OptionType == 1 {
			continue
		}
		for range int(o.OptionLength) / 4 {
			words = append(words, 0)
		}
	}
	return words
}

// talk is a packet of the initiator's, and what it is on the other side.
func (w *world) talk(r *result, sent frame, dst netip.AddrPort) (there frame) {
	w.t.Helper()
	there = sent
	there.dst = dst
	d, ok := decode(r.inner())
	if !ok {
		w.t.Fatalf("what left is no packet: %x", r.out)
	}
	port := sent.src.Port()
	switch {
	case hasPorts(sent.proto):
		port, _ = d.ports()
	case sent.proto == protoICMP:
		port = binary.BigEndian.Uint16(d.upper[4:])
	}
	there.src = ap(d.src, port)
	return there
}

// To a service's backends on this node and another, in both directions: who
// called the service hears of the packet that it sent, from the address that
// it called; the backend hears of its answer.
func TestICMPErrorOfAServiceFlow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for i, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
			src := ap(f.client, uint16(40000+i))
			fr := func(dst netip.Addr) frame {
				return frame{src: src, dst: ap(dst, svcPort), proto: proto, flags: syn, payload: pattern(40)}
			}
			sent := fr(f.vipRemote)
			there := w.talk(w.pod(devClient, sent).ended(fwdTunnel), sent, ap(f.remote, podPort))
			w.becomes(w.errorFromNode(f.nodeB), said{f.remote, f.client, there}, fwdLocal, said{f.vipRemote, f.client, sent})
			// A router on the way keeps its name.
			w.becomes(w.errorFromNode(f.nodeB), said{f.nodeB, f.client, there}, fwdLocal, said{f.nodeB, f.client, sent})
			w.becomes(w.errorFromPod(devClient), said{f.client, f.vipRemote, sent.back()}, fwdTunnel, said{f.client, f.remote, there.back()})

			sent = fr(f.vipLocal)
			there = w.talk(w.pod(devClient, sent).ended(fwdLocal), sent, ap(f.local, podPort))
			w.becomes(w.errorFromPod(devLocal), said{f.local, f.client, there}, fwdLocal, said{f.vipLocal, f.client, sent})
			w.becomes(w.errorFromPod(devClient), said{f.client, f.vipLocal, sent.back()}, fwdLocal, said{f.client, f.local, there.back()})

			// To itself, by a service.
			sent.src = ap(f.local, src.Port())
			there = w.talk(w.pod(devLocal, sent).ended(fwdLocal), sent, ap(f.local, podPort))
			if there.src.Addr() != f.nodeA {
				t.Fatalf("left under %v", there.src)
			}
			w.becomes(w.errorFromPod(devLocal), said{f.local, f.nodeA, there}, fwdLocal, said{f.vipLocal, f.local, sent})
			w.becomes(w.errorFromPod(devLocal), said{f.local, f.vipLocal, sent.back()}, fwdLocal, said{f.nodeA, f.local, there.back()})

			// A backend on the host's network: the stack says it.
			sent = fr(f.vipHost)
			there = w.talk(w.pod(devClient, sent).ended(fwdHost), sent, ap(f.nodeA, podPort))
			w.becomes(w.errorAt(toPod), said{f.nodeA, f.client, there}, fwdLocal, said{f.vipHost, f.client, sent})
			w.becomes(w.errorFromPod(devClient), said{f.client, f.vipHost, sent.back()}, fwdHost, said{f.client, f.nodeA, there.back()})
		}
	})
}

// The host's own calls of services, and their answers.
func TestICMPErrorToTheHost(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for i, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
			fr := func(dst netip.Addr, port uint16) frame {
				return frame{src: ap(f.nodeA, uint16(40000+i)), dst: ap(dst, port), proto: proto, flags: syn, payload: pattern(40)}
			}
			sent := fr(f.vipRemote, svcPort)
			there := w.talk(w.host(sent).ended(fwdTunnel), sent, ap(f.remote, podPort))
			w.becomes(w.errorFromNode(f.nodeB), said{f.remote, f.nodeA, there}, fwdHost, said{f.vipRemote, f.nodeA, sent})
			w.becomes(w.errorFromNode(f.nodeB), said{f.nodeB, f.nodeA, there}, fwdHost, said{f.vipRemote, f.nodeA, sent})
			w.becomes(w.errorAt(toOverlay), said{f.nodeA, f.vipRemote, sent.back()}, fwdTunnel, said{f.nodeA, f.remote, there.back()})

			sent = fr(f.vipLocal, svcPort)
			there = w.talk(w.host(sent).ended(fwdLocal), sent, ap(f.local, podPort))
			w.becomes(w.errorFromPod(devLocal), said{f.local, f.nodeA, there}, fwdHost, said{f.vipLocal, f.nodeA, sent})

			// Itself, under the service's address.
			sent = fr(f.vipHost, svcPort)
			there = w.talk(w.host(sent).ended(fwdHost), sent, ap(f.nodeA, podPort))
			w.becomes(w.errorAt(toOverlay), said{f.nodeA, f.vipHost, there}, fwdHost, said{f.vipHost, f.nodeA, sent})

			// A NodePort, over lo: a backend beyond, or the host's own.
			w.service(f.nodeA, 31000, proto, maps.Service{Id: uint32(70 + i), Set: setHost, Count: 1, Flags: maps.ServiceExternal})
			w.service(f.nodeA, 31001, proto, maps.Service{Id: uint32(80 + i), Set: setLocal, Count: 1, Flags: maps.ServiceExternal})
			sent = fr(f.nodeA, 31000)
			there = w.talk(w.run(w.at(toLo, sent.bytes(t))).ended(fwdHost), sent, ap(f.nodeA, podPort))
			w.becomes(w.errorAt(toLo), said{f.nodeA, f.nodeA, there}, fwdHost, said{f.nodeA, f.nodeA, sent})
			sent = fr(f.nodeA, 31001)
			there = w.talk(w.run(w.at(toLo, sent.bytes(t))).ended(fwdLocal), sent, ap(f.local, podPort))
			w.becomes(w.errorFromPod(devLocal), said{f.local, f.nodeA, there}, fwdHost, said{f.nodeA, f.nodeA, sent})

			// A load balancer's address elsewhere, backend on another node.
			w.backends(setFree, ap(f.nodeB, podPort))
			w.service(f.lb, 7000, proto, maps.Service{Id: uint32(90 + i), Set: setFree, Count: 1, Flags: maps.ServiceExternal})
			sent = fr(f.lb, 7000)
			there = w.talk(w.run(w.at(toNetdev, sent.bytes(t))).ended(fwdWire), sent, ap(f.nodeB, podPort))
			w.becomes(w.errorAt(fromNetdev), said{f.nodeB, f.nodeA, there}, fwdHost, said{f.lb, f.nodeA, sent})
			w.becomes(w.errorAt(fromNetdev), said{f.router, f.nodeA, there}, fwdHost, said{f.lb, f.nodeA, sent})
			w.becomes(w.errorAt(toNetdev), said{f.nodeA, f.lb, sent.back()}, fwdWire, said{f.nodeA, f.nodeB, there.back()})
		}
	})
}

// What left under this node's address: routers outside speak to the node, and
// mean the pod. That is how it learns of the path's MTU.
func TestICMPErrorOfAMasqueradedFlow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for _, far := range []netip.Addr{f.world, f.nodeB} {
			for _, sent := range []frame{
				tcp(ap(f.client, 40000), ap(far, 443), syn).with("some data of it"),
				udp(ap(f.client, 40000), ap(far, 53)),
				echo(f.client, far, 77),
				{src: ap(f.client, 40000), dst: ap(far, 9), proto: maps.ProtoSCTP, payload: pattern(20)},
				{src: ap(f.client, 0), dst: ap(far, 0), proto: protoGRE, payload: pattern(20)},
			} {
				there := w.talk(w.pod(devClient, sent).ended(fwdWire), sent, sent.dst)
				if there.src.Addr() != f.nodeA {
					t.Fatalf("left under %v", there.src)
				}
				w.becomes(w.errorAt(fromNetdev), said{far, f.nodeA, there}, fwdLocal, said{far, f.client, sent})
				w.becomes(w.errorAt(fromNetdev), said{f.router, f.nodeA, there}, fwdLocal, said{f.router, f.client, sent})
				w.becomes(w.errorFromPod(devClient), said{f.client, far, sent.back()}, fwdWire, said{f.nodeA, far, there.back()})
				if w.entry(sent).is(flagReplied) {
					t.Fatal("an error was taken for an answer")
				}
				if there.proto == protoGRE {
					continue
				}
				// About another packet of the node's: its stack's.
				there.src = ap(there.src.Addr(), there.src.Port()-1)
				w.run(w.at(fromNetdev, icmpError(t, f.router, f.nodeA, there.bytes(t)))).is(passed)
			}
		}
	})
}

// A client outside enters by this node: it hears from the address it called,
// whoever on the way had something to say; the backend hears of its answer.
func TestICMPErrorThroughTheEntryNode(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for i, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
			for _, called := range []netip.AddrPort{ap(f.nodeA, nodePort), ap(f.lb, svcPort)} {
				sent := frame{src: ap(f.world, uint16(40000+i)), dst: called, proto: proto, flags: syn, payload: pattern(40)}
				there := w.talk(w.wire(sent).ended(fwdTunnel), sent, ap(f.remote, podPort))
				for _, speaker := range []netip.Addr{f.remote, f.nodeB} {
					w.becomes(w.errorFromNode(f.nodeB), said{speaker, f.world, there}, fwdWire, said{called.Addr(), f.world, sent})
				}
				for _, speaker := range []netip.Addr{f.world, f.router} {
					in, out := said{speaker, called.Addr(), sent.back()}, said{speaker, f.remote, there.back()}
					w.becomes(w.errorAt(fromNetdev), in, fwdTunnel, out)
					r := w.run(w.at(fromNetdev, in.bytes(t, f.errorKinds()[0], len(sent.bytes(t))-14, 64)))
					if [6]byte(r.out[6:12]) != [6]byte{2, 'p', 'w', 0, 0, 2} {
						t.Fatalf("left with MACs %x, want the mark of an entry node", r.out[:12])
					}
				}
			}
			// A backend on this host, through the stack.
			sent := frame{src: ap(f.world, uint16(41000+i)), dst: ap(f.lb, svcPort+1), proto: proto, flags: syn, payload: pattern(40)}
			there := w.talk(w.wire(sent).ended(fwdHost), sent, ap(f.nodeA, podPort))
			w.becomes(w.errorAt(toNetdev), said{f.nodeA, f.world, there}, fwdWire, said{f.lb, f.world, sent})
			w.becomes(w.errorAt(fromNetdev), said{f.router, f.lb, sent.back()}, fwdHost, said{f.router, f.nodeA, there.back()})
			there.dst = ap(f.nodeA, podPort+1)
			w.run(w.at(toNetdev, icmpError(t, f.nodeA, f.world, there.bytes(t)))).is(passed)
		}
	})
}

// At the backend's node: what entered by another one hears back through it,
// with the port it was given here.
func TestICMPErrorAtTheBackendsNode(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for i, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
			for _, node := range []netip.Addr{f.nodeB, f.nodeC} {
				sent := frame{src: ap(f.world, uint16(40000+i)), dst: ap(f.client, podPort), proto: proto, flags: syn, payload: pattern(40)}
				there := w.talk(w.run(w.errorVia(node)(sent.bytes(t))).ended(fwdLocal), sent, sent.dst)
				if changed := there.src != sent.src; changed != (node == f.nodeC) {
					t.Fatalf("by %v it came as %v", node, there.src)
				}
				w.becomes(w.errorFromPod(devClient), said{f.client, f.world, there}, fwdTunnel, said{f.client, f.world, sent})
				w.becomes(w.errorVia(node), said{f.router, f.client, sent.back()}, fwdLocal, said{f.router, f.client, there.back()})
				// The host's network.
				sent.dst = ap(f.nodeA, podPort)
				there = w.talk(w.run(w.errorVia(node)(sent.bytes(t))).ended(fwdHost), sent, sent.dst)
				w.becomes(w.errorAt(toNetdev), said{f.nodeA, f.world, there}, fwdTunnel, said{f.nodeA, f.world, sent})
			}
		}
	})
}

// With --snat the far node knows the client under our address alone, and so
// would refuse a router outside.
func TestICMPErrorUnderTheNodesAddress(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			d, err := load(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024, SNAT: true})
			if err != nil {
				t.Fatal(err)
			}
			defer d.objs.Close()
			w := &world{t: t, f: f, datapath: d}
			w.fill()
			sent := udp(ap(f.world, 40000), ap(f.nodeA, nodePort))
			there := w.talk(w.wire(sent).ended(fwdTunnel), sent, ap(f.remote, podPort))
			if there.src.Addr() != f.nodeA {
				t.Fatalf("left under %v", there.src)
			}
			w.becomes(w.errorFromNode(f.nodeB), said{f.remote, f.nodeA, there}, fwdWire, said{f.nodeA, f.world, sent})
			for _, speaker := range []netip.Addr{f.world, f.router} {
				w.becomes(w.errorAt(fromNetdev), said{speaker, f.nodeA, sent.back()}, fwdTunnel, said{f.nodeA, f.remote, there.back()})
			}
		})
	}
}

// Nobody gets an error through that is not about a live flow, or not from
// where that flow's packets come.
func TestICMPErrorOfATranslatedFlowIsJudged(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		sent := udp(ap(f.client, 40000), ap(f.world, 53))
		there := w.talk(w.pod(devClient, sent).ended(fwdWire), sent, sent.dst)
		report := func(by, to netip.Addr, about frame) []byte { return icmpError(t, by, to, about.bytes(t)) }
		w.run(w.at(fromNetdev, report(f.router, f.nodeA, there))).is(fwdLocal)
		// Another node, by the tunnel; a pod; to another than the sender.
		w.run(w.tunnelShot(f.nodeB, report(f.nodeB, f.nodeA, there))).is(unrelated)
		w.run(shot{hook: fromPod, dev: devLocal, pkt: report(f.local, f.nodeA, there)}).is(unrelated)
		w.run(w.at(fromNetdev, report(f.router, f.nodeB, there))).is(passed)
		// A false name.
		w.run(w.at(fromNetdev, report(f.remote, f.nodeA, there))).is(bpf.DpPwReasonPW_DROP_SPOOFED_SOURCE)
		w.run(w.at(fromNetdev, report(f.nodeA, f.nodeA, there))).is(bpf.DpPwReasonPW_DROP_SPOOFED_SOURCE)
		// The form it has on the other side of the node.
		w.run(w.at(fromNetdev, report(f.router, f.client, sent))).is(unrelated)
		was := w.entry(sent).LastSeen
		w.run(w.at(fromNetdev, report(f.router, f.nodeA, there))).is(fwdLocal)
		if w.entry(sent).LastSeen != was || w.entry(there.back()).is(flagReplied) {
			t.Fatal("an error refreshed the flow")
		}
		// Decided from what has changed; denied; outlived.
		w.bump(slotWorld)
		w.run(w.at(fromNetdev, report(f.router, f.nodeA, there))).is(unrelated)
		w.pod(devClient, sent).ended(fwdWire)
		w.run(w.at(fromNetdev, report(f.router, f.nodeA, there))).is(fwdLocal)
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		w.pod(devClient, sent).ended(bpf.DpPwReasonPW_DROP_POLICY_EGRESS)
		w.run(w.at(fromNetdev, report(f.router, f.nodeA, there))).is(bpf.DpPwReasonPW_DROP_POLICY_EGRESS)
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 0 })
		w.pod(devClient, sent).ended(fwdWire)
		w.age(sent.key(), time.Minute)
		w.age(there.back().key(), time.Minute)
		w.run(w.at(fromNetdev, report(f.router, f.nodeA, there))).is(unrelated)
	})
}

// Quotes with options, without a checksum, and with the one that is written
// as its complement.
func TestICMPErrorWithAnUnusualQuote(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		sent := udp(ap(f.client, 40000), ap(f.world, 53))
		there := w.talk(w.pod(devClient, sent).ended(fwdWire), sent, sent.dst)
		again := func() {
			t.Helper()
			w.becomes(w.errorAt(fromNetdev), said{f.router, f.nodeA, there}, fwdLocal, said{f.router, f.client, sent})
		}
		// A payload that makes up for all the rest: the sum's complement is 0.
		for _, fr := range []*frame{&sent, &there} {
			sent.payload = []byte{0, 0}
			there.payload = sent.payload
			d, _ := decode(fr.bytes(t))
			sent.payload = slices.Clone(d.upper[6:8])
			there.payload = sent.payload
			if d, _ = decode(fr.bytes(t)); binary.BigEndian.Uint16(d.upper[6:]) != 0xffff {
				t.Fatalf("checksum %x", d.upper[6:8])
			}
			again()
		}
		if f.v6 {
			return
		}
		sent.noSum, there.noSum = true, true
		again()
		sent.noSum, there.noSum = false, false
		sent.options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}}
		there.options = sent.options
		again()
	})
}

// 54 was the reason for which such errors were dropped; old dashboards must
// not find another thing under it.
func TestFreeReason(t *testing.T) {
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("pw_reason", &enum); err != nil {
		t.Fatal(err)
	}
	for _, v := range enum.Values {
		if v.Value == 54 {
			t.Fatalf("%s", v.Name)
		}
	}
}

// What stands behind an error's own end, in the same frame, is not quoted by
// it: such an error is about nothing, and nothing of it is translated.
func TestQuoteBehindTheEnd(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		out := udp(ap(w.f.client, 100), ap(w.f.world, 53))
		left := w.pod(devClient, out).is(fwdWire, miss, created).left()
		about := udp(left, out.dst).bytes(t)
		whole := icmpError(t, w.f.world, w.f.nodeA, about)
		w.run(w.at(fromNetdev, whole)).ended(fwdLocal)
		d, _ := decode(whole)
		ports := len(d.upper) - len(out.payload) - 4 // the end of the quoted ports
		for n := 8; n < ports; n++ {
			cut := append([]byte(nil), whole...)
			setLength(cut, d.at-14+n)
			mend(cut)
			w.run(w.at(fromNetdev, cut)).is(passed) // it may be the host's
		}
		cut := append([]byte(nil), whole...)
		setLength(cut, d.at-14+ports)
		mend(cut)
		w.run(w.at(fromNetdev, cut)).ended(fwdLocal)
		// To a pod it is the pod's, and wrong.
		w.pod(devClient, tcp(ap(w.f.client, 100), ap(w.f.vipLocal, svcPort), syn)).is(fwdLocal, miss, created)
		to := tcp(ap(w.f.client, 100), ap(w.f.local, podPort), syn).bytes(t)
		short := icmpError(t, w.f.local, w.f.client, to)
		setLength(short, d.at-14+12)
		mend(short)
		s := w.at(fromPod, short)
		s.dev = devLocal
		w.run(s).is(malformed)
	})
}
