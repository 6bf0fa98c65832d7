package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/tools/probe"
)

// calls reads one [probe.Call] per line, makes all of them at a time and
// prints one [probe.CallResult] for each, until standard input ends.
func calls(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	c := caller{running: map[int]context.CancelFunc{}}
	c.ports.Store(rand.Uint32())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var call probe.Call
		if err := json.Unmarshal(in.Bytes(), &call); err != nil {
			return false, fmt.Errorf("call %q: %w", in.Text(), err)
		}
		if call.Cancel {
			c.cancel(call.ID)
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		c.mu.Lock()
		c.running[call.ID] = cancel
		c.mu.Unlock()
		go func() {
			defer c.cancel(call.ID)
			c.say(c.make(ctx, *o, call))
		}()
	}
	return true, in.Err()
}

type caller struct {
	mu      sync.Mutex
	running map[int]context.CancelFunc
	out     sync.Mutex
	ports   atomic.Uint32
}

// port is a source port, none of which comes twice before all have. The
// kernel chooses at random, and a datagram from a port that a call was made
// from minutes ago belongs to the flow of that call.
func (c *caller) port() int {
	const first, last = 32768, 60999
	return first + int(c.ports.Add(1)%(last-first+1))
}

func (c *caller) cancel(id int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stop := c.running[id]; stop != nil {
		stop()
		delete(c.running, id)
	}
}

func (c *caller) say(r probe.CallResult) {
	c.out.Lock()
	defer c.out.Unlock()
	_ = print(r)
}

// make makes the exchanges of one call, one after the other.
func (c *caller) make(ctx context.Context, o options, call probe.Call) probe.CallResult {
	o.proto, o.target, o.source, o.sport, o.timeout = call.Proto, call.Target, call.Source, call.SPort, call.Timeout
	r := probe.CallResult{ID: call.ID}
	servers := map[string]bool{}
	for n := 0; n < max(call.Count, 1) || len(servers) < call.Servers && n < call.Most; n++ {
		a := c.attempt(ctx, o, call)
		r.Attempts = append(r.Attempts, a)
		switch {
		case a.OK:
			servers[a.Reply.Server] = true
		case a.Kind != probe.Refused:
			return r
		}
	}
	return r
}

func (c *caller) attempt(ctx context.Context, o options, call probe.Call) probe.Attempt {
	exchange := func() probe.Attempt { return o.exchange(ctx, "call") }
	if call.Unconnected {
		exchange = func() probe.Attempt { return o.unconnected(ctx) }
	}
	if call.Proto != "udp" || call.SPort != 0 {
		return exchange()
	}
	var a probe.Attempt
	for range 100 {
		o.sport = c.port()
		if a = exchange(); a.Kind != probe.InUse {
			break
		}
	}
	return a
}

// unconnected sends one datagram by a socket that takes an answer from
// anybody; Remote is who gave it.
func (o *options) unconnected(ctx context.Context) probe.Attempt {
	start := time.Now()
	a := probe.Attempt{}
	err := func() error {
		dst, err := netip.ParseAddrPort(o.target)
		if err != nil {
			return err
		}
		network := "udp4"
		if dst.Addr().Is6() {
			network = "udp6"
		}
		lc := net.ListenConfig{Control: probe.LargeBuffer}
		c, err := lc.ListenPacket(ctx, network, net.JoinHostPort(o.source, fmt.Sprint(o.sport)))
		if err != nil {
			return err
		}
		defer c.Close()
		a.Local = c.LocalAddr().String()
		if err := c.SetDeadline(time.Now().Add(o.timeout)); err != nil {
			return err
		}
		defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) })()
		if _, err := c.WriteTo([]byte("call"), net.UDPAddrFromAddrPort(dst)); err != nil {
			return err
		}
		buf := make([]byte, 64<<10)
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		a.Remote, a.Reply = from.String(), &probe.Reply{}
		return json.Unmarshal(buf[:n], a.Reply)
	}()
	a.Took = time.Since(start)
	if err != nil {
		a.Kind, a.Error, a.Reply = kind(err), err.Error(), nil
		return a
	}
	a.OK = true
	return a
}

// peerName asks the kernel whom a socket is connected to.
func peerName(c net.Conn) (string, error) {
	sc, is := c.(syscall.Conn)
	if !is {
		return "", fmt.Errorf("%T has no descriptor", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return "", err
	}
	var sa unix.Sockaddr
	var serr error
	if err := raw.Control(func(fd uintptr) { sa, serr = unix.Getpeername(int(fd)) }); err != nil {
		return "", err
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)).String(), serr
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)).String(), serr
	}
	return "", serr
}
