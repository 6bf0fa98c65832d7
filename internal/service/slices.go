package service

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/maps"
)

// portRef is what ties a port of a slice to a port of a service.
type portRef struct {
	name   string
	proto  corev1.Protocol
	family corev1.IPFamily
}

// candidateSet holds the endpoints of one port by address and port.
type candidateSet map[netip.AddrPort]Endpoint

func (s candidateSet) sorted() []Endpoint {
	keys := make([]netip.AddrPort, 0, len(s))
	for k := range s {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, netip.AddrPort.Compare)
	out := make([]Endpoint, 0, len(keys))
	for _, k := range keys {
		out = append(out, s[k])
	}
	return out
}

// collect gathers the endpoints of all slices, in the order of the slices'
// names whatever order they come in.
func collect(all []*discoveryv1.EndpointSlice, publishNotReady bool) (map[portRef]candidateSet, []error) {
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	var errs []error
	out := map[portRef]candidateSet{}
	for _, s := range sorted {
		if otherProxy(s.Labels) {
			continue
		}
		fail := func(field, format string, args ...any) {
			errs = append(errs, fmt.Errorf("EndpointSlice %s/%s: %s: %w", s.Namespace, s.Name, field, fmt.Errorf(format, args...)))
		}
		family, ok := sliceFamily(s.AddressType)
		if !ok {
			fail("addressType", "%q is neither IPv4 nor IPv6; the slice is not used", s.AddressType)
			continue
		}
		ports := slicePorts(s, fail)
		for i := range s.Endpoints {
			ep := &s.Endpoints[i]
			addr, ok := endpointAddr(ep, family, fmt.Sprintf("endpoints[%d].addresses", i), fail)
			if !ok {
				continue
			}
			for _, p := range ports {
				ref := portRef{p.name, p.proto, family}
				if out[ref] == nil {
					out[ref] = candidateSet{}
				}
				out[ref].add(netip.AddrPortFrom(addr, p.port), ep, publishNotReady)
			}
		}
	}
	return out, errs
}

// add enters ep, or merges it with what an earlier slice said of the same
// address and port: while an endpoint moves from one slice to another it may
// stand in both, and it is usable if either says so.
func (s candidateSet) add(at netip.AddrPort, ep *discoveryv1.Endpoint, publishNotReady bool) {
	e := Endpoint{Backend: maps.Backend{Addr: maps.ToAddr(at.Addr()), Port: at.Port()}}
	e.Ready, e.Draining, e.Serving = conditions(ep.Conditions, publishNotReady)
	if ep.NodeName != nil {
		e.Node = *ep.NodeName
	}
	if h := ep.Hints; h != nil {
		for _, n := range h.ForNodes {
			e.NodeHints = append(e.NodeHints, n.Name)
		}
		for _, z := range h.ForZones {
			e.ZoneHints = append(e.ZoneHints, z.Name)
		}
	}
	if old, ok := s[at]; ok {
		// Place and hints come from an entry that is ready, else from the
		// first.
		if old.Ready || !e.Ready {
			e.Node, e.NodeHints, e.ZoneHints = old.Node, old.NodeHints, old.ZoneHints
		}
		e.Ready = e.Ready || old.Ready
		e.Draining = e.Draining || old.Draining
		e.Serving = e.Serving || old.Serving
	}
	s[at] = e
}

type slicePort struct {
	name  string
	proto corev1.Protocol
	port  uint16
}

// slicePorts returns the usable ports of s: no name is the empty name, no
// protocol is TCP. A port without a number means "any port" to whoever
// writes it, which no translation can target: it is left out.
func slicePorts(s *discoveryv1.EndpointSlice, fail failer) []slicePort {
	var out []slicePort
	for i, p := range s.Ports {
		field := fmt.Sprintf("ports[%d]", i)
		sp := slicePort{proto: corev1.ProtocolTCP}
		if p.Name != nil {
			sp.name = *p.Name
		}
		if p.Protocol != nil && *p.Protocol != "" {
			sp.proto = *p.Protocol
		}
		switch {
		case protoNumber(sp.proto) == 0:
			fail(field+".protocol", "%q is none of TCP, UDP and SCTP", sp.proto)
		case p.Port == nil:
			fail(field+".port", "is missing: there is no port to send to")
		case *p.Port < 1 || *p.Port > 65535:
			fail(field+".port", "%d is no port number", *p.Port)
		default:
			sp.port = uint16(*p.Port)
			out = append(out, sp)
		}
	}
	return out
}

// endpointAddr returns the address of ep: the first. Further ones have no
// meaning that the API defines.
func endpointAddr(ep *discoveryv1.Endpoint, family corev1.IPFamily, field string, fail failer) (netip.Addr, bool) {
	if len(ep.Addresses) == 0 {
		fail(field, "is empty")
		return netip.Addr{}, false
	}
	a, err := parseAddr(ep.Addresses[0])
	if err != nil {
		fail(field+"[0]", "%w", err)
		return netip.Addr{}, false
	}
	if familyOf(a) != family {
		fail(field+"[0]", "%s in a slice of %s addresses", a, family)
		return netip.Addr{}, false
	}
	return a, true
}

func sliceFamily(t discoveryv1.AddressType) (corev1.IPFamily, bool) {
	switch t {
	case discoveryv1.AddressTypeIPv4:
		return corev1.IPv4Protocol, true
	case discoveryv1.AddressTypeIPv6:
		return corev1.IPv6Protocol, true
	}
	return "", false
}
