package health

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type clock struct{ t time.Time }

func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

func newProxy() (*Proxy, *clock) {
	c := &clock{time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	return New(time.Minute, c.now, nil), c
}

func testNode(mod ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}
	for _, f := range mod {
		f(n)
	}
	return n
}

func tainted(key string) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key}) }
}

func deleting(n *corev1.Node) { now := metav1.Now(); n.DeletionTimestamp = &now }

// S19
func TestHealthzAndLivez(t *testing.T) {
	service := Changes{Services: 1}
	for _, c := range []struct {
		name           string
		do             func(*Proxy, *clock)
		healthz, livez int
	}{
		{"just started", func(*Proxy, *clock) {}, 200, 200},
		{"nothing ever changes", func(p *Proxy, c *clock) {
			p.Began()
			p.Applied(true, nil)
			c.advance(time.Hour)
		}, 200, 200},
		{"no change is no work", func(p *Proxy, c *clock) {
			p.Queued(Changes{})
			c.advance(time.Hour)
		}, 200, 200},
		{"a change waits, not too long", func(p *Proxy, c *clock) {
			p.Queued(service)
			c.advance(time.Minute - 1)
		}, 200, 200},
		{"a change waits for too long", func(p *Proxy, c *clock) {
			p.Queued(service)
			c.advance(time.Minute)
		}, 503, 503},
		{"a later change does not make the first one younger", func(p *Proxy, c *clock) {
			p.Queued(service)
			c.advance(30 * time.Second)
			p.Queued(service)
			c.advance(30 * time.Second)
		}, 503, 503},
		{"a round that fails leaves it waiting", func(p *Proxy, c *clock) {
			p.Began()
			p.Queued(service)
			p.Applied(false, errors.New("map is full"))
			c.advance(30 * time.Second)
			p.Began()
			p.Applied(false, errors.New("map is full"))
			c.advance(30 * time.Second)
		}, 503, 503},
		{"a failure without a change", func(p *Proxy, c *clock) {
			p.Began()
			p.Applied(false, errors.New("refused"))
			c.advance(time.Minute)
		}, 503, 503},
		{"late, but applied", func(p *Proxy, c *clock) {
			p.Queued(service)
			c.advance(time.Hour)
			p.Began()
			p.Applied(false, nil)
		}, 200, 200},
		{"a round that hangs", func(p *Proxy, c *clock) {
			p.Began()
			c.advance(time.Minute)
		}, 503, 503},
		{"another taint", func(p *Proxy, _ *clock) { p.SetNode(testNode(tainted("node.kubernetes.io/unreachable"))) }, 200, 200},
		{"to be deleted", func(p *Proxy, _ *clock) { p.SetNode(testNode(tainted("other"), tainted(TaintToBeDeleted))) }, 503, 200},
		{"being deleted", func(p *Proxy, _ *clock) { p.SetNode(testNode(deleting)) }, 503, 200},
		{"no such node", func(p *Proxy, _ *clock) { p.SetNode(nil) }, 503, 200},
		{"not to be deleted after all", func(p *Proxy, _ *clock) {
			p.SetNode(testNode(tainted(TaintToBeDeleted)))
			p.SetNode(testNode())
		}, 200, 200},
	} {
		p, clock := newProxy()
		c.do(p, clock)
		for path, want := range map[string]int{"/healthz": c.healthz, "/livez": c.livez} {
			if got := ask(t, p, path).Code; got != want {
				t.Errorf("%s: %s says %d, want %d", c.name, path, got, want)
			}
		}
		if got, want := p.Healthy(), c.livez == 200; got != want {
			t.Errorf("%s: healthy %v, want %v", c.name, got, want)
		}
	}
}

func ask(t *testing.T, p *Proxy, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	p.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return w
}

// S19: what tools read of the answers.
func TestHealthzBody(t *testing.T) {
	p, c := newProxy()
	p.SetNode(testNode())
	p.Began()
	p.Applied(true, nil)
	c.advance(5 * time.Minute)
	w := ask(t, p, "/healthz")
	if w.Header().Get("Content-Type") != "application/json" || w.Header().Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("headers %v", w.Header())
	}
	for path, want := range map[string]string{
		"/healthz": `{"lastUpdated":"2026-03-01T12:05:00Z","currentTime":"2026-03-01T12:05:00Z","nodeEligible":true,"healthy":true,` +
			`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
		"/livez": `{"lastUpdated":"2026-03-01T12:05:00Z","currentTime":"2026-03-01T12:05:00Z","healthy":true,` +
			`"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}`,
	} {
		if got := strings.TrimSpace(ask(t, p, path).Body.String()); got != want {
			t.Errorf("%s\n got %s\nwant %s", path, got, want)
		}
	}
	// Unhealthy, the time of the last success is told.
	p.Queued(Changes{Services: 1})
	c.advance(time.Minute)
	var body answer
	if err := json.Unmarshal(ask(t, p, "/healthz").Body.Bytes(), &body); err != nil {
		t.Fatal(err)
	}
	if body.Healthy || !body.LastUpdated.Equal(c.t.Add(-6*time.Minute)) || !body.CurrentTime.Equal(c.t) || body.Status["IPv4"].Healthy {
		t.Errorf("unhealthy: %+v", body)
	}
}

func testSlice(service string, family discoveryv1.AddressType, at time.Time) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: service + "-1",
			Labels:      map[string]string{discoveryv1.LabelServiceName: service},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: at.Format(time.RFC3339Nano)},
		},
		AddressType: family,
	}
}
