package policy

import (
	"encoding/binary"
	"fmt"
	gomaps "maps"
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
	peers  []uint32            // that it belongs to, blocks among them

	signature string
	refs      int // addresses and prefixes that have it
	at        int // in identities.list
}

// identities numbers the classes and knows who belongs to each peer.
type identities struct {
	f        *inForce
	prev, st *State
	bySig    map[string]*identity
	byNumber map[uint32]*identity
	list     []*identity
	fresh    []*identity            // new in this step
	members  map[uint32][]*identity // by number of the peer
	blocksAt *lpm[[]uint32]

	nsLabels map[string]labels.Set
	nsPeers  map[string][]*peer // pods' peers that may match in a namespace
	byLabels map[string]map[string]*podClass
	classes  int    // in byLabels
	sig, buf []byte // scratch
}

// podClass is what labels and ports make of a pod, whatever its addresses.
type podClass struct {
	peers []uint32
	named map[portName]uint16
	plain *identity // of its addresses in no block; may have been removed
}

func newIdentities(f *inForce, namespaces map[string]labels.Set, prev, st *State) *identities {
	ids := &identities{
		f: f, prev: prev, st: st,
		bySig:    make(map[string]*identity),
		byNumber: make(map[uint32]*identity),
		members:  make(map[uint32][]*identity),
		nsLabels: namespaces,
		nsPeers:  make(map[string][]*peer),
		byLabels: make(map[string]map[string]*podClass),
	}
	st.identities = make(map[string]uint32)
	for _, n := range []uint32{maps.IdentityWorld, maps.IdentityHost, maps.IdentityRemoteNode, maps.IdentityPod} {
		ids.get(n, nil, nil).refs++ // it is there even if no address has it
	}
	return ids
}

// get returns the identity of the signature. kind is the fixed identity of an
// address that nothing names. The class is nil if no selector is asked.
func (ids *identities) get(kind uint32, class *podClass, blocks []uint32) *identity {
	if class == nil {
		class = new(podClass)
	}
	sig := binary.BigEndian.AppendUint32(ids.sig[:0], kind)
	for _, list := range [][]uint32{class.peers, blocks} {
		sig = binary.BigEndian.AppendUint32(sig, uint32(len(list)))
		for _, n := range list {
			sig = binary.BigEndian.AppendUint32(sig, n)
		}
	}
	sig = appendNamed(sig, class.named)
	ids.sig = sig
	if id := ids.bySig[string(sig)]; id != nil {
		return id
	}
	id := &identity{named: class.named, signature: string(sig), peers: slices.Concat(class.peers, blocks), at: len(ids.list)}
	if len(id.peers) == 0 && len(class.named) == 0 {
		id.number = kind
	} else {
		n, ok := ids.prev.identities[id.signature]
		if !ok {
			n = ids.st.nextIdentity
			ids.st.nextIdentity++
		}
		id.number = n
		ids.st.identities[id.signature] = n
	}
	ids.bySig[id.signature], ids.byNumber[id.number] = id, id
	ids.list = append(ids.list, id)
	ids.fresh = append(ids.fresh, id)
	for _, n := range id.peers {
		ids.members[n] = append(ids.members[n], id)
	}
	return id
}

// remove takes out an identity that nothing has any more.
func (ids *identities) remove(id *identity) {
	delete(ids.bySig, id.signature)
	delete(ids.byNumber, id.number)
	delete(ids.st.identities, id.signature)
	last := ids.list[len(ids.list)-1]
	ids.list[id.at], last.at = last, id.at
	ids.list = ids.list[:len(ids.list)-1]
	id.at = -1
	for _, n := range id.peers {
		ids.members[n] = slices.DeleteFunc(ids.members[n], func(x *identity) bool { return x == id })
	}
}

// forget drops what was found out about a namespace.
func (ids *identities) forget(namespace string) {
	delete(ids.nsPeers, namespace)
	ids.classes -= len(ids.byLabels[namespace])
	delete(ids.byLabels, namespace)
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
		id := ids.get(maps.IdentityWorld, nil, sets[p])
		id.refs++
		out[p] = id.number
	}
	return out
}

// address returns the identity of an exact address. prefixes comes first.
func (ids *identities) address(kind uint32, class *podClass, a netip.Addr) *identity {
	blocks, _ := ids.blocksAt.addr(a)
	if len(blocks) > 0 || class == nil {
		return ids.get(kind, class, blocks)
	}
	if class.plain == nil || class.plain.at < 0 {
		class.plain = ids.get(kind, class, nil)
	}
	return class.plain
}

// classesKept is how many classes are kept beyond those that identities need,
// for pods that come back with labels of before.
const classesKept = 1024

// class returns what the labels and ports make of the pod. Pods that look the
// same to the policies in force are evaluated once.
func (ids *identities) class(pod *Pod) *podClass {
	named := resolve(pod, ids.f.egressNames)
	key := ids.buf[:0]
	for i, k := range ids.f.labelKeys {
		if v, ok := pod.Labels[k]; ok {
			key = binary.AppendUvarint(binary.AppendUvarint(key, uint64(i+1)), uint64(len(v)))
			key = append(key, v...)
		}
	}
	key = appendNamed(append(key, 0), named)
	ids.buf = key
	if c, ok := ids.byLabels[pod.Namespace][string(key)]; ok {
		return c
	}
	c := &podClass{named: named}
	for _, pr := range ids.peersOf(pod.Namespace) {
		if pr.podSel.Matches(labels.Set(pod.Labels)) {
			c.peers = append(c.peers, ids.f.number[pr.key])
		}
	}
	slices.Sort(c.peers)
	if ids.classes > 4*len(ids.list)+classesKept {
		clear(ids.byLabels)
		ids.classes = 0
	}
	if ids.byLabels[pod.Namespace] == nil {
		ids.byLabels[pod.Namespace] = make(map[string]*podClass)
	}
	ids.byLabels[pod.Namespace][string(key)] = c
	ids.classes++
	return c
}

// nodeClass returns what its labels make of a node.
func (ids *identities) nodeClass(n *Node) *podClass {
	c := new(podClass)
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

// appendNamed appends the numbers in a canonical form.
func appendNamed(b []byte, named map[portName]uint16) []byte {
	if len(named) == 0 {
		return b
	}
	for _, n := range slices.SortedFunc(gomaps.Keys(named), comparePortNames) {
		b = fmt.Appendf(b, " %s/%d=%d", n.name, n.proto, named[n])
	}
	return b
}

func writeNamed(b *strings.Builder, named map[portName]uint16) {
	b.Write(appendNamed(nil, named))
}
