package agent

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/cniinstall"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/node"
)

// L7: nothing of ours is left, nothing of others is touched.
func TestCleanup(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread and its namespace end with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	mount := filepath.Join(dir, "bpf")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", mount, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	bpffs, state, socket := filepath.Join(mount, "pw"), filepath.Join(dir, "state"), filepath.Join(dir, "agent.sock")
	log := slog.New(slog.DiscardHandler)

	for _, l := range []netlink.Link{
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"},
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pw0123456789a"}, PeerName: "pod0"},
	} {
		if err := netlink.LinkAdd(l); err != nil {
			t.Fatal(err)
		}
	}
	before := make(map[string]string)
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv4/conf/all/send_redirects"} {
		before[name] = readProc(t, name)
	}
	stack, err := node.New(state, "", log)
	if err != nil {
		t.Fatal(err)
	}
	defer stack.Close()
	overlay, _, err := stack.EnsureOverlay(node.Overlay{MTU: 1450})
	if err != nil {
		t.Fatal(err)
	}
	if err := stack.SyncSysctls(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := stack.SyncRoutes([]node.Route{{Dst: netip.MustParsePrefix("10.244.80.0/24"), Blackhole: true}}, overlay); err != nil {
		t.Fatal(err)
	}
	eth0, err := net.InterfaceByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	dp, err := loader.Load(t.Context(), loader.Config{BPFFS: bpffs, OverlayIfindex: overlay})
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(dp.AttachNetdev(t.Context(), eth0.Index, "eth0"),
		dp.AttachOverlay(t.Context(), overlay, node.OverlayName), dp.Close())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(state, "endpoints"), 0o700); err != nil {
		t.Fatal(err)
	}

	bin, conf := filepath.Join(dir, "bin"), filepath.Join(dir, "net.d")
	if _, _, err := cniinstall.Conf(conf, cniinstall.DefaultConfName, cniinstall.DefaultConf()); err != nil {
		t.Fatal(err)
	}
	if _, err := cniinstall.Program("/proc/self/exe", bin); err != nil {
		t.Fatal(err)
	}
	cfg := Config{BPFFS: bpffs, StateDir: state, Socket: socket, CNIBinDir: bin, CNIConfDir: conf, Log: log}

	// Not while an agent runs.
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := Cleanup(cfg); err == nil || !strings.Contains(err.Error(), "another agent") {
		t.Errorf("beside a live agent: %v", err)
	}
	if _, err := os.Stat(bpffs); err != nil {
		t.Errorf("beside a live agent it removed %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// Twice: the second time there is nothing to do.
	for range 2 {
		if err := Cleanup(cfg); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{bpffs, state, socket, filepath.Join(bin, cniinstall.Plugin), filepath.Join(conf, cniinstall.DefaultConfName)} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	if got := strings.Join(names, " "); strings.Contains(got, "pw") || strings.Contains(got, "podweir") || !strings.Contains(got, "eth0") {
		t.Errorf("devices left: %s", got)
	}
	for name, v := range before {
		if got := readProc(t, name); got != v {
			t.Errorf("%s = %s, was %s", name, got, v)
		}
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Protocol: node.RouteProtocol}, netlink.RT_FILTER_PROTOCOL)
	if err != nil || len(routes) != 0 {
		t.Errorf("routes left: %v, %v", routes, err)
	}
}

func readProc(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// In a container the state folder is a mount: it stays, and that is no error.
func TestCleanupOfMount(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	if err := removeEmpty(dir); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "other"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := removeEmpty(dir); err != nil {
		t.Error(err)
	}
}
