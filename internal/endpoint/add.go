package endpoint

import (
	"context"
	"crypto/rand"
	"errors"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/podweir/podweir/internal/ipam"
)

// Add makes an endpoint and returns it once its policy is in force and its
// interfaces are up. On an error nothing of it remains, unless the error says
// that undoing failed too; Del then tries again.
func (m *Manager) Add(ctx context.Context, req Request) (Endpoint, error) {
	if err := req.validate(); err != nil {
		return Endpoint{}, err
	}
	select {
	case <-m.restored:
	case <-ctx.Done():
		return Endpoint{}, errorf(CodeTryAgain, "the agent has not finished starting: %w", ctx.Err())
	}
	hostIf := HostIfName(req.Namespace, req.Pod, req.ContainerID, req.IfName)
	t := m.begin("add", req.Key().String())
	defer t.end()
	unlock, err := m.lockPod(ctx, hostIf)
	if err != nil {
		return Endpoint{}, err
	}
	defer unlock()
	t.step("locked")
	now := &turn{all: &m.turns}
	if err := now.take(ctx); err != nil {
		return Endpoint{}, err
	}
	defer now.leave()
	t.step("its turn")

	pod, err := m.openPod(req.Netns)
	if err != nil {
		return Endpoint{}, err
	}
	defer pod.close()
	if err := m.makeRoom(ctx, req, hostIf, pod); err != nil {
		return Endpoint{}, AsError(err)
	}
	e, err := m.register(req, hostIf)
	if err != nil {
		return Endpoint{}, err
	}
	t.step("reserved")
	ep, err := m.create(ctx, t, now, e, pod)
	if err != nil {
		return Endpoint{}, m.undo(ctx, e, err)
	}
	ep = m.resizeNew(e, ep)
	m.log.Info("endpoint added", "endpoint", ep.String(), "id", ep.ID, "addrs", ep.Addrs, "interface", ep.HostIfName, t.done())
	return ep, nil
}

// podNetns is an open network namespace of a pod.
type podNetns struct {
	ns netns.NsHandle
	h  *netlink.Handle
}

func (p *podNetns) close() {
	if p.h != nil {
		p.h.Close()
	}
	_ = p.ns.Close()
}

func (m *Manager) openPod(path string) (*podNetns, error) {
	ns, err := openNetns(path, m.host)
	if err != nil {
		return nil, err
	}
	p := &podNetns{ns: ns}
	err = inNetns(ns, m.host, func() error {
		p.h, err = newHandle()
		return err
	})
	if err != nil {
		p.close()
		return nil, errorf(CodeBadNetns, "network namespace %s: %w", path, err)
	}
	return p, nil
}

// makeRoom makes sure that neither half of the pair exists: an existing
// interface in the pod is an error; what an older sandbox of the pod left on
// the host goes.
func (m *Manager) makeRoom(ctx context.Context, req Request, hostIf string, pod *podNetns) error {
	link, err := linkByName(pod.h, req.IfName)
	if err != nil {
		return err
	}
	if link != nil {
		return errorf(CodeExists, "interface %s exists already in %s", req.IfName, req.Netns)
	}
	if m.get(req.Key()) != nil {
		return errorf(CodeExists, "container %s has an interface %s already: DEL it first", req.ContainerID, req.IfName)
	}
	if old := m.byHostIf(hostIf); old != nil {
		ep := m.endpointOf(old)
		if ep.Namespace != req.Namespace || ep.Pod != req.Pod || ep.IfName != req.IfName {
			return errorf(CodeInternal, "the interface name %s belongs to %s already: rename the pod", hostIf, ep)
		}
		m.log.Warn("a newer sandbox of the pod takes its place", "old", ep.String(), "new", req.ContainerID)
		t := m.begin("replace", ep.Key().String())
		defer t.end()
		if err := m.remove(ctx, t, old); err != nil {
			return errorf(CodeInternal, "remove the older sandbox's %s: %w", ep, err)
		}
	}
	return m.removeOrphan(ctx, hostIf)
}

// register reserves key, id, MACs and addresses in memory.
func (m *Manager) register(req Request, hostIf string) (*entry, error) {
	ep := Endpoint{
		ContainerID: req.ContainerID, IfName: req.IfName, Netns: req.Netns, Network: req.Network,
		Namespace: req.Namespace, Pod: req.Pod, UID: req.UID,
		HostIfName: hostIf, MTU: m.cfg.MTU(),
		PortMappings: sortedMappings(req.PortMappings),
	}
	if m.needsOver(req) {
		ep.Over = OverName(hostIf)
	}
	ep.MTU6 = m.mtu6(ep.MTU)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.eps[ep.Key()] != nil {
		return nil, errorf(CodeExists, "container %s has an interface %s already: DEL it first", req.ContainerID, req.IfName)
	}
	if err := m.portsTaken(ep.PortMappings); err != nil {
		return nil, err
	}
	var err error
	ep.Addrs, err = m.cfg.IPAM.Allocate(owner(ep), req.Addrs...)
	if err != nil {
		return nil, errorf(addressCode(err), "addresses for %s: %w", ep, err)
	}
	ep.ID = m.newID()
	ep.MAC, ep.HostMAC = m.newMAC(), m.newMAC()
	e := &entry{rec: record{Phase: phaseCreating, Endpoint: ep}}
	m.eps[ep.Key()] = e
	return e, nil
}

func addressCode(err error) Code {
	switch {
	case errors.Is(err, ipam.ErrNoCIDR):
		return CodeTryAgain
	case errors.Is(err, ipam.ErrExhausted):
		return CodeExhausted
	}
	return CodeAddress
}

// newID returns an id that no endpoint has; those of late are not repeated.
func (m *Manager) newID() uint32 {
	used := map[uint32]bool{0: true}
	for _, e := range m.eps {
		used[e.rec.Endpoint.ID] = true
	}
	for m.lastID++; used[m.lastID]; m.lastID++ {
	}
	return m.lastID
}

// newMAC returns a locally administered unicast address that no endpoint has.
func (m *Manager) newMAC() net.HardwareAddr {
	for {
		mac := make(net.HardwareAddr, 6)
		_, _ = rand.Read(mac) // never fails
		mac[0] = mac[0]&^1 | 2
		used := false
		for _, e := range m.eps {
			ep := e.rec.Endpoint
			used = used || mac.String() == ep.MAC.String() || mac.String() == ep.HostMAC.String()
		}
		if !used {
			return mac
		}
	}
}

// create makes what register reserved, in the order that the package
// promises.
func (m *Manager) create(ctx context.Context, t *trail, now *turn, e *entry, pod *podNetns) (Endpoint, error) {
	ep := m.endpointOf(e)
	if err := m.save(e, ep, phaseCreating); err != nil {
		return ep, err
	}
	t.step("saved")
	// A deletion queued for this very container is from before.
	if err := m.store.unqueue(ep.Key()); err != nil {
		return ep, errorf(CodeIO, "queued deletion of %s: %w", ep, err)
	}
	t.step("older deletion dropped")
	host, err := newHandle()
	if err != nil {
		return ep, err
	}
	defer host.Close()
	if err := ctx.Err(); err != nil {
		return ep, err
	}
	link, err := createVeth(host, int(pod.ns), &ep)
	if err != nil {
		return ep, err
	}
	if ep.Over != "" {
		if err := createOver(host, &ep); err != nil {
			return ep, errorf(CodeInternal, "what %s sends is to be limited: %w", ep, err)
		}
	}
	m.change(func() { e.rec.Endpoint = ep })
	t.step("created")
	if _, err := m.setHostSysctls(ep); err != nil {
		return ep, err
	}
	t.step("host settings")
	if err := inNetns(pod.ns, m.host, func() error { return m.podSettings(ep) }); err != nil {
		return ep, errorf(CodeInternal, "in the pod: %w", err)
	}
	t.step("pod settings")
	if err := m.attach(ctx, ep); err != nil {
		return ep, errorf(CodeInternal, "%w", err)
	}
	m.change(func() { e.attached = true })
	t.step("attached")
	now.leave() // the Pod object may be long in coming
	if err := m.cfg.Regenerator.Up(ctx, ep); err != nil {
		return ep, errorf(upCode(err), "policy of %s is not in force: %w", ep, err)
	}
	m.change(func() { e.up = true })
	t.step("up")
	if err := now.take(ctx); err != nil {
		return ep, err
	}
	t.step("its turn again")
	if err := configurePod(pod.h, ep); err != nil {
		return ep, err
	}
	t.step("pod configured")
	if err := configureHost(host, ep, link); err != nil {
		return ep, err
	}
	t.step("host configured")
	now.leave()
	if err := awaitUp(ctx, m.host, host, ep.HostIfName); err != nil {
		return ep, err
	}
	if ep.Over != "" {
		if err := awaitUp(ctx, m.host, host, ep.Over); err != nil {
			return ep, err
		}
	}
	if err := awaitUp(ctx, pod.ns, pod.h, ep.IfName); err != nil {
		return ep, errorf(CodeInternal, "in the pod: %w", err)
	}
	t.step("in operation")
	if err := ctx.Err(); err != nil {
		return ep, err // nobody waits for the answer
	}
	if err := m.save(e, ep, phaseReady); err != nil {
		return ep, err
	}
	t.step("ready")
	return ep, nil
}

func (m *Manager) podSettings(ep Endpoint) error {
	_, err := m.setSysctls(ep.IfName, podSysctls())
	if err == nil && haveIPv6() {
		_, err = m.setSysctls("lo", []sysctl{{"ipv6", "disable_ipv6", "0"}})
	}
	return err
}

func upCode(err error) Code {
	if isDone(err) {
		return CodeTryAgain
	}
	return CodeInternal
}

func isDone(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// undo removes a half-made endpoint and returns the error to report.
func (m *Manager) undo(ctx context.Context, e *entry, cause error) error {
	ep := m.endpointOf(e)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	out := *AsError(cause)
	if out.Code == CodeInternal && isDone(cause) {
		out.Code = CodeTryAgain
	}
	m.log.Error("endpoint not added", "endpoint", ep.String(), "err", cause)
	t := m.begin("undo", ep.Key().String())
	defer t.end()
	if err := m.remove(ctx, t, e); err != nil {
		m.log.Error("a failed addition could not be undone", "endpoint", ep.String(), "err", err)
		out.Details = "undoing it failed too, DEL tries again: " + err.Error()
	}
	return &out
}
