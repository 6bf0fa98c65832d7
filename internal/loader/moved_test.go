package loader

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// pods are three on this node, and a service with one of the last two behind
// it. What they send and get is seen at the far ends of their veths.
type pods struct {
	t       *testing.T
	cfg     Config
	devices map[string]int
	peers   map[string]int // the far ends' indices, where those are
	sockets map[string]int
	id      uint32
}

func podAddr(name string) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 244, 80, byte(slices.Index([]string{"pwone", "pwtwo", "pwthree"}, name) + 65)})
}

func vip() netip.Addr { return netip.AddrFrom4([4]byte{10, 98, 0, 1}) }

func newPods(t *testing.T, cfg Config) *pods {
	w := &pods{t: t, cfg: cfg, devices: make(map[string]int), peers: make(map[string]int), sockets: make(map[string]int)}
	// The far ends are elsewhere, or the kernel would not send to them.
	there := elsewhere(t)
	for _, name := range []string{"pwone", "pwtwo", "pwthree"} {
		w.devices[name] = veth(t, name)
		l, err := netlink.LinkByName(name)
		must(t, err)
		must(t, netlink.LinkSetUp(l))
		l, err = netlink.LinkByName(name + "p")
		must(t, err)
		must(t, netlink.LinkSetNsFd(l, int(there)))
	}
	within(t, there, func() error {
		for name := range w.devices {
			l, err := netlink.LinkByName(name + "p")
			if err != nil {
				return err
			}
			w.peers[name] = l.Attrs().Index
			const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xff00
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
			if err != nil {
				return err
			}
			t.Cleanup(func() { unix.Close(fd) })
			w.sockets[name] = fd
			if err := errors.Join(netlink.LinkSetUp(l),
				unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: w.peers[name]}),
				unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})); err != nil {
				return err
			}
		}
		return nil
	})
	return w
}

// elsewhere is a network namespace without a name.
func elsewhere(t *testing.T) (there netns.NsHandle) {
	t.Helper()
	here, err := netns.Get()
	must(t, err)
	defer here.Close()
	within(t, here, func() (err error) {
		there, err = netns.New()
		return err
	})
	t.Cleanup(func() { there.Close() })
	return there
}

// within runs f in a namespace, and comes back from where that leaves it.
func within(t *testing.T, there netns.NsHandle, f func() error) {
	t.Helper()
	runtime.LockOSThread()
	here, err := netns.Get()
	must(t, err)
	defer here.Close()
	err = netns.Set(there)
	if err == nil {
		err = f()
	}
	must(t, errors.Join(netns.Set(here), err))
	runtime.UnlockOSThread()
}

// attach is what the agent does with every pod.
func (w *pods) attach(d *Datapath) {
	w.t.Helper()
	for name, ifindex := range w.devices {
		must(w.t, d.AttachPod(context.Background(), ifindex, name))
	}
}

// put writes an entry as the map wants it: a longer value ends in zeros.
func (w *pods) put(m *ebpf.Map, key, value any) {
	w.t.Helper()
	k, err := binary.Append(nil, binary.NativeEndian, key)
	must(w.t, err)
	v, err := binary.Append(nil, binary.NativeEndian, value)
	must(w.t, err)
	must(w.t, m.Put(k, append(v, make([]byte, int(m.ValueSize())-len(v))...)))
}

// fill is what the agent writes.
func (w *pods) fill(d *Datapath, backend string) {
	w.t.Helper()
	n := uint32(0)
	for name, ifindex := range w.devices {
		n++
		w.put(d.objs.PwEndpoints, maps.ToAddr(podAddr(name)), maps.Endpoint{
			Id: n, Ifindex: uint32(ifindex), Identity: maps.IdentityFirstDynamic + n, Slot: n + 1, Mac: [6]byte{2, 0, 0, 0, 0, byte(n)},
		})
	}
	services, err := maps.ToPrefix(netip.MustParsePrefix("10.98.0.0/16"))
	must(w.t, err)
	w.put(d.objs.PwPrefixes, services, maps.Peer{Flags: maps.PeerService})
	w.put(d.objs.PwServices, maps.ServiceKey{Addr: maps.ToAddr(vip())}, maps.Service{Flags: maps.ServiceAddrOwned})
	w.put(d.objs.PwServices, maps.ServiceKey{Addr: maps.ToAddr(vip()), Port: 80, Proto: maps.ProtoUDP},
		maps.Service{Id: 1, Set: 1, Count: 1, ExtSet: 1, ExtCount: 1})
	w.put(d.objs.PwBackends, maps.BackendKey{Set: 1}, maps.Backend{Addr: maps.ToAddr(podAddr(backend)), Port: 8080})
	w.put(d.objs.PwBackendSt, maps.BackendStateKey{Service: 1, Addr: maps.ToAddr(podAddr(backend)), Port: 8080},
		uint32(maps.BackendIn|maps.BackendCluster|maps.BackendExt|maps.BackendServing))
}

// asks has the first pod send a datagram to the service, which gets to a pod
// and is answered from there. The answer has the service's address.
func (w *pods) asks(port uint16, backend string) {
	w.t.Helper()
	w.sends("pwone", netip.AddrPortFrom(podAddr("pwone"), port), netip.AddrPortFrom(vip(), 80),
		backend, netip.AddrPortFrom(podAddr("pwone"), port), netip.AddrPortFrom(podAddr(backend), 8080))
	w.sends(backend, netip.AddrPortFrom(podAddr(backend), 8080), netip.AddrPortFrom(podAddr("pwone"), port),
		"pwone", netip.AddrPortFrom(vip(), 80), netip.AddrPortFrom(podAddr("pwone"), port))
}

// sends sends a datagram and waits for it where it is to come out, as what.
func (w *pods) sends(from string, src, dst netip.AddrPort, to string, outSrc, outDst netip.AddrPort) {
	w.t.Helper()
	w.id++
	frame := datagram(src, dst, w.id)
	must(w.t, unix.Sendto(w.sockets[from], frame, 0, &unix.SockaddrLinklayer{Ifindex: w.peers[from]}))
	want := datagram(outSrc, outDst, w.id)
	buf := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(w.sockets[to], buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			w.t.Fatalf("%v to %v, sent by %s, does not get to %s as %v to %v: %v; counted %v", src, dst, from, to, outSrc, outDst, err, w.counts())
		}
		const ends, payload = 26, 42 // where they are in a frame
		if n >= len(want) && bytes.Equal(buf[ends:ends+12], want[ends:ends+12]) && bytes.Equal(buf[payload:payload+4], want[payload:payload+4]) {
			return
		}
	}
}

// counts are those of the maps in force, for the report.
func (w *pods) counts() []maps.Sample {
	m, err := ebpf.LoadPinnedMap(mapsDir(w.cfg.BPFFS)+"/"+bpf.DpMapPwMetrics, nil)
	must(w.t, err)
	defer m.Close()
	all, err := maps.NewMetrics(m).Read()
	must(w.t, err)
	return all
}

func datagram(src, dst netip.AddrPort, id uint32) []byte {
	f := []byte{
		0x02, 0, 0, 0, 0, 1, 0x02, 0, 0, 0, 0, 2, 0x08, 0x00,
		0x45, 0, 0, 48, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0,
	}
	s, d := src.Addr().As4(), dst.Addr().As4()
	f = append(append(f, s[:]...), d[:]...)
	sum := uint32(0)
	for i := 14; i < len(f); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(f[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(f[24:], ^uint16(sum))
	f = binary.BigEndian.AppendUint16(f, src.Port())
	f = binary.BigEndian.AppendUint16(f, dst.Port())
	f = append(f, 0, 28, 0, 0)
	return append(binary.BigEndian.AppendUint32(f, id), make([]byte, 16)...)
}

// during runs what takes a while, with datagrams of a flow under way, each of
// which arrives.
func (w *pods) during(port uint16, backend string, what func() error) {
	w.t.Helper()
	done := make(chan error, 1)
	go func() { done <- what() }()
	for n := 0; ; n++ {
		w.asks(port, backend)
		select {
		case err := <-done:
			must(w.t, err)
			w.t.Logf("%d datagrams and answers meanwhile", n)
			w.asks(port, backend)
			return
		default:
		}
	}
}

// tidy: every map is pinned once, and nothing is put aside.
func (w *pods) tidy(names []string) {
	w.t.Helper()
	if got := ls(w.t, mapsDir(w.cfg.BPFFS)); !slices.Equal(got, names) {
		w.t.Errorf("pinned %v, want %v", got, names)
	}
	if _, err := os.Stat(asideDir(w.cfg.BPFFS)); !errors.Is(err, os.ErrNotExist) {
		w.t.Errorf("maps are put aside still: %v", err)
	}
}

// A table of flows of another size takes over the flows of the one before, with
// traffic going on; that new flows go elsewhere shows which is which.
func TestFlowsAreCarriedOver(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		w := newPods(t, cfg)
		d := load(t, cfg)
		w.fill(d, "pwtwo")
		w.attach(d)
		const old, begun = 4000, 4001
		w.asks(old, "pwtwo")
		w.fill(d, "pwthree")
		w.asks(begun, "pwthree")
		names := ls(t, mapsDir(cfg.BPFFS))
		must(t, d.Close())
		for _, size := range []uint32{4096, 512} {
			cfg.FlowsMax, cfg.FlowsNewMax = size, size
			w.during(old, "pwtwo", func() (err error) {
				d, err = Load(context.Background(), cfg)
				return err
			})
			w.tidy(names)
			if d.held || d.set.Flows.MaxEntries() != int(size) {
				t.Errorf("held: %v; a table of %d flows", d.held, d.set.Flows.MaxEntries())
			}
			w.attach(d)
			w.asks(old, "pwtwo")
			w.asks(begun, "pwthree")
			must(t, d.Close())
		}

		// One that begins when all are copied.
		const late = 4002
		cfg.FlowsMax, cfg.FlowsNewMax = 1024, 1024
		d, err := loadThrough(context.Background(), cfg, seams{spec: Spec, step: func(done string) {
			if done == "copied" {
				w.asks(late, "pwthree")
			}
		}})
		must(t, err)
		w.attach(d)
		w.fill(d, "pwtwo")
		w.asks(late, "pwthree")
		w.asks(begun, "pwthree")
		must(t, d.Close())
	})
}

const (
	killAfter = "PODWEIR_TEST_KILL_AFTER"
	killPins  = "PODWEIR_TEST_KILL_BPFFS"
	killSize  = "PODWEIR_TEST_KILL_SIZE"
)

// killedLoad is the process that [TestKilledWhileCarrying] starts, which kills
// itself after a step.
func killedLoad(t *testing.T, after string) {
	size, err := strconv.ParseUint(os.Getenv(killSize), 10, 32)
	must(t, err)
	_, err = loadThrough(context.Background(), Config{BPFFS: os.Getenv(killPins), FlowsMax: uint32(size), FlowsNewMax: 1024}, seams{
		spec: Spec, step: func(done string) {
			if strings.HasPrefix(done, after) {
				must(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
				select {}
			}
		},
	})
	t.Fatalf("not killed after %q: %v", after, err)
}

// Whatever a process has done when it is killed: flows go on, those that begin
// then too, and the next start ends what it began.
func TestKilledWhileCarrying(t *testing.T) {
	if after := os.Getenv(killAfter); after != "" {
		killedLoad(t, after)
		return
	}
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	w := newPods(t, cfg)
	d := load(t, cfg)
	if d.clsact {
		t.Skip("no tcx in this kernel")
	}
	w.fill(d, "pwtwo")
	w.attach(d)
	names := ls(t, mapsDir(cfg.BPFFS))
	ports := []uint16{4000}
	for range 3 {
		w.asks(4000, "pwtwo")
	}
	for i, after := range []string{
		"loaded", "copied", "aside", "pinned", "replaced from_", "replaced all", "copied the rest", "dropped",
	} {
		must(t, d.Close())
		cfg.FlowsMax = 1024 + uint32(i+1)*512
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestKilledWhileCarrying$")
		cmd.Env = append(os.Environ(), killAfter+"="+after, killPins+"="+cfg.BPFFS, killSize+"="+strconv.Itoa(int(cfg.FlowsMax)))
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("after %q: %v\n%s", after, err, out)
		}
		// While some hooks have one table and some the other, flows that begin
		// may need another try; there is nobody here who tries again.
		w.fill(loadedAs(t, cfg), "pwtwo")
		if after != "replaced from_" {
			port := 4001 + uint16(i)
			for range 3 { // the flow is confirmed by then
				w.asks(port, "pwtwo")
			}
			ports = append(ports, port)
		}
		var since unix.Timespec
		must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &since))
		w.asks(ports[0], "pwtwo")
		d = load(t, cfg)
		w.tidy(names)
		// What the hooks have written since is newer than any copy.
		seen, err := lastSeen(d, ports[0])
		must(t, err)
		if seen < uint64(since.Nano()) && after != "replaced from_" {
			t.Errorf("after %q: the table has the flow as it was before", after)
		}
		if n := d.set.Flows.MaxEntries(); n != int(cfg.FlowsMax) {
			t.Errorf("after %q: a table of %d flows", after, n)
		}
		// Whoever is translated anew would go elsewhere.
		w.fill(d, "pwthree")
		for _, port := range ports {
			w.asks(port, "pwtwo")
		}
	}
}

// lastSeen is when the first pod was last heard from that port.
func lastSeen(d *Datapath, port uint16) (at uint64, err error) {
	err = d.set.Flows.Each(func(k maps.FlowKey, f maps.Flow) error {
		if k.Src == maps.ToAddr(podAddr("pwone")) && k.Sport == port {
			at = f.LastSeen
		}
		return nil
	})
	return at, err
}

// loadedAs are the maps that are pinned.
func loadedAs(t *testing.T, cfg Config) *Datapath {
	t.Helper()
	d := &Datapath{}
	for name, at := range map[string]**ebpf.Map{
		bpf.DpMapPwEndpoints: &d.objs.PwEndpoints, bpf.DpMapPwPrefixes: &d.objs.PwPrefixes, bpf.DpMapPwServices: &d.objs.PwServices,
		bpf.DpMapPwBackends: &d.objs.PwBackends, bpf.DpMapPwBackendSt: &d.objs.PwBackendSt,
	} {
		m, err := ebpf.LoadPinnedMap(mapsDir(cfg.BPFFS)+"/"+name, nil)
		must(t, err)
		t.Cleanup(func() { m.Close() })
		*at = m
	}
	return d
}

// otherLayouts is a version whose services and endpoints have longer entries.
func otherLayouts() seams {
	return seams{step: func(string) {}, spec: func(cfg Config) (*ebpf.CollectionSpec, error) {
		spec, err := Spec(cfg)
		if err != nil {
			return nil, err
		}
		for _, name := range []string{bpf.DpMapPwServices, bpf.DpMapPwEndpoints} {
			spec.Maps[name].ValueSize += 8
			spec.Maps[name].Value = nil
		}
		return spec, nil
	}}
}

// Hooks have the programs and maps of before until those that the agent fills
// are filled, and lose nothing.
func TestHeldUntilMapsAreFilled(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		w := newPods(t, cfg)
		d, err := loadThrough(ctx, cfg, otherLayouts())
		must(t, err)
		w.fill(d, "pwtwo")
		w.attach(d)
		const old = 4000
		w.asks(old, "pwtwo")
		names := ls(t, mapsDir(cfg.BPFFS))
		at := one(t, cfg, w.devices["pwone"], false, "from_pod")
		must(t, d.Close())

		var logged bytes.Buffer
		cfg.Log = slog.New(slog.NewTextHandler(&logged, nil))
		// A start that ends before maps are filled changes nothing.
		for range 2 {
			w.during(old, "pwtwo", func() (err error) {
				d, err = Load(ctx, cfg)
				return err
			})
			if !d.held || !strings.Contains(logged.String(), "map="+bpf.DpMapPwServices+" ") {
				t.Fatalf("held: %v; %s", d.held, &logged)
			}
			w.attach(d)
			must(t, d.SetOverlay(ctx, 77))
			if got := one(t, cfg, w.devices["pwone"], false, "from_pod"); got != at {
				t.Fatalf("a program of maps that are not filled is in force: %+v, was %+v", got, at)
			}
			w.asks(4001, "pwtwo")
			w.tidy(names)
			must(t, d.Close())
			cfg.OverlayIfindex = 0
		}
		d = load(t, cfg)
		w.attach(d)
		w.fill(d, "pwtwo")
		w.during(old, "pwtwo", func() error { return d.Switch(ctx) })
		must(t, d.Switch(ctx))
		w.tidy(names)
		if got := one(t, cfg, w.devices["pwone"], false, "from_pod"); got.id == at.id {
			t.Error("the programs of before are in force still")
		}
		// The new maps are.
		w.fill(d, "pwthree")
		w.asks(old, "pwtwo")
		w.asks(4002, "pwthree")
		d = restart(t, d)
		if d.held {
			t.Error("held again, with all maps as they should be")
		}
		w.attach(d)
		w.asks(old, "pwtwo")
	})
}

// Nobody uses the maps of before: there is nothing to wait for.
func TestNothingToHold(t *testing.T) {
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	d, err := loadThrough(context.Background(), cfg, otherLayouts())
	must(t, err)
	must(t, d.Close())
	d = load(t, cfg)
	// from_frag is attached by every load, where there is a reassembly.
	if d.held != (d.cfg.FragIfindex != 0) {
		t.Errorf("held: %v", d.held)
	}
}

// Of all kinds of maps, entries are in the new one; what is there may stay.
func TestCopy(t *testing.T) {
	const many = 10000
	for _, c := range []struct {
		name     string
		from, to ebpf.MapType
		room     uint32
		want     int
	}{
		{"hash", ebpf.Hash, ebpf.Hash, 2 * many, many},
		{"smaller hash", ebpf.Hash, ebpf.Hash, many / 2, many / 2},
		{"LRU", ebpf.LRUHash, ebpf.LRUHash, 4 * many, many},
		{"hash to LRU", ebpf.Hash, ebpf.LRUHash, 4 * many, many},
		{"array", ebpf.Array, ebpf.Array, 2 * many, many},
		{"smaller array", ebpf.Array, ebpf.Array, many / 2, many / 2},
		{"trie", ebpf.LPMTrie, ebpf.LPMTrie, 2 * many, many},
		{"smaller trie", ebpf.LPMTrie, ebpf.LPMTrie, many / 2, many / 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			make := func(typ ebpf.MapType, n uint32) *ebpf.Map {
				ms := &ebpf.MapSpec{Type: typ, KeySize: 4, ValueSize: 4, MaxEntries: n}
				if typ == ebpf.LPMTrie {
					ms.KeySize, ms.Flags = 8, unix.BPF_F_NO_PREALLOC
				}
				m, err := ebpf.NewMap(ms)
				must(t, err)
				t.Cleanup(func() { m.Close() })
				return m
			}
			size := uint32(many)
			if c.from == ebpf.LRUHash {
				size *= 4 // or some go before it is full
			}
			from, to := make(c.from, size), make(c.to, c.room)
			key := func(i uint32) []byte {
				if c.from == ebpf.LPMTrie {
					return binary.BigEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 32), i)
				}
				return binary.NativeEndian.AppendUint32(nil, i)
			}
			for i := range uint32(many) {
				must(t, from.Put(key(i), i+1))
			}
			if !canCopy(from, to) {
				t.Fatal("cannot be copied")
			}
			cp := copier{from: from, to: to}
			must(t, cp.run())
			got := 0
			for i := range uint32(many) {
				var v uint32
				err := to.Lookup(key(i), &v)
				if err == nil && v != i+1 {
					t.Fatalf("entry %d is %d", i, v)
				}
				if err == nil {
					got++
				}
			}
			if got != c.want || cp.written != c.want || cp.lost != many-c.want {
				t.Errorf("%d entries, %d told, %d lost; want %d and %d", got, cp.written, cp.lost, c.want, many-c.want)
			}
			if c.from == ebpf.Array || c.want < many {
				return
			}
			// What has come since, and what is newer there.
			must(t, to.Put(key(1), uint32(77)))
			must(t, to.Delete(key(2)))
			cp = copier{from: from, to: to, missing: true}
			must(t, cp.run())
			var newer, came uint32
			must(t, errors.Join(to.Lookup(key(1), &newer), to.Lookup(key(2), &came)))
			if newer != 77 || came != 3 || cp.written != 1 {
				t.Errorf("%d, %d; %d written", newer, came, cp.written)
			}
		})
	}
}

// Entries that are being removed stay where they are; a full table of flows is
// copied in little time.
func TestCopyFlows(t *testing.T) {
	const many = 100_000
	table := func() *ebpf.Map {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: uint32(binary.Size(maps.FlowKey{})), ValueSize: uint32(binary.Size(maps.Flow{})), MaxEntries: many})
		must(t, err)
		t.Cleanup(func() { m.Close() })
		return m
	}
	m := &moved{name: bpf.DpMapPwFlows, old: table(), new: table(), copies: true, own: true}
	flows := maps.Wrap[maps.FlowKey, maps.Flow](m.old, m.name)
	all := make(map[maps.FlowKey]maps.Flow)
	for i := range uint32(many) {
		k := maps.FlowKey{Sport: uint16(i), Dport: uint16(i >> 16)}
		all[k] = maps.Flow{Created: uint64(i), KeyHash: i % 100}
	}
	must(t, flows.PutAll(all))
	d := &Datapath{log: slog.New(slog.DiscardHandler)}
	began := time.Now()
	must(t, d.copyFirst(m))
	first := time.Since(began)
	must(t, d.copyRest(m))
	t.Logf("%d entries: %v, and %v to look for those that came since", many, first, time.Since(began)-first)
	got, err := maps.Wrap[maps.FlowKey, maps.Flow](m.new, m.name).Dump()
	must(t, err)
	if len(got) != many-many/100 {
		t.Errorf("%d entries", len(got))
	}
	for k, v := range got {
		if v != all[k] || v.KeyHash == 0 {
			t.Fatalf("%+v is %+v", k, v)
		}
	}
}
