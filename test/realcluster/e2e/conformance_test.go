//go:build realcluster

package e2e

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// What the conformance tests of Kubernetes want of a network, beyond what the
// tests of services and names here ask for anyway.
func TestConformance(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := &servicesWorld{world: w}
	s.web = w.everywhere("web", nil)
	w.each(map[string]func(*world){
		"AddressPlan":       s.addressPlan,
		"HostPortThreeWays": s.hostPortThreeWays,
		"MirroredEndpoints": s.mirroredEndpoints,
		"SlicesOfOnePort":   s.slicesOfOnePort,
		"PortsComeAndGo":    s.portsComeAndGo,
		"ProtocolsChange":   s.protocolsChange,
		"DeleteCollection":  s.deleteCollection,
		"SecureAPI":         s.secureAPI,
		"HostNames":         s.hostNames,
		"OwnResolver":       s.ownResolver,
		"NamesByKubeconfig": s.namesByKubeconfig,
		"ListsAreStreamed":  listsAreStreamed,
	})
}

// The plan that documents and tests use: client and local on one node, remote
// on another; who reaches whom by which address, and is seen as what.
func (s *servicesWorld) addressPlan(w *world) {
	one, two := w.nodes[0], w.nodes[1]
	backend := map[string]string{"app": "plan"}
	pods := w.run(w.ns, pod("client", one.name, nil), pod("local", one.name, backend), pod("remote", two.name, backend))
	client, local, remote := pods[0], pods[1], pods[2]
	svc := w.service("plan", "plan", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeNodePort, "10.98.235.247", []string{"10.98.235.247", "fd00:10:98::f7"}
		s.Spec.Ports[0].NodePort = 30080
	})
	for _, from := range []place{inPod(client), inPod(remote), onNode(one), onNode(two)} {
		for _, ip := range svc.Spec.ClusterIPs {
			w.first(from, at(ip, 80))
		}
	}
	var bad []error
	sees := func(from place, target, want string, servers ...string) {
		list, err := w.calls(from, probe.Call{Proto: "tcp", Target: target, Servers: len(servers), Most: 60})
		bad = append(bad, err)
		seen := map[string]bool{}
		for _, a := range list {
			if !a.OK {
				bad = append(bad, fmt.Errorf("%s to %s: %w", from.name, target, attemptError(a)))
				continue
			}
			seen[a.Reply.Server] = true
			if host(a.Reply.Peer) != want {
				bad = append(bad, fmt.Errorf("%s to %s: %s sees %s, want %s", from.name, target, a.Reply.Server, a.Reply.Peer, want))
			}
		}
		if have := slices.Sorted(maps.Keys(seen)); !slices.Equal(have, servers) {
			bad = append(bad, fmt.Errorf("%s to %s: answered by %v, want %v", from.name, target, have, servers))
		}
	}
	for fam := range 2 {
		vip, out := at(svc.Spec.ClusterIPs[fam], 80), []string{realcluster.HostIP, realcluster.HostIP6}[fam]
		own := client.Status.PodIPs[fam].IP
		sees(inPod(client), at(local.Status.PodIPs[fam].IP, port), own, "local")
		sees(inPod(client), at(remote.Status.PodIPs[fam].IP, port), own, "remote")
		sees(inPod(remote), at(client.Status.PodIPs[fam].IP, port), remote.Status.PodIPs[fam].IP, "client")
		sees(inPod(client), vip, own, "local", "remote")
		sees(onNode(one), at(local.Status.PodIPs[fam].IP, port), one.ips[fam], "local")
		sees(onNode(one), vip, one.ips[fam], "local", "remote")
		for _, n := range []node{one, two, w.nodes[2]} {
			sees(outside, at(n.ips[fam], 30080), out, "local", "remote")
			sees(inPod(client), at(n.ips[fam], 30080), own, "local", "remote")
		}
	}
	if err := errors.Join(bad...); err != nil {
		w.Error(err)
	}
}

// One number for three pods of a node: of loopback, of the node's address, and
// of that by UDP.
func (s *servicesWorld) hostPortThreeWays(w *world) {
	const number = 18323
	n := w.nodes[1]
	with := func(name, ip string, proto corev1.Protocol) *corev1.Pod {
		p := pod(name, n.name, nil)
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: port, HostPort: number, HostIP: ip, Protocol: proto}}
		return p
	}
	w.run(w.ns, with("by-loopback", "127.0.0.1", corev1.ProtocolTCP), with("by-address", n.ips[0], corev1.ProtocolTCP), with("by-udp", n.ips[0], corev1.ProtocolUDP))
	on := onNode(n)
	for _, c := range []struct{ proto, addr, server string }{
		{"tcp", "127.0.0.1", "by-loopback"}, {"tcp", n.ips[0], "by-address"}, {"udp", n.ips[0], "by-udp"},
	} {
		if a, err := w.reach(on, c.proto, at(c.addr, number)); err != nil {
			w.Error(err)
		} else if a.Reply.Server != c.server {
			w.Errorf("%s %s: %s answers, want %s", c.proto, c.addr, a.Reply.Server, c.server)
		}
	}
	if err := w.fails(on, "udp", at("127.0.0.1", number), probe.Refused); err != nil {
		w.Error(err)
	}
	if a, err := w.reach(outside, "tcp", at(n.ips[0], number)); err != nil || a.Reply.Server != "by-address" {
		w.Errorf("from outside: %+v, %v", a, err)
	}
}

// Endpoints that somebody writes become slices by the control plane.
func (s *servicesWorld) mirroredEndpoints(w *world) {
	svc := w.service("mirrored", "", func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[:1] })
	api := w.api.CoreV1().Endpoints(w.ns)
	from, vip := inPod(s.web[w.nodes[0].name]), at(svc.Spec.ClusterIP, 80)
	//lint:ignore SA1019 that they are deprecated does not end them
	e := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: svc.Name}}
	for i, n := range w.nodes[:2] {
		to := s.web[n.name]
		e.Subsets = []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: to.Status.PodIP}}, Ports: []corev1.EndpointPort{{Name: "tcp", Port: port}},
		}}
		var err error
		if i == 0 {
			_, err = api.Create(w.ctx, e, metav1.CreateOptions{})
		} else {
			_, err = api.Update(w.ctx, e, metav1.UpdateOptions{})
		}
		must(w, err)
		w.eventually("answered by "+to.Name, func() error {
			a, err := w.reach(from, "tcp", vip)
			if err == nil && a.Reply.Server != to.Name {
				err = errors.New(a.Reply.Server + " answers")
			}
			return err
		})
	}
	must(w, api.Delete(w.ctx, svc.Name, metav1.DeleteOptions{}))
	w.eventually("refused without them", func() error { return w.fails(from, "tcp", vip, probe.Refused) })
}

// onPort is a pw-server on another port than usual, by its name.
func onPort(name, node, portName string, number int32, labels map[string]string) *corev1.Pod {
	p := pod(name, node, labels)
	c := &p.Spec.Containers[0]
	c.Args = []string{"-port", fmt.Sprint(number)}
	c.Ports = []corev1.ContainerPort{{Name: portName, ContainerPort: number}}
	c.ReadinessProbe.TCPSocket.Port = intstr.FromInt32(number)
	return p
}

// A port whose slices say different numbers, and a slice of another port for
// the same address.
func (s *servicesWorld) slicesOfOnePort(w *world) {
	web := s.web[w.nodes[0].name]
	other := w.run(w.ns, onPort("slices-9091", w.nodes[1].name, "web", 9091, nil))[0]
	svc := w.service("slices", "", func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{{Name: "one", Port: 80}, {Name: "two", Port: 81}}
	})
	for i, c := range []struct {
		portName, ip string
		number       int32
	}{{"one", web.Status.PodIP, port}, {"one", other.Status.PodIP, 9091}, {"two", other.Status.PodIP, 9091}} {
		_, err := w.api.DiscoveryV1().EndpointSlices(w.ns).Create(w.ctx, &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: fmt.Sprintf("slices-%d", i), Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{c.ip}}},
			Ports:       []discoveryv1.EndpointPort{{Name: &c.portName, Port: &c.number}},
		}, metav1.CreateOptions{})
		must(w, err)
	}
	for _, n := range w.nodes {
		from := inPod(s.web[n.name])
		for service, want := range map[int32][]string{80: {other.Name, web.Name}, 81: {other.Name}} {
			w.eventually(fmt.Sprintf("port %d from %s", service, n.name), func() error {
				list, err := w.calls(from, probe.Call{Proto: "tcp", Target: at(svc.Spec.ClusterIP, service), Servers: len(want), Most: 60})
				seen := map[string]bool{}
				for _, a := range list {
					err = errors.Join(err, attemptError(a))
					if a.OK {
						seen[a.Reply.Server] = true
					}
				}
				if have := slices.Sorted(maps.Keys(seen)); err == nil && !slices.Equal(have, want) {
					err = fmt.Errorf("answered by %v, want %v", have, want)
				}
				return err
			})
		}
	}
}

// Each port of a service has the pods that have a port of its target's name,
// as they come and go.
func (s *servicesWorld) portsComeAndGo(w *world) {
	app := map[string]string{"app": "come-and-go"}
	svc := w.service("come-and-go", "come-and-go", func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{{Name: "one", Port: 80, TargetPort: intstr.FromString("one")}, {Name: "two", Port: 81, TargetPort: intstr.FromString("two")}}
	})
	expect := func(one, two string) {
		w.Helper()
		for _, n := range w.nodes {
			from := inPod(s.web[n.name])
			for service, server := range map[int32]string{80: one, 81: two} {
				for _, ip := range svc.Spec.ClusterIPs {
					w.eventually(fmt.Sprintf("port %d of %s from %s: %q", service, ip, n.name, server), func() error {
						if server == "" {
							return w.fails(from, "tcp", at(ip, service), probe.Refused)
						}
						a, err := w.reach(from, "tcp", at(ip, service))
						if err == nil && a.Reply.Server != server {
							err = errors.New(a.Reply.Server + " answers")
						}
						return err
					})
				}
			}
		}
	}
	expect("", "")
	w.run(w.ns, onPort("has-one", w.nodes[0].name, "one", 8080, app))
	expect("has-one", "")
	w.run(w.ns, onPort("has-two", w.nodes[1].name, "two", 9090, app))
	expect("has-one", "has-two")
	w.remove(w.ns, "has-one")
	expect("", "has-two")
	w.remove(w.ns, "has-two")
	expect("", "")
}

// One port of both protocols, then of one, then of the other.
func (s *servicesWorld) protocolsChange(w *world) {
	svc := w.service("protocols", "web", nil)
	both := svc.Spec.Ports
	expect := func(serves map[string]bool) {
		w.Helper()
		for _, from := range s.sources(w) {
			for _, ip := range svc.Spec.ClusterIPs {
				for _, proto := range []string{"tcp", "udp"} {
					w.eventually(fmt.Sprintf("%s %s from %s: %v", proto, ip, from.name, serves[proto]), func() error {
						if !serves[proto] {
							return w.fails(from, proto, at(ip, 80), probe.Refused)
						}
						_, err := w.reach(from, proto, at(ip, 80))
						return err
					})
				}
			}
		}
	}
	expect(map[string]bool{"tcp": true, "udp": true})
	w.edit(svc.Name, func(s *corev1.Service) { s.Spec.Ports = both[:1] })
	expect(map[string]bool{"tcp": true})
	w.edit(svc.Name, func(s *corev1.Service) { s.Spec.Ports = both[1:] })
	expect(map[string]bool{"udp": true})
}

// Services deleted by one request, but for one.
func (s *servicesWorld) deleteCollection(w *world) {
	var all []*corev1.Service
	for i := range 3 {
		all = append(all, w.service(fmt.Sprintf("collected-%d", i), "web", func(s *corev1.Service) {
			s.Labels = map[string]string{"collected": fmt.Sprint(i < 2)}
		}))
		s.everywhereServes(w, all[i])
	}
	must(w, w.api.CoreV1().RESTClient().Delete().Namespace(w.ns).Resource("services").Param("labelSelector", "collected=true").Do(w.ctx).Error())
	for _, from := range s.sources(w) {
		for _, svc := range all[:2] {
			w.eventually("nobody's", func() error { return w.fails(from, "tcp", at(svc.Spec.ClusterIP, 80), probe.Timeout) })
		}
		w.first(from, at(all[2].Spec.ClusterIP, 80))
	}
}

// The API server answers by its service's address and is who it says.
func (s *servicesWorld) secureAPI(w *world) {
	svc, err := w.api.CoreV1().Services("default").Get(w.ctx, "kubernetes", metav1.GetOptions{})
	must(w, err)
	ca, err := os.ReadFile(w.config.CAFile)
	must(w, err)
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		w.Fatalf("no certificate in %s", w.config.CAFile)
	}
	for _, n := range w.nodes {
		client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
			DialContext: w.dialIn(n.name), DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "kubernetes.default.svc"},
		}}
		r, err := client.Get("https://" + at(svc.Spec.ClusterIP, svc.Spec.Ports[0].Port) + "/version")
		if err != nil {
			w.Errorf("%s: %v", n.name, err)
			continue
		}
		body, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || !strings.Contains(string(body), "gitVersion") {
			w.Errorf("%s: %d %s (%v)", n.name, r.StatusCode, body, err)
		}
	}
	slices, err := w.api.DiscoveryV1().EndpointSlices("default").List(w.ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	must(w, err)
	if len(slices.Items) == 0 || len(slices.Items[0].Endpoints) == 0 {
		w.Errorf("no endpoint of the API server: %+v", slices.Items)
	}
}

// lookup asks a pod's resolver until it says these addresses.
func (w *world) lookup(from *corev1.Pod, name string, v4, v6 []string) {
	w.Helper()
	w.eventually(name+" by "+from.Name, func() error {
		out, err := w.output(w.ctx, inPod(from), "pw-client", "lookup", "-timeout", "10s", name)
		var got probe.LookupReport
		if e := json.Unmarshal(out, &got); e != nil {
			return errors.Join(err, e)
		}
		if !slices.Equal(got.A, v4) || !slices.Equal(got.AAAA, v6) {
			return fmt.Errorf("%+v, want %v and %v", got, v4, v6)
		}
		return nil
	})
}

// A pod with a host name and a subdomain has a name for others, and its own
// for itself; what an ExternalName leads to may change.
func (s *servicesWorld) hostNames(w *world) {
	p := pod("named", w.nodes[0].name, map[string]string{"app": "named"})
	p.Spec.Hostname, p.Spec.Subdomain = "querier", "sub"
	w.service("sub", "named", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	p = w.run(w.ns, p)[0]
	v4, v6 := []string{p.Status.PodIPs[0].IP}, []string{p.Status.PodIPs[1].IP}
	for _, n := range w.nodes {
		w.lookup(s.web[n.name], "querier.sub", v4, v6)
		w.lookup(s.web[n.name], "querier.sub."+w.ns+".svc.cluster.local.", v4, v6)
		w.lookup(s.web[n.name], "sub", v4, v6)
	}
	w.lookup(p, "querier", v4, v6) // by /etc/hosts
	a, b := w.service("alias-a", "web", nil), w.service("alias-b", "web", nil)
	name := func(s *corev1.Service) string { return s.Name + "." + w.ns + ".svc.cluster.local" }
	w.service("alias", "", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: name(a)}
	})
	from := s.web[w.nodes[1].name]
	w.lookup(from, "alias", a.Spec.ClusterIPs[:1], a.Spec.ClusterIPs[1:])
	w.edit("alias", func(s *corev1.Service) { s.Spec.ExternalName = name(b) })
	w.lookup(from, "alias", b.Spec.ClusterIPs[:1], b.Spec.ClusterIPs[1:])
}

// A pod that names its resolver itself: the service's address, and a domain.
func (s *servicesWorld) ownResolver(w *world) {
	dns, err := w.api.CoreV1().Services(system).Get(w.ctx, "kube-dns", metav1.GetOptions{})
	must(w, err)
	target := w.service("resolved", "web", nil)
	p := pod("own-resolver", w.nodes[2].name, nil)
	p.Spec.DNSPolicy = corev1.DNSNone
	p.Spec.DNSConfig = &corev1.PodDNSConfig{Nameservers: []string{dns.Spec.ClusterIP}, Searches: []string{w.ns + ".svc.cluster.local"}}
	p = w.run(w.ns, p)[0]
	w.lookup(p, "resolved", target.Spec.ClusterIPs[:1], target.Spec.ClusterIPs[1:])
	if _, err := w.reach(inPod(p), "tcp", "resolved:80"); err != nil {
		w.Error(err)
	}
}

// The command names pods of all nodes by the agent, and by a kubeconfig where
// no agent answers.
func (s *servicesWorld) namesByKubeconfig(w *world) {
	one, two := w.nodes[0], w.nodes[1]
	to := w.run(w.ns, pod("named-remote", two.name, map[string]string{"app": "named-remote"}))[0]
	svc := w.service("named-remote", "named-remote", nil)
	from := s.web[one.name]
	w.first(inPod(from), at(svc.Spec.ClusterIP, 80))
	target, want := w.ns+"/"+to.Name, fmt.Sprintf("%s/%s (node %s)", w.ns, to.Name, two.name)
	for how, args := range map[string][]string{
		"by the agent":    nil,
		"by a kubeconfig": {"--socket", "/nobody", "--kubeconfig", w.cluster.Kubeconfig()},
	} {
		out, err := w.output(w.ctx, onNode(one), append([]string{"podweir", "flows", "-o", "wide", "--to", target}, args...)...)
		if err != nil {
			w.Errorf("%s: %v", how, err)
			continue
		}
		for _, word := range []string{want, w.ns + "/" + from.Name, w.ns + "/named-remote:tcp"} {
			if !strings.Contains(string(out), word) {
				w.Errorf("%s: podweir flows does not say %q:\n%s", how, word, out)
			}
		}
	}
}

// Agents ask a server that can for lists as streams: neither side holds one as
// a whole.
func listsAreStreamed(w *world) {
	f, err := os.Open(w.cluster.AuditLog())
	must(w, err)
	defer f.Close()
	streamed := map[string]bool{}
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<22)
	for in.Scan() {
		var e struct {
			Verb, UserAgent, RequestURI string
			ObjectRef                   *struct{ Resource string }
		}
		if json.Unmarshal(in.Bytes(), &e) == nil && e.ObjectRef != nil && e.Verb == "watch" && strings.HasPrefix(e.UserAgent, "podweir-agent") &&
			strings.Contains(e.RequestURI, "sendInitialEvents=true") {
			streamed[e.ObjectRef.Resource] = true
		}
	}
	must(w, in.Err())
	for _, what := range []string{"nodes", "namespaces", "pods", "services", "endpointslices", "networkpolicies", "servicecidrs"} {
		if !streamed[what] {
			w.Errorf("no agent has asked for %s as a stream", what)
		}
	}
}
