// Package endpointtest helps tests that make endpoints: it moves the test
// binary into a network and mount namespace of its own, makes network
// namespaces for pods, and records the calls to datapath and regenerator.
// Everything it makes ends with the test process, even if that is killed.
package endpointtest
