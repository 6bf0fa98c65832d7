package endpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
)

// Datapath attaches the programs to a pod's host interface.
type Datapath interface {
	// AttachPod attaches to the host's half of the veth; repeating it is no
	// error. It runs while both halves are down.
	AttachPod(ctx context.Context, ifindex int, name string) error
	// Detach removes what AttachPod made; neither an interface that is gone
	// nor one that was never attached is an error.
	Detach(ctx context.Context, ifindex int) error
}

// Prober is a [Datapath] that can tell whether the programs are in place.
// CHECK and [Manager.Repair] use it when it is there.
type Prober interface {
	Attached(ctx context.Context, ifindex int) error
}

// PolicyProber is a [Regenerator] that can tell whether what [Regenerator.Up]
// put in force is so still. CHECK uses it when it is there.
type PolicyProber interface {
	InForce(ctx context.Context, ep Endpoint) error
}

// Observer is a [Regenerator] that wants to know what of an endpoint changes
// without a say in it: its MTU.
type Observer interface {
	Changed(ep Endpoint)
}

// Regenerator puts policy and addresses of an endpoint into the maps.
type Regenerator interface {
	// Up returns when the policy for ep is in force in the maps. The
	// endpoint has its addresses, MACs and interface index, but both halves
	// of its veth are still down. At a restart Up is called for endpoints
	// that are up and carry traffic.
	Up(ctx context.Context, ep Endpoint) error
	// Down forgets ep. It is called after the link went down and before the
	// addresses may be given away, and possibly for an endpoint that never
	// was up; neither that nor a repetition is an error.
	Down(ctx context.Context, ep Endpoint) error
}

// Endpoint is one interface of one pod on this node.
type Endpoint struct {
	ID          uint32       `json:"id"` // of this node; never 0
	ContainerID string       `json:"containerID"`
	IfName      string       `json:"ifName"`            // in the pod
	Netns       string       `json:"netns"`             // path as the runtime gave it
	Network     string       `json:"network,omitempty"` // name of the CNI network
	Namespace   string       `json:"namespace,omitempty"`
	Pod         string       `json:"pod,omitempty"`
	UID         string       `json:"uid,omitempty"`
	Addrs       []netip.Addr `json:"addrs"` // IPv4 before IPv6
	HostIfName  string       `json:"hostIfName"`
	HostIfindex int          `json:"hostIfindex"`
	// Over is the device over the host's half, which has the place that the half
	// has in other endpoints; see [Wirer]. Empty = there is none.
	Over        string           `json:"over,omitempty"`
	OverIfindex int              `json:"overIfindex,omitempty"`
	MAC         net.HardwareAddr `json:"-"` // of the pod's half
	HostMAC     net.HardwareAddr `json:"-"`
	MTU         int              `json:"mtu"`
	MTU6        int              `json:"mtu6,omitempty"` // of the IPv6 default route; 0 = MTU
	// PortMappings are the ports of the node that lead to this pod, sorted.
	PortMappings []PortMapping `json:"portMappings,omitempty"`
}

// Key identifies an endpoint: one container may have several interfaces.
type Key struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

func (k Key) String() string { return k.ContainerID + ":" + k.IfName }

// Key returns what identifies e.
func (e Endpoint) Key() Key { return Key{e.ContainerID, e.IfName} }

// String names e as errors and logs do.
func (e Endpoint) String() string {
	if e.Pod == "" {
		return fmt.Sprintf("container %s (%s)", e.ContainerID, e.IfName)
	}
	return fmt.Sprintf("pod %s/%s (container %s, %s)", e.Namespace, e.Pod, e.ContainerID, e.IfName)
}

// Gateway returns the gateway that pods use for the family of a: 169.254.1.1
// or fe80::1.
func Gateway(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1})
	}
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 1})
}

// HostIfName returns the name of the host's half of a pod's veth: "pw" and
// eleven hexadecimal digits. The interface name counts unless it is eth0;
// without a pod's name the container id takes its place.
func HostIfName(namespace, pod, containerID, ifName string) string {
	owner := namespace + "/" + pod
	if pod == "" {
		owner = containerID
	}
	if ifName != "eth0" {
		owner += "/" + ifName
	}
	sum := sha256.Sum256([]byte(owner))
	return "pw" + hex.EncodeToString(sum[:])[:11]
}

// plain has Endpoint's fields without its methods.
type plain Endpoint

type endpointJSON struct {
	plain
	MAC     string `json:"mac"`
	HostMAC string `json:"hostMAC"`
}

// MarshalJSON writes MAC addresses in their usual form.
func (e Endpoint) MarshalJSON() ([]byte, error) {
	return json.Marshal(endpointJSON{plain(e), e.MAC.String(), e.HostMAC.String()})
}

// UnmarshalJSON is the inverse of MarshalJSON.
func (e *Endpoint) UnmarshalJSON(b []byte) error {
	var j endpointJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	ep := Endpoint(j.plain)
	var err error
	if ep.MAC, err = parseMAC(j.MAC); err != nil {
		return fmt.Errorf("mac: %w", err)
	}
	if ep.HostMAC, err = parseMAC(j.HostMAC); err != nil {
		return fmt.Errorf("hostMAC: %w", err)
	}
	*e = ep
	return nil
}

func parseMAC(s string) (net.HardwareAddr, error) {
	if s == "" {
		return nil, nil
	}
	return net.ParseMAC(s)
}

// Request asks for, checks or removes one endpoint.
type Request struct {
	ContainerID string       `json:"containerID"`
	IfName      string       `json:"ifName"`
	Netns       string       `json:"netns,omitempty"`
	Network     string       `json:"network,omitempty"`
	Namespace   string       `json:"namespace,omitempty"`
	Pod         string       `json:"pod,omitempty"`
	UID         string       `json:"uid,omitempty"`
	Addrs       []netip.Addr `json:"addrs,omitempty"` // Add: wanted. Check: what the previous result says.
	// MTU is for Check: that of the pod's half in the previous result, which
	// another plugin may have made smaller; [MTUNotTold] where results have none.
	// Zero stands for what Add gave it.
	MTU int `json:"mtu,omitempty"`
	// PortMappings are wanted by Add and compared by Check, unless nil.
	PortMappings []PortMapping `json:"portMappings,omitzero"`
	// SendLimited tells Add that another plugin will limit what the pod sends, by
	// a qdisc at the ingress of the host's half.
	SendLimited bool `json:"sendLimited,omitempty"`
}

// MTUNotTold is the [Request.MTU] of a result without one: those of versions before 1.0, or from older plugins.
// A smaller one in the pod may be another plugin's then.
const MTUNotTold = -1

// Key returns what identifies the endpoint meant.
func (r Request) Key() Key { return Key{r.ContainerID, r.IfName} }
