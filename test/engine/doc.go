// Package engine tests the flow engine and the fast path with real packets,
// agents and pods, in clusters of network namespaces (package cluster).
//
// # What is tested where
//
//   - kernel_test.go: the fast path against a node that is nothing but a
//     kernel vxlan device, over IPv4 and IPv6, with every offload on and off.
//   - edges_test.go, forward_test.go: what the fast path leaves to the
//     kernel's device, and pods that forward or encapsulate themselves.
//   - routing_test.go: direct and cross-subnet routing.
//   - flows_test.go: flows that are removed, outlived, closed, reused, denied.
//   - spoof_test.go, via_test.go: packets under a false name; one client port
//     through two entry nodes or two services.
//   - flood_test.go: floods beside established flows. The benchmark there is
//     the same with a million packets of each kind.
//   - fragment_test.go, fragmentorder_test.go: large datagrams, and fragments
//     in any order.
//   - fragmentpolicy_test.go, reassembly_test.go: who may send them; those that
//     never become whole, and the kernel's reassembly without an agent.
//   - agent_test.go: agents killed under load.
//
// # Contract
//
// Nothing depends on time: a test waits for packets, counters and map
// entries. Where the fast path applies, its counters say that it was taken;
// contents are compared by hash and checksums by capture, by the receiving
// stack, or both. Most tests share one cluster, one after another, and leave it
// as they found it; those with a cluster of their own run beside each other.
package engine
