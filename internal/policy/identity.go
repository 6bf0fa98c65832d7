package policy

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/podweir/podweir/internal/maps"
)

// identity is a class of peers that the policies in force do not tell apart.
type identity struct {
	number uint32
	named  map[portName]uint16 // egress names that its pods serve
}

// identities numbers the classes and knows who belongs to each peer.
type identities struct {
	f        *inForce
	prev, st *State
	bySig    map[string]*identity
	list     []*identity
	members  map[uint32][]*identity // by number of the peer
	blocksAt *lpm[[]uint32]

	nsLabels map[string]labels.Set
	nsPeers  map[string][]*peer // pods' peers that may match in a namespace
	byLabels map[string]podClass
}

// podClass is what labels and ports make of a pod, whatever its addresses.
type podClass struct {
	peers []uint32
	named map[portName]uint16
}

func newIdentities(f *inForce, namespaces map[string]labels.Set, prev, st *State) *identities {
	ids := &identities{
		f: f, prev: prev, st: st,
		bySig:    make(map[string]*identity),
		members:  make(map[uint32][]*identity),
		nsLabels: namespaces,
		nsPeers:  make(map[string][]*peer),
		byLabels: make(map[string]podClass),
	}
	st.identities = make(map[string]uint32)
	for _, n := range []uint32{maps.IdentityWorld, maps.IdentityHost, maps.IdentityRemoteNode, maps.IdentityPod} {
		ids.get(n, podClass{}, nil)
	}
	return ids
}

// get returns the identity of the signature. kind is the fixed identity of an
// address that nothing names.
func (ids *identities) get(kind uint32, class podClass, blocks []uint32) *identity {
	var sig strings.Builder
	word := func(n uint32) {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], n)
		sig.Write(b[:])
	}
	word(kind)
	word(uint32(len(class.peers)))
	for _, n := range class.peers {
		word(n)
	}
	word(uint32(len(blocks)))
	for _, n := range blocks {
		word(n)
	}
	writeNamed(&sig, class.named)
	key := sig.String()
	if id := ids.bySig[key]; id != nil {
		return id
	}
	id := &identity{named: class.named}
	if len(class.peers) == 0 && len(blocks) == 0 && len(class.named) == 0 {
		id.number = kind
	} else {
		n, ok := ids.prev.identities[key]
		if !ok {
			n = ids.st.nextIdentity
			ids.st.nextIdentity++
		}
		id.number = n
		ids.st.identities[key] = n
	}
	ids.bySig[key] = id
	ids.list = append(ids.list, id)
	for _, n := range class.peers {
		ids.members[n] = append(ids.members[n], id)
	}
	for _, n := range blocks {
		ids.members[n] = append(ids.members[n], id)
	}
	return id
}

// prefixes numbers the prefixes at which identities change.
func (ids *identities) prefixes() map[netip.Prefix]uint32 {
	sets := blockSets(ids.f.blocks)
	ids.blocksAt = newLPM(sets)
	order := make([]netip.Prefix, 0, len(sets))
	for p := range sets {
		order = append(order, p)
	}
	slices.SortFunc(order, comparePrefixes)
	out := make(map[netip.Prefix]uint32, len(order))
	for _, p := range order {
		out[p] = ids.get(maps.IdentityWorld, podClass{}, sets[p]).number
	}
	return out
}

// address returns the identity of an exact address. prefixes comes first.
func (ids *identities) address(kind uint32, class podClass, a netip.Addr) uint32 {
	blocks, _ := ids.blocksAt.addr(a)
	return ids.get(kind, class, blocks).number
}

// class returns what the labels and ports make of the pod. Pods that look the
// same to the policies in force are evaluated once.
func (ids *identities) class(pod *Pod) podClass {
	named := resolve(pod, ids.f.egressNames)
	var key strings.Builder
	fmt.Fprintf(&key, "%q", pod.Namespace)
	for _, k := range ids.f.labelKeys {
		if v, ok := pod.Labels[k]; ok {
			fmt.Fprintf(&key, " %q=%q", k, v)
		}
	}
	key.WriteString("|")
	writeNamed(&key, named)
	if c, ok := ids.byLabels[key.String()]; ok {
		return c
	}
	c := podClass{named: named}
	for _, pr := range ids.peersOf(pod.Namespace) {
		if pr.podSel.Matches(labels.Set(pod.Labels)) {
			c.peers = append(c.peers, ids.f.number[pr.key])
		}
	}
	slices.Sort(c.peers)
	ids.byLabels[key.String()] = c
	return c
}

// nodeClass returns what its labels make of a node.
func (ids *identities) nodeClass(n *Node) podClass {
	var c podClass
	for _, pr := range ids.f.peers {
		if pr.nodes != nil && pr.nodes.Matches(labels.Set(n.Labels)) {
			c.peers = append(c.peers, ids.f.number[pr.key])
		}
	}
	slices.Sort(c.peers)
	return c
}

// peersOf returns the selector peers that may match pods of the namespace.
func (ids *identities) peersOf(namespace string) []*peer {
	if list, ok := ids.nsPeers[namespace]; ok {
		return list
	}
	set, known := ids.nsLabels[namespace]
	var list []*peer
	for _, pr := range ids.f.peers {
		if pr.podSel != nil && pr.inNamespace(namespace, set, known) {
			list = append(list, pr)
		}
	}
	ids.nsPeers[namespace] = list
	return list
}

// resolve returns the numbers that the pod's ports have for the names.
func resolve(pod *Pod, names []portName) map[portName]uint16 {
	var out map[portName]uint16
	for _, n := range names {
		i := slices.IndexFunc(pod.Ports, func(p NamedPort) bool { return p.Name == n.name && p.Proto == n.proto })
		if i < 0 {
			continue
		}
		if out == nil {
			out = make(map[portName]uint16)
		}
		out[n] = pod.Ports[i].Port
	}
	return out
}

// writeNamed writes the numbers in a canonical form.
func writeNamed(b *strings.Builder, named map[portName]uint16) {
	names := make([]portName, 0, len(named))
	for n := range named {
		names = append(names, n)
	}
	slices.SortFunc(names, comparePortNames)
	for _, n := range names {
		fmt.Fprintf(b, " %s/%d=%d", n.name, n.proto, named[n])
	}
}
