package health

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

func svc(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// freePort is one that nothing listens on.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

type checkBench struct {
	*Checks
	t      *testing.T
	well   bool
	client *http.Client
}

func newCheckBench(t *testing.T) *checkBench {
	b := &checkBench{t: t, well: true, client: &http.Client{Transport: &http.Transport{}}}
	b.Checks = NewChecks(func() bool { return b.well })
	t.Cleanup(func() { b.client.CloseIdleConnections(); b.Close() })
	return b
}

func (b *checkBench) sync(want map[types.NamespacedName]Check, addrs ...netip.Addr) {
	b.t.Helper()
	for name, err := range b.Sync(want, addrs) {
		b.t.Errorf("%s: %v", name, err)
	}
}

func (b *checkBench) get(host string, port uint16) (code int, header http.Header, body string) {
	b.t.Helper()
	r, err := b.client.Get("http://" + net.JoinHostPort(host, strconv.Itoa(int(port))) + "/any/path")
	if err != nil {
		b.t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return r.StatusCode, r.Header, strings.TrimSpace(string(text))
}

// closed says whether nobody listens.
func closed(host string, port uint16) bool {
	c, err := net.Dial("tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
	if err == nil {
		_ = c.Close()
	}
	return err != nil
}

// S17, S18
func TestCheckAnswers(t *testing.T) {
	b := newCheckBench(t)
	port := freePort(t)
	for _, c := range []struct {
		local int
		well  bool
		code  int
		body  string
	}{
		{3, true, 200, `{"service":{"namespace":"default","name":"web"},"localEndpoints":3,"serviceProxyHealthy":true}`},
		{0, true, 503, `{"service":{"namespace":"default","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}`},
		{3, false, 503, `{"service":{"namespace":"default","name":"web"},"localEndpoints":3,"serviceProxyHealthy":false}`},
		{1, true, 200, `{"service":{"namespace":"default","name":"web"},"localEndpoints":1,"serviceProxyHealthy":true}`},
	} {
		b.sync(map[types.NamespacedName]Check{svc("web"): {port, c.local}})
		b.well = c.well
		for _, host := range []string{"127.0.0.1", "::1"} {
			code, header, body := b.get(host, port)
			if code != c.code || body != c.body {
				t.Errorf("%s, %d endpoints, healthy %v: %d %s", host, c.local, c.well, code, body)
			}
			if header.Get("Content-Type") != "application/json" || header.Get("X-Content-Type-Options") != "nosniff" ||
				header.Get("X-Load-Balancing-Endpoint-Weight") != strconv.Itoa(c.local) {
				t.Errorf("headers %v", header)
			}
		}
	}
}

// S18: what stays is not interrupted, what goes is closed, a port may change
// hands in one step.
func TestCheckServersComeAndGo(t *testing.T) {
	b := newCheckBench(t)
	web, api, other := freePort(t), freePort(t), freePort(t)
	b.sync(map[types.NamespacedName]Check{svc("web"): {web, 1}, svc("api"): {api, 1}})
	// A connection that is open already is what tells a server that stayed
	// from one that was made anew.
	var dialled int
	b.client.Transport = &http.Transport{Dial: func(network, addr string) (net.Conn, error) {
		dialled++
		return net.Dial(network, addr)
	}}
	b.get("127.0.0.1", web)
	b.sync(map[types.NamespacedName]Check{svc("web"): {web, 2}, svc("new"): {api, 1}, svc("api"): {other, 1}})
	if _, h, _ := b.get("127.0.0.1", web); dialled != 1 || h.Get("X-Load-Balancing-Endpoint-Weight") != "2" {
		t.Errorf("the server that stays: %d connections, weight %s", dialled, h.Get("X-Load-Balancing-Endpoint-Weight"))
	}
	for port, name := range map[uint16]string{web: "web", api: "new", other: "api"} {
		if _, _, body := b.get("127.0.0.1", port); !strings.Contains(body, `"name":"`+name+`"`) {
			t.Errorf("the port of %s is answered by %s", name, body)
		}
	}
	b.sync(map[types.NamespacedName]Check{svc("api"): {other, 1}})
	if !closed("127.0.0.1", web) || !closed("127.0.0.1", api) || closed("127.0.0.1", other) {
		t.Error("not exactly the servers of the Services that are gone were closed")
	}
	b.Close()
	if !closed("127.0.0.1", other) {
		t.Error("open after Close")
	}
}

// S18: a port that another has is the problem of its Service alone, and is
// tried again.
func TestCheckPortInUse(t *testing.T) {
	b := newCheckBench(t)
	squatter, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	taken := netip.MustParseAddrPort(squatter.Addr().String()).Port()
	free := freePort(t)
	want := map[types.NamespacedName]Check{svc("web"): {taken, 1}, svc("api"): {free, 1}, svc("late"): {free, 1}}
	errs := b.Sync(want, nil)
	if len(errs) != 2 || errs[svc("web")] == nil || !strings.Contains(errs[svc("web")].Error(), strconv.Itoa(int(taken))) ||
		!strings.Contains(errs[svc("web")].Error(), "in use") {
		t.Errorf("errors %v", errs)
	}
	if err := errs[svc("late")]; err == nil || !strings.Contains(err.Error(), "Service default/api") {
		t.Errorf("two Services with one port: %v", err)
	}
	if code, _, _ := b.get("127.0.0.1", free); code != 200 {
		t.Errorf("the other Service: %d", code)
	}
	if err := squatter.Close(); err != nil {
		t.Fatal(err)
	}
	delete(want, svc("api"))
	b.sync(want)
	if code, _, body := b.get("127.0.0.1", taken); code != 200 {
		t.Errorf("when the port is free: %d %s", code, body)
	}
	if _, _, body := b.get("127.0.0.1", free); !strings.Contains(body, "late") {
		t.Errorf("when the other Service is gone: %s", body)
	}
}

// S18, S22: on the addresses that NodePorts are answered on.
func TestCheckAddresses(t *testing.T) {
	b := newCheckBench(t)
	port := freePort(t)
	want := map[types.NamespacedName]Check{svc("web"): {port, 1}}
	b.sync(want, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.3"))
	if closed("127.0.0.1", port) || closed("127.0.0.3", port) || !closed("127.0.0.2", port) || !closed("::1", port) {
		t.Error("not listening on exactly the addresses given")
	}
	b.sync(want, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1"))
	if closed("127.0.0.1", port) || !closed("127.0.0.3", port) || closed("::1", port) {
		t.Error("not following the addresses")
	}
	b.sync(want)
	if closed("127.0.0.2", port) {
		t.Error("not listening on all addresses")
	}
}

// A server that ended by itself is noticed and made anew.
func TestCheckServerLost(t *testing.T) {
	b := newCheckBench(t)
	port := freePort(t)
	want := map[types.NamespacedName]Check{svc("web"): {port, 1}}
	b.sync(want)
	if b.Lost() {
		t.Error("lost while it serves")
	}
	for _, s := range b.servers {
		if err := s.http.Close(); err != nil {
			t.Fatal(err)
		}
		<-s.ended
	}
	if !b.Lost() || !closed("127.0.0.1", port) {
		t.Error("not lost")
	}
	b.sync(want)
	if b.Lost() || closed("127.0.0.1", port) {
		t.Error("not made anew")
	}
}
