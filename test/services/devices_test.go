package services

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/podweir/podweir/test/cluster"
)

// link joins a host and a node by a cable of their own, and gives each end an
// address of both families.
func (w *world) link(host *cluster.Netns, n *cluster.Node, dev, name string, ends4, ends6 [2]string) {
	w.Helper()
	w.on(host, "ip link add wan type veth peer name %s netns %s", dev, n.Name)
	w.on(host, "ip link set wan up")
	w.on(host, "ip link set lo up")
	w.on(n.Netns, "ip link set %s up", dev)
	for i, ns := range []*cluster.Netns{host, n.Netns} {
		for _, end := range []string{ends4[i], ends6[i] + " nodad"} {
			w.on(ns, "ip addr add dev %s %s", []string{"wan", dev}[i], end)
		}
	}
	bare := func(p string) string { return netip.MustParsePrefix(p).Addr().String() }
	w.know(name, bare(ends4[0]), bare(ends6[0]))
	w.know(n.NodeName+"/"+dev, bare(ends4[1]), bare(ends6[1]))
	w.join(name, host)
}

// A node with two uplinks and a third network that no default route leads to:
// NodePorts answer on each, and what pods send goes under the address of the
// device that the route uses, routing rules included. Answers to clients leave
// by the route from the address that they called.
func TestSeveralDevices(t *testing.T) {
	t.Parallel()
	w := own(t, "--nodeport-addresses", "172.16.0.0/12,fd00:172::/32")
	a := w.Nodes[0]
	second, err := w.AddHost(w.ctx, "second")
	w.must(err)
	store, err := w.AddHost(w.ctx, "store")
	w.must(err)
	w.link(second, a, "eth1", "second", [2]string{"172.30.0.1/24", "172.30.0.2/24"}, [2]string{"fd00:172:30::1/64", "fd00:172:30::2/64"})
	w.link(store, a, "eth2", "store", [2]string{"172.29.0.1/24", "172.29.0.2/24"}, [2]string{"fd00:172:29::1/64", "fd00:172:29::2/64"})
	for _, router := range []*cluster.Netns{w.Ext, second} {
		for _, b := range beyond {
			w.on(router, "ip addr add %v dev lo", netip.PrefixFrom(b, b.BitLen()))
		}
	}
	for _, gw := range []string{"172.30.0.1", "fd00:172:30::1"} {
		w.on(a.Netns, "ip route add default via %s dev eth1 metric 4000", gw)
		w.on(a.Netns, "ip route add default via %s dev eth1 table 101", gw)
	}
	w.know("beyond", beyond[0].String(), beyond[1].String())
	w.T.Run("rows", func(t *testing.T) {
		var list []row
		for _, to := range []struct{ who, by, sees string }{
			{"second", "second", "node-a/eth1"}, {"store", "store", "node-a/eth2"},
			{"beyond", "ext", "node-a"}, // the better metric
		} {
			list = append(list, row{from: "pod-a back-a", addr: to.who, port: cluster.ServerPort, by: to.by, sees: to.sees})
		}
		w.sub(t).runTable(append(list,
			row{from: "second", svc: "web", to: "node@node-a/eth1", by: "back-a back-b"},
			row{from: "store", svc: "web", to: "node@node-a/eth2", by: "back-a back-b"},
			row{from: "second", svc: "host-a", to: "node@node-a/eth1", by: "node-a"},
			row{from: "store", svc: "hosts", to: "node@node-a/eth2", by: "node-a node-b"},
			row{from: "pod-a", svc: "web", to: "node@node-a/eth1 node@node-a/eth2", by: "back-a back-b"},
		))
	})
	s := service{name: "devices", n: 252, ends: "back-a"}
	remote := service{name: "devices-b", n: 253, ends: "back-b"}
	w.put(s)
	w.put(remote)
	for _, v6 := range []bool{false, true} {
		w.T.Run("rules "+family(v6, "IPv4", "IPv6"), func(t *testing.T) {
			w := w.sub(t)
			target := netip.AddrPortFrom(beyond[family(v6, 0, 1)], cluster.ServerPort)
			rule := func(do, from string) {
				w.on(a.Netns, "ip %s rule %s from %s lookup 101", family(v6, "-4", "-6"), do, from)
			}
			// A pod with a rule of its own leaves by the second uplink, under
			// that device's address; the other one does not.
			pod := w.addr("pod-a", v6).String()
			rule("add", pod)
			defer rule("del", pod)
			was := w.under("pod-a", target)
			flows := []flow{w.flow("pod-a", target), w.flow("back-a", target)}
			w.answeredBy(flows[:1], "second")
			w.answeredBy(flows[1:], "ext")
			for _, now := range w.under("pod-a", target) {
				if !slices.Contains(was, now) && now.Addr() != w.addr("node-a/eth1", v6) {
					w.Errorf("pod-a is under %v, want %v", now, w.addr("node-a/eth1", v6))
				}
			}
			w.end(flows)

			// A client from beyond the second uplink, at a NodePort there: a
			// rule for the address that it calls leads its answers back.
			// Without one they go by the main table's default route.
			called := w.addr("node-a/eth1", v6).String()
			rule("add", called)
			flows = nil
			for _, svc := range []service{s, remote} {
				to := svc.frontend(w, "node@node-a/eth1", v6).String()
				st, err := second.Stream(w.ctx, to, "-proto", "udp", "-interval", "10ms", "-source", target.Addr().String())
				w.must(err)
				flows = append(flows, flow{st, "beyond the second uplink to " + to})
			}
			w.answeredBy(flows[:1], s.ends)
			w.answeredBy(flows[1:], remote.ends)
			first, err := w.Ext.Capture(w.ctx, "eth0")
			w.must(err)
			defer first.Close()
			rule("del", called)
			w.silentNow(flows)
			for range flows {
				_, err := first.Find(w.ctx, "an answer by the first uplink", func(p *cluster.Packet) bool {
					return p.Outer != nil && p.Outer.Src.String() == called && p.Outer.Dst == target.Addr()
				})
				w.must(err)
			}
			rule("add", called)
			w.answeredBy(flows[:1], s.ends)
			w.answeredBy(flows[1:], remote.ends)
			w.end(flows)
			rule("del", called)
		})
	}
}

// The uplink is removed and made anew under its name, with another index:
// running flows go on, and the first packet of a new one arrives
// (N19), from pods, from the host and from outside, in every routing mode.
func TestUplinkMadeAnew(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := own(t, "--routing-mode", mode)
			a := w.Nodes[0]
			s := service{name: "anew", n: 254, ends: "back-b"}
			local := service{name: "anew-a", n: 255, ends: "back-a"}
			w.put(s)
			w.put(local)
			var flows []flow
			var by []string
			for _, v6 := range []bool{false, true} {
				for _, f := range []struct {
					from, by string
					to       netip.AddrPort
				}{
					{"pod-a", "ext", netip.AddrPortFrom(w.addr("ext", v6), cluster.ServerPort)},
					{"pod-a", "back-b", s.frontend(w, "cluster", v6)},
					{"pod-b", "back-a", local.frontend(w, "cluster", v6)},
					{"out", "back-b", s.frontend(w, "node@node-a", v6)},
					{"out", "back-a", local.frontend(w, "node@node-a", v6)},
				} {
					flows = append(flows, w.flow(f.from, f.to))
					by = append(by, f.by)
				}
			}
			before := w.index(a, "eth0")
			w.remakeUplink(a)
			if w.index(a, "eth0") == before {
				t.Fatal("eth0 is the same")
			}
			for i := range flows {
				w.answeredBy(flows[i:i+1], by[i])
			}
			w.end(flows)
			// With nothing sent twice: UDP that is lost stays so.
			w.runTable([]row{
				{from: "pod-a pod-b node-a node-b", addr: "back-a", port: cluster.ServerPort, by: "back-a", sees: "caller"},
				{from: "pod-a pod-b node-a node-b", addr: "back-b", port: cluster.ServerPort, by: "back-b", sees: "caller"},
				{from: "pod-a", addr: "ext", port: cluster.ServerPort, by: "ext", sees: "node"},
				{from: "out", svc: "web", to: "node@node-a node@node-b", by: "back-a back-b"},
			})
		})
	}
}

func (w *world) index(n *cluster.Node, dev string) string {
	w.Helper()
	out, err := n.Exec(w.ctx, "ip", "-o", "link", "show", dev)
	w.must(err)
	index, _, _ := strings.Cut(out, ":")
	return index
}

// remakeUplink replaces a node's eth0 by another of the same name and MAC, as
// that of a card that was reset, with its addresses and routes. (A new MAC
// would have to be learned by the others' kernels first, which takes long.)
func (w *world) remakeUplink(n *cluster.Node) {
	w.Helper()
	out, err := n.Exec(w.ctx, "ip", "-o", "link", "show", "eth0")
	w.must(err)
	_, mac, _ := strings.Cut(out, "link/ether ")
	w.on(n.Netns, "ip link del eth0")
	w.on(w.Switch, "ip link add %s type veth peer name eth0 netns %s", n.NodeName, n.Name)
	w.on(w.Switch, "ip link set %s master br0 up", n.NodeName)
	w.on(w.Switch, "bridge link set dev %s learning off flood on", n.NodeName)
	w.on(n.Netns, "ip link set eth0 address %s up", strings.Fields(mac)[0])
	for i, p := range n.Config.Addrs {
		suffix := ""
		if p.Addr().Is6() {
			suffix = " nodad"
			if i >= 2 {
				suffix += " preferred_lft 0"
			}
		}
		w.on(n.Netns, "ip addr add %v dev eth0%s", p, suffix)
	}
	w.on(n.Netns, "ip route add default via %v", w.addr("ext", false))
	w.on(n.Netns, "ip route add default via %v", w.addr("ext", true))
}
