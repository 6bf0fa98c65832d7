package packet

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/podweir/podweir/internal/bpf"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

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
	_, all := e.m.choices(p.key, p.from.kind)
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
	if r.counts[fwdIPIP] != 0 {
		return unwrap(r.out)
	}
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
	if p.quote != nil {
		if src, dst := quoted(r.inner()); src != o.quoted[0] || dst != o.quoted[1] {
			return fmt.Sprintf("left about %v -> %v, want %v -> %v", src, dst, o.quoted[0], o.quoted[1])
		}
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
	// By the device's own way out, where the mark says that all is decided, or
	// past it.
	toPodAlone := o.to.kind == bpf.DpPwPlaceKindPW_PLACE_POD && !egress(p.hook)
	if marked := r.mark&0x1000 != 0; toPodAlone && marked != o.shaped {
		return fmt.Sprintf("marked: %v, for a pod with a qdisc: %v", marked, o.shaped)
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
