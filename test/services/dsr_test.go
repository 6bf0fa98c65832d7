package services

import (
	"encoding/binary"
	"fmt"
	gomaps "maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// --external-source dsr: the contract holds as a whole, in every routing mode,
// and a backend on another node answers clients outside by itself.
func TestDSR(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct", "cross-subnet", "ipip"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := own(t, "--external-source", "dsr", "--routing-mode", mode)
			// The nodes' own check of sources, the strict one, has no say.
			for _, n := range w.Nodes {
				for _, dev := range []string{"all", "eth0"} {
					w.must(n.Sysctl("net/ipv4/conf/"+dev+"/rp_filter", "1"))
				}
			}
			w.T.Run("S6", func(t *testing.T) { w.sub(t).directReplies() })
			w.T.Run("S28", func(t *testing.T) { w.sub(t).twoEntryNodes() })
			w.T.Run("N12", func(t *testing.T) { w.sub(t).directSizes(mode) })
			w.T.Run("ends", func(t *testing.T) { w.sub(t).directEnds() })
			if mode == "vxlan" {
				w.T.Run("N18", func(t *testing.T) { w.sub(t).directFlood() })
				w.T.Run("N13", func(t *testing.T) { w.sub(t).directLies() })
				w.T.Run("N10", func(t *testing.T) { w.sub(t).directPath() })
				w.T.Run("S14", func(t *testing.T) { w.sub(t).affinity() })
			}
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
				w.bulkFits(target, v6)
				now, err := w.read()
				w.must(err)
				hook := family(s.ends == "node-b", "from_pod", "to_netdev")
				key := counterKey{"node-b", hook, "mss_clamped", v6}
				// Pods of a cluster with tunnels announce no more than fits.
				// With ipip these of IPv4 do: their own header is the smaller.
				if want := mode == "direct" || mode == "ipip" && !v6 || s.ends == "node-b"; want != (now[key] > before[key]) {
					w.Errorf("%s at %s %s: want it %v; %v", key.reason, key.node, key.hook, want, now.since(before))
				}
				w.noFragment(tap)
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

// established is a connection from outside that was answered, and its client.
func (w *world) established(target netip.AddrPort) (*cluster.Stream, probe.StreamReport, netip.AddrPort) {
	w.Helper()
	st, err := w.callers["out"].ns.Stream(w.ctx, target.String(), "-proto", "tcp", "-interval", "10ms")
	w.must(err)
	r, err := st.Await(w.ctx, "answers", func(r probe.StreamReport) bool { return r.Received >= 5 })
	w.must(err)
	return st, r, netip.MustParseAddrPort(r.Local)
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
			st, _, client := w.established(target)
			confirmed := func(node string) error {
				for _, f := range w.directFlows(node, client, target) {
					if f.Flags&uint8(bpf.DpPwFlowFlagsPW_F_CONFIRMED) != 0 && f.Tcp&uint8(bpf.DpPwTcpStatePW_TCP_FIN_ORIG) == 0 {
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
			const fin = uint8(bpf.DpPwTcpStatePW_TCP_FIN_ORIG | bpf.DpPwTcpStatePW_TCP_FIN_REPLY)
			const reset = uint8(bpf.DpPwTcpStatePW_TCP_RST)
			for _, node := range []string{"node-a", "node-b"} {
				w.must(cluster.Eventually(w.ctx, func() error {
					for _, f := range w.directFlows(node, client, target) {
						if f.Tcp&(fin|reset) != fin && f.Tcp&reset == 0 {
							return fmt.Errorf("%s: not closed: %+v", node, f)
						}
					}
					return nil
				}))
			}
		})
	}
}

// synFlood sends SYNs from that many ports, in the order of the ports. Not all
// at once: what overflows the kernel's backlog is lost to every other test, too.
func (w *world) synFlood(from *cluster.Netns, src netip.Addr, target netip.AddrPort, ports int) {
	w.Helper()
	const chunk = 256
	created := func() uint64 {
		c, err := w.read()
		w.must(err)
		return c[counterKey{"node-a", "from_netdev", "flow_created", src.Is6()}]
	}
	before := created()
	w.must(from.Do(func() error {
		domain := family(src.Is6(), unix.AF_INET, unix.AF_INET6)
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			return fmt.Errorf("raw socket: %w", err)
		}
		defer unix.Close(fd)
		var to unix.Sockaddr = &unix.SockaddrInet6{Addr: target.Addr().As16()}
		if src.Is4() {
			to = &unix.SockaddrInet4{Addr: target.Addr().As4()}
		} else if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_CHECKSUM, 16); err != nil {
			return fmt.Errorf("have the kernel write checksums: %w", err)
		}
		tcp := make([]byte, 20)
		binary.BigEndian.PutUint16(tcp[2:], target.Port())
		tcp[12], tcp[13], tcp[14] = 5<<4, 2, 0xff
		for i := range ports {
			binary.BigEndian.PutUint16(tcp, uint16(1024+i))
			if src.Is4() {
				copy(tcp[16:18], []byte{0, 0})
				sum := uint32(6 + len(tcp))
				a, b := src.As4(), target.Addr().As4()
				for _, part := range [][]byte{a[:], b[:], tcp} {
					for j := 0; j < len(part); j += 2 {
						sum += uint32(part[j])<<8 | uint32(part[j+1])
					}
				}
				sum = sum&0xffff + sum>>16
				sum += sum >> 16
				binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
			}
			if err := unix.Sendto(fd, tcp, 0, to); err != nil && err != unix.ENOBUFS && err != unix.EPERM {
				return fmt.Errorf("SYN %d: %w", i, err)
			}
			if i%chunk != chunk-1 {
				continue
			}
			// Should more be lost than half of it, it goes on all the same.
			for end := time.Now().Add(time.Second); created() < before+chunk/2 && time.Now().Before(end); {
				runtime.Gosched()
			}
			before = created()
		}
		return nil
	}))
}

// A flood of SYNs to the same frontend fills the table of its own kind at both
// nodes; an established connection is the same flow after it as before.
func (w *world) directFlood() {
	s := service{name: "direct-flood", n: 235, ends: "back-b"}
	w.put(s)
	w.eachFamily(func(w *world, v6 bool) {
		target := s.frontend(w, "node@node-a", v6)
		st, r, client := w.established(target)
		born := func(node string) uint64 {
			for _, f := range w.directFlows(node, client, target) {
				if f.Flags&uint8(bpf.DpPwFlowFlagsPW_F_CONFIRMED) != 0 {
					return f.Created
				}
			}
			w.Errorf("%s: no confirmed flow", node)
			return 0
		}
		was := map[string]uint64{"node-a": born("node-a"), "node-b": born("node-b")}
		before, err := w.read()
		w.must(err)
		// Two entries a flow. From another client, whose ports are all its own.
		w.synFlood(w.callers["out-b"].ns, w.addr("out-b", v6), target, 60000)
		now, err := w.read()
		w.must(err)
		key := counterKey{"node-a", "from_netdev", "flow_created", v6}
		if room := uint64(w.sets["node-a"].FlowsNew.MaxEntries()); 2*(now[key]-before[key]) < room {
			w.Errorf("%d new flows with room for %d entries: no flood", now[key]-before[key], room)
		}
		r, err = st.Await(w.ctx, "an answer after the flood", func(now probe.StreamReport) bool { return now.Received > r.Received+5 })
		w.must(err)
		for node, created := range was {
			if now := born(node); now != created {
				w.Errorf("%s: the flow is of %d, it was of %d", node, now, created)
			}
		}
		if r, err = st.Stop(w.ctx); err != nil || r.Lost != 0 || r.Error != "" {
			w.Errorf("%+v, %v", r, err)
		}
	})
}

// Frames that name a backend are read where they come from nodes alone: a
// stranger's tunnel packet, and a pod's, get nowhere.
func (w *world) directLies() {
	w.eachFamily(func(w *world, v6 bool) {
		client, vip := w.addr("out", v6), service{n: 236}.address("lb", v6)
		victim := w.addr("back-b", v6).As16()
		frame := append([]byte{2, 'p'}, victim[12:]...)
		frame = append(frame, 2, 'p', 'w', byte(cluster.ServerPort>>8), byte(cluster.ServerPort&0xff), byte(bpf.DpPwFramePW_FRAME_POD))
		udp := []byte{0x9c, 0x40, 0, 80, 0, 8, 0, 0}
		if v6 {
			frame = append(frame, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64)
		} else {
			frame = append(frame, 0x08, 0x00, 0x45, 0, 0, byte(20+len(udp)), 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0)
		}
		frame = append(append(frame, client.AsSlice()...), vip.AsSlice()...)
		if !v6 {
			sum := uint32(0)
			for i := 14; i < 34; i += 2 {
				sum += uint32(frame[i])<<8 | uint32(frame[i+1])
			}
			sum = sum&0xffff + sum>>16
			binary.BigEndian.PutUint16(frame[24:], ^uint16(sum+sum>>16))
		}
		vxlan := append([]byte{8, 0, 0, 0, 0, 0x10, 0, 0}, append(frame, udp...)...)
		for _, liar := range []struct{ who, node, hook, reason string }{
			{"out", "node-b", "from_overlay", "drop_unknown_peer"},
			{"pod-a", "node-a", "from_pod", "drop_pod_vxlan"},
			{"back-b", "node-b", "from_pod", "drop_pod_vxlan"},
		} {
			before, err := w.read()
			w.must(err)
			end := netip.AddrPortFrom(w.addr("node-b", false), 4789)
			w.must(w.callers[liar.who].ns.Do(func() error {
				c, err := net.Dial("udp4", end.String())
				if err != nil {
					return err
				}
				defer c.Close()
				_, err = c.Write(vxlan)
				return err
			}))
			w.must(cluster.Eventually(w.ctx, func() error {
				now, err := w.read()
				if err != nil {
					return err
				}
				sum := uint64(0)
				for key, n := range now.since(before) {
					if key.node == liar.node && key.hook == liar.hook && key.reason == liar.reason {
						sum += n
					}
					if key.reason == "flow_created" && key.hook == "from_overlay" {
						w.Errorf("%s made a flow", liar.who)
					}
				}
				if sum == 0 {
					return fmt.Errorf("%s: no %s at %s %s, but %v", liar.who, liar.reason, liar.node, liar.hook, now.since(before))
				}
				return nil
			}))
		}
	})
}

// Agents that are restarted in another mode: what runs goes on the way that it
// began by, what begins takes the new one. All modes know each other's packets,
// for nodes change one after the other.
func TestExternalSourceChanges(t *testing.T) {
	t.Parallel()
	w := own(t)
	s := service{name: "changes", n: 238, ends: "back-b"}
	w.put(s)
	type running struct {
		*cluster.Stream
		what string
	}
	var streams []running
	begin := func(mode string) {
		for _, v6 := range []bool{false, true} {
			for _, proto := range []string{"tcp", "udp"} {
				st, err := w.callers["out"].ns.Stream(w.ctx, s.frontend(w, "node@node-a", v6).String(), "-proto", proto, "-interval", "10ms")
				w.must(err)
				streams = append(streams, running{st, fmt.Sprintf("%s %s begun with %s", proto, family(v6, "IPv4", "IPv6"), mode)})
			}
		}
	}
	goOn := func() {
		for _, st := range streams {
			r, err := st.Report(w.ctx)
			w.must(err)
			if _, err := st.Await(w.ctx, "answers", func(now probe.StreamReport) bool { return now.Received >= r.Received+5 }); err != nil {
				t.Fatalf("%s: %v", st.what, err)
			}
		}
	}
	before, err := w.read()
	w.must(err)
	begin("keep")
	goOn()
	for _, mode := range []string{"dsr", "snat", "dsr", "keep"} {
		w.SetAgentArgs(append(slices.Clone(nodePortAddrs), "--external-source", mode)...)
		for _, n := range w.Nodes {
			w.must(n.RestartAgent(w.ctx))
			goOn()
		}
		begin(mode)
		goOn()
		w.eachFamily(func(w *world, v6 bool) {
			target := s.frontend(w, "node@node-a", v6)
			for _, proto := range []string{"tcp", "udp"} {
				r, err := w.callers["out"].call(w.ctx, probe.Call{Proto: proto, Target: target.String()})
				w.must(err)
				want := family(mode == "snat", w.addr("out", v6), w.addr("node-a", v6))
				if a := r.Attempts[0]; !a.OK || addrOf(a.Reply.Peer) != want {
					w.Errorf("%s, %s: %+v, want it seen as %v", mode, proto, a, want)
				}
			}
		})
	}
	now, err := w.read()
	w.must(err)
	drops := now.since(before)
	gomaps.DeleteFunc(drops, func(k counterKey, _ uint64) bool {
		return !strings.HasPrefix(k.reason, "drop_") || k.reason == "drop_multicast"
	})
	for _, st := range streams {
		r, err := st.Stop(w.ctx)
		if err != nil || r.Error != "" || r.Lost != 0 {
			t.Errorf("%s: %+v, %v; dropped:%v", st.what, r, err, drops)
		}
	}
}

// A router with a narrow link tells the service's address that an answer does
// not fit. That is the node that was called; the backend on the other one
// hears of it, and sends less.
func (w *world) directPath() {
	s := service{name: "direct-path", n: 239, ends: "back-b"}
	w.put(s)
	router, err := w.AddHost(w.ctx, "narrow", netip.MustParsePrefix("172.31.0.93/24"), netip.MustParsePrefix("fd00:172:31::93/64"))
	w.must(err)
	far, err := w.AddHost(w.ctx, "far", netip.MustParsePrefix("172.31.0.94/24"), netip.MustParsePrefix("fd00:172:31::94/64"))
	w.must(err)
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		w.must(router.Sysctl(key, "1"))
	}
	// Towards the client the link carries less than the client thinks.
	w.on(router, "ip link add wan mtu 1300 type veth peer name wan mtu 1500 netns %s", far.Name)
	w.on(router, "ip link set wan up")
	w.on(far, "ip link set wan up")
	for _, v6 := range []bool{false, true} {
		nodad, bits := family(v6, "", " nodad"), family(v6, 24, 64)
		w.on(router, "ip addr add %s/%d dev wan%s", family(v6, "172.29.0.1", "fd00:172:29::1"), bits, nodad)
		w.on(far, "ip addr add %s/%d dev wan%s", family(v6, "172.29.0.2", "fd00:172:29::2"), bits, nodad)
		for _, n := range w.Nodes {
			w.on(n.Netns, "ip route add %s via %s", family(v6, "172.29.0.0/24", "fd00:172:29::/64"), family(v6, "172.31.0.93", "fd00:172:31::93"))
		}
		target := s.frontend(w, "node@node-a", v6)
		hop := family(v6, "172.29.0.1", "fd00:172:29::1")
		w.on(far, "ip route add %v/%d via %s dev wan src %s", target.Addr(), target.Addr().BitLen(), hop, family(v6, "172.29.0.2", "fd00:172:29::2"))
	}
	w.eachFamily(func(w *world, v6 bool) {
		before, err := w.read()
		w.must(err)
		r, err := far.Bulk(w.ctx, s.frontend(w, "node@node-a", v6).String(), "-bytes", "1048576", "-receive", "-timeout", "60s")
		w.must(err)
		if r.Bytes != 1<<20 || !r.CRCMatches || r.Error != "" {
			w.Errorf("%+v", r)
		}
		now, err := w.read()
		w.must(err)
		// All else leaves the entry node under a header of ours.
		if key := (counterKey{"node-a", "from_netdev", "fwd_tunnel", v6}); now[key] == before[key] {
			w.Errorf("no error went by %s at %s %s, but %v", key.reason, key.node, key.hook, now.since(before))
		}
	})
}
