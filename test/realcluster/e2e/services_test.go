//go:build realcluster

package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// What Services promise: the numbers are those of CONTRIBUTING.md.
func TestServices(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := &servicesWorld{world: w}
	s.web = w.everywhere("web", nil)
	s.solo = w.run(w.ns, pod("solo", w.nodes[0].name, map[string]string{"app": "solo"}))[0]
	w.each(map[string]func(*world){
		"ClusterIP":             s.clusterIP,
		"NodePort":              s.nodePort,
		"LoadBalancer":          s.loadBalancer,
		"LoadBalancerByProxy":   s.loadBalancerByProxy,
		"ExternalIPs":           s.externalIPs,
		"NodesOwnAddresses":     s.nodesOwnAddresses,
		"HostPort":              s.hostPort,
		"InternalLocal":         s.internalLocal,
		"ExternalLocal":         s.externalLocal,
		"SlicesByHand":          s.slicesByHand,
		"NoEndpoints":           s.noEndpoints,
		"Affinity":              s.affinity,
		"ServiceCIDR":           s.serviceCIDR,
		"PortsAndProtocols":     s.portsAndProtocols,
		"OneFamily":             s.oneFamily,
		"Types":                 s.types,
		"AnotherProxys":         s.anotherProxys,
		"NotReady":              s.notReady,
		"RunningUDP":            s.runningUDP,
		"RollingUpdate":         s.rollingUpdate,
		"SameNode":              s.sameNode,
		"HostNetworkBackends":   s.hostNetworkBackends,
		"KubernetesAPI":         s.kubernetesAPI,
		"HealthOfTheNode":       s.healthOfTheNode,
		"DeletedAndMadeAnew":    s.deletedAndMadeAnew,
		"ItselfByItsOwnService": s.itself,
	})
}

type servicesWorld struct {
	*world
	web  map[string]*corev1.Pod // on every node
	solo *corev1.Pod            // on the first
}

// first waits until a service is in force everywhere.
func (w *world) first(from place, target string) {
	w.Helper()
	w.eventually(target+" from "+from.name, func() error {
		_, err := w.reach(from, "tcp", target)
		return err
	})
}

// everywhereServes has all nodes know of a service by its ClusterIP.
func (s *servicesWorld) everywhereServes(w *world, svc *corev1.Service) {
	w.Helper()
	for _, p := range s.web {
		for _, ip := range svc.Spec.ClusterIPs {
			w.first(inPod(p), at(ip, svc.Spec.Ports[0].Port))
		}
	}
}

// sources are a pod and the node itself, of every node.
func (s *servicesWorld) sources(w *world) (out []place) {
	for _, n := range w.nodes {
		out = append(out, inPod(s.web[n.name]), onNode(n))
	}
	return out
}

// callsAll wants every backend to answer in time, and the caller to be told the
// address that it called.
func callsAll(w *world, from place, proto, target string, servers int) []probe.Attempt {
	w.Helper()
	for _, unconnected := range []bool{false, true} {
		if unconnected && proto != "udp" {
			continue
		}
		list, err := w.calls(from, probe.Call{Proto: proto, Target: target, Servers: servers, Most: 100, Unconnected: unconnected})
		if err != nil {
			w.Error(err)
			return nil
		}
		seen := map[string]int{}
		for _, a := range list {
			if !a.OK {
				w.Errorf("%s to %s %s: %s: %s", from.name, proto, target, a.Kind, a.Error)
				return list
			}
			seen[a.Reply.Server]++
			if a.Remote != target {
				w.Errorf("%s to %s %s: the socket's peer is %s", from.name, proto, target, a.Remote)
				return list
			}
		}
		if len(seen) != servers {
			w.Errorf("%s to %s %s: answered by %v, want %d of them", from.name, proto, target, seen, servers)
		}
		if unconnected || proto != "udp" {
			return list
		}
	}
	return nil
}

// S1, S11, S26: pods and nodes by the cluster IPs.
func (s *servicesWorld) clusterIP(w *world) {
	svc := w.service("cluster-ip", "web", nil)
	s.everywhereServes(w, svc)
	pods := map[string]*corev1.Pod{}
	for _, p := range s.web {
		pods[p.Name] = p
	}
	for _, n := range w.nodes {
		for fam, ip := range svc.Spec.ClusterIPs {
			for _, proto := range []string{"tcp", "udp"} {
				client := s.web[n.name]
				for _, a := range callsAll(w, inPod(client), proto, at(ip, 80), len(s.web)) {
					want := client.Status.PodIPs[fam].IP
					if a.Reply != nil && a.Reply.Server == client.Name {
						want = n.ips[fam] // itself, by its service
					}
					if a.Reply != nil && host(a.Reply.Peer) != want {
						w.Errorf("%s to %s: %s sees %s, want %s", client.Name, ip, a.Reply.Server, a.Reply.Peer, want)
					}
				}
				for _, a := range callsAll(w, onNode(n), proto, at(ip, 80), len(s.web)) {
					if a.Reply != nil && host(a.Reply.Peer) != n.ips[fam] {
						w.Errorf("%s to %s: %s sees %s, want %s", n.name, ip, a.Reply.Server, a.Reply.Peer, n.ips[fam])
					}
				}
			}
		}
	}
	// S8: a port that the service lacks, an address that no service has.
	for _, from := range s.sources(w) {
		for _, ip := range svc.Spec.ClusterIPs {
			for _, proto := range []string{"tcp", "udp"} {
				if err := w.fails(from, proto, at(ip, 81), probe.Refused); err != nil {
					w.Error(err)
				}
			}
		}
		for _, ip := range []string{"10.98.255.250", "fd00:10:98::fffa"} {
			if err := w.fails(from, "tcp", at(ip, 80), probe.Timeout); err != nil {
				w.Error(err)
			}
		}
	}
}

// S6, S26, S34: from outside, pods and nodes, by every node's addresses.
func (s *servicesWorld) nodePort(w *world) {
	svc := w.service("node-port", "web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	s.everywhereServes(w, svc)
	for _, n := range w.nodes {
		for fam, ip := range n.ips {
			for i, proto := range []string{"tcp", "udp"} {
				target := at(ip, svc.Spec.Ports[i].NodePort)
				for _, a := range callsAll(w, outside, proto, target, len(s.web)) {
					if want := []string{realcluster.HostIP, realcluster.HostIP6}[fam]; a.Reply != nil && host(a.Reply.Peer) != want {
						w.Errorf("%s by %s: the backend sees %s, not the client %s", proto, target, a.Reply.Peer, want)
					}
				}
				for _, from := range s.sources(w) {
					callsAll(w, from, proto, target, len(s.web))
				}
			}
		}
	}
}

// external checks addresses that are no node's, from pods, nodes and outside
// by a route over each node.
func (s *servicesWorld) external(w *world, ips []string) {
	w.Helper()
	for fam, ip := range ips {
		target := at(ip, 80)
		for _, from := range s.sources(w) {
			w.first(from, target)
			for _, proto := range []string{"tcp", "udp"} {
				callsAll(w, from, proto, target, len(s.web))
			}
		}
		for _, n := range w.nodes {
			w.route(fam, ip, n.ips[fam])
			for _, proto := range []string{"tcp", "udp"} {
				for _, a := range callsAll(w, outside, proto, target, len(s.web)) {
					if want := []string{realcluster.HostIP, realcluster.HostIP6}[fam]; a.Reply != nil && host(a.Reply.Peer) != want {
						w.Errorf("%s by %s: the backend sees %s, not the client %s", target, n.name, a.Reply.Peer, want)
					}
				}
			}
		}
	}
}

// route leads an address of the documentation ranges over a node, as a router
// outside would, as long as the test lasts.
func (w *world) route(fam int, ip, via string) {
	w.Helper()
	args := []string{"-4", "route"}
	if fam == 1 {
		args[0] = "-6"
	}
	out, err := exec.CommandContext(w.ctx, "ip", append(args, "replace", ip, "via", via, "dev", realcluster.Bridge)...).CombinedOutput()
	if err != nil {
		w.Fatalf("route %s via %s: %v: %s", ip, via, err, out)
	}
	w.Cleanup(func() { _ = exec.Command("ip", append(args, "del", ip, "dev", realcluster.Bridge)...).Run() })
}

// setIngress writes a status as a cloud's controller does.
func (w *world) setIngress(name string, ingress ...corev1.LoadBalancerIngress) {
	w.Helper()
	w.eventually("the load balancer's status", func() error {
		s, err := w.api.CoreV1().Services(w.ns).Get(w.ctx, name, metav1.GetOptions{})
		must(w, err)
		s.Status.LoadBalancer.Ingress = ingress
		_, err = w.api.CoreV1().Services(w.ns).UpdateStatus(w.ctx, s, metav1.UpdateOptions{})
		if err != nil && !apierrors.IsConflict(err) {
			w.Fatal(err)
		}
		return err
	})
}

// S12, S22: a load balancer's addresses, written by hand, and its ranges.
func (s *servicesWorld) loadBalancer(w *world) {
	vips := []string{"198.51.100.10", "2001:db8:51::10"}
	svc := w.service("load-balancer", "web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer })
	mode := corev1.LoadBalancerIPModeVIP
	w.setIngress(svc.Name, corev1.LoadBalancerIngress{IP: vips[0], IPMode: &mode}, corev1.LoadBalancerIngress{IP: vips[1]})
	s.external(w, vips)
	// Pods alone: neither nodes nor who is outside.
	w.edit(svc.Name, func(s *corev1.Service) {
		s.Spec.LoadBalancerSourceRanges = []string{"10.244.0.0/16", "fd00:10:244::/48"}
	})
	for fam, ip := range vips {
		target := at(ip, 80)
		for _, n := range w.nodes {
			w.route(fam, ip, n.ips[fam])
			w.eventually("the ranges", func() error { return w.fails(outside, "tcp", target, probe.Timeout) })
			if err := w.fails(onNode(n), "tcp", target, probe.Timeout); err != nil {
				w.Error(err)
			}
			if _, err := w.reach(inPod(s.web[n.name]), "tcp", target); err != nil {
				w.Error(err)
			}
			if _, err := w.reach(outside, "tcp", at(n.ips[fam], svc.Spec.Ports[0].NodePort)); err != nil {
				w.Error("the NodePort has no ranges:", err)
			}
		}
	}
	w.setIngress(svc.Name)
	for _, from := range s.sources(w) {
		w.eventually("the address is nobody's again", func() error {
			list, err := w.calls(from, probe.Call{Proto: "tcp", Target: at(vips[0], 80), Timeout: time.Second})
			if err == nil && list[0].OK {
				err = errors.New("it answers")
			}
			return err
		})
	}
}

// S13: what leads through a proxy does so for pods and nodes, too.
func (s *servicesWorld) loadBalancerByProxy(w *world) {
	const vip = "198.51.100.20"
	out, err := exec.CommandContext(w.ctx, "ip", "addr", "add", vip+"/32", "dev", realcluster.Bridge).CombinedOutput()
	if err != nil {
		w.Fatalf("address of a proxy: %v: %s", err, out)
	}
	w.Cleanup(func() {
		if out, err := exec.Command("ip", "addr", "del", vip+"/32", "dev", realcluster.Bridge).CombinedOutput(); err != nil {
			w.Errorf("address of a proxy: %v: %s", err, out)
		}
	})
	target := w.listenOutside(vip)
	_, number, _ := strings.Cut(target, ":")
	svc := w.service("proxied", "web", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].Port = intstr.Parse(number).IntVal
		}
	})
	vipMode, proxy := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy
	w.setIngress(svc.Name, corev1.LoadBalancerIngress{IP: vip, IPMode: &vipMode})
	for _, mode := range []*corev1.LoadBalancerIPMode{&vipMode, &proxy} {
		w.setIngress(svc.Name, corev1.LoadBalancerIngress{IP: vip, IPMode: mode})
		for _, from := range s.sources(w) {
			w.eventually("who answers with mode "+string(*mode), func() error {
				a, err := w.reach(from, "tcp", target)
				if err == nil && (a.Reply.Server == "outside") != (mode == &proxy) {
					err = fmt.Errorf("%s to %s: %s answers", from.name, target, a.Reply.Server)
				}
				return err
			})
		}
	}
}

// S22: addresses that lead to the cluster by some other means.
func (s *servicesWorld) externalIPs(w *world) {
	ips := []string{"198.51.100.30", "2001:db8:51::30"}
	w.service("external-ips", "web", func(s *corev1.Service) { s.Spec.ExternalIPs = ips })
	s.external(w, ips)
}

// S22: services under the addresses of a node, and of the API server's machine:
// the service has its port there, and whoever listens on others keeps them.
func (s *servicesWorld) nodesOwnAddresses(w *world) {
	n, other := w.nodes[1], w.nodes[2]
	svc := w.service("node-external", "web", func(s *corev1.Service) {
		s.Spec.ExternalIPs = []string{n.ips[0], n.ips[1], realcluster.HostIP}
		s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 8088, 8088
	})
	lb := w.service("node-balancer", "web", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 8089, 8089
	})
	w.setIngress(lb.Name, corev1.LoadBalancerIngress{IP: other.ips[0]}, corev1.LoadBalancerIngress{IP: other.ips[1]})
	s.everywhereServes(w, svc)
	sources := append(s.sources(w), outside)
	for fam := range 2 {
		for _, x := range []struct {
			n      node
			number int32
		}{{n, 8088}, {other, 8089}} {
			for _, from := range sources {
				w.first(from, at(x.n.ips[fam], x.number))
				callsAll(w, from, "udp", at(x.n.ips[fam], x.number), len(s.web))
				// The kubelet, of IPv4 alone, wants TLS, and the agent HTTP.
				says := map[int32]string{10256: "invalid character 'H'"}
				if fam == 0 {
					says[10250] = "EOF"
				}
				for own, says := range says {
					if a := w.try(from, "tcp", at(x.n.ips[fam], own)); a.Remote != at(x.n.ips[fam], own) || !strings.Contains(a.Error, says) {
						w.Errorf("%s to port %d of %s, which has a service on %d: %+v", from.name, own, x.n.name, x.number, a)
					}
				}
				if err := w.fails(from, "tcp", at(x.n.ips[fam], 8090), probe.Refused); err != nil {
					w.Error(err)
				}
			}
		}
	}
	for _, from := range s.sources(w) {
		w.first(from, at(realcluster.HostIP, 8088))
		if a := w.try(from, "tcp", at(realcluster.HostIP, 6443)); a.Remote != at(realcluster.HostIP, 6443) || a.Error != "EOF" {
			w.Errorf("%s to the API server, which has a service on another port of its address: %+v", from.name, a)
		}
	}
}

// S22: a port of the node, on all of its addresses or one, from ADD to DEL.
func (s *servicesWorld) hostPort(w *world) {
	n := w.nodes[0]
	p := pod("host-port", n.name, nil)
	p.Spec.Containers[0].Ports = []corev1.ContainerPort{
		{ContainerPort: port, HostPort: 18181}, {ContainerPort: port, HostPort: 18181, Protocol: corev1.ProtocolUDP},
		{ContainerPort: port, HostPort: 18182, HostIP: n.ips[0]},
	}
	w.run(w.ns, p)
	sources := append(s.sources(w), outside)
	for _, from := range sources {
		for _, ip := range n.ips {
			for _, proto := range []string{"tcp", "udp"} {
				if a, err := w.reach(from, proto, at(ip, 18181)); err != nil {
					w.Error(err)
				} else if a.Reply.Server != p.Name {
					w.Errorf("%s to port 18181: %s answers", from.name, a.Reply.Server)
				}
			}
		}
		if _, err := w.reach(from, "tcp", at(n.ips[0], 18182)); err != nil {
			w.Error(err)
		}
		if err := w.fails(from, "tcp", at(n.ips[1], 18182), probe.Refused); err != nil {
			w.Error("a port of another address:", err)
		}
		if err := w.fails(from, "tcp", at(w.nodes[1].ips[0], 18181), probe.Refused); err != nil {
			w.Error("a port of another node:", err)
		}
	}
	w.remove(w.ns, p.Name)
	for _, from := range sources {
		w.eventually("the port goes with the pod", func() error { return w.fails(from, "tcp", at(n.ips[0], 18181), probe.Refused) })
	}
}

// S14: a client stays with its backend, by whatever address and for its time.
func (s *servicesWorld) affinity(w *world) {
	svc := w.service("affinity", "web", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.SessionAffinity = corev1.ServiceTypeNodePort, corev1.ServiceAffinityClientIP
	})
	s.everywhereServes(w, svc)
	stays := func(from place, targets ...string) {
		seen := map[string]bool{}
		for _, target := range targets {
			list, err := w.calls(from, probe.Call{Proto: "tcp", Target: target, Count: 15})
			if err != nil {
				w.Error(err)
				return
			}
			for _, a := range list {
				if !a.OK {
					w.Errorf("%s to %s: %s", from.name, target, a.Error)
					return
				}
				seen[a.Reply.Server] = true
			}
		}
		if len(seen) != 1 {
			w.Errorf("%s to %v: answered by %d backends", from.name, targets, len(seen))
		}
	}
	for _, from := range s.sources(w) {
		for fam, ip := range svc.Spec.ClusterIPs {
			stays(from, at(ip, 80), at(w.node(from.node).ips[fam], svc.Spec.Ports[0].NodePort))
		}
	}
	for fam := range 2 {
		stays(outside, at(w.nodes[0].ips[fam], svc.Spec.Ports[0].NodePort))
	}
	w.edit(svc.Name, func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityNone })
	from := inPod(s.web[w.nodes[0].name])
	w.eventually("no affinity any more", func() error {
		list, err := w.calls(from, probe.Call{Proto: "tcp", Target: at(svc.Spec.ClusterIP, 80), Servers: 3, Most: 60})
		seen := map[string]bool{}
		for _, a := range list {
			if a.OK {
				seen[a.Reply.Server] = true
			}
		}
		if err == nil && len(seen) != 3 {
			err = fmt.Errorf("answered by %v", seen)
		}
		return err
	})
}

// S10, S21: ports and protocols of one address have backends of their own, a
// named one each pod's own number.
func (s *servicesWorld) portsAndProtocols(w *world) {
	app := map[string]string{"app": "ports"}
	var pods []*corev1.Pod
	for i, number := range []int32{8080, 9090} {
		p := pod(fmt.Sprintf("ports-%d", number), w.nodes[i].name, app)
		c := &p.Spec.Containers[0]
		c.Args = []string{"-port", fmt.Sprint(number)}
		c.Ports = []corev1.ContainerPort{{Name: "web", ContainerPort: number}}
		c.ReadinessProbe.TCPSocket.Port = intstr.FromString("web")
		pods = append(pods, p)
	}
	w.run(w.ns, pods...)
	svc := w.service("ports", "ports", func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "named", Port: 80, TargetPort: intstr.FromString("web")},
			{Name: "first", Port: 81, TargetPort: intstr.FromInt32(8080)},
			{Name: "second", Port: 80, TargetPort: intstr.FromInt32(9090), Protocol: corev1.ProtocolUDP},
			{Name: "sctp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolSCTP},
		}
	})
	for _, from := range s.sources(w) {
		for _, ip := range svc.Spec.ClusterIPs {
			w.first(from, at(ip, 80))
			w.eventually("both by name", func() error {
				list, err := w.calls(from, probe.Call{Proto: "tcp", Target: at(ip, 80), Servers: 2, Most: 60})
				for _, a := range list {
					err = errors.Join(err, attemptError(a))
				}
				return err
			})
			// Each of these ports is open in one of the two pods alone. The other
			// refuses, as often as the kernel's limit for such answers lets it.
			for _, one := range []struct{ proto, target, server string }{{"tcp", at(ip, 81), "ports-8080"}, {"udp", at(ip, 80), "ports-9090"}} {
				w.eventually(one.proto+" "+one.target, func() error {
					list, err := w.calls(from, probe.Call{Proto: one.proto, Target: one.target, Timeout: time.Second})
					if err != nil {
						return err
					}
					if list[0].OK && list[0].Reply.Server != one.server {
						w.Errorf("%s to %s %s: %s answers", from.name, one.proto, one.target, list[0].Reply.Server)
					}
					return attemptError(list[0])
				})
			}
		}
	}
}

func attemptError(a probe.Attempt) error {
	if a.OK {
		return nil
	}
	return fmt.Errorf("%s: %s", a.Kind, a.Error)
}

// A service of IPv6 alone.
func (s *servicesWorld) oneFamily(w *world) {
	single := corev1.IPFamilyPolicySingleStack
	svc := w.service("one-family", "web", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = corev1.ServiceTypeNodePort, &single, []corev1.IPFamily{corev1.IPv6Protocol}
	})
	if len(svc.Spec.ClusterIPs) != 1 {
		w.Fatalf("cluster IPs %v", svc.Spec.ClusterIPs)
	}
	for _, from := range s.sources(w) {
		w.first(from, at(svc.Spec.ClusterIP, 80))
		callsAll(w, from, "udp", at(svc.Spec.ClusterIP, 80), len(s.web))
	}
	n := w.nodes[1]
	callsAll(w, outside, "tcp", at(n.ips[1], svc.Spec.Ports[0].NodePort), len(s.web))
	if err := w.fails(outside, "tcp", at(n.ips[0], svc.Spec.Ports[0].NodePort), probe.Refused); err != nil {
		w.Error("the other family's NodePort is the host's:", err)
	}
}

// The API server's own service: its backend is no pod.
func (s *servicesWorld) kubernetesAPI(w *world) {
	svc, err := w.api.CoreV1().Services("default").Get(w.ctx, "kubernetes", metav1.GetOptions{})
	must(w, err)
	for _, from := range s.sources(w) {
		a := w.try(from, "tcp", at(svc.Spec.ClusterIP, 443))
		// It wants TLS, and ends a connection that begins with something else.
		if a.Remote != at(svc.Spec.ClusterIP, 443) || a.Error != "EOF" {
			w.Errorf("%s: %+v", from.name, a)
		}
	}
}

// S11: with one backend there is no way round.
func (s *servicesWorld) itself(w *world) {
	svc := w.service("itself", "solo", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	s.everywhereServes(w, svc)
	n := w.nodes[0]
	for fam, ip := range svc.Spec.ClusterIPs {
		for i, proto := range []string{"tcp", "udp"} {
			for _, target := range []string{at(ip, 80), at(n.ips[fam], svc.Spec.Ports[i].NodePort)} {
				a, err := w.reach(inPod(s.solo), proto, target)
				if err != nil {
					w.Error(err)
				} else if host(a.Reply.Peer) != n.ips[fam] {
					w.Errorf("%s to itself by %s: it sees %s, want its node's %s", s.solo.Name, target, a.Reply.Peer, n.ips[fam])
				}
			}
		}
	}
}
