package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/loader"
)

// A machine takes about 20 s for everything when it has a core to itself,
// most of it in the verifier.
const bootTimeout = 4 * time.Minute

func TestLinux61(t *testing.T)  { testMachine(t, "6.1") }
func TestLinux612(t *testing.T) { testMachine(t, "6.12") }

func testMachine(t *testing.T, series string) {
	t.Parallel()
	dir := t.TempDir()
	build(t, dir, "init", "guest")
	tree, err := fetch(t.Context(), series)
	if err != nil {
		t.Fatal(err)
	}
	images, err := filepath.Glob(filepath.Join(tree, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		t.Fatalf("kernel images in %s: %v, %v", tree, images, err)
	}
	initramfs := filepath.Join(dir, "initramfs")
	err = writeInitramfs(t.Context(), initramfs, tree, filepath.Join(dir, "init"), filepath.Join(dir, "guest"))
	if err != nil {
		t.Fatal(err)
	}
	report(t, run(t, exec.Command("qemu-system-x86_64",
		"-M", "q35", "-cpu", "max", "-accel", "tcg", "-m", "512", "-smp", "1",
		"-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio",
		"-kernel", images[0], "-initrd", initramfs,
		"-append", "console=ttyS0 quiet panic=-1 reboot=t mitigations=off nokaslr no_timer_check -- -kernel "+series+" -bpffs /sys/fs/bpf -cgroup /sys/fs/cgroup/podweir")))
}

// TestHost runs the same checks on the kernel that the tests run on.
func TestHost(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	build(t, dir, "guest")
	bpffs := filepath.Join(dir, "bpffs")
	if err := os.Mkdir(bpffs, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a bpffs (this needs root): %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpffs, 0); err != nil {
			t.Errorf("unmount %s: %v", bpffs, err)
		}
	})
	root, err := loader.FindCgroup("")
	if err != nil || root == "" {
		t.Fatalf("a mounted cgroup2 is needed: %q, %v", root, err)
	}
	cgroup := filepath.Join(root, fmt.Sprintf("podweir-kernels-%d", os.Getpid()))
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(cgroup); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.Command(filepath.Join(dir, "guest"), "-bpffs", bpffs, "-cgroup", cgroup)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	report(t, run(t, cmd))
}

// build compiles programs of this package's subfolders into dir.
func build(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w",
			"-o", filepath.Join(dir, name), "./"+name)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build ./%s: %v\n%s", name, err, out)
		}
	}
}

// run returns everything a program printed. It is ended, by its process,
// when it takes too long.
func run(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = errors.Join(fmt.Errorf("did not end within %v", bootTimeout), cmd.Process.Kill(), <-ended)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Errorf("%s: %v\n%s", cmd.Path, err, out.String())
	}
	return out.String()
}

// report makes a subtest of each check that guest ran.
func report(t *testing.T, out string) {
	t.Helper()
	checks, ended := 0, false
	for line := range strings.Lines(out) {
		_, line, ours := strings.Cut(strings.TrimRight(line, "\r\n"), "podweir: ")
		if !ours {
			continue
		}
		kind, rest, _ := strings.Cut(line, " ")
		switch kind {
		case "log":
			t.Log(rest)
		case "ok":
			checks++
			t.Run(rest, func(*testing.T) {})
		case "fail":
			name, why, _ := strings.Cut(rest, ": ")
			t.Run(name, func(t *testing.T) { t.Error(strings.ReplaceAll(why, " | ", "\n")) })
		case "end":
			ended = true
		}
	}
	if t.Failed() || !ended || checks == 0 {
		t.Errorf("%d checks passed; came to its end: %v; everything that was printed:\n%s", checks, ended, out)
	}
}
