// Package source fills the tables of package table, from the API server or
// from a directory of manifests.
//
// Both go the same way: a client-go reflector per kind, over a ListerWatcher,
// writes its table. A list replaces the table in one transaction, so that what
// vanished while a watch was cut is removed, and marks it complete. Objects are
// trimmed on the way, and one that is the same after trimming is not written.
//
// # The manifest directory
//
// The files *.yaml, *.yml and *.json directly in the directory are read, except
// hidden ones; subdirectories are not. A file holds any number of documents and
// lists of the kinds Namespace, Node, ServiceCIDR, Pod, NetworkPolicy,
// ClusterNetworkPolicy (v1beta1 or v1alpha2), EndpointSlice and Service. Decoding is strict. The fields that the API server
// defaults are defaulted, metadata.namespace to "default". A UID is derived
// from kind, namespace and name where the manifest has none, so it is the same
// after a restart. Addresses are not allocated: a Service states its clusterIP,
// a Pod its status.podIPs.
//
// A namespace that an object lives in and no manifest defines exists all the
// same, with the label kubernetes.io/metadata.name and no other: so that a
// policy that selects it by name works without a manifest for it. A defined
// Namespace gets that label too.
//
// What a mistake does:
//
//   - A bad document is a problem, with file, line, object, cause and way out;
//     all others count. If the object was read well before, that version stays
//     in force until the document is mended or removed: a typing mistake in a
//     policy must not open what it closed.
//   - A document whose object cannot be told (broken YAML, no name) keeps all
//     objects in force that its file held before and that are not in it any
//     more. An unreadable or empty file, which is what a write that was cut off
//     looks like, keeps all of its objects. Removing the file removes them.
//   - "Before" is since the agent started: after a restart a bad document has
//     no last good version.
//   - Of two definitions of an object the first counts, by file name and then
//     in the order of the file; the other is a problem.
//   - If the directory itself goes, everything stays until it is back.
//
// Files are best replaced by renaming a new one over the old one. A change is
// read when the directory was quiet for 50 ms, half a second after it began at
// the latest; without events the directory is read every 30 s. Directories and
// symbolic links may be replaced, as mounted ConfigMaps are.
package source
