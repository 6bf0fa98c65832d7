//go:build realcluster

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// Pods, nodes and the world, by address and by name.
func TestNetwork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	web := w.everywhere("web", nil)
	w.each(map[string]func(*world){
		"PodToPod":  func(w *world) { podToPod(w, web) },
		"Nodes":     func(w *world) { nodesAndPods(w, web) },
		"World":     func(w *world) { toTheWorld(w, web) },
		"Bulk":      func(w *world) { bulk(w, web) },
		"Names":     func(w *world) { names(w, web) },
		"Interface": func(w *world) { podInterface(w, web) },
	})
}

// Pods of every node reach those of every node, in both families, under their
// own addresses.
func podToPod(w *world, web map[string]*corev1.Pod) {
	for _, from := range web {
		for _, to := range web {
			for i, ip := range to.Status.PodIPs {
				for _, proto := range []string{"tcp", "udp"} {
					a, err := w.reach(inPod(from), proto, at(ip.IP, port))
					if err != nil {
						w.Error(err)
					} else if a.Reply.Server != to.Name || host(a.Reply.Peer) != from.Status.PodIPs[i].IP {
						w.Errorf("%s to %s: %s answers and sees %s", from.Name, ip.IP, a.Reply.Server, a.Reply.Peer)
					}
				}
			}
		}
	}
}

// Nodes reach the pods of all nodes under an address of theirs, and the
// machine outside, which has no route to them, does not.
func nodesAndPods(w *world, web map[string]*corev1.Pod) {
	for _, from := range w.nodes {
		for _, to := range web {
			for i, ip := range to.Status.PodIPs {
				for _, proto := range []string{"tcp", "udp"} {
					a, err := w.reach(onNode(from), proto, at(ip.IP, port))
					if err != nil {
						w.Error(err)
					} else if host(a.Reply.Peer) != from.ips[i] {
						w.Errorf("%s to %s: seen as %s, want %s", from.name, ip.IP, a.Reply.Peer, from.ips[i])
					}
				}
			}
		}
	}
}

// A pod that calls who is outside is seen under its node's address.
func toTheWorld(w *world, web map[string]*corev1.Pod) {
	for i, addr := range []string{realcluster.HostIP, realcluster.HostIP6} {
		target := w.listenOutside(addr)
		for node, from := range web {
			for _, proto := range []string{"tcp", "udp"} {
				a, err := w.reach(inPod(from), proto, target)
				if err != nil {
					w.Error(err)
				} else if host(a.Reply.Peer) != w.node(node).ips[i] {
					w.Errorf("%s to outside: seen as %s, want its node's %s", from.Name, a.Reply.Peer, w.node(node).ips[i])
				}
			}
		}
	}
}

// listenOutside answers TCP and UDP at an address of this machine as pw-server
// does, by the name "outside", and returns where.
func (w *world) listenOutside(addr string) string {
	w.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(addr, "0"))
	must(w, err)
	u, err := net.ListenPacket("udp", l.Addr().String())
	must(w, err)
	var wg sync.WaitGroup
	w.Cleanup(func() {
		_, _ = l.Close(), u.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = json.NewEncoder(c).Encode(probe.Reply{Server: "outside", Proto: "tcp", Peer: c.RemoteAddr().String()})
			// Not before the caller has: a close with its line unread would be a reset.
			_, _ = c.Read(make([]byte, 64))
			_ = c.Close()
		}
	})
	wg.Go(func() {
		buf := make([]byte, 2048)
		for {
			_, peer, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			out, _ := json.Marshal(probe.Reply{Server: "outside", Proto: "udp", Peer: peer.String()})
			_, _ = u.WriteTo(out, peer)
		}
	})
	return l.Addr().String()
}

// Four megabytes each way between nodes arrive as they were sent.
func bulk(w *world, web map[string]*corev1.Pod) {
	s := w.service("bulk", "web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	var from, to *corev1.Pod
	from, to = web[w.nodes[0].name], web[w.nodes[1].name]
	var targets []string
	for _, ip := range to.Status.PodIPs {
		targets = append(targets, at(ip.IP, port))
	}
	for _, ip := range s.Spec.ClusterIPs {
		targets = append(targets, at(ip, 80))
	}
	for _, ip := range w.nodes[2].ips {
		targets = append(targets, at(ip, s.Spec.Ports[0].NodePort))
	}
	for _, target := range targets {
		w.eventually("the service is there", func() error {
			_, err := w.reach(inPod(from), "tcp", target)
			return err
		})
		for _, way := range []string{"-receive=false", "-receive=true"} {
			out, err := w.output(w.ctx, inPod(from), "pw-client", "bulk", "-bytes", "4000000", "-timeout", "20s", way, target)
			if err != nil {
				w.Errorf("%s %s: %v", target, way, err)
				continue
			}
			w.Logf("%s %s: %s", target, way, out)
		}
	}
}

// The cluster's DNS answers for services of every kind.
func names(w *world, web map[string]*corev1.Pod) {
	const domain = ".svc.cluster.local."
	normal := w.service("normal", "web", nil)
	w.service("headless", "web", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	w.service("alias", "", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "normal." + w.ns + domain[:len(domain)-1]}
	})
	byFamily := [2][]string{}
	for _, p := range web {
		for i, ip := range p.Status.PodIPs {
			byFamily[i] = append(byFamily[i], ip.IP)
		}
	}
	slices.Sort(byFamily[0])
	slices.Sort(byFamily[1])
	for _, from := range web {
		lookup := func(name string, want probe.LookupReport) {
			w.eventually(name+" by "+from.Name, func() error {
				out, err := w.output(w.ctx, inPod(from), "pw-client", "lookup", "-timeout", "10s", name)
				var got probe.LookupReport
				if e := json.Unmarshal(out, &got); e != nil {
					return errors.Join(err, e)
				}
				if !slices.Equal(got.A, want.A) || !slices.Equal(got.AAAA, want.AAAA) || want.CNAME != "" && got.CNAME != want.CNAME {
					return fmt.Errorf("%+v, want %+v", got, want)
				}
				return nil
			})
		}
		both := probe.LookupReport{A: normal.Spec.ClusterIPs[:1], AAAA: normal.Spec.ClusterIPs[1:], CNAME: "normal." + w.ns + domain}
		lookup("normal", both)
		lookup("normal."+w.ns+domain, both)
		lookup("alias", both)
		lookup("headless", probe.LookupReport{A: byFamily[0], AAAA: byFamily[1]})
		lookup("kubernetes.default", probe.LookupReport{A: []string{"10.98.0.1"}})
		for _, name := range []string{"normal:80", "alias:80", "headless:8080"} {
			for _, proto := range []string{"tcp", "udp"} {
				if _, err := w.reach(inPod(from), proto, name); err != nil {
					w.Error(err)
				}
			}
		}
	}
	// The answers come from the pods that the service has.
	slices, err := w.api.DiscoveryV1().EndpointSlices(w.ns).List(w.ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=headless"})
	must(w, err)
	if len(slices.Items) < 2 {
		w.Errorf("%d slices of the headless service, want one of each family", len(slices.Items))
	}
}

// What the kubelet shows of a pod is what the pod has, and the runtime's own
// check finds the interface as it was made.
func podInterface(w *world, web map[string]*corev1.Pod) {
	for node, p := range web {
		if len(p.Status.PodIPs) != 2 {
			w.Errorf("%s has addresses %v, want one of each family", p.Name, p.Status.PodIPs)
		}
		n, err := w.api.CoreV1().Nodes().Get(w.ctx, node, metav1.GetOptions{})
		must(w, err)
		for i, ip := range p.Status.PodIPs {
			_, cidr, err := net.ParseCIDR(n.Spec.PodCIDRs[i])
			must(w, err)
			if !cidr.Contains(net.ParseIP(ip.IP)) {
				w.Errorf("%s has %s, its node %s gives out %s", p.Name, ip.IP, node, cidr)
			}
		}
		var list struct {
			Endpoints []struct {
				Pod   string
				Addrs []string
			}
		}
		must(w, w.podweirJSON(node, &list, "endpoints"))
		found := false
		for _, e := range list.Endpoints {
			found = found || e.Pod == p.Namespace+"/"+p.Name && slices.Contains(e.Addrs, p.Status.PodIP)
		}
		if !found {
			w.Errorf("podweir endpoints on %s does not show %s with %s: %+v", node, p.Name, p.Status.PodIP, list)
		}
	}
}

// background is for what has to be undone when the test's own time is over.
func background(w *world) context.Context { return context.WithoutCancel(w.ctx) }
