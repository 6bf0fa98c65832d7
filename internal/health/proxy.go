package health

import (
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// DefaultTimeout is how long a change may wait: twice kube-proxy's
	// default sync period.
	DefaultTimeout = time.Minute
	// TaintToBeDeleted is the taint of a node that the cluster autoscaler is
	// about to remove.
	TaintToBeDeleted = "ToBeDeletedByClusterAutoscaler"
)

// Proxy is the state of the service proxy. Its methods may be called from
// any goroutine.
type Proxy struct {
	timeout time.Duration
	now     func() time.Time
	started time.Time
	metrics *metrics

	mu       sync.Mutex
	waiting  time.Time // since when a change waits; zero = none does
	began    time.Time // of the round under way; zero = none
	updated  time.Time // when everything was applied last
	eligible bool
	triggers map[types.NamespacedName][]trigger // by service
	seen     bool                               // changes since the last round
}

// trigger is what caused a change of an EndpointSlice.
type trigger struct {
	family corev1.IPFamily
	at     time.Time
}

// New makes a Proxy that is healthy and whose node is eligible until the loop
// says otherwise. noLocal is asked at every scrape for the number of service
// ports that a Local policy leaves without endpoints; nil = none.
func New(timeout time.Duration, now func() time.Time, noLocal func() []NoLocal) *Proxy {
	return &Proxy{
		timeout: timeout, now: now, started: now(), metrics: newMetrics(noLocal),
		eligible: true, triggers: make(map[types.NamespacedName][]trigger),
	}
}

// Changes are what the loop saw since it last looked.
type Changes struct {
	Services int
	slices   []sliceChange
}

type sliceChange struct {
	service types.NamespacedName
	trigger *trigger // nil = not known
	deleted bool
}

// Slice adds a change of an EndpointSlice.
func (c *Changes) Slice(s *discoveryv1.EndpointSlice, deleted bool) {
	ch := sliceChange{
		service: types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]},
		deleted: deleted,
	}
	if text := s.Annotations[corev1.EndpointsLastChangeTriggerTime]; text != "" {
		at, err := time.Parse(time.RFC3339Nano, text)
		if family := corev1.IPFamily(s.AddressType); err == nil && slices.Contains(families(), family) {
			ch.trigger = &trigger{family, at}
		}
	}
	c.slices = append(c.slices, ch)
}

// Queued is called when changes were seen and not yet applied.
func (p *Proxy) Queued(c Changes) {
	if c.Services == 0 && len(c.slices) == 0 {
		return
	}
	now := p.now()
	p.metrics.queued(now, c.Services, len(c.slices))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen = true
	if p.waiting.IsZero() {
		p.waiting = now
	}
	for _, s := range c.slices {
		switch {
		case s.deleted:
			// The annotation of a slice that goes is of an earlier change.
			delete(p.triggers, s.service)
		case s.trigger != nil && !s.trigger.at.Before(p.started):
			// What happened before this process ran is not its latency.
			p.triggers[s.service] = append(p.triggers[s.service], *s.trigger)
		}
	}
}

// Began is called when the loop starts a round. A round that never ends is
// work that waits, too.
func (p *Proxy) Began() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began = p.now()
}

// Applied is called when the round is over: full says that it looked at every
// Service, err what could not be written of them.
func (p *Proxy) Applied(full bool, err error) {
	now := p.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if full || p.seen {
		p.metrics.round(now.Sub(p.began), full)
	}
	if err != nil && p.waiting.IsZero() {
		p.waiting = p.began
	}
	p.began, p.seen = time.Time{}, false
	if err != nil {
		return
	}
	p.waiting, p.updated = time.Time{}, now
	for _, list := range p.triggers {
		for _, t := range list {
			p.metrics.programmed(t.family, now.Sub(t.at))
		}
	}
	clear(p.triggers)
	p.metrics.applied(now)
}

// SetNode tells of this node's object; nil = there is none.
func (p *Proxy) SetNode(n *corev1.Node) {
	eligible := n != nil && n.DeletionTimestamp.IsZero()
	if eligible {
		for _, t := range n.Spec.Taints {
			eligible = eligible && t.Key != TaintToBeDeleted
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eligible = eligible
}

// Healthy says whether nothing has been waiting for too long.
func (p *Proxy) Healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.healthy(p.now())
}

func (p *Proxy) healthy(now time.Time) bool {
	for _, since := range []time.Time{p.waiting, p.began} {
		if !since.IsZero() && now.Sub(since) >= p.timeout {
			return false
		}
	}
	return true
}

// answer is the body of /healthz and /livez.
type answer struct {
	LastUpdated  time.Time                        `json:"lastUpdated"`
	CurrentTime  time.Time                        `json:"currentTime"`
	NodeEligible *bool                            `json:"nodeEligible,omitempty"`
	Healthy      bool                             `json:"healthy"`
	Status       map[corev1.IPFamily]familyStatus `json:"status,omitempty"`
}

type familyStatus struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// families are those that the loop serves in every round.
func families() []corev1.IPFamily {
	return []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
}

func (p *Proxy) answer() (a answer, eligible bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	a = answer{LastUpdated: p.updated, CurrentTime: now, Healthy: p.healthy(now)}
	if !p.updated.IsZero() {
		a.Status = make(map[corev1.IPFamily]familyStatus)
		for _, f := range families() {
			a.Status[f] = familyStatus{p.updated, a.Healthy}
		}
	}
	return a, p.eligible
}

// Handler answers /healthz and /livez.
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		a, eligible := p.answer()
		a.NodeEligible = &eligible
		a.write(w, a.Healthy && eligible, p.metrics.healthz)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		a, _ := p.answer()
		a.write(w, a.Healthy, p.metrics.livez)
	})
	return mux
}

func (a answer) write(w http.ResponseWriter, ok bool, count func(code int)) {
	code := http.StatusServiceUnavailable
	if ok {
		// Probes take an old time for a proxy that hangs; nothing to do is
		// as good as done just now.
		code, a.LastUpdated = http.StatusOK, a.CurrentTime
	}
	count(code)
	writeJSON(w, code, a)
}

func writeJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) // the reader has gone away
}
