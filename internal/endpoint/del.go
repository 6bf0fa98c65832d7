package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
)

// Del removes the endpoint of a container; one that does not exist is no
// error. Only the container id and the interface name are required.
func (m *Manager) Del(ctx context.Context, req Request) error {
	if req.ContainerID == "" || req.IfName == "" {
		return errorf(CodeBadRequest, "the container id is %q and the interface name %q: neither may be empty", req.ContainerID, req.IfName)
	}
	if err := req.Key().Validate(); err != nil {
		// Add refuses such a one, and the runtime owes a deletion all the same.
		m.log.Warn("there is nothing to delete under a name that is not possible", "err", err)
		return nil
	}
	e := m.get(req.Key())
	if e == nil {
		return m.delUnknown(ctx, req)
	}
	return m.delEntry(ctx, e, func() bool { return true })
}

// delEntry removes e, unless it has gone or, once its lock is held, still says
// no.
func (m *Manager) delEntry(ctx context.Context, e *entry, still func() bool) error {
	ep := m.endpointOf(e)
	t := m.begin("del", ep.Key().String())
	defer t.end()
	defer m.interrupt(e)()
	unlock, err := m.lockPod(ctx, ep.HostIfName)
	if err != nil {
		return err
	}
	defer unlock()
	t.step("locked")
	if m.get(ep.Key()) != e || !still() {
		return nil // someone else was faster
	}
	return m.delLocked(ctx, t, e)
}

// interrupt ends the wait for e's policy that holds its lock, and keeps others
// from beginning one until the function returned is called: what is to go needs
// none.
func (m *Manager) interrupt(e *entry) func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.leaving++
	if e.giveUp != nil {
		e.giveUp()
	}
	return func() { m.change(func() { e.leaving-- }) }
}

// errLeaving ends a wait for policy.
var errLeaving = errors.New("the endpoint is being deleted")

// awaitPolicy is [Regenerator.Up] for an endpoint that there is already.
func (m *Manager) awaitPolicy(ctx context.Context, e *entry, ep Endpoint) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	leaving := false
	m.change(func() {
		leaving = e.leaving > 0
		e.giveUp = func() { cancel(errLeaving) }
	})
	defer m.change(func() { e.giveUp = nil })
	if leaving {
		return errLeaving
	}
	return m.cfg.Regenerator.Up(ctx, ep)
}

// delLocked removes e for a caller that holds its lock. What has begun goes on
// when the client gives up.
func (m *Manager) delLocked(ctx context.Context, t *trail, e *entry) error {
	ep := m.endpointOf(e)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := m.remove(ctx, t, e); err != nil {
		m.log.Error("endpoint not removed", "endpoint", ep.String(), "err", err)
		return errorf(CodeInternal, "remove %s: %w", ep, err)
	}
	m.log.Info("endpoint removed", "endpoint", ep.String(), "id", ep.ID, t.done())
	return nil
}

// delUnknown removes a pod's interface whose state was lost.
func (m *Manager) delUnknown(ctx context.Context, req Request) error {
	hostIf := HostIfName(req.Namespace, req.Pod, req.ContainerID, req.IfName)
	unlock, err := m.lockPod(ctx, hostIf)
	if err != nil {
		return err
	}
	defer unlock()
	if m.byHostIf(hostIf) != nil {
		return nil // it is a newer sandbox's
	}
	if err := m.removeOrphan(ctx, hostIf); err != nil {
		return AsError(err)
	}
	return nil
}

// remove takes an endpoint away. The caller holds the lock of its host
// interface. What fails is reported and the endpoint stays known, so that a
// repetition goes on.
func (m *Manager) remove(ctx context.Context, t *trail, e *entry) error {
	ep := m.endpointOf(e)
	// Without the mark a crash leaves a file that says ready: Restore then
	// removes it if the interface is gone. A full disk must not prevent this.
	if err := m.save(e, ep, phaseDeleting); err != nil {
		m.log.Warn("the deletion cannot be recorded and goes on", "endpoint", ep.String(), "err", err)
		m.change(func() { e.rec.Phase = phaseDeleting })
	}
	t.step("marked")
	if err := m.removeLink(ctx, t, ep.HostIfName, ep.HostIfindex, ep.HostMAC); err != nil {
		return err
	}
	if err := m.detachOver(ctx, ep); err != nil {
		return err
	}
	t.step("unlinked")
	if err := m.cfg.Regenerator.Down(ctx, ep); err != nil {
		return fmt.Errorf("remove %s from the maps: %w", ep, err)
	}
	t.step("down")
	if err := m.store.remove(ep.Key()); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	t.step("removed")
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cfg.IPAM.Release(owner(ep), ep.Addrs...)
	delete(m.eps, ep.Key())
	return nil
}

// removeLink takes the host's half down, detaches the datapath and removes
// the pair, in this order: nothing passes without programs. An interface that
// is gone is detached under the index that it had, unless another device has
// that index by now: a reboot begins to count anew. If that one has the MAC
// address as well, it is ours and somebody renamed it.
func (m *Manager) removeLink(ctx context.Context, t *trail, name string, ifindex int, mac net.HardwareAddr) error {
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := linkByName(h, name)
	if err != nil {
		return err
	}
	indexes := map[int]bool{}
	if ifindex != 0 {
		other, err := linkByIndex(h, ifindex)
		if err != nil {
			return err
		}
		switch {
		case other == nil:
			indexes[ifindex] = true
		case link == nil && other.Type() == "veth" && len(mac) > 0 && bytes.Equal(other.Attrs().HardwareAddr, mac):
			link = other
		}
	}
	if over, err := linkByName(h, OverName(name)); err != nil {
		return err
	} else if over != nil {
		indexes[over.Attrs().Index] = true
	}
	if link != nil {
		indexes[link.Attrs().Index] = true
		if err := h.LinkSetDown(link); err != nil {
			return fmt.Errorf("set %s down: %w", name, err)
		}
	}
	t.step("set down")
	var errs []error
	for index := range indexes {
		if err := m.cfg.Datapath.Detach(ctx, index); err != nil {
			errs = append(errs, fmt.Errorf("detach the datapath from %s (index %d): %w", name, index, err))
		}
	}
	t.step("detached")
	if link != nil {
		errs = append(errs, deleteLink(h, link))
	}
	return errors.Join(errs...)
}

// GC removes every endpoint of a CNI network that is not in valid, as they are
// now: additions that run, and what takes the place of an endpoint meanwhile,
// are left alone.
func (m *Manager) GC(ctx context.Context, network string, valid []Key) error {
	keep := map[Key]bool{}
	for _, k := range valid {
		keep[k] = true
	}
	m.mu.Lock()
	var stale []*entry
	for k, e := range m.eps {
		if !keep[k] && e.rec.Endpoint.Network == network && e.rec.Phase != phaseCreating {
			stale = append(stale, e)
		}
	}
	m.mu.Unlock()
	var errs []error
	for _, e := range stale {
		ep := m.endpointOf(e)
		m.log.Info("endpoint is in no valid attachment", "endpoint", ep.String())
		errs = append(errs, m.delEntry(ctx, e, func() bool { return true }))
	}
	errs = append(errs, m.forgetOrphans())
	if err := errors.Join(errs...); err != nil {
		return errorf(CodeInternal, "%w", err)
	}
	return nil
}
