package table

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// Tables are the tables of one node, in one database.
type Tables struct {
	DB *statedb.DB

	Pods         statedb.RWTable[*corev1.Pod]
	Namespaces   statedb.RWTable[*corev1.Namespace]
	Nodes        statedb.RWTable[*corev1.Node]
	Services     statedb.RWTable[*corev1.Service]
	Slices       statedb.RWTable[*discoveryv1.EndpointSlice]
	Policies     statedb.RWTable[*networkingv1.NetworkPolicy]
	ServiceCIDRs statedb.RWTable[*networkingv1.ServiceCIDR]

	ClusterPolicies statedb.RWTable[*v1beta1.ClusterNetworkPolicy]

	Problems statedb.RWTable[*Problem]

	mu      sync.Mutex
	source  string
	waiting Initializers // for a source to register
}

// Initializers mark the tables complete, each within a write transaction that
// has locked its table. Calling one again does nothing.
type Initializers struct {
	Pods, Namespaces, Nodes, Services, Slices, Policies, ServiceCIDRs, ClusterPolicies func(statedb.WriteTxn)
}

// New returns empty tables that wait for a source.
func New() (*Tables, error) {
	db := statedb.New()
	t := &Tables{DB: db}
	var errs [9]error
	t.Pods, errs[0] = newTable(db, "pods", podIPIndex, podNodeIndex)
	t.Namespaces, errs[1] = newTable[*corev1.Namespace](db, "namespaces")
	t.Nodes, errs[2] = newTable[*corev1.Node](db, "nodes")
	t.Services, errs[3] = newTable[*corev1.Service](db, "services")
	t.Slices, errs[4] = newTable(db, "endpointslices", sliceServiceIndex)
	t.Policies, errs[5] = newTable[*networkingv1.NetworkPolicy](db, "networkpolicies")
	t.ServiceCIDRs, errs[6] = newTable[*networkingv1.ServiceCIDR](db, "servicecidrs")
	t.ClusterPolicies, errs[8] = newTable[*v1beta1.ClusterNetworkPolicy](db, "clusternetworkpolicies")
	t.Problems, errs[7] = statedb.NewTable(db, "problems", problemIndex, problemOwnerIndex)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("make the tables: %w", err)
	}
	// Without a source the tables are empty, not complete.
	t.waiting = t.register("a source")
	return t, nil
}

// objectTables are the tables that a source fills.
func (t *Tables) objectTables() []statedb.TableMeta {
	return []statedb.TableMeta{t.Pods, t.Namespaces, t.Nodes, t.Services, t.Slices, t.Policies, t.ServiceCIDRs, t.ClusterPolicies}
}

func (t *Tables) register(name string) Initializers {
	txn := t.DB.WriteTxn(t.objectTables()...)
	defer txn.Commit()
	return Initializers{
		Pods:         t.Pods.RegisterInitializer(txn, name),
		Namespaces:   t.Namespaces.RegisterInitializer(txn, name),
		Nodes:        t.Nodes.RegisterInitializer(txn, name),
		Services:     t.Services.RegisterInitializer(txn, name),
		Slices:       t.Slices.RegisterInitializer(txn, name),
		Policies:     t.Policies.RegisterInitializer(txn, name),
		ServiceCIDRs: t.ServiceCIDRs.RegisterInitializer(txn, name),

		ClusterPolicies: t.ClusterPolicies.RegisterInitializer(txn, name),
	}
}

// RegisterSource makes name the one source of the object tables and returns
// the functions by which it marks each table complete.
func (t *Tables) RegisterSource(name string) (Initializers, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.source != "" {
		return Initializers{}, fmt.Errorf("the tables are filled by %s already: %s needs tables of its own", t.source, name)
	}
	t.source = name
	in := t.register(name)
	t.MarkComplete(t.waiting)
	return in, nil
}

// MarkComplete calls all the initializers in one transaction.
func (t *Tables) MarkComplete(in Initializers) {
	txn := t.DB.WriteTxn(t.objectTables()...)
	defer txn.Commit()
	for _, done := range []func(statedb.WriteTxn){
		in.Pods, in.Namespaces, in.Nodes, in.Services, in.Slices, in.Policies, in.ServiceCIDRs, in.ClusterPolicies,
	} {
		done(txn)
	}
}

// Synced tells whether, in this snapshot, the first list of every kind is in.
func (t *Tables) Synced(txn statedb.ReadTxn) bool {
	for _, table := range t.objectTables() {
		if done, _ := table.Initialized(txn); !done {
			return false
		}
	}
	return true
}

// Pending names the tables that are not complete in this snapshot.
func (t *Tables) Pending(txn statedb.ReadTxn) []string {
	var names []string
	for _, table := range t.objectTables() {
		if done, _ := table.Initialized(txn); !done {
			names = append(names, table.Name())
		}
	}
	return names
}

// WaitSynced returns when all tables are complete. The error, when ctx ends
// before, names the tables that are not.
func (t *Tables) WaitSynced(ctx context.Context) error {
	for _, table := range t.objectTables() {
		done, watch := table.Initialized(t.DB.ReadTxn())
		if done {
			continue
		}
		select {
		case <-watch:
		case <-ctx.Done():
			return fmt.Errorf("the first list of %v is not in: %w", t.Pending(t.DB.ReadTxn()), context.Cause(ctx))
		}
	}
	return nil
}
