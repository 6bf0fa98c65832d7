package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/service"
)

// errStopping is what waits for the loop gets when the agent stops.
var errStopping = errors.New("the agent is stopping")

// endpoints are the pods that the CNI plugged in, as the loop sees them. It
// is the [endpoint.Regenerator]: Up and Down hand an endpoint to the loop and
// wait until a whole round has been applied with it, or without it.
type endpoints struct {
	kick    chan struct{}
	stopped chan struct{}
	check   func(context.Context, endpoint.Endpoint) error // is it in force?

	mu      sync.Mutex
	running bool // the loop applies: before, there is nothing to wait for
	pending string
	m       map[endpoint.Key]*localState
	left    []chan error // of Down
}

type localState struct {
	ep      endpoint.Endpoint
	pod     *corev1.Pod // the last one seen that is this endpoint's
	why     string      // there is none
	waiters []chan error
}

func newEndpoints() *endpoints {
	return &endpoints{
		kick:    make(chan struct{}, 1),
		stopped: make(chan struct{}),
		pending: "the agent has only started",
		m:       make(map[endpoint.Key]*localState),
	}
}

// seed adds what the manager remembers of an earlier run, before the loop
// starts, so that nothing of it is taken for a leftover.
func (e *endpoints) seed(list []endpoint.Endpoint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ep := range list {
		if e.m[ep.Key()] == nil {
			e.m[ep.Key()] = &localState{ep: ep, why: "no round yet"}
		}
	}
}

func (e *endpoints) wake() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// Up implements [endpoint.Regenerator].
func (e *endpoints) Up(ctx context.Context, ep endpoint.Endpoint) error {
	done := make(chan error, 1)
	e.mu.Lock()
	st := e.m[ep.Key()]
	known := st != nil
	if !known {
		st = &localState{why: "no round yet"}
		e.m[ep.Key()] = st
	}
	st.ep = ep
	st.waiters = append(st.waiters, done)
	e.mu.Unlock()
	e.wake()
	select {
	case err := <-done:
		return err
	case <-e.stopped:
		return errStopping
	case <-ctx.Done():
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	why := st.why
	if !e.running {
		why = e.pending
	}
	st.waiters = slices.DeleteFunc(st.waiters, func(w chan error) bool { return w == done })
	if !known && e.m[ep.Key()] == st { // whoever asked gives up
		delete(e.m, ep.Key())
		e.wake()
	}
	return fmt.Errorf("%s: no policy in force yet: %s: %w", ep, why, context.Cause(ctx))
}

// Down implements [endpoint.Regenerator].
func (e *endpoints) Down(ctx context.Context, ep endpoint.Endpoint) error {
	e.mu.Lock()
	st, ok := e.m[ep.Key()]
	if ok {
		delete(e.m, ep.Key())
		for _, w := range st.waiters {
			w <- fmt.Errorf("%s was removed", ep)
		}
	}
	if !ok || !e.running {
		e.mu.Unlock()
		return nil
	}
	done := make(chan error, 1)
	e.left = append(e.left, done)
	e.mu.Unlock()
	e.wake()
	select {
	case err := <-done:
		return err
	case <-e.stopped:
		return errStopping
	case <-ctx.Done():
		return fmt.Errorf("%s: is not out of the datapath yet: %w", ep, context.Cause(ctx))
	}
}

// InForce implements [endpoint.PolicyProber].
func (e *endpoints) InForce(ctx context.Context, ep endpoint.Endpoint) error {
	return e.check(ctx, ep)
}

// Changed implements [endpoint.Observer].
func (e *endpoints) Changed(ep endpoint.Endpoint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if st := e.m[ep.Key()]; st != nil {
		st.ep = ep
	}
}

// notRunning says what the loop waits for.
func (e *endpoints) notRunning(pending string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending = pending
}

// stop ends all waits.
func (e *endpoints) stop() { close(e.stopped) }

// round is what one round of the loop takes up.
type endpointRound struct {
	byAddr  map[netip.Addr]localEndpoint
	pods    map[types.NamespacedName]*corev1.Pod // one for each local pod
	addrs   map[types.NamespacedName][]netip.Addr
	ports   map[types.NamespacedName][]service.PodPorts // of local pods that have some
	waiting []endpointWait
	left    []chan error
	errs    []error
}

type endpointWait struct {
	pod   types.NamespacedName
	addrs []netip.Addr
	done  []chan error
}

// collect takes up the endpoints and all who wait for them. lookup finds a
// pod by name, nil if there is none. Endpoints whose Pod object has gone stay
// with the last one seen until they are removed.
func (e *endpoints) collect(lookup func(types.NamespacedName) *corev1.Pod) endpointRound {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running = true
	r := endpointRound{
		byAddr: make(map[netip.Addr]localEndpoint),
		pods:   make(map[types.NamespacedName]*corev1.Pod),
		addrs:  make(map[types.NamespacedName][]netip.Addr),
		ports:  make(map[types.NamespacedName][]service.PodPorts),
		left:   e.left,
	}
	e.left = nil
	states := make([]*localState, 0, len(e.m))
	for _, st := range e.m {
		states = append(states, st)
	}
	// A newer endpoint goes before an older one that claims its address.
	sort.Slice(states, func(i, j int) bool { return states[i].ep.ID > states[j].ep.ID })
	for _, st := range states {
		name := types.NamespacedName{Namespace: st.ep.Namespace, Name: st.ep.Pod}
		pod := lookup(name)
		switch {
		case pod == nil:
			st.why = fmt.Sprintf("Pod %s is not among the objects known", name)
		case st.ep.UID != "" && pod.UID != "" && string(pod.UID) != st.ep.UID:
			st.why = fmt.Sprintf("Pod %s has UID %s, not %s: it is another pod of that name", name, pod.UID, st.ep.UID)
		default:
			st.pod, st.why = pod, ""
		}
		if st.pod == nil {
			if len(st.waiters) == 0 {
				r.errs = append(r.errs, fmt.Errorf("%s is cut off: %s", st.ep, st.why))
			}
			continue
		}
		if r.pods[name] == nil {
			r.pods[name] = st.pod
		}
		var own []netip.Addr
		for _, a := range st.ep.Addrs {
			if _, taken := r.byAddr[a]; taken {
				continue
			}
			r.byAddr[a] = localEndpoint{Endpoint: st.ep, pod: name}
			own = append(own, a)
		}
		r.addrs[name] = append(r.addrs[name], own...)
		if len(st.ep.PortMappings) > 0 {
			r.ports[name] = append(r.ports[name], podPorts(own, st.ep.PortMappings))
		}
		if len(st.waiters) > 0 {
			r.waiting = append(r.waiting, endpointWait{name, st.ep.Addrs, st.waiters})
			st.waiters = nil
		}
	}
	return r
}

// answer tells all who waited; check says whether an address is in force,
// ports whether a pod's host ports are.
func (r endpointRound) answer(check func(netip.Addr) error, ports func(types.NamespacedName) error) {
	for _, w := range r.waiting {
		var errs []error
		for _, a := range w.addrs {
			errs = append(errs, check(a))
		}
		errs = append(errs, ports(w.pod))
		for _, done := range w.done {
			done <- errors.Join(errs...)
		}
	}
	for _, done := range r.left {
		done <- nil
	}
}
