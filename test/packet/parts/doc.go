// Package parts holds programs around single functions of the datapath
// (bpf/parts.c), for tests that call those alone.
package parts
