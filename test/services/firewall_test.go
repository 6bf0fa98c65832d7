package services

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/podweir/podweir/test/cluster"
)

// dropForwarding has every node's firewall drop all that it forwards: by the
// policy of both kinds of iptables and by a chain of nft. Before these, what
// comes from or is for a pod is counted.
func (w *world) dropForwarding() {
	w.Helper()
	for _, n := range w.Nodes {
		for _, tool := range []string{"iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"} {
			w.on(n.Netns, "%s -P FORWARD DROP", tool)
		}
		w.on(n.Netns, "nft add table inet fw")
		w.on(n.Netns, "nft add chain inet fw pods { type filter hook forward priority -400 ; }")
		w.on(n.Netns, "nft add chain inet fw forward { type filter hook forward priority 10 ; policy drop ; }")
		for _, cidr := range []string{"ip %s 10.244.0.0/16", "ip6 %s fd00:10:244::/48"} {
			for _, end := range []string{"saddr", "daddr"} {
				w.on(n.Netns, "nft add rule inet fw pods "+cidr+" counter", end)
			}
		}
		w.on(n.Netns, "nft add chain inet fw everything { type filter hook forward priority -401 ; }")
		w.on(n.Netns, "nft add rule inet fw everything counter")
	}
}

// forwarded is what a chain of dropForwarding has counted.
func (w *world) forwarded(n *cluster.Node, chain string) (packets int) {
	w.Helper()
	out, err := n.Exec(w.ctx, "nft", "list", "chain", "inet", "fw", chain)
	w.must(err)
	for _, m := range regexp.MustCompile(`counter packets (\d+)`).FindAllStringSubmatch(out, -1) {
		n, err := strconv.Atoi(m[1])
		w.must(err)
		packets += n
	}
	return packets
}

// noneForwarded: the firewalls have seen no packet of a pod.
func (w *world) noneForwarded() {
	w.Helper()
	for _, n := range w.Nodes {
		if got := w.forwarded(n, "pods"); got != 0 {
			w.Errorf("%s: %d packets of pods came to the firewall", n.NodeName, got)
		}
	}
}

// behindFirewall is a world in a routing mode, and one for clients outside if
// another word follows, with dropForwarding and a pod with a host port.
func behindFirewall(t *testing.T, mode string) *world {
	t.Helper()
	mode, external, given := strings.Cut(mode, " ")
	if !given {
		external = "keep"
	}
	w := own(t, "--routing-mode", mode, "--external-source", external)
	w.dropForwarding()
	w.hostPortPod(8888)
	return w
}

// withoutForwarding is all that works where dropForwarding and a pod with a
// host port are.
func (w *world) withoutForwarding() {
	w.Helper()
	w.T.Run("rows", func(t *testing.T) {
		list := []row{
			{from: "pod-a", addr: "out", port: 8080, by: "out", sees: "node"},
			{from: "out", addr: "pod-a", port: 8080, by: "pod-a"},
			{from: "pod-a", svc: "web", to: anywhere, by: "back-a back-b"},
			{from: "node-a", svc: "web", to: "cluster lb node@node-b", by: "back-a back-b"},
			{from: "out out-b", svc: "web", to: anywhere, by: "back-a back-b"},
			{from: "out", svc: "hosts", to: anywhere, by: "node-a node-b"},
			{from: "pod-a", svc: "world", to: "cluster lb ext node@node-a", by: "ext", sees: "node"},
			{from: "pod-a", svc: "self", to: anywhere, by: "pod-a", sees: "node"},
			{from: "pod-a pod-b out out-b node-b", addr: "node-a", port: 8888, by: "host-port", sees: "caller node"},
			{from: "pod-a node-a out", svc: "none", to: "cluster lb node@node-a node@node-b", refused: true, why: "drop_no_backend"},
			// ICMP errors, of a pod and of another node.
			{from: "pod-a", addr: "back-a back-b node-b ext", port: 7777, refused: true},
		}
		for _, who := range []string{"back-a", "back-b", "node-a", "node-b", "ext"} {
			list = append(list, row{from: "pod-a pod-b node-a node-b", addr: who, port: 8080, by: who, sees: "caller node"})
		}
		w.sub(t).runTable(list)
	})
	for _, v6 := range []bool{false, true} {
		for _, to := range []string{"back-a", "back-b", "node-a", "node-b", "ext"} {
			r, err := w.Pod("default", "pod-a").Ping(w.ctx, w.addr(to, v6).String(), "-timeout", "30s")
			w.must(err)
			if r.Received != 1 {
				w.Errorf("ping of %s: %+v", to, r)
			}
		}
	}
	w.T.Run("fragments", func(t *testing.T) { w.sub(t).largeDatagrams() })
	w.T.Run("reordered", func(t *testing.T) { w.sub(t).reordered() })
}

// A node whose firewall forwards nothing: pods do not notice, and none of
// their packets gets there, the first of a flow included (N21).
func TestN21ForwardDrop(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct", "cross-subnet", "ipip", "vxlan dsr", "ipip dsr"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := behindFirewall(t, mode)
			w.withoutForwarding()
			w.noneForwarded()
			// The firewall is what it is taken for.
			out := w.callers["out"].ns
			w.on(out, "ip route add %v via %v", beyond[0], w.addr("node-a", false))
			w.on(w.Ext, "ip addr add %v/32 dev lo", beyond[0])
			before := w.forwarded(w.Nodes[0], "everything")
			r, err := out.Ping(w.ctx, beyond[0].String(), "-timeout", "200ms")
			w.must(err)
			if r.Received != 0 || w.forwarded(w.Nodes[0], "everything") == before {
				w.Errorf("the node forwards: %+v, %s", r, strings.TrimSpace(fmt.Sprint(w.forwarded(w.Nodes[0], "everything"))))
			}
		})
	}
}
