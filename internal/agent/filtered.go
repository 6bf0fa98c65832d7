package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/table"
)

// syncFiltered lets the filters that others have at the ingress of a pod's
// device see what the pod sends before it is sent on: from_pod_judge takes the
// place of from_pod, and from_pod_send sits on a device over the pod's own,
// where packets come out of the filters. Running flows go on: from_pod_judge
// does what from_pod does until the last step, which is one entry of a map.
//
// On the way back that entry goes first. What is waiting in a queue of the
// filters by then, nobody takes; such a queue goes with them.
func (a *Agent) syncFiltered(ctx context.Context) {
	w := &a.world
	want := make(map[int]localEndpoint)
	for _, ep := range w.local.byAddr {
		// With a device over it from the beginning it passes them anyway.
		if ep.Over == "" && w.qdiscs[ep.HostIfindex].In != "" {
			want[ep.HostIfindex] = ep
		}
	}
	judged := a.dp.Filtered()
	if len(want) == 0 && len(judged) == 0 && w.unfiltered {
		a.tellFiltered(nil)
		return
	}
	w.unfiltered = false
	covers, err := a.stack.Covers()
	if err != nil {
		a.problem("filtered pods", "", err)
		return // the next event or tick reads it again
	}
	failed := make(map[int]error)
	keep := make(map[uint32]bool)
	for veth, ep := range want {
		c, err := a.filter(ctx, ep)
		if err != nil {
			failed[veth] = err
			continue
		}
		keep[uint32(veth)], keep[uint32(c.Index)] = true, true
	}
	var errs []error
	entries, err := a.dp.Maps().Filtered.Dump()
	errs = append(errs, err)
	for index := range entries {
		if !keep[index] {
			errs = append(errs, a.dp.Maps().Filtered.Delete(index))
		}
	}
	if err := errors.Join(errs...); err != nil {
		// Without the map's word the device over a veth must stay.
		a.problem("filtered pods", "", err)
		a.tellFiltered(failed)
		return
	}
	for veth, c := range covers {
		if !keep[uint32(veth)] {
			errs = append(errs, a.stack.RemoveCover(c), a.dp.Detach(ctx, c.Index))
		}
	}
	for _, veth := range judged {
		if _, ok := want[veth]; !ok {
			errs = append(errs, a.dp.FilterPod(ctx, veth, "", false))
		}
	}
	err = errors.Join(errs...)
	a.problem("filtered pods", "", err)
	w.unfiltered = err == nil && len(want) == 0
	a.tellFiltered(failed)
}

// filter does so for one pod; repeating it changes nothing.
func (a *Agent) filter(ctx context.Context, ep localEndpoint) (node.Cover, error) {
	if err := a.dp.FilterPod(ctx, ep.HostIfindex, ep.HostIfName, true); err != nil {
		return node.Cover{}, err
	}
	c, err := a.stack.MakeCover(ep.HostIfindex, ep.HostIfName)
	if err != nil {
		return c, err
	}
	m := a.dp.Maps().Filtered
	if err := m.Put(uint32(c.Index), uint32(c.Veth)); err != nil {
		return c, err
	}
	if err := a.dp.AttachCover(ctx, c.Index, c.Name); err != nil {
		return c, err
	}
	if err := a.stack.RaiseCover(c); err != nil {
		return c, err
	}
	return c, m.Put(uint32(c.Veth), uint32(c.Index))
}

// tellFiltered reports the pods whose own packets pass filters by.
func (a *Agent) tellFiltered(failed map[int]error) {
	var list []table.Problem
	seen := make(map[int]bool)
	for _, ep := range a.world.local.byAddr {
		err := failed[ep.HostIfindex]
		if err == nil || seen[ep.HostIfindex] {
			continue
		}
		seen[ep.HostIfindex] = true
		list = append(list, table.Problem{Object: "Pod " + ep.pod.String(), Err: fmt.Sprintf(
			"filters at the ingress of its device %s do not see what the pod sends to others: a limit for it there (an ifb) has no effect: %v; else limit it inside the pod, on %s",
			ep.HostIfName, err, ep.IfName)})
	}
	a.problems["pods' own limits"] = list
	a.world.bypassed = failed
}
