package packet

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const (
	flowInsert = bpf.DpPwReasonPW_DROP_FLOW_INSERT
)

// cramped is a datapath whose tables have room for one confirmed flow and a
// half, and for two and a half new ones. The table of new flows is an LRU in
// production, which always finds room by pushing something out; here it is a
// hash, so that "no room" can be seen at all.
var cramped = sync.OnceValues(func() (*datapath, error) {
	return loadAs(loader.Config{FlowsMax: 3, FlowsNewMax: 5}, func(spec *ebpf.CollectionSpec) {
		spec.Maps[bpf.DpMapPwFlowsNew].Type = ebpf.Hash
	})
})

// crowded moves the world into the cramped datapath.
func (w *world) crowded() {
	w.t.Helper()
	d, err := cramped()
	if err != nil {
		w.t.Fatal(err)
	}
	w.datapath = d
	w.fill()
}

// A full table of confirmed flows costs nobody the connection.
func TestConfirmedTableFull(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.crowded()
		first := w.conn(40000).open()
		c := w.conn(40001)
		c.send(syn).is(fwdTunnel, miss, created)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		for range 3 {
			c.send(ack).is(fwdTunnel, hitNew, tableFull)
			c.reply(ack).is(fwdLocal, hitNew)
		}
		if w.entry(c.out).confirmed || w.entry(c.answer).confirmed {
			t.Fatal("half of the flow is in a table that was full")
		}
		first.send(ack).is(fwdTunnel, hit)
		// Room again: the flow is confirmed with its next packet.
		del(w, w.set.Flows, first.out.key())
		del(w, w.set.Flows, first.answer.key())
		c.send(ack).is(fwdTunnel, hitNew, confirmed)
		c.send(ack).is(fwdTunnel, hit)
	})
}

// No room at all: dropped, and no half of a flow stays behind.
func TestNewTableFull(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.crowded()
		for port := uint16(1); port <= 2; port++ {
			w.conn(port).send(syn).is(fwdTunnel, miss, created)
		}
		c := w.conn(3)
		for range 3 {
			c.send(syn).is(flowInsert, miss)
		}
		w.noEntry(c.out)
		w.noEntry(c.answer)
		w.conn(1).send(syn).is(fwdTunnel, hitNew)
	})
}

// Two ways to one reply tuple: the second gets another source port, and each
// answer finds the way it belongs to.
func TestReplyTupleTaken(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
			via := frame{src: ap(w.f.client, 40000), dst: ap(w.f.vipLocal, svcPort), proto: proto, flags: syn}
			direct := frame{src: via.src, dst: ap(w.f.local, podPort), proto: proto, flags: syn}
			w.pod(devClient, via).is(fwdLocal, miss, created)
			r := w.pod(devClient, direct).is(fwdLocal, miss, portChanged)
			d, _ := decode(r.out)
			port, _ := d.ports()
			if !givable(port) {
				t.Fatalf("source port %d", port)
			}
			changed := ap(w.f.client, port)
			r.leaves(changed, direct.dst)
			w.pod(devClient, direct).is(fwdLocal, hitNew).leaves(changed, direct.dst)
			answer := direct.back()
			answer.flags = syn | ack
			w.pod(devLocal, answer).is(fwdLocal, hitNew).leaves(via.dst, via.src)
			answer.dst = changed
			w.pod(devLocal, answer).is(fwdLocal, hitNew).leaves(direct.dst, direct.src)
			direct.flags = ack
			w.pod(devClient, direct).is(fwdLocal, hitNew, confirmed).leaves(changed, direct.dst)
			w.pod(devClient, direct).is(fwdLocal, hit).leaves(changed, direct.dst)
		}
	})
}

// An outlived flow makes room for whoever needs its reply tuple.
func TestOutlivedReplyTuple(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		via := udp(ap(w.f.client, 40000), ap(w.f.vipLocal, svcPort))
		direct := udp(ap(w.f.client, 40000), ap(w.f.local, podPort))
		w.pod(devClient, via).is(fwdLocal, miss, created)
		w.age(via.key(), time.Minute)
		w.age(direct.back().key(), time.Minute)
		w.pod(devClient, direct).is(fwdLocal, miss, created).leaves(direct.src, direct.dst)
		w.noEntry(via)
		w.pod(devLocal, direct.back()).is(fwdLocal, hitNew).leaves(direct.dst, direct.src)
	})
}

// A flood of first packets, answered or not, pushes out its own kind only.
func TestFloodLeavesEstablishedFlows(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(60000).open()
		fr := tcp(ap(w.f.third, 1), ap(w.f.remote, podPort), syn)
		pkt := fr.bytes(t)
		copy(pkt, w.devs[devThird].mac)
		ports := len(pkt) - 20 // of the TCP header
		const flood = 40000    // more than pw_flows_new holds
		for i := range flood {
			pkt[ports], pkt[ports+1] = byte(i>>8), byte(i)
			if _, err := w.quick(devThird, pkt); err != nil {
				t.Fatal(err)
			}
		}
		w.last = nil
		confirmed, err := w.set.Flows.Dump()
		if err != nil || len(confirmed) != 2 {
			t.Fatalf("%d entries of established flows, %v", len(confirmed), err)
		}
		c.send(ack).is(fwdTunnel, hit)
		c.reply(ack).is(fwdLocal, hit)
	})
}

// One of the two entries was pushed out: its flow is made whole again.
func TestHalfAFlow(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := udp(ap(w.f.client, 40000), ap(w.f.vipLocal, svcPort))
		answer := udp(ap(w.f.local, podPort), fr.src)
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		del(w, w.set.FlowsNew, fr.key())
		w.pod(devClient, fr).is(fwdLocal, miss, created)
		w.pod(devLocal, answer).is(fwdLocal, hitNew).leaves(fr.dst, fr.src)
		w.pod(devClient, fr).is(fwdLocal, hitNew, confirmed)

		other := udp(ap(w.f.client, 40001), fr.dst)
		answer = udp(ap(w.f.local, podPort), other.src)
		w.pod(devClient, other).is(fwdLocal, miss, created)
		del(w, w.set.FlowsNew, answer.key())
		w.pod(devClient, other).is(fwdLocal, miss, takenOver, created)
		w.pod(devLocal, answer).is(fwdLocal, hitNew).leaves(other.dst, other.src)
	})
}

// A recycled value that belongs to another key is not taken for the flow.
func TestForeignValueIsNotUsed(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := udp(ap(w.f.client, 40000), ap(w.f.remote, podPort))
		w.pod(devClient, fr).is(fwdTunnel, miss, created)
		f := w.entry(fr).Flow
		f.KeyHash++
		f.To = maps.Place{Id: w.index(devThird), Kind: uint8(bpf.DpPwPlaceKindPW_PLACE_POD)}
		put(w, w.set.FlowsNew, fr.key(), f)
		if why, _ := w.pod(devClient, fr).ends(); why == fwdLocal {
			t.Fatal("another key's action was carried out")
		}
	})
}

// A pod's datagram to itself, from a port to the same port: both directions
// have one key.
func TestTupleThatIsItsOwnReply(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := udp(ap(w.f.client, 5353), ap(w.f.client, 5353))
		w.pod(devClient, fr).is(fwdLocal, miss, raceLost, hitNew)
		w.pod(devClient, fr).is(fwdLocal, hitNew)
	})
}

// Both CPUs see the first packets of the same flows at once. Every flow ends
// up with one backend and exactly two entries that fit each other.
func TestParallelFirstPackets(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		const flows = 3000
		pkts := make([][]byte, flows)
		for i := range pkts {
			pkts[i] = tcp(ap(w.f.client, uint16(1024+i)), ap(w.f.vip, svcPort), syn).bytes(t)
			copy(pkts[i], w.devs[devClient].mac)
		}
		var chosen [2][flows]maps.Addr
		var errs [2]error
		var turn [2]atomic.Int64
		var done sync.WaitGroup
		before := w.counters()
		for cpu := range 2 {
			done.Go(func() {
				for i, pkt := range pkts {
					// Both at the same packet at the same moment.
					for turn[cpu].Store(int64(i)); turn[1-cpu].Load() < int64(i); {
						runtime.Gosched()
					}
					late := i % 50 // find the moment: now one is late, now the other
					if cpu == 0 {
						late = 50 - late
					}
					for range 40 * late {
						_ = turn[cpu].Load()
					}
					out, err := w.quick(devClient, pkt)
					if err != nil {
						errs[cpu] = err
						continue
					}
					d, _ := decode(out)
					chosen[cpu][i] = maps.ToAddr(d.dst)
				}
			})
		}
		done.Wait()
		after := w.counters()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
		if chosen[0] != chosen[1] {
			t.Error("two packets of one flow went to two backends")
		}
		all, err := w.set.FlowsNew.Dump()
		if err != nil {
			t.Fatal(err)
		}
		if len(all) != 2*flows {
			t.Errorf("%d entries for %d flows", len(all), flows)
		}
		for k, f := range all {
			twin := maps.FlowKey{Src: f.Dst, Dst: f.Src, Sport: f.Dport, Dport: f.Sport, Proto: k.Proto}
			other, ok := all[twin]
			if !ok || other.Src != k.Dst || other.Dst != k.Src {
				t.Fatalf("%s has no entry that answers it", maps.KeyString(k))
			}
		}
		lost := row{raceLost, fromPod, w.f.v6}
		t.Logf("%d races lost", after[lost]-before[lost])
	})
}

// quick runs from_pod without looking at the counters.
func (w *world) quick(dev string, pkt []byte) ([]byte, error) {
	opts := ebpf.RunOptions{
		Data: pkt, DataOut: make([]byte, len(pkt)+64), Context: &skBuff{Ifindex: w.index(dev)},
	}
	_, err := w.objs.FromPod.Run(&opts)
	return opts.DataOut, err
}

// An original that has joined a reply entry of an earlier flow, which was
// confirmed, is moved to it. Without room it stays, and so does that entry.
func TestConfirmBesideReply(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.crowded()
		c := w.conn(40000)
		c.send(syn).is(fwdTunnel, miss, created)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		reply := w.entry(c.answer).Flow
		reply.Flags |= uint8(bpf.DpPwFlowFlagsPW_F_CONFIRMED)
		del(w, w.set.FlowsNew, c.answer.key())
		put(w, w.set.Flows, c.answer.key(), reply)
		others := []maps.FlowKey{{Sport: 1}, {Sport: 2}}
		for _, k := range others {
			put(w, w.set.Flows, k, maps.Flow{})
		}
		c.send(ack).is(fwdTunnel, hitNew, tableFull)
		if w.entry(c.out).confirmed || !w.entry(c.answer).confirmed {
			t.Fatal("the original is confirmed, or the reply no more")
		}
		del(w, w.set.Flows, others[0])
		c.send(ack).is(fwdTunnel, hitNew, confirmed)
		if !w.entry(c.out).confirmed || !w.entry(c.answer).confirmed {
			t.Fatal("half of the flow is confirmed")
		}
		c.send(ack).is(fwdTunnel, hit)
		c.reply(ack).is(fwdLocal, hit)
	})
}
