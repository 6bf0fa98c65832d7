package packet

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/podweir/podweir/internal/bpf"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

// A sequence is a string of bytes: which conversations it is about, then
// steps of stepLen bytes. Random tests draw the bytes, the fuzzer chooses
// them; both go through the same reading, and any bytes are a sequence.
type sequence struct {
	talks [4]int // indexes of conversations
	steps []step
}

const (
	headLen = 2
	stepLen = 6
)

// step is one thing that happens. How the numbers are read depends on op.
type step struct{ op, talk, flags, from, x, y byte }

func readSequence(b []byte) sequence {
	var s sequence
	n := len(conversations(families()[0]))
	if len(b) < headLen {
		b = make([]byte, headLen)
	}
	// Neighbours in the list get in each other's way.
	for i := range s.talks {
		s.talks[i] = (int(b[0]) + i) % n
	}
	s.talks[3] = int(b[1]) % n
	for b = b[headLen:]; len(b) >= stepLen; b = b[stepLen:] {
		s.steps = append(s.steps, step{b[0], b[1] % 4, b[2], b[3], b[4], b[5]})
	}
	return s
}

// conversation is who calls whom.
type conversation struct {
	src, dst netip.AddrPort
	proto    uint8
	via      uint32 // node that a source outside the cluster enters by
}

func (c conversation) key() flowKey {
	k := frame{src: c.src, dst: c.dst, proto: c.proto}.key()
	k.Via = uint16(c.via)
	return k
}

func conversations(f family) []conversation {
	const tcp, udp, sctp = pwmaps.ProtoTCP, pwmaps.ProtoUDP, pwmaps.ProtoSCTP
	client, host, world := ap(f.client, 40000), ap(f.nodeA, 40000), ap(f.world, 40000)
	own := ap(f.client, podPort)
	return []conversation{
		{client, ap(f.vip, svcPort), tcp, 0},
		{client, ap(f.vipLocal, svcPort), tcp, 0},
		{client, ap(f.local, podPort), tcp, 0},
		{ap(f.local, podPort), client, tcp, 0},
		{client, ap(f.vip, svcPort), tcp, 0},
		{client, ap(f.vipRemote, svcPort), tcp, 0},
		{client, ap(f.remote, podPort), tcp, 0},
		{ap(f.remote, podPort), client, tcp, 0},
		{client, ap(f.vipLocal, svcPort), udp, 0},
		{client, ap(f.local, podPort), udp, 0},
		{ap(f.local, podPort), client, udp, 0},
		{client, ap(f.vip, svcPort), udp, 0},
		{client, ap(f.third, podPort), udp, 0},
		{client, ap(f.vipRemote, svcPort), udp, 0},
		{client, ap(f.remote, podPort), udp, 0},
		{host, ap(f.vipLocal, svcPort), tcp, 0},
		{host, ap(f.local, podPort), tcp, 0},
		{host, ap(f.vip, svcPort), tcp, 0},
		{host, ap(f.vipRemote, svcPort), tcp, 0},
		{host, ap(f.remote, podPort), tcp, 0},
		{host, ap(f.vipLocal, svcPort), udp, 0},
		{host, ap(f.local, podPort), udp, 0},
		{world, own, tcp, nodeIDB},
		{world, own, tcp, nodeIDC},
		{world, own, tcp, 0},
		{world, own, udp, nodeIDC},
		{world, own, udp, nodeIDB},
		{world, own, udp, 0},
		{own, world, udp, 0},
		{client, ap(f.world, 443), tcp, 0},
		{client, ap(f.nodeA, 22), tcp, 0},
		{client, ap(f.nodeB, 22), tcp, 0},
		{ap(f.nodeB, 40000), own, tcp, 0},
		{ap(f.far, 40000), own, tcp, 0},
		{client, ap(f.far, podPort), tcp, 0},
		{ap(f.remote, 40000), own, udp, 0},
		{ap(f.client, 7), ap(f.remote, 0), protoICMP, 0},
		{ap(f.client, 7), ap(f.local, 0), protoICMP, 0},
		{ap(f.client, 0), ap(f.local, 0), protoGRE, 0},
		{client, ap(f.vip, sctpPort), sctp, 0},
		{client, ap(f.third, sctpPort), sctp, 0},
		{client, ap(f.vip, sctpXlate), sctp, 0},
		{client, ap(f.vipEmpty, svcPort), tcp, 0},
		{client, ap(f.vipHost, svcPort), tcp, 0},
		{host, ap(f.vipHost, svcPort), tcp, 0},
		{client, ap(f.vip, svcPort+1), tcp, 0},
		{client, ap(f.nodeB, 4789), udp, 0},
		{client, ap(f.unowned, svcPort), udp, 0},
		{client, ap(f.free, podPort), udp, 0},
		{client, ap(f.lost, podPort), udp, 0},
		{client, ap(f.multicast, podPort), udp, 0},
		{world, ap(f.nodeA, nodePort), tcp, 0},
		{world, ap(f.lb, svcPort), tcp, 0},
		{world, ap(f.lb, svcPort), udp, 0},
		{ap(f.nodeB, 40000), ap(f.nodeA, nodePort), tcp, 0},
		{ap(f.world, 40001), ap(f.nodeA, podPort), tcp, 0},
		{ap(f.world, 40001), ap(f.lb, svcPort+1), tcp, 0},
		{world, ap(f.vip, svcPort), tcp, 0},
		{world, ap(f.vip, svcPort+1), tcp, 0},
		{ap(f.nodeB, 40000), own, tcp, nodeIDC},
		{client, ap(f.nodeB, nodePort), tcp, 0},
		{client, ap(f.lb, svcPort), udp, 0},
		{ap(f.local, 40000), ap(f.vipLocal, svcPort), tcp, 0},
		{ap(f.local, 40000), ap(f.vipLocal, svcPort), udp, 0},
		{client, ap(f.world, 53), udp, 0},
		{ap(f.client, 7), ap(f.world, 0), protoICMP, 0},
		{ap(f.client, 0), ap(f.world, 0), protoGRE, 0},
	}
}

// What TCP peers say, the usual things more often.
var (
	callerFlags    = []uint8{syn, syn, syn, ack, ack, ack, ack | psh, ack | psh, fin | ack, fin | ack, rst, rst | ack, syn | ack, syn | rst, fin, 0}
	responderFlags = []uint8{syn | ack, syn | ack, syn | ack, ack, ack, ack | psh, ack | psh, fin | ack, fin | ack, rst, rst | ack, syn, ack, ack, fin, 0}
)

func (s step) String() string {
	return fmt.Sprintf("op %d talk %d flags %d from %d x %d y %d", s.op, s.talk, s.flags, s.from, s.x, s.y)
}

// home is the place where packets with that source are sent.
func (e *engine) home(a netip.Addr) place {
	t := e.m.resolve(pwmaps.ToAddr(a))
	switch {
	case t.dev != 0:
		return place{bpf.DpPwPlaceKindPW_PLACE_POD, t.dev}
	case t.flags&pwmaps.PeerHost != 0:
		return hostPlace()
	case t.node != 0:
		return nodePlace(t.node)
	}
	return e.w.wirePlace()
}

// sender is a place packets are sent from, and how.
type sender struct {
	place
	via   bool // a source outside the cluster, says the node
	stack bool // through this node's stack
}

// liars are all places there are; most have no business with a given tuple.
func (e *engine) liars() []sender {
	w := e.w
	return []sender{
		{place: w.podPlace(devClient)}, {place: w.podPlace(devLocal)}, {place: w.podPlace(devThird)},
		{place: w.wirePlace()}, {place: place{bpf.DpPwPlaceKindPW_PLACE_WIRE, w.index(devWire2)}},
		{place: nodePlace(nodeIDB)}, {place: nodePlace(nodeIDC)},
		{place: nodePlace(nodeIDB), via: true}, {place: nodePlace(nodeIDC), via: true},
		{place: hostPlace()}, {place: w.wirePlace(), stack: true},
	}
}

func (e *engine) pick(s step, honest sender) sender {
	if s.from < 215 {
		return honest
	}
	all := e.liars()
	return all[int(s.from)%len(all)]
}

// packet names the hook that a tuple meets first when it is sent from there.
func (e *engine) packet(k flowKey, from sender, s step) packet {
	p := packet{key: k, from: from.place, ttl: 64}
	p.key.Via = 0
	if k.Proto == pwmaps.ProtoTCP {
		p.flags = s.flags
	}
	if s.y%32 == 0 {
		p.ttl = 1
	}
	pod, toPodOfOurs := e.m.pods[k.Dst]
	switch {
	case from.kind == bpf.DpPwPlaceKindPW_PLACE_POD:
		p.hook, p.dev = fromPod, from.id
	case from.kind == bpf.DpPwPlaceKindPW_PLACE_NODE:
		p.hook, p.dev = fromOverlay, e.w.index(devOverlay)
		p.decap, p.ipip = s.y&1 == 0, s.y&2 == 0 && !e.w.f.v6
		if from.via {
			p.key.Via = uint16(from.id)
		}
	case from.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE && !from.stack:
		p.hook, p.dev = fromNetdev, from.id
	case toPodOfOurs:
		p.hook, p.dev = toPod, pod.Ifindex
	default:
		p.hook, p.dev = toOverlay, e.w.index(devOverlay)
	}
	return p
}

// tuples of a conversation as they are on the wire at this moment: behind a
// service the answer's is known once there is a flow.
func (e *engine) tuples(c conversation) (out, back flowKey) {
	out = c.key()
	for _, f := range e.m.flows {
		if f.key == out {
			return out, f.back
		}
	}
	back = out
	back.Src, back.Sport, back.Dst, back.Dport, back.Via = out.Dst, out.Dport, out.Src, out.Sport, 0
	if _, all := e.m.choices(out, e.home(c.src.Addr()).kind); len(all) != 0 {
		back.Src, back.Sport = pwmaps.ToAddr(all[0].Addr()), all[0].Port()
	}
	return out, back
}

// play does one step in the datapath and in the model. It returns what
// differs, or nothing.
func (e *engine) play(seq *sequence, s step) string {
	c := e.talks[seq.talks[s.talk]]
	switch op := s.op % 100; {
	case op < 30:
		s.flags = callerFlags[int(s.flags)%len(callerFlags)]
		return e.ask(c, s)
	case op < 52:
		s.flags = responderFlags[int(s.flags)%len(responderFlags)]
		return e.answer(c, s)
	case op < 60: // the usual beginning
		s.from, s.y = 0, s.y|1
		for i, flags := range []uint8{syn, syn | ack, ack} {
			s.flags = flags
			say := e.ask
			if i == 1 {
				say = e.answer
			}
			if msg := say(c, s); msg != "" {
				return msg
			}
		}
		return ""
	case op < 66:
		return e.report(c, s)
	case op < 76:
		return e.age(s)
	case op < 80:
		return e.sweep(s)
	case op < 84:
		return e.pushOut(s)
	default:
		return e.change(s, op-84)
	}
}

// ask sends the initiator's packet, answer the responder's.
func (e *engine) ask(c conversation, s step) string {
	out, _ := e.tuples(c)
	honest := sender{place: e.home(c.src.Addr())}
	if c.via != 0 {
		honest = sender{place: nodePlace(c.via), via: true}
	}
	return e.send(e.packet(out, e.pick(s, honest), s), false)
}

func (e *engine) answer(c conversation, s step) string {
	_, back := e.tuples(c)
	honest := sender{place: e.home(pwmaps.FromAddr(back.Src))}
	return e.send(e.packet(back, e.pick(s, honest), s), true)
}

// report sends an ICMP error about a packet of the conversation, in the form
// in which it left this node or arrived.
func (e *engine) report(c conversation, s step) string {
	out, back := e.tuples(c)
	quoted := []flowKey{out, back}[s.x&1]
	f, dir := e.m.find(quoted)
	seen := quoted
	if f != nil && s.x&2 != 0 {
		to := f.entry(dir)
		seen.Src, seen.Sport, seen.Dst, seen.Dport = to.Src, to.Sport, to.Dst, to.Dport
	}
	seen.Via = 0
	fam := e.w.f
	speakers := []addr{seen.Dst, seen.Dst, seen.Dst, pwmaps.ToAddr(fam.nodeB), pwmaps.ToAddr(fam.nodeA), pwmaps.ToAddr(fam.third), pwmaps.ToAddr(fam.router)}
	k := flowKey{Src: speakers[int(s.flags)%len(speakers)], Dst: seen.Src, Proto: fam.icmpProto()}
	if s.x > 250 {
		k.Dst = pwmaps.ToAddr(fam.third)
	}
	honest := sender{place: e.home(pwmaps.FromAddr(k.Src))}
	if f != nil && dir == reply && f.key.Via != 0 && k.Src == f.key.Src {
		honest = sender{place: nodePlace(uint32(f.key.Via)), via: true}
	}
	p := e.packet(k, e.pick(s, honest), s)
	p.quote = &seen
	return e.send(p, false)
}

// age moves a flow's birth and last packets into the past: those of one
// entry, or of both.
func (e *engine) age(s step) string {
	if len(e.m.flows) == 0 {
		return ""
	}
	f := e.m.flows[int(s.talk)%len(e.m.flows)]
	by := uint64(s.x%10)*timeUnit + timeUnit/2
	f.created = e.w.now() - by
	for dir, k := range []flowKey{f.key, f.back} {
		if !f.have[dir] {
			continue
		}
		if s.y%4 != byte(dir) { // 2 and 3: both
			f.seen[dir] = e.w.now() - by
		}
		m := e.w.set.FlowsNew
		if f.confirmed {
			m = e.w.set.Flows
		}
		v, ok, err := m.Get(k)
		if err != nil || !ok {
			return fmt.Sprintf("entry %s to be aged: %v, %v", pwmaps.KeyString(k), ok, err)
		}
		v.Created = f.created
		if s.y%4 != byte(dir) {
			v.LastSeen = f.seen[dir]
		}
		put(e.w, m, k, v)
	}
	return ""
}

func (e *engine) sweep(s step) string {
	var keys []flowKey
	for i, k := range e.read() {
		if s.x&1 == 0 || i%2 == 0 {
			keys = append(keys, k)
		}
	}
	if len(keys) > 64 {
		keys = keys[:64]
	}
	e.m.now = e.w.now()
	want := e.m.sweep(keys)
	if got := e.w.sweep(keys...); got != want {
		return fmt.Sprintf("swept %d flows, want %d", got, want)
	}
	return e.compare()
}

// pushOut is what a flood does: one entry of an unconfirmed flow goes.
func (e *engine) pushOut(s step) string {
	if len(e.m.flows) == 0 {
		return ""
	}
	f := e.m.flows[int(s.talk)%len(e.m.flows)]
	dir, k := int(s.x&1), f.key
	if dir == reply {
		k = f.back
	}
	if !f.have[dir] {
		return ""
	}
	if _, ok, err := e.w.set.FlowsNew.Get(k); err != nil {
		e.w.t.Fatal(err)
	} else if ok {
		e.pushed++
	}
	del(e.w, e.w.set.FlowsNew, k)
	if f.confirmed {
		return ""
	}
	f.have[dir] = false
	if !f.have[orig] && !f.have[reply] {
		e.m.end(f)
	}
	return ""
}

// change is something the agent does.
func (e *engine) change(s step, kind byte) string {
	w, c, f := e.w, e.m.cluster, e.w.f
	pods := []netip.Addr{f.client, f.local, f.third}
	pod := pods[int(s.x)%len(pods)]
	slot := uint32(slotClient + int(s.x)%len(pods))
	a := pwmaps.ToAddr(pod)
	ep, there := c.pods[a]
	switch {
	case kind < 4: // a generation moves and nothing else
		c.moved(w, slotShared+uint32(s.x)%(slotMax-1))
	case kind < 8: // policy
		if !there {
			return ""
		}
		table := uint32(s.y>>2) % 6
		if table == 5 {
			table = tableDefault
		}
		switch s.y & 3 {
		case 0, 2:
			ep.PolicyIn = table
		case 1:
			ep.PolicyOut = table
		default: // a qdisc comes or goes
			ep.Flags ^= pwmaps.EndpointQdisc
		}
		edit(w, w.set.Endpoints, c.pods, a, &ep)
		c.moved(w, slot)
	case kind < 10: // a pod's address behind another interface, or gone
		was := e.base.pods[a]
		switch s.y % 4 {
		case 0:
			edit(w, w.set.Endpoints, c.pods, a, nil)
		case 1:
			was.Ifindex, was.Mac = w.index(devThird), mac(0x43)
			edit(w, w.set.Endpoints, c.pods, a, &was)
		default:
			edit(w, w.set.Endpoints, c.pods, a, &was)
		}
		c.moved(w, slot, slotShared)
	case kind < 12: // a remote pod's address at another node, or gone
		a := pwmaps.ToAddr(f.remote)
		was := e.base.addrs[a]
		was.Node = nodeIDB + uint32(s.y&1)
		edit(w, w.set.Addrs, c.addrs, a, &was)
		if s.y%8 == 7 {
			edit(w, w.set.Addrs, c.addrs, a, nil)
		}
		c.moved(w, slotRemote, slotShared)
	case kind == 12 && s.x&1 == 0: // an address outside becomes a remote pod's
		world := pwmaps.ToAddr(f.world)
		if _, there := c.addrs[world]; there {
			edit(w, w.set.Addrs, c.addrs, world, nil)
		} else {
			edit(w, w.set.Addrs, c.addrs, world, &pwmaps.Peer{
				Identity: idRemote, Slot: slotWorld, Node: nodeIDB, Flags: pwmaps.PeerPod,
			})
		}
		c.moved(w, slotWorld)
	default: // a service's backends
		e.newSet(s)
	}
	return ""
}

func (e *engine) newSet(s step) {
	w, c, f := e.w, e.m.cluster, e.w.f
	sets := [][]netip.Addr{{f.local, f.remote}, {f.local}, {f.remote}, {f.third, f.local, f.remote}, {}, {f.nodeB}, {f.nodeA, f.local}}
	vips := []netip.Addr{f.vip, f.vipLocal, f.vipRemote}
	k := pwmaps.ServiceKey{Addr: pwmaps.ToAddr(vips[int(s.x)%len(vips)]), Port: svcPort, Proto: pwmaps.ProtoTCP}
	if s.x&0x80 != 0 {
		k.Proto = pwmaps.ProtoUDP
	}
	svc, chosen := c.services[k], sets[int(s.y)%len(sets)]
	old := svc
	c.nextSet++
	svc.Set, svc.Count = c.nextSet, uint32(len(chosen))
	svc.ExtSet, svc.ExtCount = svc.Set, svc.Count
	for a, slot := range map[netip.Addr]uint32{f.local: slotLocal, f.remote: slotRemote, f.third: slotThird, f.nodeB: slotNodeB, f.nodeA: slotNodeA} {
		key := pwmaps.BackendStateKey{Addr: pwmaps.ToAddr(a), Service: svc.Id, Port: podPort}
		if state := pwmaps.BackendServing; slices.Contains(chosen, a) {
			edit(w, w.set.BackendStates, c.states, key, &state)
		} else if _, had := c.states[key]; had && s.from&1 == 0 {
			edit(w, w.set.BackendStates, c.states, key, nil)
			c.moved(w, slot)
		}
	}
	for i, a := range chosen {
		b := pwmaps.Backend{Addr: pwmaps.ToAddr(a), Port: podPort}
		edit(w, w.set.Backends, c.backends, pwmaps.BackendKey{Set: svc.Set, Slot: uint32(i)}, &b)
	}
	edit(w, w.set.Services, c.services, k, &svc)
	if old.Set > setFree {
		for i := range old.Count {
			edit(w, w.set.Backends, c.backends, pwmaps.BackendKey{Set: old.Set, Slot: i}, nil)
		}
	}
}
