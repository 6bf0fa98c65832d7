package endpoint

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// PortMapping is a port of the node that leads to a port of the pod.
type PortMapping struct {
	// HostIP is the address of the node alone; the zero Addr stands for all,
	// an unspecified one for all of its family.
	HostIP        netip.Addr `json:"hostIP,omitzero"`
	HostPort      uint16     `json:"hostPort"`
	ContainerPort uint16     `json:"containerPort"`
	Protocol      string     `json:"protocol"` // TCP, UDP or SCTP
}

// Frontend names the node's side: a port, or an address and port.
func (p PortMapping) Frontend() string {
	if !p.HostIP.IsValid() {
		return strconv.Itoa(int(p.HostPort))
	}
	return netip.AddrPortFrom(p.HostIP, p.HostPort).String()
}

func (p PortMapping) String() string {
	return fmt.Sprintf("%s->%d/%s", p.Frontend(), p.ContainerPort, strings.ToLower(p.Protocol))
}

func (p PortMapping) validate() error {
	if p.HostPort == 0 || p.ContainerPort == 0 {
		return fmt.Errorf("port mapping %s: ports are 1 to 65535", p)
	}
	if !slices.Contains([]string{"TCP", "UDP", "SCTP"}, p.Protocol) {
		return fmt.Errorf("port mapping %s: protocol %q is none of TCP, UDP and SCTP", p, p.Protocol)
	}
	if a := p.HostIP; a.IsMulticast() || a.Is4In6() || a.Zone() != "" {
		return fmt.Errorf("port mapping %s: hostIP %s is no address that a node can have", p, a)
	}
	return nil
}

// overlaps: is there an address on which both answer?
func (p PortMapping) overlaps(o PortMapping) bool {
	if p.HostPort != o.HostPort || p.Protocol != o.Protocol {
		return false
	}
	a, b := p.HostIP, o.HostIP
	switch {
	case !a.IsValid() || !b.IsValid() || a == b:
		return true
	case a.IsUnspecified() || b.IsUnspecified():
		return a.Is4() == b.Is4()
	}
	return false
}

// portMappings returns what is asked for in an order of its own, each once;
// two that contradict each other are an error.
func portMappings(asked []PortMapping) ([]PortMapping, error) {
	out := sortedMappings(asked)
	for i, p := range out {
		if err := p.validate(); err != nil {
			return nil, err
		}
		for _, q := range out[:i] {
			if p.overlaps(q) {
				return nil, fmt.Errorf("port mappings %s and %s: one port of the node cannot lead to both", q, p)
			}
		}
	}
	return out, nil
}

// sortedMappings is a sorted copy without repetitions.
func sortedMappings(list []PortMapping) []PortMapping {
	out := slices.Clone(list)
	slices.SortFunc(out, func(a, b PortMapping) int {
		return cmp.Or(cmp.Compare(a.HostPort, b.HostPort), cmp.Compare(a.Protocol, b.Protocol),
			a.HostIP.Compare(b.HostIP), cmp.Compare(a.ContainerPort, b.ContainerPort))
	})
	return slices.Compact(out)
}

// portsTaken says which endpoint has a port that is asked for; the caller
// holds the manager's mutex.
func (m *Manager) portsTaken(asked []PortMapping) error {
	for _, e := range m.eps {
		for _, have := range e.rec.Endpoint.PortMappings {
			for _, p := range asked {
				if p.overlaps(have) {
					return errorf(CodeHostPort, "host port %s/%s belongs to %s, as %s: delete that pod, or give them different host ports or host IPs",
						p.Frontend(), strings.ToLower(p.Protocol), e.rec.Endpoint, have)
				}
			}
		}
	}
	return nil
}
