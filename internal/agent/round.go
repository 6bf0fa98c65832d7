package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/health"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/table"
	"github.com/podweir/podweir/internal/tunnel"
)

// round reads what is dirty, compiles and applies it. It returns when to come
// back even if nothing changes; zero = never.
func (a *Agent) round(ctx context.Context) time.Time {
	txn := a.tables.DB.ReadTxn()
	if !a.synced {
		pending := fmt.Sprintf("the first list of %v is not in", a.tables.Pending(txn))
		a.eps.notRunning(pending)
		a.notReady(pending)
		return time.Time{}
	}
	first := !a.full
	ranges := a.dirty.nodes || a.dirty.stack
	if ranges {
		a.readNodes(txn)
		a.syncStack(ctx)
		a.syncDevAddrs()
		a.readLeaving()
	}
	a.dirty.routes = a.dirty.routes || a.dirty.stack || a.dirty.nodes
	endpoints := a.dirty.peers
	if endpoints {
		a.syncPeers(txn)
		a.dirty.peers = false
	}
	if endpoints || a.dirty.stack || a.dirty.nodes {
		a.syncFiltered(ctx)
	}
	a.tellMTU()
	if ranges {
		a.tellRanges()
	}
	a.syncServices(txn)
	if endpoints {
		// Running flows follow before anybody is told. What fails here fails
		// again below.
		_ = a.gens.flush()
	}
	// The maps hold all there is. Programs of before may have gone on without
	// them; pods that are told of come to this version's.
	switched := a.dp.Switch(ctx)
	a.problem(programsOfBefore, "", switched)
	if endpoints {
		a.world.local.answer(a.inForce, a.hostPortsInForce)
	}
	if a.dirty.stack || a.dirty.nodes {
		a.dirty.stack, a.dirty.nodes = false, false
	}
	a.syncRoutes()
	a.syncPrograms(ctx)
	a.followLeaving()
	if first {
		a.services.buryLeftovers()
		a.full = true
		if a.opt.Settled != nil {
			go a.opt.Settled()
		}
		a.log.Info("first full round done", "services", len(a.services.byOwner),
			"addresses", a.peers.addrs.Len(), "endpoints", a.peers.endpoints.Len())
	}
	next, err := a.services.sweep()
	a.problem("backend sets", "", err)
	if switched != nil {
		next = sooner(next, time.Now().Add(time.Second))
	}
	if err = a.gens.flush(); err != nil {
		next = sooner(next, time.Now().Add(time.Second))
	}
	a.problem("generations", "", err)
	a.syncChecks()
	a.publish()
	return a.comeBack(next)
}

// programsOfBefore is what is wrong while hooks have an earlier version's.
const programsOfBefore = "programs of this version"

// comeBack is the earliest of all times that something is due again.
func (a *Agent) comeBack(next time.Time) time.Time {
	if at := a.peers.nextRetry(); !at.IsZero() {
		next = sooner(next, at)
		a.dirty.peers = true
	}
	next = sooner(next, a.services.nextRetry())
	for _, at := range a.retry {
		next = sooner(next, at)
	}
	for _, at := range a.ports.retry {
		next = sooner(next, at)
	}
	return next
}

func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// readNodes compiles the Node objects.
func (a *Agent) readNodes(txn statedb.ReadTxn) {
	seq, watch := a.tables.Nodes.AllWatch(txn)
	a.watch.nodes = watch
	objects := collect(seq)
	nodes, errs := tunnel.Nodes(objects)
	a.problems["nodes"] = problems("", errs...)
	a.world.nodes = nodes
	a.world.self = tunnel.NodeInfo{Name: a.opt.NodeName}
	for _, n := range nodes {
		if n.Name == a.opt.NodeName {
			a.world.self = n
		}
	}
	zone := ""
	self, _, ok := a.tables.Nodes.Get(txn, table.ByName[*corev1.Node]("", a.opt.NodeName))
	a.health.SetNode(self)
	if ok {
		zone = self.Labels[corev1.LabelTopologyZone]
	}
	if zone != a.world.zone {
		a.world.zone = zone
		a.allServicesDirty()
	}
}

// tellRanges says where pods' addresses come from. Before that no pod gets
// one, so it comes after the node's own addresses and the MTU are known.
func (a *Agent) tellRanges() {
	if len(a.world.devices) == 0 {
		return // they could not be read, which is a problem of its own
	}
	a.problem("pod CIDRs", "Node "+a.opt.NodeName, a.ipam.SetCIDRs(a.world.self.PodCIDRs))
}

// syncStack reads the node's devices and sets up ours.
func (a *Agent) syncStack(ctx context.Context) {
	devices, err := a.stack.Devices()
	a.problem("devices", "", err)
	if err != nil {
		return // keep what was known; the next event or tick reads it again
	}
	w := &a.world
	if !slices.Equal(node.Addrs(devices), node.Addrs(w.devices)) {
		a.dirty.peers = true
	}
	w.devices = devices
	w.outside = node.Outside(devices, w.self.InternalIPs)
	a.ipam.SetNodeAddrs(node.Addrs(devices))

	if _, ok := node.Holding(devices, w.self.Addr); w.self.Addr.IsValid() && !ok {
		err = fmt.Errorf("no device of this node has its address %s: is it assigned, or does the Node object belong to another machine?", w.self.Addr)
	}
	a.problem("node address", "Node "+a.opt.NodeName, err)
	a.readWays()
	overlay := node.Overlay{MAC: w.self.MAC, MTU: a.syncMTU()}
	index, created, err := a.stack.EnsureOverlay(overlay)
	if err == nil && (index != w.overlay || created) {
		err = a.dp.SetOverlay(ctx, index)
		a.dirty.verify = true
	}
	if err == nil {
		w.overlay = index
	}
	a.problem("tunnel device", "", err)
	a.readQdiscs()
	a.problem("sysctls", "", a.stack.SyncSysctls(w.outside))
	a.syncSourcePorts(ctx)
}

// syncPeers tells tunnel and policy what changed and writes the difference.
func (a *Agent) syncPeers(txn statedb.ReadTxn) {
	w := &a.world
	hostAddrs := node.Addrs(w.devices)
	rest := a.readRest(txn, hostAddrs)
	w.local = a.eps.collect(func(n types.NamespacedName) *corev1.Pod {
		p, _, _ := a.tables.Pods.Get(txn, table.ByName[*corev1.Pod](n.Namespace, n.Name))
		return p
	})
	local := make(map[netip.Addr]types.NamespacedName, len(w.local.byAddr))
	for addr, ep := range w.local.byAddr {
		local[addr] = ep.pod
	}
	pods := a.changedPods(txn)
	t := a.tunnel.Compile(tunnel.Changes{
		Pods: pods.objects, Gone: pods.deleted,
		Rest: &tunnel.Input{
			Self: a.opt.NodeName, Nodes: w.nodes, HostAddrs: hostAddrs, NodePorts: a.opt.NodePortAddrs,
			ServiceCIDRs: w.cidrs, Plain: a.opt.Masquerade.Except, Local: local,
		},
	})
	p := a.policy.Compile(policy.Changes{Pods: pods.owners, Gone: pods.gone, Rest: rest})
	a.dirty.routes = a.dirty.routes || t.Delta.Routes
	w.in = peerInput{
		self: a.opt.NodeName, selfAddr: w.self.Addr, vni: a.opt.VNI, mode: a.opt.Mode, plain: a.opt.AcceptPlain, ways: w.ways,
		nodes: w.nodes, tunnel: t, policy: p, endpoints: w.local.byAddr, qdiscs: w.qdiscs, deltas: true,
	}
	err := a.peers.apply(w.in)
	a.problems["tunnel"] = problems("", t.Errs...)
	a.problems["policy"] = nil
	for _, pr := range p.Problems {
		a.problems["policy"] = append(a.problems["policy"], table.Problem{Object: pr.Object, Err: pr.Field + ": " + pr.Err})
	}
	a.problems["endpoints"] = problems("", w.local.errs...)
	a.problem("addresses and policy", "", err)
	a.compileHostPorts()
}

// epInForce says what of an endpoint is not in the maps as the loop wants it.
// Before the first full round it wants nothing yet, and what an earlier agent
// wrote counts.
func (a *Agent) epInForce(ctx context.Context, ep endpoint.Endpoint) error {
	var errs []error
	err := a.do(ctx, func() {
		for _, addr := range ep.Addrs {
			if a.full {
				errs = append(errs, a.inForce(addr))
			}
			k := maps.ToAddr(addr)
			want, wanted := a.peers.endpoints.Desired(k)
			have, ok, err := a.dp.Maps().Endpoints.Get(k)
			switch {
			case err != nil:
				errs = append(errs, err)
			case !ok:
				errs = append(errs, fmt.Errorf("pw_endpoints has no entry of %s: restart the agent", addr))
			case wanted && have != want:
				errs = append(errs, fmt.Errorf("pw_endpoints has another entry of %s than the agent wrote: restart it", addr))
			}
		}
		errs = append(errs, a.hostPortsInForce(types.NamespacedName{Namespace: ep.Namespace, Name: ep.Pod}))
	})
	return errors.Join(append(errs, err)...)
}

// inForce says why a local address is not as the loop wants it.
func (a *Agent) inForce(addr netip.Addr) error {
	k := maps.ToAddr(addr)
	want, ok := a.peers.endpoints.Desired(k)
	have, is := a.peers.endpoints.Actual(k)
	if ok && is && want == have {
		return nil
	}
	if err := a.peers.endpoints.Failed()[k]; err != nil {
		return err
	}
	return fmt.Errorf("address %s belongs to another endpoint of this node", addr)
}

// serviceCIDRs joins the flag's ranges and those of the ServiceCIDR objects.
func (a *Agent) serviceCIDRs(objects []*networkingv1.ServiceCIDR) []netip.Prefix {
	out := slices.Clone(a.opt.ServiceCIDRs)
	var list []table.Problem
	for _, o := range objects {
		for _, s := range o.Spec.CIDRs {
			p, err := netip.ParsePrefix(s)
			if err != nil {
				list = append(list, table.Problem{Object: "ServiceCIDR " + o.Name, Err: "spec.cidrs: " + err.Error()})
				continue
			}
			if p = p.Masked(); !slices.Contains(out, p) {
				out = append(out, p)
			}
		}
	}
	a.problems["service ranges"] = list
	return out
}

// syncServices compiles the services that changed, alone or in their slices.
func (a *Agent) syncServices(txn statedb.ReadTxn) {
	changed, watch := a.svcs.Next(txn)
	a.watch.services = watch
	var seen health.Changes
	for c := range changed {
		seen.Services++
		a.dirty.services[types.NamespacedName{Namespace: c.Object.Namespace, Name: c.Object.Name}] = struct{}{}
	}
	changedSlices, watch := a.slices.Next(txn)
	a.watch.slices = watch
	for c := range changedSlices {
		seen.Slice(c.Object, c.Deleted)
		key := table.Key(c.Object.Namespace, c.Object.Name)
		if old, ok := a.sliceOf[key]; ok {
			a.dirty.services[old] = struct{}{}
			delete(a.sliceOf, key)
		}
		if name := c.Object.Labels[discoveryv1.LabelServiceName]; name != "" && !c.Deleted {
			svc := types.NamespacedName{Namespace: c.Object.Namespace, Name: name}
			a.dirty.services[svc] = struct{}{}
			a.sliceOf[key] = svc
		}
	}
	a.health.Queued(seen)
	now := time.Now()
	for name, at := range a.retry {
		if now.Before(at) {
			continue
		}
		if size := a.noTable[name]; size != 0 && !a.services.tables.fits(size) {
			a.retry[name] = now.Add(serviceRetry) // it would end as it did
			continue
		}
		a.dirty.services[name] = struct{}{}
		delete(a.retry, name)
	}
	pods := a.dirtyHostPorts(now)
	if len(a.dirty.services) == 0 && len(pods) == 0 {
		a.problem("frontends", "", a.services.retry())
		return
	}
	owners := a.dirtyOwners(txn, pods)
	a.dirty.services = make(map[types.NamespacedName]struct{})
	size := len(owners)
	if !a.full {
		size = partSize
	}
	for done := 0; done < len(owners); {
		part := owners[done:min(done+size, len(owners))]
		done += len(part)
		a.applyServices(txn, part, pods, now, done < len(owners))
	}
}

// partSize is how many services of the first round are in memory as what they
// compile to, and as entries to be written, at a time.
const partSize = 2048

// dirtyOwners are the services to be compiled and the pods given, the oldest
// first: of all that want a frontend it gets it.
func (a *Agent) dirtyOwners(txn statedb.ReadTxn, pods map[service.Owner]service.Compiled) []service.Owner {
	all := make([]ordered, 0, len(a.dirty.services)+len(pods))
	for name := range a.dirty.services {
		o := ordered{owner: service.Service(name.Namespace, name.Name)}
		if svc, _, ok := a.tables.Services.Get(txn, table.ByName[*corev1.Service](name.Namespace, name.Name)); ok {
			o.created = svc.CreationTimestamp.Time
		}
		all = append(all, o)
	}
	for o, c := range pods {
		all = append(all, ordered{o, c.Created})
	}
	slices.SortFunc(all, ordered.compare)
	owners := make([]service.Owner, len(all))
	for i := range all {
		owners[i] = all[i].owner
	}
	return owners
}

// applyServices compiles and applies a part of the owners of a round, with the
// ports of pods, which are compiled already. more: another part follows.
func (a *Agent) applyServices(txn statedb.ReadTxn, owners []service.Owner, pods map[service.Owner]service.Compiled, now time.Time, more bool) {
	batch := make(map[service.Owner]service.Compiled, len(owners))
	self := a.serviceNode()
	for _, owner := range owners {
		if c, ok := pods[owner]; ok {
			batch[owner] = c
			continue
		}
		name := types.NamespacedName{Namespace: owner.Namespace, Name: owner.Name}
		key := "Service " + name.String()
		delete(a.problems, key)
		delete(a.retry, name)
		delete(a.noTable, name)
		delete(a.unwritten, owner)
		svc, _, ok := a.tables.Services.Get(txn, table.ByName[*corev1.Service](name.Namespace, name.Name))
		if !ok {
			batch[owner] = service.Compiled{}
			continue
		}
		c, err := service.Compile(svc, collect(a.tables.Slices.List(txn, table.SlicesByService(name.Namespace, name.Name))), self)
		if err != nil {
			a.problems[key] = problems(key, err)
		}
		batch[owner] = c
	}
	a.stats.services += uint64(len(batch))
	a.wantChecks(batch)
	again, errs := a.services.apply(batch, more)
	for _, o := range again {
		if o.Kind == service.KindPod {
			a.ports.retry[o] = now
			continue
		}
		a.retry[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = now
	}
	for o, err := range errs {
		key := o.String()
		a.problems[key] = append(a.problems[key], problems(key, err)...)
		a.noteUnwritten(o, err)
		if o.Kind == service.KindPod {
			a.ports.failed[o] = err
			a.ports.retry[o] = now.Add(serviceRetry)
			continue
		}
		name := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
		a.retry[name] = now.Add(serviceRetry)
		if size := onlyNoTable(err); size != 0 {
			a.noTable[name] = size
		}
	}
}

// allServicesDirty has every service compiled again.
func (a *Agent) allServicesDirty() {
	for o := range a.services.byOwner {
		if o.Kind == service.KindService {
			a.dirty.services[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = struct{}{}
		}
	}
}

// syncRoutes sets the host's routes as the last tunnel output says.
func (a *Agent) syncRoutes() {
	w := &a.world
	if w.overlay == 0 || !a.dirty.routes {
		return
	}
	want := make([]node.Route, 0, len(w.in.tunnel.Routes))
	for _, r := range w.in.tunnel.Routes {
		want = append(want, a.hostRoute(r))
	}
	_, err := a.stack.SyncRoutes(want, w.overlay)
	a.problem("routes", "", err)
	a.dirty.routes = err != nil // which waits for an event or the next tick
}

// syncPrograms attaches to the devices that need it and no others.
func (a *Agent) syncPrograms(ctx context.Context) {
	w := &a.world
	var errs []error
	if a.dirty.verify {
		repaired, err := a.dp.Verify(ctx)
		errs = append(errs, err)
		for _, what := range repaired {
			a.log.Warn("programs were not as they should be; repaired", "what", what)
		}
		a.dirty.verify = false
	}
	wanted := make(map[int]string)
	if w.overlay != 0 {
		wanted[w.overlay] = node.OverlayName
	}
	for _, d := range w.outside {
		wanted[d.Index] = d.Name
	}
	lo := 0
	for _, d := range w.devices {
		if d.Name == node.Loopback {
			lo = d.Index
			wanted[lo] = d.Name
		}
	}
	for index, name := range w.attached {
		if wanted[index] == name {
			continue
		}
		if err := a.dp.Detach(ctx, index); err != nil {
			errs = append(errs, fmt.Errorf("device %s: detach: %w", name, err))
		}
		delete(w.attached, index)
	}
	for index, name := range wanted {
		if _, done := w.attached[index]; done {
			continue
		}
		attach := a.dp.AttachNetdev
		switch index {
		case w.overlay:
			attach = a.dp.AttachOverlay
		case lo:
			attach = a.dp.AttachLoopback
		}
		if err := attach(ctx, index, name); err != nil {
			errs = append(errs, fmt.Errorf("device %s: attach: %w", name, err))
			continue
		}
		w.attached[index] = name
		a.log.Info("attached", "device", name, "ifindex", index)
	}
	a.problem("programs", "", errors.Join(errs...))
}

// publish says what is wrong, and whether the agent is ready.
func (a *Agent) publish() {
	var all []table.Problem
	for _, list := range a.problems {
		all = append(all, list...)
	}
	added, gone := a.tables.SetProblems(problemOwner, all)
	for _, p := range added {
		a.log.Error("problem", "object", p.Object, "error", p.Err)
	}
	for _, p := range gone {
		a.log.Info("problem solved", "object", p.Object, "error", p.Err)
	}
	var waits []string
	w := &a.world
	if _, ok := w.attached[w.overlay]; !ok || w.overlay == 0 {
		waits = append(waits, "programs are not attached to "+node.OverlayName)
	}
	uplinks := node.Uplinks(w.outside)
	if len(uplinks) == 0 {
		waits = append(waits, "no device holds an address of this node or a default route")
	}
	for _, d := range uplinks {
		if _, ok := w.attached[d.Index]; !ok {
			waits = append(waits, "programs are not attached to "+d.Name)
		}
	}
	if w.self.Addr == (netip.Addr{}) {
		waits = append(waits, fmt.Sprintf("Node %s is not among the objects or has no InternalIP", a.opt.NodeName))
	}
	if len(a.problems[programsOfBefore]) > 0 {
		waits = append(waits, "programs of an earlier version are in force")
	}
	was := a.NotReady()
	a.notReady(waits...)
	if len(waits) == 0 {
		select {
		case <-a.begun:
		default:
			close(a.begun)
		}
	}
	if len(waits) == 0 && len(was) > 0 {
		a.log.Info("ready")
	} else if len(waits) > 0 && !slices.Equal(was, waits) {
		a.log.Warn("not ready", "waiting for", waits)
	}
}
