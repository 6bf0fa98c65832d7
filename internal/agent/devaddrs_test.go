package agent

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
)

func TestDevAddrs(t *testing.T) {
	a := netip.MustParseAddr
	none := maps.Addr{}
	tests := []struct {
		name     string
		internal []netip.Addr
		outside  []node.Device
		want     map[uint32]maps.DevAddrs
	}{
		{"nothing known", nil, nil, map[uint32]maps.DevAddrs{0: {}}},
		{
			"the first InternalIP of each family; a device's own addresses",
			[]netip.Addr{a("172.31.0.2"), a("fd00:172:31::2"), a("172.31.0.22")},
			[]node.Device{{Uplink: true, Index: 5, Source4: a("192.0.2.5"), Source6: a("2001:db8::5")}},
			map[uint32]maps.DevAddrs{
				0: {V4: ip("172.31.0.2"), V6: ip("fd00:172:31::2")},
				5: {V4: ip("192.0.2.5"), V6: ip("2001:db8::5")},
			},
		},
		{
			"a device without an address sends under the node's",
			[]netip.Addr{a("172.31.0.2")},
			[]node.Device{{Uplink: true, Index: 5}, {Uplink: true, Index: 6, Source6: a("2001:db8::6")}},
			map[uint32]maps.DevAddrs{
				0: {V4: ip("172.31.0.2"), V6: ip("2001:db8::6")},
				5: {V4: ip("172.31.0.2"), V6: ip("2001:db8::6")},
				6: {V4: ip("172.31.0.2"), V6: ip("2001:db8::6")},
			},
		},
		{
			"one family only", []netip.Addr{a("172.31.0.2")}, []node.Device{{Uplink: true, Index: 5, Source4: a("172.31.0.2")}},
			map[uint32]maps.DevAddrs{0: {V4: ip("172.31.0.2"), V6: none}, 5: {V4: ip("172.31.0.2"), V6: none}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, devAddrs(tt.internal, tt.outside), cmp.Comparer(func(a, b maps.DevAddrs) bool { return a == b })); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
}
