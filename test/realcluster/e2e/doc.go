// Package e2e tests podweir on the cluster of package realcluster, as it is
// installed there. The tests need that cluster (make cluster) and have a build
// tag, realcluster, as they bring all of client-go with them: make test-cluster
// runs them.
package e2e
