// Package cni holds the contract cases of the CNI plugin on a running
// cluster: ADD, CHECK and DEL through libcni, with traffic to every pod and
// the maps and devices of the nodes looked at before and after.
package cni
