package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// tc runs tc in a namespace.
func tc(t *testing.T, ctx context.Context, n *cluster.Netns, format string, args ...any) string {
	t.Helper()
	out, err := n.Exec(ctx, append([]string{"tc"}, strings.Fields(fmt.Sprintf(format, args...))...)...)
	ok(t, err)
	return out
}

// sentBy is what the root qdisc of a device has sent.
func sentBy(t *testing.T, ctx context.Context, n *cluster.Netns, dev string) (bytes, packets int) {
	t.Helper()
	var list []struct {
		Kind           string
		Root           bool
		Bytes, Packets int
	}
	ok(t, json.Unmarshal([]byte(tc(t, ctx, n, "-s -j qdisc show dev %s", dev)), &list))
	for _, q := range list {
		if q.Root {
			return q.Bytes, q.Packets
		}
	}
	return 0, 0
}

// flowsTo are the flows to a pod's device that have had a packet just now.
func flowsTo(t *testing.T, set maps.Set, ifindex int) map[maps.FlowKey]maps.Flow {
	t.Helper()
	var now unix.Timespec
	ok(t, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now))
	out := map[maps.FlowKey]maps.Flow{}
	// What was moved to the first has left a copy in the second.
	for _, table := range []maps.Map[maps.FlowKey, maps.Flow]{set.FlowsNew, set.Flows} {
		flows, err := table.Dump()
		ok(t, err)
		for k, f := range flows {
			delete(out, k)
			if f.To.Kind == maps.PlacePod && f.To.Id == uint32(ifindex) && int64(f.LastSeen) > now.Nano()-int64(time.Second) {
				out[k] = f
			}
		}
	}
	return out
}

// A pod's device with a qdisc, as the bandwidth plugin leaves it: all that is
// sent to the pod goes through it, whatever way it comes, running flows
// included; so long as it is there.
func TestN22Qdisc(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	obj := pod("shaped", "node-a", "10.244.80.91", "fd00:10:244:50::91")
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Delete(context.Background())) })
	_, err = p.Serve(ctx, "shaped", cluster.ServerPort)
	ok(t, err)
	dev := hostSide(t, p).Attrs().Name
	ips := []string{"10.98.22.1", "fd00:10:98::2201"}
	svc := clusterIP("shaped", ips, bothPorts(80)...)
	svc.Spec.Type = corev1.ServiceTypeNodePort
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = 30922
	}
	w.put(t, svc)
	w.put(t, slicesFor("shaped", "shaped", bothSlicePorts(cluster.ServerPort), p)...)
	w.inForce(t, ctx, "tcp", vip(ips[1], 80), atAll(true, p)...)
	w.inForce(t, ctx, "tcp", vip(ips[0], 80), atAll(false, p)...)

	var streams []*cluster.Stream
	for _, from := range []*cluster.Netns{w.client.Netns, w.remote.Netns} {
		for _, v6 := range []bool{false, true} {
			for _, proto := range protos() {
				s, err := from.Stream(ctx, at(ip(p, v6), cluster.ServerPort).String(), "-proto", proto)
				ok(t, err)
				streams = append(streams, s)
			}
		}
	}
	set, err := maps.OpenPinned(filepath.Join(w.a.BPFFS(), "maps"), true)
	ok(t, err)
	defer set.Close()
	// follow awaits what the entries of running flows to the pod say.
	follow := func(qdisc bool) {
		t.Helper()
		eventually(t, ctx, func() error {
			n := map[bool]int{}
			for k, f := range flowsTo(t, set, hostSide(t, p).Attrs().Index) {
				if k.Sport == cluster.ServerPort || k.Dport == cluster.ServerPort {
					n[f.To.Flags&maps.PlaceQdisc != 0]++
				}
			}
			if n[!qdisc] != 0 || n[qdisc] < len(streams) {
				return fmt.Errorf("%d flows to the pod go through a qdisc, %d do not; want %v of all", n[true], n[false], qdisc)
			}
			return nil
		})
	}
	// Full segments are larger than its bucket: it cuts them itself.
	tc(t, ctx, w.a.Netns, "qdisc add dev %s root tbf rate 800mbit burst 10kb limit 10mb", dev)
	// Every running flow follows.
	through0, _ := sentBy(t, ctx, w.a.Netns, dev)
	follow(true)
	for _, s := range streams {
		progress(t, ctx, s, 2)
	}
	if now, _ := sentBy(t, ctx, w.a.Netns, dev); now == through0 {
		t.Error("nothing went through the qdisc")
	}
	const size = 1 << 20
	through := func(what string, from *cluster.Netns, target string, options ...string) {
		t.Helper()
		before, _ := sentBy(t, ctx, w.a.Netns, dev)
		r, err := from.Bulk(ctx, target, append(options, "-bytes", fmt.Sprint(size), "-timeout", "20s")...)
		ok(t, err)
		if r.Bytes != size || !r.CRCMatches || r.Error != "" {
			t.Errorf("%s to %s: %+v", what, target, r)
		}
		if after, _ := sentBy(t, ctx, w.a.Netns, dev); after-before < size {
			t.Errorf("%s to %s: %d bytes went through the qdisc, want %d", what, target, after-before, size)
		}
	}
	for _, v6 := range []bool{false, true} {
		own, service := at(ip(p, v6), cluster.ServerPort).String(), vip(pick(v6, ips[0], ips[1]), 80)
		through("pod of the node", w.client.Netns, own)
		through("pod of another node", w.remote.Netns, own)
		through("pod of the node", w.client.Netns, service)
		through("pod of another node", w.remote.Netns, service)
		through("the node", w.a.Netns, service)
		through("another node", w.b.Netns, own)
		through("from outside, its node", w.Ext, vip(pick(v6, "172.31.0.2", "fd00:172:31::2"), 30922))
		through("from outside, another node", w.Ext, vip(pick(v6, "172.31.0.3", "fd00:172:31::3"), 30922))
		// Answers, of a remote pod and of a pod here.
		through("fetched from another node", p.Netns, at(ip(w.remote, v6), cluster.ServerPort).String(), "-receive")
		through("fetched from this node", p.Netns, at(ip(w.local, v6), cluster.ServerPort).String(), "-receive")
	}
	// Gone: past the device again.
	tc(t, ctx, w.a.Netns, "qdisc del dev %s root", dev)
	follow(false)
	for _, s := range streams {
		progress(t, ctx, s, 2)
		rep, err := s.Stop(ctx)
		ok(t, err)
		// The kernel lets packets go that meet the device while its qdisc is
		// exchanged, which was twice, and TCP says them again.
		if rep.Error != "" || rep.Lost > 2 {
			t.Errorf("a flow that ran all the time: %+v", rep)
		}
	}
}

// Filters at the ingress of a pod's device do not see what our program sends
// on: the pod is reported, and the rest works.
func TestN22IngressFilters(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	obj := pod("mirrored", "node-a", "10.244.80.92", "fd00:10:244:50::92")
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Delete(context.Background())) })
	dev := hostSide(t, p).Attrs().Name
	_, err = w.a.Exec(ctx, "ip", "link", "add", "pwifb0", "up", "type", "ifb")
	ok(t, err)
	t.Cleanup(func() {
		_, err := w.a.Exec(context.Background(), "ip", "link", "del", "pwifb0")
		ok(t, err)
	})
	tc(t, ctx, w.a.Netns, "qdisc add dev pwifb0 root tbf rate 800mbit burst 100kb limit 10mb")
	tc(t, ctx, w.a.Netns, "qdisc add dev %s ingress", dev)
	reported := func(want bool) {
		t.Helper()
		eventually(t, ctx, func() error {
			is := false
			for _, pr := range status(t, ctx, w.a).Problems {
				is = is || pr.Object == "Pod default/mirrored" && strings.Contains(pr.Error, dev)
			}
			if is != want {
				return fmt.Errorf("reported: %v, want %v", is, want)
			}
			return nil
		})
	}
	tc(t, ctx, w.a.Netns, "filter add dev %s parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev pwifb0", dev)
	reported(true)
	finds := 0
	for _, f := range examine(t, ctx, w.a) {
		if f.Check == "qdiscs" && strings.Contains(f.Object, dev) {
			finds++
		}
	}
	if finds != 1 {
		t.Errorf("podweir doctor says it %d times", finds)
	}
	for _, v6 := range []bool{false, true} {
		send(t, ctx, p.Netns, "tcp", at(ip(w.remote, v6), cluster.ServerPort).String())
		// What the stack takes does pass there.
		before, _ := sentBy(t, ctx, w.a.Netns, "pwifb0")
		node := pick(v6, "172.31.0.2", "fd00:172:31::2")
		s, err := p.Ping(ctx, node, "-timeout", "10s")
		ok(t, err)
		if s.Received != 1 {
			t.Errorf("ping of the node: %+v", s)
		}
		if after, _ := sentBy(t, ctx, w.a.Netns, "pwifb0"); after == before {
			t.Error("the ping did not pass the ifb")
		}
	}
	tc(t, ctx, w.a.Netns, "qdisc del dev %s ingress", dev)
	reported(false)
}
