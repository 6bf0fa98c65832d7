// Package oldcni finds what another CNI plugin has left on this node: rules,
// devices and routes. Nothing is changed.
//
// Contract:
//   - [Look] asks the kernel, and [View.Troubles] says what is to be said of it:
//     a function of what was read, and of the ranges of pods.
//   - What is there is told by the names that Calico, flannel, the reference
//     plugins (bridge, portmap), Weave Net, Cilium and kube-router give, and by
//     the port that podweir's tunnel needs. Each trouble names the object, what
//     it does, and the commands that remove it.
//   - Rules, devices and routes of others, podweir's own among them, are none.
//   - Everything is about the network namespace of the calling thread.
package oldcni
