package policy

import (
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/maps"
)

// Input is everything that verdicts depend on. Compile reads it only.
type Input struct {
	// Pods are the pods of the cluster that own addresses: not those that
	// completed. Names are unique. See [FromPod].
	Pods []Pod
	// Namespaces. The label kubernetes.io/metadata.name is implied.
	Namespaces      []Namespace
	Nodes           []Node
	Policies        []*networkingv1.NetworkPolicy
	ClusterPolicies []*v1beta1.ClusterNetworkPolicy
}

// Pod is a pod that owns its addresses. When two pods claim one address, an
// endpoint of this node goes before others, then the pod created later, then
// the greater UID; the loser does not own the address, and a Problem says so.
// A node's address is never a pod's.
type Pod struct {
	Namespace, Name string
	UID             types.UID
	Created         time.Time
	Labels          map[string]string
	Addrs           []netip.Addr
	HostNetwork     bool
	// Ports that have a name. Of several with one name and protocol the
	// first counts, as it does for a Service.
	Ports []NamedPort
	// Local says that the pod is an endpoint of this node.
	Local bool
}

// NamedPort is a container's port.
type NamedPort struct {
	Name  string
	Proto uint8 // maps.ProtoTCP and so on
	Port  uint16
}

// Namespace is a namespace.
type Namespace struct {
	Name   string
	Labels map[string]string
}

// Node is a node of the cluster.
type Node struct {
	Name   string
	Self   bool // this node
	Labels map[string]string
	// Addrs are those in its status, by which policies select nodes.
	Addrs []netip.Addr
	// Devices are further addresses known of it: of this node, those of its
	// devices.
	Devices []netip.Addr
}

// Output is the compiled state. Maps in it are shared with State: read only.
type Output struct {
	// Addrs has the identity of every pod and node address. The identity of
	// a local endpoint is that of its address: addresses of one pod may have
	// different ones, because an ipBlock may hold one of them alone.
	Addrs map[netip.Addr]uint32
	// Prefixes has the identities of addresses that are not in Addrs, by
	// longest prefix over both families as the map has them (IPv4 below
	// ::ffff:0:0/96). No prefix: IdentityWorld. ::/0 may be in it, and is then
	// accompanied by 0.0.0.0/0, since ::/0 covers both in the map.
	Prefixes map[netip.Prefix]uint32
	// Tables by number, keys complete with the table's number. Those with a
	// default have maps.TableDefault in it.
	Tables map[uint32]Table
	// PortClasses, sorted, without class 0.
	PortClasses []PortClass
	// Endpoints has every pod with Local set and not on the host's network.
	Endpoints map[types.NamespacedName]Endpoint
	// Rules has what the rule numbers in Tables and Transitional stand for;
	// 0 is no rule: what is left to the default, or isolated and not allowed.
	Rules map[uint32]RuleRef

	// Early and Transitional make the change from the previous output safe;
	// see the package comment for when they come and go.
	Early        Early
	Transitional Table

	Problems []Problem
	// State is to be given to the next Compile.
	State *State
	// Delta is what is different from the output before.
	Delta Delta
	// Work says what it took.
	Work Work
}

// Work counts what a compile looked at.
type Work struct {
	Addrs  int // whose identities were found anew
	Groups int // of pods, whose tables were written out
}

// Delta names what differs between the maps of two outputs.
type Delta struct {
	Addrs                 []netip.Addr // whose entry in Addrs is new, another or gone
	Prefixes              bool         // some of them are
	NewTables, GoneTables []uint32
	// Added and Removed are entries of tables that stay: of identities that
	// no address had before, and of such that none has any more.
	Added   Table
	Removed []maps.PolicyKey
}

// Table is a set of verdict entries.
type Table = map[maps.PolicyKey]maps.PolicyEntry

// Early has identities to give before endpoints change their tables. An
// address that is to get a different one later still, or none, has that in
// [Output.Addrs] and [Output.Prefixes].
type Early struct {
	Addrs    map[netip.Addr]uint32
	Prefixes map[netip.Prefix]uint32
}

// PortClass says that ports Lo to Hi, inclusive, are of class Class.
type PortClass struct {
	Lo, Hi uint16
	Class  uint16
}

// Endpoint is what the policies make of a local pod. In and Out are table
// numbers, 0 = no policy is about the pod in that direction.
type Endpoint struct {
	In, Out uint32
	// InPolicies and OutPolicies are about the pod, in the order in which
	// they are asked.
	InPolicies, OutPolicies []PolicyRef
}

// Tier is a tier of policies: each is asked before the next.
type Tier uint8

// Tiers.
const (
	TierAdmin Tier = iota
	TierNetworkPolicy
	TierBaseline

	tierCount
)

func (t Tier) String() string {
	switch t {
	case TierAdmin:
		return "Admin"
	case TierBaseline:
		return "Baseline"
	}
	return "NetworkPolicy"
}

// PolicyRef names a policy: a NetworkPolicy, or a ClusterNetworkPolicy, which
// has no namespace, of another tier.
type PolicyRef struct {
	Tier            Tier
	Namespace, Name string
}

func (p PolicyRef) String() string {
	if p.Tier == TierNetworkPolicy {
		return p.Namespace + "/" + p.Name
	}
	return fmt.Sprintf("ClusterNetworkPolicy %s (%s)", p.Name, p.Tier)
}

// Direction of traffic as the isolated pod sees it.
type Direction uint8

// Directions.
const (
	Ingress Direction = iota
	Egress
)

func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// RuleRef names the rule of a policy: Index counts within spec.ingress or
// spec.egress; Name is what a ClusterNetworkPolicy calls it, if it does.
type RuleRef struct {
	PolicyRef
	Direction Direction
	Index     int
	Name      string
}

func (r RuleRef) String() string {
	s := fmt.Sprintf("%s %s[%d]", r.PolicyRef, r.Direction, r.Index)
	if r.Name != "" {
		s += fmt.Sprintf(" %q", r.Name)
	}
	return s
}

// Problem is a part of an object that makes no sense. It is an error.
type Problem struct {
	Object string // "NetworkPolicy default/web", "Pod default/a"
	Field  string // "spec.ingress[0].from[1].ipBlock.cidr"
	Err    string // what is wrong and what becomes of it
}

func (p Problem) Error() string {
	return p.Object + ": " + p.Field + ": " + p.Err
}

// FromPod returns pod as Compile wants it. local says that it is an endpoint
// of this node; its addresses are then those of the endpoint, not these.
func FromPod(pod *corev1.Pod, local bool) Pod {
	p := Pod{
		Namespace:   pod.Namespace,
		Name:        pod.Name,
		UID:         pod.UID,
		Created:     pod.CreationTimestamp.Time,
		Labels:      pod.Labels,
		HostNetwork: pod.Spec.HostNetwork,
		Local:       local,
	}
	for _, ip := range pod.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			p.Addrs = append(p.Addrs, a.Unmap())
		}
	}
	add := func(c *corev1.Container) {
		for _, cp := range c.Ports {
			proto, ok := protoNumber(cp.Protocol)
			if cp.Name != "" && ok && cp.ContainerPort > 0 && cp.ContainerPort <= 65535 {
				p.Ports = append(p.Ports, NamedPort{Name: cp.Name, Proto: proto, Port: uint16(cp.ContainerPort)})
			}
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i])
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c) // a sidecar serves as long as the pod lives
		}
	}
	return p
}

// protoNumber returns the IP protocol number; the empty protocol is TCP.
func protoNumber(p corev1.Protocol) (uint8, bool) {
	switch p {
	case "", corev1.ProtocolTCP:
		return maps.ProtoTCP, true
	case corev1.ProtocolUDP:
		return maps.ProtoUDP, true
	case corev1.ProtocolSCTP:
		return maps.ProtoSCTP, true
	}
	return 0, false
}
