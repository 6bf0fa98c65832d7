package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
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

// bulkThrough transfers so many bytes, all of them through the qdisc of a
// node's device.
func bulkThrough(t *testing.T, ctx context.Context, node *cluster.Netns, dev string, size int, what string, from *cluster.Netns, target string, options ...string) {
	t.Helper()
	before, _ := sentBy(t, ctx, node, dev)
	r, err := from.Bulk(ctx, target, append(options, "-bytes", fmt.Sprint(size), "-timeout", "20s")...)
	ok(t, err)
	if int(r.Bytes) != size || !r.CRCMatches || r.Error != "" {
		t.Errorf("%s, %s: %+v", what, target, r)
	}
	if after, _ := sentBy(t, ctx, node, dev); after-before < size {
		t.Errorf("%s, %s: %d bytes went through %s, want %d", what, target, after-before, dev, size)
	}
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
		bulkThrough(t, ctx, w.a.Netns, dev, size, what, from, target, options...)
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

// limitSent leads what a pod sends through an ifb of this name with a rate, as
// the bandwidth plugin does, and returns what ends it.
func limitSent(t *testing.T, ctx context.Context, n *cluster.Netns, dev, ifb, rate string) (end func()) {
	t.Helper()
	commands(t, ctx, n, "ip link add "+ifb+" up type ifb")
	tc(t, ctx, n, "qdisc add dev %s root tbf rate %s burst 10kb limit 10mb", ifb, rate)
	tc(t, ctx, n, "qdisc add dev %s ingress", dev)
	tc(t, ctx, n, "filter add dev %s parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev %s", dev, ifb)
	var once sync.Once
	end = func() {
		once.Do(func() {
			ctx := context.Background()
			tc(t, ctx, n, "qdisc del dev %s ingress", dev)
			commands(t, ctx, n, "ip link del "+ifb)
		})
	}
	t.Cleanup(end)
	return end
}

// filtered awaits that filters at the ingress of a pod's device see all that
// the pod sends, or that nothing is left of their having done so.
func filtered(t *testing.T, ctx context.Context, n *cluster.Node, dev string, want bool) {
	t.Helper()
	program := dev + " ingress from_pod"
	if want {
		program += "_judge"
	}
	eventually(t, ctx, func() error {
		var is, over bool
		for _, d := range status(t, ctx, n).Devices {
			is = is || d.Name == dev && d.Filters != ""
		}
		out, err := n.Exec(ctx, "ip", "-o", "link", "show", "type", "macvlan")
		if err != nil {
			return err
		}
		over = strings.Contains(out, "@"+dev+":")
		if is != want || over != want || programs(t, n)[program] != 1 {
			return fmt.Errorf("status says filtered %v, a device is over %s: %v, programs %v; want %v", is, dev, over, programs(t, n), want)
		}
		return nil
	})
}

// What a pod sends goes through the filters at the ingress of its device, and
// so through the limit that the bandwidth plugin has behind them: whatever way
// it takes, running flows included, whether an agent runs or not; and nothing
// gets out that would not without them.
func TestN22IngressFilters(t *testing.T) {
	w := shared(t)
	ctx := within(t, 180*time.Second)
	obj := pod("limited", "node-a", "10.244.80.92", "fd00:10:244:50::92")
	obj.Labels = map[string]string{"app": "limited"}
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Delete(context.Background())) })
	_, err = p.Serve(ctx, "limited", cluster.ServerPort)
	ok(t, err)
	server, stop := context.WithCancel(ctx)
	t.Cleanup(stop)
	_, err = w.Ext.Serve(server, "outside", 8095)
	ok(t, err)
	_, err = w.a.Serve(server, "host", 8095)
	ok(t, err)
	ips := []string{"10.98.22.2", "fd00:10:98::2202"}
	w.put(t, clusterIP("limited", ips, bothPorts(80)...))
	w.put(t, slicesFor("limited", "limited", bothSlicePorts(cluster.ServerPort), w.remote)...)
	w.inForce(t, ctx, "tcp", vip(ips[1], 80), atAll(true, w.remote)...)
	w.inForce(t, ctx, "tcp", vip(ips[0], 80), atAll(false, w.remote)...)
	// The pod's policy: 7777 is not allowed.
	allowed := []networkingv1.NetworkPolicyPort{}
	for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		for _, port := range []int32{cluster.ServerPort, 8095} {
			allowed = append(allowed, networkingv1.NetworkPolicyPort{Protocol: &proto, Port: &intstr.IntOrString{IntVal: port}})
		}
	}
	w.put(t, &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "limited"},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: obj.Labels},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress:      []networkingv1.NetworkPolicyEgressRule{{Ports: allowed}},
		},
	})
	dev := hostSide(t, p).Attrs().Name
	eventually(t, ctx, func() error {
		before := readCounters(t, w.a)
		_, err := p.Send(ctx, at(ip(w.remote, false), 7777).String(), "-timeout", "100ms")
		if readCounters(t, w.a).since(before).of("drop_policy_egress", "from_pod", false) == 0 {
			return fmt.Errorf("the policy is not in force: %v", err)
		}
		return err
	})
	var streams []*cluster.Stream
	for _, v6 := range []bool{false, true} {
		for _, proto := range protos() {
			for _, to := range []string{at(ip(w.local, v6), cluster.ServerPort).String(), vip(pick(v6, ips[0], ips[1]), 80),
				vip(pick(v6, "172.31.0.2", "fd00:172:31::2"), 8095)} {
				s, err := p.Stream(ctx, to, "-proto", proto)
				ok(t, err)
				streams = append(streams, s)
			}
			for _, from := range []*cluster.Netns{w.remote.Netns, w.a.Netns} {
				s, err := from.Stream(ctx, at(ip(p, v6), cluster.ServerPort).String(), "-proto", proto)
				ok(t, err)
				streams = append(streams, s)
			}
		}
	}
	commands(t, ctx, w.a.Netns, "iptables -P FORWARD DROP", "ip6tables -P FORWARD DROP")
	t.Cleanup(func() {
		commands(t, context.Background(), w.a.Netns, "iptables -P FORWARD ACCEPT", "ip6tables -P FORWARD ACCEPT")
	})
	const ifb, size = "pwifb0", 1 << 18
	through := func(what string, from *cluster.Netns, target string, options ...string) {
		t.Helper()
		bulkThrough(t, ctx, w.a.Netns, ifb, size, what, from, target, options...)
	}
	all := func() {
		t.Helper()
		for _, v6 := range []bool{false, true} {
			near, far, service := at(ip(w.local, v6), cluster.ServerPort).String(), at(ip(w.remote, v6), cluster.ServerPort).String(), vip(pick(v6, ips[0], ips[1]), 80)
			ext, node, own := vip(pick(v6, "172.31.0.1", "fd00:172:31::1"), 8095), vip(pick(v6, "172.31.0.2", "fd00:172:31::2"), 8095), at(ip(p, v6), cluster.ServerPort).String()
			through("to a pod of the node", p.Netns, near)
			through("to a pod of another node", p.Netns, far)
			through("to a service", p.Netns, service)
			through("out of the cluster", p.Netns, ext)
			through("to its node", p.Netns, node)
			through("to another pod that asks", w.remote.Netns, own, "-receive")
			through("to its node that asks", w.a.Netns, own, "-receive")
			for _, to := range []string{near, far, service, ext, node} {
				_, packets := sentBy(t, ctx, w.a.Netns, ifb)
				send(t, ctx, p.Netns, "udp", to, "-count", "10")
				if _, now := sentBy(t, ctx, w.a.Netns, ifb); now-packets < 10 {
					t.Errorf("of ten datagrams to %s %d went through the limit", to, now-packets)
				}
			}
			before := readCounters(t, w.a)
			silent(t, ctx, p.Netns, "udp", at(ip(w.remote, v6), 7777).String())
			atLeast(t, w.a, before, "drop_policy_egress", "from_pod", v6, 1)
			before = readCounters(t, w.a)
			s, err := p.Send(ctx, far, "-proto", "udp", "-source", pick(v6, "10.244.80.200", "fd00:10:244:50::c8"), "-timeout", "300ms")
			ok(t, err)
			if s.OK != 0 {
				t.Errorf("under a false name to %s: %+v", far, s)
			}
			atLeast(t, w.a, before, "drop_spoofed_source", "from_pod", v6, 1)
		}
	}
	running := func() {
		t.Helper()
		for _, s := range streams {
			progress(t, ctx, s, 2)
		}
	}
	commands(t, ctx, p.Netns, "ip addr add 10.244.80.200/32 dev eth0", "ip addr add fd00:10:244:50::c8/128 dev eth0 nodad preferred_lft 0")
	// follows starts an agent that has to notice what has changed. The kernel
	// lets packets go that meet filters while they come or go; the agent's
	// steps must not.
	follows := func(on bool) {
		t.Helper()
		running()
		var lost []uint64
		for _, s := range streams {
			r, err := s.Report(ctx)
			ok(t, err)
			lost = append(lost, r.Sent-r.Received)
		}
		ok(t, w.a.StartAgent(ctx))
		filtered(t, ctx, w.a, dev, on)
		running()
		for i, s := range streams {
			_, err := s.Await(ctx, fmt.Sprintf("no more than %d lost", lost[i]), func(r probe.StreamReport) bool { return r.Sent-r.Received <= lost[i] })
			ok(t, err)
		}
	}
	t.Cleanup(func() { w.ensureAgents(t) })
	ok(t, w.a.KillAgent(ctx))
	end := limitSent(t, ctx, w.a.Netns, dev, ifb, "800mbit")
	follows(true)
	all()
	for _, f := range examine(t, ctx, w.a) {
		if f.Check == "qdiscs" || f.Check == "programs" {
			t.Errorf("podweir doctor: %+v", f)
		}
	}
	// Without an agent, and with the next one.
	ok(t, w.a.KillAgent(ctx))
	through("without an agent", p.Netns, at(ip(w.remote, false), cluster.ServerPort).String())
	follows(true)
	all()
	// The filters go while none runs.
	ok(t, w.a.KillAgent(ctx))
	end()
	follows(false)
	for _, s := range streams {
		rep, err := s.Stop(ctx)
		ok(t, err)
		if rep.Error != "" {
			t.Errorf("a flow that ran all the time: %+v", rep)
		}
	}

	// How fast. A busy machine can only make it slower.
	end = limitSent(t, ctx, w.a.Netns, dev, ifb, "4mbit")
	filtered(t, ctx, w.a, dev, true)
	slow := func(what string, to netip.AddrPort) {
		t.Helper()
		r, err := p.Bulk(ctx, to.String(), "-bytes", "1000000", "-timeout", "30s")
		ok(t, err)
		if r.Bytes != 1000000 || r.Error != "" || r.Took < time.Second {
			t.Errorf("a megabyte %s at 4 Mbit/s, which takes two seconds: %+v", what, r)
		}
	}
	slow("to a pod of the node", at(ip(w.local, true), cluster.ServerPort))
	slow("to a pod of another node", at(ip(w.remote, false), cluster.ServerPort))
	// Somebody takes away what is over the pod's device.
	commands(t, ctx, w.a.Netns, "ip link del "+node.CoverName(dev))
	filtered(t, ctx, w.a, dev, true)
	slow("to a pod of another node, again", at(ip(w.remote, true), cluster.ServerPort))
	// Without an agent nobody puts it back: nothing is let past it. Then the
	// filters go, too.
	ok(t, w.a.KillAgent(ctx))
	commands(t, ctx, w.a.Netns, "iptables -P FORWARD ACCEPT", "ip6tables -P FORWARD ACCEPT", "ip link del "+node.CoverName(dev))
	for _, v6 := range []bool{false, true} {
		for _, to := range []netip.AddrPort{at(ip(w.local, v6), cluster.ServerPort), at(ip(w.remote, v6), cluster.ServerPort)} {
			silent(t, ctx, p.Netns, "udp", to.String())
		}
		send(t, ctx, p.Netns, "tcp", vip(pick(v6, "172.31.0.2", "fd00:172:31::2"), 8095))
	}
	end()
	ok(t, w.a.StartAgent(ctx))
	filtered(t, ctx, w.a, dev, false)
	send(t, ctx, p.Netns, "tcp", at(ip(w.remote, false), cluster.ServerPort).String())
}

// Where nothing can be put over a pod's device, its packets pass the filters
// by, as they must not be lost: the pod is reported.
func TestN22IngressFiltersInTheWay(t *testing.T) {
	w := shared(t)
	ctx := within(t, 60*time.Second)
	obj := pod("bridged", "node-a", "10.244.80.93", "fd00:10:244:50::93")
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Delete(context.Background())) })
	dev := hostSide(t, p).Attrs().Name
	reported := func(want bool) {
		t.Helper()
		eventually(t, ctx, func() error {
			is := false
			for _, pr := range status(t, ctx, w.a).Problems {
				is = is || pr.Object == "Pod default/bridged" && strings.Contains(pr.Error, dev)
			}
			if is != want {
				return fmt.Errorf("reported: %v, want %v", is, want)
			}
			return nil
		})
	}
	commands(t, ctx, w.a.Netns, "ip link add link "+dev+" name pwother type macvlan mode passthru")
	end := limitSent(t, ctx, w.a.Netns, dev, "pwifb1", "800mbit")
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
	}
	// Out of the way.
	commands(t, ctx, w.a.Netns, "ip link del pwother")
	reported(false)
	filtered(t, ctx, w.a, dev, true)
	for _, v6 := range []bool{false, true} {
		before, _ := sentBy(t, ctx, w.a.Netns, "pwifb1")
		send(t, ctx, p.Netns, "tcp", at(ip(w.remote, v6), cluster.ServerPort).String())
		if after, _ := sentBy(t, ctx, w.a.Netns, "pwifb1"); after == before {
			t.Error("it did not pass the ifb")
		}
	}
	end()
	filtered(t, ctx, w.a, dev, false)
}
