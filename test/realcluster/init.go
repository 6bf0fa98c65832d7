package realcluster

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// NodeInit is process 1 of a node: it makes the mounts that set the node apart
// from the machine, and reaps. All processes of the node end with it.
func (c Config) NodeInit(name string) error {
	n, err := c.find(name)
	if err != nil {
		return err
	}
	if os.Getpid() != 1 {
		return errors.New("node-init is for process 1 of a node's namespaces")
	}
	if err := n.mounts(); err != nil {
		return fmt.Errorf("mounts of node %s: %w", name, err)
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	signal.Ignore(unix.SIGHUP, unix.SIGINT)
	if err := os.WriteFile(n.path("run", "mounted"), nil, 0o644); err != nil {
		return err
	}
	for range children {
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
	return nil
}

// mounts are made in this order; each is private to the node until the last
// line, which shares them with the mount namespaces of its containers.
func (n Node) mounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	// What the machine has mounted under /run, such as network namespaces,
	// would live for as long as the node.
	if err := detachBelow("/run/"); err != nil {
		return err
	}
	old := n.path("cgroup")
	for _, m := range []struct {
		source, target, fstype string
		flags                  uintptr
		data                   string
	}{
		{"proc", "/proc", "proc", 0, ""},
		// /sys shows the devices of the network namespace it is mounted in. The
		// cgroups are carried over, the one of v2 from the node's own on.
		{cgroupRoot, old, "", unix.MS_BIND | unix.MS_REC, ""},
		{"sysfs", "/sys", "sysfs", 0, ""},
		{old, cgroupRoot, "", unix.MS_BIND | unix.MS_REC, ""},
		{"detach", old, "", 0, ""},
		{filepath.Join(cgroupRoot, "unified", n.cgroup()), filepath.Join(cgroupRoot, "unified"), "", unix.MS_BIND, ""},
		{"bpf", "/sys/fs/bpf", "bpf", 0, ""},
		{"tmpfs", "/run", "tmpfs", 0, "mode=755"},
		{n.path("var-lib"), "/var/lib", "", unix.MS_BIND, ""},
		{n.path("var-log"), "/var/log", "", unix.MS_BIND, ""},
		{n.path("opt"), "/opt", "", unix.MS_BIND, ""},
		{"etc", "/etc", "overlay", 0, "lowerdir=/etc,upperdir=" + n.path("etc") + ",workdir=" + n.path("etc-work")},
		{"", "/", "", unix.MS_REC | unix.MS_SHARED, ""},
	} {
		if m.source == "detach" {
			if err := unix.Unmount(m.target, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", m.target, err)
			}
			continue
		}
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
		}
	}
	// What a node has from its installation.
	for _, d := range []string{"/run/containerd", "/run/netns", "/run/lock", "/var/lib/kubelet", "/etc/cni/net.d"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// detachBelow unmounts everything below a folder, the last mounted first.
func detachBelow(dir string) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(string(data), "\n")
	slices.Reverse(lines)
	for _, l := range lines {
		if f := strings.Fields(l); len(f) > 4 && strings.HasPrefix(f[4], dir) {
			// Gone with its folder, or hidden by another mount.
			gone := func(err error) bool { return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) }
			if err := unix.Unmount(f[4], unix.MNT_DETACH); err != nil && !gone(err) {
				return fmt.Errorf("unmount %s: %w", f[4], err)
			}
		}
	}
	return nil
}
