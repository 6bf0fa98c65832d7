package packet

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

const unrelated = bpf.DpPwReasonPW_DROP_ICMP_UNRELATED

// Errors about a flow's packets take the flow's way back, through isolation
// too, and are none of its own packets.
func TestICMPErrorOfAFlow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		// Allow what the client starts; nothing else reaches it.
		isolate := func(table uint32) {
			w.edit(f.client, func(e *maps.Endpoint) { e.PolicyIn = table })
		}
		for _, quoted := range []frame{
			udp(ap(f.client, 40000), ap(f.remote, 53)),
			tcp(ap(f.client, 40001), ap(f.remote, 53), syn),
			echo(f.client, f.remote, 77),
			{src: ap(f.client, 5), dst: ap(f.remote, 6), proto: maps.ProtoSCTP},
			{src: ap(f.client, 0), dst: ap(f.remote, 0), proto: protoGRE, payload: make([]byte, 20)},
		} {
			isolate(5)
			w.pod(devClient, quoted).is(fwdTunnel, miss, created)
			for _, speaker := range []frame{{src: ap(f.remote, 0)}, {src: ap(f.nodeB, 0)}} {
				pkt := icmpError(t, speaker.src.Addr(), f.client, quoted.bytes(t))
				r := w.run(w.tunnelShot(f.nodeB, pkt)).is(fwdLocal)
				w.macs(r, fwdLocal, f.client)
				if r.ttl() != 63 {
					t.Fatalf("TTL %d", r.ttl())
				}
			}
			if w.entry(quoted).is(flagReplied) {
				t.Fatal("an error was taken for an answer")
			}
			// The node's own word about it.
			pkt := icmpError(t, f.nodeA, f.client, quoted.bytes(t))
			w.run(w.at(toPod, pkt)).is(fwdLocal)
		}
	})
}

func TestICMPErrorByTheWire(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		in := udp(ap(f.world, 50000), ap(f.client, podPort))
		w.wire(in).is(fwdLocal, miss, created)
		w.run(w.at(fromPod, icmpError(t, f.client, f.world, in.bytes(t)))).is(fwdWire)
		host := udp(ap(f.nodeA, 50000), ap(f.client, podPort))
		w.deliver(devClient, "", host).is(fwdLocal, miss, created)
		w.run(w.at(fromPod, icmpError(t, f.client, f.nodeA, host.bytes(t)))).is(fwdHost)
		remote := udp(ap(f.nodeA, 50000), ap(f.remote, podPort))
		w.host(remote).is(fwdTunnel, miss, created)
		w.run(w.tunnelShot(f.nodeB, icmpError(t, f.remote, f.nodeA, remote.bytes(t)))).is(fwdHost)
	})
}

func TestICMPErrorThatBelongsToNothing(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		quoted := udp(ap(f.client, 40000), ap(f.remote, 53))
		err := func(quote []byte) shot {
			return w.tunnelShot(f.nodeB, icmpError(t, f.remote, f.client, quote))
		}
		w.run(err(quoted.bytes(t))).is(unrelated)
		w.pod(devClient, quoted).is(fwdTunnel, miss, created)
		w.run(err(quoted.bytes(t))).is(fwdLocal)
		// Not to who sent it.
		w.run(w.tunnelShot(f.nodeB, icmpError(t, f.remote, f.local, quoted.bytes(t)))).is(unrelated)
		// About another port, another protocol, the other direction.
		w.run(err(udp(quoted.src, ap(f.remote, 54)).bytes(t))).is(unrelated)
		w.run(err(tcp(quoted.src, quoted.dst, syn).bytes(t))).is(unrelated)
		w.run(err(quoted.back().bytes(t))).is(unrelated)
		// The stack's own errors about what is no flow: the node may speak.
		w.run(w.at(toPod, icmpError(t, f.nodeA, f.client, quoted.back().bytes(t)))).is(passed)
		w.age(quoted.key(), time.Minute)
		w.age(quoted.back().key(), time.Minute)
		w.run(err(quoted.bytes(t))).is(unrelated)
	})
}

// A flow that is denied by now has no errors either.
func TestICMPErrorOfADeniedFlow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		quoted := udp(ap(f.client, 40000), ap(f.remote, 53))
		w.pod(devClient, quoted).is(fwdTunnel, miss, created)
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		denied := bpf.DpPwReasonPW_DROP_POLICY_EGRESS
		w.pod(devClient, quoted).is(denied, stale)
		w.run(w.tunnelShot(f.nodeB, icmpError(t, f.remote, f.client, quoted.bytes(t)))).is(denied)
	})
}

// The quoted packet is read as carefully as any.
func TestICMPErrorWithABadQuote(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		quoted := udp(ap(f.client, 40000), ap(f.remote, 53))
		w.pod(devClient, quoted).is(fwdTunnel, miss, created)
		whole := quoted.bytes(t)
		run := func(quote []byte) *result {
			return w.run(w.tunnelShot(f.nodeB, icmpError(t, f.remote, f.client, quote)))
		}
		ports := 14 + 20 + 4
		if f.v6 {
			ports = 14 + 40 + 4
		}
		for n := 14; n < len(whole); n++ {
			if n < ports {
				run(whole[:n]).is(malformed)
			} else {
				run(whole[:n]).is(fwdLocal)
			}
		}
		// What a short frame is padded with is no part of it.
		padded := icmpError(t, f.remote, f.client, whole)
		setLength(padded, len(padded)-14-len(whole)+ports-2)
		mend(padded)
		w.run(w.tunnelShot(f.nodeB, padded)).is(malformed)
		other := append([]byte(nil), whole...)
		other[14] ^= 0x20
		run(other).is(malformed)
		if f.v6 {
			mapped := append([]byte(nil), whole...)
			m := maps.ToAddr(families()[0].local)
			copy(mapped[22:], m.B[:])
			run(mapped).is(v4Mapped)
			run(w.fragment(quoted, 0, true)).is(unrelated)
			return
		}
		other = append([]byte(nil), whole...)
		other[14] = 0x44
		run(other).is(malformed)
		// Only a first fragment says which flow it was of.
		run(w.fragment(quoted, 0, true)).is(fwdLocal)
		run(w.fragment(quoted, 8, true)).is(unrelated)
	})
}

// Every type that is an error is treated as one, every other is a packet of
// a flow without ports.
func TestICMPTypes(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		errors := map[byte]bool{3: true, 4: true, 11: true, 12: true}
		for kind := range 256 {
			k := byte(kind)
			isError := errors[k]
			if w.f.v6 {
				isError = k < 128
			}
			body := make([]byte, 20)
			binary.BigEndian.PutUint16(body, uint16(kind)+1) // an identifier, for echo
			clear(w, w.set.FlowsNew)
			r := w.run(w.at(fromPod, icmp(t, w.f.client, w.f.remote, [2]byte{k, 0}, body)))
			switch {
			case isError:
				r.is(malformed) // what it quotes is nothing
			default:
				r.is(fwdTunnel, miss, created)
			}
		}
	})
}
