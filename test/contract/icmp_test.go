package contract

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/test/cluster"
)

// deafPort is where no pod and no node listens.
const deafPort = 7777

// unlimited lets a stack say everything that it has to say, at once.
func unlimited(t *testing.T, spaces ...*cluster.Netns) {
	t.Helper()
	for _, n := range spaces {
		for key, was := range map[string]string{"net/ipv4/icmp_ratelimit": "1000", "net/ipv6/icmp/ratelimit": "1000"} {
			ok(t, n.Sysctl(key, "0"))
			t.Cleanup(func() { ok(t, n.Sysctl(key, was)) })
		}
	}
}

// nodePorts makes a service of one UDP and one TCP port that answers on the
// nodes' addresses, too.
func nodePorts(name string, ips []string, udp, tcp int32) *corev1.Service {
	s := clusterIP(name, ips, bothPorts(85)...)
	s.Spec.Type = corev1.ServiceTypeNodePort
	s.Spec.Ports[0].NodePort, s.Spec.Ports[1].NodePort = tcp, udp
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].TargetPort = intstr.FromInt32(deafPort)
	}
	return s
}

// A datagram to a service whose backend does not listen (N10): a connected
// socket hears it at once, wherever the backend is and whoever calls, and as
// it always quotes the very packet that was sent, from the address that was
// called.
func TestN10PortUnreachable(t *testing.T) {
	w := shared(t)
	ctx := within(t, 3*time.Minute)
	unlimited(t, w.client.Netns, w.local.Netns, w.remote.Netns, w.a.Netns, w.b.Netns, w.Ext)
	backends := map[string]func(v6 bool) netip.Addr{
		"itself":     func(v6 bool) netip.Addr { return ip(w.client, v6) },
		"this node":  func(v6 bool) netip.Addr { return ip(w.local, v6) },
		"other node": func(v6 bool) netip.Addr { return ip(w.remote, v6) },
		"this host":  func(v6 bool) netip.Addr { return nodeAddr(w.a, v6) },
		"other host": func(v6 bool) netip.Addr { return nodeAddr(w.b, v6) },
	}
	n := 0
	for name, addr := range backends {
		n++
		service := fmt.Sprintf("deaf-%d", n)
		ips := []string{fmt.Sprintf("10.98.10.%d", n), fmt.Sprintf("fd00:10:98::10%d", n)}
		udpPort := int32(30700 + n)
		w.put(t, nodePorts(service, ips, udpPort, 30750+int32(n)),
			endpointSlice(service+"-v4", service, bothSlicePorts(deafPort), addr(false)),
			endpointSlice(service+"-v6", service, bothSlicePorts(deafPort), addr(true)))
		families(t, func(t *testing.T, v6 bool) {
			called := vip(pick(v6, ips[0], ips[1]), 85)
			w.inForce(t, ctx, "udp", called, at(addr(v6), deafPort))
			w.settled(t, ctx)
			here, there := at(nodeAddr(w.a, v6), uint16(udpPort)).String(), at(nodeAddr(w.b, v6), uint16(udpPort)).String()
			for _, c := range []struct {
				name, target string
				from         *cluster.Netns
			}{
				{"pod", called, w.client.Netns}, {"pod by NodePort", here, w.client.Netns}, {"pod by the other's NodePort", there, w.client.Netns},
				{"host", called, w.a.Netns}, {"host by NodePort", here, w.a.Netns},
				{"outside by NodePort", here, w.Ext},
			} {
				t.Run(c.name+" to "+name, func(t *testing.T) {
					device := "eth0"
					if c.from == w.a.Netns {
						device = "podweir.vxlan"
					}
					tap, err := c.from.Capture(ctx, device)
					ok(t, err)
					defer tap.Close()
					for _, size := range []int{1, 600, 1400} {
						datagram(t, c.from, c.target, make([]byte, size), 0)
					}
					if c.from == w.a.Netns {
						return // by lo, or where it sees both sides
					}
					said := icmpFrom(netip.MustParseAddrPort(c.target).Addr())
					_, err = tap.Find(ctx, "port unreachable from the address that was called", said)
					ok(t, err)
					for _, p := range tap.Packets() {
						if len(p.BadChecksums) > 0 || isError(p) && !said(p) {
							t.Errorf("%v", p)
						}
					}
				})
			}
		})
	}
	// Without a service: under the node's address.
	families(t, func(t *testing.T, v6 bool) {
		for _, to := range []string{pick(v6, "172.31.0.1", "fd00:172:31::1"), nodeAddr(w.b, v6).String()} {
			datagram(t, w.client.Netns, vip(to, deafPort), []byte("anybody?"), 0)
		}
	})
}

// isError: an ICMP error that came in.
func isError(p *cluster.Packet) bool {
	h := p.Outer
	return h != nil && !p.Outgoing && (h.Proto == unix.IPPROTO_ICMP && h.ICMPType == 3 || h.Proto == unix.IPPROTO_ICMPV6 && h.ICMPType == 1)
}

func icmpFrom(a netip.Addr) func(p *cluster.Packet) bool {
	return func(p *cluster.Packet) bool { return isError(p) && p.Outer.Src == a }
}

// The net beyond the router that the nodes send everything to: the way there
// is narrower than the router's own network, which its devices do not say.
const (
	far4, far6 = "203.0.113.9", "2001:db8:113::9"
	narrow     = 1300
)

// beyond builds it behind the outside's namespace.
func (w *world) beyond(t *testing.T, ctx context.Context) *cluster.Netns {
	t.Helper()
	far, err := w.AddHost(ctx, "far")
	ok(t, err)
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		ok(t, w.Ext.Sysctl(key, "1"))
		t.Cleanup(func() { ok(t, w.Ext.Sysctl(key, "0")) })
	}
	commands(t, ctx, w.Ext,
		"ip link add far0 type veth peer name eth0 netns "+far.Name,
		fmt.Sprintf("ip link set far0 mtu %d up", narrow),
		"ip addr add 203.0.113.1/24 dev far0",
		"ip addr add 2001:db8:113::1/64 dev far0 nodad")
	t.Cleanup(func() { commands(t, context.Background(), w.Ext, "ip link del far0") })
	commands(t, ctx, far,
		"ip link set lo up",
		"ip link set eth0 up",
		"ip addr add "+far4+"/24 dev eth0",
		"ip addr add "+far6+"/64 dev eth0 nodad",
		"ip route add default via 203.0.113.1",
		"ip route add default via 2001:db8:113::1")
	return far
}

func commands(t *testing.T, ctx context.Context, n *cluster.Netns, lines ...string) {
	t.Helper()
	for _, line := range lines {
		_, err := n.Exec(ctx, strings.Fields(line)...)
		ok(t, err)
	}
}

// knowsMTU: the namespace has learned the way's MTU from the router.
func knowsMTU(ctx context.Context, n *cluster.Netns, to netip.Addr) error {
	out, err := n.Exec(ctx, "ip", "route", "get", to.String())
	if err == nil && !strings.Contains(out, fmt.Sprintf("mtu %d", narrow)) {
		err = fmt.Errorf("in %s: want an MTU of %d: %s", n.Name, narrow, out)
	}
	return err
}

// A router outside has something to say about packets under the node's
// address, or that came in by it: it reaches the pod that sent them (N10).
func TestN10RouterOutside(t *testing.T) {
	w := shared(t)
	ctx := within(t, 3*time.Minute)
	far := w.beyond(t, ctx)
	unlimited(t, w.Ext)
	server, err := far.Serve(ctx, "far", cluster.ServerPort)
	ok(t, err)
	t.Cleanup(func() { ok(t, server.Kill(context.Background())) })
	ips := []string{"10.98.10.100", "fd00:10:98::1100"}
	s := nodePorts("heard", ips, 30790, 30791)
	w.put(t, append(slicesFor("heard", "heard", bothSlicePorts(cluster.ServerPort), w.remote), s)...)
	const bytes = "3000000"
	families(t, func(t *testing.T, v6 bool) {
		to := netip.MustParseAddr(pick(v6, far4, far6))
		w.inForce(t, ctx, "tcp", vip(pick(v6, ips[0], ips[1]), 85), at(ip(w.remote, v6), cluster.ServerPort))
		w.settled(t, ctx)
		t.Run("time exceeded", func(t *testing.T) {
			router := netip.MustParseAddr(pick(v6, "172.31.0.1", "fd00:172:31::1"))
			if got := expires(t, w.client.Netns, at(to, 33434)); got != router {
				t.Errorf("time exceeded by %v, want %v", got, router)
			}
		})
		t.Run("MTU of a masqueraded flow", func(t *testing.T) {
			r, err := w.client.Bulk(ctx, at(to, cluster.ServerPort).String(), "-receive=false", "-bytes", bytes, "-timeout", "30s")
			ok(t, err)
			if !r.CRCMatches || r.Error != "" {
				t.Errorf("%+v", r)
			}
			ok(t, knowsMTU(ctx, w.client.Netns, to))
		})
		t.Run("MTU on the way back to a client outside", func(t *testing.T) {
			r, err := far.Bulk(ctx, at(nodeAddr(w.a, v6), 30791).String(), "-receive=true", "-bytes", bytes, "-timeout", "30s")
			ok(t, err)
			if !r.CRCMatches || r.Error != "" {
				t.Errorf("%+v", r)
			}
			ok(t, knowsMTU(ctx, w.remote.Netns, to))
		})
	})
}

// expires sends a datagram that gets as far as the first router outside, and
// returns who said that its time was exceeded, as the socket heard it.
func expires(t *testing.T, from *cluster.Netns, to netip.AddrPort) (offender netip.Addr) {
	t.Helper()
	ok(t, from.Do(func() error {
		c, err := net.Dial("udp", to.String())
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			return err
		}
		level, hops, receive, want := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_RECVERR, uint8(11)
		if to.Addr().Is6() {
			level, hops, receive, want = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR, 3
		}
		var serr error
		if err := raw.Control(func(fd uintptr) {
			serr = errors.Join(unix.SetsockoptInt(int(fd), level, hops, 2), unix.SetsockoptInt(int(fd), level, receive, 1))
		}); errors.Join(err, serr) != nil {
			return errors.Join(err, serr)
		}
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		if _, err := c.Write([]byte("how far?")); err != nil {
			return err
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.EHOSTUNREACH) {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = errors.New("no answer")
			}
			return fmt.Errorf("to %v: %v, want host unreachable", to, err)
		}
		oob := make([]byte, 512)
		if err := raw.Control(func(fd uintptr) {
			var n int
			if _, n, _, _, serr = unix.Recvmsg(int(fd), make([]byte, 64), oob, unix.MSG_ERRQUEUE); serr == nil {
				oob = oob[:n]
			}
		}); errors.Join(err, serr) != nil {
			return errors.Join(err, serr)
		}
		messages, err := unix.ParseSocketControlMessage(oob)
		if err != nil {
			return err
		}
		const fixed = 16 // struct sock_extended_err; the offender's address follows
		for _, m := range messages {
			if len(m.Data) < fixed+16 {
				continue
			}
			e := (*unix.SockExtendedErr)(unsafe.Pointer(&m.Data[0]))
			if e.Type != want {
				return fmt.Errorf("ICMP type %d, want %d", e.Type, want)
			}
			if to.Addr().Is6() {
				offender = netip.AddrFrom16([16]byte(m.Data[fixed+8 : fixed+24]))
			} else {
				offender = netip.AddrFrom4([4]byte(m.Data[fixed+4 : fixed+8]))
			}
			return nil
		}
		return errors.New("the socket's error names nobody")
	}))
	return offender
}
