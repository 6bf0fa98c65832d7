package agent

import (
	"net/netip"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/tunnel"
)

// What frames leave out of an IPv6 address is its node's, by its first range
// and address of that family.
func TestNodeV6(t *testing.T) {
	addr, cidr := netip.MustParseAddr, netip.MustParsePrefix
	for _, c := range []struct {
		what       string
		node       tunnel.NodeInfo
		pods, host string
	}{
		{"both families", tunnel.NodeInfo{
			PodCIDRs:    []netip.Prefix{cidr("10.244.80.0/24"), cidr("fd00:10:244:50::/64"), cidr("fd00:99::/64")},
			InternalIPs: []netip.Addr{addr("172.31.0.2"), addr("fd00:172:31::2"), addr("fd00:99::2")},
		}, "fd00:10:244:50::", "fd00:172:31::"},
		{"a range longer than what is left out", tunnel.NodeInfo{PodCIDRs: []netip.Prefix{cidr("fd00::1:2:3:4500/120")}}, "fd00::1:2:0:0", ""},
		{"IPv4 alone", tunnel.NodeInfo{PodCIDRs: []netip.Prefix{cidr("10.244.80.0/24")}, InternalIPs: []netip.Addr{addr("172.31.0.2")}}, "", ""},
	} {
		want := maps.NodeV6{}
		if c.pods != "" {
			want.Pods = ip(c.pods)
		}
		if c.host != "" {
			want.Host = ip(c.host)
		}
		if got := nodeV6(c.node); got != want {
			t.Errorf("%s: %v and %v", c.what, maps.FromAddr(got.Pods), maps.FromAddr(got.Host))
		}
	}
}
