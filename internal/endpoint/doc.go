// Package endpoint makes, checks and removes the network of the pods of this
// node. It owns their addresses, veth pairs, routes and neighbours, and
// remembers them on disk.
//
// # What a pod gets
//
// A veth pair: the host's half is named after the pod ([HostIfName]) and has
// no address; the pod's half carries one /32 and one /128 address, a default
// route through 169.254.1.1 and fe80::1, and permanent neighbours for both
// with the MAC of the host's half. The host holds a /32 and a /128 route to
// the pod and a permanent neighbour for each address. No neighbour discovery
// and no duplicate address detection happens on a pod's link, and neither
// half has an automatic link-local address.
//
// # Order
//
// [Manager.Add] writes the endpoint's file, makes the pair with both halves
// down, attaches the datapath, waits until [Regenerator.Up] says that policy
// is in force, and only then brings the interfaces up. A pod's first packet
// is judged like any other. An error at any step undoes all of them.
// [Manager.Del] takes the link down before it detaches the datapath.
//
// Two additions at a time ask the kernel for devices, in the order in which
// they came; one that waits for policy is none of them.
//
// # Ports of the node
//
// [Endpoint.PortMappings] are what the runtime asked for. They are kept with
// the endpoint and given up with it; no two endpoints have one port of one
// address. The [Regenerator] puts them in force.
//
// # State
//
// There is one JSON file per endpoint under <state>/endpoints, replaced
// atomically. A file says which phase its endpoint is in: one that was still
// being created or removed when the process died is removed by
// [Manager.Restore], and so is one whose veth has gone, as after a reboot. A
// file that cannot be read is reported and moved to <state>/corrupt; the
// addresses that the host still routes to its interface are not given away
// until that interface is gone. Deletions that arrive while no agent can be
// reached wait in <state>/deletions, for [Manager.Restore] or the next
// [Manager.Repair]. What a killed process was writing is told from what one
// that lives is writing by a lock on the file.
//
// # A process that ends
//
// [Config.Step] is told each step of an operation, those of writing a file
// included. Tests end the process at every one of them: whatever remains is
// taken away by the next start, by a deletion or by GC.
//
// # Identity
//
// An endpoint belongs to a container id and an interface name. Deleting
// another container's endpoint is not possible, even of the same pod, and GC
// removes what there was when it was asked for, not what came since: the
// newer sandbox of a pod takes the pod's host interface over, and the older
// one's late deletion then finds nothing.
//
// # Sysctls
//
// On the host's half: rp_filter 2, send_redirects 0, proxy_arp 0, forwarding
// 1 for both families, accept_ra 0 and disable_ipv6 0 for IPv6. The kernel takes the
// greater of "all" and the interface for rp_filter, and the logical or of
// both for send_redirects and proxy_arp: net.ipv4.conf.all.send_redirects=1
// therefore still sends redirects to a pod. Node-wide settings are not
// touched here. [Manager.Repair] re-asserts what other programs reset.
//
// All work on the host happens in the network namespace that the process is
// in when [New] runs.
package endpoint
