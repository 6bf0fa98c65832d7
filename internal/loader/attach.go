package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// hook is a program and the side of the device it sits on.
type hook struct {
	program string
	egress  bool
	xdp     bool // generic, before all others
}

var (
	hookFromPod     = hook{program: "from_pod"}
	hookJudgePod    = hook{program: "from_pod_judge"} // in place of from_pod, see FilterPod
	hookSendPod     = hook{program: "from_pod_send"}
	hookWire        = hook{program: "from_pod_wire", xdp: true}
	hookToPod       = hook{program: "to_pod", egress: true}
	hookFromNetdev  = hook{program: "from_netdev"}
	hookFromOverlay = hook{program: "from_overlay"}
	hookToOverlay   = hook{program: "to_overlay", egress: true}
	hookToNetdev    = hook{program: "to_netdev", egress: true}
	hookToLo        = hook{program: "to_lo", egress: true}
	hookFromFrag    = hook{program: "from_frag"}
)

func allHooks() []hook {
	return []hook{hookFromPod, hookJudgePod, hookSendPod, hookWire, hookToPod, hookFromNetdev, hookToNetdev, hookFromOverlay, hookToOverlay, hookToLo, hookFromFrag}
}

func hookByName(program string) (hook, bool) {
	for _, h := range allHooks() {
		if h.program == program {
			return h, true
		}
	}
	return hook{}, false
}

type hookKey struct {
	ifindex int
	hook    hook
}

func (k hookKey) pin(bpffs string) string {
	return filepath.Join(linksDir(bpffs), fmt.Sprintf("%d-%s", k.ifindex, k.hook.program))
}

// attachment is one program on one hook. link is nil when it is a filter.
type attachment struct {
	key    hookKey
	device string
	link   link.Link
}

func (a *attachment) String() string {
	return fmt.Sprintf("program %s on device %s (index %d)", a.key.hook.program, a.device, a.key.ifindex)
}

func (a *attachment) replace(p *ebpf.Program) error {
	if a.link == nil {
		return replaceFilter(a.key, p)
	}
	if err := a.link.Update(p); err != nil {
		return fmt.Errorf("replace %v: %w", a, err)
	}
	return nil
}

func (a *attachment) close() error {
	if a.link == nil {
		return nil
	}
	return a.link.Close()
}

// AttachPod attaches from_pod, or what [Datapath.FilterPod] has put in its
// place, and to_pod to a pod's host-side veth.
func (d *Datapath) AttachPod(ctx context.Context, ifindex int, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	from := hookFromPod
	if _, ok := d.attached[hookKey{ifindex, hookJudgePod}]; ok {
		from = hookJudgePod
	}
	return d.attachAll(ctx, ifindex, name, from, hookToPod)
}

// AttachNetdev attaches from_netdev and to_netdev to a device of the node.
func (d *Datapath) AttachNetdev(ctx context.Context, ifindex int, name string) error {
	return d.attach(ctx, ifindex, name, hookFromNetdev, hookToNetdev)
}

// AttachLoopback attaches to_lo to lo.
func (d *Datapath) AttachLoopback(ctx context.Context, ifindex int, name string) error {
	return d.attach(ctx, ifindex, name, hookToLo)
}

// AttachOverlay attaches from_overlay and to_overlay to podweir.vxlan.
func (d *Datapath) AttachOverlay(ctx context.Context, ifindex int, name string) error {
	return d.attach(ctx, ifindex, name, hookFromOverlay, hookToOverlay)
}

func (d *Datapath) attach(ctx context.Context, ifindex int, name string, hooks ...hook) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attachAll(ctx, ifindex, name, hooks...)
}

func (d *Datapath) attachAll(ctx context.Context, ifindex int, name string, hooks ...hook) error {
	for _, h := range hooks {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("attach to device %s: %w", name, err)
		}
		if err := d.attachOne(hookKey{ifindex, h}, name); err != nil {
			return err
		}
	}
	return nil
}

func (d *Datapath) attachOne(key hookKey, name string) error {
	if a, ok := d.attached[key]; ok {
		a.device = name
		alive, err := d.alive(a)
		if err != nil || alive {
			return err
		}
		d.forget(a)
	}
	a := &attachment{key: key, device: name}
	if d.clsact && !key.hook.xdp {
		return d.attachFilter(a)
	}
	l, err := d.attachLink(key)
	if err != nil {
		return fmt.Errorf("attach %v: %w", a, err)
	}
	pin := key.pin(d.cfg.BPFFS)
	if err := os.Remove(pin); err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(fmt.Errorf("remove stale pin %s: %w", pin, err), l.Close())
	}
	if err := l.Pin(pin); err != nil {
		return errors.Join(fmt.Errorf("pin %v at %s: %w", a, pin, err), l.Close())
	}
	a.link = l
	d.attached[key] = a
	return nil
}

func (d *Datapath) attachLink(key hookKey) (link.Link, error) {
	if key.hook.xdp {
		return link.AttachXDP(link.XDPOptions{
			Interface: key.ifindex, Program: d.program(key.hook), Flags: link.XDPGenericMode,
		})
	}
	attach := ebpf.AttachTCXIngress
	if key.hook.egress {
		attach = ebpf.AttachTCXEgress
	}
	return link.AttachTCX(link.TCXOptions{
		Interface: key.ifindex, Program: d.program(key.hook), Attach: attach, Anchor: link.Head(),
	})
}

func (d *Datapath) attachFilter(a *attachment) error {
	if a.key.hook == hookFromPod {
		// Filters outlive the process unknown: what FilterPod has done stays.
		judge := hookKey{a.key.ifindex, hookJudgePod}
		is, err := hasFilter(judge)
		if err != nil {
			return err
		}
		if is {
			a.key = judge
		}
	}
	if err := replaceFilter(a.key, d.program(a.key.hook)); err != nil {
		return fmt.Errorf("attach %v: %w", a, err)
	}
	d.attached[a.key] = a
	return nil
}

// Detach removes our programs from a device, which may be gone already.
func (d *Datapath) Detach(ctx context.Context, ifindex int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for key, a := range d.attached {
		if key.ifindex == ifindex {
			errs = append(errs, d.detach(a))
		}
	}
	return errors.Join(errs...)
}

func (d *Datapath) detach(a *attachment) error {
	var errs []error
	if a.link == nil {
		errs = append(errs, deleteFilter(a.key))
	} else if err := detachLink(a.link); err != nil {
		errs = append(errs, fmt.Errorf("detach %v: %w", a, err))
	} else if err := os.Remove(a.key.pin(d.cfg.BPFFS)); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, fmt.Errorf("unpin %v: %w", a, err))
	}
	delete(d.attached, a.key)
	return errors.Join(append(errs, a.close())...)
}

// detachLink takes a link's program off its hook at once. Removing the pin
// alone leaves it there until the kernel gets round to freeing the link.
func detachLink(l link.Link) error {
	if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
		return err
	}
	return nil
}

// forget drops a dead attachment without touching the device.
func (d *Datapath) forget(a *attachment) {
	if a.link != nil {
		os.Remove(a.key.pin(d.cfg.BPFFS)) // absent is fine, and a new pin replaces it
		a.link.Close()
	}
	delete(d.attached, a.key)
}

// alive reports whether an attachment is still in force on its device. A
// link that lost its pin is pinned again: without it a restart would detach.
func (d *Datapath) alive(a *attachment) (bool, error) {
	if a.link == nil {
		return hasFilter(a.key)
	}
	info, err := a.link.Info()
	if err != nil {
		return false, fmt.Errorf("inspect %v: %w", a, err)
	}
	tcx, xdp := info.TCX(), info.XDP()
	there := tcx != nil && int(tcx.Ifindex) == a.key.ifindex || xdp != nil && int(xdp.Ifindex) == a.key.ifindex
	if !there {
		return false, nil
	}
	pin := a.key.pin(d.cfg.BPFFS)
	if _, err := os.Stat(pin); errors.Is(err, os.ErrNotExist) {
		// The link remembers its pin and would not make the same one again.
		if err := errors.Join(a.link.Unpin(), a.link.Pin(pin)); err != nil {
			return true, fmt.Errorf("pin %v again at %s: %w", a, pin, err)
		}
	}
	return true, nil
}

// Verify looks at every attachment: what was detached is attached again, what
// belonged to a vanished device is forgotten. It returns what it repaired. What
// only programs that have been replaced needed is removed.
func (d *Datapath) Verify(ctx context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var repaired []string
	var errs []error
	for _, a := range d.attached {
		if ctx.Err() != nil {
			break
		}
		alive, err := d.alive(a)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if alive {
			continue
		}
		var gone netlink.LinkNotFoundError
		if _, err := netlink.LinkByIndex(a.key.ifindex); errors.As(err, &gone) {
			d.forget(a)
			continue
		}
		d.forget(a)
		if err := d.attachOne(a.key, a.device); err != nil {
			errs = append(errs, err)
			continue
		}
		repaired = append(repaired, fmt.Sprintf("%v was detached, attached again", a))
	}
	missing, err := d.ensureSockets(ctx)
	for _, what := range missing {
		repaired = append(repaired, what+" was detached, attached again")
	}
	made, fragErr := d.verifyReassembly()
	repaired = append(repaired, made...)
	guarded, guardErr := d.verifyGuard()
	repaired = append(repaired, guarded...)
	errs = append(errs, err, fragErr, guardErr, d.pinCalls(d.objs.PwCalls), d.dropCalls())
	return repaired, errors.Join(errs...)
}

// adoptLinks takes over the links of an earlier process: those of vanished
// devices are unpinned, the others have their programs still.
func (d *Datapath) adoptLinks(ctx context.Context) error {
	dir := linksDir(d.cfg.BPFFS)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list pinned links: %w", err)
	}
	for _, e := range entries {
		if isFragPin(e.Name()) || isGuardPin(e.Name()) {
			continue // not ours to replace, see ensureReassembly and verifyGuard
		}
		path := filepath.Join(dir, e.Name())
		key, ok := parsePin(e.Name())
		socket, isSocket := parseSocketPin(e.Name())
		if !ok && !isSocket {
			d.log.Warn("unknown file among the pinned links; left alone", "path", path)
			continue
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			// One bad file must not keep the node down. Should a program of
			// ours hang behind it, attaching anew reports it by name.
			d.log.Error("cannot open a pinned link; left alone, remove the file if it is no link", "path", path, "error", err)
			continue
		}
		if isSocket {
			if err := d.adoptSocket(socket, l); err != nil {
				return err
			}
			continue
		}
		a := &attachment{key: key, device: strconv.Itoa(key.ifindex), link: l}
		if dev, err := netlink.LinkByIndex(key.ifindex); err == nil {
			a.device = dev.Attrs().Name
		}
		alive, err := d.alive(a)
		if err != nil {
			return errors.Join(fmt.Errorf("take over %v: %w", a, err), l.Close())
		}
		d.attached[key] = a
		if !alive {
			d.forget(a)
		}
	}
	return nil
}

func parsePin(name string) (hookKey, bool) {
	index, program, ok := strings.Cut(name, "-")
	if !ok {
		return hookKey{}, false
	}
	ifindex, err := strconv.Atoi(index)
	h, known := hookByName(program)
	return hookKey{ifindex, h}, err == nil && known
}

func (d *Datapath) program(h hook) *ebpf.Program {
	switch h {
	case hookFromPod:
		return d.objs.FromPod
	case hookJudgePod:
		return d.objs.FromPodJudge
	case hookSendPod:
		return d.objs.FromPodSend
	case hookWire:
		return d.objs.FromPodWire
	case hookToPod:
		return d.objs.ToPod
	case hookFromNetdev:
		return d.objs.FromNetdev
	case hookFromOverlay:
		return d.objs.FromOverlay
	case hookToOverlay:
		return d.objs.ToOverlay
	case hookToNetdev:
		return d.objs.ToNetdev
	case hookToLo:
		return d.objs.ToLo
	case hookFromFrag:
		return d.objs.FromFrag
	}
	return nil
}
