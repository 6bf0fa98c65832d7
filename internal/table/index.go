package table

import (
	"net/netip"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// keyIndex is the primary index of a kind: "namespace/name", or "name" of a
// cluster-wide object.
func keyIndex[Obj metav1.Object]() statedb.Index[Obj, string] {
	return statedb.Index[Obj, string]{
		Name: "name",
		FromObject: func(o Obj) index.KeySet {
			return index.NewKeySet(index.String(Key(o.GetNamespace(), o.GetName())))
		},
		FromKey:    index.String,
		FromString: index.FromString,
		Unique:     true,
	}
}

func newTable[Obj metav1.Object](db *statedb.DB, name string, more ...statedb.Indexer[Obj]) (statedb.RWTable[Obj], error) {
	header := func() []string { return []string{"Name", "UID", "ResourceVersion"} }
	row := func(o Obj) []string {
		return []string{Key(o.GetNamespace(), o.GetName()), string(o.GetUID()), o.GetResourceVersion()}
	}
	return statedb.NewTableAny(db, name, header, row, keyIndex[Obj](), more...)
}

// Key is the primary key of an object; namespace is empty for a cluster-wide
// one.
func Key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// ByName asks any object table for one object; namespace is empty for a
// cluster-wide kind: t.Pods.Get(txn, table.ByName[*corev1.Pod]("default", "web")).
func ByName[Obj metav1.Object](namespace, name string) statedb.Query[Obj] {
	return keyIndex[Obj]().Query(Key(namespace, name))
}

// InNamespace asks any table of a namespaced kind, with Table.Prefix, for all
// objects of a namespace.
func InNamespace[Obj metav1.Object](namespace string) statedb.Query[Obj] {
	return keyIndex[Obj]().Query(namespace + "/")
}

var podIPIndex = statedb.Index[*corev1.Pod, netip.Addr]{
	Name: "ip",
	FromObject: func(p *corev1.Pod) index.KeySet {
		keys := make([]index.Key, 0, 2)
		for _, addr := range PodIPs(p) {
			keys = append(keys, index.NetIPAddr(addr))
		}
		if len(keys) == 0 {
			return index.KeySet{}
		}
		return index.NewKeySet(keys[0], keys[1:]...)
	},
	FromKey:    index.NetIPAddr,
	FromString: index.NetIPAddrString,
}

// PodsByIP asks for the pods that report an address in their status. There may
// be several: pods on the host network, and a finished pod whose address went
// to another; what they are is for the caller to see.
func PodsByIP(addr netip.Addr) statedb.Query[*corev1.Pod] {
	return podIPIndex.Query(addr.Unmap())
}

// PodIPs are the valid addresses in a pod's status, without doubles, IPv4 never
// in its v4-mapped form.
func PodIPs(p *corev1.Pod) []netip.Addr {
	addrs := make([]netip.Addr, 0, 2)
	add := func(s string) {
		addr, err := netip.ParseAddr(s)
		if err != nil || addr.Zone() != "" {
			return
		}
		addr = addr.Unmap()
		for _, have := range addrs {
			if have == addr {
				return
			}
		}
		addrs = append(addrs, addr)
	}
	add(p.Status.PodIP)
	for _, ip := range p.Status.PodIPs {
		add(ip.IP)
	}
	return addrs
}

var podNodeIndex = statedb.Index[*corev1.Pod, string]{
	Name: "node",
	FromObject: func(p *corev1.Pod) index.KeySet {
		if p.Spec.NodeName == "" {
			return index.KeySet{}
		}
		return index.NewKeySet(index.String(p.Spec.NodeName))
	},
	FromKey:    index.String,
	FromString: index.FromString,
}

// PodsByNode asks for the pods bound to a node.
func PodsByNode(node string) statedb.Query[*corev1.Pod] {
	return podNodeIndex.Query(node)
}

var sliceServiceIndex = statedb.Index[*discoveryv1.EndpointSlice, types.NamespacedName]{
	Name: "service",
	FromObject: func(s *discoveryv1.EndpointSlice) index.KeySet {
		name := s.Labels[discoveryv1.LabelServiceName]
		if name == "" {
			return index.KeySet{}
		}
		return index.NewKeySet(index.String(Key(s.Namespace, name)))
	},
	FromKey:    func(n types.NamespacedName) index.Key { return index.String(Key(n.Namespace, n.Name)) },
	FromString: index.FromString,
}

// SlicesByService asks for the EndpointSlices whose label
// kubernetes.io/service-name names a service.
func SlicesByService(namespace, name string) statedb.Query[*discoveryv1.EndpointSlice] {
	return sliceServiceIndex.Query(types.NamespacedName{Namespace: namespace, Name: name})
}
