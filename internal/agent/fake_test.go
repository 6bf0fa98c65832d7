package agent

import (
	"context"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/sourceport"
)

// fakeDatapath has the kernel's maps and no programs.
type fakeDatapath struct {
	set maps.Set

	mu       sync.Mutex
	attached map[int]string
	overlay  int
	ports    []sourceport.Range
	bad      map[string]error // by device
	filtered map[int]string
	steps    func(string) // told of FilterPod
	onSwitch func() error // in place of Switch
}

func newFakeDatapath(t testing.TB) *fakeDatapath {
	t.Helper()
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
		m.MaxEntries = min(m.MaxEntries, 65536)
	}
	spec.Maps[bpf.DpMapPwCalls].Contents = nil // a program, which would be loaded too
	var o bpf.DpMaps
	if err := spec.LoadAndAssign(&o, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.Close() })
	return &fakeDatapath{set: maps.NewSet(&o), attached: make(map[int]string), bad: make(map[string]error), filtered: make(map[int]string)}
}

func (d *fakeDatapath) Maps() maps.Set { return d.set }

func (d *fakeDatapath) AttachNetdev(_ context.Context, ifindex int, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.bad[name]; err != nil {
		return err
	}
	d.attached[ifindex] = name
	return nil
}

func (d *fakeDatapath) AttachOverlay(ctx context.Context, ifindex int, name string) error {
	return d.AttachNetdev(ctx, ifindex, name)
}

func (d *fakeDatapath) AttachLoopback(ctx context.Context, ifindex int, name string) error {
	return d.AttachNetdev(ctx, ifindex, name)
}

func (d *fakeDatapath) FilterPod(_ context.Context, ifindex int, name string, on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.steps != nil {
		d.steps(fmt.Sprintf("filter %d %v", ifindex, on))
	}
	d.filtered[ifindex] = name
	if !on {
		delete(d.filtered, ifindex)
	}
	return nil
}

func (d *fakeDatapath) AttachCover(ctx context.Context, ifindex int, name string) error {
	return d.AttachNetdev(ctx, ifindex, name)
}

func (d *fakeDatapath) Filtered() []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(gomaps.Keys(d.filtered))
}

func (d *fakeDatapath) SetOverlay(_ context.Context, ifindex int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.overlay = ifindex
	return nil
}

func (d *fakeDatapath) SetSourcePorts(_ context.Context, ports []sourceport.Range) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ports = ports
	return nil
}

func (d *fakeDatapath) Detach(_ context.Context, ifindex int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.attached, ifindex)
	return nil
}

func (d *fakeDatapath) Verify(context.Context) ([]string, error) { return nil, nil }

func (d *fakeDatapath) Switch(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.onSwitch != nil {
		return d.onSwitch()
	}
	return nil
}

func (d *fakeDatapath) devices() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for _, n := range d.attached {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// fakeStack is a node with one device.
type fakeStack struct {
	events chan struct{}

	mu       sync.Mutex
	list     []node.Device
	routes   []node.Route
	overlays []node.Overlay
	world    uint64
	ways     map[netip.Addr]node.Way // those that are not by the first device
	qdiscs   map[int]node.Qdisc
	covers   map[int]node.Cover
	noCover  error
	steps    func(string) // told of covers
	local    sourceport.Range
	unread   error // of listing devices
}

func newFakeStack() *fakeStack {
	return &fakeStack{
		events: make(chan struct{}, 1),
		local:  sourceport.Range{Min: 32768, Max: 60999},
		list: []node.Device{{Index: 2, Name: "eth0", MTU: 1500, Up: true, Default: true,
			Addrs: []netip.Addr{netip.MustParseAddr("172.31.0.2")}}},
	}
}

func (s *fakeStack) Watch(context.Context) (<-chan struct{}, error) { return s.events, nil }

func (s *fakeStack) Devices() ([]node.Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list), s.unread
}

func (s *fakeStack) EnsureOverlay(o node.Overlay) (int, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.overlays = append(s.overlays, o)
	return 7, false, nil
}

func (s *fakeStack) SyncRoutes(want []node.Route, _ int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.routes = want
	return 0, nil
}

func (s *fakeStack) Way(addr netip.Addr) (node.Way, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := node.Way{Device: s.list[0].Index, Nexthop: addr, MTU: s.list[0].MTU, Link: s.list[0].MTU, Onlink: true}
	if way, ok := s.ways[addr]; ok {
		w = way
	}
	return w, true, nil
}

func (s *fakeStack) WorldRoutes() (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.world, nil
}

func (s *fakeStack) Qdiscs() (map[int]node.Qdisc, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return gomaps.Clone(s.qdiscs), nil
}

func (s *fakeStack) Covers() (map[int]node.Cover, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return gomaps.Clone(s.covers), nil
}

func (s *fakeStack) MakeCover(veth int, vethName string) (node.Cover, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noCover != nil {
		return node.Cover{}, s.noCover
	}
	if s.covers == nil {
		s.covers = make(map[int]node.Cover)
	}
	if _, ok := s.covers[veth]; !ok {
		s.step("make %s", node.CoverName(vethName))
		s.covers[veth] = node.Cover{Index: 1000 + veth, Name: node.CoverName(vethName), Veth: veth}
	}
	return s.covers[veth], nil
}

func (s *fakeStack) RaiseCover(c node.Cover) error {
	s.step("raise %s", c.Name)
	return nil
}

func (s *fakeStack) step(format string, args ...any) {
	if s.steps != nil {
		s.steps(fmt.Sprintf(format, args...))
	}
}

func (s *fakeStack) RemoveCover(c node.Cover) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.step("remove %s", c.Name)
	delete(s.covers, c.Veth)
	return nil
}

func (s *fakeStack) LocalPorts() (sourceport.Range, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.local, nil
}

func (s *fakeStack) SyncSysctls([]node.Device) error { return nil }

func (s *fakeStack) add(d node.Device) {
	s.mu.Lock()
	s.list = append(s.list, d)
	s.mu.Unlock()
	s.events <- struct{}{}
}

// event tells that something has moved, as the kernel would.
func (s *fakeStack) event(change func()) {
	s.mu.Lock()
	change()
	s.mu.Unlock()
	s.events <- struct{}{}
}
