// Package cluster builds a Kubernetes-like cluster out of network namespaces
// on one machine, for tests and demonstrations that need real packets.
//
// A cluster is a switch (a namespace with a bridge that floods every frame to
// every port), nodes on it, and one namespace outside the cluster, [Ext],
// which is also everybody's default gateway. Each node runs one agent process
// with its own bpffs, state folder, socket, cgroup and log. Pods are
// namespaces plugged by the real CNI plugin through libcni, run inside the
// node's namespace as a container runtime would.
//
//	c := cluster.ForTest(t, cluster.Config{})
//	c.Manifests.Put(objects...)
//	c.StartAgents(ctx)
//	pod, err := c.AddPod(ctx, podObject)
//	reply, err := pod.Send(ctx, "10.98.235.247:80")
//
// # Contract
//
//   - Everything made is named after the run (namespaces "pw-<id>-...", one
//     folder under [RunRoot], one cgroup) and [Cluster.Close] removes all of
//     it. What a killed run left behind is removed by [Sweep], which every
//     new cluster calls first and which touches only runs whose owner is gone.
//   - Nothing is created in the machine's own network namespace.
//   - Only processes found in a run's own cgroup are ended, one by one.
//   - It needs root, and a mounted cgroup v2 hierarchy; without, [New] says so.
package cluster
