package services

import (
	corev1 "k8s.io/api/core/v1"
)

// table is every service of the rows.
var table = []service{
	{name: "web", ends: "back-a back-b"},
	{name: "near", ends: "back-a"},
	{name: "far", ends: "back-b"},
	{name: "none"},
	{name: "unready", ends: "back-a!unready back-b!unready"},
	{name: "published", ends: "back-a!unready back-b!unready", change: func(_ *world, s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true }},
	{name: "leaving", ends: "back-a!terminating back-b!terminating"},
	{name: "half-leaving", ends: "back-a!terminating back-b"},
	{name: "stopped", ends: "back-a!stopped back-b!stopped"},

	{name: "in-local", ends: "back-a back-b", local: "internal"},
	{name: "in-local-b", ends: "back-b", local: "internal"},
	{name: "in-local-none", local: "internal"},
	{name: "in-local-leaving", ends: "back-a!terminating back-b", local: "internal"},
	{name: "ex-local", ends: "back-a back-b", local: "external"},
	{name: "ex-local-b", ends: "back-b", local: "external"},
	{name: "ex-local-none", local: "external"},
	{name: "ex-local-leaving", ends: "back-a!terminating back-b", local: "external"},
	{name: "all-local", ends: "back-b", local: "internal external"},

	{name: "hosts", ends: "node-a node-b"},
	{name: "host-a", ends: "node-a"},
	{name: "host-b", ends: "node-b"},
	{name: "ex-local-host", ends: "node-a node-b", local: "external"},
	{name: "world", ends: "ext"},

	{name: "deaf", ends: "back-a back-b", target: 7777},
	{name: "deaf-hosts", ends: "node-a node-b", target: 7777},

	{name: "self", ends: "pod-a"},
	{name: "self-or", ends: "pod-a back-b"},

	{name: "for-out", ends: "back-a back-b", change: ranges("out")},
	{name: "for-pod-a", ends: "back-a back-b", change: ranges("pod-a")},
	{name: "for-node-a", ends: "back-a back-b", change: ranges("node-a")},
	{name: "by-proxy", ends: "back-a", change: func(_ *world, s *corev1.Service) {
		mode := corev1.LoadBalancerIPModeProxy
		for i := range s.Status.LoadBalancer.Ingress {
			s.Status.LoadBalancer.Ingress[i].IPMode = &mode
		}
	}},
	{name: "node-address", ends: "back-b", change: nodeAddress},
	{name: "node-address-lb", ends: "back-a", change: nodeAddressLB},
	{name: "node-port", ends: "back-a back-b", change: func(_ *world, s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeNodePort
	}},
	{name: "cluster-ip", ends: "back-a back-b", change: func(_ *world, s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeClusterIP
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = 0
		}
	}},
}

// S22: an address of a node that is a service's too, on one port.
func nodeAddress(w *world, s *corev1.Service) {
	s.Spec.ExternalIPs = nil
	for _, a := range w.addrs["node-a/second"] {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, a.String())
	}
}

// S22: the same of a load balancer's.
func nodeAddressLB(w *world, s *corev1.Service) {
	s.Spec.ExternalIPs, s.Status.LoadBalancer.Ingress = nil, nil
	for _, a := range w.addrs["node-b/second"] {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a.String()})
	}
}

// ranges lets somebody alone in by the load balancer's address.
func ranges(who string) func(*world, *corev1.Service) {
	return func(w *world, s *corev1.Service) {
		for _, a := range w.addrs[who] {
			bits := "/32"
			if a.Is6() {
				bits = "/128"
			}
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, a.String()+bits)
		}
	}
}

const (
	everyone = "pod-a pod-b node-a node-b out out-b"
	inside   = "pod-a pod-b node-a node-b"
	anywhere = "cluster lb ext node@node-a node@node-a/second node@node-b"
	external = "lb ext node@node-a node@node-b"
)

// rows is the contract. Words of from and to multiply; so do protocols and
// families. See [row].
var rows = []row{
	// S1, S6, S26: every kind of address, from everywhere, with backends on
	// both nodes; whoever calls is seen under its own address.
	{from: "pod-a pod-b out out-b", svc: "web", to: anywhere, by: "back-a back-b"},
	{from: "node-a node-b", svc: "web", to: "cluster lb ext", by: "back-a back-b"},
	{from: "pod-a out", svc: "web", to: "cluster lb node@node-a node@node-b", proto: "open", by: "back-a back-b"},
	{from: "node-a", svc: "web", to: "cluster lb", proto: "open", by: "back-a back-b"},
	{from: "node-a", svc: "web", to: "node@node-a node@node-b", proto: "open", by: "back-a back-b"},
	{from: "pod-a out out-b", svc: "near", to: anywhere, by: "back-a"},
	{from: "pod-a out out-b", svc: "far", to: anywhere, by: "back-b"},
	// A node that calls an address of its own does so from that address, or
	// from its first one, as the kernel has it.
	{from: "node-a", svc: "far", to: "node@node-a node@node-b node@node-b/second", by: "back-b"},
	{from: "node-a", svc: "far", to: "node@node-a/second", by: "back-b", sees: "node-a node-a/second"},
	{from: "node-a", svc: "near", to: "node@node-a node@node-b node@node-b/second", by: "back-a"},
	{from: "node-a", svc: "near", to: "node@node-a/second", by: "back-a", sees: "node-a node-a/second"},
	{from: "node-b", svc: "near", to: "node@node-a node@node-b node@node-a/second", by: "back-a"},
	// Types.
	{from: "pod-a node-a out", svc: "node-port", to: "cluster ext node@node-a node@node-b", by: "back-a back-b"},
	{from: "pod-a node-a out", svc: "cluster-ip", to: "cluster ext", by: "back-a back-b"},
	{from: "pod-a node-a out", svc: "cluster-ip", to: "node@node-a node@node-b", refused: true},
	// Where --nodeport-addresses says no, nothing listens.
	{from: everyone, svc: "web", to: "node@node-a/third node@node-b/third", refused: true},

	// S2: refused at once, wherever it is called from, by whatever address.
	{from: everyone, svc: "none", to: "cluster lb ext", refused: true, why: "drop_no_backend"},
	{from: "pod-a out out-b", svc: "none", to: "node@node-a node@node-b", refused: true, why: "drop_no_backend"},
	{from: "node-a node-b", svc: "none", to: "node@node-a node@node-b", refused: true, why: "drop_no_backend"},
	{from: "pod-a node-a out", svc: "unready", to: "cluster lb node@node-a", refused: true, why: "drop_no_backend"},
	{from: "pod-a node-a out", svc: "stopped", to: "cluster lb node@node-a", refused: true, why: "drop_no_backend"},
	{from: "pod-a node-a out", svc: "in-local-none", to: "cluster lb", refused: true, why: "drop_no_backend"},
	{from: "pod-a node-a out", svc: "ex-local-none", to: "cluster lb node@node-a", refused: true, why: "drop_no_backend"},

	// S15, S21: conditions.
	{from: "pod-a node-b out", svc: "published", to: "cluster lb", by: "back-a back-b"},
	{from: "pod-a node-b out", svc: "leaving", to: "cluster lb", by: "back-a back-b"},
	{from: "pod-a node-b out", svc: "half-leaving", to: "cluster lb", by: "back-b"},
	// The local set falls back on its own.
	{from: "pod-a node-a out", svc: "in-local-leaving", to: "cluster", by: "back-a"},
	{from: "pod-b node-b out-b", svc: "in-local-leaving", to: "cluster", by: "back-b"},
	{from: "out", svc: "ex-local-leaving", to: "lb ext node@node-a", by: "back-a"},
	{from: "out-b", svc: "ex-local-leaving", to: "lb ext node@node-b", by: "back-b"},
	{from: inside, svc: "ex-local-leaving", to: "lb cluster", by: "back-b"},

	// S3: internal policy Local looks at the ClusterIP alone.
	{from: "pod-a node-a out", svc: "in-local", to: "cluster", by: "back-a"},
	{from: "pod-b node-b out-b", svc: "in-local", to: "cluster", by: "back-b"},
	{from: "pod-a node-a out", svc: "in-local", to: "lb ext node@node-b", by: "back-a back-b"},
	{from: "pod-b node-b out-b", svc: "in-local-b", to: "cluster", by: "back-b"},
	{from: "pod-a", svc: "in-local-b", to: "cluster", why: "drop_no_local_internal", at: "node-a from_pod"},
	{from: "node-a", svc: "in-local-b", to: "cluster", why: "drop_no_local_internal", at: "node-a to_overlay"},
	{from: "pod-a node-a", svc: "in-local-b", to: "lb ext node@node-b", by: "back-b"},

	// S4, S5, S7, S34: external policy Local, for who comes from outside.
	{from: "out", svc: "ex-local", to: "lb ext node@node-a", by: "back-a"},
	{from: "out-b", svc: "ex-local", to: "lb ext node@node-b", by: "back-b"},
	{from: "out", svc: "ex-local", to: "node@node-b", by: "back-b"},
	{from: inside, svc: "ex-local", to: "cluster lb ext node@node-a node@node-b", by: "back-a back-b"},
	{from: "out", svc: "ex-local-b", to: "lb ext node@node-a", why: "drop_no_local_external", at: "node-a from_netdev"},
	{from: "out", svc: "ex-local-b", to: "node@node-b cluster", by: "back-b"},
	{from: "out-b", svc: "ex-local-b", to: "lb ext node@node-b", by: "back-b"},
	{from: inside, svc: "ex-local-b", to: "cluster lb ext node@node-a node@node-b", by: "back-b"},
	{from: "pod-a", svc: "all-local", to: "cluster", why: "drop_no_local_internal", at: "node-a from_pod"},
	{from: "out", svc: "all-local", to: "lb", why: "drop_no_local_external", at: "node-a from_netdev"},
	{from: inside, svc: "all-local", to: "lb ext node@node-a node@node-b", by: "back-b"},

	// Backends on the hosts' own network. Another node's sees the client's
	// node; the node that calls itself sees the service's address, or its own
	// where the socket was connected to the backend.
	{from: "pod-a", svc: "host-a", to: anywhere, by: "node-a", sees: "pod-a"},
	{from: "pod-a", svc: "host-b", to: anywhere, by: "node-b", sees: "node-a"},
	{from: "pod-b", svc: "host-a", to: "cluster lb", by: "node-a", sees: "node-b"},
	{from: "node-a", svc: "host-a", to: anywhere, proto: "tcp", by: "node-a", sees: "called node-a"},
	{from: "node-a", svc: "host-a", to: anywhere, proto: "udp open", by: "node-a", sees: "called"},
	{from: "node-a", svc: "host-b", to: "cluster lb ext node@node-a node@node-b", by: "node-b"},
	{from: "out out-b", svc: "hosts", to: anywhere, by: "node-a node-b"},
	{from: "out", svc: "ex-local-host", to: "lb ext node@node-a", by: "node-a"},
	{from: "out-b", svc: "ex-local-host", to: "lb ext node@node-b", by: "node-b"},

	// A slice written by hand to an address outside the cluster (N8).
	{from: "pod-a out", svc: "world", to: "cluster lb ext node@node-a", by: "ext", sees: "node-a"},
	{from: "pod-b out-b", svc: "world", to: "cluster lb ext node@node-b", by: "ext", sees: "node-b"},
	{from: "node-a", svc: "world", to: "cluster lb ext node@node-a node@node-b", by: "ext"},
	// And pods without a service.
	{from: "pod-a", addr: "ext", port: 8080, by: "ext", sees: "node-a"},
	{from: "pod-a", addr: "out", port: 8080, by: "out", sees: "node-a"},
	{from: "pod-a", addr: "node-b", port: 8080, by: "node-b", sees: "node-a"},
	{from: "pod-a", addr: "node-a", port: 8080, by: "node-a"},
	{from: "pod-a", addr: "back-b", port: 8080, by: "back-b"},
	{from: "node-a", addr: "back-b", port: 8080, by: "back-b"},
	// What a client outside opened is answered under the pod's own address.
	{from: "out out-b", addr: "pod-a", port: 8080, by: "pod-a"},
	{from: "out out-b", addr: "pod-b", port: 8080, by: "pod-b"},

	// N10: nobody listens at the backends. Who called hears it, of UDP by an
	// ICMP error about its own packet.
	{from: everyone, svc: "deaf", to: "cluster lb node@node-a node@node-b", refused: true},
	{from: "pod-a out out-b node-b", svc: "deaf-hosts", to: "cluster lb node@node-a", refused: true},
	{from: "pod-a pod-b node-a node-b", addr: "back-b node-b ext", port: 7777, refused: true},

	// S11: to oneself, alone and as one of several.
	{from: "pod-a", svc: "self", to: anywhere, by: "pod-a", sees: "node-a"},
	{from: "pod-a", svc: "self-or", to: anywhere, by: "pod-a back-b", sees: "caller pod-a=node-a"},
	{from: "pod-b out", svc: "self", to: "cluster lb", by: "pod-a"},

	// S12: source ranges count for the load balancer's address alone.
	{from: "out", svc: "for-out", to: "lb", by: "back-a back-b"},
	{from: "out-b", svc: "for-out", to: "lb", why: "drop_source_range", at: "node-b from_netdev"},
	{from: "pod-a", svc: "for-out", to: "lb", why: "drop_source_range", at: "node-a from_pod"},
	{from: "node-a", svc: "for-out", to: "lb", why: "drop_source_range", at: "node-a to_netdev"},
	{from: "pod-a", svc: "for-pod-a", to: "lb", by: "back-a back-b"},
	{from: "pod-b", svc: "for-pod-a", to: "lb", why: "drop_source_range", at: "node-b from_pod"},
	{from: "out", svc: "for-pod-a", to: "lb", why: "drop_source_range", at: "node-a from_netdev"},
	{from: "node-a", svc: "for-node-a", to: "lb", by: "back-a back-b"},
	{from: "node-b", svc: "for-node-a", to: "lb", why: "drop_source_range", at: "node-b to_netdev"},
	{from: everyone, svc: "for-out", to: "cluster ext node@node-b", by: "back-a back-b"},

	// S13: the address stays the world's.
	{from: inside, svc: "by-proxy", to: "lb", by: "ext", sees: "node"},
	{from: "out out-b", svc: "by-proxy", to: "lb", by: "ext"},
	{from: everyone, svc: "by-proxy", to: "cluster ext", by: "back-a"},

	// S22: the service has its port of a node's address and no other.
	{from: "pod-a pod-b out out-b node-b", addr: "node-a/second", port: 80, by: "back-b"},
	{from: "node-a", addr: "node-a/second", port: 80, by: "back-b", sees: "node-a node-a/second"},
	{from: "pod-a out node-b", addr: "node-a/second", port: 8080, by: "node-a"},
	{from: "pod-a pod-b out out-b node-a", addr: "node-b/second", port: 80, by: "back-a"},
	{from: "pod-b out node-a", addr: "node-b/second", port: 8080, by: "node-b"},
	{from: "out", addr: "node-a node-b", port: 80, refused: true},
	// S26: NodePorts are not on the loopback addresses.
	{from: "node-a", addr: "loopback", port: 30101, refused: true},

	// S8: what no service serves.
	{from: "pod-a", vip: "nobody", why: "drop_no_service", at: "node-a from_pod"},
	{from: "node-a", vip: "nobody", why: "drop_no_service", at: "node-a to_overlay"},
	{from: "out", vip: "nobody", why: "drop_no_service", at: "node-a to_overlay"},
	{from: everyone, svc: "web", to: "cluster", port: 81, refused: true, why: "drop_no_service_port"},

	// S9: a ping ends here, without an answer.
	{from: "pod-a", svc: "web", to: "cluster", proto: "ping", why: "drop_no_service_port", at: "node-a from_pod"},
	{from: "node-a", svc: "web", to: "cluster", proto: "ping", why: "drop_no_service_port", at: "node-a to_overlay"},
	{from: "out", svc: "web", to: "cluster", proto: "ping", why: "drop_no_service_port", at: "node-a from_netdev"},
	{from: "pod-a", vip: "nobody", proto: "ping", why: "drop_no_service", at: "node-a from_pod"},
}
