package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/doctor"
	"github.com/podweir/podweir/internal/version"
)

// Exit statuses other than 0.
const (
	exitFailed     = 1
	exitUsage      = 2
	exitNoMaps     = 3
	exitPermission = 4
)

// exitError is an error with an exit status of its own.
type exitError struct {
	status int
	err    error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// usageError: a value that is wrong whatever is the case on the node. One that
// may be right, and names what is not there, is a failure.
func usageError(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// Env is the world a command runs in; tests put fakes in its place.
type Env struct {
	OpenMaps  func(bpffs string) (Maps, error)
	DialAgent func(socket string) Agent
	// DialCluster is asked when there is a --kubeconfig.
	DialCluster func(kubeconfig string) (Cluster, error)
	// Host is the node's kernel, for doctor.
	Host func(bpffs string) doctor.Host
	// Plugged asks the agent about a pod's interface, for doctor.
	Plugged func(socket string) func(context.Context, api.Endpoint) error
	// Now is CLOCK_MONOTONIC in nanoseconds, the clock of the flows.
	Now func() uint64
	// Version is this program's.
	Version string
	// IfName names a device; empty when there is none.
	IfName         func(ifindex uint32) string
	Stdout, Stderr io.Writer
}

// OSEnv is the machine.
func OSEnv() Env {
	return Env{
		OpenMaps:    OpenMaps,
		DialAgent:   DialAgent,
		DialCluster: DialCluster,
		Host:        doctor.OSHost,
		Plugged:     plugged,
		Now: func() uint64 {
			var ts unix.Timespec
			if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
				return 0
			}
			return uint64(ts.Nano())
		},
		IfName: func(ifindex uint32) string {
			dev, err := net.InterfaceByIndex(int(ifindex))
			if err != nil {
				return ""
			}
			return dev.Name
		},
		Version: version.String(),
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
	}
}

// Run runs the command with args (without its own name) and returns its exit
// status.
func Run(ctx context.Context, args []string, env Env) int {
	s := &session{env: env}
	root := s.command()
	root.SetArgs(args)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	s.warn(err)
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		return exit.status
	case !s.started:
		_, _ = fmt.Fprintln(env.Stderr, "podweir: 'podweir --help' shows how it is used")
		return exitUsage
	}
	return exitFailed
}

// session is one run of the command.
type session struct {
	env    Env
	bpffs  string
	socket string
	output string
	// kubeconfig of the commands that have the flag.
	kubeconfig string
	started    bool // flags and arguments were right
}

func (s *session) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "podweir",
		Short: "Look into the podweir dataplane of this node",
		Long: `Look into the podweir dataplane of this node.

States are read from the pinned maps, names from the agent. Without the agent
every command but monitor works, with numbers and addresses in place of names,
or, where a command has --kubeconfig, with those that the API server knows.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 no maps under --bpffs,
4 no permission to read them.`,
		Version:       s.env.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := cmd.ValidateRequiredFlags(); err != nil {
				return err
			}
			// A script's variable that nobody set must not stand for everything.
			var errs []error
			cmd.Flags().Visit(func(f *pflag.Flag) {
				if f.Value.String() == "" {
					errs = append(errs, fmt.Errorf("--%s is empty", f.Name))
				}
			})
			if err := errors.Join(errs...); err != nil {
				return err
			}
			switch s.output {
			case "table", "wide", "json":
				s.started = true
				return nil
			}
			return fmt.Errorf("-o %s: is none of table, wide and json", s.output)
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&s.bpffs, "bpffs", "/sys/fs/bpf/podweir", "folder that the agent pins its maps under")
	flags.StringVar(&s.socket, "socket", "/run/podweir/agent.sock", "socket of the agent")
	flags.StringVarP(&s.output, "output", "o", "table", "table, wide or json")
	root.AddCommand(s.statusCommand(), s.servicesCommand(), s.flowsCommand(), s.endpointsCommand(),
		s.policyCommand(), s.monitorCommand(), s.nodesCommand(), s.metricsCommand(), s.doctorCommand(), s.versionCommand())
	return root
}

func (s *session) warn(err error) {
	_, _ = fmt.Fprintf(s.env.Stderr, "podweir: %v\n", err)
}

// names asks the agent for what paths answer.
func (s *session) names(ctx context.Context, paths ...string) *names {
	return askNames(ctx, s.env.DialAgent(s.socket), s.env.IfName, "going on without names", s.warn, paths...)
}

// namesFor is the same for a command that may ask the API server, too.
func (s *session) namesFor(ctx context.Context, m Maps, paths ...string) (*names, error) {
	if s.kubeconfig == "" {
		return s.names(ctx, paths...), nil
	}
	c, err := s.env.DialCluster(s.kubeconfig)
	if err != nil {
		return nil, err
	}
	n := askNames(ctx, s.env.DialAgent(s.socket), s.env.IfName, "going on with the API server's names", s.warn, paths...)
	return n, n.complete(ctx, c, m, s.warn)
}

// withMaps runs fn over the pinned maps.
func (s *session) withMaps(fn func(Maps) error) error {
	m, err := s.env.OpenMaps(s.bpffs)
	if err != nil {
		return err
	}
	return errors.Join(fn(m), m.Close())
}

func (s *session) wide() bool { return s.output == "wide" }

// print writes v as JSON, or else t.
func (s *session) print(v any, t *table) error {
	if s.output == "json" {
		enc := json.NewEncoder(s.env.Stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	return t.write(s.env.Stdout, s.wide())
}

// table is a table under construction. Columns whose heading starts with "+"
// are shown when it is wide.
type table struct {
	head []string
	rows [][]string
	// none is said instead of a table without rows.
	none string
}

func newTable(none string, head ...string) *table {
	return &table{none: none, head: head}
}

// add adds a row; an empty cell is shown as "-".
func (t *table) add(cells ...string) {
	t.rows = append(t.rows, cells)
}

func (t *table) write(w io.Writer, wide bool) error {
	if len(t.rows) == 0 {
		_, err := fmt.Fprintln(w, t.none)
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	line := func(cells []string, empty string) {
		var shown []string
		for i, c := range cells {
			if strings.HasPrefix(t.head[i], "+") && !wide {
				continue
			}
			if c == "" {
				c = empty
			}
			shown = append(shown, c)
		}
		_, _ = fmt.Fprintln(tw, strings.Join(shown, "\t"))
	}
	head := make([]string, len(t.head))
	for i, h := range t.head {
		head[i] = strings.TrimPrefix(h, "+")
	}
	line(head, "")
	for _, r := range t.rows {
		line(r, "-")
	}
	return tw.Flush()
}

// list joins items; when not wide, at most four of them.
func list(items []string, wide bool) string {
	const most = 4
	if wide || len(items) <= most {
		return strings.Join(items, ",")
	}
	return fmt.Sprintf("%s,+%d more", strings.Join(items[:most], ","), len(items)-most)
}
