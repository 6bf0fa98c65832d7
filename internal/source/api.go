package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
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
	// lookEvery is how often, meanwhile, the server's own list of what it has
	// is looked at for kinds that somebody may install: up to a quarter more,
	// so that not all nodes look at once.
	lookEvery time.Duration
}

// NewAPI returns a source that reads from the API server. A kind that cannot
// be listed is a problem in the tables until it can. An API server without
// ServiceCIDR objects, which came with Kubernetes 1.31, counts as one that has
// none of them; so does one without ClusterNetworkPolicies, which somebody has
// to install.
func NewAPI(client *Client, t *table.Tables, log *slog.Logger) Source {
	return &apiSource{client: client, tables: t, log: log, askAgain: 2 * time.Minute, lookEvery: 8 * time.Second}
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
		case "ServiceCIDR":
			lw = a.optional(k.resource, lw, nil)
		case "ClusterNetworkPolicy":
			lw = a.optional(k.resource, lw, func(ctx context.Context) (bool, error) { return a.client.serves(ctx, k) })
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
// serves, if there is one, says at little cost whether the server has it now.
func (a *apiSource) optional(resource string, lw *cache.ListWatch, serves func(context.Context) (bool, error)) *cache.ListWatch {
	again := a.askAgain
	if serves != nil {
		again = a.lookEvery
	}
	var once sync.Once
	var none atomic.Bool // what was read last is that there is no such kind
	absent := func() {
		once.Do(func() {
			a.log.Info("the API server does not have this kind, going on without", "resource", resource, "askAgainAfter", again)
		})
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			l, err := lw.ListWithContext(ctx, opts)
			if !apierrors.IsNotFound(err) {
				if err == nil {
					none.Store(false)
				}
				return l, err
			}
			absent()
			none.Store(true)
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
				if err == nil {
					none.Store(false)
				}
				return w, err
			}
			if !none.Load() {
				// The kind has gone: what there was of it is listed anew,
				// which says that there is none.
				return nil, apierrors.NewResourceExpired("the kind has gone")
			}
			absent()
			return newIdleWatch(ctx, a.askAgain, a.lookEvery, serves), nil
		},
	}
}

// newIdleWatch returns a watch without events that ends after a time, or before
// when serves, asked every now and then, says that there is something to list.
func newIdleWatch(ctx context.Context, end, every time.Duration, serves func(context.Context) (bool, error)) watch.Interface {
	ctx, cancel := context.WithCancel(ctx)
	w := &feedWatch{result: make(chan watch.Event), cancel: cancel}
	go func() {
		defer cancel()
		defer close(w.result)
		after := time.NewTimer(end)
		defer after.Stop()
		var look <-chan time.Time
		for waiting := true; waiting; {
			if serves != nil {
				look = time.After(wait.Jitter(every, 0.25))
			}
			select {
			case <-ctx.Done():
				return
			case <-after.C:
				waiting = false
			case <-look:
				// Who may not look, or gets no answer, asks for the list
				// itself in time.
				there, err := serves(ctx)
				waiting = err != nil || !there
			}
		}
		// Not simply closed: that would look like a fault to the reader.
		status := apierrors.NewResourceExpired("time to ask for the list again").Status()
		select {
		case <-ctx.Done():
		case w.result <- watch.Event{Type: watch.Error, Object: &status}:
		}
	}()
	return w
}
