package engine

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/tunnel"
	"github.com/podweir/podweir/test/cluster"
)

// kernelNet is what a kernel node's underlay looks like.
type kernelNet struct {
	addr    string // on the switch
	mtu     int    // of the tunnel
	options string // of the vxlan device
}

var (
	kernelNet4 = kernelNet{"172.31.0.4/24", 1450, ""}
	kernelNet6 = kernelNet{"fd00:172:31::4/64", 1430, "udp6zerocsumrx"}
)

// kernelNode is a node that runs nothing of ours: a vxlan device with its own
// VNI, static neighbours and forwarding entries, and one pod behind a veth,
// which the kernel routes to.
type kernelNode struct {
	host, pod *cluster.Netns
	underlay  netip.Addr
	v4, v6    netip.Addr // of the pod
	device    string
}

var kernelCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.200.0/24"), netip.MustParsePrefix("fd00:10:244:c8::/64")}

func newKernelNode(ctx context.Context, c *cluster.Cluster, net kernelNet) (*kernelNode, error) {
	k := &kernelNode{
		underlay: netip.MustParsePrefix(net.addr).Addr(), device: "vx",
		v4: netip.MustParseAddr("10.244.200.10"), v6: netip.MustParseAddr("fd00:10:244:c8::10"),
	}
	var err error
	if k.host, err = c.AddHost(ctx, "kernel", netip.MustParsePrefix(net.addr)); err != nil {
		return nil, err
	}
	if k.pod, err = c.AddHost(ctx, "kernel-pod"); err != nil {
		return nil, err
	}
	for key, value := range map[string]string{
		"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
		"net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/default/rp_filter": "0",
	} {
		if err := k.host.Sysctl(key, value); err != nil {
			return nil, err
		}
	}
	mac := tunnel.MAC(k.underlay)
	setup := fmt.Sprintf(`
		ip link add vx address %v type vxlan id 4096 dstport 4789 local %v dev eth0 nolearning %s
		ip link set vx mtu %d up
		ip link add veth0 mtu %d type veth peer name eth0 mtu %d netns %s
		ip link set veth0 up
		ip addr add 10.244.200.1/24 dev veth0
		ip addr add fd00:10:244:c8::1/64 dev veth0 nodad`,
		mac, k.underlay, net.options, net.mtu, net.mtu, net.mtu, k.pod.Name)
	for i, n := range c.Nodes {
		addr := n.Config.Addrs[0].Addr()
		mac := tunnel.MAC(addr)
		v4, v6 := fmt.Sprintf("169.254.77.%d", i+1), fmt.Sprintf("fe80::77:%d", i+1)
		setup += fmt.Sprintf(`
			bridge fdb append %v dev vx dst %v
			ip neigh add %s lladdr %v dev vx nud permanent
			ip neigh add %s lladdr %v dev vx nud permanent`, mac, addr, v4, mac, v6, mac)
		for _, cidr := range n.Config.PodCIDRs {
			via := v4
			if cidr.Addr().Is6() {
				via = v6
			}
			setup += fmt.Sprintf("\nip route add %v via %s dev vx onlink", cidr, via)
		}
	}
	if err := run(ctx, k.host, setup); err != nil {
		return nil, err
	}
	return k, run(ctx, k.pod, `
		ip link set eth0 up
		ip addr add 10.244.200.10/24 dev eth0
		ip addr add fd00:10:244:c8::10/64 dev eth0 nodad
		ip route add default via 10.244.200.1
		ip route add default via fd00:10:244:c8::1`)
}

// objects are the node and its pod as the API server would know them.
func (k *kernelNode) objects() []cluster.Object {
	return []cluster.Object{
		nodeObject("kernel", []netip.Addr{k.underlay}, kernelCIDRs),
		podObject("kernel", "kernel", k.v4.String(), k.v6.String()),
	}
}

// IPv4 and IPv6 are its pod's addresses.
func (k *kernelNode) IPv4() netip.Addr { return k.v4 }
func (k *kernelNode) IPv6() netip.Addr { return k.v6 }

// offloads are the settings of every device a packet crosses.
type offloads struct{ tx, gso, gro string }

func (o offloads) String() string { return fmt.Sprintf("tx-%s,gso-%s,gro-%s", o.tx, o.gso, o.gro) }

// set applies them to the pod's end, both nodes' devices and the vxlan
// device. Without transmit checksums the receiving side verifies them, too.
func (o offloads) set(ctx context.Context, t *testing.T, w *world) {
	t.Helper()
	feature := func(n *cluster.Netns, device string, args ...string) {
		_, err := n.Exec(ctx, append([]string{"ethtool", "-K", device}, args...)...)
		ok(t, err)
	}
	all := []string{"tx", o.tx, "rx", o.tx, "sg", "on", "tso", o.gso, "gso", o.gso, "gro", o.gro}
	for _, d := range []struct {
		n      *cluster.Netns
		device string
	}{{w.client.Netns, "eth0"}, {w.a.Netns, "eth0"}, {w.kernel.host, "eth0"}, {w.kernel.host, "veth0"}, {w.kernel.pod, "eth0"}} {
		feature(d.n, d.device, all...)
	}
	// The switch's ends of the nodes' veths receive what those send.
	feature(w.kernel.host, w.kernel.device, "tx", o.tx, "gso", o.gso, "gro", o.gro)
	feature(w.a.Netns, "podweir.vxlan", "tx", o.tx, "gso", o.gso, "gro", o.gro)
}

// badPackets reports captured packets with a wrong checksum.
func badPackets(t *testing.T, what string, c *cluster.Capture) {
	t.Helper()
	// What a socket has received the capture may not have read yet.
	any := func(*cluster.Packet) bool { return true }
	if _, err := c.Find(within(t, patience), "packet at all", any); err != nil {
		t.Errorf("%s: nothing captured: %v", what, err)
	}
	packets := c.Packets()
	shown := 0
	for _, p := range packets {
		if len(p.BadChecksums) > 0 && shown < 5 {
			t.Errorf("%s: %v", what, p)
			shown++
		}
	}
}

// Every combination of offloads, both inner families, TCP both ways and
// either side opening, UDP both ways: contents, checksums and counters.
func TestKernelNodeOverIPv4(t *testing.T) {
	w := shared(t)
	ctx := within(t, 3*time.Minute)
	w.service(t, ctx, "kernel", kernelVIP4, kernelVIP6, w.kernel)
	for _, o := range []offloads{
		{"on", "on", "off"}, {"on", "on", "on"}, {"on", "off", "off"}, {"on", "off", "on"},
		{"off", "off", "off"}, {"off", "off", "on"}, {"off", "on", "on"},
	} {
		t.Run(o.String(), func(t *testing.T) {
			o.set(ctx, t, w)
			for _, f := range families {
				t.Run(f.name, func(t *testing.T) { kernelTraffic(ctx, t, w, f, true) })
			}
		})
	}
	offloads{"on", "on", "off"}.set(ctx, t, w)
	checksumErrors(t, w.client.Netns, w.kernel.pod, w.kernel.host, w.a.Netns)
}

// The service whose backend is the kernel node's pod.
const kernelVIP4, kernelVIP6 = "10.98.0.77", "fd00:10:98::4d"

// kernelTraffic is traffic between the client and the kernel node's pod.
// fast: the underlay is one that the fast path serves.
func kernelTraffic(ctx context.Context, t *testing.T, w *world, f family, fast bool) {
	const size = 2 << 20
	here, there, vip := f.of(w.client), f.of(w.kernel), f.pick(kernelVIP4, kernelVIP6)
	onClient, err := w.client.Capture(ctx, "eth0")
	ok(t, err)
	onKernel, err := w.kernel.pod.Capture(ctx, "eth0")
	ok(t, err)
	captured := func(what string) {
		badPackets(t, what+", client's side", onClient)
		badPackets(t, what+", kernel pod's side", onKernel)
		ok(t, onClient.Close())
		ok(t, onKernel.Close())
	}
	// measure compares the counters of one exchange: where our header fits,
	// no packet takes the device.
	measure := func(what string, fn func()) {
		t.Helper()
		before := counters(t, w.a)
		fn()
		got := counters(t, w.a).since(before)
		if drops := got.drops(); len(drops) > 0 {
			t.Errorf("%s: drops: %v", what, drops)
		}
		encap, decap := got["fwd_encap/from_pod/"+f.name], got["fwd_decap/from_netdev/"+f.name]
		sent, took := got["fwd_tunnel/from_pod/"+f.name], got["fwd_local/from_overlay/"+f.name]
		if !fast {
			if encap+decap != 0 || sent < 10 || took < 10 {
				t.Errorf("%s: %d encapsulated, %d decapsulated, %d and %d through the device; want all through the device", what, encap, decap, sent, took)
			}
			return
		}
		if sent+took != 0 || encap < 10 || decap < 10 {
			t.Errorf("%s: sent %d by the device, took %d from it, %d and %d past it; want all past it; %v",
				what, sent, took, encap, decap, got)
		}
	}
	l := listen(t, w.kernel.pod, port(there, serverPort), nil)
	measure("TCP to the kernel node", func() {
		transfer(ctx, t, w.client.Netns, l, port(there, serverPort), size, nil)
	})
	measure("TCP to a service on the kernel node", func() {
		transfer(ctx, t, w.client.Netns, l, port(vip, 80), size, nil)
	})
	l.Close()
	l = listen(t, w.client.Netns, port(here, serverPort), nil)
	measure("TCP from the kernel node", func() {
		transfer(ctx, t, w.kernel.pod, l, port(here, serverPort), size, nil)
	})
	l.Close()
	echoUDP(t, w.kernel.pod, port(there, serverPort))
	echoUDP(t, w.client.Netns, port(here, serverPort))
	most := 1372 // what fits a packet of either family
	measure("UDP to the kernel node", func() {
		datagrams(t, udp(t, w.client.Netns, "", port(there, serverPort), nil), 50, most)
	})
	measure("UDP to a service on the kernel node", func() {
		datagrams(t, udp(t, w.client.Netns, "", port(vip, 80), nil), 50, most)
	})
	measure("UDP from the kernel node", func() {
		datagrams(t, udp(t, w.kernel.pod, "", port(here, serverPort), nil), 50, most)
	})
	captured(f.name)
}

// Nodes whose only addresses are IPv6: no header of ours fits, so the device
// sends and receives, and the counters say so.
func TestKernelNodeOverIPv6(t *testing.T) {
	nodes := cluster.DefaultNodes()[:1]
	nodes[0].Addrs = nodes[0].Addrs[1:]
	w := own(t, cluster.Config{Nodes: nodes})
	ctx := within(t, 2*time.Minute)
	ok(t, w.bringUp(ctx, kernelNet6))
	w.service(t, ctx, "kernel", kernelVIP4, kernelVIP6, w.kernel)
	out, err := w.client.Exec(ctx, "ip", "link", "show", "eth0")
	ok(t, err)
	if !strings.Contains(out, "mtu 1430 ") {
		t.Errorf("the pod's MTU over IPv6: %s", out)
	}
	tap, err := w.Tap(ctx)
	ok(t, err)
	for _, o := range []offloads{{"on", "on", "off"}, {"off", "off", "on"}} {
		t.Run(o.String(), func(t *testing.T) {
			o.set(ctx, t, w)
			for _, f := range families {
				t.Run(f.name, func(t *testing.T) { kernelTraffic(ctx, t, w, f, false) })
			}
		})
	}
	ok(t, tap.Close())
	outer := map[string]int{}
	for _, p := range tap.Matching(func(p *cluster.Packet) bool { return p.Inner != nil }) {
		outer[p.Outer.Src.String()]++
		if len(p.BadChecksums) > 0 {
			t.Fatalf("on the wire: %v", p)
		}
	}
	if outer["fd00:172:31::2"] < 100 || outer["fd00:172:31::4"] < 100 || len(outer) != 2 {
		t.Errorf("outer sources: %v", outer)
	}
	checksumErrors(t, w.client.Netns, w.kernel.pod, w.kernel.host, w.a.Netns)
}
