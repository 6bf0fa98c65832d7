package source

import (
	"context"
	"log/slog"
	"sync"

	"github.com/cilium/statedb"
	"github.com/go-logr/logr"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/podweir/podweir/internal/table"
)

// Source fills the object tables and keeps them up to date.
type Source interface {
	// Run works until ctx ends, and returns when all it started has stopped.
	// Run may be called once.
	Run(ctx context.Context) error
}

// runReflectors runs one reflector per kind, over the ListerWatchers by kind name,
// until ctx ends.
func runReflectors(ctx context.Context, lws map[string]cache.ListerWatcher, t *table.Tables, in table.Initializers, log *slog.Logger) {
	logger := logr.FromSlogHandler(log.Handler())
	ctx = klog.NewContext(ctx, logger)
	stores := map[string]cache.ReflectorStore{
		"Pod":                  newStore(t, t.Pods, trimPod, in.Pods),
		"Namespace":            newStore(t, t.Namespaces, trimNamespace, in.Namespaces),
		"Node":                 newStore(t, t.Nodes, trimNode, in.Nodes),
		"Service":              newStore(t, t.Services, trimService, in.Services),
		"EndpointSlice":        newStore(t, t.Slices, trimSlice, in.Slices),
		"NetworkPolicy":        newStore(t, t.Policies, trimPolicy, in.Policies),
		"ClusterNetworkPolicy": newStore(t, t.ClusterPolicies, trimClusterPolicy, in.ClusterPolicies),
		"ServiceCIDR":          newStore(t, t.ServiceCIDRs, trimServiceCIDR, in.ServiceCIDRs),
	}
	var wg sync.WaitGroup
	for _, k := range kinds() {
		r := cache.NewReflectorWithOptions(lws[k.name], k.empty(), stores[k.name], cache.ReflectorOptions{
			Logger: &logger, Name: k.resource, TypeDescription: k.name,
		})
		wg.Go(func() { r.RunWithContext(ctx) })
	}
	wg.Wait()
}

func newStore[Obj comparableObject](t *table.Tables, tbl statedb.RWTable[Obj], trim func(Obj) Obj, done func(statedb.WriteTxn)) cache.ReflectorStore {
	return &store[Obj]{db: t.DB, table: tbl, trim: trim, done: done}
}
