package service

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/maps"
)

// Endpoint is a candidate to be a backend, its conditions resolved.
type Endpoint struct {
	Backend maps.Backend
	// Ready endpoints are used first.
	Ready bool
	// Draining endpoints are serving and terminating: used when no endpoint
	// is ready.
	Draining bool
	// Serving endpoints answer, whether or not anything new is sent to them:
	// all that are ready or draining do.
	Serving bool
	// Node is the name of the node it runs on; empty when unknown.
	Node string
	// NodeHints and ZoneHints name the nodes and zones it is meant for.
	NodeHints, ZoneHints []string
}

// Scope says which endpoints a kind of frontend may use.
type Scope int

const (
	// Cluster allows endpoints on every node.
	Cluster Scope = iota
	// Local allows endpoints on this node only.
	Local
)

// Choose returns the endpoints that traffic goes to, in the order given.
//
// In scope Cluster these are the ready ones that topology leaves: those
// hinted at this node if every ready endpoint has node hints and one of them
// names it; else those hinted at its zone if every ready endpoint has zone
// hints and one of them names it; else all. In scope Local they are the
// ready ones on this node.
//
// If that leaves none because none is ready, endpoints that terminate but
// still serve are used, whatever their hints; in scope Local, those of this
// node.
func Choose(endpoints []Endpoint, scope Scope, node Node) []Endpoint {
	if scope == Local {
		endpoints = filter(endpoints, func(e *Endpoint) bool { return node.Name != "" && e.Node == node.Name })
	}
	ready := filter(endpoints, func(e *Endpoint) bool { return e.Ready })
	if len(ready) == 0 {
		return filter(endpoints, func(e *Endpoint) bool { return e.Draining })
	}
	if scope == Cluster {
		if near := hinted(ready, node.Name, func(e *Endpoint) []string { return e.NodeHints }); near != nil {
			return near
		}
		if near := hinted(ready, node.Zone, func(e *Endpoint) []string { return e.ZoneHints }); near != nil {
			return near
		}
	}
	return ready
}

// hinted returns the endpoints whose hints name want, or nil when hints
// cannot be followed: one endpoint without any, or none that names it.
func hinted(endpoints []Endpoint, want string, hints func(*Endpoint) []string) []Endpoint {
	if want == "" {
		return nil
	}
	var out []Endpoint
	for i := range endpoints {
		h := hints(&endpoints[i])
		if len(h) == 0 {
			return nil
		}
		for _, name := range h {
			if name == want {
				out = append(out, endpoints[i])
				break
			}
		}
	}
	return out
}

// filter returns the endpoints to keep; if that is all of them, as it is
// nearly always, the very slice.
func filter(endpoints []Endpoint, keep func(*Endpoint) bool) []Endpoint {
	n := 0
	for i := range endpoints {
		if keep(&endpoints[i]) {
			n++
		}
	}
	switch n {
	case 0:
		return nil
	case len(endpoints):
		return endpoints
	}
	out := make([]Endpoint, 0, n)
	for i := range endpoints {
		if keep(&endpoints[i]) {
			out = append(out, endpoints[i])
		}
	}
	return out
}

// conditions resolves what a slice leaves unsaid: ready is true, serving is
// what ready is, terminating is false. A service that publishes addresses
// before they are ready has ready endpoints only.
func conditions(c discoveryv1.EndpointConditions, publishNotReady bool) (ready, draining, serving bool) {
	ready = c.Ready == nil || *c.Ready
	serving = ready
	if c.Serving != nil {
		serving = *c.Serving
	}
	terminating := c.Terminating != nil && *c.Terminating
	ready = ready || publishNotReady
	return ready, serving && terminating, serving || ready
}

// scopesOf returns the scopes of the cluster IPs of svc and of its external
// frontends as clients outside see them.
func scopesOf(svc *corev1.Service) (internal, external Scope) {
	if p := svc.Spec.InternalTrafficPolicy; p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal {
		internal = Local
	}
	if svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		external = Local
	}
	return internal, external
}
