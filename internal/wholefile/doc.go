// Package wholefile writes files whole or not at all.
//
// # Contract
//
// Whoever reads the file, and whatever crash or full disk comes between, has
// the old content or the new one. What is written goes to a temporary file
// beside it, which takes its place when it is complete. An error leaves neither
// that nor a change; only who dies leaves the temporary one, and whoever has the
// folder sweeps those. A durable file is on the disk, name and all, when Write
// returns: an error of that alone comes after the change.
package wholefile
