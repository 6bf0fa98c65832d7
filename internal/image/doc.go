// Package image writes container images without a container engine.
//
// # Contract
//
//   - An archive is an OCI image layout in a tar, with the manifest.json beside
//     it that `docker load` reads: `ctr images import`, `podman load`, `skopeo`
//     and `docker load` all take it.
//   - An image has one layer, of the files and links given; folders they lie in
//     are made.
//   - The same input gives the same archive, byte for byte: names are sorted,
//     owners are 0, times are the one given.
package image
