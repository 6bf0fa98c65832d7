package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/podweir/podweir/test/tools/probe"
)

// ping sends -count echo requests, one after the other.
func ping(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	count := fs.Int("count", 1, "number of requests")
	size := fs.Int("size", 56, "bytes of payload")
	if err := o.parse(fs, args); err != nil {
		return false, err
	}
	dst, err := netip.ParseAddr(o.target)
	if err != nil {
		return false, err
	}
	network, listen, number := "ip4:icmp", "0.0.0.0", 1
	var request icmp.Type = ipv4.ICMPTypeEcho
	if dst.Is6() {
		network, listen, number = "ip6:ipv6-icmp", "::", 58
		request = ipv6.ICMPTypeEchoRequest
	}
	if o.source != "" {
		listen = o.source
	}
	c, err := icmp.ListenPacket(network, listen)
	if err != nil {
		return false, fmt.Errorf("raw ICMP socket: %w", err)
	}
	defer c.Close()
	rep := probe.PingReport{}
	id := os.Getpid() & 0xffff
	for seq := 1; seq <= *count && ctx.Err() == nil; seq++ {
		m := icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: seq, Data: make([]byte, *size)}}
		wire, err := m.Marshal(nil)
		if err != nil {
			return false, err
		}
		rep.Sent++
		if _, err := c.WriteTo(wire, &net.IPAddr{IP: dst.AsSlice()}); err != nil {
			rep.ICMP = err.Error()
			continue
		}
		if err := c.SetReadDeadline(time.Now().Add(o.timeout)); err != nil {
			return false, err
		}
		if err := await(c, number, id, seq, &rep); err != nil {
			return false, err
		}
	}
	return rep.Received == rep.Sent && rep.Sent > 0, print(rep)
}

// await reads until the answer to seq, an ICMP error or the deadline.
func await(c *icmp.PacketConn, number, id, seq int, rep *probe.PingReport) error {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
				return nil
			}
			return err
		}
		m, err := icmp.ParseMessage(number, buf[:n])
		if err != nil {
			continue
		}
		switch body := m.Body.(type) {
		case *icmp.Echo:
			if (m.Type == ipv4.ICMPTypeEchoReply || m.Type == ipv6.ICMPTypeEchoReply) && body.ID == id && body.Seq == seq {
				rep.Received++
				rep.From = from.String()
				return nil
			}
		case *icmp.DstUnreach, *icmp.TimeExceeded, *icmp.PacketTooBig:
			rep.ICMP = fmt.Sprintf("%v from %v", m.Type, from)
			return nil
		}
	}
}
