package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// A fragment that is ahead of its datagram's first has no ports. The programs
// leave such datagrams to the kernel, which reassembles what arrives at a
// network namespace, before it is routed, for as long as somebody asks for it:
// conntrack, or a netfilter link with this flag (kernel 6.6). The program of
// the link has nothing to do.

// nfDefrag is BPF_F_NETFILTER_IP_DEFRAG.
const nfDefrag = 1 << 0

// The kernel reassembles at priority -400 and wants whoever asks for it to
// come later. Two links may not have one priority.
const (
	defragPriority = -399
	defragTries    = 16
)

// defragPin starts the names of the pinned links, see [socketPin].
const defragPin = "defrag"

func defragFamilies() map[string]link.NetfilterProtocolFamily {
	return map[string]link.NetfilterProtocolFamily{
		defragPin + "-4": link.NetfilterProtoIPv4,
		defragPin + "-6": link.NetfilterProtoIPv6,
	}
}

func isDefragPin(name string) bool { return defragFamilies()[name] != 0 }

// attachDefrag has the kernel reassemble fragments in this thread's network
// namespace, and says if it does: in both families, or in none. The links of
// an earlier load are replaced, for they may be another namespace's.
func (d *Datapath) attachDefrag() (done bool, err error) {
	if err := d.detachDefrag(); err != nil {
		return false, err
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "pw_defrag", Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1 /* NF_ACCEPT */), asm.Return()},
	})
	if err != nil {
		d.log.Info("no netfilter links in this kernel: fragments ahead of their datagram's first are dropped", "error", err)
		return false, nil
	}
	defer p.Close()
	for name, family := range defragFamilies() {
		l, err := attachDefragTo(p, family)
		if err != nil {
			d.log.Info("this kernel does not reassemble for us: fragments ahead of their datagram's first are dropped", "family", name, "error", err)
			return false, d.detachDefrag()
		}
		d.defrag = append(d.defrag, l)
		if err := l.Pin(filepath.Join(linksDir(d.cfg.BPFFS), name)); err != nil {
			return false, errors.Join(fmt.Errorf("pin link %s: %w", name, err), d.detachDefrag())
		}
	}
	return true, nil
}

func attachDefragTo(p *ebpf.Program, family link.NetfilterProtocolFamily) (l link.Link, err error) {
	for i := range int32(defragTries) {
		l, err = link.AttachNetfilter(link.NetfilterOptions{
			Program: p, ProtocolFamily: family, Hook: link.NetfilterInetPreRouting,
			Priority: defragPriority + i, NetfilterFlags: nfDefrag,
		})
		if !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return l, err
}

// detachDefrag takes off what this or an earlier load has attached.
func (d *Datapath) detachDefrag() error {
	errs := []error{d.closeDefrag()}
	for name := range defragFamilies() {
		path := filepath.Join(linksDir(d.cfg.BPFFS), name)
		errs = append(errs, detachPinned(path))
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove pinned link: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (d *Datapath) closeDefrag() error {
	var errs []error
	for _, l := range d.defrag {
		errs = append(errs, l.Close())
	}
	d.defrag = nil
	return errors.Join(errs...)
}

// verifyDefrag attaches the links anew when their pins are gone, which would
// end them with this process. It returns what was missing.
func (d *Datapath) verifyDefrag() (missing []string, err error) {
	if !d.cfg.Defrag {
		return nil, nil
	}
	for name := range defragFamilies() {
		path := filepath.Join(linksDir(d.cfg.BPFFS), name)
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			missing = append(missing, fmt.Sprintf("link %s, for the reassembly of fragments,", name))
		}
	}
	if len(missing) == 0 {
		return nil, nil
	}
	done, err := d.attachDefrag()
	if err == nil && !done {
		err = errors.New("attach the links for the reassembly of fragments again: the kernel refuses by now; a restart of the agent does without")
	}
	return missing, err
}
