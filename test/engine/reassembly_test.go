package engine

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

// until waits for counters that amount to that.
func until(t *testing.T, n *cluster.Node, before counts, want int, what ...string) {
	t.Helper()
	eventually(t, within(t, patience), func() error {
		got, sum := counters(t, n).since(before), 0
		for _, w := range what {
			sum += got[w]
		}
		if sum != want {
			return fmt.Errorf("%s: %d, want %d; all: %v", what, sum, want, got)
		}
		return nil
	})
}

// reassembled sends datagrams last fragment first, from a pod to a pod and to
// its node, and says which did not arrive.
func (w *world) reassembled(t *testing.T, raw *frames, gw net.HardwareAddr, wait time.Duration) (missing []string) {
	t.Helper()
	for _, f := range families {
		for what, to := range map[string]struct {
			at     netip.Addr
			server *cluster.Netns
		}{"pod": {f.of(w.remote), w.remote.Netns}, "node": {nodeAddr(f, w.a), w.a.Netns}} {
			server := udp(t, to.server, port(to.at, 7781), "", nil)
			payload, cut := cutUDP(packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: to.at, sport: w.port(), dport: 7781}, w.id(), 4000)
			for _, frame := range reversed(cut) {
				ok(t, raw.send(frame))
			}
			ok(t, server.SetReadDeadline(time.Now().Add(wait)))
			buf := make([]byte, 64<<10)
			if n, _, err := server.ReadFromUDPAddrPort(buf); err != nil || !bytes.Equal(buf[:n], payload) {
				missing = append(missing, f.name+" to a "+what)
			}
			ok(t, server.Close())
		}
	}
	return missing
}

// The reassembly needs no agent, is the same after a restart, and is made anew
// when its device is gone, by an agent that runs and by the next one (N11, L1).
func TestReassemblyOutlivesTheAgent(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 4*time.Minute)
	ok(t, w.start(ctx))
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	index := func() (i int) {
		ok(t, w.a.Netns.Do(func() error {
			ifi, err := net.InterfaceByName("podweir.frag")
			if err == nil {
				i = ifi.Index
			}
			return err
		}))
		return i
	}
	pass := func(when string) {
		t.Helper()
		before := counters(t, w.a)
		if missing := w.reassembled(t, raw, gw, patience); len(missing) > 0 {
			t.Fatalf("%s: lost %v; %v", when, missing, counters(t, w.a).since(before))
		}
	}
	pass("at first")
	was := index()
	ok(t, w.KillAgents(ctx))
	pass("without an agent")
	ok(t, w.StartAgents(ctx))
	pass("after a restart")
	if now := index(); now != was {
		t.Errorf("a restart made the device anew: index %d, was %d", now, was)
	}
	ok(t, run(ctx, w.a.Netns, "ip link del podweir.frag"))
	eventually(t, ctx, func() error {
		if missing := w.reassembled(t, raw, gw, 200*time.Millisecond); len(missing) > 0 {
			return fmt.Errorf("without its device: lost %v", missing)
		}
		return nil
	})
	ok(t, w.KillAgents(ctx))
	ok(t, run(ctx, w.a.Netns, "ip link del podweir.frag"))
	ok(t, w.StartAgents(ctx))
	pass("after the next agent has made it anew")
}

// Datagrams that never become whole fill what the namespace has for them, and
// nothing else: those in order go on, to pods and to the host.
func TestIncompleteDatagrams(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 3*time.Minute)
	ok(t, w.start(ctx))
	wire, nodeMAC := rawSocket(t, w.Ext, "eth0"), macOf(t, w.a.Netns, "eth0")
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	for _, f := range families {
		before := counters(t, w.a)
		for i := range 6000 {
			// Of six megabytes each family's reassembly holds four.
			p := packet{srcMAC: wire.mac, dstMAC: nodeMAC, src: extOf(f), dst: nodeAddr(f, w.a), sport: 9, dport: 9}
			_, cut := cutUDP(p, uint32(20000+i), 2*1400-8)
			ok(t, wire.send(cut[1]))
		}
		eventually(t, ctx, func() error {
			if n := counters(t, w.a).since(before)["fragment_reassembly/from_netdev"]; n < 5000 {
				return fmt.Errorf("%d fragments went there", n)
			}
			return nil
		})
	}
	for _, f := range families {
		for _, c := range []struct {
			by     *frames
			gw     net.HardwareAddr
			src    netip.Addr
			at     netip.Addr
			server *cluster.Netns
		}{
			{raw, gw, f.of(w.client), f.of(w.remote), w.remote.Netns},
			{raw, gw, f.of(w.client), nodeAddr(f, w.a), w.a.Netns},
			{wire, nodeMAC, extOf(f), nodeAddr(f, w.a), w.a.Netns},
		} {
			server := udp(t, c.server, port(c.at, 7782), "", nil)
			payload, cut := cutUDP(packet{srcMAC: c.by.mac, dstMAC: c.gw, src: c.src, dst: c.at, sport: w.port(), dport: 7782}, w.id(), 4000)
			for _, frame := range cut {
				ok(t, c.by.send(frame))
			}
			if !arrives(t, server, map[string]bool{string(payload): true}, c.src) {
				t.Errorf("from %v to %v: lost", c.src, c.at)
			}
			ok(t, server.Close())
		}
	}
}
