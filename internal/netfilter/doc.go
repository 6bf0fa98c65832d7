// Package netfilter reads which tables and chains the node's packet filters
// have, to find out whose they are.
//
// Contract:
//   - The kernel is asked directly, for nf_tables by netlink and for legacy
//     iptables by getsockopt: no program of the node is needed. Nothing is
//     changed, and no table is made by being asked for.
//   - Of nf_tables the families ip, ip6 and inet are read. A kernel that does
//     not have one kind of them has no tables of it, which is no error.
//   - Everything is about the network namespace of the calling thread.
package netfilter
