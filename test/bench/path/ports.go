package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// Ports that clients bind to: above the servers', below those that kernels
// choose. One of the latter lingers after its connection, too.
const (
	minPort     = 10000
	kernelPorts = 61000
	maxPort     = kernelPorts - 1
	warmUp      = 50 // connections of pw-path-core before those that count
)

// kernelPortRange is what the kernel of a namespace chooses from.
func kernelPortRange(ns *cluster.Netns) error {
	return ns.Sysctl("net/ipv4/ip_local_port_range", fmt.Sprintf("%d 65535", kernelPorts))
}

type portRange struct{ first, last int }

// A turn gives out the ports of its ranges in order, and then again.
type turn struct {
	ranges []portRange
	at     int
	again  bool // all were given out before
}

// take gives out as many ports, with those that warm up, all of one range, and
// says whether they were given out before.
func (t *turn) take(count int) (portRange, bool, error) {
	count += warmUp
	fits := func() (portRange, bool) {
		for _, r := range t.ranges {
			if first := max(t.at, r.first); first+count-1 <= r.last {
				t.at = first + count
				return portRange{first, first + count - 1}, true
			}
		}
		return portRange{}, false
	}
	if r, ok := fits(); ok {
		return r, t.again, nil
	}
	t.at, t.again = 0, true
	r, ok := fits()
	if !ok {
		return r, false, fmt.Errorf("%d ports in a row are more than a client has: measure at a smaller --scale", count)
	}
	return r, true, nil
}

// clientPorts are those of clients in one namespace. Only workloads that
// open many sockets take any; the others leave theirs to the kernel.
type clientPorts struct{ tcp, udp turn }

// podPorts are those of pods, and of the host outside.
func podPorts() clientPorts {
	all := []portRange{{minPort, maxPort}}
	return clientPorts{tcp: turn{ranges: all}, udp: turn{ranges: all}}
}

// fillingPorts leave those aside that many datagrams were sent from: the first
// of a flow comes from others.
func fillingPorts() clientPorts {
	p := podPorts()
	p.udp = turn{ranges: []portRange{{minPort + portsToFill, maxPort}}}
	return p
}

// nodePorts are those of a process of the node. They leave those aside that the
// node's other sockets and NodePorts have.
func nodePorts() clientPorts {
	all := []portRange{{17000, 29999}, {33000, maxPort}}
	return clientPorts{tcp: turn{ranges: all}, udp: turn{ranges: all}}
}

// take is the first of the ports for a workload, which are free. A connection
// that has ended holds its port for a minute more: who comes round to it
// earlier waits, and says so.
func (p *clientPorts) take(ctx context.Context, ns *cluster.Netns, load workload, count int, say func(format string, args ...any)) (int, error) {
	switch strings.TrimPrefix(load.name, "two-") {
	case "first":
		r, _, err := p.udp.take(count)
		return r.first, err
	case "crr":
		r, again, err := p.tcp.take(count)
		if err != nil || !again {
			return r.first, err
		}
		err = await(ctx, func() (left time.Duration, busy bool, err error) {
			err = ns.Do(func() error {
				left, busy, err = lingering(r)
				return err
			})
			return left, busy, err
		}, func(left time.Duration) {
			say("waits %.0f s for connections that linger on ports %d to %d", left.Seconds(), r.first, r.last)
		})
		return r.first, err
	}
	return 0, nil
}

// sayer prints what a mode has to say.
func sayer(out io.Writer, mode string) func(format string, args ...any) {
	return func(format string, args ...any) { fmt.Fprintf(out, mode+" "+format+"\n", args...) }
}

// await looks again after what is left by the last look, until nothing is busy.
// A wait that somebody may wonder about is announced.
func await(ctx context.Context, look func() (left time.Duration, busy bool, err error), announce func(left time.Duration)) error {
	announced := false
	for {
		left, busy, err := look()
		if err != nil || !busy {
			return err
		}
		if left >= time.Second && !announced {
			announce(left)
			announced = true
		}
		select {
		// The kernel's timers are late by up to some seconds.
		case <-time.After(max(left, 100*time.Millisecond)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lingering asks the kernel of this thread's namespace whether connections
// that have ended hold ports of the range, and for how long they are to.
func lingering(r portRange) (left time.Duration, any bool, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		socks, err := netlink.SocketDiagTCP(family)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return 0, false, fmt.Errorf("TCP sockets: %w", err)
		}
		// Not all of them: look again.
		any = any || err != nil
		for _, s := range socks {
			port := int(s.ID.SourcePort)
			if s.State == netlink.TCP_TIME_WAIT && r.first <= port && port <= r.last {
				any = true
				left = max(left, time.Duration(s.Expires)*time.Millisecond)
			}
		}
	}
	return left, any, nil
}
