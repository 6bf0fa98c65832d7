package endpoint

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// nsfsMagic is the type of the file system that namespaces live on.
const nsfsMagic = 0x6e736673

// openNetns opens a pod's network namespace and makes sure that it is one,
// and not the host's.
func openNetns(path string, host netns.NsHandle) (netns.NsHandle, error) {
	if path == "" {
		return netns.None(), errorf(CodeBadNetns, "no network namespace is given")
	}
	// Without O_NONBLOCK, opening a named pipe would wait for ever.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return netns.None(), errorf(CodeBadNetns, "network namespace %s: %w; the agent must see the path as the runtime does", path, err)
	}
	ns := netns.NsHandle(fd)
	var st unix.Statfs_t
	kind := 0
	if err = unix.Fstatfs(fd, &st); err == nil && st.Type == nsfsMagic {
		kind, err = unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	}
	switch {
	case err != nil:
		err = errorf(CodeBadNetns, "network namespace %s: %w", path, err)
	case kind != unix.CLONE_NEWNET:
		err = errorf(CodeBadNetns, "%s is no network namespace", path)
	case ns.Equal(host):
		err = errorf(CodeBadNetns, "network namespace %s is the host's; a pod needs its own", path)
	default:
		return ns, nil
	}
	_ = ns.Close()
	return netns.None(), err
}

// inNetns runs f on a thread inside ns. A thread that cannot come back to
// host is discarded. The process's first thread is spared: /proc/self shows
// its namespace to everyone, and it cannot be discarded.
func inNetns(ns, host netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- inNetns(ns, host, f) // another thread, as this one waits
			return
		}
		if err := netns.Set(ns); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		}
		err := f()
		if netns.Set(host) == nil {
			runtime.UnlockOSThread() // else the thread ends with this goroutine
		}
		done <- err
	}()
	return <-done
}

// newHandle returns a netlink handle of the network namespace that the
// calling thread is in.
func newHandle() (*netlink.Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return h, nil
}
