package endpointtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
)

const insideEnv = "PODWEIR_TEST_INSIDE"

// The process's first thread stays where it is: /proc/self shows its
// namespaces.
func init() { runtime.LockOSThread() }

// Main runs the tests in new network and mount namespaces, by starting the
// test binary again, and returns the exit status.
func Main(m *testing.M) int {
	if os.Getenv(insideEnv) == "" {
		return reexec()
	}
	if err := setLoopbackUp(); err != nil {
		fmt.Fprintln(os.Stderr, "endpointtest:", err)
		return 1
	}
	return m.Run()
}

func reexec() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:    syscall.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "endpointtest: these tests need root, for network namespaces:", err)
		return 1
	}
	return 0
}

func setLoopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// Netns is a network namespace for a pod.
type Netns struct {
	Path   string
	handle netns.NsHandle
}

// NewNetns makes a network namespace that ends with the test.
func NewNetns(t *testing.T) *Netns {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n := &Netns{Path: path}
	err := onThread(func() (err error) {
		if n.handle, err = netns.New(); err != nil {
			return err
		}
		// /proc/thread-self, as the thread is the one in the namespace.
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(n.Remove)
	return n
}

// Remove unmounts the namespace, as a runtime does; repeating it is harmless.
func (n *Netns) Remove() {
	_ = unix.Unmount(n.Path, unix.MNT_DETACH)
	_ = os.Remove(n.Path)
	if n.handle.IsOpen() {
		_ = n.handle.Close()
	}
}

// Do runs f on a thread inside the namespace.
func (n *Netns) Do(t *testing.T, f func() error) {
	t.Helper()
	err := onThread(func() error {
		if err := netns.Set(n.handle); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		t.Fatalf("in the pod's network namespace: %v", err)
	}
}

// onThread runs f on a thread that is discarded afterwards.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// Fakes is a datapath and a regenerator that record what is asked of them.
type Fakes struct {
	// Hook, if set, is called for each call with its name ("wire", "attach",
	// "detach", "up", "down", "attached"); its error is the call's.
	Hook func(ctx context.Context, call string, ep endpoint.Endpoint) error
	// Clsact: programs take the place of an ingress qdisc.
	Clsact bool

	mu       sync.Mutex
	calls    []string
	attached map[int]bool
	up       map[endpoint.Key]endpoint.Endpoint
}

func (f *Fakes) call(ctx context.Context, name string, ep endpoint.Endpoint, change func()) error {
	if f.Hook != nil {
		if err := f.Hook(ctx, name, ep); err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.attached == nil {
		f.attached = map[int]bool{}
		f.up = map[endpoint.Key]endpoint.Endpoint{}
	}
	f.calls = append(f.calls, name)
	change()
	return nil
}

// AttachPod implements [endpoint.Datapath].
func (f *Fakes) AttachPod(ctx context.Context, ifindex int, name string) error {
	ep := endpoint.Endpoint{HostIfindex: ifindex, HostIfName: name}
	return f.call(ctx, "attach", ep, func() { f.attached[ifindex] = true })
}

// TakesIngress implements [endpoint.Wirer].
func (f *Fakes) TakesIngress() bool { return f.Clsact }

// AttachWire implements [endpoint.Wirer].
func (f *Fakes) AttachWire(ctx context.Context, ifindex int, name string) error {
	ep := endpoint.Endpoint{HostIfindex: ifindex, HostIfName: name}
	return f.call(ctx, "wire", ep, func() { f.attached[ifindex] = true })
}

// Detach implements [endpoint.Datapath].
func (f *Fakes) Detach(ctx context.Context, ifindex int) error {
	ep := endpoint.Endpoint{HostIfindex: ifindex}
	return f.call(ctx, "detach", ep, func() { delete(f.attached, ifindex) })
}

// Attached implements [endpoint.Prober].
func (f *Fakes) Attached(_ context.Context, ifindex int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.attached[ifindex] {
		return errors.New("not attached")
	}
	return nil
}

// Up implements [endpoint.Regenerator].
func (f *Fakes) Up(ctx context.Context, ep endpoint.Endpoint) error {
	return f.call(ctx, "up", ep, func() { f.up[ep.Key()] = ep })
}

// Down implements [endpoint.Regenerator].
func (f *Fakes) Down(ctx context.Context, ep endpoint.Endpoint) error {
	return f.call(ctx, "down", ep, func() { delete(f.up, ep.Key()) })
}

// InForce implements [endpoint.PolicyProber].
func (f *Fakes) InForce(_ context.Context, ep endpoint.Endpoint) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.up[ep.Key()]; !ok {
		return errors.New("it was never up")
	}
	return nil
}

// ForgetPolicy drops an endpoint from the maps.
func (f *Fakes) ForgetPolicy(k endpoint.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.up, k)
}

// Calls returns the names of all calls so far and forgets them.
func (f *Fakes) Calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.calls
	f.calls = nil
	return out
}

// Held returns how many interfaces are attached and how many endpoints up.
func (f *Fakes) Held() (attached, up int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.attached), len(f.up)
}

// Forget drops the programs of an interface, as a stranger's tc command would.
func (f *Fakes) Forget(ifindex int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.attached, ifindex)
}
