package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

// The cases share a cluster; each leaves it without pods.
func TestCNI(t *testing.T) {
	w := newWorld(t)
	w.run("C concurrent ADD of 20 pods, traffic, DEL", (*world).many)
	w.run("C repeated ADD", (*world).again)
	w.run("C CHECK", (*world).check)
	w.run("C repeated DEL", (*world).del)
	w.run("C DEL without the agent", (*world).delWithoutAgent)
	w.run("C DEL of a pod without an object", (*world).delWithoutObject)
	w.run("C the socket is removed", (*world).socketRemoved)
	w.run("C how long ADD takes", (*world).times)
	w.run("S22 host ports", (*world).hostPorts)
	w.run("S22 a host port and a NodePort", (*world).hostPortAndNodePort)
	w.run("S22 a host port used again", (*world).hostPortReused)
	w.run("N19 an address used again", (*world).reused)
}

// Twenty at a time get twenty addresses of each family, all answer, and when
// they are gone nothing of them is left.
func (w *world) many() {
	before := map[string]map[string]bool{}
	for _, n := range w.c.Nodes {
		before[n.NodeName] = w.traces(n)
	}
	const count = 20
	pods := make([]*cluster.Pod, count)
	errs := make([]error, count)
	var wg sync.WaitGroup
	for i := range count {
		wg.Go(func() {
			pods[i], errs[i] = w.add(object(fmt.Sprintf("many-%d", i), w.c.Nodes[i%2].NodeName))
		})
	}
	wg.Wait()
	w.must(errors.Join(errs...))
	owner := map[netip.Addr]string{}
	for _, p := range pods {
		if !p.IPv4().IsValid() || !p.IPv6().IsValid() || len(p.Addrs) != 2 {
			w.Fatalf("%s got %v", p.PodName, p.Addrs)
		}
		for i, a := range []netip.Addr{p.IPv4(), p.IPv6()} {
			cidr := p.Node.Config.PodCIDRs[i]
			if !cidr.Contains(a) || a == cidr.Masked().Addr() {
				w.Errorf("%s got %v, outside of %v or the network itself", p.PodName, a, cidr)
			}
			if owner[a] != "" {
				w.Errorf("%v belongs to %s and %s", a, owner[a], p.PodName)
			}
			owner[a] = p.PodName
		}
		w.must(p.Check(w.ctx))
	}
	// From one pod of each node to all.
	w.reach(pods[:2], pods)
	for _, p := range pods {
		wg.Go(func() {
			w.remove(p)
		})
	}
	wg.Wait()
	for _, n := range w.c.Nodes {
		w.baseline(n, before[n.NodeName])
	}
}

// ADD fails when the interface exists, and harms nothing.
func (w *world) again() {
	p, err := w.add(object("again", "node-a"))
	w.must(err)
	addrs := p.Addrs
	if err := p.Add(w.ctx); err == nil || !strings.Contains(err.Error(), "exists") {
		w.Errorf("ADD of what exists: %v", err)
	}
	p.Addrs = addrs
	w.must(p.Check(w.ctx))
	other, err := w.add(object("other", "node-b"))
	w.must(err)
	w.reach([]*cluster.Pod{p, other}, []*cluster.Pod{p, other})
	w.remove(p)
	w.remove(other)
}

// CHECK is content with what ADD made and names whatever is not so any more.
func (w *world) check() {
	for i, damage := range []struct {
		what string
		host bool
		args func(*cluster.Pod, string) []string
		says string
	}{
		{"address", false, func(p *cluster.Pod, _ string) []string {
			return []string{"ip", "addr", "del", p.IPv4().String() + "/32", "dev", "eth0"}
		}, "address"},
		{"IPv6 address", false, func(p *cluster.Pod, _ string) []string {
			return []string{"ip", "addr", "del", p.IPv6().String() + "/128", "dev", "eth0"}
		}, "address"},
		{"default route", false, func(*cluster.Pod, string) []string { return []string{"ip", "route", "del", "default"} }, "route"},
		{"IPv6 default route", false, func(*cluster.Pod, string) []string { return []string{"ip", "-6", "route", "del", "default"} }, "route"},
		{"gateway's neighbour", false, func(*cluster.Pod, string) []string {
			return []string{"ip", "neigh", "del", "169.254.1.1", "dev", "eth0"}
		}, "169.254.1.1"},
		{"interface", false, func(*cluster.Pod, string) []string { return []string{"ip", "link", "del", "eth0"} }, "missing"},
		{"interface down", false, func(*cluster.Pod, string) []string { return []string{"ip", "link", "set", "eth0", "down"} }, "down"},
		{"MTU", false, func(*cluster.Pod, string) []string { return []string{"ip", "link", "set", "eth0", "mtu", "1300"} }, "MTU"},
		{"host route", true, func(p *cluster.Pod, _ string) []string { return []string{"ip", "route", "del", p.IPv4().String()} }, "route"},
		{"host interface down", true, func(_ *cluster.Pod, dev string) []string { return []string{"ip", "link", "set", dev, "down"} }, "down"},
	} {
		p, err := w.add(object(fmt.Sprintf("check-%d", i), "node-a"))
		w.must(err)
		w.must(p.Check(w.ctx))
		dev := ""
		for _, ifi := range p.Result.Interfaces {
			if ifi.Sandbox == "" {
				dev = ifi.Name
			}
		}
		ns := p.Netns
		if damage.host {
			ns = p.Node.Netns
		}
		// The agent mends the host's side by itself now and then: damage and
		// look until the two came in this order.
		err = nil
		for try := 0; err == nil && try < 3; try++ {
			_, derr := ns.Exec(w.ctx, damage.args(p, dev)...)
			w.must(derr)
			err = p.Check(w.ctx)
		}
		if err == nil || !strings.Contains(err.Error(), damage.says) {
			w.Errorf("%s: CHECK says %v", damage.what, err)
		}
		w.remove(p)
	}
	p, err := w.add(object("unplugged", "node-a"))
	w.must(err)
	w.must(p.Del(w.ctx))
	if err := p.Check(w.ctx); err == nil {
		w.Error("CHECK after DEL is content")
	}
	w.remove(p)
}

// plugin calls the plugin as a runtime would that has lost everything but the
// container's id.
func (w *world) plugin(n *cluster.Node, command, container string) error {
	bin, err := cluster.BinDir()
	w.must(err)
	conf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":"podweir","type":"podweir-cni","socket":%q,"stateDir":%q}`, n.Socket(), n.StateDir())
	_, err = n.Exec(w.ctx, "env", "CNI_COMMAND="+command, "CNI_CONTAINERID="+container, "CNI_IFNAME=eth0", "CNI_PATH="+bin,
		"sh", "-c", "echo '"+conf+"' | "+bin+"/podweir-cni")
	return err
}

// DEL succeeds however often, and whatever is gone already.
func (w *world) del() {
	n := w.c.Node("node-a")
	before := w.traces(n)
	for _, c := range []struct {
		what string
		do   func(*cluster.Pod)
	}{
		{"twice", func(p *cluster.Pod) { w.must(p.Del(w.ctx)) }},
		{"after the namespace is gone", func(p *cluster.Pod) {
			_, err := n.Exec(w.ctx, "ip", "netns", "del", p.Name)
			w.must(err)
		}},
		{"without CNI_NETNS and result", func(p *cluster.Pod) { w.must(w.plugin(n, "DEL", p.ContainerID)) }},
		{"after the interface is gone", func(p *cluster.Pod) {
			_, err := p.Exec(w.ctx, "ip", "link", "del", "eth0")
			w.must(err)
		}},
	} {
		p, err := w.add(object("del", "node-a"))
		w.must(err)
		c.do(p)
		for range 2 {
			if err := p.Del(w.ctx); err != nil {
				w.Errorf("%s: %v", c.what, err)
			}
		}
		w.must(w.plugin(n, "DEL", p.ContainerID))
		w.remove(p)
		w.baseline(n, before)
	}
	w.must(w.plugin(n, "DEL", "never-added"))
	// Another container's DEL takes nothing from this one.
	p, err := w.add(object("kept", "node-a"))
	w.must(err)
	w.must(w.plugin(n, "DEL", "never-added"))
	w.must(p.Check(w.ctx))
	w.remove(p)
	w.baseline(n, before)
}

// A DEL that no agent hears is carried out by the next one.
func (w *world) delWithoutAgent() {
	n := w.c.Node("node-a")
	before := w.traces(n)
	p, err := w.add(object("late", "node-a"))
	w.must(err)
	w.must(n.KillAgent(w.ctx))
	for range 2 {
		w.must(p.Del(w.ctx))
	}
	if err := w.plugin(n, "ADD", "nobody"); err == nil {
		w.Error("ADD without an agent succeeds")
	}
	w.must(w.c.Manifests.Delete(object("late", "node-a")))
	w.must(n.StartAgent(w.ctx))
	w.baseline(n, before)
	w.must(p.Delete(w.ctx))
}

// A pod whose object went while no agent looked has no policy to wait for. Its
// DEL does not wait either.
func (w *world) delWithoutObject() {
	n := w.c.Node("node-a")
	before := w.traces(n)
	p, err := w.add(object("orphan", "node-a"))
	w.must(err)
	w.must(n.KillAgent(w.ctx))
	w.must(w.c.Manifests.Delete(object("orphan", "node-a")))
	w.must(n.StartAgent(w.ctx))
	w.must(p.Delete(w.ctx))
	w.baseline(n, before)
}

// Somebody cleans /run up: the agent listens anew, and does what it was not
// told meanwhile.
func (w *world) socketRemoved() {
	n := w.c.Node("node-a")
	before := w.traces(n)
	p, err := w.add(object("unheard", "node-a"))
	w.must(err)
	w.must(os.Remove(n.Socket()))
	w.must(p.Del(w.ctx))
	w.must(w.c.Manifests.Delete(object("unheard", "node-a")))
	w.baseline(n, before)
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	w.must(cluster.Eventually(ctx, func() error { return w.plugin(n, "STATUS", "") }))
	w.must(p.Delete(w.ctx))
	p, err = w.add(object("heard", "node-a"))
	w.must(err)
	w.must(p.Check(w.ctx))
	w.remove(p)
	w.baseline(n, before)
}

// The next owner of an address is reached at once, from both nodes, over
// tuples that the last owner used.
func (w *world) reused() {
	callers := []*cluster.Pod{}
	for _, n := range w.c.Nodes {
		p, err := w.add(object("caller-"+n.NodeName, n.NodeName))
		w.must(err)
		callers = append(callers, p)
	}
	addrs := []netip.Addr{netip.MustParseAddr("10.244.80.200"), netip.MustParseAddr("fd00:10:244:50::200")}
	for i := range 3 {
		obj := object(fmt.Sprintf("owner-%d", i), "node-a", addrs...)
		w.must(w.c.Manifests.Put(obj))
		p, err := w.c.AddPod(w.ctx, obj)
		w.must(err)
		_, err = p.Serve(w.ctx, obj.Name, port)
		w.must(err)
		if p.IPv4() != addrs[0] || p.IPv6() != addrs[1] {
			w.Fatalf("asked for %v, got %v", addrs, p.Addrs)
		}
		for _, c := range callers {
			for _, a := range addrs {
				for _, proto := range []string{"tcp", "udp"} {
					s, err := c.Send(w.ctx, netip.AddrPortFrom(a, port).String(), "-proto", proto, "-sport", "41000", "-timeout", "5s")
					w.must(err)
					if s.OK != 1 || s.First.Reply.Server != p.PodName {
						w.Errorf("owner %d: first %s from %s: %+v", i, proto, c.PodName, s)
					}
				}
			}
		}
		w.remove(p)
	}
	for _, c := range callers {
		w.remove(c)
	}
}
