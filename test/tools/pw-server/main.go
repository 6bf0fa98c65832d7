// Command pw-server answers TCP and UDP on one port in both families with a
// JSON line that says who it is and whom it sees.
//
// TCP is line based. "SINK n" is followed by n raw bytes, which are counted
// and summed; "SOURCE n" is answered by n raw bytes; every other line is
// echoed. A UDP datagram is answered by one datagram.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/podweir/podweir/test/tools/probe"
)

func main() {
	port := flag.Int("port", 8080, "TCP and UDP port")
	host, _ := os.Hostname()
	name := flag.String("name", host, "name given in every answer")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *name, *port); err != nil {
		fmt.Fprintln(os.Stderr, "pw-server:", err)
		os.Exit(1)
	}
}

type server struct{ name string }

// serve listens in each family that the namespace has and says so on
// standard output when all of it is ready.
func serve(ctx context.Context, name string, port int) error {
	s := server{name}
	// MPTCP sockets behave differently from what is measured here.
	// A server that a busy machine lets wait for seconds loses no datagram.
	lc := net.ListenConfig{Control: probe.LargeBuffer}
	lc.SetMultipathTCP(false)
	addr := ":" + strconv.Itoa(port)
	for _, family := range []string{"4", "6"} {
		l, err := lc.Listen(ctx, "tcp"+family, addr)
		if err != nil {
			return fmt.Errorf("listen on TCP port %d, IPv%s: %w", port, family, err)
		}
		go s.tcp(l)
		u, err := lc.ListenPacket(ctx, "udp"+family, addr)
		if err != nil {
			return fmt.Errorf("listen on UDP port %d, IPv%s: %w", port, family, err)
		}
		if family == "4" {
			go s.udp4(u)
		} else {
			go s.udp6(u)
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(probe.Ready{Ready: true, Name: name, Port: port}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (s server) tcp(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, "pw-server: accept:", err)
			return
		}
		go func() {
			defer c.Close()
			if err := s.conn(c); err != nil && err != io.EOF {
				fmt.Fprintf(os.Stderr, "pw-server: %v: %v\n", c.RemoteAddr(), err)
			}
		}()
	}
}

func (s server) conn(c net.Conn) error {
	r := bufio.NewReaderSize(c, 64<<10)
	enc := json.NewEncoder(c)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return err
		}
		line = strings.TrimSpace(line)
		rep := probe.Reply{Server: s.name, Proto: "tcp", Peer: c.RemoteAddr().String(), Local: c.LocalAddr().String()}
		word, arg, _ := strings.Cut(line, " ")
		n, numErr := strconv.ParseInt(arg, 10, 64)
		switch {
		case word == "SINK" && numErr == nil:
			sum := crc32.NewIEEE()
			if rep.Bytes, err = io.CopyN(sum, r, n); err != nil {
				return err
			}
			rep.CRC32 = sum.Sum32()
		case word == "SOURCE" && numErr == nil:
			if _, err := io.CopyN(c, probe.Pattern(), n); err != nil {
				return err
			}
			continue
		default:
			rep.Echo = line
		}
		if err := enc.Encode(rep); err != nil {
			return err
		}
	}
}

// answer is the datagram for what came from peer, sent to local.
func (s server) answer(peer net.Addr, local net.IP, port int, data []byte) []byte {
	out, err := json.Marshal(probe.Reply{
		Server: s.name, Proto: "udp", Peer: peer.String(),
		Local: net.JoinHostPort(local.String(), strconv.Itoa(port)), Echo: string(data),
	})
	if err != nil { // strings and numbers only
		panic(err)
	}
	return out
}

func portOf(u net.PacketConn) int { return u.LocalAddr().(*net.UDPAddr).Port }

// udp4 answers from the very address a datagram was sent to, which the
// wildcard socket alone would not do on a host with several.
func (s server) udp4(u net.PacketConn) {
	p := ipv4.NewPacketConn(u)
	if err := p.SetControlMessage(ipv4.FlagDst, true); err != nil {
		fmt.Fprintln(os.Stderr, "pw-server: IP_PKTINFO:", err)
		return
	}
	buf := make([]byte, 64<<10)
	for {
		n, cm, peer, err := p.ReadFrom(buf)
		if err != nil {
			fmt.Fprintln(os.Stderr, "pw-server: UDP read:", err)
			continue
		}
		if _, err := p.WriteTo(s.answer(peer, cm.Dst, portOf(u), buf[:n]), &ipv4.ControlMessage{Src: cm.Dst}, peer); err != nil {
			fmt.Fprintf(os.Stderr, "pw-server: UDP answer to %v: %v\n", peer, err)
		}
	}
}

func (s server) udp6(u net.PacketConn) {
	p := ipv6.NewPacketConn(u)
	if err := p.SetControlMessage(ipv6.FlagDst, true); err != nil {
		fmt.Fprintln(os.Stderr, "pw-server: IPV6_RECVPKTINFO:", err)
		return
	}
	buf := make([]byte, 64<<10)
	for {
		n, cm, peer, err := p.ReadFrom(buf)
		if err != nil {
			fmt.Fprintln(os.Stderr, "pw-server: UDP read:", err)
			continue
		}
		if _, err := p.WriteTo(s.answer(peer, cm.Dst, portOf(u), buf[:n]), &ipv6.ControlMessage{Src: cm.Dst}, peer); err != nil {
			fmt.Fprintf(os.Stderr, "pw-server: UDP answer to %v: %v\n", peer, err)
		}
	}
}
