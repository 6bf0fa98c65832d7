package agent

import (
	"errors"
	"fmt"
	"sort"

	"github.com/podweir/podweir/internal/maps"
)

// errNoNodeID says that pw_nodes has no index left.
var errNoNodeID = errors.New("no node id is left")

// nodeIDs gives every other node of the cluster a small number that stays
// with its name while the agent runs, and with its outer address over a
// restart. A number is not used again before all others have been.
type nodeIDs struct {
	max    uint32 // ids are 1 .. max-1
	byName map[string]uint32
	byAddr map[maps.Addr]uint32 // of an earlier run, not claimed yet
	used   map[uint32]struct{}
	next   uint32
	freed  []uint32
}

// adoptNodeIDs reads the numbers back from the maps. Where two numbers stand
// for one address, the one that pw_node_ids names is kept.
func adoptNodeIDs(size int, nodes map[uint32]maps.Node, ids map[maps.Addr]uint32) *nodeIDs {
	n := &nodeIDs{
		max:    uint32(min(size, 1<<16)), // a flow key has 16 bits for it
		byName: make(map[string]uint32),
		byAddr: make(map[maps.Addr]uint32),
		used:   make(map[uint32]struct{}),
		next:   1,
	}
	found := make([]uint32, 0, len(nodes))
	for id := range nodes {
		if id > 0 && id < n.max {
			found = append(found, id)
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i] < found[j] })
	for _, id := range found {
		addr := nodes[id].Addr
		if _, double := n.byAddr[addr]; double && ids[addr] != id {
			continue
		}
		n.byAddr[addr] = id
		n.next = max(n.next, id+1)
	}
	for _, id := range n.byAddr {
		n.used[id] = struct{}{}
	}
	return n
}

// get returns the number of a node, a new one if it has none.
func (n *nodeIDs) get(name string, addr maps.Addr) (uint32, error) {
	if id, ok := n.byName[name]; ok {
		return id, nil
	}
	id, ok := n.byAddr[addr]
	if ok {
		delete(n.byAddr, addr)
	} else if id, ok = n.fresh(); !ok {
		return 0, fmt.Errorf("Node %s: %w: pw_nodes holds %d", name, errNoNodeID, n.max-1)
	}
	n.byName[name] = id
	n.used[id] = struct{}{}
	return id, nil
}

func (n *nodeIDs) fresh() (uint32, bool) {
	for ; n.next < n.max; n.next++ {
		if _, taken := n.used[n.next]; !taken {
			n.next++
			return n.next - 1, true
		}
	}
	if len(n.freed) > 0 {
		id := n.freed[0]
		n.freed = n.freed[1:]
		return id, true
	}
	// Numbers below an adopted one that were never in use.
	for id := uint32(1); id < n.max; id++ {
		if _, taken := n.used[id]; !taken {
			return id, true
		}
	}
	return 0, false
}

// retain frees the numbers of all nodes not in names, and forgets what an
// earlier run left and nobody has claimed.
func (n *nodeIDs) retain(names map[string]uint32) {
	for addr, id := range n.byAddr {
		delete(n.byAddr, addr)
		n.free(id)
	}
	for name, id := range n.byName {
		if _, ok := names[name]; !ok {
			delete(n.byName, name)
			n.free(id)
		}
	}
}

func (n *nodeIDs) free(id uint32) {
	delete(n.used, id)
	n.freed = append(n.freed, id)
}
