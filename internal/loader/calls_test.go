package loader

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// strange is a datagram of no known flow: from_pod leaves it to the slow path,
// which finds that the source is no pod's.
func strange() []byte {
	return []byte{
		0x02, 0, 0, 0, 0, 1, 0x02, 0, 0, 0, 0, 2, 0x08, 0x00,
		0x45, 0, 0, 32, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2,
		0x12, 0x34, 0x12, 0x35, 0, 12, 0, 0, 1, 2, 3, 4,
	}
}

// slowPathWorks runs a from_pod, of this load of the datapath or of another.
func slowPathWorks(t *testing.T, d *Datapath, p *ebpf.Program) {
	t.Helper()
	const judged = maps.Reason(bpf.DpPwReasonPW_DROP_SPOOFED_SOURCE)
	before := counted(t, d, judged)
	// Test runs need some bytes behind the headers on newer kernels.
	if _, err := p.Run(&ebpf.RunOptions{Data: append(strange(), make([]byte, 32)...)}); err != nil {
		t.Fatal(err)
	}
	if got := counted(t, d, judged) - before; got != 1 {
		t.Fatalf("%v did not reach its slow path; counted by now: %v", p, samples(t, d))
	}
}

func samples(t *testing.T, d *Datapath) []maps.Sample {
	t.Helper()
	all, err := d.Maps().Metrics.Read()
	must(t, err)
	return all
}

func counted(t *testing.T, d *Datapath, r maps.Reason) (n uint64) {
	t.Helper()
	for _, s := range samples(t, d) {
		if s.Reason == r {
			n += s.Packets
		}
	}
	return n
}

func hookProgram(t *testing.T, s seen) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgramFromID(s.id)
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// awaitGone waits until the kernel has freed a program.
func awaitGone(t *testing.T, id ebpf.ProgramID) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, os.ErrNotExist) {
			return
		}
		must(t, err)
		p.Close()
		if time.Now().After(end) {
			t.Fatalf("program %d is still there", id)
		}
		must(t, awaitPrograms())
	}
}

// awaitPins waits until Verify has left the slow paths of n loads: the kernel
// frees the programs of the others when it comes to it.
func awaitPins(t *testing.T, d *Datapath, cfg Config, n int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		if _, err := d.Verify(context.Background()); err != nil {
			t.Fatal(err)
		}
		pins := ls(t, callsDir(cfg.BPFFS))
		if len(pins) == n {
			return
		}
		if len(pins) < n || time.Now().After(end) {
			t.Fatalf("pinned: %v, want %d", pins, n)
		}
		must(t, awaitPrograms())
	}
}

// Whatever pw_calls holds is no hook's use of it.
func TestCalledPrograms(t *testing.T) {
	spec, err := bpf.LoadDp()
	must(t, err)
	contents := spec.Maps[bpf.DpMapPwCalls].Contents
	if len(contents) == 0 {
		t.Fatal("pw_calls holds nothing")
	}
	for _, kv := range contents {
		if name, ok := kv.Value.(string); !ok || !isCalled(name) {
			t.Errorf("pw_calls holds %v: its use of the map would keep every load's", kv.Value)
		}
	}
}

// A hook's slow path is there without a process, and for as long as the hook
// is: however many loads have come and gone, and no longer.
func TestSlowPathLivesAsLongAsItsHooks(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod := veth(t, "pwpod")
		d := load(t, cfg)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		at := one(t, cfg, pod, false, "from_pod")
		// As a packet that is on its way holds it; as a filter it stays by itself.
		old := hookProgram(t, at)
		must(t, d.Close())
		for range 3 {
			d = load(t, cfg)
			slowPathWorks(t, d, old)
			slowPathWorks(t, d, d.objs.FromPod)
			must(t, d.Close())
		}
		d = load(t, cfg)
		awaitPins(t, d, cfg, 2) // those of the first and of the last load
		slowPathWorks(t, d, old)

		must(t, d.AttachPod(ctx, pod, "pwpod"))
		must(t, old.Close())
		awaitGone(t, at.id)
		awaitPins(t, d, cfg, 1) // that of the last load
		replaced := one(t, cfg, pod, false, "from_pod")
		must(t, d.SetOverlay(ctx, 77))
		if pins := ls(t, callsDir(cfg.BPFFS)); len(pins) != 2 {
			t.Fatalf("pinned: %v, want those of both tunnel devices", pins)
		}
		at = one(t, cfg, pod, false, "from_pod")
		slowPathWorks(t, d, hookProgram(t, at))
		awaitGone(t, replaced.id)
		d = restart(t, d)
		slowPathWorks(t, d, hookProgram(t, at))
		if pins := ls(t, callsDir(cfg.BPFFS)); len(pins) != 2 {
			t.Fatalf("pinned: %v, want those of the last two loads", pins)
		}
	})
}

// A program in pw_calls that uses the map itself keeps it, and with it the
// slow path of every load there ever was, unless it is known not to count.
func TestCalledProgramsAreKnown(t *testing.T) {
	spec, err := bpf.LoadDp()
	must(t, err)
	for _, kv := range spec.Maps["pw_calls"].Contents {
		if name := kv.Value.(string); !isCalled(name) {
			t.Errorf("pw_calls has %s, which is not known to be called", name)
		}
	}
}

// A pin that somebody removed is made again, or the slow path would go with
// this process.
func TestVerifyPinsSlowPathAgain(t *testing.T) {
	ctx := context.Background()
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	pod := veth(t, "pwpod")
	d := load(t, cfg)
	must(t, d.AttachPod(ctx, pod, "pwpod"))
	p := hookProgram(t, one(t, cfg, pod, false, "from_pod"))
	for _, name := range ls(t, callsDir(cfg.BPFFS)) {
		must(t, os.Remove(filepath.Join(callsDir(cfg.BPFFS), name)))
	}
	if _, err := d.Verify(ctx); err != nil {
		t.Fatal(err)
	}
	must(t, d.objs.PwCalls.Close())
	slowPathWorks(t, d, p)
}

// No packet finds a hook without its slow path while programs are replaced
// and what is left of them is removed.
func TestNoPacketMissesItsSlowPath(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod := veth(t, "pwpod")
		for _, name := range []string{"pwpod", "pwpodp"} {
			l, err := netlink.LinkByName(name)
			must(t, err)
			must(t, netlink.LinkSetUp(l))
		}
		d := load(t, cfg)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		s := sendStrange(t, index(t, "pwpodp"))
		for range 8 {
			before := programsWith(t, d.objs.PwCalls)
			d = restart(t, d)
			must(t, d.AttachPod(ctx, pod, "pwpod"))
			for _, id := range before {
				awaitGone(t, id)
			}
			if _, err := d.Verify(ctx); err != nil {
				t.Fatal(err)
			}
			if pins := ls(t, callsDir(cfg.BPFFS)); len(pins) != 1 {
				t.Fatalf("pinned: %v, want that of the last load", pins)
			}
		}
		sent := s.stop(t)
		if got := counted(t, d, maps.Reason(bpf.DpPwReasonPW_DROP_SPOOFED_SOURCE)); sent == 0 || got != sent {
			t.Errorf("%d of %d packets got through the slow path: %v", got, sent, samples(t, d))
		}
	})
}

// programsWith are the loaded programs that use a map.
func programsWith(t *testing.T, m *ebpf.Map) (out []ebpf.ProgramID) {
	t.Helper()
	info, err := m.Info()
	must(t, err)
	want, _ := info.ID()
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return out
		}
		must(t, err)
		id = next
		ids, err := mapsOf(id)
		if !errors.Is(err, os.ErrNotExist) {
			must(t, err)
		}
		if slices.Contains(ids, want) {
			out = append(out, id)
		}
	}
}

type sender struct {
	ended chan error
	end   atomic.Bool
	sent  uint64
}

// sendStrange sends strange frames by a device, one after the other, until it
// is stopped.
func sendStrange(t *testing.T, ifindex int) *sender {
	t.Helper()
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	s := &sender{ended: make(chan error, 1)}
	go func() {
		defer unix.Close(fd)
		for !s.end.Load() {
			if err := unix.Sendto(fd, strange(), 0, &unix.SockaddrLinklayer{Ifindex: ifindex}); err != nil {
				s.ended <- err
				return
			}
			s.sent++
		}
		s.ended <- nil
	}()
	t.Cleanup(func() { s.end.Store(true) })
	return s
}

func (s *sender) stop(t *testing.T) uint64 {
	t.Helper()
	s.end.Store(true)
	must(t, <-s.ended)
	return s.sent
}
