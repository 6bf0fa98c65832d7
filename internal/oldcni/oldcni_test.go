package oldcni

import (
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/netfilter"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/testns"
)

func TestMain(m *testing.M) { testns.Main(m, nil) }

func table(kind, family, name string, chains ...string) netfilter.Table {
	return netfilter.Table{Kind: kind, Family: family, Name: name, Chains: chains}
}

// What is whose, by what the node shows alone.
func TestTroubles(t *testing.T) {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	for _, c := range []struct {
		name string
		view View
		want []string // "object|text|way out", parts of each
	}{
		{"nothing", View{}, nil},
		{"others' rules", View{Tables: []netfilter.Table{
			table("iptables-nft", "ip", "filter", "INPUT", "KUBE-FIREWALL", "KUBE-KUBELET-CANARY", "KUBE-SERVICES", "DOCKER-USER", "CNI-FORWARD", "CNI-ADMIN", "MY-cali-", "cali"),
			table("iptables-legacy", "ip", "nat", "CNI-0123", "FLANNEL"), table("nftables", "inet", "filter", "input"), table("nftables", "ip", "kube-proxy", "cali-INPUT"),
			table("nftables", "inet", "calico"), table("nftables", "ip", "cni_plugins_masquerade"),
		}}, nil},
		{"Calico, iptables", View{Tables: []netfilter.Table{table("iptables-nft", "ip", "filter", "INPUT", "cali-FORWARD", "cali-INPUT")}},
			[]string{"iptables-nft, table ip filter, chain cali-FORWARD and 1 more|rules of Calico are there: they go on deciding|iptables-nft-save -t filter | sed"}},
		{"Calico, legacy, IPv6", View{Tables: []netfilter.Table{table("iptables-legacy", "ip6", "raw", "cali-PREROUTING")}},
			[]string{"iptables-legacy, table ip6 raw, chain cali-PREROUTING|Calico|ip6tables-legacy-save -t raw"}},
		{"Calico, nftables", View{Tables: []netfilter.Table{table("nftables", "ip", "calico", "filter-cali-INPUT"), table("nftables", "ip6", "calico")}},
			[]string{"nftables, table ip calico|Calico|nft delete table ip calico", "nftables, table ip6 calico|Calico|nft delete table ip6 calico"}},
		{"flannel", View{Tables: []netfilter.Table{table("iptables-nft", "ip", "nat", "FLANNEL-POSTRTG"), table("nftables", "ip6", "flannel-ipv6")}},
			[]string{"chain FLANNEL-POSTRTG|rules of flannel|FLANNEL-", "nftables, table ip6 flannel-ipv6|flannel|nft delete"}},
		{"portmap", View{Tables: []netfilter.Table{table("iptables-nft", "ip", "nat", "CNI-DN-0123456789abcdef01234", "CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-MASQ"), table("nftables", "ip", "cni_hostport")}},
			[]string{"CNI-DN-0123456789abcdef01234 and 2 more|portmap|CNI-(HOSTPORT", "nftables, table ip cni_hostport|portmap|nft delete table ip cni_hostport"}},
		{"bridge, ipMasq", View{Tables: []netfilter.Table{table("iptables-nft", "ip", "nat", "CNI-0123456789abcdef01234567"), table("nftables", "inet", "cni_plugins_masquerade")}},
			[]string{"CNI-0123456789abcdef01234567|plugin bridge|iptables-nft-save -t nat", "inet cni_plugins_masquerade|plugin bridge|nft delete table inet cni_plugins_masquerade"}},
		{"one table, two owners", View{Tables: []netfilter.Table{table("iptables-nft", "ip", "filter", "CILIUM_INPUT", "KUBE-POD-FW-X", "KUBE-ROUTER-INPUT", "OLD_CILIUM_INPUT", "WEAVE", "WEAVE-NPC")}},
			[]string{"WEAVE and 1 more|Weave Net|WEAVE", "CILIUM_INPUT and 1 more|Cilium|CILIUM_", "KUBE-POD-FW-X and 1 more|kube-router|KUBE-(ROUTER"}},
		{"others' devices", View{Devices: []Device{
			{Name: "eth0", Kind: "device"}, {Name: node.OverlayName, Kind: "vxlan", Port: 4789}, {Name: "pw0123456789a", Kind: "veth"}, {Name: "vethabc", Kind: "veth", Master: "docker0"},
			{Name: "docker0", Kind: "bridge"}, {Name: "tunl0", Kind: "ipip"}, {Name: "calibre0", Kind: "bridge"}, {Name: "cali-own", Kind: "veth"}, {Name: "lxcbr0", Kind: "bridge"},
			{Name: "lxc1234", Kind: "veth"}, {Name: "vxlan7", Kind: "vxlan", Port: 8472, Up: true}, {Name: "vxlan8", Kind: "vxlan", Port: 4789},
			{Name: "tunl0", Kind: "ipip", Addrs: []netip.Addr{a("192.0.2.10")}},
		}}, nil},
		{"flannel's devices", View{Devices: []Device{
			{Name: "flannel.1", Kind: "vxlan", Port: 8472}, {Name: "cni0", Kind: "bridge"}, {Name: "veth1", Kind: "veth", Master: "cni0"}, {Name: "veth2", Kind: "veth", Master: "cni0"},
		}}, []string{"Device flannel.1|a device of flannel|ip link delete dev flannel.1", "Device cni0|addresses and routes|ip link delete dev cni0", "Device veth1 and 1 more|pods run here that flannel or the plugin bridge plugged, 2 interfaces|delete these pods"}},
		{"Calico's devices", View{Devices: []Device{
			{Name: "cali0123456789a", Kind: "veth"}, {Name: "vxlan.calico", Kind: "vxlan", Port: 4789, Up: true}, {Name: "tunl0", Kind: "ipip", Addrs: []netip.Addr{a("10.244.1.64")}},
		}}, []string{"Device vxlan.calico|the tunnel of Calico has UDP port 4789|ip link delete dev vxlan.calico", "Device tunl0|10.244.1.64|ip addr flush dev tunl0 to 10.244.1.64;", "Device cali0123456789a|Calico plugged, 1 interfaces"}},
		{"somebody's tunnel", View{Devices: []Device{{Name: "vxlan0", Kind: "vxlan", Port: 4789, Up: true}}}, []string{"Device vxlan0|another program has UDP port 4789|ip link delete dev vxlan0"}},
		{"a name for a shell", View{Devices: []Device{{Name: "v$(id)'", Kind: "vxlan", Port: 4789, Up: true}}}, []string{`Device v$(id)'|ip link delete dev 'v$(id)'\'''; or`}},
		{"Calico's tunnel on another port", View{Devices: []Device{{Name: "vxlan.calico", Kind: "vxlan", Port: 4790}}}, []string{"Device vxlan.calico|a device of Calico"}},
		{"others", View{Devices: []Device{{Name: "weave", Kind: "bridge"}, {Name: "cilium_host", Kind: "veth"}, {Name: "lxc0123456789ab", Kind: "veth"}, {Name: "kube-bridge", Kind: "bridge"}}},
			[]string{"Device weave|Weave Net", "Device cilium_host|before podweir|reboot", "Device kube-bridge|kube-router", "Device lxc0123456789ab|Cilium plugged"}},
		{"others' routes", View{Routes: []Route{
			{p("10.244.1.0/24"), "podweir.vxlan", 112}, {p("10.244.1.64/26"), "eth0", 4}, {p("10.244.0.0/16"), "eth0", protoFelix}, {p("10.9.0.0/26"), "eth0", protoBird},
			{p("10.244.1.5/32"), "cali0123456789a", protoFelix},
		}}, nil},
		{"Calico's routes", View{Routes: []Route{
			{p("10.244.1.64/26"), "eth0", protoFelix}, {p("10.244.2.0/24"), "", protoFelix}, {p("fd00:10:244:1::40/122"), "eth0", protoBird},
		}}, []string{"Route 10.244.1.64/26 and 2 more|lead into the ranges of pods|ip route flush root 10.244.0.0/16 proto 80; ip -6 route flush root fd00:10:244::/48 proto 12"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.view.Troubles([]netip.Prefix{p("10.244.1.0/24"), p("10.244.2.0/24"), p("fd00:10:244:1::/64")})
			for i, x := range got {
				all := x.Object + "\n" + x.Text + "\n" + x.WayOut
				if i >= len(c.want) {
					t.Fatalf("also %s", all)
				}
				object, rest, _ := strings.Cut(c.want[i], "|")
				if !strings.Contains(x.Object, object) {
					t.Errorf("%q is not about %q", all, object)
				}
				for _, part := range strings.SplitN(rest, "|", 2) {
					if !strings.Contains(all, part) {
						t.Errorf("%q lacks %q", all, part)
					}
				}
			}
			if len(got) < len(c.want) {
				t.Errorf("%d findings, want %q", len(got), c.want)
			}
		})
	}
}

// ownNamespace gives the test an empty one.
func ownNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread and its namespace end with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
}

func sh(t *testing.T, input, command string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

// rules of a table of iptables; lines that begin with O are plugins'.
func rules(with bool) string {
	var out strings.Builder
	for _, l := range []string{
		"*filter",
		":MINE - [0:0]", ":MY-cali-own - [0:0]", ":KUBE-FIREWALL - [0:0]", "O:cali-INPUT - [0:0]", "O:cali-fw-x - [0:0]", "O:KUBE-ROUTER-INPUT - [0:0]", "O:WEAVE-NPC - [0:0]", "O:CILIUM_INPUT - [0:0]",
		`O-A INPUT -m comment --comment "cali:Cz_u1IQiXIMmKD4c" -j cali-INPUT`, "-A INPUT -j KUBE-FIREWALL", "-A INPUT -i cali+ -j MINE", "O-A INPUT -j KUBE-ROUTER-INPUT",
		`O-A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs" -m mark --mark 0x10000/0x10000 -j ACCEPT`,
		"O-A FORWARD -o weave -j WEAVE-NPC", "O-A INPUT -j CILIUM_INPUT", "O-A cali-INPUT -p udp -m udp --dport 4789 -j DROP", "O-A cali-INPUT -j cali-fw-x",
		`-A MY-cali-own -m comment --comment "not WEAVE, CILIUM_ or KUBE-ROUTER-" -j DROP`, "-A INPUT -j MY-cali-own",
		"-A MINE -p tcp -m tcp --dport 22 -j ACCEPT",
		"COMMIT",
		"*nat",
		"O:FLANNEL-POSTRTG - [0:0]", "O:CNI-HOSTPORT-DNAT - [0:0]", "O:CNI-DN-0123456789abcdef01234 - [0:0]", "O:CNI-0123456789abcdef01234567 - [0:0]", ":CNI-OWN - [0:0]",
		"O-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT", "O-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8080 -j CNI-DN-0123456789abcdef01234",
		"O-A CNI-DN-0123456789abcdef01234 -p tcp -m tcp --dport 8080 -j DNAT --to-destination :80",
		`O-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG`, "O-A POSTROUTING -j CNI-0123456789abcdef01234567", "-A POSTROUTING -j CNI-OWN",
		"O-A FLANNEL-POSTRTG -j MASQUERADE", "O-A CNI-0123456789abcdef01234567 -j MASQUERADE",
		"COMMIT",
	} {
		own, is := strings.CutPrefix(l, "O")
		if with || !is {
			out.WriteString(own + "\n")
		}
	}
	return out.String()
}

// L4: real rules of plugins are found in either kind of iptables and both
// families, and the commands that are named remove them from between others'.
func TestRules(t *testing.T) {
	for _, program := range []string{"iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"} {
		t.Run(program, func(t *testing.T) {
			ownNamespace(t)
			saved := func() string {
				out := regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(sh(t, "", program+"-save"), "")
				return regexp.MustCompile(`(?m)^(:\S+ \S+) \[.*$`).ReplaceAllString(out, "$1")
			}
			sh(t, rules(false), program+"-restore")
			before := saved()
			if v, err := Look(); err != nil || len(v.Troubles(nil)) > 0 {
				t.Fatalf("among others' rules: %+v, %v", v.Troubles(nil), err)
			}
			sh(t, rules(true), program+"-restore")
			remove(t, 7)
			if after := saved(); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
	// iptables cannot show what nft has put into its table, nor write it again.
	t.Run("nft among iptables", func(t *testing.T) {
		ownNamespace(t)
		sh(t, "table ip filter { chain INPUT { type filter hook input priority 0; ip saddr { 192.0.2.1, 192.0.2.2 } drop; }; }\n", "nft -f -")
		before := sh(t, "", "nft list ruleset")
		sh(t, "table ip filter { chain cali-a { accept; }; }\n", "nft -f -")
		remove(t, 1)
		if after := sh(t, "", "nft list ruleset"); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	})
	t.Run("nft", func(t *testing.T) {
		ownNamespace(t)
		own := "table inet mine { chain cali-INPUT { drop; }; }\n"
		sh(t, own, "nft -f -")
		before := sh(t, "", "nft list ruleset")
		for _, name := range []string{"ip calico", "ip6 calico", "ip flannel-ipv4", "ip6 flannel-ipv6", "ip cni_hostport", "ip6 cni_hostport", "inet cni_plugins_masquerade"} {
			sh(t, "table "+name+" { chain c { type filter hook input priority 0; accept; }; }", "nft -f -")
		}
		remove(t, 7)
		if after := sh(t, "", "nft list ruleset"); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	})
}

var command = regexp.MustCompile(`(?s)on the node: (.*); or reboot it$`)

// remove runs what is named for all troubles, and wants none to be left.
func remove(t *testing.T, want int) {
	t.Helper()
	ranges := []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}
	v, err := Look()
	found := v.Troubles(ranges)
	if err != nil || len(found) != want {
		t.Fatalf("found %d, want %d: %+v, %v", len(found), want, found, err)
	}
	for _, x := range found {
		if m := command.FindStringSubmatch(x.WayOut); m != nil {
			sh(t, "", m[1])
		} else {
			t.Errorf("%+v names no command", x)
		}
	}
	v, err = Look()
	if left := v.Troubles(ranges); err != nil || len(left) > 0 {
		t.Errorf("left: %+v, %v", left, err)
	}
}

// Devices and routes as plugins make them.
func TestDevicesAndRoutes(t *testing.T) {
	ownNamespace(t)
	link := func(l netlink.Link, addr string) {
		t.Helper()
		if err := netlink.LinkAdd(l); err != nil {
			t.Fatalf("%s: %v", l.Attrs().Name, err)
		}
		if addr != "" {
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				t.Fatal(err)
			}
			if err := netlink.AddrAdd(l, a); err != nil {
				t.Fatal(err)
			}
		}
		if err := netlink.LinkSetUp(l); err != nil {
			t.Fatal(err)
		}
	}
	named := func(name string) netlink.LinkAttrs { return netlink.LinkAttrs{Name: name} }
	link(&netlink.Bridge{LinkAttrs: named("eth0")}, "172.31.0.2/24")
	link(&netlink.Vxlan{LinkAttrs: named(node.OverlayName), FlowBased: true, Port: node.OverlayPort}, "")
	if v, err := Look(); err != nil || len(v.Troubles(nil)) > 0 {
		t.Fatalf("%+v, %v", v.Troubles(nil), err)
	}
	link(&netlink.Vxlan{LinkAttrs: named("flannel.1"), VxlanId: 1, Port: 8472}, "10.244.0.0/32")
	link(&netlink.Vxlan{LinkAttrs: named("vxlan.calico"), VxlanId: 4096, Port: 4790}, "")
	link(&netlink.Bridge{LinkAttrs: named("cni0")}, "10.244.0.1/24")
	// Where the kernel has ipip, tunl0 comes with it.
	if _, err := netlink.LinkByName("tunl0"); err != nil {
		link(&netlink.Bridge{LinkAttrs: named("tunl0")}, "10.244.1.1/32")
	} else {
		sh(t, "", "ip addr add 10.244.1.1/32 dev tunl0")
	}
	sh(t, "", "ip route add 10.244.1.64/26 via 172.31.0.3 dev eth0 proto bird && ip route add blackhole 10.244.1.128/26 proto 80 && ip -6 route add blackhole fd00:10:244:1::40/122 proto 80")
	sh(t, "", "ip route add 10.244.1.0/24 dev "+node.OverlayName+" proto 112")
	// BIRD of the node's own.
	sh(t, "", "ip route add default via 172.31.0.1 dev eth0 proto bird && ip route add 192.0.2.0/24 via 172.31.0.1 dev eth0 proto bird")
	before := sh(t, "", "ip route show via 172.31.0.1")
	remove(t, 5)
	if after := sh(t, "", "ip route show via 172.31.0.1"); after != before || before == "" {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	// A pod's interface on a bridge, and one of Calico's.
	link(&netlink.Bridge{LinkAttrs: named("cni0")}, "")
	link(&netlink.Veth{LinkAttrs: named("vethabc"), PeerName: "p0"}, "")
	link(&netlink.Veth{LinkAttrs: named("cali0123456789a"), PeerName: "p1"}, "")
	sh(t, "", "ip link set vethabc master cni0")
	v, err := Look()
	var objects []string
	for _, x := range v.Troubles(nil) {
		objects = append(objects, x.Object)
	}
	if want := []string{"Device cni0", "Device cali0123456789a", "Device vethabc"}; err != nil || !slices.Equal(objects, want) {
		t.Errorf("%q, %v; want %q", objects, err, want)
	}
	if all, err := net.Interfaces(); err != nil || !slices.ContainsFunc(all, func(i net.Interface) bool { return i.Name == node.OverlayName }) {
		t.Errorf("podweir's own device went: %v, %v", all, err)
	}
}
