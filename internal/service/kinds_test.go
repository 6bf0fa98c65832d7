package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/internal/maps"
)

// outline writes a port in words: its frontends, then what it has of sets
// (the last byte of each address) and settings.
func outline(p *Port) string {
	var out []string
	for _, f := range p.Frontends {
		out = append(out, fmt.Sprintf("%s %s", f.Kind, netip.AddrPortFrom(maps.FromAddr(f.Key.Addr), f.Key.Port)))
	}
	list := func(name string, set []maps.Backend, noLocal bool) {
		var s []string
		for _, b := range set {
			s = append(s, fmt.Sprint(b.Addr.B[15]))
		}
		if noLocal {
			s = append(s, "none-here")
		}
		if len(s) > 0 {
			out = append(out, name+"="+strings.Join(s, "+"))
		}
	}
	list("in", p.Internal, p.NoLocalInternal)
	list("cluster", p.Cluster, false)
	list("ext", p.External, p.NoLocalExternal)
	if p.KeepSource {
		out = append(out, "keep")
	}
	if p.Affinity != 0 {
		out = append(out, fmt.Sprintf("affinity=%d", p.Affinity))
	}
	if p.Restricted {
		out = append(out, fmt.Sprintf("from=%v", p.SourceRanges))
	}
	return strings.Join(out, ", ")
}

// The endpoints of a service: 66 and 67 on node a, which is this node, 165 and
// 166 on node b.
func spread(state66, state67, state165, state166 string) string {
	var b strings.Builder
	b.WriteString("addressType: IPv4\nports: [{port: 8080}]\nendpoints:\n")
	for _, e := range []struct{ addr, node, state string }{
		{"10.244.80.66", "a", state66}, {"10.244.80.67", "a", state67},
		{"10.244.158.165", "b", state165}, {"10.244.158.166", "b", state166},
	} {
		conditions := map[string]string{
			"ready": "{ready: true}", "not": "{ready: false}", "dead": "{ready: false, serving: false, terminating: true}",
			"draining": "{ready: false, serving: true, terminating: true}",
			"serving":  "{ready: false, serving: true}",
		}[e.state]
		if conditions == "" {
			continue
		}
		fmt.Fprintf(&b, "- {addresses: [%s], nodeName: %s, conditions: %s}\n", e.addr, e.node, conditions)
	}
	return b.String()
}

func typed(kind corev1.ServiceType, mod ...func(*corev1.Service)) *corev1.Service {
	return svc(append([]func(*corev1.Service){func(s *corev1.Service) {
		s.Spec.Type = kind
		if kind != corev1.ServiceTypeClusterIP {
			s.Spec.Ports[0].NodePort = 30080
		}
	}}, mod...)...)
}

func localExternal(s *corev1.Service) {
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

func localInternal(s *corev1.Service) {
	s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
}

func ingress(list ...corev1.LoadBalancerIngress) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = list }
}

func ranges(list ...string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = list }
}

func dual(s *corev1.Service) { s.Spec.ClusterIPs = []string{vip4, vip6} }

func TestKinds(t *testing.T) {
	const (
		cip = "ClusterIP 10.98.235.247:80"
		np  = cip + ", NodePort 0.0.0.0:30080"
		lb  = np + ", LoadBalancer 192.0.2.1:80"
	)
	node := Node{Name: "a", NodePorts: PortRange{30000, 32767}}
	all := spread("ready", "ready", "ready", "ready")
	here := spread("ready", "not", "ready", "not")
	elsewhere := spread("not", "not", "ready", "ready")
	vip := ingress(corev1.LoadBalancerIngress{IP: "192.0.2.1"})
	tests := []struct {
		name   string
		svc    *corev1.Service
		slices string
		want   []string
		errs   []string
	}{
		{"S1 ClusterIP", typed("ClusterIP"), all, []string{cip + ", in=66+67+165+166"}, nil},
		{"S2 no endpoint anywhere", typed("NodePort", localExternal, localInternal), spread("not", "dead", "not", "serving"), []string{np + ", keep"}, nil},
		{"S3 internal Local, none here", typed("ClusterIP", localInternal), elsewhere, []string{cip + ", in=none-here"}, nil},
		{"S3 with external frontends", typed("NodePort", localInternal), elsewhere, []string{np + ", in=none-here, cluster=165+166, ext=165+166"}, nil},
		{"S4, S5 external Local, none here", typed("NodePort", localExternal), elsewhere, []string{np + ", in=165+166, cluster=165+166, ext=none-here, keep"}, nil},
		{"S6 external Cluster", typed("NodePort"), all, []string{np + ", in=66+67+165+166, cluster=66+67+165+166, ext=66+67+165+166"}, nil},
		{"S7 external Local", typed("NodePort", localExternal), here, []string{np + ", in=66+165, cluster=66+165, ext=66, keep"}, nil},
		{"S7 both Local", typed("NodePort", localExternal, localInternal), here, []string{np + ", in=66, cluster=66+165, ext=66, keep"}, nil},
		{"S12 source ranges", typed("LoadBalancer", vip, ranges("203.0.113.0/24", " 198.51.100.7/32 ", "203.0.113.9/24")), here,
			[]string{lb + ", in=66+165, cluster=66+165, ext=66+165, from=[203.0.113.0/24 198.51.100.7/32]"}, nil},
		{"S12 source ranges without a load balancer's IP", typed("LoadBalancer", ranges("203.0.113.0/24")), here,
			[]string{np + ", in=66+165, cluster=66+165, ext=66+165"}, nil},
		{"S12 a bad range lets nobody in", typed("LoadBalancer", vip, ranges("203.0.113.0")), "",
			[]string{lb + ", from=[]"}, []string{`Service default/web: spec.loadBalancerSourceRanges[0]: "203.0.113.0" is no range`}},
		{"S12 ranges by family", typed("LoadBalancer", dual, ranges("203.0.113.0/24"),
			ingress(corev1.LoadBalancerIngress{IP: "192.0.2.1"}, corev1.LoadBalancerIngress{IP: "2001:db8::1"})), "",
			[]string{lb + ", from=[203.0.113.0/24]",
				"ClusterIP [fd00:10:98::f7]:80, NodePort [::]:30080, LoadBalancer [2001:db8::1]:80, from=[]"}, nil},
		{"S13 ipMode", typed("LoadBalancer", ingress(
			corev1.LoadBalancerIngress{IP: "192.0.2.9", IPMode: new(corev1.LoadBalancerIPModeProxy)},
			corev1.LoadBalancerIngress{Hostname: "lb.example.com"},
			corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: new(corev1.LoadBalancerIPModeVIP)})), "", []string{lb}, nil},
		{"S14 affinity", typed("ClusterIP", func(s *corev1.Service) { s.Spec.SessionAffinity = "ClientIP" }), "", []string{cip + ", affinity=10800"}, nil},
		{"S14 affinity, timeout given", typed("NodePort", func(s *corev1.Service) {
			s.Spec.SessionAffinity = "ClientIP"
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(60))}}
		}), "", []string{np + ", affinity=60"}, nil},
		{"S15 draining ones", typed("NodePort"), spread("draining", "not", "draining", "dead"), []string{np + ", in=66+165, cluster=66+165, ext=66+165"}, nil},
		{"S15, S17 the Local set falls back on its own", typed("NodePort", localExternal, localInternal), spread("draining", "not", "ready", "draining"),
			[]string{np + ", in=66, cluster=165, ext=66, keep"}, nil},
		{"S15 only draining ones elsewhere", typed("NodePort", localExternal), spread("not", "not", "draining", "not"),
			[]string{np + ", in=165, cluster=165, ext=none-here, keep"}, nil},
		{"S16 hints do not touch Local", typed("NodePort", localExternal), `
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.80.66], nodeName: a, hints: {forNodes: [{name: b}]}}
- {addresses: [10.244.158.165], nodeName: b, hints: {forNodes: [{name: a}]}}
`, []string{np + ", in=165, cluster=165, ext=66, keep"}, nil},
		{"S21 dual stack, one NodePort for both", typed("NodePort", dual), here,
			[]string{np + ", in=66+165, cluster=66+165, ext=66+165", "ClusterIP [fd00:10:98::f7]:80, NodePort [::]:30080"}, nil},
		{"S22 external IPs", typed("ClusterIP", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"172.31.0.2", "198.51.100.1", "172.31.0.2"} }), here,
			[]string{cip + ", ExternalIP 172.31.0.2:80, ExternalIP 198.51.100.1:80, in=66+165, cluster=66+165, ext=66+165"}, nil},
		{"S22 external IPs, Local", typed("ClusterIP", localExternal, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"198.51.100.1"} }), elsewhere,
			[]string{cip + ", ExternalIP 198.51.100.1:80, in=165+166, cluster=165+166, ext=none-here, keep"}, nil},
		{"an address that is both stays restricted", typed("LoadBalancer", vip, ranges("203.0.113.0/24"),
			func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1", vip4} }), "", []string{lb + ", from=[203.0.113.0/24]"}, nil},
		{"a load balancer without NodePorts", typed("LoadBalancer", vip, func(s *corev1.Service) {
			s.Spec.AllocateLoadBalancerNodePorts, s.Spec.Ports[0].NodePort = new(false), 0
		}), "", []string{cip + ", LoadBalancer 192.0.2.1:80"}, nil},
		{"an IP left over from when it was a load balancer", typed("NodePort", vip), "", []string{np}, nil},
		{"the NodePort of a former type", typed("NodePort", func(s *corev1.Service) { s.Spec.Type = "ClusterIP" }), "", []string{cip}, nil},

		{"external IP of another family", typed("ClusterIP", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"2001:db8::9", "x"} }), "", []string{cip},
			[]string{"spec.externalIPs[0]: 2001:db8::9 is not used: the service has no IPv6 cluster IP", `spec.externalIPs[1]: "x" is no IP address`}},
		{"load balancer's IP that is none", typed("LoadBalancer", ingress(corev1.LoadBalancerIngress{IP: "127.0.0.1"})), "", []string{np},
			[]string{"status.loadBalancer.ingress[0].ip: 127.0.0.1 is unspecified, loopback"}},
		{"NodePort outside the range", typed("NodePort", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 8080 }), "", []string{cip},
			[]string{"spec.ports[0].nodePort: 8080 is outside the range of NodePorts 30000-32767"}},
		{"NodePort that is none", typed("NodePort", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 70000 }), "", []string{cip},
			[]string{"spec.ports[0].nodePort: 70000 is no port number"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var docs []string
			if tt.slices != "" {
				docs = []string{tt.slices}
			}
			got, err := Compile(tt.svc, manifest(t, docs...), node)
			var lines []string
			for i := range got.Ports {
				lines = append(lines, outline(&got.Ports[i]))
			}
			if d := cmp.Diff(tt.want, lines); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
			checkErrors(t, err, tt.errs)
			// S22: nothing but cluster IPs is owned on every port.
			for _, a := range got.Addrs {
				if a.String() != vip4 && a.String() != vip6 {
					t.Errorf("%s is owned", a)
				}
			}
		})
	}
}

// What each endpoint is to a port (S23): one that serves and is in no set
// still keeps its flows.
func TestStates(t *testing.T) {
	tests := []struct {
		name   string
		svc    *corev1.Service
		slices string
		want   string
	}{
		{"ClusterIP", typed("ClusterIP"), spread("ready", "not", "ready", "draining"), "66 in ext, 165 in ext, 166"},
		{"external Local", typed("NodePort", localExternal), spread("ready", "dead", "ready", "serving"), "66 in cluster ext, 165 in cluster, 166"},
		{"internal Local", typed("ClusterIP", localInternal), spread("ready", "not", "ready", ""), "66 in ext, 165"},
		{"internal Local, external Cluster", typed("NodePort", localInternal), spread("ready", "", "ready", ""), "66 in cluster ext, 165 cluster ext"},
		{"draining ones used", typed("NodePort", localExternal), spread("draining", "", "ready", ""), "66 ext, 165 in cluster"},
		{"none", typed("ClusterIP"), spread("not", "dead", "", ""), ""},
		{"published before ready", typed("ClusterIP", func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true }), spread("not", "", "", ""), "66 in ext"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := Compile(tt.svc, manifest(t, tt.slices), Node{Name: "a"})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range c.Ports[0].States {
				line := fmt.Sprint(s.Backend.Addr.B[15])
				if s.Flags&maps.BackendIn != 0 {
					line += " in"
				}
				if s.Flags&maps.BackendCluster != 0 {
					line += " cluster"
				}
				if s.Flags&maps.BackendExt != 0 {
					line += " ext"
				}
				if s.Flags&maps.BackendServing == 0 {
					line += " not serving"
				}
				got = append(got, line)
			}
			if s := strings.Join(got, ", "); s != tt.want {
				t.Errorf("got %q, want %q", s, tt.want)
			}
		})
	}
}

// S18, S17: what a health check is told.
func TestHealth(t *testing.T) {
	check := func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 31000 }
	ports := func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "a", Port: 80, TargetPort: intstr.FromInt32(8080)}, {Name: "b", Port: 81, TargetPort: intstr.FromInt32(8081)},
		}
	}
	const twoPorts = `
addressType: IPv4
ports: [{name: a, port: 8080}, {name: b, port: 8081}]
endpoints: [{addresses: [10.244.80.66], nodeName: a}]
`
	const other = `
addressType: IPv6
ports: [{port: 8080}]
endpoints: [{addresses: ["fd00:10:244:50::66"], nodeName: a}]
`
	tests := []struct {
		name   string
		svc    *corev1.Service
		slices []string
		want   *Health
	}{
		{"ready ones here", typed("LoadBalancer", localExternal, check), []string{spread("ready", "ready", "ready", "")}, &Health{31000, 2}},
		{"one address, two ports", typed("LoadBalancer", localExternal, check, ports), []string{twoPorts}, &Health{31000, 1}},
		{"both families are one pod", typed("LoadBalancer", localExternal, check, dual), []string{spread("ready", "", "", ""), other}, &Health{31000, 1}},
		{"draining ones do not count", typed("LoadBalancer", localExternal, check), []string{spread("draining", "not", "ready", "")}, &Health{31000, 0}},
		{"external Cluster", typed("LoadBalancer", check), []string{spread("ready", "", "", "")}, nil},
		{"NodePort", typed("NodePort", localExternal, check), []string{spread("ready", "", "", "")}, nil},
		{"no port", typed("LoadBalancer", localExternal), []string{spread("ready", "", "", "")}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := Compile(tt.svc, manifest(t, tt.slices...), Node{Name: "a"})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, c.Health); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
}

// Only sets that clients outside use have a Maglev table.
func TestMaglevOfPorts(t *testing.T) {
	all := manifest(t, spread("ready", "ready", "ready", "ready"))
	for _, tt := range []struct {
		svc  *corev1.Service
		size uint32
		want uint32
	}{
		{typed("ClusterIP"), 0, 0},
		{typed("NodePort"), 0, 1021},
		{typed("NodePort"), 251, 251},
		{typed("ClusterIP", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"198.51.100.1"} }), 0, 1021},
	} {
		c, err := Compile(tt.svc, all, Node{Name: "a", MaglevSize: tt.size})
		if err != nil || c.Ports[0].Maglev != tt.want {
			t.Errorf("%s, %d given: %d, want %d (%v)", tt.svc.Spec.Type, tt.size, c.Ports[0].Maglev, tt.want, err)
		}
	}
	// Every node makes the same table of the same endpoints.
	a, _ := Compile(typed("NodePort"), all, Node{Name: "a"})
	b, _ := Compile(typed("NodePort"), all, Node{Name: "b"})
	if !slices.Equal(Maglev(a.Ports[0].External, 1021), Maglev(b.Ports[0].External, 1021)) {
		t.Error("two nodes, two tables")
	}
}
