//go:build realcluster

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// N22: the reference plugins bandwidth and tuning, chained as docs/install.md
// says, with the annotations that Kubernetes has for it: what is sent to the
// pod and what it sends stay within the limit whatever way it takes, policies
// hold, and a restart of the agent changes nothing of it.
func TestBandwidth(t *testing.T) {
	w := newWorld(t)
	n := w.nodes[0]
	w.canLimit(n)
	// Where NodePorts answer is no matter of limits, but one roll of the agents
	// does for both.
	w.installed([]string{"nodeport-addresses: [primary]"}, `{"type": "tuning", "sysctl": {"net.core.somaxconn": "321"}}`, `{"type": "bandwidth", "capabilities": {"bandwidth": true}}`)

	app := map[string]string{"app": "limited"}
	obj := pod("limited", n.name, app)
	obj.Annotations = map[string]string{"kubernetes.io/ingress-bandwidth": "32M", "kubernetes.io/egress-bandwidth": "32M"}
	friend := map[string]string{"app": "friend"}
	pods := w.run(w.ns, obj, pod("near", n.name, friend), pod("far", w.nodes[1].name, friend), pod("stranger", w.nodes[1].name, nil))
	l := &limitedPod{world: w, n: n, pod: pods[0], first: map[string]tbf{}}
	l.near, l.far, l.stranger = pods[1], pods[2], pods[3]
	l.own = w.service("limited", "limited", nil)
	l.friends = w.service("friends", "friend", nil)
	to := []networkingv1.NetworkPolicyPeer{{PodSelector: selector("friend")}}
	w.policy("limited", "limited", networkingv1.NetworkPolicySpec{
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
		Ingress:     from(to...), Egress: []networkingv1.NetworkPolicyEgressRule{{To: to}},
	})
	w.step("PrimaryNodePorts", l.primaryNodePorts)
	l.find()
	if pid := w.pid(l.pod); pid != "" {
		out, err := w.output(w.ctx, onNode(n), "nsenter", "-t", pid, "-n", "cat", "/proc/sys/net/core/somaxconn")
		must(w, err)
		if got := strings.TrimSpace(string(out)); got != "321" {
			w.Errorf("net.core.somaxconn of the pod is %s, want what tuning was told: 321", got)
		}
	}
	w.first(inPod(l.far), at(l.own.Spec.ClusterIP, 80))
	w.first(inPod(l.pod), at(l.friends.Spec.ClusterIP, 80))
	l.policies(w)
	w.step("Limits", l.limits)
	streams := []*stream{
		w.stream(inPod(l.far), "tcp", at(l.own.Spec.ClusterIP, 80)), w.stream(inPod(l.pod), "tcp", at(l.far.Status.PodIP, port)),
		w.stream(inPod(l.pod), "udp", at(l.near.Status.PodIPs[1].IP, port)),
	}
	w.kill(n, w.agent(w.ctx, n.name))
	w.step("LimitsAfterARestart", l.limits)
	l.policies(w)
	for _, s := range streams {
		must(w, s.moves())
		if r, err := last[probe.StreamReport](s.s, s.name); err != nil || r.Lost > 0 || r.Error != "" {
			w.Errorf("%s, which ran while the agent was killed: %+v (%v)", s.name, r, err)
		}
	}
	w.noProblem(n)
	w.remove(w.ns, l.pod.Name)
	w.eventually("nothing of it is left", func() error {
		out, err := w.output(w.ctx, onNode(n), "ip", "-o", "link")
		if err == nil && (strings.Contains(string(out), " "+l.dev+"@") || strings.Contains(string(out), " "+l.ifb+":") || strings.Contains(string(out), "@"+l.dev+":")) {
			err = fmt.Errorf("%s or %s is there:\n%s", l.dev, l.ifb, out)
		}
		return err
	})
	w.noProblem(n)
}

// canLimit skips where the kernel lacks what the plugin asks it for.
func (w *world) canLimit(n node) {
	w.Helper()
	const dev = "pwtestifb"
	defer func() { _, _ = w.output(background(w), onNode(n), "ip", "link", "del", dev) }()
	for _, c := range []string{
		"ip link add " + dev + " up type ifb", "tc qdisc add dev " + dev + " root tbf rate 80mbit burst 100kb limit 1mb", "tc qdisc add dev " + dev + " ingress",
		"tc filter add dev " + dev + " parent ffff: protocol all prio 1 u32 match u32 0 0 action mirred egress redirect dev lo",
	} {
		if _, err := w.output(w.ctx, onNode(n), strings.Fields(c)...); err != nil {
			w.Skipf("this kernel lacks what the bandwidth plugin needs (ifb, sch_tbf, sch_ingress, cls_u32, act_mirred): %v", err)
		}
	}
}

// installed has agents with these settings, and plugins behind podweir's, for the
// time of the test.
func (w *world) installed(settings []string, plugins ...string) {
	w.Helper()
	install := func(in realcluster.Installation) error {
		err := w.cluster.Install(background(w), in)
		if err == nil {
			_, err = w.kubectl("-n", system, "rollout", "status", "daemonset/podweir", "--timeout=240s")
		}
		return err
	}
	var was string
	configMap := func() string {
		d, err := w.api.AppsV1().DaemonSets(system).Get(background(w), "podweir", metav1.GetOptions{})
		must(w, err)
		for _, v := range d.Spec.Template.Spec.Volumes {
			if v.ConfigMap != nil {
				return v.ConfigMap.Name
			}
		}
		return ""
	}
	was = configMap()
	w.Cleanup(func() {
		ours := configMap()
		if err := install(realcluster.Installation{}); err != nil {
			w.Errorf("the configuration of before: %v", err)
			return
		}
		if now := configMap(); now != was {
			w.Errorf("the agents have the ConfigMap %s, before the test %s", now, was)
		}
		if ours != was {
			if err := w.api.CoreV1().ConfigMaps(system).Delete(background(w), ours, metav1.DeleteOptions{}); err != nil {
				w.Error(err)
			}
		}
	})
	must(w, install(realcluster.Installation{Chained: plugins, Settings: settings}))
	for _, n := range w.nodes {
		w.eventually("the runtime's configuration", func() error {
			out, err := w.output(w.ctx, onNode(n), "cat", "/etc/cni/net.d/10-podweir.conflist")
			for _, p := range plugins {
				if err == nil && !strings.Contains(string(out), p) {
					err = fmt.Errorf("%s does not have %s:\n%s", n.name, p, out)
				}
			}
			return err
		})
	}
}

// pid is the first process of a pod's container, as its node has it.
func (w *world) pid(p *corev1.Pod) string {
	w.Helper()
	out, err := w.output(w.ctx, onNode(w.node(p.Spec.NodeName)), "ctr", "-n", "k8s.io", "tasks", "ls")
	must(w, err)
	m := regexp.MustCompile(inPod(p).container + `\s+(\d+)`).FindSubmatch(out)
	if m == nil {
		w.Fatalf("%s has no process:\n%s", p.Name, out)
	}
	return string(m[1])
}

type limitedPod struct {
	*world
	n                   node
	pod                 *corev1.Pod
	near, far, stranger *corev1.Pod
	own, friends        *corev1.Service
	dev, ifb            string         // with the qdiscs for what is sent to it, and what it sends
	first               map[string]tbf // by device: when it was first read
}

// find finds the pod's device and the one that the plugin has made.
func (l *limitedPod) find() {
	l.Helper()
	l.dev = l.device(l.n, l.pod)
	out, err := l.output(l.ctx, onNode(l.n), "tc", "filter", "show", "dev", l.dev, "ingress")
	must(l, err)
	m := regexp.MustCompile(`Egress Redirect to device (\S+?)\)`).FindSubmatch(out)
	if m == nil {
		l.Fatalf("the bandwidth plugin has no filter at %s:\n%s", l.dev, out)
	}
	l.ifb = string(m[1])
	l.eventually("the agent knows of both", func() error {
		var status struct {
			Agent struct {
				Devices []struct{ Name, Qdisc, Filters, Bypassed string }
			}
		}
		err := l.podweirJSON(l.n.name, &status, "status")
		for _, d := range status.Agent.Devices {
			if d.Name == l.dev && d.Qdisc == "tbf" && d.Filters != "" && d.Bypassed == "" {
				return err
			}
		}
		return errors.Join(err, fmt.Errorf("%s: %+v", l.dev, status.Agent.Devices))
	})
}

// tbf is what a limit is, and what it has let through.
type tbf struct {
	bytes       int64
	rate, burst int64     // bytes a second, bytes
	before, at  time.Time // it was read between these
}

func (l *limitedPod) tbf(dev string) tbf {
	l.Helper()
	before := time.Now()
	out, err := l.output(l.ctx, onNode(l.n), "tc", "-s", "-j", "qdisc", "show", "dev", dev, "root")
	must(l, err)
	now := time.Now()
	var list []struct {
		Kind    string
		Bytes   int64
		Options struct{ Rate, Burst int64 }
	}
	must(l, json.Unmarshal(out, &list))
	if len(list) != 1 || list[0].Kind != "tbf" {
		l.Fatalf("%s has no tbf: %s", dev, out)
	}
	return tbf{list[0].Bytes, list[0].Options.Rate, list[0].Options.Burst, before, now}
}

// within: no more has gone through than the limit allows, which was whole at
// the most when it was first read. left is what may still go at once, now.
func (l *limitedPod) within(w *world, dev string) (left int64, now tbf) {
	w.Helper()
	q, first := l.tbf(dev), l.first[dev]
	through, took := q.bytes-first.bytes, q.at.Sub(first.before)
	left = q.burst + int64(float64(q.rate)*took.Seconds()) + packet - through
	if left < 0 {
		w.Errorf("%s has let %d bytes through in %v, %d more than %d a second and %d at first", dev, through, took, -left, q.rate, q.burst)
	}
	return left, q
}

// packet is the one that a limit is in the middle of, with all its segments.
const packet = 1 << 16

// drained uses up what a limit lets through at once, half a gigabyte of which
// containerd grants. From then on all goes at the limit's pace.
func (l *limitedPod) drained(w *world) {
	const rate = 4_000_000 // bytes a second
	for _, x := range []struct {
		dev      string
		from, to *corev1.Pod
	}{{l.dev, l.near, l.pod}, {l.ifb, l.pod, l.near}} {
		if _, is := l.first[x.dev]; !is {
			l.first[x.dev] = l.tbf(x.dev)
		}
		if got := l.first[x.dev].rate; got != rate {
			w.Fatalf("%s lets %d bytes a second through, want %d", x.dev, got, rate)
		}
		for !w.Failed() {
			left, _ := l.within(w, x.dev)
			if left < 2*rate {
				break
			}
			out, err := w.output(w.ctx, inPod(x.from), "pw-client", "bulk", "-bytes", fmt.Sprint(left), "-timeout", "150s", at(x.to.Status.PodIP, port))
			if err != nil {
				w.Fatalf("%v: %s", err, out)
			}
			w.Logf("%s: %d bytes: %s", x.dev, left, out)
		}
	}
}

// limits: whatever way something takes to the pod, or from it, it goes through
// the limit, and takes the time that the limit wants: all that may still go at
// once, and a second and a half's worth more.
func (l *limitedPod) limits(w *world) {
	l.drained(w)
	for _, x := range []struct {
		what     string
		dev      string
		from     place
		to       string
		receives bool
	}{
		{"to it from its node's pod", l.dev, inPod(l.near), at(l.pod.Status.PodIP, port), false},
		{"to it from another node's pod", l.dev, inPod(l.far), at(l.pod.Status.PodIPs[1].IP, port), false},
		{"to it by its service", l.dev, inPod(l.far), at(l.own.Spec.ClusterIP, 80), false},
		{"to it, fetched", l.dev, inPod(l.pod), at(l.far.Status.PodIP, port), true},
		{"from it to its node's pod", l.ifb, inPod(l.pod), at(l.near.Status.PodIPs[1].IP, port), false},
		{"from it to another node's pod", l.ifb, inPod(l.pod), at(l.far.Status.PodIP, port), false},
		{"from it to a service", l.ifb, inPod(l.pod), at(l.friends.Spec.ClusterIP, 80), false},
		{"from it, fetched", l.ifb, inPod(l.far), at(l.own.Spec.ClusterIPs[1], 80), true},
	} {
		left, before := l.within(w, x.dev)
		size := left + 3*before.rate/2
		out, err := w.output(w.ctx, x.from, "pw-client", "bulk", "-bytes", fmt.Sprint(size), "-timeout", "60s", fmt.Sprintf("-receive=%v", x.receives), x.to)
		took := time.Since(before.at)
		var r probe.BulkReport
		if err = errors.Join(err, json.Unmarshal(out, &r)); err != nil || r.Bytes != size {
			w.Errorf("%s: %v: %s", x.what, err, out)
			continue
		}
		// By whoever received it. Slower it may be, for any reason.
		if most := left + int64(float64(before.rate)*took.Seconds()); size > most {
			w.Errorf("%s: %d bytes were there after %v, want no more than %d", x.what, size, took, most)
		}
		after := l.tbf(x.dev)
		if through := after.bytes - before.bytes; through < size {
			w.Errorf("%s: %d bytes went through the limit, want %d", x.what, through, size)
		}
		w.Logf("%s: %d bytes, %d of them at once, in %v", x.what, size, left, r.Took)
		l.within(w, x.dev)
	}
}

// primaryNodePorts: S22: a NodePort answers at the InternalIPs of nodes alone.
func (l *limitedPod) primaryNodePorts(w *world) {
	const second = "172.31.0.212"
	dev := []string{"dev", "eth0"}
	_, err := w.output(w.ctx, onNode(l.n), append([]string{"ip", "addr", "add", second + "/24"}, dev...)...)
	must(w, err)
	defer func() {
		if _, err := w.output(background(w), onNode(l.n), append([]string{"ip", "addr", "del", second + "/24"}, dev...)...); err != nil {
			w.Error(err)
		}
	}()
	svc := w.service("primary", "friend", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	number := svc.Spec.Ports[0].NodePort
	for _, from := range []place{outside, inPod(l.stranger), onNode(w.nodes[1]), onNode(l.n)} {
		for _, ip := range l.n.ips {
			w.first(from, at(ip, number))
		}
		if err := w.fails(from, "tcp", at(second, number), probe.Refused); err != nil {
			w.Error("an address that is not the node's first:", err)
		}
	}
}

// policies: friends alone get in and are called.
func (l *limitedPod) policies(w *world) {
	w.Helper()
	for i := range w.nodes[0].ips {
		own, far, other := at(l.pod.Status.PodIPs[i].IP, port), at(l.far.Status.PodIPs[i].IP, port), at(l.stranger.Status.PodIPs[i].IP, port)
		for _, proto := range []string{"tcp", "udp"} {
			w.eventually("the policy is in force", func() error {
				_, err := w.reach(inPod(l.far), proto, own)
				_, err2 := w.reach(inPod(l.pod), proto, far)
				return errors.Join(err, err2, w.fails(inPod(l.stranger), proto, own, probe.Timeout), w.fails(inPod(l.pod), proto, other, probe.Timeout))
			})
		}
	}
}
