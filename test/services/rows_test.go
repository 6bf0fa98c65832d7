package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// row is one line of the contract. It is answered (by), refused, or dropped
// (why and at without either of these).
type row struct {
	from  string // who calls
	svc   string // the service, called by these of its addresses:
	to    string // cluster, lb, ext, node@WHO
	addr  string // or somebody's own address
	vip   string // or an address of the service range: nobody's
	port  int    // other than the service's
	proto string // of tcp, udp (connected), open (UDP, not connected), ping; default: tcp udp

	by string // who may answer, all of them do
	// sees is whom backends may see: somebody, "node" (the caller's), "called"
	// (the address that was called), default the caller; WHO=WHOM makes an
	// exception for one backend.
	sees    string
	refused bool
	why     string // the reason that is counted
	at      string // node and hook where, "" = anywhere
}

// probed is one call of a row.
type probed struct {
	row
	from, to, proto string
	v6              bool
	target          netip.AddrPort
}

func (p probed) String() string {
	what := p.to
	if p.svc != "" {
		what = p.svc + " by " + p.to
	}
	family := "IPv4"
	if p.v6 {
		family = "IPv6"
	}
	s := fmt.Sprintf("%s to %s %s %s", p.from, what, p.proto, family)
	if p.port != 0 {
		s += fmt.Sprintf(" port %d", p.port)
	}
	return s
}

// expand multiplies a row.
func (w *world) expand(r row) (out []probed) {
	w.Helper()
	to := strings.Fields(r.to)
	switch {
	case r.addr != "":
		to = strings.Fields(r.addr)
	case r.vip != "":
		to = []string{r.vip}
	}
	protos := []string{"tcp", "udp"}
	if r.proto != "" {
		protos = strings.Fields(r.proto)
	}
	for _, from := range strings.Fields(r.from) {
		for _, to := range to {
			for _, proto := range protos {
				for _, v6 := range []bool{false, true} {
					p := probed{row: r, from: from, to: to, proto: proto, v6: v6}
					switch {
					case r.addr != "":
						p.target = netip.AddrPortFrom(w.addr(to, v6), 0)
					case r.vip != "":
						p.target = netip.AddrPortFrom(netip.MustParseAddr(map[bool]string{false: "10.98.77.77", true: "fd00:10:98::7777"}[v6]), 80)
					default:
						p.target = w.service(r.svc).frontend(w, to, v6)
					}
					if r.port != 0 {
						p.target = netip.AddrPortFrom(p.target.Addr(), uint16(r.port))
					}
					out = append(out, p)
				}
			}
		}
	}
	return out
}

func (w *world) service(name string) service {
	w.Helper()
	i := slices.IndexFunc(table, func(s service) bool { return s.name == name })
	if i < 0 {
		w.Fatalf("no service %q in the table", name)
	}
	return table[i]
}

// whom says under which addresses a backend may see the caller.
func (w *world) whom(p probed, server string) (out []netip.Addr) {
	w.Helper()
	sees := p.sees
	if sees == "" {
		sees = "caller"
	}
	var words []string
	for _, word := range strings.Fields(sees) {
		at, seen, exception := strings.Cut(word, "=")
		if exception && at == server {
			words = []string{seen}
			break
		}
		if !exception {
			words = append(words, word)
		}
	}
	for _, who := range words {
		switch who {
		case "caller":
			who = p.from
		case "called":
			out = append(out, p.target.Addr())
			continue
		case "node":
			who = w.nodeOf(p.from)
		}
		out = append(out, w.addr(who, p.v6))
	}
	return out
}

func (w *world) nodeOf(name string) string {
	for _, l := range layout {
		if l.name == name {
			return l.node
		}
	}
	return name
}

// Two backends are both met in so many calls but once in 10^19 runs; few are
// made once they are.
const few, enough = 6, 64

func (p probed) call() probe.Call {
	c := probe.Call{Proto: p.proto, Target: p.target.String(), Count: 2, Timeout: patience}
	if p.proto == "open" {
		c.Proto, c.Unconnected = "udp", true
	}
	if n := len(strings.Fields(p.by)); n > 1 {
		c.Count, c.Servers, c.Most = few, n, enough
	}
	if p.by == "" {
		c.Count = 1
	}
	return c
}

// answered checks a row that somebody answers.
func (w *world) answered(p probed) error {
	before, err := w.read()
	if err != nil {
		return err
	}
	r, err := w.callers[p.from].call(w.ctx, p.call())
	if err != nil {
		return err
	}
	servers := map[string]bool{}
	for i, a := range r.Attempts {
		if !a.OK {
			return fmt.Errorf("call %d: %s, %s\n%s", i, a.Kind, a.Error, w.traces(a.Local, before))
		}
		server := a.Reply.Server
		servers[server] = true
		if !slices.Contains(strings.Fields(p.by), server) {
			return fmt.Errorf("call %d: answered by %s", i, server)
		}
		if peer, want := addrOf(a.Reply.Peer), w.whom(p, server); !slices.Contains(want, peer) {
			return fmt.Errorf("call %d: %s saw %v, want %v", i, server, peer, want)
		}
		if a.Remote != p.target.String() {
			return fmt.Errorf("call %d: the caller sees %s, it called %v", i, a.Remote, p.target)
		}
	}
	if len(servers) != len(strings.Fields(p.by)) {
		return fmt.Errorf("answered by %v alone", servers)
	}
	return nil
}

func addrOf(hostport string) netip.Addr {
	ap, _ := netip.ParseAddrPort(hostport)
	return ap.Addr().Unmap()
}

// ended checks a row that is refused or dropped, and counted.
func (w *world) ended(p probed) error {
	before, err := w.read()
	if err != nil {
		return err
	}
	if p.proto == "ping" {
		return w.pinged(p, before)
	}
	result, giveUp, err := w.callers[p.from].begin(p.call())
	if err != nil {
		return err
	}
	if p.refused {
		select {
		case r := <-result:
			if a := r.Attempts[0]; a.Kind != probe.Refused {
				now, err := w.read()
				return errors.Join(fmt.Errorf("%s %s (%+v), want it refused; counted since:%v", a.Kind, a.Error, a.Reply, now.since(before)), err)
			}
		case <-w.ctx.Done():
			return w.ctx.Err()
		}
		if p.why == "" {
			return nil
		}
		return w.counted(w.ctx, p, before)
	}
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	err = w.counted(ctx, p, before)
	// What was on its way has a moment to arrive.
	select {
	case r := <-result:
		return fmt.Errorf("want silence, got %+v", r.Attempts[0])
	case <-time.After(5 * time.Millisecond):
	}
	if gerr := giveUp(); gerr != nil {
		return gerr
	}
	<-result
	return err
}

func (w *world) pinged(p probed, before counters) error {
	rep, err := w.callers[p.from].ns.Ping(w.ctx, p.target.Addr().String(), "-timeout", "100ms")
	if err != nil {
		return err
	}
	// The host's own may learn from the socket that its packet was dropped.
	if rep.Received != 0 || p.from != w.nodeOf(p.from) && rep.ICMP != "" {
		return fmt.Errorf("want silence, got %+v", rep)
	}
	return w.counted(w.ctx, p, before)
}

// counted waits until the reason of a row was counted where it says.
func (w *world) counted(ctx context.Context, p probed, before counters) error {
	node, hook, _ := strings.Cut(p.at, " ")
	return cluster.Eventually(ctx, func() error {
		now, err := w.read()
		if err != nil {
			return err
		}
		since := now.since(before)
		sum := uint64(0)
		for k, n := range since {
			if k.reason == p.why && k.v6 == p.v6 && (node == "" || k.node == node && k.hook == hook) {
				sum += n
			}
		}
		if sum == 0 {
			return fmt.Errorf("no %s was counted at %q, but %v", p.why, p.at, since)
		}
		return nil
	})
}

type counterKey struct {
	node, hook, reason string
	v6                 bool
}

type counters map[counterKey]uint64

// read returns both nodes' counters.
func (w *world) read() (counters, error) {
	c := counters{}
	for node, set := range w.sets {
		list, err := set.Metrics.Read()
		if err != nil {
			return nil, err
		}
		for _, s := range list {
			c[counterKey{node, maps.HookName(s.Hook), maps.ReasonName(s.Reason), s.IPv6}] += s.Packets
		}
	}
	return c, nil
}

func (c counters) since(old counters) counters { return cluster.Since(c, old) }

func (c counters) String() string {
	var lines []string
	for k, v := range c {
		family := "4"
		if k.v6 {
			family = "6"
		}
		lines = append(lines, fmt.Sprintf("%s %s %s IPv%s: %d", k.node, k.hook, k.reason, family, v))
	}
	slices.Sort(lines)
	return "\n\t" + strings.Join(lines, "\n\t")
}

// traces are what the nodes have counted since, and every flow of a client's
// port: the call's own, and whose it was before.
func (w *world) traces(client string, before counters) string {
	now, err := w.read()
	if err != nil {
		return err.Error()
	}
	out := fmt.Sprintf("from %s; counted since:%v\nflows of that port:", client, now.since(before))
	local, err := netip.ParseAddrPort(client)
	if err != nil {
		return out + err.Error()
	}
	for _, n := range w.Nodes {
		set := w.sets[n.NodeName]
		for name, table := range map[string]maps.Map[maps.FlowKey, maps.Flow]{"confirmed": set.Flows, "new": set.FlowsNew} {
			flows, err := table.Dump()
			if err != nil {
				return out + err.Error()
			}
			for k, f := range flows {
				if port := local.Port(); k.Sport == port || k.Dport == port || f.Sport == port || f.Dport == port {
					out += fmt.Sprintf("\n\t%s, %s: %s: %+v", n.NodeName, name, maps.KeyString(k), f)
				}
			}
		}
	}
	return out
}

// describe repeats a failed row alone.
func (w *world) describe(p probed, check func(probed) error) string {
	return fmt.Sprintf("once more, alone: %v", check(p))
}

// TestServices is the table.
func TestServices(t *testing.T) {
	w := shared(t)
	w.claim("by-proxy")
	w.runTable(rows)
}

// atATime is how many rows are called at a time.
const atATime = 8

func (w *world) runTable(rows []row) {
	w.Helper()
	for _, s := range table {
		w.write(s)
		w.Cleanup(func() { w.must(w.Manifests.Delete(s.objects(w, nil)...)) })
	}
	w.settled()
	var list []probed
	for _, r := range rows {
		list = append(list, w.expand(r)...)
	}
	errs := make([]error, len(list))
	start := time.Now()
	var wg sync.WaitGroup
	slots := make(chan struct{}, atATime)
	for i, p := range list {
		if p.by == "" {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			errs[i] = w.answered(p)
			<-slots
		})
	}
	wg.Wait()
	answered := time.Since(start)
	for i, p := range list {
		if p.by == "" {
			errs[i] = w.ended(p)
		}
	}
	w.Logf("%d rows, %d calls: answered in %v, ended in %v", len(rows), len(list), answered, time.Since(start)-answered)
	failed := 0
	for i, p := range list {
		w.T.Run(p.String(), func(t *testing.T) {
			if errs[i] == nil {
				return
			}
			t.Errorf("%v: %v", p, errs[i])
			failed++
			if failed > 10 {
				return // they will have one cause
			}
			check := w.answered
			if p.by == "" {
				check = w.ended
			}
			t.Logf("target %v, row %+v\n%s", p.target, p.row, w.describe(p, check))
		})
	}
}

// claim gives the load balancer's address of a service to a server outside.
func (w *world) claim(name string) {
	w.Helper()
	for _, v6 := range []bool{false, true} {
		w.claimAddr(w.service(name).address("lb", v6))
	}
}

func (w *world) claimAddr(a netip.Addr) {
	w.Helper()
	p := netip.PrefixFrom(a, a.BitLen()).String()
	_, err := w.Ext.Exec(w.ctx, "ip", "addr", "add", p, "dev", "lo")
	w.must(err)
	w.Cleanup(func() {
		if _, err := w.Ext.Exec(context.Background(), "ip", "addr", "del", p, "dev", "lo"); err != nil {
			w.Error(err)
		}
	})
}
