//go:build realcluster

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// S3: only this node's endpoints, for pods and nodes.
func (s *servicesWorld) internalLocal(w *world) {
	local := corev1.ServiceInternalTrafficPolicyLocal
	svc := w.service("internal-local", "solo", func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = &local })
	for _, ip := range svc.Spec.ClusterIPs {
		for i, n := range w.nodes {
			for _, from := range []place{inPod(s.web[n.name]), onNode(n)} {
				if i == 0 {
					w.first(from, at(ip, 80))
					continue
				}
				w.eventually("dropped where no endpoint is", func() error { return w.fails(from, "tcp", at(ip, 80), probe.Timeout) })
			}
		}
	}
	w.eventually("the metric", func() error {
		v, err := w.metric(w.nodes[1].name, `kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`)
		if err == nil && v < 1 {
			err = fmt.Errorf("no_local_endpoints is %v", v)
		}
		return err
	})
}

// metric is a value of the agent's own.
func (w *world) metric(node, name string) (float64, error) {
	all, err := w.metrics(node)
	if err != nil {
		return 0, err
	}
	v, ok := all[name]
	if !ok {
		return 0, fmt.Errorf("%s: no metric %s", node, name)
	}
	return v, nil
}

func (w *world) metrics(node string) (map[string]float64, error) {
	body, status, err := w.get(node, "127.0.0.1:9964", "/metrics")
	if err != nil || status != http.StatusOK {
		return nil, fmt.Errorf("%s: metrics: %d: %w", node, status, err)
	}
	out := map[string]float64{}
	for line := range strings.Lines(string(body)) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			var v float64
			if _, err := fmt.Sscan(line[i+1:], &v); err == nil {
				out[line[:i]] = v
			}
		}
	}
	return out, nil
}

// get asks over HTTP, from a node, or from outside if that is empty.
func (w *world) get(node, addr, path string) (body []byte, status int, err error) {
	resp, err := w.getResponse(node, addr, path)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return body, resp.StatusCode, err
}

func (w *world) getResponse(node, addr, path string) (*http.Response, error) {
	tr := &http.Transport{DisableKeepAlives: true}
	if node != "" {
		tr.DialContext = w.dialIn(node)
	}
	req, err := http.NewRequestWithContext(w.ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return nil, err
	}
	return (&http.Client{Transport: tr, Timeout: 10 * time.Second}).Do(req)
}

// healthCheck is what a load balancer reads.
type healthCheck struct {
	Service             struct{ Namespace, Name string }
	LocalEndpoints      int
	ServiceProxyHealthy bool
}

// health wants a node's health check of a service to say so, with so many
// endpoints.
func (w *world) health(svc *corev1.Service, n node, status, endpoints int) error {
	resp, err := w.getResponse("", at(n.ips[0], svc.Spec.HealthCheckNodePort), "/")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var got healthCheck
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		return err
	}
	weight := resp.Header.Get("X-Load-Balancing-Endpoint-Weight")
	if resp.StatusCode != status || got.LocalEndpoints != endpoints || !got.ServiceProxyHealthy ||
		got.Service.Namespace != svc.Namespace || got.Service.Name != svc.Name || weight != fmt.Sprint(endpoints) {
		return fmt.Errorf("%s: %s, weight %s, %+v; want %d with %d endpoints", n.name, resp.Status, weight, got, status, endpoints)
	}
	return nil
}

// S4, S5, S7, S18: only this node's endpoints, for clients outside.
func (s *servicesWorld) externalLocal(w *world) {
	svc := w.service("external-local", "solo", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
	})
	for i, n := range w.nodes {
		status, endpoints := http.StatusServiceUnavailable, 0
		if i == 0 {
			status, endpoints = http.StatusOK, 1
		}
		w.eventually("the health check of "+n.name, func() error { return w.health(svc, n, status, endpoints) })
		for fam, ip := range n.ips {
			target := at(ip, svc.Spec.Ports[0].NodePort)
			for _, from := range s.sources(w) {
				w.first(from, target)
			}
			if i > 0 {
				w.eventually("dropped", func() error { return w.fails(outside, "tcp", target, probe.Timeout) })
				continue
			}
			a, err := w.reach(outside, "tcp", target)
			if err != nil {
				w.Error(err)
			} else if host(a.Reply.Peer) != []string{realcluster.HostIP, realcluster.HostIP6}[fam] {
				w.Errorf("the backend sees %s, not the client", a.Reply.Peer)
			}
		}
	}
}

// S15, S17, S21: slices that somebody writes, and what becomes of their
// conditions.
func (s *servicesWorld) slicesByHand(w *world) {
	svc := w.service("by-hand", "", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.Ports = s.Spec.Ports[:1]
	})
	n := w.nodes[0]
	yes, no, name, number := true, false, "tcp", int32(port)
	slices := w.api.DiscoveryV1().EndpointSlices(w.ns)
	put := func(c discoveryv1.EndpointConditions) {
		for fam, ip := range s.solo.Status.PodIPs {
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("by-hand-%d", fam), Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}},
				// The same one twice counts once.
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{ip.IP}, NodeName: &n.name, Conditions: c}},
				Ports:     []discoveryv1.EndpointPort{{Name: &name, Port: &number}}, AddressType: []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}[fam],
			}
			_, err := slices.Update(w.ctx, slice, metav1.UpdateOptions{})
			if apierrors.IsNotFound(err) {
				_, err = slices.Create(w.ctx, slice, metav1.CreateOptions{})
			}
			must(w, err)
		}
	}
	outsideBy := func(kind string) {
		for _, ip := range n.ips {
			target := at(ip, svc.Spec.Ports[0].NodePort)
			w.eventually("from outside", func() error {
				if kind != "" {
					return w.fails(outside, "tcp", target, kind)
				}
				_, err := w.reach(outside, "tcp", target)
				return err
			})
		}
	}
	put(discoveryv1.EndpointConditions{})
	w.eventually("conditions that are not stated: ready", func() error { return w.health(svc, n, http.StatusOK, 1) })
	outsideBy("")
	s.everywhereServes(w, svc)
	put(discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes})
	w.eventually("terminating: no new clients, please", func() error { return w.health(svc, n, http.StatusServiceUnavailable, 0) })
	outsideBy("")
	s.everywhereServes(w, svc)
	put(discoveryv1.EndpointConditions{Ready: &no, Serving: &no, Terminating: &yes})
	outsideBy(probe.Refused)
	for _, from := range s.sources(w) {
		w.eventually("nothing serves", func() error { return w.fails(from, "tcp", at(svc.Spec.ClusterIP, 80), probe.Refused) })
	}
}

// S2: refused at once, by every address and from everywhere.
func (s *servicesWorld) noEndpoints(w *world) {
	ips := []string{"198.51.100.40", "2001:db8:51::40"}
	svc := w.service("no-endpoints", "nobody", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = corev1.ServiceTypeNodePort, ips
	})
	for i, proto := range []string{"tcp", "udp"} {
		for _, n := range w.nodes {
			for fam := range n.ips {
				targets := []string{at(svc.Spec.ClusterIPs[fam], 80), at(n.ips[fam], svc.Spec.Ports[i].NodePort), at(ips[fam], 80)}
				for j, target := range targets {
					sources := []place{inPod(s.web[n.name]), onNode(n)}
					if j > 0 {
						w.route(fam, ips[fam], n.ips[fam])
						sources = append(sources, outside)
					}
					for _, from := range sources {
						w.eventually("refused", func() error { return w.fails(from, proto, target, probe.Refused) })
					}
				}
			}
		}
	}
}

// S15, S21: pods that are not ready get nothing, unless the service says so.
func (s *servicesWorld) notReady(w *world) {
	p := pod("not-ready", w.nodes[1].name, map[string]string{"app": "not-ready"})
	p.Spec.Containers[0].ReadinessProbe.TCPSocket.Port = intstr.FromInt32(1)
	_, err := w.api.CoreV1().Pods(w.ns).Create(w.ctx, p, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() { w.remove(w.ns, p.Name) })
	w.pods(w.ns, "app=not-ready", "it runs", func(all []corev1.Pod) error {
		if len(all) != 1 || all[0].Status.Phase != corev1.PodRunning {
			return errors.New("it does not run")
		}
		return nil
	})
	svc := w.service("not-ready", "not-ready", nil)
	published := w.service("not-ready-published", "not-ready", func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true })
	s.everywhereServes(w, published)
	for _, from := range s.sources(w) {
		w.eventually("refused", func() error { return w.fails(from, "tcp", at(svc.Spec.ClusterIP, 80), probe.Refused) })
	}
}

// S16: trafficDistribution arrives as hints of the slices.
func (s *servicesWorld) sameNode(w *world) {
	same := "PreferSameNode"
	svc := w.service("same-node", "web", func(s *corev1.Service) { s.Spec.TrafficDistribution = &same })
	s.everywhereServes(w, svc)
	for _, n := range w.nodes {
		for _, from := range []place{inPod(s.web[n.name]), onNode(n)} {
			for _, ip := range svc.Spec.ClusterIPs {
				w.eventually("answers come from the same node", func() error {
					list, err := w.calls(from, probe.Call{Proto: "tcp", Target: at(ip, 80), Count: 12})
					for _, a := range list {
						if e := attemptError(a); e != nil {
							err = errors.Join(err, e)
						} else if a.Reply.Server != s.web[n.name].Name {
							return fmt.Errorf("%s to %s: %s answers", from.name, ip, a.Reply.Server)
						}
					}
					return err
				})
			}
		}
	}
}

// Backends on the hosts' own network.
func (s *servicesWorld) hostNetworkBackends(w *world) {
	const own = 18080
	pods := w.everywhere("host-web", func(t *corev1.PodTemplateSpec) {
		t.Spec.HostNetwork = true
		t.Spec.Containers[0] = server("-port", fmt.Sprint(own))
		t.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: own}}
		t.Spec.Containers[0].ReadinessProbe.TCPSocket.Port = intstr.FromInt32(own)
	})
	svc := w.service("host-web", "host-web", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeNodePort
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].TargetPort = intstr.FromInt32(own)
		}
	})
	s.everywhereServes(w, svc)
	for _, ip := range svc.Spec.ClusterIPs {
		for _, from := range s.sources(w) {
			for _, proto := range []string{"tcp", "udp"} {
				list, err := w.calls(from, probe.Call{Proto: proto, Target: at(ip, 80), Servers: len(pods), Most: 100})
				if err != nil {
					w.Error(err)
				}
				seen := map[string]bool{}
				for _, a := range list {
					if e := attemptError(a); e != nil {
						w.Errorf("%s to %s %s: %v", from.name, proto, ip, e)
						break
					}
					seen[a.Reply.Server] = true
				}
				if len(seen) != len(pods) {
					w.Errorf("%s to %s %s: answered by %v", from.name, proto, ip, seen)
				}
			}
		}
	}
	for _, n := range w.nodes {
		for fam, ip := range n.ips {
			for _, a := range callsAll(w, outside, "tcp", at(ip, svc.Spec.Ports[0].NodePort), len(pods)) {
				if want := []string{realcluster.HostIP, realcluster.HostIP6}[fam]; a.Reply != nil && host(a.Reply.Peer) != want {
					w.Errorf("NodePort of %s: %s sees %s, not the client", ip, a.Reply.Server, a.Reply.Peer)
				}
			}
		}
	}
}

// S19: what load balancers and kubelets ask of a node.
func (s *servicesWorld) healthOfTheNode(w *world) {
	n := w.nodes[2]
	says := func(path string, want int) error {
		for _, ip := range n.ips {
			_, status, err := w.get("", at(ip, 10256), path)
			if err == nil && status != want {
				err = fmt.Errorf("%s of %s: %d, want %d", path, ip, status, want)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	w.eventually("well", func() error { return errors.Join(says("/healthz", 200), says("/livez", 200)) })
	taint := corev1.Taint{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectPreferNoSchedule}
	set := func(on bool) {
		w.eventually("the taint", func() error {
			o, err := w.api.CoreV1().Nodes().Get(background(w), n.name, metav1.GetOptions{})
			must(w, err)
			o.Spec.Taints = slices.DeleteFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taint.Key })
			if on {
				o.Spec.Taints = append(o.Spec.Taints, taint)
			}
			_, err = w.api.CoreV1().Nodes().Update(background(w), o, metav1.UpdateOptions{})
			return err
		})
	}
	w.Cleanup(func() { set(false) })
	set(true)
	w.eventually("about to go", func() error { return errors.Join(says("/healthz", 503), says("/livez", 200)) })
	set(false)
	w.eventually("well again", func() error { return says("/healthz", 200) })
}
