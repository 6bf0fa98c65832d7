package source

import (
	"context"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
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
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme} {
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
	return c, nil
}

func groupClient(rc *rest.Config, shared *http.Client, gv schema.GroupVersion) (rest.Interface, error) {
	of := rest.CopyConfig(rc)
	of.GroupVersion, of.APIPath = &gv, "/apis"
	if gv.Group == "" {
		of.APIPath = "/api"
	}
	return rest.RESTClientForConfigAndClient(of, shared)
}

// listWatch reads all objects of a kind, in all namespaces.
func (c *Client) listWatch(k kind) (*cache.ListWatch, error) {
	gv, err := schema.ParseGroupVersion(k.apiVersion)
	if err != nil {
		return nil, err
	}
	group := c.groups[gv]
	if group == nil {
		return nil, fmt.Errorf("%s: no client of %s", k.resource, gv)
	}
	request := func(opts *metav1.ListOptions) *rest.Request {
		r := group.Get().Resource(k.resource).VersionedParams(opts, metav1.ParameterCodec)
		if opts.TimeoutSeconds != nil {
			r = r.Timeout(time.Duration(*opts.TimeoutSeconds) * time.Second)
		}
		return r
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return request(&opts).Do(ctx).Get()
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			opts.Watch = true
			return request(&opts).Watch(ctx)
		},
	}, nil
}
