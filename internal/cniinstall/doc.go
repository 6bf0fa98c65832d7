// Package cniinstall puts the CNI plugin and its configuration where the
// node's container runtime looks for them, and takes them away again.
//
// # Contract
//
//   - A file is there whole or not at all, after a crash and on a full disk,
//     too: it is written under a name that no runtime reads, synced, and
//     renamed. One that is as it should be is not touched, so that runtimes
//     that watch the folder see no change.
//   - The configuration is what makes a kubelet call its node ready. It is for
//     the caller to write it last, when pods can be given a network.
//   - Ours is a configuration that names our plugin, and the plugin's own file;
//     nothing else in the folders is touched. There is one configuration of
//     ours at a time: writing one removes those of other names.
package cniinstall
