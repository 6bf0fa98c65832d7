package mesh

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// Serve answers TCP and UDP in both families on these ports of a namespace
// until ctx ends: with the server's name and the peer it saw.
func Serve(ctx context.Context, ns *cluster.Netns, name string, ports ...int) error {
	var open []interface{ Close() error }
	for _, port := range ports {
		for _, family := range []string{"4", "6"} {
			addr := ":" + strconv.Itoa(port)
			var l net.Listener
			var u net.PacketConn
			err := ns.Do(func() (err error) {
				lc := net.ListenConfig{Control: probe.LargeBuffer}
				lc.SetMultipathTCP(false)
				if l, err = lc.Listen(ctx, "tcp"+family, addr); err != nil {
					return err
				}
				u, err = lc.ListenPacket(ctx, "udp"+family, addr)
				return err
			})
			if err != nil {
				return fmt.Errorf("serve port %d in %s: %w", port, ns.Name, err)
			}
			open = append(open, l, u)
			go accept(l, name)
			go answer(u, family, name)
		}
	}
	context.AfterFunc(ctx, func() {
		for _, c := range open {
			_ = c.Close()
		}
	})
	return nil
}

// accept greets every connection and then waits for its end.
func accept(l net.Listener, name string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			if _, err := fmt.Fprintf(c, "%s %s\n", name, c.RemoteAddr()); err != nil {
				return
			}
			// The peer resets the connection; nothing is to linger.
			_ = c.(*net.TCPConn).SetLinger(0)
			_, _ = c.Read(make([]byte, 1))
		}()
	}
}

// answer replies from the very address that was asked.
func answer(u net.PacketConn, family, name string) {
	buf := make([]byte, 2048)
	p4, p6 := ipv4.NewPacketConn(u), ipv6.NewPacketConn(u)
	if family == "4" {
		_ = p4.SetControlMessage(ipv4.FlagDst, true)
	} else {
		_ = p6.SetControlMessage(ipv6.FlagDst, true)
	}
	for {
		var peer net.Addr
		var err error
		var cm4 *ipv4.ControlMessage
		var cm6 *ipv6.ControlMessage
		if family == "4" {
			_, cm4, peer, err = p4.ReadFrom(buf)
		} else {
			_, cm6, peer, err = p6.ReadFrom(buf)
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		line := []byte(name + " " + peer.String() + "\n")
		if family == "4" {
			_, _ = p4.WriteTo(line, &ipv4.ControlMessage{Src: cm4.Dst}, peer)
		} else {
			_, _ = p6.WriteTo(line, &ipv6.ControlMessage{Src: cm6.Dst}, peer)
		}
	}
}

// parse reads a server's line.
func parse(line string) (server string, peer netip.Addr) {
	server, at, _ := strings.Cut(strings.TrimSpace(line), " ")
	ap, _ := netip.ParseAddrPort(at)
	return server, ap.Addr()
}

// Dial opens one connection from a namespace, for tests that keep it.
func Dial(ctx context.Context, ns *cluster.Netns, network, target string) (net.Conn, error) {
	var c net.Conn
	err := ns.Do(func() (err error) {
		d := net.Dialer{Control: probe.LargeBuffer}
		d.SetMultipathTCP(false)
		c, err = d.DialContext(ctx, network, target)
		return err
	})
	return c, err
}

// Listen opens a listener in a namespace.
func Listen(ctx context.Context, ns *cluster.Netns, port int) (net.Listener, error) {
	var l net.Listener
	err := ns.Do(func() (err error) {
		lc := net.ListenConfig{}
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(ctx, "tcp", ":"+strconv.Itoa(port))
		return err
	})
	return l, err
}
