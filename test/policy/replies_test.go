package policy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
)

const denyAll = "x/deny-all\npodSelector: {}\npolicyTypes: [Ingress, Egress]"

// closedPort is one where nobody listens.
const closedPort = 9999

// P3: whatever default deny says of the way back, replies and ICMP errors of
// an allowed flow pass.
func (w *world) replies() {
	w.apply(denyAll,
		"x/out\npodSelector: {matchLabels: {tier: front}}\npolicyTypes: [Egress]\negress:\n- to: [{podSelector: {}}]",
		"x/in\npodSelector: {}\ningress:\n- from: [{podSelector: {matchLabels: {tier: front}}}]")
	w.check()
	// b is on the other node, c on the same.
	var probes []mesh.Probe
	for _, to := range []string{"x/b", "x/c"} {
		for _, a := range w.addrs(to) {
			for _, proto := range []string{"tcp", "udp"} {
				probes = append(probes, mesh.Probe{From: w.netns("x/a"), Proto: proto, To: netip.AddrPortFrom(a, closedPort)})
			}
		}
	}
	for i, r := range w.probe(probes) {
		if r.Outcome != mesh.Refused || !errors.Is(r.Err, unix.ECONNREFUSED) {
			w.Errorf("%v: %s %v, want ECONNREFUSED", probes[i], r.Outcome, r.Err)
		}
	}
	for _, to := range []string{"x/b", "x/c"} {
		for _, a := range w.addrs(to) {
			w.tooBig(to, a)
		}
	}
}

// tooBig has the far end of a UDP flow say that a packet was too big for it:
// the sender's socket learns of it.
func (w *world) tooBig(to string, dst netip.Addr) {
	w.Helper()
	c, err := mesh.Dial(w.ctx, w.netns("x/a"), "udp", netip.AddrPortFrom(dst, portA).String())
	w.must(err)
	defer c.Close()
	if _, err := c.Write([]byte("probe")); err != nil {
		w.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 256)); err != nil {
		w.Fatal(err)
	}
	local := netip.MustParseAddrPort(c.LocalAddr().String())
	const mtu = 1300
	w.must(w.netns(to).Do(func() error { return sendTooBig(dst, local, portA, mtu) }))
	raw, err := c.(interface {
		SyscallConn() (syscall.RawConn, error)
	}).SyscallConn()
	w.must(err)
	w.must(cluster.Eventually(w.ctx, func() (err error) {
		got := 0
		cerr := raw.Control(func(fd uintptr) {
			if dst.Is4() {
				got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU)
			} else {
				got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU)
			}
		})
		if err == nil && got != mtu {
			err = errors.New("the sender has not heard that its packet was too big for " + to + " at " + dst.String())
		}
		return errors.Join(cerr, err)
	}))
}

// sendTooBig sends, as src, an ICMP error about a UDP packet that to sent.
func sendTooBig(src netip.Addr, to netip.AddrPort, port uint16, mtu uint32) error {
	udp := binary.BigEndian.AppendUint16(nil, to.Port())
	udp = binary.BigEndian.AppendUint16(udp, port)
	udp = append(udp, 0, 8+5, 0, 0, 'p', 'r', 'o', 'b', 'e')
	if src.Is4() {
		quote := []byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0x40, 0, 64, 17, 0, 0}
		quote = append(append(append(quote, to.Addr().AsSlice()...), src.AsSlice()...), udp...)
		msg := append([]byte{3, 4, 0, 0, 0, 0, byte(mtu >> 8), byte(mtu)}, quote...)
		binary.BigEndian.PutUint16(msg[2:], internetChecksum(msg))
		return sendRaw(unix.AF_INET, unix.IPPROTO_ICMP, src, to.Addr(), msg)
	}
	quote := []byte{0x60, 0, 0, 0, 0, byte(len(udp)), 17, 64}
	quote = append(append(append(quote, to.Addr().AsSlice()...), src.AsSlice()...), udp...)
	msg := append([]byte{2, 0, 0, 0, 0, 0, byte(mtu >> 8), byte(mtu)}, quote...)
	return sendRaw(unix.AF_INET6, unix.IPPROTO_ICMPV6, src, to.Addr(), msg)
}

func sendRaw(family, proto int, src, dst netip.Addr, msg []byte) error {
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var from, to unix.Sockaddr = &unix.SockaddrInet6{Addr: src.As16()}, &unix.SockaddrInet6{Addr: dst.As16()}
	if family == unix.AF_INET {
		from, to = &unix.SockaddrInet4{Addr: src.As4()}, &unix.SockaddrInet4{Addr: dst.As4()}
	}
	return errors.Join(unix.Bind(fd, from), unix.Sendto(fd, msg, 0, to))
}

func internetChecksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// P4: the node reaches its own pods from every address it has, old and new;
// a pod reaches itself. (Whoever only claims to be the node: test/hostile.)
func (w *world) node() {
	w.apply(denyAll, "v/deny-all\npodSelector: {}\npolicyTypes: [Ingress, Egress]")
	w.check()
	n := w.c.Node("node-a")
	own := w.addrs("node-a")
	for _, a := range []string{"10.99.1.1/32", "172.31.0.77/24", "fd00:99::1/128", "fd00:172:31::77/64"} {
		dev := "lo"
		if netip.MustParsePrefix(a).Bits()%32 != 0 {
			dev = "eth0"
		}
		_, err := n.Exec(w.ctx, "ip", "addr", "add", a, "dev", dev, "nodad")
		if netip.MustParsePrefix(a).Addr().Is4() {
			_, err = n.Exec(w.ctx, "ip", "addr", "replace", a, "dev", dev)
		}
		w.must(err)
		defer func() { _, _ = n.Exec(w.ctx, "ip", "addr", "del", a, "dev", dev) }()
		addr := netip.MustParsePrefix(a).Addr()
		own = append(own, addr)
		// The kernel takes an IPv6 address for its own some time later.
		w.must(cluster.Eventually(w.ctx, func() error {
			out, err := n.Exec(w.ctx, "ip", "route", "get", addr.String())
			if err == nil && !strings.HasPrefix(out, "local ") {
				err = fmt.Errorf("%v is not the node's yet: %s", addr, out)
			}
			return err
		}))
	}
	var probes []mesh.Probe
	for _, key := range []string{"x/a", "x/c", "v/a"} {
		for _, dst := range w.addrs(key) {
			for _, src := range own {
				for _, proto := range []string{"tcp", "udp"} {
					if src.Is4() == dst.Is4() {
						probes = append(probes, mesh.Probe{From: n.Netns, Source: src, Proto: proto, To: netip.AddrPortFrom(dst, portA)})
					}
				}
			}
		}
	}
	for i, r := range w.probe(probes) {
		if r.Outcome != mesh.Answered || r.Peer != probes[i].Source {
			w.Errorf("%v from %v: %s, the pod saw %v, %v", probes[i], probes[i].Source, r.Outcome, r.Peer, r.Err)
		}
	}
}
