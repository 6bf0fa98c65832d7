package packet

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/sourceport"
)

// fewPorts is a datapath that has two source ports to give away.
var fewPorts = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024, SourcePorts: []sourceport.Range{{Min: 2000, Max: 2001}}})
})

// givable are the ports that sources are translated to by default.
func givable(port uint16) bool { return port >= 1024 && port <= 29999 || port >= 61000 }

// A port that a socket of the host's holds is not given to another of its
// flows; to a pod's flow it is, for the pod's address is another.
func TestPortsOfTheHostsSockets(t *testing.T) {
	const collision = bpf.DpPwReasonPW_DROP_FLOW_COLLISION
	both(t, func(t *testing.T, w *world) {
		d, err := fewPorts()
		if err != nil {
			t.Fatal(err)
		}
		w.datapath = d
		w.fill()
		for _, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
			// The same source port by the service and directly: the second
			// flow needs another one.
			collide := func(send func(frame) *result, deliver func(frame) *result, src netip.AddrPort) *result {
				t.Helper()
				send(frame{src: src, dst: ap(w.f.vipLocal, svcPort), proto: proto, flags: syn}).is(fwdLocal, miss, created)
				return deliver(frame{src: src, dst: ap(w.f.local, podPort), proto: proto, flags: syn})
			}
			toLocal := func(fr frame) *result { t.Helper(); return w.deliver(devLocal, "", fr) }
			byClient := func(fr frame) *result { t.Helper(); return w.pod(devClient, fr) }
			to := ap(w.f.local, podPort)

			taken := holdPort(t, proto, ap(w.f.nodeA, 2000))
			collide(w.host, toLocal, ap(w.f.nodeA, 40000)).is(fwdLocal, miss, portChanged).leaves(ap(w.f.nodeA, 2001), to)
			collide(w.host, toLocal, ap(w.f.nodeA, 40001)).is(collision, miss)
			collide(byClient, byClient, ap(w.f.client, 40000)).is(fwdLocal, miss, portChanged)
			collide(byClient, byClient, ap(w.f.client, 40001)).is(fwdLocal, miss, portChanged)
			if err := taken.Close(); err != nil {
				t.Fatal(err)
			}
			toLocal(frame{src: ap(w.f.nodeA, 40001), dst: to, proto: proto, flags: syn}).
				is(fwdLocal, miss, portChanged).leaves(ap(w.f.nodeA, 2000), to)
		}
	})
}

// holdPort has a socket of the test's namespace, the node's, own a port.
func holdPort(t *testing.T, proto uint8, at netip.AddrPort) io.Closer {
	t.Helper()
	var s io.Closer
	var err error
	if proto == maps.ProtoTCP {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		s, err = lc.Listen(context.Background(), "tcp", at.String())
	} else {
		s, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() }) // a second time, where the test went on
	return s
}

// The host calls a place outside under a port, or an echo's identifier, that a
// pod's flow to the same place has by now: it goes on under another one, and
// each hears its own answers and errors (N9).
func TestHostsCallUnderAPodsPort(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		for _, sent := range []frame{
			tcp(ap(f.client, 40000), ap(f.world, 443), syn),
			udp(ap(f.client, 40000), ap(f.world, 53)),
			echo(f.client, f.world, 77),
		} {
			pod := w.talk(w.pod(devClient, sent).is(fwdWire, miss, created), sent, sent.dst)
			call := pod // what the host sends is what the pod's packet has become
			host := w.talk(w.run(w.at(toNetdev, call.bytes(t))).is(fwdWire, miss, portChanged), call, call.dst)
			if host.src.Addr() != f.nodeA || host.src.Port() == call.src.Port() {
				t.Fatalf("protocol %d: the host's call left as %v beside the pod's %v", sent.proto, host.src, pod.src)
			}
			reply := func(fr frame) frame {
				fr = fr.back()
				if fr.proto == maps.ProtoTCP {
					fr.flags = syn | ack
				}
				return fr
			}
			w.wire(reply(pod)).is(fwdLocal, hitNew).leaves(sent.dst, sent.src)
			w.wire(reply(host)).is(fwdHost, hitNew).leaves(call.dst, call.src)
			w.becomes(w.errorAt(fromNetdev), said{f.router, f.nodeA, pod}, fwdLocal, said{f.router, f.client, sent})
			w.becomes(w.errorAt(fromNetdev), said{f.router, f.nodeA, host}, fwdHost, said{f.router, f.nodeA, call})
		}
	})
}
