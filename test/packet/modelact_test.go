package packet

import (
	"net/netip"

	"github.com/podweir/podweir/internal/bpf"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

// deliver carries out what the entry of that direction says.
func (m *model) deliver(f *mflow, dir int, p packet, o outcome) outcome {
	e := f.entry(dir)
	o.src, o.dst = ap(pwmaps.FromAddr(e.Src), e.Sport), ap(pwmaps.FromAddr(e.Dst), e.Dport)
	o.to, o.mac, o.shaped = at(e.To), e.Mac, f.shaped[dir]
	if p.quote != nil {
		o.quoted = [2]netip.AddrPort{o.dst, o.src}
		// A router keeps its name towards a pod, and where the flow's end has
		// the same name on both sides.
		router := p.key.Src != p.about().Src && o.to.kind == bpf.DpPwPlaceKindPW_PLACE_POD
		if router || e.Src == p.about().Src {
			o.src = ap(pwmaps.FromAddr(p.key.Src), 0)
		}
	}
	ingress := p.hook != toPod && p.hook != toOverlay
	if ingress && o.to.kind != bpf.DpPwPlaceKindPW_PLACE_HOST && p.ttl <= 1 {
		o.end = ttlDrop
		if p.quote == nil {
			o.engine[ttlSent]++
		}
		return o
	}
	switch o.to.kind {
	case bpf.DpPwPlaceKindPW_PLACE_POD:
		o.end = fwdLocal
		if p.decap {
			o.end = fwdDecap
		}
		if p.hook == toPod && p.dev != o.to.id {
			o.end = bpf.DpPwReasonPW_DROP_NO_ROUTE
		}
	case bpf.DpPwPlaceKindPW_PLACE_NODE:
		o.end = fwdTunnel
		if p.quote == nil && (p.hook == fromPod || p.hook == fromNetdev) && m.overlaid {
			o.end = fwdEncap
			if o.to.id == nodeIDC && e.Flags&uint8(bpf.DpPwFlowFlagsPW_F_TUNNEL) == 0 && pwmaps.FromAddr(e.Dst).Is4() {
				o.end = fwdIPIP
			}
		}
	case bpf.DpPwPlaceKindPW_PLACE_WIRE:
		o.end = fwdWire
	default:
		// Back into the stack only as a service's doing: by the tunnel's device.
		o.end = fwdHost
		if !ingress && f.service == 0 {
			o.end = bpf.DpPwReasonPW_DROP_NO_ROUTE
		}
	}
	return o
}

// about is the tuple of the packets that go the way of an ICMP error.
func (p packet) about() flowKey {
	return flowKey{
		Src: p.quote.Dst, Dst: p.quote.Src, Sport: p.quote.Dport, Dport: p.quote.Sport,
		Proto: p.quote.Proto, Via: p.key.Via,
	}
}

// icmpError goes where the flow of the packet it quotes goes.
func (m *model) icmpError(p packet, o outcome) outcome {
	host := p.from.kind == bpf.DpPwPlaceKindPW_PLACE_HOST
	k := p.about()
	f, dir := m.find(k)
	o.end = m.mayUse(p.from, p.key, p.service)
	switch {
	case o.end != 0:
	case k.Dst != p.key.Dst, f == nil, m.expired(f), !m.fresh(f), !host && !f.rightPlace(dir, p.from):
		o.end = unrelated
		if host {
			o.end = passed // the node's own word to its own pods
		}
	case f.denied != 0:
		o.end = f.denied
	default:
		return m.deliver(f, dir, p, o)
	}
	return o
}

// takesDecap: does the device's hook take the tunnel header off itself?
func (m *model) takesDecap(p packet) bool {
	if p.quote != nil || p.key.Via != 0 || p.ttl <= 1 {
		return false
	}
	_, ours := m.pods[p.key.Dst]
	if f, dir := m.find(p.key); f != nil {
		return at(f.entry(dir).To).kind == bpf.DpPwPlaceKindPW_PLACE_POD && (ours || m.known(f, dir, p))
	}
	return ours
}

// sweep removes outlived flows.
func (m *model) sweep(keys []flowKey) (removed int) {
	for _, k := range keys {
		f, _ := m.find(k)
		if f == nil {
			continue
		}
		if m.expired(f) {
			m.end(f)
			removed++
		}
	}
	return removed
}

// entry is the flow's entry of one direction, complete in itself.
func (f *mflow) entry(dir int) pwmaps.Flow {
	e := pwmaps.Flow{
		LastSeen: f.seen[dir], Created: f.created, Verdict: pwmaps.VerdictAllow,
		Src: f.back.Dst, Dst: f.back.Src, Sport: f.back.Dport, Dport: f.back.Sport,
		From: pwPlace(f.from), To: pwPlace(f.to), Mac: f.mac, Nexthop: f.hop,
		SrcGen: f.src, DstGen: f.dst, Service: f.service, Rule: f.rule,
	}
	if dir == reply {
		e.Src, e.Dst, e.Sport, e.Dport = f.key.Dst, f.key.Src, f.key.Dport, f.key.Sport
		e.From, e.To, e.Mac, e.Nexthop = pwPlace(f.to), pwPlace(f.home), f.homeMAC, f.homeHop
		e.TwinVia = f.key.Via
		e.Flags = uint8(flagReply)
	}
	if f.shaped[dir] {
		e.To.Flags = pwmaps.PlaceQdisc
	}
	// To a client outside through its entry node, or as one.
	if dir == orig && f.tunnel || dir == reply && f.key.Via != 0 {
		e.Flags |= uint8(bpf.DpPwFlowFlagsPW_F_TUNNEL)
	}
	if f.denied != 0 {
		e.Verdict, e.Reason = pwmaps.VerdictDeny, uint8(f.denied)
	}
	for flag, set := range map[bpf.DpPwFlowFlags]bool{
		flagXlate: f.xlate, flagReplied: f.replied, flagMidstream: f.midstream,
		bpf.DpPwFlowFlagsPW_F_CONFIRMED: f.confirmed, bpf.DpPwFlowFlagsPW_F_CLAMP: f.clamp,
	} {
		if set {
			e.Flags |= uint8(flag)
		}
	}
	for bit, set := range map[uint8]bool{finOrig: f.fin[orig], finReply: f.fin[reply], tcpRST: f.rst} {
		if set {
			e.Tcp |= bit
		}
	}
	return e
}

func pwPlace(p place) pwmaps.Place { return pwmaps.Place{Id: p.id, Kind: uint8(p.kind)} }

// clone is a copy for trying a choice that cannot be seen from outside.
func (m *model) clone() *model {
	out := *m
	out.flows = make([]*mflow, len(m.flows))
	for i, f := range m.flows {
		copied := *f
		out.flows[i] = &copied
	}
	return &out
}
