package services

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// caller is a process that makes calls in one namespace.
type caller struct {
	name string
	ns   *cluster.Netns
	proc *cluster.Process

	mu      sync.Mutex
	last    int
	waiting map[int]chan probe.CallResult
}

func newCaller(ctx context.Context, name string, ns *cluster.Netns) (*caller, error) {
	p, err := ns.Start(ctx, "pw-client", "calls")
	if err != nil {
		return nil, err
	}
	c := &caller{name: name, ns: ns, proc: p, waiting: map[int]chan probe.CallResult{}}
	go func() {
		for {
			var r probe.CallResult
			if err := p.JSON(ctx, &r); err != nil {
				return
			}
			c.mu.Lock()
			ch := c.waiting[r.ID]
			delete(c.waiting, r.ID)
			c.mu.Unlock()
			if ch != nil {
				ch <- r
			}
		}
	}()
	return c, nil
}

// begin makes a call whose result comes by the channel; giveUp ends it.
func (c *caller) begin(call probe.Call) (result chan probe.CallResult, giveUp func() error, err error) {
	c.mu.Lock()
	c.last++
	call.ID = c.last
	result = make(chan probe.CallResult, 1)
	c.waiting[call.ID] = result
	c.mu.Unlock()
	if call.Timeout == 0 {
		call.Timeout = patience
	}
	giveUp = func() error { return c.say(probe.Call{ID: call.ID, Cancel: true}) }
	return result, giveUp, c.say(call)
}

func (c *caller) say(call probe.Call) error {
	line, err := json.Marshal(call)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err = c.proc.Stdin.Write(append(line, '\n'))
	return err
}

// call makes a call and waits for its end.
func (c *caller) call(ctx context.Context, call probe.Call) (probe.CallResult, error) {
	result, _, err := c.begin(call)
	if err != nil {
		return probe.CallResult{}, err
	}
	select {
	case r := <-result:
		if len(r.Attempts) == 0 {
			return r, errors.New("no attempt was made")
		}
		return r, nil
	case <-c.proc.Done():
		return probe.CallResult{}, fmt.Errorf("the caller %s ended: %s", c.name, c.proc.Stderr())
	case <-ctx.Done():
		return probe.CallResult{}, fmt.Errorf("%s calls %s: %w", c.name, call.Target, ctx.Err())
	}
}
