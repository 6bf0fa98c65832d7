package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// eachFlow calls fn with every entry that has this port on a node, in the
// table it is in.
func eachFlow(t *testing.T, n *cluster.Node, number uint16, fn func(m maps.Map[maps.FlowKey, maps.Flow], k maps.FlowKey, f maps.Flow)) {
	t.Helper()
	set := mapsOf(t, n)
	for _, m := range []maps.Map[maps.FlowKey, maps.Flow]{set.Flows, set.FlowsNew} {
		all, err := m.Dump()
		ok(t, err)
		for k, f := range all {
			if k.Sport == number || k.Dport == number {
				fn(m, k, f)
			}
		}
	}
}

// forget removes the flows of a port on both nodes.
func (w *world) forget(t *testing.T, number uint16) {
	t.Helper()
	removed := 0
	for _, n := range w.Nodes {
		eachFlow(t, n, number, func(m maps.Map[maps.FlowKey, maps.Flow], k maps.FlowKey, _ maps.Flow) {
			ok(t, m.Delete(k))
			removed++
		})
	}
	if removed == 0 || removed%2 != 0 { // a flow has two where it passes, and no copies
		t.Errorf("%d entries were there to remove, want two a node and flow", removed)
	}
}

// outlive makes the flows of a port on both nodes as old as they can get.
func (w *world) outlive(t *testing.T, number uint16) {
	t.Helper()
	var ts unix.Timespec
	ok(t, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts))
	aged := 0
	for _, n := range w.Nodes {
		eachFlow(t, n, number, func(m maps.Map[maps.FlowKey, maps.Flow], k maps.FlowKey, f maps.Flow) {
			// Longer than any timeout; it may wrap, as the sum does.
			f.LastSeen = uint64(ts.Nano()) - uint64(86401*time.Second)
			ok(t, m.Put(k, f))
			aged++
		})
	}
	if aged < 4 {
		t.Errorf("only %d entries were there to age", aged)
	}
}

// pair is an established TCP connection with both ends in hand.
func pair(ctx context.Context, t *testing.T, from, to *cluster.Pod, local, listenAt, target string) (client, server net.Conn) {
	t.Helper()
	l := listen(t, to.Netns, listenAt, nil)
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	client, err := dial(ctx, from.Netns, local, target, nil)
	ok(t, err)
	server = <-accepted
	t.Cleanup(func() {
		// Reset: the next connection uses the same ports.
		for _, c := range []net.Conn{client, server} {
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
	})
	return client, server
}

// say carries a message from one end to the other.
func say(from, to net.Conn, what string) error {
	if err := errors.Join(from.SetDeadline(soon()), to.SetDeadline(soon())); err != nil {
		return err
	}
	if _, err := io.WriteString(from, what); err != nil {
		return err
	}
	buf := make([]byte, len(what))
	if _, err := io.ReadFull(to, buf); err != nil {
		return fmt.Errorf("%q: %w", what, err)
	}
	if string(buf) != what {
		return fmt.Errorf("%q arrived as %q", what, buf)
	}
	return nil
}

// isReset says that the peer, or the network, ended the connection.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// Flows that vanish from the tables under running connections (N15), and
// flows that are outlived (N17): between pods both go on, whoever speaks
// first. By a service, the client's word goes on or is reset, and the
// server's too; nobody waits for ever.
func TestFlowsThatVanish(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	w.service(t, ctx, "vanish", "10.98.0.15", "fd00:10:98::15", w.remote)
	w.service(t, ctx, "vanish2", "10.98.0.16", "fd00:10:98::16", w.remote, w.other)
	for _, how := range []struct {
		name string
		do   func(*testing.T, uint16)
	}{{"removed", w.forget}, {"outlived", w.outlive}} {
		for _, f := range families {
			t.Run(how.name+" "+f.name, func(t *testing.T) {
				at := port(f.of(w.remote), serverPort)
				for _, serverFirst := range []bool{false, true} {
					number := w.port()
					c, s := pair(ctx, t, w.client, w.remote, port(f.of(w.client), number), at, at)
					ok(t, say(c, s, "hello"))
					ok(t, say(s, c, "hello"))
					ok(t, say(c, s, "hello"))
					how.do(t, number)
					first, second := c, s
					if serverFirst {
						first, second = s, c
					}
					for range 3 {
						ok(t, say(first, second, "goes on"))
						ok(t, say(second, first, "goes on"))
					}
				}
				// By the service with one backend.
				number := w.port()
				c, s := pair(ctx, t, w.client, w.remote, port(f.of(w.client), number), at, port(f.pick("10.98.0.15", "fd00:10:98::15"), 80))
				// The server's word comes last: it carries its acknowledgement,
				// which would be the server speaking first if it came later.
				ok(t, say(c, s, "hello"))
				ok(t, say(s, c, "hello"))
				how.do(t, number)
				ok(t, say(c, s, "goes on"))
				ok(t, say(s, c, "goes on"))
				// The server speaks first: to the client that is a stranger,
				// whom it resets; its own next word is answered or reset.
				how.do(t, number)
				serverErr := say(s, c, "anybody there")
				clientErr := say(c, s, "hello")
				if serverErr == nil && clientErr != nil || clientErr == nil && serverErr != nil || clientErr != nil && !isReset(clientErr) {
					t.Errorf("server first: server %v, client %v", serverErr, clientErr)
				}
				if serverErr != nil {
					// The server has heard of it, too.
					if err := say(s, c, "x"); !isReset(err) {
						t.Errorf("the server still believes: %v", err)
					}
				}
				// UDP by the service: the next datagram is answered.
				number = w.port()
				echo := echoUDP(t, w.remote.Netns, at)
				u := udp(t, w.client.Netns, port(f.of(w.client), number), port(f.pick("10.98.0.15", "fd00:10:98::15"), 80), nil)
				ok(t, talk(u, "one"))
				ok(t, talk(u, "two"))
				how.do(t, number)
				ok(t, talk(u, "three"))
				ok(t, echo.Close())
			})
			// Of two backends, the packet may meet the wrong one: a reset.
			t.Run(how.name+" two backends "+f.name, func(t *testing.T) {
				resets := 0
				for range 8 {
					number := w.port()
					c, s := w.pairOfTwo(ctx, t, f, number)
					ok(t, say(c, s, "hello"))
					ok(t, say(s, c, "hello"))
					how.do(t, number)
					go func() { _, _ = io.Copy(s, s) }()
					if err := talk(c, "goes on or ends"); isReset(err) {
						resets++
					} else if err != nil {
						t.Errorf("neither an answer nor a reset: %v", err)
					}
				}
				t.Logf("%d of 8 connections were reset", resets)
			})
		}
	}
}

// pairOfTwo is a pair by the service with two backends.
func (w *world) pairOfTwo(ctx context.Context, t *testing.T, f family, number uint16) (client, server net.Conn) {
	t.Helper()
	accepted := make(chan net.Conn, 2)
	for _, p := range []*cluster.Pod{w.remote, w.other} {
		l := listen(t, p.Netns, port(f.of(p), serverPort), nil)
		defer l.Close()
		go func() {
			if c, err := l.Accept(); err == nil {
				accepted <- c
			}
		}()
	}
	client, err := dial(ctx, w.client.Netns, port(f.of(w.client), number), port(f.pick("10.98.0.16", "fd00:10:98::16"), 80), nil)
	ok(t, err)
	server = <-accepted
	t.Cleanup(func() { client.Close(); server.(*net.TCPConn).SetLinger(0); server.Close() })
	return client, server
}

// A segment far outside the window of a translated flow is translated like
// any other (N15).
func TestOutOfWindowSegments(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	w.service(t, ctx, "window", "10.98.0.18", "fd00:10:98::18", w.remote)
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			number := w.port()
			vip := f.pick("10.98.0.18", "fd00:10:98::18")
			c, s := pair(ctx, t, w.client, w.remote, port(f.of(w.client), number), port(f.of(w.remote), serverPort), port(vip, 80))
			ok(t, say(c, s, "hello"))
			ok(t, say(s, c, "hello"))
			capture, err := w.remote.Capture(ctx, "eth0")
			ok(t, err)
			ok(t, raw.send(packet{
				srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: vip, sport: number, dport: 80, proto: 6,
				flags: ack | psh, seq: 0x70000000, ack: 0x60000000, payload: []byte("OUTSIDE"),
			}.frame()))
			p, err := capture.Find(ctx, "segment", func(p *cluster.Packet) bool { return bytes.Contains(p.Frame, []byte("OUTSIDE")) })
			ok(t, err)
			if p.Outer.Dst != f.of(w.remote) || p.Outer.DPort != serverPort || len(p.BadChecksums) > 0 {
				t.Errorf("arrived as %v", p)
			}
			ok(t, capture.Close())
			ok(t, say(c, s, "still here"))
			ok(t, say(s, c, "still here"))
		})
	}
}

// denyIngress isolates a pod.
func denyIngress(name string) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "deny-" + name},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"pod": name}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		},
	}
}

// isolated waits until the pod's node has put it, and its flows, under
// policy or taken it out.
func (w *world) isolated(t *testing.T, ctx context.Context, p *cluster.Pod, want bool) {
	t.Helper()
	set := mapsOf(t, p.Node)
	for _, a := range p.Addrs {
		eventually(t, ctx, func() error {
			ep, found, err := set.Endpoints.Get(maps.ToAddr(a))
			if err != nil || !found || (ep.PolicyIn != 0) != want {
				return fmt.Errorf("%v: found %v, policy %d, %v", a, found, ep.PolicyIn, err)
			}
			return nil
		})
	}
	// The round that wrote it has also moved its generation when it is over.
	code, _, err := p.Node.AgentGet(ctx, "/healthz")
	if err != nil || code != 200 {
		t.Errorf("/healthz: %d, %v", code, err)
	}
}

// A closed tuple that is used again is a new flow (N16): it is decided
// afresh, by policy too, and until then what the old one left lives on.
func TestReusedTuples(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	w.service(t, ctx, "reuse", "10.98.0.19", "fd00:10:98::19", w.remote)
	policy := denyIngress("remote")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			number := w.port()
			from, at, to := port(f.of(w.client), number), port(f.of(w.remote), serverPort), port(f.pick("10.98.0.19", "fd00:10:98::19"), 80)
			closed := func() {
				t.Helper()
				c, s := pair(ctx, t, w.client, w.remote, from, at, to)
				ok(t, say(c, s, "hello"))
				ok(t, say(s, c, "hello"))
				// The server closes first and keeps the TIME_WAIT.
				ok(t, s.Close())
				ok(t, c.SetReadDeadline(soon()))
				if _, err := c.Read(make([]byte, 1)); err != io.EOF {
					t.Fatalf("want the end: %v", err)
				}
				ok(t, c.Close())
				// All that is left on both nodes is closed, and still there.
				eventually(t, ctx, func() error {
					for _, n := range w.Nodes {
						left := 0
						var bad error
						eachFlow(t, n, number, func(_ maps.Map[maps.FlowKey, maps.Flow], k maps.FlowKey, f maps.Flow) {
							if f.Flags&8 == 0 {
								bad = fmt.Errorf("%s: %s is not confirmed", n.NodeName, maps.KeyString(k))
							}
							left++
							if !slices.Equal(maps.TCPStateNames(f.Tcp), []string{"fin_orig", "fin_reply"}) {
								bad = fmt.Errorf("%s: %s is %v", n.NodeName, maps.KeyString(k), maps.TCPStateNames(f.Tcp))
							}
						})
						if bad != nil || left != 2 {
							return fmt.Errorf("%s: %d entries, %w", n.NodeName, left, bad)
						}
					}
					return nil
				})
			}
			for i := range 3 {
				before := counters(t, w.a)
				closed()
				got := counters(t, w.a).since(before)
				taken := min(i, 1)
				got.want(t, fmt.Sprintf("connection %d", i), counts{"flow_created": 1, "flow_taken_over": taken, "flow_confirmed": 1})
			}
			// The same tuple under a policy that forbids it by now.
			ok(t, w.Manifests.Put(policy))
			w.isolated(t, ctx, w.remote, true)
			before := counters(t, w.b)
			short, cancel := context.WithTimeout(ctx, time.Second)
			c, err := dial(short, w.client.Netns, from, to, nil)
			cancel()
			if err == nil {
				c.Close()
				t.Error("a denied connection was made")
			} else if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("denied: %v", err)
			}
			if got := counters(t, w.b).since(before); got["drop_policy_ingress"] == 0 {
				t.Errorf("not for policy: %v", got)
			}
			ok(t, w.Manifests.Delete(policy))
			w.isolated(t, ctx, w.remote, false)
			closed()
		})
	}
}

// Policy reaches flows that run (P11): their packets stop at once, and the
// same flows go on when they are allowed again.
func TestPolicyReachesRunningFlows(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	w.service(t, ctx, "running", "10.98.0.20", "fd00:10:98::20", w.remote)
	policy := denyIngress("remote")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			at, to := port(f.of(w.remote), serverPort), port(f.pick("10.98.0.20", "fd00:10:98::20"), 80)
			from := port(f.of(w.client), w.port())
			c, s := pair(ctx, t, w.client, w.remote, from, at, to)
			ok(t, say(c, s, "hello"))
			ok(t, say(s, c, "hello"))
			defer echoUDP(t, w.remote.Netns, at).Close()
			u := udp(t, w.client.Netns, from, to, nil)
			ok(t, talk(u, "one"))
			ok(t, talk(u, "two"))
			capture, err := w.remote.Capture(ctx, "eth0")
			ok(t, err)
			ok(t, w.Manifests.Put(policy))
			w.isolated(t, ctx, w.remote, true)
			before := counters(t, w.b)
			ok(t, c.SetDeadline(soon()))
			_, err = io.WriteString(c, "DENIED")
			ok(t, err)
			_, err = u.Write([]byte("DENIED"))
			ok(t, err)
			eventually(t, ctx, func() error {
				if got := counters(t, w.b).since(before); got["drop_policy_ingress"] < 2 {
					return fmt.Errorf("%v", got)
				}
				return nil
			})
			if got := capture.Matching(func(p *cluster.Packet) bool { return bytes.Contains(p.Frame, []byte("DENIED")) }); len(got) > 0 {
				t.Errorf("delivered: %v", got[0])
			}
			ok(t, capture.Close())
			before = counters(t, w.a)
			ok(t, w.Manifests.Delete(policy))
			w.isolated(t, ctx, w.remote, false)
			// TCP sends it again by itself.
			buf := make([]byte, 6)
			ok(t, s.SetDeadline(soon()))
			if _, err := io.ReadFull(s, buf); err != nil || string(buf) != "DENIED" {
				t.Errorf("after the policy is gone: %q, %v", buf, err)
			}
			ok(t, say(s, c, "back"))
			ok(t, talk(u, "three"))
			if got := counters(t, w.a).since(before); got["flow_created"] != 0 {
				t.Errorf("not the same flows: %v", got)
			}
		})
	}
}

// A masqueraded connection that is forgotten (N17): a new port cannot carry it
// on. Whoever speaks is reset, and hears so; nobody waits for ever.
func TestMasqueradedFlowsThatVanish(t *testing.T) {
	w := shared(t)
	ctx := within(t, time.Minute)
	for _, f := range families {
		for _, how := range []struct {
			name string
			do   func(*testing.T, uint16)
		}{{"removed", w.forget}, {"outlived", w.outlive}} {
			for _, serverFirst := range []bool{false, true} {
				t.Run(fmt.Sprint(f.name, " ", how.name, ", server first ", serverFirst), func(t *testing.T) {
					at := port(extOf(f), 7790)
					l := listen(t, w.Ext, at, nil)
					accepted := make(chan net.Conn, 1)
					go func() {
						c, _ := l.Accept()
						accepted <- c
					}()
					c, err := dial(ctx, w.client.Netns, port(f.of(w.client), w.port()), at, nil)
					ok(t, err)
					defer c.Close()
					s := <-accepted
					defer s.Close()
					ok(t, say(c, s, "hello"))
					ok(t, say(s, c, "hello"))
					how.do(t, 7790)
					first, second := c, s
					if serverFirst {
						first, second = s, c
					}
					said, heard := nextByte(t, first), nextByte(t, second)
					_, err = io.WriteString(first, "x")
					ok(t, err)
					select {
					case err := <-heard:
						if err != nil {
							t.Errorf("who was spoken to: %v", err)
						}
						return // it goes on
					case err := <-said:
						if !isReset(err) {
							t.Errorf("who spoke first: %v, want a reset", err)
						}
					}
					_, err = io.WriteString(second, "x")
					ok(t, err)
					if err := <-heard; !isReset(err) {
						t.Errorf("the other end: %v, want a reset", err)
					}
				})
			}
		}
	}
}

// nextByte reads one, in its own time.
func nextByte(t *testing.T, c net.Conn) <-chan error {
	t.Helper()
	ok(t, c.SetDeadline(soon()))
	done := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		done <- err
	}()
	return done
}
