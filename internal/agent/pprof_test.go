package agent

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
)

func TestPprof(t *testing.T) {
	reserved, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := reserved.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	var g errgroup.Group
	err = servePprof(ctx, &g, addr)
	if err == nil || !strings.Contains(err.Error(), "--pprof-bind-address") {
		t.Errorf("an address in use: %v", err)
	}
	if err := reserved.Close(); err != nil {
		t.Fatal(err)
	}
	if err := servePprof(ctx, &g, addr); err != nil {
		t.Fatal(err)
	}
	r, err := http.Get("http://" + addr + "/debug/pprof/heap")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(r.Body)
	_ = r.Body.Close()
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("heap profile: %s, %v", r.Status, err)
	}
	if _, err := gzip.NewReader(bytes.NewReader(body)); err != nil {
		t.Errorf("the heap profile is none: %v", err)
	}
	http.DefaultClient.CloseIdleConnections()
	cancel()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// Profiles hold parts of the agent's memory: they are on no address but their
// own.
func TestPprofIsOff(t *testing.T) {
	b := newAgentBench(t)
	get := serveBench(t, b)
	if code, _ := get("/debug/pprof/heap"); code != http.StatusNotFound {
		t.Errorf("/debug/pprof/heap beside the metrics: %d", code)
	}
	var g errgroup.Group
	if err := servePprof(t.Context(), &g, ""); err != nil {
		t.Error(err)
	}
	if err := g.Wait(); err != nil { // with a server it would not return
		t.Error(err)
	}
}
