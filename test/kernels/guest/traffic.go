package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long an answer may take on an emulated processor.
const patience = 20 * time.Second

// serve makes every pod and node echo TCP and UDP on podPort.
func (w *world) serve(ctx context.Context) error {
	for _, s := range []*space{w.a.space, w.b.space, w.client.space, w.local.space, w.remote.space} {
		if err := s.do(func() error { return echoServer(ctx) }); err != nil {
			return err
		}
	}
	return nil
}

func echoServer(ctx context.Context) error {
	var cfg net.ListenConfig
	addr := fmt.Sprintf("[::]:%d", podPort)
	l, err := cfg.Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	u, err := cfg.ListenPacket(ctx, "udp", addr)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	context.AfterFunc(ctx, func() { l.Close(); u.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				// The client sees what goes wrong: its echo is not whole.
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	go func() {
		buf := make([]byte, 8192)
		for {
			n, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			if _, err := u.WriteTo(buf[:n], from); err != nil {
				logf("udp echo to %v: %v", from, err)
			}
		}
	}()
	return nil
}

// dial opens a socket inside s.
func (s *space) dial(network string, to netip.AddrPort) (conn net.Conn, err error) {
	err = s.do(func() error {
		conn, err = net.DialTimeout(network, to.String(), patience)
		return err
	})
	return conn, err
}

// pattern differs between any two positions less than 64 KiB apart.
func pattern(size int) []byte {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i*7) ^ byte(i>>8)*31
	}
	return b
}

// tcpEcho sends size bytes through one connection and wants them back.
func (s *space) tcpEcho(to netip.AddrPort, size int) error {
	conn, err := s.dial("tcp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := echoOver(conn, size); err != nil {
		return err
	}
	return finish(conn)
}

// finish ends a TCP connection from both sides: when it returns, nothing of
// it is under way any more.
func finish(conn net.Conn) error {
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	if n, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		return fmt.Errorf("end of the TCP echo from %v: %d more bytes, %w", conn.RemoteAddr(), n, err)
	}
	return nil
}

func echoOver(conn net.Conn, size int) error {
	if err := conn.SetDeadline(time.Now().Add(2 * patience)); err != nil {
		return err
	}
	sent := pattern(size)
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		wrote <- err
	}()
	got := make([]byte, size)
	n, err := io.ReadFull(conn, got)
	if err := errors.Join(err, <-wrote); err != nil {
		return fmt.Errorf("TCP echo from %v: %d of %d bytes: %w", conn.RemoteAddr(), n, size, err)
	}
	if !bytes.Equal(sent, got) {
		return fmt.Errorf("TCP echo from %v differs from what was sent", conn.RemoteAddr())
	}
	return nil
}

// udpEcho exchanges datagrams over one socket, one after the other.
func (s *space) udpEcho(to netip.AddrPort, rounds, size int) error {
	conn, err := s.dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	return datagrams(conn, rounds, size)
}

func datagrams(conn net.Conn, rounds, size int) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	sent, got := pattern(size), make([]byte, size+1)
	for i := range rounds {
		sent[0] = byte(i)
		if _, err := conn.Write(sent); err != nil {
			return fmt.Errorf("UDP to %v, datagram %d: %w", conn.RemoteAddr(), i, err)
		}
		n, err := conn.Read(got)
		if err != nil {
			return fmt.Errorf("UDP echo from %v, datagram %d: %w", conn.RemoteAddr(), i, err)
		}
		if !bytes.Equal(sent, got[:n]) {
			return fmt.Errorf("UDP echo from %v differs from what was sent", conn.RemoteAddr())
		}
	}
	return nil
}

// udpSegments sends datagrams several in one packet (UDP_SEGMENT) and wants
// each of them back, in any order.
func (s *space) udpSegments(to netip.AddrPort, rounds, parts, size int) error {
	conn, err := s.dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
	if err = errors.Join(err, serr, conn.SetDeadline(time.Now().Add(patience))); err != nil {
		return err
	}
	sent, got := pattern(parts*size), make([]byte, size+1)
	for i := range rounds {
		if _, err := conn.Write(sent); err != nil {
			return fmt.Errorf("UDP to %v, segmented write %d: %w", to, i, err)
		}
		for j := range parts {
			n, err := conn.Read(got)
			if err != nil {
				return fmt.Errorf("UDP echo from %v, segmented write %d, datagram %d: %w", to, i, j, err)
			}
			if n != size || !bytes.Contains(sent, got[:n]) {
				return fmt.Errorf("UDP echo from %v: %d bytes that were not sent", to, n)
			}
		}
	}
	return nil
}

// refused wants the answer that nobody listens: an ICMP error.
func (s *space) refused(to netip.AddrPort) error {
	conn, err := s.dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	err = datagrams(conn, 1, 64)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("UDP to closed port %v: %v, want connection refused", to, err)
	}
	return nil
}

// refusedTCP wants a reset at once.
func (s *space) refusedTCP(to netip.AddrPort) error {
	conn, err := s.dial("tcp", to)
	if err == nil {
		return errors.Join(fmt.Errorf("TCP to closed port %v: connected", to), conn.Close())
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("TCP to closed port %v: %v, want connection refused", to, err)
	}
	return nil
}

// pings gives every call its own identifier: a flow of its own.
var pings atomic.Uint32

// ping exchanges echo messages.
func (s *space) ping(to netip.Addr, rounds int) error {
	network, request, reply := "ip4:1", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:58", 128, 129
	}
	var conn *net.IPConn
	err := s.do(func() (err error) {
		conn, err = net.DialIP(network, nil, &net.IPAddr{IP: to.AsSlice()})
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	id, buf := uint16(pings.Add(1)), make([]byte, 256)
	for i := range rounds {
		m := append([]byte{request, 0, 0, 0, byte(id >> 8), byte(id), 0, byte(i)}, pattern(56)...)
		if to.Is4() {
			sum := internetSum(m)
			m[2], m[3] = byte(sum>>8), byte(sum)
		}
		if _, err := conn.Write(m); err != nil {
			return fmt.Errorf("echo request to %v: %w", to, err)
		}
		for {
			n, _, err := conn.ReadFrom(buf)
			if err != nil {
				return fmt.Errorf("echo reply %d from %v: %w", i, to, err)
			}
			if n == len(m) && buf[0] == reply && bytes.Equal(buf[4:n], m[4:]) {
				break
			}
		}
	}
	return nil
}

func internetSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
