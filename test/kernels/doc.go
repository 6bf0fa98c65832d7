// Package kernels proves that the datapath loads and works on kernels other
// than the one the tests run on: Debian's 6.1 (no tcx) and 6.12 cloud
// kernels, booted in qemu, and the host's own.
//
// The test fetches the kernels' packages with apt-get download, never
// installs them, and keeps them in the user's cache folder
// ($XDG_CACHE_HOME/podweir/kernels). A kernel that apt does not offer is a
// failure. Each kernel boots an initramfs of two static programs: init loads
// the kernel modules and ends the machine, guest makes two nodes with pods
// out of network namespaces, loads and attaches the datapath through
// internal/loader, fills its maps as the agent would and sends real packets.
// On the host's kernel guest runs in namespaces of its own.
//
// Guest prints what it finds as lines that start with "podweir:"; each of
// its checks becomes a subtest here.
package kernels
