// Command podweir-cni is the CNI plugin of podweir, for versions 0.3.1 to
// 1.1.0 of the specification. It has no state and no credentials: it passes
// each operation to the agent of the node over a unix socket.
//
// Keys of its configuration, all optional, beside those that every plugin
// has:
//
//	socket     of the agent (/run/podweir/agent.sock)
//	stateDir   of the agent, where DEL is noted while no agent runs
//	           (/var/lib/podweir)
//	timeout    of one operation ("60s")
//	logLevel   of what goes to standard error: debug, info, warn, error
//	           ("warn")
//	dns        is passed on in the result
//
// Addresses can be asked for with the "ips" capability, with args.cni.ips, or
// with IP= in CNI_ARGS; the first of these that is there counts. The pod's
// name comes from K8S_POD_NAMESPACE, K8S_POD_NAME and K8S_POD_UID in CNI_ARGS.
//
// Ports of the node are asked for with the "portMappings" capability.
//
// Codes of errors are those of the specification; beyond them: 100 a requested
// address cannot be given, 101 no address is left, 102 the interface exists,
// 103 CHECK found differences, 104 a requested port of the node is another
// pod's.
package main
