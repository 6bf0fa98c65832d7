package tunnel

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// The addresses of nodes that NodePorts answer on (S22).
func TestNodePortAddrs(t *testing.T) {
	var own []netip.Addr
	for _, s := range []string{"127.0.0.1", "172.31.0.2", "10.9.0.1", "169.254.7.7", "fd00:172:31::2", "fe80::2", "::1"} {
		own = append(own, netip.MustParseAddr(s))
	}
	tests := []struct {
		name string
		flag []string
		want []string
	}{
		{"all", nil, []string{"10.9.0.1", "172.31.0.2", "172.31.0.3", "fd00:172:31::2", "fd00:172:31::3"}},
		{"primary", []string{"primary"}, []string{"172.31.0.2", "172.31.0.3", "fd00:172:31::3"}},
		{"ranges", []string{"10.0.0.0/8", " fd00:172:31::3/64"}, []string{"10.9.0.1", "fd00:172:31::2", "fd00:172:31::3"}},
		{"no address in them", []string{"192.0.2.0/24"}, nil},
		{"IPv4 anywhere", []string{"0.0.0.0/0"}, []string{"10.9.0.1", "172.31.0.2", "172.31.0.3"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n, err := ParseNodePortAddrs(tt.flag)
			if err != nil {
				t.Fatal(err)
			}
			out := Compile(Input{
				Self: "a", HostAddrs: own, NodePorts: n,
				Nodes: []NodeInfo{
					{Name: "a", InternalIPs: []netip.Addr{netip.MustParseAddr("172.31.0.2")}},
					{Name: "b", InternalIPs: []netip.Addr{netip.MustParseAddr("172.31.0.3"), netip.MustParseAddr("fd00:172:31::3")}},
				},
			})
			var got []string
			for a, p := range out.Addrs {
				if p.Flags&maps.PeerNodePort != 0 {
					got = append(got, a.String())
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}
