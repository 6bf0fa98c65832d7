package realcluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What tests do to a running cluster, and how they look into it. None of it
// needs the API server.

// Names of the nodes, in their order.
func (c Config) Names() (out []string) {
	for _, n := range c.nodes() {
		out = append(out, n.Name)
	}
	return out
}

// Node is the plan of a node.
func (c Config) Node(name string) (Node, error) { return c.find(name) }

// HostIP and HostIP6 are the addresses of this machine, where the nodes see
// the API server and whoever is outside.
const (
	HostIP  = hostIP
	HostIP6 = hostIP6
	Bridge  = bridge
)

// In is a command in all of a node's namespaces; done frees what it holds once
// it has started.
func (c Config) In(ctx context.Context, node string, args ...string) (cmd *exec.Cmd, done func(), err error) {
	n, err := c.find(node)
	if err != nil {
		return nil, nil, err
	}
	return n.In(ctx, args...)
}

// Dial connects from a node's own network namespace.
func (c Config) Dial(ctx context.Context, node, network, addr string) (net.Conn, error) {
	n, err := c.find(node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return dialer(n.netns())(ctx, network, addr)
}

// LogFile is a file that a process of a node writes: kubelet, containerd.
func (c Config) LogFile(node, name string) (string, error) {
	n, err := c.find(node)
	return n.log(name), err
}

// AuditLog is what the API server was asked by podweir's agents, a JSON object
// a line.
func (c Config) AuditLog() string { return c.cp("log", "audit") }

// cutRules keep a node and the API server from each other.
var cutRules = [][]string{
	{"INPUT", "-s", hostIP, "-p", "tcp", "--sport", "6443", "-j", "REJECT", "--reject-with", "tcp-reset"},
	{"OUTPUT", "-d", hostIP, "-p", "tcp", "--dport", "6443", "-j", "REJECT", "--reject-with", "tcp-reset"},
}

// Cut is a node's connection to the API server, cut in both directions: what
// is under way is reset. mend makes it whole again, as does Mend.
func (c Config) Cut(ctx context.Context, node string) (mend func() error, err error) {
	n, err := c.find(node)
	if err != nil {
		return nil, err
	}
	mend = func() error { return c.Mend(context.WithoutCancel(ctx), node) }
	for _, rule := range cutRules {
		if err := n.run(ctx, append([]string{"iptables", "-w", "-I"}, rule...)...); err != nil {
			return nil, errors.Join(err, mend())
		}
	}
	return mend, nil
}

// Mend takes back all that Cut did to a node.
func (c Config) Mend(ctx context.Context, node string) error {
	n, err := c.find(node)
	if err != nil {
		return err
	}
	for _, rule := range cutRules {
		for n.run(ctx, append([]string{"iptables", "-w", "-C"}, rule...)...) == nil {
			if err := n.run(ctx, append([]string{"iptables", "-w", "-D"}, rule...)...); err != nil {
				return err
			}
		}
	}
	return nil
}

// StopPart ends a process of the control plane: kube-apiserver, say.
func (c Config) StopPart(name string) error {
	p, err := c.part(name)
	if err != nil {
		return err
	}
	return stopProcess(c.record(p), 3*time.Second)
}

// StartPart starts it again and waits until it serves.
func (c Config) StartPart(ctx context.Context, name string) error {
	p, err := c.part(name)
	if err != nil {
		return err
	}
	return c.startPart(ctx, p)
}

func (c Config) part(name string) (part, error) {
	parts := c.parts()
	i := slices.IndexFunc(parts, func(p part) bool { return p.name == name })
	if i < 0 {
		return part{}, fmt.Errorf("the control plane has no %q", name)
	}
	return parts[i], nil
}

// RestartKubelet ends a node's kubelet and starts another. Pods live on.
func (c Config) RestartKubelet(node string) error {
	n, err := c.find(node)
	if err != nil {
		return err
	}
	if err := n.endChild("kubelet"); err != nil {
		return err
	}
	return c.startKubelet(n)
}

// endChild ends a program of the node. The recorded process is nsenter, which
// waits for it.
func (n Node) endChild(name string) error {
	pid := running(n.path("run", name))
	if pid == 0 {
		return fmt.Errorf("the %s of %s does not run", name, n.Name)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	if err != nil {
		return err
	}
	for _, f := range strings.Fields(string(children)) {
		child, err := strconv.Atoi(f)
		if err != nil {
			return err
		}
		if err := unix.Kill(child, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	if !waitEnd(n.path("run", name), 20*time.Second) {
		return fmt.Errorf("the %s of %s does not end", name, n.Name)
	}
	return nil
}

// PowerOff takes a node away from one moment to the next: its processes, its
// network namespace with all that is in the kernel for it, what it had in
// memory. What it had on disk stays.
func (c Config) PowerOff(ctx context.Context, node string) error {
	n, err := c.find(node)
	if err != nil {
		return err
	}
	if running(n.record()) == 0 {
		return fmt.Errorf("node %s of %s is not up", node, c.title())
	}
	// The cable first: nobody hears that it ends.
	return errors.Join(n.removeNetwork(ctx), n.end(ctx))
}

// PowerOn starts a node over what it has on disk.
func (c Config) PowerOn(ctx context.Context, node string) error {
	n, err := c.find(node)
	if err != nil {
		return err
	}
	if running(n.record()) != 0 {
		return fmt.Errorf("node %s is up", node)
	}
	return c.startNode(ctx, n, nil)
}

// ImportOlder has every node's runtime know OlderImage.
func (c Config) ImportOlder(ctx context.Context) error {
	archive := filepath.Join(c.Tree, "bin", "older", "podweir-image.tar")
	if _, err := os.Stat(archive); err != nil {
		return fmt.Errorf("the image of an older version is missing: tools/older-image.sh %s %s: %w", archive, OlderImage, err)
	}
	for _, n := range c.nodes() {
		if err := n.importImage(ctx, archive); err != nil {
			return err
		}
	}
	return nil
}

// ToolPath is a program of the tree's bin.
func (c Config) ToolPath(name string) string { return filepath.Join(c.Tree, "bin", name) }
