package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/apiserver"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/source"
	objects "github.com/podweir/podweir/internal/table"
	"github.com/podweir/podweir/internal/version"
)

// clusterTimeout is for all that is read from the API server.
const clusterTimeout = 30 * time.Second

// Cluster is an API server that knows names.
type Cluster interface {
	// Each hands over all objects of a kind.
	Each(ctx context.Context, kind string, each func(metav1.Object)) error
}

// DialCluster returns the API server that a kubeconfig leads to.
func DialCluster(kubeconfig string) (Cluster, error) {
	rc, _, err := apiserver.Config(apiserver.Options{Kubeconfig: kubeconfig, UserAgent: "podweir/" + version.String()})
	if err != nil {
		return nil, err
	}
	c, err := source.NewClient(rc)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %s: %w", kubeconfig, err)
	}
	return c, nil
}

// kubeconfigFlag lets a command ask the API server for names.
func (s *session) kubeconfigFlag(c *cobra.Command) *cobra.Command {
	c.Flags().StringVar(&s.kubeconfig, "kubeconfig", "", "file that leads to the API server; it is asked for the names of pods, services and nodes, with the agent or in its place")
	return c
}

// complete adds what the API server knows. What the agent has told stays: that
// is what is in force. What cannot be read is passed to warn.
func (n *names) complete(ctx context.Context, c Cluster, m Maps, warn func(error)) error {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	read := func(kind string, each func(metav1.Object)) bool {
		err := c.Each(ctx, kind, each)
		if err != nil {
			warn(fmt.Errorf("API server: %w; going on without", err))
		}
		return err == nil
	}
	var pods []*corev1.Pod
	if read("Pod", func(o metav1.Object) {
		if p, ok := o.(*corev1.Pod); ok && !p.Spec.HostNetwork && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			pods = append(pods, p)
		}
	}) {
		n.everyPod = map[string][]netip.Addr{}
		for _, p := range pods {
			n.everyPod[podName(p.Namespace, p.Name)] = objects.PodIPs(p)
		}
	}
	slices.SortFunc(pods, heirFirst)
	for _, p := range pods {
		n.addPod(podName(p.Namespace, p.Name), objects.PodIPs(p))
	}
	if n.down == nil {
		return nil
	}
	frontends, nodes := map[frontend]api.Service{}, map[netip.Addr]string{}
	read("Service", func(o metav1.Object) {
		if s, ok := o.(*corev1.Service); ok {
			addFrontends(frontends, s)
		}
	})
	read("Node", func(o metav1.Object) {
		if node, ok := o.(*corev1.Node); ok {
			for _, a := range node.Status.Addresses {
				if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
					nodes[addr] = node.Name
				}
			}
		}
	})
	return errors.Join(n.completeEndpoints(m), n.completeServices(m, frontends), n.completeNodes(m, nodes))
}

// heirFirst puts a pod before one that is being deleted, whose address it may
// have by now, and a younger before an older one.
func heirFirst(a, b *corev1.Pod) int {
	switch aGoes, bGoes := a.DeletionTimestamp != nil, b.DeletionTimestamp != nil; {
	case aGoes && !bGoes:
		return 1
	case bGoes && !aGoes:
		return -1
	}
	if c := b.CreationTimestamp.Compare(a.CreationTimestamp.Time); c != 0 {
		return c
	}
	return strings.Compare(podName(a.Namespace, a.Name), podName(b.Namespace, b.Name))
}

// completeEndpoints names the pods of this node.
func (n *names) completeEndpoints(m Maps) error {
	all, err := m.Endpoints()
	if err != nil {
		return err
	}
	byID := map[uint32]*api.Endpoint{}
	for a, e := range all {
		addr := maps.FromAddr(a)
		name := n.pods[addr]
		if name == "" {
			continue
		}
		if byID[e.Id] == nil {
			namespace, pod := splitName(name)
			byID[e.Id] = &api.Endpoint{ID: e.Id, Namespace: namespace, Pod: pod, HostIfindex: int(e.Ifindex), HostIfName: n.ifName(e.Ifindex)}
		}
		byID[e.Id].Addrs = append(byID[e.Id].Addrs, addr)
		n.podDevices[e.Ifindex] = name
	}
	for _, e := range byID {
		slices.SortFunc(e.Addrs, netip.Addr.Compare)
		n.endpoints = append(n.endpoints, *e)
	}
	return nil
}

// frontend is where a service port answers.
type frontend struct {
	at    netip.AddrPort
	proto string
}

// addFrontends adds those that a Service asks for; a NodePort's address is the
// unspecified one, as in the map.
func addFrontends(to map[frontend]api.Service, s *corev1.Service) {
	types := map[netip.Addr]string{}
	add := func(kind string, addrs ...string) {
		for _, a := range addrs {
			if addr, err := netip.ParseAddr(a); err == nil {
				types[addr] = kind
			}
		}
	}
	add("ExternalIP", s.Spec.ExternalIPs...)
	for _, in := range s.Status.LoadBalancer.Ingress {
		add("LoadBalancer", in.IP)
	}
	add("ClusterIP", s.Spec.ClusterIPs...)
	for _, p := range s.Spec.Ports {
		put := func(addr netip.Addr, port int32, kind string) {
			at := netip.AddrPortFrom(addr, uint16(port))
			to[frontend{at, string(p.Protocol)}] = api.Service{
				Kind: "Service", Namespace: s.Namespace, Name: s.Name, Port: p.Name, Protocol: string(p.Protocol),
				Frontends: []netip.AddrPort{at}, Types: []string{kind},
			}
		}
		for addr, kind := range types {
			put(addr, p.Port, kind)
		}
		if p.NodePort != 0 {
			put(netip.IPv4Unspecified(), p.NodePort, "NodePort")
			put(netip.IPv6Unspecified(), p.NodePort, "NodePort")
		}
	}
}

// completeServices names the ids in the map by their frontends.
func (n *names) completeServices(m Maps, frontends map[frontend]api.Service) error {
	programmed, err := m.Services()
	if err != nil {
		return err
	}
	for k, v := range programmed {
		s, ok := frontends[frontend{addrPort(k.Addr, k.Port), protocol(k.Proto)}]
		if !ok || v.Id == 0 {
			continue
		}
		s.ID = v.Id
		if have, ok := n.services[v.Id]; ok {
			s.Frontends, s.Types = slices.Concat(have.Frontends, s.Frontends), slices.Concat(have.Types, s.Types)
		}
		n.services[v.Id] = s
	}
	return nil
}

// protocol is how objects write it.
func protocol(number uint8) string {
	switch number {
	case maps.ProtoTCP:
		return "TCP"
	case maps.ProtoUDP:
		return "UDP"
	case maps.ProtoSCTP:
		return "SCTP"
	}
	return ""
}

// completeNodes names the ids in the map by their addresses.
func (n *names) completeNodes(m Maps, nodes map[netip.Addr]string) error {
	peers, err := m.Nodes()
	if err != nil {
		return err
	}
	for id, node := range peers {
		if name := nodes[maps.FromAddr(node.Addr)]; name != "" {
			n.nodes[id] = name
		}
	}
	return nil
}
