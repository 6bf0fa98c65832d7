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
