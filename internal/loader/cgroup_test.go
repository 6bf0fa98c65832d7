package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

func TestCgroupMount(t *testing.T) {
	const (
		cpu     = "31 30 0:27 / /sys/fs/cgroup/cpu rw shared:5 - cgroup cgroup rw,cpu\n"
		unified = "32 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		main    = "33 30 0:28 / /sys/fs/cgroup rw shared:9 master:1 - cgroup2 cgroup2 rw\n"
		odd     = "34 30 0:28 / /mnt/my\\040cgroup rw - cgroup2 none rw\n"
	)
	for mountinfo, want := range map[string]string{
		"":                   "",
		cpu:                  "",
		cpu + odd:            "/mnt/my cgroup",
		odd + unified:        "/sys/fs/cgroup/unified",
		unified + odd + main: "/sys/fs/cgroup",
		main + unified:       "/sys/fs/cgroup",
		"nonsense\n" + odd:   "/mnt/my cgroup",
	} {
		if got, err := cgroupMount(strings.NewReader(mountinfo)); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", mountinfo, got, err, want)
		}
	}
}

func TestFindCgroup(t *testing.T) {
	if got, err := FindCgroup(NoCgroup); got != "" || err != nil {
		t.Errorf("none: %q, %v", got, err)
	}
	own := cgroup(t, "find")
	if got, err := FindCgroup(own); got != own || err != nil {
		t.Errorf("a cgroup: %q, %v", got, err)
	}
	// As /sys/fs/cgroup is on a machine with cgroup v1.
	mixed := t.TempDir()
	must(t, os.Symlink(own, filepath.Join(mixed, "unified")))
	if got, err := FindCgroup(mixed); got != filepath.Join(mixed, "unified") || err != nil {
		t.Errorf("a cgroup at unified: %q, %v", got, err)
	}
	for _, bad := range []string{t.TempDir(), filepath.Join(own, "missing"), filepath.Join(own, "cgroup.procs")} {
		if _, err := FindCgroup(bad); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: error %v, want one that names it", bad, err)
		}
	}
}

// cgroup makes one of the test's own, with nobody in it.
func cgroup(t *testing.T, name string) string {
	t.Helper()
	root, err := FindCgroup("")
	must(t, err)
	if root == "" {
		t.Fatal("no cgroup2 is mounted; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified")
	}
	dir := filepath.Join(root, fmt.Sprintf("podweir-loader-%d-%s", os.Getpid(), name))
	must(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	return dir
}

// atSockets are the programs at a cgroup's sockets, by name.
func atSockets(t *testing.T, dir string) map[string]seen {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	out := make(map[string]seen)
	for _, h := range socketHooks() {
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: h.attach})
		must(t, err)
		for i, p := range result.Programs {
			prog, err := ebpf.NewProgramFromID(p.ID)
			must(t, err)
			info, err := prog.Info()
			must(t, err)
			prog.Close()
			out[fmt.Sprintf("%s %d", info.Name, i)] = seen{id: p.ID, name: info.Name}
		}
	}
	return out
}

// allAtSockets wants each of our programs once.
func allAtSockets(t *testing.T, dir string) map[string]seen {
	t.Helper()
	got := atSockets(t, dir)
	for _, h := range socketHooks() {
		if _, ok := got[h.program+" 0"]; !ok || len(got) != len(socketHooks()) {
			t.Fatalf("programs at the sockets of %s: %v, want each of ours once", dir, got)
		}
	}
	return got
}

// The programs at sockets are attached once however often they are asked for,
// replaced in place, and removed by cleanup.
func TestSockets(t *testing.T) {
	ctx := context.Background()
	d := load(t, Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024})
	dir := cgroup(t, "sockets")
	if at, attached := d.Sockets(); at != "" || attached {
		t.Fatalf("before: %q, %v", at, attached)
	}
	must(t, d.AttachSockets(ctx, dir))
	before := allAtSockets(t, dir)
	for range 2 {
		must(t, d.Close())
		allAtSockets(t, dir)
		d = restart(t, d)
		now := allAtSockets(t, dir) // at once, in place
		for name := range now {
			if now[name] == before[name] {
				t.Errorf("%s is still the old program", name)
			}
		}
		must(t, d.AttachSockets(ctx, dir))
		if got := allAtSockets(t, dir); fmt.Sprint(got) != fmt.Sprint(now) {
			t.Errorf("attaching again changed %v to %v", now, got)
		}
		before = now
	}
	must(t, d.SetOverlay(ctx, 7))
	if got := allAtSockets(t, dir); fmt.Sprint(got) == fmt.Sprint(before) {
		t.Error("another tunnel device: still the old programs")
	}
	if at, attached := d.Sockets(); at != dir || !attached {
		t.Errorf("Sockets says %q, %v", at, attached)
	}

	other := cgroup(t, "other")
	must(t, d.AttachSockets(ctx, other))
	allAtSockets(t, other)
	if got := atSockets(t, dir); len(got) > 0 {
		t.Errorf("still at the cgroup of before: %v", got)
	}
	must(t, d.AttachSockets(ctx, ""))
	if got := atSockets(t, other); len(got) > 0 {
		t.Errorf("switched off, still attached: %v", got)
	}
	must(t, d.AttachSockets(ctx, other))
	must(t, d.Close())
	must(t, Cleanup(d.cfg.BPFFS))
	if got := atSockets(t, other); len(got) > 0 {
		t.Errorf("after cleanup: %v", got)
	}
}

func TestVerifySockets(t *testing.T) {
	ctx := context.Background()
	d := load(t, Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024})
	dir := cgroup(t, "verify")
	must(t, d.AttachSockets(ctx, dir))
	verify := func(want int) {
		t.Helper()
		repaired, err := d.Verify(ctx)
		must(t, err)
		if len(repaired) != want {
			t.Fatalf("repaired %q, want %d", repaired, want)
		}
		allAtSockets(t, dir)
		for _, h := range socketHooks() {
			if _, err := os.Stat(h.pin(d.cfg.BPFFS)); err != nil {
				t.Error(err)
			}
		}
	}
	verify(0)
	h := socketHooks()[3]
	must(t, d.sockets[h].Detach())
	if at, attached := d.Sockets(); at != dir || attached {
		t.Errorf("one is detached, Sockets says %q, %v", at, attached)
	}
	verify(1)
	must(t, os.Remove(h.pin(d.cfg.BPFFS)))
	verify(0)

	// The cgroup goes and comes again.
	must(t, os.Remove(dir))
	if _, err := d.Verify(ctx); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("without its cgroup: %v, want an error that names it", err)
	}
	must(t, os.Mkdir(dir, 0o755))
	verify(len(socketHooks()))

	// It goes while no process looks after it.
	must(t, d.Close())
	must(t, os.Remove(dir))
	d = restart(t, d)
	must(t, os.Mkdir(dir, 0o755))
	must(t, d.AttachSockets(ctx, dir))
	verify(0)
}
