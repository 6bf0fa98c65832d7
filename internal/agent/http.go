package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/api"
)

// publicHandler answers on the TCP address: health and counters, nothing that
// names objects.
func (a *Agent) publicHandler(own prometheus.Collector) (*http.ServeMux, error) {
	reg := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{own, a.health, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), doTimeout)
		defer cancel()
		if err := a.do(ctx, func() {}); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if why := a.NotReady(); len(why) > 0 {
			http.Error(w, "not ready: "+strings.Join(why, "; "), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux, nil
}

// socketHandler adds what the command and the plugin ask for. info fills what
// only the process knows.
func (a *Agent) socketHandler(public *http.ServeMux, cni http.Handler, info func(*api.Status)) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", public)
	if cni != nil {
		mux.Handle("/v1/cni/", cni)
	}
	mux.HandleFunc("GET "+api.PathStatus, answer(func(ctx context.Context) (any, error) {
		s, err := a.Status(ctx)
		info(&s)
		return s, err
	}))
	mux.HandleFunc("GET "+api.PathPods, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		answer(func(context.Context) (any, error) { return a.Pods(q.Get("name"), q.Get("addr")) })(w, r)
	})
	mux.HandleFunc("GET "+api.PathAllPods, func(w http.ResponseWriter, _ *http.Request) {
		// A line at a time: there may be a hundred thousand.
		enc := json.NewEncoder(w)
		for p := range a.AllPods() {
			if enc.Encode(p) != nil {
				return // the reader has gone away
			}
		}
	})
	mux.HandleFunc("GET "+api.PathServices, answer(func(ctx context.Context) (any, error) { return a.Services(ctx) }))
	mux.HandleFunc("GET "+api.PathPolicy, answer(func(ctx context.Context) (any, error) { return a.Policy(ctx) }))
	mux.Handle("GET "+api.PathEvents, a.events)
	mux.HandleFunc("GET "+api.PathEndpoints, answer(func(context.Context) (any, error) { return a.EndpointList(), nil }))
	return mux
}

func answer(f func(context.Context) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), doTimeout)
		defer cancel()
		body, err := f(ctx)
		status := http.StatusOK
		if err != nil {
			body, status = api.Error{Message: err.Error()}, http.StatusServiceUnavailable
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(body) // the reader has gone away
	}
}

// socketInUse is an error if an agent answers on the socket.
func socketInUse(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is no socket; remove it or choose another --socket", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close()
		return fmt.Errorf("another agent answers on %s; stop it first", path)
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	return nil
}
