package realcluster

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/podweir/podweir/test/tools/probe"
)

// steady calls one target for as long as a cluster changes over. One in a pod
// ends with that, and another takes its place when the pod is there again.
type steady struct {
	kind   string // who calls whom, one of a few
	start  func(ctx context.Context) (cmd *exec.Cmd, done func(), err error)
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	before probe.Summary
}

// loss is what became of some calls; why counts the lost ones by their errors.
type loss struct {
	calls, lost int
	why         map[string]int
}

func (l loss) String() string {
	text := fmt.Sprintf("%d of %d", l.lost, l.calls)
	for _, why := range slices.Sorted(maps.Keys(l.why)) {
		text += fmt.Sprintf(" (%d: %s)", l.why[why], why)
	}
	return text
}

// and is the calls of both.
func (l loss) and(o loss) loss {
	sum := loss{l.calls + o.calls, l.lost + o.lost, map[string]int{}}
	for _, each := range []loss{l, o} {
		for why, n := range each.why {
			sum.why[why] += n
		}
	}
	return sum
}

// begin starts it, unless it runs or cannot be started yet.
func (s *steady) begin(ctx context.Context) error {
	if s.cmd != nil {
		return nil
	}
	cmd, done, err := s.start(ctx)
	if err != nil || cmd == nil {
		return err
	}
	defer done()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if s.in, err = cmd.StdinPipe(); err != nil {
		return err
	}
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("caller (%s): %w", s.kind, err)
	}
	s.cmd, s.out, s.before = cmd, bufio.NewReader(out), probe.Summary{}
	return nil
}

// take is what became of the calls since the last time. Of one that has ended
// with its pod there is nothing to say.
func (s *steady) take() (loss, error) {
	if s.cmd == nil {
		return loss{}, nil
	}
	_, err := fmt.Fprintln(s.in)
	var line []byte
	if err == nil {
		line, err = s.out.ReadBytes('\n')
	}
	var now probe.Summary
	if err == nil {
		err = json.Unmarshal(line, &now)
	}
	if err != nil {
		s.end()
		return loss{}, nil
	}
	attempts, ok := now.Attempts-s.before.Attempts, now.OK-s.before.OK
	why := map[string]int{}
	for text, n := range now.Failed {
		if n -= s.before.Failed[text]; n > 0 {
			why[text] = n
		}
	}
	s.before = now
	return loss{attempts, attempts - ok, why}, nil
}

// end ends it and waits. How it ends is of no interest.
func (s *steady) end() {
	if s.cmd == nil {
		return
	}
	_ = s.in.Close()
	_, _ = io.Copy(io.Discard, s.out)
	_ = s.cmd.Wait()
	s.cmd = nil
}

// loadArgs are ten calls a second. Who waits for five seconds is lost, and not
// late on a busy machine: such calls may count with the step after theirs.
func loadArgs(client, target string) []string {
	return []string{client, "load", "-attached", "-interval", "100ms", "-parallel", "60", "-timeout", "5s", target}
}

// Whom the callers call; what each kind is for is told in this order.
const (
	outsideToService = "outside to NodePorts"
	nodeToService    = "nodes to a cluster IP"
	podToService     = "pods to a cluster IP"
	outsideToHost    = "outside to pods on the host's network"
)

// callers are one of each kind for every node.
func (m *migration) makeCallers(clusterIP string) {
	client := m.c.ToolPath("pw-client")
	plain := func(f func(ctx context.Context) *exec.Cmd) func(context.Context) (*exec.Cmd, func(), error) {
		return func(ctx context.Context) (*exec.Cmd, func(), error) { return f(ctx), func() {}, nil }
	}
	for _, n := range m.c.nodes() {
		m.callers = append(m.callers,
			&steady{kind: outsideToService, start: plain(func(ctx context.Context) *exec.Cmd {
				return m.c.Outside(ctx, loadArgs(client, n.IP+":30080")...)
			})},
			&steady{kind: outsideToHost, start: plain(func(ctx context.Context) *exec.Cmd {
				return m.c.Outside(ctx, loadArgs(client, n.IP+":18080")...)
			})},
			&steady{kind: nodeToService, start: func(ctx context.Context) (*exec.Cmd, func(), error) {
				return n.In(ctx, loadArgs(client, clusterIP+":80")...)
			}},
			&steady{kind: podToService, start: func(ctx context.Context) (*exec.Cmd, func(), error) {
				id, err := m.container(ctx, n)
				if id == "" || err != nil {
					return nil, nil, err
				}
				args := append([]string{"ctr", "-n", "k8s.io", "tasks", "exec", "--exec-id", fmt.Sprintf("migrate-%d", time.Now().UnixNano()), id},
					loadArgs("pw-client", clusterIP+":80")...)
				return n.In(ctx, args...)
			}})
	}
}

// step does something while everybody calls, and says what was lost meanwhile.
func (m *migration) step(ctx context.Context, what string, do func() error) (map[string]loss, error) {
	begin := time.Now()
	for _, s := range m.callers {
		if err := s.begin(ctx); err != nil {
			return nil, err
		}
		if _, err := s.take(); err != nil {
			return nil, err
		}
	}
	if err := do(); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	sum := map[string]loss{}
	for _, s := range m.callers {
		l, err := s.take()
		if err != nil {
			return nil, err
		}
		sum[s.kind] = sum[s.kind].and(l)
	}
	var text []string
	for _, kind := range []string{outsideToService, nodeToService, podToService, outsideToHost} {
		text = append(text, fmt.Sprintf("%s %s", kind, sum[kind]))
	}
	m.c.Out("%6.1f s  %s; lost: %s", time.Since(begin).Seconds(), what, strings.Join(text, ", "))
	return sum, nil
}
