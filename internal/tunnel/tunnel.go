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
	// Plain are the ranges outside of the cluster, and of nodes, that pods
	// reach under their own addresses; see [CheckPlain].
	Plain []netip.Prefix
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
	// HostAddrs are the addresses that this node has, sorted.
	HostAddrs []netip.Addr
	// Errs name objects that contradict each other or lack something.
	Errs []error
	// Delta is what is different from the output before.
	Delta Delta
}

// Delta names what differs between two outputs.
type Delta struct {
	Addrs    []netip.Addr // whose entry in Addrs is new, another or gone
	Prefixes bool         // some of them are
	Routes   bool
}

// Compile compiles in.
func Compile(in Input) Output {
	return NewCompiler().Compile(Changes{Pods: in.Pods, Rest: &in})
}

// base is what comes of everything but the pods of other nodes.
type base struct {
	in    Input
	uids  func(types.NamespacedName) types.UID // of pods of this node
	nodes map[string]*NodeInfo
	cidrs prefixIndex

	addrs     map[netip.Addr]Peer
	hosts     []netip.Addr
	prefixes  map[netip.Prefix]Peer
	routes    []Route
	errs      []error // of addresses
	rangeErrs []error
}

func newBase(in Input, uids func(types.NamespacedName) types.UID) *base {
	b := &base{
		in: in, uids: uids, nodes: make(map[string]*NodeInfo, len(in.Nodes)),
		addrs:    make(map[netip.Addr]Peer, len(in.Nodes)+len(in.HostAddrs)+len(in.Local)),
		prefixes: make(map[netip.Prefix]Peer, len(in.Nodes)+len(in.ServiceCIDRs)+1),
	}
	for i := range in.Nodes {
		b.nodes[in.Nodes[i].Name] = &in.Nodes[i]
	}
	if b.nodes[in.Self] == nil {
		b.fail("Node %s: is this node and not among the Node objects: it has no pod CIDRs and other nodes do not accept its packets; create it or set the agent's node name", in.Self)
	}
	b.hostAddrs()
	b.localPods()
	b.nodeAddrs()
	b.podRanges()
	b.serviceRanges()
	b.prefixes[World()] = Peer{}
	b.plainRanges()
	slices.SortFunc(b.routes, func(a, b Route) int {
		return cmp.Or(a.Dst.Addr().Compare(b.Dst.Addr()), cmp.Compare(a.Dst.Bits(), b.Dst.Bits()))
	})
	slices.SortFunc(b.hosts, netip.Addr.Compare)
	b.hosts = slices.Compact(b.hosts)
	return b
}

func (b *base) fail(format string, args ...any) {
	b.errs = append(b.errs, fmt.Errorf(format, args...))
}

func (b *base) hostAddrs() {
	self := b.nodes[b.in.Self]
	for _, a := range b.in.HostAddrs {
		a = a.Unmap().WithZone("")
		if !a.IsValid() || a.IsLoopback() || a.IsUnspecified() || a.Is6() && a.IsLinkLocalUnicast() {
			continue
		}
		p := Peer{Flags: maps.PeerHost | b.nodePortFlag(a, self)}
		if self != nil && slices.Contains(self.InternalIPs, a) {
			p.Flags |= maps.PeerInternal
		}
		b.addrs[a] = p
		b.hosts = append(b.hosts, a)
	}
}

func (b *base) localPods() {
	for _, a := range sortedAddrs(b.in.Local) {
		pod := b.in.Local[a]
		if _, taken := b.addrs[a]; taken {
			b.fail("Pod %s: its address %s is also on a device of this node, which keeps it; delete the pod", pod, a)
			continue
		}
		b.addrs[a] = Peer{Flags: maps.PeerPod | maps.PeerLocal, Pod: pod, UID: b.uids(pod)}
	}
}

func (b *base) nodeAddrs() {
	for i := range b.in.Nodes {
		n := &b.in.Nodes[i]
		if n.Name == b.in.Self {
			continue
		}
		for _, a := range n.InternalIPs {
			if old, taken := b.addrs[a]; taken {
				b.fail("Node %s: its InternalIP %s is %s, which keeps it", n.Name, a, describe(old))
				continue
			}
			b.addrs[a] = Peer{Node: n.Name, Flags: maps.PeerNode | b.nodePortFlag(a, n)}
		}
	}
}

// newer: of two pods that claim an address, a has it.
func newer(a, b *corev1.Pod) bool {
	return cmp.Or(
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.UID, b.UID),
		cmp.Compare(b.Namespace, a.Namespace),
		cmp.Compare(b.Name, a.Name)) > 0
}

func (b *base) podRanges() {
	for i := range b.in.Nodes {
		n := &b.in.Nodes[i]
		for _, p := range n.PodCIDRs {
			b.cidrs.add(p, n.Name)
			peer, route := Peer{Flags: maps.PeerPod}, Route{Dst: p, Kind: RouteOverlay, Node: n.Name}
			switch {
			case n.Name == b.in.Self:
				peer.Flags |= maps.PeerLocal
				route.Kind, route.Node = RouteBlackhole, ""
			case n.Addr.IsValid():
				peer.Node = n.Name
			}
			b.prefixes[p] = peer
			b.routes = append(b.routes, route)
		}
	}
}

func (b *base) serviceRanges() {
	fail := func(format string, args ...any) { b.rangeErrs = append(b.rangeErrs, fmt.Errorf(format, args...)) }
	for _, p := range b.in.ServiceCIDRs {
		if !p.IsValid() || p.Bits() == 0 {
			fail("service range %s: is no range for services", p)
			continue
		}
		p = p.Masked()
		if _, twice := b.prefixes[p]; twice && b.prefixes[p].Flags == maps.PeerService {
			continue
		}
		if cidr, node, overlaps := b.cidrs.find(p); overlaps {
			fail("service range %s: overlaps the pod CIDR %s of Node %s and is not used; services keep their own addresses, others in the range are not dropped; choose another range", p, cidr, node)
			continue
		}
		b.prefixes[p] = Peer{Flags: maps.PeerService}
		b.routes = append(b.routes, Route{Dst: p, Kind: RouteOverlay})
	}
}

// plainRanges says where pods are not masqueraded. They never are towards pods
// and services, whose ranges stay what they are.
func (b *base) plainRanges() {
	for _, p := range b.in.Plain {
		inside := false
		for other, peer := range b.prefixes {
			inside = inside || peer.Flags&(maps.PeerPod|maps.PeerService) != 0 && other.Bits() <= p.Bits() && other.Contains(p.Addr())
		}
		if !inside {
			b.prefixes[p] = Peer{Flags: maps.PeerPlain}
		}
	}
	for a, peer := range b.addrs {
		if peer.Flags&(maps.PeerNode|maps.PeerHost) != 0 && slices.ContainsFunc(b.in.Plain, func(p netip.Prefix) bool { return p.Contains(a) }) {
			peer.Flags |= maps.PeerPlain
			b.addrs[a] = peer
		}
	}
}

// CheckPlain says why a range cannot be one of [Input.Plain].
func CheckPlain(p netip.Prefix) error {
	switch mapped := netip.MustParsePrefix("::ffff:0:0/96"); {
	case p != p.Masked():
		return fmt.Errorf("%v has bits set beyond its length; did you mean %v?", p, p.Masked())
	case p.Bits() == 0:
		return fmt.Errorf("%v is everything; --masquerade says for which family pods are masqueraded at all", p)
	case p.Addr().Is6() && p.Overlaps(mapped):
		return fmt.Errorf("%v holds the IPv4-mapped addresses %v; name IPv4 ranges as such", p, mapped)
	}
	return nil
}

// describe says who has an address.
func describe(p Peer) string {
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
