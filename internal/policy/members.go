package policy

import (
	"cmp"
	gomaps "maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
)

// members are the pods, namespaces and nodes of the cluster, and who of them
// owns which address.
type members struct {
	pods        map[types.NamespacedName]*member
	local       map[types.NamespacedName]*member
	byNamespace map[string]map[*member]struct{}
	claims      map[netip.Addr][]*member // who says that it has an address
	conflicts   map[netip.Addr]struct{}  // addresses with a claim that is ignored

	nsLabels map[string]labels.Set
	list     []Node
	nodes    map[netip.Addr]nodeOwner
}

// member is a pod with what was found out about it.
type member struct {
	pod   Pod
	addrs []netip.Addr // claimed: unmapped, without zone

	class   *podClass // nil: not known yet
	classOf *identities
	chosen  *chosen // of a local pod; nil: not known yet
}

func (mb *member) name() types.NamespacedName {
	return types.NamespacedName{Namespace: mb.pod.Namespace, Name: mb.pod.Name}
}

func comparePods(a, b *Pod) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func (mb *member) isLocal() bool { return mb.pod.Local && !mb.pod.HostNetwork }

// nodeOwner is a node that an address belongs to: the addresses of a node's
// devices are its own, but no selector finds it by them.
type nodeOwner struct {
	kind uint32
	node *Node
}

func newMembers() members {
	return members{
		pods:        make(map[types.NamespacedName]*member),
		local:       make(map[types.NamespacedName]*member),
		byNamespace: make(map[string]map[*member]struct{}),
		claims:      make(map[netip.Addr][]*member),
		conflicts:   make(map[netip.Addr]struct{}),
		nsLabels:    make(map[string]labels.Set),
		nodes:       make(map[netip.Addr]nodeOwner),
	}
}

// sortedLocal are the local pods, by name.
func (m *members) sortedLocal() []*member {
	return slices.SortedFunc(gomaps.Values(m.local), func(a, b *member) int { return comparePods(&a.pod, &b.pod) })
}

// put takes a pod up, or what is different about it.
func (m *members) put(p *Pod, s *work) {
	mb := &member{pod: *p}
	name := mb.name()
	old := m.pods[name]
	if old != nil && samePod(&old.pod, p) {
		return
	}
	m.remove(name, s)
	if !p.HostNetwork {
		for _, a := range p.Addrs {
			if a = a.Unmap().WithZone(""); !slices.Contains(mb.addrs, a) {
				mb.addrs = append(mb.addrs, a)
			}
		}
	}
	m.pods[name] = mb
	if m.byNamespace[name.Namespace] == nil {
		m.byNamespace[name.Namespace] = make(map[*member]struct{})
	}
	m.byNamespace[name.Namespace][mb] = struct{}{}
	if mb.isLocal() {
		m.local[name] = mb
		s.local = true
	}
	for _, a := range mb.addrs {
		m.claims[a] = append(m.claims[a], mb)
		m.settle(a)
		s.touch(a)
	}
}

func samePod(a, b *Pod) bool {
	return a.UID == b.UID && a.Created.Equal(b.Created) && a.HostNetwork == b.HostNetwork && a.Local == b.Local &&
		slices.Equal(a.Addrs, b.Addrs) && slices.Equal(a.Ports, b.Ports) && gomaps.Equal(a.Labels, b.Labels)
}

func (m *members) remove(name types.NamespacedName, s *work) {
	mb := m.pods[name]
	if mb == nil {
		return
	}
	delete(m.pods, name)
	delete(m.byNamespace[name.Namespace], mb)
	if len(m.byNamespace[name.Namespace]) == 0 {
		delete(m.byNamespace, name.Namespace)
	}
	if mb.isLocal() {
		delete(m.local, name)
		s.local = true
	}
	for _, a := range mb.addrs {
		if list := slices.DeleteFunc(m.claims[a], func(x *member) bool { return x == mb }); len(list) > 0 {
			m.claims[a] = list
		} else {
			delete(m.claims, a)
		}
		m.settle(a)
		s.touch(a)
	}
}

// settle puts the owner of an address before the others that claim it.
func (m *members) settle(a netip.Addr) {
	list := m.claims[a]
	for i := range list {
		if i > 0 && beats(&list[i].pod, &list[0].pod) {
			list[0], list[i] = list[i], list[0]
		}
	}
	_, node := m.nodes[a]
	if len(list) > 1 || node && len(list) > 0 {
		m.conflicts[a] = struct{}{}
	} else {
		delete(m.conflicts, a)
	}
}

// owner returns the pod that owns an address; nil: none.
func (m *members) owner(a netip.Addr) *member {
	if _, ok := m.nodes[a]; ok || len(m.claims[a]) == 0 {
		return nil
	}
	return m.claims[a][0]
}

// problems are the claims that are ignored, by address.
func (m *members) problems() []Problem {
	var out []Problem
	for _, a := range slices.SortedFunc(gomaps.Keys(m.conflicts), netip.Addr.Compare) {
		list, who := m.claims[a], "a node"
		if mb := m.owner(a); mb != nil {
			list, who = list[1:], "pod "+mb.pod.Namespace+"/"+mb.pod.Name
		}
		losers := slices.SortedFunc(slices.Values(list), func(a, b *member) int { return comparePods(&a.pod, &b.pod) })
		for _, mb := range losers {
			out = append(out, conflict(&mb.pod, a, who))
		}
	}
	return out
}

// setNamespaces returns those that are different.
func (m *members) setNamespaces(list []Namespace) map[string]bool {
	now := namespaceLabels(list)
	changed := make(map[string]bool)
	for name, set := range now {
		if old, ok := m.nsLabels[name]; !ok || !gomaps.Equal(old, set) {
			changed[name] = true
			m.nsLabels[name] = set
		}
	}
	for name := range m.nsLabels {
		if _, ok := now[name]; !ok {
			changed[name] = true
			delete(m.nsLabels, name)
		}
	}
	return changed
}

// setNodes touches the addresses of all nodes if one is different.
func (m *members) setNodes(list []Node, s *work) {
	if slices.EqualFunc(list, m.list, sameNode) {
		return
	}
	old := m.nodes
	m.list, m.nodes = slices.Clone(list), make(map[netip.Addr]nodeOwner)
	for i := range m.list {
		n := &m.list[i]
		w := nodeOwner{maps.IdentityRemoteNode, n}
		if n.Self {
			w.kind = maps.IdentityHost
		}
		own := func(a netip.Addr) {
			a = a.Unmap().WithZone("")
			if m.nodes[a].kind != maps.IdentityHost { // this node goes before others
				m.nodes[a] = w
			}
		}
		for _, a := range n.Addrs {
			own(a)
		}
		w.node = nil
		for _, a := range n.Devices {
			if !slices.Contains(n.Addrs, a) {
				own(a)
			}
		}
	}
	for _, nodes := range []map[netip.Addr]nodeOwner{old, m.nodes} {
		for a := range nodes {
			m.settle(a)
			s.touch(a)
		}
	}
}

func sameNode(a, b Node) bool {
	return a.Name == b.Name && a.Self == b.Self && gomaps.Equal(a.Labels, b.Labels) &&
		slices.Equal(a.Addrs, b.Addrs) && slices.Equal(a.Devices, b.Devices)
}
