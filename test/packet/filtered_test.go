package packet

import (
	"bytes"
	"flag"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// With it every test is one of pods with filters, except for those of the flow
// engine: a flow's first packet is there twice.
var allFiltered = flag.Bool("filtered", false, "what pods send passes filters in all tests")

// filter shoots a packet; that of a pod with filters at the ingress of its veth
// twice, before and after these, which let everything pass. What is returned is
// as from_pod would have it: what the flow engine did at first, and what became
// of the packet in the end.
func (w *world) filter(s shot, shoot func(shot, *ebpf.Program) *result) *result {
	w.t.Helper()
	if s.hook != fromPod || !w.filtered || s.cut != 0 {
		return shoot(s, w.program(s.hook))
	}
	// Any device that is no pod's.
	veth, over := w.index(s.dev), w.index(devWire2)
	put(w, w.set.Filtered, veth, over)
	put(w, w.set.Filtered, over, veth)
	r := shoot(s, w.objs.FromPodJudge)
	if r.action != actNext {
		if r.counts[fwdHost] != 0 {
			copy(r.out, r.shot.pkt[:1])
		}
		return r
	}
	stays := r.out[0]&1 != 0
	for why := range r.counts {
		if why >= hit && why != fwdIPIP && !maps.IsDrop(why) {
			continue
		}
		// For the stack, past what is over the veth.
		if !stays {
			w.t.Fatalf("for the stack, and the device over the veth would take it: %v", r)
		}
		copy(r.out, r.shot.pkt[:1])
		return r
	}
	if stays || !bytes.Equal(r.out[1:], r.shot.pkt[1:]) {
		w.t.Fatalf("left to the filters, and changed:\n in  %x\n out %x", r.shot.pkt, r.out)
	}
	again := s
	again.dev, again.pkt, again.mark, again.other = devWire2, r.out, r.mark, true
	r2 := shoot(again, w.objs.FromPodSend)
	for why, n := range r2.counts {
		if why < hit || why > reselected {
			r.counts[why] += n
		} else if why != hit && why != hitNew && why != miss && why != tableFull {
			w.t.Fatalf("after the filters it was no packet of the flow that it had been: %v, before %v", r2, r)
		}
	}
	r.action, r.mark, r.out, r.v6 = r2.action, r2.mark, r2.out, r2.v6
	return r
}

// filters has the pods' packets pass filters.
func (w *world) filters() *world {
	w.filtered = true
	return w
}

// A pod whose veth has filters of others: what it sends is judged before and
// sent on after them, everything as without.
func TestFilteredPod(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.filters().f
		w.ways()
		c := w.conn(40000)
		first := c.send(syn).is(fwdEncap, miss, created)
		w.encapsulated(first, c.out.src, c.answer.src)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		c.send(ack).is(fwdEncap, hitNew, confirmed)
		c.send(ack).is(fwdEncap, hit)
		for dst, end := range map[string]struct {
			fr  frame
			why reason
		}{
			"a pod of the node":  {udp(ap(f.client, 40001), ap(f.local, podPort)), fwdLocal},
			"the world":          {udp(ap(f.client, 40002), ap(f.world, 53)), fwdWire},
			"the node":           {udp(ap(f.client, 40003), ap(f.nodeA, 53)), fwdHost},
			"the node's service": {tcp(ap(f.client, 40004), ap(f.vipHost, svcPort), syn), fwdHost},
		} {
			t.Run(dst, func(t *testing.T) {
				w.pod(devClient, end.fr).is(end.why, miss, created)
				w.pod(devClient, end.fr).ended(end.why)
			})
		}
		// To all on the link by its MAC, to one by its address.
		s := w.at(fromPod, udp(ap(f.client, 40001), ap(f.local, podPort)).bytes(t))
		s.other = true
		copy(s.pkt, bytes.Repeat([]byte{0xff}, 6))
		w.run(s).is(fwdLocal, hitNew)

		// What must not get there does not get to the filters.
		w.pod(devClient, udp(ap(f.third, 1), ap(f.local, podPort))).is(spoofedSource, miss)
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		w.pod(devClient, udp(ap(f.client, 40001), ap(f.local, podPort))).is(bpf.DpPwReasonPW_DROP_POLICY_EGRESS, stale)

		// What comes out of them is judged again.
		denied := udp(ap(f.client, 40009), ap(f.local, podPort)).bytes(t)
		over := shot{hook: fromPod, dev: devWire2, pkt: denied}
		if r := w.shoot(over, w.objs.FromPodSend); r.action != actDrop || r.counts[bpf.DpPwReasonPW_DROP_POLICY_EGRESS] != 1 {
			t.Errorf("denied meanwhile: %v", r)
		}
		over.pkt = udp(ap(f.local, 40009), ap(f.third, podPort)).bytes(t)
		if r := w.shoot(over, w.objs.FromPodSend); r.action != actDrop || r.counts[spoofedSource] != 1 {
			t.Errorf("another pod's address: %v", r)
		}
		// A copy, which the stack has had; and a device that is over nothing.
		over.other = true
		over.pkt[0] |= 1
		if r := w.shoot(over, w.objs.FromPodSend); r.action != actDrop || len(r.counts) != 0 {
			t.Errorf("a copy: %v", r)
		}
		if err := w.set.Filtered.Delete(w.index(devWire2)); err != nil {
			t.Fatal(err)
		}
		over = shot{hook: fromPod, dev: devWire2, pkt: udp(ap(f.remote, 1), ap(f.local, podPort)).bytes(t)}
		if r := w.shoot(over, w.objs.FromPodSend); r.action != actDrop || r.counts[spoofedSource] != 1 {
			t.Errorf("over nothing: %v", r)
		}
		// Before the device is ready, and when it goes.
		if err := w.set.Filtered.Delete(w.index(devClient)); err != nil {
			t.Fatal(err)
		}
		w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 0 })
		alone := w.at(fromPod, udp(ap(f.client, 40001), ap(f.local, podPort)).bytes(t))
		if r := w.shoot(alone, w.objs.FromPodJudge); r.action != actRedirect || r.counts[fwdLocal] != 1 {
			t.Errorf("nothing over the veth: %v", r)
		}
		alone.pkt = udp(ap(f.client, 40003), ap(f.nodeA, 53)).bytes(t)
		if r := w.shoot(alone, w.objs.FromPodJudge); r.action != actNext || r.counts[fwdHost] != 1 || r.out[0]&1 == 0 {
			t.Errorf("for the stack, and something may be over the veth: %v", r)
		}
	})
}

// The same packets, answers, fragments and errors as everywhere else.
func TestFilteredPods(t *testing.T) {
	for _, f := range families() {
		t.Run(fmt.Sprint(f.name), func(t *testing.T) {
			w := newWorld(t, f).filters()
			w.use(everything)
			w.dsr, w.defrags = true, true
			w.fuzzHook(t, w.ways, fromPod, make(map[reason]uint64))
		})
	}
}
