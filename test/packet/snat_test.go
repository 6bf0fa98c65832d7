package packet

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
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
