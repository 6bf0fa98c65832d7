// Package health tells the rest of the cluster how the service proxy of this
// node does, the way kube-proxy does it: same ports, bodies, headers, metric
// names, labels and buckets.
//
// # The proxy's health
//
// A [Proxy] is told by the agent's loop when changes of Services and
// EndpointSlices were seen ([Proxy.Queued]), when a round of work began
// ([Proxy.Began]) and how it ended ([Proxy.Applied]). It is healthy unless a
// change, or a round, has been waiting for longer than the timeout: work that
// is late, not the absence of work, makes it unhealthy. A round that failed to
// write something leaves its changes waiting.
//
// [Proxy.Handler] answers /healthz and /livez with 200 or 503. /healthz is for
// load balancers: it also says 503 when the Node is gone, is being deleted or
// is about to be removed by the cluster autoscaler. /livez is for the kubelet:
// it looks at the proxy alone.
//
// # Health checks of Services
//
// A [Checks] serves the healthCheckNodePort of each Service that has one: 200
// if this node has ready endpoints of it and the proxy is healthy, 503
// otherwise. Endpoints that terminate may still be sent traffic; they are not
// counted. [Checks.Sync] starts and stops servers so that there is one for
// every Service given; a server that stays is not interrupted. A port that
// cannot be had is the error of its Service alone, and the next call of Sync
// tries it again.
//
// # Metrics
//
// A [Proxy] is a prometheus.Collector of those of kube-proxy's metrics that
// have a meaning in any dataplane. Where kube-proxy has one proxy per address
// family, there is one loop here for both: what it measures stands under both
// values of ip_family, except latencies of EndpointSlices, which have one.
package health
