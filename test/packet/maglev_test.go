package packet

import (
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/service"
)

// A client outside finds the same backend on every node, whatever numbers the
// node has given to service and set, and whichever of its own addresses was
// called; the choice is even, and the loss of a backend moves its share.
func TestMaglevChoosesAlike(t *testing.T) {
	const clients, all = 2000, 20
	both(t, func(t *testing.T, w *world) {
		// node has the choices of one node for all clients, by backend port.
		node := func(id, set uint32, called netip.Addr, n int) []uint16 {
			w.fill()
			var addrs []netip.AddrPort
			var list []maps.Backend
			for i := range n {
				addrs = append(addrs, ap(w.f.remote, uint16(9000+i)))
				list = append(list, maps.Backend{Addr: maps.ToAddr(w.f.remote), Port: uint16(9000 + i)})
			}
			w.backends(set, addrs...)
			size := service.MaglevSize(16381, n)
			for i, chunk := range service.MaglevChunks(service.Maglev(list, size)) {
				put(w, w.set.Maglev, maps.MaglevKey{Set: set, Chunk: uint32(i)}, chunk)
			}
			w.service(called, 7000, maps.ProtoTCP, maps.Service{
				Id: id, Set: set, Count: uint32(n), ExtSet: set, ExtCount: uint32(n), Maglev: size, Flags: maps.ServiceExternal,
			})
			var out []uint16
			for i := range uint16(clients) {
				r := w.wire(tcp(ap(w.f.world, 20000+i), ap(called, 7000), syn)).is(fwdTunnel, miss, created)
				d, _ := decode(r.out)
				_, port := d.ports()
				out = append(out, port-9000)
			}
			return out
		}
		first := node(70, 170, w.f.lb, all)
		second := node(4711, 815, w.f.nodeA, all)
		share := make(map[uint16]int)
		for i := range first {
			if first[i] != second[i] {
				t.Fatalf("client %d: backend %d on one node, %d on another", i, first[i], second[i])
			}
			share[first[i]]++
		}
		// Chi-square for 19 degrees of freedom: above this once in 10^7.
		chi, want := 0.0, float64(clients)/all
		for i := range uint16(all) {
			d := float64(share[i]) - want
			chi += d * d / want
		}
		if chi > 70 {
			t.Errorf("chi-square %.1f: %v", chi, share)
		}
		moved := 0
		for i, b := range node(70, 170, w.f.lb, all-1) {
			if b != first[i] {
				moved++
			}
		}
		if most := 2 * clients / all; moved > most || moved < share[all-1] {
			t.Errorf("%d of %d clients moved, want %d to %d", moved, clients, share[all-1], most)
		}
	})
}
