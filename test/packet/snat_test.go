package packet

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/sourceport"
)

const (
	noPort    = bpf.DpPwReasonPW_DROP_NO_PORT
	collision = bpf.DpPwReasonPW_DROP_FLOW_COLLISION
)

// withPorts is a world that has these source ports to give away.
func withPorts(t *testing.T, f family, cfg loader.Config) *world {
	t.Helper()
	d, err := load(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.objs.Close(); err != nil {
			t.Error(err)
		}
	})
	w := &world{t: t, f: f, datapath: d}
	w.fill()
	return w
}

// left is the source that a packet went on under.
func (r *result) left() netip.AddrPort {
	r.t.Helper()
	d, ok := decode(r.out)
	if !ok {
		r.t.Fatalf("what left is no packet: %x", r.out)
	}
	port, _ := d.ports()
	return ap(d.src, port)
}

// With two ports to give, two flows to one destination leave under this
// node's address and the third is dropped; to another destination it leaves.
// A port is free again when its flow is over and its time is up, and at once
// for the flow's own client.
func TestPortsRunOut(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			w := withPorts(t, f, loader.Config{FlowsMax: 1024, FlowsNewMax: 1024, SourcePorts: []sourceport.Range{{Min: 5000, Max: 5000}, {Min: 7000, Max: 7000}}})
			seen := make(map[netip.AddrPort]bool)
			for i := range uint16(2) {
				left := w.pod(devClient, udp(ap(f.client, 100+i), ap(f.world, 53))).is(fwdWire, miss, created).left()
				if left != ap(f.nodeA, 5000) && left != ap(f.nodeA, 7000) || seen[left] {
					t.Fatalf("left as %v, after %v", left, seen)
				}
				seen[left] = true
			}
			third := udp(ap(f.client, 102), ap(f.world, 53))
			for range 3 { // searched once, known to be full then
				w.pod(devClient, third).is(noPort, miss)
				w.noEntry(third)
			}
			w.pod(devClient, udp(ap(f.client, 102), ap(f.world, 54))).is(fwdWire, miss, created)
			// The first one's time is up.
			old := udp(ap(f.client, 100), ap(f.world, 53))
			was := w.entry(old)
			w.age(old.key(), time.Minute)
			w.age(udp(ap(f.world, 53), ap(f.nodeA, was.Sport)).key(), time.Minute)
			w.pod(devClient, third).is(fwdWire, miss, created).leaves(ap(f.nodeA, was.Sport), third.dst)
			w.pod(devClient, old).is(noPort, miss) // it had to go for that

			// TCP, closed by both: another SYN of the client's starts anew.
			c := tcp(ap(f.client, 300), ap(f.world, 80), syn)
			before := w.pod(devClient, c).is(fwdWire, miss, created).left()
			c.flags = fin | ack
			w.pod(devClient, c).is(fwdWire, hitNew)
			w.wire(tcp(c.dst, before, fin|ack)).is(fwdLocal, hitNew)
			w.pod(devClient, tcp(ap(f.client, 301), c.dst, syn)).is(fwdWire, miss, created)
			w.pod(devClient, tcp(ap(f.client, 302), c.dst, syn)).is(noPort, miss)
			c.flags = syn
			if after := w.pod(devClient, c).is(fwdWire, miss, created, takenOver).left(); after != before {
				t.Errorf("there was one port, %v, and it left as %v", before, after)
			}
			w.wire(tcp(c.dst, before, syn|ack)).is(fwdLocal, hitNew).leaves(c.dst, c.src)
		})
	}
}

// Where a source is translated and judged on one node, what is judged is the
// source as it was (P4): a client outside and a pod that are seen under the
// node's address get no further for it, and a pod that calls itself by a service
// is itself.
func TestHiddenCallersAreJudgedAsTheyAre(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			w := withPorts(t, f, loader.Config{SNAT: true, FlowsMax: 1024, FlowsNewMax: 1024})
			w.service(f.lb, 1000, maps.ProtoUDP, maps.Service{Id: 40, Set: setLocal, Count: 1, ExtSet: setLocal, ExtCount: 1, Flags: maps.ServiceExternal})
			const table = 7
			w.edit(f.local, func(e *maps.Endpoint) { e.PolicyIn, e.PolicyOut = table, table })
			port := uint16(40000)
			for _, allowed := range []uint32{0, maps.IdentityHost, maps.IdentityWorld, idClient} {
				clear(w, w.set.Policy)
				if allowed != 0 {
					w.policy(table, allowed, maps.PolicyAny, 0, 0, maps.VerdictAllow)
				}
				for _, c := range []struct {
					what string
					send func(frame) *result
					src  netip.Addr
					to   netip.AddrPort
					by   uint32 // who has to be let in; 0 = nobody
				}{
					{"outside by a load balancer", w.wire, f.world, ap(f.lb, 1000), maps.IdentityWorld},
					{"a pod by a load balancer", func(fr frame) *result { return w.pod(devClient, fr) }, f.client, ap(f.lb, 1000), idClient},
					{"itself by a load balancer", func(fr frame) *result { return w.pod(devLocal, fr) }, f.local, ap(f.lb, 1000), 0},
					{"itself by a cluster IP", func(fr frame) *result { return w.pod(devLocal, fr) }, f.local, ap(f.vipLocal, svcPort), 0},
				} {
					port++
					r := c.send(udp(ap(c.src, port), c.to))
					if c.by != 0 && c.by != allowed {
						if why, _ := r.ends(); why != ingressDenied {
							t.Errorf("%s, identity %d let in: %s, want it denied", c.what, allowed, maps.ReasonName(why))
						}
						continue
					}
					if why, _ := r.ends(); why != fwdLocal {
						t.Errorf("%s, identity %d let in: %s, want it there", c.what, allowed, maps.ReasonName(why))
						continue
					}
					if left, _ := decode(r.out); left.src != f.nodeA {
						t.Errorf("%s: left under %v, want %v", c.what, left.src, f.nodeA)
					}
				}
			}
		})
	}
}

// Callers of external frontends are hidden, whoever they are, as far as their
// packets leave this node's stack.
func TestCallersAreHidden(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			d, err := load(loader.Config{SNAT: true, FlowsMax: 1024, FlowsNewMax: 1024})
			if err != nil {
				t.Fatal(err)
			}
			defer d.objs.Close()
			w := &world{t: t, f: f, datapath: d}
			w.fill()
			own := f.third // for this once an address of the node, and of no pod
			del(w, w.set.Endpoints, maps.ToAddr(own))
			w.addr(own, maps.Peer{Identity: maps.IdentityHost, Slot: slotThird, Flags: maps.PeerHost})
			local := maps.Service{Id: 40, Set: setLocal, Count: 1, ExtSet: setLocal, ExtCount: 1, Flags: maps.ServiceExternal}
			kept := local
			kept.Id, kept.Flags = 41, kept.Flags|maps.ServiceKeepSource
			w.service(f.lb, 1000, maps.ProtoUDP, local)
			w.service(f.lb, 1001, maps.ProtoUDP, kept)
			pod := func(fr frame) *result { return w.pod(devClient, fr) }
			for i, c := range []struct {
				what     string
				send     func(frame) *result
				src      netip.Addr
				to       netip.AddrPort
				end      reason
				hidden   bool
				answered func(frame) *result
			}{
				{"a pod by a load balancer", pod, f.client, ap(f.lb, 1000), fwdLocal, true, func(fr frame) *result { return w.pod(devLocal, fr) }},
				{"a pod where the source is kept", pod, f.client, ap(f.lb, 1001), fwdLocal, false, nil},
				{"a pod by a cluster IP", pod, f.client, ap(f.vipLocal, svcPort), fwdLocal, false, nil},
				{"a pod to this host", pod, f.client, ap(f.lb, svcPort+1), fwdHost, false, nil},
				{"this host by an address that others do not know", w.host, own, ap(f.lb, 1000), fwdLocal, true, nil},
				{"this host by its own", w.host, f.nodeA, ap(f.lb, 1000), fwdLocal, false, nil},
				{"outside to a pod of this node", w.wire, f.world, ap(f.lb, 1000), fwdLocal, true, func(fr frame) *result { return w.pod(devLocal, fr) }},
				{"outside where the source is kept", w.wire, f.world, ap(f.lb, 1001), fwdLocal, false, nil},
				{"outside to this host", w.wire, f.world, ap(f.lb, svcPort+1), fwdHost, false, nil},
			} {
				t.Run(c.what, func(t *testing.T) {
					out := udp(ap(c.src, 40000+uint16(i)), c.to)
					r := c.send(out)
					r.t = t
					r.is(c.end, miss, created)
					left, _ := decode(r.out)
					port, _ := left.ports()
					if want := map[bool]netip.Addr{true: f.nodeA, false: c.src}[c.hidden]; left.src != want {
						t.Fatalf("left under %v, want %v", left.src, want)
					}
					if c.answered != nil {
						r := c.answered(udp(ap(f.local, podPort), ap(left.src, port)))
						r.t = t
						r.leaves(c.to, out.src)
					}
				})
			}
		})
	}
}

// shots sends packets of one kind in quick succession: no counter is read.
type shots struct {
	w    *world
	prog *ebpf.Program
	ctx  skBuff
	pkt  []byte
	out  []byte
}

func (w *world) shots(h hook, dev string, fr frame) *shots {
	s := &shots{w: w, prog: w.program(h), ctx: skBuff{Ifindex: w.index(dev)}, pkt: fr.bytes(w.t)}
	copy(s.pkt, w.devs[dev].mac)
	s.out = make([]byte, len(s.pkt)+512)
	return s
}

// send gives the packet other ports and says under which it left.
func (s *shots) send(src, dst netip.AddrPort) (action uint32, from, to netip.AddrPort) {
	s.w.t.Helper()
	d, _ := decode(s.pkt)
	at := 26
	if d.v6 {
		at = 22
	}
	copy(s.pkt[at:], src.Addr().AsSlice())
	copy(s.pkt[at+len(src.Addr().AsSlice()):], dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(s.pkt[d.at:], src.Port())
	binary.BigEndian.PutUint16(s.pkt[d.at+2:], dst.Port())
	mend(s.pkt)
	opts := ebpf.RunOptions{Data: s.pkt, DataOut: s.out, Context: &s.ctx}
	action, err := s.prog.Run(&opts)
	if err != nil {
		s.w.t.Fatal(err)
	}
	if action != actRedirect {
		return action, from, to
	}
	if msg := wrong(opts.DataOut); msg != "" {
		s.w.t.Fatalf("%s checksum is wrong: %x", msg, opts.DataOut)
	}
	o, _ := decode(opts.DataOut)
	sport, dport := o.ports()
	return action, ap(o.src, sport), ap(o.dst, dport)
}

// 33,000 connections to one destination, all distinct, all answered, and none
// under what the node itself has: 5,000 sockets connected there, some of them
// on ports that could be given away. What is beyond is counted as a drop, and
// 17,000 to another destination still go.
func TestThirtyThreeThousand(t *testing.T) {
	const many, own = 33000, 5000
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			w := withPorts(t, f, loader.Config{FlowsNewMax: 65536})
			far, other := ap(f.world, 53), ap(f.world, 54)
			taken := make(map[netip.AddrPort]bool)
			for i := range own {
				at := ap(f.nodeA, uint16(40000+i))
				if i < 400 {
					at = ap(f.nodeA, uint16(2000+i*5))
				}
				s, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(at), net.UDPAddrFromAddrPort(far))
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				taken[at] = true
			}
			request := w.shots(fromPod, devClient, udp(ap(f.client, 1), far))
			answer := w.shots(fromNetdev, devWire, udp(far, ap(f.nodeA, 1)))
			clients := []struct {
				addr netip.Addr
				dev  string
			}{{f.client, devClient}, {f.local, devLocal}, {f.third, devThird}}
			// open has a flow to dst go there, back, and be confirmed.
			next := 0
			open := func(dst netip.AddrPort) bool {
				t.Helper()
				c := clients[next%len(clients)]
				src := ap(c.addr, uint16(1000+next/len(clients)))
				next++
				request.ctx.Ifindex = w.index(c.dev)
				action, from, to := request.send(src, dst)
				if action == actDrop {
					return false
				}
				port := from.Port()
				good := port >= 1024 && port < 30000 || port >= 61000
				if action != actRedirect || from.Addr() != f.nodeA || to != dst || !good || dst == far && taken[from] {
					t.Fatalf("flow %d: action %d, left as %v to %v", next, action, from, to)
				}
				if dst == far {
					taken[from] = true
				}
				if action, from, to := answer.send(dst, from); action != actRedirect || from != dst || to != src {
					t.Fatalf("flow %d: the answer: action %d, left as %v to %v, want %v", next, action, from, to, src)
				}
				if action, again, _ := request.send(src, dst); action != actRedirect || again != from {
					t.Fatalf("flow %d: again, action %d, left as %v, before as %v", next, action, again, from)
				}
				return true
			}
			began := time.Now()
			n := 0
			for open(far) {
				n++
			}
			if n < many {
				t.Errorf("%d flows to %v, want at least %d", n, far, many)
			}
			t.Logf("%d flows to one destination beside %d of the node's own, in %v", n, own, time.Since(began))
			last := clients[(next-1)%len(clients)]
			w.last = nil
			w.pod(last.dev, udp(ap(last.addr, uint16(1000+(next-1)/len(clients))), far)).is(noPort, miss)
			began = time.Now()
			for range 17000 {
				if !open(other) {
					t.Fatalf("flow %d was dropped, to another destination", next)
				}
			}
			t.Logf("17000 to another, in %v", time.Since(began))
			sizes := [2]int{}
			for i, m := range []maps.Map[maps.FlowKey, maps.Flow]{w.set.Flows, w.set.FlowsNew} {
				all, err := m.Dump()
				if err != nil {
					t.Fatal(err)
				}
				sizes[i] = len(all)
			}
			if sizes[0] != 2*(n+17000) {
				t.Errorf("pw_flows has %d entries of %d flows", sizes[0], n+17000)
			}
			t.Logf("entries: %d in pw_flows, %d in pw_flows_new", sizes[0], sizes[1])
		})
	}
}

// What is left in pw_flows_new of confirmed flows is pushed out before flows
// that wait for their first answer.
func TestLeftoversGoFirst(t *testing.T) {
	const flows, waiting = 40000, 2000
	f := families()[0]
	w := withPorts(t, f, loader.Config{FlowsMax: 4 * flows, FlowsNewMax: 16384})
	request := w.shots(fromPod, devClient, udp(ap(f.client, 1), ap(f.world, 1)))
	answer := w.shots(fromNetdev, devWire, udp(ap(f.world, 1), ap(f.nodeA, 1)))
	end := func(i int) (src, dst netip.AddrPort) {
		return ap(f.client, uint16(1+i%20000)), ap(f.world, uint16(1+i/20000))
	}
	var left []netip.AddrPort
	lost := 0
	for i := range flows + waiting {
		if i < flows {
			_, from, _ := request.send(end(i))
			left = append(left, from)
		}
		if i < waiting {
			continue
		}
		src, dst := end(i - waiting)
		if action, _, to := answer.send(dst, left[i-waiting]); action != actRedirect || to != src {
			lost++
		}
		request.send(src, dst) // confirms it
	}
	if lost > flows/1000 {
		t.Errorf("%d of %d answers came when their flow had been pushed out, with %d waiting", lost, flows, waiting)
	}
}
