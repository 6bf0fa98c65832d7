package loader

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// modes runs a test with tcx links and with filters on a clsact qdisc.
func modes(t *testing.T, test func(t *testing.T, cfg Config)) {
	t.Helper()
	for _, clsact := range []bool{false, true} {
		name := "tcx"
		if clsact {
			name = "clsact"
		}
		t.Run(name, func(t *testing.T) {
			test(t, Config{BPFFS: bpffs(t), ForceClsact: clsact, FlowsMax: 1024, FlowsNewMax: 1024})
		})
	}
}

// bpffs mounts a bpffs of the test's own and returns a folder on it.
func bpffs(t *testing.T) string {
	t.Helper()
	mount := t.TempDir()
	if err := unix.Mount("bpf", mount, "bpf", 0, ""); err != nil {
		t.Fatalf("mount bpffs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount bpffs: %v", err)
		}
	})
	return filepath.Join(mount, "podweir")
}

func load(t *testing.T, cfg Config) *Datapath {
	t.Helper()
	d, err := Load(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// restart closes a datapath and loads it again, as a new process would.
func restart(t *testing.T, d *Datapath) *Datapath {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	return load(t, d.cfg)
}

// veth makes a pair and returns the index of its first end.
func veth(t *testing.T, name string) int {
	t.Helper()
	err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeDevice(t, name) })
	return index(t, name)
}

func removeDevice(t *testing.T, name string) {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		return // gone, which some tests see to
	}
	if err := netlink.LinkDel(l); err != nil {
		t.Error(err)
	}
}

func index(t *testing.T, name string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().Index
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// seen is one program on a hook.
type seen struct {
	name string
	id   ebpf.ProgramID
	link link.ID
}

// onHook lists what sits on a hook, first to last.
func onHook(t *testing.T, cfg Config, ifindex int, egress bool) []seen {
	t.Helper()
	var out []seen
	if !cfg.ForceClsact {
		attach := ebpf.AttachTCXIngress
		if egress {
			attach = ebpf.AttachTCXEgress
		}
		r, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: attach})
		must(t, err)
		for _, p := range r.Programs {
			s := seen{id: p.ID}
			s.link, _ = p.LinkID()
			s.name = programName(t, p.ID)
			out = append(out, s)
		}
		return out
	}
	parent := uint32(netlink.HANDLE_MIN_INGRESS)
	if egress {
		parent = netlink.HANDLE_MIN_EGRESS
	}
	l, err := netlink.LinkByIndex(ifindex)
	must(t, err)
	filters, err := netlink.FilterList(l, parent)
	if err != nil {
		return nil // no such qdisc
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			out = append(out, seen{name: programName(t, ebpf.ProgramID(b.Id)), id: ebpf.ProgramID(b.Id)})
		}
	}
	return out
}

func programName(t *testing.T, id ebpf.ProgramID) string {
	t.Helper()
	p, err := ebpf.NewProgramFromID(id)
	must(t, err)
	defer p.Close()
	info, err := p.Info()
	must(t, err)
	return info.Name
}

// one asserts that exactly our program is on a hook and returns it.
func one(t *testing.T, cfg Config, ifindex int, egress bool, name string) seen {
	t.Helper()
	got := onHook(t, cfg, ifindex, egress)
	if len(got) != 1 || got[0].name != name {
		t.Fatalf("on the hook: %+v, want %s alone", got, name)
	}
	return got[0]
}

func ls(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// stranger is somebody else's program: it lets everything by.
func stranger(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "stranger", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}
