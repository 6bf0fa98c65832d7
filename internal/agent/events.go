package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/table"
)

// eventQueue is how many events wait for one reader that is slow.
const eventQueue = 256

// events hands what the programs tell of drops to all who listen, with names.
// Nobody waits for a listener: what its queue has no room for it misses, and
// is told how many that were.
type events struct {
	agent *Agent

	mu        sync.Mutex
	listeners map[*listener]struct{}
	ended     bool
}

// listener is one reader.
type listener struct {
	c      chan api.Event
	missed uint64
}

func newEvents(a *Agent) *events {
	return &events{agent: a, listeners: make(map[*listener]struct{})}
}

// run reads the events until ctx ends. Without listeners they are read all
// the same, so that the first one that comes does not get what is long over.
func (e *events) run(ctx context.Context, from *maps.Events) error {
	defer e.end()
	r, err := from.Open()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = r.Close() })
	defer func() {
		if stop() {
			_ = r.Close()
		}
	}()
	for {
		ev, err := r.Read()
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case err != nil:
			return err
		case e.idle():
			continue
		}
		named, err := e.agent.describeEvent(ctx, ev)
		switch {
		case ctx.Err() != nil || errors.Is(err, errStopping):
			return nil
		case err != nil:
			return err
		}
		e.publish(named)
	}
}

func (e *events) idle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.listeners) == 0
}

func (e *events) publish(ev api.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for l := range e.listeners {
		ev.Missed = l.missed
		select {
		case l.c <- ev:
			l.missed = 0
		default:
			l.missed++
		}
	}
}

// listen returns a queue of events, which is closed when the agent ends. Call
// done when it is not read any more.
func (e *events) listen() (c <-chan api.Event, done func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := &listener{c: make(chan api.Event, eventQueue)}
	if e.ended {
		close(l.c)
		return l.c, func() {}
	}
	e.listeners[l] = struct{}{}
	return l.c, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.listeners, l)
	}
}

// end closes every queue.
func (e *events) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
	for l := range e.listeners {
		close(l.c)
	}
	clear(e.listeners)
}

// ServeHTTP is the answer to [api.PathEvents]: a line of JSON for an event,
// as it happens, for as long as the client listens.
func (e *events) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c, done := e.listen()
	defer done()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	enc := json.NewEncoder(w)
	for {
		if out.Flush() != nil {
			return
		}
		select {
		case ev, ok := <-c:
			if !ok || enc.Encode(ev) != nil {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

// describeEvent gives names to the numbers of an event.
func (a *Agent) describeEvent(ctx context.Context, ev maps.Event) (api.Event, error) {
	now, err := monotonic()
	if err != nil {
		return api.Event{}, err
	}
	out := api.Event{
		Time:        time.Now().Add(time.Duration(ev.Time) - now),
		Reason:      maps.ReasonName(maps.Reason(ev.Reason)),
		Hook:        maps.HookName(maps.Hook(ev.Hook)),
		Protocol:    maps.ProtoName(ev.Key.Proto),
		Source:      a.eventEnd(ev.Key.Src, ev.Key.Sport),
		Destination: a.eventEnd(ev.Key.Dst, ev.Key.Dport),
		From:        maps.PlaceName(ev.From.Kind),
		RuleID:      ev.Rule, Table: ev.Table &^ maps.TableDefault,
	}
	if ev.From.Kind == maps.PlacePod {
		out.Sender = a.podOnDevice(int(ev.From.Id))
	}
	egress := out.Reason == reasonEgress
	if !egress && out.Reason != reasonIngress {
		return out, nil
	}
	src, dst := a.eventEnd(ev.Src, 0), a.eventEnd(ev.Dst, ev.Dport)
	out.Denied = &api.Denial{Source: src, Destination: dst, Direction: "ingress", Pod: dst.Pod, PeerIdentity: ev.SrcIdentity}
	if egress {
		out.Denied.Direction, out.Denied.Pod, out.Denied.PeerIdentity = "egress", src.Pod, ev.DstIdentity
	}
	err = a.do(ctx, func() { a.explainDenial(&out) })
	return out, err
}

// Reasons of denials by policy.
var (
	reasonEgress  = maps.ReasonName(maps.ReasonPolicyEgress)
	reasonIngress = maps.ReasonName(maps.ReasonPolicyIngress)
)

// explainDenial names the rule, or the policies that isolate the pod. The
// loop runs it.
func (a *Agent) explainDenial(out *api.Event) {
	p := a.world.in.policy
	if out.RuleID != 0 {
		out.Rule = fmt.Sprintf("rule %d", out.RuleID)
		if r, ok := p.Rules[out.RuleID]; ok {
			out.Rule = r.String()
		}
		out.Text = "denied by " + out.Rule
		return
	}
	namespace, name, _ := strings.Cut(out.Denied.Pod, "/")
	pod := types.NamespacedName{Namespace: namespace, Name: name}
	ep := p.Endpoints[pod]
	if out.Policies = policyNames(isolating(ep.InPolicies)); out.Denied.Direction == "egress" {
		out.Policies = policyNames(isolating(ep.OutPolicies))
	}
	out.Text = "isolated, no rule allows"
	if len(out.Policies) > 0 {
		out.Text = "isolated by " + strings.Join(out.Policies, ", ") + ", no rule allows"
	}
}

// eventEnd names the pod that has an address.
func (a *Agent) eventEnd(addr maps.Addr, port uint16) api.EventEnd {
	end := api.EventEnd{Addr: maps.FromAddr(addr), Port: port}
	if end.Pod = a.eps.podAt(end.Addr); end.Pod != "" {
		return end
	}
	for p := range a.tables.Pods.List(a.tables.DB.ReadTxn(), table.PodsByIP(end.Addr)) {
		if !finished(p) && !p.Spec.HostNetwork {
			end.Pod = table.Key(p.Namespace, p.Name)
		}
	}
	return end
}

// podAt is the pod of this node that has an address, as namespace/name.
func (e *endpoints) podAt(addr netip.Addr) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, st := range e.m {
		for _, own := range st.ep.Addrs {
			if own == addr {
				return table.Key(st.ep.Namespace, st.ep.Pod)
			}
		}
	}
	return ""
}

// podOnDevice is the pod behind a device.
func (a *Agent) podOnDevice(ifindex int) string {
	a.eps.mu.Lock()
	defer a.eps.mu.Unlock()
	for _, st := range a.eps.m {
		if _, device := st.ep.Device(); device == ifindex {
			return table.Key(st.ep.Namespace, st.ep.Pod)
		}
	}
	return ""
}
