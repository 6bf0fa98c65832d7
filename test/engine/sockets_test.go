package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

const serverPort = 8080

// control sets options of a socket before it is bound.
type control func(fd int) error

// hook has datagrams kept while the test gets no CPU, unless c says otherwise.
func (c control) hook(network, addr string, raw syscall.RawConn) error {
	if err := probe.LargeBuffer(network, addr, raw); err != nil || c == nil {
		return err
	}
	var err error
	cerr := raw.Control(func(fd uintptr) { err = c(int(fd)) })
	return errors.Join(cerr, err)
}

// listen opens a TCP listener inside a namespace, for the test's duration.
func listen(t testing.TB, n *cluster.Netns, addr string, c control) net.Listener {
	t.Helper()
	var l net.Listener
	ok(t, n.Do(func() (err error) {
		lc := net.ListenConfig{Control: c.hook}
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(context.Background(), "tcp", addr)
		return err
	}))
	t.Cleanup(func() { l.Close() })
	return l
}

// dial opens a TCP connection inside a namespace; from is "" or an address.
func dial(ctx context.Context, n *cluster.Netns, from, to string, c control) (net.Conn, error) {
	d := net.Dialer{Control: func(network, addr string, raw syscall.RawConn) error {
		reuse := control(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
		return errors.Join(reuse.hook(network, addr, raw), c.hook(network, addr, raw))
	}}
	d.SetMultipathTCP(false)
	if from != "" {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))
	}
	var conn net.Conn
	err := n.Do(func() (err error) {
		conn, err = d.DialContext(ctx, "tcp", to)
		return err
	})
	return conn, err
}

// udp opens a UDP socket inside a namespace, for the test's duration; to ""
// leaves it unconnected.
func udp(t testing.TB, n *cluster.Netns, from, to string, c control) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	ok(t, n.Do(func() error {
		if to == "" {
			lc := net.ListenConfig{Control: c.hook}
			pc, err := lc.ListenPacket(context.Background(), "udp", from)
			if err == nil {
				conn = pc.(*net.UDPConn)
			}
			return err
		}
		d := net.Dialer{Control: c.hook}
		if from != "" {
			d.LocalAddr = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from))
		}
		pc, err := d.Dial("udp", to)
		if err == nil {
			conn = pc.(*net.UDPConn)
		}
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return conn
}

// echoTCP answers everything with itself until the test ends.
func echoTCP(t testing.TB, n *cluster.Netns, addr string) {
	l := listen(t, n, addr, nil)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
}

// echoUDP answers every datagram with itself until it is closed or the test
// ends.
func echoUDP(t testing.TB, n *cluster.Netns, addr string) *net.UDPConn {
	u := udp(t, n, addr, "", nil)
	go func() {
		buf := make([]byte, 64<<10)
		for {
			k, from, err := u.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = u.WriteToUDPAddrPort(buf[:k], from)
			}
		}
	}()
	return u
}

// talk sends a line and wants it back.
func talk(c net.Conn, what string) error {
	if err := c.SetDeadline(soon()); err != nil {
		return err
	}
	if _, err := io.WriteString(c, what); err != nil {
		return err
	}
	buf := make([]byte, len(what))
	if _, err := io.ReadFull(c, buf); err != nil {
		return fmt.Errorf("answer to %q: %w", what, err)
	}
	if string(buf) != what {
		return fmt.Errorf("answer to %q: %q", what, buf)
	}
	return nil
}

// bytesOf are n bytes that nobody would guess.
func bytesOf(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // never fails
	return b
}

// transfer sends n bytes each way over one TCP connection and compares their
// hashes. The listener's side sends after it has read everything.
func transfer(ctx context.Context, t testing.TB, from *cluster.Netns, l net.Listener, to string, n int, c control) {
	t.Helper()
	up, down := bytesOf(1, n), bytesOf(2, n)
	server := make(chan error, 1)
	go func() {
		server <- func() error {
			c, err := l.Accept()
			if err != nil {
				return err
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			got, err := io.ReadAll(c)
			if err != nil {
				return fmt.Errorf("server: after %d bytes: %w", len(got), err)
			}
			if sha256.Sum256(got) != sha256.Sum256(up) {
				return fmt.Errorf("server got %d bytes that are not the %d sent", len(got), n)
			}
			_, err = c.Write(down)
			return err
		}()
	}()
	err := func() error {
		c, err := dial(ctx, from, "", to, c)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := c.Write(up); err != nil {
			return fmt.Errorf("client: %w", err)
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		got, err := io.ReadAll(c)
		if err != nil {
			return fmt.Errorf("client: after %d bytes: %w", len(got), err)
		}
		if sha256.Sum256(got) != sha256.Sum256(down) {
			return fmt.Errorf("client got %d bytes that are not the %d sent", len(got), n)
		}
		return nil
	}()
	if err != nil {
		t.Errorf("to %s: %v", to, err)
		l.(*net.TCPListener).SetDeadline(time.Now())
		<-server
		l.(*net.TCPListener).SetDeadline(time.Time{})
		return
	}
	if err := <-server; err != nil {
		t.Errorf("to %s: %v", to, err)
	}
}

// datagrams sends datagrams, from large to small, to an echo and compares each
// answer.
func datagrams(t testing.TB, c *net.UDPConn, count, most int) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for i := range count {
		want := bytesOf(byte(i), most-i*(most-1)/max(count-1, 1))
		if _, err := c.Write(want); err != nil {
			t.Errorf("datagram %d: %v", i, err)
			return
		}
		_ = c.SetReadDeadline(soon())
		n, err := c.Read(buf)
		if err != nil || !bytes.Equal(buf[:n], want) {
			t.Errorf("datagram %d of %d bytes: %d bytes came back, %v", i, len(want), n, err)
			return
		}
	}
}

// checksumErrors fails if a stack has seen a wrong checksum.
func checksumErrors(t testing.TB, spaces ...*cluster.Netns) {
	t.Helper()
	for _, n := range spaces {
		got, err := n.SNMP()
		ok(t, err)
		known := 0
		for name, v := range got {
			if !strings.HasSuffix(name, "CsumErrors") {
				continue
			}
			if known++; v != 0 {
				t.Errorf("%s: %s %d", n.Name, name, v)
			}
		}
		if known < 4 {
			t.Errorf("%s: only these counters: %v", n.Name, got)
		}
	}
}

// frames is an AF_PACKET socket of a device, to send what no socket would.
type frames struct {
	fd, ifindex int
	mac         net.HardwareAddr
}

func rawSocket(t testing.TB, n *cluster.Netns, device string) *frames {
	t.Helper()
	f := &frames{}
	ok(t, n.Do(func() error {
		ifi, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		f.ifindex, f.mac = ifi.Index, ifi.HardwareAddr
		f.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return unix.Bind(f.fd, &unix.SockaddrLinklayer{Ifindex: ifi.Index})
	}))
	t.Cleanup(func() { unix.Close(f.fd) })
	return f
}

// send sends a frame, again when the queue is full.
func (f *frames) send(frame []byte) error {
	for {
		_, err := unix.Write(f.fd, frame)
		if err == unix.ENOBUFS || err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		return err
	}
}
