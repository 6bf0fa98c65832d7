package agent

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"

	"golang.org/x/sync/errgroup"
)

// pprofHandler answers /debug/pprof as every Go process does: profiles of the
// agent's processor time and memory, goroutines, traces.
func pprofHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	return mux
}

// servePprof serves profiles until ctx ends; addr empty = not.
func servePprof(ctx context.Context, g *errgroup.Group, addr string) error {
	if addr == "" {
		return nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("listen for profiles: %w; choose another --pprof-bind-address, or none", err)
	}
	// Without a timeout: a profile takes as long as its reader asks for.
	serve(ctx, g, &http.Server{Handler: pprofHandler(), ReadHeaderTimeout: shutdownTimeout}, l)
	return nil
}
