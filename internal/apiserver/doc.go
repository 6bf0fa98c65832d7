// Package apiserver finds the way to the API server.
//
// # Contract
//
//   - Credentials come from a kubeconfig, or from the service account of the
//     pod that the process runs in. The account's token is read again
//     every minute, and with the request after one that was refused.
//   - The address is the one of the kubeconfig or of the pod's environment
//     (KUBERNETES_SERVICE_HOST), or any of a list of servers. With a list
//     nothing has to work that podweir itself makes work, such as the service
//     kubernetes.default.
//   - Of several servers one is used, a random one first. When it cannot be
//     connected to, the request goes to the next at once; when it answers that
//     it is in trouble (500, 502, 503, 504), the next request does.
//   - All servers of a list are the same cluster's: the same authority signed
//     their certificates, each of which names its own address.
package apiserver
