package agent

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/table"
)

// membersShown is how many addresses of an identity the socket lists.
const membersShown = 100

// Status is the answer to [api.PathStatus].
func (a *Agent) Status(ctx context.Context) (api.Status, error) {
	s := api.Status{Node: a.opt.NodeName}
	err := a.do(ctx, func() {
		w := &a.world
		txn := a.tables.DB.ReadTxn()
		s.NotReady = a.NotReady()
		s.Ready = len(s.NotReady) == 0
		s.Synced = a.tables.Synced(txn)
		s.Problems = []api.Problem{}
		for p := range a.tables.Problems.All(txn) {
			s.Problems = append(s.Problems, api.Problem{Object: p.Object, File: p.File, Line: p.Line, Error: p.Err, Since: p.Since})
		}
		s.Nodes = []api.Node{}
		for _, n := range w.nodes {
			s.Nodes = append(s.Nodes, api.Node{
				ID: a.peers.ids.byName[n.Name], Name: n.Name, Addr: n.Addr,
				PodCIDRs: n.PodCIDRs, Self: n.Name == a.opt.NodeName,
			})
		}
		s.Devices = []api.Device{}
		for _, d := range w.devices {
			_, attached := w.attached[d.Index]
			role := "netdev"
			switch {
			case d.Name == node.FragName:
				role = "reassembly" // the loader's own
			case !attached:
				continue
			case d.Index == w.overlay:
				role = "overlay"
			}
			s.Devices = append(s.Devices, api.Device{Name: d.Name, Ifindex: d.Index, Role: role, MTU: d.MTU, Addrs: d.Addrs})
		}
		for _, ep := range a.eps.list() {
			q := w.qdiscs[ep.HostIfindex]
			filters, bypassed := q.In, ""
			if w.bypassed[ep.HostIfindex] != nil {
				filters, bypassed = "", q.In
			}
			if ep.Over != "" {
				s.Devices = append(s.Devices,
					api.Device{Name: ep.Over, Ifindex: ep.OverIfindex, Role: "pod", MTU: ep.MTU, Addrs: ep.Addrs},
					api.Device{Name: ep.HostIfName, Ifindex: ep.HostIfindex, Role: "wire", MTU: ep.MTU, Qdisc: q.Out, Filters: q.In})
				continue
			}
			s.Devices = append(s.Devices, api.Device{
				Name: ep.HostIfName, Ifindex: ep.HostIfindex, Role: "pod", MTU: ep.MTU, Addrs: ep.Addrs,
				Qdisc: q.Out, Filters: filters, Bypassed: bypassed,
			})
		}
		s.MTU, s.MTU6 = w.mtu.Pod, w.mtu.Pod6
		s.RoutingMode, s.AcceptsUnencapsulated = string(a.opt.Mode), a.opt.AcceptPlain
		s.Tunnel = api.Tunnel{
			Device: node.OverlayName, VNI: a.opt.VNI, Port: node.OverlayPort,
			Addr: w.self.Addr, MAC: w.self.MAC.String(), MTU: w.mtu.Tunnel,
		}
		s.ServiceCIDRs = w.cidrs
		s.Masquerade = a.masquerade()
		s.ExternalSource = a.opt.ExternalSource
	})
	return s, err
}

// Services is the answer to [api.PathServices].
func (a *Agent) Services(ctx context.Context) (api.Services, error) {
	out := api.Services{Services: []api.Service{}}
	err := a.do(ctx, func() {
		txn := a.tables.DB.ReadTxn()
		for owner, c := range a.services.byOwner {
			for i := range c.Ports {
				if st := a.services.ports[c.Ports[i].Key()]; st != nil {
					s := servicePort(owner, &c.Ports[i], st)
					for slice := range a.tables.Slices.List(txn, table.SlicesByService(owner.Namespace, owner.Name)) {
						if string(slice.AddressType) == string(c.Ports[i].Family) {
							s.Slices++
							s.Endpoints += len(slice.Endpoints)
						}
					}
					out.Services = append(out.Services, s)
				}
			}
		}
	})
	sort.Slice(out.Services, func(i, j int) bool {
		a, b := out.Services[i], out.Services[j]
		for _, c := range []int{strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name)} {
			if c != 0 {
				return c < 0
			}
		}
		return a.ID < b.ID
	})
	return out, err
}

// servicePort describes a port as it is compiled, and the numbers it has.
func servicePort(owner service.Owner, p *service.Port, st *portState) api.Service {
	list := func(backends []maps.Backend) []netip.AddrPort {
		out := []netip.AddrPort{}
		for _, b := range backends {
			out = append(out, netip.AddrPortFrom(maps.FromAddr(b.Addr), b.Port))
		}
		return out
	}
	s := api.Service{
		Kind: owner.Kind, Namespace: owner.Namespace, Name: owner.Name, Port: p.PortName, Protocol: string(p.Protocol),
		ID: st.id, Frontends: []netip.AddrPort{}, Backends: list(p.Internal), External: list(p.External),
	}
	for _, f := range p.Frontends {
		if slices.Contains(st.frontends, f.Key) {
			s.Frontends = append(s.Frontends, netip.AddrPortFrom(maps.FromAddr(f.Key.Addr), f.Key.Port))
			s.Types = append(s.Types, f.Kind.String())
		}
	}
	for _, r := range p.SourceRanges {
		s.SourceRanges = append(s.SourceRanges, r.String())
	}
	return s
}

// EndpointList is the answer to [api.PathEndpoints].
func (a *Agent) EndpointList() api.Endpoints {
	out := api.Endpoints{Endpoints: []api.Endpoint{}}
	for _, ep := range a.eps.list() {
		var ports []string
		for _, m := range ep.PortMappings {
			ports = append(ports, m.String())
		}
		name, index := ep.Device()
		out.Endpoints = append(out.Endpoints, api.Endpoint{
			ID: ep.ID, Namespace: ep.Namespace, Pod: ep.Pod, UID: ep.UID,
			ContainerID: ep.ContainerID, IfName: ep.IfName,
			HostIfName: name, HostIfindex: index,
			Addrs: ep.Addrs, MAC: ep.MAC.String(), HostPorts: ports,
		})
	}
	return out
}

// Policy is the answer to [api.PathPolicy].
func (a *Agent) Policy(ctx context.Context) (api.Policy, error) {
	out := api.Policy{Rules: make(map[uint32]api.Rule), Endpoints: []api.PolicyEndpoint{}, Identities: []api.Identity{}}
	err := a.do(ctx, func() {
		p := a.world.in.policy
		for n, r := range p.Rules {
			out.Rules[n] = apiRule(r)
		}
		for name, ep := range p.Endpoints {
			e := api.PolicyEndpoint{
				Namespace: name.Namespace, Pod: name.Name, Addrs: a.world.local.addrs[name],
				Ingress: ep.In, Egress: ep.Out, Policies: policyNames(ep.InPolicies, ep.OutPolicies),
				IngressPolicies: policyNames(isolating(ep.InPolicies)), EgressPolicies: policyNames(isolating(ep.OutPolicies)),
			}
			if len(e.Addrs) > 0 {
				e.Identity = p.Addrs[e.Addrs[0]]
			}
			out.Endpoints = append(out.Endpoints, e)
		}
		out.Identities = a.identities()
		out.PortClasses = portClasses(p.PortClasses)
	})
	sort.Slice(out.Endpoints, func(i, j int) bool {
		a, b := out.Endpoints[i], out.Endpoints[j]
		return a.Namespace+"/"+a.Pod < b.Namespace+"/"+b.Pod
	})
	return out, err
}

func apiRule(r policy.RuleRef) api.Rule {
	out := api.Rule{Namespace: r.Namespace, Name: r.PolicyRef.Name, Direction: r.Direction.String(), Index: r.Index, RuleName: r.Name, Text: r.String()}
	if r.Tier != policy.TierNetworkPolicy {
		out.Tier = r.Tier.String()
	}
	return out
}

// isolating are those policies that deny what no rule allows.
func isolating(refs []policy.PolicyRef) (out []policy.PolicyRef) {
	for _, r := range refs {
		if r.Tier == policy.TierNetworkPolicy {
			out = append(out, r)
		}
	}
	return out
}

// policyNames are the names of policies about a pod, NetworkPolicies first.
func policyNames(lists ...[]policy.PolicyRef) []string {
	refs := slices.Concat(lists...)
	slices.SortFunc(refs, func(a, b policy.PolicyRef) int {
		namespaced := func(r policy.PolicyRef) int { return min(1, len(r.Namespace)) }
		return cmp.Or(namespaced(b)-namespaced(a), cmp.Compare(a.String(), b.String()))
	})
	names := []string{}
	for _, r := range slices.Compact(refs) {
		names = append(names, r.String())
	}
	return names
}

// Pods is the answer to [api.PathPods]: the pod of a name, or the pods that
// have an address, finished ones left out. One of the two is given.
func (a *Agent) Pods(name, addr string) (api.Pods, error) {
	out := api.Pods{Pods: []api.Pod{}}
	namespace, short, named := strings.Cut(name, "/")
	query := table.ByName[*corev1.Pod](namespace, short)
	if !named {
		at, err := netip.ParseAddr(addr)
		if err != nil {
			return out, fmt.Errorf("ask for name=NAMESPACE/NAME or addr=ADDRESS: %w", err)
		}
		query = table.PodsByIP(at)
	}
	for p := range a.tables.Pods.List(a.tables.DB.ReadTxn(), query) {
		if !finished(p) {
			out.Pods = append(out.Pods, podPlace(p))
		}
	}
	return out, nil
}

// AllPods is the answer to [api.PathAllPods].
func (a *Agent) AllPods() iter.Seq[api.Pod] {
	return func(yield func(api.Pod) bool) {
		for p := range a.tables.Pods.All(a.tables.DB.ReadTxn()) {
			if finished(p) || p.Spec.HostNetwork || p.Status.PodIP == "" {
				continue
			}
			if !yield(podPlace(p)) {
				return
			}
		}
	}
}

func podPlace(p *corev1.Pod) api.Pod {
	return api.Pod{Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName, Addrs: table.PodIPs(p), HostNetwork: p.Spec.HostNetwork}
}

func (a *Agent) identities() []api.Identity {
	members := make(map[uint32]*api.Identity)
	add := func(id uint32, p netip.Prefix) {
		if id < maps.IdentityFirstDynamic {
			return
		}
		m := members[id]
		if m == nil {
			m = &api.Identity{ID: id}
			members[id] = m
		}
		m.Count++
		if len(m.Addrs) < membersShown {
			m.Addrs = append(m.Addrs, p)
		}
	}
	p := a.world.in.policy
	for addr, id := range p.Addrs {
		add(id, netip.PrefixFrom(addr, addr.BitLen()))
	}
	for prefix, id := range p.Prefixes {
		add(id, prefix)
	}
	out := make([]api.Identity, 0, len(members))
	for _, m := range members {
		sort.Slice(m.Addrs, func(i, j int) bool { return m.Addrs[i].Addr().Less(m.Addrs[j].Addr()) })
		m.Description = a.describe(m)
		out = append(out, *m)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// describe names an identity by its first member, which is what a person
// recognises.
func (a *Agent) describe(m *api.Identity) string {
	if len(m.Addrs) == 0 {
		return ""
	}
	first := m.Addrs[0]
	if !first.IsSingleIP() {
		return "addresses in " + first.String() + " that no pod or node has"
	}
	peer := a.world.in.tunnel.Addrs[first.Addr()]
	who := first.Addr().String()
	switch {
	case peer.Pod.Name != "":
		who = "pod " + peer.Pod.String()
	case peer.Flags&maps.PeerHost != 0:
		who = "this node"
	case peer.Flags&maps.PeerNode != 0:
		who = "node " + peer.Node
	}
	if m.Count > 1 {
		return "peers like " + who
	}
	return who
}

func portClasses(list []policy.PortClass) []api.PortClass {
	byClass := make(map[uint16]*api.PortClass)
	var order []uint16
	for _, c := range list {
		pc := byClass[c.Class]
		if pc == nil {
			pc = &api.PortClass{Class: c.Class}
			byClass[c.Class] = pc
			order = append(order, c.Class)
		}
		if c.Lo == c.Hi {
			pc.Ranges = append(pc.Ranges, fmt.Sprint(c.Lo))
		} else {
			pc.Ranges = append(pc.Ranges, fmt.Sprintf("%d-%d", c.Lo, c.Hi))
		}
	}
	out := make([]api.PortClass, 0, len(order))
	for _, class := range order {
		out = append(out, *byClass[class])
	}
	return out
}

// list is every endpoint, ordered by id.
func (e *endpoints) list() []endpoint.Endpoint {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]endpoint.Endpoint, 0, len(e.m))
	for _, st := range e.m {
		out = append(out, st.ep)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// metricsView is what the loop tells of itself.
type metricsView struct {
	stats
	sizes    map[string]int
	problems int
	ready    bool
}

func (a *Agent) view(ctx context.Context) (v metricsView, err error) {
	err = a.do(ctx, func() {
		v.stats = a.stats
		v.bumps = a.gens.total
		v.sizes = map[string]int{
			"pw_services": a.services.frontends.Len(), "pw_backends": a.services.backends.Len(),
			"pw_maglev": a.services.tables.total, "pw_backend_st": a.services.states.Len(), "pw_src_ranges": a.services.ranges.Len(),
			"pw_endpoints": a.peers.endpoints.Len(), "pw_addrs": a.peers.addrs.Len(),
			"pw_prefixes": a.peers.prefixes.Len(), "pw_nodes": a.peers.nodes.Len(),
			"pw_node_ids": a.peers.nodeIDs.Len(), "pw_policy": a.peers.policy.Len(),
			"pw_node_v6": a.peers.nodesV6.Len(), "pw_dev_addrs": a.devAddrs.Len(),
			"pw_gens": len(a.gens.used) + slotFirst,
		}
		v.problems = a.tables.Problems.NumObjects(a.tables.DB.ReadTxn())
		v.ready = len(a.NotReady()) == 0
	})
	return v, err
}

// doTimeout bounds how long a question to the loop may take.
const doTimeout = 5 * time.Second
