package packet

import (
	"sync"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

// narrow is a datapath with room for few new flows.
var narrow = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024})
})

// kept is how many entries of pw_flows_new the datapath has put there and not
// taken away. What is missing of them was pushed out, or deleted by hand.
func (w *world) kept() int {
	w.t.Helper()
	n, err := w.set.Churn.Read()
	if err != nil {
		w.t.Fatal(err)
	}
	return int(n.Inserted - n.Removed)
}

// evicted is what the agent would tell.
func (w *world) evicted() int {
	w.t.Helper()
	n, err := w.set.Churn.Read()
	if err != nil {
		w.t.Fatal(err)
	}
	evicted, uncounted := maps.Evicted(n, n, uint64(w.newFlows()))
	if uncounted != 0 {
		w.t.Fatalf("%d entries that nobody inserted", uncounted)
	}
	return int(evicted)
}

func (w *world) newFlows() int {
	w.t.Helper()
	all, err := w.set.FlowsNew.Dump()
	if err != nil {
		w.t.Fatal(err)
	}
	return len(all)
}

// A flood pushes entries out of a full table: exactly those are counted that
// were created and are not there any more. What is taken over, replaced,
// promoted, refused or swept is not.
func TestEvictionsAreCounted(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d, err := narrow()
		if err != nil {
			t.Fatal(err)
		}
		w.datapath = d
		w.fill()
		base := w.evicted() // of the other family, and what fill deleted by hand
		want := func(n int) {
			t.Helper()
			if got := w.evicted() - base; got != n {
				t.Fatalf("%d evicted, want %d", got, n)
			}
		}
		want(0)
		entries := w.newFlows()
		c := w.conn(60000).open()
		if n := w.newFlows(); n != entries {
			t.Fatalf("%d entries of new flows, want %d: a confirmed one has none", n, entries)
		}
		want(0)
		// An outlived flow makes room for the next of its tuple.
		fr := udp(ap(w.f.client, 40000), ap(w.f.vipLocal, svcPort))
		answer := udp(ap(w.f.local, podPort), fr.src)
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		w.age(fr.key(), time.Minute)
		w.age(answer.key(), time.Minute)
		w.pod(devClient, fr).is(fwdLocal, miss, takenOver, created)
		want(0)
		// One whose reply tuple is taken, and one that is its own reply.
		direct := udp(fr.src, ap(w.f.local, podPort))
		w.pod(devClient, direct).is(fwdLocal, miss, portChanged)
		self := ap(w.f.client, 5353)
		w.pod(devClient, udp(self, self)).is(fwdLocal, miss, raceLost, hitNew)
		want(0)
		// The forward entry is pushed out (here by hand): it is inserted
		// again, the reply's is written over.
		del(w, w.set.FlowsNew, fr.key())
		want(1)
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		want(1)
		for _, k := range []frame{fr, answer} {
			w.age(k.key(), time.Minute)
		}
		if n := w.sweep(fr.key(), answer.key()); n != 1 {
			t.Fatalf("swept %d flows", n)
		}
		want(1)
		// An established flow, which took its own entries away.
		if n := w.sweep(c.out.key(), c.answer.key()); n != 0 {
			t.Fatalf("swept %d established flows", n)
		}
		want(1)

		const flood = 3000 // two entries each
		before := w.newFlows()
		pkt := tcp(ap(w.f.third, 1), ap(w.f.remote, podPort), syn).bytes(t)
		copy(pkt, w.devs[devThird].mac)
		ports := len(pkt) - 20
		was := w.counters()
		for i := range flood {
			pkt[ports], pkt[ports+1] = byte(i>>8)+8, byte(i)
			if _, err := w.quick(devThird, pkt); err != nil {
				t.Fatal(err)
			}
		}
		w.last = nil
		k := row{created, fromPod, w.f.v6}
		if n := w.counters()[k] - was[k]; n != flood {
			t.Fatalf("%d flows created, want %d", n, flood)
		}
		left := w.newFlows()
		if left > w.set.FlowsNew.MaxEntries() {
			t.Fatalf("%d entries", left)
		}
		want(1 + before + 2*flood - left)
		c.send(ack).is(fwdTunnel, hit)
	})
}

// Entries from before the counts, after an update of the agent, are counted
// once as inserted, and are no evictions then or later.
func TestEntriesBeforeTheCounts(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		d, err := load(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024})
		if err != nil {
			t.Fatal(err)
		}
		defer d.objs.Close()
		w.datapath = d
		w.fill()
		fr := udp(ap(w.f.client, 40000), ap(w.f.vipLocal, svcPort))
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		old := make(map[maps.FlowKey]maps.Flow)
		for i := range uint16(100) {
			old[udp(ap(w.f.client, i), ap(w.f.remote, 9)).key()] = maps.Flow{}
		}
		if err := w.set.FlowsNew.PutAll(old); err != nil {
			t.Fatal(err)
		}
		n, err := w.set.Churn.Read()
		if err != nil {
			t.Fatal(err)
		}
		evicted, uncounted := maps.Evicted(n, n, uint64(w.newFlows()))
		if evicted != 0 || uncounted != 100 {
			t.Fatalf("%d evicted, %d uncounted", evicted, uncounted)
		}
		for range 2 {
			if err := w.set.Churn.AddFound(uncounted / 2); err != nil {
				t.Fatal(err)
			}
		}
		if got := w.evicted(); got != 0 {
			t.Fatalf("%d evicted", got)
		}
		w.pod(devClient, udp(fr.src, ap(w.f.remote, 10))).is(fwdTunnel, miss, created)
		if got := w.evicted(); got != 0 {
			t.Fatalf("%d evicted after another flow", got)
		}
	})
}
