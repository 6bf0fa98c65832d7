package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// subject is who programs the services of a node.
type subject interface {
	// start starts its process on the node.
	start() (*cluster.Process, error)
	// settled waits until it has, by its own account, everything in force; the
	// packets have been asked before.
	settled(ctx context.Context, p *cluster.Process) error
	// ready says since when it is, after a start at a time.
	ready(ctx context.Context, p *cluster.Process, start time.Time) (time.Time, error)
	// led waits until it has, by its own account, brought a change into force
	// that was made at a time, and says when: a service leads to an address.
	led(ctx context.Context, p *cluster.Process, service int, ip netip.Addr, since time.Time) (time.Time, error)
	// check counts what is in force, as far as that can be looked up.
	check() (entries, error)
	metrics(ctx context.Context) (string, error)
	mapBytes() (map[string]uint64, error)
	// stop ends its process and leaves what is in force.
	stop(ctx context.Context) error
	log() string
	close() error
}

// The subjects' names.
const (
	podweir  = "podweir"
	iptables = "kube-proxy-iptables"
	nftables = "kube-proxy-nftables"
)

func subjectNames() []string { return []string{podweir, iptables, nftables} }

// agent is podweir's.
type agent struct {
	size size
	node *cluster.Node
	maps *maps.Set
}

func (a *agent) start() (*cluster.Process, error) { return a.node.SpawnAgent() }

func (a *agent) settled(ctx context.Context, p *cluster.Process) error {
	if a.maps == nil {
		err := until(ctx, p, time.Millisecond, "maps are pinned", func() (bool, error) {
			set, err := maps.OpenPinned(pinned(a.node), true)
			if errors.Is(err, os.ErrNotExist) {
				return false, nil
			}
			if err == nil {
				a.maps = &set
			}
			return err == nil, err
		})
		if err != nil {
			return err
		}
	}
	// Every frontend leads to all its backends, which are written before it.
	i := 0
	return until(ctx, p, time.Millisecond, "all frontends are in the map", func() (bool, error) {
		for ; i < a.size.Services; i++ {
			for _, k := range a.size.frontends(i) {
				v, ok, err := a.maps.Services.Get(k)
				if !ok || err != nil || v.Count != uint32(a.size.Endpoints) {
					return false, err
				}
			}
		}
		return true, nil
	})
}

func (a *agent) ready(ctx context.Context, p *cluster.Process, _ time.Time) (at time.Time, err error) {
	err = until(ctx, p, time.Millisecond, "the agent is ready", func() (bool, error) {
		code, _, err := a.node.AgentGet(ctx, "/readyz")
		return err == nil && code == http.StatusOK, nil
	})
	return time.Now(), err
}

func (a *agent) led(ctx context.Context, p *cluster.Process, service int, ip netip.Addr, _ time.Time) (time.Time, error) {
	err := until(ctx, p, look, "a change", func() (bool, error) { return a.leads(service, ip) })
	return time.Now(), err
}

// leads tells whether all frontends of a service lead to a set with ip, which
// sorts last in it.
func (a *agent) leads(service int, ip netip.Addr) (bool, error) {
	for _, k := range a.size.frontends(service) {
		v, ok, err := a.maps.Services.Get(k)
		if !ok || err != nil {
			return false, err
		}
		for set, n := range map[uint32]uint32{v.Set: v.Count, v.ExtSet: v.ExtCount} {
			last, ok, err := a.maps.Backends.Get(maps.BackendKey{Set: set, Slot: n - 1})
			if !ok || err != nil || maps.FromAddr(last.Addr) != ip {
				return false, err
			}
		}
	}
	return true, nil
}

func (a *agent) check() (entries, error) {
	e := entries{}
	services, err := a.maps.Services.Dump()
	if err != nil {
		return e, err
	}
	sets := map[uint32]uint32{}
	for _, v := range services {
		if v.Flags&maps.ServiceAddrOwned != 0 {
			continue
		}
		e.Frontends++
		sets[v.Set], sets[v.ExtSet] = v.Count, v.ExtCount
	}
	var want uint32
	for set, n := range sets {
		for slot := range n {
			if _, ok, err := a.maps.Backends.Get(maps.BackendKey{Set: set, Slot: slot}); !ok || err != nil {
				return e, fmt.Errorf("set %d of %d backends: slot %d is missing: %w", set, n, slot, err)
			}
		}
		want += n
	}
	e.Backends = int(want)
	states, err := a.maps.BackendStates.Dump()
	if err != nil {
		return e, err
	}
	e.States = len(states)
	chunks, err := a.maps.Maglev.Dump()
	if err != nil {
		return e, err
	}
	e.Maglev = len(chunks)
	all := a.size.Services * a.size.Endpoints
	if e.Frontends != a.size.Services*len(a.size.frontends(0)) || e.Backends != all || e.States < all {
		return e, fmt.Errorf("not everything is in the maps: %+v", e)
	}
	return e, nil
}

// tidy waits until the sets that changes replaced are gone: they linger for a
// second.
func (a *agent) tidy(ctx context.Context, p *cluster.Process) error {
	return until(ctx, p, 10*time.Millisecond, "replaced sets are gone", func() (bool, error) {
		n := 0
		err := a.maps.Backends.Each(func(maps.BackendKey, maps.Backend) error { n++; return nil })
		return n == a.size.Services*a.size.Endpoints, err
	})
}

func (a *agent) metrics(ctx context.Context) (string, error) {
	_, body, err := a.node.AgentGet(ctx, "/metrics")
	return body, err
}

func pinned(n *cluster.Node) string { return filepath.Join(n.BPFFS(), "maps") }

func (a *agent) mapBytes() (map[string]uint64, error) { return mapMemory(pinned(a.node)) }
func (a *agent) stop(ctx context.Context) error       { return a.node.KillAgent(ctx) }
func (a *agent) log() string                          { return a.node.LogTail() }

func (a *agent) close() error {
	if a.maps == nil {
		return nil
	}
	return a.maps.Close()
}

// proxy is kube-proxy in one of its modes.
type proxy struct {
	node             *cluster.Node
	bin, mode, kconf string
	tools            string // folder that is searched first for what it calls
	p                *cluster.Process
}

// newProxy finds the programs that kube-proxy calls by names which the system
// may have given to others, and links them into a folder.
func newProxy(o options, n *cluster.Node, mode, kubeconfig, tools string) (*proxy, error) {
	x := &proxy{node: n, bin: o.kubeProxy, mode: mode, kconf: kubeconfig, tools: tools}
	for _, ip := range []string{"iptables", "ip6tables"} {
		for _, what := range []string{"", "-save", "-restore"} {
			path, err := exec.LookPath(ip + "-" + o.iptables + what)
			if err != nil {
				return nil, fmt.Errorf("kube-proxy's tools: %w; install the package iptables", err)
			}
			if err := os.Symlink(path, filepath.Join(tools, ip+what)); err != nil {
				return nil, err
			}
		}
	}
	return x, nil
}

// start leaves everything at its default but for the machine's limit of
// connections, which belongs to no namespace.
func (x *proxy) start() (p *cluster.Process, err error) {
	x.p, err = x.node.Start(context.Background(), "/usr/bin/env", "PATH="+x.tools+":"+os.Getenv("PATH"), x.bin, "--proxy-mode", x.mode, "--kubeconfig", x.kconf,
		"--hostname-override", x.node.NodeName, "--cluster-cidr", endpointCIDR, "--conntrack-max-per-core", "0")
	return x.p, err
}

func (x *proxy) settled(context.Context, *cluster.Process) error { return nil }

func (x *proxy) ready(ctx context.Context, p *cluster.Process, start time.Time) (time.Time, error) {
	return x.synced(ctx, p, start, false)
}

func (x *proxy) led(ctx context.Context, p *cluster.Process, _ int, _ netip.Addr, since time.Time) (time.Time, error) {
	return x.synced(ctx, p, since, true)
}

// synced waits for the end of a sync that was asked for, or just ended, after
// a time.
func (x *proxy) synced(ctx context.Context, p *cluster.Process, since time.Time, asked bool) (at time.Time, err error) {
	after := float64(since.UnixNano()) / 1e9
	err = until(ctx, p, 20*time.Millisecond, "kube-proxy has synced", func() (bool, error) {
		text, err := x.metrics(ctx)
		if err != nil {
			return false, nil // not yet listening
		}
		queued := metric(text, `kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}`)
		last := metric(text, `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"}`)
		at = time.Unix(0, int64(last*1e9))
		return last > after && (!asked || queued > after && last > queued), nil
	})
	return at, err
}

func (x *proxy) check() (entries, error) { return entries{}, nil }

func (x *proxy) metrics(ctx context.Context) (string, error) {
	return nodeGet(ctx, x.node, "127.0.0.1:10249", "/metrics")
}

func (x *proxy) mapBytes() (map[string]uint64, error) { return nil, nil }

func (x *proxy) stop(ctx context.Context) error {
	if x.p == nil {
		return nil
	}
	defer func() { x.p = nil }()
	return x.p.Kill(ctx)
}

func (x *proxy) log() string {
	if x.p == nil {
		return ""
	}
	text := x.p.Stderr()
	return text[max(0, len(text)-4096):]
}

func (x *proxy) close() error { return nil }

// nodeGet asks what listens in a node's namespace.
func nodeGet(ctx context.Context, n *cluster.Node, addr, path string) (string, error) {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
		err = n.Do(func() error {
			var d net.Dialer
			c, err = d.DialContext(ctx, "tcp", addr)
			return err
		})
		return c, err
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", path, resp.Status)
	}
	return string(body), err
}

// metric is a value of the text format; 0 if it is not there.
func metric(text, name string) float64 {
	in := bufio.NewScanner(strings.NewReader(text))
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		if rest, ok := strings.CutPrefix(in.Text(), name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err == nil {
				return v
			}
		}
	}
	return 0
}
