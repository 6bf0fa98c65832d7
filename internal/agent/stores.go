package agent

import (
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
)

// stores are the maps that the loop writes.
type stores struct {
	gens      genStore
	services  reconcile.Store[maps.ServiceKey, maps.Service]
	backends  reconcile.Store[maps.BackendKey, maps.Backend]
	maglev    maglevChunks
	states    reconcile.Store[maps.BackendStateKey, uint32]
	ranges    reconcile.Store[maps.SrcRangeKey, uint32]
	devAddrs  reconcile.Store[uint32, maps.DevAddrs]
	nodes     reconcile.Store[uint32, maps.Node]
	nodesV6   reconcile.Store[uint32, maps.NodeV6]
	nodeIDs   reconcile.Store[maps.Addr, uint32]
	addrs     sizedStore[maps.Addr, maps.Peer]
	prefixes  sizedStore[maps.PrefixKey, maps.Peer]
	endpoints reconcile.Store[maps.Addr, maps.Endpoint]
	policy    reconcile.Store[maps.PolicyKey, maps.PolicyEntry]
	classes   reconcile.Store[uint32, uint16]
	nodesMax  int // size of pw_nodes
}

// sizedStore is a store that says how many entries it has room for.
type sizedStore[K, V comparable] interface {
	reconcile.Store[K, V]
	MaxEntries() int
}

func storesOf(set maps.Set) stores {
	return stores{
		gens: set.Gens, services: set.Services, backends: set.Backends,
		maglev: set.Maglev, states: set.BackendStates, ranges: set.SrcRanges, devAddrs: set.DevAddrs,
		nodes: reconcile.Array(set.Nodes), nodesV6: reconcile.Array(set.NodesV6), nodeIDs: set.NodeIDs,
		addrs: set.Addrs, prefixes: set.Prefixes, endpoints: set.Endpoints,
		policy: set.Policy, classes: reconcile.Array(set.PortClass),
		nodesMax: set.Nodes.MaxEntries(),
	}
}
