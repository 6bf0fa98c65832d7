// Package maps gives Go names to the datapath's maps, their keys and values,
// and reads and writes them.
//
// The types are those that bpf2go derives from bpf/types.h; nothing is
// defined twice. Addresses are 16 bytes in network order with IPv4 as
// v4-mapped; ports are in host order; times are nanoseconds of
// CLOCK_MONOTONIC.
//
// Errors name the map and the key. A full map is reported as an error that
// wraps [ErrFull].
package maps
