package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/packet/parts"
)

func (c *checks) all(ctx context.Context, cgroup string) {
	w := c.w
	c.do("parts", loadParts)
	c.do("attached", w.attached)
	c.do("local", func() error { return each(w.checkLocal) })
	c.do("service", func() error { return each(w.checkService) })
	c.do("refused", func() error { return each(w.checkRefused) })
	c.do("policy", func() error { return each(w.checkPolicy) })
	c.do("stale", func() error { return each(w.checkStale) })
	c.do("host", func() error { return each(w.checkHost) })
	c.do("sockets", func() error { return w.checkSockets(ctx, cgroup) })
	c.do("tunnel-by-device", func() error { return each(func(v6 bool) error { return w.checkTunnel(v6, false) }) })
	if c.do("header", func() error { return w.useHeader(true) }) {
		c.do("tunnel-by-header", func() error { return each(func(v6 bool) error { return w.checkTunnel(v6, true) }) })
		c.do("host-by-header", func() error { return each(w.checkHost) })
	}
	if c.do("ipip", func() error { return w.useIPIP(true) }) {
		c.do("tunnel-by-ipip", w.checkIPIP)
		c.do("host-by-ipip", func() error { return each(func(v6 bool) error { return w.checkHostBy(v6, !v6) }) })
		if c.do("header-again", func() error { return w.useIPIP(false) }) {
			c.do("tunnel-by-header-again", func() error { return each(func(v6 bool) error { return w.checkTunnel(v6, true) }) })
		}
	}
	if c.do("limited", func() error { return w.limit(ctx) }) {
		c.do("local-limited", func() error { return each(w.checkLimited) })
	}
	c.do("replaced", func() error { return w.checkReplaced(ctx) })
	if c.do("offload-off", w.offloadOff) {
		c.do("checksums", func() error {
			return each(func(v6 bool) error {
				return errors.Join(w.checkService(v6), w.checkRefused(v6), w.checkTunnel(v6, true), w.checkHost(v6))
			})
		})
	}
	c.do("no-drops", w.noDrops)
}

// loadParts: the functions that no hook calls yet.
func loadParts() error {
	spec, err := parts.LoadParts()
	if err != nil {
		return err
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	var p parts.PartsPrograms
	if err := spec.LoadAndAssign(&p, nil); err != nil {
		return err
	}
	return p.Close()
}

// converse is a bit of everything between a pod and an address.
func (s *space) converse(to netip.Addr, port uint16) error {
	at := netip.AddrPortFrom(to, port)
	return errors.Join(s.tcpEcho(at, 300), s.udpEcho(at, 5, 1000))
}

// Of five datagrams each way, one after the other, the first request is
// unknown, its reply and the second request find the flow unconfirmed, and
// the rest is established.
const (
	rounds      = 5
	established = 2*rounds - 3
)

func (w *world) checkLocal(v6 bool) error {
	to := w.local.ip(v6)
	udp, err := w.a.growth(func() error { return w.client.udpEcho(netip.AddrPortFrom(to, podPort), rounds, 1000) })
	if err != nil {
		return err
	}
	icmp, err := w.a.growth(func() error { return w.client.ping(to, rounds) })
	if err != nil {
		return err
	}
	tcp, err := w.a.growth(func() error { return w.client.tcpEcho(netip.AddrPortFrom(to, podPort), 1<<20) })
	if err != nil {
		return err
	}
	refused, err := w.a.growth(func() error { return w.client.refused(netip.AddrPortFrom(to, closed)) })
	if err != nil {
		return err
	}
	logf("local %s: UDP%v; TCP%v", family(v6), udp, tcp)
	return errors.Join(
		udp.want(1, bpf.DpPwReasonPW_FLOW_MISS, fromPod, v6),
		udp.want(1, bpf.DpPwReasonPW_FLOW_CREATED, fromPod, v6),
		udp.want(2, bpf.DpPwReasonPW_FLOW_HIT_NEW, fromPod, v6),
		udp.want(1, bpf.DpPwReasonPW_FLOW_CONFIRMED, fromPod, v6),
		udp.want(established, bpf.DpPwReasonPW_FLOW_HIT, fromPod, v6),
		udp.want(2*rounds, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6),
		// ICMP never confirms a flow.
		icmp.want(2*rounds-1, bpf.DpPwReasonPW_FLOW_HIT_NEW, fromPod, v6),
		icmp.want(2*rounds, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6),
		tcp.want(1, bpf.DpPwReasonPW_FLOW_CONFIRMED, fromPod, v6),
		tcp.want(-20, bpf.DpPwReasonPW_FLOW_HIT, fromPod, v6),
		// The datagram and the error about it.
		refused.want(2, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6),
	)
}

func (w *world) checkService(v6 bool) error {
	at := netip.AddrPortFrom(localService.ip(v6), servicePort)
	udp, err := w.a.growth(func() error { return w.client.udpEcho(at, rounds, 1000) })
	if err != nil {
		return err
	}
	tcp, err := w.a.growth(func() error { return w.client.tcpEcho(at, 1<<20) })
	if err != nil {
		return err
	}
	return errors.Join(
		udp.want(established, bpf.DpPwReasonPW_FLOW_HIT, fromPod, v6),
		udp.want(2*rounds, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6),
		tcp.want(-20, bpf.DpPwReasonPW_FLOW_HIT, fromPod, v6),
		w.client.converse(remoteService.ip(v6), servicePort),
		// In fragments, by every place that they are made or followed at.
		w.client.udpEcho(at, 2, 5000),
		w.client.udpEcho(netip.AddrPortFrom(remoteService.ip(v6), servicePort), 2, 5000),
		w.a.udpEcho(netip.AddrPortFrom(remoteService.ip(v6), servicePort), 2, 5000),
		w.a.udpEcho(netip.AddrPortFrom(w.local.ip(v6), podPort), 2, 5000),
		w.client.udpEcho(netip.AddrPortFrom(w.b.ip(v6), podPort), 2, 5000),
	)
}

// checkRefused calls a port that a service lacks, from a pod and the node.
func (w *world) checkRefused(v6 bool) error {
	at := netip.AddrPortFrom(localService.ip(v6), closed)
	grown, err := w.a.growth(func() error {
		return errors.Join(w.client.refused(at), w.client.refusedTCP(at), w.a.refused(at), w.a.refusedTCP(at))
	})
	if err != nil {
		return err
	}
	return errors.Join(
		grown.want(2, bpf.DpPwReasonPW_REFUSED, fromPod, v6),
		grown.want(2, bpf.DpPwReasonPW_REFUSED, toOverlay, v6),
		grown.want(2, bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT, fromPod, v6),
		grown.want(2, bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT, toOverlay, v6))
}

// checkPolicy isolates the local pod: only podPort is allowed.
func (w *world) checkPolicy(v6 bool) error {
	m, addr := w.a.maps(), maps.ToAddr(w.local.ip(v6))
	open, _, err := m.Endpoints.Get(addr)
	if err != nil {
		return err
	}
	isolated := open
	isolated.PolicyIn = 7
	allow := maps.PolicyKey{
		Table: 7, Identity: maps.IdentityPod, Port: podPort, Proto: maps.ProtoUDP, Kind: maps.PolicyPort,
	}
	err = errors.Join(
		m.Policy.Put(allow, maps.PolicyEntry{Rule: 1, Verdict: maps.VerdictAllow}),
		m.Endpoints.Put(addr, isolated), w.a.bump(w.local.slot))
	if err != nil {
		return err
	}
	grown, err := w.a.growth(func() error {
		conn, err := w.client.dial("udp", netip.AddrPortFrom(w.local.ip(v6), denied))
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.Write([]byte("no")); err != nil {
			return err
		}
		// The same way, so that the one before has arrived when it returns.
		return w.client.udpEcho(netip.AddrPortFrom(w.local.ip(v6), podPort), 1, 64)
	})
	return errors.Join(err, w.a.do(func() error { return w.explained(v6) }), m.Endpoints.Put(addr, open), w.a.bump(w.local.slot),
		grown.want(1, bpf.DpPwReasonPW_DROP_POLICY_INGRESS, fromPod, v6),
		grown.want(2, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6))
}

// explained: the denial was told of, and a question has it for an answer.
func (w *world) explained(v6 bool) error {
	asker, err := maps.OpenAsker(filepath.Join(w.a.bpffs, "programs"))
	if err != nil {
		return err
	}
	defer asker.Close()
	key := maps.FlowKey{Src: maps.ToAddr(w.client.ip(v6)), Dst: maps.ToAddr(w.local.ip(v6)), Proto: maps.ProtoUDP}
	for port, want := range map[uint16]maps.AskHalf{
		denied:  {Table: 7, Identity: maps.IdentityPod, Verdict: maps.VerdictDeny},
		podPort: {Table: 7, Identity: maps.IdentityPod, Verdict: maps.VerdictAllow, Rule: 1},
	} {
		key.Dport = port
		if got, err := asker.Ask(maps.Ask{Key: key}); err != nil || got.Ingress != want {
			return errors.Join(err, fmt.Errorf("asked about port %d: %+v, want %+v", port, got, want))
		}
	}
	events, err := w.a.maps().Events.Open()
	if err != nil {
		return err
	}
	defer events.Close()
	events.SetDeadline(time.Now())
	for {
		ev, err := events.Read()
		if err != nil {
			return fmt.Errorf("of the denial nobody was told: %w", err)
		}
		if ev.Reason == uint32(maps.ReasonPolicyIngress) && ev.Key.Src == key.Src && ev.Dst == key.Dst && ev.Dport == denied && ev.Table == 7 {
			return nil
		}
	}
}

// checkStale moves a generation under an established flow.
func (w *world) checkStale(v6 bool) error {
	conn, err := w.client.dial("udp", netip.AddrPortFrom(w.local.ip(v6), podPort))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := datagrams(conn, rounds, 64); err != nil {
		return err
	}
	if err := w.a.bump(w.local.slot); err != nil {
		return err
	}
	grown, err := w.a.growth(func() error { return datagrams(conn, rounds, 64) })
	if err != nil {
		return err
	}
	return errors.Join(
		grown.want(1, bpf.DpPwReasonPW_FLOW_STALE, fromPod, v6),
		grown.want(0, bpf.DpPwReasonPW_FLOW_MISS, fromPod, v6),
		grown.want(2*rounds, bpf.DpPwReasonPW_FWD_LOCAL, fromPod, v6))
}

// checkHost lets a process of the node speak to pods and services, and pods
// to processes of both nodes.
func (w *world) checkHost(v6 bool) error { return w.checkHostBy(v6, false) }

// checkHostBy: answers of pods there come by the tunnel's device, or in IPv4
// alone.
func (w *world) checkHostBy(v6, ipip bool) error {
	back := fromOverlay
	if ipip {
		back = fromNetdev
	}
	grown, err := w.a.growth(func() error {
		return errors.Join(
			w.a.converse(w.local.ip(v6), podPort), w.a.ping(w.local.ip(v6), 2),
			w.a.converse(w.remote.ip(v6), podPort), w.a.ping(w.remote.ip(v6), 2),
			w.a.converse(remoteService.ip(v6), servicePort),
			w.client.converse(w.a.ip(v6), podPort), w.client.ping(w.a.ip(v6), 2),
			w.client.converse(w.b.ip(v6), podPort),
			// NodePorts, to a pod here and to one there: of the host itself by
			// lo, of another node translated where they are called.
			w.a.converse(w.a.ip(v6), nodePort+1), w.a.converse(w.a.ip(v6), nodePort+2),
			w.b.converse(w.a.ip(v6), nodePort+1), w.b.converse(w.a.ip(v6), nodePort+2),
			w.client.converse(w.b.ip(v6), nodePort+2),
		)
	})
	if err != nil {
		return err
	}
	return errors.Join(
		grown.want(-10, bpf.DpPwReasonPW_FWD_LOCAL, toPod, v6),
		grown.want(-20, bpf.DpPwReasonPW_FWD_TUNNEL, toOverlay, v6),
		grown.want(-10, bpf.DpPwReasonPW_FWD_HOST, fromPod, v6),
		grown.want(-10, bpf.DpPwReasonPW_FWD_HOST, back, v6),
		grown.want(-10, bpf.DpPwReasonPW_FWD_LOCAL, bpf.DpPwHookPW_TO_LO, v6),
		grown.want(-10, bpf.DpPwReasonPW_FWD_TUNNEL, bpf.DpPwHookPW_TO_LO, v6),
		grown.want(-5, bpf.DpPwReasonPW_FWD_LOCAL, fromNetdev, v6),
	)
}

// checkTunnel crosses to the other node: through the tunnel device, or with
// the header that the programs put on and take off.
func (w *world) checkTunnel(v6, own bool) error {
	at := netip.AddrPortFrom(w.remote.ip(v6), podPort)
	var far counters
	near, err := w.a.growth(func() (err error) {
		far, err = w.b.growth(func() error {
			return errors.Join(w.client.udpEcho(at, rounds, 1400), w.client.ping(at.Addr(), rounds))
		})
		return err
	})
	if err != nil {
		return err
	}
	stream, err := w.a.growth(func() error {
		return errors.Join(w.client.tcpEcho(at, 1<<20), w.remote.tcpEcho(netip.AddrPortFrom(w.client.ip(v6), podPort), 1<<20))
	})
	if err != nil {
		return err
	}
	if err := w.client.refused(netip.AddrPortFrom(w.remote.ip(v6), closed)); err != nil {
		return err
	}
	logf("tunnel %s, own header %v: near%v; far%v; streams%v", family(v6), own, near, far, stream)
	// Twice rounds each way. On the far side the device takes what the
	// header's way leaves.
	encap, device := 0, 2*rounds
	if own {
		encap, device = 2*rounds, 0
	}
	decap := encap
	if v6 && !w.kernel.decapsIPv6() {
		decap = 0
	}
	errs := []error{
		near.want(encap, bpf.DpPwReasonPW_FWD_ENCAP, fromPod, v6),
		near.want(device, bpf.DpPwReasonPW_FWD_TUNNEL, fromPod, v6),
		far.want(decap, bpf.DpPwReasonPW_FWD_DECAP, fromNetdev, v6),
		far.want(2*rounds-decap, bpf.DpPwReasonPW_FWD_LOCAL, fromOverlay, v6),
		near.want(rounds-2, bpf.DpPwReasonPW_FLOW_HIT, fromPod, v6),
	}
	if own {
		errs = append(errs, stream.want(-10, bpf.DpPwReasonPW_FWD_ENCAP, fromPod, v6))
		if decap != 0 {
			errs = append(errs, stream.want(-10, bpf.DpPwReasonPW_FWD_DECAP, fromNetdev, v6))
		}
	}
	return errors.Join(errs...)
}

// checkIPIP crosses in IPv4 alone, with datagrams that the kernel keeps in one
// packet, too.
func (w *world) checkIPIP() error {
	at := netip.AddrPortFrom(w.remote.ip(false), podPort)
	var far counters
	near, err := w.a.growth(func() (err error) {
		far, err = w.b.growth(func() error {
			return errors.Join(w.client.udpEcho(at, rounds, 1400), w.client.ping(at.Addr(), rounds),
				w.client.udpSegments(at, rounds, 10, 1000))
		})
		return err
	})
	if err != nil {
		return err
	}
	stream, err := w.a.growth(func() error {
		return errors.Join(w.client.tcpEcho(at, 1<<20), w.remote.tcpEcho(netip.AddrPortFrom(w.client.ip(false), podPort), 1<<20))
	})
	if err != nil {
		return err
	}
	logf("ipip: near%v; far%v; streams%v", near, far, stream)
	return errors.Join(
		near.want(3*rounds, bpf.DpPwReasonPW_FWD_IPIP, fromPod, false),
		near.want(0, bpf.DpPwReasonPW_FWD_TUNNEL, fromPod, false),
		far.want(3*rounds, bpf.DpPwReasonPW_FWD_DECAP, fromNetdev, false),
		far.want(0, bpf.DpPwReasonPW_FWD_LOCAL, fromOverlay, false),
		stream.want(-10, bpf.DpPwReasonPW_FWD_IPIP, fromPod, false),
		stream.want(-10, bpf.DpPwReasonPW_FWD_DECAP, fromNetdev, false))
}

// checkReplaced loads node a's datapath again over what is pinned, as an
// agent that starts anew does, while connections go on.
func (w *world) checkReplaced(ctx context.Context) error {
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for _, v6 := range []bool{false, true} {
		for _, to := range []netip.AddrPort{
			netip.AddrPortFrom(localService.ip(v6), servicePort), netip.AddrPortFrom(w.remote.ip(v6), podPort),
		} {
			conn, err := w.client.dial("tcp", to)
			if err != nil {
				return err
			}
			conns = append(conns, conn)
			if err := echoOver(conn, 2000); err != nil {
				return err
			}
		}
	}
	before, err := w.programs()
	if err != nil {
		return err
	}
	old := w.a.dp
	if err := w.a.do(func() error { return errors.Join(old.Close(), w.a.start(ctx)) }); err != nil {
		return err
	}
	if err := w.attached(); err != nil {
		return err
	}
	after, err := w.programs()
	if err != nil {
		return err
	}
	for hook, ids := range before {
		if hook.node == w.a.name && after[hook][0] == ids[0] {
			return fmt.Errorf("%v still runs the old program %d", hook, ids[0])
		}
	}
	for _, conn := range conns {
		if err := echoOver(conn, 20000); err != nil {
			return fmt.Errorf("a connection from before: %w", err)
		}
		if err := finish(conn); err != nil {
			return err
		}
	}
	return nil
}
