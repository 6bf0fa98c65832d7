package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/podweir/podweir/internal/maps"
)

const (
	vip4 = "10.98.235.247"
	vip6 = "fd00:10:98::f7"
)

func svc(mod ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			ClusterIP:  vip4,
			ClusterIPs: []string{vip4},
			Ports:      []corev1.ServicePort{{Port: 80}},
		},
	}
	for _, m := range mod {
		m(s)
	}
	return s
}

// manifest parses slices written as users write them: with defaults unsaid.
func manifest(t *testing.T, docs ...string) []*discoveryv1.EndpointSlice {
	t.Helper()
	var out []*discoveryv1.EndpointSlice
	for i, d := range docs {
		s := &discoveryv1.EndpointSlice{}
		if err := yaml.UnmarshalStrict([]byte(d), s); err != nil {
			t.Fatal(err)
		}
		s.Namespace = "default"
		if s.Name == "" {
			s.Name = fmt.Sprintf("web-%d", i)
		}
		out = append(out, s)
	}
	return out
}

// describe writes the cluster IPs of a Compiled as one line a port:
// "port proto vip:port -> backends".
func describe(c Compiled) []string {
	var out []string
	for _, p := range c.Ports {
		var front, back []string
		for _, f := range p.Frontends {
			if f.Kind.External() {
				continue
			}
			front = append(front, netip.AddrPortFrom(maps.FromAddr(f.Key.Addr), f.Key.Port).String())
		}
		for _, b := range p.Internal {
			back = append(back, netip.AddrPortFrom(maps.FromAddr(b.Addr), b.Port).String())
		}
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s -> %s",
			p.PortName, p.Protocol, strings.Join(front, ","), strings.Join(back, ","))))
	}
	return out
}

const basic = `
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- addresses: [10.244.158.65]
- addresses: [10.244.80.66]
`

func TestCompile(t *testing.T) {
	node := Node{Name: "a", Zone: "east"}
	tests := []struct {
		name   string
		svc    *corev1.Service
		slices []string
		want   []string
		errs   []string // substrings, one for each error
	}{
		{
			name:   "one port, sorted backends",
			svc:    svc(),
			slices: []string{basic},
			want:   []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8080"},
		},
		{
			name: "no slices: a frontend without backends",
			svc:  svc(),
			want: []string{"TCP 10.98.235.247:80 ->"},
		},
		{
			name: "clusterIP alone",
			svc:  svc(func(s *corev1.Service) { s.Spec.ClusterIPs = nil }),
			want: []string{"TCP 10.98.235.247:80 ->"},
		},
		{
			name:   "the cluster IP of a LoadBalancer",
			svc:    svc(func(s *corev1.Service) { s.Spec.Type, s.Spec.Ports[0].NodePort = "LoadBalancer", 30080 }),
			slices: []string{basic},
			want:   []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8080"},
		},
		{
			name: "TCP, UDP and SCTP on one number are independent",
			svc: svc(func(s *corev1.Service) {
				s.Spec.Ports = []corev1.ServicePort{
					{Name: "dns-tcp", Port: 53, Protocol: "TCP"},
					{Name: "dns", Port: 53, Protocol: "UDP"},
					{Name: "sig", Port: 53, Protocol: "SCTP"},
				}
			}),
			slices: []string{`
addressType: IPv4
ports: [{name: dns, port: 5353, protocol: UDP}]
endpoints: [{addresses: [10.244.80.66]}]
`, `
addressType: IPv4
ports: [{name: dns-tcp, port: 5354}]
endpoints: [{addresses: [10.244.158.65]}]
`, `
addressType: IPv4
ports: [{name: sig, port: 5355, protocol: SCTP}]
endpoints: [{addresses: [10.244.158.65]}]
`},
			want: []string{
				"dns-tcp TCP 10.98.235.247:53 -> 10.244.158.65:5354",
				"dns UDP 10.98.235.247:53 -> 10.244.80.66:5353",
				"sig SCTP 10.98.235.247:53 -> 10.244.158.65:5355",
			},
		},
		{
			name:   "a name with another protocol is another port",
			svc:    svc(func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "UDP" }),
			slices: []string{basic},
			want:   []string{"UDP 10.98.235.247:80 ->"},
		},
		{
			name: "several ports in one slice, several slices for one port",
			svc: svc(func(s *corev1.Service) {
				s.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80}, {Name: "admin", Port: 9000}}
			}),
			slices: []string{`
addressType: IPv4
ports: [{name: http, port: 8080}, {name: admin, port: 9001}, {name: other, port: 1}]
endpoints: [{addresses: [10.244.80.66]}]
`, `
addressType: IPv4
ports: [{name: http, port: 8081}]
endpoints: [{addresses: [10.244.158.65]}]
`},
			want: []string{
				"http TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8081",
				"admin TCP 10.98.235.247:9000 -> 10.244.80.66:9001",
			},
		},
		{
			name: "an endpoint is its address and port: one address with two ports, duplicates once",
			svc:  svc(),
			slices: []string{basic, basic, `
addressType: IPv4
ports: [{port: 8081}]
endpoints: [{addresses: [10.244.80.66]}]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.80.66:8081,10.244.158.65:8080"},
		},
		{
			name: "a duplicate is usable if either slice says so",
			svc:  svc(),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.80.66], conditions: {ready: false}}
- {addresses: [10.244.80.67], conditions: {ready: true}}
- {addresses: [10.244.80.68], conditions: {ready: false}}
`, `
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.80.66], conditions: {ready: true}}
- {addresses: [10.244.80.67], conditions: {ready: false}}
- {addresses: [10.244.80.68], conditions: {ready: false}}
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.80.67:8080"},
		},
		{
			name: "conditions: draining ones when none is ready",
			svc:  svc(),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.80.66], conditions: {ready: false, serving: true, terminating: true}}
- {addresses: [10.244.80.67], conditions: {ready: false, serving: false, terminating: true}}
- {addresses: [10.244.80.68], conditions: {ready: false}}
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080"},
		},
		{
			name: "publishNotReadyAddresses",
			svc:  svc(func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true }),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.80.66], conditions: {ready: false}}]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080"},
		},
		{
			name: "dual stack: a port for each family",
			svc:  svc(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{vip6, vip4} }),
			slices: []string{basic, `
addressType: IPv6
ports: [{port: 8080}]
endpoints: [{addresses: ["fd00:10:244:9e::65"]}, {addresses: ["fd00:10:244:50::66"]}]
`},
			want: []string{
				"TCP [fd00:10:98::f7]:80 -> [fd00:10:244:50::66]:8080,[fd00:10:244:9e::65]:8080",
				"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8080",
			},
		},
		{
			name:   "slices of the other family alone",
			svc:    svc(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = vip6, []string{vip6} }),
			slices: []string{basic},
			want:   []string{"TCP [fd00:10:98::f7]:80 ->"},
		},
		{
			name: "internalTrafficPolicy Local",
			svc:  svc(func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal) }),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.80.66], nodeName: a}, {addresses: [10.244.158.65], nodeName: b}]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080"},
		},
		{
			name: "zone hints",
			svc:  svc(),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.80.66], hints: {forZones: [{name: west}]}}
- {addresses: [10.244.158.65], hints: {forZones: [{name: east}]}}
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.158.65:8080"},
		},
		{
			name: "slices of another proxy and headless ones are not looked at",
			svc:  svc(),
			slices: []string{`
metadata: {labels: {service.kubernetes.io/headless: ""}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.80.66]}]
`, `
metadata: {labels: {service.kubernetes.io/service-proxy-name: other}}
addressType: FQDN
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.80.67]}]
`},
			want: []string{"TCP 10.98.235.247:80 ->"},
		},
		{
			name: "only the first address of an endpoint counts",
			svc:  svc(),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.80.66, 10.244.80.67]}]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080"},
		},

		// What cannot be used is named; the rest is.
		{
			name: "slice of names",
			svc:  svc(),
			slices: []string{basic, `
metadata: {name: names}
addressType: FQDN
ports: [{port: 8080}]
endpoints: [{addresses: [web.example.com]}]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8080"},
			errs: []string{`EndpointSlice default/names: addressType: "FQDN" is neither`},
		},
		{
			name: "bad addresses",
			svc:  svc(),
			slices: []string{`
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- addresses: [10.244.80.066]
- addresses: ["fd00::1"]
- addresses: []
- addresses: [127.0.0.1]
- addresses: [10.244.80.66]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080"},
			errs: []string{
				`EndpointSlice default/web-0: endpoints[0].addresses[0]: "10.244.80.066" is no IP address`,
				`endpoints[1].addresses[0]: fd00::1 in a slice of IPv4 addresses`,
				`endpoints[2].addresses: is empty`,
				`endpoints[3].addresses[0]: 127.0.0.1 is unspecified, loopback`,
			},
		},
		{
			name: "mapped, zoned and broadcast addresses",
			svc:  svc(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{vip6} }),
			slices: []string{`
addressType: IPv6
ports: [{port: 8080}]
endpoints:
- addresses: ["::ffff:10.244.80.66"]
- addresses: ["fd00::1%eth0"]
- addresses: ["fe80::1"]
- addresses: ["ff02::1"]
`, `
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [255.255.255.255]}]
`},
			want: []string{"TCP [fd00:10:98::f7]:80 ->"},
			errs: []string{"IPv4-mapped IPv6 address; write 10.244.80.66", "has a zone", "link-local", "multicast", "broadcast"},
		},
		{
			name: "bad slice ports",
			svc:  svc(),
			slices: []string{`
addressType: IPv4
ports: [{}, {port: 0}, {port: 65536}, {port: 1, protocol: DCCP}, {port: 8080}]
endpoints: [{addresses: [10.244.80.66]}]
`},
			want: []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080"},
			errs: []string{"ports[0].port: is missing", "ports[1].port: 0 is", "ports[2].port: 65536", `ports[3].protocol: "DCCP"`},
		},
		{
			name: "bad service ports",
			svc: svc(func(s *corev1.Service) {
				s.Spec.Ports = []corev1.ServicePort{
					{Name: "a", Port: 0}, {Name: "b", Port: 80, Protocol: "ICMP"}, {Name: "", Port: 80},
					{Name: "d", Port: 80}, {Name: "", Port: 81},
				}
			}),
			slices: []string{basic},
			want:   []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8080"},
			errs: []string{
				"Service default/web: spec.ports[0].port: 0 is", `spec.ports[1].protocol: "ICMP"`,
				"spec.ports[3]: TCP port 80 is spec.ports[2] already", `spec.ports[4].name: "" is the name of spec.ports[2]`,
			},
		},
		{
			name:   "one bad cluster IP",
			svc:    svc(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.98.0", vip4, vip4} }),
			slices: []string{basic},
			want:   []string{"TCP 10.98.235.247:80 -> 10.244.80.66:8080,10.244.158.65:8080"},
			errs:   []string{`Service default/web: spec.clusterIPs[0]: "10.98.0" is no IP address`, "spec.clusterIPs[2]: 10.98.235.247 stands there twice"},
		},
		{
			name: "no good cluster IP",
			svc:  svc(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "x", nil }),
			errs: []string{`Service default/web: spec.clusterIP: "x" is no IP address`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Compile(tt.svc, manifest(t, tt.slices...), node)
			if d := cmp.Diff(tt.want, describe(got)); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
			checkErrors(t, err, tt.errs)
		})
	}
}

func checkErrors(t *testing.T, err error, want []string) {
	t.Helper()
	var got []string
	if err != nil {
		got = strings.Split(err.Error(), "\n")
	}
	if len(got) != len(want) {
		t.Fatalf("got %d errors, want %d:\n%s", len(got), len(want), strings.Join(got, "\n"))
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("error %d: got %q, want it to contain %q", i, got[i], want[i])
		}
	}
}

func TestSkipped(t *testing.T) {
	tests := map[string]func(*corev1.Service){
		"headless":       func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} },
		"headless, old":  func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", nil },
		"ExternalName":   func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName },
		"no address yet": func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil },
		"other proxy": func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "mesh"}
		},
		"headless by label": func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/headless": ""}
		},
	}
	for name, mod := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Compile(svc(mod), manifest(t, basic, "addressType: FQDN"), Node{})
			if err != nil {
				t.Error(err)
			}
			if d := cmp.Diff(Compiled{}, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
}

func TestOwnedAddrs(t *testing.T) {
	got, err := Compile(svc(func(s *corev1.Service) { s.Spec.ClusterIPs, s.Spec.Ports = []string{vip4, vip6}, nil }), nil, Node{})
	if err != nil {
		t.Fatal(err)
	}
	want := []netip.Addr{netip.MustParseAddr(vip4), netip.MustParseAddr(vip6)}
	if !slices.Equal(got.Addrs, want) {
		t.Errorf("got %v, want %v", got.Addrs, want)
	}
	if k := OwnerKey(want[0]); k.Port != 0 || k.Proto != 0 || maps.FromAddr(k.Addr) != want[0] {
		t.Errorf("owner key %+v", k)
	}
}

func TestPortKeyIsUniqueAndStable(t *testing.T) {
	s := svc(func(s *corev1.Service) {
		s.Spec.ClusterIPs = []string{vip4, vip6}
		s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 53, Protocol: "UDP"}, {Name: "b", Port: 53}}
	})
	got, err := Compile(s, nil, Node{})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[PortKey]bool{}
	for i := range got.Ports {
		seen[got.Ports[i].Key()] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d keys for 4 ports: %v", len(seen), seen)
	}
	if k := got.Ports[0].Key().String(); k != "default/web:a/UDP/IPv4" {
		t.Errorf("key prints as %s", k)
	}
}
