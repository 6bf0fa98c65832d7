// Package table holds what the node knows of the cluster: one in-memory table
// for each kind of Kubernetes object, and one of problems.
//
// Readers take a snapshot (Tables.DB.ReadTxn) and query it; they learn of
// changes from the watch channels that the tables hand out, or from a change
// iterator. Objects in the tables are shared and must never be modified.
//
// # Contract
//
//   - The key of an object is namespace and name; of a cluster-wide object its
//     name.
//   - Objects are trimmed: they carry what the dataplane reads and nothing
//     else. ResourceVersion is that of the last change that mattered.
//   - One source at a time writes the object tables; it calls
//     [Tables.RegisterSource] before it starts. A table counts as complete when
//     the source's first full list of that kind is in. Before a source has
//     registered, nothing is complete.
//   - [Tables.Synced] is true when all tables are complete. Nothing that takes
//     the absence of an object as a fact (deleting, "no endpoints") may be done
//     before. It never turns false again.
//   - Problems are kept per owner; an owner replaces all of its problems at
//     once with [Tables.SetProblems].
package table
