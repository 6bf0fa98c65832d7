package contract

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/health"
	"github.com/podweir/podweir/test/cluster"
)

// says awaits what a node answers to a client outside; 0: nobody listens.
func (w *world) says(t *testing.T, ctx context.Context, addr netip.Addr, port uint16, path string, want int) {
	t.Helper()
	url := fmt.Sprintf("http://%s%s", at(addr, port), path)
	eventually(t, ctx, func() error {
		code, err := inside(ctx, w.Ext, url)
		if want == 0 && errors.Is(err, syscall.ECONNREFUSED) {
			return nil
		}
		if err == nil && code != want {
			err = fmt.Errorf("GET %s from outside: %d, want %d", url, code, want)
		}
		return err
	})
}

// A load balancer outside asks each node whether it has endpoints of a
// service: the answer follows where they are and what state they are in.
func TestS18HealthCheckNodePort(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	const port = 30118
	ips := []string{"10.98.18.1", "fd00:10:98::1201"}
	svc := clusterIP("checked", ips, bothPorts(80)...)
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	svc.Spec.HealthCheckNodePort = port
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = 30117
	}
	w.put(t, svc)
	// The endpoints of checked, all on their nodes.
	endpoints := func(change func(*discoveryv1.Endpoint), pods ...*cluster.Pod) []cluster.Object {
		objs := slicesFor("checked", "checked", bothSlicePorts(cluster.ServerPort), pods...)
		for _, o := range objs {
			list := o.(*discoveryv1.EndpointSlice).Endpoints
			for i := range list {
				list[i].NodeName = &pods[i].Node.NodeName
				if change != nil {
					change(&list[i])
				}
			}
		}
		return objs
	}
	answers := func(a, b int) {
		t.Helper()
		for _, v6 := range []bool{false, true} {
			w.says(t, ctx, nodeAddr(w.a, v6), port, "/", a)
			w.says(t, ctx, nodeAddr(w.b, v6), port, "/", b)
		}
	}
	answers(503, 503)
	w.put(t, endpoints(nil, w.local)...)
	answers(200, 503)
	ok(t, w.Manifests.Put(endpoints(nil, w.remote)...))
	answers(503, 200)
	ok(t, w.Manifests.Put(endpoints(nil, w.local, w.remote)...))
	answers(200, 200)
	// What terminates still serves, and wants nothing new.
	yes, no := true, false
	ok(t, w.Manifests.Put(endpoints(func(e *discoveryv1.Endpoint) {
		if *e.NodeName == w.a.NodeName {
			e.Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
		}
	}, w.local, w.remote)...))
	answers(503, 200)
	// Without the agent nobody answers; the next one does.
	ok(t, w.b.StopAgent(ctx))
	t.Cleanup(func() { w.ensureAgents(t) })
	answers(503, 0)
	ok(t, w.b.StartAgent(ctx))
	answers(503, 200)
	// With its policy the port goes.
	everywhere := svc.DeepCopy()
	everywhere.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	everywhere.Spec.HealthCheckNodePort = 0
	ok(t, w.Manifests.Put(everywhere))
	answers(0, 0)
}

// /healthz and /livez on kube-proxy's port, asked from outside: a node that is
// about to be removed is not fit for new traffic, but alive; an agent that was
// killed says nothing, and the next one is heard again.
func TestS19Healthz(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	const port = 10256
	a, b := nodeAddr(w.a, false), nodeAddr(w.b, false)
	all := func(code int) {
		t.Helper()
		for _, path := range []string{"/healthz", "/livez"} {
			for _, addr := range []netip.Addr{a, b} {
				w.says(t, ctx, addr, port, path, code)
			}
		}
	}
	all(http.StatusOK)
	node := object[*corev1.Node](w, w.a.NodeName)
	w.restore(t, object[*corev1.Node](w, w.a.NodeName))
	node.Spec.Taints = []corev1.Taint{{Key: health.TaintToBeDeleted, Effect: corev1.TaintEffectNoSchedule}}
	ok(t, w.Manifests.Put(node))
	w.says(t, ctx, a, port, "/healthz", http.StatusServiceUnavailable)
	w.says(t, ctx, a, port, "/livez", http.StatusOK)
	w.says(t, ctx, b, port, "/healthz", http.StatusOK)
	ok(t, w.Manifests.Put(object[*corev1.Node](w, w.a.NodeName)))
	all(http.StatusOK)

	t.Cleanup(func() { w.ensureAgents(t) })
	ok(t, w.KillAgents(ctx))
	all(0)
	ok(t, w.StartAgents(ctx))
	all(http.StatusOK)
}
