package cli

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// pinMaps mounts a bpffs of the test's own, pins the datapath's maps in it
// and returns the folder for --bpffs with the maps open for writing.
func pinMaps(t *testing.T) (string, maps.Set) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpffs", dir, "bpf", 0, ""); err != nil {
		t.Fatalf("mount bpffs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount bpffs: %v", err)
		}
	})
	pins := filepath.Join(dir, "pw", "maps")
	if err := os.MkdirAll(pins, 0o755); err != nil {
		t.Fatal(err)
	}
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	spec.Maps[bpf.DpMapPwCalls].Contents = nil // a program, which would be loaded too
	var o bpf.DpMaps
	if err := spec.LoadAndAssign(&o, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: pins}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.Close() })
	return filepath.Join(dir, "pw"), maps.NewSet(&o)
}

// What is written into the kernel's maps is what the commands read.
func TestPinnedMaps(t *testing.T) {
	dir, set := pinMaps(t)
	plan := planMaps()
	classes := map[uint32]uint16{}
	for port, class := range plan.classes {
		if class != 0 {
			classes[uint32(port)] = class
		}
	}
	if err := errors.Join(
		set.Flows.PutAll(plan.confirmed), set.FlowsNew.PutAll(plan.unconfirmed), set.Gens.PutAll(plan.gens),
		set.Services.PutAll(plan.services), set.Backends.PutAll(plan.backends), set.SrcRanges.PutAll(plan.ranges), set.Endpoints.PutAll(plan.endpoints),
		set.Addrs.PutAll(plan.addrs), set.Prefixes.PutAll(plan.prefixes), set.Nodes.PutAll(plan.nodes),
		set.NodeIDs.PutAll(plan.nodeIDs), set.Policy.PutAll(plan.policy), set.PortClass.PutAll(classes),
	); err != nil {
		t.Fatal(err)
	}
	m, err := OpenMaps(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })

	confirmed, unconfirmed, err := m.Flows()
	same(t, "confirmed flows", plan.confirmed, confirmed, err)
	same(t, "unconfirmed flows", plan.unconfirmed, unconfirmed, err)
	for slot, want := range plan.gens {
		got, err := m.Generation(slot)
		same(t, "generation", want, got, err)
	}
	if _, err := m.Generation(1 << 30); err == nil {
		t.Error("a generation beyond the end of the map")
	}
	services, err := m.Services()
	same(t, "services", plan.services, services, err)
	backends, err := m.Backends()
	same(t, "backends", plan.backends, backends, err)
	ranges, err := m.SrcRanges()
	same(t, "source ranges", plan.ranges, ranges, err)
	endpoints, err := m.Endpoints()
	same(t, "endpoints", plan.endpoints, endpoints, err)
	addrs, err := m.Addrs()
	same(t, "addresses", plan.addrs, addrs, err)
	prefixes, err := m.Prefixes()
	same(t, "prefixes", plan.prefixes, prefixes, err)
	nodes, err := m.Nodes()
	same(t, "nodes", plan.nodes, nodes, err)
	nodeIDs, err := m.NodeIDs()
	same(t, "node ids", plan.nodeIDs, nodeIDs, err)
	policy, err := m.Policy()
	same(t, "policy", plan.policy, policy, err)
	ports, err := m.PortClasses()
	same(t, "port classes", plan.classes, ports, err)
	samples, err := m.Metrics()
	same(t, "metrics", 0, len(samples), err)

	usage, err := m.Usage()
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range usage {
		if u.Name == "pw_services" && u.Entries != len(plan.services) || u.Max == 0 {
			t.Errorf("usage %+v", u)
		}
	}
}

func same[T any](t *testing.T, what string, want, got T, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got)\n%s", what, d)
	}
}

func TestOpenMapsErrors(t *testing.T) {
	dir, _ := pinMaps(t)
	status := func(err error) int {
		var exit *exitError
		if !errors.As(err, &exit) {
			return -1
		}
		return exit.status
	}
	_, err := OpenMaps(filepath.Join(dir, "elsewhere"))
	if status(err) != exitNoMaps || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing pinned: %v", err)
	}

	// As somebody else, for a thread that ends with its goroutine.
	denied := make(chan error)
	go func() {
		runtime.LockOSThread()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETFSUID, 65534, 0, 0); errno != 0 {
			denied <- errno
			return
		}
		m, err := OpenMaps(dir)
		if err == nil {
			_ = m.Close()
		}
		denied <- err
	}()
	if err := <-denied; status(err) != exitPermission {
		t.Errorf("no permission: %v", err)
	}
}
