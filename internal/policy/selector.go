package policy

import (
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// metadataName is the label that every namespace has, its name.
const metadataName = "kubernetes.io/metadata.name"

// peer is a peer of a rule: pods or nodes by selectors, or a block of
// addresses.
type peer struct {
	key string // the same for equal peers, in all compiles

	block *block          // nil: selectors
	nodes labels.Selector // nil: pods

	namespace string          // unless namespaces is set
	nsSel     labels.Selector // nil: the pods of namespace
	podSel    labels.Selector
}

// podPeer returns the peer of the two selectors, of which ns may be nil.
func podPeer(policyNamespace string, ns, pod labels.Selector) *peer {
	if ns == nil {
		return &peer{
			key:       "p" + strconv.Quote(policyNamespace) + pod.String(),
			namespace: policyNamespace,
			podSel:    pod,
		}
	}
	return &peer{
		key:    "s" + strconv.Quote(ns.String()) + pod.String(),
		nsSel:  ns,
		podSel: pod,
	}
}

// nodePeer returns the peer of the nodes, by the addresses in their status.
func nodePeer(sel labels.Selector) *peer {
	return &peer{key: "n" + sel.String(), nodes: sel}
}

// inNamespace says that the pods of a namespace may be meant, its labels being
// set, or not known.
func (pr *peer) inNamespace(name string, set labels.Set, known bool) bool {
	if pr.nsSel == nil {
		return pr.namespace == name
	}
	return known && pr.nsSel.Matches(set)
}

// selector compiles sel; nil selects everything.
func selector(sel *metav1.LabelSelector) (labels.Selector, error) {
	if sel == nil {
		return labels.Everything(), nil
	}
	return metav1.LabelSelectorAsSelector(sel)
}

// namespaceLabels returns the labels by namespace, with the implied one.
func namespaceLabels(list []Namespace) map[string]labels.Set {
	out := make(map[string]labels.Set, len(list))
	for _, n := range list {
		set := make(labels.Set, len(n.Labels)+1)
		for k, v := range n.Labels {
			set[k] = v
		}
		set[metadataName] = n.Name
		out[n.Name] = set
	}
	return out
}
