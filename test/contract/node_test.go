package contract

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/test/cluster"
)

// programs counts the programs at the tcx hooks of a node's devices, as
// "device ingress|egress name". The kernel is asked how many there are, then
// which, then what each is: what comes or goes in between makes it begin anew.
func programs(t *testing.T, n *cluster.Node) map[string]int {
	t.Helper()
	var out map[string]int
	eventually(t, within(t, time.Minute), func() (err error) {
		out, err = tcxPrograms(n)
		if err != nil && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return err
	})
	for name, n := range socketPrograms(t, n) {
		out["cgroup "+name] = n
	}
	return out
}

func tcxPrograms(n *cluster.Node) (map[string]int, error) {
	out := map[string]int{}
	return out, netlinkIn(n.Netns, func(h *netlink.Handle) error {
		links, err := h.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			for attach, dir := range map[ebpf.AttachType]string{ebpf.AttachTCXIngress: "ingress", ebpf.AttachTCXEgress: "egress"} {
				res, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: attach})
				if err != nil {
					return err
				}
				for _, p := range res.Programs {
					prog, err := ebpf.NewProgramFromID(p.ID)
					if err != nil {
						return err
					}
					info, err := prog.Info()
					prog.Close()
					if err != nil {
						return err
					}
					out[l.Attrs().Name+" "+dir+" "+info.Name]++
				}
			}
		}
		return nil
	})
}

// passive is somebody else's program, which lets everything pass.
func passive(t *testing.T) *ebpf.Program {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	ok(t, err)
	t.Cleanup(func() { prog.Close() })
	return prog
}

// foreign sets up what other programs have on a node, and returns how it
// looks, to be compared later.
func foreign(t *testing.T, ctx context.Context, n *cluster.Node, prog *ebpf.Program, devices ...string) (look func() string) {
	t.Helper()
	pin := filepath.Join(n.BPFFS(), "foreign")
	ok(t, prog.Pin(pin))
	t.Cleanup(func() { ok(t, prog.Unpin()) })
	run := func(args ...string) {
		t.Helper()
		_, err := n.Exec(ctx, args...)
		ok(t, err)
	}
	for _, dev := range devices {
		run("tc", "qdisc", "add", "dev", dev, "clsact")
		for _, dir := range []string{"ingress", "egress"} {
			run("tc", "filter", "add", "dev", dev, dir, "prio", "7", "handle", "1", "bpf", "direct-action", "object-pinned", pin)
		}
		run("tc", "qdisc", "add", "dev", dev, "root", "handle", "7:", "pfifo", "limit", "1234")
		t.Cleanup(func() {
			for _, args := range [][]string{{"clsact"}, {"root"}} {
				_, err := n.Exec(context.Background(), append([]string{"tc", "qdisc", "del", "dev", dev}, args...)...)
				ok(t, err)
			}
		})
	}
	run("iptables", "-w", "-N", "FOREIGN")
	run("iptables", "-w", "-A", "INPUT", "-j", "FOREIGN")
	run("ip6tables", "-w", "-A", "FORWARD", "-s", "2001:db8::/32", "-j", "DROP")
	run("ipset", "create", "foreign", "hash:ip")
	run("ipset", "add", "foreign", "192.0.2.1")
	t.Cleanup(func() {
		for _, cmd := range []string{"iptables -w -F", "iptables -w -X FOREIGN", "ip6tables -w -F", "ipset destroy foreign"} {
			_, err := n.Exec(context.Background(), strings.Fields(cmd)...)
			ok(t, err)
		}
	})
	return func() string {
		t.Helper()
		var all []string
		for _, cmd := range []string{"iptables-save", "ip6tables-save", "ipset save"} {
			out, err := n.Exec(ctx, strings.Fields(cmd)...)
			ok(t, err)
			for line := range strings.Lines(out) {
				if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
					all = append(all, line)
				}
			}
		}
		for _, dev := range devices {
			for _, cmd := range []string{"qdisc show dev " + dev, "filter show dev " + dev + " ingress", "filter show dev " + dev + " egress"} {
				out, err := n.Exec(ctx, append([]string{"tc"}, strings.Fields(cmd)...)...)
				ok(t, err)
				all = append(all, out)
			}
		}
		return strings.Join(all, "")
	}
}

// One program per hook after any number of restarts, in company of others'
// programs, filters, queues, rules and sets, which nobody touches; and one
// that somebody detached is attached again.
func TestL3Attachments(t *testing.T) {
	w := shared(t)
	ctx := within(t, 120*time.Second)
	veth := hostSide(t, w.client).Attrs().Name
	prog := passive(t)
	t.Cleanup(func() { // of the filters, which go before
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		filtered(t, ctx, w.a, veth, false)
	})
	look := foreign(t, ctx, w.a, prog, "eth0", veth)
	for _, dev := range []string{"eth0", veth, "podweir.vxlan"} {
		for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			ok(t, netlinkIn(w.a.Netns, func(h *netlink.Handle) error {
				d, err := h.LinkByName(dev)
				if err != nil {
					return err
				}
				l, err := link.AttachTCX(link.TCXOptions{Interface: d.Attrs().Index, Program: prog, Attach: attach, Anchor: link.Tail()})
				if err == nil {
					t.Cleanup(func() { l.Close() })
				}
				return err
			}))
		}
	}
	// The filters among them are to see what the pod sends.
	filtered(t, ctx, w.a, veth, true)
	looks, attached := look(), programs(t, w.a)
	want := map[string]int{
		"eth0 ingress from_netdev": 1, "eth0 egress to_netdev": 1, "lo egress to_lo": 1, "podweir.vxlan ingress from_overlay": 1, "podweir.vxlan egress to_overlay": 1, "podweir.frag ingress from_frag": 1,
	}
	for _, p := range []*cluster.Pod{w.client, w.local} {
		want[hostSide(t, p).Attrs().Name+" ingress from_pod"] = 1
		want[hostSide(t, p).Attrs().Name+" egress to_pod"] = 1
	}
	delete(want, veth+" ingress from_pod")
	want[veth+" ingress from_pod_judge"], want[node.CoverName(veth)+" ingress from_pod_send"] = 1, 1
	for _, name := range []string{"connect4", "connect6", "getpeername4", "getpeername6", "sock_release"} {
		want["cgroup "+name] = 1
	}
	for _, dev := range []string{"eth0", veth, "podweir.vxlan"} {
		want[dev+" ingress foreign"], want[dev+" egress foreign"] = 1, 1
	}
	if fmt.Sprint(attached) != fmt.Sprint(want) {
		t.Fatalf("attached %v, want %v", attached, want)
	}
	t.Cleanup(func() { w.ensureAgents(t) })
	same := func(when string) {
		t.Helper()
		if got := programs(t, w.a); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: attached %v, want %v", when, got, want)
		}
		if got := look(); got != looks {
			t.Errorf("%s: what other programs had was\n%s\nand is\n%s", when, looks, got)
		}
	}
	for i := range 3 {
		ok(t, w.a.RestartAgent(ctx))
		same(fmt.Sprintf("restart %d", i+1))
	}
	// Another program detaches ours, each kind on a device; for those of the
	// cgroup see TestSocketsOutliveTheAgent.
	for dev, names := range map[string][]string{"eth0": {"from_netdev", "to_netdev"}, "lo": {"to_lo"}, "podweir.vxlan": {"from_overlay", "to_overlay"}, "podweir.frag": {"from_frag"}, veth: {"from_pod_judge", "to_pod"}, node.CoverName(veth): {"from_pod_send"}} {
		var index int
		ok(t, netlinkIn(w.a.Netns, func(h *netlink.Handle) error {
			d, err := h.LinkByName(dev)
			if err == nil {
				index = d.Attrs().Index
			}
			return err
		}))
		for _, name := range names {
			pin := filepath.Join(w.a.BPFFS(), "links", fmt.Sprintf("%d-%s", index, name))
			_, err := w.a.Exec(ctx, "bpftool", "link", "detach", "pinned", pin)
			ok(t, err)
		}
	}
	eventually(t, ctx, func() error {
		if got := programs(t, w.a); fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("after detaching: attached %v, want %v", got, want)
		}
		return nil
	})
	same("after detaching")
	for _, v6 := range []bool{false, true} {
		send(t, ctx, w.client.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-count", "16")
	}
	ok(t, w.a.RestartAgent(ctx))
	same("a restart later")
}

// nodeState is everything of a node that cleanup has to leave as it was.
func nodeState(t *testing.T, ctx context.Context, n *cluster.Node) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, cmd := range []string{
		"ip -o -d link", "ip -o addr", "ip route show table all", "ip -6 route show table all", "ip rule", "ip -6 rule", "tc qdisc",
	} {
		text, err := n.Exec(ctx, strings.Fields(cmd)...)
		ok(t, err)
		var lines []string
		for line := range strings.Lines(text) {
			// What the kernel does by itself, at times of its own.
			if strings.Contains(line, "proto kernel") || strings.Contains(line, "multicast ff00::/8") {
				continue
			}
			lines = append(lines, line)
		}
		slices.Sort(lines)
		out[cmd] = strings.Join(lines, "")
	}
	out["programs"] = fmt.Sprint(programs(t, n))
	out["bpffs"] = tree(t, n.BPFFS())
	ok(t, n.Do(func() error {
		for _, dir := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6"} {
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.IsDir() {
					return nil // gone meanwhile
				}
				if data, err := os.ReadFile(path); err == nil {
					out[path] = string(data)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	return out
}

func tree(t *testing.T, dir string) string {
	t.Helper()
	var all []string
	ok(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && path != dir {
			all = append(all, path)
		}
		return err
	}))
	return strings.Join(all, "\n")
}

func cleanup(ctx context.Context, n *cluster.Node) error {
	_, err := n.Exec(ctx, "podweir-agent", "cleanup", "--bpffs", n.BPFFS(), "--state-dir", n.StateDir(), "--socket", n.Socket())
	return err
}

// Cleanup leaves no program, map, route, device or sysctl of ours, and what
// others have as it is.
func TestL7Cleanup(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 90*time.Second)
	before := map[*cluster.Node]map[string]string{}
	for _, n := range w.Nodes {
		ok(t, n.Sysctl("net/ipv4/ip_forward", "0"))
		ok(t, n.Sysctl("net/ipv6/conf/all/forwarding", "0"))
		_, err := n.Exec(ctx, "ip", "route", "add", "192.0.2.0/24", "via", "172.31.0.1")
		ok(t, err)
		before[n] = nodeState(t, ctx, n)
	}
	ok(t, w.bringUp(ctx))
	for _, v6 := range []bool{false, true} {
		send(t, ctx, w.client.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-count", "8")
		send(t, ctx, w.a.Netns, "tcp", at(ip(w.remote, v6), cluster.ServerPort).String())
	}
	// A pod whose packets pass filters has a device more.
	veth := hostSide(t, w.client).Attrs().Name
	commands(t, ctx, w.a.Netns, "ip link add pwifb2 up type ifb", "tc qdisc add dev "+veth+" ingress",
		"tc filter add dev "+veth+" parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev pwifb2")
	filtered(t, ctx, w.a, veth, true)
	if err := cleanup(ctx, w.a); err == nil || !strings.Contains(err.Error(), "another agent") {
		t.Errorf("cleanup with a running agent: %v", err)
	}
	send(t, ctx, w.client.Netns, "tcp", vip(web4, 80), "-count", "8")
	ok(t, w.KillAgents(ctx))
	for _, n := range w.Nodes {
		for range 2 { // the second finds nothing
			ok(t, cleanup(ctx, n))
		}
		if n == w.a {
			commands(t, ctx, n.Netns, "ip link del pwifb2")
		}
		after := nodeState(t, ctx, n)
		for what, was := range before[n] {
			if after[what] != was {
				t.Errorf("%s: %s was\n%s\nand is\n%s", n.NodeName, what, was, after[what])
			}
		}
		for what := range after {
			if _, is := before[n][what]; !is {
				t.Errorf("%s: %s is left", n.NodeName, what)
			}
		}
		if left := tree(t, n.StateDir()); left != "" {
			t.Errorf("%s: left of the state: %s", n.NodeName, left)
		}
	}
	// And it works again.
	for _, p := range []*cluster.Pod{w.client, w.local, w.remote, w.other} {
		ok(t, p.Delete(ctx))
	}
	ok(t, w.StartAgents(ctx))
	ok(t, w.plug(ctx))
	for _, v6 := range []bool{false, true} {
		send(t, ctx, w.client.Netns, "tcp", vip(pick(v6, web4, web6), 80), "-count", "8")
	}
}

func readSysctl(t *testing.T, n *cluster.Netns, key string) (value string) {
	t.Helper()
	ok(t, n.Do(func() error {
		data, err := os.ReadFile(filepath.Join("/proc/sys", key))
		value = strings.TrimSpace(string(data))
		return err
	}))
	return value
}

// Sysctls: of our devices, and node-wide ones; set again when another program
// resets them; put back by cleanup unless somebody has changed them since.
func TestN20Sysctls(t *testing.T) {
	w := own(t, cluster.Config{Nodes: cluster.DefaultNodes()[:1]})
	ctx := within(t, 90*time.Second)
	n := w.a
	old := map[string]string{
		"net/ipv4/ip_forward": "0", "net/ipv6/conf/all/forwarding": "0",
		"net/ipv4/conf/all/send_redirects": "1", "net/ipv6/conf/eth0/accept_ra": "1",
	}
	for key, v := range old {
		ok(t, n.Sysctl(key, v))
	}
	ok(t, w.Manifests.Put(w.objs...))
	ok(t, n.StartAgent(ctx))
	p, err := w.AddPod(ctx, object[*corev1.Pod](w, "client"))
	ok(t, err)
	veth := hostSide(t, p).Attrs().Name
	want := map[string]string{
		"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
		"net/ipv4/conf/all/send_redirects": "0", "net/ipv6/conf/eth0/accept_ra": "2",
		"net/ipv4/conf/" + veth + "/proxy_arp": "0",
	}
	for _, dev := range []string{"eth0", veth, "podweir.vxlan"} {
		want["net/ipv4/conf/"+dev+"/forwarding"] = "1"
		want["net/ipv6/conf/"+dev+"/forwarding"] = "1"
	}
	for _, dev := range []string{veth, "podweir.vxlan"} {
		want["net/ipv4/conf/"+dev+"/rp_filter"] = "2"
		want["net/ipv4/conf/"+dev+"/send_redirects"] = "0"
	}
	check := func() error {
		for key, v := range want {
			if got := readSysctl(t, n.Netns, key); got != v {
				return fmt.Errorf("%s is %s, want %s", key, got, v)
			}
		}
		return nil
	}
	eventually(t, ctx, check)
	for key, v := range want {
		other := map[string]string{"0": "1", "1": "0", "2": "1"}[v]
		ok(t, n.Sysctl(key, other))
	}
	eventually(t, ctx, check)
	if log := n.LogTail(); !strings.Contains(log, "reset by another program") {
		t.Errorf("the log does not tell:\n%s", log)
	}
	ok(t, n.KillAgent(ctx))
	// Changed since by somebody else: not ours to put back.
	ok(t, n.Sysctl("net/ipv6/conf/eth0/accept_ra", "0"))
	old["net/ipv6/conf/eth0/accept_ra"] = "0"
	ok(t, cleanup(ctx, n))
	for key, v := range old {
		if got := readSysctl(t, n.Netns, key); got != v {
			t.Errorf("after cleanup %s is %s, want %s", key, got, v)
		}
	}
}

// ourRoutes is what a node has of ours, devices named alike in every cluster.
func ourRoutes(t *testing.T, ctx context.Context, n *cluster.Node) string {
	t.Helper()
	var all []string
	for _, family := range []string{"-4", "-6"} {
		out, err := n.Exec(ctx, "ip", family, "route", "show", "proto", "112")
		ok(t, err)
		for line := range strings.Lines(out) {
			all = append(all, line)
		}
	}
	slices.Sort(all)
	out, err := n.Exec(ctx, "ip", "-o", "link", "show", "podweir.vxlan")
	ok(t, err)
	_, rest, _ := strings.Cut(out, "podweir.vxlan")
	return strings.Join(all, "") + rest
}

// The order of events at start makes no difference: an agent before its
// node's address, a Node object after the agents.
func TestN6Order(t *testing.T) {
	nodes := cluster.DefaultNodes()
	addrs := nodes[1].Addrs
	nodes[1].Addrs = nil
	w := own(t, cluster.Config{Nodes: nodes})
	ctx := within(t, 90*time.Second)
	nodeB := object[*corev1.Node](w, "node-b")
	ok(t, w.Manifests.Put(w.objs...))
	ok(t, w.Manifests.Delete(nodeB))
	ok(t, w.a.StartAgent(ctx)) // knows nothing of node-b
	started := make(chan error, 1)
	go func() { started <- w.b.StartAgent(ctx) }()
	eventually(t, ctx, func() error {
		code, body, err := w.b.AgentGet(ctx, "/readyz")
		if err == nil && (code != 503 || !strings.Contains(body, "no device")) {
			err = fmt.Errorf("/readyz of node-b: %d %s", code, body)
		}
		return err
	})
	ok(t, w.Manifests.Put(nodeB))
	// Routes before the address they are from, on both nodes.
	eventually(t, ctx, func() error { return hasRoute(w.a, "10.244.158.0/24", "podweir.vxlan") })
	for _, p := range addrs {
		_, err := w.b.Exec(ctx, "ip", "addr", "add", p.String(), "dev", "eth0")
		ok(t, err)
	}
	ok(t, <-started)
	ok(t, w.plug(ctx))
	w.b.Config.Addrs = addrs
	for _, v6 := range []bool{false, true} {
		for _, pair := range [][2]*cluster.Pod{{w.client, w.remote}, {w.remote, w.client}} {
			for _, proto := range protos() {
				s := send(t, ctx, pair[0].Netns, proto, at(ip(pair[1], v6), cluster.ServerPort).String())
				if s.Peers[ip(pair[0], v6).String()] != 1 {
					t.Errorf("%s saw %v", pair[1].PodName, s.Peers)
				}
			}
		}
		send(t, ctx, w.a.Netns, "tcp", at(ip(w.remote, v6), cluster.ServerPort).String())
		send(t, ctx, w.b.Netns, "tcp", at(ip(w.client, v6), cluster.ServerPort).String())
	}
	usual := shared(t)
	for i, n := range w.Nodes {
		eventually(t, ctx, func() error {
			if got, want := ourRoutes(t, ctx, n), ourRoutes(t, ctx, usual.Nodes[i]); got != want {
				return fmt.Errorf("%s has\n%s\nin the usual order it is\n%s", n.NodeName, got, want)
			}
			return nil
		})
	}
}

// outer asserts what every tunnelled packet of a capture has outside.
func outer(t *testing.T, tap *cluster.Capture, a, b netip.Addr) {
	t.Helper()
	n := 0
	for _, p := range tap.Packets() {
		if p.Inner == nil {
			continue
		}
		n++
		if !(p.Outer.Src == a && p.Outer.Dst == b || p.Outer.Src == b && p.Outer.Dst == a) {
			t.Fatalf("%v: want the nodes' addresses %v and %v outside", p, a, b)
		}
	}
	if n == 0 {
		t.Error("nothing was tunnelled")
	}
}

// The tunnel ends at the InternalIP of the Node object: not at a virtual
// address that the device has as well (even as its first), not at docker's.
func TestN7NeverAnotherAddress(t *testing.T) {
	nodes := cluster.DefaultNodes()
	for i, extra := range []string{"172.31.0.200/24", "172.31.0.201/24"} {
		nodes[i].Addrs = append([]netip.Prefix{netip.MustParsePrefix(extra)}, nodes[i].Addrs...)
	}
	w := own(t, cluster.Config{Nodes: nodes})
	ctx := within(t, 60*time.Second)
	for _, n := range w.Nodes {
		for _, cmd := range []string{"ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0", "ip link set docker0 up"} {
			_, err := n.Exec(ctx, strings.Fields(cmd)...)
			ok(t, err)
		}
	}
	ok(t, w.bringUp(ctx))
	tap, err := w.Tap(ctx)
	ok(t, err)
	defer tap.Close()
	for _, v6 := range []bool{false, true} {
		for _, proto := range protos() {
			stream, err := w.client.Stream(ctx, at(ip(w.remote, v6), cluster.ServerPort).String(), "-proto", proto)
			if err != nil {
				outer(t, tap, netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("172.31.0.3"))
				t.Fatalf("%v; node-b: %v", err, readCounters(t, w.b).drops())
			}
			progress(t, ctx, stream, 5)
			_, err = stream.Stop(ctx)
			ok(t, err)
		}
	}
	outer(t, tap, netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("172.31.0.3"))
}

// A node's address changes, and its Node object with it: both agents follow
// without a restart.
func TestN7AddressChanges(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 60*time.Second)
	ok(t, w.bringUp(ctx))
	try := func(peer string) {
		t.Helper()
		tap, err := w.Tap(ctx)
		ok(t, err)
		defer tap.Close()
		for _, v6 := range []bool{false, true} {
			for _, proto := range protos() {
				stream, err := w.client.Stream(ctx, at(ip(w.remote, v6), cluster.ServerPort).String(), "-proto", proto)
				ok(t, err)
				progress(t, ctx, stream, 5)
				_, err = stream.Stop(ctx)
				ok(t, err)
			}
			send(t, ctx, w.remote.Netns, "tcp", at(ip(w.client, v6), cluster.ServerPort).String())
		}
		send(t, ctx, w.b.Netns, "tcp", at(w.client.IPv4(), cluster.ServerPort).String())
		outer(t, tap, netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr(peer))
	}
	try("172.31.0.3")
	stream, err := w.client.Stream(ctx, at(w.remote.IPv6(), cluster.ServerPort).String())
	ok(t, err)
	pids := [2]int{w.a.Agent().PID, w.b.Agent().PID}
	for _, cmd := range []string{"ip addr del 172.31.0.3/24 dev eth0", "ip addr add 172.31.0.13/24 dev eth0", "ip route replace default via 172.31.0.1"} {
		_, err := w.b.Exec(ctx, strings.Fields(cmd)...)
		ok(t, err)
	}
	ok(t, cluster.Edit(w.Manifests, "", "node-b", func(n *corev1.Node) { n.Status.Addresses[0].Address = "172.31.0.13" }))
	for _, n := range w.Nodes {
		eventually(t, ctx, func() error {
			for _, node := range status(t, ctx, n).Nodes {
				if node.Name == "node-b" && node.Addr.String() == "172.31.0.13" {
					return nil
				}
			}
			return fmt.Errorf("%s does not know of it", n.NodeName)
		})
	}
	eventually(t, ctx, func() error {
		out, err := w.b.Exec(ctx, "ip", "route", "show", "10.244.80.0/24")
		if err == nil && !strings.Contains(out, "src 172.31.0.13") {
			err = fmt.Errorf("route of node-b: %s", out)
		}
		return err
	})
	try("172.31.0.13")
	progress(t, ctx, stream, 5)
	rep, err := stream.Stop(ctx)
	ok(t, err)
	if rep.Error != "" {
		t.Errorf("the connection that was open: %+v", rep)
	}
	if got := [2]int{w.a.Agent().PID, w.b.Agent().PID}; got != pids {
		t.Errorf("agents were restarted: %v, %v", pids, got)
	}
}
