// Package services holds the Service contract against real packets.
//
// The rows of [TestServices] say who calls what by which protocol, and who
// may answer, under which address the backend sees the caller, or how and
// where the call ends. One definition stands for both families. The services
// are set up once; rows that must be answered are called at a time, rows that
// must not be one after the other, because what ends them is counted.
//
// Stateful guarantees have tests of their own: affinity, running UDP flows,
// rolling backends, sizes, and the way of replies.
package services
