package services

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// crowdSize makes TestCrowd as large as the default source ports allow; its
// sockets need some hundred MB.
var crowdSize = flag.Int("crowd", 0, "connections of TestCrowd to one destination, such as 33000 (0: a few hundred, over few ports)")

const (
	crowdPort  = 9100 // the destination, and the next port another one
	crowdStep  = 7    // between those ports
	crowdBound = 20   // of the node's own connections, on ports that flows may get
)

// Pods open as many connections to one destination outside as there are ports
// to leave by, beside the node's own to the same place, and half as many again
// to another. Every server answers with the client that it sees: no two have
// the same, nobody has the node's, and when all are open all are still served.
// What is beyond is counted and dropped.
func TestCrowd(t *testing.T) {
	n, nodes, first := 480, 150, 20000
	args := []string{"--source-ports", "20000-20511"}
	if *crowdSize != 0 {
		n, nodes, first, args = *crowdSize, 5000, 2000, nil
	} else {
		t.Parallel()
	}
	w := own(t, args...)
	for _, v6 := range []bool{false, true} {
		w.T.Run(family(v6, "IPv4", "IPv6"), func(t *testing.T) { w.sub(t).crowd(v6, n, nodes, first) })
	}
}

// crowd is the case in one family; first is one of the ports that flows get.
func (w *world) crowd(v6 bool, n, own, first int) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 5*time.Minute)
	defer cancel()
	host, server := w.addr("node-a", v6), w.addr("ext", v6)
	if v6 {
		first += crowdStep * crowdBound // the others are in TIME_WAIT
	}
	dst := netip.AddrPortFrom(server, crowdPort)
	other := netip.AddrPortFrom(server, crowdPort+1)
	var servers []*cluster.Process
	serve := func(at netip.AddrPort, total int) {
		for range 1 + total/12000 {
			p := w.crowdProcess(ctx, w.Ext, "serve", at.String())
			servers = append(servers, p)
			var ready string
			w.must(p.JSON(ctx, &ready))
		}
	}
	serve(dst, n+own+crowdBound)
	serve(other, n/2)

	var callers []*cluster.Process
	call := func(ns *cluster.Netns, at netip.AddrPort, bind, count int) crowdCalls {
		p := w.crowdProcess(ctx, ns, "call", at.String(), strconv.Itoa(bind), strconv.Itoa(count))
		callers = append(callers, p)
		var got crowdCalls
		w.must(p.JSON(ctx, &got))
		if len(got.Seen) != count || got.Failed != "" {
			w.Fatalf("%s: %d of %d connections to %v: %s", ns.Name, len(got.Seen), count, at, got.Failed)
		}
		return got
	}
	node, pods := w.Node("node-a").Netns, []*cluster.Netns{w.Pod("default", "pod-a").Netns, w.Pod("default", "back-a").Netns}
	taken := map[netip.AddrPort]string{}
	add := func(who string, c crowdCalls) {
		w.Helper()
		for _, seen := range c.Seen {
			if seen.Addr() != host || taken[seen] != "" {
				w.Fatalf("a connection of %s is seen as %v, so is one of %q", who, seen, taken[seen])
			}
			taken[seen] = who
		}
	}
	began := time.Now()
	add("the node", call(node, dst, 0, own))
	add("the node on its ports", call(node, dst, first, crowdBound))
	var ours []netip.AddrPort
	for i, ns := range pods {
		c := call(ns, dst, 0, n/len(pods))
		add(fmt.Sprintf("pod %d", i), c)
		ours = append(ours, c.Seen...)
	}
	for _, seen := range ours {
		if p := int(seen.Port()); p < 1024 || p >= 30000 && p < 61000 || *crowdSize == 0 && (p < 20000 || p > 20511) {
			w.Errorf("a pod's connection left by port %d", p)
		}
	}
	for _, ns := range pods {
		call(ns, other, 0, n/4)
	}
	w.Logf("%d connections to one destination beside the node's %d, %d to another, in %v", n, own+crowdBound, n/2, time.Since(began))

	// The node takes a port that a pod's connection has by now: it gets
	// another one on the way, and both go on. None that the node binds to, in
	// this family or the other.
	theirs := ours[slices.IndexFunc(ours, func(a netip.AddrPort) bool { return (int(a.Port())-first)%crowdStep != 0 })]
	if again := call(node, dst, int(theirs.Port()), 1); again.Seen[0] == theirs {
		w.Errorf("the node and a pod are both seen as %v", theirs)
	}

	// The rest finds no port.
	before := w.dropped("node-a", bpf.DpPwReasonPW_DROP_NO_PORT)
	p := w.crowdProcess(ctx, pods[0], "try", dst.String(), "600")
	var got crowdCalls
	w.must(p.JSON(ctx, &got))
	if drops := w.dropped("node-a", bpf.DpPwReasonPW_DROP_NO_PORT) - before; len(got.Seen) == 600 || drops == 0 {
		w.Errorf("%d of 600 more connections opened, %d packets were dropped for want of a port", len(got.Seen), drops)
	}
	add("the last ones", got)
	w.Logf("%d more found a port of 600 that tried", len(got.Seen))

	// All are served still, each under its own name.
	for _, s := range servers {
		_, err := io.WriteString(s.Stdin, "again\n")
		w.must(err)
	}
	for _, c := range callers {
		_, err := io.WriteString(c.Stdin, "again\n")
		w.must(err)
		var good int
		w.must(c.JSON(ctx, &good))
		if good < 0 {
			w.Errorf("a connection was answered under another name, or not, when all were open")
		}
	}
	for _, p := range append(callers, servers...) {
		w.must(p.Kill(ctx))
	}
	w.must(p.Kill(ctx))
}

// dropped is how many packets a node has dropped for a reason.
func (w *world) dropped(node string, why maps.Reason) (n uint64) {
	w.Helper()
	set := w.sets[node]
	samples, err := set.Metrics.Read()
	w.must(err)
	for _, s := range samples {
		if s.Reason == why {
			n += s.Packets
		}
	}
	return n
}

// crowdProcess runs this program as one of the ends.
func (w *world) crowdProcess(ctx context.Context, ns *cluster.Netns, args ...string) *cluster.Process {
	w.Helper()
	self, err := os.Executable()
	w.must(err)
	p, err := ns.Start(ctx, append([]string{self, crowdCommand}, args...)...)
	w.must(err)
	return p
}

// crowdCommand as the first argument makes this program an end of connections.
const crowdCommand = "crowd-end"

// crowdCalls is what the caller of many connections says.
type crowdCalls struct {
	Seen   []netip.AddrPort // what the server sees of each
	Failed string           // why the next one did not come about
}

// crowdEnd is the program's other life: many sockets in one namespace. Each
// end waits for a line at its standard input before it goes on.
func crowdEnd(args []string) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err == nil {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	at, err := netip.ParseAddrPort(args[1])
	if err != nil {
		return err
	}
	go func() { // the owner has ended
		<-time.After(10 * time.Minute)
		os.Exit(1)
	}()
	switch args[0] {
	case "serve":
		return crowdServe(at)
	case "try":
		n, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return crowdTry(at, n)
	}
	bind, err1 := strconv.Atoi(args[2])
	n, err2 := strconv.Atoi(args[3])
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	return crowdCall(at, bind, n)
}

func tell(v any) error { return json.NewEncoder(os.Stdout).Encode(v) }

// crowdServe tells every client how it is seen, and all once more when told to.
func crowdServe(at netip.AddrPort) error {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }), err)
	}}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", at.String())
	if err != nil {
		return err
	}
	if err := tell("ready"); err != nil {
		return err
	}
	var mu sync.Mutex
	var all []net.Conn
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintln(c, c.RemoteAddr())
			mu.Lock()
			all = append(all, c)
			mu.Unlock()
		}
	}()
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		mu.Lock()
		for _, c := range all {
			_, _ = fmt.Fprintln(c, c.RemoteAddr())
		}
		mu.Unlock()
	}
	return in.Err()
}

// seenAs reads what the server says of a connection, byte by byte: nothing is
// read ahead, and nothing kept for each.
func seenAs(c net.Conn, timeout time.Duration) (netip.AddrPort, error) {
	if err := c.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return netip.AddrPort{}, err
	}
	var line [64]byte
	for n := 0; n < len(line); {
		got, err := c.Read(line[n:])
		if err != nil {
			return netip.AddrPort{}, err
		}
		if n += got; line[n-1] == '\n' {
			return netip.ParseAddrPort(string(line[:n-1]))
		}
	}
	return netip.AddrPort{}, errors.New("the server talks too much")
}

const crowdTimeout = 20 * time.Second

// crowdCall opens n connections, from the ports from bind on unless it is 0.
func crowdCall(at netip.AddrPort, bind, n int) error {
	var out crowdCalls
	var all []net.Conn
	for i := range n {
		d := net.Dialer{Timeout: crowdTimeout}
		if bind != 0 {
			d.LocalAddr = &net.TCPAddr{Port: bind + crowdStep*i}
		}
		c, err := d.Dial("tcp", at.String())
		if err != nil {
			out.Failed = err.Error()
			break
		}
		seen, err := seenAs(c, crowdTimeout)
		if err != nil {
			out.Failed = "read: " + err.Error()
			break
		}
		all, out.Seen = append(all, c), append(out.Seen, seen)
	}
	if err := tell(out); err != nil {
		return err
	}
	in := bufio.NewScanner(os.Stdin)
	in.Scan()
	good := 0
	for i, c := range all {
		if seen, err := seenAs(c, crowdTimeout); err != nil || seen != out.Seen[i] {
			fmt.Fprintln(os.Stderr, i, seen, out.Seen[i], err)
			good = -1
			break
		}
		good++
	}
	if err := tell(good); err != nil {
		return err
	}
	in.Scan()
	return in.Err()
}

// crowdTry tries to open n connections at a time, of which some will not find
// a way.
func crowdTry(at netip.AddrPort, n int) error {
	var out crowdCalls
	var mu sync.Mutex
	var wg sync.WaitGroup
	var all []net.Conn
	for range n {
		wg.Go(func() {
			c, err := net.DialTimeout("tcp", at.String(), patience)
			if err != nil {
				return
			}
			seen, err := seenAs(c, crowdTimeout)
			mu.Lock()
			defer mu.Unlock()
			if all = append(all, c); err == nil {
				out.Seen = append(out.Seen, seen)
			} else {
				out.Failed = err.Error()
			}
		})
	}
	wg.Wait()
	if err := tell(out); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, closeAll(all))
}

func closeAll(all []net.Conn) (err error) {
	for _, c := range all {
		err = errors.Join(err, c.Close())
	}
	return err
}
