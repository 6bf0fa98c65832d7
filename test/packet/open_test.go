package packet

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	pwmaps "github.com/podweir/podweir/internal/maps"
)

var openCount = flag.Int("open.count", 6000, "how many flows TestParallelOpens opens from two CPUs at once, per family")

// opener has the same tuples opened by two CPUs at the same moments, round
// after round: on empty tables, over closed flows and over outlived ones.
type opener struct {
	w       *world
	flows   int
	asks    [3][][]byte // SYN, ACK, RST of the client
	before  map[row]uint64
	kept    int    // world.kept in the beginning, with empty tables
	backend []addr // of each flow, as chosen in this round
	port    []uint16
	failed  []string
}

const (
	askSYN = iota
	askACK
	askRST
)

func newOpener(w *world, flows int) *opener {
	w.t.Helper()
	f := w.f
	w.backends(setFree, ap(f.local, podPort), ap(f.local, podPort+1), ap(f.third, podPort), ap(f.third, podPort+1))
	w.service(f.vip, svcPort, pwmaps.ProtoTCP, pwmaps.Service{Id: 1, Set: setFree, Count: 4})
	o := &opener{w: w, flows: flows, backend: make([]addr, flows), port: make([]uint16, flows)}
	for kind, flags := range []uint8{syn, ack, rst} {
		for i := range flows {
			pkt := tcp(o.client(i).src, o.client(i).dst, flags).bytes(w.t)
			copy(pkt, w.devs[devClient].mac)
			o.asks[kind] = append(o.asks[kind], pkt)
		}
	}
	o.before, o.kept = w.counters(), w.kept()
	return o
}

func (o *opener) client(i int) frame {
	return tcp(ap(o.w.f.client, uint16(1024+i)), ap(o.w.f.vip, svcPort), syn)
}

func (o *opener) failf(format string, args ...any) {
	if len(o.failed) < 10 {
		o.failed = append(o.failed, fmt.Sprintf(format, args...))
	}
}

// counted is how often something happened at from_pod since the beginning.
func (o *opener) counted(why reason) uint64 {
	k := row{why, fromPod, o.w.f.v6}
	return o.w.counters()[k] - o.before[k]
}

// sent is what left for a packet, and where.
type sent struct {
	dst          addr
	sport, dport uint16
	dropped      bool
}

// together has both CPUs send the same packets, each at the same moment.
func (o *opener) together(kind, round int) (out [2][]sent) {
	o.w.t.Helper()
	for cpu := range out {
		out[cpu] = make([]sent, o.flows)
	}
	err := atOnce(o.flows, round, func(cpu, i int) (err error) {
		out[cpu][i], err = o.send(devClient, o.asks[kind][i])
		return err
	})
	if err != nil {
		o.w.t.Fatal(err)
	}
	return out
}

// atOnce calls do for each of n things on both CPUs at the same moment.
func atOnce(n, round int, do func(cpu, i int) error) error {
	var turn [2]atomic.Int64
	var errs [2]error
	var done sync.WaitGroup
	for cpu := range 2 {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var was, one unix.CPUSet
			if unix.SchedGetaffinity(0, &was) == nil && runtime.NumCPU() > 1 {
				one.Set(cpu)
				// Where it is refused the scheduler's choice will do.
				_ = unix.SchedSetaffinity(0, &one)
				defer func() { _ = unix.SchedSetaffinity(0, &was) }()
			}
			for i := range n {
				for turn[cpu].Store(int64(i)); turn[1-cpu].Load() < int64(i); {
					runtime.Gosched()
				}
				// Find the moment: now one is late, now the other.
				late := (i + round) % 50
				if cpu == 0 {
					late = 50 - late
				}
				for range 20 * late {
					_ = turn[cpu].Load()
				}
				if err := do(cpu, i); err != nil {
					errs[cpu] = err
				}
			}
			turn[cpu].Store(int64(n))
		})
	}
	done.Wait()
	return errors.Join(errs[:]...)
}

func (o *opener) send(dev string, pkt []byte) (sent, error) {
	opts := ebpf.RunOptions{
		Data: pkt, DataOut: make([]byte, len(pkt)+64), Context: &skBuff{Ifindex: o.w.index(dev)},
	}
	action, err := o.w.objs.FromPod.Run(&opts)
	if err != nil || action == actDrop {
		return sent{dropped: true}, err
	}
	d, _ := decode(opts.DataOut)
	s, p := d.ports()
	return sent{dst: pwmaps.ToAddr(d.dst), sport: s, dport: p}, nil
}

// answer sends the chosen backend's SYN-ACK for every flow.
func (o *opener) answer() {
	o.w.t.Helper()
	for i := range o.flows {
		if o.port[i] == 0 {
			continue // no flow in this round: reported already
		}
		dev := devLocal
		if o.backend[i] == pwmaps.ToAddr(o.w.f.third) {
			dev = devThird
		}
		fr := tcp(ap(pwmaps.FromAddr(o.backend[i]), o.port[i]), o.client(i).src, syn|ack)
		pkt := fr.bytes(o.w.t)
		copy(pkt, o.w.devs[dev].mac)
		s, err := o.send(dev, pkt)
		if err != nil {
			o.w.t.Fatal(err)
		}
		if s.dropped || s.sport != svcPort || s.dport != o.client(i).src.Port() {
			o.failf("flow %d: the answer left as %+v", i, s)
		}
	}
}

// one checks that both CPUs sent to one backend, from the client's own port.
func (o *opener) one(out [2][]sent, first bool) {
	for i := range o.flows {
		for cpu := range 2 {
			s := out[cpu][i]
			switch {
			case s.dropped:
				continue
			case s.sport != o.client(i).src.Port():
				o.failf("flow %d: source port became %d", i, s.sport)
			case first && o.port[i] == 0:
				o.backend[i], o.port[i] = s.dst, s.dport
			case s.dst != o.backend[i] || s.dport != o.port[i]:
				o.failf("flow %d: two backends", i)
			}
		}
	}
}

// whole checks that a table holds two entries a flow that name each other.
func (o *opener) whole(m pwmaps.Map[flowKey, pwmaps.Flow]) {
	o.w.t.Helper()
	all := dump(o.w, m)
	if len(all) != 2*o.flows {
		o.failf("%s: %d entries for %d flows", m.Name(), len(all), o.flows)
	}
	for i := range o.flows {
		k := o.client(i).key()
		f, ok := all[k]
		back := flowKey{Src: f.Dst, Dst: f.Src, Sport: f.Dport, Dport: f.Sport, Proto: k.Proto}
		r, twin := all[back]
		if !ok || !twin || r.Src != k.Dst || r.Dst != k.Src || f.Dst != o.backend[i] || f.Dport != o.port[i] {
			o.failf("%s: flow %d: entries %v and %v", m.Name(), i, ok, twin)
		}
	}
}

// round opens every flow once, has it answered and confirmed.
func (o *opener) round(n int) {
	o.w.t.Helper()
	for i := range o.port {
		o.port[i] = 0
	}
	o.one(o.together(askSYN, n), true)
	o.whole(o.w.set.FlowsNew)
	o.answer()
	o.one(o.together(askACK, n), false)
	o.whole(o.w.set.Flows)
}

// outlive moves every entry of both tables into the past.
func (o *opener) outlive() {
	o.w.t.Helper()
	for _, m := range []pwmaps.Map[flowKey, pwmaps.Flow]{o.w.set.Flows, o.w.set.FlowsNew} {
		all := dump(o.w, m)
		for k, f := range all {
			// Just beyond the limit: the clock may be younger than a day.
			limit := 24 * time.Hour
			switch {
			case k.Proto == pwmaps.ProtoUDP:
				limit = 3 * time.Minute
			case f.Tcp != 0:
				limit = time.Minute
			}
			f.LastSeen = o.w.now() - uint64(limit+10*time.Second)
			all[k] = f
		}
		if err := m.PutAll(all); err != nil {
			o.w.t.Fatal(err)
		}
	}
}

// empty sweeps all that is there; nothing may be left, whichever entries'
// keys are asked for.
func (o *opener) empty() {
	o.w.t.Helper()
	o.outlive()
	for _, m := range []pwmaps.Map[flowKey, pwmaps.Flow]{o.w.set.Flows, o.w.set.FlowsNew} {
		var keys []flowKey
		for k := range dump(o.w, m) {
			keys = append(keys, k)
		}
		for ; len(keys) > 0; keys = keys[min(64, len(keys)):] {
			o.w.sweep(keys[:min(64, len(keys))]...)
		}
	}
	if n := o.w.kept() - o.kept; n != 0 {
		o.failf("%d entries are neither there nor counted as removed", n)
	}
	for _, m := range []pwmaps.Map[flowKey, pwmaps.Flow]{o.w.set.Flows, o.w.set.FlowsNew} {
		if left := dump(o.w, m); len(left) != 0 {
			o.failf("%s: %d entries left behind", m.Name(), len(left))
			clear(o.w, m)
		}
	}
}

// The same flows opened by both CPUs at once, many times over: one backend
// each, no port changed without need, nothing left behind.
func TestParallelOpens(t *testing.T) {
	const flows = 2000
	both(t, func(t *testing.T, w *world) {
		o := newOpener(w, flows)
		began, opened := time.Now(), 0
		for n := 0; opened < *openCount; n++ {
			o.round(n)
			o.close(n)
			opened += flows
			if len(o.failed) > 0 {
				t.Fatalf("round %d: %s", n, strings.Join(o.failed, "; "))
			}
		}
		o.empty()
		if len(o.failed) > 0 {
			t.Fatal(strings.Join(o.failed, "; "))
		}
		t.Logf("%d flows opened by two CPUs at once in %v: %d created, %d races lost, %d taken over, %d confirmed, %d ports changed, %d dropped",
			opened, time.Since(began).Round(time.Millisecond), o.counted(created), o.counted(raceLost), o.counted(takenOver),
			o.counted(confirmed), o.counted(portChanged), o.counted(flowInsert)+o.counted(bpf.DpPwReasonPW_DROP_FLOW_COLLISION))
		if n := o.counted(portChanged); n != 0 {
			t.Errorf("%d ports changed without need", n)
		}
	})
}

// close ends the flows of a round in one of three ways.
func (o *opener) close(round int) {
	o.w.t.Helper()
	switch round % 3 {
	case 0: // closed: the next SYN makes a new flow
		for _, pkt := range o.asks[askRST] {
			if s, err := o.send(devClient, pkt); err != nil || s.dropped {
				o.failf("RST: %+v, %v", s, err)
			}
		}
	case 1:
		o.outlive()
	case 2:
		o.empty()
	}
}

// Both ends open one flow at once, each by its first packet: it has one
// original direction all the same, else nothing would ever confirm it.
func TestMutualOpens(t *testing.T) {
	const flows = 4000
	both(t, func(t *testing.T, w *world) {
		o := newOpener(w, flows)
		mine := func(i int) frame { return udp(ap(w.f.client, uint16(1024+i)), ap(w.f.local, uint16(1024+i))) }
		devs := [2]string{devClient, devLocal}
		var asks [2][][]byte
		for i := range flows {
			for cpu, fr := range []frame{mine(i), mine(i).back()} {
				pkt := fr.bytes(t)
				copy(pkt, w.devs[devs[cpu]].mac)
				asks[cpu] = append(asks[cpu], pkt)
			}
		}
		missing := 0 // both packets dropped
		for round := range 6 {
			err := atOnce(flows, round*10, func(cpu, i int) error {
				s, err := o.send(devs[cpu], asks[cpu][i])
				if err == nil && !s.dropped && s.sport != s.dport {
					err = fmt.Errorf("flow %d: left as %+v", i, s)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			all := dump(w, w.set.FlowsNew)
			for i := range flows {
				f, ok := all[mine(i).key()]
				r, twin := all[mine(i).back().key()]
				switch {
				case !ok && !twin:
					missing++
				case !ok || !twin || (f.Flags^r.Flags)&uint8(flagReply) == 0:
					o.failf("flow %d: entries %v and %v with flags %#x and %#x", i, ok, twin, f.Flags, r.Flags)
				case f.Created != r.Created:
					o.failf("flow %d: born at %d and at %d", i, f.Created, r.Created)
				}
			}
			// The next are opened where there is nothing, or over outlived ones.
			if o.outlive(); round%2 == 0 {
				o.empty()
			}
			if len(o.failed) > 0 {
				t.Fatalf("round %d, %d races lost: %s", round, o.counted(raceLost), strings.Join(o.failed, "; "))
			}
		}
		// Where the machine holds one CPU up in the middle of it, the other gives up.
		lost, dropped := o.counted(raceLost), o.counted(flowInsert)
		t.Logf("%d races lost, %d dropped", lost, dropped)
		if dropped > lost/20 || 2*uint64(missing) > dropped {
			t.Errorf("%d packets dropped of %d that lost a race, %d flows missing", dropped, lost, missing)
		}
	})
}

// With room for half a flow two CPUs confirm the same ones at once: each stays
// whole where it is, though the one CPU's half makes room for the other's.
func TestParallelConfirmsWithoutRoom(t *testing.T) {
	const flows = 2000
	both(t, func(t *testing.T, w *world) {
		d, err := halfRoom()
		if err != nil {
			t.Fatal(err)
		}
		w.datapath = d
		w.fill()
		o := newOpener(w, flows)
		o.one(o.together(askSYN, 0), true)
		o.answer()
		for n := range 20 {
			o.one(o.together(askACK, n), false)
			o.whole(w.set.FlowsNew)
			if left := dump(w, w.set.Flows); len(left) != 0 {
				o.failf("round %d: %d entries of pw_flows are halves of flows", n, len(left))
			}
			if len(o.failed) > 0 {
				t.Fatal(strings.Join(o.failed, "; "))
			}
		}
		if n := o.counted(confirmed); n != 0 {
			t.Errorf("%d flows confirmed", n)
		}
	})
}

// halfRoom is a datapath whose table of confirmed flows has room for one entry.
var halfRoom = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 1, FlowsNewMax: 32768})
})

// A closed flow's tuple is opened again by one CPU while the other confirms the
// old flow by a late ACK: whichever comes first, no direction is left alone.
func TestConfirmDuringReuse(t *testing.T) {
	const flows = 2000
	both(t, func(t *testing.T, w *world) {
		o := newOpener(w, flows)
		for n := range 20 {
			for i := range o.port {
				o.port[i] = 0
			}
			o.one(o.together(askSYN, n), true)
			o.answer()
			o.close(0)
			err := atOnce(flows, n*7, func(cpu, i int) error {
				_, err := o.send(devClient, o.asks[[]int{askACK, askSYN}[cpu]][i])
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			o.paired()
			if len(o.failed) > 0 {
				t.Fatalf("round %d: %s", n, strings.Join(o.failed, "; "))
			}
			clear(w, w.set.Flows)
			clear(w, w.set.FlowsNew)
		}
	})
}

// paired checks that all that is in pw_flows is there with its other direction.
func (o *opener) paired() {
	o.w.t.Helper()
	all := dump(o.w, o.w.set.Flows)
	for k, f := range all {
		back := flowKey{Src: f.Dst, Dst: f.Src, Sport: f.Dport, Dport: f.Sport, Proto: k.Proto}
		if r, ok := all[back]; !ok || r.Src != k.Dst || r.Dst != k.Src {
			o.failf("flow of port %d, flags %#x: its other direction is there: %v", k.Sport, f.Flags, ok)
		}
	}
}
