package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/podweir/podweir/internal/table"
)

type apiSource struct {
	client kubernetes.Interface
	tables *table.Tables
	log    *slog.Logger
	// askAgain is the time after which an API that the server did not have
	// is asked for again: the server may have been upgraded.
	askAgain time.Duration
}

// Configure has a client's objects come as protobuf, which costs a fraction of
// what JSON does to decode, and as JSON from a server that has nothing else.
func Configure(c *rest.Config) {
	c.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	c.ContentType = runtime.ContentTypeProtobuf
}

// NewAPI returns a source that reads from the API server. A kind that cannot
// be listed is a problem in the tables until it can. An API server without
// ServiceCIDR objects, which came with Kubernetes 1.31, counts as one that has
// none of them.
func NewAPI(client kubernetes.Interface, t *table.Tables, log *slog.Logger) Source {
	return &apiSource{client: client, tables: t, log: log, askAgain: 10 * time.Minute}
}

func (a *apiSource) Run(ctx context.Context) error {
	in, err := a.tables.RegisterSource("the API server")
	if err != nil {
		return err
	}
	runReflectors(ctx, a.listerWatchers(), a.tables, in, a.log)
	return nil
}

func (a *apiSource) listerWatchers() map[string]cache.ListerWatcher {
	core, networking := a.client.CoreV1(), a.client.NetworkingV1()
	slices := a.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll)
	lws := map[string]*cache.ListWatch{
		"Namespace":     listWatch(core.Namespaces().List, core.Namespaces().Watch),
		"Node":          listWatch(core.Nodes().List, core.Nodes().Watch),
		"Pod":           listWatch(core.Pods(metav1.NamespaceAll).List, core.Pods(metav1.NamespaceAll).Watch),
		"Service":       listWatch(core.Services(metav1.NamespaceAll).List, core.Services(metav1.NamespaceAll).Watch),
		"EndpointSlice": listWatch(slices.List, slices.Watch),
		"NetworkPolicy": listWatch(networking.NetworkPolicies(metav1.NamespaceAll).List, networking.NetworkPolicies(metav1.NamespaceAll).Watch),
		"ServiceCIDR":   a.optional("servicecidrs", listWatch(networking.ServiceCIDRs().List, networking.ServiceCIDRs().Watch)),
	}
	out := map[string]cache.ListerWatcher{}
	for _, k := range kinds() {
		out[k.name] = cache.ToListWatcherWithWatchListSemantics(a.reporting(k.resource, lws[k.name]), a.client)
	}
	return out
}

func listWatch[L runtime.Object](
	list func(context.Context, metav1.ListOptions) (L, error),
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error),
) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			l, err := list(ctx, opts)
			if err != nil {
				return nil, err
			}
			return l, nil
		},
		WatchFuncWithContext: watch,
	}
}

// reporting keeps a problem in the tables while a kind cannot be read. Errors
// that belong to the normal course (a version too old, a server that cannot
// stream lists) are none.
func (a *apiSource) reporting(resource string, lw *cache.ListWatch) *cache.ListWatch {
	owner := apiOwner + "/" + resource
	report := func(verb string, err error) {
		switch {
		case err == nil:
			a.tables.SetProblems(owner, nil)
		case errors.Is(err, context.Canceled), apierrors.IsResourceExpired(err), apierrors.IsGone(err):
		default:
			way := "the agent goes on trying; what was read before stays in force"
			if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
				way = "grant the agent's account get, list and watch on " + resource
			}
			a.tables.SetProblems(owner, []table.Problem{{Err: fmt.Sprintf("cannot %s %s: %v: %s", verb, resource, err, way)}})
		}
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			l, err := lw.ListWithContext(ctx, opts)
			report("list", err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			w, err := lw.WatchWithContext(ctx, opts)
			// A server that cannot stream a list is asked for a plain one next.
			if opts.SendInitialEvents == nil || !apierrors.IsInvalid(err) {
				report("watch", err)
			}
			return w, err
		},
	}
}

// optional makes of an API that the server does not have one without objects.
func (a *apiSource) optional(resource string, lw *cache.ListWatch) *cache.ListWatch {
	var once sync.Once
	absent := func() {
		once.Do(func() {
			a.log.Info("the API server does not have this kind, going on without", "resource", resource, "askAgainAfter", a.askAgain)
		})
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			l, err := lw.ListWithContext(ctx, opts)
			if !apierrors.IsNotFound(err) {
				return l, err
			}
			absent()
			for _, k := range kinds() {
				if k.resource == resource {
					return k.list(nil, "0"), nil
				}
			}
			return nil, err
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			w, err := lw.WatchWithContext(ctx, opts)
			if !apierrors.IsNotFound(err) || opts.SendInitialEvents != nil {
				return w, err
			}
			absent()
			return newIdleWatch(ctx, a.askAgain), nil
		},
	}
}

// newIdleWatch returns a watch without events that ends after a time.
func newIdleWatch(ctx context.Context, end time.Duration) watch.Interface {
	ctx, cancel := context.WithCancel(ctx)
	w := &feedWatch{result: make(chan watch.Event), cancel: cancel}
	go func() {
		defer cancel()
		defer close(w.result)
		after := time.NewTimer(end)
		defer after.Stop()
		select {
		case <-ctx.Done():
		case <-after.C:
			// Not simply closed: that would look like a fault to the reader.
			status := apierrors.NewResourceExpired("time to ask for the list again").Status()
			select {
			case <-ctx.Done():
			case w.result <- watch.Event{Type: watch.Error, Object: &status}:
			}
		}
	}()
	return w
}
