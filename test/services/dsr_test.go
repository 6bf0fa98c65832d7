package services

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// --external-source dsr: the contract holds as a whole, in every routing mode,
// and a backend on another node answers clients outside by itself.
func TestDSR(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct", "cross-subnet"} {
		t.Run(mode, func(t *testing.T) {
			w := own(t, "--external-source", "dsr", "--routing-mode", mode)
			w.T.Run("S6", func(t *testing.T) { w.sub(t).directReplies() })
			w.T.Run("S28", func(t *testing.T) { w.sub(t).twoEntryNodes() })
			w.T.Run("N12", func(t *testing.T) { w.sub(t).directSizes(mode) })
			w.T.Run("ends", func(t *testing.T) { w.sub(t).directEnds() })
			w.T.Run("rows", func(t *testing.T) {
				w := w.sub(t)
				w.claim("by-proxy")
				w.runTable(rows)
			})
		})
	}
}

// The client's packets cross the tunnel as they are, with the service's
// address; the answers leave by the backend's node and pass the entry node
// nowhere.
func (w *world) directReplies() {
	for _, s := range []service{{name: "direct", n: 230, ends: "back-b"}, {name: "direct-host", n: 231, ends: "node-b"}} {
		w.T.Run(s.ends, func(t *testing.T) {
			w := w.sub(t)
			w.put(s)
			w.each(func(w *world, proto string, v6 bool) {
				for _, at := range []string{"node@node-a", "lb", "ext"} {
					tap, err := w.Tap(w.ctx)
					w.must(err)
					defer tap.Close()
					before, err := w.read()
					w.must(err)
					target := s.frontend(w, at, v6)
					if got := w.who("out", s, at, proto, v6, 3); got[s.ends] != 3 {
						w.Errorf("answered by %v", got)
					}
					w.closing(tap)
					client := w.addr("out", v6)
					var asked, carried, replied int
					for _, p := range tap.Packets() {
						switch {
						case p.Outer == nil || p.Outer.Proto == unix.IPPROTO_ICMPV6:
						case p.Inner != nil && p.Inner.Src == client && netip.AddrPortFrom(p.Inner.Dst, p.Inner.DPort) == target:
							carried++
						case p.Inner == nil && p.Outer.Src == client && netip.AddrPortFrom(p.Outer.Dst, p.Outer.DPort) == target:
							asked++
						case p.Inner == nil && p.Outer.Dst == client && netip.AddrPortFrom(p.Outer.Src, p.Outer.SPort) == target:
							replied++
							if want := w.macOf("node-b"); p.SrcMAC.String() != want {
								w.Errorf("%v was sent by %v, want node-b's %s", p, p.SrcMAC, want)
							}
						case p.Outer.Dst == client, p.Inner != nil && (p.Inner.Dst == client || p.Inner.Src == client):
							w.Errorf("on the underlay: %v", p)
						}
						if p.Outer != nil && len(p.BadChecksums) > 0 {
							w.Errorf("on the underlay: %v", p)
						}
					}
					if asked < 3 || carried != asked || replied < 3 {
						w.Errorf("%s: %d packets of the client, %d carried on, %d of replies", at, asked, carried, replied)
					}
					now, err := w.read()
					w.must(err)
					for key, n := range now.since(before) {
						if key.node == "node-a" && key.v6 == v6 && (key.reason == "fwd_wire" || key.hook == "from_overlay") {
							w.Errorf("%s: the entry node counted %d %s at %s", at, n, key.reason, key.hook)
						}
					}
				}
			})
		})
	}
}

// What clients send fits the tunnel, by the SYN-ACK's MSS or by being told;
// what they get is as large as the pod may send.
func (w *world) directSizes(mode string) {
	for _, s := range []service{{name: "direct-sizes-host", n: 233, ends: "node-b"}, {name: "direct-sizes", n: 232, ends: "back-b"}} {
		w.put(s)
		for _, v6 := range []bool{false, true} {
			w.T.Run(s.ends+" "+family(v6, "IPv4", "IPv6"), func(t *testing.T) {
				w := w.sub(t)
				target := s.frontend(w, "node@node-a", v6)
				tap, err := w.Tap(w.ctx)
				w.must(err)
				defer tap.Close()
				before, err := w.read()
				w.must(err)
				for _, options := range [][]string{{"-bytes", "1048576"}, {"-bytes", "1048576", "-receive"}} {
					r, err := w.callers["out"].ns.Bulk(w.ctx, target.String(), append(options, "-timeout", "20s")...)
					w.must(err)
					if r.Bytes != 1<<20 || !r.CRCMatches || r.Error != "" {
						w.Errorf("%v: %+v", options, r)
					}
					if most := uint32(tunnelMTU - 40 - family(v6, 0, 20)); r.MSS > most || r.MSS < most-20 {
						w.Errorf("%v: segments of %d, want %d at most", options, r.MSS, most)
					}
					if r.Retransmits > 20 {
						w.Errorf("%v: %d retransmissions", options, r.Retransmits)
					}
				}
				now, err := w.read()
				w.must(err)
				hook := family(s.ends == "node-b", "from_pod", "to_netdev")
				key := counterKey{"node-b", hook, "mss_clamped", v6}
				// Pods of a cluster with tunnels announce no more than fits.
				if want := mode == "direct" || s.ends == "node-b"; want != (now[key] > before[key]) {
					w.Errorf("%s at %s %s: want it %v; %v", key.reason, key.node, key.hook, want, now.since(before))
				}
				w.closing(tap)
				for _, p := range tap.Packets() {
					if p.Outer != nil && p.Outer.Fragment {
						w.Errorf("a fragment on the underlay: %v", p)
						break
					}
				}
				// Once told, the client knows of the way to this node for good.
				if s.ends == "back-b" {
					w.tooBig(target, v6)
				}
			})
		}
	}
}

// directFlows are the entries of a client's flows at a node.
func (w *world) directFlows(node string, client, target netip.AddrPort) (out []maps.Flow) {
	w.Helper()
	set := w.sets[node]
	for _, table := range []maps.Map[maps.FlowKey, maps.Flow]{set.Flows, set.FlowsNew} {
		flows, err := table.Dump()
		w.must(err)
		for k, f := range flows {
			if k.Proto == maps.ProtoTCP && netip.AddrPortFrom(maps.FromAddr(k.Src), k.Sport) == client &&
				netip.AddrPortFrom(maps.FromAddr(k.Dst), k.Dport) == target {
				out = append(out, f)
			}
		}
		if len(out) > 0 {
			return out
		}
	}
	return nil
}

// An established flow stands among those that are never evicted, at the entry
// node too, and the client's FIN closes it there.
func (w *world) directEnds() {
	s := service{name: "direct-ends", n: 234, ends: "back-b"}
	w.put(s)
	for _, v6 := range []bool{false, true} {
		w.T.Run(family(v6, "IPv4", "IPv6"), func(t *testing.T) {
			w := w.sub(t)
			target := s.frontend(w, "node@node-a", v6)
			st, err := w.callers["out"].ns.Stream(w.ctx, target.String(), "-proto", "tcp", "-interval", "10ms")
			w.must(err)
			r, err := st.Await(w.ctx, "answers", func(r probe.StreamReport) bool { return r.Received >= 5 })
			w.must(err)
			client := netip.MustParseAddrPort(r.Local)
			confirmed := func(node string) error {
				for _, f := range w.directFlows(node, client, target) {
					if f.Flags&8 != 0 && f.Tcp&1 == 0 {
						return nil
					}
				}
				return fmt.Errorf("%s: %+v, want a confirmed flow", node, w.directFlows(node, client, target))
			}
			for _, node := range []string{"node-a", "node-b"} {
				w.must(confirmed(node))
			}
			if _, err := st.Stop(w.ctx); err != nil {
				t.Error(err)
			}
			for _, node := range []string{"node-a", "node-b"} {
				w.must(cluster.Eventually(w.ctx, func() error {
					for _, f := range w.directFlows(node, client, target) {
						if f.Tcp&3 != 3 && f.Tcp&4 == 0 {
							return fmt.Errorf("%s: not closed: %+v", node, f)
						}
					}
					return nil
				}))
			}
		})
	}
}

var _ = time.Second
