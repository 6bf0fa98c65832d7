// Command podweir-agent is the node's process: it keeps the dataplane as the
// cluster's objects say. See package agent.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/agent"
	"github.com/podweir/podweir/internal/apiserver"
	"github.com/podweir/podweir/internal/heap"
	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/sourceport"
	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/internal/version"
)

const (
	// gcPercent trades processor time, of which the agent needs little once it
	// is ready, for memory, which it holds for good.
	gcPercent = 40
	// startRoom is what the heap may grow by between collections until then.
	startRoom = 20 << 20
	// maxEvents is a burst of the programs' (PW_EVENT_BURST) in each tick of
	// the slowest clock that they may have, of 100 Hz: they cannot tell more.
	maxEvents = 10000
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "podweir-agent:", err)
		os.Exit(1)
	}
}

type flags struct {
	agent.Config
	serviceCIDRs   []string
	nodePorts      string
	nodePortAddrs  []string
	masquerade     string
	plainCIDRs     []string
	sourcePorts    []string
	externalSource string
	mode           string
	logLevel       string
	logFormat      string
	apiservers     []string
	config         string
}

func command() *cobra.Command { return commandOf(new(flags)) }

// noArgs refuses arguments. --masquerade stands alone or with a value behind =:
// what follows it otherwise is one.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		if cmd.Flags().Changed("masquerade") {
			return fmt.Errorf("%w; if it is meant for --masquerade, write --masquerade=%s", err, args[0])
		}
		return err
	}
	return nil
}

// commandOf is the command that reads its flags into f.
func commandOf(f *flags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "podweir-agent",
		Short: "Keeps this node's dataplane as the cluster's objects say",
		Long: `podweir-agent loads the dataplane of this node into the kernel and keeps it as
the objects of the cluster say: services, pods, nodes and network policies.
They come from the API server (by default with the credentials of the pod it
runs in), or from a folder of ordinary manifests.

When it stops, programs and maps stay in place and traffic goes on;
'podweir-agent cleanup' removes them.`,
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.String(),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if f.config == "" {
				return nil
			}
			return fromFile(cmd, f.config)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			if f.PprofBind == "" {
				runtime.MemProfileRate = 0 // nobody can ask what it samples
			}
			f.Settled = heap.Start(startRoom, gcPercent)
			return agent.Run(cmd.Context(), f.Config)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.NodeName, "node-name", "", "name of this machine's Node object (default: the host name)")
	fs.StringVar(&f.Manifests, "manifests", "", "folder to read objects from instead of the API server")
	fs.StringVar(&f.Kubeconfig, "kubeconfig", "", "file that says how to reach the API server (default: the pod's service account)")
	fs.StringSliceVar(&f.apiservers, "apiserver", nil, "API servers to use instead of the one that the credentials name: https://HOST:PORT or HOST:PORT, one after another")
	fs.StringVar(&f.CNIConf, "cni-conf", "", "CNI configuration to write into --cni-conf-dir, under its own name (default: 10-podweir.conflist with podweir alone)")
	fs.StringVar(&f.Listen, "listen", agent.DefaultListen, "TCP address for /healthz, /readyz and /metrics; empty for none")
	fs.StringVar(&f.HealthzBind, "healthz-bind-address", agent.DefaultHealthz, "TCP address for /healthz and /livez as kube-proxy has them, for load balancers and the kubelet; empty for none")
	fs.StringVar(&f.MetricsBind, "metrics-bind-address", "", "further TCP address for /metrics, such as kube-proxy's 127.0.0.1:10249 (default none)")
	fs.StringVar(&f.PprofBind, "pprof-bind-address", "", "TCP address for profiles of the agent under /debug/pprof, such as 127.0.0.1:6060 (default none)")
	fs.StringSliceVar(&f.serviceCIDRs, "service-cidr", nil, "ranges of cluster IPs, besides those of ServiceCIDR objects")
	fs.IntVar(&f.MTU, "mtu", 0, "MTU of pods (0: what the node's device leaves for the tunnel)")
	fs.StringVar(&f.mode, "routing-mode", string(tunnel.ModeVXLAN), "between nodes: vxlan, ipip (IPv4 of pods in IPv4, the rest as vxlan), cross-subnet or ipip-cross-subnet (routed on one link, vxlan or ipip behind a router), direct (the network routes pod ranges)")
	fs.BoolVar(&f.AcceptPlain, "accept-unencapsulated", false, "take packets of other nodes' pods that come without encapsulation, whatever the routing mode: while it is changed from or to direct or cross-subnet")
	fs.StringVar(&f.nodePorts, "service-node-port-range", "30000-32767", "ports that NodePorts are looked for in: the API server's flag of the same name")
	fs.StringSliceVar(&f.nodePortAddrs, "nodeport-addresses", nil, "ranges of node addresses that NodePorts answer on, or primary for the Node's InternalIPs (default: all)")
	fs.StringVar(&f.externalSource, "external-source", "keep", "keep, dsr or snat: whether backends see the address of clients outside the cluster, and answer by the node that was called (keep) or directly (dsr), or see this node's")
	fs.StringVar(&f.masquerade, "masquerade", "true", "true, false, ipv4 or ipv6: whether, or of which family, pods reach what is no pod under this node's address")
	fs.Lookup("masquerade").NoOptDefVal = "true"
	fs.StringSliceVar(&f.plainCIDRs, "non-masquerade-cidrs", nil, "ranges that pods reach under their own address all the same")
	fs.StringSliceVar(&f.sourcePorts, "source-ports", nil, "ports that sources are translated to, such as 1024-29999,61000-65535 (default: all from 1024 on that are neither NodePorts nor in net.ipv4.ip_local_port_range)")
	fs.Uint32Var(&f.MaglevSize, "maglev-table-size", 0, "entries of the tables that choose backends for clients outside, a prime, the same on all nodes (0: by the number of backends)")
	fs.StringVar(&f.Cgroup, "cgroup", "", "folder of the cgroup (v2) whose processes get their services at connect(), or none (default: where cgroup2 is mounted, all processes)")
	fs.Uint32Var(&f.EventsPerSec, "events-per-second", agent.DefaultEvents, "events about dropped packets, for podweir monitor, per second and CPU, at most 10000; 0 for none")
	fs.Uint32Var(&f.Mark, "mark", agent.DefaultMark, "packet mark bit for our own use; one bit that nobody else has")
	fs.BoolVar(&f.Clsact, "clsact", false, "attach programs as filters of a clsact qdisc where the kernel has tcx, too, as before Linux 6.6; a node keeps what it began with until it is restarted")
	pfs := cmd.PersistentFlags()
	pfs.StringVar(&f.BPFFS, "bpffs", loader.DefaultBPFFS, "folder on a BPF file system for programs and maps")
	pfs.StringVar(&f.StateDir, "state-dir", agent.DefaultStateDir, "folder for what has to outlive a restart")
	pfs.StringVar(&f.Socket, "socket", agent.DefaultSocket, "unix socket for the CNI plugin and the podweir command")
	pfs.StringVar(&f.Sysctls, "sysctl-dir", "", "where /proc/sys can be written, if not there: containers have it read-only")
	pfs.StringVar(&f.CNIConfDir, "cni-conf-dir", "", "folder that the container runtime reads CNI configurations from, to write one when ready; empty for none")
	pfs.StringVar(&f.config, "config", "", "YAML file of flags and their values; the command line goes before it")
	pfs.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	pfs.StringVar(&f.logFormat, "log-format", "text", "text or json")

	cmd.AddCommand(cleanupCommand(f), installCommand(f), mountCommand(f), waitCommand())
	return cmd
}

func cleanupCommand(f *flags) *cobra.Command {
	kubeProxy := false
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Removes everything an agent left on this node",
		Long: `Removes what an agent made on this node: programs, maps, routes, the tunnel
device and the interfaces of pods (running ones lose their network), and puts
sysctls back that nobody has changed since. The CNI configuration and the plugin
go as well where --cni-conf-dir and --cni-bin-dir are given. Stop the agent
first.

With --kube-proxy it removes what a kube-proxy left instead, and nothing of the
agent's, which may run: kube-proxy's tables of nftables, its chains in iptables
with the rules that lead to them, and the device kube-ipvs0. End kube-proxy
first.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if f.Log, err = f.logger(); err != nil {
				return err
			}
			if kubeProxy {
				return cleanupKubeProxy(cmd.Context(), f.Log)
			}
			if err := f.absolute(); err != nil {
				return err
			}
			return agent.Cleanup(f.Config)
		},
	}
	cmd.Flags().StringVar(&f.CNIBinDir, "cni-bin-dir", "", "folder of plugins to remove podweir-cni from; empty for none")
	cmd.Flags().BoolVar(&kubeProxy, "kube-proxy", false, "remove what a kube-proxy left on this node, and nothing of the agent's")
	cmd.MarkFlagsMutuallyExclusive("kube-proxy", "cni-bin-dir")
	return cmd
}

func cleanupKubeProxy(ctx context.Context, log *slog.Logger) error {
	removed, err := kubeproxy.Remove(ctx)
	for _, what := range removed {
		log.Info("removed", "what", what)
	}
	if err != nil {
		return fmt.Errorf("cleanup --kube-proxy: %w", err)
	}
	if len(removed) == 0 {
		log.Info("nothing of kube-proxy's is on this node")
	}
	return nil
}

// complete checks the flags and fills in what they leave open.
func (f *flags) complete() (err error) {
	if f.Log, err = f.logger(); err != nil {
		return err
	}
	f.Version = version.String()
	if f.NodeName == "" {
		if f.NodeName, err = os.Hostname(); err != nil {
			return fmt.Errorf("--node-name is not given and the host name unknown: %w", err)
		}
		f.NodeName = strings.ToLower(f.NodeName) // as the kubelet does
	}
	if f.Manifests != "" && f.Kubeconfig != "" {
		return fmt.Errorf("--manifests and --kubeconfig exclude each other")
	}
	if f.Manifests != "" && len(f.apiservers) > 0 {
		return fmt.Errorf("--manifests and --apiserver exclude each other")
	}
	if f.Servers, err = apiserver.ParseServers(f.apiservers); err != nil {
		return fmt.Errorf("--apiserver %w", err)
	}
	if f.CNIConf != "" && f.CNIConfDir == "" {
		return fmt.Errorf("--cni-conf says what to write, --cni-conf-dir must say where")
	}
	for _, s := range f.serviceCIDRs {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return fmt.Errorf("--service-cidr %q is no range such as 10.96.0.0/12: %w", s, err)
		}
		if p != p.Masked() {
			return fmt.Errorf("--service-cidr %s has bits set beyond its length; did you mean %s?", p, p.Masked())
		}
		f.ServiceCIDRs = append(f.ServiceCIDRs, p)
	}
	if f.Mode, err = tunnel.ParseMode(f.mode); err != nil {
		return fmt.Errorf("--routing-mode: %w", err)
	}
	if f.NodePorts, err = service.ParsePortRange(f.nodePorts); err != nil {
		return fmt.Errorf("--service-node-port-range: %w", err)
	}
	if f.NodePortAddrs, err = tunnel.ParseNodePortAddrs(f.nodePortAddrs); err != nil {
		return fmt.Errorf("--nodeport-addresses: %w", err)
	}
	if err = f.completeMasquerade(); err != nil {
		return err
	}
	switch f.externalSource {
	case "keep", "dsr", "snat":
		f.ExternalSNAT = f.externalSource == "snat"
		f.ExternalDSR = f.externalSource == "dsr"
	default:
		return fmt.Errorf("--external-source %q: must be keep, dsr or snat", f.externalSource)
	}
	if err = service.CheckMaglevSize(f.MaglevSize); err != nil {
		return fmt.Errorf("--maglev-table-size %w", err)
	}
	if f.EventsPerSec > maxEvents {
		return fmt.Errorf("--events-per-second %d: must be at most %d", f.EventsPerSec, maxEvents)
	}
	if f.MTU != 0 && (f.MTU < 1280 || f.MTU > 65485) {
		return fmt.Errorf("--mtu %d: must be 0 or from 1280 (the least of IPv6) to 65485", f.MTU)
	}
	if f.Mark == 0 || f.Mark&(f.Mark-1) != 0 {
		return fmt.Errorf("--mark %#x: must be one single bit", f.Mark)
	}
	if f.Mark == 0x4000 || f.Mark == 0x8000 {
		return fmt.Errorf("--mark %#x is kube-proxy's; choose another bit", f.Mark)
	}
	for _, a := range []struct{ flag, addr string }{
		{"--listen", f.Listen}, {"--healthz-bind-address", f.HealthzBind},
		{"--metrics-bind-address", f.MetricsBind}, {"--pprof-bind-address", f.PprofBind},
	} {
		if a.addr == "" {
			continue
		}
		host, port, err := net.SplitHostPort(a.addr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err == nil && host != "" {
			_, err = netip.ParseAddr(host)
		}
		if err != nil {
			return fmt.Errorf("%s %q: must be ADDRESS:PORT, such as 0.0.0.0:10256 or [::1]:10249, or empty: %w", a.flag, a.addr, err)
		}
	}
	if f.Cgroup != "" && f.Cgroup != loader.NoCgroup {
		if f.Cgroup, err = filepath.Abs(f.Cgroup); err != nil {
			return fmt.Errorf("--cgroup: %w", err)
		}
	}
	return f.absolute()
}

// completeMasquerade reads the flags about translated sources.
func (f *flags) completeMasquerade() (err error) {
	m := &f.Masquerade
	*m = agent.Masquerade{}
	switch on, err := strconv.ParseBool(f.masquerade); {
	case err == nil:
		m.Off4, m.Off6 = !on, !on
	case strings.EqualFold(f.masquerade, "ipv4"):
		m.Off6 = true
	case strings.EqualFold(f.masquerade, "ipv6"):
		m.Off4 = true
	default:
		return fmt.Errorf("--masquerade %q: must be true, false, ipv4 or ipv6", f.masquerade)
	}
	for _, s := range f.plainCIDRs {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return fmt.Errorf("--non-masquerade-cidrs %q is no range such as 10.0.0.0/8: %w", s, err)
		}
		if err := tunnel.CheckPlain(p); err != nil {
			return fmt.Errorf("--non-masquerade-cidrs %w", err)
		}
		m.Except = append(m.Except, p)
	}
	if m.Ports, err = sourceport.Parse(f.sourcePorts); err != nil {
		return fmt.Errorf("--source-ports: %w", err)
	}
	if err = sourceport.Check(m.Ports, sourceport.Range(f.NodePorts)); err != nil {
		return fmt.Errorf("--source-ports: %w", err)
	}
	if len(m.Ports) == 0 {
		if _, _, err = sourceport.Choose(sourceport.Range(f.NodePorts), sourceport.Range{}); err != nil {
			return fmt.Errorf("--service-node-port-range: %w", err)
		}
	}
	return nil
}

// absolute checks the paths, of which an empty one would stand for the working
// directory, and makes them independent of it.
func (f *flags) absolute() (err error) {
	for name, path := range map[string]*string{"--bpffs": &f.BPFFS, "--state-dir": &f.StateDir, "--socket": &f.Socket} {
		if *path == "" {
			return fmt.Errorf("%s is empty", name)
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for name, path := range map[string]*string{"--cni-conf-dir": &f.CNIConfDir, "--sysctl-dir": &f.Sysctls} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func (f *flags) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return nil, fmt.Errorf("--log-level %q: must be debug, info, warn or error", f.logLevel)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch f.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(os.Stderr, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, opts)), nil
	}
	return nil, fmt.Errorf("--log-format %q: must be text or json", f.logFormat)
}
