package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// The service of examples/basic.
const (
	vip4 = "10.98.235.247:80"
	vip6 = "[fd00:10:98::ebf7]:80"
)

type step struct {
	title string
	run   func(context.Context) error
}

func (d *demo) steps() []step {
	return []step{
		{"Pod to pod on one node: nothing of it on the underlay", d.sameNode},
		{"Pod to pod across nodes: VXLAN on the underlay", d.acrossNodes},
		{"ClusterIP: both backends, each sees the client's own address", d.clusterIP},
		{"ClusterIP on the underlay: translated before the tunnel", d.clusterIPOnWire},
		{"Ports and addresses that no service has", d.noService},
		{"Flow entries", d.flows},
		{"One flow lookup per packet of an established flow", d.oneLookup},
		{"An allow-list policy: pod IP and ClusterIP denied, then allowed by a label", d.policy},
		{"kill -9 of both agents during traffic", d.killAgents},
		{"Counters", d.counters},
	}
}

func (d *demo) pod(name string) *cluster.Pod { return d.c.Pod("default", name) }

func (d *demo) bringUp(ctx context.Context) error {
	root, err := cluster.Root()
	if err != nil {
		return err
	}
	objs, err := cluster.Load(filepath.Join(root, "examples", "basic"))
	if err != nil {
		return err
	}
	name, err := label()
	if err != nil {
		return err
	}
	start := time.Now()
	if d.c, err = cluster.New(ctx, cluster.Config{Label: name}); err != nil {
		return err
	}
	if err := d.c.Manifests.Put(objs...); err != nil {
		return err
	}
	if err := d.c.StartAgents(ctx); err != nil {
		return err
	}
	if err := d.c.AddPods(ctx, objs...); err != nil {
		return err
	}
	say("up in %.1f s, from the manifests in examples/basic", time.Since(start).Seconds())
	for _, n := range d.c.Nodes {
		say("%-8s %v", n.NodeName, n.Config.Addrs)
	}
	for _, obj := range objs {
		manifest, ok := obj.(*corev1.Pod)
		if !ok {
			continue
		}
		p := d.pod(manifest.Name)
		say("%-8s on %s  %v", p.PodName, p.Node.NodeName, p.Addrs)
		for _, want := range manifest.Status.PodIPs {
			if !slices.Contains(p.Addrs, netip.MustParseAddr(want.IP)) {
				return fmt.Errorf("pod %s got %v, its manifest says %s", p.PodName, p.Addrs, want.IP)
			}
		}
		// They outlive a kept demo's process.
		if _, err := p.Serve(context.WithoutCancel(ctx), p.PodName, cluster.ServerPort); err != nil {
			return err
		}
	}
	return nil
}

// both returns a pod's addresses with the servers' port.
func both(p *cluster.Pod) []string {
	var out []string
	for _, a := range []netip.Addr{p.IPv4(), p.IPv6()} {
		out = append(out, netip.AddrPortFrom(a, cluster.ServerPort).String())
	}
	return out
}

// call has one pod call a target by TCP and UDP and checks who answered and
// whom it saw.
func call(ctx context.Context, from *cluster.Pod, target string, servers ...string) error {
	for _, proto := range []string{"tcp", "udp"} {
		s, err := from.Send(ctx, target, "-proto", proto)
		if err != nil {
			return err
		}
		if s.OK != 1 {
			return fmt.Errorf("%s to %s: %s", proto, target, s.Failure.Error)
		}
		r := s.First.Reply
		say("%s  %s -> %s answered by %s, which saw %s and was called as %s", proto, from.PodName, target, r.Server, r.Peer, r.Local)
		if r.Peer != s.First.Local {
			return fmt.Errorf("the server saw %s, the client is %s", r.Peer, s.First.Local)
		}
		if !slices.Contains(servers, r.Server) {
			return fmt.Errorf("answered by %s, want one of %v", r.Server, servers)
		}
	}
	return nil
}

func (d *demo) sameNode(ctx context.Context) error {
	client, local := d.pod("client"), d.pod("local")
	tap, err := d.c.Tap(ctx)
	if err != nil {
		return err
	}
	defer tap.Close()
	for _, target := range both(local) {
		if err := call(ctx, client, target, "local"); err != nil {
			return err
		}
	}
	// A frame sent after the others arrives after them.
	if _, err := d.c.Ext.Ping(ctx, "172.31.0.2"); err != nil {
		return err
	}
	if _, err := tap.Find(ctx, "closing ping", func(p *cluster.Packet) bool { return p.Outer != nil && p.Outer.Proto == 1 }); err != nil {
		return err
	}
	leaked := tap.Matching(func(p *cluster.Packet) bool {
		l := p.Last()
		return l != nil && (slices.Contains(local.Addrs, l.Dst) || slices.Contains(local.Addrs, l.Src))
	})
	if len(leaked) > 0 {
		return fmt.Errorf("on the underlay: %v", leaked[0])
	}
	say("none of these packets was on the underlay")
	return nil
}

func (d *demo) acrossNodes(ctx context.Context) error {
	client, remote := d.pod("client"), d.pod("remote")
	tap, err := d.c.Tap(ctx)
	if err != nil {
		return err
	}
	defer tap.Close()
	for _, target := range both(remote) {
		if err := call(ctx, client, target, "remote"); err != nil {
			return err
		}
	}
	for _, pair := range [][2]netip.Addr{{client.IPv4(), remote.IPv4()}, {client.IPv6(), remote.IPv6()}} {
		if err := d.tunnelled(ctx, tap, pair[0], pair[1]); err != nil {
			return err
		}
	}
	return checksums(tap)
}

// tunnelled finds the SYN and the SYN-ACK between two pods on the underlay.
func (d *demo) tunnelled(ctx context.Context, tap *cluster.Capture, from, to netip.Addr) error {
	a, b := netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("172.31.0.3")
	for _, want := range []struct {
		flags                       string
		outerSrc, outerDst, in, out netip.Addr
	}{{"S", a, b, from, to}, {"SA", b, a, to, from}} {
		p, err := tap.Find(ctx, fmt.Sprintf("%s %v > %v in a tunnel", want.flags, want.in, want.out), func(p *cluster.Packet) bool {
			return p.Inner != nil && p.Inner.Flags == want.flags && p.Inner.Src == want.in && p.Inner.Dst == want.out
		})
		if err != nil {
			return err
		}
		say("outer  %v:%d > %v:%d  VNI %d", p.Outer.Src, p.Outer.SPort, p.Outer.Dst, p.Outer.DPort, p.VNI)
		say("inner    %v", p.Inner)
		if p.Outer.Src != want.outerSrc || p.Outer.Dst != want.outerDst || p.Outer.DPort != 4789 || p.VNI != 4096 {
			return fmt.Errorf("want outer %v > %v, UDP port 4789, VNI 4096", want.outerSrc, want.outerDst)
		}
		if want.flags == "S" && p.Inner.DPort != cluster.ServerPort {
			return fmt.Errorf("inner destination port %d, want %d", p.Inner.DPort, cluster.ServerPort)
		}
	}
	return nil
}

// checksums looks at everything captured.
func checksums(tap *cluster.Capture) error {
	n := 0
	for _, p := range tap.Packets() {
		if len(p.BadChecksums) > 0 {
			return fmt.Errorf("wrong checksum: %v", p)
		}
		n++
	}
	say("checksums of all %d captured packets are right", n)
	return nil
}

func (d *demo) clusterIP(ctx context.Context) error {
	client := d.pod("client")
	for _, target := range []string{vip4, vip6} {
		if err := call(ctx, client, target, "local", "remote"); err != nil {
			return err
		}
		s, err := client.Send(ctx, target, "-count", "200", "-parallel", "4")
		if err != nil {
			return err
		}
		if s.OK != 200 {
			return fmt.Errorf("200 connections to %s: %d succeeded, failed %v, first: %+v", target, s.OK, s.Failed, s.Failure)
		}
		say("200 connections to %s: answered by %s; clients seen: %s", target, tally(s.Servers), tally(s.Peers))
		own := client.IPv4().String()
		if target == vip6 {
			own = client.IPv6().String()
		}
		if s.Peers[own] != 200 {
			return fmt.Errorf("the backends saw %v, want %s only", s.Peers, own)
		}
		// Fair coins leave 50..150 once in 10^12 runs.
		if len(s.Servers) != 2 || s.Servers["local"] < 50 || s.Servers["remote"] < 50 {
			return fmt.Errorf("uneven: %v", s.Servers)
		}
	}
	return nil
}

func (d *demo) clusterIPOnWire(ctx context.Context) error {
	client, remote := d.pod("client"), d.pod("remote")
	tap, err := d.c.Tap(ctx)
	if err != nil {
		return err
	}
	defer tap.Close()
	for _, v := range []struct {
		target   string
		from, to netip.Addr
	}{{vip4, client.IPv4(), remote.IPv4()}, {vip6, client.IPv6(), remote.IPv6()}} {
		s, err := client.Send(ctx, v.target, "-count", "40")
		if err != nil {
			return err
		}
		if s.Servers["remote"] == 0 {
			return fmt.Errorf("of 40 connections to %s none reached the remote backend: %+v", v.target, s)
		}
		if err := d.tunnelled(ctx, tap, v.from, v.to); err != nil {
			return err
		}
	}
	for _, p := range tap.Packets() {
		if l := p.Last(); l != nil && (l.Dst.String() == "10.98.235.247" || l.Dst.String() == "fd00:10:98::ebf7") {
			return fmt.Errorf("a service address on the underlay: %v", p)
		}
	}
	say("no packet on the underlay carries a service's address")
	return checksums(tap)
}

// noService calls what nobody serves. The packets go nowhere, and a reason is
// counted for each.
func (d *demo) noService(ctx context.Context) error {
	client, tapped := d.pod("client"), netip.MustParsePrefix("10.98.0.0/16")
	tap, err := d.c.Tap(ctx)
	if err != nil {
		return err
	}
	defer tap.Close()
	for _, v := range []struct{ target, reason, why string }{
		{"10.98.235.247:81", "drop_no_service_port", "a port the service does not have"},
		{"[fd00:10:98::ebf7]:81", "drop_no_service_port", "a port the service does not have"},
		{"10.98.1.1:80", "drop_no_service", "an address no service owns"},
		{"[fd00:10:98::101]:80", "drop_no_service", "an address no service owns"},
	} {
		before, err := counters(ctx, client.Node)
		if err != nil {
			return err
		}
		s, err := client.Send(ctx, v.target, "-timeout", "200ms")
		if err != nil {
			return err
		}
		if s.OK > 0 {
			return fmt.Errorf("%s (%s) answered: %+v", v.target, v.why, s.First)
		}
		after, err := counters(ctx, client.Node)
		if err != nil {
			return err
		}
		say("%-22s %-33s %-8s %s +%d", v.target, v.why, s.Failure.Kind, v.reason, after[v.reason]-before[v.reason])
		if after[v.reason] == before[v.reason] {
			return fmt.Errorf("%s was not counted", v.reason)
		}
	}
	for _, p := range tap.Packets() {
		if l := p.Last(); l != nil && tapped.Contains(l.Dst) {
			return fmt.Errorf("on the underlay: %v", p)
		}
	}
	return nil
}

// roads are all ways from the client to the web pods.
func (d *demo) roads() []string {
	return slices.Concat(both(d.pod("local")), both(d.pod("remote")), []string{vip4, vip6})
}

// tryAll calls every road at a time and returns those that gave a result
// other than the one wanted ("" is success).
func (d *demo) tryAll(ctx context.Context, want string) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var wrong []string
	for _, target := range d.roads() {
		wg.Go(func() {
			s, err := d.pod("client").Send(ctx, target, "-timeout", "300ms")
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				wrong = append(wrong, err.Error())
			case want == "" && s.OK != 1, want != "" && s.Failed[want] != 1:
				wrong = append(wrong, fmt.Sprintf("%s: ok %d, failed %v", target, s.OK, s.Failed))
			}
		})
	}
	wg.Wait()
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return errors.New(strings.Join(wrong, "\n"))
	}
	return nil
}

func (d *demo) policy(ctx context.Context) error {
	root, err := cluster.Root()
	if err != nil {
		return err
	}
	policies, err := cluster.Load(filepath.Join(root, "examples", "policy"))
	if err != nil {
		return err
	}
	if err := d.tryAll(ctx, ""); err != nil {
		return fmt.Errorf("before the policy: %w", err)
	}
	stream, err := d.pod("client").Stream(ctx, vip4)
	if err != nil {
		return err
	}
	say("before: all of %v answer; one connection stays open", d.roads())

	if err := d.c.Manifests.Put(policies...); err != nil {
		return err
	}
	if err := cluster.Eventually(ctx, func() error { return d.tryAll(ctx, probe.Timeout) }); err != nil {
		return fmt.Errorf("with the policy: %w", err)
	}
	if _, err := stream.Await(ctx, "silence", func(r probe.StreamReport) bool { return r.LastReply > 300*time.Millisecond }); err != nil {
		return fmt.Errorf("the open connection goes on: %w", err)
	}
	say("examples/policy: none answers, neither pod IP nor ClusterIP; the open connection stands still")

	if err := cluster.Edit(d.c.Manifests, "default", "client", func(p *corev1.Pod) { p.Labels["role"] = "frontend" }); err != nil {
		return err
	}
	if err := cluster.Eventually(ctx, func() error { return d.tryAll(ctx, "") }); err != nil {
		return fmt.Errorf("with the label: %w", err)
	}
	if _, err := stream.Await(ctx, "all answers", func(r probe.StreamReport) bool {
		return r.LastReply < 100*time.Millisecond && r.Received+5 > r.Sent
	}); err != nil {
		return fmt.Errorf("the open connection does not go on: %w", err)
	}
	if rep, err := stream.Stop(ctx); err != nil || rep.Lost > 0 {
		return fmt.Errorf("the open connection: %+v, %w", rep, err)
	}
	say("role=frontend in the client's manifest: all answer, and the open connection goes on")
	s, err := d.pod("other").Send(ctx, vip4, "-timeout", "300ms")
	if err != nil {
		return err
	}
	if s.Failed[probe.Timeout] != 1 {
		return fmt.Errorf("the pod other, without the label, got through: %+v", s)
	}
	say("the pod other, without the label, is still denied")
	return nil
}

// tally writes who was counted how often.
func tally(counts map[string]int) string {
	var out []string
	for _, who := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, fmt.Sprintf("%s %d times", who, counts[who]))
	}
	return strings.Join(out, ", ")
}

func (d *demo) killAgents(ctx context.Context) error {
	client, remote := d.pod("client"), d.pod("remote")
	targets := []struct{ proto, target string }{
		{"tcp", vip4}, {"udp", vip4}, {"tcp", vip6}, {"udp", vip6},
		{"tcp", both(remote)[0]}, {"udp", both(remote)[1]},
	}
	var streams []*cluster.Stream
	for _, t := range targets {
		s, err := client.Stream(ctx, t.target, "-proto", t.proto)
		if err != nil {
			return err
		}
		streams = append(streams, s)
	}
	all := func(what string, more uint64) error {
		goals := make([]uint64, len(streams))
		for i, s := range streams {
			r, err := s.Report(ctx)
			if err != nil {
				return err
			}
			goals[i] = r.Received + more
		}
		for i, s := range streams {
			if _, err := s.Await(ctx, what, func(r probe.StreamReport) bool { return r.Received >= goals[i] }); err != nil {
				return err
			}
		}
		return nil
	}
	if err := all("traffic before", 20); err != nil {
		return err
	}
	before := make([]probe.StreamReport, len(streams))
	for i, s := range streams {
		var err error
		if before[i], err = s.Report(ctx); err != nil {
			return err
		}
	}
	start := time.Now()
	if err := d.c.KillAgents(ctx); err != nil {
		return err
	}
	killed := time.Since(start)
	if err := all("traffic without agents", 200); err != nil {
		return err
	}
	say("both agents killed (%.1f s): %d flows go on", killed.Seconds(), len(streams))
	start = time.Now()
	starting, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if err := d.c.StartAgents(starting); err != nil {
		return err
	}
	ready := time.Since(start)
	if err := all("traffic after the restart", 100); err != nil {
		return err
	}
	say("both agents started again, ready after %.1f s", ready.Seconds())
	var bad error
	for i, s := range streams {
		r, err := s.Stop(ctx)
		if err != nil {
			return err
		}
		// A segment sent again because a timer ran early, on a busy machine,
		// is one the receiver had: nothing was lost.
		again, spurious := r.Retransmits-before[i].Retransmits, r.Spurious-before[i].Spurious
		say("%s %-26s sent %4d, lost %d (segments lost %d, needlessly sent again %d), longest gap %v", targets[i].proto, targets[i].target,
			r.Sent, r.Lost, int64(again)-int64(spurious), spurious, r.MaxGap.Round(time.Millisecond))
		if r.Lost > 0 || again > spurious || r.Error != "" {
			bad = errors.Join(bad, fmt.Errorf("not every packet came through: %+v", r))
		}
	}
	return bad
}
