package contract

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/doctor"
	"github.com/podweir/podweir/test/cluster"
)

// A pod that another plugin plugged into a bridge before podweir came: its node
// reaches it as before, other pods and services do not, which status says; what
// is left of the plugin is named by doctor, and the commands named remove it
// (L4).
func TestL4PodOfAnotherPlugin(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 4*time.Minute)
	const addr, port, outside = "10.244.80.9", 9443, "172.31.0.2"
	obj := pod("old", "node-a", addr)
	old, err := w.NewSandbox(obj)
	ok(t, err)
	in := func(n *cluster.Netns, lines ...string) {
		t.Helper()
		for _, l := range lines {
			_, err := n.Exec(ctx, "sh", "-ec", l)
			ok(t, err)
		}
	}
	// What the plugins bridge and portmap make.
	in(w.a.Netns,
		"ip link add cni0 type bridge", "ip addr add 10.244.80.1/24 dev cni0", "ip link set cni0 up",
		"ip link add vethold master cni0 type veth peer name eth0 netns "+old.Name, "ip link set vethold up",
		fmt.Sprintf("nft 'table ip cni_hostport { chain hostports { type nat hook prerouting priority dstnat; ip daddr %s tcp dport %d dnat to %s:%d; }; }'", outside, port, addr, cluster.ServerPort))
	in(old.Netns, "ip link set lo up", "ip addr add "+addr+"/24 dev eth0", "ip link set eth0 up", "ip route add default via 10.244.80.1")
	_, err = old.Serve(ctx, "old", cluster.ServerPort)
	ok(t, err)
	target := net.JoinHostPort(addr, fmt.Sprint(cluster.ServerPort))
	send(t, ctx, w.a.Netns, "tcp", target)

	ok(t, w.bringUp(ctx))
	ok(t, w.Manifests.Put(obj))
	w.put(t, clusterIP("old", []string{"10.98.50.9"}, bothPorts(80)...), endpointSlice("old", "old", bothSlicePorts(cluster.ServerPort), netip.MustParseAddr(addr)))
	w.inForce(t, ctx, "tcp", "10.98.50.9:80", at(netip.MustParseAddr(addr), cluster.ServerPort))
	before := readCounters(t, w.a)
	for _, from := range []*cluster.Pod{w.client, w.remote} {
		silent(t, ctx, from.Netns, "tcp", target)
		silent(t, ctx, from.Netns, "udp", "10.98.50.9:80")
	}
	atLeast(t, w.a, before, "drop_no_endpoint", "", false, 4)
	send(t, ctx, w.a.Netns, "tcp", target)

	stranger := func() error {
		all := status(t, ctx, w.a).Problems
		for _, p := range all {
			if p.Object == "Pod default/old" && strings.Contains(p.Error, addr) && strings.Contains(p.Error, "delete it") {
				return nil
			}
		}
		return fmt.Errorf("node-a does not name the pod: %+v", all)
	}
	eventually(t, ctx, stranger)

	// Somebody on the node's network listens where the plugin's rules lead away.
	_, err = w.a.Serve(ctx, "listener", port)
	ok(t, err)
	lost := net.JoinHostPort(outside, fmt.Sprint(port))
	if s := send(t, ctx, w.Ext, "tcp", lost); s.Servers["old"] != 1 {
		t.Errorf("answered by %v: the plugin's rules do nothing", s.Servers)
	}
	leftovers := func() (out []doctor.Finding) {
		for _, f := range examine(t, ctx, w.a) {
			if f.Check == "leftovers" {
				out = append(out, f)
			}
		}
		return out
	}
	var objects []string
	for _, f := range leftovers() {
		objects = append(objects, f.Object)
		if _, command, is := strings.Cut(f.WayOut, "on the node: "); is {
			in(w.a.Netns, strings.TrimSuffix(command, "; or reboot it"))
		}
	}
	if want := []string{"Device cni0", "Device vethold", "nftables, table ip cni_hostport"}; !slices.Equal(objects, want) {
		t.Errorf("doctor names %q, want %q", objects, want)
	}
	if s := send(t, ctx, w.Ext, "tcp", lost); s.Servers["listener"] != 1 {
		t.Errorf("answered by %v, without the plugin's rules", s.Servers)
	}
	// The pod starts anew.
	ok(t, w.Manifests.Delete(obj))
	ok(t, old.Delete(context.WithoutCancel(ctx)))
	eventually(t, ctx, func() error {
		if stranger() == nil {
			return fmt.Errorf("the pod that has gone is named: %+v", status(t, ctx, w.a).Problems)
		}
		return nil
	})
	if left := leftovers(); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
}
