package cli

import (
	"context"
	"encoding/json"
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
	podNames   map[string]bool // of pods
	// everyPod of the cluster and its addresses, if the API server has told.
	everyPod   map[string][]netip.Addr
	identities map[uint32]api.Identity
	ifName     func(ifindex uint32) string
}

// askNames asks the agent for what the paths answer. What fails is passed to
// warn, once when the agent is down, with how it goes on then.
func askNames(ctx context.Context, a Agent, ifName func(uint32) string, without string, warn func(error), paths ...string) *names {
	n := &names{
		services: map[uint32]api.Service{}, nodes: map[uint32]string{}, pods: map[netip.Addr]string{},
		podDevices: map[uint32]string{}, podNames: map[string]bool{}, identities: map[uint32]api.Identity{}, ifName: ifName,
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
			warn(fmt.Errorf("%w; %s", err, without))
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
		n.addPod(name, e.Addrs)
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

// askPods asks the agent for the pods of all nodes.
func (n *names) askPods(ctx context.Context, a Agent, warn func(error)) {
	if n.down != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	err := a.Stream(ctx, api.PathAllPods, func(line json.RawMessage) error {
		var p api.Pod
		if err := json.Unmarshal(line, &p); err != nil {
			return err
		}
		n.addPod(podName(p.Namespace, p.Name), p.Addrs)
		return nil
	})
	if err != nil {
		warn(fmt.Errorf("names of other nodes' pods: %w", err))
	}
}

// addPod has addresses of a pod shown by its name, unless they have one.
func (n *names) addPod(name string, addrs []netip.Addr) {
	n.podNames[name] = true
	for _, a := range addrs {
		if n.pods[a] == "" {
			n.pods[a] = name
		}
	}
}

// blind: nobody could be asked for names of pods.
func (n *names) blind() bool { return n.down != nil && n.everyPod == nil }

func podName(namespace, name string) string { return namespace + "/" + name }

func splitName(s string) (namespace, name string) {
	namespace, name, _ = strings.Cut(s, "/")
	return namespace, name
}

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
	Name string `json:"name,omitempty"`
	// Pod that the address belongs to, behind another node or the wire.
	Pod    string `json:"pod,omitempty"`
	Device string `json:"device,omitempty"`
}

// end is the place of one end of a flow, with the pod of its address.
func (n *names) end(p maps.Place, addr maps.Addr) placeView {
	v := n.place(p)
	if v.Kind == "node" || v.Kind == "wire" {
		v.Pod = n.pods[maps.FromAddr(addr)]
	}
	return v
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

// String is the place as a cell: "default/web", "node b", "default/web (node b)",
// "wire eth0".
func (p placeView) String() string {
	if pod := p.Pod; pod != "" {
		p.Pod = ""
		return fmt.Sprintf("%s (%s)", pod, p.String())
	}
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
