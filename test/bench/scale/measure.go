package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

const (
	// bringUp is how long one step may take on a machine that is busy.
	bringUp = 3 * time.Minute
	// pace is the pause between two changes of which each is measured alone.
	pace = 10 * time.Millisecond
	// look is the pause between two looks at the maps.
	look = 50 * time.Microsecond
)

// bench is one node whose agent watches a fake API server.
type bench struct {
	o     options
	size  size
	c     *cluster.Cluster
	node  *cluster.Node
	api   *fakeapi.Server
	maps  maps.Set
	spare int // addresses that changes have used
}

// measure measures one size, with a cluster of its own.
func measure(ctx context.Context, o options, s size, r *row) (err error) {
	kubeconfig, err := os.CreateTemp("", "pw-bench-scale-*.kubeconfig")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kubeconfig.Close(), os.Remove(kubeconfig.Name())) }()
	args := []string{"--service-node-port-range", fmt.Sprintf("%d-%d", firstNodePort, lastNodePort)}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o755); err != nil {
			return err
		}
		args = append(args, "--pprof-bind-address", pprofAddr)
	}
	c, err := cluster.New(ctx, cluster.Config{
		Label: "bench-scale " + s.Name, Wire: true, LogLevel: "warn", BinDir: o.bin, Kubeconfig: kubeconfig.Name(),
		AgentArgs: args,
	})
	if err != nil {
		return err
	}
	b := &bench{o: o, size: s, c: c, node: c.Node(selfNode)}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, b.node.LogTail())
		}
		err = errors.Join(err, c.Close())
	}()
	// The server is reached in the agent's own namespace.
	err = b.node.Do(func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			b.api = fakeapi.Start(l)
		}
		return err
	})
	if err != nil {
		return err
	}
	defer b.api.Close()
	b.api.SetProtobuf(o.format == "protobuf")
	if _, err = fmt.Fprintf(kubeconfig, kubeconfigFormat, b.api.URL); err != nil {
		return err
	}
	s.fill(b.api, c.Nodes[0].Object(), c.Nodes[1].Object())
	if err := b.api.Encode(); err != nil {
		return err
	}
	for range o.repeats {
		sample, err := b.repeat(ctx)
		if err != nil {
			return err
		}
		r.Samples = append(r.Samples, sample)
	}
	return nil
}

const kubeconfigFormat = `apiVersion: v1
kind: Config
clusters: [{name: bench, cluster: {server: "%s"}}]
users: [{name: bench}]
contexts: [{name: bench, context: {cluster: bench, user: bench}}]
current-context: bench
`

// repeat measures everything once, from a node without anything of ours.
func (b *bench) repeat(ctx context.Context) (s sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, bringUp)
	defer cancel()
	start := time.Now()
	p, err := b.node.SpawnAgent()
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, b.node.KillAgent(context.WithoutCancel(ctx)), b.cleanup()) }()
	profiled := b.profileStart(ctx, p)
	if err := b.openMaps(ctx, p); err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, b.maps.Close()) }()
	if err := b.awaitAll(ctx, p); err != nil {
		return s, err
	}
	s.Cold = ms(time.Since(start))
	if err := b.awaitReady(ctx, p); err != nil {
		return s, err
	}
	if s.ColdCPU, err = cpu(p.PID); err != nil {
		return s, err
	}
	if s.Entries, err = b.check(); err != nil {
		return s, err
	}
	if s.Start, err = b.memory(ctx, p.PID); err != nil {
		return s, err
	}
	if err := errors.Join(profiled(), b.profileHeap(ctx, "start")); err != nil {
		return s, err
	}
	if err := b.changes(ctx, p, &s); err != nil {
		return s, err
	}
	if s.After, err = b.memory(ctx, p.PID); err != nil {
		return s, err
	}
	if err := b.profileHeap(ctx, "changed"); err != nil {
		return s, err
	}
	if s.MapBytes, err = mapMemory(b.pinned()); err != nil {
		return s, err
	}
	if err := b.node.KillAgent(ctx); err != nil {
		return s, err
	}
	return s, b.restart(ctx, &s)
}

func (b *bench) restart(ctx context.Context, s *sample) error {
	start := time.Now()
	p, err := b.node.SpawnAgent()
	if err != nil {
		return err
	}
	if err := b.awaitReady(ctx, p); err != nil {
		return err
	}
	s.Restart = ms(time.Since(start))
	if s.RestartCPU, err = cpu(p.PID); err != nil {
		return err
	}
	if s.Restarted, err = b.memory(ctx, p.PID); err != nil {
		return err
	}
	_, err = b.check()
	return err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (b *bench) pinned() string { return filepath.Join(b.node.BPFFS(), "maps") }

// cleanup removes everything that the agent made, so that the next start is a
// cold one.
func (b *bench) cleanup() error {
	ctx, cancel := context.WithTimeout(context.Background(), bringUp)
	defer cancel()
	_, err := b.node.Exec(ctx, "podweir-agent", "cleanup", "--bpffs", b.node.BPFFS(),
		"--state-dir", b.node.StateDir(), "--socket", b.node.Socket())
	return err
}

// until looks until ok, an error, or the end of the agent.
func until(ctx context.Context, p *cluster.Process, pause time.Duration, what string, ok func() (bool, error)) error {
	for {
		if done, err := ok(); done || err != nil {
			return err
		}
		select {
		case <-p.Done():
			return fmt.Errorf("%s: the agent has ended", what)
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// openMaps opens the maps as soon as the agent has pinned all of them.
func (b *bench) openMaps(ctx context.Context, p *cluster.Process) error {
	return until(ctx, p, time.Millisecond, "maps are pinned", func() (bool, error) {
		set, err := maps.OpenPinned(b.pinned(), true)
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		b.maps = set
		return err == nil, err
	})
}

// awaitAll waits until every frontend leads to all its backends, which are
// written before it.
func (b *bench) awaitAll(ctx context.Context, p *cluster.Process) error {
	i := 0
	return until(ctx, p, time.Millisecond, "all frontends are in the map", func() (bool, error) {
		for ; i < b.size.Services; i++ {
			for _, k := range b.size.frontends(i) {
				v, ok, err := b.maps.Services.Get(k)
				if !ok || err != nil || v.Count != uint32(b.size.Endpoints) {
					return false, err
				}
			}
		}
		return true, nil
	})
}

func (b *bench) awaitReady(ctx context.Context, p *cluster.Process) error {
	return until(ctx, p, time.Millisecond, "the agent is ready", func() (bool, error) {
		code, _, err := b.node.AgentGet(ctx, "/readyz")
		return err == nil && code == http.StatusOK, nil
	})
}

// check counts what is in the maps.
func (b *bench) check() (entries, error) {
	e := entries{}
	services, err := b.maps.Services.Dump()
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
			if _, ok, err := b.maps.Backends.Get(maps.BackendKey{Set: set, Slot: slot}); !ok || err != nil {
				return e, fmt.Errorf("set %d of %d backends: slot %d is missing: %w", set, n, slot, err)
			}
		}
		want += n
	}
	e.Backends = int(want)
	states, err := b.maps.BackendStates.Dump()
	if err != nil {
		return e, err
	}
	e.States = len(states)
	chunks, err := b.maps.Maglev.Dump()
	if err != nil {
		return e, err
	}
	e.Maglev = len(chunks)
	all := b.size.Services * b.size.Endpoints
	if e.Frontends != b.size.Services*len(b.size.frontends(0)) || e.Backends != all || e.States < all {
		return e, fmt.Errorf("not everything is in the maps: %+v", e)
	}
	return e, nil
}

// change gives a service another endpoint in the place of its first one.
func (b *bench) change(i int) (netip.Addr, fakeapi.Object) {
	b.spare++
	ip := spareIP(b.spare)
	return ip, b.size.slices(i, ip)[0]
}

// leads tells whether all frontends of a service lead to a set with ip, which
// sorts last in it.
func (b *bench) leads(i int, ip netip.Addr) (bool, error) {
	for _, k := range b.size.frontends(i) {
		v, ok, err := b.maps.Services.Get(k)
		if !ok || err != nil {
			return false, err
		}
		for set, n := range map[uint32]uint32{v.Set: v.Count, v.ExtSet: v.ExtCount} {
			last, ok, err := b.maps.Backends.Get(maps.BackendKey{Set: set, Slot: n - 1})
			if !ok || err != nil || maps.FromAddr(last.Addr) != ip {
				return false, err
			}
		}
	}
	return true, nil
}

// changes measures single changes, then many that come at once.
func (b *bench) changes(ctx context.Context, p *cluster.Process, s *sample) error {
	before, err := cpu(p.PID)
	if err != nil {
		return err
	}
	// A prime's multiples reach all services in no order.
	at := func(n int) int { return n * 7919 % b.size.Services }
	for n := range b.o.changes {
		time.Sleep(pace)
		i := at(n)
		ip, slice := b.change(i)
		start := time.Now()
		b.api.Put(slice)
		err := until(ctx, p, look, "a change", func() (bool, error) { return b.leads(i, ip) })
		if err != nil {
			return err
		}
		s.Changes = append(s.Changes, ms(time.Since(start)))
	}
	after, err := cpu(p.PID)
	if err != nil {
		return err
	}
	s.ChangeCPU = (after - before) / float64(b.o.changes)
	slices.Sort(s.Changes)

	last := map[int]netip.Addr{}
	var objs []fakeapi.Object
	for n := range b.o.burst {
		i := at(n)
		ip, slice := b.change(i)
		last[i] = ip
		objs = append(objs, slice)
	}
	start := time.Now()
	b.api.Put(objs...)
	for i, ip := range last {
		if err := until(ctx, p, time.Millisecond, "a change of many", func() (bool, error) { return b.leads(i, ip) }); err != nil {
			return err
		}
	}
	s.Burst = ms(time.Since(start))
	// The sets that were replaced linger for a second.
	return until(ctx, p, 10*time.Millisecond, "replaced sets are gone", func() (bool, error) {
		n := 0
		err := b.maps.Backends.Each(func(maps.BackendKey, maps.Backend) error { n++; return nil })
		return n == b.size.Services*b.size.Endpoints, err
	})
}
