package hostile

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// specimen is one packet that is wrong in one way.
type specimen struct {
	what   string
	reason string
	packet []byte // from the IP header on
	ether  uint16 // 0: by the packet's version
}

const (
	ethIPv4 = 0x0800
	ethIPv6 = 0x86dd
)

// header writes an IP header as told, with a right IPv4 checksum.
func header(src, dst netip.Addr, proto uint8, payload int, change func([]byte)) []byte {
	var h []byte
	if src.Is4() {
		h = append([]byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, proto, 0, 0}, append(src.AsSlice(), dst.AsSlice()...)...)
		binary.BigEndian.PutUint16(h[2:], uint16(20+payload))
	} else {
		h = append([]byte{0x60, 0, 0, 0, 0, 0, proto, 64}, append(src.AsSlice(), dst.AsSlice()...)...)
		binary.BigEndian.PutUint16(h[4:], uint16(payload))
	}
	if change != nil {
		change(h)
	}
	if src.Is4() {
		binary.BigEndian.PutUint16(h[10:], 0)
		binary.BigEndian.PutUint16(h[10:], checksum(h))
	}
	return h
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// datagram is a UDP header and payload without a checksum.
func datagram(sport, dport uint16, payload string) []byte {
	b := binary.BigEndian.AppendUint16(nil, sport)
	b = binary.BigEndian.AppendUint16(b, dport)
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	return append(append(b, 0, 0), payload...)
}

// segment is a TCP header of a given data offset.
func segment(doff byte, payload string) []byte {
	return append([]byte{0x9c, 0x40, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 0, doff << 4, 2, 4, 0, 0, 0, 0, 0}, payload...)
}

// specimens are all that is wrong with packets between two addresses,
// wherever they are seen.
func specimens(src, dst netip.Addr) []specimen {
	body := datagram(sport, port, mark)
	n := len(body)
	v6 := src.Is6()
	whole := func(proto uint8, b []byte, change func([]byte)) []byte {
		return append(header(src, dst, proto, len(b), change), b...)
	}
	out := []specimen{
		{"length beyond the frame", "drop_malformed", whole(17, body, func(h []byte) {
			if v6 {
				binary.BigEndian.PutUint16(h[4:], uint16(n+100))
			} else {
				binary.BigEndian.PutUint16(h[2:], uint16(n+120))
			}
		}), 0},
		{"half a UDP header", "drop_malformed", whole(17, body[:5], nil), 0},
		{"UDP length beyond the packet", "drop_malformed", whole(17, slices.Concat(body[:4], []byte{1, 0, 0, 0}, body[8:]), nil), 0},
		{"UDP length below its header", "drop_malformed", whole(17, slices.Concat(body[:4], []byte{0, 7, 0, 0}, body[8:]), nil), 0},
		{"half a TCP header", "drop_malformed", whole(6, segment(5, "")[:12], nil), 0},
		{"TCP data offset 4", "drop_malformed", whole(6, segment(4, mark), nil), 0},
		{"TCP data offset beyond the packet", "drop_malformed", whole(6, segment(15, mark), nil), 0},
		{"half a SCTP header", "drop_malformed", whole(132, body[:8], nil), 0},
		{"half an ICMP header", "drop_malformed", whole(icmpOf(v6), []byte{8, 0, 0}, nil), 0},
		{"the other family's ICMP", "drop_malformed", whole(icmpOf(!v6), []byte{8, 0, 0, 0, 0, 1, 0, 1}, nil), 0},
	}
	if !v6 {
		return append(out,
			specimen{"header length 16", "drop_malformed", whole(17, body, func(h []byte) { h[0] = 0x44 }), 0},
			specimen{"header length beyond the packet", "drop_malformed", whole(17, body[:10], func(h []byte) { h[0] = 0x4f }), 0},
			specimen{"total length below the header", "drop_malformed", whole(17, body, func(h []byte) { h[2], h[3] = 0, 19 }), 0},
			specimen{"a fragment that ends anywhere", "drop_malformed", whole(17, body[:21], func(h []byte) { h[6] = 0x20 }), 0},
			specimen{"a first fragment with half a header", "drop_malformed", whole(6, segment(5, "")[:8], func(h []byte) { h[6] = 0x20 }), 0},
			specimen{"a fragment beyond 64 KiB", "drop_malformed", whole(17, body, func(h []byte) { h[6], h[7] = 0x1f, 0xff }), 0},
		)
	}
	dest := func(next uint8) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }
	chain := func(n int, kind, last uint8, rest []byte) []byte {
		var b []byte
		for i := range n {
			next := kind
			if i == n-1 {
				next = last
			}
			b = append(b, dest(next)...)
		}
		return append(b, rest...)
	}
	return append(out,
		specimen{"a fragment that ends anywhere", "drop_malformed", whole(44, append([]byte{17, 0, 0, 1, 0, 0, 0, 9}, body[:21]...), nil), 0},
		specimen{"the same behind options", "drop_malformed", whole(60, append(dest(44), append([]byte{17, 0, 0, 1, 0, 0, 0, 9}, body[:21]...)...), nil), 0},
		specimen{"a first fragment with half a header", "drop_malformed", whole(44, append([]byte{6, 0, 0, 1, 0, 0, 0, 9}, segment(5, "")[:8]...), nil), 0},
		specimen{"a first fragment with options alone", "drop_malformed", whole(44, append([]byte{60, 0, 0, 1, 0, 0, 0, 9}, dest(17)...), nil), 0},
		specimen{"a fragment beyond 64 KiB", "drop_malformed", whole(44, append([]byte{17, 0, 0xff, 0xf8, 0, 0, 0, 9}, body...), nil), 0},
		specimen{"seven extension headers", "drop_ext_headers", whole(60, chain(7, 60, 17, body), nil), 0},
		specimen{"twenty extension headers", "drop_ext_headers", whole(60, chain(20, 60, 17, body), nil), 0},
		specimen{"an extension header longer than is looked at", "drop_ext_headers", whole(60, append(append([]byte{17, 30, 1, 244}, make([]byte, 244)...), body...), nil), 0},
		specimen{"an extension header cut off", "drop_malformed", whole(60, []byte{17, 0, 1}, nil), 0},
		specimen{"an extension header that leaves nothing", "drop_malformed", whole(60, []byte{17, 5, 1, 4, 0, 0, 0, 0}, nil), 0},
	)
}

func icmpOf(v6 bool) uint8 {
	if v6 {
		return 58
	}
	return 1
}

func (s specimen) frame(src, dst net.HardwareAddr) []byte {
	e := s.ether
	if e == 0 {
		e = ethIPv4
		if s.packet[0]>>4 == 6 {
			e = ethIPv6
		}
	}
	return append(binary.BigEndian.AppendUint16(slices.Concat(dst, src), e), s.packet...)
}

// malformedByPod: whatever makes no sense is dropped at the pod's door.
func (w *world) malformedByPod() {
	src, gw := w.mac("villain", "eth0"), w.gateway("villain")
	w.families(func(v6 bool) {
		for _, dst := range []string{"victim", "peer", "node-a", "ext"} {
			for _, s := range specimens(w.addr("villain", v6), w.addr(dst, v6)) {
				w.counted(s.what+" to "+dst, "villain", "node-a", s.reason, "from_pod", s.frame(src, gw))
			}
		}
		own := w.addr("villain", v6)
		multicast := []string{"224.0.0.251", "239.1.1.1", "255.255.255.255"}
		if v6 {
			multicast = []string{"ff02::fb", "ff05::1:3", "ff0e::1"}
		}
		for _, m := range multicast {
			b := datagram(sport, port, mark)
			s := specimen{packet: append(header(own, netip.MustParseAddr(m), 17, len(b), nil), b...)}
			w.counted("multicast to "+m, "villain", "node-a", "drop_multicast", "from_pod", s.frame(src, gw))
		}
	})
	whole := append(header(w.addr("villain", false), w.addr("victim", false), 17, len(datagram(1, 2, mark)), nil), datagram(sport, port, mark)...)
	mapped := func(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }
	body := datagram(sport, port, mark)
	v4, v6 := w.addr("villain", false), w.addr("villain", true)
	for _, s := range []specimen{
		{"a cut IPv4 header", "drop_malformed", whole[:12], ethIPv4},
		{"no IPv4 header", "drop_malformed", []byte{}, ethIPv4},
		{"IPv4 version 5", "drop_malformed", append([]byte{0x55}, whole[1:]...), ethIPv4},
		{"a cut IPv6 header", "drop_malformed", header(v6, w.addr("victim", true), 17, 0, nil)[:30], ethIPv6},
		{"IPv4 as IPv6", "drop_malformed", append(slices.Clone(whole), make([]byte, 40)...), ethIPv6},
		{"LLDP", "drop_unknown_l3", []byte("\x02\x07\x04" + mark), 0x88cc},
		{"a VLAN tag", "drop_unknown_l3", slices.Concat([]byte{0, 5, 8, 0}, whole), 0x8100},
		{"two VLAN tags", "drop_unknown_l3", slices.Concat([]byte{0, 5, 0x81, 0, 0, 6, 8, 0}, whole), 0x88a8},
		{"MPLS", "drop_unknown_l3", slices.Concat([]byte{0, 1, 0, 64}, whole), 0x8847},
		{"a length instead of a type", "drop_unknown_l3", []byte("\xaa\xaa\x03\x00\x00\x00\x08\x00" + mark), 60},
		{"mapped source", "drop_v4_mapped", append(header(mapped(v4), w.addr("victim", true), 17, len(body), nil), body...), ethIPv6},
		{"mapped destination", "drop_v4_mapped", append(header(v6, mapped(w.addr("victim", false)), 17, len(body), nil), body...), ethIPv6},
	} {
		w.counted(s.what, "villain", "node-a", s.reason, "from_pod", s.frame(src, gw))
	}
}

// malformedToPod: the same from the underlay, to a pod's own address. What
// is no packet for a pod is the host's to judge.
func (w *world) malformedToPod() {
	src, dst := w.mac("ext", "eth0"), w.mac("node-a", "eth0")
	w.families(func(v6 bool) {
		for _, s := range specimens(w.addr("ext", v6), w.addr("victim", v6)) {
			w.counted(s.what, "ext", "node-a", s.reason, "from_netdev", s.frame(src, dst))
		}
	})
	body := datagram(sport, port, mark)
	mapped := netip.AddrFrom16(w.addr("victim", false).As16())
	s := specimen{packet: append(header(w.addr("ext", true), mapped, 17, len(body), nil), body...)}
	w.counted("mapped destination", "ext", "node-a", "drop_v4_mapped", "from_netdev", s.frame(src, dst))
	// Frames for another machine, which the switch floods, are not looked at.
	s = specimens(w.addr("ext", false), w.addr("victim", false))[0]
	w.send("ext", s.frame(src, net.HardwareAddr{2, 0, 0, 0, 0, 99}))
	whole := append(header(w.addr("ext", false), w.addr("victim", false), 17, len(body), nil), body...)
	w.send("ext", specimen{packet: whole}.frame(src, net.HardwareAddr{2, 0, 0, 0, 0, 99}))
}

// malformedInTunnel: the same inside a known node's tunnel.
func (w *world) malformedInTunnel() {
	outer, to := w.addr("node-b", false), ap(w.addr("node-a", false), 4789)
	mac := w.mac("node-a", "podweir.vxlan")
	wrap := func(inner []byte) []byte {
		head := []byte{8, 0, 0, 0, 0, vni >> 8, vni & 0xff, 0}
		return w.fromWire("node-a", false, udp(ap(outer, 55555), to, append(head, inner...))...)
	}
	w.families(func(v6 bool) {
		for _, s := range specimens(w.addr("peer", v6), w.addr("victim", v6)) {
			w.counted(s.what, "ext", "node-a", s.reason, "from_overlay", wrap(s.frame(net.HardwareAddr{2, 'p', 'w', 0, 0, 1}, mac)))
		}
	})
	inner := func(s specimen) []byte { return wrap(s.frame(net.HardwareAddr{2, 'p', 'w', 0, 0, 1}, mac)) }
	arp := append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, make([]byte, 20)...)
	w.counted("ARP", "ext", "node-a", "drop_multicast", "from_overlay", inner(specimen{packet: arp, ether: 0x0806}))
	w.counted("LLDP", "ext", "node-a", "drop_unknown_l3", "from_overlay", inner(specimen{packet: []byte(mark), ether: 0x88cc}))
	w.counted("a VLAN tag", "ext", "node-a", "drop_unknown_l3", "from_overlay", inner(specimen{packet: []byte("\x00\x05\x08\x00" + mark), ether: 0x8100}))
	// Tunnel packets that the kernel's device refuses itself.
	for _, payload := range [][]byte{{}, {8}, {8, 0, 0, 0, 0, 16, 0, 0}, {8, 0, 0, 0, 0, 16, 0, 0, 1, 2, 3}, append([]byte{0, 0, 0, 0, 0, 16, 0, 0}, make([]byte, 60)...), append([]byte{0xff, 0xff, 0xff, 0xff, 0, 16, 0, 0}, make([]byte, 60)...)} {
		w.send("ext", w.fromWire("node-a", false, udp(ap(outer, 55555), to, payload)...))
	}
}

// linkOfPod: a pod's own link works, and shows it nobody else.
func (w *world) linkOfPod() {
	mac := w.mac("villain", "eth0")
	own, victim := w.addr("villain", false), w.addr("victim", false)
	arp := slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, mac, own.AsSlice(), make([]byte, 6), victim.AsSlice())
	w.counted("ARP for another pod", "villain", "node-a", "pass", "from_pod",
		specimen{packet: arp, ether: 0x0806}.frame(mac, net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}))
	sender := w.addr("villain", true)
	solicit := slices.Concat([]byte{135, 0, 0, 0, 0, 0, 0, 0}, w.addr("victim", true).AsSlice(), []byte{1, 1}, mac)
	report := []byte{143, 0, 0, 0, 0, 0, 0, 0}
	for _, m := range []struct {
		what, dst string
		body      []byte
		reason    string
	}{
		{"neighbour solicitation for another pod", "ff02::1:ff00:65", solicit, "pass"},
		{"listener report", "ff02::16", report, "pass"},
		{"router solicitation", "ff02::2", []byte{133, 0, 0, 0, 0, 0, 0, 0}, "pass"},
		{"neighbour solicitation to a routed group", "ff05::1", solicit, "drop_multicast"},
	} {
		s := specimen{packet: append(header(sender, netip.MustParseAddr(m.dst), 58, len(m.body), func(h []byte) { h[7] = 255 }), m.body...)}
		w.counted(m.what, "villain", "node-a", m.reason, "from_pod", s.frame(mac, net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}))
	}
	// A ping that is answered comes after any answer to those.
	p, err := w.pod("villain").Ping(w.ctx, victim.String())
	w.must(err)
	if p.Received != 1 {
		w.Errorf("ping: %+v", p)
	}
	for _, p := range w.captures["villain"].Packets() {
		if !p.Outgoing && len(p.Frame) > 38 && binary.BigEndian.Uint16(p.Frame[12:]) == 0x0806 && p.Frame[21] == 2 &&
			netip.AddrFrom4([4]byte(p.Frame[28:32])) == victim {
			w.Errorf("the host answered ARP for another pod: %v", p)
		}
		if !p.Outgoing && p.Outer != nil && p.Outer.Proto == 58 && p.Outer.ICMPType == 136 && index(p.Frame, string(w.addr("victim", true).AsSlice())) >= 0 {
			w.Errorf("the host answered for another pod's IPv6 address: %v", p)
		}
	}
}

// exchange sends one frame whose payload asks a server, and waits for the
// answer on the sender's port.
func (w *world) exchange(what, from string, v6 bool, frame []byte) {
	w.Helper()
	network := "udp4"
	if v6 {
		network = "udp6"
	}
	var u *net.UDPConn
	w.must(w.at(from).Do(func() (err error) {
		u, err = net.ListenUDP(network, &net.UDPAddr{Port: sport + 1000})
		return err
	}))
	defer u.Close()
	w.send(from, frame)
	w.must(u.SetReadDeadline(time.Now().Add(5 * time.Second)))
	if _, _, err := u.ReadFromUDPAddrPort(make([]byte, 512)); err != nil {
		w.Errorf("%s, IPv6 %v: no answer: %v", what, v6, err)
		w.drops("node-a")
	}
}

// ask is a UDP datagram with a right checksum.
func ask(src, dst netip.Addr, dport uint16) []byte {
	b := datagram(sport+1000, dport, "a fine packet")
	pseudo := slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, 0, 0, byte(len(b)), 0, 0, 0, 17}, b)
	if len(b)%2 == 1 {
		pseudo = append(pseudo, 0)
	}
	binary.BigEndian.PutUint16(b[6:], checksum(pseudo))
	return b
}

// odd are packets that are unusual and right.
func odd(src, dst netip.Addr, dport uint16) []specimen {
	body := ask(src, dst, dport)
	if src.Is4() {
		with := func(options ...byte) []byte {
			h := header(src, dst, 17, len(options)+len(body), nil)
			h[0] = 0x45 + byte(len(options)/4)
			h = append(h, options...)
			binary.BigEndian.PutUint16(h[10:], 0)
			binary.BigEndian.PutUint16(h[10:], checksum(h))
			return append(h, body...)
		}
		return []specimen{
			{what: "padding options", packet: with(1, 1, 1, 0)},
			{what: "40 bytes of options", packet: with(slices.Repeat([]byte{1}, 40)...)},
			{what: "router alert", packet: with(148, 4, 0, 0)},
		}
	}
	dest := func(next uint8) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }
	chain := func(n int) []byte {
		var b []byte
		for range n - 1 {
			b = append(b, dest(60)...)
		}
		b = slices.Concat(b, dest(17), body)
		return append(header(src, dst, 60, len(b), nil), b...)
	}
	return []specimen{
		{what: "one extension header", packet: chain(1)},
		{what: "six extension headers", packet: chain(6)},
		{what: "an atomic fragment", packet: append(header(src, dst, 44, 8+len(body), nil), append([]byte{17, 0, 0, 0, 0, 0, 0, 7}, body...)...)},
	}
}

// unusual: right packets pass between pods, on one node and across.
func (w *world) unusual() {
	src, gw := w.mac("villain", "eth0"), w.gateway("villain")
	w.families(func(v6 bool) {
		for _, to := range []string{"victim", "peer"} {
			for _, s := range odd(w.addr("villain", v6), w.addr(to, v6), port) {
				w.exchange(s.what+" to "+to, "villain", v6, s.frame(src, gw))
			}
			// A protocol that nobody here knows is carried as it is.
			body := []byte("an unknown protocol for " + to)
			s := specimen{packet: append(header(w.addr("villain", v6), w.addr(to, v6), 253, len(body), nil), body...)}
			w.send("villain", s.frame(src, gw))
			_, err := w.captures[to].Find(w.ctx, "protocol 253", func(p *cluster.Packet) bool { return contains(p.Frame, string(body)) })
			w.must(err)
		}
	})
}

// hostTraffic: all of it is the host's own business and reaches it.
func (w *world) hostTraffic() {
	src, dst := w.mac("ext", "eth0"), w.mac("node-a", "eth0")
	w.families(func(v6 bool) {
		for from, to := range map[string]string{"ext": "node-a", "node-a": "node-b"} {
			p, err := w.at(from).Ping(w.ctx, w.addr(to, v6).String(), "-size", "4000")
			w.must(err)
			if p.Received != 1 {
				w.Errorf("fragmented ping from %s to %s, IPv6 %v: %+v", from, to, v6, p)
			}
		}
		for _, s := range odd(w.addr("ext", v6), w.addr("node-a", v6), port) {
			w.exchange(s.what+" to the host", "ext", v6, s.frame(src, dst))
		}
		s, err := w.c.Ext.Send(w.ctx, ap(w.addr("node-a", v6), 22).String())
		w.must(err)
		if s.Failed["refused"] != 1 {
			w.Errorf("a closed port of the host, IPv6 %v: %+v", v6, s)
		}
	})
	// Other protocols than IP: a socket of that protocol hears them, behind
	// our program.
	for _, e := range []uint16{0x88cc, 0x8847, 0x9000} {
		w.heard(e, specimen{packet: []byte("of another protocol"), ether: e}.frame(src, dst))
	}
	// A VLAN's frames: behind the tag is a protocol of its own.
	tagged := append([]byte{0, 5, 0x88, 0xb5}, "in a VLAN, long enough for any device"...)
	w.heard(0x88b5, specimen{packet: tagged, ether: 0x8100}.frame(src, dst))
	// Multicast to a group that the host is in.
	group := &net.UDPAddr{IP: net.IPv4(239, 1, 1, 1), Port: 9200}
	var u *net.UDPConn
	w.must(w.at("node-a").Do(func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err == nil {
			u, err = net.ListenMulticastUDP("udp4", ifi, group)
		}
		return err
	}))
	defer u.Close()
	body := datagram(sport, 9200, "to the group")
	s := specimen{packet: append(header(w.addr("ext", false), netip.MustParseAddr("239.1.1.1"), 17, len(body), nil), body...)}
	w.send("ext", s.frame(src, net.HardwareAddr{1, 0, 0x5e, 1, 1, 1}))
	w.must(u.SetReadDeadline(time.Now().Add(5 * time.Second)))
	if _, _, err := u.ReadFrom(make([]byte, 64)); err != nil {
		w.Errorf("multicast to the host: %v", err)
	}
}

// heard sends a frame to node-a and waits for it on a socket of its protocol.
func (w *world) heard(ether uint16, frame []byte) {
	w.Helper()
	fd := -1
	w.must(w.at("node-a").Do(func() (err error) {
		ifi, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		proto := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, ether))
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: ifi.Index, Protocol: proto})
	}))
	defer unix.Close(fd)
	w.send("ext", frame)
	set := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(set, 5000); err != nil || n != 1 {
		w.Errorf("ethertype %#x does not reach the host: %v", ether, err)
	}
}
