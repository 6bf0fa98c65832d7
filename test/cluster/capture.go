package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Capture records the frames of one device until it is closed.
type Capture struct {
	file *os.File
	name string

	mu      sync.Mutex
	missed  uint64
	packets []*Packet
	more    chan struct{} // closed and replaced at each packet
	err     error         // why it ended
}

// captureBuffer holds what comes while the reader gets no CPU: a minute's
// worth of what tests send. It is a limit; only what waits takes memory.
const captureBuffer = 256 << 20

// Capture starts recording on a device of the namespace. When it returns,
// the socket sees every frame from now on.
func (n *Netns) Capture(ctx context.Context, device string) (*Capture, error) {
	c := &Capture{name: n.Name + "/" + device, more: make(chan struct{})}
	err := n.Do(func() error {
		ifi, err := net.InterfaceByName(device)
		if err != nil {
			return fmt.Errorf("%s: %w", device, err)
		}
		proto := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}) // network order
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		c.file = os.NewFile(uintptr(fd), "packet socket")
		// Auxiliary data tells which checksums a device was still to fill in.
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: ifi.Index}),
			unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP,
				&unix.PacketMreq{Ifindex: int32(ifi.Index), Type: unix.PACKET_MR_PROMISC}),
		)
	})
	if err != nil {
		if c.file != nil {
			err = errors.Join(err, c.file.Close())
		}
		return nil, fmt.Errorf("capture on %s: %w", c.name, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.file.Close() })
	go func() {
		defer stop()
		c.read()
	}()
	return c, nil
}

func (c *Capture) read() {
	raw, err := c.file.SyscallConn()
	if err != nil {
		c.end(err)
		return
	}
	buf, oob := make([]byte, 128<<10), make([]byte, 256)
	for {
		var n, oobn int
		var from unix.Sockaddr
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			n, oobn, _, from, rerr = unix.Recvmsg(int(fd), buf, oob, 0)
			return rerr != syscall.EAGAIN
		})
		if err = errors.Join(err, rerr); err != nil {
			if rerr == unix.EINTR || rerr == unix.ENETDOWN {
				continue
			}
			c.end(err)
			return
		}
		frame := make([]byte, n)
		copy(frame, buf[:n])
		p := decode(time.Now(), frame, csumNotReady(oob[:oobn]))
		if ll, ok := from.(*unix.SockaddrLinklayer); ok {
			p.Outgoing = ll.Pkttype == unix.PACKET_OUTGOING
		}
		c.mu.Lock()
		c.packets = append(c.packets, p)
		close(c.more)
		c.more = make(chan struct{})
		c.mu.Unlock()
	}
}

func (c *Capture) end(err error) {
	if errors.Is(err, os.ErrClosed) {
		err = io.EOF
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	close(c.more)
}

// csumNotReady reads the status of struct tpacket_auxdata.
func csumNotReady(oob []byte) bool {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return false
	}
	for _, m := range msgs {
		if m.Header.Level == unix.SOL_PACKET && m.Header.Type == unix.PACKET_AUXDATA && len(m.Data) >= 4 {
			return binary.NativeEndian.Uint32(m.Data)&unix.TP_STATUS_CSUMNOTREADY != 0
		}
	}
	return false
}

// Packets returns what has been recorded so far.
func (c *Capture) Packets() []*Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*Packet(nil), c.packets...)
}

// Missed says how many frames found no room in the buffer and are not among
// the recorded ones, though the device saw them. It needs an open capture.
func (c *Capture) Missed() (uint64, error) {
	raw, err := c.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var serr error
	err = raw.Control(func(fd uintptr) {
		var st *unix.TpacketStats // since the last time it was asked for
		if st, serr = unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS); serr == nil {
			c.missed += uint64(st.Drops)
		}
	})
	if err = errors.Join(err, serr); err != nil {
		return 0, fmt.Errorf("statistics of the capture on %s: %w", c.name, err)
	}
	return c.missed, nil
}

// Find waits for the first recorded packet that matches, past or future.
func (c *Capture) Find(ctx context.Context, what string, match func(*Packet) bool) (*Packet, error) {
	for next := 0; ; {
		c.mu.Lock()
		packets, more, err := c.packets, c.more, c.err
		c.mu.Unlock()
		for ; next < len(packets); next++ {
			if match(packets[next]) {
				return packets[next], nil
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s: no %s among %d packets: %w", c.name, what, len(packets), err)
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: no %s among %d packets: %w%s", c.name, what, len(packets), ctx.Err(), sample(packets))
		}
	}
}

// sample lists a few packets for an error message.
func sample(packets []*Packet) string {
	const most = 10
	out := ""
	for i, p := range packets {
		if i == most {
			return out + "\n\t..."
		}
		out += "\n\t" + p.String()
	}
	return out
}

// Matching returns the packets recorded so far that match.
func (c *Capture) Matching(match func(*Packet) bool) []*Packet {
	var out []*Packet
	for _, p := range c.Packets() {
		if match(p) {
			out = append(out, p)
		}
	}
	return out
}

// Close stops recording. What was recorded stays readable.
func (c *Capture) Close() error {
	if err := c.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
