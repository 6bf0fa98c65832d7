package hostile

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/mesh"
	"github.com/podweir/podweir/test/tools/probe"
)

const (
	port  = 8080
	sport = 40000
	vni   = 4096
)

// mark is in the payload of everything hostile.
const mark = "hostile packet"

// world is two nodes with three pods: victim and villain on node-a, peer on
// node-b; and the outside, which speaks on the underlay as it likes.
type world struct {
	*testing.T
	ctx context.Context
	c   *cluster.Cluster
	set map[string]maps.Set

	mark     int // of what the villain sends, see slipPast
	streams  []*cluster.Stream
	captures map[string]*cluster.Capture // of the pods' interfaces
}

func newWorld(t *testing.T) *world {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	w := &world{T: t, ctx: ctx, c: cluster.ForTest(t, cluster.Config{}), set: map[string]maps.Set{}, captures: map[string]*cluster.Capture{}}
	// The switch forwards what it gets: with br_netfilter it would judge it.
	for _, key := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		if err := w.c.Switch.Sysctl("net/bridge/"+key, "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	objs := []cluster.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}}
	for _, n := range w.c.Nodes {
		objs = append(objs, n.Object())
	}
	for _, p := range []struct{ name, node, v4, v6 string }{
		{"victim", "node-a", "10.244.80.65", "fd00:10:244:50::65"},
		{"villain", "node-a", "10.244.80.66", "fd00:10:244:50::66"},
		{"peer", "node-b", "10.244.158.65", "fd00:10:244:9e::65"},
	} {
		objs = append(objs, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: p.name, UID: types.UID("uid-" + p.name)},
			Spec:       corev1.PodSpec{NodeName: p.node, Containers: []corev1.Container{{Name: "main", Image: "main"}}},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: p.v4, PodIPs: []corev1.PodIP{{IP: p.v4}, {IP: p.v6}}},
		})
	}
	w.must(w.c.Manifests.Put(objs...))
	w.must(w.c.StartAgents(ctx))
	w.must(w.c.AddPods(ctx, objs...))
	for _, n := range w.c.Nodes {
		set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
		w.must(err)
		t.Cleanup(func() { _ = set.Close() })
		w.set[n.NodeName] = set
		w.must(mesh.Serve(ctx, n.Netns, n.NodeName, port))
	}
	for _, name := range []string{"victim", "villain", "peer"} {
		_, err := w.pod(name).Serve(ctx, name, port)
		w.must(err)
		w.captures[name], err = w.pod(name).Capture(ctx, "eth0")
		w.must(err)
	}
	// Flows that must go on: across nodes and on one, both families.
	for _, to := range []string{"victim", "villain"} {
		for _, a := range w.pod(to).Addrs {
			for _, proto := range []string{"tcp", "udp"} {
				s, err := w.pod("peer").Stream(ctx, netip.AddrPortFrom(a, port).String(), "-proto", proto, "-interval", "20ms")
				w.must(err)
				w.streams = append(w.streams, s)
			}
		}
	}
	for _, a := range w.pod("victim").Addrs {
		s, err := w.pod("villain").Stream(ctx, netip.AddrPortFrom(a, port).String(), "-proto", "udp", "-interval", "20ms")
		w.must(err)
		w.streams = append(w.streams, s)
	}
	return w
}

// filterVillain leads what the villain sends through an ifb of its node.
func (w *world) filterVillain() {
	w.Helper()
	n := w.c.Node("node-a")
	var ep maps.Endpoint
	w.must(cluster.Eventually(w.ctx, func() (err error) {
		var found bool
		ep, found, err = w.set["node-a"].Endpoints.Get(maps.ToAddr(w.addr("villain", false)))
		if err == nil && !found {
			err = errors.New("the villain has no endpoint")
		}
		return err
	}))
	var dev string
	w.must(n.Netns.Do(func() error {
		ifi, err := net.InterfaceByIndex(int(ep.Ifindex))
		if err == nil {
			dev = ifi.Name
		}
		return err
	}))
	for _, args := range [][]string{
		{"ip", "link", "add", "shaper", "up", "type", "ifb"},
		{"tc", "qdisc", "add", "dev", dev, "ingress"},
		{"tc", "filter", "add", "dev", dev, "parent", "ffff:", "protocol", "all", "u32", "match", "u32", "0", "0",
			"action", "mirred", "egress", "redirect", "dev", "shaper"},
	} {
		_, err := n.Exec(w.ctx, args...)
		w.must(err)
	}
	w.must(cluster.Eventually(w.ctx, func() error {
		entries, err := w.set["node-a"].Filtered.Dump()
		if err == nil && len(entries) != 2 {
			err = fmt.Errorf("the villain is not filtered yet: %v", entries)
		}
		return err
	}))
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) run(name string, fn func(*world)) {
	w.T.Run(name, func(t *testing.T) {
		sub := *w
		sub.T = t
		fn(&sub)
		sub.unharmed()
	})
}

// unharmed: every flow in progress has lost nothing and goes on, no hostile
// packet came to a pod, and both agents are well.
func (w *world) unharmed() {
	w.Helper()
	for i, s := range w.streams {
		r, err := s.Report(w.ctx)
		w.must(err)
		goal := r.Received + 2
		r, err = s.Await(w.ctx, "more answers", func(r probe.StreamReport) bool { return r.Received >= goal })
		w.must(err)
		if r.Lost > 0 || r.Error != "" {
			w.Errorf("flow %d was harmed: %+v", i, r)
			w.drops("node-a")
		}
	}
	for name, c := range w.captures {
		for _, p := range c.Packets() {
			if !p.Outgoing && contains(p.Frame, mark) {
				w.Errorf("delivered to %s: %v", name, p)
			}
		}
	}
	for _, n := range w.c.Nodes {
		code, body, err := n.AgentGet(w.ctx, "/readyz")
		if err != nil || code != 200 {
			w.Errorf("agent of %s: %d %s %v", n.NodeName, code, body, err)
		}
	}
}

func contains(frame []byte, s string) bool { return len(frame) >= len(s) && index(frame, s) >= 0 }

func index(b []byte, s string) int {
	for i := 0; i+len(s) <= len(b); i++ {
		if string(b[i:i+len(s)]) == s {
			return i
		}
	}
	return -1
}

func (w *world) pod(name string) *cluster.Pod { return w.c.Pod("default", name) }

// addr is a party's address of one family.
func (w *world) addr(name string, v6 bool) netip.Addr {
	if p := w.pod(name); p != nil {
		if v6 {
			return p.IPv6()
		}
		return p.IPv4()
	}
	i := 0
	if v6 {
		i = 1
	}
	if n := w.c.Node(name); n != nil {
		return n.Config.Addrs[i].Addr()
	}
	return []netip.Addr{netip.MustParseAddr("172.31.0.1"), netip.MustParseAddr("fd00:172:31::1")}[i]
}

// at is the namespace that a party sends from.
func (w *world) at(name string) *cluster.Netns {
	if p := w.pod(name); p != nil {
		return p.Netns
	}
	if n := w.c.Node(name); n != nil {
		return n.Netns
	}
	return w.c.Ext
}

// mac is the address of a device in a party's namespace.
func (w *world) mac(name, device string) net.HardwareAddr {
	w.Helper()
	var mac net.HardwareAddr
	w.must(w.at(name).Do(func() error {
		ifi, err := net.InterfaceByName(device)
		if err == nil {
			mac = ifi.HardwareAddr
		}
		return err
	}))
	return mac
}

// gateway is the MAC a pod sends to: that of the host's half.
func (w *world) gateway(pod string) net.HardwareAddr {
	w.Helper()
	for _, i := range w.pod(pod).Result.Interfaces {
		if i.Sandbox == "" {
			mac, err := net.ParseMAC(i.Mac)
			w.must(err)
			return mac
		}
	}
	w.Fatalf("the result of ADD of %s has no host interface", pod)
	return nil
}

// send puts frames on a party's eth0 as they are.
func (w *world) send(from string, frames ...[]byte) {
	w.Helper()
	w.must(w.at(from).Do(func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if w.mark != 0 && from == "villain" {
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, w.mark); err != nil {
				return fmt.Errorf("mark what %s sends: %w", from, err)
			}
		}
		for _, f := range frames {
			to := &unix.SockaddrLinklayer{Ifindex: ifi.Index, Protocol: binary.NativeEndian.Uint16(f[12:14])}
			if err := unix.Sendto(fd, f, 0, to); err != nil {
				return fmt.Errorf("send %d bytes from %s: %w", len(f), from, err)
			}
		}
		return nil
	}))
}

// count reads one counter of a node.
func (w *world) count(node, reason, hook string) uint64 {
	w.Helper()
	list, err := w.set[node].Metrics.Read()
	w.must(err)
	var sum uint64
	for _, s := range list {
		if maps.ReasonName(s.Reason) == reason && maps.HookName(s.Hook) == hook {
			sum += s.Packets
		}
	}
	return sum
}

// counted sends and waits until every frame is counted at that node and hook
// under that reason.
func (w *world) counted(what, from, node, reason, hook string, frames ...[]byte) {
	w.Helper()
	before := w.count(node, reason, hook)
	w.send(from, frames...)
	ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
	defer cancel()
	if err := cluster.Eventually(ctx, func() error {
		if n := w.count(node, reason, hook) - before; n < uint64(len(frames)) {
			return fmt.Errorf("%s: %d of %d counted as %s at %s of %s", what, n, len(frames), reason, hook, node)
		}
		return nil
	}); err != nil {
		w.Errorf("%v", err)
		w.drops(node)
	}
}

// drops logs what a node has dropped so far.
func (w *world) drops(node string) {
	list, err := w.set[node].Metrics.Read()
	w.must(err)
	for _, s := range list {
		if name := maps.ReasonName(s.Reason); len(name) > 5 && name[:5] == "drop_" {
			w.Logf("%s %s %s %s: %d", node, name, maps.HookName(s.Hook), s.Family(), s.Packets)
		}
	}
}

// families runs fn for both.
func (w *world) families(fn func(v6 bool)) {
	fn(false)
	fn(true)
}

// build serializes layers with right lengths and checksums.
func build(ls ...gopacket.SerializableLayer) []byte {
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, ls...); err != nil {
		panic(err) // a test that builds nonsense does so on purpose, by bytes
	}
	return append([]byte(nil), buf.Bytes()...)
}

func ether(src, dst net.HardwareAddr, v6 bool) *layers.Ethernet {
	e := &layers.Ethernet{SrcMAC: src, DstMAC: dst, EthernetType: layers.EthernetTypeIPv4}
	if v6 {
		e.EthernetType = layers.EthernetTypeIPv6
	}
	return e
}

// ip makes the network layer.
func ip(src, dst netip.Addr, proto layers.IPProtocol) gopacket.SerializableLayer {
	if src.Is4() {
		return &layers.IPv4{Version: 4, TTL: 64, Protocol: proto, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
	}
	return &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: proto, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
}

// udp makes a whole packet from the IP header on.
func udp(src, dst netip.AddrPort, payload []byte) []gopacket.SerializableLayer {
	n := ip(src.Addr(), dst.Addr(), layers.IPProtocolUDP)
	u := &layers.UDP{SrcPort: layers.UDPPort(src.Port()), DstPort: layers.UDPPort(dst.Port())}
	_ = u.SetNetworkLayerForChecksum(n.(gopacket.NetworkLayer))
	return []gopacket.SerializableLayer{n, u, gopacket.Payload(payload)}
}

func tcp(src, dst netip.AddrPort, flags string, payload []byte) []gopacket.SerializableLayer {
	n := ip(src.Addr(), dst.Addr(), layers.IPProtocolTCP)
	t := &layers.TCP{SrcPort: layers.TCPPort(src.Port()), DstPort: layers.TCPPort(dst.Port()), Seq: 1, Ack: 1, Window: 1000}
	for _, f := range flags {
		switch f {
		case 'S':
			t.SYN = true
		case 'A':
			t.ACK = true
		case 'R':
			t.RST = true
		}
	}
	_ = t.SetNetworkLayerForChecksum(n.(gopacket.NetworkLayer))
	return []gopacket.SerializableLayer{n, t, gopacket.Payload(payload)}
}

func ap(a netip.Addr, p uint16) netip.AddrPort { return netip.AddrPortFrom(a, p) }

// fromPod is a frame that a pod sends to its gateway.
func (w *world) fromPod(pod string, v6 bool, ls ...gopacket.SerializableLayer) []byte {
	w.Helper()
	return build(append([]gopacket.SerializableLayer{ether(w.mac(pod, "eth0"), w.gateway(pod), v6)}, ls...)...)
}

// fromWire is a frame of the outside to a node's eth0.
func (w *world) fromWire(node string, v6 bool, ls ...gopacket.SerializableLayer) []byte {
	w.Helper()
	return build(append([]gopacket.SerializableLayer{ether(w.mac("ext", "eth0"), w.mac(node, "eth0"), v6)}, ls...)...)
}

// vxlan is a frame to a node's tunnel port, from an outer address of choice.
func (w *world) vxlan(outer netip.Addr, node string, id uint32, innerV6 bool, ls ...gopacket.SerializableLayer) []byte {
	w.Helper()
	return w.fromWire(node, outer.Is6(), w.tunnelled(outer, node, id, innerV6, ls...)...)
}

// vxlanByPod is the same, of our network, sent by a pod.
func (w *world) vxlanByPod(pod string, outer netip.Addr, node string, innerV6 bool, ls ...gopacket.SerializableLayer) []byte {
	w.Helper()
	return w.fromPod(pod, outer.Is6(), w.tunnelled(outer, node, vni, innerV6, ls...)...)
}

func (w *world) tunnelled(outer netip.Addr, node string, id uint32, innerV6 bool, ls ...gopacket.SerializableLayer) []gopacket.SerializableLayer {
	w.Helper()
	inner := build(append([]gopacket.SerializableLayer{ether(net.HardwareAddr{2, 'p', 'w', 0, 0, 1}, w.mac(node, "podweir.vxlan"), innerV6)}, ls...)...)
	head := []byte{8, 0, 0, 0, byte(id >> 16), byte(id >> 8), byte(id), 0}
	return udp(ap(outer, 55555), ap(w.addr(node, outer.Is6()), 4789), append(head, inner...))
}
