package agent

import (
	"errors"
	"net/netip"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
)

// syncDevAddrs writes under which addresses this node sends.
func (a *Agent) syncDevAddrs() {
	a.devAddrs.Desire(devAddrs(a.world.self.InternalIPs, a.world.outside))
	err := a.devAddrs.Upsert().Err()
	a.problem("addresses to send under", "", errors.Join(err, a.devAddrs.Prune().Err()))
}

// devAddrs are the entries of pw_dev_addrs. Index 0 has the node's own
// addresses, else those of the first uplink that has any; a device without an
// address of a family sends under the node's, as the kernel does.
func devAddrs(internal []netip.Addr, outside []node.Device) map[uint32]maps.DevAddrs {
	var v4, v6 netip.Addr
	first := func(to *netip.Addr, a netip.Addr) {
		if !to.IsValid() {
			*to = a
		}
	}
	for _, a := range internal {
		if a.Is4() {
			first(&v4, a)
		} else {
			first(&v6, a)
		}
	}
	for _, d := range node.Uplinks(outside) {
		first(&v4, d.Source4)
		first(&v6, d.Source6)
	}
	out := map[uint32]maps.DevAddrs{0: {V4: maps.ToAddr(v4), V6: maps.ToAddr(v6)}}
	for _, d := range outside {
		s4, s6 := d.Source4, d.Source6
		first(&s4, v4)
		first(&s6, v6)
		out[uint32(d.Index)] = maps.DevAddrs{V4: maps.ToAddr(s4), V6: maps.ToAddr(s6)}
	}
	return out
}
