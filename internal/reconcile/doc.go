// Package reconcile brings a kernel map to a desired state.
//
// A [Table] keeps two pictures: what is desired, and what the map holds as
// far as the agent knows (the shadow, first read from the map itself, so that
// a restart over pinned maps adopts what is there). Writing has two phases,
// [Table.Upsert] for additions and changes and [Table.Prune] for removals, so
// that the caller can order the phases of several tables: what is referred to
// is written before what refers to it and removed after it.
//
// One entry that cannot be written never stops the others. It is reported by
// key and tried again with a growing delay.
//
// A Table is not safe for concurrent use: one loop owns it.
package reconcile
