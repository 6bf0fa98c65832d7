package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// command prepares a program: inside the run's cgroup, in a process group of
// its own (an interrupt at the terminal reaches the owner alone, which then
// cleans up), found in the bin folder first. The caller closes the cgroup.
func (n *Netns) command(ctx context.Context, args []string) (*exec.Cmd, *os.File, error) {
	if len(args) == 0 {
		return nil, nil, errors.New("no program given")
	}
	cg, err := os.Open(n.cgroup)
	if err != nil {
		return nil, nil, fmt.Errorf("cgroup of %s: %w", n.Name, err)
	}
	path := args[0]
	if !strings.Contains(path, "/") {
		if own := filepath.Join(n.c.cfg.BinDir, path); fileExists(own) {
			path = own
		}
	}
	cmd := exec.CommandContext(ctx, path, args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, UseCgroupFD: true, CgroupFD: int(cg.Fd())}
	cmd.WaitDelay = 2 * time.Second
	return cmd, cg, nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// start forks inside the namespace: a child has its parent thread's.
func (n *Netns) start(cmd *exec.Cmd, cg *os.File) error {
	defer cg.Close()
	if err := n.Do(cmd.Start); err != nil {
		return fmt.Errorf("start %s in %s: %w", cmd.Path, n.Name, err)
	}
	return nil
}

// ExitError is a program that ran and failed.
type ExitError struct {
	Args   []string
	Netns  string
	Stdout string
	Stderr string
	Err    error
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("%s in %s: %v\n%s%s", strings.Join(e.Args, " "), e.Netns, e.Err, e.Stdout, e.Stderr)
}

func (e *ExitError) Unwrap() error { return e.Err }

// Exec runs a program inside the namespace and returns its standard output,
// also when it failed: the error is then an [*ExitError].
func (n *Netns) Exec(ctx context.Context, args ...string) (string, error) {
	cmd, cg, err := n.command(ctx, args)
	if err != nil {
		return "", err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := n.start(cmd, cg); err != nil {
		return "", err
	}
	if err := cmd.Wait(); err != nil {
		return stdout.String(), &ExitError{args, n.Name, stdout.String(), stderr.String(), err}
	}
	return stdout.String(), nil
}

// Process is a program that runs inside a namespace.
type Process struct {
	PID   int
	Stdin io.WriteCloser

	args  []string
	netns string
	cmd   *exec.Cmd
	log   string
	lines chan string
	done  chan struct{}
	err   error // valid when done is closed
}

// Start runs a program inside the namespace until it ends, is killed, or ctx
// ends. Its standard error goes to a file in the run's folder; its standard
// output is read with [Process.Line].
func (n *Netns) Start(ctx context.Context, args ...string) (*Process, error) {
	cmd, cg, err := n.command(ctx, args)
	if err != nil {
		return nil, err
	}
	log, err := os.CreateTemp(n.c.logDir(), fmt.Sprintf("%s-%s-*.log", n.Name, filepath.Base(args[0])))
	if err != nil {
		cg.Close()
		return nil, err
	}
	defer log.Close()
	p := &Process{args: args, netns: n.Name, cmd: cmd, log: log.Name(), lines: make(chan string, 64), done: make(chan struct{})}
	cmd.Stderr = log
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		p.Stdin, err = cmd.StdinPipe()
	}
	if err != nil {
		cg.Close()
		return nil, err
	}
	if err := n.start(cmd, cg); err != nil {
		return nil, err
	}
	p.PID = cmd.Process.Pid
	go func() {
		defer close(p.done)
		in := bufio.NewScanner(stdout)
		in.Buffer(nil, 1<<20)
		for in.Scan() {
			p.lines <- in.Text()
		}
		close(p.lines)
		p.err = cmd.Wait()
	}()
	return p, nil
}

// Line waits for the next line of the program's standard output; io.EOF when
// it has ended.
func (p *Process) Line(ctx context.Context) (string, error) {
	select {
	case line, ok := <-p.lines:
		if !ok {
			return "", io.EOF
		}
		return line, nil
	case <-ctx.Done():
		return "", fmt.Errorf("waiting for output of %s in %s: %w", p.args[0], p.netns, ctx.Err())
	}
}

// JSON waits for the next line and decodes it.
func (p *Process) JSON(ctx context.Context, v any) error {
	line, err := p.Line(ctx)
	if err != nil {
		return fmt.Errorf("%s in %s: %w\n%s", p.args[0], p.netns, err, p.Stderr())
	}
	if err := json.Unmarshal([]byte(line), v); err != nil {
		return fmt.Errorf("%s in %s said %q: %w", p.args[0], p.netns, line, err)
	}
	return nil
}

// Stderr is what the program has written to its standard error so far.
func (p *Process) Stderr() string {
	data, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// Signal sends sig to the program.
func (p *Process) Signal(sig os.Signal) error { return p.cmd.Process.Signal(sig) }

// Done is closed when the program has ended and its output has been read.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the end of the program, discarding output not yet read.
func (p *Process) Wait(ctx context.Context) error {
	for {
		select {
		case <-p.done:
			if p.err != nil {
				return &ExitError{Args: p.args, Netns: p.netns, Stderr: p.Stderr(), Err: p.err}
			}
			return nil
		case <-p.lines:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the end of %s in %s: %w", p.args[0], p.netns, ctx.Err())
		}
	}
}

// Kill ends the program at once and waits for it.
func (p *Process) Kill(ctx context.Context) error {
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if err := p.Wait(ctx); ctx.Err() != nil {
		return err
	}
	return nil
}
