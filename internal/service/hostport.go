package service

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
)

// PortMapping is a port of the node that leads to a port of a pod.
type PortMapping struct {
	// HostIP is the one address it answers on; the zero Addr stands for all of
	// the node, an unspecified one for all of its family.
	HostIP   netip.Addr
	Port     uint16
	Target   uint16
	Protocol corev1.Protocol
}

func (m PortMapping) name() string {
	if !m.HostIP.IsValid() {
		return fmt.Sprint(m.Port)
	}
	return netip.AddrPortFrom(m.HostIP, m.Port).String()
}

// PodPorts are the port mappings of one interface of a pod.
type PodPorts struct {
	Addrs []netip.Addr // of the pod
	Ports []PortMapping
}

// Pod is the owner of the host ports of a pod.
func Pod(namespace, name string) Owner { return Owner{KindPod, namespace, name} }

// CompileHostPorts compiles the host ports of a pod of this node, node being
// the addresses of the node. Each leads to the pod's address of the family,
// under the client's own address, for whoever asks. A port for one address
// takes effect while the node has it; a port for all leaves out link-local
// ones. One for a loopback address is for sockets of the node alone, which the
// datapath sees of TCP only, if it sees them at all. The error joins what cannot be served; the Compiled beside it is good.
func CompileHostPorts(pod Owner, created time.Time, list []PodPorts, node []netip.Addr, sockets bool) (Compiled, error) {
	out := Compiled{Owner: pod, Created: created}
	var errs []error
	for _, of := range list {
		for _, m := range of.Ports {
			ports, err := m.compile(pod, of.Addrs, node, sockets)
			if err != nil {
				errs = append(errs, fmt.Errorf("host port %s/%s: %w", m.name(), m.Protocol, err))
			}
			out.Ports = append(out.Ports, ports...)
		}
	}
	slices.SortFunc(out.Ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.PortName, b.PortName), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Family, b.Family))
	})
	return out, errors.Join(errs...)
}

// compile makes a port of every family that m is for.
func (m PortMapping) compile(pod Owner, podAddrs, node []netip.Addr, sockets bool) (out []Port, err error) {
	proto := protoNumber(m.Protocol)
	if proto == 0 {
		return nil, fmt.Errorf("%q is none of TCP, UDP and SCTP", m.Protocol)
	}
	one := m.HostIP.IsValid() && !m.HostIP.IsUnspecified()
	if one && m.HostIP.IsLoopback() {
		if m.Protocol != corev1.ProtocolTCP {
			return nil, errors.New("loopback addresses have ports of TCP alone")
		}
		if !sockets {
			return nil, errors.New("loopback addresses have ports at sockets alone, and without --cgroup those are left alone")
		}
		node = []netip.Addr{m.HostIP}
	}
	if one && !slices.Contains(node, m.HostIP) {
		return nil, fmt.Errorf("this node has no address %s that others can reach; the port answers once it has", m.HostIP)
	}
	served := false
	for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		at := slices.IndexFunc(podAddrs, func(a netip.Addr) bool { return familyOf(a) == family })
		if at < 0 || m.HostIP.IsValid() && familyOf(m.HostIP) != family {
			continue
		}
		served = true
		backend := []maps.Backend{{Addr: maps.ToAddr(podAddrs[at]), Port: m.Target}}
		p := Port{
			Owner: pod, PortName: m.name(), Protocol: m.Protocol, Family: family,
			Cluster: backend, External: backend, KeepSource: true,
			States: []BackendState{{backend[0], maps.BackendCluster | maps.BackendExt | maps.BackendServing}},
		}
		for _, a := range node {
			if familyOf(a) != family || one && a != m.HostIP || !one && a.IsLinkLocalUnicast() {
				continue
			}
			p.Frontends = append(p.Frontends, Frontend{maps.ServiceKey{Addr: maps.ToAddr(a), Port: m.Port, Proto: proto}, HostPort})
		}
		if len(p.Frontends) > 0 {
			out = append(out, p)
		}
	}
	if !served {
		return nil, errors.New("the pod has no address of the family")
	}
	return out, nil
}
