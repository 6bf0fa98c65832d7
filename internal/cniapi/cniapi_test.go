package cniapi_test

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/cniapi"
	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
	"github.com/podweir/podweir/internal/ipam"
)

func TestMain(m *testing.M) { os.Exit(endpointtest.Main(m)) }

type agent struct {
	*endpoint.Manager
	socket string
	fakes  *endpointtest.Fakes
	ipam   *ipam.Allocator
}

func newAgent(t *testing.T) *agent {
	t.Helper()
	a := &agent{socket: filepath.Join(t.TempDir(), "run", "agent.sock"), fakes: &endpointtest.Fakes{}, ipam: &ipam.Allocator{}}
	if err := a.ipam.SetCIDRs([]netip.Prefix{netip.MustParsePrefix("10.244.80.0/24")}); err != nil {
		t.Fatal(err)
	}
	var err error
	a.Manager, err = endpoint.New(endpoint.Config{
		StateDir: t.TempDir(), IPAM: a.ipam, Datapath: a.fakes, Regenerator: a.fakes, MTU: func() int { return 1450 },
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := cniapi.Listen(a.socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: cniapi.Handler(a.Manager)}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		<-done
		if err := a.GC(context.Background(), "", nil); err != nil {
			t.Error(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(a.socket); err == nil {
			t.Error("the socket is left")
		}
	})
	return a
}

func request(t *testing.T) endpoint.Request {
	return endpoint.Request{ContainerID: "c", IfName: "eth0", Netns: endpointtest.NewNetns(t).Path, Namespace: "default", Pod: "web"}
}

func TestOperationsAndErrorsCrossTheWire(t *testing.T) {
	a := newAgent(t)
	c := cniapi.NewClient(a.socket)
	req := request(t)
	ctx := t.Context()
	ep, err := c.Add(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	if want := a.List()[0]; ep.String() != want.String() || ep.MAC.String() != want.MAC.String() || ep.Addrs[0] != want.Addrs[0] {
		t.Errorf("got %+v, want %+v", ep, want)
	}
	if err := c.Check(ctx, req); err != nil {
		t.Error(err)
	}
	expectCode := func(err error, code endpoint.Code, text string) {
		t.Helper()
		var e *endpoint.Error
		if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Error(), text) {
			t.Errorf("error %v, want code %d and %q", err, code, text)
		}
	}
	_, err = c.Add(ctx, req)
	expectCode(err, endpoint.CodeExists, "eth0")
	a.fakes.Forget(ep.HostIfindex)
	expectCode(c.Check(ctx, req), endpoint.CodeDiffers, "not attached")
	if err := c.Status(ctx); err != nil {
		t.Error(err)
	}
	if err := c.Del(ctx, req); err != nil {
		t.Error(err)
	}
	expectCode(c.Check(ctx, req), endpoint.CodeUnknownContainer, "c")
	if _, err := c.Add(ctx, req); err != nil {
		t.Error(err)
	}
	if err := c.GC(ctx, "", []endpoint.Key{req.Key()}); err != nil || len(a.List()) != 1 {
		t.Errorf("GC removed a valid endpoint (%v)", err)
	}
	if err := c.GC(ctx, "", nil); err != nil || len(a.List()) != 0 {
		t.Errorf("GC left an endpoint (%v)", err)
	}
	if err := a.ipam.SetCIDRs(nil); err != nil {
		t.Fatal(err)
	}
	expectCode(c.Status(ctx), endpoint.CodeNotAvailable, "no pod CIDR")
}

// promise is a context of somebody who names a time and waits longer.
type promise struct {
	context.Context
	until time.Time
}

func (p promise) Deadline() (time.Time, bool) { return p.until, true }

func TestTheAgentGivesUpWithTheClient(t *testing.T) {
	a := newAgent(t)
	c := cniapi.NewClient(a.socket)
	req := request(t)
	var waited atomic.Bool
	a.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call == "up" {
			waited.Store(true)
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}
	// Where an interface takes long to be made, the time is up before policy is
	// waited for: then it is too short for what is to be seen.
	var err error
	for timeout := 250 * time.Millisecond; !waited.Load() && timeout < 2*time.Minute; timeout *= 2 {
		_, err = c.Add(promise{t.Context(), time.Now().Add(timeout)}, req)
	}
	var e *endpoint.Error
	if !errors.As(err, &e) || e.Code != endpoint.CodeTryAgain || !strings.Contains(e.Error(), "policy") {
		t.Errorf("the reason is lost: %v", err)
	}
	if eps := a.List(); len(eps) > 0 {
		t.Errorf("endpoints: %v", eps)
	}
}

func TestMalformedRequests(t *testing.T) {
	a := newAgent(t)
	for name, c := range map[string]struct{ request, status, body string }{
		"no JSON":       {"POST /v1/cni/add HTTP/1.0\r\nContent-Length: 1\r\n\r\n{", "400", `"code":6`},
		"too large":     {"POST /v1/cni/add HTTP/1.0\r\nContent-Length: 1048577\r\n\r\n" + strings.Repeat(" ", 1<<20+1), "400", "too large: 1048576"},
		"wrong method":  {"GET /v1/cni/add HTTP/1.0\r\n\r\n", "405", ""},
		"wrong address": {"POST /v1/cni/del HTTP/1.0\r\nContent-Length: 20\r\n\r\n" + `{"addrs":["nowhere"]}`, "400", "code"},
		"GC without a list": {
			"POST /v1/cni/gc HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", "400", "valid",
		},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("unix", a.socket)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write([]byte(c.request)); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var body strings.Builder
			if err := resp.Write(&body); err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(resp.Status, c.status) || !strings.Contains(body.String(), c.body) {
				t.Errorf("answer %s", body.String())
			}
		})
	}
}

func TestUnreachable(t *testing.T) {
	dir := t.TempDir()
	c := cniapi.NewClient(filepath.Join(dir, "none.sock"))
	if err := c.Del(t.Context(), endpoint.Request{}); !errors.Is(err, cniapi.ErrUnreachable) || !strings.Contains(err.Error(), "none.sock") {
		t.Errorf("error: %v", err)
	}
	// One that ends before it answers.
	path := filepath.Join(dir, "dying.sock")
	l, err := cniapi.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	if err := cniapi.NewClient(path).Del(t.Context(), endpoint.Request{}); !errors.Is(err, cniapi.ErrUnreachable) {
		t.Errorf("error: %v", err)
	}
}

// A socket's file that is removed, with its folder or replaced by another
// one's, comes back, and the server goes on.
func TestSocketComesBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "agent.sock")
	l, err := cniapi.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) })}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	c := cniapi.NewClient(path)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.Status(t.Context()))
	if again, err := l.Restore(); again || err != nil {
		t.Errorf("nothing has gone: %v, %v", again, err)
	}
	dead := func() {
		stale, err := net.Listen("unix", path)
		must(err)
		stale.(*net.UnixListener).SetUnlinkOnClose(false)
		must(stale.Close())
	}
	for name, harm := range map[string]func(){
		"file":         func() { must(os.Remove(path)) },
		"folder":       func() { must(os.RemoveAll(filepath.Dir(path))) },
		"a dead one's": func() { must(os.Remove(path)); dead() },
	} {
		harm()
		if err := c.Status(t.Context()); !errors.Is(err, cniapi.ErrUnreachable) {
			t.Errorf("%s: %v", name, err)
		}
		if again, err := l.Restore(); !again || err != nil {
			t.Errorf("%s: %v, %v", name, again, err)
		}
		must(c.Status(t.Context()))
	}
	must(os.Remove(path))
	must(os.WriteFile(path, nil, 0o600))
	if again, err := l.Restore(); again || err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file in the way: %v, %v", again, err)
	}
	must(os.Remove(path))
	rival, err := cniapi.Listen(path)
	must(err)
	if again, err := l.Restore(); again || err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("another's socket: %v, %v", again, err)
	}
	must(server.Close())
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("the server ended with %v", err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("closing took the socket of another: %v", err)
	}
	must(rival.Close())
	if again, err := l.Restore(); again || err != nil {
		t.Errorf("after Close: %v, %v", again, err)
	}
}

// What a deletion does not need cannot stand in its way, and is not sent.
func TestDelIsSmall(t *testing.T) {
	a := newAgent(t)
	c := cniapi.NewClient(a.socket)
	req := request(t)
	if _, err := c.Add(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	huge := req
	huge.PortMappings = make([]endpoint.PortMapping, 100_000)
	huge.Pod = strings.Repeat("x", 2<<20)
	if err := c.Del(t.Context(), huge); err != nil || len(a.List()) > 0 {
		t.Errorf("%v, endpoints %v", err, a.List())
	}
	var e *endpoint.Error
	if _, err := c.Add(t.Context(), huge); !errors.As(err, &e) || e.Code != endpoint.CodeDecode || !strings.Contains(err.Error(), "too large") {
		t.Errorf("ADD: %v", err)
	}
}

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "agent.sock")
	l, err := cniapi.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v (%v)", st.Mode(), err)
	}
	if _, err := cniapi.Listen(path); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a live socket was taken over: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("the socket is left after Close")
	}
	// A socket whose process died is replaced; its file stays behind.
	stale, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = cniapi.Listen(path); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := cniapi.Listen(path); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file was replaced: %v", err)
	}
	if _, err := cniapi.Listen("/tmp/" + strings.Repeat("x", 120)); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("error: %v", err)
	}
}
