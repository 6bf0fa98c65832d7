package packet

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
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
	for _, id := range []uint32{idClient, idLocal, idThird, idRemote, pwmaps.IdentityWorld} {
		w.policy(2, id, pwmaps.PolicyPort, pwmaps.ProtoTCP, podPort, pwmaps.VerdictAllow)
	}
	w.policy(3, idClient, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictAllow)
	w.policy(3, idLocal, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictAllow)
	w.policy(3, idRemote, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictDeny)
	w.policy(4, idRemote, pwmaps.PolicyClass, pwmaps.ProtoTCP, 0, pwmaps.VerdictAllow)
	w.policy(4, pwmaps.IdentityWorld, pwmaps.PolicyAny, 0, 0, pwmaps.VerdictAllow)
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
	e.m.flows, e.m.left, e.trail = nil, make(map[flowKey]pwmaps.Flow), nil
	e.began = e.w.now()
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
	opts := ebpf.RunOptions{Data: s.pkt, DataOut: make([]byte, len(s.pkt)+128), Context: &in}
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
	r := &result{t: e.w.t, shot: s, action: action, out: opts.DataOut, counts: make(map[reason]uint64)}
	was, is := rows(e.before), rows(e.after)
	for why := range reason(64) {
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

// one compares one packet's fate and what it did to the tables.
func (e *engine) one(p packet, s shot) string {
	e.w.t.Helper()
	e.m.now = e.w.now()
	r := e.run(s)
	e.load()
	if msg := r.broken(); msg != "" {
		return fmt.Sprintf("%v: %s", p, msg)
	}
	for why, n := range r.counts {
		e.seen[why] += n
	}
	e.trail = append(e.trail, fmt.Sprintf("%v: %v", p, r))
	choices := e.choices(p, r)
	if len(choices) == 1 {
		return e.agree(e.m, p, r, choices[0])
	}
	first := ""
	for _, ch := range choices {
		m := e.m.clone()
		msg := e.agree(m, p, r, ch)
		if msg == "" {
			e.m = m
			return ""
		}
		if first == "" {
			first = msg
		}
	}
	return first
}

// choices reads from the datapath what the rules leave open; if it left no
// trace, anything may have been chosen.
func (e *engine) choices(p packet, r *result) []choice {
	for i := range e.keys {
		if at := slices.Index(e.keys[i][:e.n[i]], p.key); at >= 0 {
			f := e.vals[i][at]
			return []choice{{ap(pwmaps.FromAddr(f.Dst), f.Dport), f.Sport}}
		}
	}
	if why, _ := r.ends(); !pwmaps.IsDrop(why) {
		if d, ok := decode(r.inner()); ok {
			sport, dport := d.ports()
			return []choice{{ap(d.dst, dport), sport}}
		}
	}
	out := []choice{}
	_, all := e.m.choices(p.key)
	for _, b := range all {
		out = append(out, choice{b, p.key.Sport})
	}
	if len(out) == 0 {
		out = append(out, choice{})
	}
	return out
}

// inner is what left, without the tunnel's header.
func (r *result) inner() []byte {
	if r.counts[fwdEncap] != 0 {
		return r.out[tunnelHeader:]
	}
	return r.out
}

func (e *engine) agree(m *model, p packet, r *result, ch choice) string {
	o := m.step(p, ch)
	got, _ := r.ends()
	want := o.engine
	want[o.end]++
	same := len(want) == len(r.counts)
	for why, n := range want {
		same = same && r.counts[why] == n
	}
	if !same {
		w := result{counts: want}
		return fmt.Sprintf("%v: counted %v, want %v", p, r, &w)
	}
	if !pwmaps.IsDrop(got) && got != passed {
		if msg := o.left(p, r); msg != "" {
			return fmt.Sprintf("%v: %s", p, msg)
		}
	}
	if msg := e.compareTo(m); msg != "" {
		return fmt.Sprintf("after %v (%v): %s", p, r, msg)
	}
	return ""
}

// left compares the packet that was sent on.
func (o outcome) left(p packet, r *result) string {
	d, ok := decode(r.inner())
	if !ok {
		return fmt.Sprintf("what left is no packet: %x", r.out)
	}
	src, dst := ap(d.src, 0), ap(d.dst, 0)
	wantSrc, wantDst := ap(o.src.Addr(), 0), ap(o.dst.Addr(), 0)
	if hasPorts(d.proto) {
		sport, dport := d.ports()
		src, dst, wantSrc, wantDst = ap(d.src, sport), ap(d.dst, dport), o.src, o.dst
	}
	if src != wantSrc || dst != wantDst {
		return fmt.Sprintf("left as %v -> %v, want %v -> %v", src, dst, wantSrc, wantDst)
	}
	ttl := p.ttl
	if p.hook != toPod && p.hook != toOverlay && o.to.kind != bpf.DpPwPlaceKindPW_PLACE_HOST {
		ttl--
	}
	if d.ttl != ttl {
		return fmt.Sprintf("left with TTL %d, want %d", d.ttl, ttl)
	}
	if to := [6]byte(r.inner()[:6]); o.to.kind == bpf.DpPwPlaceKindPW_PLACE_POD && p.hook != toPod && to != o.mac {
		return fmt.Sprintf("left to MAC %x, want %x", to, o.mac)
	}
	return ""
}

func (e *engine) compare() string {
	e.load()
	return e.compareTo(e.m)
}

// compareTo: both tables hold exactly what the model says.
func (e *engine) compareTo(m *model) string {
	var want [2]map[flowKey]pwmaps.Flow
	want[0], want[1] = make(map[flowKey]pwmaps.Flow), make(map[flowKey]pwmaps.Flow)
	for k, v := range m.left {
		want[1][k] = v
	}
	for _, f := range m.flows {
		i := 1
		if f.confirmed {
			i = 0
		}
		for dir, k := range []flowKey{f.key, f.back} {
			if f.have[dir] {
				want[i][k] = f.entry(dir)
			}
		}
	}
	slack := e.w.now() - e.began
	for i, name := range []string{"pw_flows", "pw_flows_new"} {
		for at, k := range e.keys[i][:e.n[i]] {
			w, ok := want[i][k]
			if !ok {
				return fmt.Sprintf("%s holds %s, want nothing there", name, pwmaps.KeyString(k))
			}
			delete(want[i], k)
			if msg := differ(e.vals[i][at], w, slack); msg != "" {
				return fmt.Sprintf("%s, %s: %s", name, pwmaps.KeyString(k), msg)
			}
		}
		for k := range want[i] {
			return fmt.Sprintf("%s does not hold %s", name, pwmaps.KeyString(k))
		}
	}
	return ""
}

// differ compares two entries in what they mean. Times are the model's or a
// little later.
func differ(got, want pwmaps.Flow, slack uint64) string {
	if got.LastSeen-want.LastSeen > slack {
		return fmt.Sprintf("last seen %v off", time.Duration(got.LastSeen-want.LastSeen))
	}
	if got.Created-want.Created > slack {
		return fmt.Sprintf("created %v off", time.Duration(got.Created-want.Created))
	}
	if got.KeyHash == 0 {
		return "the entry is marked as removed"
	}
	for _, f := range []*pwmaps.Flow{&got, &want} {
		f.LastSeen, f.Created, f.KeyHash = 0, 0, 0
		if at(f.To).kind != bpf.DpPwPlaceKindPW_PLACE_POD {
			f.Mac = [6]byte{}
		}
		if at(f.To).kind != bpf.DpPwPlaceKindPW_PLACE_WIRE {
			f.Nexthop = addr{}
		}
		if why := reason(f.Reason); why != 0 && why != bpf.DpPwReasonPW_DROP_POLICY_EGRESS &&
			why != bpf.DpPwReasonPW_DROP_POLICY_INGRESS {
			f.Rule = 0 // no rule spoke
		}
	}
	if got == want {
		return ""
	}
	var out []string
	g, v := reflect.ValueOf(got), reflect.ValueOf(want)
	for i := range g.NumField() {
		if a, b := fmt.Sprint(g.Field(i)), fmt.Sprint(v.Field(i)); a != b {
			out = append(out, fmt.Sprintf("%s is %s, want %s", g.Type().Field(i).Name, a, b))
		}
	}
	return strings.Join(out, "; ")
}

// try plays a whole sequence: the number of the step that went wrong, and how.
func (e *engine) try(seq sequence) (int, string) {
	e.w.t.Helper()
	e.reset()
	for i, s := range seq.steps {
		if msg := e.play(&seq, s); msg != "" {
			return i, msg
		}
	}
	return 0, ""
}

// fail reports a sequence that went wrong, after leaving out of it all that
// can be left out.
func (e *engine) fail(seq sequence, at int, msg string) {
	e.w.t.Helper()
	seq.steps = seq.steps[:at+1]
	for size := len(seq.steps) / 2; size > 0; {
		smaller := false
		for i := 0; i+size <= len(seq.steps); i++ {
			shorter := sequence{seq.talks, slices.Delete(slices.Clone(seq.steps), i, i+size)}
			if n, m := e.try(shorter); m != "" {
				seq.steps, msg, smaller = shorter.steps[:n+1], m, true
				i--
			}
		}
		if !smaller {
			size /= 2
		}
	}
	if _, m := e.try(seq); m != "" {
		msg = m
	}
	var b strings.Builder
	for _, s := range seq.steps {
		fmt.Fprintf(&b, "  %v\n", s)
	}
	e.w.t.Fatalf("%s\nafter the steps (conversations %v):\n%sand the packets:\n  %s",
		msg, seq.talks, b.String(), strings.Join(e.trail, "\n  "))
}

var (
	modelSeed  = flag.Uint64("model.seed", 0, "seed of the flow engine's random sequences; 0 = the time")
	modelCount = flag.Int("model.sequences", 1500, "how many random sequences, per family and table size")
)

// The real programs do what the rules say, packet after packet.
func TestEngine(t *testing.T) {
	seed := *modelSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	for _, f := range families() {
		for name, crowded := range map[string]bool{"room": false, "crowded": true} {
			t.Run(f.name+"/"+name, func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(len(name))))
				e := newEngine(t, f, crowded)
				count := *modelCount
				if crowded {
					count /= 4
				}
				for n := range count {
					b := make([]byte, headLen+stepLen*(10+r.IntN(40)))
					for i := range b {
						b[i] = byte(r.Uint32())
					}
					seq := readSequence(b)
					if at, msg := e.try(seq); msg != "" {
						t.Logf("seed %d, sequence %d", seed, n)
						e.fail(seq, at, msg)
					}
				}
				e.report2(t)
			})
		}
	}
}

// report2 says how often what was reached.
func (e *engine) report2(t *testing.T) {
	var out []string
	for why, n := range e.seen {
		out = append(out, fmt.Sprintf("%s %d", pwmaps.ReasonName(why), n))
	}
	slices.Sort(out)
	t.Logf("%d packets: %s", e.packets, strings.Join(out, ", "))
}

// FuzzEngine does the same with the fuzzer's choice of sequences.
func FuzzEngine(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 20 {
		b := make([]byte, headLen+stepLen*30)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(byte(i), b)
	}
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		if len(b) > headLen+stepLen*200 {
			b = b[:headLen+stepLen*200]
		}
		e := newEngine(t, families()[which&1], which&2 != 0)
		seq := readSequence(b)
		if at, msg := e.try(seq); msg != "" {
			e.fail(seq, at, msg)
		}
	})
}
