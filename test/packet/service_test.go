package packet

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const (
	noService     = bpf.DpPwReasonPW_DROP_NO_SERVICE
	noServicePort = bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT
	noBackend     = bpf.DpPwReasonPW_DROP_NO_BACKEND
)

// Ten thousand connections spread evenly, whatever the number of backends.
func TestEvenChoice(t *testing.T) {
	// Chi-square for n-1 degrees of freedom: an even choice is above these
	// limits once in 10^7.
	limits := map[int]float64{2: 28.37, 3: 32.24, 7: 43.34, 16: 62.33}
	both(t, func(t *testing.T, w *world) {
		for n, limit := range limits {
			var addrs []netip.AddrPort
			for i := range n {
				addrs = append(addrs, ap(w.f.remote, uint16(9000+i)))
			}
			set := uint32(setFree + n)
			w.backends(set, addrs...)
			w.service(w.f.vip, svcPort, maps.ProtoTCP, maps.Service{Id: 1, Set: set, Count: uint32(n)})
			clear(w, w.set.FlowsNew)
			const picks = 10000
			seen := make([]float64, n)
			for i := range picks {
				pkt := tcp(ap(w.f.client, uint16(1024+i)), ap(w.f.vip, svcPort), syn).bytes(t)
				copy(pkt, w.devs[devClient].mac)
				out, err := w.quick(devClient, pkt)
				if err != nil {
					t.Fatal(err)
				}
				d, _ := decode(out)
				_, port := d.ports()
				seen[port-9000]++
			}
			chi, want := 0.0, float64(picks)/float64(n)
			for _, got := range seen {
				chi += (got - want) * (got - want) / want
			}
			if chi > limit {
				t.Errorf("%d backends: chi-square %.1f over %.1f: %v", n, chi, limit, seen)
			}
		}
	})
}

// What no service offers is dropped under a name of its own, from wherever it
// is called, and refused if it is a service's address.
func TestServiceAddressWithoutService(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for _, c := range []struct {
			dst  netip.AddrPort
			want reason
		}{
			{ap(f.vip, 81), noServicePort},
			{ap(f.vip, podPort), noServicePort},
			{ap(f.unowned, svcPort), noService},
			{ap(f.vipEmpty, svcPort), noBackend},
		} {
			engine := []reason{miss}
			if c.want != noService {
				engine = append(engine, refused)
			}
			w.pod(devClient, tcp(ap(f.client, 1), c.dst, syn)).is(c.want, engine...)
			w.host(tcp(ap(f.nodeA, 1), c.dst, syn)).is(c.want, engine...)
			w.pod(devClient, udp(ap(f.client, 1), c.dst)).is(c.want, engine...)
			w.host(udp(ap(f.nodeA, 1), c.dst)).is(c.want, engine...)
			// Through the tunnel nothing is translated and nothing passed on.
			w.tunnel(f.nodeB, udp(ap(f.remote, 1), c.dst)).is(noService, miss)
		}
		w.tunnel(f.nodeB, udp(ap(f.remote, 1), ap(f.vip, svcPort))).is(noService, miss)
		// Protocols that services have none of: ping too.
		for dst, want := range map[netip.Addr]reason{f.vip: noServicePort, f.unowned: noService} {
			w.pod(devClient, echo(f.client, dst, 9)).is(want, miss)
			w.host(echo(f.nodeA, dst, 9)).is(want, miss)
			w.pod(devClient, frame{src: ap(f.client, 0), dst: ap(dst, 0), proto: protoGRE}).is(want, miss)
		}
		all, err := w.set.FlowsNew.Dump()
		if err != nil || len(all) != 0 {
			t.Fatalf("%d flows of refused packets, %v", len(all), err)
		}
		// From outside the node it is the kernel's affair.
		w.wire(udp(ap(f.world, 1), ap(f.unowned, svcPort))).is(passed)
		w.wire(udp(ap(f.world, 1), ap(f.vip, 81))).is(noServicePort, miss, refused)
		w.wire(udp(ap(f.world, 1), ap(f.vipEmpty, svcPort))).is(noBackend, miss, refused)
	})
}

// A port of a loopback address is for the node's sockets: packets that say they
// are for it come from nobody good, and get what they would without it.
func TestLoopbackIsForSockets(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		lo := netip.MustParseAddr("127.0.0.1")
		if w.f.v6 {
			lo = netip.IPv6Loopback()
		}
		dst := ap(lo, nodePort) // in the range of NodePorts, too
		fire := func() (out []string) {
			for _, r := range []*result{
				w.wire(tcp(ap(w.f.world, 1), dst, syn)), w.pod(devClient, tcp(ap(w.f.client, 1), dst, syn)),
				w.tunnel(w.f.nodeB, tcp(ap(w.f.remote, 1), dst, syn)), w.host(tcp(ap(w.f.nodeA, 1), dst, syn)),
				w.run(w.at(toLo, tcp(ap(w.f.nodeA, 1), dst, syn).bytes(t))), w.run(w.at(toNetdev, tcp(ap(w.f.nodeA, 1), dst, syn).bytes(t))),
			} {
				d, ok := decode(r.out)
				if !ok || d.dst != lo {
					t.Errorf("%s: left for %v (%v)", maps.HookName(r.shot.hook), d.dst, ok)
				}
				out = append(out, r.String())
			}
			return out
		}
		without := fire()
		// Flows that were made would decide for what follows.
		w.empty()
		w.backends(setFree, ap(w.f.local, podPort))
		w.service(lo, nodePort, maps.ProtoTCP, maps.Service{Id: 40, Set: setFree, Count: 1, Flags: maps.ServiceExternal, ExtSet: setFree, ExtCount: 1})
		if with := fire(); !slices.Equal(with, without) {
			t.Errorf("with the port %v, without it %v", with, without)
		}
	})
}

// A host process's call that comes back to the host: it is sent under the
// service's address, so that the answer passes the tunnel's device too.
func TestHostServiceOnItsOwnHost(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := tcp(ap(w.f.nodeA, 1), ap(w.f.vipHost, svcPort), syn)
		in := frame{src: ap(w.f.vipHost, 1), dst: ap(w.f.nodeA, podPort)}
		w.host(fr).is(fwdHost, miss, created).leaves(in.src, in.dst)
		answer := tcp(in.dst, in.src, syn|ack)
		w.host(answer).is(fwdHost, hitNew).leaves(fr.dst, fr.src)
	})
}

// A host process's call to a service on another node's host leaves by the
// wire, and the answer is translated where it arrives.
func TestHostServiceOnAnotherHost(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.backends(setFree, ap(w.f.nodeB, 1001))
		w.service(w.f.vip, 7001, maps.ProtoUDP, maps.Service{Id: 40, Set: setFree, Count: 1})
		fr := udp(ap(w.f.nodeA, 1), ap(w.f.vip, 7001))
		w.host(fr).is(fwdWire, miss, created).leaves(fr.src, ap(w.f.nodeB, 1001))
		w.wire(udp(ap(w.f.nodeB, 1001), fr.src)).is(fwdHost, hitNew).leaves(fr.dst, fr.src)
		// What the host receives otherwise is left alone.
		w.wire(udp(ap(w.f.nodeB, 1002), fr.src)).is(passed)
	})
}

// A host process's call to a load balancer's address, which the stack would
// send to that address's own next hop, goes to the backend's.
func TestHostServiceBeyondTheWire(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.backends(setFree, ap(w.f.nodeB, 1001))
		w.service(w.f.world, 7001, maps.ProtoUDP, maps.Service{Id: 40, Set: setFree, Count: 1})
		fr := udp(ap(w.f.nodeA, 1), ap(w.f.world, 7001))
		for _, what := range [][]reason{{miss, created}, {hitNew}} {
			r := w.run(w.at(toNetdev, fr.bytes(t))).is(fwdWire, what...).leaves(fr.src, ap(w.f.nodeB, 1001))
			if r.action != actRedirect {
				t.Errorf("action %d: it keeps the next hop that the stack gave it", int32(r.action))
			}
		}
		w.wire(udp(ap(w.f.nodeB, 1001), fr.src)).is(fwdHost, hitNew).leaves(fr.dst, fr.src)
	})
}

// TCP, UDP and SCTP on one address and port are three services.
func TestProtocolsAreApart(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		src := ap(f.client, 40000)
		w.backends(setFree, ap(f.local, 1001))
		w.backends(setFree+1, ap(f.third, 1002))
		w.backends(setFree+2, ap(f.third, 7000))
		w.service(f.vip, 7000, maps.ProtoTCP, maps.Service{Id: 30, Set: setFree, Count: 1})
		w.service(f.vip, 7000, maps.ProtoUDP, maps.Service{Id: 31, Set: setFree + 1, Count: 1})
		w.service(f.vip, 7000, maps.ProtoSCTP, maps.Service{Id: 32, Set: setFree + 2, Count: 1})
		vip := ap(f.vip, 7000)
		w.pod(devClient, tcp(src, vip, syn)).is(fwdLocal, miss, created).leaves(src, ap(f.local, 1001))
		w.pod(devClient, udp(src, vip)).is(fwdLocal, miss, created).leaves(src, ap(f.third, 1002))
		sctp := frame{src: src, dst: vip, proto: maps.ProtoSCTP, payload: []byte{1, 0, 0, 8, 1, 2, 3, 4}}
		w.pod(devClient, sctp).is(fwdLocal, miss, created).leaves(src, ap(f.third, 7000))
		answer := frame{src: ap(f.third, 7000), dst: src, proto: maps.ProtoSCTP, payload: sctp.payload}
		w.pod(devThird, answer).is(fwdLocal, hitNew).leaves(vip, src)
	})
}

// The set is replaced as the agent does it: established connections stay
// where they are, new ones find the new set at every moment.
func TestSetReplaced(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		c := w.conn(40000).open()
		w.backends(setFree, ap(f.local, podPort))
		w.service(f.vipRemote, svcPort, maps.ProtoTCP, maps.Service{Id: 12, Set: setFree, Count: 1})
		fresh := tcp(ap(f.client, 40001), ap(f.vipRemote, svcPort), syn)
		w.pod(devClient, fresh).is(fwdLocal, miss, created).leaves(fresh.src, ap(f.local, podPort))
		del(w, w.set.Backends, maps.BackendKey{Set: setRemote})
		c.send(ack).is(fwdTunnel, hit)
		// Its backend's generation moves with the removal: still no other one.
		w.bump(slotRemote)
		c.send(ack).is(fwdTunnel, stale, hit).leaves(c.out.src, c.answer.src)

		// Scaled to nothing: new connections are refused, the old one drains.
		w.service(f.vipRemote, svcPort, maps.ProtoTCP, maps.Service{Id: 12})
		fresh.src = ap(f.client, 40002)
		w.pod(devClient, fresh).is(noBackend, miss, refused)
		c.send(ack|psh).is(fwdTunnel, hit)
		del(w, w.set.Services, maps.ServiceKey{Addr: maps.ToAddr(f.vipRemote), Port: svcPort, Proto: maps.ProtoTCP})
		w.pod(devClient, fresh).is(noServicePort, miss, refused)
		c.reply(ack).is(fwdLocal, hit).leaves(c.out.dst, c.out.src)

		// A set that is gone without a successor is no endless search.
		w.service(f.vipRemote, svcPort, maps.ProtoTCP, maps.Service{Id: 12, Set: 999, Count: 3})
		w.pod(devClient, fresh).is(noBackend, miss, refused)
	})
}

// Translation keeps what was right right, in every shape a packet has.
func TestTranslatedChecksums(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		src, vip, real := ap(f.client, 40000), ap(f.vipLocal, svcPort), ap(f.local, podPort)
		for n := range 40 {
			fr := tcp(src, vip, psh|ack)
			fr.payload = make([]byte, n)
			for i := range fr.payload {
				fr.payload[i] = byte(251 * (i + n))
			}
			w.pod(devClient, fr).ended(fwdLocal).leaves(src, real)
			fr.proto = maps.ProtoUDP
			w.pod(devClient, fr).ended(fwdLocal).leaves(src, real)
		}
		// A UDP checksum of zero means none, and stays so.
		fr := udp(src, vip)
		fr.noSum = true
		d, _ := decode(w.pod(devClient, fr).ended(fwdLocal).leaves(src, real).out)
		if d.upper[6] != 0 || d.upper[7] != 0 {
			t.Fatalf("checksum %x appeared", d.upper[6:8])
		}
		w.udpSumBecomesZero(src, vip, real)
		// What was wrong stays wrong: nobody downstream may believe it.
		pkt := udp(src, vip).bytes(t)
		pkt[len(pkt)-1] ^= 1
		if r := w.run(w.at(fromPod, pkt)).ended(fwdLocal); wrong(r.out) == "" {
			t.Fatal("a wrong checksum was made right")
		}
	})
}

// The sum that comes out as zero is written as all ones (RFC 768).
func (w *world) udpSumBecomesZero(src, vip, real netip.AddrPort) {
	w.t.Helper()
	out := udp(src, real).with("xx\x00\x00").bytes(w.t)
	d, _ := decode(out)
	sum := uint16(d.upper[6])<<8 | uint16(d.upper[7])
	// Adding the checksum to the payload takes it away from the checksum.
	fr := udp(src, vip).with("xx" + string([]byte{byte(sum >> 8), byte(sum)}))
	r := w.pod(devClient, fr).ended(fwdLocal).leaves(src, real)
	d, _ = decode(r.out)
	if d.upper[6] != 0xff || d.upper[7] != 0xff {
		w.t.Fatalf("checksum %x, want ffff", d.upper[6:8])
	}
}

// However many clients outside come to a service: who is here keeps its
// backend.
func TestAffinityOfOwnClientsIsKept(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		const id, set = 40, setFree
		backends := make([]netip.AddrPort, 16)
		for i := range backends {
			backends[i] = ap(w.f.remote, uint16(9000+i))
		}
		w.backends(set, backends...)
		n := uint32(len(backends))
		w.service(w.f.lb, 443, maps.ProtoTCP, maps.Service{Id: id, Set: set, Count: n, ExtSet: set, ExtCount: n, Affinity: 600, Flags: maps.ServiceExternal})
		backend := func(r *result) uint16 {
			t.Helper()
			d, _ := decode(r.out)
			_, port := d.ports()
			return port
		}
		call := func(port uint16) uint16 {
			t.Helper()
			return backend(w.pod(devClient, tcp(ap(w.f.client, port), ap(w.f.lb, 443), syn)).is(fwdTunnel, miss, created))
		}
		was := call(40000)
		w.wire(tcp(ap(w.f.world, 40000), ap(w.f.lb, 443), syn)).is(fwdTunnel, miss, created)
		inside, outside := maps.AffinityKey{Client: maps.ToAddr(w.f.client), Service: id}, maps.AffinityKey{Client: maps.ToAddr(w.f.world), Service: id}
		for k, m := range map[maps.AffinityKey]maps.Map[maps.AffinityKey, maps.Affinity]{inside: w.set.AffinityIn, outside: w.set.Affinity} {
			if all, err := m.Dump(); err != nil || len(all) != 1 {
				t.Fatalf("%v: %v, %v", maps.FromAddr(k.Client), all, err)
			}
			if _, ok, err := m.Get(k); err != nil || !ok {
				t.Fatalf("%v is not there: %v", maps.FromAddr(k.Client), err)
			}
		}
		// As many as the map holds, and more.
		a := w.f.world.As16()
		for i := range w.set.Affinity.MaxEntries() + 1000 {
			binary.BigEndian.PutUint32(a[12:], uint32(0x0c000000+i))
			put(w, w.set.Affinity, maps.AffinityKey{Client: maps.Addr{B: a}, Service: id}, maps.Affinity{Addr: maps.ToAddr(w.f.remote), Port: 9000})
		}
		if _, ok, err := w.set.Affinity.Get(outside); err != nil || ok {
			t.Fatalf("the first client outside is still there: %v", err)
		}
		for port := uint16(40001); port < 40010; port++ {
			if now := call(port); now != was {
				t.Fatalf("backend %d, it was %d before", now, was)
			}
		}
	})
}
