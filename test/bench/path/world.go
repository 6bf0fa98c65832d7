package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// outside is the host that is no node, in clusters of three nodes.
var outside = netip.MustParseAddr("172.31.0.1")

const (
	apiPort  = 16443 // of the API server, in every node's namespace
	podRange = "10.244.0.0/16"
	// refill is how old live flows may be: a tenth of the time they have.
	refill = 15 * time.Second
)

// proxyPrograms are what kube-proxy needs: itself, and which iptables it is
// to find, legacy or nft.
type proxyPrograms struct{ kubeProxy, iptables string }

// A world is a setup's topology, an API server that tells agents and proxies
// what there is, and what keeps them.
type world struct {
	*topology
	setup   setup
	three   bool
	api     *fakeapi.Server
	serving []func() error // ends it, but for the first node
	config  string         // kubeconfig
	proxies map[string]*cluster.Process
	env     []string // of what runs iptables
	filled  time.Time
	host    clientPorts // of a process of the node
}

func threeNodes() []cluster.NodeConfig {
	return append(cluster.DefaultNodes(), cluster.NodeConfig{
		Name:     "node-c",
		Addrs:    []netip.Prefix{netip.MustParsePrefix("172.31.0.4/24"), netip.MustParsePrefix("fd00:172:31::4/64")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.200.0/24"), netip.MustParsePrefix("fd00:10:244:c8::/64")},
	})
}

// buildWorld makes a setup's topology and waits until it works as it should.
// What it returns has to be closed, with an error, too.
func buildWorld(ctx context.Context, s setup, three bool, programs proxyPrograms) (_ *world, err error) {
	w := &world{setup: s, three: three, proxies: map[string]*cluster.Process{}, host: nodePorts()}
	cfg := cluster.Config{Label: "bench " + s.label(), Wire: !three, LogLevel: "warn", AgentArgs: s.agent, NoSockets: s.noSockets}
	if three {
		cfg.Nodes = threeNodes()
	}
	if cfg.Kubeconfig, err = writeKubeconfig(); err != nil {
		return nil, err
	}
	w.config = cfg.Kubeconfig
	c, err := cluster.New(ctx, cfg)
	if err != nil {
		return w, err
	}
	w.topology = newTopology(c)
	if s.flows > 1 {
		w.ports = fillingPorts()
	}
	if three {
		if err := calmSwitch(ctx, c); err != nil {
			return w, err
		}
		if err := kernelPortRange(c.Ext); err != nil {
			return w, err
		}
	}
	for _, n := range c.Nodes {
		if three {
			break
		}
		// The ports below are those of measured processes of the node.
		if err := kernelPortRange(n.Netns); err != nil {
			return w, err
		}
	}
	if err := w.serve(c.Nodes); err != nil {
		return w, err
	}
	var nodes []*corev1.Node
	for _, n := range c.Nodes {
		nodes = append(nodes, n.Object())
	}
	objs, err := objects(s, three, nodes)
	if err != nil {
		return w, err
	}
	w.remember(objs)
	if err := put(w.api, objs); err != nil {
		return w, err
	}
	switch {
	case s.podweir:
		if err = w.agents(ctx, objs); err == nil {
			err = w.awaitServices()
		}
	case s.proxy != "":
		if err = w.plugKernel(s.tunnel); err == nil {
			err = w.startProxies(ctx, programs)
		}
	default:
		if err = w.plugKernel(s.tunnel); err == nil && three {
			err = w.floorRoutes(s.tunnel)
		}
	}
	if err == nil {
		err = w.kernelPortRanges()
	}
	if err == nil {
		err = w.checkRules(ctx)
	}
	return w, err
}

// close ends everything, and says what programs had to complain about if the
// error is not nil.
func (w *world) close() error {
	var errs []error
	// First who calls the API server, which waits for the end of calls.
	if w.topology != nil {
		errs = append(errs, w.topology.close())
	}
	for _, stop := range w.serving {
		errs = append(errs, stop())
	}
	if w.api != nil {
		w.api.Close()
	}
	return errors.Join(append(errs, os.Remove(w.config))...)
}

func writeKubeconfig() (string, error) {
	f, err := os.CreateTemp("", "pw-bench-*.kubeconfig")
	if err != nil {
		return "", err
	}
	_, err = fmt.Fprintf(f, `apiVersion: v1
kind: Config
clusters: [{name: bench, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: bench}]
contexts: [{name: bench, context: {cluster: bench, user: bench}}]
current-context: bench
`, apiPort)
	return f.Name(), errors.Join(err, f.Close())
}

// serve has the API server answer inside every node.
func (w *world) serve(nodes []*cluster.Node) error {
	for i, n := range nodes {
		var l net.Listener
		err := n.Do(func() (err error) {
			l, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(apiPort)))
			return err
		})
		if err != nil {
			return fmt.Errorf("API server in %s: %w", n.NodeName, err)
		}
		if i == 0 {
			w.api = fakeapi.Start(l)
			continue
		}
		w.serving = append(w.serving, w.api.ServeOn(l))
	}
	return nil
}

// calmSwitch has the switch learn where hosts are and takes the tap away:
// frames for others would cost what they do on no switch.
func calmSwitch(ctx context.Context, c *cluster.Cluster) error {
	if _, err := c.Switch.Exec(ctx, "ip", "link", "delete", "tap0"); err != nil {
		return err
	}
	if _, err := c.Switch.Exec(ctx, "ip", "link", "set", "br0", "type", "bridge", "ageing_time", "360000"); err != nil {
		return err
	}
	all, err := links(c.Switch)
	if err != nil {
		return err
	}
	h, ns, err := handle(c.Switch)
	if err != nil {
		return err
	}
	defer ns.Close()
	defer h.Close()
	for _, l := range all {
		if l.Type() == "veth" {
			if err := h.LinkSetLearning(l, true); err != nil {
				return fmt.Errorf("port %s of the switch: %w", l.Attrs().Name, err)
			}
		}
	}
	return nil
}

// floorRoutes lead between outside and pods the way that the others take: to
// a pod through the node that is called, answers by the same node.
func (w *world) floorRoutes(tunnel bool) error {
	h, ns, err := handle(w.c.Ext)
	if err != nil {
		return err
	}
	defer ns.Close()
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return err
	}
	a, b, c := w.c.Node("node-a"), w.c.Node("node-b"), w.c.Node("node-c")
	err = errors.Join(
		routeVia(h, eth0.Attrs().Index, a.Config.PodCIDRs[0], c.Config.Addrs[0].Addr()),
		routeVia(h, eth0.Attrs().Index, b.Config.PodCIDRs[0], b.Config.Addrs[0].Addr()),
	)
	if err != nil || !tunnel {
		return err
	}
	ah, ans, err := handle(a.Netns)
	if err != nil {
		return err
	}
	defer ans.Close()
	defer ah.Close()
	vx, err := ah.LinkByName(vxlanName)
	if err != nil {
		return err
	}
	return routeVia(ah, vx.Attrs().Index, netip.PrefixFrom(outside, outside.BitLen()), vtep(3, false))
}

// awaitServices: agents are ready when the first round is done, which has all
// services that there were.
func (w *world) awaitServices() error {
	for node, set := range w.maps {
		n := 0
		all, err := set.Services.Dump()
		if err != nil {
			return fmt.Errorf("%s: %w", node, err)
		}
		for _, v := range all {
			if v.Count > 0 {
				n++
			}
		}
		if n < w.setup.services {
			return fmt.Errorf("%s: the agent is ready with %d of %d services", node, n, w.setup.services)
		}
	}
	return nil
}

// startProxies runs kube-proxy on every node, and a rule that masquerades what
// pods send out of the cluster, as network plugins add it.
func (w *world) startProxies(ctx context.Context, p proxyPrograms) error {
	dir := filepath.Join(w.c.Dir(), "iptables")
	if err := linkIPTables(dir, p.iptables); err != nil {
		return err
	}
	w.env = []string{"env", "PATH=" + dir + ":" + os.Getenv("PATH")}
	for _, n := range w.c.Nodes {
		// It lives as long as the cluster, not as this context.
		p, err := n.Start(context.WithoutCancel(ctx), w.program(n, p.kubeProxy,
			"--kubeconfig", w.config, "--hostname-override", n.NodeName,
			"--proxy-mode", w.setup.proxy, "--cluster-cidr", podRange+",fd00:10:244::/48",
			"--healthz-bind-address", "127.0.0.1:10256", "--metrics-bind-address", "127.0.0.1:10249",
			"--conntrack-max-per-core", "0", "--conntrack-min", "0",
			"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s",
		)...)
		if err != nil {
			return fmt.Errorf("kube-proxy of %s: %w", n.NodeName, err)
		}
		w.proxies[n.NodeName] = p
		if !w.three {
			if err := defaultRoute(n); err != nil {
				return fmt.Errorf("default route of %s: %w", n.NodeName, err)
			}
			continue
		}
		own := n.Config.PodCIDRs[0].String()
		masquerade := []string{"iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", own, "!", "-d", podRange, "-j", "MASQUERADE"}
		if w.setup.proxy == "nftables" {
			masquerade = []string{"nft", fmt.Sprintf("table ip plugin { chain postrouting { type nat hook postrouting priority srcnat; ip saddr %s ip daddr != %s masquerade; }; }", own, podRange)}
		}
		if _, err := n.Exec(ctx, w.program(n, masquerade[0], masquerade[1:]...)...); err != nil {
			return err
		}
	}
	for _, n := range w.c.Nodes {
		if err := w.awaitProxy(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// program is a command line with the iptables of this world, whose lock is the
// node's own.
func (w *world) program(n *cluster.Node, name string, args ...string) []string {
	return append(append(slices.Clone(w.env), "XTABLES_LOCKFILE="+filepath.Join(w.c.Dir(), n.NodeName, "xtables.lock"), name), args...)
}

// linkIPTables makes a folder with iptables and its relatives, all of them
// one program.
func linkIPTables(dir, kind string) error {
	multi, err := exec.LookPath("xtables-" + kind + "-multi")
	if err != nil {
		return fmt.Errorf("iptables (%s): %w; install the package iptables", kind, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			if err := os.Symlink(multi, filepath.Join(dir, name+verb)); err != nil {
				return err
			}
		}
	}
	return nil
}

// rules of a node as its kernel has them: the text, and how many lead to
// cluster IPs.
func (w *world) rules(ctx context.Context, n *cluster.Node, proxy string) (string, int, error) {
	args := []string{"iptables-save", "-t", "nat"}
	if proxy == "nftables" {
		args = []string{"nft", "list", "map", "ip", "kube-proxy", "service-ips"}
	}
	out, err := n.Exec(ctx, w.program(n, args[0], args[1:]...)...)
	return out, countRules(proxy, out), err
}

// countRules counts what leads to cluster IPs: rules, or elements of the map.
func countRules(proxy, text string) (n int) {
	for line := range strings.Lines(text) {
		switch {
		case proxy == "nftables":
			n += strings.Count(line, "10.98.")
		case strings.HasPrefix(line, "-A KUBE-SERVICES -d 10.98."):
			n++
		}
	}
	return n
}

// defaultRoute is what every node has, and no cable of two: what a process of
// the node sends to a cluster IP must lead somewhere before it is translated.
func defaultRoute(n *cluster.Node) error {
	h, ns, err := handle(n.Netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return err
	}
	return h.RouteAdd(&netlink.Route{
		LinkIndex: eth0.Attrs().Index, Scope: netlink.SCOPE_LINK,
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
	})
}

func (w *world) awaitProxy(ctx context.Context, n *cluster.Node) error {
	p := w.proxies[n.NodeName]
	// Each further service has one port; those of the manifests two, the remote
	// one those to fill as well.
	want := w.setup.services - 1 + 4 + fillPorts
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		_, have, err := w.rules(ctx, n, w.setup.proxy)
		if err == nil && have >= want {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-p.Done():
			return fmt.Errorf("kube-proxy of %s ended:\n%s", n.NodeName, tail(p.Stderr()))
		case <-ctx.Done():
			return fmt.Errorf("kube-proxy of %s: %d of %d rules (%v): %w\n%s", n.NodeName, have, want, err, ctx.Err(), tail(p.Stderr()))
		}
	}
}

func tail(text string) string { return text[max(0, len(text)-4096):] }

// checkRules proves that a setup is what it is called: kube-proxy's rules in
// the kernel, those of the one mode alone, or no rules at all. To ask iptables
// would make what is asked for, so the kernel is asked for its tables first.
func (w *world) checkRules(ctx context.Context) error {
	for _, n := range w.c.Nodes {
		nft, err := n.Exec(ctx, "nft", "list", "tables")
		if err != nil {
			return err
		}
		legacy, err := legacyTables(n)
		if err != nil {
			return err
		}
		own := strings.Contains(nft, "table ip kube-proxy")
		if own != (w.setup.proxy == "nftables") {
			return fmt.Errorf("%s, %s: nftables of kube-proxy: %v\n%s", w.setup.label(), n.NodeName, own, nft)
		}
		if w.setup.proxy == "" && nft+legacy != "" {
			return fmt.Errorf("%s, %s: there are tables, nothing should be filtered:\n%s%s", w.setup.label(), n.NodeName, nft, legacy)
		}
		if w.setup.proxy != "iptables" {
			continue
		}
		if text, have, err := w.rules(ctx, n, "iptables"); err != nil || have == 0 {
			return fmt.Errorf("%s, %s: no rules of kube-proxy in iptables (%v):\n%s", w.setup.label(), n.NodeName, err, tail(text))
		}
	}
	return nil
}

// legacyTables are those of iptables in the kernel, if it has that at all.
func legacyTables(n *cluster.Node) (names string, err error) {
	err = n.Do(func() error {
		data, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		names = string(data)
		return err
	})
	return names, err
}

// tracked is how many connections a node's kernel keeps.
func tracked(n *cluster.Node) (count int, err error) {
	err = n.Do(func() error {
		data, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if err == nil {
			count, err = strconv.Atoi(strings.TrimSpace(string(data)))
		}
		return err
	})
	return count, err
}

// conversation on a way: whom a client calls to reach the server.
func (w *world) conversation(y way) (c conversation, err error) {
	c = conversation{listen: listenPort, port: listenPort}
	place := func(pod string) *cluster.Netns {
		switch pod {
		case "":
			return w.c.Ext
		case hostClient:
			return w.c.Node(hostClient).Netns
		}
		return w.pods[pod].Netns
	}
	c.client, c.server = place(y.client), place(y.server)
	if y.client == hostClient {
		c.inside = c.client
	}
	by := y.by
	if !w.setup.podweir && w.setup.proxy == "" && by != outsideIP {
		by = podIP // the floor knows nothing else
	}
	var target string
	switch by {
	case podIP:
		target = w.objs[y.server].Status.PodIPs[0].IP
	case clusterIP:
		target, c.port = w.services[y.server].Spec.ClusterIP, servicePort
	case nodePort:
		target, c.port = w.c.Node(y.entry).Config.Addrs[0].Addr().String(), int(w.services[y.server].Spec.Ports[0].NodePort)
	case outsideIP:
		target = outside.String()
	}
	c.target, err = netip.ParseAddr(target)
	return c, err
}

// measure runs one workload on a way and checks that it was the way.
func (w *world) measure(ctx context.Context, o peerOptions, y way, load workload, out io.Writer) (s sample, err error) {
	c, err := w.conversation(y)
	if err != nil {
		return s, err
	}
	count := max(1, int(float64(load.count)*o.scale))
	ports := &w.ports
	if y.client == hostClient {
		ports = &w.host
	}
	if c.firstPort, err = ports.take(ctx, c.client, load, count, sayer(out, w.setup.label())); err != nil {
		return s, err
	}
	before, err := w.counters()
	if err != nil {
		return s, err
	}
	if s, err = runCore(ctx, load.name, count, c, o.cpu, o.serverCPU()); err != nil {
		return s, err
	}
	switch {
	case w.setup.podweir:
		after, err := w.counters()
		if err != nil {
			return s, err
		}
		return s, checkWay(w.setup.on(y), load, s.Operations, after.since(before))
	default:
		for _, n := range w.c.Nodes {
			have, err := tracked(n)
			if err != nil {
				return s, err
			}
			// A node that only others pass by has none.
			on := y.entry == n.NodeName || y.client == n.NodeName
			if p := w.pods[y.client]; p != nil {
				on = p.Node == n
			}
			if w.setup.proxy == "" && have > 0 || w.setup.proxy != "" && on && have == 0 {
				return s, fmt.Errorf("%s tracks %d connections", n.NodeName, have)
			}
		}
	}
	return s, nil
}

// fill sees to it that as many flows are alive as the setup says. They go to
// ports of the service that nothing else calls.
func (w *world) fill(ctx context.Context, o peerOptions) error {
	if w.setup.flows <= 1 || time.Since(w.filled) < refill {
		return nil
	}
	c, err := w.conversation(wireWays()[2])
	if err != nil {
		return err
	}
	left := w.setup.flows
	for i := 0; left > 0; i++ {
		c.port, c.listen, c.firstPort = fillPort+i, fillListen+i, minPort
		n := min(left, portsToFill)
		if _, err := runCore(ctx, "fill", n, c, o.cpu, o.serverCPU()); err != nil {
			return fmt.Errorf("%d flows: %w", n, err)
		}
		left -= n
	}
	w.filled = time.Now()
	return w.checkFilled()
}

// checkFilled counts them on both nodes. A table that evicts what was unused
// for longest may have let go of some.
func (w *world) checkFilled() error {
	for _, n := range w.c.Nodes {
		var have int
		var err error
		if w.setup.podweir {
			set := w.maps[n.NodeName]
			err = set.Flows.Each(func(k maps.FlowKey, _ maps.Flow) error {
				if k.Sport >= fillListen && k.Sport < fillListen+fillPorts {
					have++ // answers: one entry of each flow
				}
				return nil
			})
		} else {
			have, err = tracked(n)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", n.NodeName, err)
		}
		if have < w.setup.flows*9/10 {
			return fmt.Errorf("%s has %d of %d flows", n.NodeName, have, w.setup.flows)
		}
	}
	return nil
}
