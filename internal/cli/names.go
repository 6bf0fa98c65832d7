package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// names is what the agent knows about the numbers in the maps. Whatever it
// does not know stays a number.
type names struct {
	// down is why the agent could not be asked; nil when it answered.
	down error

	status    api.Status
	services  map[uint32]api.Service
	endpoints []api.Endpoint
	policy    api.Policy

	nodes      map[uint32]string
	pods       map[netip.Addr]string
	podDevices map[uint32]string
	identities map[uint32]api.Identity
	ifName     func(ifindex uint32) string
}

// askNames asks the agent for what the paths answer. What fails is passed to
// warn, once when the agent is down.
func askNames(ctx context.Context, a Agent, ifName func(uint32) string, warn func(error), paths ...string) *names {
	n := &names{
		services: map[uint32]api.Service{}, nodes: map[uint32]string{}, pods: map[netip.Addr]string{},
		podDevices: map[uint32]string{}, identities: map[uint32]api.Identity{}, ifName: ifName,
	}
	var services api.Services
	var endpoints api.Endpoints
	into := map[string]any{
		api.PathStatus: &n.status, api.PathServices: &services,
		api.PathEndpoints: &endpoints, api.PathPolicy: &n.policy,
	}
	for _, path := range paths {
		err := a.Get(ctx, path, into[path])
		if err == nil {
			continue
		}
		var down *agentDownError
		if errors.As(err, &down) {
			n.down = err
			warn(fmt.Errorf("%w; going on without names", err))
			break
		}
		warn(err)
	}
	for _, s := range services.Services {
		n.services[s.ID] = s
	}
	n.endpoints = endpoints.Endpoints
	for _, e := range n.endpoints {
		name := podName(e.Namespace, e.Pod)
		n.podDevices[uint32(e.HostIfindex)] = name
		for _, a := range e.Addrs {
			n.pods[a] = name
		}
	}
	for _, node := range n.status.Nodes {
		if node.ID != 0 {
			n.nodes[node.ID] = node.Name
		}
	}
	for _, id := range n.policy.Identities {
		n.identities[id.ID] = id
	}
	return n
}

func podName(namespace, name string) string { return namespace + "/" + name }

// node names a node id.
func (n *names) node(id uint32) string {
	if name := n.nodes[id]; name != "" {
		return name
	}
	return fmt.Sprint(id)
}

// device names an ifindex.
func (n *names) device(ifindex uint32) string {
	if name := n.ifName(ifindex); name != "" {
		return name
	}
	return fmt.Sprintf("ifindex-%d", ifindex)
}

// serviceName is namespace/name[:port], with the kind before it if the owner is
// no Service; empty for an unknown id.
func (n *names) serviceName(id uint32) string {
	s, ok := n.services[id]
	if !ok {
		return ""
	}
	name := podName(s.Namespace, s.Name)
	if s.Kind != "" && s.Kind != "Service" {
		name = strings.ToLower(s.Kind) + " " + name
	}
	if s.Port != "" {
		name += ":" + s.Port
	}
	return name
}

// rule says where a verdict comes from; empty for rule 0.
func (n *names) rule(ref uint32) string {
	r, ok := n.policy.Rules[ref]
	switch {
	case ref == 0:
		return ""
	case !ok:
		return fmt.Sprintf("rule %d", ref)
	}
	return r.Text
}

// podPolicies is what the agent knows of the policies on a pod of this node.
func (n *names) podPolicies(pod string) api.PolicyEndpoint {
	for _, p := range n.policy.Endpoints {
		if podName(p.Namespace, p.Pod) == pod {
			return p
		}
	}
	return api.PolicyEndpoint{}
}

// identity describes an identity in words.
func (n *names) identity(id uint32) string {
	if d := n.identities[id].Description; d != "" {
		return d
	}
	return maps.IdentityName(id)
}

// placeView is a place of pw_flows with its name.
type placeView struct {
	Kind string `json:"kind"`
	// ID is an ifindex or a node id.
	ID uint32 `json:"id,omitempty"`
	// Name is that of the pod, the node or the device.
	Name   string `json:"name,omitempty"`
	Device string `json:"device,omitempty"`
}

func (n *names) place(p maps.Place) placeView {
	v := placeView{Kind: maps.PlaceName(p.Kind), ID: p.Id}
	switch v.Kind {
	case "pod":
		v.Device = n.device(p.Id)
		v.Name = n.podDevices[p.Id]
	case "node":
		v.Name = n.node(p.Id)
	case "wire":
		v.Device = n.device(p.Id)
	}
	return v
}

// String is the place as a cell: "default/web", "node b", "wire eth0".
func (p placeView) String() string {
	switch {
	case p.Kind == "pod" && p.Name != "":
		return p.Name
	case p.Kind == "pod":
		return p.Device
	case p.Name != "":
		return p.Kind + " " + p.Name
	case p.Device != "":
		return p.Kind + " " + p.Device
	}
	return p.Kind
}
