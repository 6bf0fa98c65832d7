package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/tools/probe"
)

// load makes exchanges, each with a connection (or a UDP socket) of its own,
// until a signal. What is under way then is finished: it counts like the rest.
func load(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	interval := fs.Duration("interval", 3*time.Millisecond, "between two exchanges")
	parallel := fs.Int("parallel", 2, "exchanges at a time; when all wait, none is begun")
	data := fs.String("data", "hello", "what to send")
	attached := fs.Bool("attached", false, "end with standard input, too")
	arrears := fs.Duration("arrears", 250*time.Millisecond, "how far it may be behind its pace and make up for it")
	if err := o.parse(fs, args); err != nil {
		return false, err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	// Who is tested comes first where there is not enough CPU for all.
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, 10); err != nil {
		return false, fmt.Errorf("lower own priority: %w", err)
	}
	l := &loader{start: time.Now(), sum: probe.Summary{Failed: map[string]int{}, Servers: map[string]int{}, Peers: map[string]int{}}}
	var wg sync.WaitGroup
	work := make(chan struct{})
	for range max(*parallel, 1) {
		wg.Go(func() {
			for range work {
				l.add(o.exchange(context.WithoutCancel(ctx), *data))
			}
		})
	}
	go func() {
		l.snapshots()
		if *attached {
			end()
		}
	}()
	t := time.NewTicker(*interval)
	defer t.Stop()
	// What a busy machine let pass is made up for, as far as it is not long ago.
	due := func() int { return int(time.Since(l.start) / *interval) }
	for begun := 0; ctx.Err() == nil; {
		if begun = max(begun, due()-int(*arrears / *interval)); begun < due() {
			select {
			case work <- struct{}{}:
				begun++
			case <-ctx.Done():
			}
			continue
		}
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
	close(work)
	wg.Wait()
	l.mu.Lock() // for good: nothing is printed after this
	rep := l.report(true)
	return rep.OK == rep.Attempts && rep.Attempts > 0, print(rep)
}

type loader struct {
	start time.Time

	mu  sync.Mutex
	sum probe.Summary
}

func (l *loader) add(a probe.Attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	add(&l.sum, a)
	l.sum.Longest = max(l.sum.Longest, a.Took)
}

// report needs the lock, also while its maps are read.
func (l *loader) report(final bool) probe.Summary {
	l.sum.Final, l.sum.Took = final, time.Since(l.start)
	return l.sum
}

// snapshots prints a report for every line on standard input.
func (l *loader) snapshots() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		l.mu.Lock()
		_ = print(l.report(false))
		l.mu.Unlock()
	}
}
