package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// Config describes a cluster; the zero value is the usual one.
type Config struct {
	Label        string         // for people who find a kept run
	Nodes        []NodeConfig   // default: [DefaultNodes]
	ServiceCIDRs []netip.Prefix // default: [DefaultServiceCIDRs]
	BinDir       string         // podweir-agent, podweir-cni, pw-server, pw-client; default: [BinDir]
	MTU          int            // of the underlay, default 1500
	Wire         bool           // two nodes joined by one cable: no Switch, no Ext, no gateway
	AgentArgs    []string       // added to every agent's command line
	LogLevel     string         // of the agents, default info
	NoSockets    bool           // agents leave connect() of the nodes' processes alone
	Kubeconfig   string         // agents watch an API server instead of Manifests
}

// NodeConfig describes one node.
type NodeConfig struct {
	Name     string
	Addrs    []netip.Prefix // on eth0
	PodCIDRs []netip.Prefix
	// AgentArgs are added to this node's agent's command line, behind those of
	// all; read at every start.
	AgentArgs []string
}

// DefaultNodes are node-a and node-b of the address plan in examples/basic.
func DefaultNodes() []NodeConfig {
	return []NodeConfig{{
		Name:     "node-a",
		Addrs:    prefixes("172.31.0.2/24", "fd00:172:31::2/64"),
		PodCIDRs: prefixes("10.244.80.0/24", "fd00:10:244:50::/64"),
	}, {
		Name:     "node-b",
		Addrs:    prefixes("172.31.0.3/24", "fd00:172:31::3/64"),
		PodCIDRs: prefixes("10.244.158.0/24", "fd00:10:244:9e::/64"),
	}}
}

// DefaultServiceCIDRs are the service ranges of the address plan.
func DefaultServiceCIDRs() []netip.Prefix {
	return prefixes("10.98.0.0/16", "fd00:10:98::/112")
}

// extAddrs are the addresses outside the cluster; also the gateway's.
func extAddrs() []netip.Prefix { return prefixes("172.31.0.1/24", "fd00:172:31::1/64") }

func prefixes(s ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(s))
	for i := range s {
		out[i] = netip.MustParsePrefix(s[i])
	}
	return out
}

// Cluster is a running cluster. Its methods may be called concurrently.
type Cluster struct {
	Run
	Switch    *Netns // holds the bridge
	Ext       *Netns // a client outside the cluster
	Nodes     []*Node
	Manifests *Manifests // the directory that all agents watch

	cfg    Config
	cgroup string

	mu   sync.Mutex
	pods map[string]*Pod // by namespace/name
}

// New builds the switch, the nodes and the outside. Agents are started by
// [Cluster.StartAgents], when the manifests they need are written.
func New(ctx context.Context, cfg Config) (_ *Cluster, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a cluster of network namespaces needs root: run this as root")
	}
	if cfg.Nodes == nil {
		cfg.Nodes = DefaultNodes()
	}
	if cfg.ServiceCIDRs == nil {
		cfg.ServiceCIDRs = DefaultServiceCIDRs()
	}
	if cfg.MTU == 0 {
		cfg.MTU = 1500
	}
	if cfg.LogLevel == "" {
		cfg.LogLevel = "info"
	}
	if cfg.BinDir == "" {
		if cfg.BinDir, err = BinDir(); err != nil {
			return nil, err
		}
	}
	root, err := cgroupRoot()
	if err != nil {
		return nil, err
	}
	if err := Sweep(); err != nil {
		return nil, fmt.Errorf("remains of an earlier run: %w", err)
	}
	run, err := newRun(cfg.Label)
	if err != nil {
		return nil, err
	}
	c := &Cluster{Run: run, cfg: cfg, pods: map[string]*Pod{}, cgroup: filepath.Join(root, "podweir-test", run.ID)}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	for _, dir := range []string{c.logDir(), c.cniCacheDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	if c.Manifests, err = NewManifests(filepath.Join(c.dir(), "manifests")); err != nil {
		return nil, err
	}
	if cfg.Wire {
		if err := c.makeWire(ctx); err != nil {
			return nil, err
		}
		return c, nil
	}
	if err := c.makeSwitch(ctx); err != nil {
		return nil, err
	}
	var gateways []netip.Addr
	for _, p := range extAddrs() {
		gateways = append(gateways, p.Addr())
	}
	if c.Ext, err = c.newNetns("ext"); err != nil {
		return nil, err
	}
	if err := c.attach(ctx, c.Ext, "ext", extAddrs(), nil); err != nil {
		return nil, err
	}
	for _, nc := range cfg.Nodes {
		n, err := c.newNode(nc)
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", nc.Name, err)
		}
		if err := c.attach(ctx, n.Netns, nc.Name, nc.Addrs, gateways); err != nil {
			return nil, fmt.Errorf("node %s: %w", nc.Name, err)
		}
		c.Nodes = append(c.Nodes, n)
	}
	return c, nil
}

func (c *Cluster) logDir() string      { return filepath.Join(c.dir(), "log") }
func (c *Cluster) cniCacheDir() string { return filepath.Join(c.dir(), "cni-cache") }

// Dir is the run's folder: manifests, logs, one folder per node.
func (c *Cluster) Dir() string { return c.dir() }

// Node returns the node of that name, nil if there is none.
func (c *Cluster) Node(name string) *Node {
	for _, n := range c.Nodes {
		if n.NodeName == name {
			return n
		}
	}
	return nil
}

// Pod returns a pod that was added, nil if there is none.
func (c *Cluster) Pod(namespace, name string) *Pod {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pods[namespace+"/"+name]
}

// StartAgents starts every node's agent and waits until all are ready.
func (c *Cluster) StartAgents(ctx context.Context) error {
	return c.eachNode(func(n *Node) error { return n.StartAgent(ctx) })
}

// KillAgents ends every agent with SIGKILL.
func (c *Cluster) KillAgents(ctx context.Context) error {
	return c.eachNode(func(n *Node) error { return n.KillAgent(ctx) })
}

// StopAgents ends every agent in an orderly way.
func (c *Cluster) StopAgents(ctx context.Context) error {
	return c.eachNode(func(n *Node) error { return n.StopAgent(ctx) })
}

// BeginAgents starts every node's agent and waits until all of them answer.
func (c *Cluster) BeginAgents(ctx context.Context) error {
	return c.eachNode(func(n *Node) error { return n.BeginAgent(ctx) })
}

// AwaitReady waits until every running agent is ready.
func (c *Cluster) AwaitReady(ctx context.Context) error {
	return c.eachNode(func(n *Node) error { return n.waitReady(ctx, n.Agent()) })
}

func (c *Cluster) eachNode(fn func(*Node) error) error {
	errs := make([]error, len(c.Nodes))
	var wg sync.WaitGroup
	for i, n := range c.Nodes {
		wg.Go(func() { errs[i] = fn(n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Keep lets the cluster outlive this process; [Run.Remove] ends it.
func (c *Cluster) Keep() error {
	c.Kept = true
	return c.save(c.dir())
}

// Close ends all processes and removes every trace.
func (c *Cluster) Close() error { return c.Remove() }

// Tap captures everything on the underlay: the switch floods each frame once
// to a port that never sends.
func (c *Cluster) Tap(ctx context.Context) (*Capture, error) { return c.Switch.Capture(ctx, tapName) }

// Sysctl writes one sysctl of the namespace, given as a path below /proc/sys.
func (n *Netns) Sysctl(key, value string) error {
	return n.Do(func() error {
		if err := os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0o644); err != nil {
			return fmt.Errorf("sysctl in %s: %w", n.Name, err)
		}
		return nil
	})
}

// mountBPF mounts a bpffs of its own on dir.
func mountBPF(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount a bpffs on %s: %w", dir, err)
	}
	return nil
}
