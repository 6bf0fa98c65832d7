package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// sports are the source ports of a flood, or the destination ports of a scan.
// When all have been used, it goes on with the next port of the other end: no
// two packets of it are of one tuple, which would make the second a sign of
// life.
const sports = 64000

// flood sends n packets from the pod's own address, each of another tuple: from
// all ports to one, or, as a scan, from one to all.
func flood(t testing.TB, from *cluster.Pod, p packet, scan bool, n int) {
	t.Helper()
	raw := rawSocket(t, from.Netns, "eth0")
	p.srcMAC, p.dstMAC = raw.mac, hostMAC(t, from)
	first := p.dport
	for i := range n {
		p.sport, p.dport, p.seq = uint16(1024+i%sports), first+uint16(i/sports), uint32(i)
		if scan {
			p.sport, p.dport = p.dport, p.sport
		}
		ok(t, raw.send(p.frame()))
	}
}

// confirmed counts a node's confirmed flows.
func confirmed(t testing.TB, n *cluster.Node) int {
	t.Helper()
	all, err := mapsOf(t, n).Flows.Dump()
	ok(t, err)
	return len(all)
}

// evicted is how many unconfirmed entries a node's kernel has pushed out.
func evicted(t testing.TB, n *cluster.Node) int {
	t.Helper()
	set := mapsOf(t, n)
	before, err := set.Churn.Read()
	ok(t, err)
	present := uint64(0)
	ok(t, set.FlowsNew.Each(func(maps.FlowKey, maps.Flow) error { present++; return nil }))
	after, err := set.Churn.Read()
	ok(t, err)
	out, uncounted := maps.Evicted(before, after, present)
	if uncounted > 0 {
		t.Errorf("%s: %d unconfirmed entries that nobody inserted", n.NodeName, uncounted)
	}
	return int(out)
}

// slow are established connections that say something now and then.
type slow struct {
	conns []net.Conn
	turns int
}

func newSlow(ctx context.Context, t testing.TB, from *cluster.Pod, to string, n int) *slow {
	t.Helper()
	s := &slow{}
	t.Cleanup(func() {
		for _, c := range s.conns {
			c.Close()
		}
	})
	for range n {
		c, err := dial(ctx, from.Netns, "", to, nil)
		ok(t, err)
		s.conns = append(s.conns, c)
	}
	ok(t, s.round())
	return s
}

// round has every connection say a word and get it back.
func (s *slow) round() error {
	s.turns++
	var errs []error
	for i, c := range s.conns {
		if err := talk(c, fmt.Sprintf("turn %d of %d\n", s.turns, i)); err != nil {
			errs = append(errs, fmt.Errorf("connection %d: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// during repeats rounds until fn is done.
func (s *slow) during(fn func()) (rounds int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	for {
		rounds++
		if err := s.round(); err != nil {
			<-done
			return rounds, err
		}
		select {
		case <-done:
			return rounds, s.round()
		default:
		}
	}
}

// floods runs floods beside established flows: SYNs to open ports, datagrams to
// a server that answers each, and scans of all ports, most of them closed. What
// is established, by pod address and by service, loses nothing, and the flood
// confirms nothing. What it pushes out of the table of its own kind is counted.
func floods(t testing.TB, packets, flows int) {
	w := shared(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	w.service(t, ctx, "flood", "10.98.0.18", "fd00:10:98::18", w.remote)
	// Every SYN has its SYN-ACK: a queue that is full answers with cookies.
	for i := range uint16(packets/sports + 1) {
		for _, f := range families {
			echoTCP(t, w.remote.Netns, port(f.of(w.remote), 9100+i))
			echoUDP(t, w.remote.Netns, port(f.of(w.remote), 9100+i))
		}
	}
	all := &slow{}
	for _, f := range families {
		at := port(f.of(w.remote), serverPort)
		echoTCP(t, w.remote.Netns, at)
		for _, to := range []string{at, port(f.pick("10.98.0.18", "fd00:10:98::18"), 80)} {
			all.conns = append(all.conns, newSlow(ctx, t, w.client, to, flows/4).conns...)
		}
	}
	ok(t, all.round())
	before := map[*cluster.Node]int{w.a: confirmed(t, w.a), w.b: confirmed(t, w.b)}
	attacker, target := w.local, w.remote
	type kind struct {
		name string
		p    packet
		scan bool
	}
	var kinds []kind
	for _, f := range families {
		for _, k := range []kind{
			{"SYNs to open ports", packet{proto: 6, flags: syn, dport: 9100}, false},
			{"datagrams to a server that answers", packet{proto: 17, dport: 9100, payload: []byte("flood")}, false},
			{"SYNs to all ports", packet{proto: 6, flags: syn, dport: 500}, true},
			{"datagrams to all ports", packet{proto: 17, dport: 500, payload: []byte("flood")}, true},
		} {
			k.name += ", " + f.name
			k.p.src, k.p.dst = f.of(attacker), f.of(target)
			kinds = append(kinds, k)
		}
	}
	for _, kind := range kinds {
		start := time.Now()
		base, baseB := counters(t, w.a), counters(t, w.b)
		gone := map[*cluster.Node]int{w.a: evicted(t, w.a), w.b: evicted(t, w.b)}
		rounds, err := all.during(func() { flood(t, attacker, kind.p, kind.scan, packets) })
		if err != nil {
			t.Errorf("%s: %v", kind.name, err)
		}
		got, gotB := counters(t, w.a).since(base), counters(t, w.b).since(baseB)
		t.Logf("%d %s in %v: %d rounds of %d flows, 0 lost=%v; node-a created %d, confirmed %d, answers delivered %d, drops %v; node-b created %d, confirmed %d, drops %v",
			packets, kind.name, time.Since(start).Round(time.Millisecond), rounds, flows, err == nil,
			got["flow_created"], got["flow_confirmed"], got["fwd_decap/from_netdev"], got.drops(),
			gotB["flow_created"], gotB["flow_confirmed"], gotB.drops())
		if got["flow_created"] < packets*9/10 {
			t.Errorf("%s: only %d new flows: no flood", kind.name, got["flow_created"])
		}
		if n := got["flow_confirmed"] + gotB["flow_confirmed"]; n > 0 {
			t.Errorf("%s: confirmed %d flows", kind.name, n)
		}
		for n, was := range gone {
			gone[n] = evicted(t, n) - was
			// Two entries a flow, less what there is room for; of those that
			// are not counted a sweep may have had some.
			created := got["flow_created"]
			if n == w.b {
				created = gotB["flow_created"]
			}
			room := mapsOf(t, n).FlowsNew.MaxEntries()
			if gone[n] < created-room || gone[n] <= 0 || gone[n] > 2*created+room {
				t.Errorf("%s: %s evicted %d entries with room for %d, of %d flows", kind.name, n.NodeName, gone[n], room, created)
			}
		}
		t.Logf("%s: evicted %d on node-a, %d on node-b", kind.name, gone[w.a], gone[w.b])
		for n, was := range before {
			// The sweeper may have removed older ones meanwhile.
			if now := confirmed(t, n); now > was {
				t.Errorf("%s: %s has %d confirmed entries, %d before", kind.name, n.NodeName, now, was)
			}
		}
		for _, drop := range []string{"drop_flow_insert", "drop_flow_collision", "drop_helper"} {
			if n := got[drop] + gotB[drop]; n > 0 {
				t.Errorf("%s: %s %d", kind.name, drop, n)
			}
		}
	}
	ok(t, all.round())
	// Away with what the flood left, for the tests that look at every entry.
	for _, n := range []*cluster.Node{w.a, w.b} {
		set := mapsOf(t, n)
		var left []maps.FlowKey
		ok(t, set.FlowsNew.Each(func(k maps.FlowKey, _ maps.Flow) error { left = append(left, k); return nil }))
		t.Logf("%s: %d of %d unconfirmed entries in use", n.NodeName, len(left), set.FlowsNew.MaxEntries())
		ok(t, set.FlowsNew.DeleteAll(left))
	}
}

// Each flow has two entries, so the table is full with every kind.
func TestFlood(t *testing.T) { floods(t, 50_000, 200) }

// BenchmarkFlood is the full-sized flood; run it once, with -benchtime 1x -timeout 30m.
func BenchmarkFlood(b *testing.B) {
	for b.Loop() {
		floods(b, 1_000_000, 2_000)
	}
}
