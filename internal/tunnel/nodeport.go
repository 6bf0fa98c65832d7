package tunnel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/podweir/podweir/internal/maps"
)

// NodePortAddrs says on which addresses of the nodes NodePorts answer. The
// zero value stands for all that other hosts can reach.
type NodePortAddrs struct {
	Primary bool           // only on the InternalIPs of the Node objects
	In      []netip.Prefix // only in these ranges
}

// ParseNodePortAddrs reads what a flag says: ranges, or the word primary.
func ParseNodePortAddrs(list []string) (NodePortAddrs, error) {
	var out NodePortAddrs
	for _, s := range list {
		s = strings.TrimSpace(s)
		if s == "primary" {
			if len(list) > 1 {
				return NodePortAddrs{}, fmt.Errorf("primary stands alone: leave the ranges out, or write ranges only")
			}
			return NodePortAddrs{Primary: true}, nil
		}
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil:
			return NodePortAddrs{}, fmt.Errorf("%q is neither a range such as 192.0.2.0/24 nor the word primary", s)
		case p.Addr().Is4In6():
			return NodePortAddrs{}, fmt.Errorf("%s is an IPv4 range in IPv6 form; write it as IPv4", s)
		}
		out.In = append(out.In, p.Masked())
	}
	return out, nil
}

// nodePortFlag is maps.PeerNodePort if NodePorts answer on an address of a
// node; the node may be unknown.
func (b *base) nodePortFlag(a netip.Addr, node *NodeInfo) uint32 {
	n := b.in.NodePorts
	yes := !a.IsLinkLocalUnicast() && !a.IsMulticast()
	switch {
	case n.Primary:
		yes = yes && node != nil && slices.Contains(node.InternalIPs, a)
	case len(n.In) > 0:
		yes = yes && slices.ContainsFunc(n.In, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	if yes {
		return maps.PeerNodePort
	}
	return 0
}
