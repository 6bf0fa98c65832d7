package services

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// manyRetransmits are more of a MiB than a busy machine's queues lose, and less
// than a way that what is large does not fit.
const manyRetransmits = 200

// tunnelMTU is what a VXLAN header over IPv4 leaves of 1500.
const tunnelMTU = 1450

// Replies to a client outside leave by the node it called, whose tunnel
// brought the request; backends on a host's own network do it likewise.
func (w *world) replies() {
	for _, s := range []service{{name: "entry", n: 230, ends: "back-b"}, {name: "entry-host", n: 231, ends: "node-b"}} {
		w.T.Run(s.ends, func(t *testing.T) {
			w := w.sub(t)
			w.put(s)
			w.each(func(w *world, proto string, v6 bool) {
				tap, err := w.Tap(w.ctx)
				w.must(err)
				defer tap.Close()
				target := s.frontend(w, "node@node-a", v6)
				if got := w.who("out", s, "node@node-a", proto, v6, 3); got[s.ends] != 3 {
					w.Errorf("answered by %v", got)
				}
				w.closing(tap)
				client, backend := w.addr("out", v6), w.addr(s.ends, v6)
				var asked, carried, replied int
				for _, p := range tap.Packets() {
					switch {
					case p.Outer == nil:
					case p.Inner != nil && p.Inner.Src == client && p.Inner.Dst == backend:
						carried++
					case p.Inner == nil && p.Outer.Src == client && netip.AddrPortFrom(p.Outer.Dst, p.Outer.DPort) == target:
						asked++
					case p.Inner == nil && p.Outer.Dst == client && netip.AddrPortFrom(p.Outer.Src, p.Outer.SPort) == target:
						replied++
						if want := w.macOf("node-a"); p.SrcMAC.String() != want {
							w.Errorf("%v was sent by %v, want node-a's %s", p, p.SrcMAC, want)
						}
					case p.Inner == nil && p.Outer.Dst == client && p.Outer.Proto != unix.IPPROTO_ICMPV6:
						w.Errorf("on the underlay: %v", p)
					}
					if p.Outer != nil && len(p.BadChecksums) > 0 {
						w.Errorf("on the underlay: %v", p)
					}
				}
				if asked < 3 || carried != asked || replied < 3 {
					w.Errorf("%d packets of the client, %d carried on, %d of replies", asked, carried, replied)
				}
			})
		})
	}
}

// closing waits until a tap has seen what was sent before.
func (w *world) closing(tap *cluster.Capture) {
	w.Helper()
	for _, n := range w.Nodes {
		_, err := n.Ping(w.ctx, "172.31.0.1")
		w.must(err)
		src := w.addr(n.NodeName, false)
		_, err = tap.Find(w.ctx, "closing ping", func(p *cluster.Packet) bool {
			return p.Outer != nil && p.Inner == nil && p.Outer.Proto == unix.IPPROTO_ICMP && p.Outer.Src == src
		})
		w.must(err)
	}
}

func (w *world) macOf(node string) (mac string) {
	w.Helper()
	w.must(w.Node(node).Do(func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err == nil {
			mac = ifi.HardwareAddr.String()
		}
		return err
	}))
	return mac
}

// One client port towards two nodes that pick the same backend.
func (w *world) twoEntryNodes() {
	s := service{name: "two-ways", n: 232, ends: "back-b"}
	w.put(s)
	w.each(func(w *world, proto string, v6 bool) {
		var streams []*cluster.Stream
		port := fmt.Sprint(20000 + len(proto)*100 + map[bool]int{true: 1}[v6])
		if proto == "udp" {
			port += "0"
		}
		for _, at := range []string{"node@node-a", "node@node-b", "lb"} {
			st, err := w.callers["out"].ns.Stream(w.ctx, s.frontend(w, at, v6).String(), "-proto", proto, "-sport", port)
			w.must(err)
			streams = append(streams, st)
		}
		for _, st := range streams {
			_, err := st.Await(w.ctx, "answers", func(r probe.StreamReport) bool { return r.Received >= 20 })
			w.must(err)
		}
		for _, st := range streams {
			r, err := st.Stop(w.ctx)
			w.must(err)
			if r.Lost != 0 || r.Error != "" {
				w.Errorf("%+v", r)
			}
		}
	})
}

// bulk and too big: what enters from outside for another node's backend fits
// the tunnel in every routing mode.
func (w *world) sizes() {
	s := service{name: "sizes", n: 233, ends: "back-b"}
	w.put(s)
	for _, v6 := range []bool{false, true} {
		w.T.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			w := w.sub(t)
			target := s.frontend(w, "node@node-a", v6)
			tap, err := w.Tap(w.ctx)
			w.must(err)
			defer tap.Close()
			before, err := w.read()
			w.must(err)
			w.bulkFits(target, v6)
			now, err := w.read()
			w.must(err)
			for _, key := range []counterKey{{"node-a", "from_netdev", "mss_clamped", v6}} {
				if now[key] == before[key] {
					w.Errorf("no %s at %s %s, but %v", key.reason, key.node, key.hook, now.since(before))
				}
			}
			w.noFragment(tap)
			w.tooBig(target, v6)
		})
	}
}

// bulkFits transfers a MiB each way from outside, in segments that are as large
// as the tunnel takes.
func (w *world) bulkFits(target netip.AddrPort, v6 bool) {
	w.Helper()
	for _, options := range [][]string{{"-bytes", "1048576"}, {"-bytes", "1048576", "-receive"}} {
		r, err := w.callers["out"].ns.Bulk(w.ctx, target.String(), append(options, "-timeout", "60s")...)
		w.must(err)
		if r.Bytes != 1<<20 || !r.CRCMatches || r.Error != "" {
			w.Errorf("%v: %+v", options, r)
		}
		if most := uint32(tunnelMTU - 40 - family(v6, 0, 20)); r.MSS > most || r.MSS < most-20 {
			w.Errorf("%v: segments of %d, want %d at most", options, r.MSS, most)
		}
		if r.Retransmits > manyRetransmits {
			w.Errorf("%v: %d retransmissions", options, r.Retransmits)
		}
	}
}

// noFragment: none was on the underlay.
func (w *world) noFragment(tap *cluster.Capture) {
	w.Helper()
	w.closing(tap)
	if list := tap.Matching(func(p *cluster.Packet) bool { return p.Outer != nil && p.Outer.Fragment }); len(list) > 0 {
		w.Errorf("%d fragments on the underlay, such as %v", len(list), list[0])
	}
}

// tooBig sends a datagram that fits the wire and not the tunnel, and must not
// be cut: the sender is told the size, and gets an answer to one of that size.
func (w *world) tooBig(target netip.AddrPort, v6 bool) {
	w.Helper()
	before, err := w.read()
	w.must(err)
	headers := 28
	if v6 {
		headers = 48
	}
	w.must(w.callers["out"].ns.Do(func() error {
		c, err := net.Dial("udp", target.String())
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			return err
		}
		mtu := 0
		control := func(fn func(fd int) error) error {
			var serr error
			return errors.Join(raw.Control(func(fd uintptr) { serr = fn(int(fd)) }), serr)
		}
		level, discover, get := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_MTU
		if v6 {
			level, discover, get = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_MTU
		}
		err = control(func(fd int) error { return unix.SetsockoptInt(fd, level, discover, unix.IP_PMTUDISC_DO) })
		if err != nil {
			return err
		}
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if _, err := c.Write(make([]byte, tunnelMTU-headers+1)); err != nil {
			return err
		}
		// The answer comes as an error of the socket.
		if n, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.EMSGSIZE) {
			return fmt.Errorf("%d bytes came, %v; want message too long", n, err)
		}
		if err := control(func(fd int) (err error) { mtu, err = unix.GetsockoptInt(fd, level, get); return err }); err != nil {
			return err
		}
		if mtu != tunnelMTU {
			return fmt.Errorf("the path's MTU is %d, want %d", mtu, tunnelMTU)
		}
		// One byte less passes, and is answered: with less than was sent.
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		if _, err := c.Read(make([]byte, 2000)); err != nil {
			return fmt.Errorf("after the answer: %w", err)
		}
		return nil
	}))
	now, err := w.read()
	w.must(err)
	if key := (counterKey{"node-a", "from_netdev", "too_big_sent", v6}); now[key] != before[key]+1 {
		w.Errorf("too_big_sent was counted %d times; %v", now[key]-before[key], now.since(before))
	}
}

func TestS6RepliesByTheEntryNode(t *testing.T) { shared(t).replies() }

func TestS28TwoEntryNodes(t *testing.T) { shared(t).twoEntryNodes() }

func TestN12SizesTunnel(t *testing.T) { shared(t).sizes() }

// Where pods' packets need no tunnel, or another, clients' packets are carried
// in it all the same. The contract holds in every routing mode as a whole.
func TestServicesDirect(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"direct", "cross-subnet", "ipip"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := own(t, "--routing-mode", mode)
			w.T.Run("S6", func(t *testing.T) { w.sub(t).replies() })
			w.T.Run("S28", func(t *testing.T) { w.sub(t).twoEntryNodes() })
			w.T.Run("N12", func(t *testing.T) { w.sub(t).sizes() })
			w.T.Run("rows", func(t *testing.T) {
				w := w.sub(t)
				w.claim("by-proxy")
				w.runTable(rows)
			})
		})
	}
}

// --external-source snat: callers of NodePorts, load balancers' and external IPs
// are seen under the address of the node whose hook translates, as with
// kube-proxy: clients outside, pods and hosts alike. Not with the policy Local,
// not by a backend on that very node's network, and pods not by a cluster IP.
func TestSnat(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct", "cross-subnet", "ipip"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := own(t, "--external-source", "snat", "--routing-mode", mode)
			w.runTable([]row{
				// Clients outside.
				{from: "out", svc: "web", to: "lb ext node@node-a", by: "back-a back-b", sees: "node-a"},
				{from: "out", svc: "web", to: "node@node-b", by: "back-a back-b", sees: "node-b"},
				{from: "out-b", svc: "web", to: "lb ext node@node-b", by: "back-a back-b", sees: "node-b"},
				{from: "out", svc: "web", to: "cluster", by: "back-a back-b", sees: "node-a"},
				{from: "out", svc: "host-b", to: "lb ext node@node-a", by: "node-b", sees: "node-a"},
				{from: "out", svc: "host-a", to: "lb ext node@node-a", by: "node-a"},
				{from: "out", svc: "world", to: "lb node@node-a", by: "ext", sees: "node-a"},
				// S7.
				{from: "out", svc: "ex-local", to: "lb ext node@node-a", by: "back-a"},
				{from: "out", svc: "ex-local", to: "node@node-b", by: "back-b"},
				{from: "out", svc: "ex-local-host", to: "lb ext node@node-a", by: "node-a"},
				// Pods: backends on this node and on others, and the pod itself.
				{from: "pod-a", svc: "web", to: "lb ext node@node-a node@node-b", by: "back-a back-b", sees: "node-a"},
				{from: "pod-b", svc: "web", to: "lb ext node@node-a node@node-b", by: "back-a back-b", sees: "node-b"},
				{from: "pod-a pod-b", svc: "web", to: "cluster", by: "back-a back-b"},
				{from: "pod-a pod-b", svc: "ex-local", to: "cluster lb ext node@node-a node@node-b", by: "back-a back-b"},
				{from: "pod-a", svc: "host-a", to: "cluster lb ext node@node-a", by: "node-a"},
				{from: "pod-a", svc: "host-b", to: "cluster lb ext node@node-a", by: "node-b", sees: "node-a"},
				{from: "pod-a", svc: "self", to: anywhere, by: "pod-a", sees: "node-a"},
				{from: "pod-a", svc: "self-or", to: "cluster", by: "pod-a back-b", sees: "caller pod-a=node-a"},
				{from: "pod-a", svc: "self-or", to: "lb ext node@node-a", by: "pod-a back-b", sees: "node-a"},
				{from: "pod-a", addr: "ext", port: 8080, by: "ext", sees: "node-a"},
				{from: "pod-a", addr: "back-b", port: 8080, by: "back-b"},
				// Hosts have the node's address anyway, whichever InternalIP it is.
				{from: "node-a", svc: "web", to: "cluster lb ext node@node-b", by: "back-a back-b"},
				{from: "node-a", svc: "near", to: "node@node-a node@node-a/second", by: "back-a", sees: "node-a node-a/second"},
				{from: "node-a", svc: "far", to: "node@node-a node@node-a/second", by: "back-b", sees: "node-a node-a/second"},
				// And what is for nobody.
				{from: "out pod-a", svc: "none", to: "lb node@node-b", refused: true, why: "drop_no_backend"},
				{from: "out pod-a node-a", svc: "deaf", to: "lb ext node@node-a", refused: true},
				{from: "out", svc: "ex-local-b", to: "lb", why: "drop_no_local_external", at: "node-a from_netdev"},
				{from: "out-b", svc: "for-out", to: "lb", why: "drop_source_range", at: "node-b from_netdev"},
				{from: "pod-a", svc: "for-pod-a", to: "lb", by: "back-a back-b", sees: "node-a"},
			})
			w.T.Run("sizes", func(t *testing.T) { w.sub(t).hiddenBulk() })
		})
	}
}

// hiddenBulk moves a megabyte each way from a pod and from outside.
func (w *world) hiddenBulk() {
	s := service{name: "hidden-bulk", n: 234, ends: "back-b"}
	w.put(s)
	w.eachFamily(func(w *world, v6 bool) {
		for _, from := range []string{"pod-a", "out"} {
			for _, options := range [][]string{{"-bytes", "1048576"}, {"-bytes", "1048576", "-receive"}} {
				r, err := w.callers[from].ns.Bulk(w.ctx, s.frontend(w, "node@node-a", v6).String(), append(options, "-timeout", "60s")...)
				w.must(err)
				if r.Bytes != 1<<20 || !r.CRCMatches || r.Error != "" || r.Retransmits > manyRetransmits {
					w.Errorf("%s %v: %+v", from, options, r)
				}
			}
		}
	})
}
