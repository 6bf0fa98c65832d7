package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"github.com/podweir/podweir/test/cluster"
)

// pprofAddr is where the agent serves profiles, in its own namespace.
const pprofAddr = "127.0.0.1:6060"

// startSeconds is how long the profile of a start lasts.
const startSeconds = 3

func (b *bench) profiled() bool {
	_, ok := b.sub.(*agent)
	return ok && b.o.profile != ""
}

// profileStart profiles the first seconds of an agent that was just started;
// the function it returns waits for the end.
func (b *bench) profileStart(ctx context.Context, p *cluster.Process) (wait func() error) {
	if !b.profiled() {
		return func() error { return nil }
	}
	done := make(chan error, 1)
	go func() {
		err := until(ctx, p, look, "the agent serves profiles", func() (bool, error) {
			c, err := b.dialPprof(ctx)
			if err != nil {
				return false, nil
			}
			return true, c.Close()
		})
		if err == nil {
			err = b.profile(ctx, fmt.Sprintf("profile?seconds=%d", startSeconds), "start")
		}
		done <- err
	}()
	return func() error { return <-done }
}

// profileHeap writes what the agent's heap holds after a collection.
func (b *bench) profileHeap(ctx context.Context, when string) error {
	if !b.profiled() {
		return nil
	}
	return b.profile(ctx, "heap?gc=1", when+"-heap")
}

func (b *bench) dialPprof(ctx context.Context) (c net.Conn, err error) {
	err = b.node.Do(func() error {
		var d net.Dialer
		c, err = d.DialContext(ctx, "tcp", pprofAddr)
		return err
	})
	return c, err
}

func (b *bench) profile(ctx context.Context, what, name string) error {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return b.dialPprof(ctx) }}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+pprofAddr+"/debug/pprof/"+what, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return fmt.Errorf("profile %s: %w", what, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("profile %s: %s", what, resp.Status)
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("profile %s: %w", what, err)
	}
	return os.WriteFile(filepath.Join(b.o.profile, b.size.Name+"-"+name+".pprof"), data, 0o644)
}
