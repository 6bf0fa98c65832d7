package packet

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/maps"
)

// sweep runs the program that removes idle flows over the keys given.
func (w *world) sweep(keys ...maps.FlowKey) int {
	w.t.Helper()
	buf, err := binary.Append(make([]byte, 14), binary.NativeEndian, keys)
	if err != nil {
		w.t.Fatal(err)
	}
	n, err := w.objs.Sweep.Run(&ebpf.RunOptions{Data: buf})
	if err != nil {
		w.t.Fatal(err)
	}
	return int(n)
}

// The keys that are still idle when the kernel looks go, with both entries;
// the rest stays.
func TestSweep(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		var keys []maps.FlowKey
		var flows []frame
		for port := uint16(1); port <= 60; port++ {
			fr := udp(ap(w.f.client, port), ap(w.f.vipLocal, svcPort))
			w.pod(devClient, fr).is(fwdLocal, miss, created)
			flows = append(flows, fr)
			keys = append(keys, fr.key())
		}
		answer := func(fr frame) frame { return udp(ap(w.f.local, podPort), fr.src) }
		if n := w.sweep(keys...); n != 0 {
			t.Fatalf("swept %d live flows", n)
		}
		for i, fr := range flows {
			w.age(fr.key(), time.Minute)
			if i%3 == 0 { // the other direction is alive
				continue
			}
			w.age(answer(fr).key(), time.Minute)
		}
		if n := w.sweep(keys...); n != 40 {
			t.Fatalf("swept %d flows, want 40", n)
		}
		for i, fr := range flows {
			_, ok := w.find(fr.key())
			_, back := w.find(answer(fr).key())
			if alive := i%3 == 0; ok != alive || back != alive {
				t.Fatalf("flow %d: entries %v and %v, want both %v", i, ok, back, alive)
			}
		}
		if n := w.sweep(keys...); n != 0 {
			t.Fatalf("swept %d flows twice", n)
		}
	})
}

// Either entry's key will do. What is in the other table under the key of an
// established flow goes: programs before these left copies there.
func TestSweepConfirmed(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000).open()
		for _, fr := range []frame{c.out, c.answer} {
			f, ok := w.find(fr.key())
			if !ok {
				t.Fatalf("no entry of %v", fr)
			}
			if err := w.set.FlowsNew.Put(fr.key(), f.Flow); err != nil {
				t.Fatal(err)
			}
		}
		for _, fr := range []frame{c.out, c.answer} {
			w.age(fr.key(), time.Hour)
		}
		if n := w.sweep(c.out.key(), c.answer.key()); n != 0 {
			t.Fatalf("swept %d established flows", n)
		}
		all, err := w.set.FlowsNew.Dump()
		if err != nil || len(all) != 0 {
			t.Fatalf("%d copies left behind, %v", len(all), err)
		}
		c.send(ack).is(fwdTunnel, hit)
		c.send(rst).is(fwdTunnel, hit)
		for _, fr := range []frame{c.out, c.answer} {
			w.age(fr.key(), 61*time.Second)
		}
		if n := w.sweep(c.answer.key()); n != 1 {
			t.Fatalf("swept %d, want 1", n)
		}
		w.noEntry(c.out)
		w.noEntry(c.answer)
	})
}
