package policy

import (
	"context"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	pwmaps "github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

// P19: what docs/policy.md says of examples/three-services.
func TestThreeServices(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	w := &world{T: t, ctx: ctx, c: cluster.ForTest(t, cluster.Config{}), sets: map[string]pwmaps.Set{}}
	objs, err := cluster.Load("../../examples/three-services")
	w.must(err)
	w.must(w.c.Manifests.Put(objs...))
	for _, n := range w.c.Nodes {
		w.must(w.c.Manifests.Put(n.Object()))
	}
	w.must(w.c.StartAgents(ctx))
	for _, n := range w.c.Nodes {
		set, err := pwmaps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
		w.must(err)
		t.Cleanup(func() { _ = set.Close() })
		w.sets[n.NodeName] = set
	}
	w.must(w.c.AddPods(ctx, objs...)) // each is under its policies when this returns

	ip := func(ns *cluster.Netns, args ...string) {
		t.Helper()
		_, err := ns.Exec(ctx, append([]string{"ip"}, args...)...)
		w.must(err)
	}
	addrs := map[string][]netip.Addr{
		"payment": {netip.MustParseAddr("192.0.3.7"), netip.MustParseAddr("2001:db8:3::7")},
		"blocked": {netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8:2::7")},
		"ext":     {netip.MustParseAddr("172.31.0.1"), netip.MustParseAddr("fd00:172:31::1")},
		"node-a":  {netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("fd00:172:31::2")},
	}
	for _, name := range []string{"payment", "blocked"} {
		for i, a := range addrs[name] {
			one := netip.PrefixFrom(a, a.BitLen()).String()
			ip(w.c.Ext, "addr", "add", one, "dev", "lo")
			for _, n := range w.c.Nodes {
				ip(n.Netns, "route", "add", one, "via", addrs["ext"][i].String())
			}
		}
	}
	for _, n := range w.c.Nodes {
		for i, cidr := range n.Config.PodCIDRs {
			ip(w.c.Ext, "route", "add", cidr.String(), "via", n.Config.Addrs[i].Addr().String())
		}
	}
	at := map[string]*cluster.Netns{"ext": w.c.Ext, "node-a": w.c.Node("node-a").Netns}
	ports := []int{53, 443, 5432, 8080, 10250}
	for _, o := range objs {
		p, ok := o.(*corev1.Pod)
		if !ok {
			continue
		}
		at[p.Name] = w.c.Pod(p.Namespace, p.Name).Netns
		for _, a := range p.Status.PodIPs {
			addrs[p.Name] = append(addrs[p.Name], netip.MustParseAddr(a.IP))
		}
	}
	for name, ns := range at {
		w.must(mesh.Serve(ctx, ns, name, ports...))
	}

	type way struct {
		from, to string
		port     int
	}
	allowed := map[way]bool{
		{"ext", "user", 8080}: true, {"stranger", "user", 8080}: true,
		{"user", "order", 8080}: true, {"order", "database", 5432}: true, {"order", "payment", 443}: true,
		// The stranger lives where nothing is denied by default.
		{"ext", "stranger", 8080}: true, {"ext", "dns", 443}: true, {"stranger", "dns", 443}: true, {"stranger", "payment", 443}: true,
		{"stranger", "payment", 8080}: true, {"stranger", "node-a", 443}: true, {"dns", "stranger", 8080}: true,
		// A node reaches its own pods.
		{"node-a", "user", 5432}: true, {"node-a", "database", 8080}: true,
	}
	for _, from := range []string{"user", "order", "database", "stranger"} {
		allowed[way{from, "dns", 53}] = true
	}
	var probes []mesh.Probe
	var ways []way
	for _, v := range []way{
		{"ext", "user", 8080}, {"ext", "user", 443}, {"ext", "order", 8080}, {"ext", "database", 5432}, {"ext", "stranger", 8080}, {"ext", "dns", 443},
		{"stranger", "user", 8080}, {"stranger", "order", 8080}, {"stranger", "database", 5432}, {"stranger", "dns", 443}, {"stranger", "dns", 53},
		{"stranger", "payment", 443}, {"stranger", "payment", 8080}, {"stranger", "blocked", 443}, {"stranger", "node-a", 443}, {"stranger", "node-a", 10250},
		{"dns", "stranger", 8080}, {"dns", "order", 8080}, {"dns", "blocked", 53},
		{"user", "order", 8080}, {"user", "order", 443}, {"user", "database", 5432}, {"user", "dns", 53}, {"user", "dns", 443}, {"user", "payment", 443}, {"user", "stranger", 8080}, {"user", "ext", 443},
		{"order", "database", 5432}, {"order", "database", 8080}, {"order", "user", 8080}, {"order", "dns", 53}, {"order", "payment", 443}, {"order", "payment", 8080}, {"order", "blocked", 443}, {"order", "node-a", 443},
		{"database", "order", 8080}, {"database", "user", 8080}, {"database", "dns", 53}, {"database", "payment", 443},
		{"node-a", "user", 5432}, {"node-a", "database", 8080}, {"node-a", "order", 8080},
	} {
		for _, a := range addrs[v.to] {
			probes = append(probes, mesh.Probe{From: at[v.from], Proto: "tcp", To: netip.AddrPortFrom(a, uint16(v.port))})
			ways = append(ways, v)
		}
	}
	for i, res := range w.probe(probes) {
		want := mesh.Silent
		if allowed[ways[i]] {
			want = mesh.Answered
		}
		if res.Outcome != want {
			t.Errorf("%s -> %s:%d (%v): %s, want %s (%v)", ways[i].from, ways[i].to, ways[i].port, probes[i].To, res.Outcome, want, res.Err)
		}
	}
	if t.Failed() {
		w.describe()
	}
}
