package agent

import (
	"fmt"
	"maps"

	"github.com/podweir/podweir/internal/table"
)

// readQdiscs notes what other programs have put on pods' devices. What is sent
// to such a pod goes through it: the pod's entry says so, and running flows
// follow, like any change of an entry.
func (a *Agent) readQdiscs() {
	qdiscs, err := a.stack.Qdiscs()
	a.problem("qdiscs of pods", "", err)
	if err != nil {
		return // keep what was known; the next event or tick reads it again
	}
	if !maps.Equal(qdiscs, a.world.qdiscs) {
		a.world.qdiscs = qdiscs
		a.dirty.peers = true
	}
}

// tellBypassed reports the pods whose own packets pass filters by: from_pod
// comes before these, and what it sends on never gets there.
func (a *Agent) tellBypassed() {
	var list []table.Problem
	seen := make(map[int]bool)
	for _, ep := range a.world.local.byAddr {
		if a.world.qdiscs[ep.HostIfindex].In == "" || seen[ep.HostIfindex] {
			continue
		}
		seen[ep.HostIfindex] = true
		list = append(list, table.Problem{Object: "Pod " + ep.pod.String(), Err: fmt.Sprintf(
			"filters at the ingress of its device %s do not see what the pod sends to others: a limit for it there (an ifb) has no effect; limit it inside the pod, on %s",
			ep.HostIfName, ep.IfName)})
	}
	a.problems["pods' own limits"] = list
}
