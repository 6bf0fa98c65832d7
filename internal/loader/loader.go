package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/sourceport"
)

// DefaultBPFFS is where maps and links are pinned unless told otherwise.
const DefaultBPFFS = "/sys/fs/bpf/podweir"

// Config says where the datapath is pinned and how its programs are set up.
// The zero value of a field means its default.
type Config struct {
	BPFFS          string // folder on a bpffs; created
	OverlayIfindex int    // of podweir.vxlan; 0 = nothing can be tunnelled yet
	VNI            uint32 // default 4096
	Mark           uint32 // skb mark bit of decided packets, default 0x1000
	NodePortMin    uint16 // range of NodePorts, default 30000-32767
	NodePortMax    uint16
	SNAT           bool               // callers of external frontends go on under this node's address
	DSR            bool               // a backend on another node answers clients outside by itself
	EventsPerSec   uint32             // events about drops, per CPU, default 100
	NoEvents       bool               // none at all
	NetnsCookie    uint64             // whose sockets are translated; default: this thread's namespace's
	FlowsMax       uint32             // entries of pw_flows, two a flow
	FlowsNewMax    uint32             // entries of pw_flows_new
	ForceClsact    bool               // do not use tcx even where the kernel has it
	FragIfindex    int                // of podweir.frag; 0 = nothing is reassembled; Load finds out
	Sysctls        string             // where they are set, default /proc/sys
	NoMasquerade4  bool               // pods' packets leave under the pods' own addresses
	NoMasquerade6  bool               // the same of IPv6
	Plain          bool               // some of the maps' addresses and prefixes are PeerPlain
	SourcePorts    []sourceport.Range // to translate sources to, default 1024-29999 and 61000-65535
	Log            *slog.Logger
}

// Datapath is the loaded datapath. Its methods may be called concurrently.
type Datapath struct {
	cfg Config
	log *slog.Logger

	mu           sync.Mutex
	objs         bpf.DpObjects
	set          maps.Set
	attached     map[hookKey]*attachment
	clsact       bool
	cgroup       string // whose sockets are translated, "" = none
	sockets      map[socketHook]link.Link
	frag         fragPrograms
	noReassembly bool // this kernel cannot
	guard        *ebpf.Program
	noGuard      bool // this kernel cannot
	guarded      bool // the guard has been attached, or found so
	behind       bool // some hooks have programs of before the last reload
	moved        []*moved
	held         bool // the hooks have programs of an earlier process until Switch
	seams
}

// seams are where tests look in.
type seams struct {
	spec func(Config) (*ebpf.CollectionSpec, error)
	step func(string) // told what has just been done for maps of another layout
}

// Load loads the programs, reusing the pinned maps, and replaces the
// programs of the links it finds pinned. For pinned maps whose layout differs
// from the programs' there are new ones. Their entries are carried over where
// they fit. If they do not, and it is the agent that writes them, hooks keep
// the programs that they have until [Datapath.Switch].
func Load(ctx context.Context, cfg Config) (*Datapath, error) {
	return loadThrough(ctx, cfg, seams{spec: Spec, step: func(string) {}})
}

func loadThrough(ctx context.Context, cfg Config, s seams) (*Datapath, error) {
	if cfg.BPFFS == "" {
		cfg.BPFFS = DefaultBPFFS
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := Prepare(cfg.BPFFS); err != nil {
		return nil, err
	}
	if cfg.NetnsCookie == 0 {
		var err error
		if cfg.NetnsCookie, err = netnsCookie(); err != nil {
			return nil, err
		}
	}
	for _, dir := range []string{mapsDir(cfg.BPFFS), linksDir(cfg.BPFFS), programsDir(cfg.BPFFS)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("create pin folder %s: %w", dir, err)
		}
	}
	d := &Datapath{
		cfg: cfg, log: cfg.Log, seams: s,
		attached: make(map[hookKey]*attachment), clsact: cfg.ForceClsact,
		sockets: make(map[socketHook]link.Link),
	}
	if err := d.startReassembly(); err != nil {
		return nil, err
	}
	if err := d.start(ctx); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// start loads the programs and has them in force, or ready for Switch.
func (d *Datapath) start(ctx context.Context) error {
	spec, err := d.spec(d.cfg)
	if err != nil {
		return err
	}
	if err := errors.Join(d.resume(spec), d.findMoved(spec)); err != nil {
		return err
	}
	// What the last load replaced, unless its process has done this.
	if err := d.dropCalls(); err != nil {
		d.log.Warn("slow paths of earlier loads stay for now", "error", err)
	}
	if err := loadInto(spec, mapsDir(d.cfg.BPFFS), d.replacements(), &d.objs); err != nil {
		return fmt.Errorf("load datapath into the kernel: %w", verifierDetail(err))
	}
	d.set = maps.NewSet(&d.objs.DpMaps)
	d.clsact = d.clsact || !d.haveTCX()
	if err := d.pinCalls(d.objs.PwCalls); err != nil {
		return err
	}
	d.step("loaded")
	if err := d.adoptLinks(ctx); err != nil {
		return err
	}
	if d.clsact && len(d.moved) > 0 {
		if err := d.adoptFilters(); err != nil {
			return err
		}
	}
	if d.held = d.mustHold(); !d.held {
		if err := d.takeOver(); err != nil {
			return err
		}
	}
	return d.attachFrag()
}

// Spec returns the embedded datapath with cfg's settings written into it.
func Spec(cfg Config) (*ebpf.CollectionSpec, error) {
	spec, err := bpf.LoadDp()
	if err != nil {
		return nil, fmt.Errorf("read embedded datapath: %w", err)
	}
	set := func(name string, wanted bool, v any) {
		if !wanted || err != nil {
			return
		}
		if e := spec.Variables[name].Set(v); e != nil {
			err = fmt.Errorf("set constant %s to %v: %w", name, v, e)
		}
	}
	set("cfg_overlay_ifindex", cfg.OverlayIfindex != 0, uint32(cfg.OverlayIfindex))
	set("cfg_vni", cfg.VNI != 0, cfg.VNI)
	set("cfg_mark", cfg.Mark != 0, cfg.Mark)
	set("cfg_netns_cookie", cfg.NetnsCookie != 0, cfg.NetnsCookie)
	set("cfg_events_per_sec", cfg.EventsPerSec != 0, cfg.EventsPerSec)
	set("cfg_events_per_sec", cfg.NoEvents, uint32(0))
	set("cfg_masquerade", true, masqueraded(cfg))
	set("cfg_plain", cfg.Plain, uint8(1))
	set("cfg_snat", cfg.SNAT, uint8(1))
	set("cfg_frag_ifindex", cfg.FragIfindex != 0, uint32(cfg.FragIfindex))
	set("cfg_dsr", cfg.DSR, uint8(1))
	set("cfg_nodeport_min", cfg.NodePortMin != 0, cfg.NodePortMin)
	set("cfg_nodeport_max", cfg.NodePortMin != 0, cfg.NodePortMax)
	if len(cfg.SourcePorts) > sourceport.Max {
		return nil, fmt.Errorf("source ports %v: more than %d ranges", cfg.SourcePorts, sourceport.Max)
	}
	set("cfg_ports", len(cfg.SourcePorts) > 0, portRanges(cfg.SourcePorts))
	if err != nil {
		return nil, err
	}
	if cfg.FlowsMax != 0 {
		spec.Maps[bpf.DpMapPwFlows].MaxEntries = cfg.FlowsMax
	}
	if cfg.FlowsNewMax != 0 {
		spec.Maps[bpf.DpMapPwFlowsNew].MaxEntries = cfg.FlowsNewMax
	}
	return spec, nil
}

// masqueraded are the families (enum pw_families) whose pods are.
func masqueraded(cfg Config) uint8 {
	var out bpf.DpPwFamilies
	if !cfg.NoMasquerade4 {
		out |= bpf.DpPwFamiliesPW_IPV4
	}
	if !cfg.NoMasquerade6 {
		out |= bpf.DpPwFamiliesPW_IPV6
	}
	return uint8(out)
}

// portRanges is what the programs know of ranges of ports.
func portRanges(list []sourceport.Range) (out [sourceport.Max]bpf.DpPwPortRange) {
	for i, r := range list {
		out[i] = bpf.DpPwPortRange{First: r.Min, Count: uint16(r.Len())}
	}
	return out
}

// Maps returns the datapath's maps.
func (d *Datapath) Maps() maps.Set { return d.set }

// SetOverlay makes the programs send through another tunnel device: they are
// loaded anew with its index and replace the attached ones in place.
func (d *Datapath) SetOverlay(ctx context.Context, ifindex int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if ifindex == d.cfg.OverlayIfindex && !d.behind {
		return nil
	}
	cfg := d.cfg
	cfg.OverlayIfindex = ifindex
	if err := d.reload(cfg); err != nil {
		return fmt.Errorf("tunnel device %d: %w", ifindex, err)
	}
	return nil
}

// SetSourcePorts makes the programs translate the sources of new flows to
// other ports, in the same way.
func (d *Datapath) SetSourcePorts(ctx context.Context, ports []sourceport.Range) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Equal(ports, d.cfg.SourcePorts) && !d.behind {
		return nil
	}
	cfg := d.cfg
	cfg.SourcePorts = slices.Clone(ports)
	if err := d.reload(cfg); err != nil {
		return fmt.Errorf("source ports %v: %w", ports, err)
	}
	return nil
}

// reload puts programs with the settings of cfg in place of those attached.
// Those that stay where they are, with an error, are tried again by the next.
func (d *Datapath) reload(cfg Config) error {
	spec, err := d.spec(cfg)
	if err != nil {
		return err
	}
	var objs bpf.DpObjects
	if err := loadInto(spec, mapsDir(cfg.BPFFS), d.replacements(), &objs); err != nil {
		return fmt.Errorf("load datapath anew: %w", verifierDetail(err))
	}
	if err := d.pinCalls(objs.PwCalls); err != nil {
		return errors.Join(err, objs.Close())
	}
	old := d.objs.DpPrograms
	// The maps stay those already handed out: same pins, same kernel maps.
	// The old programs' slow path has its pin for as long as they need it.
	d.objs.PwCalls, objs.PwCalls = objs.PwCalls, d.objs.PwCalls
	if err := objs.DpMaps.Close(); err != nil {
		return fmt.Errorf("close duplicate map handles: %w", err)
	}
	d.objs.DpPrograms = objs.DpPrograms
	d.cfg = cfg
	if d.held {
		return old.Close() // [Datapath.Switch] brings these
	}
	err = d.replaceAll()
	d.behind = err != nil
	return errors.Join(err, d.pinPrograms(), old.Close())
}

// replaceAll puts the programs in place of those of all hooks.
func (d *Datapath) replaceAll() error {
	var errs []error
	for _, a := range d.attached {
		if err := a.replace(d.program(a.key.hook)); err != nil {
			errs = append(errs, err)
		}
		d.step("replaced " + a.key.hook.program)
	}
	for h, l := range d.sockets {
		if err := l.Update(d.socketProgram(h)); err != nil {
			errs = append(errs, fmt.Errorf("replace program %s of cgroup %s: %w", h.program, d.cgroup, err))
		}
	}
	return errors.Join(errs...)
}

// pinPrograms pins what is run by others than the agent, in place of what an
// earlier load has pinned.
func (d *Datapath) pinPrograms() error {
	path := filepath.Join(programsDir(d.cfg.BPFFS), maps.AskProgram)
	next := path + "_new" // no dots on a bpffs
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove what an earlier load left: %w", err)
	}
	if err := d.objs.Ask.Pin(next); err != nil {
		return fmt.Errorf("pin program %s: %w", path, err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("replace pinned program: %w", err)
	}
	return nil
}

// Close closes the handles. Pinned programs and maps stay: traffic goes on.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, a := range d.attached {
		errs = append(errs, a.close())
	}
	d.attached = make(map[hookKey]*attachment)
	for _, l := range d.sockets {
		errs = append(errs, l.Close())
	}
	d.sockets = make(map[socketHook]link.Link)
	if d.guard != nil {
		errs = append(errs, d.guard.Close())
		d.guard = nil
	}
	for _, m := range d.moved {
		errs = append(errs, m.close())
	}
	d.moved = nil
	return errors.Join(append(errs, d.frag.close(), d.objs.Close())...)
}

// Sweep removes those of the flows named that are idle for longer than their
// timeout, in both directions, when the kernel looks at them. Check and
// removal exclude a packet that revives a flow meanwhile. It returns how many
// were removed.
func (d *Datapath) Sweep(keys []maps.FlowKey) (removed int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const max = 64 // PW_SWEEP_MAX
	for chunk := range slices.Chunk(keys, max) {
		buf := make([]byte, 14, 14+len(chunk)*int(unsafe.Sizeof(maps.FlowKey{})))
		if buf, err = binary.Append(buf, binary.NativeEndian, chunk); err != nil {
			return removed, fmt.Errorf("sweep flows: encode keys: %w", err)
		}
		n, err := d.objs.Sweep.Run(&ebpf.RunOptions{Data: buf})
		if err != nil {
			return removed, fmt.Errorf("sweep flows: run program: %w", err)
		}
		removed += int(n)
	}
	return removed, nil
}

// Cleanup removes everything that Load and the Attach methods left under a
// bpffs folder: links (which detaches), filters, maps, the folder itself. A
// folder that is not there is no error.
func Cleanup(bpffs string) error {
	errs := []error{removeGuard(bpffs), removeReassembly(bpffs)}
	if _, err := os.Stat(bpffs); errors.Is(err, os.ErrNotExist) {
		return errors.Join(append(errs, removeFilters())...)
	}
	for _, dir := range []string{linksDir(bpffs), programsDir(bpffs), callsDir(bpffs), asideDir(bpffs), mapsDir(bpffs)} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("list %s: %w", dir, err))
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if dir == linksDir(bpffs) {
				errs = append(errs, detachPinned(path))
			}
			errs = append(errs, os.Remove(path))
		}
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	// The folder may be the mount point of a bpffs of its own.
	if err := os.Remove(bpffs); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, removeFilters())...)
}

// detachPinned detaches the link pinned at path. What is no link is only a
// file to remove.
func detachPinned(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return nil
	}
	if err := errors.Join(detachLink(l), l.Close()); err != nil {
		return fmt.Errorf("detach link %s: %w", path, err)
	}
	return nil
}

func mapsDir(bpffs string) string     { return filepath.Join(bpffs, "maps") }
func linksDir(bpffs string) string    { return filepath.Join(bpffs, "links") }
func programsDir(bpffs string) string { return filepath.Join(bpffs, "programs") }

// Prepare makes the pin folder, or says why nothing can be pinned there.
func Prepare(bpffs string) error {
	near := bpffs
	for {
		if _, err := os.Stat(near); err == nil || near == filepath.Dir(near) {
			break
		}
		near = filepath.Dir(near)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(near, &st); err != nil {
		return fmt.Errorf("inspect pin folder %s: %w", near, err)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("pin folder %s is not on a bpffs: mount one first, for the default folder with 'mount -t bpf bpf /sys/fs/bpf'", bpffs)
	}
	if err := os.MkdirAll(bpffs, 0o700); err != nil {
		return fmt.Errorf("create pin folder %s: %w", bpffs, err)
	}
	return nil
}

// Loaded tells whether a datapath is pinned under the folder: not after a
// reboot, nor on a node that is new.
func Loaded(bpffs string) bool {
	_, err := os.Stat(mapsDir(bpffs))
	return err == nil
}

// verifierDetail keeps the verifier's last lines, which name the cause.
func verifierDetail(err error) error {
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) {
		return fmt.Errorf("%w\n%-20v", err, ve)
	}
	return err
}
