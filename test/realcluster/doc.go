// Package realcluster brings up Kubernetes on one machine: etcd, API server,
// controllers and scheduler as processes of the machine, and nodes with
// containerd and kubelet as namespaces of it (network, mount, uts, ipc, pid).
// podweir is installed on it as its users do, from an image and deploy/.
//
//	pw-cluster up      make cluster
//	pw-cluster check
//	pw-cluster migrate
//	pw-cluster describe
//	pw-cluster down    make cluster-down
//	pw-cluster in n1 CMD...
//	pw-cluster outside CMD...
//	pw-cluster kubectl ARGS...
//
// # Contract
//
//   - Binaries of Kubernetes come from the modules under modules/, each with
//     its own go.mod, and lie in a cache folder (PODWEIR_CLUSTER_CACHE); one is
//     built again when its module, the Go version or the flags change.
//   - Everything else is in a state folder (PODWEIR_CLUSTER_STATE): logs,
//     certificates, the nodes' /var/lib and /etc.
//   - A cluster with a name (PODWEIR_CLUSTER_NAME) is in a network namespace as
//     a whole, podweir-NAME-host, with a state folder beside that of the one
//     without. Any number of them are side by side: addresses and devices are
//     the same in each; namespaces and cgroups begin with podweir-NAME-.
//   - In podweir's place a cluster can have kube-proxy and the reference CNI
//     plugins (Choose), to compare with. Check tries what both must do, and
//     Migrate has such a cluster change over to podweir.
//   - Down ends what Up started, process by process as recorded and then by
//     cgroup, and removes its network namespaces, devices, cgroups and folders.
//     It can be called at any time, after an Up that failed or was killed too.
//   - Of the network that a cluster is in, it has one bridge, podweir0, with the
//     address that the API server is reached at and that nodes see as outside.
//   - It needs root, containerd, runc, cgroup v1 with cgroup2 at unified (the
//     way of machines without systemd), and overlayfs.
package realcluster
