package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// steady is traffic that must go on: do is done again and again until it
// fails or is told to stop, at a pace that leaves the agents a processor.
type steady struct {
	name  string
	times atomic.Int64
	quit  atomic.Bool
	ended chan error
}

const pace = 250 * time.Millisecond

func keepUp(name string, do func(i int64) error) *steady {
	s := &steady{name: name, ended: make(chan error, 1)}
	go func() {
		for !s.quit.Load() {
			if err := do(s.times.Load()); err != nil {
				s.ended <- fmt.Errorf("%s: after %d times: %w", s.name, s.times.Load(), err)
				return
			}
			s.times.Add(1)
			time.Sleep(pace)
		}
		s.ended <- nil
	}()
	return s
}

// more waits until all of it has been done another time, from now on.
func more(ctx context.Context, t *testing.T, when string, all []*steady) {
	t.Helper()
	// From now on, for all of them: not one after another.
	from := make([]int64, len(all))
	for i, s := range all {
		from[i] = s.times.Load()
	}
	for i, s := range all {
		// The one that is being done began before.
		for s.times.Load() < from[i]+2 {
			select {
			case err := <-s.ended:
				t.Fatalf("%s: %v", when, err)
			case <-ctx.Done():
				t.Fatalf("%s: %s does not go on", when, s.name)
			case <-time.After(2 * time.Millisecond):
			}
		}
	}
}

// A cluster changes its routing mode node by node, between any two of them:
// connections of pods and hosts, by addresses and by services, go on
// all the while, nothing is refused, and in the end the nodes have what they
// would have had from the start. Two nodes are on one link, the third is
// behind a router that knows the pod ranges.
func TestModesChange(t *testing.T) {
	// Pods of direct mode have the largest MTU, so all begin with it. In one of
	// the two clusters or the other any two modes are side by side for a while;
	// who has which does not matter.
	t.Run("vxlan first", func(t *testing.T) {
		modesChange(t, []tunnel.Mode{tunnel.ModeVXLAN, tunnel.ModeCrossSubnet, tunnel.ModeIPIP, tunnel.ModeVXLAN},
			// Modes that always encapsulate need not accept what does not.
			tunnel.ModeVXLAN, tunnel.ModeIPIP)
	})
	t.Run("ipip-cross-subnet first", func(t *testing.T) {
		modesChange(t, []tunnel.Mode{tunnel.ModeIPIPCrossSubnet, tunnel.ModeCrossSubnet, tunnel.ModeDirect,
			tunnel.ModeIPIP, tunnel.ModeIPIPCrossSubnet, tunnel.ModeVXLAN})
	})
}

// modesChange goes through modes in which all nodes accept what some send
// without a header, as those in direct mode do anyway, and then through some in
// which they do not.
func modesChange(t *testing.T, accepting []tunnel.Mode, refusing ...tunnel.Mode) {
	w := own(t, cluster.Config{Nodes: threeNodes()})
	ctx := within(t, 20*time.Minute)
	w.moveFar(ctx, t)
	ok(t, run(ctx, w.Ext, `
		ip route add 10.244.80.0/24 via 172.31.0.2
		ip route add 10.244.158.0/24 via 172.31.0.3
		ip route add 10.244.90.0/24 via 172.31.1.2
		ip route add fd00:10:244:50::/64 via fd00:172:31::2
		ip route add fd00:10:244:9e::/64 via fd00:172:31::3
		ip route add fd00:10:244:5a::/64 via fd00:172:31:1::2`))
	obj := podObject("distant", "node-c", "10.244.90.65", "fd00:10:244:5a::65")
	ok(t, w.Manifests.Put(obj))
	for _, n := range w.Nodes {
		n.Config.AgentArgs = []string{"--routing-mode", string(tunnel.ModeDirect)}
	}
	ok(t, w.start(ctx))
	distant, err := w.AddPod(ctx, obj)
	ok(t, err)
	w.service(t, ctx, "near", "10.98.0.1", "fd00:10:98::1", w.remote)
	w.service(t, ctx, "far", "10.98.0.2", "fd00:10:98::2", distant)
	all := w.steadyTraffic(ctx, t, distant)
	more(ctx, t, "before", all)

	before := make(map[string]counts)
	refused := func(when string) {
		t.Helper()
		for _, n := range w.Nodes {
			now := counters(t, n)
			got := now.since(before[n.NodeName])
			drops := got.drops()
			// Where a way has less room than before, pods are told.
			if drops["drop_too_big/from_pod"] == got["too_big_sent/from_pod"] {
				delete(drops, "drop_too_big/from_pod")
			}
			if len(drops) > 0 {
				t.Errorf("%s: %s dropped %v", when, n.NodeName, drops)
			}
			before[n.NodeName] = now
		}
	}
	roll := func(mode tunnel.Mode, args ...string) {
		t.Helper()
		for _, n := range w.Nodes {
			n.Config.AgentArgs = append([]string{"--routing-mode", string(mode)}, args...)
			ok(t, n.RestartAgent(ctx))
			more(ctx, t, fmt.Sprintf("%s has changed to %s", n.NodeName, n.Config.AgentArgs), all)
		}
		w.settled(t, mode, append(w.plannedPods(), distant))
		refused(fmt.Sprintf("changed to %s", mode))
	}
	refused("before")
	for _, mode := range accepting {
		roll(mode, "--accept-unencapsulated")
	}
	for _, mode := range refusing {
		roll(mode)
	}
	for _, s := range all {
		s.quit.Store(true)
	}
	for _, s := range all {
		if err := <-s.ended; err != nil {
			t.Error(err)
		}
	}
	checksumErrors(t, w.client.Netns, w.remote.Netns, distant.Netns, w.a.Netns, w.b.Netns)
}

// steadyTraffic is, in both families: connections that stay and some that are
// new each time, from pods and a host, to pods on the link and behind the
// router, by their addresses and by services.
func (w *world) steadyTraffic(ctx context.Context, t *testing.T, distant *cluster.Pod) (all []*steady) {
	large := bytesOf(7, 20000)
	for _, f := range families {
		near, far := port(f.of(w.remote), serverPort), port(f.of(distant), serverPort)
		for _, p := range []*cluster.Pod{w.remote, distant} {
			echoTCP(t, p.Netns, port(f.of(p), serverPort))
			echoUDP(t, p.Netns, port(f.of(p), serverPort))
		}
		for _, c := range []struct {
			name string
			from *cluster.Netns
			to   string
		}{
			{"pod to pod", w.client.Netns, near},
			{"pod to pod behind the router", w.client.Netns, far},
			{"pod behind the router to pod", distant.Netns, near},
			{"pod to service", w.client.Netns, port(f.pick("10.98.0.1", "fd00:10:98::1"), 80)},
			{"pod to service behind the router", w.client.Netns, port(f.pick("10.98.0.2", "fd00:10:98::2"), 80)},
			{"host to pod", w.a.Netns, near},
			{"host to pod behind the router", w.a.Netns, far},
			{"host behind the router to pod", w.Node("node-c").Netns, near},
			{"host to service", w.a.Netns, port(f.pick("10.98.0.2", "fd00:10:98::2"), 80)},
		} {
			name := f.name + " " + c.name
			stays, err := dial(ctx, c.from, "", c.to, nil)
			ok(t, err)
			t.Cleanup(func() { _ = stays.Close() })
			all = append(all, keepUp(name+", one connection", func(int64) error { return exchangeAll(stays, large) }),
				keepUp(name+", new ones", func(int64) error {
					fresh, err := dial(ctx, c.from, "", c.to, nil)
					if err != nil {
						return err
					}
					defer fresh.Close()
					return talk(fresh, "hello")
				}))
		}
		u := udp(t, w.client.Netns, "", far, nil)
		all = append(all, keepUp(f.name+" datagrams", func(i int64) error { return call(u, i) }))
	}
	return all
}

// exchangeAll sends several segments and wants them back.
func exchangeAll(c net.Conn, what []byte) error {
	if err := c.SetDeadline(soon()); err != nil {
		return err
	}
	if _, err := c.Write(what); err != nil {
		return err
	}
	got := make([]byte, len(what))
	n, err := io.ReadFull(c, got)
	if err == nil && !bytes.Equal(got, what) {
		err = errors.New("other bytes than were sent")
	}
	if err != nil {
		return fmt.Errorf("%d of %d bytes came back: %w", n, len(what), err)
	}
	return nil
}

// call wants the answer to a datagram, which may be lost now and then.
func call(u *net.UDPConn, i int64) error {
	want, buf := fmt.Sprint("datagram ", i), make([]byte, 100)
	for until := soon(); time.Now().Before(until); {
		if _, err := u.Write([]byte(want)); err != nil {
			return err
		}
		_ = u.SetReadDeadline(time.Now().Add(time.Second))
		for {
			n, err := u.Read(buf)
			if err != nil {
				break
			}
			if string(buf[:n]) == want {
				return nil
			}
		}
	}
	return fmt.Errorf("no answer to %q", want)
}

// settled: routes, peers, the tunnel's device and pods' MTU are the mode's on
// all nodes, and what CHECK wants.
func (w *world) settled(t *testing.T, mode tunnel.Mode, pods []*cluster.Pod) {
	t.Helper()
	ctx := within(t, patience)
	for _, n := range w.Nodes {
		eventually(t, ctx, func() error { return w.asIn(ctx, t, n, mode) })
	}
	for _, p := range pods {
		eventually(t, ctx, func() error { return podFollows(ctx, p, mode.MTU(1500, p.Node.Config.Addrs[0].Addr())) })
		if err := p.Check(ctx); err != nil {
			t.Errorf("changed to %s: CHECK of %s: %v", mode, p.PodName, err)
		}
	}
}

func (w *world) asIn(ctx context.Context, t *testing.T, n *cluster.Node, mode tunnel.Mode) error {
	set := mapsOf(t, n)
	for _, peer := range w.Nodes {
		if peer == n {
			continue
		}
		onlink := n.NodeName != "node-c" && peer.NodeName != "node-c"
		id, found, err := set.NodeIDs.Get(maps.ToAddr(peer.Config.Addrs[0].Addr()))
		if err != nil || !found {
			return fmt.Errorf("%s does not know %s: %w", n.NodeName, peer.NodeName, err)
		}
		entry, _, err := set.Nodes.Get(id)
		if err != nil {
			return err
		}
		want := maps.NodeHeader
		switch {
		case mode.Direct(onlink):
			want |= maps.NodeDirect
		case mode.IPIP():
			want |= maps.NodeIPIP
		}
		if got := entry.Flags &^ maps.NodePlain; got != want {
			return fmt.Errorf("%s, %s: flags of %s are %#x, want %#x", mode, n.NodeName, peer.NodeName, got, want)
		}
		for _, cidr := range peer.Config.PodCIDRs {
			device := "dev podweir.vxlan"
			if mode.Direct(onlink) {
				device = "dev eth0"
			}
			if err := routed(ctx, n, cidr, device); err != nil {
				return fmt.Errorf("%s: %w", mode, err)
			}
		}
	}
	link, err := n.Exec(ctx, "ip", "link", "show", "podweir.vxlan")
	if err != nil || !strings.Contains(link, " mtu 1450 ") {
		return fmt.Errorf("%s, %s: %s, %w", mode, n.NodeName, link, err)
	}
	return nil
}

// routed: one route leads to a pod range.
func routed(ctx context.Context, n *cluster.Node, cidr netip.Prefix, device string) error {
	family := "-4"
	if cidr.Addr().Is6() {
		family = "-6"
	}
	out, err := n.Exec(ctx, "ip", family, "route", "show", cidr.String())
	if err != nil || strings.Count(strings.TrimSpace(out), "\n") != 0 || !strings.Contains(out, device) {
		return fmt.Errorf("%s: route to %s: %q, want %s; %w", n.NodeName, cidr, out, device, err)
	}
	return nil
}
