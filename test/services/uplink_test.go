package services

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// beyond is a host of the world that every router leads to; which of them
// answers tells the way that was taken.
var beyond = []netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8:113::9")}

func (w *world) on(ns *cluster.Netns, format string, args ...any) {
	w.Helper()
	_, err := ns.Exec(w.ctx, strings.Fields(fmt.Sprintf(format, args...))...)
	w.must(err)
}

// family chooses of two.
func family[T any](v6 bool, v4, v6s T) T {
	if v6 {
		return v6s
	}
	return v4
}

// Running flows from and to the world follow a default route that changes, by
// another next hop and by another device, under the address that they have;
// one whose address the node loses goes on as a new flow (N7, N19).
func TestWorldFollowsTheUplink(t *testing.T) {
	t.Parallel()
	w := own(t)
	s := service{name: "uplink", n: 250, ends: "back-b"}
	w.put(s)
	a := w.Nodes[0]
	// Two more routers: one on the nodes' own network, one on a link of its own.
	second, err := w.AddHost(w.ctx, "second", netip.MustParsePrefix("172.31.0.91/24"), netip.MustParsePrefix("fd00:172:31::91/64"))
	w.must(err)
	third, err := w.AddHost(w.ctx, "third", netip.MustParsePrefix("172.31.0.92/24"), netip.MustParsePrefix("fd00:172:31::92/64"))
	w.must(err)
	w.on(third, "ip link add wan type veth peer name eth1 netns %s", a.Name)
	w.on(third, "ip link set wan up")
	w.on(a.Netns, "ip link set eth1 up")
	for v6, ends := range map[bool][2]string{false: {"172.30.0.1/24", "172.30.0.2/24"}, true: {"fd00:172:30::1/64", "fd00:172:30::2/64"}} {
		w.on(third, "ip addr add %s dev wan%s", ends[0], family(v6, "", " nodad"))
		w.on(a.Netns, "ip addr add %s dev eth1%s", ends[1], family(v6, "", " nodad"))
		// Answers to the node's first address come by that link, too.
		w.on(third, "ip route add %v/%d via %s", w.addr("node-a", v6), family(v6, 32, 128), strings.Split(ends[1], "/")[0])
	}
	for name, ns := range map[string]*cluster.Netns{"ext": w.Ext, "second": second, "third": third} {
		for _, b := range beyond {
			w.on(ns, "ip addr add %v dev lo", netip.PrefixFrom(b, b.BitLen()))
		}
		if name != "ext" {
			w.on(ns, "ip link set lo up")
			w.join(name, ns)
		}
	}
	route := func(v6 bool, hop string) { w.on(a.Netns, "ip route replace default via %s", hop) }

	for _, v6 := range []bool{false, true} {
		w.T.Run(family(v6, "IPv4", "IPv6"), func(t *testing.T) {
			w := w.sub(t)
			target := netip.AddrPortFrom(beyond[family(v6, 0, 1)], cluster.ServerPort)
			first := family(v6, "172.31.0.1", "fd00:172:31::1")
			host, pod := w.flow("node-a", target), w.flow("pod-a", target)
			flows := []flow{pod, host}
			defer w.end(flows)
			w.answeredBy(flows, "ext")
			was := w.under("pod-a", target)

			route(v6, family(v6, "172.31.0.91", "fd00:172:31::91"))
			w.answeredBy(flows, "second")
			route(v6, family(v6, "172.30.0.1", "fd00:172:30::1"))
			w.answeredBy(flows[:1], "third")
			if now := w.under("pod-a", target); len(now) != 1 || now[0] != was[0] || now[0].Addr() != w.addr("node-a", v6) {
				w.Errorf("the pod's flow was under %v, now it is under %v", was, now)
			}

			// A flow that begins now has the new device's address, until
			// the node has it no more.
			late := w.flow("back-a", target)
			defer w.end([]flow{late})
			w.answeredBy([]flow{late}, "third")
			eth1 := netip.MustParseAddr(family(v6, "172.30.0.2", "fd00:172:30::2"))
			if now := w.under("back-a", target); len(now) != 1 || now[0].Addr() != eth1 {
				w.Errorf("the late flow is under %v, want %v", now, eth1)
			}
			route(v6, first)
			w.answeredBy(flows[:1], "ext")
			w.silentNow([]flow{late}) // its answers go where nobody is asked for
			w.on(a.Netns, "ip addr del %v dev eth1", netip.PrefixFrom(eth1, family(v6, 24, 64)))
			w.answeredBy([]flow{late}, "ext")
			if now := w.under("back-a", target); len(now) != 1 || now[0].Addr() != w.addr("node-a", v6) {
				w.Errorf("the late flow is under %v, want %v", now, w.addr("node-a", v6))
			}
		})
	}
	// The other way round: a client there that called in. Its answers leave
	// by the route of now.
	for _, v6 := range []bool{false, true} {
		w.T.Run("in "+family(v6, "IPv4", "IPv6"), func(t *testing.T) {
			w := w.sub(t)
			first := family(v6, "172.31.0.1", "fd00:172:31::1")
			target := s.frontend(w, "node@node-a", v6)
			st, err := w.Ext.Stream(w.ctx, target.String(), "-proto", "udp", "-interval", "10ms", "-source", beyond[family(v6, 0, 1)].String())
			w.must(err)
			flows := []flow{{st, "beyond to " + target.String()}}
			defer w.end(flows)
			w.answeredBy(flows, "back-b")
			route(v6, family(v6, "172.31.0.91", "fd00:172:31::91"))
			w.silentNow(flows)
			route(v6, first)
			w.answeredBy(flows, "back-b")
		})
	}
}

// under is what node-a's table says that somebody's flow to a target goes on
// under.
func (w *world) under(who string, target netip.AddrPort) (out []netip.AddrPort) {
	w.Helper()
	set := w.sets["node-a"]
	seen := map[maps.FlowKey]bool{}
	for _, table := range []maps.Map[maps.FlowKey, maps.Flow]{set.Flows, set.FlowsNew} {
		flows, err := table.Dump()
		w.must(err)
		for k, f := range flows {
			if !seen[k] && maps.FromAddr(k.Src) == w.addr(who, target.Addr().Is6()) && netip.AddrPortFrom(maps.FromAddr(k.Dst), k.Dport) == target && k.Proto == maps.ProtoUDP {
				seen[k] = true
				out = append(out, netip.AddrPortFrom(maps.FromAddr(f.Src), f.Sport))
			}
		}
	}
	return out
}
