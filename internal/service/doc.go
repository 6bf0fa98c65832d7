// Package service turns a Service and its EndpointSlices into the frontends
// and backends that the datapath translates between.
//
// It is pure: the result depends on the arguments alone, never on the clock,
// the machine or earlier calls, and equal arguments give equal results in
// equal order. It never changes its arguments.
//
// What is compiled:
//
//   - frontends of both families, for every protocol and port of the service,
//     TCP, UDP and SCTP kept apart: cluster IPs; NodePorts of services of type
//     NodePort and LoadBalancer; the load balancer's IPs (not those of ipMode
//     Proxy) of type LoadBalancer; external IPs of families the service has;
//   - up to three sets of backends by who asks, see [Port], session affinity,
//     source ranges, the size of the Maglev table ([Maglev]), and what each
//     endpoint that serves is to the port;
//   - what the health check of a load balancer is told;
//   - backends from any number of slices, matched by port name and protocol,
//     slices written by hand included. A backend is an address and a port:
//     one that stands in several slices is one backend;
//   - the choice among endpoints, see [Choose].
//
// Headless and ExternalName services, and services and slices that their
// labels give to another proxy, compile to nothing and are no error.
//
// The host ports of a pod compile to the same ([CompileHostPorts]).
//
// A part that cannot be used (an address that is none, a port of an unknown
// protocol, a slice of names) is left out and reported by object and field;
// everything else is compiled.
package service
