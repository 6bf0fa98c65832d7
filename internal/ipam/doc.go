// Package ipam gives the addresses of the node's pod CIDRs to pods.
//
// Every address has at most one owner, whatever runs concurrently. The
// network address, the first address (by custom the gateway's), the IPv4
// broadcast address and the node's own addresses are never given out. The
// search goes on where it last ended, and a freed address is given out again
// only when no other is left, the one freed first before the others.
//
// An [Allocator] keeps nothing on disk: whoever records an owner durably
// calls [Allocator.Reserve] for it at the next start.
package ipam
