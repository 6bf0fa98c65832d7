package packet

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const eventLost = bpf.DpPwReasonPW_EVENT_LOST

// witness is a world whose drops are told of.
type witness struct {
	*world
	events *maps.EventReader
}

// watched loads a datapath of its own, with so many events a second and a
// ring of so many bytes.
func watched(t *testing.T, f family, perSec, ring uint32) *witness {
	t.Helper()
	d, err := loadAs(loader.Config{FlowsMax: 4096, FlowsNewMax: 4096}, func(spec *ebpf.CollectionSpec) {
		spec.Maps[bpf.DpMapPwEvents].MaxEntries = ring
		if err := spec.Variables["cfg_events_per_sec"].Set(perSec); err != nil {
			t.Fatal(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &witness{world: &world{t: t, f: f, datapath: d}}
	if w.events, err = d.set.Events.Open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(w.events.Close(), d.objs.Close()); err != nil {
			t.Error(err)
		}
	})
	w.fill()
	return w
}

// told returns the events since the last call.
func (w *witness) told() []maps.Event {
	w.t.Helper()
	w.events.SetDeadline(time.Now())
	var out []maps.Event
	for {
		ev, err := w.events.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return out
		}
		if err != nil {
			w.t.Fatal(err)
		}
		out = append(out, ev)
	}
}

// Every drop of a first packet is told of with all that explains it, and so
// is a flow that is denied by now, in both of its directions.
func TestEvents(t *testing.T) {
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) {
			w := watched(t, f, 1000000, 65536)
			v6 := uint8(0)
			if f.v6 {
				v6 = 1
			}
			pod := func(dev string) maps.Place { return maps.Place{Kind: maps.PlacePod, Id: w.index(dev)} }
			client, local, third := maps.ToAddr(f.client), maps.ToAddr(f.local), maps.ToAddr(f.third)
			// expect sends a packet that is dropped, and compares.
			expect := func(what string, send func() *result, fr frame, want maps.Event) {
				t.Helper()
				before := w.now()
				why, _ := send().ends()
				want.Key, want.Reason, want.V6 = fr.key(), uint32(why), v6
				if want.Src == (maps.Addr{}) {
					want.Src, want.Dst, want.Dport = want.Key.Src, want.Key.Dst, want.Key.Dport
				}
				got := w.told()
				if len(got) != 1 {
					t.Fatalf("%s: %d events", what, len(got))
				}
				if at := got[0].Time; at < before || at > w.now() {
					t.Errorf("%s: at %d, want it after %d", what, at, before)
				}
				got[0].Time = 0
				if d := cmp.Diff(want, got[0]); d != "" {
					t.Errorf("%s: (-want +got)\n%s", what, d)
				}
			}
			fromClient := func(fr frame) func() *result { return func() *result { return w.pod(devClient, fr) } }

			// The flows that will be denied later: direct, and by a service.
			direct, called := udp(ap(f.client, 7), ap(f.local, podPort)), udp(ap(f.client, 8), ap(f.vipLocal, svcPort))
			w.pod(devClient, direct).is(fwdLocal, miss, created)
			w.pod(devClient, called).is(fwdLocal, miss, created)
			if got := w.told(); len(got) != 0 {
				t.Fatalf("events of what was not dropped: %+v", got)
			}

			w.edit(f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
			denied := maps.Event{
				From: pod(devClient), Hook: uint8(fromPod), Src: client, Dst: local, Dport: podPort,
				SrcIdentity: idClient, DstIdentity: idLocal, Table: 7,
			}
			fr := tcp(ap(f.client, 1), ap(f.local, podPort), syn)
			expect("ingress, no rule", fromClient(fr), fr, denied)
			fr = tcp(ap(f.client, 1), ap(f.vipLocal, svcPort), syn)
			byService := denied
			byService.Service = 11
			expect("ingress, by a service", fromClient(fr), fr, byService)
			expect("a running flow", fromClient(direct), direct, denied)
			answer := direct.back()
			back := denied
			back.From = pod(devLocal)
			expect("its answer", func() *result { return w.pod(devLocal, answer) }, answer, back)
			byService.Service = 21
			expect("a running flow by a service", fromClient(called), called, byService)
			answer = udp(ap(f.local, podPort), ap(f.client, 8))
			back.Service = 21
			expect("its answer", func() *result { return w.pod(devLocal, answer) }, answer, back)

			w.policy(7, idClient, maps.PolicyAny, 0, 0, maps.VerdictDeny)
			denied.Rule = 703
			fr = tcp(ap(f.client, 2), ap(f.local, podPort), syn)
			expect("ingress, by a rule", fromClient(fr), fr, denied)
			fr = tcp(ap(f.remote, 1), ap(f.local, podPort), syn)
			expect("ingress from another node", func() *result { return w.tunnel(f.nodeB, fr) }, fr, maps.Event{
				From: maps.Place{Kind: maps.PlaceNode, Id: nodeIDB}, Hook: uint8(fromOverlay), SrcIdentity: idRemote, DstIdentity: idLocal, Table: 7,
			})
			w.edit(f.client, func(e *maps.Endpoint) { e.PolicyOut = 8 })
			fr = echo(f.client, f.remote, 3)
			expect("egress", fromClient(fr), fr, maps.Event{
				From: pod(devClient), Hook: uint8(fromPod), SrcIdentity: idClient, DstIdentity: idRemote, Table: 8,
			})

			fr = tcp(ap(f.third, 1), ap(f.local, podPort), syn)
			expect("a false source", fromClient(fr), fr, maps.Event{
				From: pod(devClient), Hook: uint8(fromPod), SrcIdentity: idThird, DstIdentity: idLocal,
			})
			fr = udp(ap(f.third, 1), ap(f.vipEmpty, svcPort))
			expect("no backend", func() *result { return w.pod(devThird, fr) }, fr, maps.Event{
				From: pod(devThird), Hook: uint8(fromPod), Src: third, Dst: maps.ToAddr(f.vipEmpty), Dport: svcPort, SrcIdentity: idThird,
			})
			w.pod(devThird, udp(ap(f.third, 1), ap(f.multicast, 5353)))
			if got := w.told(); len(got) != 0 {
				t.Errorf("multicast is told of: %+v", got)
			}
		})
	}
}

// onOneCPU keeps the test on the CPU it is on: limits are per CPU.
func onOneCPU(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	var was, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if was.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.SchedSetaffinity(0, &was) })
}

// A drop that goes on is told of again after five seconds, not before; others
// are told of meanwhile.
func TestEventsAreNotRepeated(t *testing.T) {
	onOneCPU(t)
	w := watched(t, families()[0], 1000000, 65536)
	w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
	fr := tcp(ap(w.f.client, 1), ap(w.f.local, podPort), syn)
	w.pod(devClient, fr).is(ingressDenied, miss)
	first := w.told()
	if len(first) != 1 {
		t.Fatalf("%d events of the first packet", len(first))
	}
	other := fr
	other.src = ap(w.f.client, 2)
	w.pod(devClient, other).is(ingressDenied, miss)
	if got := w.told(); len(got) != 1 {
		t.Fatalf("%d events of another flow", len(got))
	}
	for {
		w.pod(devClient, fr).is(ingressDenied, miss)
		again, passed := w.told(), time.Duration(w.now()-first[0].Time)
		switch {
		case len(again) == 1 && time.Duration(again[0].Time-first[0].Time) >= 5*time.Second:
			return
		case len(again) != 0:
			t.Fatalf("told again after %v", time.Duration(again[0].Time-first[0].Time))
		case passed > 10*time.Second:
			t.Fatalf("not told again in %v", passed)
		}
	}
}

// So many a second and no more; what is not told is counted. A flood of other
// drops leaves denials their share.
func TestEventsAreLimited(t *testing.T) {
	onOneCPU(t)
	w := watched(t, families()[0], 10, 65536)
	f := w.f
	w.edit(f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
	const sent, burst = 600, 100
	flood := func(dst frame, why reason) {
		t.Helper()
		began, lost := time.Now(), 0
		for port := range uint16(sent) {
			dst.src = ap(f.client, 1024+port)
			lost += int(w.pod(devClient, dst).ended(why).counts[eventLost])
		}
		told := len(w.told())
		if told+lost != sent {
			t.Errorf("%s: %d told and %d lost of %d", maps.ReasonName(why), told, lost, sent)
		}
		if most := burst + 2 + int(10*time.Since(began).Seconds()); told < burst || told > most {
			t.Errorf("%s: %d told, want %d at least and %d at most", maps.ReasonName(why), told, burst, most)
		}
	}
	flood(frame{dst: ap(f.unowned, 80), proto: maps.ProtoTCP, flags: syn}, bpf.DpPwReasonPW_DROP_NO_SERVICE)
	flood(frame{dst: ap(f.local, podPort), proto: maps.ProtoTCP, flags: syn}, ingressDenied)
}

// Without a reader the oldest events wait, the others are lost and counted;
// a reader that comes has the waiting ones and all that follow.
func TestEventsWithoutReader(t *testing.T) {
	const ring = 4096
	fits := ring / (8 + 120) // a header each
	w := watched(t, families()[0], 1000000, ring)
	w.edit(w.f.local, func(e *maps.Endpoint) { e.PolicyIn = 7 })
	lost := 0
	for port := range uint16(2 * fits) {
		r := w.pod(devClient, tcp(ap(w.f.client, 1024+port), ap(w.f.local, podPort), syn)).ended(ingressDenied)
		lost += int(r.counts[eventLost])
	}
	told := w.told()
	if len(told)+lost != 2*fits || len(told) < fits-1 || len(told) > fits {
		t.Fatalf("%d told and %d lost of %d", len(told), lost, 2*fits)
	}
	for i, ev := range told {
		if ev.Key.Sport != 1024+uint16(i) {
			t.Fatalf("event %d is of port %d", i, ev.Key.Sport)
		}
	}
	w.pod(devClient, tcp(ap(w.f.client, 1), ap(w.f.local, podPort), syn)).is(ingressDenied, miss)
	if got := w.told(); len(got) != 1 {
		t.Fatalf("%d events after the ring was read", len(got))
	}
}
