// Package mesh puts servers and probes into the network namespaces of a
// cluster without a process for each: a socket belongs to the namespace it
// was made in, wherever it is used from. Many pairs are tried at a time.
//
// A probe that nothing answers is told apart from a slow one by counting
// drops: a round is over when every probe was either answered or counted as
// dropped, not when some time has passed.
package mesh
