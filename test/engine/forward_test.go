package engine

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// A pod that forwards what it receives (N23): a router with a network of its
// own behind it, some of it in a tunnel, to which it translates addresses and
// from which it masquerades. What came by the fast path must still be valid when the pod's kernel forwards,
// segments and sums it.
func TestPodThatForwards(t *testing.T) { shared(t).podThatForwards(t) }

func (w *world) podThatForwards(t *testing.T) {
	ctx := within(t, 2*time.Minute)
	behind := w.host(t, ctx, "behind")
	router := w.remote
	for key, value := range map[string]string{"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1"} {
		ok(t, router.Sysctl(key, value))
	}
	ok(t, run(ctx, router.Netns, `
		ip link add in0 type veth peer name eth0 netns `+behind.Name+`
		ip link set in0 mtu 1450 up
		ip addr add 192.168.50.1/24 dev in0
		ip addr add fd00:50::1/64 dev in0 nodad
		ip link add own type vxlan id 9 dstport 4789 local 192.168.50.1 remote 192.168.50.2 dev in0
		ip link set own mtu 1400 up
		ip addr add 192.168.51.1/24 dev own
		ip addr add fd00:51::1/64 dev own nodad
		nft add table inet t
		nft add chain inet t pre { type nat hook prerouting priority -100 ; }
		nft add chain inet t post { type nat hook postrouting priority 100 ; }
		nft add rule inet t pre iifname eth0 meta nfproto ipv4 meta l4proto { tcp, udp } th dport 9000 dnat ip to 192.168.50.2
		nft add rule inet t pre iifname eth0 meta nfproto ipv6 meta l4proto { tcp, udp } th dport 9000 dnat ip6 to fd00:50::2
		nft add rule inet t pre iifname eth0 meta nfproto ipv4 meta l4proto { tcp, udp } th dport 9001 dnat ip to 192.168.51.2
		nft add rule inet t pre iifname eth0 meta nfproto ipv6 meta l4proto { tcp, udp } th dport 9001 dnat ip6 to fd00:51::2
		nft add rule inet t post oifname eth0 masquerade`))
	ok(t, run(ctx, behind, `
		ip link set eth0 mtu 1450 up
		ip addr add 192.168.50.2/24 dev eth0
		ip addr add fd00:50::2/64 dev eth0 nodad
		ip route add default via 192.168.50.1
		ip route add default via fd00:50::1
		ip link add own type vxlan id 9 dstport 4789 local 192.168.50.2 remote 192.168.50.1 dev eth0
		ip link set own mtu 1400 up
		ip addr add 192.168.51.2/24 dev own
		ip addr add fd00:51::2/64 dev own nodad
		ip route add 10.244.0.0/16 via 192.168.51.1 table 51
		ip route add fd00:10:244::/48 via fd00:51::1 table 51
		ip rule add from 192.168.51.2 table 51
		ip -6 rule add from fd00:51::2 table 51`))
	t.Cleanup(func() {
		ctx := context.Background()
		ok(t, run(ctx, behind, "ip link del own\nip rule del table 51\nip -6 rule del table 51"))
		ok(t, run(ctx, router.Netns, "nft delete table inet t\nip link del own\nip link del in0"))
		for key, value := range map[string]string{"net/ipv4/ip_forward": "0", "net/ipv6/conf/all/forwarding": "0"} {
			ok(t, router.Sysctl(key, value))
		}
	})
	for _, o := range []offloads{{"on", "on", "off"}, {"on", "off", "off"}, {"off", "on", "on"}, {"off", "off", "off"}} {
		t.Run(o.String(), func(t *testing.T) {
			features := fmt.Sprintf(" tx %s rx %s sg on tso %s gso %s gro %s", o.tx, o.tx, o.gso, o.gso, o.gro)
			ok(t, run(ctx, router.Netns, "ethtool -K in0"+features))
			ok(t, run(ctx, behind, "ethtool -K eth0"+features))
			for _, f := range families {
				t.Run(f.name, func(t *testing.T) {
					capture, err := behind.Capture(ctx, "eth0")
					ok(t, err)
					w.throughRouter(ctx, t, behind, f, f.pick("192.168.50.2", "fd00:50::2"), 9000)
					w.throughRouter(ctx, t, behind, f, f.pick("192.168.51.2", "fd00:51::2"), 9001)
					badPackets(t, "behind the router", capture)
					ok(t, capture.Close())
				})
			}
		})
	}
	checksumErrors(t, behind, router.Netns, w.client.Netns)
}

// throughRouter is traffic between the client and a host behind the router
// that has this address there, and this port of the router's.
func (w *world) throughRouter(ctx context.Context, t *testing.T, behind *cluster.Netns, f family, inside netip.Addr, number uint16) {
	t.Helper()
	const size = 2 << 20
	to, back := port(f.of(w.remote), number), port(f.of(w.client), serverPort)
	before := counters(t, w.b)
	l := listen(t, behind, port(inside, number), nil)
	transfer(ctx, t, w.client.Netns, l, to, size, nil)
	l.Close()
	l = listen(t, w.client.Netns, back, nil)
	transfer(ctx, t, behind, l, back, size, nil)
	l.Close()
	if got := counters(t, w.b).since(before); got["fwd_decap"] < 20 || got["fwd_encap"]+got["fwd_ipip"] < 20 || len(got.drops()) > 0 {
		t.Errorf("not by the fast path: %v", got)
	}
	echoUDP(t, behind, port(inside, number))
	datagrams(t, udp(t, w.client.Netns, "", to, nil), 30, 1300)
	// Packets of many datagrams.
	const part = 1000
	c := udp(t, w.client.Netns, "", to, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, part)
	})
	for i := range 3 {
		data := bytesOf(byte(i), 10*part)
		_, err := c.Write(data)
		ok(t, err)
		if err := receiveAll(c, data, part); err != nil {
			t.Errorf("segmented write %d to port %d, echoed: %v", i, number, err)
		}
	}
}
