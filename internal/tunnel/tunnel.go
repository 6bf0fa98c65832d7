package tunnel

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
)

// Peer is what is known of an address or a range.
type Peer struct {
	// Node is the name of the node to tunnel to; empty: none. A remote pod
	// with none cannot be reached at present.
	Node string
	// Flags are maps.Peer*; 0 is the world.
	Flags uint32
	// Pod has the address; zero when no pod does.
	Pod types.NamespacedName
	UID types.UID
}

// Input is the state of the cluster as one node sees it.
type Input struct {
	// Self is the name of this node.
	Self string
	// Nodes as [Nodes] returns them, this one included.
	Nodes []NodeInfo
	// Pods of all nodes.
	Pods []*corev1.Pod
	// HostAddrs are the addresses of this node's devices. Loopback and IPv6
	// link-local ones are ignored.
	HostAddrs []netip.Addr
	// NodePorts says on which of the nodes' addresses NodePorts answer.
	NodePorts NodePortAddrs
	// ServiceCIDRs are the service ranges.
	ServiceCIDRs []netip.Prefix
	// Local are the pods that the CNI plugged in here, by address.
	Local map[netip.Addr]types.NamespacedName
}

// World is the prefix of every address of both families.
func World() netip.Prefix { return netip.PrefixFrom(netip.IPv6Unspecified(), 0) }

// RouteKind says what a route of the host does.
type RouteKind string

const (
	// RouteOverlay leads to podweir.vxlan.
	RouteOverlay RouteKind = "overlay"
	// RouteBlackhole drops what no more specific route takes.
	RouteBlackhole RouteKind = "blackhole"
)

// Route is a route of this node's main table.
type Route struct {
	Dst  netip.Prefix
	Kind RouteKind
	Node string // whose pods, when they are another node's
}

// Output is what the maps and the routing table shall hold.
type Output struct {
	Addrs    map[netip.Addr]Peer
	Prefixes map[netip.Prefix]Peer
	// Routes sorted by destination.
	Routes []Route
	// Errs name objects that contradict each other or lack something.
	Errs []error
}

// Compile compiles in.
func Compile(in Input) Output {
	c := compiler{in: in, nodes: map[string]*NodeInfo{}, out: Output{
		Addrs:    make(map[netip.Addr]Peer, len(in.Pods)+len(in.Nodes)+len(in.HostAddrs)),
		Prefixes: make(map[netip.Prefix]Peer, len(in.Nodes)+len(in.ServiceCIDRs)+1),
	}}
	for i := range in.Nodes {
		c.nodes[in.Nodes[i].Name] = &in.Nodes[i]
	}
	if c.nodes[in.Self] == nil {
		c.fail("Node %s: is this node and not among the Node objects: it has no pod CIDRs and other nodes do not accept its packets; create it or set the agent's node name", in.Self)
	}
	c.hostAddrs()
	c.localPods()
	c.nodeAddrs()
	c.remotePods()
	c.podRanges()
	c.serviceRanges()
	c.out.Prefixes[World()] = Peer{}
	slices.SortFunc(c.out.Routes, func(a, b Route) int {
		return cmp.Or(a.Dst.Addr().Compare(b.Dst.Addr()), cmp.Compare(a.Dst.Bits(), b.Dst.Bits()))
	})
	return c.out
}

type compiler struct {
	in    Input
	nodes map[string]*NodeInfo
	cidrs prefixIndex
	out   Output
}

func (c *compiler) fail(format string, args ...any) {
	c.out.Errs = append(c.out.Errs, fmt.Errorf(format, args...))
}

func (c *compiler) hostAddrs() {
	self := c.nodes[c.in.Self]
	for _, a := range c.in.HostAddrs {
		a = a.Unmap().WithZone("")
		if !a.IsValid() || a.IsLoopback() || a.IsUnspecified() || a.Is6() && a.IsLinkLocalUnicast() {
			continue
		}
		p := Peer{Flags: maps.PeerHost | c.nodePortFlag(a, self)}
		if self != nil && slices.Contains(self.InternalIPs, a) {
			p.Flags |= maps.PeerInternal
		}
		c.out.Addrs[a] = p
	}
}

func (c *compiler) localPods() {
	uids := map[types.NamespacedName]types.UID{}
	for _, p := range c.in.Pods {
		if p.Spec.NodeName == c.in.Self {
			uids[name(p)] = p.UID
		}
	}
	for _, a := range sortedAddrs(c.in.Local) {
		pod := c.in.Local[a]
		if _, taken := c.out.Addrs[a]; taken {
			c.fail("Pod %s: its address %s is also on a device of this node, which keeps it; delete the pod", pod, a)
			continue
		}
		c.out.Addrs[a] = Peer{Flags: maps.PeerPod | maps.PeerLocal, Pod: pod, UID: uids[pod]}
	}
}

func (c *compiler) nodeAddrs() {
	for i := range c.in.Nodes {
		n := &c.in.Nodes[i]
		if n.Name == c.in.Self {
			continue
		}
		for _, a := range n.InternalIPs {
			if old, taken := c.out.Addrs[a]; taken {
				c.fail("Node %s: its InternalIP %s is %s, which keeps it", n.Name, a, c.describe(old))
				continue
			}
			c.out.Addrs[a] = Peer{Node: n.Name, Flags: maps.PeerNode | c.nodePortFlag(a, n)}
		}
	}
}

func (c *compiler) remotePods() {
	first := len(c.out.Errs)
	type claim struct {
		pod  *corev1.Pod
		addr netip.Addr
	}
	winners := make(map[netip.Addr]*corev1.Pod, len(c.in.Pods))
	var losers []claim
	lost := map[string][]*corev1.Pod{}
	for _, p := range c.in.Pods {
		if p.Spec.NodeName == c.in.Self || !ownsAddrs(p) {
			continue
		}
		addrs := c.podAddrs(p)
		if len(addrs) > 0 && c.nodes[p.Spec.NodeName] == nil {
			lost[p.Spec.NodeName] = append(lost[p.Spec.NodeName], p)
		}
		for _, a := range addrs {
			old := winners[a]
			switch {
			case old == p: // the same address twice in one status
			case hasAddr(c.out.Addrs, a):
				losers = append(losers, claim{p, a})
			case old == nil:
				winners[a] = p
			case newer(p, old):
				winners[a] = p
				losers = append(losers, claim{old, a})
			default:
				losers = append(losers, claim{p, a})
			}
		}
	}
	for a, p := range winners {
		peer := Peer{Flags: maps.PeerPod, Pod: name(p), UID: p.UID}
		// A node without an address is reported with the node.
		if n := c.nodes[p.Spec.NodeName]; n != nil && n.Addr.IsValid() {
			peer.Node = n.Name
		}
		c.out.Addrs[a] = peer
	}
	for _, l := range losers {
		c.fail("Pod %s: its address %s is %s, which keeps it; delete the pod that is gone", name(l.pod), l.addr, c.describe(c.out.Addrs[l.addr]))
	}
	for node, pods := range lost {
		c.nodeMissing(node, pods)
	}
	slices.SortFunc(c.out.Errs[first:], func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
}

// nodeMissing reports pods on a node that has no object, all in one.
func (c *compiler) nodeMissing(node string, pods []*corev1.Pod) {
	first := slices.MinFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	what := fmt.Sprintf("Pod %s", name(first))
	if more := len(pods) - 1; more > 0 {
		what = fmt.Sprintf("%s and %d more", what, more)
	}
	if node == "" {
		c.fail("%s: spec.nodeName is empty: cannot be reached until it is set", what)
		return
	}
	c.fail("%s: on Node %s, which is not among the Node objects: cannot be reached until it is", what, node)
}

// newer: of two pods that claim an address, a has it.
func newer(a, b *corev1.Pod) bool {
	return cmp.Or(
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.UID, b.UID),
		cmp.Compare(b.Namespace, a.Namespace),
		cmp.Compare(b.Name, a.Name)) > 0
}

func hasAddr(m map[netip.Addr]Peer, a netip.Addr) bool {
	_, ok := m[a]
	return ok
}

// podAddrs returns the addresses that the status of p gives it.
func (c *compiler) podAddrs(p *corev1.Pod) []netip.Addr {
	ips, field := p.Status.PodIPs, "status.podIPs"
	if len(ips) == 0 && p.Status.PodIP != "" {
		ips, field = []corev1.PodIP{{IP: p.Status.PodIP}}, "status.podIP"
	}
	out := make([]netip.Addr, 0, len(ips))
	for _, ip := range ips {
		a, err := parseAddr(ip.IP)
		if err != nil {
			c.fail("Pod %s: %s: %w", name(p), field, err)
			continue
		}
		out = append(out, a)
	}
	return out
}

func (c *compiler) podRanges() {
	for i := range c.in.Nodes {
		n := &c.in.Nodes[i]
		for _, p := range n.PodCIDRs {
			c.cidrs.add(p, n.Name)
			peer, route := Peer{Flags: maps.PeerPod}, Route{Dst: p, Kind: RouteOverlay, Node: n.Name}
			switch {
			case n.Name == c.in.Self:
				peer.Flags |= maps.PeerLocal
				route.Kind, route.Node = RouteBlackhole, ""
			case n.Addr.IsValid():
				peer.Node = n.Name
			}
			c.out.Prefixes[p] = peer
			c.out.Routes = append(c.out.Routes, route)
		}
	}
}

func (c *compiler) serviceRanges() {
	for _, p := range c.in.ServiceCIDRs {
		if !p.IsValid() || p.Bits() == 0 {
			c.fail("service range %s: is no range for services", p)
			continue
		}
		p = p.Masked()
		if _, twice := c.out.Prefixes[p]; twice && c.out.Prefixes[p].Flags == maps.PeerService {
			continue
		}
		if cidr, node, overlaps := c.cidrs.find(p); overlaps {
			c.fail("service range %s: overlaps the pod CIDR %s of Node %s and is not used; services keep their own addresses, others in the range are not dropped; choose another range", p, cidr, node)
			continue
		}
		c.out.Prefixes[p] = Peer{Flags: maps.PeerService}
		c.out.Routes = append(c.out.Routes, Route{Dst: p, Kind: RouteOverlay})
	}
}

// describe says who has an address.
func (c *compiler) describe(p Peer) string {
	switch {
	case p.Flags&maps.PeerHost != 0:
		return "an address of this node's devices"
	case p.Flags&maps.PeerNode != 0:
		return "an address of Node " + p.Node
	case p.Flags&maps.PeerLocal != 0:
		return "that of Pod " + p.Pod.String() + " of this node"
	}
	return "that of Pod " + p.Pod.String()
}

// ownsAddrs: a pod with the host's network has its node's addresses, a
// completed one has none.
func ownsAddrs(p *corev1.Pod) bool {
	return !p.Spec.HostNetwork && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
}

func name(p *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
}

func sortedAddrs(m map[netip.Addr]types.NamespacedName) []netip.Addr {
	out := make([]netip.Addr, 0, len(m))
	for a := range m {
		out = append(out, a)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}
