package source

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// Client lists and watches the kinds of this package. The generated clientset
// would bring all API groups there are into the process, and keep them in its
// memory.
type Client struct {
	groups map[schema.GroupVersion]rest.Interface
}

// NewClient makes a client of the API server that rc leads to. Objects come as
// protobuf, which costs a fraction of what JSON does to decode, and as JSON
// from a server that has nothing else.
func NewClient(rc *rest.Config) (*Client, error) {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, addClusterPolicies} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("kinds of the client: %w", err)
		}
	}
	rc = rest.CopyConfig(rc)
	rc.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	rc.ContentType = runtime.ContentTypeProtobuf
	rc.NegotiatedSerializer = rest.CodecFactoryForGeneratedClient(scheme, serializer.NewCodecFactory(scheme)).WithoutConversion()
	if rc.UserAgent == "" {
		rc.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	shared, err := rest.HTTPClientFor(rc)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	c := &Client{groups: make(map[schema.GroupVersion]rest.Interface)}
	for _, gv := range []schema.GroupVersion{corev1.SchemeGroupVersion, discoveryv1.SchemeGroupVersion, networkingv1.SchemeGroupVersion} {
		if c.groups[gv], err = groupClient(rc, shared, gv); err != nil {
			return nil, fmt.Errorf("client of %s: %w", gv, err)
		}
	}
	// Custom resources have nothing but JSON.
	rc.AcceptContentTypes, rc.ContentType = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	for _, gv := range clusterPolicyVersions() {
		if c.groups[gv], err = groupClient(rc, shared, gv); err != nil {
			return nil, fmt.Errorf("client of %s: %w", gv, err)
		}
	}
	return c, nil
}

// clusterPolicyVersions are those of ClusterNetworkPolicy, which differ in
// nothing but the name, the best first.
func clusterPolicyVersions() []schema.GroupVersion {
	return []schema.GroupVersion{schema.GroupVersion(v1beta1.GroupVersion), {Group: v1beta1.GroupName, Version: "v1alpha2"}}
}

// addClusterPolicies has all versions come in the type of the best.
func addClusterPolicies(scheme *runtime.Scheme) error {
	for _, gv := range clusterPolicyVersions() {
		scheme.AddKnownTypeWithName(gv.WithKind("ClusterNetworkPolicy"), &v1beta1.ClusterNetworkPolicy{})
		scheme.AddKnownTypeWithName(gv.WithKind("ClusterNetworkPolicyList"), &v1beta1.ClusterNetworkPolicyList{})
		metav1.AddToGroupVersion(scheme, gv)
	}
	return nil
}

func groupClient(rc *rest.Config, shared *http.Client, gv schema.GroupVersion) (rest.Interface, error) {
	of := rest.CopyConfig(rc)
	of.GroupVersion, of.APIPath = &gv, "/apis"
	if gv.Group == "" {
		of.APIPath = "/api"
	}
	return rest.RESTClientForConfigAndClient(of, shared)
}

// serves says whether the server has a kind in one of its versions, by what it
// tells everybody of its groups: one small request while it does not have the
// group.
func (c *Client) serves(ctx context.Context, k kind) (bool, error) {
	var versions []schema.GroupVersion
	for _, v := range append([]string{k.apiVersion}, k.also...) {
		gv, err := schema.ParseGroupVersion(v)
		if err != nil {
			return false, err
		}
		versions = append(versions, gv)
	}
	path := "/apis/" + versions[0].Group
	get := func(path string, into any) error {
		body, err := c.groups[versions[0]].Get().AbsPath(path).MaxRetries(0).Do(ctx).Raw()
		if err != nil {
			return err
		}
		if err := json.Unmarshal(body, into); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return nil
	}
	var group metav1.APIGroup
	if err := get(path, &group); err != nil {
		return false, ignoreNotFound(err)
	}
	for _, gv := range versions {
		if !slices.ContainsFunc(group.Versions, func(v metav1.GroupVersionForDiscovery) bool { return v.Version == gv.Version }) {
			continue
		}
		var have metav1.APIResourceList
		if err := get(path+"/"+gv.Version, &have); ignoreNotFound(err) != nil {
			return false, err
		}
		if slices.ContainsFunc(have.APIResources, func(r metav1.APIResource) bool { return r.Name == k.resource }) {
			return true, nil
		}
	}
	return false, nil
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// listWatch reads all objects of a kind, in all namespaces, in the first of its
// versions that the server has.
func (c *Client) listWatch(k kind) (*cache.ListWatch, error) {
	var groups []rest.Interface
	for _, version := range append([]string{k.apiVersion}, k.also...) {
		gv, err := schema.ParseGroupVersion(version)
		if err != nil {
			return nil, err
		}
		if c.groups[gv] == nil {
			return nil, fmt.Errorf("%s: no client of %s", k.resource, gv)
		}
		groups = append(groups, c.groups[gv])
	}
	try := func(opts *metav1.ListOptions, do func(*rest.Request) error) (err error) {
		for _, group := range groups {
			r := group.Get().Resource(k.resource).VersionedParams(opts, metav1.ParameterCodec)
			if opts.TimeoutSeconds != nil {
				r = r.Timeout(time.Duration(*opts.TimeoutSeconds) * time.Second)
			}
			if err = do(r); !apierrors.IsNotFound(err) {
				break
			}
		}
		return err
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (l runtime.Object, err error) {
			err = try(&opts, func(r *rest.Request) (err error) {
				l, err = r.Do(ctx).Get()
				return err
			})
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (w watch.Interface, err error) {
			opts.Watch = true
			err = try(&opts, func(r *rest.Request) (err error) {
				w, err = r.Watch(ctx)
				return err
			})
			return w, err
		},
	}, nil
}
