package realcluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Who turns services into pods, and who connects pods. What is not podweir is
// Kubernetes' own: to compare with, and to know whether a test asks for what
// is so elsewhere.
const (
	ProxyPodweir  = "podweir"
	ProxyNFTables = "kube-proxy-nftables"
	ProxyIPTables = "kube-proxy-iptables"

	CNIPodweir = "podweir"
	CNIBridge  = "bridge"       // reference plugins bridge and host-local, routes between nodes
	CNIVXLAN   = "bridge-vxlan" // the same over a device of type vxlan on each node
)

// settings are those that a cluster keeps for as long as it is up.
type settings struct {
	Proxy string `json:"proxy"`
	CNI   string `json:"cni"`
}

func (s settings) String() string { return "PROXY=" + s.Proxy + " CNI=" + s.CNI }

func (c Config) settings() settings   { return settings{c.Proxy, c.CNI} }
func (c Config) settingsFile() string { return filepath.Join(c.State, "settings.json") }
func (c Config) podweir() bool        { return c.CNI == CNIPodweir }
func (c Config) kubeProxyMode() string {
	mode, _ := strings.CutPrefix(c.Proxy, "kube-proxy-")
	return mode
}
func (n Node) conflist() string { return "/etc/cni/net.d/10-bridge.conflist" }
func (n Node) vtep() string     { return fmt.Sprintf("02:70:77:01:00:%02x", n.index) }
func without(all []Node, n Node) []Node {
	return slices.DeleteFunc(all, func(o Node) bool { return o == n })
}

// recorded returns the settings of the cluster that is up, if one is.
func (c Config) recorded() (s settings, there bool, err error) {
	data, err := os.ReadFile(c.settingsFile())
	if errors.Is(err, os.ErrNotExist) {
		return s, false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err != nil {
		return s, false, fmt.Errorf("settings of %s: %w; make cluster-down removes it", c.title(), err)
	}
	return s, true, nil
}

// choose takes over what is asked for; "" leaves it to what goes with the
// rest.
func (s settings) choose(proxy, cni string) (settings, error) {
	proxies, cnis := []string{ProxyPodweir, ProxyNFTables, ProxyIPTables}, []string{CNIPodweir, CNIBridge, CNIVXLAN}
	if proxy != "" && !slices.Contains(proxies, proxy) {
		return s, fmt.Errorf("PROXY is %q: %s", proxy, strings.Join(proxies, ", "))
	}
	if cni != "" && !slices.Contains(cnis, cni) {
		return s, fmt.Errorf("CNI is %q: %s", cni, strings.Join(cnis, ", "))
	}
	switch {
	case proxy == "" && cni == "":
		proxy, cni = ProxyPodweir, CNIPodweir
	case proxy == "" && cni == CNIPodweir:
		proxy = ProxyPodweir
	case proxy == "":
		proxy = ProxyNFTables
	case cni == "" && proxy == ProxyPodweir:
		cni = CNIPodweir
	case cni == "":
		cni = CNIBridge
	}
	if (proxy == ProxyPodweir) != (cni == CNIPodweir) {
		return s, fmt.Errorf("PROXY=%s does not go with CNI=%s: podweir serves the pods that it plugs and leaves no services to others; "+
			"kube-proxy goes with CNI=%s or CNI=%s", proxy, cni, CNIBridge, CNIVXLAN)
	}
	return settings{proxy, cni}, nil
}

// Choose sets who does services and who connects pods; "" is for the default,
// and for what a cluster that is up has.
func (c *Config) Choose(proxy, cni string) error {
	is, there, err := c.recorded()
	if err != nil {
		return err
	}
	if there && (proxy == "" || proxy == is.Proxy) && (cni == "" || cni == is.CNI) {
		proxy, cni = is.Proxy, is.CNI
	}
	want, err := is.choose(proxy, cni)
	if err != nil {
		return err
	}
	if there && want != is {
		return fmt.Errorf("%s was brought up with %v, which does not change to %v: make cluster-down first", c.title(), is, want)
	}
	c.Proxy, c.CNI = want.Proxy, want.CNI
	return nil
}

// write keeps the settings.
func (s settings) write(file string) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o644)
}

// ranges are the nodes' pod ranges by name, once all nodes have theirs.
func (c Config) ranges(ctx context.Context) (map[string][]netip.Prefix, error) {
	out := map[string][]netip.Prefix{}
	return out, until(ctx, "pod ranges of the nodes", "", "", time.Minute, func() error {
		var data bytes.Buffer
		if err := c.Kubectl(ctx, nil, &data, "get", "nodes", "-o", "json"); err != nil {
			return err
		}
		var list struct {
			Items []struct {
				Metadata struct{ Name string }
				Spec     struct{ PodCIDRs []netip.Prefix }
			}
		}
		if err := json.Unmarshal(data.Bytes(), &list); err != nil {
			return err
		}
		for _, i := range list.Items {
			out[i.Metadata.Name] = i.Spec.PodCIDRs
		}
		for _, n := range c.nodes() {
			if len(out[n.Name]) != 2 {
				return fmt.Errorf("%s has the pod ranges %v", n.Name, out[n.Name])
			}
		}
		return nil
	})
}

// startPlain connects a node's pods by the reference plugins and has
// kube-proxy serve them.
func (c Config) startPlain(ctx context.Context, n Node) error {
	ranges, err := c.ranges(ctx)
	if err != nil {
		return err
	}
	for _, p := range []string{"bridge", "host-local", "portmap"} {
		if err := copyFile(n.path("opt", "cni", "bin", p), c.bin(p), 0o755); err != nil {
			return err
		}
	}
	// Packets between two pods of a bridge pass kube-proxy's rules by
	// bridge-nf-call only.
	sysctls := "echo 1 >/proc/sys/net/ipv4/ip_forward && echo 1 >/proc/sys/net/ipv6/conf/all/forwarding"
	for _, f := range []string{"iptables", "ip6tables"} {
		sysctls += " && echo 1 >/proc/sys/net/bridge/bridge-nf-call-" + f
	}
	if err := n.run(ctx, "sh", "-c", sysctls); err != nil {
		return fmt.Errorf("CNI=bridge needs forwarding and the kernel's br_netfilter: %w", err)
	}
	// One that a call before this one left half-made goes.
	if ip(ctx, n.netns(), "link show dev vxlan0") == nil {
		if err := ip(ctx, n.netns(), "link del vxlan0"); err != nil {
			return err
		}
	}
	for _, line := range c.routes(n, ranges) {
		if err := n.run(ctx, strings.Fields(line)...); err != nil {
			return err
		}
	}
	if err := n.feed(ctx, masquerade(ranges[n.Name]), "nft", "-f", "-"); err != nil {
		return err
	}
	if running(n.path("run", "kube-proxy")) == 0 {
		// The connection table's limit is the machine's, and not a node's to set.
		err := n.start("kube-proxy", c.bin("kube-proxy"), "--proxy-mode="+c.kubeProxyMode(), "--kubeconfig="+c.kubeconfig("kube-proxy"),
			"--hostname-override="+n.Name, "--cluster-cidr="+podCIDRs, "--nodeport-addresses=primary",
			"--conntrack-max-per-core=0", "--conntrack-min=0", "--v=2")
		if err != nil {
			return err
		}
	}
	err = until(ctx, "kube-proxy of "+n.Name, n.path("run", "kube-proxy"), n.log("kube-proxy"), time.Minute, func() error {
		return get(ctx, n.netns(), "http://127.0.0.1:10256/healthz")
	})
	if err != nil {
		return err
	}
	// With its configuration the kubelet counts the node as ready. Runtimes
	// read no file of this ending before it is moved.
	conf, err := c.bridgeConf(ranges[n.Name])
	if err != nil {
		return err
	}
	return n.feed(ctx, conf, "sh", "-c", "cat >"+n.conflist()+".new && mv "+n.conflist()+".new "+n.conflist())
}

// feed runs a command in the node with an input.
func (n Node) feed(ctx context.Context, input string, args ...string) error {
	cmd, done, err := n.In(ctx, args...)
	if err != nil {
		return err
	}
	defer done()
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %s: %w: %s", n.Name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// routes are the commands that have a node reach the pods of the others.
func (c Config) routes(n Node, ranges map[string][]netip.Prefix) (out []string) {
	vxlan := c.CNI == CNIVXLAN
	if vxlan {
		out = append(out,
			"ip link add vxlan0 address "+n.vtep()+" type vxlan id 1 dstport 4789 local "+n.IP+" dev eth0 nolearning",
			"ip link set vxlan0 mtu 1450 up")
		for _, r := range ranges[n.Name] {
			out = append(out, fmt.Sprintf("ip addr add %s/%d dev vxlan0", r.Addr(), r.Addr().BitLen()))
		}
	}
	for _, o := range without(c.nodes(), n) {
		if vxlan {
			out = append(out, "bridge fdb replace "+o.vtep()+" dev vxlan0 dst "+o.IP)
		}
		for _, r := range ranges[o.Name] {
			switch {
			case vxlan:
				out = append(out, fmt.Sprintf("ip neigh replace %s lladdr %s dev vxlan0 nud permanent", r.Addr(), o.vtep()),
					fmt.Sprintf("ip route replace %s via %s dev vxlan0 onlink", r, r.Addr()))
			case r.Addr().Is4():
				out = append(out, fmt.Sprintf("ip route replace %s via %s", r, o.IP))
			default:
				out = append(out, fmt.Sprintf("ip route replace %s via %s", r, o.IP6))
			}
		}
	}
	return out
}

// masquerade are the rules by which a node's pods reach what is no pod.
func masquerade(ranges []netip.Prefix) string {
	rules := ""
	for i, all := range strings.Split(podCIDRs, ",") {
		family := [2]string{"ip", "ip6"}[i]
		rules += fmt.Sprintf("\t\t%s saddr %s %[1]s daddr != %s masquerade\n", family, ranges[i], all)
	}
	const table = "table inet podweir-test-masquerade"
	return table + "\ndelete " + table + "\n" + table + " {\n\tchain postrouting {\n\t\ttype nat hook postrouting priority srcnat; policy accept;\n" + rules + "\t}\n}\n"
}

// bridgeConf is a node's CNI configuration.
func (c Config) bridgeConf(ranges []netip.Prefix) (string, error) {
	type object = map[string]any
	var subnets []any
	for _, r := range ranges {
		subnets = append(subnets, []any{object{"subnet": r.String()}})
	}
	mtu := 1500
	if c.CNI == CNIVXLAN {
		mtu = 1450
	}
	data, err := json.Marshal(object{"cniVersion": "1.0.0", "name": "bridge", "plugins": []any{
		object{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "mtu": mtu, "ipam": object{
			"type": "host-local", "ranges": subnets, "routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}}},
		object{"type": "portmap", "capabilities": object{"portMappings": true}, "backend": c.kubeProxyMode()},
	}})
	return string(data), err
}
