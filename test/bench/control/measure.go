package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/test/cluster"
)

const (
	// bringUp is how long one step may take on a machine that is busy.
	bringUp = 5 * time.Minute
	// look is the pause between two looks at the maps.
	look = 50 * time.Microsecond
	// arrive is how long a SYN has to cross the two nodes.
	arrive = 2 * time.Millisecond
	// checked is how many services are asked after a start.
	checked = 200
	// chancy is from how many endpoints on a change is not waited for by SYNs,
	// each of which meets the new one by chance.
	chancy = 32
)

// nodes are the one that is measured and the one that stands for all others,
// whose pods are all the endpoints.
func nodes() []cluster.NodeConfig {
	p := netip.MustParsePrefix
	return []cluster.NodeConfig{
		{Name: selfNode, Addrs: []netip.Prefix{p("172.31.0.2/24")}, PodCIDRs: []netip.Prefix{p("10.127.80.0/24")}},
		{Name: "node-b", Addrs: []netip.Prefix{p("172.31.0.3/24")}, PodCIDRs: []netip.Prefix{p(endpointCIDR)}},
	}
}

// bench is one node of its own, and what programs it.
type bench struct {
	o     options
	size  size
	api   *fakeapi.Server
	c     *cluster.Cluster
	node  *cluster.Node
	sub   subject
	probe *prober
	stop  func() error // serving the API
	dir   string
	spare *int // addresses that changes have used
}

// measure measures a size with all subjects in turn.
func measure(ctx context.Context, o options, s size, rows []*row) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	api := fakeapi.Start(l)
	defer api.Close()
	api.SetProtobuf(o.format == "protobuf")
	s.fill(api, nodes())
	if err := api.Encode(); err != nil {
		return err
	}
	spare := 0
	for range o.repeats {
		for _, r := range rows {
			sample, err := once(ctx, o, s, api, r.Subject, &spare)
			if err != nil {
				return fmt.Errorf("%s: %w", r.Subject, err)
			}
			r.Samples = append(r.Samples, sample)
		}
	}
	return nil
}

// once makes a node and measures everything on it, from nothing.
func once(ctx context.Context, o options, s size, api *fakeapi.Server, who string, spare *int) (_ sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, bringUp)
	defer cancel()
	b, err := newBench(ctx, o, s, api, who)
	if err != nil {
		return sample{}, err
	}
	b.spare = spare
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, b.sub.log())
		}
		err = errors.Join(err, b.close())
	}()
	return b.run(ctx)
}

func newBench(ctx context.Context, o options, s size, api *fakeapi.Server, who string) (_ *bench, err error) {
	b := &bench{o: o, size: s, api: api}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.dir, err = os.MkdirTemp("", "pw-bench-control-"); err != nil {
		return nil, err
	}
	kubeconfig := filepath.Join(b.dir, "kubeconfig")
	args := []string{"--service-node-port-range", fmt.Sprintf("%d-%d", firstNodePort, lastNodePort)}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o755); err != nil {
			return nil, err
		}
		args = append(args, "--pprof-bind-address", pprofAddr)
	}
	b.c, err = cluster.New(ctx, cluster.Config{
		Label: "bench-control " + s.Name, Nodes: nodes(), Wire: true, LogLevel: "warn", BinDir: o.bin, Kubeconfig: kubeconfig,
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix(serviceCIDR)}, AgentArgs: args,
	})
	if err != nil {
		return nil, err
	}
	b.node = b.c.Node(selfNode)
	// The server is reached in the node's own namespace.
	err = b.node.Do(func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		b.stop = api.ServeOn(l)
		return os.WriteFile(kubeconfig, fmt.Appendf(nil, kubeconfigFormat, "http://"+l.Addr().String()), 0o600)
	})
	if err != nil {
		return nil, err
	}
	switch who {
	case podweir:
		b.sub = &agent{size: s, node: b.node}
	default:
		x, err := newProxy(o, b.node, strings.TrimPrefix(who, "kube-proxy-"), kubeconfig, b.dir)
		if err != nil {
			return nil, err
		}
		b.sub = x
		// What another plugin would have done.
		if err := routes(b.node, b.c.Nodes[1].Config.Addrs[0].Addr(), serviceCIDR, endpointCIDR); err != nil {
			return nil, err
		}
	}
	b.probe, err = newProber(b.node, b.c.Nodes[1], b.node.Config.Addrs[0].Addr())
	return b, err
}

func (b *bench) close() error {
	var err error
	if b.probe != nil {
		err = errors.Join(err, b.probe.close())
	}
	if b.sub != nil {
		err = errors.Join(err, b.sub.stop(context.Background()), b.sub.close())
	}
	if b.stop != nil {
		err = errors.Join(err, b.stop())
	}
	if b.c != nil {
		err = errors.Join(err, b.c.Close())
	}
	return errors.Join(err, os.RemoveAll(b.dir))
}

// routes leads ranges to a node.
func routes(n *cluster.Node, via netip.Addr, ranges ...string) error {
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	for _, r := range ranges {
		_, dst, err := net.ParseCIDR(r)
		if err == nil {
			err = h.RouteAdd(&netlink.Route{Dst: dst, Gw: via.AsSlice()})
		}
		if err != nil {
			return fmt.Errorf("route to %s on %s: %w", r, n.NodeName, err)
		}
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

func (b *bench) run(ctx context.Context) (s sample, err error) {
	start := time.Now()
	p, err := b.sub.start()
	if err != nil {
		return s, err
	}
	profiled := b.profileStart(ctx, p)
	last := b.size.Services - 1
	if err := b.awaitPacket(ctx, p, last, time.Millisecond, func(to netip.AddrPort) bool { return b.size.leadsTo(last, to) }); err != nil {
		return s, err
	}
	if err := b.sub.settled(ctx, p); err != nil {
		return s, err
	}
	s.Cold = ms(time.Since(start))
	if _, err := b.sub.ready(ctx, p, start); err != nil {
		return s, err
	}
	if s.ColdCPU, err = cpu(p.PID); err != nil {
		return s, err
	}
	if s.Entries, err = b.sub.check(); err != nil {
		return s, err
	}
	if err := b.checkPackets(ctx, p); err != nil {
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
	if err := b.burst(ctx, p, &s); err != nil {
		return s, err
	}
	if s.After, err = b.memory(ctx, p.PID); err != nil {
		return s, err
	}
	if err := b.profileHeap(ctx, "changed"); err != nil {
		return s, err
	}
	if s.MapBytes, err = b.sub.mapBytes(); err != nil {
		return s, err
	}
	if err := b.sub.stop(ctx); err != nil {
		return s, err
	}
	return s, b.restart(ctx, &s)
}

func (b *bench) restart(ctx context.Context, s *sample) error {
	start := time.Now()
	p, err := b.sub.start()
	if err != nil {
		return err
	}
	at, err := b.sub.ready(ctx, p, start)
	if err != nil {
		return err
	}
	s.Restart = ms(at.Sub(start))
	if s.RestartCPU, err = cpu(p.PID); err != nil {
		return err
	}
	if s.Restarted, err = b.memory(ctx, p.PID); err != nil {
		return err
	}
	if _, err = b.sub.check(); err != nil {
		return err
	}
	return b.checkPackets(ctx, p)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// until looks until ok, an error, or the end of the process.
func until(ctx context.Context, p *cluster.Process, pause time.Duration, what string, ok func() (bool, error)) error {
	for {
		if done, err := ok(); done || err != nil {
			return err
		}
		select {
		case <-p.Done():
			return fmt.Errorf("%s: the process has ended", what)
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// awaitPacket sends SYNs to a service until one arrives where it should. The
// pauses between them are four times as long as a SYN takes, so that they
// leave the processor to those who are measured.
func (b *bench) awaitPacket(ctx context.Context, p *cluster.Process, service int, pause time.Duration, ok func(netip.AddrPort) bool) error {
	vip := netip.AddrPortFrom(clusterIP(service), servicePort)
	for {
		start := time.Now()
		to, err := b.probe.ask(vip, arrive)
		if err != nil {
			return err
		}
		if ok(to) {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("a packet to service %d: the process has ended", service)
		case <-ctx.Done():
			return fmt.Errorf("a packet to service %d: the last one went to %v: %w", service, to, ctx.Err())
		case <-time.After(max(pause, 4*time.Since(start))):
		}
	}
}

// checkPackets asks services all over the range.
func (b *bench) checkPackets(ctx context.Context, p *cluster.Process) error {
	n := min(checked, b.size.Services)
	for k := range n {
		i := k * b.size.Services / n
		wrong := 0
		err := b.awaitPacket(ctx, p, i, time.Millisecond, func(to netip.AddrPort) bool {
			if to.IsValid() && !b.size.leadsTo(i, to) {
				wrong++
			}
			return b.size.leadsTo(i, to) || wrong > 0
		})
		if err != nil {
			return err
		}
		if wrong > 0 {
			return fmt.Errorf("service %d is said to be in force, and a packet to it is led elsewhere", i)
		}
	}
	return nil
}

// at is the n-th service to change: a prime's multiples reach all of them in
// no order.
func (b *bench) at(n int) int { return n * 7919 % b.size.Services }

// change gives a service another endpoint in the place of its first one.
func (b *bench) change(i int) (netip.Addr, fakeapi.Object) {
	*b.spare++
	ip := spareIP(*b.spare)
	return ip, b.size.slices(i, ip)[0]
}

// changes measures changes of one endpoint, one after the other.
func (b *bench) changes(ctx context.Context, p *cluster.Process, s *sample) error {
	var spent float64
	for n := range b.o.changes {
		select {
		case <-time.After(b.o.pause):
		case <-ctx.Done():
			return ctx.Err()
		}
		before, err := cpu(p.PID)
		if err != nil {
			return err
		}
		i := b.at(*b.spare + n)
		ip, slice := b.change(i)
		start := time.Now()
		b.api.Put(slice)
		at := start
		if b.size.Endpoints >= chancy {
			at, err = b.sub.led(ctx, p, i, ip, start)
		} else {
			err = b.awaitPacket(ctx, p, i, look, func(to netip.AddrPort) bool { return to.Addr() == ip })
			at = time.Now()
		}
		if err != nil {
			return fmt.Errorf("a change of service %d: %w", i, err)
		}
		s.Changes = append(s.Changes, ms(at.Sub(start)))
		after, err := cpu(p.PID)
		if err != nil {
			return err
		}
		spent += after - before
	}
	s.ChangeCPU = spent / float64(max(1, b.o.changes))
	slices.Sort(s.Changes)
	return nil
}

// burst measures changes that come at once, which only the agent's maps tell
// the end of.
func (b *bench) burst(ctx context.Context, p *cluster.Process, s *sample) error {
	a, ok := b.sub.(*agent)
	if !ok {
		return nil
	}
	last := map[int]netip.Addr{}
	var objs []fakeapi.Object
	for n := range b.o.burst {
		i := b.at(n)
		ip, slice := b.change(i)
		last[i] = ip
		objs = append(objs, slice)
	}
	start := time.Now()
	b.api.Put(objs...)
	for i, ip := range last {
		if err := until(ctx, p, time.Millisecond, "a change of many", func() (bool, error) { return a.leads(i, ip) }); err != nil {
			return err
		}
	}
	s.Burst = ms(time.Since(start))
	return a.tidy(ctx, p)
}
