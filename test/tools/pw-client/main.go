// Command pw-client talks to pw-server as an application in a pod would and
// prints what it saw as JSON (see package probe). Exit status 0 means that
// everything succeeded, 1 that something did not, 2 wrong usage.
//
//	pw-client send   [flags] ADDR:PORT   connect, one request, close; -count times
//	pw-client load   [flags] ADDR:PORT   the same at a steady pace, until a signal
//	pw-client stream [flags] ADDR:PORT   one long flow with sequence numbers
//	pw-client bulk   [flags] ADDR:PORT   one large TCP transfer
//	pw-client ping   [flags] ADDR        ICMP echo
//	pw-client lookup [flags] NAME        addresses by the resolver
//	pw-client calls                      whatever standard input asks for
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/tools/probe"
)

// options are the flags that all modes share.
type options struct {
	proto   string
	source  string
	sport   int
	socket  string
	timeout time.Duration
	target  string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:]))
}

func run(ctx context.Context, args []string) int {
	modes := map[string]func(context.Context, *flag.FlagSet, *options, []string) (bool, error){
		"send": send, "load": load, "stream": stream, "bulk": bulk, "ping": ping, "calls": calls, "lookup": lookup,
	}
	if len(args) == 0 || modes[args[0]] == nil {
		fmt.Fprintln(os.Stderr, "usage: pw-client send|load|stream|bulk|ping|calls|lookup [flags] TARGET")
		return 2
	}
	var o options
	fs := flag.NewFlagSet("pw-client "+args[0], flag.ExitOnError)
	fs.StringVar(&o.proto, "proto", "tcp", "tcp or udp")
	fs.StringVar(&o.source, "source", "", "source address")
	fs.IntVar(&o.sport, "sport", 0, "source port")
	fs.StringVar(&o.socket, "socket", "", "of TCP: mapped (an IPv6 socket, IPv4 as v4-mapped address), mptcp (default: plain)")
	fs.DurationVar(&o.timeout, "timeout", time.Second, "for connecting and for each answer")
	ok, err := modes[args[0]](ctx, fs, &o, args[1:])
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "pw-client:", err)
		return 2
	case !ok:
		return 1
	}
	return 0
}

// parse reads the flags and the one target.
func (o *options) parse(fs *flag.FlagSet, args []string) error {
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() != 1 {
		return fmt.Errorf("%s wants one target, got %q", fs.Name(), fs.Args())
	}
	o.target = fs.Arg(0)
	if o.proto != "tcp" && o.proto != "udp" {
		return fmt.Errorf("-proto %q: want tcp or udp", o.proto)
	}
	switch o.socket {
	case "", "mapped", "mptcp":
	default:
		return fmt.Errorf("-socket %q: want mapped or mptcp", o.socket)
	}
	return nil
}

// dial connects from the source asked for. A source port is bound with
// SO_REUSEADDR, so that it can be used again at once.
func (o *options) dial(ctx context.Context) (net.Conn, error) {
	if o.socket == "mapped" {
		return o.dialMapped()
	}
	d := net.Dialer{Timeout: o.timeout, Control: probe.LargeBuffer}
	d.SetMultipathTCP(o.socket == "mptcp")
	if o.source != "" || o.sport != 0 {
		ip := netip.IPv4Unspecified()
		if t, err := netip.ParseAddrPort(o.target); err == nil && t.Addr().Is6() {
			ip = netip.IPv6Unspecified()
		}
		if o.source != "" {
			var err error
			if ip, err = netip.ParseAddr(o.source); err != nil {
				return nil, fmt.Errorf("-source %q: %w", o.source, err)
			}
		}
		src := netip.AddrPortFrom(ip, uint16(o.sport))
		if o.proto == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(src)
		} else {
			d.LocalAddr = net.TCPAddrFromAddrPort(src)
		}
		d.Control = func(network, address string, c syscall.RawConn) error {
			serr := probe.LargeBuffer(network, address, c)
			err := c.Control(func(fd uintptr) {
				serr = errors.Join(serr, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
			})
			return errors.Join(err, serr)
		}
	}
	return d.DialContext(ctx, o.proto, o.target)
}

// dialMapped connects an IPv6 socket to the v4-mapped form of an IPv4 target.
func (o *options) dialMapped() (net.Conn, error) {
	to, err := netip.ParseAddrPort(o.target)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, fmt.Errorf("IPv6 socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), "mapped")
	defer f.Close()
	timeout := unix.NsecToTimeval(int64(o.timeout)) // of connect, too
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
		return nil, fmt.Errorf("timeout of the socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}); err != nil {
		return nil, fmt.Errorf("connect to %s, v4-mapped: %w", to, err)
	}
	return net.FileConn(f)
}

// kind names an error as package probe does.
func kind(err error) string {
	var ne net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return probe.Refused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EACCES):
		return probe.Unreachable
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return probe.Reset
	case errors.Is(err, syscall.EADDRINUSE):
		return probe.InUse
	case errors.As(err, &ne) && ne.Timeout():
		return probe.Timeout
	}
	return probe.Other
}

// tcpInfo returns what the kernel knows about a TCP connection.
func tcpInfo(c net.Conn) *unix.TCPInfo {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return &unix.TCPInfo{}
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return &unix.TCPInfo{}
	}
	info := &unix.TCPInfo{}
	_ = raw.Control(func(fd uintptr) {
		if i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			info = i
		}
	})
	return info
}

func print(v any) error { return json.NewEncoder(os.Stdout).Encode(v) }
