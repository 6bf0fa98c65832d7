package fakeapi

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// Resource names, as in the API's paths.
const (
	Nodes           = "nodes"
	Namespaces      = "namespaces"
	Pods            = "pods"
	Services        = "services"
	EndpointSlices  = "endpointslices"
	NetworkPolicies = "networkpolicies"
	ClusterPolicies = "clusternetworkpolicies"
	ServiceCIDRs    = "servicecidrs"
)

// Object is any Kubernetes object.
type Object interface {
	metav1.Object
	runtime.Object
}

// Server is the fake API server.
type Server struct {
	URL string

	http *httptest.Server

	mu        sync.Mutex
	changed   chan struct{} // closed at the next change of anything below
	version   uint64
	resources map[string]*resource
	watchList bool
	protobuf  bool
}

// resource is the state of one kind.
type resource struct {
	apiVersion, kind string
	custom           bool               // a custom resource: JSON alone
	objects          map[string]*served // by namespace/name
	log              []event
	dropped          uint64 // newest version that is no longer in log
	fail             int    // HTTP status that requests get, 0 for none
	holdLists        bool
	holdWatches      bool // no watch is answered
	holdEvents       bool // watches are answered, but nothing is sent
	part             int  // so many objects of a list are sent, the rest is held; 0 = whole
	lists, watches   int  // requests answered so far
	begun            int  // lists of which a part was sent
	cut              chan struct{}
	open             int // watches
	looks            int // discoveries of its group
}

type event struct {
	version uint64
	what    watch.EventType
	obj     *served
	old     Object // before the change; nil if there was none
}

// New starts a server that ends with the test.
func New(t testing.TB) *Server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := Start(l)
	t.Cleanup(s.Close)
	return s
}

// Start starts a server on a listener; Close ends both.
func Start(l net.Listener) *Server {
	s := &Server{changed: make(chan struct{}), version: 1, watchList: true, protobuf: true, resources: map[string]*resource{}}
	for name, r := range map[string]resource{
		Nodes:           {apiVersion: "v1", kind: "Node"},
		Namespaces:      {apiVersion: "v1", kind: "Namespace"},
		Pods:            {apiVersion: "v1", kind: "Pod"},
		Services:        {apiVersion: "v1", kind: "Service"},
		EndpointSlices:  {apiVersion: "discovery.k8s.io/v1", kind: "EndpointSlice"},
		NetworkPolicies: {apiVersion: "networking.k8s.io/v1", kind: "NetworkPolicy"},
		ClusterPolicies: {apiVersion: v1beta1.GroupVersion.String(), kind: "ClusterNetworkPolicy", custom: true},
		ServiceCIDRs:    {apiVersion: "networking.k8s.io/v1", kind: "ServiceCIDR"},
	} {
		r.objects = map[string]*served{}
		r.cut = make(chan struct{})
		s.resources[name] = &r
	}
	s.http = &httptest.Server{Listener: l, Config: &http.Server{Handler: s}}
	s.http.Start()
	s.URL = s.http.URL
	return s
}

// Close lets go of what is held back and ends the server.
func (s *Server) Close() {
	s.update(func() {
		for _, r := range s.resources {
			r.holdLists, r.holdWatches, r.holdEvents, r.part = false, false, false, 0
			close(r.cut)
			r.cut = make(chan struct{})
		}
	})
	s.http.CloseClientConnections()
	s.http.Close()
}

// Serve answers on a further address, such as one inside a network namespace,
// until stop: that ends its connections, too, as the end of a process would.
func (s *Server) Serve(t testing.TB, l net.Listener) (stop func()) {
	t.Helper()
	end := s.ServeOn(l)
	stop = func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// ServeOn is Serve outside of tests. Only the first stop does anything.
func (s *Server) ServeOn(l net.Listener) (stop func() error) {
	h := &http.Server{Handler: s}
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(l) }()
	return sync.OnceValue(func() error {
		err := h.Close()
		if serr := <-ended; !errors.Is(serr, http.ErrServerClosed) {
			err = errors.Join(err, serr)
		}
		if err != nil {
			return fmt.Errorf("fakeapi: serve on %s: %w", l.Addr(), err)
		}
		return nil
	})
}

// Config is a client configuration for the server.
func (s *Server) Config() *rest.Config {
	return &rest.Config{Host: s.URL, QPS: -1}
}

// update changes the state and wakes whoever waits for a change.
func (s *Server) update(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	close(s.changed)
	s.changed = make(chan struct{})
}

// on changes the state of some resources; of all, if none is named.
func (s *Server) on(names []string, change func(*resource)) {
	s.update(func() {
		for name, r := range s.resources {
			if len(names) == 0 || slices.Contains(names, name) {
				change(r)
			}
		}
		for _, name := range names {
			if s.resources[name] == nil {
				panic(fmt.Sprintf("fakeapi: no resource %q", name))
			}
		}
	})
}

func resourceOf(o Object) string {
	switch o.(type) {
	case *corev1.Node:
		return Nodes
	case *corev1.Namespace:
		return Namespaces
	case *corev1.Pod:
		return Pods
	case *corev1.Service:
		return Services
	case *discoveryv1.EndpointSlice:
		return EndpointSlices
	case *networkingv1.NetworkPolicy:
		return NetworkPolicies
	case *v1beta1.ClusterNetworkPolicy:
		return ClusterPolicies
	case *networkingv1.ServiceCIDR:
		return ServiceCIDRs
	}
	panic(fmt.Sprintf("fakeapi: no resource for %T", o))
}

func keyOf(o Object) string { return o.GetNamespace() + "/" + o.GetName() }

// Put creates or updates objects, each a change of its own. An object without
// a UID gets one, the one it had if it exists.
func (s *Server) Put(objs ...Object) {
	s.update(func() {
		for _, o := range objs {
			r := s.resources[resourceOf(o)]
			o = o.DeepCopyObject().(Object)
			what := watch.Added
			old := r.objects[keyOf(o)]
			if old != nil {
				what = watch.Modified
			}
			s.version++
			switch {
			case o.GetUID() != "":
			case old != nil:
				o.SetUID(old.obj.GetUID())
			default:
				o.SetUID(uid(s.version))
			}
			r.objects[keyOf(o)] = s.record(r, what, o, old)
		}
	})
}

// Delete removes objects by their kind, namespace and name.
func (s *Server) Delete(objs ...Object) {
	s.update(func() {
		for _, o := range objs {
			r := s.resources[resourceOf(o)]
			old := r.objects[keyOf(o)]
			if old == nil {
				panic(fmt.Sprintf("fakeapi: delete %s %s: no such object", r.kind, keyOf(o)))
			}
			s.version++
			s.record(r, watch.Deleted, old.obj.DeepCopyObject().(Object), old)
			delete(r.objects, keyOf(o))
		}
	})
}

func (s *Server) record(r *resource, what watch.EventType, o Object, old *served) *served {
	o.SetResourceVersion(strconv.FormatUint(s.version, 10))
	o.GetObjectKind().SetGroupVersionKind(r.gvk())
	e := event{version: s.version, what: what, obj: &served{obj: o}}
	if old != nil {
		e.old = old.obj
	}
	r.log = append(r.log, e)
	return e.obj
}

// HoldLists keeps lists, streamed or plain, of the resources (all, if none is
// named) unanswered until ReleaseLists.
func (s *Server) HoldLists(resources ...string) {
	s.on(resources, func(r *resource) { r.holdLists = true })
}

func (s *Server) ReleaseLists(resources ...string) {
	s.on(resources, func(r *resource) { r.holdLists, r.part = false, 0 })
}

// HoldListsAfter has lists begin with so many objects, one at least: a plain
// list as a first page, a streamed one as its first events. The rest waits for
// ReleaseLists.
func (s *Server) HoldListsAfter(objects int, resources ...string) {
	s.on(resources, func(r *resource) { r.part = objects })
}

// HoldWatches keeps new watches unanswered until ReleaseWatches.
func (s *Server) HoldWatches(resources ...string) {
	s.on(resources, func(r *resource) { r.holdWatches = true })
}

func (s *Server) ReleaseWatches(resources ...string) {
	s.on(resources, func(r *resource) { r.holdWatches = false })
}

// HoldEvents keeps changes back from open watches until ReleaseEvents.
func (s *Server) HoldEvents(resources ...string) {
	s.on(resources, func(r *resource) { r.holdEvents = true })
}

func (s *Server) ReleaseEvents(resources ...string) {
	s.on(resources, func(r *resource) { r.holdEvents = false })
}

// CutWatches breaks the connections of all open watches.
func (s *Server) CutWatches(resources ...string) {
	s.on(resources, func(r *resource) {
		close(r.cut)
		r.cut = make(chan struct{})
	})
}

// Forget drops the log of changes: a watch from an older version is Gone.
func (s *Server) Forget(resources ...string) {
	s.on(resources, func(r *resource) {
		r.log = nil
		r.dropped = s.version
	})
}

// Fail answers all requests with an HTTP status; 0 ends that. 404 is a kind
// that the server does not have.
func (s *Server) Fail(status int, resources ...string) {
	s.on(resources, func(r *resource) { r.fail = status })
}

// SetVersion has the server know a resource by another version alone.
func (s *Server) SetVersion(apiVersion string, resources ...string) {
	s.on(resources, func(r *resource) {
		r.apiVersion = apiVersion
		for key, o := range r.objects {
			obj := o.obj.DeepCopyObject().(Object)
			obj.GetObjectKind().SetGroupVersionKind(r.gvk())
			r.objects[key] = &served{obj: obj}
		}
	})
}

// SetWatchList sets whether the server can stream lists; it can at first.
func (s *Server) SetWatchList(on bool) { s.update(func() { s.watchList = on }) }

// SetProtobuf sets whether the server speaks protobuf; it does at first.
func (s *Server) SetProtobuf(on bool) { s.update(func() { s.protobuf = on }) }

// Stats are the requests that a resource has answered.
type Stats struct {
	Lists   int // plain and streamed
	Begun   int // lists of which a part was sent
	Watches int // without initial events
	Open    int // watches now
	Looks   int // at what there is of its group
}

// Await waits until the stats of a resource satisfy a condition. It fails the
// test when the test's time is over.
func (s *Server) Await(t testing.TB, resource string, ok func(Stats) bool) Stats {
	t.Helper()
	for {
		s.mu.Lock()
		r := s.resources[resource]
		st := Stats{r.lists, r.begun, r.watches, r.open, r.looks}
		changed := s.changed
		s.mu.Unlock()
		if ok(st) {
			return st
		}
		select {
		case <-changed:
		case <-t.Context().Done():
			t.Fatalf("fakeapi: %s: %+v is not what was waited for: %v", resource, st, t.Context().Err())
		}
	}
}
