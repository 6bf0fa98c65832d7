//go:build realcluster

package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// What policies promise, with labels that the API server has and pods that
// kubelets start.
func TestPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := &policyWorld{world: w}
	p.friend = w.everywhere("friend", nil)
	p.other = w.everywhere("other", nil)
	team := w.namespace(map[string]string{"team": "a"})
	n := w.nodes
	strangers := w.run(team, pod("friend", n[1].name, map[string]string{"app": "friend"}), pod("other", n[0].name, map[string]string{"app": "other"}))
	hostnet := pod("hostnet", n[1].name, map[string]string{"app": "friend"})
	hostnet.Spec.HostNetwork = true
	hostnet.Spec.Containers[0] = server("-port", "18090")
	hostnet.Spec.Containers[0].Ports = nil
	hostnet.Spec.Containers[0].ReadinessProbe.TCPSocket.Port = intstr.FromInt32(18090)
	p.peers = map[string]place{
		"friend":         inPod(p.friend[n[0].name]),
		"friend far":     inPod(p.friend[n[1].name]),
		"other":          inPod(p.other[n[0].name]),
		"other far":      inPod(p.other[n[2].name]),
		"stranger":       inPod(strangers[1]),
		"strange friend": inPod(strangers[0]),
		"hostnet far":    inPod(w.run(w.ns, hostnet)[0]),
		"node far":       onNode(n[2]),
		"its node":       onNode(n[0]),
		"outside":        outside,
	}
	w.each(map[string]func(*world){
		"Ingress":              p.ingress,
		"Egress":               p.egress,
		"NewPods":              p.newPods,
		"CompletedPods":        p.completedPods,
		"RunningConnections":   p.runningConnections,
		"ClusterNetworkPolicy": p.clusterPolicy,
	})
}

type policyWorld struct {
	*world
	friend, other map[string]*corev1.Pod
	peers         map[string]place
}

func selector(app string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

func teamA() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
}

// policy makes one about pods of an app, that goes with the test.
func (w *world) policy(name, app string, spec networkingv1.NetworkPolicySpec) {
	w.Helper()
	spec.PodSelector = *selector(app)
	_, err := w.api.NetworkingV1().NetworkPolicies(w.ns).Create(w.ctx,
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() { _ = w.unpolicy(name) })
}

func (w *world) unpolicy(name string) error {
	return w.api.NetworkingV1().NetworkPolicies(w.ns).Delete(background(w), name, metav1.DeleteOptions{})
}

func from(peers ...networkingv1.NetworkPolicyPeer) []networkingv1.NetworkPolicyIngressRule {
	return []networkingv1.NetworkPolicyIngressRule{{From: peers}}
}

func blocks(cidrs ...string) (out []networkingv1.NetworkPolicyPeer) {
	for _, c := range cidrs {
		out = append(out, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: c}})
	}
	return out
}

func ports(list ...networkingv1.NetworkPolicyPort) []networkingv1.NetworkPolicyIngressRule {
	return []networkingv1.NetworkPolicyIngressRule{{Ports: list}}
}

// ingress has a server for every policy, on the first node, and all peers try
// each in both families. Its node is let in always (P4): otherwise it would
// not get ready again, which is looked at in the end.
func (p *policyWorld) ingress(w *world) {
	all := func(more ...string) []string {
		return append(more, "friend", "friend far", "other", "other far", "stranger", "strange friend", "hostnet far", "node far", "outside")
	}
	named, unknown, udp := intstr.FromString("main"), intstr.FromString("nobodys"), corev1.ProtocolUDP
	low, high := intstr.FromInt32(8000), int32(8090)
	tcp := func(port *intstr.IntOrString, end *int32) networkingv1.NetworkPolicyPort {
		return networkingv1.NetworkPolicyPort{Port: port, EndPort: end}
	}
	rows := []struct {
		name    string
		ingress []networkingv1.NetworkPolicyIngressRule
		allowed []string
	}{
		{"deny", nil, nil},
		{"pods", from(networkingv1.NetworkPolicyPeer{PodSelector: selector("friend")}), []string{"friend", "friend far"}},
		{"namespaces", from(networkingv1.NetworkPolicyPeer{NamespaceSelector: teamA()}), []string{"stranger", "strange friend"}},
		{"both", from(networkingv1.NetworkPolicyPeer{NamespaceSelector: teamA(), PodSelector: selector("friend")}), []string{"strange friend"}},
		{"either", from(networkingv1.NetworkPolicyPeer{NamespaceSelector: teamA()}, networkingv1.NetworkPolicyPeer{PodSelector: selector("friend")}),
			[]string{"friend", "friend far", "stranger", "strange friend"}},
		{"outside", from(blocks(realcluster.HostIP+"/32", realcluster.HostIP6+"/128")...), []string{"outside"}},
		{"nodes", from(
			networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "172.31.0.0/24", Except: []string{realcluster.HostIP + "/32"}}},
			networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "fd00:172:31::/64", Except: []string{realcluster.HostIP6 + "/128"}}}),
			[]string{"hostnet far", "node far"}},
		{"pod-ranges", from(blocks("10.244.0.0/16", "fd00:10:244::/48")...),
			[]string{"friend", "friend far", "other", "other far", "stranger", "strange friend"}},
		{"named-port", ports(tcp(&named, nil)), all()},
		{"unknown-port", ports(tcp(&unknown, nil)), nil},
		{"other-protocol", ports(networkingv1.NetworkPolicyPort{Protocol: &udp}), nil},
		{"port-range", ports(tcp(&low, &high)), all()},
	}
	var servers []*corev1.Pod
	for _, r := range rows {
		servers = append(servers, pod("srv-"+r.name, w.nodes[0].name, map[string]string{"app": r.name}))
	}
	servers = w.run(w.ns, servers...)
	for i, r := range rows {
		svc := w.service("srv-"+r.name, r.name, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		w.policy("srv-"+r.name, r.name, networkingv1.NetworkPolicySpec{Ingress: r.ingress})
		w.Run(r.name, func(t *testing.T) {
			t.Parallel()
			w := w.with(t)
			var wg sync.WaitGroup
			defer wg.Wait()
			for name, peer := range p.peers {
				for fam, ip := range servers[i].Status.PodIPs {
					target := at(ip.IP, port)
					if peer == outside {
						target = at(w.nodes[0].ips[fam], svc.Spec.Ports[0].NodePort)
					}
					verdict := func(target string) func() error {
						return func() error {
							if name == "its node" || slices.Contains(r.allowed, name) {
								_, err := w.reach(peer, "tcp", target)
								return err
							}
							return w.fails(peer, "tcp", target, probe.Timeout)
						}
					}
					wg.Go(func() {
						if err := w.await(verdict(target)); err != nil {
							w.Errorf("about %s: %v", name, err)
						}
						// P13: the service is no way round.
						if peer == outside {
							return
						}
						if err := w.await(verdict(at(svc.Spec.ClusterIPs[fam], 80))); err != nil {
							w.Errorf("about %s by the service: %v", name, err)
						}
					})
				}
			}
			wg.Wait()
			now, err := w.api.CoreV1().Pods(w.ns).Get(w.ctx, servers[i].Name, metav1.GetOptions{})
			must(w, err)
			if !isReady(now) || now.Status.ContainerStatuses[0].RestartCount > 0 {
				w.Error("the kubelet's probes do not pass")
			}
		})
	}
}

// egress: what a pod may call, by labels, after the service's translation, and
// what it answers is no concern of it.
func (p *policyWorld) egress(w *world) {
	c := w.run(w.ns, pod("caller", w.nodes[1].name, map[string]string{"app": "caller"}))[0]
	// Not the one on a host's network: that is a node to policies (P5).
	svc := w.service("egress-friend", "", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"set": "friend"} })
	no := w.service("egress-other", "other", nil)
	w.first(inPod(c), at(no.Spec.ClusterIP, 80))
	w.policy("caller", "caller", networkingv1.NetworkPolicySpec{
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
		Egress:      []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{PodSelector: selector("friend")}}}},
	})
	world := []string{w.listenOutside(realcluster.HostIP), w.listenOutside(realcluster.HostIP6)}
	for fam := range 2 {
		denied := []string{at(no.Spec.ClusterIPs[fam], 80), world[fam]}
		allowed := []string{at(svc.Spec.ClusterIPs[fam], 80)}
		for _, n := range w.nodes {
			denied = append(denied, at(p.other[n.name].Status.PodIPs[fam].IP, port))
			allowed = append(allowed, at(p.friend[n.name].Status.PodIPs[fam].IP, port))
		}
		for _, target := range denied {
			w.eventually("denied", func() error { return w.fails(inPod(c), "tcp", target, probe.Timeout) })
		}
		for _, target := range allowed {
			for _, proto := range []string{"tcp", "udp"} {
				if _, err := w.reach(inPod(c), proto, target); err != nil {
					w.Error(err)
				}
			}
		}
		for _, peer := range []place{inPod(p.other[w.nodes[0].name]), onNode(w.nodes[2])} {
			if _, err := w.reach(peer, "tcp", at(c.Status.PodIPs[fam].IP, port)); err != nil {
				w.Error("its ingress is open:", err)
			}
		}
	}
}

// P9: pods whose first act is a call. Those that are isolated never get
// through, not once; the others do.
func (p *policyWorld) newPods(w *world) {
	w.policy("new", "new-isolated", networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}})
	w.policy("new-in", "new-target", networkingv1.NetworkPolicySpec{Ingress: from(networkingv1.NetworkPolicyPeer{PodSelector: selector("new-open")})})
	target := w.run(w.ns, pod("new-target", w.nodes[1].name, map[string]string{"app": "new-target"}))[0]
	open := p.friend[w.nodes[1].name]
	const each = 4
	want := map[string]bool{}
	var names []string
	start := func(kind string, i int, n node, to *corev1.Pod, allowed bool) {
		count := 3
		if allowed {
			count = 20
		}
		q := pod(fmt.Sprintf("%s-%s-%d", kind, n.name, i), n.name, map[string]string{"app": kind, "first-act": "call"})
		q.Spec.RestartPolicy = corev1.RestartPolicyNever
		q.Spec.Containers[0] = corev1.Container{Name: "c", Image: image, ImagePullPolicy: corev1.PullNever,
			Command: []string{"pw-client", "send", "-count", fmt.Sprint(count), "-timeout", "3s", at(to.Status.PodIPs[i%2].IP, port)}}
		_, err := w.api.CoreV1().Pods(w.ns).Create(w.ctx, q, metav1.CreateOptions{})
		must(w, err)
		w.Cleanup(func() { w.remove(w.ns, q.Name) })
		want[q.Name] = allowed
		names = append(names, q.Name)
	}
	for i := range each {
		for _, n := range w.nodes {
			start("new-isolated", i, n, open, false)   // by its own egress
			start("new-stranger", i, n, target, false) // by the target's ingress
			start("new-open", i, n, target, true)      // let in by its label
		}
	}
	done := w.pods(w.ns, "first-act=call", "all have called", func(all []corev1.Pod) error {
		for _, q := range all {
			if q.Status.Phase != corev1.PodSucceeded && q.Status.Phase != corev1.PodFailed {
				return fmt.Errorf("%s is %s", q.Name, q.Status.Phase)
			}
		}
		if len(all) != len(names) {
			return fmt.Errorf("%d of %d", len(all), len(names))
		}
		return nil
	})
	for _, q := range done {
		log, _ := w.api.CoreV1().Pods(w.ns).GetLogs(q.Name, &corev1.PodLogOptions{}).DoRaw(w.ctx)
		// Not one of several may have got through. Those that are let in are, when
		// the other node has heard which address the new pod has.
		if got := !strings.Contains(string(log), `"ok":0,`) && strings.Contains(string(log), `"ok":`); got != want[q.Name] {
			w.Errorf("%s got through: %v, want %v: %s", q.Name, got, want[q.Name], log)
		}
	}
}

// P10: a pod that has come to its end owns no address, though its object still
// shows one.
func (p *policyWorld) completedPods(w *world) {
	target := w.run(w.ns, pod("completed-target", w.nodes[0].name, map[string]string{"app": "completed-target"}))[0]
	w.policy("completed", "completed-target", networkingv1.NetworkPolicySpec{Ingress: from(networkingv1.NetworkPolicyPeer{PodSelector: selector("completing")})})
	ask := func(addr string) (string, error) {
		var out struct{ Answers []struct{ Verdict string } }
		err := w.podweirJSON(w.nodes[0].name, &out, "policy", "ask", "--from", addr, "--to", w.ns+"/"+target.Name, "--port", fmt.Sprint(port))
		if err != nil || len(out.Answers) == 0 {
			return "", fmt.Errorf("no answer: %w", err)
		}
		for _, a := range out.Answers[1:] {
			if a.Verdict != out.Answers[0].Verdict {
				return "", fmt.Errorf("%+v", out)
			}
		}
		return out.Answers[0].Verdict, nil
	}
	q := pod("completing", w.nodes[1].name, map[string]string{"app": "completing"})
	w.run(w.ns, q)
	live, err := w.api.CoreV1().Pods(w.ns).Get(w.ctx, q.Name, metav1.GetOptions{})
	must(w, err)
	// It ends by itself when its server is told to.
	w.eventually("its address is let in", func() error {
		v, err := ask(live.Status.PodIP)
		if err == nil && v != "allowed" {
			err = fmt.Errorf("verdict %q", v)
		}
		return err
	})
	must(w, w.api.CoreV1().Pods(w.ns).Delete(w.ctx, q.Name, metav1.DeleteOptions{}))
	done := pod("completed", w.nodes[1].name, map[string]string{"app": "completing"})
	done.Spec.RestartPolicy = corev1.RestartPolicyNever
	done.Spec.Containers[0] = corev1.Container{Name: "c", Image: image, ImagePullPolicy: corev1.PullNever,
		Command: []string{"pw-client", "send", "-timeout", "5s", at(target.Status.PodIP, port)}}
	_, err = w.api.CoreV1().Pods(w.ns).Create(w.ctx, done, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() { w.remove(w.ns, done.Name) })
	var ended corev1.Pod
	w.pods(w.ns, "app=completing", "it ends well", func(all []corev1.Pod) error {
		for _, p := range all {
			if p.Name == done.Name && p.Status.Phase == corev1.PodSucceeded && p.Status.PodIP != "" {
				ended = p
				return nil
			}
		}
		return errors.New("not yet")
	})
	w.eventually("its address is nobody's", func() error {
		v, err := ask(ended.Status.PodIP)
		if err == nil && v != "denied" {
			err = fmt.Errorf("verdict %q about %s", v, ended.Status.PodIP)
		}
		return err
	})
	w.eventually("nor is it plugged", func() error {
		out, err := w.podweir(w.ctx, w.nodes[1].name, "endpoints")
		if err == nil && strings.Contains(string(out), w.ns+"/"+done.Name) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
}

// P11: labels of pods and namespaces, and policies, reach connections that run.
func (p *policyWorld) runningConnections(w *world) {
	target := w.run(w.ns, pod("run-target", w.nodes[0].name, map[string]string{"app": "run-target"}))[0]
	ns := w.namespace(nil)
	callers := w.run(w.ns, pod("run-near", w.nodes[0].name, map[string]string{"app": "run"}), pod("run-far", w.nodes[1].name, map[string]string{"app": "run"}))
	callers = append(callers, w.run(ns, pod("run-team", w.nodes[2].name, map[string]string{"app": "run"}))...)
	var streams []*stream
	for _, c := range callers {
		for fam, proto := range []string{"tcp", "udp"} {
			streams = append(streams, w.stream(inPod(c), proto, at(target.Status.PodIPs[fam].IP, port)))
		}
	}
	all := func(what string, ok func(*stream) error, list []*stream) {
		w.Helper()
		for _, s := range list {
			if err := ok(s); err != nil {
				w.Errorf("%s: %v", what, err)
			}
		}
	}
	labelPod := func(ns, pod, app string) {
		w.Helper()
		_, err := w.api.CoreV1().Pods(ns).Patch(w.ctx, pod, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{"app":%q}}}`, app), metav1.PatchOptions{})
		must(w, err)
	}
	labelNS := func(value string) {
		w.Helper()
		_, err := w.api.CoreV1().Namespaces().Patch(w.ctx, ns, types.MergePatchType, []byte(`{"metadata":{"labels":{"run-team":`+value+`}}}`), metav1.PatchOptions{})
		must(w, err)
	}
	all("before", (*stream).moves, streams)
	w.policy("run", "run-target", networkingv1.NetworkPolicySpec{Ingress: from(
		networkingv1.NetworkPolicyPeer{PodSelector: selector("run-friend")},
		networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"run-team": "yes"}}})})
	all("denied", (*stream).stalls, streams)
	labelPod(w.ns, "run-near", "run-friend")
	labelPod(w.ns, "run-far", "run-friend")
	all("let in by their label", (*stream).moves, streams[:4])
	all("still denied", (*stream).stalls, streams[4:])
	labelNS(`"yes"`)
	all("let in by the namespace's label", (*stream).moves, streams[4:])
	labelNS("null")
	labelPod(w.ns, "run-far", "run")
	all("denied again", (*stream).stalls, streams[2:])
	all("not changed", (*stream).moves, streams[:2])
	must(w, w.unpolicy("run"))
	all("no policy any more", (*stream).moves, streams)
	for _, s := range streams {
		if r, err := s.soFar(); err != nil || r.Error != "" {
			w.Errorf("%s: %v %+v", s.name, err, r)
		}
	}
}

// P19: the kind is installed while agents run, and gone again in the end.
func (p *policyWorld) clusterPolicy(w *world) {
	const patience = 3 * time.Minute // agents ask for what was not there every two
	dir, err := exec.CommandContext(w.ctx, "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/network-policy-api").Output()
	must(w, err)
	crd := filepath.Join(strings.TrimSpace(string(dir)), "config", "crd", "standard", "policy.networking.k8s.io_clusternetworkpolicies.yaml")
	before := w.readyAgents()
	_, err = w.kubectl("apply", "--server-side", "-f", crd)
	must(w, err)
	removed := false
	remove := func() {
		if _, err := w.kubectl("delete", "-f", crd, "--wait=true"); err != nil && !removed {
			w.Error(err)
		}
		removed = true
	}
	w.Cleanup(func() {
		if !removed {
			remove()
		}
	})
	target := w.run(w.ns, pod("cnp", w.nodes[0].name, map[string]string{"app": "cnp"}))[0]
	must(w, w.cluster.Kubectl(w.ctx, nil, nil, "wait", "--for=condition=Established", "crd/clusternetworkpolicies.policy.networking.k8s.io", "--timeout=60s"))
	w.apply(`apiVersion: policy.networking.k8s.io/v1beta1
kind: ClusterNetworkPolicy
metadata: {name: ` + w.ns + `}
spec:
  tier: Admin
  priority: 10
  subject:
    pods:
      namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ` + w.ns + `}}
      podSelector: {matchLabels: {app: cnp}}
  ingress:
    - name: friends
      action: Accept
      from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: friend}}}}]
    - name: nobody-else
      action: Deny
      from: [{namespaces: {}}]
`)
	denied := func() error {
		for _, ip := range target.Status.PodIPs {
			for _, peer := range []string{"other", "other far", "stranger"} {
				if err := w.fails(p.peers[peer], "tcp", at(ip.IP, port), probe.Timeout); err != nil {
					return err
				}
			}
		}
		return nil
	}
	begin := time.Now()
	for err = denied(); err != nil && time.Since(begin) < patience; err = denied() {
		time.Sleep(time.Second)
	}
	if err != nil {
		w.Fatalf("agents that ran before do not know the policy after %v: %v", patience, err)
	}
	w.Logf("in force %.0f s after it was created", time.Since(begin).Seconds())
	for _, peer := range []string{"friend", "friend far", "strange friend", "its node"} {
		if _, err := w.reach(p.peers[peer], "tcp", at(target.Status.PodIP, port)); err != nil {
			w.Error(err)
		}
	}
	remove()
	w.eventually("without the kind there is no policy", func() error {
		_, err := w.reach(p.peers["other"], "tcp", at(target.Status.PodIP, port))
		return err
	})
	for node, a := range w.readyAgents() {
		if a.UID != before[node].UID || a.Status.ContainerStatuses[0].RestartCount != before[node].Status.ContainerStatuses[0].RestartCount {
			w.Errorf("the agent of %s was started anew meanwhile", node)
		}
	}
}
