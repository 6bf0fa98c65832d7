package services

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// --masquerade=false: pods keep their address wherever they go, other nodes
// and the world included, and reach every service as they do with it. A host
// port of another node, which their own node cannot translate, too.
func TestNoMasquerade(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct", "ipip"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := own(t, "--masquerade=false", "--routing-mode", mode)
			w.routesToPods(w.Ext)
			hostPort := w.hostPortPod(8888)
			w.T.Run("rows", func(t *testing.T) {
				w.sub(t).runTable([]row{
					{from: "pod-a", addr: "ext", port: 8080, by: "ext"},
					{from: "pod-a", addr: "out", port: 8080, by: "out"},
					{from: "out", addr: "pod-a", port: 8080, by: "pod-a"},
					{from: "pod-a", addr: "node-b", port: 8080, by: "node-b"},
					{from: "pod-a", addr: "node-a", port: 8080, by: "node-a"},
					{from: "pod-a", addr: "back-b", port: 8080, by: "back-b"},
					{from: "pod-a", svc: "web", to: anywhere, by: "back-a back-b"},
					{from: "node-a", svc: "web", to: "cluster lb node@node-b", by: "back-a back-b"},
					{from: "out", svc: "web", to: anywhere, by: "back-a back-b"},
					{from: "pod-a", svc: "hosts", to: anywhere, by: "node-a node-b"},
					{from: "pod-b", svc: "host-a", to: "cluster lb node@node-a node@node-b", by: "node-a"},
					{from: "out", svc: "hosts", to: anywhere, by: "node-a node-b"},
					{from: "pod-a", svc: "world", to: "cluster lb ext node@node-a", by: "ext"},
					{from: "pod-a", svc: "self", to: anywhere, by: "pod-a", sees: "node-a"},
					{from: everyone, svc: "none", to: "cluster lb node@node-a node@node-b", refused: true, why: "drop_no_backend"},
					{from: "pod-a pod-b", addr: "node-b", port: 7777, refused: true},
					{from: "pod-a pod-b out out-b node-b", addr: "node-a", port: 8888, by: "host-port"},
					{from: "pod-a pod-b", addr: "node-a/second", port: 8888, by: "host-port"},
				})
			})
			w.T.Run("while it runs", func(t *testing.T) {
				w := w.sub(t)
				var flows []flow
				for _, v6 := range []bool{false, true} {
					flows = append(flows, w.flow("pod-b", netip.AddrPortFrom(w.addr("node-a", v6), 8888)))
				}
				defer w.end(flows)
				w.answeredBy(flows, "host-port")
				// Something about both ends moves: the flow stays as it is.
				s := service{name: "moves", n: 251, ends: "pod-b host-port"}
				w.put(s)
				s.ends = "back-a"
				w.write(s)
				w.settled()
				w.answeredBy(flows, "host-port")
				// The port goes with its pod: now it is the host's, where nobody listens.
				w.must(hostPort.Delete(w.ctx))
				w.silentNow(flows)
				w.eachFamily(func(w *world, v6 bool) {
					target := netip.AddrPortFrom(w.addr("node-a", v6), 8888).String()
					r, err := w.callers["pod-b"].call(w.ctx, probe.Call{Proto: "tcp", Target: target, Timeout: patience})
					w.must(err)
					if a := r.Attempts[0]; a.Kind != probe.Refused {
						w.Errorf("%+v, want it refused by the host", a)
					}
				})
			})
		})
	}
}

// --non-masquerade-cidrs: pods keep their address towards these, a client
// outside and another node here, and towards nothing else.
//
// A client in these is one outside like any: seen as --external-source says. Nor
// do they change what snat hides: calls of an external frontend.
func TestNonMasqueradeCIDRs(t *testing.T) {
	t.Parallel()
	for _, external := range []string{"keep", "dsr", "snat"} {
		t.Run(external, func(t *testing.T) {
			t.Parallel()
			own(t, "--external-source", external, "--non-masquerade-cidrs", "172.31.0.50/31,172.31.0.3/32,fd00:172:31::50/128,fd00:172:31::3/128").nonMasquerade(external)
		})
	}
}

func (w *world) nonMasquerade(external string) {
	w.Helper()
	// As who a caller is seen by whom it reaches by an external frontend.
	hidden := func(as, by string) string {
		if external == "snat" {
			return by
		}
		return as
	}
	w.runTable([]row{
		{from: "out", svc: "web", to: "lb ext node@node-a", by: "back-a back-b", sees: hidden("out", "node-a")},
		{from: "out", svc: "host-b", to: "lb node@node-a", by: "node-b", sees: hidden("out", "node-a")},
		{from: "out", svc: "ex-local", to: "lb node@node-a", by: "back-a"},
		{from: "out", svc: "world", to: "lb node@node-a", by: "ext", sees: "node-a"},
		{from: "pod-a", svc: "web", to: "lb ext node@node-b", by: "back-a back-b", sees: hidden("pod-a", "node-a")},
		{from: "pod-a", svc: "host-b", to: "lb node@node-b", by: "node-b", sees: hidden("pod-a", "node-a")},
		{from: "pod-b", svc: "host-a", to: "lb node@node-a", by: "node-a", sees: "node-b"},
		{from: "pod-a", svc: "web", to: "cluster", by: "back-a back-b"},
		{from: "pod-a", svc: "host-b", to: "cluster", by: "node-b"},
		{from: "pod-b", svc: "host-a", to: "cluster", by: "node-a", sees: "node-b"},
		{from: "pod-a", svc: "self", to: anywhere, by: "pod-a", sees: "node-a"},
		{from: "pod-a", addr: "out", port: 8080, by: "out"},
		{from: "pod-a", addr: "ext", port: 8080, by: "ext", sees: "node-a"},
		{from: "pod-a", addr: "node-b", port: 8080, by: "node-b"},
		{from: "pod-b", addr: "node-a", port: 8080, by: "node-a", sees: "node-b"},
		{from: "out ext", addr: "node-a", port: 8080, by: "node-a"},
		{from: "out", addr: "pod-b", port: 8080, by: "pod-b"},
		{from: "out", addr: "pod-a", port: 8080, by: "pod-a"},
		{from: "pod-a", addr: "back-b", port: 8080, by: "back-b"},
	})
	out, err := w.Node("node-a").Podweir(w.ctx, "status")
	w.must(err)
	for _, want := range []string{"IPv4 and IPv6, not to 172.31.0.50/31, ", "; source ports 1024-29999, 61000-65535", "External source ", " " + external + ": clients ", "Routing mode ", " vxlan\n"} {
		if !strings.Contains(out, want) {
			w.Errorf("podweir status lacks %q:\n%s", want, out)
		}
	}
}

// Masquerade that is off, and each of the ways in which clients outside are
// answered: pods keep their address towards the world, by a service too, but
// where snat hides whoever calls an external frontend.
func TestNoMasqueradeExternalSource(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ external, mode, pod, out string }{
		{"dsr", "ipip", "pod-a", "out"}, {"snat", "cross-subnet", "node-a", "node-a"},
	} {
		t.Run(c.external+" "+c.mode, func(t *testing.T) {
			t.Parallel()
			w := own(t, "--masquerade=false", "--external-source", c.external, "--routing-mode", c.mode)
			w.routesToPods(w.Ext)
			w.runTable([]row{
				{from: "pod-a", addr: "ext", port: 8080, by: "ext"},
				{from: "pod-a", addr: "node-b", port: 8080, by: "node-b"},
				{from: "pod-a", svc: "world", to: "cluster", by: "ext"},
				{from: "pod-a", svc: "world", to: "lb ext node@node-a", by: "ext", sees: c.pod},
				{from: "pod-a", svc: "web", to: "lb ext node@node-b", by: "back-a back-b", sees: c.pod},
				{from: "pod-a", svc: "host-b", to: "cluster", by: "node-b"},
				{from: "pod-a", svc: "host-b", to: "lb node@node-b", by: "node-b", sees: c.pod},
				{from: "pod-a", svc: "self", to: anywhere, by: "pod-a", sees: "node-a"},
				{from: "out", svc: "web", to: "lb ext node@node-a", by: "back-a back-b", sees: c.out},
				{from: "out", svc: "host-b", to: "lb node@node-a", by: "node-b", sees: c.out},
				{from: "out", addr: "pod-a", port: 8080, by: "pod-a"},
			})
		})
	}
}

// eachFamily runs a case once per family.
func (w *world) eachFamily(fn func(w *world, v6 bool)) {
	w.Helper()
	for _, v6 := range []bool{false, true} {
		w.T.Run(family(v6, "IPv4", "IPv6"), func(t *testing.T) { fn(w.sub(t), v6) })
	}
}

// routesToPods lets somebody outside know where pods are.
func (w *world) routesToPods(ns *cluster.Netns) {
	w.Helper()
	for _, n := range w.Nodes {
		for _, cidr := range n.Config.PodCIDRs {
			w.on(ns, "ip route add %v via %v", cidr, w.addr(n.NodeName, cidr.Addr().Is6()))
		}
	}
}

// hostPortPod is a pod of node-a with a port of the node, called "host-port".
func (w *world) hostPortPod(port int) *cluster.Pod {
	w.Helper()
	w.know("host-port", "10.244.80.77", "fd00:10:244:50::4d")
	obj := podObject("host-port", "node-a", "10.244.80.77", "fd00:10:244:50::4d")
	w.must(w.Manifests.Put(obj))
	var list []cluster.PortMapping
	for proto := range strings.FieldsSeq("tcp udp") {
		list = append(list, cluster.PortMapping{HostPort: port, ContainerPort: cluster.ServerPort, Protocol: proto})
	}
	p, err := w.AddPod(w.ctx, obj, list...)
	w.must(err)
	w.join("host-port", p.Netns)
	return p
}
