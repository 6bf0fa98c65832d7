// Command guest runs the checks of package kernels on the kernel it finds
// itself on, as root: two nodes, their pods and the datapath between them.
//
//	podweir: log TEXT        a measurement or a fact
//	podweir: ok CHECK
//	podweir: fail CHECK: WHY newlines given as " | "
//	podweir: end             nothing was left out
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	series := flag.String("kernel", "", "kernel that this must be, as in 6.1")
	bpffs := flag.String("bpffs", "/sys/fs/bpf", "an empty, mounted bpffs")
	cgroup := flag.String("cgroup", "/sys/fs/cgroup/podweir", "an empty cgroup (v2) to run some checks in")
	flag.Parse()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if !run(ctx, *series, *bpffs, *cgroup) {
		os.Exit(1)
	}
}

// kernel is what the checks must know about the one they run on.
type kernel struct {
	release      string
	major, minor int
}

func (k kernel) atLeast(major, minor int) bool {
	return k.major > major || k.major == major && k.minor >= minor
}

// hasTCX: links on tc hooks; older kernels have clsact filters.
func (k kernel) hasTCX() bool { return k.atLeast(6, 6) }

// hasNetfilter: programs at netfilter's hooks.
func (k kernel) hasNetfilter() bool { return k.atLeast(6, 4) }

// decapsIPv6: adjust_room may take an outer IPv4 header off an IPv6 packet.
func (k kernel) decapsIPv6() bool { return k.atLeast(6, 3) }

func thisKernel(series string) (kernel, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return kernel{}, err
	}
	k := kernel{release: unix.ByteSliceToString(u.Release[:])}
	if _, err := fmt.Sscanf(k.release, "%d.%d", &k.major, &k.minor); err != nil {
		return k, fmt.Errorf("release %q: %w", k.release, err)
	}
	if series != "" && fmt.Sprintf("%d.%d", k.major, k.minor) != series {
		return k, fmt.Errorf("this is %s, not %s", k.release, series)
	}
	return k, nil
}

// checks is what has been found so far.
type checks struct {
	failed bool
	w      *world
}

// do runs one check. Later ones run even after a failure, as far as they can.
func (c *checks) do(name string, fn func() error) bool {
	start := time.Now()
	err := fn()
	if err == nil {
		logf("%s: %v", name, time.Since(start).Round(time.Millisecond))
		fmt.Printf("podweir: ok %s\n", name)
		return true
	}
	c.failed = true
	fmt.Printf("podweir: fail %s: %s\n", name, oneLine(err.Error()))
	return false
}

func logf(format string, args ...any) {
	fmt.Printf("podweir: log %s\n", oneLine(fmt.Sprintf(format, args...)))
}

func oneLine(s string) string { return strings.ReplaceAll(s, "\n", " | ") }

func run(ctx context.Context, series, bpffs, cgroup string) bool {
	c := &checks{}
	var k kernel
	ok := c.do("kernel", func() (err error) {
		k, err = thisKernel(series)
		logf("kernel %s", k.release)
		return err
	})
	ok = ok && c.do("nodes", func() (err error) {
		c.w, err = newWorld(bpffs, k)
		return err
	})
	ok = ok && c.do("load", func() error { return c.w.load(ctx) })
	if ok {
		c.all(ctx, cgroup)
	}
	if ok {
		c.do("removed", func() error { return c.w.remove(ctx) })
	}
	fmt.Println("podweir: end")
	return !c.failed
}

// each runs fn for both families and joins what went wrong.
func each(fn func(v6 bool) error) error {
	var errs []error
	for _, v6 := range []bool{false, true} {
		if err := fn(v6); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family(v6), err))
		}
	}
	return errors.Join(errs...)
}

func family(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}
