package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Node is one node. Its [Netns] is the node's own namespace: Exec runs what
// a process of the host would.
type Node struct {
	*Netns
	NodeName string
	Config   NodeConfig

	dir string

	mu    sync.Mutex
	agent *Process
}

func (c *Cluster) newNode(nc NodeConfig) (*Node, error) {
	ns, err := c.newNetns(nc.Name)
	if err != nil {
		return nil, err
	}
	n := &Node{Netns: ns, NodeName: nc.Name, Config: nc, dir: filepath.Join(c.dir(), nc.Name)}
	if err := os.MkdirAll(n.StateDir(), 0o755); err != nil {
		return nil, err
	}
	if err := mountBPF(n.BPFFS()); err != nil {
		return nil, err
	}
	return n, nil
}

// BPFFS is the node's bpffs; maps and links are below.
func (n *Node) BPFFS() string { return filepath.Join(n.dir, "bpf") }

// StateDir is the agent's persistent state.
func (n *Node) StateDir() string { return filepath.Join(n.dir, "state") }

// Socket is the agent's unix socket.
func (n *Node) Socket() string { return filepath.Join(n.dir, "agent.sock") }

// AgentLog is the file all incarnations of the agent write to.
func (n *Node) AgentLog() string { return filepath.Join(n.c.logDir(), n.NodeName+"-agent.log") }

// Object is the node as a Kubernetes object.
func (n *Node) Object() *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.NodeName, Labels: map[string]string{corev1.LabelHostname: n.NodeName}}}
	for _, p := range n.Config.PodCIDRs {
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, p.String())
	}
	if len(node.Spec.PodCIDRs) > 0 {
		node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
	}
	for _, p := range n.Config.Addrs {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: p.Addr().String()})
	}
	return node
}

// agentArgs is the agent's command line.
func (n *Node) agentArgs() []string {
	cfg := n.c.cfg
	args := []string{"podweir-agent",
		"--node-name", n.NodeName,
		"--bpffs", n.BPFFS(),
		"--state-dir", n.StateDir(),
		"--socket", n.Socket(),
		"--listen", "127.0.0.1:9964",
		"--log-level", cfg.LogLevel,
	}
	// The node's cgroup, never the root: that has all processes of the machine.
	cgroup := n.cgroup
	if cfg.NoSockets {
		cgroup = "none"
	}
	args = append(args, "--cgroup", cgroup)
	if cfg.Kubeconfig != "" {
		args = append(args, "--kubeconfig", cfg.Kubeconfig)
	} else {
		args = append(args, "--manifests", n.c.Manifests.Dir)
	}
	for _, p := range cfg.ServiceCIDRs {
		args = append(args, "--service-cidr", p.String())
	}
	return append(append(args, cfg.AgentArgs...), n.Config.AgentArgs...)
}

// SetAgentArgs replaces what is added to the command line of every agent that
// is started from now on.
func (c *Cluster) SetAgentArgs(args ...string) { c.cfg.AgentArgs = args }

// StartAgent starts the node's agent and waits until it is ready.
func (n *Node) StartAgent(ctx context.Context) error {
	p, err := n.SpawnAgent()
	if err != nil {
		return err
	}
	return n.waitReady(ctx, p)
}

// SpawnAgent starts the node's agent.
func (n *Node) SpawnAgent() (*Process, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent != nil {
		select {
		case <-n.agent.done:
		default:
			return nil, fmt.Errorf("agent of %s is already running", n.NodeName)
		}
	}
	p, err := n.startLogged(n.AgentLog(), n.agentArgs())
	if err != nil {
		return nil, err
	}
	n.agent = p
	return p, nil
}

// startLogged starts a program whose output goes to the end of a file. It
// lives until it is killed or the run is removed.
func (n *Node) startLogged(path string, args []string) (*Process, error) {
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd, cg, err := n.command(context.Background(), args)
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = log, log
	p := &Process{args: args, netns: n.Name, cmd: cmd, log: path, lines: nil, done: make(chan struct{})}
	if err := n.start(cmd, cg); err != nil {
		return nil, err
	}
	p.PID = cmd.Process.Pid
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// BeginAgent starts the node's agent and waits
// only until it answers: it may be far from ready.
func (n *Node) BeginAgent(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- n.StartAgent(ctx) }()
	answered := make(chan error, 1)
	go func() {
		answered <- Eventually(ctx, func() error {
			_, _, err := n.AgentGet(ctx, "/readyz")
			return err
		})
	}()
	select {
	case err := <-ended:
		return err
	case err := <-answered:
		cancel()
		<-ended
		return err
	}
}

// waitReady asks /readyz on the agent's socket until it answers 200. The end
// of the process or of ctx gives the last answer and the end of the log.
func (n *Node) waitReady(ctx context.Context, p *Process) error {
	last := errors.New("no answer yet")
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		code, body, err := n.AgentGet(ctx, "/readyz")
		switch {
		case err == nil && code == http.StatusOK:
			return nil
		case err == nil:
			last = fmt.Errorf("/readyz: %d %s", code, strings.TrimSpace(body))
		case !errors.Is(err, context.DeadlineExceeded):
			last = err
		}
		select {
		case <-time.After(pause):
		case <-p.done:
			return fmt.Errorf("agent of %s ended: %v\n%s", n.NodeName, p.err, n.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("agent of %s is not ready: %w (%w)\n%s", n.NodeName, last, ctx.Err(), n.LogTail())
		}
	}
}

// AgentGet asks the agent over its unix socket.
func (n *Node) AgentGet(ctx context.Context, path string) (int, string, error) {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", n.Socket())
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// KillAgent ends the agent with SIGKILL, as the kernel would when memory is
// short. Without a running agent it does nothing.
func (n *Node) KillAgent(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent == nil {
		return nil
	}
	defer func() { n.agent = nil }()
	return n.agent.Kill(ctx)
}

// StopAgent asks the agent to end and waits until it has, without an error.
// Without a running agent it does nothing.
func (n *Node) StopAgent(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent == nil {
		return nil
	}
	if err := n.agent.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if err := n.agent.Wait(ctx); err != nil {
		return fmt.Errorf("stop the agent of %s: %w", n.NodeName, err)
	}
	n.agent = nil
	return nil
}

// RestartAgent kills the agent and starts a new one.
func (n *Node) RestartAgent(ctx context.Context) error {
	return errors.Join(n.KillAgent(ctx), n.StartAgent(ctx))
}

// Agent is the running agent process, nil if none was started.
func (n *Node) Agent() *Process {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.agent
}

// Podweir runs the operator's command against this node's agent and maps.
func (n *Node) Podweir(ctx context.Context, args ...string) (string, error) {
	return n.Exec(ctx, append([]string{"podweir", "--socket", n.Socket(), "--bpffs", n.BPFFS()}, args...)...)
}

// LogTail is the end of the agent's log.
func (n *Node) LogTail() string {
	data, err := os.ReadFile(n.AgentLog())
	if err != nil {
		return err.Error()
	}
	const most = 4 << 10
	if len(data) > most {
		data = append([]byte("...\n"), data[len(data)-most:]...)
	}
	return string(data)
}
