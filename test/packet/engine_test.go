package packet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

// timeUnit apart are the limits that the engine under test is given; ages
// fall between them.
const timeUnit = uint64(4 * time.Second)

// tableDefault is a table with a default, of those that policies give to pods.
const tableDefault = 5 | pwmaps.TableDefault

func testTimeouts() (timeouts, map[string]uint64) {
	u := timeUnit
	t := timeouts{
		tcpClosed: u, udpNew: 2 * u, icmp: 3 * u, tcpNew: 4 * u, other: 5 * u,
		udpStream: 6 * u, tcpHalfClosed: 7 * u, tcpEstablished: 8 * u,
	}
	return t, map[string]uint64{
		"cfg_tcp_closed": t.tcpClosed, "cfg_udp_new": t.udpNew, "cfg_icmp": t.icmp, "cfg_tcp_new": t.tcpNew,
		"cfg_other": t.other, "cfg_udp_stream": t.udpStream, "cfg_tcp_half_closed": t.tcpHalfClosed,
		"cfg_tcp_established": t.tcpEstablished,
	}
}

// Room in the tables: plenty, or none to speak of. The small table of new
// flows is a plain hash, so that "no room" can be seen at all.
type size struct{ flows, flowsNew uint32 }

var (
	roomy = sync.OnceValues(func() (*datapath, error) { return modelled(size{256, 1024}) })
	tight = sync.OnceValues(func() (*datapath, error) { return modelled(size{5, 9}) })
)

func modelled(s size) (*datapath, error) {
	_, names := testTimeouts()
	var err error
	d, loadErr := loadAs(loader.Config{FlowsMax: s.flows, FlowsNewMax: s.flowsNew}, func(spec *ebpf.CollectionSpec) {
		for name, v := range names {
			if e := spec.Variables[name].Set(v); e != nil {
				err = fmt.Errorf("set %s: %w", name, e)
			}
		}
		if s.flowsNew < 64 {
			spec.Maps[bpf.DpMapPwFlowsNew].Type = ebpf.Hash
		}
		// Counters that can be read without a system call.
		metrics := spec.Maps[bpf.DpMapPwMetrics]
		metrics.Type, metrics.Flags = ebpf.Array, metrics.Flags|1<<10 /* BPF_F_MMAPABLE */
	})
	if loadErr != nil {
		return nil, loadErr
	}
	return d, err
}

// engine is the datapath and the model side by side.
type engine struct {
	w        *world
	m        *model
	base     *cluster
	talks    []conversation
	counters *ebpf.Memory
	before   []byte
	after    []byte
	frames   map[packet][]byte
	began    uint64
	keys     [2][]flowKey
	vals     [2][]pwmaps.Flow
	n        [2]int
	trail    []string // what happened, for the report
	packets  int
	pushed   int // entries pushed out in this sequence
	kept     int // world.kept at its beginning
	seen     map[reason]uint64
}

func newEngine(t testing.TB, f family, crowded bool) *engine {
	t.Helper()
	get := roomy
	if crowded {
		get = tight
	}
	d, err := get()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, f: f, datapath: d}
	w.fill()
	w.ways()
	// One of the two takes IPv4 in IPv4.
	w.node(nodeIDC, func(n *pwmaps.Node) { n.Flags |= pwmaps.NodeIPIP })
	for _, id := range []uint32{idClient, idLocal, idThird, idRemote, pwmaps.IdentityWorld} {
		w.policy(2, id, pwmaps.PolicyPort, pwmaps.ProtoTCP, podPort, pwmaps.VerdictAllow)
	}
	w.policy(3, idClient, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictAllow)
	w.policy(3, idLocal, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictAllow)
	w.policy(3, idRemote, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictDeny)
	w.policy(4, idRemote, pwmaps.PolicyClass, pwmaps.ProtoTCP, 0, pwmaps.VerdictAllow)
	w.policy(4, pwmaps.IdentityWorld, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictAllow)
	w.policy(tableDefault, 0, pwmaps.PolicyDefault, 0, 0, pwmaps.VerdictAllow)
	w.policy(tableDefault, idRemote, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictDeny)
	w.policy(tableDefault, idClient, pwmaps.PolicyPort, pwmaps.ProtoTCP, podPort, pwmaps.VerdictDeny)
	e := &engine{w: w, base: w.readCluster(), talks: conversations(f), frames: make(map[packet][]byte), seen: make(map[reason]uint64)}
	limits, _ := testTimeouts()
	e.m = &model{cluster: w.readCluster(), limits: limits, overlaid: true, room: w.set.Flows.MaxEntries()}
	if crowded {
		e.m.roomNew = w.set.FlowsNew.MaxEntries()
	}
	for i, m := range []*ebpf.Map{d.objs.PwFlows, d.objs.PwFlowsNew} {
		e.keys[i], e.vals[i] = make([]flowKey, m.MaxEntries()), make([]pwmaps.Flow, m.MaxEntries())
	}
	if e.counters, err = d.objs.PwMetrics.Memory(); err != nil {
		t.Fatal(err)
	}
	e.before, e.after = make([]byte, e.counters.Size()), make([]byte, e.counters.Size())
	return e
}

// reset empties the tables and takes back what a sequence changed.
func (e *engine) reset() {
	e.w.t.Helper()
	e.load()
	for i, m := range []*ebpf.Map{e.w.objs.PwFlows, e.w.objs.PwFlowsNew} {
		for _, k := range e.keys[i][:e.n[i]] {
			if err := m.Delete(&k); err != nil {
				e.w.t.Fatal(err)
			}
		}
	}
	e.m.cluster.restore(e.w, e.base)
	e.m.flows, e.trail = nil, nil
	e.began = e.w.now()
	e.pushed, e.kept = 0, e.w.kept()
}

// counted: every entry that came into the table of new flows and went again
// is in the counts that evictions are computed from.
func (e *engine) counted() string {
	e.w.t.Helper()
	e.load()
	if got := e.w.kept() - e.kept - e.n[1]; got != e.pushed {
		return fmt.Sprintf("%d entries evicted, want %d", got, e.pushed)
	}
	return ""
}

// load reads both tables into the buffers.
func (e *engine) load() {
	e.w.t.Helper()
	for i, m := range []*ebpf.Map{e.w.objs.PwFlows, e.w.objs.PwFlowsNew} {
		var cursor ebpf.MapBatchCursor
		n, err := m.BatchLookup(&cursor, e.keys[i], e.vals[i], nil)
		if err != nil && !strings.Contains(err.Error(), ebpf.ErrKeyNotExist.Error()) {
			e.w.t.Fatalf("read flow table: %v", err)
		}
		e.n[i] = n
	}
}

// read returns all keys of both tables.
func (e *engine) read() []flowKey {
	e.w.t.Helper()
	e.load()
	return append(slices.Clone(e.keys[0][:e.n[0]]), e.keys[1][:e.n[1]]...)
}

// frame builds the bytes of a packet; most are asked for again and again.
func (e *engine) frame(p packet, answer bool) []byte {
	e.w.t.Helper()
	id := packet{key: p.key, flags: p.flags, ttl: p.ttl, decap: answer}
	if b, ok := e.frames[id]; ok && p.quote == nil {
		return b
	}
	build := func(k flowKey, answer bool) []byte {
		fr := frame{
			src: ap(pwmaps.FromAddr(k.Src), k.Sport), dst: ap(pwmaps.FromAddr(k.Dst), k.Dport),
			proto: k.Proto, flags: p.flags, ttl: p.ttl, reply: answer, payload: []byte("payload."),
		}
		if fr.proto == protoICMP6 {
			fr.proto = protoICMP
		}
		return fr.bytes(e.w.t)
	}
	var b []byte
	if p.quote != nil {
		// An echo's identifier says by its place which of the two it is.
		q := build(*p.quote, p.quote.Sport == 0)
		b = icmpError(e.w.t, pwmaps.FromAddr(p.key.Src), pwmaps.FromAddr(p.key.Dst), q)
		if p.ttl != 64 {
			if e.w.f.v6 {
				b[21] = p.ttl
			} else {
				b[22] = p.ttl
				mend(b)
			}
		}
	} else {
		b = build(p.key, answer)
	}
	if p.key.Via != 0 {
		copy(b[6:], []byte{2, 'p', 'w', 0, 0, 2})
	}
	if p.quote == nil {
		e.frames[id] = b
	}
	return b
}

func (p packet) String() string {
	s := fmt.Sprintf("%s dev %d from %v %d: %s", pwmaps.HookName(p.hook), p.dev, p.from.kind, p.from.id, pwmaps.KeyString(p.key))
	if p.key.Proto == pwmaps.ProtoTCP {
		for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK"} {
			if p.flags&(1<<i) != 0 {
				s += " " + name
			}
		}
	}
	if p.quote != nil {
		s += " about " + pwmaps.KeyString(*p.quote)
	}
	if p.ttl != 64 {
		s += fmt.Sprintf(" TTL %d", p.ttl)
	}
	return s
}

// send runs one packet through datapath and model.
func (e *engine) send(p packet, answer bool) string {
	e.w.t.Helper()
	pkt := e.frame(p, answer)
	if !p.decap {
		return e.one(p, e.shot(p, pkt))
	}
	// The tunnel's packet meets the device's hook first.
	outer := p
	outer.hook, outer.dev = fromNetdev, e.w.index(devWire)
	from := outerNode(p.from.id)
	s := e.w.at(fromNetdev, e.w.wrap(from, pkt))
	if p.key.Via != 0 {
		copy(s.pkt[tunnelHeader+6:], pkt[6:12])
		mend(s.pkt)
	}
	e.m.now = e.w.now()
	if e.m.takesDecap(p) {
		if p.ipip {
			s = e.w.at(fromNetdev, wrapIPIP(e.w.t, from, e.w.f.nodeA, pkt))
		}
		return e.one(outer, s)
	}
	r := e.run(s)
	if msg := r.broken(); msg != "" || r.counts[passed] != 1 || len(r.counts) != 1 {
		return fmt.Sprintf("%v: behind a tunnel header: %v, want the device to take it; %s", outer, r, msg)
	}
	p.decap = false
	return e.one(p, e.shot(p, pkt))
}

func outerNode(id uint32) netip.Addr {
	if id == nodeIDC {
		return outer().nodeC
	}
	return outer().nodeB
}

func (e *engine) shot(p packet, pkt []byte) shot {
	s := shot{hook: p.hook, dev: e.name(p.dev), pkt: pkt}
	switch {
	case p.hook == fromOverlay:
		node := e.w.f.nodeB
		if p.from.id == nodeIDC {
			node = e.w.f.nodeC
		}
		s.tunnel = tunnelKey{pwmaps.ToAddr(node), vni}
	case (p.hook == toPod || p.hook == toOverlay) && p.from.kind == bpf.DpPwPlaceKindPW_PLACE_WIRE:
		s.iif = devWire
	}
	return s
}

func (e *engine) name(index uint32) string {
	for name, d := range e.w.devs {
		if uint32(d.index) == index {
			return name
		}
	}
	e.w.t.Fatalf("no device %d", index)
	return ""
}

// run is world.fire with counters that cost nothing to read.
func (e *engine) run(s shot) *result {
	e.w.t.Helper()
	e.packets++
	s.pkt = slices.Clone(s.pkt)
	copy(s.pkt, e.w.devs[s.dev].mac)
	prog := e.w.program(s.hook)
	if s.hook == fromOverlay {
		var err error
		if prog, err = e.w.gate(s.tunnel); err != nil {
			e.w.t.Fatal(err)
		}
	}
	in := skBuff{Ifindex: e.w.index(s.dev)}
	if s.iif != "" {
		in.IngressIfindex = e.w.index(s.iif)
	}
	var out skBuff
	opts := ebpf.RunOptions{Data: s.pkt, DataOut: make([]byte, len(s.pkt)+128), Context: &in, ContextOut: &out}
	if _, err := e.counters.ReadAt(e.before, 0); err != nil {
		e.w.t.Fatal(err)
	}
	action, err := prog.Run(&opts)
	if err != nil || action == gateFailed {
		e.w.t.Fatalf("run %s: action %d, %v", pwmaps.HookName(s.hook), action, err)
	}
	if _, err := e.counters.ReadAt(e.after, 0); err != nil {
		e.w.t.Fatal(err)
	}
	r := &result{t: e.w.t, shot: s, action: action, mark: out.Mark, out: opts.DataOut, counts: make(map[reason]uint64)}
	was, is := rows(e.before), rows(e.after)
	for why := range reason(128) {
		for v6 := range 2 {
			row := pwmaps.MetricsIndex(why, s.hook, v6 == 1)
			if n := is[row].Packets - was[row].Packets; n != 0 {
				r.counts[why] += n
				r.v6 = v6 == 1
			}
		}
	}
	return r
}

func rows(b []byte) []pwmaps.Counter {
	return unsafe.Slice((*pwmaps.Counter)(unsafe.Pointer(&b[0])), len(b)/16)
}
