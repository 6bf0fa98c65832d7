// Package node keeps what the dataplane needs of the node's own network
// stack: the overlay device, host routes, sysctls, and the knowledge of the
// node's devices and addresses.
//
// Contract:
//   - The overlay device is podweir.vxlan and ours alone: one that exists with
//     other attributes is re-created under the same ifindex, so that programs
//     compiled for that index stay right. It does no ARP: a peer's address is
//     its node's MAC, which the datapath writes.
//   - A route is ours exactly if it carries the protocol number
//     [RouteProtocol]. No other route is ever changed or removed; one that
//     stands in the way is reported.
//   - Every node-wide sysctl that is changed is first recorded with its old
//     value in the state folder; [Manager.RestoreSysctls] puts it back unless
//     somebody else has changed it since. Those of our own devices are not
//     recorded: they go with the device.
//   - [Manager.Watch] only says that something moved. All methods read the
//     kernel anew and bring it to what is asked for; called again they change
//     nothing. The order of events does not matter.
//   - One device or route that fails is reported and stops nothing else.
//
// A Manager works in the network namespace of the thread that made it. Its
// methods are for one goroutine, locked to that thread if the process has
// threads in several namespaces (/proc/sys/net follows the thread).
package node
