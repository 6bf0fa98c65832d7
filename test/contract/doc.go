// Package contract tests what podweir promises its users, with real packets:
// one test per case, in a cluster of network namespaces with real agents and
// the real CNI plugin.
//
// Most cases share one cluster, which the first of them brings up: nodes
// node-a and node-b, the pods of examples/basic and one client outside. A
// case that changes a node itself has a cluster of its own.
//
// A case asserts what the wire, the pods and the counters show. It awaits
// states, never a time.
package contract
