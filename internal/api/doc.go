// Package api holds the bodies of what the agent answers on its unix socket
// and the podweir command asks for. All of it is JSON over HTTP/1.1:
//
//	GET /v1/status     [Status]
//	GET /v1/services   [Services]
//	GET /v1/endpoints  [Endpoints]
//	GET /v1/policy     [Policy]
//	GET /v1/pods       [Pods], with ?name=NAMESPACE/NAME or ?addr=ADDRESS
//	GET /v1/events     [Event], one a line, for as long as the client listens
//
// The answers give names to what stands in the maps as numbers. They are
// never the source of a state: the command reads states from the maps, and
// works without the agent.
//
// An error is answered with a status of 400 and above and an [Error].
// Fields are only ever added; readers ignore those they do not know.
package api
