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
	"k8s.io/client-go/tools/cache"

	"github.com/podweir/podweir/internal/table"
)

type apiSource struct {
	client *Client
	tables *table.Tables
	log    *slog.Logger
	// askAgain is the time after which an API that the server did not have
	// is asked for again: the server may have been upgraded.
	askAgain time.Duration
}

// NewAPI returns a source that reads from the API server. A kind that cannot
// be listed is a problem in the tables until it can. An API server without
// ServiceCIDR objects, which came with Kubernetes 1.31, counts as one that has
// none of them; so does one without ClusterNetworkPolicies, which somebody has
// to install.
func NewAPI(client *Client, t *table.Tables, log *slog.Logger) Source {
	return &apiSource{client: client, tables: t, log: log, askAgain: 2 * time.Minute}
}

func (a *apiSource) Run(ctx context.Context) error {
	lws, err := a.listerWatchers()
	if err != nil {
		return err
	}
	in, err := a.tables.RegisterSource("the API server")
	if err != nil {
		return err
	}
	runReflectors(ctx, lws, a.tables, in, a.log)
	return nil
}

func (a *apiSource) listerWatchers() (map[string]cache.ListerWatcher, error) {
	out := map[string]cache.ListerWatcher{}
	for _, k := range kinds() {
		lw, err := a.client.listWatch(k)
		if err != nil {
			return nil, err
		}
		switch k.name {
		case "ServiceCIDR", "ClusterNetworkPolicy":
			lw = a.optional(k.resource, lw)
		}
		out[k.name] = a.reporting(k.resource, lw)
	}
	return out, nil
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
				way = "grant the agent's account list and watch on " + resource
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
