package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/podweir/podweir/test/tools/probe"
)

// stream sends numbered messages over one flow at a steady pace and matches
// the answers. It ends after -duration, at a signal, or when the connection
// fails.
func stream(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	interval := fs.Duration("interval", 5*time.Millisecond, "between two messages")
	duration := fs.Duration("duration", 0, "end after this time; 0: at a signal")
	linger := fs.Duration("linger", 30*time.Second, "wait at most this long for the last answers")
	attached := fs.Bool("attached", false, "end with standard input, too")
	if err := o.parse(fs, args); err != nil {
		return false, err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	if *duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *duration)
		defer cancel()
	}
	s := &streamer{seen: map[uint64]bool{}}
	c, err := o.dial(ctx)
	if err != nil {
		s.rep.Error, s.rep.Kind, s.rep.Final = err.Error(), kind(err), true
		return false, print(s.rep)
	}
	defer c.Close()
	s.conn = c
	s.rep.Local, s.rep.Remote = c.LocalAddr().String(), c.RemoteAddr().String()
	s.last = time.Now()

	received := make(chan error, 1)
	go func() { received <- s.receive() }()
	go func() {
		s.snapshots()
		if *attached {
			end()
		}
	}()
	sendErr := s.send(ctx, *interval)
	if sendErr == nil {
		// All is sent: what is on its way has the time to come back.
		if err := s.finish(*linger); err != nil {
			return false, err
		}
		sendErr = <-received
		if ne := net.Error(nil); errors.As(sendErr, &ne) && ne.Timeout() {
			sendErr = nil
		}
	}
	rep := s.snapshot()
	rep.Final = true
	// At the end, what has not come back is lost.
	rep.Lost = rep.Sent - rep.Received
	if sendErr != nil {
		rep.Error, rep.Kind = sendErr.Error(), kind(sendErr)
	}
	return sendErr == nil && rep.Lost == 0, print(rep)
}

type streamer struct {
	conn net.Conn

	mu   sync.Mutex
	rep  probe.StreamReport
	seen map[uint64]bool // received, above low
	low  uint64          // all below were received
	high uint64          // one above the highest received
	last time.Time
	done bool // nothing more is sent
}

// send writes one message per interval. UDP: an error that an earlier
// datagram caused (port unreachable) is recorded, and sending goes on.
func (s *streamer) send(ctx context.Context, interval time.Duration) error {
	t := time.NewTicker(interval)
	defer t.Stop()
	_, udp := s.conn.(*net.UDPConn)
	for seq := uint64(0); ; seq++ {
		msg := strconv.FormatUint(seq, 10)
		if !udp {
			msg += "\n"
		}
		if err := s.conn.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		if _, err := io.WriteString(s.conn, msg); err != nil {
			if !udp {
				return err
			}
			s.note(err)
		}
		s.mu.Lock()
		s.rep.Sent++
		s.mu.Unlock()
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// overtaken is how long an answer may take that a later one has overtaken.
const overtaken = 2 * time.Second

// finish says that nothing more is sent. The last answer is waited for, however
// busy the server's machine is; when it has come, what is missing is lost, or on
// its way through another processor.
func (s *streamer) finish(linger time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done = true
	wait := linger
	switch {
	case s.rep.Received == s.rep.Sent:
		wait = 0
	case s.high == s.rep.Sent:
		wait = min(overtaken, linger)
	}
	return s.conn.SetReadDeadline(time.Now().Add(wait))
}

func (s *streamer) note(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rep.Error, s.rep.Kind = err.Error(), kind(err)
}

// receive reads answers until the connection ends or all are in.
func (s *streamer) receive() error {
	_, udp := s.conn.(*net.UDPConn)
	r := bufio.NewReaderSize(s.conn, 64<<10)
	buf := make([]byte, 64<<10)
	for {
		var line []byte
		var err error
		if udp {
			var n int
			n, err = s.conn.Read(buf)
			line = buf[:n]
		} else {
			line, err = r.ReadBytes('\n')
		}
		if err != nil {
			if ne := net.Error(nil); udp && !(errors.As(err, &ne) && ne.Timeout()) && !errors.Is(err, net.ErrClosed) {
				s.note(err)
				continue
			}
			return err
		}
		var rep probe.Reply
		if err := json.Unmarshal(line, &rep); err != nil {
			return fmt.Errorf("answer %q: %w", line, err)
		}
		seq, err := strconv.ParseUint(rep.Echo, 10, 64)
		if err != nil {
			return fmt.Errorf("answer %q: %w", line, err)
		}
		if s.got(seq, rep.Server) {
			return nil
		}
	}
}

// got records one answer and says whether it was the last one.
func (s *streamer) got(seq uint64, server string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.rep.MaxGap = max(s.rep.MaxGap, now.Sub(s.last))
	s.last = now
	if seq < s.low || s.seen[seq] {
		s.rep.Duplicate++
		return false
	}
	s.seen[seq] = true
	for s.seen[s.low] {
		delete(s.seen, s.low)
		s.low++
	}
	s.high = max(s.high, seq+1)
	s.rep.Received++
	s.rep.Server = server
	if !slices.Contains(s.rep.Servers, server) {
		s.rep.Servers = append(s.rep.Servers, server)
	}
	if s.rep.Received == 1 {
		_ = print(s.report(now))
	}
	if s.done && s.high == s.rep.Sent && seq+1 == s.high {
		_ = s.conn.SetReadDeadline(time.Now().Add(overtaken))
	}
	return s.done && s.rep.Received == s.rep.Sent
}

func (s *streamer) report(now time.Time) probe.StreamReport {
	rep := s.rep
	rep.Servers = slices.Clone(s.rep.Servers)
	rep.Lost = s.high - rep.Received
	rep.LastReply = now.Sub(s.last)
	if rep.Received < rep.Sent {
		rep.MaxGap = max(rep.MaxGap, rep.LastReply)
	}
	info := tcpInfo(s.conn)
	rep.Retransmits, rep.Spurious = uint64(info.Total_retrans), uint64(info.Dsack_dups)
	return rep
}

func (s *streamer) snapshot() probe.StreamReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.report(time.Now())
}

// snapshots prints a report for every line on standard input.
func (s *streamer) snapshots() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		_ = print(s.snapshot())
	}
}
