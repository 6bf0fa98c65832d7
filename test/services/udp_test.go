package services

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/utils/ptr"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// flow is a client with a connected UDP socket that never stops sending.
type flow struct {
	*cluster.Stream
	what string
}

func (w *world) flow(from string, target netip.AddrPort) flow {
	w.Helper()
	s, err := w.callers[from].ns.Stream(w.ctx, target.String(), "-proto", "udp", "-interval", "10ms")
	w.must(err)
	return flow{s, fmt.Sprintf("%s to %v", from, target)}
}

// answeredBy awaits that this server gives the answers now.
func (w *world) answeredBy(flows []flow, server string) {
	w.Helper()
	for _, f := range flows {
		r, err := f.Report(w.ctx)
		w.must(err)
		goal := r.Received + 3
		if _, err := f.Await(w.ctx, "answers by "+server, func(r probe.StreamReport) bool {
			return r.Received >= goal && r.Server == server
		}); err != nil {
			w.Fatalf("%s: %v", f.what, err)
		}
	}
}

// silentNow awaits some datagrams more, none of which is answered.
func (w *world) silentNow(flows []flow) {
	w.Helper()
	for _, f := range flows {
		var before probe.StreamReport
		_, err := f.Await(w.ctx, "no answers", func(r probe.StreamReport) bool {
			if r.Received != before.Received || before.Sent == 0 {
				before = r
			}
			return r.Sent >= before.Sent+5
		})
		if err != nil {
			w.Fatalf("%s: %v", f.what, err)
		}
	}
}

func (w *world) end(flows []flow) {
	w.Helper()
	for _, f := range flows {
		_, err := f.Stop(w.ctx)
		w.must(err)
	}
}

// A running UDP flow follows its service, from a pod and from a host, by an
// address of the cluster and by a load balancer's.
func TestS23S24S25RunningUDP(t *testing.T) {
	w := shared(t)
	for _, end := range []string{"pod-b", "back-a"} {
		_, err := w.callers[end].ns.Serve(w.ctx, end+"-8091", 8091)
		w.must(err)
	}
	s := service{name: "running", n: 210, ends: "back-a"}
	w.put(s)
	var flows, cluster []flow
	for _, v6 := range []bool{false, true} {
		for _, from := range []string{"pod-a", "node-a", "pod-b"} {
			cluster = append(cluster, w.flow(from, s.frontend(w, "cluster", v6)))
		}
		flows = append(flows, w.flow("pod-a", s.frontend(w, "lb", v6)), w.flow("node-a", s.frontend(w, "lb", v6)),
			w.flow("out", s.frontend(w, "lb", v6)), w.flow("out", s.frontend(w, "node@node-b", v6)),
			w.flow("pod-a", s.frontend(w, "node@node-b", v6)), w.flow("node-a", s.frontend(w, "node@node-a", v6)))
	}
	flows = append(flows, cluster...)
	defer w.end(flows)
	w.answeredBy(flows, "back-a")
	step := func(what string, change func(), server string) {
		w.Helper()
		change()
		w.settled()
		w.Log(what)
		if server == "" {
			w.silentNow(flows)
		} else {
			w.answeredBy(flows, server)
		}
	}
	ends := func(ends string) func() { return func() { s.ends = ends; w.write(s) } }
	step("S23: the backend is removed, another has come", ends("back-b"), "back-b")
	step("S24: no endpoint", ends(""), "")
	step("S24: one again", ends("pod-b"), "pod-b")
	step("S25: the service is deleted", func() { w.must(w.Manifests.Delete(s.objects(w, nil)...)) }, "")
	step("S25: it is created again", func() { w.write(s) }, "pod-b")
	step("S25: another target port", func() { s.target = 8091; w.write(s) }, "pod-b-8091")
	step("S23: on its way out, the last one serves", ends("pod-b!terminating"), "pod-b-8091")
	step("S23: gone", ends("back-a"), "back-a-8091")
	// The address moves away, and comes back.
	moved := s
	moved.n = 211
	w.write(moved)
	w.settled()
	w.silentNow(cluster)
	w.write(s)
	w.settled()
	w.answeredBy(flows, "back-a-8091")
}

// An address of the world that becomes a service's, and ceases to be.
func TestAddressBecomesAService(t *testing.T) {
	w := shared(t)
	s := service{name: "becomes", n: 212, ends: "back-b"}
	var flows []flow
	for _, v6 := range []bool{false, true} {
		for _, at := range []string{"lb", "ext"} {
			w.claimAddr(s.address(at, v6))
			for _, from := range []string{"pod-a", "node-a", "pod-b"} {
				flows = append(flows, w.flow(from, s.frontend(w, at, v6)))
			}
		}
	}
	defer w.end(flows)
	w.answeredBy(flows, "ext")
	w.put(s)
	w.answeredBy(flows, "back-b")
	// From now on it is no service's.
	s.change = func(_ *world, svc *corev1.Service) {
		svc.Spec.ExternalIPs = nil
		for i := range svc.Status.LoadBalancer.Ingress {
			svc.Status.LoadBalancer.Ingress[i].IPMode = ptr.To(corev1.LoadBalancerIPModeProxy)
		}
	}
	w.write(s)
	w.answeredBy(flows, "ext")
}
