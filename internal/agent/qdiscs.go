package agent

import "maps"

// readQdiscs notes what other programs have put on pods' devices. What is sent
// to such a pod goes through it: the pod's entry says so, and running flows
// follow, like any change of an entry. For what it sends see syncFiltered.
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
