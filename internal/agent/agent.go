package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/health"
	"github.com/podweir/podweir/internal/ipam"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/sourceport"
	"github.com/podweir/podweir/internal/table"
	"github.com/podweir/podweir/internal/tunnel"
)

// Datapath is what the loop needs of the loaded programs.
type Datapath interface {
	Maps() maps.Set
	AttachNetdev(ctx context.Context, ifindex int, name string) error
	AttachOverlay(ctx context.Context, ifindex int, name string) error
	AttachLoopback(ctx context.Context, ifindex int, name string) error
	FilterPod(ctx context.Context, ifindex int, name string, on bool) error
	AttachCover(ctx context.Context, ifindex int, name string) error
	Filtered() []int
	SetOverlay(ctx context.Context, ifindex int) error
	SetSourcePorts(ctx context.Context, ports []sourceport.Range) error
	Detach(ctx context.Context, ifindex int) error
	Verify(ctx context.Context) ([]string, error)
	Switch(ctx context.Context) error
}

// Stack is what the loop needs of the node's network stack; [node.Manager]
// is one.
type Stack interface {
	Watch(ctx context.Context) (<-chan struct{}, error)
	Devices() ([]node.Device, error)
	EnsureOverlay(node.Overlay) (ifindex int, created bool, err error)
	SyncRoutes(want []node.Route, overlay int) (changes int, err error)
	SyncSysctls(outside []node.Device) error
	Way(addr netip.Addr) (w node.Way, ok bool, err error)
	WorldRoutes() (uint64, error)
	Qdiscs() (map[int]node.Qdisc, error)
	Covers() (map[int]node.Cover, error)
	MakeCover(veth int, vethName string) (node.Cover, error)
	RaiseCover(node.Cover) error
	RemoveCover(node.Cover) error
	LocalPorts() (sourceport.Range, error)
}

// Options are the settings of the loop.
type Options struct {
	NodeName      string
	ServiceCIDRs  []netip.Prefix // besides those of ServiceCIDR objects
	MTU           int            // of pods; 0 = from the node's device
	VNI           uint32
	Mode          tunnel.Mode          // empty = vxlan
	AcceptPlain   bool                 // of other nodes' pods without a header, whatever the mode
	NodePorts     service.PortRange    // zero = any port
	NodePortAddrs tunnel.NodePortAddrs // where they answer; zero = on all addresses
	MaglevSize    uint32               // 0 = by the number of backends
	Masquerade    Masquerade
	// ExternalSource is the programs' setting, by the flag's word, for status alone.
	ExternalSource string
	// NoSockets: no cgroup's connections are translated at connect().
	NoSockets bool
	Settled   func()           // see [Config]
	Now       func() time.Time // the clock of health and of what is deleted later; nil = time.Now
	Log       *slog.Logger
}

// Agent is the loop and its state.
type Agent struct {
	opt    Options
	log    *slog.Logger
	tables *table.Tables
	dp     Datapath
	stack  Stack
	ipam   *ipam.Allocator
	eps    *endpoints
	health *health.Proxy
	events *events

	tunnel   *tunnel.Compiler
	policy   *policy.Compiler
	peers    *peers
	services *services
	devAddrs *reconcile.Table[uint32, maps.DevAddrs]
	gens     *generations

	queries chan func()
	// rounds gets a value after every round, unless one waits there already.
	rounds chan struct{}
	ready  atomic.Pointer[[]string] // what readiness waits for
	begun  chan struct{}            // closed when the agent is ready for the first time
	mtu    atomic.Int64
	mtu6   atomic.Int64
	// resized gets a value when the MTU of pods is another, or there is another
	// reason to look after them at once.
	resized chan struct{}

	// Of the loop alone.
	dirty     dirty
	watch     watches
	pods      statedb.ChangeIterator[*corev1.Pod]
	svcs      statedb.ChangeIterator[*corev1.Service]
	slices    statedb.ChangeIterator[*discoveryv1.EndpointSlice]
	sliceOf   map[string]types.NamespacedName // slice -> service, to see it move
	retry     map[types.NamespacedName]time.Time
	noTable   map[types.NamespacedName]uint32 // of these, whose Maglev table found no room, its size
	problems  map[string][]table.Problem      // by what they are about
	synced    bool
	full      bool // the first full round is done
	world     world
	stats     stats
	checks    checks
	ports     hostPorts
	unwritten map[service.Owner]struct{} // services that a map refused a part of

	read      revisions    // what the compilers know of
	hostAddrs []netip.Addr // so
	localPods map[types.NamespacedName]*corev1.Pod
}

// world is what the last round knew.
type world struct {
	nodes    []tunnel.NodeInfo
	self     tunnel.NodeInfo
	zone     string
	devices  []node.Device
	outside  []node.Device
	overlay  int
	ways     map[netip.Addr]node.Way // to the other nodes' addresses
	learned  map[netip.Addr]learned  // of these ways
	leaving  leaving
	mtu      tunnel.MTU
	qdiscs   map[int]node.Qdisc // of pods' devices
	bypassed map[int]error      // of these, by whose filters at the ingress the pods' packets pass
	// No pod has such filters, and nothing is left of when one had.
	unfiltered bool
	ports      []sourceport.Range // that sources are translated to
	attached   map[int]string
	cidrs      []netip.Prefix
	in         peerInput
	local      endpointRound
}

// dirty says what the next round has to look at.
type dirty struct {
	stack    bool // devices, addresses, routes, sysctls
	nodes    bool
	peers    bool // pods, policies: everything about addresses
	routes   bool
	verify   bool // programs
	services map[types.NamespacedName]struct{}
}

// stats are for metrics; read through the loop.
type stats struct {
	rounds   uint64
	last     time.Duration
	total    time.Duration
	services uint64
	bumps    uint64
}

// New makes the loop over what the maps hold. It writes nothing yet.
func New(opt Options, tables *table.Tables, dp Datapath, stack Stack, alloc *ipam.Allocator) (*Agent, error) {
	if opt.Mode == "" {
		opt.Mode = tunnel.ModeVXLAN
	}
	if opt.Now == nil {
		opt.Now = time.Now
	}
	a := &Agent{
		opt: opt, log: opt.Log, tables: tables, dp: dp, stack: stack, ipam: alloc,
		eps:      newEndpoints(),
		queries:  make(chan func()),
		rounds:   make(chan struct{}, 1),
		resized:  make(chan struct{}, 1),
		begun:    make(chan struct{}),
		sliceOf:  make(map[string]types.NamespacedName),
		retry:    make(map[types.NamespacedName]time.Time),
		noTable:  make(map[types.NamespacedName]uint32),
		problems: make(map[string][]table.Problem),
	}
	a.eps.check = a.epInForce
	a.world.attached = make(map[int]string)
	a.events = newEvents(a)
	a.health = health.New(health.DefaultTimeout, opt.Now, a.noLocal)
	a.checks = newChecks(a.health)
	a.ports = newHostPorts()
	a.unwritten = make(map[service.Owner]struct{})
	a.dirty.services = make(map[types.NamespacedName]struct{})
	var err error
	st := storesOf(dp.Maps())
	if a.peers, err = newPeers(st, opt.Now); err != nil {
		return nil, err
	}
	a.gens = a.peers.gens
	a.tunnel, a.policy = tunnel.NewCompiler(), policy.NewCompiler(a.peers.restored())
	if a.services, err = newServices(st, opt.Now, a.peers.bumpAddr); err != nil {
		return nil, err
	}
	a.devAddrs = reconcile.New(st.devAddrs)
	if err = a.devAddrs.Load(); err != nil {
		return nil, err
	}
	a.notReady("the agent has only started")
	a.mtu.Store(int64(opt.MTU))
	a.mtu6.Store(int64(opt.MTU))
	return a, nil
}

// Endpoints is the regenerator to give to the endpoint manager.
func (a *Agent) Endpoints() *endpoints { return a.eps }

// MTU of pods; 0 while the node's device is not known.
func (a *Agent) MTU() int { return int(a.mtu.Load()) }

// MTU6 is that of pods' IPv6.
func (a *Agent) MTU6() int { return int(a.mtu6.Load()) }

// NotReady says what the agent waits for; empty when it is ready.
func (a *Agent) NotReady() []string { return *a.ready.Load() }

func (a *Agent) notReady(why ...string) { a.ready.Store(&why) }

// do runs f in the loop, which owns the state that f reads.
func (a *Agent) do(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case a.queries <- func() { f(); close(done) }:
	case <-a.eps.stopped:
		return errStopping
	case <-ctx.Done():
		return fmt.Errorf("the agent's loop does not answer: %w", context.Cause(ctx))
	}
	<-done
	return nil
}

// Run is the loop. It returns when ctx ends, leaving everything in place.
func (a *Agent) Run(ctx context.Context) error {
	defer a.eps.stop()
	defer a.checks.servers.Close()
	events, err := a.stack.Watch(ctx)
	if err != nil {
		return fmt.Errorf("follow the node's devices: %w", err)
	}
	txn := a.tables.DB.WriteTxn(a.tables.Pods, a.tables.Services, a.tables.Slices)
	if a.pods, err = a.tables.Pods.Changes(txn); err == nil {
		a.svcs, err = a.tables.Services.Changes(txn)
	}
	if err == nil {
		a.slices, err = a.tables.Slices.Changes(txn)
	}
	txn.Commit()
	if err != nil {
		return fmt.Errorf("follow pods and services: %w", err)
	}
	synced := make(chan struct{})
	go func() {
		if a.tables.WaitSynced(ctx) == nil {
			close(synced)
		}
	}()
	verify := time.NewTicker(verifyEvery)
	defer verify.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	a.dirty.stack, a.dirty.nodes, a.dirty.peers, a.dirty.verify = true, true, true, true

	var earliest time.Time // throttle: not before
	var stale time.Time    // since when the stack may be another
	for {
		urgent := false
		select {
		case <-ctx.Done():
			return nil
		case f := <-a.queries:
			f()
			continue
		case <-synced:
			a.synced, synced = true, nil
			a.log.Info("all objects known; starting to apply")
		case <-events:
			if !a.dirty.stack {
				stale = time.Now()
			}
			a.dirty.stack = true
		case <-a.eps.kick:
			a.dirty.peers, urgent = true, true
		case <-verify.C:
			a.dirty.stack, a.dirty.verify = true, true
		case <-timer.C:
		case <-a.watch.nodes:
			a.watch.nodes, a.dirty.nodes, a.dirty.peers = nil, true, true
		case <-a.watch.pods:
			a.watch.pods, a.dirty.peers = nil, true
		case <-a.watch.namespaces:
			a.watch.namespaces, a.dirty.peers = nil, true
		case <-a.watch.policies:
			a.watch.policies, a.dirty.peers = nil, true
		case <-a.watch.clusterPolicies:
			a.watch.clusterPolicies, a.dirty.peers = nil, true
		case <-a.watch.cidrs:
			a.watch.cidrs, a.dirty.peers = nil, true
		case <-a.watch.services:
			a.watch.services = nil
		case <-a.watch.slices:
			a.watch.slices = nil
		}
		now := time.Now()
		if !urgent && now.Before(earliest) {
			timer.Reset(earliest.Sub(now))
			continue
		}
		// Pods that come make events of devices all the time, and the kernel answers
		// late about them meanwhile: who waits for policy does not wait for that,
		// and the next round makes up for it.
		later := urgent && a.full && a.dirty.stack && !a.dirty.nodes && now.Sub(stale) < maxThrottle
		a.dirty.stack = a.dirty.stack && !later
		full := a.beginRound()
		next := a.round(ctx)
		took := time.Since(now)
		a.endRound(full)
		a.stats.rounds++
		a.stats.last = took
		a.stats.total += took
		select {
		case a.rounds <- struct{}{}:
		default:
		}
		earliest = time.Now().Add(min(took, maxThrottle))
		if later {
			a.dirty.stack = true
			next = sooner(next, earliest)
		}
		if !next.IsZero() {
			timer.Reset(max(time.Until(next), time.Millisecond))
		}
	}
}

const (
	verifyEvery = 10 * time.Second
	// maxThrottle bounds how long changes are gathered: as long as the last
	// round took, so that the loop works half of the time at most.
	maxThrottle = 500 * time.Millisecond
	// serviceRetry is when a service with a problem is compiled again.
	serviceRetry = 10 * time.Second
)

// watches are the channels that close when a table changes; nil = it has,
// and the next round reads the table.
type watches struct {
	nodes, pods, namespaces, policies, clusterPolicies, cidrs, services, slices <-chan struct{}
}

func (a *Agent) serviceNode() service.Node {
	return service.Node{
		Name: a.world.self.Name, Zone: a.world.zone,
		NodePorts: a.opt.NodePorts, MaglevSize: a.opt.MaglevSize,
	}
}
