package packet

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

var (
	fuzzSeed    = flag.Uint64("seed", 1, "first seed of TestFuzz")
	fuzzPackets = flag.Int("packets", 1000, "packets of TestFuzz per hook and family")
)

func allHooks() []hook { return append(hooks(), toNetdev, toLo) }

// people are all kinds of addresses, and some that are nobody's.
func (f family) people() []netip.Addr {
	a := netip.MustParseAddr
	out := []netip.Addr{
		f.client, f.local, f.third, f.free, f.remote, f.remoteFree, f.far, f.nodeA, f.nodeB, f.nodeC, f.router, f.world,
		f.vip, f.vipLocal, f.vipRemote, f.vipEmpty, f.vipHost, f.lb, f.unowned, f.lost, f.multicast,
	}
	if f.v6 {
		return append(out, a("::"), a("::1"), a("ff02::1"), a("fe80::1"), a("::ffff:10.244.80.65"), a("ff0e::1"))
	}
	return append(out, a("0.0.0.0"), a("127.0.0.1"), a("255.255.255.255"), a("169.254.1.1"), a("0.1.2.3"), a("240.0.0.1"))
}

// source is, most often, who may send what is seen there.
func (w *world) source(r *rand.Rand, h hook) netip.Addr {
	f := w.f
	if r.IntN(4) == 0 {
		return oneOf(r, f.people())
	}
	switch h {
	case fromPod:
		return f.client
	case fromNetdev:
		return oneOf(r, []netip.Addr{f.world, f.world, f.router, f.nodeB})
	case fromOverlay:
		return oneOf(r, []netip.Addr{f.remote, f.nodeB, f.world})
	}
	return f.nodeA
}

func oneOf[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// generate makes one packet for a hook, right in itself.
func (w *world) generate(r *rand.Rand, h hook) []byte {
	pkt := w.packet(r, h)
	switch {
	case h == fromNetdev && r.IntN(3) == 0:
		if !w.f.v6 && r.IntN(2) == 0 {
			return w.inIPIP(r, pkt)
		}
		return w.tunnelled(r, pkt)
	case h == fromOverlay && r.IntN(3) == 0:
		w.say(r, pkt)
	}
	return pkt
}

// packet is one without what is between nodes.
func (w *world) packet(r *rand.Rand, h hook) []byte {
	f := w.f
	if len(w.queue) > 0 && r.IntN(2) == 0 {
		pkt := w.queue[0]
		w.queue = w.queue[1:]
		return slices.Clone(pkt)
	}
	ports := []uint16{svcPort, podPort, nodePort, sctpPort, sctpXlate, 4789, 53, 1000, 1001, 0}
	fr := frame{
		src: ap(w.source(r, h), oneOf(r, ports)), dst: ap(oneOf(r, f.people()), oneOf(r, ports)),
		proto:   oneOf(r, []uint8{maps.ProtoTCP, maps.ProtoTCP, maps.ProtoUDP, maps.ProtoUDP, maps.ProtoSCTP, protoICMP, protoGRE, 255, 0, 60}),
		flags:   oneOf(r, []uint8{syn, syn, ack, syn | ack, fin | ack, rst, rst | ack, 0, 0xff, psh | ack}),
		reply:   r.IntN(4) == 0,
		ttl:     oneOf(r, []uint8{64, 64, 64, 255, 2, 1, 0}),
		payload: make([]byte, oneOf(r, []int{0, 1, 8, 30, 33, 600, 1400, 1472})),
		noSum:   r.IntN(16) == 0,
	}
	if fr.proto != maps.ProtoUDP {
		fr.noSum = false
	}
	for i := range fr.payload {
		fr.payload[i] = byte(r.Uint32())
	}
	if len(w.live) > 0 && r.IntN(2) == 0 {
		live := oneOf(r, w.live)
		live.payload, live.flags = fr.payload, fr.flags
		fr = live
	}
	pkt := fr.bytes(w.t)
	if fr.ttl == 0 && len(w.live) == 0 {
		pkt[map[bool]int{false: 22, true: 21}[f.v6]] = 0
		mend(pkt)
	}
	if !f.v6 && r.IntN(3) == 0 {
		pkt = dontFragment(pkt)
	}
	switch r.IntN(10) {
	case 0:
		if len(fr.payload) >= 16 && r.IntN(3) == 0 {
			pkt = w.fragment(fr, uint16(8*r.IntN(3)), r.IntN(2) == 0)
		} else if len(fr.payload) > 100 {
			pkt = w.pieces(r, fr)
		}
	case 1:
		quoted := fr.back()
		if r.IntN(3) == 0 {
			quoted.src = ap(oneOf(r, f.people()), oneOf(r, ports))
		}
		q := quoted.bytes(w.t)
		if r.IntN(3) == 0 {
			q = q[:14+r.IntN(len(q)-14)]
		}
		pkt = icmpError(w.t, fr.src.Addr(), fr.dst.Addr(), q)
		pkt = kindOfError(r, pkt)
	case 2:
		if f.v6 {
			for _, e := range []extension{{kind: 0, bytes: 8}, {kind: 43, bytes: 24}, {kind: 44, bytes: 8}, {kind: 51, bytes: 24}, {kind: 60, bytes: 8 * (1 + r.IntN(8))}} {
				if r.IntN(2) == 0 {
					pkt = extend(w.t, pkt, e)
				}
			}
		} else if fr.proto == maps.ProtoTCP && len(pkt) >= 54 {
			pkt = withSomeOptions(pkt, r)
		}
	case 3:
		pkt = ethernet(oneOf(r, []uint16{0x0806, 0x88cc, 0x8100, 0x88a8, 0x0800, 0x86dd, 0x8847, 60}), pkt[14:])
	case 4:
		if fr.proto == maps.ProtoTCP {
			pkt = withMSS(pkt)
		}
	}
	return pkt
}

// pieces are the fragments of a datagram, mostly in order: one now, the others
// soon.
func (w *world) pieces(r *rand.Rand, fr frame) []byte {
	parts := cut(fr.bytes(w.t), uint32(r.IntN(4)), 8*(3+r.IntN(60)))
	if len(parts) > 5 {
		parts = append(parts[:4], parts[len(parts)-1])
	}
	if r.IntN(3) == 0 {
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
	}
	w.queue = append(w.queue, parts[1:]...)
	return parts[0]
}

// inIPIP puts a packet into IPv4, not always rightly; or makes a router's word
// about such a packet of ours.
func (w *world) inIPIP(r *rand.Rand, pkt []byte) []byte {
	o := outer()
	out := wrapIPIP(w.t, oneOf(r, []netip.Addr{o.nodeB, o.nodeB, o.nodeC, o.world, o.nodeA}), o.nodeA, pkt)
	switch r.IntN(10) {
	case 0:
		out[15] |= byte(r.IntN(4))
	case 1:
		out[20] |= oneOf(r, []byte{0x20, 0x40, 0x80, 1})
	case 2:
		copy(out[30:], oneOf(r, o.people()).AsSlice())
	case 3:
		return w.tooBigOutside(r, wrapIPIP(w.t, o.nodeA, oneOf(r, []netip.Addr{o.nodeB, o.world}), pkt))
	}
	mend(out)
	return out
}

// tooBigOutside is about a packet between nodes.
func (w *world) tooBigOutside(r *rand.Rand, about []byte) []byte {
	word := binary.BigEndian.AppendUint32(nil, uint32(oneOf(r, []int{0, 68, 1300, 1480, 1500, 1 << 16})))
	quote := about[14 : 14+min(len(about)-14, oneOf(r, []int{20, 28, 36, 44, 548}))]
	return icmp(w.t, outer().router, outer().nodeA, [2]byte{3, 4}, append(word, quote...))
}

// say has the frame say something of its packet: by which node it entered, or
// what backend it is for.
func (w *world) say(r *rand.Rand, frame []byte) {
	f := w.f
	macs := name(ap(oneOf(r, []netip.Addr{f.client, f.client, f.client, f.local, f.free, f.remote, f.nodeA}), oneOf(r, []uint16{podPort, podPort, 53})),
		oneOf(r, []uint8{framePod, framePod, frameHost, frameVia, 9}))
	copy(frame, macs[:])
}

// kindOfError makes another error of a destination unreachable.
func kindOfError(r *rand.Rand, pkt []byte) []byte {
	d, ok := decode(pkt)
	if !ok {
		return pkt
	}
	if d.v6 {
		d.upper[0], d.upper[1] = byte(1+r.IntN(5)), byte(r.IntN(5))
	} else {
		d.upper[0], d.upper[1] = oneOf(r, []byte{3, 3, 4, 5, 11, 12}), byte(r.IntN(5))
	}
	binary.BigEndian.PutUint16(d.upper[6:], uint16(r.IntN(2000)))
	mend(pkt)
	return pkt
}

// withSomeOptions puts IPv4 options into a packet.
func withSomeOptions(pkt []byte, r *rand.Rand) []byte {
	n := 4 * (1 + r.IntN(10))
	out := slices.Concat(pkt[:34], make([]byte, n), pkt[34:])
	for i := 34; i < 34+n; i++ {
		out[i] = 1
	}
	out[14] = 0x40 | byte(5+n/4)
	setLength(out, len(out)-14)
	mend(out)
	return out
}

// withMSS gives a segment that option, as far as there is room in its payload.
func withMSS(pkt []byte) []byte {
	d, ok := decode(pkt)
	if !ok || len(d.upper) < 28 {
		return pkt
	}
	copy(d.upper[20:], []byte{1, 1, 2, 4, 5, 180, 1, 0})
	d.upper[12] = 7 << 4
	mend(pkt)
	return pkt
}

// tunnelled puts a packet behind a tunnel header, not always a right one.
func (w *world) tunnelled(r *rand.Rand, pkt []byte) []byte {
	out := w.wrap(oneOf(r, []netip.Addr{outer().nodeB, outer().nodeB, outer().nodeC, outer().world, outer().nodeA}), pkt)
	switch r.IntN(6) {
	case 0:
		copy(out[56:], []byte{0x02, 'p', 'w', 0, 0, 0x02})
	case 1:
		w.say(r, out[tunnelHeader:])
	case 2:
		if r.IntN(4) == 0 {
			return w.tooBigOutside(r, slices.Concat(out[:26], outer().nodeA.AsSlice(), out[26:30], out[34:]))
		}
	}
	switch r.IntN(12) {
	case 0:
		out[42] = byte(r.Uint32())
	case 1:
		out[46+r.IntN(4)] ^= 1 << r.IntN(8)
	case 2:
		out[43+r.IntN(3)] = byte(r.Uint32())
	case 3:
		out[15] |= byte(r.IntN(4)) // congestion
		mend(out)
	}
	return out
}

// damage spoils a packet in ways that parsers are known to fall for.
func damage(r *rand.Rand, pkt []byte) []byte {
	if r.IntN(3) == 0 || len(pkt) < 54 {
		return mutate(r, append(pkt, make([]byte, max(0, 54-len(pkt)))...))
	}
	out := slices.Clone(pkt)
	v6, be := out[12] == 0x86, binary.BigEndian
	for range 1 + r.IntN(2) {
		base := 14
		if len(out) > 130 && r.IntN(3) == 0 {
			base = 64 // inside of a tunnel header, if there is one
		}
		switch r.IntN(12) {
		case 0: // version and header length
			out[base] = byte(r.IntN(16))<<4 | byte(r.IntN(16))
		case 1:
			out[base] = out[base]&0xf0 | byte(r.IntN(16))
		case 2: // length
			at := base + 2
			if v6 {
				at = base + 4
			}
			be.PutUint16(out[at:], oneOf(r, []uint16{0, 1, 19, 20, 28, uint16(len(out) - base), uint16(len(out) - base + 1), 0xffff}))
		case 3: // fragment bits
			if !v6 {
				be.PutUint16(out[base+6:], oneOf(r, []uint16{0x2000, 0x4000, 0x8000, 1, 0x1fff, 0x3fff}))
			}
		case 4: // protocol
			at := base + 9
			if v6 {
				at = base + 6
			}
			out[at] = oneOf(r, []byte{0, 1, 4, 6, 17, 41, 43, 44, 47, 50, 51, 58, 59, 60, 132, 135, 255})
		case 5: // data offset or UDP length
			if d, ok := decode(out); ok && len(d.upper) > 13 {
				d.upper[12] = byte(r.Uint32())
			}
		case 6:
			if d, ok := decode(out); ok && len(d.upper) >= 8 {
				be.PutUint16(d.upper[4:], oneOf(r, []uint16{0, 7, 8, uint16(len(d.upper)), uint16(len(d.upper) + 1), 0xffff}))
			}
		case 7: // TTL
			at := base + 8
			if v6 {
				at = base + 7
			}
			out[at] = byte(r.IntN(3))
		case 8: // kind of frame
			be.PutUint16(out[12:], oneOf(r, []uint16{0x0800, 0x86dd, 0x0806, 0x8100, 0x88cc}))
		case 9: // longer than it says, or shorter
			out = append(out, make([]byte, 1+r.IntN(40))...)
		case 10:
			out = out[:54+r.IntN(len(out)-53)]
		case 11:
			out[base+r.IntN(min(60, len(out)-base))] = byte(r.Uint32())
		}
		if len(out) < 132 {
			continue
		}
	}
	if r.IntN(2) == 0 {
		mend(out)
	}
	return out
}

// circumstances put a packet where such packets are, with some of what the
// kernel may say of it.
func (w *world) circumstances(r *rand.Rand, h hook, pkt []byte) shot {
	s := w.at(h, pkt)
	s.other = h == fromOverlay && len(pkt) > 14 && says(pkt) > frameVia // its address says something
	switch r.IntN(8) {
	case 0:
		s.gso = oneOf(r, []uint32{1, 8, 536, 1400, 9000})
	case 1:
		s.cut = 14 + r.IntN(max(1, len(pkt)-14))
	case 2:
		s.mark = oneOf(r, []uint32{0x1000, 0x4000, 0xffffffff})
	case 3:
		s.other = h == fromNetdev
	case 4:
		if egress(h) {
			s.iif = oneOf(r, []string{devWire, devLocal})
		}
	case 5:
		if h == fromOverlay {
			s.tunnel.peer = maps.ToAddr(oneOf(r, []netip.Addr{w.f.nodeB, w.f.nodeC, outer().nodeB, w.f.world, w.f.nodeA}))
			s.tunnel.vni = oneOf(r, []uint32{vni, vni, 1, 0xffffff})
		}
	}
	return s
}

// liven opens flows of all kinds, whose packets are then worth spoiling, and
// returns what belongs to them by hook.
func (w *world) liven() map[hook][]frame {
	f := w.f
	out := make(map[hook][]frame)
	add := func(h hook, fr ...frame) { out[h] = append(out[h], fr...) }
	c := w.conn(40000)
	c.send(syn)
	c.answer.flags = syn | ack
	w.arrive(outer().nodeB, c.answer).is(fwdDecap, hitNew)
	add(fromPod, c.out)
	add(fromOverlay, c.answer)
	add(fromNetdev, c.answer, c.answer, c.answer, c.answer)
	// To the world, under this node's address.
	for _, fr := range []frame{tcp(ap(f.client, 40001), ap(f.world, 443), syn), udp(ap(f.client, 40001), ap(f.world, 53)), echo(f.client, f.world, 77)} {
		left := w.pod(devClient, fr).is(fwdWire, miss, created)
		add(fromPod, fr)
		e := w.entry(fr)
		back := fr.back()
		back.dst = ap(f.nodeA, e.Sport)
		_ = left
		add(fromNetdev, back)
	}
	add(fromPod, udp(ap(f.client, 40001), ap(f.nodeB, 4789)))
	// From outside, by a NodePort, to a pod of another node, and directly.
	in := tcp(ap(f.world, 40002), ap(f.nodeA, nodePort), syn)
	w.wire(in).is(fwdEncap, miss, created)
	direct := udp(ap(f.world, 40003), ap(f.client, podPort))
	w.wire(direct).is(fwdLocal, miss, created)
	add(fromNetdev, in, direct)
	add(fromPod, direct.back())
	add(fromOverlay, tcp(ap(f.remote, podPort), in.src, syn|ack))
	// With an entry node's word, and its answer.
	be := ap(f.client, podPort)
	named := udp(ap(f.world, 40010), ap(f.lb, svcPort))
	w.named(f.nodeB, be, framePod, named.bytes(w.t)).is(fwdLocal, miss, created)
	w.named(f.nodeB, be, framePod, named.bytes(w.t)).is(fwdLocal, hitNew)
	add(fromOverlay, named, named)
	add(fromNetdev, named)
	add(fromPod, udp(be, named.src))
	// Of the host.
	call := udp(ap(f.nodeA, 40004), ap(f.vip, svcPort))
	w.host(call).ended(fwdLocal)
	far := tcp(ap(f.nodeA, 40005), ap(f.vipRemote, svcPort), syn)
	w.host(far).ended(fwdTunnel)
	add(toOverlay, call, far)
	add(toNetdev, tcp(ap(f.nodeA, 40006), ap(f.lb, svcPort), syn))
	add(toLo, tcp(ap(f.nodeA, 40007), ap(f.nodeA, nodePort), syn))
	add(toPod, tcp(ap(f.nodeA, 40008), ap(f.client, podPort), syn))
	return out
}

// everything is a datapath that does all that is not done unless asked for.
var everything = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 32768, FlowsNewMax: 32768, DSR: true, FragIfindex: reassembles})
})

// TestFuzz has every hook see thousands of packets, from right ones to
// garbage, with flows, services and policies behind it, and then with maps
// that hold nonsense; as a node does by default, and with all that it may do.
// What must hold for each is in sane_test.go. A failure names the seed: -seed N
// -packets M repeats it.
func TestFuzz(t *testing.T) {
	expected := []reason{
		passed, fwdLocal, fwdTunnel, fwdWire, fwdHost, fwdEncap, fwdDecap, malformed, spoofedSource, spoofedFlow, unrelated, refused,
		multicasted, ttlDrop, ttlSent, tooBigSent, beforeFirst, bpf.DpPwReasonPW_DROP_POD_VXLAN,
	}
	t.Run("default", func(t *testing.T) {
		both(t, func(t *testing.T, w *world) { w.fuzzHooks(t, w.ways, expected...) })
	})
	t.Run("everything", func(t *testing.T) {
		both(t, func(t *testing.T, w *world) {
			w.use(everything)
			w.dsr, w.defrags = true, true
			more := append(expected, reassembly)
			if !w.f.v6 {
				more = append(more, fwdIPIP)
			}
			w.fuzzHooks(t, w.ipip, more...)
		})
	})
}

// fuzzHooks throws packets at all hooks, and wants to have seen some reasons.
func (w *world) fuzzHooks(t *testing.T, ways func(), expected ...reason) {
	total := make(map[reason]uint64)
	for _, h := range allHooks() {
		t.Run(maps.HookName(h), func(t *testing.T) { w.fuzzHook(t, ways, h, total) })
	}
	t.Logf("seed %d: %d reasons were seen", *fuzzSeed, len(total))
	for _, why := range expected {
		if total[why] == 0 && !t.Failed() && *fuzzPackets >= 1000 {
			t.Errorf("no packet of them all was counted as %s", maps.ReasonName(why))
		}
	}
}

// fuzzHook does so at one, and adds to total what was counted.
func (w *world) fuzzHook(t *testing.T, ways func(), h hook, total map[reason]uint64) {
	w.t = t
	for _, hostile := range []bool{false, true} {
		w.fill()
		ways()
		w.firsts, w.queue, w.live = make(map[datagramKey]int), nil, nil
		w.live = w.liven()[h]
		r := rand.New(rand.NewPCG(*fuzzSeed, uint64(h)))
		n := *fuzzPackets
		if hostile {
			n /= 3
		}
		for i := range n {
			if hostile && i%50 == 0 {
				w.poison(r)
			}
			w.fuzz(r, h, i, hostile, total)
		}
	}
}

// fuzz sends one packet.
func (w *world) fuzz(r *rand.Rand, h hook, i int, hostile bool, total map[reason]uint64) {
	w.t.Helper()
	pkt := w.generate(r, h)
	if r.IntN(3) > 0 {
		pkt = damage(r, pkt)
	}
	res := w.throw(w.circumstances(r, h, pkt), hostile)
	if res.msg != "" {
		s := res.shot
		w.t.Fatalf("seed %d, packet %d at %s, hostile maps %v: %s: %v, action %d, mark %#x, gso %d, cut %d, by %q\n in  %x\n out %x",
			*fuzzSeed, i, maps.HookName(h), hostile, res.msg, res, int32(res.action), s.mark, s.gso, s.cut, s.iif, s.pkt, res.out)
	}
	for why, n := range res.counts {
		total[why] += n
	}
	if res.counts[reassembly] != 0 {
		w.fuzzRisen(r, h, i, hostile, res.out)
	}
}

// fuzzRisen sends what rose at a hook, or what has become of it, out of the
// reassembly: nothing of it enters the stack as it is, none but a first fragment
// begins a flow, and what was right stays right.
func (w *world) fuzzRisen(r *rand.Rand, was hook, i int, hostile bool, pkt []byte) {
	w.t.Helper()
	if r.IntN(3) == 0 {
		pkt = damage(r, slices.Clone(pkt))
	}
	for len(pkt) < 54 {
		pkt = append(pkt, 0)
	}
	res := w.fire(shot{hook: fromFrag, dev: devFrag, risen: was, pkt: pkt, hostile: hostile, other: r.IntN(9) == 0})
	msg := res.spoiled()
	_, off, cut := w.datagram(res.shot, pkt)
	_, one := res.ends()
	switch {
	case msg != "":
	case res.action == actNext:
		msg = "enters the stack by the reassembly's device"
	case res.counts[reassembly] != 0:
		msg = "rises again"
	case cut && off != 0 && res.counts[created] != 0:
		msg = "a later fragment began a flow"
	case !one && !res.told() && !res.shot.other:
		msg = "not exactly one outcome"
	}
	if msg != "" {
		w.t.Fatalf("seed %d, packet %d, risen at %s, hostile maps %v: %s: %v, action %d\n in  %x\n out %x",
			*fuzzSeed, i, maps.HookName(was), hostile, msg, res, int32(res.action), pkt, res.out)
	}
}

type thrown struct {
	*result
	msg string
}

// throw sends a packet that may be anything. Frames too short for a test run
// are filled up.
func (w *world) throw(s shot, hostile bool) thrown {
	w.t.Helper()
	for len(s.pkt) < 54 {
		s.pkt = append(s.pkt, 0)
	}
	if len(s.pkt) > 3000 {
		s.pkt = s.pkt[:3000]
	}
	s.cut = min(s.cut, len(s.pkt)-1)
	// A cut frame is none that a device would segment; what is too large for
	// its length field has TestGSOLengths.
	if s.cut != 0 || !bytes.Equal(sized(s.pkt), s.pkt) {
		s.gso = 0
	}
	s.hostile = hostile
	res := thrown{result: w.fire(s)}
	w.remember(res.shot)
	if !hostile {
		res.msg = res.broken()
	} else if res.msg = res.spoiled(); res.msg == "" {
		res.msg = res.unanswered()
	}
	if res.msg == "" && !res.told() {
		res.msg = w.insane(res.result, hostile)
	}
	return res
}

// poison writes into the maps what the agent never would.
func (w *world) poison(r *rand.Rand) {
	w.t.Helper()
	s, f := &w.set, w.f
	number := func() uint32 { return oneOf(r, []uint32{0, 1, 2, 7, 100, 65535, 1 << 20, 0xffffffff, r.Uint32()}) }
	people := f.people()
	for range 8 {
		a := maps.ToAddr(oneOf(r, people))
		switch r.IntN(10) {
		case 9:
			put(w, s.NodesV6, uint32(r.IntN(4)), maps.NodeV6{Pods: a, Host: maps.ToAddr(oneOf(r, people))})
		case 0:
			put(w, s.Endpoints, a, maps.Endpoint{Ifindex: number(), PolicyIn: uint32(r.IntN(3)), PolicyOut: uint32(r.IntN(3)), Identity: number(), Slot: number()})
		case 1:
			put(w, s.Addrs, a, maps.Peer{Identity: number(), Slot: number(), Node: number(), Flags: number()})
		case 2:
			n := maps.Node{Addr: maps.ToAddr(oneOf(r, people)), Nexthop: maps.ToAddr(oneOf(r, people)), Ifindex: number(), Mtu: uint16(number()), Flags: uint16(number()) &^ maps.NodeHeader}
			put(w, s.Nodes, uint32(r.IntN(4)), n)
		case 3:
			put(w, s.NodeIDs, a, number())
		case 4:
			k := maps.ServiceKey{Addr: a, Port: oneOf(r, []uint16{svcPort, podPort, nodePort, 0}), Proto: oneOf(r, []uint8{maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP})}
			put(w, s.Services, k, maps.Service{Id: number(), Set: uint32(r.IntN(9)), Count: number(), ExtSet: uint32(r.IntN(9)), ExtCount: number(), Maglev: number(), Affinity: number(), Flags: number()})
		case 5:
			put(w, s.Backends, maps.BackendKey{Set: uint32(r.IntN(9)), Slot: uint32(r.IntN(3))}, maps.Backend{Addr: maps.ToAddr(oneOf(r, people)), Port: uint16(r.Uint32())})
		case 6:
			put(w, s.Gens, uint32(r.IntN(slotMax)), number())
		case 7:
			put(w, s.DevAddrs, uint32(r.IntN(4)), maps.DevAddrs{V4: maps.ToAddr(oneOf(r, families()[0].people())), V6: maps.ToAddr(oneOf(r, families()[1].people()))})
		case 8:
			w.poisonFlow(r, number)
		}
	}
}

// poisonFlow spoils what one entry of a live flow says.
func (w *world) poisonFlow(r *rand.Rand, number func() uint32) {
	w.t.Helper()
	if len(w.live) == 0 {
		return
	}
	k := oneOf(r, w.live).key()
	for _, m := range []maps.Map[maps.FlowKey, maps.Flow]{w.set.Flows, w.set.FlowsNew} {
		e, ok, err := m.Get(k)
		if err != nil {
			w.t.Fatal(err)
		}
		if !ok {
			continue
		}
		switch r.IntN(9) {
		case 8:
			e.Entry, e.Frame, e.Nexthop = uint16(number()), uint8(r.IntN(7)), maps.ToAddr(oneOf(r, w.f.people()))
		case 0:
			e.To = maps.Place{Id: number(), Kind: uint8(r.IntN(7))}
		case 1:
			e.From = maps.Place{Id: number(), Kind: uint8(r.IntN(7))}
		case 2:
			e.Flags = uint8(r.Uint32())
		case 3:
			e.Tcp, e.Verdict, e.Reason = uint8(r.Uint32()), uint8(r.IntN(4)), uint8(oneOf(r, []reason{0, ingressDenied, malformed}))
		case 4:
			e.Src, e.Dst = maps.ToAddr(oneOf(r, w.f.people())), maps.ToAddr(oneOf(r, w.f.people()))
			e.Flags |= uint8(flagXlate)
		case 5:
			e.Sport, e.Dport, e.TwinVia = uint16(r.Uint32()), uint16(r.Uint32()), uint16(number())
			e.Flags |= uint8(flagXlate)
		case 6:
			e.LastSeen, e.Created = uint64(number()), uint64(number())
		case 7:
			e.SrcGen, e.DstGen, e.Service = maps.GenRef{Slot: number(), Gen: number()}, maps.GenRef{Slot: number(), Gen: number()}, number()
		}
		put(w, m, k, e)
	}
}

// FuzzHooks does the same with the fuzzer's choice of bytes.
func FuzzHooks(f *testing.F) {
	d, err := standard()
	if err != nil {
		f.Fatal(err)
	}
	for i, fam := range families() {
		w := &world{t: f, f: fam, datapath: d}
		w.fill()
		w.ways()
		live := w.liven()
		r := rand.New(rand.NewPCG(1, uint64(i)))
		for which, h := range allHooks() {
			w.live = live[h]
			for range 8 {
				f.Add(byte(which), fam.v6, w.generate(r, h))
			}
		}
	}
	f.Fuzz(func(t *testing.T, which byte, v6 bool, pkt []byte) {
		all := allHooks()
		w := &world{t: t, f: families()[0], datapath: d}
		if v6 {
			w.f = families()[1]
		}
		w.fill()
		w.ways()
		w.liven()
		h := all[int(which)%len(all)]
		if res := w.throw(w.at(h, pkt), false); res.msg != "" {
			t.Fatalf("%s: %s: %v\n in  %x\n out %x", maps.HookName(h), res.msg, res, res.shot.pkt, res.out)
		}
	})
}
