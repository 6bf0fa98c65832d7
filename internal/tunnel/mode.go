package tunnel

import (
	"fmt"
	"slices"
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
	// ModeIPIP puts IPv4 of pods into IPv4 (RFC 2003) and the rest into the
	// tunnel.
	ModeIPIP Mode = "ipip"
	// ModeIPIPCrossSubnet routes to nodes on the same link and is ModeIPIP
	// towards others.
	ModeIPIPCrossSubnet Mode = "ipip-cross-subnet"
)

// Modes are all there are.
func Modes() []Mode {
	return []Mode{ModeVXLAN, ModeIPIP, ModeCrossSubnet, ModeIPIPCrossSubnet, ModeDirect}
}

// ParseMode is the inverse of string(m).
func ParseMode(s string) (Mode, error) {
	if slices.Contains(Modes(), Mode(s)) {
		return Mode(s), nil
	}
	return "", fmt.Errorf("%q is no routing mode; there are %s", s, Names())
}

// Names lists the modes for a message.
func Names() string {
	names := make([]string, 0, len(Modes()))
	for _, m := range Modes() {
		names = append(names, string(m))
	}
	return strings.Join(names, ", ")
}

// Routes says whether some nodes may be reached without encapsulation.
func (m Mode) Routes() bool {
	return m == ModeDirect || m == ModeCrossSubnet || m == ModeIPIPCrossSubnet
}

// Direct says whether a node is reached without encapsulation, given whether
// it is on the same link.
func (m Mode) Direct(onlink bool) bool {
	return m == ModeDirect || m.Routes() && onlink
}

// IPIP says whether IPv4 of pods travels in IPv4, to nodes that are not
// routed to.
func (m Mode) IPIP() bool { return m == ModeIPIP || m == ModeIPIPCrossSubnet }

// Encapsulates says whether any node can be reached by encapsulation, so that
// pods must leave room for its headers.
func (m Mode) Encapsulates() bool { return m != ModeDirect }
