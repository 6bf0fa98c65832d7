package contract

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/test/cluster"
)

// plugLimited adds a pod as a runtime does that is to have its rates limited.
func (w *world) plugLimited(t *testing.T, ctx context.Context, name, v4, v6 string) *cluster.Pod {
	t.Helper()
	obj := pod(name, "node-a", v4, v6)
	obj.Labels = map[string]string{"app": name}
	w.put(t, obj)
	p, err := w.NewSandbox(obj)
	ok(t, err)
	t.Cleanup(func() { ok(t, p.Delete(context.Background())) })
	p.Bandwidth = map[string]any{"ingressRate": 1 << 30, "ingressBurst": 1 << 20, "egressRate": 1 << 30, "egressBurst": 1 << 20}
	ok(t, p.Add(ctx, v4, v6))
	return p
}

// Without tcx there is no place on a pod's veth for our programs and for the
// ingress qdisc that the bandwidth plugin adds. A pod that the runtime wants
// limited has them on a device over its veth from the beginning: it is judged
// before ADD returns, before the limit is there, by it and after it, in
// whatever frames it sends; both limits are honoured whatever way packets take.
func TestN22WithoutTCX(t *testing.T) {
	w := own(t, cluster.Config{AgentArgs: []string{"--clsact"}})
	ctx := within(t, 240*time.Second)
	ok(t, w.Manifests.Put(w.objs...))
	ok(t, w.StartAgents(ctx))
	ok(t, w.plug(ctx))
	tcp, udp, server := corev1.ProtocolTCP, corev1.ProtocolUDP, intstr.FromInt32(cluster.ServerPort)
	w.put(t, &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "limited"},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "limited"}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress: []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{
				{Protocol: &tcp, Port: &server}, {Protocol: &udp, Port: &server},
			}}},
		},
	})
	for _, port := range []int{cluster.ServerPort, 7777} {
		_, err := w.a.Serve(ctx, "host", port)
		ok(t, err)
	}
	p := w.plugLimited(t, ctx, "limited", "10.244.80.92", "fd00:10:244:50::92")
	_, err := p.Serve(ctx, "limited", cluster.ServerPort)
	ok(t, err)
	node := func(v6 bool) string { return pick(v6, "172.31.0.2", "fd00:172:31::2") }
	// denied: its policy holds, and its address is its own.
	denied := func(what string) {
		t.Helper()
		for _, v6 := range []bool{false, true} {
			for _, to := range []string{at(ip(w.local, v6), 7777).String(), at(ip(w.remote, v6), 7777).String(), vip(node(v6), 7777)} {
				before := readCounters(t, w.a)
				silent(t, ctx, p.Netns, "udp", to)
				if got := readCounters(t, w.a).since(before).of("drop_policy_egress", "from_pod", v6); got == 0 {
					t.Errorf("%s: a datagram to %s is not counted as denied", what, to)
				}
			}
		}
	}
	allowed := func(what string) {
		t.Helper()
		for _, v6 := range []bool{false, true} {
			for _, proto := range protos() {
				own := at(ip(p, v6), cluster.ServerPort).String()
				for _, to := range []string{at(ip(w.local, v6), cluster.ServerPort).String(), at(ip(w.remote, v6), cluster.ServerPort).String(), vip(node(v6), cluster.ServerPort), own} {
					send(t, ctx, p.Netns, proto, to)
				}
				for _, from := range []*cluster.Netns{w.local.Netns, w.remote.Netns, w.a.Netns, w.b.Netns} {
					send(t, ctx, from, proto, own)
				}
			}
		}
	}
	host := hostSide(t, p).Attrs()
	veth := host.Name
	// Whatever the pod sends, the stack gets nothing of it below the device over
	// the veth, where nobody judges.
	for _, tool := range []string{"iptables", "ip6tables"} {
		commands(t, ctx, w.a.Netns, tool+" -w -t raw -A PREROUTING -i "+veth)
	}
	sealed := func(what string) {
		t.Helper()
		for _, tool := range []string{"iptables", "ip6tables"} {
			out, err := w.a.Exec(ctx, tool, "-w", "-t", "raw", "-S", "PREROUTING", "-v")
			ok(t, err)
			if !strings.Contains(out, "-i "+veth+" -c 0 0") {
				t.Errorf("%s: the stack has got packets from %s: %s", what, veth, out)
			}
		}
	}
	denied("ADD has returned")
	allowed("ADD has returned")
	sealed("ADD has returned")
	over := endpoint.OverName(veth)
	const ifb, size = "pwifb2", 1 << 18
	end := limitSent(t, ctx, w.a.Netns, veth, ifb, "800mbit")
	tc(t, ctx, w.a.Netns, "qdisc add dev %s root tbf rate 800mbit burst 20kb limit 10mb", veth)
	through := func(what string, from *cluster.Netns, target string, options ...string) {
		t.Helper()
		sent, _ := sentBy(t, ctx, w.a.Netns, ifb)
		got, _ := sentBy(t, ctx, w.a.Netns, veth)
		r, err := from.Bulk(ctx, target, append(options, "-bytes", fmt.Sprint(size), "-timeout", "20s")...)
		ok(t, err)
		if r.Bytes != size || !r.CRCMatches || r.Error != "" {
			t.Errorf("%s, %s: %+v", what, target, r)
		}
		sentNow, _ := sentBy(t, ctx, w.a.Netns, ifb)
		gotNow, _ := sentBy(t, ctx, w.a.Netns, veth)
		if max(sentNow-sent, gotNow-got) < size || min(sentNow-sent, gotNow-got) == 0 {
			t.Errorf("%s, %s: %d bytes of the pod's and %d to it went through the limits", what, target, sentNow-sent, gotNow-got)
		}
	}
	limited := func(what string) {
		t.Helper()
		for _, v6 := range []bool{false, true} {
			own := at(ip(p, v6), cluster.ServerPort).String()
			for _, to := range []string{at(ip(w.local, v6), cluster.ServerPort).String(), at(ip(w.remote, v6), cluster.ServerPort).String(), vip(node(v6), cluster.ServerPort)} {
				through(what+" from it", p.Netns, to)
				through(what+" back to it", p.Netns, to, "-receive")
			}
			for _, from := range []*cluster.Netns{w.local.Netns, w.remote.Netns, w.a.Netns} {
				through(what+" to it", from, own)
				through(what+" from it, who is asked", from, own, "-receive")
			}
		}
	}
	well := func(what string) {
		t.Helper()
		denied(what)
		allowed(what)
		limited(what)
	}
	well("limits")
	for _, f := range examine(t, ctx, w.a) {
		switch f.Check {
		case "qdiscs", "programs", "sysctls", "pods", "mtu":
			t.Errorf("podweir doctor: %+v", f)
		}
	}
	ok(t, p.Check(ctx))

	// Frames for all on the link are no way past it: neither with one address
	// inside nor with all.
	commands(t, ctx, p.Netns, "ip neigh replace 169.254.1.1 lladdr ff:ff:ff:ff:ff:ff dev eth0 nud permanent",
		"ip neigh replace fe80::1 lladdr 33:33:00:00:00:01 dev eth0 nud permanent")
	denied("frames for all")
	allowed("frames for all")
	before := readCounters(t, w.a)
	silent(t, ctx, p.Netns, "udp", vip("224.0.0.1", 7777))
	atLeast(t, w.a, before, "drop_multicast", "from_pod", false, 1)
	sealed("frames for all")
	end()
	denied("frames for all, the limit has gone")
	commands(t, ctx, p.Netns, "ip neigh replace 169.254.1.1 lladdr "+host.HardwareAddr.String()+" dev eth0 nud permanent",
		"ip neigh replace fe80::1 lladdr "+host.HardwareAddr.String()+" dev eth0 nud permanent")

	// Another agent, and none.
	streams := map[bool]*cluster.Stream{}
	for _, v6 := range []bool{false, true} {
		streams[v6], err = p.Stream(ctx, at(ip(w.remote, v6), cluster.ServerPort).String(), "-proto", "udp")
		ok(t, err)
	}
	end = limitSent(t, ctx, w.a.Netns, veth, ifb, "800mbit")
	ok(t, w.a.KillAgent(ctx))
	limited("no agent")
	ok(t, w.a.StartAgent(ctx))
	for _, s := range streams {
		progress(t, ctx, s, 2)
	}
	well("another agent")

	// Somebody takes away what is over the veth: nothing gets by, and it comes
	// back.
	ok(t, w.a.KillAgent(ctx))
	commands(t, ctx, w.a.Netns, "ip link del "+over)
	for _, v6 := range []bool{false, true} {
		for _, to := range []string{at(ip(w.local, v6), cluster.ServerPort).String(), vip(node(v6), cluster.ServerPort), vip(node(v6), 7777)} {
			silent(t, ctx, p.Netns, "udp", to)
		}
	}
	sealed("nothing is over the veth")
	ok(t, w.a.StartAgent(ctx))
	eventually(t, ctx, func() error {
		_, err := w.a.Exec(ctx, "ip", "link", "show", over)
		return err
	})
	eventually(t, ctx, func() error { return p.Check(ctx) })
	well("made again")
	end()
}
