package contract

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// ethtool changes features of a device for the duration of the case.
func ethtool(t *testing.T, n *cluster.Netns, device string, features ...string) {
	t.Helper()
	set := func(ctx context.Context, value string) error {
		args := []string{"ethtool", "-K", device}
		for _, f := range features {
			args = append(args, f, value)
		}
		_, err := n.Exec(ctx, args...)
		return err
	}
	t.Cleanup(func() {
		if err := set(context.Background(), "on"); err != nil {
			t.Error(err)
		}
	})
	ok(t, set(t.Context(), "off"))
}

// Between nodes: the nodes' addresses outside, the pods' inside, translated
// already; and every checksum right, whoever computes it.
func TestN4Tunnel(t *testing.T) {
	w := shared(t)
	for i, offload := range []struct {
		name     string
		pod, dev bool // checksum offload off
	}{{"offloads on", false, false}, {"off in the pods", true, false}, {"off on the nodes", false, true}, {"off everywhere", true, true}} {
		t.Run(offload.name, func(t *testing.T) {
			if offload.pod {
				for _, p := range []*cluster.Pod{w.client, w.local, w.remote} {
					ethtool(t, p.Netns, "eth0", "tx")
				}
			}
			if offload.dev {
				for _, n := range w.Nodes {
					ethtool(t, n.Netns, "eth0", "tx")
				}
			}
			families(t, func(t *testing.T, v6 bool) {
				for _, proto := range protos() {
					t.Run(proto, func(t *testing.T) { w.tunnelled(t, proto, v6, 61001+i) })
				}
			})
		})
	}
}

// few sends a few messages: of a flow's beginning, and established.
func (w *world) few(t *testing.T, ctx context.Context, target, proto string, options ...string) (*cluster.Capture, probe.StreamReport) {
	t.Helper()
	tap, err := w.Tap(ctx)
	ok(t, err)
	stream, err := w.client.Stream(ctx, target, append(options, "-proto", proto)...)
	ok(t, err)
	progress(t, ctx, stream, 10)
	rep, err := stream.Stop(ctx)
	ok(t, err)
	return tap, rep
}

// tunnelled calls from a port that nobody draws: one of an earlier connection to
// the same backend would be translated, and rightly.
func (w *world) tunnelled(t *testing.T, proto string, v6 bool, sport int) {
	ctx := within(t, 30*time.Second)
	ips := []string{"10.98.4.1", "fd00:10:98::401"}
	target := vip(pick(v6, ips[0], ips[1]), 80)
	w.put(t, clusterIP("wire", ips, bothPorts(80)...))
	w.put(t, slicesFor("wire", "wire", bothSlicePorts(cluster.ServerPort), w.remote)...)
	w.inForce(t, ctx, proto, target, atAll(v6, w.remote)...)
	tap, rep := w.few(t, ctx, target, proto, "-sport", fmt.Sprint(sport))
	defer tap.Close()
	local := netip.MustParseAddrPort(rep.Local)
	backend := at(ip(w.remote, v6), cluster.ServerPort)
	w.closingPing(t, ctx, tap)
	sent := 0
	for _, p := range tap.Packets() {
		if len(p.BadChecksums) > 0 {
			t.Fatalf("wrong checksum: %v", p)
		}
		l := p.Last()
		if l == nil || l.Proto != protoNumber(proto) || p.Inner == nil && l.DPort != cluster.ServerPort && l.DPort != 80 {
			continue
		}
		if p.Inner == nil {
			t.Fatalf("outside the tunnel: %v", p)
		}
		src, dst := nodeAddr(w.a, false), nodeAddr(w.b, false)
		from, to := local, backend
		if l.Src == backend.Addr() {
			src, dst, from, to = dst, src, to, from
		}
		if p.Outer.Src != src || p.Outer.Dst != dst || p.Outer.Proto != 17 || p.Outer.DPort != 4789 || p.VNI != 4096 {
			t.Fatalf("%v: want %v > %v, UDP port 4789, VNI 4096", p, src, dst)
		}
		if at(l.Src, l.SPort) != from || at(l.Dst, l.DPort) != to {
			t.Fatalf("%v: want %v > %v inside", p, from, to)
		}
		sent++
	}
	if sent < 20 {
		t.Errorf("%d packets in the tunnel, want 20 or more", sent)
	}
}

// traffic sums what passed a pod's interface.
type traffic struct{ packets, bytes int }

// flows counts a pod's TCP or UDP packets with payload, per direction as
// seen from the captured device.
func flows(c *cluster.Capture, pod *cluster.Pod, proto uint8) (out, in traffic) {
	for _, p := range c.Packets() {
		l := p.Last()
		if l == nil || l.Proto != proto || len(l.Payload) == 0 || !slices.Contains(pod.Addrs, l.Src) && !slices.Contains(pod.Addrs, l.Dst) {
			continue
		}
		d := &in
		if p.Outgoing {
			d = &out
		}
		d.packets++
		d.bytes += len(l.Payload)
	}
	return out, in
}

// lossless awaits that all that one pod and its peers sent to each other
// has arrived. Bytes of TCP are compared, for a device may cut or join
// segments; a segment sent twice has to arrive twice. So a retransmission of
// what was never lost (a busy machine) is told from a loss.
//
// What the captures still hold is read at the pace the machine allows. Frames
// that a capture itself could not keep make the comparison void: that is an
// error of its own.
func (w *world) lossless(ctx context.Context, client *cluster.Capture, peers ...*cluster.Capture) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	var void error
	err := cluster.Eventually(ctx, func() error {
		for _, c := range append([]*cluster.Capture{client}, peers...) {
			if n, err := c.Missed(); err != nil || n > 0 {
				void = errors.Join(fmt.Errorf("a capture missed %d frames; nothing can be said of the datapath", n), err)
				return nil
			}
		}
		var errs []error
		for _, proto := range []uint8{6, 17} {
			out, in := flows(client, w.client, proto)
			var theirs, got traffic
			for _, c := range peers {
				o, i := flows(c, w.client, proto)
				theirs.packets, theirs.bytes = theirs.packets+o.packets, theirs.bytes+o.bytes
				got.packets, got.bytes = got.packets+i.packets, got.bytes+i.bytes
			}
			if out.bytes != got.bytes || in.bytes != theirs.bytes {
				errs = append(errs, fmt.Errorf("protocol %d: sent %+v, arrived %+v; sent back %+v, arrived %+v", proto, out, got, theirs, in))
			}
		}
		return errors.Join(errs...)
	})
	return errors.Join(void, err)
}

// Bulk TCP over VXLAN: segments as large as the tunnel leaves room for,
// nothing lost, and not one IP fragment on the underlay.
func TestN12Bulk(t *testing.T) {
	w := shared(t)
	for _, segmented := range []bool{false, true} {
		name := "segmentation offload"
		if segmented {
			name = "segmented by the node"
		}
		t.Run(name, func(t *testing.T) {
			if segmented {
				for _, n := range w.Nodes {
					ethtool(t, n.Netns, "eth0", "gro", "gso", "tso")
				}
			}
			families(t, func(t *testing.T, v6 bool) {
				for _, receive := range []bool{false, true} {
					t.Run(fmt.Sprintf("receive=%v", receive), func(t *testing.T) { w.bulk(t, v6, receive, segmented) })
				}
			})
		})
	}
}

func (w *world) bulk(t *testing.T, v6, receive, segmented bool) {
	ctx := within(t, 60*time.Second)
	ips := []string{"10.98.12.1", "fd00:10:98::c01"}
	target := vip(pick(v6, ips[0], ips[1]), 80)
	w.put(t, clusterIP("bulk", ips, bothPorts(80)...))
	w.put(t, slicesFor("bulk", "bulk", bothSlicePorts(cluster.ServerPort), w.remote)...)
	w.inForce(t, ctx, "tcp", target, atAll(v6, w.remote)...)
	tap, err := w.Tap(ctx)
	ok(t, err)
	defer tap.Close()
	mine, err := w.client.Capture(ctx, "eth0")
	ok(t, err)
	defer mine.Close()
	theirs, err := w.remote.Capture(ctx, "eth0")
	ok(t, err)
	defer theirs.Close()
	const size = 2 << 20
	r, err := w.client.Bulk(ctx, target, "-bytes", fmt.Sprint(size), fmt.Sprintf("-receive=%v", receive), "-timeout", "20s")
	ok(t, err)
	if r.Bytes != size || !r.CRCMatches || r.Error != "" {
		t.Fatalf("%+v", r)
	}
	// 1450 without the inner IP and TCP headers, the latter with timestamps.
	if want := uint32(map[bool]int{false: 1450 - 20 - 32, true: 1450 - 40 - 32}[v6]); r.MSS != want {
		t.Errorf("segments of %d bytes, want %d", r.MSS, want)
	}
	if err := w.lossless(ctx, mine, theirs); err != nil {
		t.Errorf("lost (%d retransmitted by the client): %v", r.Retransmits, err)
	}
	w.closingPing(t, ctx, tap)
	largest, bytes := 0, 0
	for _, p := range tap.Packets() {
		if p.Outer == nil {
			continue
		}
		if p.Outer.Fragment || p.Last().Fragment {
			t.Fatalf("a fragment: %v", p)
		}
		if len(p.BadChecksums) > 0 {
			t.Fatalf("wrong checksum: %v", p)
		}
		if p.Inner != nil && slices.Contains(w.remote.Addrs, p.Inner.Dst) != receive {
			bytes += len(p.Inner.Payload)
		}
		largest = max(largest, len(p.Frame))
	}
	if bytes < size {
		t.Errorf("%d bytes in the tunnel, want %d", bytes, size)
	}
	if segmented && largest != 1514 {
		t.Errorf("the largest frame has %d bytes, want 1514: full, and no fragment needed", largest)
	}
}

// An established packet costs one look-up per node and direction: it is
// found at the first one, and our programs put the tunnel header on and take
// it off. Every packet is accounted for, and no counter moves besides.
func TestFastPath(t *testing.T) {
	w := shared(t)
	families(t, func(t *testing.T, v6 bool) {
		for _, c := range []struct {
			proto, addr string
			peer        *cluster.Pod
		}{
			{"tcp", "pod", w.remote}, {"udp", "pod", w.remote}, {"tcp", "service", w.remote}, {"udp", "service", w.remote},
			{"tcp", "pod", w.local}, {"udp", "service", w.local},
		} {
			t.Run(c.proto+" "+c.addr+" "+c.peer.PodName, func(t *testing.T) {
				ctx := within(t, 60*time.Second)
				target := at(ip(c.peer, v6), cluster.ServerPort).String()
				if c.addr == "service" {
					ips := []string{"10.98.5.1", "fd00:10:98::501"}
					target = vip(pick(v6, ips[0], ips[1]), 80)
					w.put(t, clusterIP("fast", ips, bothPorts(80)...))
					w.put(t, slicesFor("fast", "fast", bothSlicePorts(cluster.ServerPort), c.peer)...)
					w.inForce(t, ctx, c.proto, target, atAll(v6, c.peer)...)
				}
				stream, err := w.client.Stream(ctx, target, "-proto", c.proto, "-interval", "2ms")
				ok(t, err)
				progress(t, ctx, stream, 5) // established
				// Generations may still move for what earlier services
				// left, which the agents hear of when they do: then once
				// more. They come to rest.
				const attempts = 20
				for i := range attempts {
					if !w.straight(t, ctx, stream, c.peer, protoNumber(c.proto), v6, i < attempts-1) {
						break
					}
				}
				_, err = stream.Stop(ctx)
				ok(t, err)
			})
		}
	})
}

// straight counts a stretch of an established flow.
//
// It asks to be called again, and says nothing else, if a packet was decided
// anew meanwhile and again allows for it.
func (w *world) straight(t *testing.T, ctx context.Context, stream *cluster.Stream, peer *cluster.Pod, proto uint8, v6, again bool) bool {
	t.Helper()
	ok(t, pause(ctx, stream))
	start := w.still(t, ctx, peer)
	seen, err := w.client.Capture(ctx, "eth0")
	ok(t, err)
	defer seen.Close()
	ok(t, resume(stream))
	progress(t, ctx, stream, 100)
	ok(t, pause(ctx, stream))
	end := w.still(t, ctx, peer)
	// A marker: when the capture has it, it has all that came before.
	gateway := nodeAddr(w.a, false)
	_, err = w.client.Ping(ctx, gateway.String())
	ok(t, err)
	_, err = seen.Find(ctx, "closing ping", func(p *cluster.Packet) bool { return p.Outer != nil && p.Outer.Src == gateway && p.Outer.Proto == 1 })
	ok(t, err)
	packets := seen.Packets()
	ok(t, resume(stream))
	var out, in uint64
	for _, p := range packets {
		if l := p.Last(); l == nil || l.Proto != proto {
			continue
		}
		if p.Outgoing {
			out++
		} else {
			in++
		}
	}
	if out < 50 || in < 50 {
		t.Fatalf("%d packets out, %d in", out, in)
	}
	// What each hook has to have counted.
	hooks := map[*cluster.Node]map[counterKey]uint64{
		w.a: {{"flow_hit", "from_pod", v6}: out, {"fwd_encap", "from_pod", v6}: out, {"flow_hit", "from_netdev", v6}: in, {"fwd_decap", "from_netdev", v6}: in},
		w.b: {{"flow_hit", "from_netdev", v6}: out, {"fwd_decap", "from_netdev", v6}: out, {"flow_hit", "from_pod", v6}: in, {"fwd_encap", "from_pod", v6}: in},
	}
	if peer.Node == w.a {
		hooks = map[*cluster.Node]map[counterKey]uint64{
			w.a: {{"flow_hit", "from_pod", v6}: out + in, {"fwd_local", "from_pod", v6}: out + in}, w.b: {},
		}
	}
	for n := range hooks {
		if got := flowCounters(end[n].since(start[n])); again && (got[counterKey{"flow_stale", "from_pod", v6}] != 0 || got[counterKey{"flow_stale", "from_netdev", v6}] != 0) {
			return true
		}
	}
	for n, want := range hooks {
		got := flowCounters(end[n].since(start[n]))
		// The stack's own word to the link of the tunnel's device.
		delete(got, counterKey{"drop_multicast", "to_overlay", true})
		for k, v := range want {
			if got[k] != v {
				t.Errorf("%s: %d packets out and %d in, but %s at %s counted %d", n.NodeName, out, in, k.reason, k.hook, got[k])
			}
			delete(got, k)
		}
		if len(got) > 0 {
			t.Errorf("%s: counted besides: %v", n.NodeName, got)
		}
	}
	return false
}

// still waits until a paused flow has come to rest: neither side of a TCP
// connection waits for an acknowledgement (the last one is delayed), and no
// counter moves, that of each node having been read before and after its host
// heard an answer from outside.
func (w *world) still(t *testing.T, ctx context.Context, peer *cluster.Pod) map[*cluster.Node]counters {
	t.Helper()
	last := map[*cluster.Node]counters{}
	var why error
	eventually(t, ctx, func() (err error) {
		defer func() {
			if ctx.Err() == nil {
				why = err // the last look that was not cut short
			} else if err != nil {
				err = why
			}
		}()
		for _, p := range []*cluster.Pod{w.client, peer} {
			out, err := p.Exec(ctx, "ss", "-tinH")
			if err != nil || strings.Contains(out, "unacked:") {
				return fmt.Errorf("%s waits for an acknowledgement (%w): %s", p.PodName, err, out)
			}
		}
		moved := false
		for _, n := range w.Nodes {
			c := readCounters(t, n)
			moved = moved || last[n] == nil || len(flowCounters(c.since(last[n]))) > 0
			last[n] = c
		}
		for _, n := range w.Nodes {
			if _, err := n.Ping(ctx, "172.31.0.1"); err != nil {
				return err
			}
		}
		if moved {
			return errors.New("packets are still on their way")
		}
		return nil
	})
	return last
}

// flowCounters leaves out what passes by on every link, and what the agent
// removes of flows that other cases left.
func flowCounters(c counters) counters {
	out := counters{}
	for k, v := range c {
		if k.reason != "pass" && k.reason != "flow_swept" {
			out[k] = v
		}
	}
	return out
}
