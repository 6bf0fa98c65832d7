// Package kubeproxy finds what a kube-proxy has left on this node, and removes
// it.
//
// Contract:
//   - The kernel is asked directly: no program of the node is needed to find
//     anything, nor to remove what nf_tables holds. Rules of legacy iptables
//     alone are removed by the node's own iptables-legacy-restore.
//   - kube-proxy's are the tables ip and ip6 kube-proxy of nftables, the chains
//     of its names in the tables of iptables with the rules that lead to them,
//     and the device kube-ipvs0. Chains of the kubelet and of others that begin
//     with KUBE- too are none, and are left as they are.
//   - Nothing is removed while a kube-proxy is seen to run, which would make it
//     anew. It is seen as a process of this network namespace, where /proc shows
//     those of the node, and by what its metrics answer on port 10249.
//   - Everything is about the network namespace of the calling thread.
package kubeproxy
