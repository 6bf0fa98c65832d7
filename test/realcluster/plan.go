package realcluster

import (
	"fmt"
	"os"
	"path/filepath"
)

// Versions and the address plan.
const (
	Version = "v1.37.2" // of Kubernetes: also in modules/kubernetes/go.mod

	bridge     = "podweir0"
	hostIP     = "172.31.0.1" // the API server; a client outside the cluster
	hostIP6    = "fd00:172:31::1"
	apiserver  = "https://" + hostIP + ":6443"
	podCIDRs   = "10.244.0.0/16,fd00:10:244::/48"
	svcCIDRs   = "10.98.0.0/16,fd00:10:98::/112"
	apiVIP     = "10.98.0.1"
	dnsVIP     = "10.98.0.10"
	domain     = "cluster.local"
	pauseImage = "podweir-test/pause:1"
	dnsImage   = "podweir-test/coredns:1"
	toolsImage = "podweir-test/tools:1"
)

// Config says what to bring up.
type Config struct {
	Tree  string // of podweir
	Cache string // for binaries and images of Kubernetes
	State string // for everything else
	Nodes int
	Image string // archive of podweir's image
	Out   func(format string, args ...any)
}

// Default is the configuration that the environment asks for.
func Default(tree string) (Config, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return Config{}, fmt.Errorf("no home folder: set HOME, or PODWEIR_CLUSTER_CACHE and PODWEIR_CLUSTER_STATE: %w", err)
	}
	dir := func(variable, xdg, fallback string) string {
		if d := os.Getenv(variable); d != "" {
			return d
		}
		base := os.Getenv(xdg)
		if base == "" {
			base = filepath.Join(home, fallback)
		}
		return filepath.Join(base, "podweir", "cluster")
	}
	return Config{
		Tree:  tree,
		Cache: filepath.Join(dir("PODWEIR_CLUSTER_CACHE", "XDG_CACHE_HOME", ".cache"), Version),
		State: dir("PODWEIR_CLUSTER_STATE", "XDG_STATE_HOME", ".local/state"),
		Nodes: 3,
		Image: filepath.Join(tree, "bin", "podweir-image.tar"),
		Out:   func(format string, args ...any) { fmt.Printf(format+"\n", args...) },
	}, nil
}

func (c Config) bin(name string) string { return filepath.Join(c.Cache, "bin", name) }

// Bin is where a binary that was built is.
func (c Config) Bin(name string) string { return c.bin(name) }

func (c Config) cp(elem ...string) string {
	return filepath.Join(append([]string{c.State, "cp"}, elem...)...)
}
func (c Config) kubeconfig(name string) string { return c.cp(name + ".kubeconfig") }

// Kubeconfig is the file of the cluster's administrator.
func (c Config) Kubeconfig() string { return c.kubeconfig("admin") }

// Node is one node's plan.
type Node struct {
	Name string // n1: also its host name
	IP   string
	IP6  string
	dir  string
}

func (c Config) nodes() (out []Node) {
	for i := 1; i <= c.Nodes; i++ {
		out = append(out, c.node(i))
	}
	return out
}

func (c Config) node(i int) Node {
	name := fmt.Sprintf("n%d", i)
	return Node{
		Name: name, IP: fmt.Sprintf("172.31.0.%d", i+1), IP6: fmt.Sprintf("fd00:172:31::%x", i+1),
		dir: filepath.Join(c.State, "nodes", name),
	}
}

// find returns the node of a name.
func (c Config) find(name string) (Node, error) {
	for _, n := range c.nodes() {
		if n.Name == name {
			return n, nil
		}
	}
	return Node{}, fmt.Errorf("there is no node %q: nodes are n1 to n%d", name, c.Nodes)
}

func (n Node) netns() string           { return "podweir-" + n.Name }
func (n Node) cgroup() string          { return "podweir-" + n.Name }
func (n Node) veth() string            { return "podweir-" + n.Name }
func (n Node) path(e ...string) string { return filepath.Join(append([]string{n.dir}, e...)...) }
