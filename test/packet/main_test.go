package packet

import (
	"fmt"
	"net"
	"os"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/testns"
)

// Devices of the test's namespace. Their indexes stand for the pods' veths,
// the node's device and the tunnel's.
const (
	devClient  = "pwclient"
	devLocal   = "pwlocal"
	devThird   = "pwthird"
	devWire    = "eth0"
	devWire2   = "eth1"
	devOverlay = "podweir.vxlan"
	devFrag    = "podweir.frag"
	devLo      = "lo"
)

func TestMain(m *testing.M) { testns.Main(m, makeDevices) }

func makeDevices() error {
	for _, name := range []string{"lo", devClient, devLocal, devThird, devWire, devWire2, devOverlay, devFrag} {
		if name != "lo" {
			err := netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "x" + name,
			})
			if err != nil {
				return fmt.Errorf("add device %s: %w", name, err)
			}
			if err := setUp("x" + name); err != nil {
				return err
			}
		}
		if err := setUp(name); err != nil {
			return err
		}
	}
	for _, path := range []string{
		"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding",
	} {
		if err := os.WriteFile(path, []byte("1"), 0); err != nil {
			return fmt.Errorf("switch forwarding on: %w", err)
		}
	}
	return addRoutes()
}

func setUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return nil
}

// addRoutes gives the node its addresses and the way to the world.
func addRoutes() error {
	l, err := netlink.LinkByName(devWire)
	if err != nil {
		return fmt.Errorf("find device %s: %w", devWire, err)
	}
	for _, f := range families() {
		bits := 24
		if f.v6 {
			bits = 64
		}
		ip := &net.IPNet{IP: f.nodeA.AsSlice(), Mask: net.CIDRMask(bits, f.nodeA.BitLen())}
		if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ip, Flags: 0x02 /* nodad */}); err != nil {
			return fmt.Errorf("add address %v: %w", ip, err)
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: f.router.AsSlice()}); err != nil {
			return fmt.Errorf("add default route by %v: %w", f.router, err)
		}
	}
	return nil
}

type device struct {
	index int
	mac   net.HardwareAddr
}

func findDevices() (map[string]device, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	out := make(map[string]device)
	for _, l := range links {
		out[l.Attrs().Name] = device{l.Attrs().Index, l.Attrs().HardwareAddr}
	}
	return out, nil
}

// reassembles stands for the index of podweir.frag.
const reassembles = -1

// datapath is one loaded copy of the programs with maps of its own.
type datapath struct {
	objs  bpf.DpObjects
	set   maps.Set
	devs  map[string]device
	gates map[tunnelKey]*ebpf.Program // see gate
	jump  *ebpf.Map
	cut   map[hook]*ebpf.Program
	last  map[row]uint64 // counters after the last run, nil if not known
}

// standard is the copy that most tests share; newWorld empties it first.
var standard = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 32768, FlowsNewMax: 32768})
})

func load(cfg loader.Config) (*datapath, error) {
	return loadAs(cfg, func(*ebpf.CollectionSpec) {})
}

// loadAs loads a datapath that change has had its way with.
func loadAs(cfg loader.Config, change func(*ebpf.CollectionSpec)) (*datapath, error) {
	d := &datapath{gates: make(map[tunnelKey]*ebpf.Program), cut: make(map[hook]*ebpf.Program)}
	var err error
	if d.devs, err = findDevices(); err != nil {
		return nil, err
	}
	cfg.OverlayIfindex = d.devs[devOverlay].index
	if cfg.FragIfindex == reassembles {
		cfg.FragIfindex = d.devs[devFrag].index
	}
	spec, err := loader.Spec(cfg)
	if err != nil {
		return nil, err
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	// A test sends more in a second than errors are due; see TestErrorsAreLimited.
	if err := spec.Variables["cfg_errors_per_sec"].Set(uint32(0)); err != nil {
		return nil, fmt.Errorf("set the limit of errors: %w", err)
	}
	// Nobody reads them; see TestEvents.
	if err := spec.Variables["cfg_events_per_sec"].Set(uint32(0)); err != nil {
		return nil, fmt.Errorf("switch events off: %w", err)
	}
	change(spec)
	opts := &ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}}
	if err := spec.LoadAndAssign(&d.objs, opts); err != nil {
		return nil, fmt.Errorf("load datapath: %w", err)
	}
	d.set = maps.NewSet(&d.objs.DpMaps)
	d.jump, err = ebpf.NewMap(&ebpf.MapSpec{
		Name: "jump", Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 8,
		Contents: []ebpf.MapKV{{Key: uint32(0), Value: d.objs.FromOverlay}},
	})
	if err != nil {
		return nil, fmt.Errorf("make jump table: %w", err)
	}
	return d, nil
}

func (d *datapath) program(h hook) *ebpf.Program {
	switch h {
	case fromPod:
		return d.objs.FromPod
	case toPod:
		return d.objs.ToPod
	case fromNetdev:
		return d.objs.FromNetdev
	case fromOverlay:
		return d.objs.FromOverlay
	case toNetdev:
		return d.objs.ToNetdev
	case toLo:
		return d.objs.ToLo
	case fromFrag:
		return d.objs.FromFrag
	}
	return d.objs.ToOverlay
}

// tunnelKey is what the tunnel device says about a received frame.
type tunnelKey struct {
	peer maps.Addr
	vni  uint32
}

// gate is a program that gives the frame a tunnel key and goes on with
// from_overlay. The "local" address of a key that a program sets is stored
// where the kernel's device stores the remote one of a frame it received.
func (d *datapath) gate(k tunnelKey) (*ebpf.Program, error) {
	if p, ok := d.gates[k]; ok {
		return p, nil
	}
	// struct bpf_tunnel_key: id 0, remote 4..20, tos 20, ttl 21, ext 22,
	// label 24, local 28..44.
	const size, stack = 44, -48
	ins := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	word := func(off int16, v uint32) {
		ins = append(ins, asm.StoreImm(asm.R10, stack+off, int64(int32(v)), asm.Word))
	}
	for off := int16(0); off < 48; off += 4 {
		word(off, 0)
	}
	word(0, k.vni)
	flags := int32(0)
	b := k.peer.B
	if addr := maps.FromAddr(k.peer); addr.Is4() {
		// Host order.
		word(28, uint32(b[12])<<24|uint32(b[13])<<16|uint32(b[14])<<8|uint32(b[15]))
	} else {
		flags = 1 // BPF_F_TUNINFO_IPV6
		for i := 0; i < 16; i++ {
			ins = append(ins, asm.StoreImm(asm.R10, stack+28+int16(i), int64(b[i]), asm.Byte))
		}
	}
	ins = append(ins,
		asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, stack),
		asm.Mov.Imm(asm.R3, size), asm.Mov.Imm(asm.R4, flags),
		asm.FnSkbSetTunnelKey.Call(),
		asm.JNE.Imm(asm.R0, 0, "failed"),
		asm.Mov.Reg(asm.R1, asm.R6), asm.LoadMapPtr(asm.R2, d.jump.FD()), asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, gateFailed).WithSymbol("failed"),
		asm.Return(),
	)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "gate", Type: ebpf.SchedCLS, Instructions: ins, License: "GPL",
	})
	if err != nil {
		return nil, fmt.Errorf("load tunnel key program: %w", err)
	}
	d.gates[k] = p
	return p, nil
}

const gateFailed = 77

// cutter is a program that shortens the frame to what the first word of its
// control buffer says, and goes on with p. It stands for what arrives short
// on the wire; a test run does not take such frames.
func (d *datapath) cutter(h hook, p *ebpf.Program) (*ebpf.Program, error) {
	slot := uint32(h) + 1
	if err := d.jump.Put(slot, p); err != nil {
		return nil, fmt.Errorf("fill jump table: %w", err)
	}
	if c, ok := d.cut[h]; ok {
		return c, nil
	}
	const cb = 48 // struct __sk_buff
	c, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "cutter", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R2, asm.R1, cb, asm.Word), asm.Mov.Imm(asm.R3, 0),
			asm.FnSkbChangeTail.Call(),
			asm.JNE.Imm(asm.R0, 0, "failed"),
			asm.Mov.Reg(asm.R1, asm.R6), asm.LoadMapPtr(asm.R2, d.jump.FD()), asm.Mov.Imm(asm.R3, int32(slot)),
			asm.FnTailCall.Call(),
			asm.Mov.Imm(asm.R0, gateFailed).WithSymbol("failed"),
			asm.Return(),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("load cutting program: %w", err)
	}
	d.cut[h] = c
	return c, nil
}
