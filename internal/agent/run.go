package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/apiserver"
	"github.com/podweir/podweir/internal/cniapi"
	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/ipam"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/source"
	"github.com/podweir/podweir/internal/table"
	"github.com/podweir/podweir/internal/tunnel"
)

// Defaults of [Config].
const (
	DefaultSocket   = "/run/podweir/agent.sock"
	DefaultStateDir = "/var/lib/podweir"
	DefaultListen   = "127.0.0.1:9964"
	DefaultHealthz  = "0.0.0.0:10256" // kube-proxy's
	DefaultVNI      = 4096
	DefaultMark     = 0x1000
	DefaultEvents   = 100
)

// Config is what the process is told. Fields whose zero value is not explained
// are required.
type Config struct {
	NodeName      string
	Manifests     string     // a folder; empty = the API server
	Kubeconfig    string     // empty = the pod's own credentials
	Servers       []*url.URL // API servers, instead of the one of the credentials
	BPFFS         string
	StateDir      string
	Socket        string
	Cgroup        string         // whose sockets are translated; empty = all, none = nobody's
	Sysctls       string         // where /proc/sys can be written; empty = there
	CNIConfDir    string         // where the runtime looks for configurations; empty = none is written
	CNIConf       string         // file to write there, under its name; empty = the default
	CNIBinDir     string         // of plugins, for [Cleanup]; empty = left alone
	Listen        string         // empty = not on TCP
	HealthzBind   string         // for kube-proxy's /healthz and /livez; empty = not served
	MetricsBind   string         // for the metrics once more; empty = not
	PprofBind     string         // for profiles of the process; empty = not served
	ServiceCIDRs  []netip.Prefix // besides those of ServiceCIDR objects
	MTU           int            // of pods; 0 = from the node's device
	Mode          tunnel.Mode
	AcceptPlain   bool                 // take what other nodes' pods send without a header, whatever the mode
	NodePorts     service.PortRange    // where the API server takes NodePorts from
	NodePortAddrs tunnel.NodePortAddrs // on which they answer; zero = on all
	ExternalSNAT  bool                 // callers of external frontends under this node's
	ExternalDSR   bool                 // clients outside are answered by the backend's node
	Masquerade    Masquerade           // under which addresses and ports pods reach the world
	MaglevSize    uint32               // of every table, a prime; 0 = by the number of backends
	EventsPerSec  uint32               // about drops, per CPU; 0 = none
	Mark          uint32
	Clsact        bool // programs are filters, as on kernels without tcx
	Version       string
	Settled       func() // called when all objects have been applied once; nil = nobody is
	Log           *slog.Logger
}

// externalSource is the word of --external-source.
func (c *Config) externalSource() string {
	switch {
	case c.ExternalSNAT:
		return "snat"
	case c.ExternalDSR:
		return "dsr"
	}
	return "keep"
}

// restoreTimeout bounds how long endpoints of an earlier run may wait for
// their Pod objects before the plugin is served.
const restoreTimeout = 15 * time.Second

// shutdownTimeout bounds how long running requests may take when stopping.
const shutdownTimeout = 5 * time.Second

// sourceGrace is how long a source may take to end by itself.
const sourceGrace = time.Second

// runSource runs the source until ctx ends. A request under way, or the pause
// before the next try, is not waited for: nothing depends on it any more.
func runSource(ctx context.Context, src source.Source) error {
	done := make(chan error, 1)
	go func() { done <- src.Run(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	grace := time.NewTimer(sourceGrace)
	defer grace.Stop()
	select {
	case err := <-done:
		return err
	case <-grace.C:
		return nil
	}
}

// Run is the process: it returns when ctx ends or something vital fails.
// What it set up stays; traffic goes on.
func Run(ctx context.Context, cfg Config) (err error) {
	started := time.Now()
	log := cfg.Log
	listener, err := cniapi.Listen(cfg.Socket)
	if err != nil {
		return err
	}
	defer func() { _ = listener.Close() }() // removes the socket file; closed by the server as a rule

	// Before anything is made on the node.
	if err := loader.Prepare(cfg.BPFFS); err != nil {
		return err
	}
	cgroup, err := loader.FindCgroup(cfg.Cgroup)
	if err != nil {
		return fmt.Errorf("--cgroup: %w", err)
	}
	if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("create state folder: %w", err)
	}
	unlock, err := lockFolders(cfg.StateDir, cfg.BPFFS)
	if err != nil {
		return err
	}
	defer unlock()

	cni, err := newCNIConf(cfg)
	if err != nil {
		return err
	}
	if err := cni.withdraw(loader.Loaded(cfg.BPFFS), log); err != nil {
		return err
	}

	tables, err := table.New()
	if err != nil {
		return err
	}
	src, from, err := newSource(cfg, tables)
	if err != nil {
		return err
	}
	// The objects come in while the programs are loaded.
	g, ctx := errgroup.WithContext(ctx)
	early, cancel := context.WithCancel(ctx)
	running := false
	g.Go(func() error { return finish(early, "source", runSource(early, src)) })
	defer func() {
		cancel()
		if !running {
			err = errors.Join(err, g.Wait())
		}
	}()
	if err := servePprof(early, g, cfg.PprofBind); err != nil {
		return err
	}
	stack, err := node.New(cfg.StateDir, cfg.Sysctls, log)
	if err != nil {
		return err
	}
	defer stack.Close()
	overlay, _, err := stack.EnsureOverlay(node.Overlay{})
	if err != nil {
		return err
	}
	local, err := stack.LocalPorts()
	if err != nil {
		return err
	}
	ports, _, err := cfg.Masquerade.chosen(cfg.NodePorts, local) // the loop reports a shortage
	if err != nil {
		return err
	}
	dp, err := loader.Load(ctx, loader.Config{
		BPFFS: cfg.BPFFS, OverlayIfindex: overlay, VNI: DefaultVNI, Mark: cfg.Mark,
		NodePortMin: cfg.NodePorts.Min, NodePortMax: cfg.NodePorts.Max,
		EventsPerSec: cfg.EventsPerSec, NoEvents: cfg.EventsPerSec == 0,
		NoMasquerade4: cfg.Masquerade.Off4, NoMasquerade6: cfg.Masquerade.Off6, Plain: len(cfg.Masquerade.Except) > 0,
		SourcePorts: ports, SNAT: cfg.ExternalSNAT, DSR: cfg.ExternalDSR, ForceClsact: cfg.Clsact,
		Sysctls: cfg.Sysctls, Log: log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dp.Close()) }()
	if cgroup == "" && cfg.Cgroup == "" {
		log.Info("no cgroup2 is mounted: connections of the host's processes are translated on the way, not at the socket")
	}
	if err := dp.AttachSockets(ctx, cgroup); err != nil {
		// They are a shortcut. The loop tries again and lists the problem.
		log.Error("programs at sockets; the host's connections are translated on the way", "error", err)
	}
	timeouts, err := loader.LoadTimeouts()
	if err != nil {
		return err
	}
	alloc := new(ipam.Allocator)
	a, err := New(Options{
		NodeName: cfg.NodeName, ServiceCIDRs: cfg.ServiceCIDRs, MTU: cfg.MTU, VNI: DefaultVNI, Mode: cfg.Mode, AcceptPlain: cfg.AcceptPlain,
		ExternalSource: cfg.externalSource(), NoSockets: cgroup == "",
		NodePorts: cfg.NodePorts, NodePortAddrs: cfg.NodePortAddrs, MaglevSize: cfg.MaglevSize, Masquerade: cfg.Masquerade, Settled: cfg.Settled, Log: log,
	}, tables, dp, stack, alloc)
	if err != nil {
		return err
	}
	manager, err := endpoint.New(endpoint.Config{
		StateDir: cfg.StateDir, IPAM: alloc, Datapath: dp, Regenerator: a.Endpoints(), MTU: a.MTU, MTU6: a.MTU6, Sysctls: cfg.Sysctls, Log: log,
	})
	if err != nil {
		return fmt.Errorf("endpoints of an earlier run: %w", err)
	}
	defer func() { err = errors.Join(err, manager.Close()) }()
	a.eps.seed(manager.List())
	sweep := newSweeper(dp.Maps(), timeouts.For, dp.Sweep, log)

	public, err := a.publicHandler(newCollector(a, dp.Maps(), sweep, cfg.Version))
	if err != nil {
		return err
	}
	socket := &http.Server{ReadHeaderTimeout: shutdownTimeout, Handler: a.socketHandler(public, cniapi.Handler(manager), func(s *api.Status) {
		s.Version = cfg.Version
		s.UptimeSeconds = time.Since(started).Seconds()
		from.Synced = s.Synced
		s.Sources = []api.Source{from}
		s.Sockets.Cgroup, s.Sockets.Attached = dp.Sockets()
	})}
	log.Info("starting", "node", cfg.NodeName, "version", cfg.Version, "source", from.Location, "bpffs", cfg.BPFFS, "socket", cfg.Socket)

	running = true
	g.Go(func() error { return finish(ctx, "loop", a.Run(ctx)) })
	g.Go(func() error { sweep.run(ctx); return nil })
	g.Go(func() error {
		// They tell of what happens; nothing hangs on them.
		if err := a.events.run(ctx, dp.Maps().Events); err != nil {
			log.Error("events about drops: there are none until the agent is restarted", "error", err)
		}
		return nil
	})
	g.Go(func() error { return a.repair(ctx, manager) })
	g.Go(func() error { a.keepSocket(ctx, listener); return nil })
	g.Go(func() error { a.offer(ctx, cni); return nil })
	for _, l := range allLeftovers() {
		g.Go(func() error {
			t := time.NewTicker(leftoversEvery)
			defer t.Stop()
			a.watchLeftovers(ctx, l, t.C)
			return nil
		})
	}
	g.Go(func() error {
		t := time.NewTicker(verifyEvery)
		defer t.Stop()
		new(strangerWatch).run(ctx, a, t.C)
		return nil
	})
	serve(ctx, g, socket, listener)
	if cfg.Listen != "" {
		tcp, err := net.Listen("tcp", cfg.Listen)
		if err != nil {
			err = fmt.Errorf("listen for health and metrics: %w; choose another address with --listen", err)
			g.Go(func() error { return err })
		} else {
			serve(ctx, g, &http.Server{Handler: public, ReadHeaderTimeout: shutdownTimeout}, tcp)
		}
	}
	a.serveAs(ctx, g, "--healthz-bind-address", cfg.HealthzBind, a.health.Handler())
	a.serveAs(ctx, g, "--metrics-bind-address", cfg.MetricsBind, public)
	err = g.Wait()
	if err == nil {
		log.Info("stopped; programs and maps stay in place")
	}
	return err
}

// repair restores the endpoints once all objects are known and looks after
// them from then on.
func (a *Agent) repair(ctx context.Context, m *endpoint.Manager) error {
	if a.tables.WaitSynced(ctx) != nil {
		return nil
	}
	restore, cancel := context.WithTimeout(ctx, restoreTimeout)
	err := m.Restore(restore)
	cancel()
	if err != nil && ctx.Err() == nil {
		a.log.Error("endpoints of an earlier run", "error", err)
	}
	t := time.NewTicker(verifyEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-a.resized:
		}
		repaired, err := m.Repair(ctx)
		for _, what := range repaired {
			a.log.Warn("an endpoint was not as it should be; repaired", "what", what)
		}
		if ctx.Err() == nil {
			// The loop keeps the list of problems, and logs what is new.
			_ = a.do(ctx, func() {
				a.problem("interfaces of pods", "", err)
				a.publish()
			})
		}
	}
}

// socketEvery is how often the socket's file is looked for.
const socketEvery = time.Second

// keepSocket puts the socket's file back when somebody removed it. What the
// plugin could not ask for meanwhile, it noted.
func (a *Agent) keepSocket(ctx context.Context, l *cniapi.Listener) {
	t := time.NewTicker(socketEvery)
	defer t.Stop()
	failed := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		again, err := l.Restore()
		if again {
			a.log.Warn("the socket's file was gone; it is back", "socket", l.Addr())
			select {
			case a.resized <- struct{}{}: // repair looks for notes
			default:
			}
		}
		if err != nil || failed {
			_ = a.do(ctx, func() { // the loop ends with ctx
				a.problem("socket of the plugin", "", err)
				a.publish()
			})
		}
		failed = err != nil
	}
}

// finish turns the end of a part into the end of the process, with a reason
// unless the process is ending anyway.
func finish(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	if err == nil {
		err = errors.New("ended")
	}
	return fmt.Errorf("%s: %w", what, err)
}

func serve(ctx context.Context, g *errgroup.Group, s *http.Server, l net.Listener) {
	g.Go(func() error {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve on %s: %w", l.Addr(), err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if s.Shutdown(end) != nil {
			_ = s.Close()
		}
		return nil
	})
}

// bindRetry is when an address that is in use is tried again.
const bindRetry = 5 * time.Second

// serveAs serves on an address that is kube-proxy's by default. Where one
// runs still, or an agent that is being replaced, the address is waited for.
func (a *Agent) serveAs(ctx context.Context, g *errgroup.Group, flag, addr string, h http.Handler) {
	if addr == "" {
		return
	}
	report := func(err error) {
		_ = a.do(ctx, func() { // the loop ends with ctx
			a.problem("address of "+flag, "", err)
			if a.full {
				a.publish()
			}
		})
	}
	g.Go(func() error {
		t := time.NewTicker(bindRetry)
		defer t.Stop()
		for failed := false; ; failed = true {
			l, err := net.Listen("tcp", addr)
			if err == nil {
				if failed {
					report(nil)
				}
				serve(ctx, g, &http.Server{Handler: h, ReadHeaderTimeout: shutdownTimeout}, l)
				return nil
			}
			report(fmt.Errorf("%w; it is tried again: stop who has it (kube-proxy?), or give another %s", err, flag))
			select {
			case <-ctx.Done():
				return nil
			case <-t.C:
			}
		}
	})
}

func newSource(cfg Config, t *table.Tables) (source.Source, api.Source, error) {
	if cfg.Manifests != "" {
		s, err := source.NewDir(cfg.Manifests, t, cfg.Log)
		return s, api.Source{Kind: "directory", Location: cfg.Manifests}, err
	}
	rc, location, err := apiserver.Config(apiserver.Options{Kubeconfig: cfg.Kubeconfig, Servers: cfg.Servers, UserAgent: "podweir-agent/" + cfg.Version})
	if errors.Is(err, apiserver.ErrNone) {
		err = fmt.Errorf("no source of objects: give --manifests DIR or --kubeconfig FILE, or run in a pod with a service account: %w", err)
	}
	if err != nil {
		return nil, api.Source{}, fmt.Errorf("API server: %w", err)
	}
	client, err := source.NewClient(rc)
	if err != nil {
		return nil, api.Source{}, fmt.Errorf("API server %s: %w", location, err)
	}
	return source.NewAPI(client, t, cfg.Log), api.Source{Kind: "api", Location: location}, nil
}
