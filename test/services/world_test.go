package services

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// sharedWorld is what most cases run in; it ends with the process.
var sharedWorld struct {
	once    sync.Once
	cluster *cluster.Cluster
	w       *world
}

// patience is how long an answer that must come may take: on a machine that
// has thirty times as much to do as it can, seconds.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == crowdCommand {
		if err := crowdEnd(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// However long it takes; the cases are bounded, and find it done.
	if err := cluster.Build(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if c := sharedWorld.cluster; c != nil {
		if w := sharedWorld.w; w != nil {
			for _, set := range w.sets {
				_ = set.Close()
			}
		}
		if err := c.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared is the common cluster. A case takes its own services away.
func shared(t *testing.T) *world {
	t.Helper()
	sharedWorld.once.Do(func() {
		c, err := cluster.New(context.Background(), config())
		if err != nil {
			t.Fatal(err)
		}
		sharedWorld.cluster = c
		sharedWorld.w = bringUp(t, context.Background(), c)
	})
	if sharedWorld.w == nil {
		t.Fatal("the shared cluster did not come up")
	}
	w := sharedWorld.w.sub(t)
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range w.Nodes {
				t.Logf("agent of %s:\n%s", n.NodeName, n.LogTail())
			}
		}
	})
	return w
}

// own is a cluster of one case, with other flags.
func own(t *testing.T, agentArgs ...string) *world {
	t.Helper()
	w := bringUp(t, t.Context(), cluster.ForTest(t, config(agentArgs...)))
	t.Cleanup(func() {
		for _, set := range w.sets {
			_ = set.Close()
		}
	})
	return w.sub(t)
}

func config(agentArgs ...string) cluster.Config {
	return cluster.Config{Label: "services", Nodes: nodes(), AgentArgs: append(slices.Clone(nodePortAddrs), agentArgs...)}
}

// nodes of the cases: each with a second address, and a third one that
// --nodeport-addresses leaves out.
func nodes() []cluster.NodeConfig {
	list := cluster.DefaultNodes()
	for i, more := range [][]string{
		{"172.31.0.12/24", "fd00:172:31::12/64", "172.31.0.22/24", "fd00:172:31::22/64"},
		{"172.31.0.13/24", "fd00:172:31::13/64", "172.31.0.23/24", "fd00:172:31::23/64"},
	} {
		for _, p := range more {
			list[i].Addrs = append(list[i].Addrs, netip.MustParsePrefix(p))
		}
	}
	return list
}

// nodePortAddrs take the first two addresses of a node, not the third.
var nodePortAddrs = []string{"--nodeport-addresses", "172.31.0.0/28,fd00:172:31::2/127,fd00:172:31::12/127"}

// pods of the cases; back-* serve, pod-* call (and serve).
var layout = []struct{ name, node, ip4, ip6 string }{
	{"pod-a", "node-a", "10.244.80.65", "fd00:10:244:50::41"},
	{"back-a", "node-a", "10.244.80.66", "fd00:10:244:50::42"},
	{"pod-b", "node-b", "10.244.158.65", "fd00:10:244:9e::41"},
	{"back-b", "node-b", "10.244.158.66", "fd00:10:244:9e::42"},
}

// outside are clients on the underlay. Their routes to addresses of services
// lead to one node each.
var outside = []struct{ name, ip4, ip6, via string }{
	{"out", "172.31.0.50", "fd00:172:31::50", "node-a"},
	{"out-b", "172.31.0.51", "fd00:172:31::51", "node-b"},
}

// External addresses of services: nobody's but theirs.
var externalRanges = []string{"192.0.2.0/24", "198.51.100.0/24", "fd00:10:1b::/64", "fd00:10:ef::/64", "10.98.0.0/16", "fd00:10:98::/112"}

// world is a cluster with callers and servers.
type world struct {
	*testing.T
	*cluster.Cluster
	ctx       context.Context         // of the case
	life      context.Context         // of the cluster
	sets      map[string]maps.Set     // by node
	callers   map[string]*caller      // by name
	addrs     map[string][]netip.Addr // IPv4, IPv6 of everybody
	marks     *int
	datagrams *atomic.Uint32
}

// bringUp starts agents, pods, servers and callers; they live as long as life.
func bringUp(t *testing.T, life context.Context, c *cluster.Cluster) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(life, 5*time.Minute)
	defer cancel()
	w := &world{
		T: t, Cluster: c, ctx: ctx, life: life, marks: new(int), datagrams: new(atomic.Uint32),
		sets: map[string]maps.Set{}, callers: map[string]*caller{}, addrs: map[string][]netip.Addr{},
	}
	var pods []cluster.Object
	for _, l := range layout {
		pods = append(pods, podObject(l.name, l.node, l.ip4, l.ip6))
		w.know(l.name, l.ip4, l.ip6)
	}
	for _, n := range w.Nodes {
		w.must(w.Manifests.Put(n.Object()))
		for i, suffix := range []string{"", "/second", "/third"} {
			a := n.Config.Addrs[2*i:]
			w.know(n.NodeName+suffix, a[0].Addr().String(), a[1].Addr().String())
		}
	}
	w.know("loopback", "127.0.0.1", "::1")
	w.know("ext", "172.31.0.1", "fd00:172:31::1")
	w.must(w.Manifests.Put(pods...))
	// The kernel sends under an address that is not deprecated: the first. What
	// it refuses itself it says each time; the redirects that it sends to
	// clients outside would count against that.
	limits := []string{"net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"}
	for _, n := range w.Nodes {
		for _, key := range limits {
			w.must(n.Sysctl(key, "0"))
		}
		for _, p := range n.Config.Addrs[2:] {
			if p.Addr().Is6() {
				_, err := n.Exec(ctx, "ip", "addr", "change", p.String(), "dev", "eth0", "preferred_lft", "0")
				w.must(err)
			}
		}
	}
	w.must(w.StartAgents(ctx))
	for _, n := range w.Nodes {
		set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
		w.must(err)
		w.sets[n.NodeName] = set
	}
	w.must(w.AddPods(ctx, pods...))
	for _, p := range pods {
		for _, key := range limits {
			w.must(w.Pod(p.GetNamespace(), p.GetName()).Sysctl(key, "0"))
		}
	}
	for _, o := range outside {
		host, err := w.AddHost(ctx, o.name, netip.MustParsePrefix(o.ip4+"/24"), netip.MustParsePrefix(o.ip6+"/64"))
		w.must(err)
		w.know(o.name, o.ip4, o.ip6)
		// While an address is no service's, the node forwards what comes for
		// it, and would have the client go by another way for good.
		for _, key := range []string{"net/ipv4/conf/all", "net/ipv4/conf/eth0", "net/ipv6/conf/eth0"} {
			w.must(host.Sysctl(key+"/accept_redirects", "0"))
		}
		for _, r := range externalRanges {
			via := w.addr(o.via, strings.Contains(r, ":"))
			_, err := host.Exec(ctx, "ip", "route", "add", r, "via", via.String())
			w.must(err)
		}
		w.routesToPods(host)
		w.join(o.name, host)
	}
	for _, l := range layout {
		w.join(l.name, w.Pod("default", l.name).Netns)
	}
	for _, n := range w.Nodes {
		w.join(n.NodeName, n.Netns)
	}
	w.join("ext", w.Ext)
	_, err := w.Ext.Serve(life, "ext", 80)
	w.must(err)
	return w
}

// join starts a server and a caller in a namespace.
func (w *world) join(name string, ns *cluster.Netns) {
	w.Helper()
	_, err := ns.Serve(w.life, name, cluster.ServerPort)
	w.must(err)
	c, err := newCaller(w.life, name, ns)
	w.must(err)
	w.callers[name] = c
}

func (w *world) know(name, ip4, ip6 string) {
	w.addrs[name] = []netip.Addr{netip.MustParseAddr(ip4), netip.MustParseAddr(ip6)}
}

// addr is somebody's address of one family.
func (w *world) addr(name string, v6 bool) netip.Addr {
	w.Helper()
	list := w.addrs[name]
	if list == nil {
		w.Fatalf("nobody is called %q", name)
	}
	if v6 {
		return list[1]
	}
	return list[0]
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// sub is the world of a part of a test.
func (w *world) sub(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	s := *w
	s.T, s.ctx = t, ctx
	return &s
}

// put writes a service for the rest of the test, in force when it returns.
func (w *world) put(s service) {
	w.Helper()
	w.write(s)
	w.Cleanup(func() {
		if err := w.Manifests.Delete(s.objects(w, nil)...); err != nil {
			w.Error(err)
		}
	})
	w.settled()
}

func (w *world) write(s service) {
	w.Helper()
	w.must(w.Manifests.Put(s.objects(w, nil)...))
}

// settled waits until both nodes have in force what was written before. What
// an agent reads in one go it takes over in no particular order: when a first
// mark is in force, everything before it has been read, and when a second
// one is, which was written after that, it has been taken over.
func (w *world) settled() {
	w.Helper()
	for range 2 {
		*w.marks++
		name, addr := fmt.Sprintf("mark-%d", *w.marks), fmt.Sprintf("10.98.%d.%d", 254+*w.marks/256, *w.marks%256)
		m := service{name: name, ends: "back-a"}
		objs := m.objects(w, func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs = addr, []string{addr}
			s.Spec.Type, s.Spec.ExternalIPs = corev1.ServiceTypeClusterIP, nil
			s.Spec.IPFamilies = s.Spec.IPFamilies[:1]
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].NodePort = 0
			}
		})
		w.must(w.Manifests.Put(objs...))
		for _, n := range w.Nodes {
			w.must(cluster.Eventually(w.ctx, func() error {
				svc, known, err := w.sets[n.NodeName].Services.Get(maps.ServiceKey{
					Addr: maps.ToAddr(netip.MustParseAddr(addr)), Port: 80, Proto: maps.ProtoTCP})
				if err == nil && (!known || svc.Count != 1) {
					err = fmt.Errorf("%s: %s is not in force (known %v, %+v)", n.NodeName, name, known, svc)
				}
				return err
			}))
		}
		w.must(w.Manifests.Delete(objs...))
	}
}

func podObject(name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "podweir/pw-server"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ips[0]},
	}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}
