package maps

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// AskProgram is the name of the program that answers, in the folder of
// pinned programs.
const AskProgram = "ask"

// Asker has the datapath decide about packets that there are none of. It
// changes nothing: no flow, no counter.
type Asker struct {
	p *ebpf.Program
	// dir is locked while the program runs, because its working space is one
	// to a CPU; nil: nobody else asks.
	dir *os.File
}

// NewAsker asks a loaded program, which the caller keeps owning, and which
// nobody else runs.
func NewAsker(p *ebpf.Program) *Asker { return &Asker{p: p} }

// OpenAsker opens the program that an agent pinned in dir (<bpffs>/programs).
// The caller closes it. An error that wraps [fs.ErrNotExist] means that no
// agent has run over this folder, or one of before there was the program.
func OpenAsker(dir string) (*Asker, error) {
	path := filepath.Join(dir, AskProgram)
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("program %s is not there; has podweir-agent of this version run with this bpffs folder? %w", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned program %s: %w", path, err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &Asker{p, d}, nil
}

// Ask returns q with its answer. Routes are looked up as from the device that
// such a packet would be seen on; the caller must be in the node's network
// namespace. See bpf/ask.c.
func (a *Asker) Ask(q Ask) (Ask, error) {
	if a.dir != nil {
		if err := unix.Flock(int(a.dir.Fd()), unix.LOCK_EX); err != nil {
			return q, fmt.Errorf("lock %s: %w", a.dir.Name(), err)
		}
		defer func() { _ = unix.Flock(int(a.dir.Fd()), unix.LOCK_UN) }()
	}
	// The program knows the device, but cannot go there by itself.
	out, err := a.run(q, 0)
	if err != nil || out.Device == 0 {
		return out, err
	}
	return a.run(q, out.Device)
}

func (a *Asker) run(q Ask, device uint32) (Ask, error) {
	const head = 14 // Ethernet
	in, err := binary.Append(make([]byte, head), binary.NativeEndian, q)
	if err != nil {
		return q, fmt.Errorf("ask the datapath: encode: %w", err)
	}
	opts := ebpf.RunOptions{
		Data: in, DataOut: make([]byte, head+unsafe.Sizeof(q)),
		// The start of struct __sk_buff; what is missing is 0.
		Context: struct {
			_       [10]uint32
			Ifindex uint32
		}{Ifindex: device},
	}
	ret, err := a.p.Run(&opts)
	if err != nil {
		return q, fmt.Errorf("ask the datapath: run program on device %d: %w", device, err)
	}
	if ret != 0 {
		return q, fmt.Errorf("ask the datapath: the program returned %d", int32(ret))
	}
	if err := binary.Read(bytes.NewReader(opts.DataOut[head:]), binary.NativeEndian, &q); err != nil {
		return q, fmt.Errorf("ask the datapath: decode: %w", err)
	}
	return q, nil
}

// Close closes the program.
func (a *Asker) Close() error {
	if a == nil {
		return nil
	}
	var err error
	if a.dir != nil {
		err = a.dir.Close()
	}
	return errors.Join(err, a.p.Close())
}
