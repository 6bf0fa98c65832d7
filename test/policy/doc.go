// Package policy holds the contract cases of NetworkPolicy on real packets:
// two nodes, agents, the CNI plugin, and pods that call each other by TCP and
// UDP in both families. What must come of each pair is worked out by a small
// evaluator of its own (eval_test.go), not by the compiler under test.
package policy
