package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// whole makes a socket's datagrams be sent in one piece or not at all.
func whole(v6 bool) control {
	return func(fd int) error {
		if v6 {
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	}
}

// shortLived gives a socket's datagrams so many hops to live, and the socket the
// word of whoever lets them end.
func shortLived(v6 bool, hops int) control {
	level, ttl, told := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_RECVERR
	if v6 {
		level, ttl, told = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR
	}
	return func(fd int) error {
		if err := unix.SetsockoptInt(fd, level, ttl, hops); err != nil {
			return err
		}
		return unix.SetsockoptInt(fd, level, told, 1)
	}
}

// payloadOf is what a UDP datagram carries in an IP packet of that size.
func (f family) payloadOf(mtu int) int {
	if f.name == "ipv6" {
		return mtu - 48
	}
	return mtu - 28
}

// exchangeBulk sends n bytes to an echo on a connection and wants them back.
func exchangeBulk(c net.Conn, n int) error {
	out, in := bytesOf(3, n), make([]byte, n)
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() { _, err := c.Write(out); sent <- err }()
	if _, err := io.ReadFull(c, in); err != nil {
		return err
	}
	if !bytes.Equal(in, out) {
		return errors.New("other bytes came back")
	}
	return <-sent
}

// The MTU of the nodes' devices changes while everything runs (N1, N12): the
// tunnel's device, pods that exist and new ones follow, down and up; running
// connections go on, datagrams as large as the MTU pass, and nothing is ever
// fragmented on the underlay. An agent that was away catches up.
func TestMTUChanges(t *testing.T) {
	t.Run("vxlan", func(t *testing.T) { mtuChanges(t, tunnel.ModeVXLAN, 1400, 1500, 9000) })
	// IPv6 has less room than IPv4 here, which its default route says.
	t.Run("ipip", func(t *testing.T) { mtuChanges(t, tunnel.ModeIPIP, 1400, 9000) })
}

func mtuChanges(t *testing.T, mode tunnel.Mode, devices ...int) {
	w := own(t, cluster.Config{MTU: 9000, AgentArgs: []string{"--routing-mode", string(mode)}})
	ctx := within(t, 4*time.Minute)
	device := func(mtu int) {
		for _, n := range w.Nodes {
			ok(t, run(ctx, n.Netns, fmt.Sprintf("ip link set eth0 mtu %d", mtu)))
		}
	}
	device(1500)
	ok(t, w.start(ctx))
	tap, err := w.Tap(ctx)
	ok(t, err)
	type running struct {
		f    family
		conn net.Conn
		stop chan struct{}
		done chan error
	}
	var all []*running
	for _, f := range families {
		at := port(f.of(w.remote), serverPort)
		echoTCP(t, w.remote.Netns, at)
		echoUDP(t, w.remote.Netns, at)
		r := &running{f: f, stop: make(chan struct{}), done: make(chan error, 1)}
		r.conn, err = dial(ctx, w.client.Netns, "", at, nil)
		ok(t, err)
		defer r.conn.Close()
		busy, err := dial(ctx, w.client.Netns, "", at, nil)
		ok(t, err)
		defer busy.Close()
		go func() {
			for {
				select {
				case <-r.stop:
					r.done <- nil
					return
				default:
				}
				if err := exchangeBulk(busy, 1<<17); err != nil {
					r.done <- err
					return
				}
			}
		}()
		all = append(all, r)
	}
	follow := func(onDevice int) {
		t.Helper()
		mtu := mode.MTU(onDevice, w.a.Config.Addrs[0].Addr())
		for _, p := range w.plannedPods() {
			eventually(t, ctx, func() error { return podFollows(ctx, p, mtu) })
			if err := p.Check(ctx); err != nil {
				t.Errorf("CHECK of %s with %+v: %v", p.PodName, mtu, err)
			}
		}
		for _, n := range w.Nodes {
			eventually(t, ctx, func() error { return hasMTU(ctx, n.Netns, "podweir.vxlan", mtu.Tunnel) })
		}
		for _, r := range all {
			at, most := port(r.f.of(w.remote), serverPort), mtu.Pod
			if r.f.name == "ipv6" {
				most = mtu.Pod6
			}
			if err := exchangeBulk(r.conn, 1<<20); err != nil {
				t.Errorf("%s, %+v, the connection of before: %v", r.f.name, mtu, err)
			}
			u := udp(t, w.client.Netns, "", at, whole(r.f.name == "ipv6"))
			datagrams(t, u, 1, r.f.payloadOf(most))
			if _, err := u.Write(make([]byte, r.f.payloadOf(most+1))); !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("%s, %+v, a datagram that is one byte larger: %v", r.f.name, mtu, err)
			}
			// One hop too far, and its sender is told: by the other node, which
			// has just taken it out of the header.
			far := udp(t, w.client.Netns, "", at, shortLived(r.f.name == "ipv6", 2))
			_, err := far.Write(make([]byte, r.f.payloadOf(most)))
			ok(t, err)
			ok(t, far.SetReadDeadline(soon()))
			if n, err := far.Read(make([]byte, 1)); !errors.Is(err, unix.EHOSTUNREACH) {
				t.Errorf("%s, %+v, a datagram whose time ends: %d, %v", r.f.name, mtu, n, err)
			}
			fresh, err := dial(ctx, w.client.Netns, "", at, nil)
			ok(t, err)
			if err := exchangeBulk(fresh, 1<<18); err != nil {
				t.Errorf("%s, %+v, a new connection: %v", r.f.name, mtu, err)
			}
			ok(t, fresh.Close())
		}
	}
	follow(1500)
	for _, mtu := range devices {
		device(mtu)
		follow(mtu)
	}
	late := podObject("late", "node-a", "10.244.80.90", "fd00:10:244:50::90")
	ok(t, w.Manifests.Put(late))
	p, err := w.AddPod(ctx, late)
	ok(t, err)
	ok(t, podFollows(ctx, p, mode.MTU(9000, w.a.Config.Addrs[0].Addr())))
	ok(t, w.KillAgents(ctx))
	device(1400)
	ok(t, w.StartAgents(ctx))
	follow(1400)
	for _, r := range all {
		close(r.stop)
		if err := <-r.done; err != nil {
			t.Errorf("%s: a transfer that ran through all changes: %v", r.f.name, err)
		}
	}
	ok(t, tap.Close())
	for _, p := range tap.Matching(func(p *cluster.Packet) bool { return p.Outer != nil && (p.Outer.Fragment || p.Last().Fragment) }) {
		t.Fatalf("fragment on the underlay: %v", p)
	}
	checksumErrors(t, w.client.Netns, w.remote.Netns, w.a.Netns, w.b.Netns)
}

// podFollows: both halves of a pod's interface have the MTU, and its IPv6
// default route one of its own where that is less.
func podFollows(ctx context.Context, p *cluster.Pod, mtu tunnel.MTU) error {
	if err := hasMTU(ctx, p.Netns, "eth0", mtu.Pod); err != nil {
		return err
	}
	if err := hasMTU(ctx, p.Node.Netns, hostDevice(p), mtu.Pod); err != nil {
		return err
	}
	out, err := p.Exec(ctx, "ip", "-6", "route", "show", "default")
	if err != nil {
		return err
	}
	has := 0
	if _, text, found := strings.Cut(out, " mtu "); found {
		if _, err := fmt.Sscan(text, &has); err != nil {
			return fmt.Errorf("%s: %w", out, err)
		}
	}
	want := mtu.Pod6
	if want == mtu.Pod {
		want = 0
	}
	if has != want {
		return fmt.Errorf("%s: the IPv6 default route has an MTU of %d, want %d: %s", p.PodName, has, want, out)
	}
	return nil
}

func hasMTU(ctx context.Context, n *cluster.Netns, device string, want int) error {
	out, err := n.Exec(ctx, "ip", "link", "show", device)
	if err == nil && !strings.Contains(out, fmt.Sprintf(" mtu %d ", want)) {
		err = fmt.Errorf("%s in %s: want an MTU of %d: %s", device, n.Name, want, out)
	}
	return err
}

// distant moves a third node two routers away from the others; the link
// between the routers is narrower than the nodes' own, and neither says so.
func (w *world) distant(ctx context.Context, t *testing.T, narrow int) *cluster.Netns {
	t.Helper()
	far := w.Node("node-c")
	second := w.host(t, ctx, "router")
	for _, r := range []*cluster.Netns{w.Ext, second} {
		for key, value := range map[string]string{
			"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
			"net/ipv4/icmp_ratelimit": "0", "net/ipv6/icmp/ratelimit": "0",
		} {
			ok(t, r.Sysctl(key, value))
		}
	}
	ok(t, run(ctx, far.Netns, "ip link del eth0"))
	ok(t, run(ctx, w.Ext, fmt.Sprintf(`
		ip link add eth1 type veth peer name eth1 netns %[1]s
		ip link set eth1 mtu %[2]d up
		ip addr add 172.31.2.1/24 dev eth1
		ip addr add fd00:172:31:2::1/64 dev eth1 nodad`, second.Name, narrow)))
	ok(t, run(ctx, second, fmt.Sprintf(`
		ip link set eth1 mtu %[2]d up
		ip addr add 172.31.2.2/24 dev eth1
		ip addr add fd00:172:31:2::2/64 dev eth1 nodad
		ip link add eth0 type veth peer name eth0 netns %[1]s
		ip link set eth0 up
		ip addr add 172.31.1.1/24 dev eth0
		ip addr add fd00:172:31:1::1/64 dev eth0 nodad
		ip route add default via 172.31.2.1
		ip route add default via fd00:172:31:2::1`, far.Name, narrow)))
	ok(t, run(ctx, w.Ext, `
		ip route add 172.31.1.0/24 via 172.31.2.2
		ip route add fd00:172:31:1::/64 via fd00:172:31:2::2`))
	ok(t, run(ctx, far.Netns, `
		ip link set eth0 up
		ip addr add 172.31.1.2/24 dev eth0
		ip addr add fd00:172:31:1::2/64 dev eth0 nodad
		ip route add default via 172.31.1.1
		ip route add default via fd00:172:31:1::1`))
	return second
}

// A way between nodes narrower than their devices (N10): a router's word about
// the tunnel's packets makes the datapath tell pods, whose connections then
// use what fits; nothing is fragmented. And each hop decrements and answers:
// what traceroute shows between pods.
func TestNarrowWay(t *testing.T) { narrowWay(t, tunnel.ModeVXLAN) }

// The same where IPv4 has the small header: a router's word is about a packet
// of IPv4 in IPv4, or about one of the tunnel that IPv6 goes by. Both teach
// the way, whose room each family then has by its own header.
func TestNarrowWayInIPIP(t *testing.T) { narrowWay(t, tunnel.ModeIPIP) }

func narrowWay(t *testing.T, mode tunnel.Mode) {
	const narrow = 1400
	nodes := append(cluster.DefaultNodes(), cluster.NodeConfig{
		Name:     "node-c",
		Addrs:    []netip.Prefix{netip.MustParsePrefix("172.31.1.2/24"), netip.MustParsePrefix("fd00:172:31:1::2/64")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.90.0/24"), netip.MustParsePrefix("fd00:10:244:5a::/64")},
	})
	w := own(t, cluster.Config{Nodes: nodes, AgentArgs: []string{"--routing-mode", string(mode)}})
	ctx := within(t, 4*time.Minute)
	w.distant(ctx, t, narrow)
	obj := podObject("distant", "node-c", "10.244.90.65", "fd00:10:244:5a::65")
	ok(t, w.Manifests.Put(obj))
	ok(t, w.start(ctx))
	distant, err := w.AddPod(ctx, obj)
	ok(t, err)
	ok(t, podFollows(ctx, w.client, mode.MTU(1500, w.a.Config.Addrs[0].Addr())))
	room := mode.MTU(narrow, w.a.Config.Addrs[0].Addr())
	w.service(t, ctx, "far", "10.98.0.2", "fd00:10:98::2", distant)
	objs := service("entry", "10.98.0.3", "fd00:10:98::3", distant)
	svc := objs[0].(*corev1.Service)
	svc.Spec.Type = corev1.ServiceTypeNodePort
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = 30080
	}
	ok(t, w.Manifests.Put(objs...))
	w.awaitService(t, ctx, "10.98.0.3", "fd00:10:98::3", 1)
	wire, err := w.Ext.Capture(ctx, "eth1")
	ok(t, err)
	c := w.Node("node-c")
	for _, f := range families {
		t.Run("traceroute "+f.name, func(t *testing.T) { w.traces(ctx, t, f, distant, c) })
	}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			inner := room.Pod
			if f.name == "ipv6" {
				inner = room.Pod6
			}
			vip := f.pick("10.98.0.2", "fd00:10:98::2")
			// From outside by a NodePort (N12), before anybody knows of the
			// narrow way.
			from := listen(t, distant.Netns, port(f.of(distant), serverPort), nil)
			transfer(ctx, t, w.Ext, from, port(nodeAddr(f, w.a), 30080), 1<<20, nil)
			ok(t, from.Close())
			for _, to := range []string{port(f.of(distant), serverPort), port(vip, 80)} {
				l := listen(t, distant.Netns, port(f.of(distant), serverPort), nil)
				transfer(ctx, t, w.client.Netns, l, to, 1<<20, nil)
				ok(t, l.Close())
			}
			for n, to := range map[*cluster.Netns]netip.Addr{w.client.Netns: f.of(distant), distant.Netns: f.of(w.client)} {
				out, err := n.Exec(ctx, "ip", "route", "get", to.String())
				if err != nil || !strings.Contains(out, fmt.Sprintf("mtu %d", inner)) {
					t.Errorf("in %s: want a path MTU of %d: %s, %v", n.Name, inner, out, err)
				}
			}
			// As large as it may be, and in one piece.
			at := port(f.of(distant), 8091)
			echoUDP(t, distant.Netns, at)
			datagrams(t, udp(t, w.client.Netns, "", at, whole(f.name == "ipv6")), 1, f.payloadOf(inner))
			// Another pod of the node has not been told, and is.
			u := udp(t, w.local.Netns, "", at, whole(f.name == "ipv6"))
			_, err := u.Write(make([]byte, f.payloadOf(inner+1)))
			ok(t, err)
			ok(t, u.SetReadDeadline(soon()))
			if n, err := u.Read(make([]byte, 1)); !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("a datagram too large: %d, %v", n, err)
			}
		})
	}
	for _, n := range []*cluster.Node{w.a, c} {
		got := counters(t, n)
		if got["pmtu_learned/from_netdev"] == 0 || got["too_big_sent/from_pod/ipv4"] == 0 || got["too_big_sent/from_pod/ipv6"] == 0 {
			t.Errorf("%s: %v", n.NodeName, got)
		}
	}
	ok(t, wire.Close())
	for _, p := range wire.Matching(func(p *cluster.Packet) bool { return p.Outer != nil && (p.Outer.Fragment || p.Last().Fragment) }) {
		t.Fatalf("fragment on the way: %v", p)
	}
	checksumErrors(t, w.client.Netns, distant.Netns, w.a.Netns, c.Netns)
}

// The same over IPv6, where the tunnel's device sends: routers never fragment
// there, and the first too large packet teaches the way's MTU.
func TestNarrowWayOverIPv6(t *testing.T) {
	const narrow, inner = 1400, 1330
	nodes := append(cluster.DefaultNodes(), cluster.NodeConfig{
		Name: "node-c", Addrs: []netip.Prefix{netip.MustParsePrefix("fd00:172:31:1::2/64")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.90.0/24"), netip.MustParsePrefix("fd00:10:244:5a::/64")},
	})
	for i := range nodes[:2] {
		nodes[i].Addrs = nodes[i].Addrs[1:]
	}
	w := own(t, cluster.Config{Nodes: nodes})
	ctx := within(t, 2*time.Minute)
	w.distant(ctx, t, narrow)
	obj := podObject("distant", "node-c", "10.244.90.65", "fd00:10:244:5a::65")
	ok(t, w.Manifests.Put(obj))
	ok(t, w.start(ctx))
	distant, err := w.AddPod(ctx, obj)
	ok(t, err)
	podMTU(ctx, t, w.client, 1430)
	wire, err := w.Ext.Capture(ctx, "eth1")
	ok(t, err)
	for _, f := range families {
		at := port(f.of(distant), serverPort)
		l := listen(t, distant.Netns, at, nil)
		transfer(ctx, t, w.client.Netns, l, at, 1<<20, nil)
		out, err := w.client.Exec(ctx, "ip", "route", "get", f.of(distant).String())
		if err != nil || !strings.Contains(out, fmt.Sprintf("mtu %d", inner)) {
			t.Errorf("%s: want a path MTU of %d: %s, %v", f.name, inner, out, err)
		}
	}
	for _, n := range []*cluster.Node{w.a, w.Node("node-c")} {
		if got := counters(t, n); got["pmtu_learned/from_netdev/ipv6"] == 0 || got["too_big_sent/from_pod"] == 0 {
			t.Errorf("%s: %v", n.NodeName, got)
		}
	}
	ok(t, wire.Close())
	for _, p := range wire.Matching(func(p *cluster.Packet) bool { return p.Outer != nil && (p.Outer.Fragment || p.Last().Fragment) }) {
		t.Fatalf("fragment on the way: %v", p)
	}
}

// traces asks with UDP, TCP and ICMP how far each TTL goes, between pods, by a
// service, and from outside by a NodePort.
func (w *world) traces(ctx context.Context, t *testing.T, f family, distant *cluster.Pod, c *cluster.Node) {
	nodeOf := func(n *cluster.Node) netip.Addr { return nodeAddr(f, n) }
	vip := f.pick("10.98.0.2", "fd00:10:98::2")
	for _, kind := range []string{"udp", "tcp", "icmp"} {
		hop := func(from *cluster.Pod, to netip.Addr, ttl int, want netip.Addr) {
			t.Helper()
			by, err := oneProbe(ctx, from.Netns, kind, netip.AddrPortFrom(to, 80), ttl)
			if err != nil || by != want {
				t.Errorf("%s to %v with TTL %d: answered by %v, %v; want %v", kind, to, ttl, by, err, want)
			}
		}
		// One hop to a pod of the same node, two to another node's.
		hop(w.client, f.of(w.local), 1, nodeOf(w.a))
		hop(w.client, f.of(w.local), 2, netip.Addr{})
		for _, to := range []netip.Addr{f.of(distant), vip} {
			if kind == "icmp" && to == vip {
				continue // a service's address is not pinged
			}
			hop(w.client, to, 1, nodeOf(w.a))
			hop(w.client, to, 2, nodeOf(c))
			hop(w.client, to, 3, netip.Addr{})
		}
		hop(distant, f.of(w.client), 1, nodeOf(c))
		hop(distant, f.of(w.client), 2, nodeOf(w.a))
		hop(distant, f.of(w.client), 3, netip.Addr{})
		if kind != "icmp" {
			// The second node's own name would mean nothing outside.
			for ttl, want := range []netip.Addr{nodeOf(w.a), nodeOf(w.a), {}} {
				by, err := oneProbe(ctx, w.Ext, kind, netip.AddrPortFrom(nodeOf(w.a), 30080), ttl+1)
				if err != nil || by != want {
					t.Errorf("%s from outside to a NodePort with TTL %d: answered by %v, %v; want %v", kind, ttl+1, by, err, want)
				}
			}
		}
		// To the world: this node, then the router there.
		outside := f.pick("172.31.2.2", "fd00:172:31:2::2")
		hop(w.client, outside, 1, nodeOf(w.a))
		hop(w.client, outside, 2, f.pick("172.31.0.1", "fd00:172:31::1"))
		hop(w.client, outside, 3, netip.Addr{})
	}
}

// oneProbe sends one packet with that TTL and says who let it expire; no address
// when it reached whom it was sent to, who answers or lets it be known that
// nobody listens.
func oneProbe(ctx context.Context, n *cluster.Netns, kind string, to netip.AddrPort, ttl int) (by netip.Addr, err error) {
	v6 := to.Addr().Is6()
	tap, err := n.Capture(ctx, "eth0")
	if err != nil {
		return by, err
	}
	defer tap.Close()
	err = n.Do(func() error {
		domain, proto, kindOf := unix.AF_INET, 0, unix.SOCK_DGRAM
		var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(to.Port()), Addr: addr4(to.Addr())}
		if v6 {
			domain, sa = unix.AF_INET6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
		}
		payload := []byte("how far?")
		switch kind {
		case "tcp":
			kindOf = unix.SOCK_STREAM
		case "icmp":
			kindOf, proto = unix.SOCK_RAW, unix.IPPROTO_ICMP
			if sa4, is4 := sa.(*unix.SockaddrInet4); is4 {
				sa4.Port = 0
			}
			payload = []byte{8, 0, 0, 0, 0x12, 0x34, 0, byte(ttl)}
			if v6 {
				proto, payload[0] = unix.IPPROTO_ICMPV6, 128
				sa.(*unix.SockaddrInet6).Port = 0
			} else {
				binary.BigEndian.PutUint16(payload[2:], folded(words(payload)))
			}
		}
		fd, err := unix.Socket(domain, kindOf|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		level, option := unix.IPPROTO_IP, unix.IP_TTL
		if v6 {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		if err := unix.SetsockoptInt(fd, level, option, ttl); err != nil {
			return err
		}
		if kind == "tcp" {
			if err := unix.Connect(fd, sa); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				return err
			}
		} else if err := unix.Sendto(fd, payload, 0, sa); err != nil {
			return err
		}
		// The first that comes back: an error, an answer, a reset.
		wait, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		p, err := tap.Find(wait, kind+" answer", func(p *cluster.Packet) bool {
			h := p.Outer
			if h == nil || p.Outgoing {
				return false
			}
			if h.Proto == unix.IPPROTO_ICMPV6 && h.ICMPType > 132 {
				return false
			}
			return h.Proto == unix.IPPROTO_ICMP || h.Proto == unix.IPPROTO_ICMPV6 || h.Src == to.Addr() && h.SPort == to.Port()
		})
		if err != nil {
			return err
		}
		if len(p.BadChecksums) > 0 {
			return fmt.Errorf("%v", p)
		}
		h := p.Outer
		if h.Proto == unix.IPPROTO_ICMP && h.ICMPType == 11 || h.Proto == unix.IPPROTO_ICMPV6 && h.ICMPType == 3 {
			by = h.Src
			quote := h.Payload // of ICMPv6 with the word before it
			if at := map[bool][2]int{false: {16, 20}, true: {28, 44}}[v6]; len(quote) >= at[1] {
				if dst, _ := netip.AddrFromSlice(quote[at[0]:at[1]]); dst != to.Addr() {
					return fmt.Errorf("by %v about a packet to %v, not %v", by, dst, to.Addr())
				}
			}
		}
		return nil
	})
	return by, err
}

func addr4(a netip.Addr) (b [4]byte) {
	if a.Is4() {
		b = a.As4()
	}
	return b
}
