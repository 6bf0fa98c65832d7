// Package firewall says what the node's packet filters do with a packet that
// arrives for the node itself: it reads what iptables-save and "nft -j list
// ruleset" print and walks the chains.
//
// Contract:
//   - Pure: text in, answer out. Nothing is changed anywhere.
//   - Conditions that the package knows (protocol, ports, addresses, device,
//     connection state) are decided; any other is "perhaps". A verdict that
//     hangs on one is reported as unsure, never as certain.
//   - Every verdict names the program, table, chain and rule it comes from, in
//     the words of the program that prints them.
package firewall
