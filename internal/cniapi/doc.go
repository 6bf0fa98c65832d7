// Package cniapi is how the CNI plugin talks to the agent: JSON over HTTP on
// a unix socket that only root may open.
//
//	POST /v1/cni/add     endpoint.Request -> endpoint.Endpoint
//	POST /v1/cni/del     endpoint.Request -> {}
//	POST /v1/cni/check   endpoint.Request -> {}
//	POST /v1/cni/gc      {"network": string, "valid": [endpoint.Key]} -> {}
//	GET  /v1/cni/status  -> {}
//
// An error arrives as an [endpoint.Error] with its code, whatever the HTTP
// status. The client sends how long it is going to wait; the agent gives up
// then, or when the connection breaks, and undoes a half-made ADD. Unknown
// fields are ignored, so that plugin and agent may differ in age.
package cniapi
