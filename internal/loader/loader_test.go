package loader

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/sourceport"
	"github.com/podweir/podweir/internal/testns"
)

func TestMain(m *testing.M) { testns.Main(m, nil) }

func TestNotABPFFS(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "podweir")
	_, err := Load(context.Background(), Config{BPFFS: dir})
	if err == nil || !strings.Contains(err.Error(), "not on a bpffs") || !strings.Contains(err.Error(), dir) {
		t.Fatalf("error %v, want one that names %s and says what to do", err, dir)
	}
}

// Programs and their links outlive the process; a restart replaces them in
// place, one on every hook however many there were.
func TestRestartReplacesInPlace(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		pod, eth, tun := veth(t, "pwpod"), veth(t, "eth0"), veth(t, "pwtun")
		d := load(t, cfg)
		ctx := context.Background()
		type at struct {
			ifindex int
			egress  bool
			name    string
		}
		hooks := []at{
			{pod, false, "from_pod"}, {pod, true, "to_pod"}, {eth, false, "from_netdev"},
			{tun, false, "from_overlay"}, {tun, true, "to_overlay"},
		}
		attach := func() {
			t.Helper()
			must(t, d.AttachPod(ctx, pod, "pwpod"))
			must(t, d.AttachNetdev(ctx, eth, "eth0"))
			must(t, d.AttachOverlay(ctx, tun, "pwtun"))
		}
		attach()
		attach() // again changes nothing
		before := make(map[at]seen)
		for _, h := range hooks {
			before[h] = one(t, cfg, h.ifindex, h.egress, h.name)
		}
		addr := maps.Addr{B: [16]byte{15: 7}}
		must(t, d.Maps().Addrs.Put(addr, maps.Peer{Identity: 300}))

		for range 3 {
			must(t, d.Close())
			for _, h := range hooks {
				if got := one(t, cfg, h.ifindex, h.egress, h.name); got != before[h] {
					t.Fatalf("closing changed %s: %+v, was %+v", h.name, got, before[h])
				}
			}
			d = load(t, cfg)
			if cfg.ForceClsact {
				attach() // filters are not pinned: the agent attaches again
			}
			for _, h := range hooks {
				got := one(t, cfg, h.ifindex, h.egress, h.name)
				if got.id == before[h].id || got.link != before[h].link {
					t.Fatalf("%s: %+v, was %+v: want another program in the same link", h.name, got, before[h])
				}
				before[h] = got
			}
			attach()
			for _, h := range hooks {
				if got := one(t, cfg, h.ifindex, h.egress, h.name); got != before[h] {
					t.Fatalf("attaching again changed %s", h.name)
				}
			}
			if v, ok, err := d.Maps().Addrs.Get(addr); err != nil || !ok || v.Identity != 300 {
				t.Fatalf("map entry after a restart: %+v %v %v", v, ok, err)
			}
		}
		repaired, err := d.Verify(ctx)
		if err != nil || len(repaired) != 0 {
			t.Fatalf("nothing to repair: %v, %v", repaired, err)
		}
	})
}

// Others' programs on our hooks stay where they are, whatever we do.
func TestForeignProgramsAreLeftAlone(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		pod := veth(t, "pwpod")
		p := stranger(t)
		if cfg.ForceClsact {
			l, err := netlink.LinkByIndex(pod)
			must(t, err)
			must(t, netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: pod, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
			}}))
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				// The same priority as ours, another handle and name.
				must(t, netlink.FilterAdd(&netlink.BpfFilter{
					FilterAttrs: netlink.FilterAttrs{
						LinkIndex: l.Attrs().Index, Parent: parent, Handle: 5, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
					},
					Fd: p.FD(), Name: "stranger", DirectAction: true,
				}))
			}
		} else {
			for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				l, err := link.AttachTCX(link.TCXOptions{Interface: pod, Program: p, Attach: attach})
				must(t, err)
				defer l.Close()
			}
		}
		theirs := func() []seen {
			var out []seen
			for _, egress := range []bool{false, true} {
				for _, s := range onHook(t, cfg, pod, egress) {
					if s.name == "stranger" {
						out = append(out, s)
					}
				}
			}
			return out
		}
		before := theirs()
		if len(before) != 2 {
			t.Fatalf("%+v", before)
		}
		same := func(what string, ours int) {
			t.Helper()
			if got := theirs(); !slices.Equal(got, before) {
				t.Fatalf("%s: their programs %+v, were %+v", what, got, before)
			}
			if n := len(onHook(t, cfg, pod, false)); n != 1+ours {
				t.Fatalf("%s: %d programs on the hook", what, n)
			}
		}
		d := load(t, cfg)
		must(t, d.AttachPod(context.Background(), pod, "pwpod"))
		same("attach", 1)
		d = restart(t, d)
		must(t, d.AttachPod(context.Background(), pod, "pwpod"))
		same("restart", 1)
		must(t, d.Detach(context.Background(), pod))
		same("detach", 0)
		must(t, d.AttachPod(context.Background(), pod, "pwpod"))
		must(t, d.Close())
		must(t, Cleanup(cfg.BPFFS))
		same("cleanup", 0)
	})
}

// What somebody detached is noticed and put back; twice means once.
func TestVerifyAttachesAgain(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod := veth(t, "pwpod")
		d := load(t, cfg)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		detachForeignly(t, cfg, d, pod)
		if got := onHook(t, cfg, pod, false); len(got) != 0 {
			t.Fatalf("still there: %+v", got)
		}
		repaired, err := d.Verify(ctx)
		if err != nil || len(repaired) != 1 || !strings.Contains(repaired[0], "from_pod") || !strings.Contains(repaired[0], "pwpod") {
			t.Fatalf("repaired %q, %v", repaired, err)
		}
		one(t, cfg, pod, false, "from_pod")
		one(t, cfg, pod, true, "to_pod")
		if repaired, err = d.Verify(ctx); err != nil || len(repaired) != 0 {
			t.Fatalf("repaired again: %q, %v", repaired, err)
		}
		// Attach finds it out by itself, too.
		detachForeignly(t, cfg, d, pod)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		one(t, cfg, pod, false, "from_pod")
		d = restart(t, d)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		one(t, cfg, pod, false, "from_pod")
	})
}

// detachForeignly takes from_pod off the device behind the loader's back.
func detachForeignly(t *testing.T, cfg Config, d *Datapath, ifindex int) {
	t.Helper()
	if !cfg.ForceClsact {
		l, ok := d.attached[hookKey{ifindex, hookFromPod}].link.(interface{ Detach() error })
		if !ok {
			t.Fatal("the link cannot be detached")
		}
		must(t, l.Detach())
		return
	}
	must(t, deleteFilter(hookKey{ifindex, hookFromPod}))
}

// A pin that somebody removed is made again, or a restart would detach.
func TestVerifyPinsAgain(t *testing.T) {
	ctx := context.Background()
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	pod := veth(t, "pwpod")
	d := load(t, cfg)
	must(t, d.AttachPod(ctx, pod, "pwpod"))
	before := one(t, cfg, pod, false, "from_pod")
	pin := hookKey{pod, hookFromPod}.pin(cfg.BPFFS)
	must(t, os.Remove(pin))
	if _, err := d.Verify(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(pin); err != nil {
		t.Fatal(err)
	}
	must(t, d.Close())
	if got := one(t, cfg, pod, false, "from_pod"); got != before {
		t.Fatalf("%+v, was %+v", got, before)
	}
}

// devicePins are the pinned links to devices, but for those of the reassembly and the guard.
func devicePins(t *testing.T, cfg Config) []string {
	return slices.DeleteFunc(ls(t, linksDir(cfg.BPFFS)), func(name string) bool {
		return isFragPin(name) || isGuardPin(name) || strings.HasSuffix(name, "-"+hookFromFrag.program)
	})
}

// attachments are the devices' programs, in the same way.
func attachments(d *Datapath) (n int) {
	for key := range d.attached {
		if key.hook != hookFromFrag {
			n++
		}
	}
	return n
}

// A device that vanished is forgotten, and its index may be another's.
func TestVanishedDevice(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		d := load(t, cfg)
		gone := veth(t, "pwgone")
		must(t, d.AttachPod(ctx, gone, "pwgone"))
		removeDevice(t, "pwgone")
		repaired, err := d.Verify(ctx)
		if err != nil || len(repaired) != 0 {
			t.Fatalf("repaired %q, %v", repaired, err)
		}
		if pins := devicePins(t, cfg); len(pins) != 0 || attachments(d) != 0 {
			t.Fatalf("left behind: %q, %d attachments", pins, attachments(d))
		}
		// Detached when it is gone already: no error.
		again := veth(t, "pwgone")
		must(t, d.AttachPod(ctx, again, "pwgone"))
		removeDevice(t, "pwgone")
		must(t, d.Detach(ctx, again))
		must(t, d.Detach(ctx, 123456))
		if pins := devicePins(t, cfg); len(pins) != 0 {
			t.Fatalf("left behind by Detach: %q", pins)
		}
		// Gone while no process was there.
		again = veth(t, "pwgone")
		must(t, d.AttachPod(ctx, again, "pwgone"))
		must(t, d.Close())
		removeDevice(t, "pwgone")
		d = load(t, cfg)
		if pins := devicePins(t, cfg); len(pins) != 0 || attachments(d) != 0 {
			t.Fatalf("left behind: %q, %d attachments", pins, attachments(d))
		}
	})
}

// Another device under the index of one that is gone gets programs of its own.
func TestReusedIndex(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		d := load(t, cfg)
		const reused = 4242
		add := func(name string) {
			t.Helper()
			must(t, netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: netlink.LinkAttrs{Name: name, Index: reused}, PeerName: name + "p",
			}))
			t.Cleanup(func() { removeDevice(t, name) })
		}
		add("pwone")
		must(t, d.AttachPod(ctx, reused, "pwone"))
		removeDevice(t, "pwone")
		add("pwtwo")
		must(t, d.AttachPod(ctx, reused, "pwtwo"))
		one(t, cfg, reused, false, "from_pod")
		one(t, cfg, reused, true, "to_pod")
		d = restart(t, d)
		must(t, d.AttachPod(ctx, reused, "pwtwo"))
		one(t, cfg, reused, false, "from_pod")
		// The same while no process was there.
		must(t, d.Close())
		removeDevice(t, "pwtwo")
		add("pwthree")
		d = load(t, cfg)
		if got := onHook(t, cfg, reused, false); len(got) != 0 {
			t.Fatalf("a stranger's device got %+v", got)
		}
		must(t, d.AttachPod(ctx, reused, "pwthree"))
		one(t, cfg, reused, false, "from_pod")
	})
}

// Cleanup leaves nothing, of this process or of earlier ones.
func TestCleanup(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod, eth := veth(t, "pwpod"), veth(t, "eth0")
		d := load(t, cfg)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		must(t, d.AttachNetdev(ctx, eth, "eth0"))
		must(t, d.Close())
		must(t, Cleanup(cfg.BPFFS))
		for _, ifindex := range []int{pod, eth} {
			for _, egress := range []bool{false, true} {
				if got := onHook(t, cfg, ifindex, egress); len(got) != 0 {
					t.Fatalf("still attached: %+v", got)
				}
			}
		}
		// The kernel itself keeps two files on every bpffs.
		for _, name := range ls(t, filepath.Dir(cfg.BPFFS)) {
			if !strings.HasSuffix(name, ".debug") {
				t.Fatalf("left on the bpffs: %s", name)
			}
		}
		must(t, Cleanup(cfg.BPFFS)) // nothing there: no error
	})
}

// A pinned map of another layout is replaced, and the log says which.
func TestIncompatibleMap(t *testing.T) {
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	d := load(t, cfg)
	must(t, d.Maps().Addrs.Put(maps.Addr{B: [16]byte{15: 1}}, maps.Peer{Identity: 9}))
	must(t, d.Close())
	pin := filepath.Join(mapsDir(cfg.BPFFS), bpf.DpMapPwNodes)
	must(t, os.Remove(pin))
	old, err := ebpf.NewMap(&ebpf.MapSpec{Name: "pw_nodes", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 16})
	must(t, err)
	must(t, old.Pin(pin))
	must(t, old.Close())

	var logged bytes.Buffer
	cfg.Log = slog.New(slog.NewTextHandler(&logged, nil))
	cfg.FlowsMax = 2048 // another size is another layout
	d = load(t, cfg)
	for _, name := range []string{bpf.DpMapPwNodes, bpf.DpMapPwFlows} {
		if !strings.Contains(logged.String(), "map="+name+" ") {
			t.Errorf("the log does not name %s: %s", name, logged.String())
		}
	}
	if n := strings.Count(logged.String(), "another layout"); n != 2 {
		t.Errorf("%d maps put aside, want 2: %s", n, logged.String())
	}
	must(t, d.Maps().Nodes.Put(1, maps.Node{Flags: 1}))
	if v, ok, err := d.Maps().Addrs.Get(maps.Addr{B: [16]byte{15: 1}}); err != nil || !ok || v.Identity != 9 {
		t.Fatalf("a map whose layout did not change: %+v %v %v", v, ok, err)
	}
}

// The counts of a table of new flows stay as long as its entries do. Of those
// that are not there any more they would say that they were evicted.
func TestCountsGoWithTheirTable(t *testing.T) {
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	other := seams{step: func(string) {}, spec: func(cfg Config) (*ebpf.CollectionSpec, error) {
		spec, err := Spec(cfg)
		if err == nil {
			table := spec.Maps[bpf.DpMapPwFlowsNew]
			table.ValueSize, table.Value = table.ValueSize+8, nil
		}
		return spec, err
	}}
	counts := func(cfg Config, s seams, add uint64) uint64 {
		t.Helper()
		d, err := loadThrough(context.Background(), cfg, s)
		must(t, err)
		defer d.Close()
		must(t, d.Maps().Churn.AddFound(add))
		n, err := d.Maps().Churn.Read()
		must(t, err)
		return n.Inserted
	}
	same := seams{step: func(string) {}, spec: Spec}
	if n := counts(cfg, same, 5); n != 5 {
		t.Fatalf("%d", n)
	}
	cfg.FlowsMax, cfg.FlowsNewMax = 2048, 2048
	if n := counts(cfg, same, 1); n != 6 {
		t.Errorf("%d after their table was carried over, want 6", n)
	}
	if n := counts(cfg, other, 1); n != 1 {
		t.Errorf("%d after their table was begun anew, want 1", n)
	}
}

// stubborn is a link that does not take another program this many times.
type stubborn struct {
	link.Link
	times int
}

func (s *stubborn) Update(p *ebpf.Program) error {
	if s.times--; s.times >= 0 {
		return unix.ENOMEM
	}
	return s.Link.Update(p)
}

// Settings that have not reached every hook are not in force: asked for again,
// they are brought to all.
func TestSettingsThatReachedSomeHooks(t *testing.T) {
	ctx := context.Background()
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	pod := veth(t, "pwpod")
	d := load(t, cfg)
	must(t, d.AttachPod(ctx, pod, "pwpod"))
	at := d.attached[hookKey{pod, hookFromPod}]
	if at.link == nil {
		t.Skip("no tcx in this kernel")
	}
	inForce := func() bool {
		info, err := d.objs.FromPod.Info()
		must(t, err)
		id, _ := info.ID()
		return one(t, cfg, pod, false, "from_pod").id == id
	}
	for what, set := range map[string]func() error{
		"tunnel device": func() error { return d.SetOverlay(ctx, 77) },
		"source ports":  func() error { return d.SetSourcePorts(ctx, []sourceport.Range{{Min: 2000, Max: 9000}}) },
	} {
		at.link = &stubborn{at.link, 1}
		if err := set(); !errors.Is(err, unix.ENOMEM) {
			t.Errorf("%s: %v", what, err)
		}
		if inForce() {
			t.Fatalf("%s: the hook has it all the same", what)
		}
		must(t, set())
		if !inForce() {
			t.Errorf("%s: asked for again, it does not reach the hook", what)
		}
	}
}

// Another tunnel device: other programs in the same links over the same maps.
func TestSetOverlay(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod := veth(t, "pwpod")
		d := load(t, cfg)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		before := one(t, cfg, pod, false, "from_pod")
		must(t, d.SetOverlay(ctx, 77))
		got := one(t, cfg, pod, false, "from_pod")
		if got.id == before.id || got.link != before.link {
			t.Fatalf("%+v, was %+v", got, before)
		}
		must(t, d.SetOverlay(ctx, 77))
		if again := one(t, cfg, pod, false, "from_pod"); again != got {
			t.Fatalf("the same device again replaced the programs: %+v, was %+v", again, got)
		}
		// So are other source ports.
		ports := []sourceport.Range{{Min: 2000, Max: 3000}}
		must(t, d.SetSourcePorts(ctx, ports))
		other := one(t, cfg, pod, false, "from_pod")
		if other.id == got.id || other.link != got.link || d.cfg.OverlayIfindex != 77 {
			t.Fatalf("%+v, was %+v", other, got)
		}
		must(t, d.SetSourcePorts(ctx, ports))
		if again := one(t, cfg, pod, false, "from_pod"); again != other {
			t.Fatalf("the same ports again replaced the programs: %+v, was %+v", again, other)
		}
		must(t, d.Maps().Nodes.Put(1, maps.Node{Flags: 1}))
		if repaired, err := d.Verify(ctx); err != nil || len(repaired) != 0 {
			t.Fatalf("repaired %q, %v", repaired, err)
		}
	})
}
