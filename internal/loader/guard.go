package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/podweir/podweir/internal/bpf"
)

// A pod can have the kernel leave from_pod out for its packets, which then go
// up the stack unjudged. The guard, a netfilter program before routing, drops
// them, see bpf/guard.c. It asks for what from_pod writes into those that it
// passes, so it comes after the programs of the pods' devices and goes first.

// Pins of its links, named like those of programs at a device that there cannot
// be: an agent from before there was a guard, whose from_pod does not write what
// it asks for, removes such pins first of all, and so the guard.
const (
	guardPin4 = "0-from_pod"
	guardPin6 = "0-to_pod"
)

func isGuardPin(name string) bool { return name == guardPin4 || name == guardPin6 }

// guardPriorities are before anything of the host's does something with such
// packets, and after the reassembly (-400). Two, because the kernel lets no two
// programs have the same: the next version's takes the other one.
func guardPriorities() []int32 { return []int32{-350, -349} }

// errNoGuard is that of a kernel that has no such programs.
var errNoGuard = errors.New("this kernel has no netfilter programs (6.4 does, with CONFIG_NETFILTER_BPF_LINK and BTF): what a pod with NET_ADMIN leads past the programs by an ifb of its own reaches this host's sockets and its routes unjudged")

// guardProgram is loaded once. It has no settings, so a reload leaves it alone.
func (d *Datapath) guardProgram() (*ebpf.Program, error) {
	if d.guard != nil {
		return d.guard, nil
	}
	spec, err := bpf.LoadGuard()
	if err != nil {
		return nil, fmt.Errorf("read embedded guard: %w", err)
	}
	counters := spec.Maps[bpf.DpMapPwMetrics]
	c, err := ebpf.NewCollectionWithOptions(&ebpf.CollectionSpec{
		Maps:      map[string]*ebpf.MapSpec{bpf.DpMapPwMetrics: counters},
		Programs:  spec.Programs,
		Types:     spec.Types,
		ByteOrder: spec.ByteOrder,
	}, ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{bpf.DpMapPwMetrics: d.objs.PwMetrics}})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoGuard, verifierDetail(err))
	}
	defer c.Close()
	d.guard = c.DetachProgram(guardName)
	return d.guard, nil
}

const guardName = "guard"

// verifyGuard attaches and pins the guard where it is not. It returns what was
// missing.
func (d *Datapath) verifyGuard() (repaired []string, err error) {
	if d.noGuard || d.behind || d.held {
		return nil, nil
	}
	p, err := d.guardProgram()
	if err != nil {
		// Asked once: nothing but another kernel changes it.
		d.log.Warn("no guard", "reason", err)
		d.noGuard = true
		return nil, nil
	}
	families := map[string]link.NetfilterProtocolFamily{guardPin4: link.NetfilterProtoIPv4}
	v6, err := d.hasIPv6()
	if err != nil {
		return nil, err
	}
	if v6 {
		families[guardPin6] = link.NetfilterProtoIPv6
	}
	var errs []error
	for name, family := range families {
		why, err := d.wrongGuard(name, p)
		if err == nil && why != "" {
			err = d.attachGuard(name, family, p)
		}
		if err != nil {
			errs = append(errs, err)
		} else if why != "" && d.guarded {
			repaired = append(repaired, fmt.Sprintf("link %s: %s; attached anew", name, why))
		}
	}
	d.guarded = d.guarded || len(errs) == 0
	slices.Sort(repaired)
	return repaired, errors.Join(errs...)
}

// wrongGuard says what is wrong with a pinned link.
func (d *Datapath) wrongGuard(name string, p *ebpf.Program) (why string, err error) {
	l, err := link.LoadPinnedLink(filepath.Join(linksDir(d.cfg.BPFFS), name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return "it is not pinned", nil
	}
	if err != nil {
		return fmt.Sprintf("what is pinned is no link: %v", err), nil
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return "", fmt.Errorf("inspect link %s: %w", name, err)
	}
	if info.Type != link.NetfilterType {
		return "it is another", nil
	}
	have, err := ebpf.NewProgramFromID(info.Program)
	if errors.Is(err, os.ErrNotExist) {
		return "its program is gone", nil
	}
	if err != nil {
		return "", fmt.Errorf("program of link %s: %w", name, err)
	}
	defer have.Close()
	is, err := have.Info()
	if err != nil {
		return "", fmt.Errorf("program of link %s: %w", name, err)
	}
	want, err := p.Info()
	if err != nil {
		return "", fmt.Errorf("program %s: %w", guardName, err)
	}
	if is.Tag != want.Tag {
		return "its program is of another version", nil
	}
	// The counters may have been put aside, see dropIncompatible.
	counts, _ := is.MapIDs()
	if now, _ := want.MapIDs(); !slices.Equal(counts, now) {
		return "it counts where nobody looks", nil
	}
	return "", nil
}

// attachGuard puts a link in the place of what is pinned under its name, which
// is there until the new one is.
func (d *Datapath) attachGuard(name string, family link.NetfilterProtocolFamily, p *ebpf.Program) error {
	var l link.Link
	var err error
	for _, priority := range guardPriorities() {
		l, err = link.AttachNetfilter(link.NetfilterOptions{
			Program: p, ProtocolFamily: family, Hook: link.NetfilterInetPreRouting, Priority: priority,
		})
		if err == nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("attach link %s: %w", name, err)
	}
	defer l.Close()
	pin := filepath.Join(linksDir(d.cfg.BPFFS), name)
	if err := dropPin(pin); err != nil {
		return fmt.Errorf("link %s: replace: %w", name, err)
	}
	if err := l.Pin(pin); err != nil {
		return fmt.Errorf("pin link %s: %w", name, err)
	}
	return nil
}

// removeGuard detaches it: without from_pod nothing would pass.
func removeGuard(bpffs string) error {
	var errs []error
	for _, name := range []string{guardPin4, guardPin6} {
		errs = append(errs, dropPin(filepath.Join(linksDir(bpffs), name)))
	}
	return errors.Join(errs...)
}
