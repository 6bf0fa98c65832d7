// Command init is process 1 of the machines of package kernels: it mounts
// what a Linux program expects, loads the kernel modules, runs guest and
// powers the machine off. It imports nothing of the datapath, so that the
// programs that do start with /proc in place.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(); err != nil {
		fmt.Printf("podweir: fail init: %v\n", err)
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Printf("podweir: fail init: power off: %v\n", err)
	}
}

func run() error {
	for _, m := range []struct{ kind, dir string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"},
		{"bpf", "/sys/fs/bpf"}, {"tmpfs", "/tmp"}, {"cgroup2", "/sys/fs/cgroup"},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.dir, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.dir, err)
		}
	}
	if err := loadModules("/modules/order"); err != nil {
		return err
	}
	cmd := exec.Command("/guest", os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = []string{"PATH=/", "HOME=/tmp", "TMPDIR=/tmp"}
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		return fmt.Errorf("run guest: %w", err)
	}
	return nil
}

// loadModules loads the files that order lists, one a line.
func loadModules(order string) error {
	list, err := os.Open(order)
	if err != nil {
		return err
	}
	defer list.Close()
	lines := bufio.NewScanner(list)
	for lines.Scan() {
		image, err := os.ReadFile(lines.Text())
		if err != nil {
			return err
		}
		if err := unix.InitModule(image, ""); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load module %s: %w", lines.Text(), err)
		}
	}
	return lines.Err()
}
