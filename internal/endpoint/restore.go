package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
)

// restoreParallel bounds how many endpoints are restored at a time.
const restoreParallel = 8

// repairParallel bounds how many wait for their policy at a time.
const repairParallel = 64

// load takes the records on disk over.
func (m *Manager) load() {
	records, errs := m.store.load()
	for _, r := range records {
		ep := r.Endpoint
		other := m.byHostIf(ep.HostIfName)
		err := error(nil)
		if other != nil {
			err = fmt.Errorf("interface %s belongs to %s too", ep.HostIfName, m.endpointOf(other))
		} else {
			err = m.cfg.IPAM.Reserve(owner(ep), ep.Addrs...)
		}
		if err != nil {
			// Keep the file for people to look at; its pod has to be re-made.
			errs = append(errs, fmt.Errorf("state of %s contradicts another: %w", ep, err))
			errs = appendErr(errs, m.store.setAside(fileName(ep.Key())))
			continue
		}
		m.eps[ep.Key()] = &entry{rec: r}
		m.lastID = max(m.lastID, ep.ID)
	}
	for _, err := range errs {
		m.log.Error("endpoint state", "err", err)
	}
	m.setup = errs
}

// findOrphans looks for host interfaces of ours that no record describes and
// keeps their addresses from being given away.
func (m *Manager) findOrphans() error {
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	ours := regexp.MustCompile(`^pw[0-9a-f]{11}$`)
	for _, link := range links {
		name := link.Attrs().Name
		if link.Type() != "veth" || !ours.MatchString(name) || m.byHostIf(name) != nil {
			continue
		}
		routes, err := routesTo(h, link)
		if err != nil {
			return err
		}
		var addrs []netip.Addr
		for _, r := range routes {
			if p := destination(r); p.IsSingleIP() && m.cfg.IPAM.Reserve(orphanOwner(name), p.Addr()) == nil {
				addrs = append(addrs, p.Addr())
			}
		}
		m.orphans[name] = addrs
		err = fmt.Errorf("interface %s with addresses %v has no state: its pod has no network until it is re-created", name, addrs)
		m.log.Error("endpoint state", "err", err)
		m.setup = append(m.setup, err)
	}
	return nil
}

// routesTo are the host's routes to the pod behind the host's half of a veth.
func routesTo(h *netlink.Handle, link netlink.Link) ([]netlink.Route, error) {
	over, err := linkByName(h, OverName(link.Attrs().Name))
	if err != nil {
		return nil, err
	}
	if over != nil {
		link = over
	}
	routes, err := dump(func() ([]netlink.Route, error) { return h.RouteList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list routes of %s: %w", link.Attrs().Name, err)
	}
	return routes, nil
}

func orphanOwner(name string) string { return "interface " + name + ", whose state is lost" }

// removeOrphan removes an interface without a record, if there is one. The
// caller holds its lock.
func (m *Manager) removeOrphan(ctx context.Context, name string) error {
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := linkByName(h, name)
	if err != nil {
		return err
	}
	if link != nil {
		m.log.Warn("interface without state is removed", "interface", name)
		t := m.begin("remove", name)
		defer t.end()
		if err := m.removeLink(ctx, t, name, 0, nil); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cfg.IPAM.Release(orphanOwner(name), m.orphans[name]...)
	delete(m.orphans, name)
	return nil
}

// forgetOrphans gives back the addresses of interfaces without a record that
// have gone with their pods.
func (m *Manager) forgetOrphans() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.orphans) == 0 {
		return nil
	}
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	var errs []error
	for name, addrs := range m.orphans {
		link, err := linkByName(h, name)
		if err != nil {
			errs = append(errs, err)
		} else if link == nil {
			m.cfg.IPAM.Release(orphanOwner(name), addrs...)
			delete(m.orphans, name)
		}
	}
	return errors.Join(errs...)
}

// Restore brings back what the files describe; it calls the datapath and the
// regenerator for several endpoints at a time. Call it once, after the socket
// listens and the caches are complete. Until it returns, Add waits. The error
// joins what went wrong with single endpoints; all others work, and the
// manager is in service.
func (m *Manager) Restore(ctx context.Context) error {
	errs := m.setup
	m.restoreOnce.Do(func() {
		defer close(m.restored)
		errs = append(errs, m.replay(ctx)...)
		m.mu.Lock()
		var all []*entry
		for _, e := range m.eps {
			all = append(all, e)
		}
		m.mu.Unlock()
		results := make([]error, len(all))
		var group errgroup.Group
		group.SetLimit(restoreParallel)
		for i, e := range all {
			group.Go(func() error {
				results[i] = m.restoreOne(ctx, e)
				return nil
			})
		}
		_ = group.Wait()
		errs = append(errs, results...)
	})
	return errors.Join(errs...)
}

// replay carries queued deletions out. An addition drops the note that is from
// before it, so one that has gone meanwhile does not count.
func (m *Manager) replay(ctx context.Context) []error {
	keys, errs := m.store.queued()
	for _, k := range keys {
		var err error
		if e := m.get(k); e != nil {
			err = m.delEntry(ctx, e, func() bool { return m.store.isQueued(k) })
		} else {
			err = m.Del(ctx, Request{ContainerID: k.ContainerID, IfName: k.IfName})
		}
		if err == nil {
			err = m.store.unqueue(k)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("queued deletion of %s: %w", k, err))
		}
	}
	return errs
}

func (m *Manager) restoreOne(ctx context.Context, e *entry) error {
	ep := m.endpointOf(e)
	unlock, err := m.lockPod(ctx, ep.HostIfName)
	if err != nil {
		return err
	}
	defer unlock()
	if m.get(ep.Key()) != e {
		return nil // a deletion was faster
	}
	if p := m.phaseOf(e); p != phaseReady {
		m.log.Warn("endpoint is removed: the process ended in the middle", "endpoint", ep.String(), "phase", string(p))
		t := m.begin("finish", ep.Key().String())
		defer t.end()
		return m.delLocked(ctx, t, e)
	}
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := linkByName(h, ep.HostIfName)
	if err != nil {
		return err
	}
	if link == nil || link.Attrs().Index != ep.HostIfindex {
		m.log.Warn("endpoint is removed: its interface is gone", "endpoint", ep.String(), "interface", ep.HostIfName)
		t := m.begin("restore", ep.Key().String())
		defer t.end()
		return m.delLocked(ctx, t, e)
	}
	_, err = m.mend(ctx, h, e, true)
	return err
}

// Repair re-asserts sysctls, routes, neighbours and programs of all endpoints
// and returns what it mended. It also carries out deletions that were queued
// while nobody could reach this process.
func (m *Manager) Repair(ctx context.Context) ([]string, error) {
	h, err := newHandle()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	var mended []string
	errs := m.replay(ctx)
	errs = append(errs, m.forgetOrphans())
	var waiting []*entry
	for _, ep := range m.List() {
		e := m.get(ep.Key())
		if e == nil {
			continue
		}
		if !m.copyOf(e).up {
			waiting = append(waiting, e)
			continue
		}
		done, err := m.repairOne(ctx, h, e, ep)
		mended = append(mended, done...)
		errs = append(errs, err)
	}
	done, waitErrs := m.repairWaiting(ctx, waiting)
	return append(mended, done...), errors.Join(append(errs, waitErrs...)...)
}

// upAgain is how long a repair waits for policy. A deletion of that endpoint
// ends the wait.
const upAgain = time.Second

// repairWaiting repairs endpoints whose policy is not in force, as when their
// Pod objects are gone. All at a time: each of them may wait in vain.
func (m *Manager) repairWaiting(ctx context.Context, list []*entry) (mended []string, errs []error) {
	var mu sync.Mutex
	var group errgroup.Group
	group.SetLimit(repairParallel)
	for _, e := range list {
		group.Go(func() error {
			h, err := newHandle()
			var done []string
			if err == nil {
				defer h.Close()
				ctx, cancel := context.WithTimeout(ctx, upAgain)
				defer cancel()
				done, err = m.repairOne(ctx, h, e, m.endpointOf(e))
			}
			mu.Lock()
			defer mu.Unlock()
			mended = append(mended, done...)
			errs = append(errs, err)
			return nil
		})
	}
	_ = group.Wait()
	return mended, errs
}

func (m *Manager) repairOne(ctx context.Context, h *netlink.Handle, e *entry, ep Endpoint) ([]string, error) {
	unlock, err := m.lockPod(ctx, ep.HostIfName)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if m.get(ep.Key()) != e || m.phaseOf(e) != phaseReady {
		return nil, nil
	}
	return m.mend(ctx, h, e, false)
}

// mend brings the host's half of a ready endpoint to what it should be. With
// restart the programs and the policy are asserted unconditionally. A pod
// whose programs cannot be attached is cut off rather than left open.
func (m *Manager) mend(ctx context.Context, h *netlink.Handle, e *entry, restart bool) ([]string, error) {
	ep := m.endpointOf(e)
	link, err := linkByName(h, ep.HostIfName)
	if err != nil {
		return nil, err
	}
	if link == nil || link.Attrs().Index != ep.HostIfindex {
		return nil, fmt.Errorf("%s: interface %s is gone: the pod has no network until it is re-created", ep, ep.HostIfName)
	}
	mended, err := m.mendOver(h, e)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", ep, err)
	}
	ep = m.endpointOf(e)
	prober, canProbe := m.cfg.Datapath.(Prober)
	if restart || !m.copyOf(e).attached || canProbe && m.attached(ctx, prober, ep) != nil {
		if err := m.attach(ctx, ep); err != nil {
			err = fmt.Errorf("%s: %w", ep, err)
			if !canProbe || m.attached(ctx, prober, ep) != nil {
				m.change(func() { e.attached = false })
				err = errors.Join(err, h.LinkSetDown(link))
			}
			return nil, err
		}
		m.change(func() { e.attached = true })
		if !restart {
			mended = append(mended, fmt.Sprintf("%s: programs attached again", ep.HostIfName))
		}
	}
	if restart || !m.copyOf(e).up {
		err := m.awaitPolicy(ctx, e, ep)
		if errors.Is(err, errLeaving) {
			return mended, nil
		}
		if err != nil {
			return mended, fmt.Errorf("policy of %s is not in force: %w", ep, err)
		}
		m.change(func() { e.up = true })
	}
	resized, err := m.resize(h, e, link)
	mended = append(mended, resized...)
	if err != nil {
		return mended, fmt.Errorf("%s: %w", ep, err)
	}
	ep = m.endpointOf(e)
	changed, err := m.setHostSysctls(ep)
	mended = append(mended, changed...)
	if err != nil {
		return mended, fmt.Errorf("%s: %w", ep, err)
	}
	diffs, err := hostDifferences(h, ep)
	if err != nil || len(diffs) == 0 {
		return mended, err
	}
	if err := configureHost(h, ep, link); err != nil {
		return mended, fmt.Errorf("%s: %w", ep, err)
	}
	left, err := hostDifferences(h, ep)
	for _, d := range diffs {
		mended = append(mended, ep.HostIfName+": mended: "+d)
	}
	if err == nil && len(left) > 0 {
		return nil, fmt.Errorf("%s: cannot be mended: %v", ep, left)
	}
	return mended, err
}
