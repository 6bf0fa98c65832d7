//go:build realcluster

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/tools/probe"
)

// place is where a call comes from: a pod, a node, or this machine, which is
// outside of the cluster.
type place struct {
	node      string
	container string
	name      string
}

func inPod(p *corev1.Pod) place {
	id := ""
	if len(p.Status.ContainerStatuses) > 0 {
		id = strings.TrimPrefix(p.Status.ContainerStatuses[0].ContainerID, "containerd://")
	}
	return place{node: p.Spec.NodeName, container: id, name: "pod " + p.Name + " on " + p.Spec.NodeName}
}

func onNode(n node) place { return place{node: n.name, name: "node " + n.name} }

var outside = place{name: "outside"}

var execs atomic.Uint64

// command runs a program there. In a pod the runtime is asked, and not the API
// server: that need not be there.
func (w *world) command(ctx context.Context, at place, args ...string) (*exec.Cmd, func(), error) {
	if at.container != "" {
		id := fmt.Sprintf("e2e-%d-%d", time.Now().UnixNano(), execs.Add(1))
		return w.cluster.In(ctx, at.node, append([]string{"ctr", "-n", "k8s.io", "tasks", "exec", "--exec-id", id, at.container}, args...)...)
	}
	if args[0] == "pw-client" || args[0] == "podweir" {
		args = append([]string{w.cluster.ToolPath(args[0])}, args[1:]...)
	}
	if at.node != "" {
		return w.cluster.In(ctx, at.node, args...)
	}
	return exec.CommandContext(ctx, args[0], args[1:]...), func() {}, nil
}

// output runs a program there to its end.
func (w *world) output(ctx context.Context, at place, args ...string) ([]byte, error) {
	cmd, done, err := w.command(ctx, at, args...)
	if err != nil {
		return nil, err
	}
	defer done()
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("%s: %s: %w: %s%s", at.name, strings.Join(args, " "), err, out.String(), said.String())
	}
	return out.Bytes(), nil
}

// session is a program that runs there until its input ends. Lines are what it
// prints.
type session struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   io.Closer
	lines chan []byte
	said  bytes.Buffer
	done  chan struct{}
	err   error // valid when done
}

func (w *world) session(at place, args ...string) (*session, error) {
	cmd, done, err := w.command(context.WithoutCancel(w.ctx), at, args...)
	if err != nil {
		return nil, err
	}
	defer done()
	s := &session{cmd: cmd, lines: make(chan []byte, 64), done: make(chan struct{})}
	out, err := cmd.StdoutPipe()
	if err == nil {
		s.out = out
		s.in, err = cmd.StdinPipe()
	}
	cmd.Stderr = &s.said
	// nsenter has a child, which is to end with it.
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.WaitDelay = 5 * time.Second
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", at.name, strings.Join(args, " "), err)
	}
	go func() {
		in := bufio.NewScanner(out)
		in.Buffer(nil, 1<<20)
		for in.Scan() {
			s.lines <- bytes.Clone(in.Bytes())
		}
		if err := cmd.Wait(); err != nil {
			s.err = fmt.Errorf("%s: %s: %w: %s", at.name, strings.Join(args, " "), err, s.said.String())
		}
		close(s.lines)
		close(s.done)
	}()
	return s, nil
}

// end ends the input, and the program if that does not.
func (s *session) end() {
	_ = s.in.Close()
	go func() {
		for range s.lines { // whatever it still says
		}
	}()
	select {
	case <-s.done:
	case <-time.After(20 * time.Second):
		_ = unix.Kill(-s.cmd.Process.Pid, unix.SIGKILL)
		_ = s.out.Close() // whoever else has the other end
		<-s.done
	}
}

// callers are pw-clients that make calls for as long as the tests of a file,
// one for each place.
type callers struct {
	mu sync.Mutex
	m  map[place]*caller
}

func newCallers() *callers { return &callers{m: map[place]*caller{}} }

func (c *callers) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	var wg sync.WaitGroup
	for _, k := range c.m {
		wg.Go(k.s.end)
	}
	wg.Wait()
	clear(c.m)
}

type caller struct {
	s       *session
	mu      sync.Mutex
	next    int
	waiting map[int]chan probe.CallResult
}

// caller is the one of a place; another if the last has ended, with its pod.
func (w *world) caller(from place) (*caller, error) {
	w.callers.mu.Lock()
	defer w.callers.mu.Unlock()
	if c := w.callers.m[from]; c != nil {
		select {
		case <-c.s.done:
		default:
			return c, nil
		}
	}
	s, err := w.session(from, "pw-client", "calls")
	if err != nil {
		return nil, err
	}
	c := &caller{s: s, waiting: map[int]chan probe.CallResult{}}
	w.callers.m[from] = c
	go func() {
		for line := range s.lines {
			var r probe.CallResult
			if json.Unmarshal(line, &r) != nil {
				continue
			}
			c.mu.Lock()
			if to := c.waiting[r.ID]; to != nil {
				delete(c.waiting, r.ID)
				to <- r
			}
			c.mu.Unlock()
		}
	}()
	return c, nil
}

// calls makes the exchanges of one call. An error is one of the means: what
// becomes of an exchange is in its attempt.
func (w *world) calls(from place, call probe.Call) ([]probe.Attempt, error) {
	if call.Timeout == 0 {
		call.Timeout = 5 * time.Second
	}
	c, err := w.caller(from)
	if err != nil {
		return nil, err
	}
	answer := make(chan probe.CallResult, 1)
	c.mu.Lock()
	c.next++
	call.ID = c.next
	c.waiting[call.ID] = answer
	line, err := json.Marshal(call)
	if err == nil {
		_, err = c.s.in.Write(append(line, '\n'))
	}
	c.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from.name, err)
	}
	select {
	case r := <-answer:
		return r.Attempts, nil
	case <-c.s.done:
		return nil, errors.Join(fmt.Errorf("%s: the caller has ended", from.name), c.s.err)
	case <-time.After(call.Timeout*time.Duration(max(1, call.Count, call.Most)) + time.Minute):
		return nil, fmt.Errorf("%s: the caller does not answer", from.name)
	}
}

// try makes one exchange.
func (w *world) try(from place, proto, target string) probe.Attempt {
	a, err := w.calls(from, probe.Call{Proto: proto, Target: target})
	if err != nil {
		return probe.Attempt{Kind: probe.Other, Error: err.Error()}
	}
	return a[len(a)-1]
}

// reach makes one exchange that is to succeed, and returns it.
func (w *world) reach(from place, proto, target string) (probe.Attempt, error) {
	a := w.try(from, proto, target)
	if !a.OK {
		return a, fmt.Errorf("%s to %s %s: %s: %s", from.name, proto, target, a.Kind, a.Error)
	}
	return a, nil
}

// fails makes one exchange that is to fail in a certain way: soon, where
// silence is what is wanted.
func (w *world) fails(from place, proto, target, kind string) error {
	timeout := 5 * time.Second
	if kind == probe.Timeout {
		timeout = time.Second
	}
	list, err := w.calls(from, probe.Call{Proto: proto, Target: target, Timeout: timeout})
	if err != nil {
		return err
	}
	if a := list[0]; a.OK {
		return fmt.Errorf("%s to %s %s: %s answers, want %s", from.name, proto, target, a.Reply.Server, kind)
	} else if a.Kind != kind {
		return fmt.Errorf("%s to %s %s: %s (%s), want %s", from.name, proto, target, a.Kind, a.Error, kind)
	}
	return nil
}

// load makes exchanges at a steady pace until it is ended.
type load struct {
	s    *session
	name string
}

func (w *world) load(from place, target string, args ...string) *load {
	w.Helper()
	s, err := w.session(from, append(append([]string{"pw-client", "load", "-attached", "-timeout", "10s"}, args...), target)...)
	must(w, err)
	w.Cleanup(s.end)
	return &load{s, from.name + " to " + target}
}

// soFar asks for what has become of it.
func (l *load) soFar() (probe.Summary, error) { return ask[probe.Summary](l.s, l.name) }

// end ends it and returns all there was.
func (l *load) end() (probe.Summary, error) { return last[probe.Summary](l.s, l.name) }

// stream is one long flow.
func (w *world) stream(from place, proto, target string) *stream {
	w.Helper()
	s, err := w.session(from, "pw-client", "stream", "-attached", "-proto", proto, "-interval", "20ms", "-linger", "1s", "-timeout", "10s", target)
	must(w, err)
	w.Cleanup(s.end)
	st := &stream{s, from.name + " to " + target}
	select { // the first answer
	case line, ok := <-s.lines:
		if !ok {
			w.Fatalf("%s: %v", st.name, s.err)
		}
		var r probe.StreamReport
		must(w, json.Unmarshal(line, &r))
		if r.Final {
			w.Fatalf("%s: %s", st.name, line)
		}
	case <-time.After(30 * time.Second):
		w.Fatalf("%s: no answer", st.name)
	}
	return st
}

type stream struct {
	s    *session
	name string
}

func (s *stream) soFar() (probe.StreamReport, error) { return ask[probe.StreamReport](s.s, s.name) }

// moves waits until more has come back than now.
func (s *stream) moves() error {
	before, err := s.soFar()
	for limit := time.Now().Add(patience); err == nil; {
		var now probe.StreamReport
		if now, err = s.soFar(); err == nil && now.Received > before.Received {
			return nil
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%s: nothing comes back: %+v", s.name, now)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

// stalls waits until nothing has come back for a second.
func (s *stream) stalls() error {
	for limit := time.Now().Add(patience); ; {
		now, err := s.soFar()
		if err != nil {
			return err
		}
		if now.LastReply > time.Second {
			return nil
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%s: answers come on: %+v", s.name, now)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func ask[R any](s *session, name string) (r R, err error) {
	if _, err := s.in.Write([]byte("\n")); err != nil {
		return r, fmt.Errorf("%s: %w", name, err)
	}
	select {
	case line, ok := <-s.lines:
		if !ok {
			<-s.done
			return r, fmt.Errorf("%s has ended: %w", name, s.err)
		}
		return r, json.Unmarshal(line, &r)
	case <-time.After(3 * time.Minute): // the runtime may have to start it first
		return r, fmt.Errorf("%s: no report", name)
	}
}

func last[R any](s *session, name string) (r R, err error) {
	if err := s.in.Close(); err != nil {
		return r, err
	}
	var line []byte
	limit := time.After(time.Minute)
	for {
		select {
		case l, ok := <-s.lines:
			if ok {
				line = l
				continue
			}
			if line == nil {
				<-s.done
				return r, fmt.Errorf("%s: no report: %w", name, s.err)
			}
			return r, json.Unmarshal(line, &r)
		case <-limit:
			return r, fmt.Errorf("%s: does not end", name)
		}
	}
}
