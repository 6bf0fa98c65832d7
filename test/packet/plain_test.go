package packet

import (
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

// To ranges that are not masqueraded pods go under their own address: in the
// world, and to another node, by the tunnel then, as without masquerade. By a
// service that leads there, too. The rest goes under this node's.
func TestPlainDestinations(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			w := withPorts(t, f, loader.Config{FlowsMax: 1024, FlowsNewMax: 1024, Plain: true})
			w.plain()
			plain := w.nearWorld()
			direct := udp(ap(f.client, 100), ap(plain, 53))
			w.pod(devClient, direct).is(fwdWire, miss, created).leaves(direct.src, direct.dst)
			w.wire(direct.back()).is(fwdLocal, hitNew).leaves(direct.dst, direct.src)
			other := udp(ap(f.client, 100), ap(f.world, 53))
			if left := w.pod(devClient, other).is(fwdWire, miss, created).left(); left.Addr() != f.nodeA {
				t.Errorf("to the rest of the world it left as %v", left)
			}
			node := udp(ap(f.client, 100), ap(f.nodeB, 53))
			w.pod(devClient, node).is(fwdTunnel, miss, created).leaves(node.src, node.dst)
			w.tunnel(f.nodeB, node.back()).is(fwdLocal, hitNew)
			if left := w.pod(devClient, udp(ap(f.client, 100), ap(f.nodeC, 53))).is(fwdWire, miss, created).left(); left.Addr() != f.nodeA {
				t.Errorf("to a node outside it left as %v", left)
			}
			w.backends(setFree, ap(plain, 53))
			w.service(f.vip, 99, maps.ProtoUDP, maps.Service{Id: 99, Set: setFree, Count: 1})
			call := udp(ap(f.client, 101), ap(f.vip, 99))
			w.pod(devClient, call).is(fwdWire, miss, created).leaves(call.src, ap(plain, 53))

			// What opens a connection from there is a client outside like any.
			in := udp(ap(plain, 1000), ap(f.client, podPort))
			w.wire(in).is(fwdLocal, miss, created).leaves(in.src, in.dst)
			w.pod(devClient, in.back()).is(fwdWire, hitNew).leaves(in.dst, in.src)
			// Its flows outlast a change of what is known of its address.
			w.bump(slotPlain)
			w.wire(in).ended(fwdLocal)
			w.pod(devClient, in.back()).ended(fwdWire)
			w.pod(devClient, direct).ended(fwdWire).leaves(direct.src, direct.dst)
			w.wire(udp(ap(plain, 1001), ap(f.local, podPort))).is(fwdLocal, miss, created)
		})
	}
}

// Masquerade may be of one family alone.
func TestMasqueradeOfOneFamily(t *testing.T) {
	for _, cfg := range []loader.Config{
		{FlowsMax: 1024, FlowsNewMax: 1024, NoMasquerade4: true},
		{FlowsMax: 1024, FlowsNewMax: 1024, NoMasquerade6: true},
	} {
		for _, f := range families() {
			w := withPorts(t, f, cfg)
			want := f.nodeA
			if f.v6 && cfg.NoMasquerade6 || !f.v6 && cfg.NoMasquerade4 {
				want = f.client
			}
			if left := w.pod(devClient, udp(ap(f.client, 100), ap(f.world, 53))).is(fwdWire, miss, created).left(); left.Addr() != want {
				t.Errorf("%s with %+v: left as %v, want %v", f.name, cfg, left, want)
			}
			// A pod that calls itself needs another name in any case.
			w.backends(setFree, ap(f.client, 53))
			w.service(f.vip, 99, maps.ProtoUDP, maps.Service{Id: 99, Set: setFree, Count: 1})
			if left := w.pod(devClient, udp(ap(f.client, 101), ap(f.vip, 99))).is(fwdLocal, miss, created).left(); left.Addr() != f.nodeA {
				t.Errorf("%s with %+v: to itself as %v", f.name, cfg, left)
			}
		}
	}
}

// A pod of another node that is not masqueraded towards this one is
// translated here where it calls a host port; one that is was translated there.
func TestHostPortOfPlainNode(t *testing.T) {
	for _, f := range families() {
		for _, plain := range []bool{true, false} {
			w := withPorts(t, f, loader.Config{FlowsMax: 1024, FlowsNewMax: 1024, Plain: true})
			w.backends(setFree, ap(f.client, 53))
			w.service(f.nodeA, 8888, maps.ProtoUDP, maps.Service{Id: 99, Set: setFree, Count: 1, ExtSet: setFree, ExtCount: 1, Flags: maps.ServiceExternal})
			flags := maps.PeerHost | maps.PeerNodePort | maps.PeerInternal
			want := fwdHost
			if plain {
				flags, want = flags|maps.PeerPlain, fwdLocal
			}
			w.addr(f.nodeA, maps.Peer{Identity: maps.IdentityHost, Slot: slotNodeA, Flags: flags})
			w.tunnel(f.nodeB, udp(ap(f.remote, 100), ap(f.nodeA, 8888))).is(want, miss, created)
		}
	}
}

// slotPlain is the generation of the prefix that plain writes.
const slotPlain = slotThird

// nearWorld is an address in the range that plain writes.
func (w *world) nearWorld() netip.Addr {
	if w.f.v6 {
		return netip.MustParseAddr("2001:db8:77::9")
	}
	return netip.MustParseAddr("192.0.2.9")
}

// plain has pods reach a part of the world, and node b, under their own
// address.
func (w *world) plain() {
	w.t.Helper()
	near := w.nearWorld()
	p, err := near.Prefix(near.BitLen() * 3 / 4)
	if err != nil {
		w.t.Fatal(err)
	}
	w.prefix(p, maps.Peer{Identity: maps.IdentityWorld, Slot: slotPlain, Flags: maps.PeerPlain})
	w.addr(w.f.nodeB, maps.Peer{Identity: maps.IdentityRemoteNode, Slot: slotNodeB, Node: nodeIDB, Flags: maps.PeerNode | maps.PeerNodePort | maps.PeerPlain})
}
