// Package loader puts the datapath into the kernel: it loads the programs
// with their settings, pins maps and links under a folder on a bpffs, and
// attaches the programs to devices.
//
// Everything survives the process: maps are pinned under <folder>/maps and
// reused by the next load, links under <folder>/links/<ifindex>-<program>, or
// cgroup-<program> for those at the sockets of the host's processes.
// The hooks' way to their slow path, a map of programs that the kernel empties
// when nobody holds it, is pinned under <folder>/calls/<map id>, one a load,
// for as long as any program may use it; under <folder>/programs, what is never
// attached but run by the podweir command.
// Fragments that are ahead of their datagram's first are put in order by the
// kernel in a network namespace of the loader's own behind the device
// podweir.frag, which the links pinned under <folder>/links/frag-* keep alive; a
// load takes over the one that is there if it is what it should be.
// A load replaces the programs of all links that exist in place, without a
// moment in which a hook is empty. Maps of another layout are exchanged with
// them, and while that happens the old ones are under <folder>/aside. tcx links are used where the kernel has
// them (6.6), a clsact qdisc with a direct-action filter elsewhere.
//
// Attaching is idempotent, and programs and filters of others on the same
// hook are never touched.
package loader
