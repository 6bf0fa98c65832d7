package packet

import (
	"net/netip"
	"slices"

	"github.com/podweir/podweir/internal/bpf"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

// The rules of the flow engine, as docs/architecture.md has them, in the
// plainest form: a flow is one object, a table is a list of flows. Nothing
// here races, nothing is recycled, and time is a number that is handed in.

// Directions of a flow.
const (
	orig  = 0
	reply = 1
)

type mflow struct {
	key, back      flowKey // the tuples of the two directions as they arrive
	have           [2]bool // the entry of that direction is in the tables
	from, to, home place   // where it starts, where it goes, where answers go
	mac, homeMAC   [6]byte // of deliveries to pods
	shaped         [2]bool // the pod of that direction has a qdisc
	hop, homeHop   addr    // of the ways out
	src, dst       pwmaps.GenRef
	seen           [2]uint64 // per entry
	created        uint64

	xlate, midstream, replied, confirmed bool
	snat, clamp, tunnel                  bool
	fin                                  [2]bool
	rst                                  bool
	denied                               reason
	rule, service                        uint32
}

// packet is one packet at one hook.
type packet struct {
	hook  hook
	dev   uint32 // it is seen on
	from  place
	key   flowKey
	flags uint8 // TCP
	ttl   uint8
	quote *flowKey // an ICMP error: the tuple of the packet it quotes
	decap bool     // behind a tunnel header that we may take off
	ipip  bool     // and that is IPv4 alone

	service bool // from outside to a service's address
}

// choice is what the rules leave open.
type choice struct {
	backend netip.AddrPort
	port    uint16
}

// outcome is what the rules say of one packet.
type outcome struct {
	end    reason
	engine map[reason]uint64
	// If it is sent on: as what, and to whom.
	src, dst netip.AddrPort
	to       place
	mac      [6]byte
	shaped   bool
	quoted   [2]netip.AddrPort // an ICMP error: what it quotes, source first
}

type timeouts struct {
	tcpNew, tcpEstablished, tcpHalfClosed, tcpClosed, udpNew, udpStream, icmp, other uint64
}

type model struct {
	*cluster
	limits   timeouts
	now      uint64
	flows    []*mflow
	room     int  // entries that fit pw_flows
	roomNew  int  // and pw_flows_new, 0 = it makes room
	overlaid bool // nodes have tunnel headers
}

func (m *model) find(k flowKey) (*mflow, int) {
	for _, f := range m.flows {
		if f.have[orig] && f.key == k {
			return f, orig
		}
		if f.have[reply] && f.back == k {
			return f, reply
		}
	}
	return nil, 0
}

// end removes what there is of a flow.
func (m *model) end(f *mflow) {
	m.flows = slices.DeleteFunc(m.flows, func(o *mflow) bool { return o == f })
}

func (f *mflow) closed() bool { return f.rst || f.fin[orig] && f.fin[reply] }

func (m *model) timeout(f *mflow) uint64 {
	l := &m.limits
	switch f.key.Proto {
	case pwmaps.ProtoTCP:
		switch {
		case f.closed():
			return l.tcpClosed
		case f.fin[orig] || f.fin[reply]:
			return l.tcpHalfClosed
		case f.confirmed || f.midstream:
			return l.tcpEstablished
		}
		return l.tcpNew
	case pwmaps.ProtoUDP:
		if f.confirmed {
			return l.udpStream
		}
		return l.udpNew
	case protoICMP, protoICMP6:
		return l.icmp
	}
	return l.other
}

func (m *model) idle(f *mflow, dir int) bool {
	return !f.have[dir] || f.seen[dir]+m.timeout(f) <= m.now
}

// expired: idle for too long in both directions.
func (m *model) expired(f *mflow) bool { return m.idle(f, orig) && m.idle(f, reply) }

func (m *model) fresh(f *mflow) bool {
	return m.gens[f.src.Slot] == f.src.Gen && m.gens[f.dst.Slot] == f.dst.Gen
}

// half: the entry that answers this one was pushed out. Answers that are
// still known go on.
func (f *mflow) half(dir int) bool { return dir == orig && !f.have[reply] && !f.confirmed }

func (f *mflow) rightPlace(dir int, p place) bool {
	want := f.from
	if dir == reply {
		want = f.to
	}
	return p == want || p.kind == want.kind && p.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE
}

func isSYN(p packet) bool {
	return p.key.Proto == pwmaps.ProtoTCP && p.flags&(syn|ack) == syn
}

func (m *model) over(f *mflow, dir int, p packet) bool {
	return isSYN(p) && (f.closed() || dir == orig && f.service != 0 && !m.holds(f)) || m.expired(f) || f.half(dir)
}

// known: its own entry is all that the packet needs.
func (m *model) known(f *mflow, dir int, p packet) bool {
	return f != nil && !(isSYN(p) && f.service != 0) && f.denied == 0 && f.rightPlace(dir, p.from) && m.fresh(f) &&
		!m.idle(f, dir) && !m.over(f, dir, p)
}

// mayUse: may packets with this source come from there? To a service from
// outside, and by an entry node, the nodes themselves may, too.
func (c *cluster) mayUse(from place, k flowKey, service bool) reason {
	src := c.resolve(k.Src)
	ok := src.flags == 0 && src.node == 0 // outside the cluster
	if k.Via != 0 || service && src.flags&pwmaps.PeerHost == 0 {
		ok = src.dev == 0 && src.flags&(pwmaps.PeerPod|pwmaps.PeerLocal|pwmaps.PeerService) == 0
	}
	switch {
	case from.kind == bpf.DpPwPlaceKindPW_PLACE_HOST:
		return 0
	case pwmaps.FromAddr(k.Src).IsMulticast():
		return badSource
	case from.kind == bpf.DpPwPlaceKindPW_PLACE_POD:
		ok = src.dev == from.id
	case from.kind == bpf.DpPwPlaceKindPW_PLACE_NODE && k.Via == 0:
		ok = src.node == from.id
	}
	if ok {
		return 0
	}
	return spoofedSource
}

// where a destination is, for packets from there.
func (c *cluster) where(from place, dst target, service bool) (place, reason) {
	inward := from.kind == bpf.DpPwPlaceKindPW_PLACE_NODE || from.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE && !service
	switch {
	case dst.dev != 0:
		return place{bpf.DpPwPlaceKindPW_PLACE_POD, dst.dev}, 0
	case dst.flags&pwmaps.PeerLocal != 0:
		return place{}, bpf.DpPwReasonPW_DROP_NO_ENDPOINT
	case dst.flags&pwmaps.PeerService != 0:
		return place{}, bpf.DpPwReasonPW_DROP_NO_SERVICE
	case dst.flags&pwmaps.PeerHost != 0:
		return hostPlace(), 0
	case dst.flags&pwmaps.PeerNode != 0 &&
		(from.kind == bpf.DpPwPlaceKindPW_PLACE_HOST || from.kind == bpf.DpPwPlaceKindPW_PLACE_POD):
		return c.wire, 0 // node to node needs no tunnel
	case dst.node != 0 && inward:
		return place{}, bpf.DpPwReasonPW_DROP_NO_ROUTE
	case dst.node != 0:
		return nodePlace(dst.node), 0
	case dst.flags&pwmaps.PeerPod != 0:
		return place{}, bpf.DpPwReasonPW_DROP_NO_NODE
	case inward:
		return place{}, bpf.DpPwReasonPW_DROP_NO_ROUTE
	}
	return c.wire, 0
}

// judge: the source's egress, then the destination's ingress. The node
// reaches its pods, a pod itself.
func (c *cluster) judge(f *mflow) (reason, uint32) {
	src, dst := c.resolve(f.key.Src), c.resolve(f.back.Src)
	proto, port, last := f.key.Proto, f.back.Sport, uint32(0)
	if f.key.Src == f.back.Src {
		return 0, 0
	}
	if f.from.kind == bpf.DpPwPlaceKindPW_PLACE_POD {
		ok, rule := c.allows(src.tableOut, dst.identity, proto, port)
		if !ok {
			return bpf.DpPwReasonPW_DROP_POLICY_EGRESS, rule
		}
		last = rule
	}
	if f.to.kind == bpf.DpPwPlaceKindPW_PLACE_POD && f.from.kind != bpf.DpPwPlaceKindPW_PLACE_HOST {
		ok, rule := c.allows(dst.tableIn, src.identity, proto, port)
		if !ok {
			return bpf.DpPwReasonPW_DROP_POLICY_INGRESS, rule
		}
		if rule != 0 {
			last = rule
		}
	}
	return 0, last
}

// aim places and judges the original direction as the cluster is now.
func (m *model) aim(f *mflow) (why reason, rule uint32) {
	dst := m.resolve(f.back.Src)
	f.src, f.dst = m.resolve(f.key.Src).gen, dst.gen
	old := f.to
	if f.to, why = m.where(f.from, dst, f.service != 0); why != 0 {
		f.to = old
		return why, 0
	}
	if why, rule = m.judge(f); why != 0 {
		f.to = old
		return why, rule
	}
	f.mac, f.hop = dst.mac, m.router
	f.shaped = [2]bool{dst.shaped, m.resolve(f.key.Src).shaped}
	if dst.flags&pwmaps.PeerNode != 0 {
		f.hop = f.back.Src // on the link
	}
	return 0, rule
}

// rejudge a flow one of whose generations moved, in its original direction.
// False if it is not that flow any more: its source lives elsewhere, half of
// it is gone, or its client, on UDP, needs another backend. The answers of the
// one that is gone still pass.
func (m *model) rejudge(f *mflow, dir int, o outcome) bool {
	if !f.have[orig] || !f.have[reply] || m.mayUse(f.from, f.key, f.service != 0 || f.to == hostPlace()) != 0 {
		return false
	}
	src, dst := f.src, f.dst
	lost := f.key.Proto == pwmaps.ProtoUDP && !m.holds(f)
	if lost && dir == orig {
		o.engine[reselected]++
		return false
	}
	f.denied, f.rule = m.aim(f)
	if lost {
		f.src, f.dst = src, dst
	}
	return true
}

// step says what becomes of a packet, and changes the tables accordingly.
func (m *model) step(p packet, ch choice) outcome {
	o := outcome{engine: make(map[reason]uint64)}
	// Whoever it is for, the kernel's device may have it.
	if p.hook == fromNetdev && !p.decap && p.quote == nil && p.key.Proto == pwmaps.ProtoUDP && p.key.Dport == 4789 {
		o.end = passed
		return o
	}
	if _, ours := m.pods[p.key.Dst]; p.hook == fromNetdev && !p.decap && !ours {
		var follows bool
		if follows, p.service = m.enters(p); !follows {
			o.end = passed
			return o
		}
	}
	if p.quote != nil {
		return m.icmpError(p, o)
	}
	f, dir := m.find(p.key)
	if f != nil {
		over := false
		switch {
		case !f.rightPlace(dir, p.from):
			if o.end = m.mayUse(p.from, p.key, p.service); o.end == spoofedSource {
				o.end = spoofedFlow
			}
			if o.end != 0 {
				return o
			}
			over = true
		case m.over(f, dir, p):
			over = true
		case !m.fresh(f):
			o.engine[stale]++
			over = !m.rejudge(f, dir, o)
		}
		if !over && f.denied != 0 {
			o.end = f.denied
			return o
		}
		if !over {
			m.touch(f, dir, p, o)
			return m.deliver(f, dir, p, o)
		}
		m.end(f)
		o.engine[takenOver]++
	}
	return m.first(p, ch, o)
}

// enters: of what is for no pod, calls of services, calls of the host that must
// be told from these, and the answers to and errors about what left translated
// are followed.
func (m *model) enters(p packet) (follows, service bool) {
	if p.quote != nil {
		f, _ := m.find(p.about())
		follows = f != nil && f.xlate && p.about().Dst == p.key.Dst
		return follows, follows
	}
	if f, dir := m.find(p.key); f != nil && f.xlate {
		return true, dir == orig
	}
	_, called := m.frontend(p.key, true)
	_, owned := m.services[pwmaps.ServiceKey{Addr: p.key.Dst}]
	called = called || owned || m.answersTaken(p)
	return called, called
}

// answersTaken: a flow that starts outside and ends at the host has the tuple
// of what the host would answer.
func (m *model) answersTaken(p packet) bool {
	back := flowKey{Src: p.key.Dst, Dst: p.key.Src, Sport: p.key.Dport, Dport: p.key.Sport, Proto: p.key.Proto}
	f, dir := m.find(back)
	return f != nil && dir == reply && (f.xlate || f.key.Via != 0) && f.to == hostPlace() &&
		(p.key.Proto != pwmaps.ProtoTCP || isSYN(p))
}

// first is a packet of no known flow.
func (m *model) first(p packet, ch choice, o outcome) outcome {
	o.engine[miss]++
	if o.end = m.mayUse(p.from, p.key, p.service); o.end != 0 {
		return o
	}
	if pwmaps.FromAddr(p.key.Dst).IsMulticast() {
		o.end = bpf.DpPwReasonPW_DROP_MULTICAST
		return o
	}
	f := &mflow{key: p.key, back: p.key, from: p.from, home: p.from, seen: [2]uint64{m.now, m.now}, created: m.now}
	f.back.Src, f.back.Sport, f.back.Dst, f.back.Dport, f.back.Via = p.key.Dst, p.key.Dport, p.key.Src, p.key.Sport, 0
	if why := m.translate(f, ch); why != 0 {
		o.end = why
		if (why == noBackend || why == noServicePort) && m.refuses(p) {
			o.engine[refused]++
		}
		return o
	}
	dst := m.resolve(f.back.Src)
	if f.key.Proto == pwmaps.ProtoUDP && f.back.Sport == 4789 && p.from.kind == bpf.DpPwPlaceKindPW_PLACE_POD &&
		dst.flags&(pwmaps.PeerNode|pwmaps.PeerHost) != 0 {
		o.end = bpf.DpPwReasonPW_DROP_POD_VXLAN
		return o
	}
	if o.end, f.rule = m.aim(f); o.end != 0 {
		return o
	}
	m.source(f, dst)
	f.homeMAC = m.resolve(f.key.Src).mac
	if f.home.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE {
		f.home, f.homeHop = m.wire, m.router
		if m.resolve(f.key.Src).flags&pwmaps.PeerNode != 0 {
			f.homeHop = f.key.Src // on the link
		}
	}
	if f.key.Proto == pwmaps.ProtoTCP {
		if p.flags&rst != 0 || p.flags&(syn|ack) == syn|ack {
			if f.snat {
				o.end = bpf.DpPwReasonPW_DROP_STRAY
				return o
			}
			return m.deliver(f, orig, p, o)
		}
		if p.flags&syn == 0 {
			f.midstream = true
			o.engine[midstream]++
		}
	}
	if o.end = m.create(f, ch, o); o.end != 0 {
		return o
	}
	return m.deliver(f, orig, p, o)
}

// source: under which address it goes on.
func (m *model) source(f *mflow, dst target) {
	wire := f.to.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE
	switch f.from.kind {
	case bpf.DpPwPlaceKindPW_PLACE_HOST:
		if f.service != 0 && dst.flags&pwmaps.PeerHost != 0 {
			f.back.Dst = f.key.Dst // the host calls itself: under the service's address
		} else if f.service != 0 && m.resolve(f.key.Src).flags&pwmaps.PeerInternal == 0 {
			// Nobody but this node knows that address as its own.
			f.snat = wire || f.to.kind == bpf.DpPwPlaceKindPW_PLACE_NODE
		}
	case bpf.DpPwPlaceKindPW_PLACE_POD: // to the world, or to itself
		f.snat = wire || f.service != 0 && f.back.Src == f.key.Src
	case bpf.DpPwPlaceKindPW_PLACE_WIRE:
		f.snat = wire && f.service != 0
		f.tunnel = f.service != 0 && f.to.kind == bpf.DpPwPlaceKindPW_PLACE_NODE
		f.clamp = f.tunnel
	}
	if f.snat {
		f.xlate = true
		f.back.Dst = m.own[0].V4
		if !pwmaps.FromAddr(f.key.Src).Is4() {
			f.back.Dst = m.own[0].V6
		}
	}
}

// translate: services, for what does not come from another node.
func (m *model) translate(f *mflow, ch choice) reason {
	if f.from.kind == bpf.DpPwPlaceKindPW_PLACE_NODE {
		return 0
	}
	svc, all := m.choices(f.key, f.from.kind)
	switch {
	case svc == nil:
		if _, owned := m.services[pwmaps.ServiceKey{Addr: f.key.Dst}]; owned {
			return bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT
		}
		return 0
	case len(all) == 0:
		return bpf.DpPwReasonPW_DROP_NO_BACKEND
	case !slices.Contains(all, ch.backend):
		return badChoice
	}
	f.back.Src, f.back.Sport = pwmaps.ToAddr(ch.backend.Addr()), ch.backend.Port()
	f.service, f.xlate = svc.Id, true
	return 0
}

// refuses: what no service serves is answered where it came from, in
// protocols with ports; a reset never is.
func (m *model) refuses(p packet) bool {
	way := p.hook == fromPod || p.hook == fromNetdev || p.hook == toOverlay && p.from.kind == bpf.DpPwPlaceKindPW_PLACE_HOST
	return way && hasPorts(p.key.Proto) && !(p.key.Proto == pwmaps.ProtoTCP && p.flags&rst != 0)
}

// badChoice is no reason of the datapath's: it chose what the rules forbid.
const badChoice = reason(0xff)

// create: an outlived flow makes room for the reply tuple, what was left of
// this very flow is replaced, and a live flow of others makes this one take
// another source port.
func (m *model) create(f *mflow, ch choice, o outcome) reason {
	result, replaced := created, false
	other, _ := m.find(f.back)
	if f.snat {
		if other != nil && !m.expired(other) && !translatable(f.key) {
			return bpf.DpPwReasonPW_DROP_FLOW_COLLISION
		}
		if m.roomNew != 0 && m.countNew()+2 > m.roomNew {
			return flowInsert
		}
		if translatable(f.key) {
			f.back.Dport = ch.port
			if !givable(ch.port) {
				return badChoice
			}
			if other, _ = m.find(f.back); other != nil && !m.expired(other) {
				return badChoice
			}
		}
		if other != nil && !m.expired(other) {
			return bpf.DpPwReasonPW_DROP_FLOW_COLLISION
		}
		if other != nil {
			m.end(other)
		}
	} else if other != nil {
		switch {
		case m.expired(other):
			m.end(other)
		case other.back == f.back && other.key == f.key:
			f.created, replaced = other.created, true
			m.end(other)
		case !translatable(f.key):
			return bpf.DpPwReasonPW_DROP_FLOW_COLLISION
		default:
			if m.roomNew != 0 && m.countNew()+2 > m.roomNew {
				return flowInsert
			}
			f.back.Dport = ch.port
			taken, _ := m.find(f.back)
			if !givable(ch.port) || taken != nil && !m.expired(taken) {
				return badChoice
			}
			if taken != nil {
				m.end(taken)
			}
			f.xlate = true
			result = portChanged
		}
	}
	f.have = [2]bool{true, true}
	if m.roomNew != 0 && m.countNew()+2 > m.roomNew {
		if f.have[orig] = false; replaced {
			m.flows = append(m.flows, f)
		}
		return flowInsert
	}
	m.flows = append(m.flows, f)
	o.engine[result]++
	return 0
}

// translatable: something in its header tells flows apart. An echo's
// identifier does.
func translatable(k flowKey) bool {
	switch k.Proto {
	case pwmaps.ProtoTCP, pwmaps.ProtoUDP, pwmaps.ProtoSCTP:
		return true
	case protoICMP, protoICMP6:
		return k.Sport != 0
	}
	return false
}

func (m *model) countNew() (n int) {
	for _, f := range m.flows {
		if !f.confirmed {
			n += count(f)
		}
	}
	return n
}

func count(f *mflow) (n int) {
	for _, have := range f.have {
		if have {
			n++
		}
	}
	return n
}

// touch is the bookkeeping of a known flow's packet.
func (m *model) touch(f *mflow, dir int, p packet, o outcome) {
	f.seen[dir] = m.now
	if p.key.Proto == pwmaps.ProtoTCP {
		f.rst = f.rst || p.flags&rst != 0
		f.fin[dir] = f.fin[dir] || p.flags&fin != 0
	}
	if f.confirmed {
		o.engine[hit]++
		return
	}
	o.engine[hitNew]++
	if dir == reply {
		f.replied = true
		return
	}
	heard := p.key.Proto != protoICMP && p.key.Proto != protoICMP6
	if p.key.Proto == pwmaps.ProtoTCP {
		heard = p.flags&(ack|syn|rst|fin) == ack
	}
	if !f.replied || !heard {
		return
	}
	used := 0
	for _, other := range m.flows {
		if other.confirmed {
			used += count(other)
		}
	}
	if used+2 > m.room {
		o.engine[tableFull]++
		return
	}
	o.engine[confirmed]++
	f.confirmed = true
}
