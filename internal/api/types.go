package api

import (
	"net/netip"
	"strings"
	"time"
)

// Paths under the agent's socket.
const (
	PathStatus    = "/v1/status"
	PathServices  = "/v1/services"
	PathEndpoints = "/v1/endpoints"
	PathPolicy    = "/v1/policy"
	PathPods      = "/v1/pods"
	PathAllPods   = "/v1/allpods"
	PathEvents    = "/v1/events"
)

// Error is the body of an answer that is no success.
type Error struct {
	Message string `json:"error"`
}

// Status is what the agent knows of itself.
type Status struct {
	// Node is the name of the agent's own Node object.
	Node    string `json:"node"`
	Version string `json:"version"`
	// UptimeSeconds counts from the start of the process.
	UptimeSeconds float64 `json:"uptimeSeconds"`
	// Ready: programs attached, sources synced, first full apply done.
	Ready bool `json:"ready"`
	// NotReady says what Ready waits for; empty when ready.
	NotReady []string `json:"notReady,omitempty"`
	// Synced: every source has delivered its first list.
	Synced  bool     `json:"synced"`
	Sources []Source `json:"sources"`
	// Problems are the objects and devices that could not be used.
	Problems []Problem `json:"problems"`
	// Nodes are the nodes known, this one included, with their ids.
	Nodes   []Node   `json:"nodes"`
	Devices []Device `json:"devices"`
	// RoutingMode is how packets travel between nodes.
	RoutingMode string `json:"routingMode"`
	// AcceptsUnencapsulated: packets of other nodes' pods are taken as they
	// are, whatever the mode.
	AcceptsUnencapsulated bool `json:"acceptsUnencapsulated,omitempty"`
	// MTU is that of pods, MTU6 that of their IPv6.
	MTU    int    `json:"mtu"`
	MTU6   int    `json:"mtu6"`
	Tunnel Tunnel `json:"tunnel"`
	// Sockets says where connections are translated at connect().
	Sockets Sockets `json:"sockets"`
	// ServiceCIDRs are the service ranges in force.
	ServiceCIDRs []netip.Prefix `json:"serviceCIDRs,omitempty"`
	// Masquerade says under whose address pods reach the world.
	Masquerade Masquerade `json:"masquerade"`
	// ExternalSource is keep, dsr or snat: how clients outside are seen by
	// backends, and answered.
	ExternalSource string `json:"externalSource"`
}

// Masquerade says under whose address pods reach the world.
type Masquerade struct {
	// IPv4 and IPv6: under this node's.
	IPv4 bool `json:"ipv4"`
	IPv6 bool `json:"ipv6"`
	// Except are ranges that pods reach under their own address all the same.
	Except []netip.Prefix `json:"except,omitempty"`
	// SourcePorts are ranges of ports that sources are translated to.
	SourcePorts []string `json:"sourcePorts,omitempty"`
}

func (m Masquerade) String() string {
	how := "off"
	switch {
	case m.IPv4 && m.IPv6:
		how = "IPv4 and IPv6"
	case m.IPv4:
		how = "IPv4"
	case m.IPv6:
		how = "IPv6"
	}
	if len(m.Except) > 0 && (m.IPv4 || m.IPv6) {
		how += ", not to"
		for i, p := range m.Except {
			if i > 0 {
				how += ","
			}
			how += " " + p.String()
		}
	}
	if len(m.SourcePorts) > 0 {
		how += "; source ports " + strings.Join(m.SourcePorts, ", ")
	}
	return how
}

// Source is one place that objects come from.
type Source struct {
	// Kind is "directory" or "api".
	Kind string `json:"kind"`
	// Location is the directory or the server's address.
	Location string `json:"location"`
	Synced   bool   `json:"synced"`
}

// Problem is something that could not be used; it stays until it is mended.
type Problem struct {
	// Object is "Service default/web", "Device eth0", or empty.
	Object string    `json:"object,omitempty"`
	File   string    `json:"file,omitempty"`
	Line   int       `json:"line,omitempty"`
	Error  string    `json:"error"`
	Since  time.Time `json:"since"`
}

// Node is a node as the datapath knows it.
type Node struct {
	// ID is the index into pw_nodes; 0 for this node itself.
	ID   uint32 `json:"id"`
	Name string `json:"name"`
	// Addr is the tunnel's end; the zero address when the node has none.
	Addr     netip.Addr     `json:"addr"`
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
	Self     bool           `json:"self,omitempty"`
}

// Device is a device of the node that programs are attached to.
type Device struct {
	Name    string `json:"name"`
	Ifindex int    `json:"ifindex"`
	// Role is "pod", "netdev", "overlay" or "reassembly", or "wire": a pod's veth
	// whose part has the device over it.
	Role  string       `json:"role"`
	MTU   int          `json:"mtu"`
	Addrs []netip.Addr `json:"addrs,omitempty"`
	// Qdisc that others have put on a pod's device, or "filters": all that is
	// sent to the pod goes through it.
	Qdisc string `json:"qdisc,omitempty"`
	// Filters is what others have put on its ingress: all that the pod sends
	// goes through it.
	Filters string `json:"filters,omitempty"`
	// Bypassed is the same where it does not see what the pod sends to others.
	Bypassed string `json:"bypassed,omitempty"`
}

// Tunnel describes the overlay device.
type Tunnel struct {
	Device string     `json:"device"`
	VNI    uint32     `json:"vni"`
	Port   uint16     `json:"port"`
	Addr   netip.Addr `json:"addr"`
	MAC    string     `json:"mac"`
	MTU    int        `json:"mtu"`
}

// Sockets are the programs at the sockets of the host's processes.
type Sockets struct {
	// Cgroup that they are for; empty = none.
	Cgroup   string `json:"cgroup,omitempty"`
	Attached bool   `json:"attached"`
}

// Services names the service ids of pw_services.
type Services struct {
	Services []Service `json:"services"`
}

// Service is one port of a service in one family.
type Service struct {
	// Kind of the object that has the port: Service, or Pod for a host port.
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Port is the name of the service port; empty when it has none.
	Port string `json:"port,omitempty"`
	// Protocol is TCP, UDP or SCTP.
	Protocol string `json:"protocol"`
	ID       uint32 `json:"id"`
	// Frontends that the port has; a NodePort's address is the unspecified
	// one of its family.
	Frontends []netip.AddrPort `json:"frontends"`
	// Types of the frontends, in their order: ClusterIP, NodePort,
	// LoadBalancer, ExternalIP or HostPort.
	Types []string `json:"types"`
	// Backends are those of the cluster IPs.
	Backends []netip.AddrPort `json:"backends"`
	// External are those for clients outside, of external frontends.
	External []netip.AddrPort `json:"external,omitempty"`
	// Slices are the service's EndpointSlices of that family, Endpoints all
	// that these name, whatever their conditions.
	Slices    int `json:"slices"`
	Endpoints int `json:"endpoints"`
	// SourceRanges that load-balancer IPs answer to.
	SourceRanges []string `json:"sourceRanges,omitempty"`
}

// Endpoints lists the pods that the CNI plugged in on this node.
type Endpoints struct {
	Endpoints []Endpoint `json:"endpoints"`
}

// Endpoint is a pod of this node.
type Endpoint struct {
	// ID is that of pw_endpoints.
	ID          uint32       `json:"id"`
	Namespace   string       `json:"namespace"`
	Pod         string       `json:"pod"`
	UID         string       `json:"uid,omitempty"`
	ContainerID string       `json:"containerID"`
	IfName      string       `json:"ifName"`
	HostIfName  string       `json:"hostIfName"`
	HostIfindex int          `json:"hostIfindex"`
	Addrs       []netip.Addr `json:"addrs"`
	MAC         string       `json:"mac"`
	// HostPorts are the ports of the node that lead to the pod, such as
	// "8080->80/tcp" and "172.31.0.2:53->53/udp".
	HostPorts []string `json:"hostPorts,omitempty"`
}

// Policy names what stands in pw_policy.
type Policy struct {
	// Rules by the reference that a verdict carries.
	Rules map[uint32]Rule `json:"rules"`
	// Endpoints are the pods of this node and the tables they use.
	Endpoints []PolicyEndpoint `json:"endpoints"`
	// Identities in force, those of the enum left out.
	Identities []Identity `json:"identities"`
	// PortClasses are the ranges behind the classes of pw_port_class.
	PortClasses []PortClass `json:"portClasses,omitempty"`
}

// Rule is one rule of a policy.
type Rule struct {
	// Tier of a ClusterNetworkPolicy, "Admin" or "Baseline"; none: a
	// NetworkPolicy.
	Tier      string `json:"tier,omitempty"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Direction is "ingress" or "egress".
	Direction string `json:"direction"`
	// Index counts the rules of the direction from 0.
	Index int `json:"index"`
	// RuleName is what a ClusterNetworkPolicy calls the rule, if it does.
	RuleName string `json:"ruleName,omitempty"`
	// Text is the rule as people write it: "default/web ingress[0]".
	Text string `json:"text"`
}

// Pods are pods of any node.
type Pods struct {
	Pods []Pod `json:"pods"`
}

// Pod is where a pod is. The answer to [PathAllPods] is one in each line, of
// every node: those with an address of their own.
type Pod struct {
	Namespace string       `json:"namespace"`
	Name      string       `json:"name"`
	Node      string       `json:"node"`
	Addrs     []netip.Addr `json:"addrs"`
	// HostNetwork: the addresses are its node's.
	HostNetwork bool `json:"hostNetwork,omitempty"`
}

// Event is a packet that was dropped: the first of its flow, or one of a flow
// that was let through before.
type Event struct {
	Time time.Time `json:"time"`
	// Reason of the drop, as metrics call it: "drop_policy_ingress".
	Reason string `json:"reason"`
	// Hook is the program that dropped it.
	Hook     string `json:"hook"`
	Protocol string `json:"protocol"`
	// Source and Destination as the packet arrived.
	Source      EventEnd `json:"source"`
	Destination EventEnd `json:"destination"`
	// From is the kind of place that the packet came from: pod, node, wire
	// or host; Sender is the pod, whatever address it used.
	From   string `json:"from"`
	Sender string `json:"sender,omitempty"`
	// Denied is set when policy denied it.
	Denied *Denial `json:"denied,omitempty"`
	// RuleID and Rule deny; without them no rule allows, and Policies are
	// what isolates the pod. Table is the pod's.
	Table    uint32   `json:"table,omitempty"`
	RuleID   uint32   `json:"ruleID,omitempty"`
	Rule     string   `json:"rule,omitempty"`
	Policies []string `json:"policies,omitempty"`
	// Text says why in words.
	Text string `json:"text,omitempty"`
	// Missed is how many events this listener had no room for before.
	Missed uint64 `json:"missed,omitempty"`
}

// EventEnd is one end of a packet.
type EventEnd struct {
	// Pod that has the address, as namespace/name.
	Pod  string     `json:"pod,omitempty"`
	Addr netip.Addr `json:"addr"`
	Port uint16     `json:"port,omitempty"`
}

// Denial is what policy was asked.
type Denial struct {
	// Direction is that of the policy: "ingress" or "egress".
	Direction string `json:"direction"`
	// Pod is the isolated one.
	Pod string `json:"pod,omitempty"`
	// PeerIdentity is the one that its table knows the other end by.
	PeerIdentity uint32 `json:"peerIdentity"`
	// Source and Destination in the flow's original direction, after
	// translation: a service's backend, and its port.
	Source      EventEnd `json:"source"`
	Destination EventEnd `json:"destination"`
}

// PolicyEndpoint is what policy makes of a pod of this node.
type PolicyEndpoint struct {
	Namespace string       `json:"namespace"`
	Pod       string       `json:"pod"`
	Addrs     []netip.Addr `json:"addrs"`
	// Identity is the one that other pods' tables know this pod by.
	Identity uint32 `json:"identity"`
	// Ingress and Egress are table ids; 0 = not isolated.
	Ingress uint32 `json:"ingress"`
	Egress  uint32 `json:"egress"`
	// Policies that are about the pod: namespace/name, or
	// "ClusterNetworkPolicy name (tier)"; and the NetworkPolicies that isolate
	// it in one direction: what no rule allows is denied.
	Policies        []string `json:"policies"`
	IngressPolicies []string `json:"ingressPolicies,omitempty"`
	EgressPolicies  []string `json:"egressPolicies,omitempty"`
}

// Identity is a class of peers that no policy tells apart.
type Identity struct {
	ID uint32 `json:"id"`
	// Description says what its members have in common.
	Description string `json:"description"`
	// Addrs are the members, prefixes for CIDRs; of a large identity the
	// first of them.
	Addrs []netip.Prefix `json:"addrs"`
	// Count is the number of members.
	Count int `json:"count"`
}

// PortClass is a class of ports that no port range in force tells apart.
type PortClass struct {
	Class uint16 `json:"class"`
	// Ranges as "8000-8080" or "53".
	Ranges []string `json:"ranges"`
}
