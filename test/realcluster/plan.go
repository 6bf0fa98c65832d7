package realcluster

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
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

	podweirImage = "podweir:dev"
)

// OlderImage is podweir of an older version, which tools/older-image.sh builds
// for tests, and which nodes do not have by themselves.
const OlderImage = "podweir:older"

// Config says what to bring up.
type Config struct {
	// Name tells clusters of one machine apart. Without one it is the cluster
	// in the machine's own network; any other is in a network namespace as a
	// whole, so all have the same addresses and devices.
	Name  string
	Tree  string // of podweir
	Cache string // for binaries and images of Kubernetes
	State string // for everything else
	Nodes int
	Image string // archive of podweir's image
	Proxy string // who does services, see Choose
	CNI   string // who connects pods
	Out   func(format string, args ...any)
}

// names of clusters are parts of those of namespaces, cgroups and folders.
var names = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$`)

// Default is the configuration that the environment asks for.
func Default(tree string) (Config, error) {
	name := os.Getenv("PODWEIR_CLUSTER_NAME")
	if name != "" && !names.MatchString(name) {
		return Config{}, fmt.Errorf("PODWEIR_CLUSTER_NAME is %q: up to 32 small letters, digits and inner hyphens name a cluster", name)
	}
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
	state := dir("PODWEIR_CLUSTER_STATE", "XDG_STATE_HOME", ".local/state")
	if name != "" {
		state += "-" + name
	}
	c := Config{
		Name:  name,
		Tree:  tree,
		Cache: filepath.Join(dir("PODWEIR_CLUSTER_CACHE", "XDG_CACHE_HOME", ".cache"), Version),
		State: state,
		Nodes: 3,
		Image: filepath.Join(tree, "bin", "podweir-image.tar"),
		Out:   func(format string, args ...any) { fmt.Printf(format+"\n", args...) },
	}
	return c, c.Choose("", "")
}

func (c Config) bin(name string) string { return filepath.Join(c.Cache, "bin", name) }

// Bin is where a binary that was built is.
func (c Config) Bin(name string) string { return c.bin(name) }

func (c Config) cp(elem ...string) string {
	return filepath.Join(append([]string{c.State, "cp"}, elem...)...)
}
func (c Config) kubeconfig(name string) string { return c.cp(name + ".kubeconfig") }

// label begins the names of what a cluster has of the machine: namespaces and
// cgroups.
func (c Config) label() string {
	if c.Name == "" {
		return "podweir"
	}
	return "podweir-" + c.Name
}

// host is the network namespace that the cluster is in; none: the machine's
// own.
func (c Config) host() string {
	if c.Name == "" {
		return ""
	}
	return c.label() + "-host"
}

// cgroup is that of the control plane.
func (c Config) cgroup() string { return c.label() + "-cp" }

// Kubeconfig is the file of the cluster's administrator.
func (c Config) Kubeconfig() string { return c.kubeconfig("admin") }

// Node is one node's plan.
type Node struct {
	Name string // n1: also its host name
	IP   string
	IP6  string

	index int
	dir   string
	own   string // name of its network namespace and cgroups
	host  string // network namespace that it is connected to
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
		Name: name, IP: fmt.Sprintf("172.31.0.%d", i+1), IP6: fmt.Sprintf("fd00:172:31::%x", i+1), index: i,
		dir: filepath.Join(c.State, "nodes", name), own: c.label() + "-" + name, host: c.host(),
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

func (n Node) netns() string           { return n.own }
func (n Node) cgroup() string          { return n.own }
func (n Node) veth() string            { return "podweir-" + n.Name }
func (n Node) mac() string             { return "02:70:77:00:00:" + fmt.Sprintf("%02x", n.index) }
func (n Node) path(e ...string) string { return filepath.Join(append([]string{n.dir}, e...)...) }
