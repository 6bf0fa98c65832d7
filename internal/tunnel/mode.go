package tunnel

import (
	"fmt"
	"strings"
)

// Mode is how packets travel between nodes.
type Mode string

const (
	// ModeVXLAN puts every packet between nodes into the tunnel.
	ModeVXLAN Mode = "vxlan"
	// ModeCrossSubnet routes to nodes on the same link and tunnels to others.
	ModeCrossSubnet Mode = "cross-subnet"
	// ModeDirect routes to all nodes: the network knows the pod ranges.
	ModeDirect Mode = "direct"
)

// ParseMode is the inverse of string(m).
func ParseMode(s string) (Mode, error) {
	modes := []string{string(ModeVXLAN), string(ModeCrossSubnet), string(ModeDirect)}
	for _, m := range modes {
		if s == m {
			return Mode(m), nil
		}
	}
	return "", fmt.Errorf("%q is no routing mode; there are %s", s, strings.Join(modes, ", "))
}

// Direct says whether a node is reached without the tunnel, given whether it
// is on the same link.
func (m Mode) Direct(onlink bool) bool {
	return m == ModeDirect || m == ModeCrossSubnet && onlink
}

// Tunnels says whether any node can be reached through the tunnel, so that
// pods must leave room for its headers.
func (m Mode) Tunnels() bool { return m != ModeDirect }
