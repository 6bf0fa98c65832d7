package realcluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// netnsDir is where iproute2 has named network namespaces.
const netnsDir = "/run/netns"

func netnsThere(name string) bool {
	_, err := os.Stat(filepath.Join(netnsDir, name))
	return err == nil
}

// ip runs ip(8) in a named network namespace; "": in the machine's own.
func ip(ctx context.Context, ns, line string) error {
	args := strings.Fields(line)
	if ns != "" {
		args = append([]string{"-n", ns}, args...)
	}
	return run(ctx, "ip", args...)
}

// removeNetns removes a named namespace, if it is there, or what a call that
// was killed left of it: a name of nothing.
func removeNetns(ctx context.Context, name string) error {
	if !netnsThere(name) {
		return nil
	}
	if err := run(ctx, "ip", "netns", "del", name); err != nil && netnsThere(name) {
		if other := os.Remove(filepath.Join(netnsDir, name)); other != nil {
			return errors.Join(err, other)
		}
	}
	return nil
}

// Outside is a command where the cluster is seen from outside, at the address
// that the API server has: for a cluster without a name on the machine itself.
func (c Config) Outside(ctx context.Context, args ...string) *exec.Cmd {
	if c.host() != "" {
		args = append([]string{"nsenter", "--net=" + filepath.Join(netnsDir, c.host()), "--"}, args...)
	}
	return exec.CommandContext(ctx, args[0], args[1:]...)
}

// dialer connects from a named network namespace; "": from the machine's own.
func dialer(ns string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	if ns == "" {
		return d.DialContext
	}
	return func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			// Never unlocked: the thread, which is elsewhere then, ends with this.
			runtime.LockOSThread()
			var f *os.File
			if f, err = os.Open(filepath.Join(netnsDir, ns)); err != nil {
				return
			}
			if err = errors.Join(unix.Setns(int(f.Fd()), unix.CLONE_NEWNET), f.Close()); err != nil {
				err = fmt.Errorf("enter the network namespace %s: %w", ns, err)
				return
			}
			conn, err = d.DialContext(ctx, network, addr)
		}()
		<-done
		return conn, err
	}
}

// get asks a URL from a named namespace; what is not 200 is an error.
func get(ctx context.Context, ns, url string, certs ...tls.Certificate) error {
	hc := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		// Some of those who are asked have certificates that they signed themselves.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certs}, DisableKeepAlives: true, DialContext: dialer(ns)}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := hc.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return nil
}

// isUp tells whether a device is there and up; "": in the machine's namespace.
func isUp(ctx context.Context, ns, device string) bool {
	args := []string{"-o", "link", "show", "dev", device, "up"}
	if ns != "" {
		args = append([]string{"-n", ns}, args...)
	}
	out, err := exec.CommandContext(ctx, "ip", args...).Output()
	return err == nil && len(out) > 0
}

// makeBridge makes the nodes' network, with one who is outside: the machine,
// or the namespace that the cluster is in.
func (c Config) makeBridge(ctx context.Context) error {
	ns := c.host()
	// Up is the last that it gets: with that it is whole.
	if (ns == "" || netnsThere(ns)) && isUp(ctx, ns, bridge) {
		return nil
	}
	if err := c.removeBridge(ctx); err != nil {
		return err
	}
	if ns != "" {
		if err := ip(ctx, "", "netns add "+ns); err != nil {
			return err
		}
		if err := ip(ctx, ns, "link set lo up"); err != nil {
			return err
		}
	}
	for _, line := range []string{
		"link add " + bridge + " type bridge", "addr add " + hostIP + "/24 dev " + bridge,
		"addr add " + hostIP6 + "/64 dev " + bridge + " nodad", "link set " + bridge + " up",
	} {
		if err := ip(ctx, ns, line); err != nil {
			return err
		}
	}
	return nil
}

func (c Config) removeBridge(ctx context.Context) error {
	if c.host() != "" {
		return removeNetns(ctx, c.host())
	}
	return removeDevice(ctx, bridge)
}

// removeDevice removes a device of the machine, if it is there.
func removeDevice(ctx context.Context, name string) error {
	there := func() bool { return ip(ctx, "", "link show dev "+name) == nil }
	if !there() {
		return nil
	}
	if err := ip(ctx, "", "link del "+name); err != nil && there() {
		return err
	}
	return nil
}

// makeNetwork makes the node's network namespace and its device on the bridge.
func (n Node) makeNetwork(ctx context.Context) error {
	if err := n.removeNetwork(ctx); err != nil {
		return err
	}
	if err := ip(ctx, "", "netns add "+n.netns()); err != nil {
		return err
	}
	for _, step := range []struct{ ns, line string }{
		// As with a machine, the address of the link stays when it starts anew.
		{n.host, "link add " + n.veth() + " type veth peer name eth0 address " + n.mac() + " netns " + n.netns()},
		{n.host, "link set " + n.veth() + " master " + bridge + " up"},
		{n.netns(), "addr add " + n.IP + "/24 dev eth0"}, {n.netns(), "addr add " + n.IP6 + "/64 dev eth0 nodad"},
		{n.netns(), "link set lo up"}, {n.netns(), "link set eth0 up"},
		{n.netns(), "route add default via " + hostIP}, {n.netns(), "-6 route add default via " + hostIP6},
	} {
		if err := ip(ctx, step.ns, step.line); err != nil {
			return err
		}
	}
	return nil
}

// removeNetwork removes them.
func (n Node) removeNetwork(ctx context.Context) error {
	// The device first: with its namespace it would go at a time of its own.
	var err error
	if n.host == "" {
		err = removeDevice(ctx, n.veth())
	} else if netnsThere(n.host) && ip(ctx, n.host, "link show dev "+n.veth()) == nil {
		err = ip(ctx, n.host, "link del "+n.veth())
	}
	return errors.Join(err, removeNetns(ctx, n.netns()))
}

// tidyNetns removes what iproute2 made to have named namespaces, if there are
// none.
func tidyNetns() error {
	if entries, err := os.ReadDir(netnsDir); err != nil || len(entries) > 0 {
		return nil
	}
	// Namespaces that others make in this moment keep both.
	if err := unix.Unmount(netnsDir, 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("unmount %s: %w", netnsDir, err)
	}
	if err := unix.Rmdir(netnsDir); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", netnsDir, err)
	}
	return nil
}
