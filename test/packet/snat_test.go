package packet

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

// With two ports to give, two flows to one destination leave under this
// node's address and the third is dropped; to another destination it leaves.
func TestPortsRunOut(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			d, err := loadAs(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024}, func(spec *ebpf.CollectionSpec) {
				for name, v := range map[string]uint16{"cfg_port_min": 5000, "cfg_port_max": 5001} {
					if err := spec.Variables[name].Set(v); err != nil {
						t.Fatal(err)
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			w := &world{t: t, f: f, datapath: d}
			w.fill()
			seen := make(map[uint16]bool)
			for i := range uint16(2) {
				r := w.pod(devClient, udp(ap(f.client, 100+i), ap(f.world, 53))).is(fwdWire, miss, created)
				left, _ := decode(r.out)
				port, _ := left.ports()
				if left.src != f.nodeA || port < 5000 || port > 5001 || seen[port] {
					t.Fatalf("left as %v:%d, after %v", left.src, port, seen)
				}
				seen[port] = true
			}
			w.pod(devClient, udp(ap(f.client, 102), ap(f.world, 53))).is(bpf.DpPwReasonPW_DROP_NO_PORT, miss)
			w.noEntry(udp(ap(f.client, 102), ap(f.world, 53)))
			w.pod(devClient, udp(ap(f.client, 102), ap(f.world, 54))).is(fwdWire, miss, created)
			if err := d.objs.Close(); err != nil {
				t.Fatal(err)
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
