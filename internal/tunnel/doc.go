// Package tunnel decides who stands behind every address of the cluster:
// which node to tunnel to, what kind of peer it is, which pod has it; and
// which routes the host needs.
//
// It is pure: the result depends on the arguments alone and equal arguments
// give equal results, whatever order the objects come in. It never changes
// its arguments.
//
// Where objects contradict each other, one claim is used, the same at every
// call, and the contradiction is reported with both names:
//
//   - an address of this node's devices is the host's, whoever claims it;
//   - then the endpoints that the CNI made here, by [Input].Local alone: what
//     the API says of local pods' addresses is not looked at;
//   - then addresses of other nodes, then pods of other nodes; of two pods
//     the one created last;
//   - a pod CIDR that overlaps another node's belongs to the node created
//     first; an address of two nodes to the one created last;
//   - a service range that overlaps a pod CIDR is not programmed as a range;
//     the services in it still work by their addresses.
package tunnel
