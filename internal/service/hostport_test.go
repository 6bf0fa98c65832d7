package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
)

func TestCompileHostPorts(t *testing.T) {
	addrs := func(list ...string) (out []netip.Addr) {
		for _, s := range list {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	node := addrs("169.254.20.10", "172.31.0.2", "192.0.2.7", "fd00:172:31::2")
	pod := addrs("10.244.80.65", "fd00:10:244:50::65")
	for _, c := range []struct {
		name   string
		pod    []netip.Addr
		hostIP string
		proto  corev1.Protocol
		want   []string // name frontends -> backend
		err    string
	}{
		{"all addresses of both families", pod, "", "TCP", []string{
			"8888 IPv4 172.31.0.2:8888/6 192.0.2.7:8888/6 -> 10.244.80.65:8080", "8888 IPv6 [fd00:172:31::2]:8888/6 -> [fd00:10:244:50::65]:8080",
		}, ""},
		{"UDP", pod[:1], "", "UDP", []string{"8888 IPv4 172.31.0.2:8888/17 192.0.2.7:8888/17 -> 10.244.80.65:8080"}, ""},
		{"SCTP to the only family", pod[1:], "", "SCTP", []string{"8888 IPv6 [fd00:172:31::2]:8888/132 -> [fd00:10:244:50::65]:8080"}, ""},
		{"all of IPv4", pod, "0.0.0.0", "TCP", []string{"0.0.0.0:8888 IPv4 172.31.0.2:8888/6 192.0.2.7:8888/6 -> 10.244.80.65:8080"}, ""},
		{"all of IPv6", pod, "::", "TCP", []string{"[::]:8888 IPv6 [fd00:172:31::2]:8888/6 -> [fd00:10:244:50::65]:8080"}, ""},
		{"one address", pod, "192.0.2.7", "TCP", []string{"192.0.2.7:8888 IPv4 192.0.2.7:8888/6 -> 10.244.80.65:8080"}, ""},
		{"one of IPv6", pod, "fd00:172:31::2", "TCP", []string{"[fd00:172:31::2]:8888 IPv6 [fd00:172:31::2]:8888/6 -> [fd00:10:244:50::65]:8080"}, ""},
		{"a link-local one by name", pod, "169.254.20.10", "TCP", []string{"169.254.20.10:8888 IPv4 169.254.20.10:8888/6 -> 10.244.80.65:8080"}, ""},
		{"another host's", pod, "172.31.0.3", "TCP", nil, "host port 172.31.0.3:8888/TCP: this node has no address 172.31.0.3"},
		{"loopback", pod, "127.0.0.1", "TCP", []string{"127.0.0.1:8888 IPv4 127.0.0.1:8888/6 -> 10.244.80.65:8080"}, ""},
		{"loopback of IPv6", pod, "::1", "TCP", []string{"[::1]:8888 IPv6 [::1]:8888/6 -> [fd00:10:244:50::65]:8080"}, ""},
		{"loopback without sockets", pod, "127.0.0.1", "TCP", nil, "--cgroup"},
		{"loopback, UDP", pod, "127.0.0.1", "UDP", nil, "host port 127.0.0.1:8888/UDP: loopback addresses have ports of TCP alone"},
		{"loopback, SCTP", pod, "::1", "SCTP", nil, "loopback"},
		{"a family the pod lacks", pod[1:], "192.0.2.7", "TCP", nil, "the pod has no address of the family"},
		{"no protocol", pod, "", "ICMP", nil, "ICMP"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := PortMapping{Port: 8888, Target: 8080, Protocol: c.proto}
			if c.hostIP != "" {
				m.HostIP = netip.MustParseAddr(c.hostIP)
			}
			created := time.Unix(7, 0)
			got, err := CompileHostPorts(Pod("default", "web"), created, []PodPorts{{c.pod, []PortMapping{m}}}, node, c.name != "loopback without sockets")
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if got.Owner != Pod("default", "web") || got.Created != created || len(got.Addrs) > 0 {
				t.Errorf("owner %v, created %v, addresses %v", got.Owner, got.Created, got.Addrs)
			}
			var text []string
			for _, p := range got.Ports {
				line := fmt.Sprintf("%s %s", p.PortName, p.Family)
				for _, f := range p.Frontends {
					line += fmt.Sprintf(" %s/%d", netip.AddrPortFrom(maps.FromAddr(f.Key.Addr), f.Key.Port), f.Key.Proto)
					if f.Kind != HostPort {
						t.Errorf("kind %s", f.Kind)
					}
				}
				if !slices.Equal(p.Cluster, p.External) || len(p.Cluster) != 1 || len(p.Internal) > 0 || !p.KeepSource ||
					p.Owner != got.Owner || p.Protocol != c.proto || len(p.States) != 1 || p.States[0].Backend != p.Cluster[0] ||
					p.States[0].Flags != maps.BackendCluster|maps.BackendExt|maps.BackendServing || p.Maglev != 0 {
					t.Errorf("port %+v", p)
				}
				text = append(text, line+fmt.Sprintf(" -> %s", netip.AddrPortFrom(maps.FromAddr(p.Cluster[0].Addr), p.Cluster[0].Port)))
			}
			if !slices.Equal(text, c.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(text, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

// Ports of several interfaces, in an order of their own; one mistake leaves
// the others.
func TestCompileHostPortsOfSeveral(t *testing.T) {
	ip := netip.MustParseAddr
	node := []netip.Addr{ip("172.31.0.2")}
	list := []PodPorts{
		{[]netip.Addr{ip("10.244.80.65")}, []PortMapping{
			{Port: 90, Target: 1, Protocol: "UDP"}, {Port: 90, Target: 2, Protocol: "TCP"}, {HostIP: ip("192.0.2.1"), Port: 80, Target: 3, Protocol: "TCP"},
		}},
		{[]netip.Addr{ip("10.244.80.66")}, []PortMapping{{Port: 80, Target: 4, Protocol: "TCP"}}},
	}
	one, err := CompileHostPorts(Pod("default", "web"), time.Time{}, list, node, false)
	if err == nil || len(one.Ports) != 3 {
		t.Fatalf("%v, %d ports", err, len(one.Ports))
	}
	slices.Reverse(list)
	two, _ := CompileHostPorts(Pod("default", "web"), time.Time{}, list, node, false)
	seen := map[PortKey]bool{}
	for i := range one.Ports {
		k := one.Ports[i].Key()
		if seen[k] || two.Ports[i].Key() != k {
			t.Errorf("%s: twice, or %s in the other order", k, two.Ports[i].Key())
		}
		seen[k] = true
	}
	if one.Ports[0].PortName != "80" || one.Ports[0].Cluster[0].Addr != maps.ToAddr(ip("10.244.80.66")) {
		t.Errorf("first %+v", one.Ports[0])
	}
}
