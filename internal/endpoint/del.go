package endpoint

import (
	"context"
	"errors"
	"fmt"
)

// Del removes the endpoint of a container; one that does not exist is no
// error. Only the container id and the interface name are required.
func (m *Manager) Del(ctx context.Context, req Request) error {
	if err := req.Key().validate(); err != nil {
		return errorf(CodeBadRequest, "%w", err)
	}
	e := m.get(req.Key())
	if e == nil {
		return m.delUnknown(ctx, req)
	}
	unlock, err := m.lockPod(ctx, m.endpointOf(e).HostIfName)
	if err != nil {
		return err
	}
	defer unlock()
	if m.get(req.Key()) != e {
		return nil // someone else was faster
	}
	return m.delLocked(ctx, e)
}

// delLocked removes e for a caller that holds its lock. What has begun goes on
// when the client gives up.
func (m *Manager) delLocked(ctx context.Context, e *entry) error {
	ep := m.endpointOf(e)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := m.remove(ctx, e); err != nil {
		m.log.Error("endpoint not removed", "endpoint", ep.String(), "err", err)
		return errorf(CodeInternal, "remove %s: %w", ep, err)
	}
	m.log.Info("endpoint removed", "endpoint", ep.String(), "id", ep.ID)
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
func (m *Manager) remove(ctx context.Context, e *entry) error {
	ep := m.endpointOf(e)
	// Without the mark a crash leaves a file that says ready: Restore then
	// removes it if the interface is gone. A full disk must not prevent this.
	if err := m.save(e, ep, phaseDeleting); err != nil {
		m.log.Warn("the deletion cannot be recorded and goes on", "endpoint", ep.String(), "err", err)
		m.change(func() { e.rec.Phase = phaseDeleting })
	}
	m.step("marked")
	if err := m.removeLink(ctx, ep.HostIfName, ep.HostIfindex); err != nil {
		return err
	}
	m.step("unlinked")
	if err := m.cfg.Regenerator.Down(ctx, ep); err != nil {
		return fmt.Errorf("remove %s from the maps: %w", ep, err)
	}
	m.step("down")
	if err := m.store.remove(ep.Key()); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	m.step("removed")
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cfg.IPAM.Release(owner(ep), ep.Addrs...)
	delete(m.eps, ep.Key())
	return nil
}

// removeLink takes the host's half down, detaches the datapath and removes
// the pair, in this order: nothing passes without programs. An interface that
// is gone is detached under the index that it had, unless another device has
// that index by now: a reboot begins to count anew.
func (m *Manager) removeLink(ctx context.Context, name string, ifindex int) error {
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
		if other == nil {
			indexes[ifindex] = true
		}
	}
	if link != nil {
		indexes[link.Attrs().Index] = true
		if err := h.LinkSetDown(link); err != nil {
			return fmt.Errorf("set %s down: %w", name, err)
		}
	}
	var errs []error
	for index := range indexes {
		if err := m.cfg.Datapath.Detach(ctx, index); err != nil {
			errs = append(errs, fmt.Errorf("detach the datapath from %s (index %d): %w", name, index, err))
		}
	}
	m.step("detached")
	if link != nil {
		errs = append(errs, deleteLink(h, link))
	}
	return errors.Join(errs...)
}

// GC removes every endpoint of a CNI network that is not in valid. Additions
// that run are left alone.
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
		errs = append(errs, m.Del(ctx, Request{ContainerID: ep.ContainerID, IfName: ep.IfName}))
	}
	if err := errors.Join(errs...); err != nil {
		return errorf(CodeInternal, "%w", err)
	}
	return nil
}
