package policy

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/api"
	pwmaps "github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

// Two ports, so that a rule about one can be told from none.
const portA, portB = 8080, 8081

// world is the cluster of the cases, and what its manifests say right now.
type world struct {
	*testing.T
	ctx  context.Context
	c    *cluster.Cluster
	sets map[string]pwmaps.Set // maps per node

	pods       map[string]*corev1.Pod // by namespace/name
	namespaces map[string]map[string]string
	policies   map[string]*networkingv1.NetworkPolicy
	cluster    map[string]*v1beta1.ClusterNetworkPolicy
	hosts      int // last host part of an address given away
	marks      int
	checked    map[string]bool // policies that a matrix has been about
}

// layout is every pod of the matrix: three namespaces of three over two nodes.
// The names of ports stand for other numbers in each.
var layout = []struct{ namespace, name, node, labels, ports string }{
	{"x", "a", "node-a", "app=a tier=front", "http=8080/TCP"},
	{"x", "b", "node-b", "app=b tier=back", "http=8081/TCP dns=8080/UDP"},
	{"x", "c", "node-a", "app=c", "http=8080/UDP"}, // the name, of another protocol
	{"v", "a", "node-a", "app=a tier=back", "http=8081/TCP"},
	{"v", "b", "node-b", "app=b", "http=8080/TCP http=8081/UDP"},
	{"v", "c", "node-b", "app=c tier=front", ""},
	{"z", "a", "node-b", "app=a", "dns=8081/UDP"},
	{"z", "b", "node-a", "app=b tier=back", "http=9999/TCP"},
	{"z", "c", "node-a", "app=c", ""},
}

func newWorld(t *testing.T) *world {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	w := &world{
		T: t, ctx: ctx, c: cluster.ForTest(t, cluster.Config{}), sets: map[string]pwmaps.Set{}, hosts: 10, checked: map[string]bool{},
		pods: map[string]*corev1.Pod{}, policies: map[string]*networkingv1.NetworkPolicy{},
		cluster: map[string]*v1beta1.ClusterNetworkPolicy{},
		namespaces: map[string]map[string]string{
			"x": {"team": "red", "stage": "prod"}, "v": {"team": "blue"}, "z": {}, "sys": {},
		},
	}
	for _, n := range w.c.Nodes {
		w.must(w.c.Manifests.Put(n.Object()))
	}
	for name := range w.namespaces {
		w.putNamespace(name)
	}
	for _, l := range layout {
		p := w.newPod(l.namespace, l.name, l.node, l.labels)
		p.Spec.Containers[0].Ports = containerPorts(l.ports)
		w.must(w.c.Manifests.Put(p))
	}
	for _, n := range w.c.Nodes {
		w.newPod("sys", n.NodeName, n.NodeName, "")
	}
	w.must(w.c.StartAgents(ctx))
	for _, n := range w.c.Nodes {
		set, err := pwmaps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
		w.must(err)
		t.Cleanup(func() { _ = set.Close() })
		w.sets[n.NodeName] = set
	}
	objs := []cluster.Object{}
	for _, p := range w.pods {
		objs = append(objs, p)
	}
	w.must(w.c.AddPods(ctx, objs...))
	for key, p := range w.pods {
		if p.Namespace != "sys" {
			w.must(mesh.Serve(ctx, w.netns(key), key, portA, portB))
		}
	}
	for _, n := range w.c.Nodes {
		w.must(mesh.Serve(ctx, n.Netns, n.NodeName, portA, portB))
		// The outside routes to pods by their nodes.
		for i, cidr := range n.Config.PodCIDRs {
			_, err := w.c.Ext.Exec(ctx, "ip", "route", "add", cidr.String(), "via", n.Config.Addrs[i].Addr().String())
			w.must(err)
		}
	}
	w.must(mesh.Serve(ctx, w.c.Ext, "ext", portA, portB))
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// run is one case: it starts and ends without policies.
func (w *world) run(name string, fn func(*world)) {
	w.T.Run(name, func(t *testing.T) {
		sub := *w
		sub.T = t
		defer func() { w.hosts, w.marks = sub.hosts, sub.marks }()
		sub.clear()
		fn(&sub)
	})
}

func (w *world) clear() {
	w.Helper()
	for _, p := range w.policies {
		w.must(w.c.Manifests.Delete(p))
	}
	for _, p := range w.cluster {
		w.must(w.c.Manifests.Delete(p))
	}
	clear(w.policies)
	clear(w.cluster)
	w.settled()
}

func (w *world) putNamespace(name string) {
	w.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: maps.Clone(w.namespaces[name])}}
	w.namespaces[name][corev1.LabelMetadataName] = name
	w.must(w.c.Manifests.Put(ns))
}

// labelled parses "a=b c=d".
func labelled(s string) map[string]string {
	out := map[string]string{}
	for _, kv := range strings.Fields(s) {
		k, v, _ := strings.Cut(kv, "=")
		out[k] = v
	}
	return out
}

// containerPorts parses "name=8080/TCP other=53/UDP".
func containerPorts(s string) (out []corev1.ContainerPort) {
	for _, f := range strings.Fields(s) {
		var p corev1.ContainerPort
		name, port, _ := strings.Cut(f, "=")
		number, proto, _ := strings.Cut(port, "/")
		n, err := strconv.ParseInt(number, 10, 32)
		if err != nil {
			panic(err)
		}
		p.Name, p.Protocol, p.ContainerPort = name, corev1.Protocol(proto), int32(n)
		out = append(out, p)
	}
	return out
}

// newPod writes the manifest of a pod with addresses of its own.
func (w *world) newPod(namespace, name, node, labels string) *corev1.Pod {
	w.Helper()
	n := w.c.Node(node)
	w.hosts++
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: labelled(labels),
			UID: types.UID(fmt.Sprintf("uid-%s-%s-%d", namespace, name, w.hosts)),
		},
		Spec:   corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "main"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, cidr := range n.Config.PodCIDRs {
		b := cidr.Addr().AsSlice()
		b[len(b)-1] = byte(w.hosts)
		a, _ := netip.AddrFromSlice(b)
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	p.Status.PodIP = p.Status.PodIPs[0].IP
	w.pods[namespace+"/"+name] = p
	w.must(w.c.Manifests.Put(p))
	return p
}

func (w *world) netns(key string) *cluster.Netns {
	namespace, name, _ := strings.Cut(key, "/")
	if p := w.c.Pod(namespace, name); p != nil {
		return p.Netns
	}
	w.Fatalf("no pod %s", key)
	return nil
}

// apply writes policies and waits until both nodes have them in force.
func (w *world) apply(docs ...string) {
	w.Helper()
	w.write(docs...)
	w.settled()
}

// write writes policies, each given as a line with its name and the body of
// its spec. One without a namespace is a ClusterNetworkPolicy.
func (w *world) write(docs ...string) {
	w.Helper()
	for _, doc := range docs {
		name, spec, _ := strings.Cut(strings.TrimSpace(doc), "\n")
		namespace, short, namespaced := strings.Cut(strings.TrimSpace(name), "/")
		text := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: " + namespace + ", name: " + short + "}\nspec:\n"
		if !namespaced {
			text = "apiVersion: policy.networking.k8s.io/v1beta1\nkind: ClusterNetworkPolicy\nmetadata: {name: " + name + "}\nspec:\n"
		}
		for line := range strings.Lines(spec) {
			text += "  " + strings.ReplaceAll(line, "\t", "  ")
		}
		objs, err := cluster.Decode([]byte(text))
		if err != nil {
			w.Fatalf("%v\n%s", err, text)
		}
		w.must(w.c.Manifests.Put(objs...))
		switch p := objs[0].(type) {
		case *networkingv1.NetworkPolicy:
			w.policies[p.Namespace+"/"+p.Name] = p
		case *v1beta1.ClusterNetworkPolicy:
			w.cluster[p.Name] = p
		}
	}
}

func (w *world) remove(name string) {
	w.Helper()
	w.must(w.c.Manifests.Delete(w.policies[name]))
	delete(w.policies, name)
	w.settled()
}

// settled waits until both nodes have in force what was written before the
// call. What an agent reads in one go it takes over in no particular order:
// when a first mark is in force, everything before it has been read, and when
// a second one is, which was written after that, it has been taken over.
func (w *world) settled() {
	w.Helper()
	w.mark()
	w.mark()
}

// mark writes a policy and the label of the pods it selects, and waits until
// it isolates them on both nodes.
func (w *world) mark() {
	w.Helper()
	w.marks++
	value := fmt.Sprint(w.marks)
	mark := &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "sys", Name: "mark-" + value},
		Spec:       networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"mark": value}}},
	}
	w.must(w.c.Manifests.Put(mark))
	for _, n := range w.c.Nodes {
		p := w.pods["sys/"+n.NodeName]
		p.Labels["mark"] = value
		w.must(w.c.Manifests.Put(p))
	}
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	for _, n := range w.c.Nodes {
		w.must(cluster.Eventually(ctx, func() error {
			_, body, err := n.AgentGet(ctx, api.PathPolicy)
			if err != nil {
				return err
			}
			var p api.Policy
			if err := json.Unmarshal([]byte(body), &p); err != nil {
				return err
			}
			for _, e := range p.Endpoints {
				if e.Namespace == "sys" && slices.Contains(e.Policies, "sys/"+mark.Name) {
					return nil
				}
			}
			return fmt.Errorf("%s does not have %s in force", n.NodeName, mark.Name)
		}))
	}
	w.must(w.c.Manifests.Delete(mark))
}

// dropped counts on both nodes.
func (w *world) dropped() (uint64, error) { return mesh.Dropped(w.sets)() }

func (w *world) rules() rules {
	return rules{slices.Collect(maps.Values(w.policies)), slices.Collect(maps.Values(w.cluster)), w.namespaces}
}

// addrs are the addresses of a pod, a node or the outside, IPv4 first.
func (w *world) addrs(key string) []netip.Addr {
	if p := w.pods[key]; p != nil {
		var out []netip.Addr
		for _, ip := range p.Status.PodIPs {
			out = append(out, netip.MustParseAddr(ip.IP))
		}
		return out
	}
	if n := w.c.Node(key); n != nil {
		return []netip.Addr{n.Config.Addrs[0].Addr(), n.Config.Addrs[1].Addr()}
	}
	return []netip.Addr{netip.MustParseAddr("172.31.0.1"), netip.MustParseAddr("fd00:172:31::1")}
}

// seen is the address, IPv4 for 0, that to sees from come under: what is no
// pod and not a pod's own node sees its node.
func (w *world) seen(from, to string, family int) netip.Addr {
	p := w.pods[from]
	if p == nil || w.pods[to] != nil || to == p.Spec.NodeName {
		return w.addrs(from)[family]
	}
	return w.addrs(p.Spec.NodeName)[family]
}

func (w *world) party(key string, addr netip.Addr) party {
	if p := w.pods[key]; p != nil {
		return party{pod: p, node: p.Spec.NodeName, addr: addr}
	}
	if n := w.c.Node(key); n != nil {
		return party{node: n.NodeName, addr: addr}
	}
	return party{addr: addr}
}

func (w *world) at(key string) *cluster.Netns {
	if w.pods[key] != nil {
		return w.netns(key)
	}
	if n := w.c.Node(key); n != nil {
		return n.Netns
	}
	return w.c.Ext
}

// everyone is every party of the matrix.
func (w *world) everyone() []string {
	var out []string
	for key, p := range w.pods {
		if p.Namespace != "sys" {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return append(out, "node-a", "node-b", "ext")
}

// matrix tries everybody with everybody, by TCP and UDP, in both families,
// on both ports, and compares with what the rules say. It returns how many
// were allowed and how many denied.
func (w *world) matrix() (allowed, denied int) {
	w.Helper()
	wrong, allowed, denied := w.try()
	w.right(wrong)
	return allowed, denied
}

// amid is a matrix while other flows go on, whose drops may end a round
// before all of its answers are in: one round without a difference will do.
func (w *world) amid() {
	w.Helper()
	var wrong []string
	for range 20 {
		if wrong, _, _ = w.try(); len(wrong) == 0 {
			return
		}
	}
	w.right(wrong)
}

func (w *world) right(wrong []string) {
	w.Helper()
	if len(wrong) == 0 {
		return
	}
	for _, s := range wrong[:min(len(wrong), 12)] {
		w.Error(s)
	}
	w.describe()
	w.Fatalf("%d pairs are wrong; policies: %v", len(wrong), slices.Sorted(maps.Keys(w.policies)))
}

// try is one round of the matrix; it returns the pairs that are wrong.
func (w *world) try() (wrong []string, allowed, denied int) {
	w.Helper()
	var probes []mesh.Probe
	var want []string
	var names []string
	r := w.rules()
	for _, from := range w.everyone() {
		for _, to := range w.everyone() {
			if w.pods[from] == nil && w.pods[to] == nil {
				continue // no pod, no business of ours
			}
			for i, dst := range w.addrs(to) {
				src := w.addrs(from)[i]
				for _, port := range []int{portA, portB} {
					for _, proto := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
						probes = append(probes, mesh.Probe{From: w.at(from), Proto: strings.ToLower(string(proto)), To: netip.AddrPortFrom(dst, uint16(port))})
						names = append(names, fmt.Sprintf("%s -> %s %v", from, to, probes[len(probes)-1]))
						if r.allowed(w.party(from, src), w.party(to, dst), proto, port) {
							want = append(want, "answered by "+to+" which saw "+w.seen(from, to, i).String())
							allowed++
						} else {
							want = append(want, mesh.Silent)
							denied++
						}
					}
				}
			}
		}
	}
	for i, res := range w.probe(probes) {
		is := res.Outcome
		if is == mesh.Answered {
			is = "answered by " + res.Server + " which saw " + res.Peer.String()
		}
		if is != want[i] {
			wrong = append(wrong, fmt.Sprintf("%s: %s, want %s (%v)", names[i], is, want[i], res.Err))
		}
	}
	return wrong, allowed, denied
}

func (w *world) probe(probes []mesh.Probe) []mesh.Result {
	w.Helper()
	return w.probeFor(10*time.Second, probes)
}

func (w *world) probeFor(limit time.Duration, probes []mesh.Probe) []mesh.Result {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, limit)
	defer cancel()
	got, err := mesh.Run(ctx, probes, w.dropped)
	w.must(err)
	return got
}

// check is one matrix that must hold both allowances and denials.
func (w *world) check() {
	w.Helper()
	allowed, denied := w.matrix()
	if allowed == 0 || denied == 0 {
		w.Fatalf("%d allowed, %d denied: this shows nothing", allowed, denied)
	}
	w.Logf("%d allowed, %d denied", allowed, denied)
	var specs []string
	for _, p := range w.policies {
		specs = append(specs, fmt.Sprint(p.Namespace, p.Spec.String()))
	}
	for _, p := range w.cluster {
		spec, err := json.Marshal(p.Spec)
		w.must(err)
		specs = append(specs, string(spec))
	}
	slices.Sort(specs)
	w.checked[strings.Join(specs, "\n")] = true
}

// describe logs what both nodes have in force.
func (w *world) describe() {
	for _, n := range w.c.Nodes {
		_, body, err := n.AgentGet(w.ctx, api.PathPolicy)
		w.Logf("%s says %v %s", n.NodeName, err, body)
		set := w.sets[n.NodeName]
		counters, err := set.Metrics.Read()
		w.must(err)
		for _, s := range counters {
			w.Logf("%s %s %s %s: %d", n.NodeName, pwmaps.ReasonName(s.Reason), pwmaps.HookName(s.Hook), s.Family(), s.Packets)
		}
		eps, err := set.Endpoints.Dump()
		w.must(err)
		for a, e := range eps {
			gen, _, err := set.Gens.Get(e.Slot)
			w.must(err)
			w.Logf("%s endpoint %s: %+v, generation %d", n.NodeName, pwmaps.KeyString(a), e, gen)
		}
		verdicts, err := set.Policy.Dump()
		w.must(err)
		for k, v := range verdicts {
			w.Logf("%s verdict %s: %+v", n.NodeName, pwmaps.KeyString(k), v)
		}
		for _, port := range []uint32{portA, portB} {
			class, _, err := set.PortClass.Get(port)
			w.must(err)
			w.Logf("%s port %d: class %d", n.NodeName, port, class)
		}
	}
}
