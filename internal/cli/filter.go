package cli

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/podweir/podweir/internal/maps"
)

// flowFilter selects flows by their ends, as the initiator sees them.
type flowFilter struct {
	from, to *endFilter
	services map[uint32]bool // nil: any
	proto    string          // empty: any
}

// checkFlowFlags refuses what selects nothing on any node, before anybody is
// asked what the rest means.
func checkFlowFlags(from, to, service, proto string) error {
	for _, end := range []struct{ flag, value string }{{"--from", from}, {"--to", to}} {
		s := end.value
		_, err1 := netip.ParseAddr(s)
		_, err2 := netip.ParsePrefix(s)
		_, err3 := netip.ParseAddrPort(s)
		if s != "" && err1 != nil && err2 != nil && err3 != nil && !validPod(s) && !validNode(s) && !validDevice(s) {
			return usageError("%s %s: is neither an address, with a port or without, nor a range, nor a name of a pod (namespace/name), node or device", end.flag, s)
		}
	}
	if proto != "" {
		if _, err := parseProto(proto); err != nil {
			return err
		}
	}
	if service != "" {
		return checkService("--service "+service, service)
	}
	return nil
}

// checkService refuses what names no service on any node; arg is how it was
// given.
func checkService(arg, service string) error {
	_, err1 := netip.ParseAddr(service)
	_, err2 := netip.ParseAddrPort(service)
	id, err3 := strconv.ParseUint(service, 10, 32)
	// Names are printed as "pod namespace/name:port" when no Service owns them.
	name, _, _ := strings.Cut(service[strings.LastIndexByte(service, ' ')+1:], ":")
	if err1 != nil && err2 != nil && (err3 != nil || id == 0) && !validPod(name) {
		return usageError("%s: is neither namespace/name, with a port's name or without, nor an address, nor an id", arg)
	}
	return nil
}

// validPod: may s be namespace/name?
func validPod(s string) bool {
	namespace, name, ok := strings.Cut(s, "/")
	return ok && len(validation.IsDNS1123Label(namespace)) == 0 && len(validation.IsDNS1123Subdomain(name)) == 0
}

// validNode: may s be the name of a Node?
func validNode(s string) bool { return len(validation.IsDNS1123Subdomain(s)) == 0 }

func newFlowFilter(m Maps, n *names, from, to, service, proto string) (flowFilter, error) {
	var f flowFilter
	var err error
	if from != "" {
		if f.from, err = newEndFilter("--from", from, n); err != nil {
			return f, err
		}
	}
	if to != "" {
		if f.to, err = newEndFilter("--to", to, n); err != nil {
			return f, err
		}
	}
	if proto != "" {
		if f.proto, err = parseProto(proto); err != nil {
			return f, err
		}
	}
	if service != "" {
		f.services, err = findServices(m, n, "--service "+service, service)
	}
	return f, err
}

func (f *flowFilter) match(v *flowView) bool {
	if f.proto != "" && v.Protocol != f.proto {
		return false
	}
	if f.services != nil && !f.services[v.ServiceID] {
		return false
	}
	if f.from != nil && !f.from.match(v.end.from, v.end.source) {
		return false
	}
	return f.to == nil || f.to.match(v.end.to, v.end.destination, v.end.translated)
}

// endFilter is what --from and --to select: one of its fields is set.
type endFilter struct {
	addrPort netip.AddrPort
	prefix   netip.Prefix
	name     string
	names    *names
}

func newEndFilter(flag, s string, n *names) (*endFilter, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		a = a.Unmap().WithZone("")
		return &endFilter{prefix: netip.PrefixFrom(a, a.BitLen())}, nil
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		return &endFilter{prefix: p.Masked()}, nil
	}
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return &endFilter{addrPort: ap}, nil
	}
	known := s == "host" || s == "wire" || n.podNames[s]
	for _, name := range n.nodes {
		known = known || s == name
	}
	for _, e := range n.endpoints {
		known = known || s == e.HostIfName
	}
	// A device can be named without the agent; a name the agent does not
	// know may be one, too.
	if !known && n.down != nil {
		known = validDevice(s)
	}
	switch {
	case known:
		return &endFilter{name: s, names: n}, nil
	case n.blind():
		return nil, fmt.Errorf("%s %s: names of pods and nodes need the agent, which does not answer, or --kubeconfig; give an address", flag, s)
	}
	return nil, fmt.Errorf("%s %s: is neither an address nor a range, and neither a pod with an address of its own (namespace/name), nor a node, nor a pod's device", flag, s)
}

// validDevice: may s be the name of a device?
func validDevice(s string) bool {
	if s == "" || len(s) > 15 {
		return false
	}
	for _, r := range s {
		if r == '/' || r == ':' || r <= ' ' {
			return false
		}
	}
	return true
}

// match reports whether a place or one of the addresses is meant.
func (f *endFilter) match(place placeView, addrs ...netip.AddrPort) bool {
	if f.name != "" && (f.name == place.Name || f.name == place.Device || place.Kind == f.name) {
		return true
	}
	for _, a := range addrs {
		switch {
		case f.name != "":
			if f.names.pods[a.Addr()] == f.name {
				return true
			}
		case f.prefix.IsValid():
			if f.prefix.Contains(a.Addr()) {
				return true
			}
		case a == f.addrPort:
			return true
		}
	}
	return false
}

// parseProto returns the name of a protocol as flows print it.
func parseProto(s string) (string, error) {
	if n, err := strconv.ParseUint(s, 10, 8); err == nil {
		return maps.ProtoName(uint8(n)), nil
	}
	for n := 1; n < 256; n++ {
		if maps.ProtoName(uint8(n)) == s {
			return s, nil
		}
	}
	return "", usageError("--proto %s: is none of tcp, udp, sctp, icmp, icmpv6 and no number below 256", s)
}

// findServices returns the ids that s means: an id, an address and port in
// the map, or a name that the agent knows; arg is how it was given.
func findServices(m Maps, n *names, arg, s string) (map[uint32]bool, error) {
	out := map[uint32]bool{}
	if id, err := strconv.ParseUint(s, 10, 32); err == nil && id != 0 {
		out[uint32(id)] = true
		return out, nil
	}
	frontend, ferr := netip.ParseAddrPort(s)
	addr, aerr := netip.ParseAddr(s)
	if ferr == nil || aerr == nil {
		services, err := m.Services()
		if err != nil {
			return nil, err
		}
		for k, v := range services {
			at := addrPort(k.Addr, k.Port)
			if v.Id != 0 && (at == frontend || at.Addr() == addr) {
				out[v.Id] = true
			}
		}
		if len(out) == 0 {
			return nil, fmt.Errorf("%s: no service has this address", arg)
		}
		return out, nil
	}
	for id, svc := range n.services {
		if s == podName(svc.Namespace, svc.Name) || s == n.serviceName(id) {
			out[id] = true
		}
	}
	switch {
	case len(out) > 0:
		return out, nil
	case n.blind():
		return nil, fmt.Errorf("%s: names of services need the agent, which does not answer, or --kubeconfig; give its address or id", arg)
	}
	return nil, fmt.Errorf("%s: there is no such service in force; 'podweir services' lists them", arg)
}
