package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	corev1 "k8s.io/api/core/v1"
)

// Pod is a pod plugged into a node.
type Pod struct {
	*Netns
	Namespace, PodName string
	UID                string
	Node               *Node
	ContainerID        string
	Addrs              []netip.Addr     // as CNI ADD answered
	Result             *types100.Result // of CNI ADD
	PortMappings       []PortMapping    // asked for by the "portMappings" capability
	Bandwidth          map[string]any   // by that of this name
}

// PortMapping is a host port as container runtimes ask for it.
type PortMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol,omitempty"`
	HostIP        string `json:"hostIP,omitempty"`
}

// AddPod makes the sandbox of a pod on the node its spec names, and plugs it
// with CNI ADD. The addresses of its status, if any, are asked for by the
// "ips" capability: in directory mode the manifests say who has which.
func (c *Cluster) AddPod(ctx context.Context, obj *corev1.Pod, ports ...PortMapping) (*Pod, error) {
	p, err := c.NewSandbox(obj)
	if err != nil {
		return nil, err
	}
	p.PortMappings = ports
	var ips []string
	for _, ip := range obj.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	if err := p.Add(ctx, ips...); err != nil {
		return nil, err
	}
	return p, nil
}

// AddPods adds all pods among objects, those of different nodes at a time.
func (c *Cluster) AddPods(ctx context.Context, objs ...Object) error {
	perNode := map[string][]*corev1.Pod{}
	for _, obj := range objs {
		if pod, ok := obj.(*corev1.Pod); ok {
			perNode[pod.Spec.NodeName] = append(perNode[pod.Spec.NodeName], pod)
		}
	}
	errs := make(chan error, len(perNode))
	var wg sync.WaitGroup
	for _, pods := range perNode {
		wg.Go(func() {
			for _, pod := range pods {
				if _, err := c.AddPod(ctx, pod); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	var err error
	for e := range errs {
		err = errors.Join(err, e)
	}
	return err
}

// NewSandbox makes a pod's namespace without plugging it.
func (c *Cluster) NewSandbox(obj *corev1.Pod) (*Pod, error) {
	key := obj.Namespace + "/" + obj.Name
	node := c.Node(obj.Spec.NodeName)
	if node == nil {
		return nil, fmt.Errorf("pod %s: spec.nodeName %q is no node of this cluster", key, obj.Spec.NodeName)
	}
	if c.Pod(obj.Namespace, obj.Name) != nil {
		return nil, fmt.Errorf("pod %s exists already", key)
	}
	ns, err := c.newNetns("pod-" + obj.Namespace + "-" + obj.Name)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", key, err)
	}
	id := make([]byte, 32)
	if _, err := rand.Read(id); err != nil {
		return nil, err
	}
	p := &Pod{
		Netns: ns, Namespace: obj.Namespace, PodName: obj.Name, UID: string(obj.UID),
		Node: node, ContainerID: hex.EncodeToString(id),
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods[key] = p
	return p, nil
}

// Add calls CNI ADD, asking for these addresses if any are given.
func (p *Pod) Add(ctx context.Context, ips ...string) error {
	res, err := p.cni().AddNetworkList(ctx, p.network(), p.runtimeConf(ips))
	if err != nil {
		return fmt.Errorf("CNI ADD of %s/%s: %w", p.Namespace, p.PodName, err)
	}
	if p.Result, err = types100.NewResultFromResult(res); err != nil {
		return fmt.Errorf("CNI ADD of %s/%s: result: %w", p.Namespace, p.PodName, err)
	}
	p.Addrs = nil
	for _, ip := range p.Result.IPs {
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			p.Addrs = append(p.Addrs, a.Unmap())
		}
	}
	return nil
}

// Check calls CNI CHECK.
func (p *Pod) Check(ctx context.Context) error {
	if err := p.cni().CheckNetworkList(ctx, p.network(), p.runtimeConf(nil)); err != nil {
		return fmt.Errorf("CNI CHECK of %s/%s: %w", p.Namespace, p.PodName, err)
	}
	return nil
}

// Del calls CNI DEL and leaves the namespace; it may be repeated.
func (p *Pod) Del(ctx context.Context) error {
	if err := p.cni().DelNetworkList(ctx, p.network(), p.runtimeConf(nil)); err != nil {
		return fmt.Errorf("CNI DEL of %s/%s: %w", p.Namespace, p.PodName, err)
	}
	return nil
}

// Delete ends the pod: its processes, CNI DEL, its namespace. Its manifest
// is the caller's.
func (p *Pod) Delete(ctx context.Context) error {
	err := errors.Join(removeCgroup(p.cgroup), p.Del(ctx), removeNetns(p.Name))
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	delete(p.c.pods, p.Namespace+"/"+p.PodName)
	return err
}

// IPv4 is the pod's IPv4 address; the zero Addr if it has none.
func (p *Pod) IPv4() netip.Addr { return p.addr(netip.Addr.Is4) }

// IPv6 is the pod's IPv6 address; the zero Addr if it has none.
func (p *Pod) IPv6() netip.Addr { return p.addr(netip.Addr.Is6) }

func (p *Pod) addr(is func(netip.Addr) bool) netip.Addr {
	for _, a := range p.Addrs {
		if is(a) {
			return a
		}
	}
	return netip.Addr{}
}

func (p *Pod) runtimeConf(ips []string) *libcni.RuntimeConf {
	rc := &libcni.RuntimeConf{
		ContainerID: p.ContainerID,
		NetNS:       p.Path(),
		IfName:      "eth0",
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.Namespace},
			{"K8S_POD_NAME", p.PodName},
			{"K8S_POD_INFRA_CONTAINER_ID", p.ContainerID},
			{"K8S_POD_UID", p.UID},
		},
	}
	rc.CapabilityArgs = map[string]any{}
	if len(ips) > 0 {
		rc.CapabilityArgs["ips"] = ips
	}
	if len(p.PortMappings) > 0 {
		rc.CapabilityArgs["portMappings"] = p.PortMappings
	}
	if len(p.Bandwidth) > 0 {
		rc.CapabilityArgs["bandwidth"] = p.Bandwidth
	}
	return rc
}

// network is the configuration a node would have in /etc/cni/net.d.
func (p *Pod) network() *libcni.NetworkConfigList {
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.1.0",
		"name":       "podweir",
		"plugins": []map[string]any{{
			"type":         "podweir-cni",
			"socket":       p.Node.Socket(),
			"stateDir":     p.Node.StateDir(),
			"capabilities": map[string]bool{"ips": true, "portMappings": true, "bandwidth": true},
		}},
	})
	if err != nil { // strings only
		panic(err)
	}
	list, err := libcni.NetworkConfFromBytes(conf)
	if err != nil { // the same for every pod
		panic(err)
	}
	return list
}

func (p *Pod) cni() *libcni.CNIConfig {
	exec := &pluginExec{RawExec: invoke.RawExec{}, node: p.Node}
	return libcni.NewCNIConfigWithCacheDir([]string{p.c.cfg.BinDir}, p.c.cniCacheDir(), exec)
}

// pluginExec runs plugins inside the node's namespace.
type pluginExec struct {
	invoke.RawExec
	node *Node
}

// ExecPlugin runs one plugin; a failure is the error the plugin printed.
func (e *pluginExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	cmd, cg, err := e.node.command(ctx, []string{path})
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	if err := e.node.start(cmd, cg); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		if stdout.Len() > 0 {
			// The specification: the error as JSON on standard output.
			var perr types.Error
			if json.Unmarshal(stdout.Bytes(), &perr) == nil && perr.Msg != "" {
				return nil, &perr
			}
		}
		return nil, &ExitError{[]string{path}, e.node.Name, stdout.String(), stderr.String(), err}
	}
	return stdout.Bytes(), nil
}

// Decode reads the answer to VERSION.
func (e *pluginExec) Decode(data []byte) (version.PluginInfo, error) {
	return (&version.PluginDecoder{}).Decode(data)
}
