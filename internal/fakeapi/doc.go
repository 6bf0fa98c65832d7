// Package fakeapi is an API server for tests: an HTTP server in the test's own
// process that lists and watches the kinds podweir reads, closely enough for
// the real client-go.
//
// # Contract
//
//   - It keeps objects, versions and the log of changes in memory; every write
//     gets the next resource version. There is no validation and no
//     defaulting.
//   - List, watch, bookmarks at the end of initial events (WatchList) and
//     410 Gone behave as in Kubernetes. Limits are ignored: a list is whole,
//     unless a test wants it in two parts.
//   - Groups and their versions are described (discovery), in JSON.
//   - Label selectors work, and field selectors by name, namespace, clusterIP
//     and nodeName: other clients than the agent, such as kube-proxy, watch
//     what they would elsewhere.
//   - Trouble is made on purpose only: lists and watches held back, watches
//     cut, history forgotten, kinds missing, the whole server gone from an
//     address. Requests can be awaited, so that a test never sleeps.
package fakeapi
