package cluster_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestNodesReachEachOther(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{})
	ctx := within(t, time.Minute)
	a, b := c.Node("node-a"), c.Node("node-b")
	for _, from := range []*cluster.Netns{a.Netns, c.Ext} {
		for _, to := range b.Config.Addrs {
			r, err := from.Ping(ctx, to.Addr().String())
			if err != nil || r.Received != 1 {
				t.Errorf("ping from %s to %v: %+v, %v", from.Name, to, r, err)
			}
		}
	}
}

// The switch shows every frame to every port: what a sends to b, the outside
// sees too, and the tap sees exactly once.
func TestSwitchFloods(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{})
	ctx := within(t, time.Minute)
	a, b := c.Node("node-a"), c.Node("node-b")
	if _, err := b.Serve(ctx, "b", cluster.ServerPort); err != nil {
		t.Fatal(err)
	}
	ext, err := c.Ext.Capture(ctx, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	tap, err := c.Tap(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s, err := a.Send(ctx, "172.31.0.3:8080", "-proto", "udp", "-count", "3")
	if err != nil || s.OK != 3 {
		t.Fatalf("%+v, %v", s, err)
	}
	requests := func(p *cluster.Packet) bool {
		return p.Outer != nil && p.Outer.Proto == 17 && p.Outer.DPort == 8080
	}
	n := 0
	third := func(p *cluster.Packet) bool {
		if requests(p) {
			n++
		}
		return n == 3
	}
	if p, err := ext.Find(ctx, "third request", third); err != nil {
		t.Error(err)
	} else if p.Outgoing {
		t.Errorf("%v was sent, not received", p)
	}
	n = 0
	if _, err := tap.Find(ctx, "third request", third); err != nil {
		t.Error(err)
	}
	if got := len(tap.Matching(requests)); got != 3 {
		t.Errorf("the tap saw %d copies of 3 requests", got)
	}
}

func TestToolsSeeEachOther(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{})
	ctx := within(t, time.Minute)
	a, b := c.Node("node-a"), c.Node("node-b")
	if _, err := b.Serve(ctx, "b", cluster.ServerPort); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"172.31.0.3:8080", "[fd00:172:31::3]:8080"} {
		for _, proto := range []string{"tcp", "udp"} {
			t.Run(proto+" "+target, func(t *testing.T) {
				s, err := a.Send(ctx, target, "-proto", proto, "-sport", "40000")
				if err != nil || s.OK != 1 {
					t.Fatalf("%+v, %v", s, err)
				}
				r := s.First.Reply
				if r.Server != "b" || r.Local != target || !strings.HasSuffix(r.Peer, ":40000") || r.Peer != s.First.Local {
					t.Errorf("reply %+v to %+v", r, s.First)
				}
				st, err := a.Stream(ctx, target, "-proto", proto, "-interval", "1ms")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := st.Await(ctx, "100 answers", func(r probe.StreamReport) bool { return r.Received >= 100 }); err != nil {
					t.Error(err)
				}
				rep, err := st.Stop(ctx)
				if err != nil || rep.Lost != 0 || rep.Sent < 100 {
					t.Errorf("%+v, %v", rep, err)
				}
			})
		}
		s, err := a.Send(ctx, strings.TrimSuffix(target, "8080")+"8081")
		if err != nil || s.Failed[probe.Refused] != 1 {
			t.Errorf("closed port: %+v, %v", s, err)
		}
		for _, receive := range []string{"-receive=false", "-receive=true"} {
			bulk, err := a.Bulk(ctx, target, receive)
			if err != nil || !bulk.CRCMatches || bulk.Bytes != 1<<20 {
				t.Errorf("bulk %s: %+v, %v", receive, bulk, err)
			}
		}
	}
	if s, err := a.Send(ctx, "172.31.0.99:8080", "-timeout", "50ms"); err != nil || s.Failed[probe.Timeout] != 1 {
		t.Errorf("address nobody has: %+v, %v", s, err)
	}
}

// A tunnel made by the kernel's own vxlan devices is decoded, and its
// checksums hold, with and without offload.
func TestCaptureDecodesVXLAN(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{})
	ctx := within(t, time.Minute)
	a, b := c.Node("node-a"), c.Node("node-b")
	tunnel := func(n *cluster.Node, remote, addr4, addr6 string) {
		t.Helper()
		for _, cmd := range []string{
			"ip link add vx type vxlan id 4096 dstport 4789 remote " + remote + " dev eth0",
			"ip link set vx up mtu 1430", "ip addr add dev vx " + addr4, "ip addr add dev vx nodad " + addr6,
		} {
			if _, err := n.Exec(ctx, strings.Fields(cmd)...); err != nil {
				t.Fatal(err)
			}
		}
	}
	tunnel(a, "172.31.0.3", "192.0.2.1/24", "2001:db8::1/64")
	tunnel(b, "172.31.0.2", "192.0.2.2/24", "2001:db8::2/64")
	if _, err := b.Serve(ctx, "b", cluster.ServerPort); err != nil {
		t.Fatal(err)
	}
	for _, offload := range []string{"on", "off"} {
		for _, n := range c.Nodes {
			if _, err := n.Exec(ctx, "ethtool", "-K", "vx", "tx", offload); err != nil {
				t.Fatal(err)
			}
			if _, err := n.Exec(ctx, "ethtool", "-K", "eth0", "tx", offload); err != nil {
				t.Fatal(err)
			}
		}
		for _, target := range []string{"192.0.2.2:8080", "[2001:db8::2]:8080"} {
			tap, err := c.Tap(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if r, err := a.Bulk(ctx, target, "-bytes", "100000", "-timeout", "20s"); err != nil || !r.CRCMatches {
				t.Fatalf("%+v, %v", r, err)
			}
			p, err := tap.Find(ctx, "SYN in the tunnel", func(p *cluster.Packet) bool { return p.Inner != nil && p.Inner.Flags == "S" })
			if err != nil {
				t.Fatal(err)
			}
			if p.Outer.Src.String() != "172.31.0.2" || p.Outer.Dst.String() != "172.31.0.3" || p.Outer.DPort != 4789 || p.VNI != 4096 || p.Inner.DPort != 8080 {
				t.Errorf("%v", p)
			}
			if p.Offloaded != (offload == "on") {
				t.Errorf("offload %s, but captured with offloaded=%v", offload, p.Offloaded)
			}
			if _, err := tap.Find(ctx, "FIN", func(p *cluster.Packet) bool { return p.Inner != nil && strings.Contains(p.Inner.Flags, "F") }); err != nil {
				t.Error(err)
			}
			for _, p := range tap.Matching(func(p *cluster.Packet) bool { return len(p.BadChecksums) > 0 }) {
				t.Errorf("offload %s: %v", offload, p)
			}
			if err := tap.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestManifests(t *testing.T) {
	m, err := cluster.NewManifests(filepath.Join(t.TempDir(), "m"))
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "client", Labels: map[string]string{"role": "x"}}}
	if err := m.Put(pod); err != nil {
		t.Fatal(err)
	}
	if pod.Kind != "" {
		t.Error("Put changed its argument")
	}
	if err := cluster.Edit(m, "default", "client", func(p *corev1.Pod) { p.Labels["role"] = "y" }); err != nil {
		t.Fatal(err)
	}
	objs, err := cluster.Load(m.Dir)
	if err != nil || len(objs) != 1 || objs[0].GetLabels()["role"] != "y" {
		t.Errorf("%v, %v", objs, err)
	}
	if err := m.Delete(pod, pod); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(m.Dir)); len(left) != 1 {
		t.Errorf("temporary files left: %v", left)
	}
}

func TestExamplesDecode(t *testing.T) {
	root, err := cluster.Root()
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := filepath.Glob(filepath.Join(root, "examples", "*"))
	if err != nil || len(dirs) == 0 {
		t.Fatal(dirs, err)
	}
	for _, dir := range dirs {
		if _, err := cluster.Load(dir); err != nil {
			t.Error(err)
		}
	}
}

// traces is everything on the machine that names a run.
func traces(t *testing.T, id string) []string {
	t.Helper()
	var found []string
	for _, cmd := range []string{"ip netns list", "cat /proc/self/mountinfo", "ip -o link", "find /run/podweir-test /sys/fs/cgroup -name *" + id + "*"} {
		args := strings.Fields(cmd)
		out, _ := exec.Command(args[0], args[1:]...).CombinedOutput() // find fails when there is no folder
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, id) && !strings.Contains(line, cmd) {
				found = append(found, args[0]+": "+line)
			}
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		args, _ := os.ReadFile(p)
		if len(args) == 0 { // gone, or waiting for its parent to notice
			continue
		}
		if strings.Contains(string(args), id) {
			found = append(found, p+": "+strings.ReplaceAll(string(args), "\x00", " "))
		}
		if cg, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "cgroup")); strings.Contains(string(cg), id) {
			found = append(found, filepath.Dir(p)+" in its cgroup")
		}
	}
	return found
}

func TestCloseLeavesNothing(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{})
	ctx := within(t, time.Minute)
	server, err := c.Node("node-a").Serve(ctx, "a", cluster.ServerPort)
	if err != nil {
		t.Fatal(err)
	}
	if got := traces(t, c.ID); len(got) < 10 {
		t.Errorf("a running cluster has only these traces: %q", got)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got := traces(t, c.ID); len(got) > 0 {
		t.Errorf("left behind: %q", got)
	}
	if err := server.Wait(ctx); err == nil {
		t.Error("the server ended by itself")
	}
	if err := c.Close(); err != nil {
		t.Errorf("closing twice: %v", err)
	}
}

// A run whose owner was killed is swept; a kept one and a living one are not.
func TestSweep(t *testing.T) {
	if os.Getenv("CLUSTER_TEST_ORPHAN") != "" {
		orphan(t)
		return
	}
	live := cluster.ForTest(t, cluster.Config{})
	kept := orphaned(t, "keep")
	dead := orphaned(t, "die")
	if err := cluster.Sweep(); err != nil {
		t.Fatal(err)
	}
	runs, err := cluster.Runs()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]cluster.Run{}
	for _, r := range runs {
		have[r.ID] = r
	}
	if _, ok := have[live.ID]; !ok {
		t.Error("the running cluster was swept")
	}
	if got := traces(t, dead); len(got) > 0 {
		t.Errorf("left behind: %q", got)
	}
	r, ok := have[kept]
	if !ok {
		t.Fatal("the kept cluster was swept")
	}
	if err := r.Remove(); err != nil {
		t.Error(err)
	}
	if got := traces(t, kept); len(got) > 0 {
		t.Errorf("left behind: %q", got)
	}
}

// orphaned has another process make a cluster and end without closing it.
func orphaned(t *testing.T, how string) (id string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSweep$", "-test.v")
	cmd.Env = append(os.Environ(), "CLUSTER_TEST_ORPHAN="+how)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	_, after, ok := strings.Cut(string(out), "ORPHAN ")
	if !ok {
		t.Fatalf("%v\n%s", err, out)
	}
	id, _, _ = strings.Cut(after, "\n")
	return id
}

func orphan(t *testing.T) {
	c, err := cluster.New(t.Context(), cluster.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Node("node-a").Serve(context.Background(), "a", cluster.ServerPort); err != nil {
		t.Fatal(err)
	}
	if os.Getenv("CLUSTER_TEST_ORPHAN") == "keep" {
		if err := c.Keep(); err != nil {
			t.Fatal(err)
		}
	}
	_, _ = os.Stdout.WriteString("ORPHAN " + c.ID + "\n")
	os.Exit(0)
}

func TestNewNamesItsRuns(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{})
	runs, err := cluster.Runs()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		if r.ID == c.ID {
			if r.Label != t.Name() || r.PID != os.Getpid() {
				t.Errorf("recorded as %+v", r)
			}
			return
		}
	}
	t.Error("run " + c.ID + " of process " + strconv.Itoa(os.Getpid()) + " is not listed")
}
