package tunnel

import (
	"cmp"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
)

// Changes is what is not as it was when a [Compiler] compiled last.
type Changes struct {
	// Pods that are new or different.
	Pods []*corev1.Pod
	// Gone are pods that are no more. One that is in Pods, too, is there.
	Gone []types.NamespacedName
	// Rest is everything but the pods, if some of it may be different: its
	// Pods are not read. The first Compile needs it.
	Rest *Input
}

// Compiler compiles a cluster that changes: given what changed, its output is
// that of [Compile] given everything, and costs what the change is. It is not
// safe for concurrent use.
type Compiler struct {
	base *base
	out  Output

	pods    map[types.NamespacedName]*corev1.Pod
	claims  map[netip.Addr][]*corev1.Pod // of other nodes' pods
	ignored map[netip.Addr]struct{}      // where some claim is
	invalid map[types.NamespacedName][]error
	lost    map[string]map[types.NamespacedName]*corev1.Pod // by node that has no object
}

// NewCompiler makes a compiler of an empty cluster.
func NewCompiler() *Compiler {
	return &Compiler{
		out:     Output{Addrs: make(map[netip.Addr]Peer)},
		pods:    make(map[types.NamespacedName]*corev1.Pod),
		claims:  make(map[netip.Addr][]*corev1.Pod),
		ignored: make(map[netip.Addr]struct{}),
		invalid: make(map[types.NamespacedName][]error),
		lost:    make(map[string]map[types.NamespacedName]*corev1.Pod),
	}
}

// Compile takes ch over and returns the output. The one before is no longer
// valid then: its maps are shared.
func (c *Compiler) Compile(ch Changes) Output {
	touched := make(map[netip.Addr]struct{})
	in := Input{}
	if c.base != nil {
		in = c.base.in
	}
	renew := c.base == nil
	nodes := renew
	if ch.Rest != nil {
		nodes = nodes || !slices.EqualFunc(in.Nodes, ch.Rest.Nodes, sameNode)
		renew = renew || nodes || !sameRest(&in, ch.Rest)
		in = *ch.Rest
		in.Pods, in.Local = nil, gomaps.Clone(in.Local)
	}
	for _, n := range ch.Gone {
		renew = c.remove(n, in.Self, touched) || renew
	}
	for _, p := range ch.Pods {
		renew = c.put(p, in.Self, touched) || renew
	}
	c.out.Delta = Delta{}
	if renew {
		c.renew(in, nodes, touched)
	}
	for a := range touched {
		c.settle(a)
	}
	c.out.Errs = slices.Concat(c.base.errs, c.errs(), c.base.rangeErrs)
	return c.out
}

func sameNode(a, b NodeInfo) bool {
	return a.Name == b.Name && a.Addr == b.Addr && slices.Equal(a.InternalIPs, b.InternalIPs) &&
		slices.Equal(a.PodCIDRs, b.PodCIDRs) && slices.Equal(a.MAC, b.MAC)
}

// sameRest compares all but pods and nodes.
func sameRest(a, b *Input) bool {
	return a.Self == b.Self && slices.Equal(a.HostAddrs, b.HostAddrs) && slices.Equal(a.ServiceCIDRs, b.ServiceCIDRs) && slices.Equal(a.Plain, b.Plain) &&
		a.NodePorts.Primary == b.NodePorts.Primary && slices.Equal(a.NodePorts.In, b.NodePorts.In) && gomaps.Equal(a.Local, b.Local)
}

// renew makes the base anew and touches the addresses of which it says
// something else.
func (c *Compiler) renew(in Input, nodes bool, touched map[netip.Addr]struct{}) {
	old := c.base
	c.base = newBase(in, func(n types.NamespacedName) types.UID {
		if p := c.pods[n]; p != nil && p.Spec.NodeName == in.Self {
			return p.UID
		}
		return ""
	})
	first := old == nil
	if first {
		old = &base{}
	}
	for a, p := range c.base.addrs {
		if was, ok := old.addrs[a]; !ok || was != p {
			touched[a] = struct{}{}
		}
	}
	for a := range old.addrs {
		if _, ok := c.base.addrs[a]; !ok {
			touched[a] = struct{}{}
		}
	}
	c.out.Delta.Prefixes = !gomaps.Equal(old.prefixes, c.base.prefixes)
	c.out.Delta.Routes = !slices.Equal(old.routes, c.base.routes)
	c.out.Prefixes, c.out.Routes, c.out.HostAddrs = c.base.prefixes, c.base.routes, c.base.hosts
	if !nodes {
		return
	}
	// Of a node, its pods' addresses depend on what changes seldom.
	changed := changedNodes(old.nodes, c.base.nodes)
	if len(changed) == 0 && !first {
		return
	}
	for n := range changed {
		delete(c.lost, n)
	}
	for a, list := range c.claims {
		for _, p := range list {
			if _, ok := changed[p.Spec.NodeName]; ok || first {
				touched[a] = struct{}{}
				c.lose(p)
			}
		}
	}
}

// changedNodes are the names of nodes that are there, or can be reached, in one
// of two lists alone.
func changedNodes(old, now map[string]*NodeInfo) map[string]struct{} {
	reached := func(n *NodeInfo) bool { return n != nil && n.Addr.IsValid() }
	changed := make(map[string]struct{})
	for _, list := range []map[string]*NodeInfo{old, now} {
		for n := range list {
			if (old[n] == nil) != (now[n] == nil) || reached(old[n]) != reached(now[n]) {
				changed[n] = struct{}{}
			}
		}
	}
	return changed
}

// lose notes a pod whose node has no object.
func (c *Compiler) lose(p *corev1.Pod) {
	node := p.Spec.NodeName
	if c.base == nil || c.base.nodes[node] != nil {
		return
	}
	if c.lost[node] == nil {
		c.lost[node] = make(map[types.NamespacedName]*corev1.Pod)
	}
	c.lost[node][name(p)] = p
}

// put takes a pod up; true if it matters to the base.
func (c *Compiler) put(p *corev1.Pod, self string, touched map[netip.Addr]struct{}) bool {
	ours := c.remove(name(p), self, touched)
	c.pods[name(p)] = p
	if p.Spec.NodeName == self {
		return true
	}
	if !ownsAddrs(p) {
		return ours
	}
	addrs, errs := podAddrs(p)
	if len(errs) > 0 {
		c.invalid[name(p)] = errs
	}
	for _, a := range addrs {
		c.claims[a] = append(c.claims[a], p)
		touched[a] = struct{}{}
	}
	if len(addrs) > 0 {
		c.lose(p)
	}
	return ours
}

// remove forgets a pod; true if it mattered to the base.
func (c *Compiler) remove(n types.NamespacedName, self string, touched map[netip.Addr]struct{}) bool {
	p := c.pods[n]
	if p == nil {
		return false
	}
	delete(c.pods, n)
	if p.Spec.NodeName == self {
		return true
	}
	delete(c.invalid, n)
	if lost := c.lost[p.Spec.NodeName]; lost != nil {
		if delete(lost, n); len(lost) == 0 {
			delete(c.lost, p.Spec.NodeName)
		}
	}
	if !ownsAddrs(p) {
		return false
	}
	addrs, _ := podAddrs(p)
	for _, a := range addrs {
		if list := slices.DeleteFunc(c.claims[a], func(x *corev1.Pod) bool { return x == p }); len(list) > 0 {
			c.claims[a] = list
		} else {
			delete(c.claims, a)
		}
		touched[a] = struct{}{}
	}
	return false
}

// settle says whose an address is: what the base has is left alone; of pods
// that claim it, the newest has it, and is put before the others.
func (c *Compiler) settle(a netip.Addr) {
	list := c.claims[a]
	for i := range list {
		if i > 0 && newer(list[i], list[0]) {
			list[0], list[i] = list[i], list[0]
		}
	}
	p, has := c.base.addrs[a]
	if len(list) > 1 || has && len(list) > 0 {
		c.ignored[a] = struct{}{}
	} else {
		delete(c.ignored, a)
	}
	if !has && len(list) > 0 {
		w := list[0]
		p, has = Peer{Flags: maps.PeerPod, Pod: name(w), UID: w.UID}, true
		// A node without an address is reported with the node.
		if n := c.base.nodes[w.Spec.NodeName]; n != nil && n.Addr.IsValid() {
			p.Node = n.Name
		}
	}
	old, had := c.out.Addrs[a]
	switch {
	case had == has && old == p:
		return
	case has:
		c.out.Addrs[a] = p
	default:
		delete(c.out.Addrs, a)
	}
	c.out.Delta.Addrs = append(c.out.Delta.Addrs, a)
}

// errs are what is wrong with other nodes' pods, sorted.
func (c *Compiler) errs() []error {
	var out []error
	for _, errs := range c.invalid {
		out = append(out, errs...)
	}
	for a := range c.ignored {
		losers := c.claims[a]
		if _, taken := c.base.addrs[a]; !taken {
			losers = losers[1:]
		}
		for _, p := range losers {
			out = append(out, fmt.Errorf("Pod %s: its address %s is %s, which keeps it; delete the pod that is gone", name(p), a, describe(c.out.Addrs[a])))
		}
	}
	for node, pods := range c.lost {
		out = append(out, nodeMissing(node, slices.Collect(gomaps.Values(pods))))
	}
	slices.SortFunc(out, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	return out
}

// nodeMissing reports pods on a node that has no object, all in one.
func nodeMissing(node string, pods []*corev1.Pod) error {
	first := slices.MinFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	what := fmt.Sprintf("Pod %s", name(first))
	if more := len(pods) - 1; more > 0 {
		what = fmt.Sprintf("%s and %d more", what, more)
	}
	if node == "" {
		return fmt.Errorf("%s: spec.nodeName is empty: cannot be reached until it is set", what)
	}
	return fmt.Errorf("%s: on Node %s, which is not among the Node objects: cannot be reached until it is", what, node)
}

// podAddrs returns the addresses that the status of p gives it.
func podAddrs(p *corev1.Pod) (out []netip.Addr, errs []error) {
	ips, field := p.Status.PodIPs, "status.podIPs"
	if len(ips) == 0 && p.Status.PodIP != "" {
		ips, field = []corev1.PodIP{{IP: p.Status.PodIP}}, "status.podIP"
	}
	for _, ip := range ips {
		a, err := parseAddr(ip.IP)
		if err != nil {
			errs = append(errs, fmt.Errorf("Pod %s: %s: %w", name(p), field, err))
			continue
		}
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out, errs
}
