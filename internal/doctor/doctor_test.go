package doctor

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/firewall"
	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/netfilter"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/oldcni"
)

const veth = "pw0123456789a"

// fakeHost is a node on which all is well.
type fakeHost struct {
	programs map[int][]string
	pinned   map[int][]string
	rules    string // of INPUT
	errs     []error
	sysctls  map[string]string
	mtus     map[string]int
	routes   map[netip.Addr]string
	silent   map[netip.AddrPort]bool
	left     kubeproxy.Leftovers
	leftErr  error
	view     oldcni.View
	viewErr  error
	err      error
}

func newHost() *fakeHost {
	h := &fakeHost{
		programs: map[int][]string{
			1: {"to_lo"}, 2: {"from_netdev", "to_netdev"}, 3: {"from_overlay", "to_overlay"}, 9: {"from_pod", "to_pod"},
		},
		sysctls: map[string]string{
			"net/ipv4/conf/eth0/forwarding": "1",
			"net/ipv4/ip_forward":           "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/send_redirects": "0",
			"net/ipv4/conf/" + veth + "/forwarding": "1", "net/ipv4/conf/" + veth + "/proxy_arp": "0",
			"net/ipv6/conf/" + veth + "/disable_ipv6": "0",
		},
		mtus: map[string]int{"lo": 65536, "eth0": 1500, "podweir.vxlan": 1450, veth: 1450},
	}
	for _, dev := range []string{veth, "podweir.vxlan"} {
		h.sysctls["net/ipv4/conf/"+dev+"/rp_filter"] = "2"
		h.sysctls["net/ipv4/conf/"+dev+"/send_redirects"] = "0"
	}
	h.routes = map[netip.Addr]string{podAddr: veth}
	h.silent = map[netip.AddrPort]bool{}
	h.pinned = maps.Clone(h.programs)
	return h
}

func (h *fakeHost) Programs(i int) ([]string, error)  { return h.programs[i], h.err }
func (h *fakeHost) Pinned() (map[int][]string, error) { return h.pinned, h.err }
func (h *fakeHost) Devices() (map[string]int, error)  { return h.mtus, h.err }
func (h *fakeHost) Route(a netip.Addr) (string, error) {
	if dev, ok := h.routes[a]; ok {
		return dev, h.err
	}
	return "", errors.New("network is unreachable")
}
func (h *fakeHost) AskDNS(_ context.Context, to netip.AddrPort) error {
	if h.silent[to] {
		return errors.New("i/o timeout")
	}
	return h.err
}
func (h *fakeHost) KubeProxy(context.Context) (kubeproxy.Leftovers, error) {
	return h.left, h.leftErr
}
func (h *fakeHost) OldCNI() (oldcni.View, error) { return h.view, h.viewErr }
func (h *fakeHost) Sysctl(name string) (string, error) {
	v, ok := h.sysctls[name]
	if !ok {
		return "", fs.ErrNotExist
	}
	return v, h.err
}
func (h *fakeHost) Firewall(context.Context) (firewall.Ruleset, []error) {
	set, err := firewall.IPTables("iptables-legacy", "ip", "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n"+h.rules+"\nCOMMIT\n")
	if err != nil {
		return set, append(h.errs, err)
	}
	return set, h.errs
}

var (
	podAddr = netip.MustParseAddr("10.244.80.65")
	dnsVIP  = netip.MustParseAddrPort("10.98.0.10:53")
	dnsPods = []netip.AddrPort{netip.MustParseAddrPort("10.244.80.66:53"), netip.MustParseAddrPort("10.244.158.66:53")}
)

func newEndpoints() *api.Endpoints {
	return &api.Endpoints{Endpoints: []api.Endpoint{{Namespace: "default", Pod: "client", HostIfName: veth, Addrs: []netip.Addr{podAddr}}}}
}

func newServices() *api.Services {
	return &api.Services{Services: []api.Service{
		{Kind: "Service", Namespace: "kube-system", Name: "kube-dns", Port: "dns", Protocol: "UDP", Frontends: []netip.AddrPort{dnsVIP}, Backends: dnsPods},
		{Kind: "Service", Namespace: "default", Name: "web", Protocol: "TCP", Frontends: []netip.AddrPort{netip.MustParseAddrPort("10.98.0.20:80")},
			Backends: []netip.AddrPort{netip.MustParseAddrPort("10.244.80.66:8080")}},
		{Kind: "Pod", Namespace: "default", Name: "client", Protocol: "UDP", Frontends: []netip.AddrPort{netip.MustParseAddrPort("172.31.0.2:53")}},
	}}
}

func newStatus() *api.Status {
	a := netip.MustParseAddr
	return &api.Status{
		Node: "node-a", Ready: true, RoutingMode: "vxlan", MTU: 1450,
		Tunnel: api.Tunnel{Device: "podweir.vxlan", Port: 4789, Addr: a("172.31.0.2"), MTU: 1450},
		Nodes:  []api.Node{{Name: "node-a", Self: true, Addr: a("172.31.0.2")}, {ID: 1, Name: "node-b", Addr: a("172.31.0.3")}},
		Devices: []api.Device{
			{Name: "lo", Ifindex: 1, Role: "netdev"},
			{Name: "eth0", Ifindex: 2, Role: "netdev", Addrs: []netip.Addr{a("172.31.0.2")}},
			{Name: "podweir.vxlan", Ifindex: 3, Role: "overlay"},
			{Name: veth, Ifindex: 9, Role: "pod", Addrs: []netip.Addr{a("10.244.80.65")}},
		},
	}
}

func TestChecks(t *testing.T) {
	for _, c := range []struct {
		name   string
		break_ func(*fakeHost, *Facts)
		want   []string // "result check object: text", each a part of one finding in this order
	}{
		{"nothing", func(*fakeHost, *Facts) {}, nil},
		{"no agent", func(_ *fakeHost, f *Facts) {
			f.Status, f.Endpoints, f.Services, f.Agent = nil, nil, nil, errors.New("connection refused")
		},
			[]string{"fail agent|connection refused", "warn mtu", "warn firewall", "warn qdiscs", "warn pods", "warn policy", "warn services", "warn dns"}},
		{"not ready", func(_ *fakeHost, f *Facts) { f.Status.NotReady = []string{"no lists"} }, []string{"fail agent|not ready: no lists"}},
		{"a problem", func(_ *fakeHost, f *Facts) {
			f.Status.Problems = []api.Problem{{Object: "Service default/web", Error: "bad"}}
		}, []string{"warn agent|Service default/web|bad"}},
		{"no maps", func(_ *fakeHost, f *Facts) { f.Maps = errors.New("no maps") }, []string{"fail maps|no maps"}},
		{"a program", func(h *fakeHost, _ *Facts) { h.programs[9] = []string{"to_pod"} }, []string{"fail programs|Device " + veth + "|from_pod"}},
		{"a wire's program", func(h *fakeHost, f *Facts) {
			f.Status.Devices = append(f.Status.Devices, api.Device{Name: "pwcccccccccc1", Ifindex: 10, Role: "wire", Filters: "filters"})
			h.programs[10] = nil
		}, []string{"fail programs|Device pwcccccccccc1|from_pod_wire"}},
		{"loopback's", func(h *fakeHost, _ *Facts) { delete(h.programs, 1) }, []string{"fail programs|Device lo|to_lo"}},
		{"a program, without the agent", func(h *fakeHost, f *Facts) {
			h.programs[2] = []string{"from_netdev"}
			f.Status = nil
		}, []string{"fail agent", "fail programs|index 2|to_netdev", "warn mtu", "warn firewall", "warn qdiscs", "warn policy"}},
		{"forwarding", func(h *fakeHost, _ *Facts) { h.sysctls["net/ipv4/ip_forward"] = "0" }, []string{"fail sysctls|net.ipv4.ip_forward|is 0 and must be 1"}},
		{"rp_filter", func(h *fakeHost, _ *Facts) { h.sysctls["net/ipv4/conf/"+veth+"/rp_filter"] = "1" }, []string{"fail sysctls|" + veth + ".rp_filter|must be 2"}},
		{"a device's forwarding", func(h *fakeHost, _ *Facts) { h.sysctls["net/ipv4/conf/eth0/forwarding"] = "0" }, []string{"fail sysctls|net.ipv4.conf.eth0.forwarding"}},
		{"forwarding of the device over a pod's", func(h *fakeHost, _ *Facts) {
			over := node.CoverName(veth)
			h.mtus[over] = 1450
			h.sysctls["net/ipv4/conf/"+over+"/forwarding"], h.sysctls["net/ipv6/conf/"+over+"/forwarding"] = "1", "0"
		}, []string{"fail sysctls|net.ipv6.conf." + node.CoverName(veth) + ".forwarding|must be 1"}},
		{"proxy_arp of all", func(h *fakeHost, _ *Facts) { h.sysctls["net/ipv4/conf/all/proxy_arp"] = "1" }, []string{"warn sysctls|all.proxy_arp"}},
		{"no IPv6 in the kernel", func(h *fakeHost, _ *Facts) { delete(h.sysctls, "net/ipv6/conf/all/forwarding") }, nil},
		{"a small device", func(h *fakeHost, _ *Facts) { h.mtus["eth0"] = 1400 }, []string{"fail mtu|Device eth0|1350"}},
		{"a small device, no tunnel", func(h *fakeHost, f *Facts) { h.mtus["eth0"], f.Status.RoutingMode = 1400, "direct" }, nil},
		{"an old pod", func(_ *fakeHost, f *Facts) { f.Status.MTU, f.Status.Tunnel.MTU = 1350, 1350 }, []string{"warn mtu|" + veth + "|re-create"}},
		{"blocked", func(h *fakeHost, _ *Facts) { h.rules = "-A INPUT -p udp -m udp --dport 4789 -j DROP" },
			[]string{"fail firewall|iptables-legacy, table ip filter, chain INPUT|UDP port 4789) from node node-b: -A INPUT -p udp|iptables-legacy -t filter -I INPUT -p udp --dport 4789"}},
		{"perhaps blocked", func(h *fakeHost, _ *Facts) {
			h.rules = "-A INPUT -p udp -m udp --dport 4789 -m limit --limit 1/s -j DROP"
		}, []string{"warn firewall|may drop"}},
		{"protocol 4", func(h *fakeHost, _ *Facts) { h.rules = "-A INPUT -p ipencap -j DROP" }, nil},
		{"protocol 4 is used", func(h *fakeHost, f *Facts) {
			h.rules, f.Status.RoutingMode = "-A INPUT -p ipencap -j DROP", "ipip"
		}, []string{"fail firewall|protocol 4"}},
		{"rules that cannot be read", func(h *fakeHost, _ *Facts) { h.errs = []error{errors.New("no nft")} }, []string{"warn firewall|no nft"}},
		{"passed by", func(_ *fakeHost, f *Facts) { f.Status.Devices[3].Bypassed = "filters" }, []string{"warn qdiscs|" + veth + "|10.244.80.65"}},
		{"a pod's route", func(h *fakeHost, _ *Facts) { delete(h.routes, podAddr) }, []string{"fail pods|Pod default/client|no route to its address 10.244.80.65|ten seconds"}},
		{"a pod's route that is another's", func(h *fakeHost, _ *Facts) { h.routes[podAddr] = "eth0" }, []string{"fail pods|Pod default/client|leads to eth0|ip route get 10.244.80.65"}},
		{"a pod's interface", func(_ *fakeHost, f *Facts) { f.Endpoints.Endpoints[0].HostIfName = "pwffffffffffb" }, []string{"fail pods|Pod default/client|pwffffffffffb is gone"}},
		{"a service without endpoints", func(_ *fakeHost, f *Facts) { f.Services.Services[1].Backends = nil },
			[]string{"warn services|Service default/web|no EndpointSlice of that family|refused|kubernetes.io/service-name=web"}},
		{"slices without endpoints", func(_ *fakeHost, f *Facts) {
			f.Services.Services[1].Backends, f.Services.Services[1].Slices = nil, 2
		}, []string{"warn services|Service default/web|its EndpointSlices name none"}},
		{"conditions of endpoints", func(_ *fakeHost, f *Facts) {
			s := &f.Services.Services[1]
			s.Backends, s.Slices, s.Endpoints = nil, 1, 3
		}, []string{"warn services|Service default/web|of the 3 in its EndpointSlices none is ready"}},
		{"a frontend that the map lacks", func(_ *fakeHost, f *Facts) {
			f.Missing = map[string][]netip.AddrPort{"Service default/web": {netip.MustParseAddrPort("10.98.0.20:80")}}
		}, []string{"fail services|Service default/web|the datapath does not have 10.98.0.20:80|started anew"}},
		{"a pod's address", func(_ *fakeHost, f *Facts) {
			f.Plugged = func(_ context.Context, ep api.Endpoint) error {
				return errors.New("address 10.244.80.65/32 is missing on eth0 in the pod of " + ep.HostIfName)
			}
		}, []string{"warn pods|Pod default/client|address 10.244.80.65/32 is missing on eth0 in the pod of " + veth + "|who changed it"}},
		{"a pod that is as it was made", func(_ *fakeHost, f *Facts) {
			f.Plugged = func(context.Context, api.Endpoint) error { return nil }
		}, nil},
		{"policy", func(_ *fakeHost, f *Facts) {
			end := func(pod string, port uint16) api.EventEnd {
				return api.EventEnd{Pod: pod, Addr: podAddr, Port: port}
			}
			ev := api.Event{Protocol: "tcp", Text: "isolated by default/deny", Denied: &api.Denial{Direction: "ingress", Pod: "default/local", Source: end("", 0), Destination: end("default/local", 80)}}
			f.Denials = []api.Event{ev, {Reason: "drop_spoofed_source"}, ev}
			for port := range uint16(11) {
				other := *ev.Denied
				other.Direction, other.Destination.Port = "egress", port
				f.Denials = append(f.Denials, api.Event{Protocol: "udp", Denied: &other})
			}
		}, append(append([]string{"warn policy|Pod default/local|its ingress policy denies 10.244.80.65 to default/local by tcp, port 80: isolated by default/deny|podweir policy default/local"},
			slices.Repeat([]string{"warn policy|Pod default/local|egress"}, 9)...), "warn policy|and 2 more")},
		{"no resolver", func(_ *fakeHost, f *Facts) { f.Services.Services[0].Backends = nil },
			[]string{"warn services|kube-dns", "fail dns|Service kube-system/kube-dns:dns|no usable endpoint|cannot resolve"}},
		{"a silent resolver", func(h *fakeHost, _ *Facts) { h.silent[dnsVIP] = true },
			[]string{"fail dns|Service kube-system/kube-dns:dns|10.98.0.10:53 (i/o timeout)|Its endpoints answer|podweir services"}},
		{"a silent pod of the resolver", func(h *fakeHost, _ *Facts) { h.silent[dnsVIP], h.silent[dnsPods[1]] = true, true },
			[]string{"fail dns|these do not answer: 10.244.158.66:53"}},
		{"silent pods of the resolver", func(h *fakeHost, _ *Facts) {
			h.silent[dnsVIP], h.silent[dnsPods[0]], h.silent[dnsPods[1]] = true, true, true
		},
			[]string{"fail dns|None of its endpoints answers|targetPort"}},
		{"kube-proxy was here", func(h *fakeHost, _ *Facts) {
			h.left.Tables = []kubeproxy.Table{{Kind: kubeproxy.IPTablesLegacy, Family: "ip", Name: "filter", Chains: []string{"KUBE-FORWARD", "KUBE-SERVICES"}}}
		}, []string{"warn leftovers|iptables-legacy, table ip filter, chain KUBE-SERVICES|podweir-agent cleanup --kube-proxy|kube-proxy --cleanup"}},
		{"kube-proxy is here", func(h *fakeHost, _ *Facts) {
			h.left.Running, h.left.Tables = "process 7", []kubeproxy.Table{{Kind: kubeproxy.NFTables, Family: "ip6", Name: "kube-proxy"}}
		}, []string{"warn leftovers|process 7|delete daemonset kube-proxy", "warn leftovers|nftables, table ip6 kube-proxy|end kube-proxy first"}},
		{"IPVS was here", func(h *fakeHost, _ *Facts) { h.left.Device = true }, []string{"warn leftovers|kube-ipvs0"}},
		{"leftovers that cannot be read", func(h *fakeHost, _ *Facts) { h.leftErr = errors.New("CAP_NET_ADMIN") }, []string{"warn leftovers|cannot be read: CAP_NET_ADMIN"}},
		{"another plugin was here", func(h *fakeHost, f *Facts) {
			f.Status.Nodes[1].PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.158.0/24")}
			h.view = oldcni.View{
				Tables:  []netfilter.Table{{Kind: netfilter.IPTablesNFT, Family: "ip", Name: "filter", Chains: []string{"cali-INPUT"}}},
				Devices: []oldcni.Device{{Name: "cni0", Kind: "bridge"}},
				Routes:  []oldcni.Route{{Dst: netip.MustParsePrefix("10.244.158.64/26"), Device: "eth0", Protocol: 80}},
			}
		}, []string{"warn leftovers|Device cni0|ip link delete dev cni0", "warn leftovers|Route 10.244.158.64/26|calico-node", "warn leftovers|iptables-nft, table ip filter, chain cali-INPUT|iptables-nft-restore --noflush"}},
		{"another plugin's that cannot be read", func(h *fakeHost, _ *Facts) { h.viewErr = errors.New("CAP_NET_ADMIN") }, []string{"warn leftovers|another CNI plugin may have left cannot be read: CAP_NET_ADMIN"}},
		{"filtered", func(h *fakeHost, f *Facts) {
			f.Status.Devices[3].Filters, h.programs[9] = "filters", []string{"from_pod_judge", "to_pod"}
		}, nil},
		{"filters, and the wrong program", func(_ *fakeHost, f *Facts) { f.Status.Devices[3].Filters = "filters" }, []string{"fail programs|Device " + veth + "|from_pod_judge"}},
		{"a qdisc", func(_ *fakeHost, f *Facts) { f.Status.Devices[3].Qdisc = "tbf" }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost()
			f := Facts{Status: newStatus(), Endpoints: newEndpoints(), Services: newServices(), Host: h}
			c.break_(h, &f)
			found := Run(t.Context(), f, Checks())
			var bad []Finding
			for _, x := range found {
				if x.State != OK {
					bad = append(bad, x)
				}
			}
			failed := false
			for i, w := range c.want {
				parts := strings.Split(w, "|")
				if i >= len(bad) {
					t.Fatalf("%d findings %+v, want %q", len(bad), bad, c.want)
				}
				all := string(bad[i].State) + " " + bad[i].Check + " " + bad[i].Object + ": " + bad[i].Text + bad[i].WayOut
				for _, p := range parts {
					if !strings.Contains(all, p) {
						t.Errorf("finding %q lacks %q", all, p)
					}
				}
				failed = failed || strings.HasPrefix(w, "fail")
			}
			if len(bad) != len(c.want) {
				t.Errorf("findings %+v, want %q", bad, c.want)
			}
			if Failed(found) != failed {
				t.Errorf("failed: %v, want %v", Failed(found), failed)
			}
			// The others are well, and that forwarding is off hurts nobody.
			for _, check := range Checks() {
				if !slices.ContainsFunc(found, func(x Finding) bool { return x.Check == check.Name }) {
					t.Errorf("nothing is said of %s", check.Name)
				}
			}
			if !slices.ContainsFunc(found, func(x Finding) bool { return x.State == OK && strings.Contains(x.Text, "chain FORWARD") }) {
				t.Errorf("FORWARD DROP is not noted: %+v", found)
			}
		})
	}
}
