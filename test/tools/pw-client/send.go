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
	"sync"
	"time"

	"github.com/podweir/podweir/test/tools/probe"
)

// send makes -count exchanges, each with a connection (or a UDP socket) of
// its own.
func send(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	count := fs.Int("count", 1, "number of connections")
	parallel := fs.Int("parallel", 1, "connections at a time")
	data := fs.String("data", "hello", "what to send")
	every := fs.Duration("every", 0, "begin one this often, however many are open (-parallel does not count); at a signal: no more")
	if err := o.parse(fs, args); err != nil {
		return false, err
	}
	sum := probe.Summary{Failed: map[string]int{}, Servers: map[string]int{}, Peers: map[string]int{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	if *every > 0 {
		t := time.NewTicker(*every)
		defer t.Stop()
		for n := 0; n < *count && ctx.Err() == nil; n++ {
			wg.Go(func() {
				a := o.exchange(context.WithoutCancel(ctx), *data)
				mu.Lock()
				defer mu.Unlock()
				add(&sum, a)
			})
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
		wg.Wait()
		return sum.OK == sum.Attempts && sum.Attempts > 0, print(sum)
	}
	work := make(chan struct{})
	for range max(*parallel, 1) {
		wg.Go(func() {
			for range work {
				a := o.exchange(ctx, *data)
				mu.Lock()
				add(&sum, a)
				mu.Unlock()
			}
		})
	}
	for range *count {
		select {
		case work <- struct{}{}:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(work)
	wg.Wait()
	return sum.OK == sum.Attempts && sum.Attempts > 0, print(sum)
}

func add(sum *probe.Summary, a probe.Attempt) {
	sum.Attempts++
	if !a.OK {
		sum.Failed[a.Kind]++
		if sum.Failure == nil {
			sum.Failure = &a
		}
		return
	}
	sum.OK++
	sum.Servers[a.Reply.Server]++
	if host, _, err := net.SplitHostPort(a.Reply.Peer); err == nil {
		sum.Peers[host]++
	}
	if sum.First == nil {
		sum.First = &a
	}
}

// exchange is one connection, one request, one answer, one close.
func (o *options) exchange(ctx context.Context, data string) probe.Attempt {
	start := time.Now()
	a := probe.Attempt{}
	err := func() error {
		c, err := o.dial(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		a.Local = c.LocalAddr().String()
		if a.Remote, err = peerName(c); err != nil {
			return err
		}
		if err := c.SetDeadline(time.Now().Add(o.timeout)); err != nil {
			return err
		}
		defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) })()
		if o.proto == "tcp" {
			data += "\n"
		}
		if _, err := io.WriteString(c, data); err != nil {
			return err
		}
		a.Reply = &probe.Reply{}
		return json.NewDecoder(c).Decode(a.Reply)
	}()
	a.Took = time.Since(start)
	if err != nil {
		a.Kind, a.Error, a.Reply = kind(err), err.Error(), nil
		return a
	}
	a.OK = true
	return a
}

// bulk sends or fetches many bytes over one TCP connection and compares
// their checksum.
func bulk(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	n := fs.Int64("bytes", 1<<20, "bytes to transfer")
	receive := fs.Bool("receive", false, "fetch instead of sending")
	if err := o.parse(fs, args); err != nil {
		return false, err
	}
	if o.proto != "tcp" {
		return false, fmt.Errorf("bulk is for TCP")
	}
	rep := probe.BulkReport{}
	start := time.Now()
	err := func() error {
		c, err := o.dial(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		defer func() {
			info := tcpInfo(c)
			rep.Retransmits, rep.MSS = uint64(info.Total_retrans), info.Snd_mss
		}()
		// The time allowed is for each step, not for the whole transfer.
		step := &deadlined{c, o.timeout}
		want := crc32.NewIEEE()
		if *receive {
			if _, err := fmt.Fprintf(step, "SOURCE %d\n", *n); err != nil {
				return err
			}
			got := crc32.NewIEEE()
			if rep.Bytes, err = io.CopyN(got, step, *n); err != nil {
				return err
			}
			if _, err := io.CopyN(want, probe.Pattern(), *n); err != nil {
				return err
			}
			rep.CRCMatches = got.Sum32() == want.Sum32()
			return nil
		}
		if _, err := fmt.Fprintf(step, "SINK %d\n", *n); err != nil {
			return err
		}
		if _, err := io.CopyN(step, io.TeeReader(probe.Pattern(), want), *n); err != nil {
			return err
		}
		var r probe.Reply
		if err := json.NewDecoder(bufio.NewReader(step)).Decode(&r); err != nil {
			return err
		}
		rep.Bytes, rep.CRCMatches = r.Bytes, r.CRC32 == want.Sum32()
		return nil
	}()
	rep.Took = time.Since(start)
	if err != nil {
		rep.Error, rep.Kind = err.Error(), kind(err)
	}
	return err == nil && rep.CRCMatches && rep.Bytes == *n, print(rep)
}

// deadlined gives every read and write the same time.
type deadlined struct {
	net.Conn
	d time.Duration
}

func (c *deadlined) Read(b []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.d)); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

func (c *deadlined) Write(b []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.d)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}
