package packet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

type (
	hook   = maps.Hook
	reason = maps.Reason
)

const (
	fromPod     = bpf.DpPwHookPW_FROM_POD
	toPod       = bpf.DpPwHookPW_TO_POD
	fromNetdev  = bpf.DpPwHookPW_FROM_NETDEV
	fromOverlay = bpf.DpPwHookPW_FROM_OVERLAY
	toOverlay   = bpf.DpPwHookPW_TO_OVERLAY
	toNetdev    = bpf.DpPwHookPW_TO_NETDEV
	toLo        = bpf.DpPwHookPW_TO_LO
	fromFrag    = bpf.DpPwHookPW_FROM_FRAG
)

// hooks that own what they see: what cannot be parsed there is dropped. At
// to_netdev and to_lo it is the host's own and left alone.
func hooks() []hook { return []hook{fromPod, toPod, fromNetdev, fromOverlay, toOverlay} }

// egress: the stack sends; what it forwards it has a device for.
func egress(h hook) bool { return h == toPod || h == toOverlay || h == toNetdev || h == toLo }

const (
	passed    = bpf.DpPwReasonPW_PASS
	fwdLocal  = bpf.DpPwReasonPW_FWD_LOCAL
	fwdTunnel = bpf.DpPwReasonPW_FWD_TUNNEL
	fwdWire   = bpf.DpPwReasonPW_FWD_WIRE
	fwdHost   = bpf.DpPwReasonPW_FWD_HOST
	fwdEncap  = bpf.DpPwReasonPW_FWD_ENCAP
	fwdDecap  = bpf.DpPwReasonPW_FWD_DECAP
	fwdDirect = bpf.DpPwReasonPW_FWD_DIRECT
	fwdIPIP   = bpf.DpPwReasonPW_FWD_IPIP

	hit         = bpf.DpPwReasonPW_FLOW_HIT
	hitNew      = bpf.DpPwReasonPW_FLOW_HIT_NEW
	miss        = bpf.DpPwReasonPW_FLOW_MISS
	stale       = bpf.DpPwReasonPW_FLOW_STALE
	created     = bpf.DpPwReasonPW_FLOW_CREATED
	confirmed   = bpf.DpPwReasonPW_FLOW_CONFIRMED
	raceLost    = bpf.DpPwReasonPW_FLOW_RACE_LOST
	tableFull   = bpf.DpPwReasonPW_FLOW_TABLE_FULL
	portChanged = bpf.DpPwReasonPW_FLOW_PORT_CHANGED
	takenOver   = bpf.DpPwReasonPW_FLOW_TAKEN_OVER
	midstream   = bpf.DpPwReasonPW_FLOW_MIDSTREAM
	reselected  = bpf.DpPwReasonPW_FLOW_RESELECTED
)

// What a program may return: TCX_NEXT, TC_ACT_SHOT, TC_ACT_REDIRECT.
const (
	actNext     = uint32(0xffffffff)
	actDrop     = uint32(2)
	actRedirect = uint32(7)
)

// skBuff is struct __sk_buff of the kernel's interface.
type skBuff struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTci, VlanProto,
	Priority, IngressIfindex, Ifindex, TcIndex uint32
	Cb                                   [5]uint32
	Hash, TcClassid, Data, DataEnd, Napi uint32
	Family, RemoteIP4, LocalIP4          uint32
	RemoteIP6, LocalIP6                  [4]uint32
	RemotePort, LocalPort, DataMeta      uint32
	FlowKeys                             uint64
	Tstamp                               uint64
	WireLen, GsoSegs                     uint32
	Sk                                   uint64
	GsoSize                              uint32
	TstampType, Pad                      uint32
	Hwtstamp                             uint64
}

// shot is one packet at one hook.
type shot struct {
	hook   hook
	dev    string
	iif    string // device it came in by, for the egress hooks; "" = the host's own
	mark   uint32
	gso    uint32
	tunnel tunnelKey
	pkt    []byte
	cut    int  // shorten the frame to this inside the kernel, which refuses short ones
	other  bool // leave the destination MAC alone: a frame for somebody else

	hostile bool // the maps hold nonsense

	risen hook // fromFrag: the hook that sent it there
}

type result struct {
	t      testing.TB
	shot   shot
	action uint32
	mark   uint32
	out    []byte
	counts map[reason]uint64
	v6     bool // family the terminal reason was counted under
}

func (w *world) pod(dev string, fr frame) *result {
	w.t.Helper()
	return w.run(shot{hook: fromPod, dev: dev, pkt: fr.bytes(w.t)})
}

func (w *world) deliver(dev, iif string, fr frame) *result {
	w.t.Helper()
	return w.run(shot{hook: toPod, dev: dev, iif: iif, pkt: fr.bytes(w.t)})
}

func (w *world) wire(fr frame) *result {
	w.t.Helper()
	return w.run(shot{hook: fromNetdev, dev: devWire, pkt: fr.bytes(w.t)})
}

func (w *world) tunnel(node netip.Addr, fr frame) *result {
	w.t.Helper()
	return w.run(w.tunnelShot(node, fr.bytes(w.t)))
}

func (w *world) tunnelShot(node netip.Addr, pkt []byte) shot {
	return shot{hook: fromOverlay, dev: devOverlay, tunnel: tunnelKey{maps.ToAddr(node), 4096}, pkt: pkt}
}

func (w *world) host(fr frame) *result {
	w.t.Helper()
	return w.run(shot{hook: toOverlay, dev: devOverlay, pkt: fr.bytes(w.t)})
}

// at builds a shot from the usual place of a hook.
func (w *world) at(h hook, pkt []byte) shot {
	switch h {
	case fromPod, toPod:
		return shot{hook: h, dev: devClient, pkt: pkt}
	case fromNetdev, toNetdev:
		return shot{hook: h, dev: devWire, pkt: pkt}
	case toLo:
		return shot{hook: h, dev: devLo, pkt: pkt}
	case fromOverlay:
		return w.tunnelShot(w.f.nodeB, pkt)
	}
	return shot{hook: h, dev: devOverlay, pkt: pkt}
}

// run sends one packet through its program and checks what must hold for
// every packet.
func (w *world) run(s shot) *result {
	w.t.Helper()
	r := w.fire(s)
	if msg := r.broken(); msg != "" {
		w.t.Fatalf("%s: %s\n in  %x\n out %x", maps.HookName(s.hook), msg, r.shot.pkt, r.out)
	}
	return r
}

func (w *world) fire(s shot) *result {
	w.t.Helper()
	return w.filter(s, w.shoot)
}

func (w *world) shoot(s shot, p *ebpf.Program) *result {
	w.t.Helper()
	s.pkt = append([]byte(nil), s.pkt...)
	if !s.other && len(s.pkt) >= 6 {
		copy(s.pkt, w.devs[s.dev].mac)
	}
	if s.hook == fromOverlay && s.tunnel != (tunnelKey{}) {
		var err error
		if p, err = w.gate(s.tunnel); err != nil {
			w.t.Fatal(err)
		}
	}
	if s.cut != 0 {
		var err error
		if p, err = w.cutter(s.hook, p); err != nil {
			w.t.Fatal(err)
		}
	}
	in := skBuff{Cb: [5]uint32{uint32(s.cut)}, Ifindex: w.index(s.dev), Mark: s.mark, GsoSize: s.gso}
	if s.gso != 0 {
		in.GsoSegs = 2
	}
	if s.iif != "" {
		in.IngressIfindex = w.index(s.iif)
	}
	var out skBuff
	opts := ebpf.RunOptions{Data: s.pkt, DataOut: make([]byte, len(s.pkt)+512), Context: &in, ContextOut: &out}
	if w.last == nil {
		w.last = w.counters()
	}
	before := w.last
	action, err := p.Run(&opts)
	if err != nil {
		w.t.Fatalf("run %s: %v", maps.HookName(s.hook), err)
	}
	if action == gateFailed {
		w.t.Fatal("the kernel refused the tunnel key, or to cut the frame")
	}
	if s.cut != 0 {
		s.pkt = s.pkt[:s.cut]
	}
	r := &result{t: w.t, shot: s, action: action, mark: out.Mark, out: opts.DataOut, counts: make(map[reason]uint64)}
	w.last = w.counters()
	for row, n := range w.last {
		if n -= before[row]; n == 0 {
			continue
		}
		if row.hook != s.hook && (s.hook != fromFrag || row.hook != s.risen) {
			w.t.Fatalf("a packet at %s was counted at %s", maps.HookName(s.hook), maps.HookName(row.hook))
		}
		r.counts[row.reason] += n
		r.v6 = row.v6
	}
	return r
}

type row struct {
	reason reason
	hook   hook
	v6     bool
}

func (w *world) counters() map[row]uint64 {
	w.t.Helper()
	samples, err := w.set.Metrics.Read()
	if err != nil {
		w.t.Fatal(err)
	}
	out := make(map[row]uint64, len(samples))
	for _, s := range samples {
		out[row{s.Reason, s.Hook, s.IPv6}] = s.Packets
	}
	return out
}

// ends is the reason that says what became of the packet; false if there is
// none or more than one.
func (r *result) ends() (reason, bool) {
	var found reason
	n := uint64(0)
	for why, count := range r.counts {
		if why < hit || why == fwdIPIP || why == reassembly || maps.IsDrop(why) {
			found, n = why, n+count
		}
	}
	return found, n == 1
}

// skipped: packets that an earlier hook decided, and frames for others, are
// let by uncounted.
func (r *result) skipped() bool {
	return (egress(r.shot.hook) || r.shot.hook == fromOverlay) && r.shot.mark&0x1000 != 0 || r.shot.hook == fromNetdev && r.shot.other ||
		(r.shot.hook == toNetdev || r.shot.hook == toLo) && r.shot.iif != ""
}

// broken checks what holds for every packet at every hook.
func (r *result) broken() string {
	if msg := r.spoiled(); msg != "" {
		return msg
	}
	if r.skipped() {
		if len(r.counts) != 0 || r.action != actNext {
			return fmt.Sprintf("not let by: action %d, %v", int32(r.action), r)
		}
		return ""
	}
	why, ok := r.ends()
	if !ok {
		return fmt.Sprintf("not exactly one outcome: %v", r)
	}
	// The stack has found the neighbour, unless another is meant by now.
	stays := r.shot.hook == toNetdev && why == fwdWire && r.action == actNext && !r.newDestination()
	want := actNext
	switch {
	case r.told(), r.counts[tooBigSent] != 0:
		want = actRedirect
	case maps.IsDrop(why):
		want = actDrop
	case r.shot.hook == fromFrag:
		want = actRedirect // nothing enters the stack by that device
	case stays:
	case why == fwdWire, why == fwdEncap, why == fwdDecap, why == fwdDirect, why == fwdIPIP, why == reassembly, why == fwdTunnel && r.shot.hook != toOverlay, why == fwdLocal && r.shot.hook != toPod:
		want = actRedirect
	case why == fwdHost && (r.newSource() && (r.shot.hook == fromPod || r.shot.hook == fromNetdev) || egress(r.shot.hook) && r.shot.hook != toLo ||
		r.shot.hook == fromNetdev && r.mark&0x1000 != 0):
		// Into the stack by the tunnel's device, which answers marked.
		want = actRedirect
	}
	if r.action != want {
		return fmt.Sprintf("action %d does not fit %v", int32(r.action), r)
	}
	if msg := r.unanswered(); msg != "" {
		return msg
	}
	if why == passed && r.shot.hook != fromFrag && !slices.Equal(r.out, r.shot.pkt) {
		return "a packet left to the kernel was changed"
	}
	return ""
}

// tunnelHeader is how much VXLAN over IPv4 puts before a frame.
const tunnelHeader = 50

// spoiled checks the bytes that left: a tunnel header more or less and
// nothing else, and checksums that are right where they were.
func (r *result) spoiled() string {
	in, out := r.shot.pkt, r.out
	switch {
	case r.told(), r.counts[tooBigSent] != 0:
		return "" // another packet, see unanswered and wrongAnswer
	case r.action == actDrop:
		return ""
	case r.counts[fwdEncap] != 0:
		if w := wrong(out); w != "" || len(out) != len(in)+tunnelHeader {
			return w + " tunnel header is wrong"
		}
	case r.counts[fwdIPIP] != 0:
		if w := wrong(out); w != "" || len(out) != len(in)+ipipHeader {
			return w + " IPIP header is wrong"
		}
	}
	in, out = r.frames()
	if len(out) > len(in) {
		return "the packet grew"
	}
	if wrong(in) != "" {
		return ""
	}
	if w := wrong(out); w != "" {
		return w + " checksum is wrong after it was right"
	}
	if w := wrongQuote(out); w != "" && wrongQuote(in) == "" {
		return w + " checksum is wrong in the quote after it was right"
	}
	return ""
}

// newSource: the packet left under another address than it came with.
func (r *result) newSource() bool {
	in, ok1 := decode(r.shot.pkt)
	out, ok2 := decode(r.out)
	return ok1 && ok2 && in.src != out.src
}

func (r *result) newDestination() bool {
	in, ok1 := decode(r.shot.pkt)
	out, ok2 := decode(r.out)
	return ok1 && ok2 && in.dst != out.dst
}

func (r *result) String() string {
	var out []string
	for why, n := range r.counts {
		out = append(out, fmt.Sprintf("%s=%d", maps.ReasonName(why), n))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// is asserts everything that was counted: the outcome and what the flow
// engine did, each once and nothing else.
func (r *result) is(outcome reason, engine ...reason) *result {
	r.t.Helper()
	want := append([]reason{outcome}, engine...)
	good := len(r.counts) == len(want)
	for _, why := range want {
		good = good && r.counts[why] == 1
	}
	if !good {
		var names []string
		for _, why := range want {
			names = append(names, maps.ReasonName(why))
		}
		slices.Sort(names)
		r.t.Fatalf("%s: counted %v, want %s", maps.HookName(r.shot.hook), r, strings.Join(names, " "))
	}
	return r
}

// ended asserts the outcome alone.
func (r *result) ended(outcome reason) *result {
	r.t.Helper()
	if why, ok := r.ends(); !ok || why != outcome {
		r.t.Fatalf("%s: counted %v, want the outcome %s", maps.HookName(r.shot.hook), r, maps.ReasonName(outcome))
	}
	return r
}

// leaves asserts the addresses and ports of the packet that left.
func (r *result) leaves(src, dst netip.AddrPort) *result {
	r.t.Helper()
	d, ok := decode(r.out)
	if !ok {
		r.t.Fatalf("what left is no packet: %x", r.out)
	}
	gotS, gotD := ap(d.src, 0), ap(d.dst, 0)
	switch d.proto {
	case maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP:
		s, p := d.ports()
		gotS, gotD = ap(d.src, s), ap(d.dst, p)
	default:
		src, dst = ap(src.Addr(), 0), ap(dst.Addr(), 0)
	}
	if gotS != src || gotD != dst {
		r.t.Fatalf("left as %v -> %v, want %v -> %v", gotS, gotD, src, dst)
	}
	return r
}

func (r *result) ttl() uint8 {
	r.t.Helper()
	d, ok := decode(r.out)
	if !ok {
		r.t.Fatalf("what left is no packet: %x", r.out)
	}
	return d.ttl
}

// entry is a flow's entry and the table it is in.
type entry struct {
	maps.Flow
	confirmed bool
}

func (w *world) find(k maps.FlowKey) (entry, bool) {
	w.t.Helper()
	f, ok, err := w.set.Flows.Get(k)
	if err != nil {
		w.t.Fatal(err)
	}
	if ok {
		return entry{f, true}, true
	}
	f, ok, err = w.set.FlowsNew.Get(k)
	if err != nil {
		w.t.Fatal(err)
	}
	return entry{f, false}, ok
}

func (w *world) entry(fr frame) entry {
	w.t.Helper()
	e, ok := w.find(fr.key())
	if !ok {
		w.t.Fatalf("no flow %s", maps.KeyString(fr.key()))
	}
	return e
}

func (w *world) noEntry(fr frame) {
	w.t.Helper()
	if _, ok := w.find(fr.key()); ok {
		w.t.Fatalf("there is a flow %s", maps.KeyString(fr.key()))
	}
}

func (e entry) is(flag bpf.DpPwFlowFlags) bool { return e.Flags&uint8(flag) != 0 }

const (
	flagReply     = bpf.DpPwFlowFlagsPW_F_REPLY
	flagXlate     = bpf.DpPwFlowFlagsPW_F_XLATE
	flagReplied   = bpf.DpPwFlowFlagsPW_F_REPLIED
	flagMidstream = bpf.DpPwFlowFlagsPW_F_MIDSTREAM
)
