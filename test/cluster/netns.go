package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// netnsDir is where "ip netns" looks, so that people can look around too.
const netnsDir = "/run/netns"

// Netns is a network namespace of the cluster.
type Netns struct {
	Name   string // as in "ip netns exec NAME"
	c      *Cluster
	cgroup string
}

// Path is the file that a container runtime would hand to a CNI plugin.
func (n *Netns) Path() string { return filepath.Join(netnsDir, n.Name) }

// Do runs fn on a thread inside the namespace. The rest of the process, /sys
// and the mount namespace stay as they are. fn must not start goroutines
// that rely on the namespace, nor call a test's FailNow.
func (n *Netns) Do(fn func() error) error { return inNetns(n.Path(), fn) }

func inNetns(path string, fn func() error) error {
	errc := make(chan error, 1)
	go func() {
		// The thread is given back only if it is in its old namespace again;
		// otherwise it ends with this goroutine.
		runtime.LockOSThread()
		errc <- func() error {
			old, err := os.Open("/proc/thread-self/ns/net")
			if err != nil {
				return fmt.Errorf("own network namespace: %w", err)
			}
			defer old.Close()
			target, err := os.Open(path)
			if err != nil {
				return fmt.Errorf("network namespace: %w", err)
			}
			defer target.Close()
			if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("enter network namespace %s: %w", path, err)
			}
			err = fn()
			if back := unix.Setns(int(old.Fd()), unix.CLONE_NEWNET); back != nil {
				return errors.Join(err, fmt.Errorf("leave network namespace %s: %w", path, back))
			}
			runtime.UnlockOSThread()
			return err
		}()
	}()
	return <-errc
}

// InCgroupOf is the same namespace, but programs started in it live in the
// cgroup of another.
func (n *Netns) InCgroupOf(other *Netns) *Netns {
	return &Netns{Name: n.Name, c: n.c, cgroup: other.cgroup}
}

// Cgroup is the folder of the cgroup that the namespace's programs live in.
func (n *Netns) Cgroup() string { return n.cgroup }

// createNetns makes a named namespace, by a bind mount as "ip netns" does.
func createNetns(name string) error {
	if err := prepareNetnsDir(); err != nil {
		return fmt.Errorf("create network namespace %s: %w", name, err)
	}
	path := filepath.Join(netnsDir, name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("create network namespace %s: %w", name, err)
	}
	f.Close()
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		errc <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("create network namespace %s: %w", name, err)
			}
			if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("bind network namespace to %s: %w", path, err)
			}
			return nil
		}()
	}()
	if err := <-errc; err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// prepareNetnsDir makes the folder what "ip netns add" makes of it: a mount of
// its own, which is shared. Otherwise whoever calls that first hides the names
// that are there under a second mount, where nobody can remove them.
func prepareNetnsDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(netnsDir)
	if err != nil {
		return err
	}
	defer dir.Close() // and with it the lock, which iproute2 takes, too
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", netnsDir, err)
	}
	share := func() error { return unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	if err = share(); errors.Is(err, unix.EINVAL) { // not a mount yet
		if err = unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = share()
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount: %w", netnsDir, err)
	}
	return nil
}

// removeNetns removes the name; the kernel ends the namespace when its last
// process is gone. A name that is not there is no error.
func removeNetns(name string) error {
	path := filepath.Join(netnsDir, name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// newNetns makes a namespace of the run: lo up, duplicate address detection
// off so that addresses work at once.
func (c *Cluster) newNetns(short string) (*Netns, error) {
	n := &Netns{Name: c.prefix() + short, c: c, cgroup: filepath.Join(c.cgroup, short)}
	if err := os.MkdirAll(n.cgroup, 0o755); err != nil {
		return nil, fmt.Errorf("cgroup for %s: %w", n.Name, err)
	}
	if err := createNetns(n.Name); err != nil {
		return nil, err
	}
	err := n.Do(func() error {
		for key, value := range map[string]string{
			"net/ipv6/conf/all/accept_dad":     "0",
			"net/ipv6/conf/default/accept_dad": "0",
		} {
			if err := os.WriteFile("/proc/sys/"+key, []byte(value), 0o644); err != nil {
				return fmt.Errorf("set %s in %s: %w", key, n.Name, err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	h, err := n.netlink()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("lo in %s: %w", n.Name, err)
	}
	return n, h.LinkSetUp(lo)
}
