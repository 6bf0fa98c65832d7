package realcluster

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What goes together, and what an omission means.
func TestChoose(t *testing.T) {
	for _, c := range []struct{ proxy, cni, want string }{
		{"", "", "PROXY=podweir CNI=podweir"},
		{"podweir", "", "PROXY=podweir CNI=podweir"},
		{"", "podweir", "PROXY=podweir CNI=podweir"},
		{"kube-proxy-iptables", "", "PROXY=kube-proxy-iptables CNI=bridge"},
		{"", "bridge-vxlan", "PROXY=kube-proxy-nftables CNI=bridge-vxlan"},
		{"kube-proxy-nftables", "bridge", "PROXY=kube-proxy-nftables CNI=bridge"},
		{"kube-proxy", "", `error: PROXY is "kube-proxy": podweir, kube-proxy-nftables, kube-proxy-iptables`},
		{"", "flannel", `error: CNI is "flannel": podweir, bridge, bridge-vxlan`},
		{"podweir", "bridge", "error: PROXY=podweir does not go with CNI=bridge"},
		{"kube-proxy-nftables", "podweir", "error: PROXY=kube-proxy-nftables does not go with CNI=podweir"},
	} {
		s, err := settings{}.choose(c.proxy, c.cni)
		got := s.String()
		if err != nil {
			got = "error: " + err.Error()
		}
		if !strings.HasPrefix(got, c.want) || (err == nil && got != c.want) {
			t.Errorf("PROXY=%s CNI=%s: %s, want %s", c.proxy, c.cni, got, c.want)
		}
	}
}

// A cluster that is up keeps what it has, and says so.
func TestChooseAgain(t *testing.T) {
	c := Config{State: t.TempDir()}
	if err := c.Choose("", "bridge-vxlan"); err != nil {
		t.Fatal(err)
	}
	if err := c.settings().write(c.settingsFile()); err != nil {
		t.Fatal(err)
	}
	again := Config{State: c.State}
	if err := again.Choose("", ""); err != nil || again.settings() != c.settings() {
		t.Errorf("%v, %v; the cluster has %v", again.settings(), err, c.settings())
	}
	if err := again.Choose("kube-proxy-nftables", "bridge-vxlan"); err != nil {
		t.Errorf("what it has is refused: %v", err)
	}
	if err := again.Choose("kube-proxy-nftables", ""); err != nil || again.settings() != c.settings() {
		t.Errorf("half of what it has: %v, %v", again.settings(), err)
	}
	err := again.Choose("podweir", "")
	if err == nil || !strings.Contains(err.Error(), "was brought up with PROXY=kube-proxy-nftables CNI=bridge-vxlan") {
		t.Errorf("a change of settings: %v", err)
	}
}

// Names of clusters: what they may be, and that nothing is shared.
func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{"": true, "a": true, "ci-12": true, "-a": false, "a-": false, "A": false, "a/b": false, "a.b": false, strings.Repeat("a", 33): false} {
		t.Setenv("PODWEIR_CLUSTER_NAME", name)
		t.Setenv("PODWEIR_CLUSTER_STATE", t.TempDir())
		if _, err := Default("/tree"); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
	var all []string
	for _, name := range []string{"", "n1", "a", "a-n1", "host", "cp", "a-host"} {
		c := Config{Name: name, Nodes: 2}
		all = append(all, c.host(), c.cgroup())
		for _, n := range c.nodes() {
			all = append(all, n.netns())
		}
	}
	slices.Sort(all)
	if short := slices.Compact(slices.Clone(all)); len(short) != len(all) {
		t.Errorf("two clusters share a name: %v", all)
	}
}

// The ways between nodes, of both families and kinds.
func TestRoutes(t *testing.T) {
	ranges := map[string][]netip.Prefix{
		"n1": {netip.MustParsePrefix("10.244.0.0/24"), netip.MustParsePrefix("fd00:10:244::/64")},
		"n2": {netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")},
	}
	for cni, want := range map[string][]string{
		CNIBridge: {"ip route replace 10.244.1.0/24 via 172.31.0.3", "ip route replace fd00:10:244:1::/64 via fd00:172:31::3"},
		CNIVXLAN: {
			"ip link add vxlan0 address 02:70:77:01:00:01 type vxlan id 1 dstport 4789 local 172.31.0.2 dev eth0 nolearning",
			"ip link set vxlan0 mtu 1450 up", "ip addr add 10.244.0.0/32 dev vxlan0", "ip addr add fd00:10:244::/128 dev vxlan0",
			"bridge fdb replace 02:70:77:01:00:02 dev vxlan0 dst 172.31.0.3",
			"ip neigh replace 10.244.1.0 lladdr 02:70:77:01:00:02 dev vxlan0 nud permanent", "ip route replace 10.244.1.0/24 via 10.244.1.0 dev vxlan0 onlink",
			"ip neigh replace fd00:10:244:1:: lladdr 02:70:77:01:00:02 dev vxlan0 nud permanent", "ip route replace fd00:10:244:1::/64 via fd00:10:244:1:: dev vxlan0 onlink",
		},
	} {
		c := Config{CNI: cni, Nodes: 2}
		n, err := c.find("n1")
		if err != nil {
			t.Fatal(err)
		}
		if got := c.routes(n, ranges); !slices.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", cni, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// What examples/cluster runs is on the nodes: there is no registry.
func TestExample(t *testing.T) {
	objs, err := os.ReadFile(filepath.Join("..", "..", "examples", "cluster", "web.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	images := 0
	for line := range strings.Lines(string(objs)) {
		if image, ok := strings.CutPrefix(strings.TrimSpace(line), "image: "); ok {
			if images++; image != toolsImage {
				t.Errorf("image %s, want %s", image, toolsImage)
			}
		}
	}
	if images == 0 {
		t.Error("no image")
	}
}
