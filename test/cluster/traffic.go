package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"time"

	"github.com/podweir/podweir/test/tools/probe"
)

// ServerPort is where [Netns.Serve] listens unless told otherwise.
const ServerPort = 8080

// Serve starts pw-server inside the namespace, under this name, and waits
// until it accepts. It lives as long as ctx or the cluster, whichever ends
// first.
func (n *Netns) Serve(ctx context.Context, name string, port int) (*Process, error) {
	p, err := n.Start(ctx, "pw-server", "-name", name, "-port", strconv.Itoa(port))
	if err != nil {
		return nil, err
	}
	var ready probe.Ready
	if err := p.JSON(ctx, &ready); err != nil {
		return nil, err
	}
	return p, nil
}

// client runs one mode of pw-client and decodes what it prints. A client
// that failed to reach its target is a result, not an error.
func (n *Netns) client(ctx context.Context, v any, args ...string) error {
	out, err := n.Exec(ctx, append([]string{"pw-client"}, args...)...)
	if exit := (*ExitError)(nil); err != nil && !(errors.As(err, &exit) && out != "") {
		return err
	}
	if err := json.Unmarshal([]byte(out), v); err != nil {
		return fmt.Errorf("pw-client in %s said %q: %w", n.Name, out, err)
	}
	return nil
}

// Send connects to target ("address:port") inside the namespace as often as
// the options say (flags of "pw-client send", such as "-proto", "udp",
// "-count", "1000"); the default is one TCP connection.
func (n *Netns) Send(ctx context.Context, target string, options ...string) (*probe.Summary, error) {
	var s probe.Summary
	return &s, n.client(ctx, &s, append(append([]string{"send"}, options...), target)...)
}

// Bulk transfers many bytes over one TCP connection.
func (n *Netns) Bulk(ctx context.Context, target string, options ...string) (*probe.BulkReport, error) {
	var r probe.BulkReport
	return &r, n.client(ctx, &r, append(append([]string{"bulk"}, options...), target)...)
}

// Ping sends ICMP echo requests.
func (n *Netns) Ping(ctx context.Context, target string, options ...string) (*probe.PingReport, error) {
	var r probe.PingReport
	return &r, n.client(ctx, &r, append(append([]string{"ping"}, options...), target)...)
}

// Stream is a long-lived flow of numbered messages.
type Stream struct {
	*Process
	run       Run
	overflows uint64 // when it began
}

// Stream starts a long-lived flow and waits for its first answer. A flow
// that gets none is an error that holds the client's report.
func (n *Netns) Stream(ctx context.Context, target string, options ...string) (*Stream, error) {
	overflows, err := n.c.overflows()
	if err != nil {
		return nil, err
	}
	p, err := n.Start(ctx, append(append([]string{"pw-client", "stream"}, options...), target)...)
	if err != nil {
		return nil, err
	}
	var first probe.StreamReport
	if err := p.JSON(ctx, &first); err != nil {
		return nil, err
	}
	if first.Final {
		return nil, fmt.Errorf("stream from %s to %s: %s", n.Name, target, first.Error)
	}
	return &Stream{p, n.c.Run, overflows}, nil
}

// Report asks the running flow how it is.
func (s *Stream) Report(ctx context.Context) (probe.StreamReport, error) {
	var r probe.StreamReport
	if _, err := s.Stdin.Write([]byte("\n")); err != nil {
		return r, err
	}
	return r, s.JSON(ctx, &r)
}

// Await asks until the report satisfies ok, or ctx ends.
func (s *Stream) Await(ctx context.Context, what string, ok func(probe.StreamReport) bool) (probe.StreamReport, error) {
	for {
		r, err := s.Report(ctx)
		if err != nil || ok(r) {
			return r, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return r, fmt.Errorf("stream of %s: %s: %w; last report %+v", s.netns, what, ctx.Err(), r)
		}
	}
}

// Stop ends the flow and returns the final account. Lost are the messages that
// are missing beyond what queues of the machine had no room for since the flow
// began: those are Overflowed.
func (s *Stream) Stop(ctx context.Context) (probe.StreamReport, error) {
	var r probe.StreamReport
	if err := s.Signal(syscall.SIGTERM); err != nil {
		return r, err
	}
	for !r.Final {
		if err := s.JSON(ctx, &r); err != nil {
			return r, err
		}
	}
	if r.Lost > 0 {
		now, err := s.run.overflows()
		if err != nil {
			return r, err
		}
		r.Overflowed = min(r.Lost, now-s.overflows)
		r.Lost -= r.Overflowed
	}
	return r, nil
}

// Caller is a client that makes new connections at a steady pace.
type Caller struct {
	*Process
	From, Target string
}

// Caller starts "pw-client load" and waits for its first success or failure.
func (n *Netns) Caller(ctx context.Context, target string, options ...string) (*Caller, error) {
	p, err := n.Start(ctx, append(append([]string{"pw-client", "load"}, options...), target)...)
	if err != nil {
		return nil, err
	}
	c := &Caller{p, n.Name, target}
	return c, c.Progress(ctx, 1)
}

// Report asks the running client how it is.
func (c *Caller) Report(ctx context.Context) (probe.Summary, error) {
	var s probe.Summary
	if _, err := c.Stdin.Write([]byte("\n")); err != nil {
		return s, err
	}
	return s, c.JSON(ctx, &s)
}

// Progress awaits so many more attempts; the first that failed is an error.
func (c *Caller) Progress(ctx context.Context, more int) error {
	for goal := -1; ; {
		s, err := c.Report(ctx)
		if err == nil && s.OK != s.Attempts {
			err = fmt.Errorf("%d of %d failed: %v, first %+v", s.Attempts-s.OK, s.Attempts, s.Failed, s.Failure)
		}
		if goal < 0 {
			goal = s.Attempts + more
		}
		if err == nil && s.Attempts >= goal {
			return nil
		}
		if err == nil {
			select {
			case <-time.After(10 * time.Millisecond):
				continue
			case <-ctx.Done():
				err = fmt.Errorf("%d attempts, want %d: %w", s.Attempts, goal, ctx.Err())
			}
		}
		return fmt.Errorf("calls from %s to %s: %w", c.From, c.Target, err)
	}
}

// Stop ends the client and returns the final account.
func (c *Caller) Stop(ctx context.Context) (probe.Summary, error) {
	var s probe.Summary
	if err := c.Signal(syscall.SIGTERM); err != nil {
		return s, err
	}
	for !s.Final {
		if err := c.JSON(ctx, &s); err != nil {
			return s, err
		}
	}
	return s, nil
}

// Eventually calls fn until it succeeds; when ctx ends it returns fn's last
// error. It is for effects across processes that announce themselves only by
// traffic; the pause between two calls is short.
func Eventually(ctx context.Context, fn func() error) error {
	for {
		err := fn()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}
