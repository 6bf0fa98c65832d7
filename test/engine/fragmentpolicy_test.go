package engine

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// A denied datagram is denied in any order of its fragments, at once on a
// flow that runs, and passes when it is allowed again.
func TestPolicyJudgesFragments(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	policy := denyIngress("local")
	t.Cleanup(func() { _ = w.Manifests.Delete(policy) })
	id := uint32(5000)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			server := udp(t, w.local.Netns, port(f.of(w.local), serverPort), "", nil)
			defer server.Close()
			p := packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: f.of(w.local), sport: w.port(), dport: serverPort}
			send := func(fresh, back bool) map[string]bool {
				t.Helper()
				if fresh {
					p.sport = w.port()
				}
				id++
				payload, cut := cutUDP(p, id, 4000)
				if back {
					cut = reversed(cut)
				}
				for _, frame := range cut {
					ok(t, raw.send(frame))
				}
				return map[string]bool{string(payload): true}
			}
			pass := func(fresh, back bool) {
				t.Helper()
				before := counters(t, w.a)
				if !arrives(t, server, send(fresh, back), f.of(w.client)) {
					t.Fatalf("new flow %v, reversed %v: nothing arrives; %v", fresh, back, counters(t, w.a).since(before))
				}
			}
			pass(true, false)
			ok(t, w.Manifests.Put(policy))
			w.isolated(t, ctx, w.local, true)
			for _, fresh := range []bool{false, true, true} {
				before := counters(t, w.a)
				send(fresh, false)
				// Of a flow that was allowed, all know why.
				denied := 3
				if fresh {
					denied = 1
				}
				until(t, w.a, before, 3, "drop_fragment/from_pod", "drop_policy_ingress/from_pod")
				counters(t, w.a).since(before).want(t, "denied", counts{"drop_policy_ingress/from_pod": denied, "fwd_local": 0})
				before = counters(t, w.a)
				send(fresh, true)
				// Behind the reassembly it is what it is in order.
				until(t, w.a, before, 3, "drop_fragment/from_pod", "drop_policy_ingress/from_pod")
				counters(t, w.a).since(before).want(t, "denied, reversed", counts{"fragment_reassembly/from_pod": 3, "drop_policy_ingress/from_pod": denied, "fwd_local": 0})
			}
			ok(t, w.Manifests.Delete(policy))
			w.isolated(t, ctx, w.local, false)
			pass(false, false)
			pass(false, true)
			pass(true, true)
		})
	}
}

// What is known of a datagram is known of the place that its first fragment
// came from: nobody else adds to it, in whatever order.
func TestSpoofedFragments(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	raw, gw := rawSocket(t, w.client.Netns, "eth0"), hostMAC(t, w.client)
	pod, podGW := rawSocket(t, w.local.Netns, "eth0"), hostMAC(t, w.local)
	wire, nodeMAC := rawSocket(t, w.Ext, "eth0"), macOf(t, w.b.Netns, "eth0")
	peer := w.newVTEP(ctx, t, "fragments", "172.31.0.6/24", w.b)
	id := uint32(9000)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			server := udp(t, w.remote.Netns, port(f.of(w.remote), serverPort), "", nil)
			defer server.Close()
			for _, back := range []bool{false, true} {
				id++
				p := packet{srcMAC: raw.mac, dstMAC: gw, src: f.of(w.client), dst: f.of(w.remote), sport: w.port(), dport: serverPort}
				payload, cut := cutUDP(p, id, 4000)
				lie := p
				lie.srcMAC, lie.dstMAC = pod.mac, podGW
				_, podLie := cutUDP(lie, id, 4008)
				lie.dstMAC = nodeMAC
				_, wireLie := cutUDP(lie, id, 4008)
				if back {
					cut = reversed(cut)
				}
				before, beforeB := counters(t, w.a), counters(t, w.b)
				ok(t, raw.send(cut[0]))
				for i := range podLie {
					ok(t, pod.send(podLie[len(podLie)-1-i]))
					ok(t, wire.send(wireLie[len(wireLie)-1-i]))
					inner := slices.Clone(podLie[len(podLie)-1-i])
					copy(inner, tunnelMAC(w.b))
					_, err := peer.WriteToUDPAddrPort(vxlan(inner), netip.AddrPortFrom(nodeAddr(families[0], w.b), 4789))
					ok(t, err)
				}
				for hook, n := range map[string]*cluster.Node{"from_pod": w.a, "from_netdev": w.b, "from_overlay": w.b} {
					b := beforeB
					if n == w.a {
						b = before
					}
					until(t, n, b, 3, "drop_spoofed_source/"+hook, "drop_spoofed_flow/"+hook)
				}
				for _, frame := range cut[1:] {
					ok(t, raw.send(frame))
				}
				if !arrives(t, server, map[string]bool{string(payload): true}, f.of(w.client)) {
					t.Fatalf("reversed %v: nothing arrives; node-a %v, node-b %v", back, counters(t, w.a).since(before), counters(t, w.b).since(beforeB))
				}
			}
		})
	}
}

func tunnelMAC(n *cluster.Node) net.HardwareAddr { return tunnel.MAC(n.Config.Addrs[0].Addr()) }
