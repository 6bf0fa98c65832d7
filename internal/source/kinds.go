package source

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// object is any Kubernetes object.
type object interface {
	metav1.Object
	runtime.Object
}

// kind describes a kind that the sources deliver.
type kind struct {
	name        string // "Pod"
	apiVersion  string
	resource    string // "pods": its name in the API's paths and in the log
	clusterWide bool   // it belongs to no namespace
	empty       func() object
	list        func(items []runtime.Object, resourceVersion string) runtime.Object
	also        []string // further versions, of which this one's type serves
}

// listOf makes a list object of T's list type from shared objects.
func listOf[T any, P interface {
	*T
	object
}](build func(meta metav1.ListMeta, items []T) runtime.Object) func([]runtime.Object, string) runtime.Object {
	return func(objs []runtime.Object, resourceVersion string) runtime.Object {
		items := make([]T, 0, len(objs))
		for _, o := range objs {
			items = append(items, *o.(P))
		}
		return build(metav1.ListMeta{ResourceVersion: resourceVersion}, items)
	}
}

// kinds are all kinds, namespaces and nodes first.
func kinds() []kind {
	const core, discovery, networking = "v1", "discovery.k8s.io/v1", "networking.k8s.io/v1"
	clusterPolicy := clusterPolicyVersions()
	return []kind{
		{"Namespace", core, "namespaces", true, func() object { return new(corev1.Namespace) },
			listOf(func(m metav1.ListMeta, i []corev1.Namespace) runtime.Object {
				return &corev1.NamespaceList{ListMeta: m, Items: i}
			}), nil},
		{"Node", core, "nodes", true, func() object { return new(corev1.Node) },
			listOf(func(m metav1.ListMeta, i []corev1.Node) runtime.Object {
				return &corev1.NodeList{ListMeta: m, Items: i}
			}), nil},
		{"ServiceCIDR", networking, "servicecidrs", true, func() object { return new(networkingv1.ServiceCIDR) },
			listOf(func(m metav1.ListMeta, i []networkingv1.ServiceCIDR) runtime.Object {
				return &networkingv1.ServiceCIDRList{ListMeta: m, Items: i}
			}), nil},
		{"Pod", core, "pods", false, func() object { return new(corev1.Pod) },
			listOf(func(m metav1.ListMeta, i []corev1.Pod) runtime.Object {
				return &corev1.PodList{ListMeta: m, Items: i}
			}), nil},
		{"NetworkPolicy", networking, "networkpolicies", false, func() object { return new(networkingv1.NetworkPolicy) },
			listOf(func(m metav1.ListMeta, i []networkingv1.NetworkPolicy) runtime.Object {
				return &networkingv1.NetworkPolicyList{ListMeta: m, Items: i}
			}), nil},
		{"ClusterNetworkPolicy", clusterPolicy[0].String(), "clusternetworkpolicies", true, func() object { return new(v1beta1.ClusterNetworkPolicy) },
			listOf(func(m metav1.ListMeta, i []v1beta1.ClusterNetworkPolicy) runtime.Object {
				return &v1beta1.ClusterNetworkPolicyList{ListMeta: m, Items: i}
			}), []string{clusterPolicy[1].String()}},
		{"EndpointSlice", discovery, "endpointslices", false, func() object { return new(discoveryv1.EndpointSlice) },
			listOf(func(m metav1.ListMeta, i []discoveryv1.EndpointSlice) runtime.Object {
				return &discoveryv1.EndpointSliceList{ListMeta: m, Items: i}
			}), nil},
		{"Service", core, "services", false, func() object { return new(corev1.Service) },
			listOf(func(m metav1.ListMeta, i []corev1.Service) runtime.Object {
				return &corev1.ServiceList{ListMeta: m, Items: i}
			}), nil},
	}
}

// findKind returns the kind for what a document says of itself. known is true
// if the kind is one of ours, though perhaps in another version.
func findKind(all []kind, apiVersion, name string) (k kind, known bool, err error) {
	if name == "" {
		return kind{}, false, fmt.Errorf("kind is missing: write apiVersion and kind of the object")
	}
	i := slices.IndexFunc(all, func(k kind) bool { return k.name == name })
	if i < 0 {
		var names []string
		for _, k := range all {
			names = append(names, k.name)
			if strings.EqualFold(k.name, name) {
				return kind{}, false, fmt.Errorf("kind %q is unknown: write %q", name, k.name)
			}
		}
		return kind{}, false, fmt.Errorf("kind %q (apiVersion %q) is not read from a manifest directory, only %s: move it to a file elsewhere",
			name, apiVersion, strings.Join(names, ", "))
	}
	k = all[i]
	switch {
	case apiVersion == k.apiVersion || slices.Contains(k.also, apiVersion):
		return k, true, nil
	case apiVersion == "":
		return k, true, fmt.Errorf("apiVersion is missing: write apiVersion: %s", k.apiVersion)
	}
	return k, true, fmt.Errorf("apiVersion %q of kind %s is not read: write apiVersion: %s", apiVersion, k.name, k.apiVersion)
}

// objectKey names one object among all kinds.
type objectKey struct{ kind, namespace, name string }

func (k objectKey) String() string {
	switch {
	case k.kind == "":
		return ""
	case k.name == "":
		return k.kind
	case k.namespace == "":
		return k.kind + " " + k.name
	}
	return k.kind + " " + k.namespace + "/" + k.name
}
