package loader

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// NoCgroup is the name of no cgroup at all: sockets are not translated.
const NoCgroup = "none"

// socketPin starts the names of pinned links to a cgroup, where those of
// devices have an index.
const socketPin = "cgroup"

// socketHook is a program at the sockets of a cgroup's processes.
type socketHook struct {
	program string
	attach  ebpf.AttachType
}

// socketHooks in the order to attach them: before a socket can be translated,
// its peer's name and its end are looked after.
func socketHooks() []socketHook {
	return []socketHook{
		{"sock_release", ebpf.AttachCgroupInetSockRelease},
		{"getpeername4", ebpf.AttachCgroupInet4GetPeername},
		{"getpeername6", ebpf.AttachCgroupInet6GetPeername},
		{"connect4", ebpf.AttachCGroupInet4Connect},
		{"connect6", ebpf.AttachCGroupInet6Connect},
	}
}

func (h socketHook) pin(bpffs string) string {
	return filepath.Join(linksDir(bpffs), socketPin+"-"+h.program)
}

// parseSocketPin is the inverse of pin, for the file's name.
func parseSocketPin(name string) (socketHook, bool) {
	for _, h := range socketHooks() {
		if name == socketPin+"-"+h.program {
			return h, true
		}
	}
	return socketHook{}, false
}

func (d *Datapath) socketProgram(h socketHook) *ebpf.Program {
	switch h.program {
	case "connect4":
		return d.objs.Connect4
	case "connect6":
		return d.objs.Connect6
	case "getpeername4":
		return d.objs.Getpeername4
	case "getpeername6":
		return d.objs.Getpeername6
	case "sock_release":
		return d.objs.SockRelease
	}
	return nil
}

// FindCgroup resolves what the agent is told: a folder, which must be a cgroup
// (v2) or have one at "unified", where machines with cgroup v1 mount it;
// [NoCgroup]; or nothing, for the first cgroup2 mount. It returns ""
// when sockets are to be left alone, or when there is no such mount.
func FindCgroup(told string) (string, error) {
	switch told {
	case NoCgroup:
		return "", nil
	case "":
		f, err := os.Open("/proc/self/mountinfo")
		if err != nil {
			return "", fmt.Errorf("look for a cgroup2 mount: %w", err)
		}
		defer f.Close()
		return cgroupMount(f)
	}
	_, err := cgroupID(told)
	if err != nil {
		if unified := filepath.Join(told, "unified"); isCgroup(unified) {
			return unified, nil
		}
	}
	return told, err
}

// cgroupMount is the mount point to prefer in a mountinfo file.
func cgroupMount(mountinfo io.Reader) (string, error) {
	var found string
	rank := func(point string) int {
		switch point {
		case "":
			return 3
		case "/sys/fs/cgroup":
			return 0
		case "/sys/fs/cgroup/unified":
			return 1
		}
		return 2
	}
	in := bufio.NewScanner(mountinfo)
	for in.Scan() {
		left, right, ok := strings.Cut(in.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) == 0 || r[0] != "cgroup2" {
			continue
		}
		if point := unescape(l[4]); rank(point) < rank(found) {
			found = point
		}
	}
	if err := in.Err(); err != nil {
		return "", fmt.Errorf("look for a cgroup2 mount: %w", err)
	}
	return found, nil
}

// unescape undoes what the kernel does to white space and backslashes in
// mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// cgroupID is the kernel's number of a cgroup: that of its folder.
func cgroupID(path string) (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", path, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", path, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return 0, fmt.Errorf("%s is not a cgroup (v2): give the folder where the host's cgroup2 is mounted, or %q", path, NoCgroup)
	}
	return st.Ino, nil
}

func isCgroup(path string) bool {
	_, err := cgroupID(path)
	return err == nil
}

// rootCgroup is the number of the cgroup that all processes are in.
const rootCgroup = 1

// netnsCookie is the number of this thread's network namespace.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("cookie of the network namespace: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("cookie of the network namespace: %w", err)
	}
	return cookie, nil
}

// AttachSockets attaches the programs that translate connect() to the
// processes of a cgroup, those below it included; "" detaches them. What
// fails is tried again by Verify.
func (d *Datapath) AttachSockets(ctx context.Context, cgroup string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cgroup = cgroup
	if cgroup == "" {
		var errs []error
		for h := range d.sockets {
			errs = append(errs, d.detachSocket(h))
		}
		return errors.Join(errs...)
	}
	id, err := cgroupID(cgroup)
	if err != nil {
		return err
	}
	if id != rootCgroup {
		d.log.Info("only the sockets of processes in one part of the cgroups are translated", "cgroup", cgroup)
	}
	_, err = d.ensureSockets(ctx)
	return err
}

// Sockets says to which cgroup sockets are translated, "" for none, and
// whether all programs for it are in force.
func (d *Datapath) Sockets() (cgroup string, attached bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cgroup == "" {
		return "", false
	}
	id, err := cgroupID(d.cgroup)
	for _, h := range socketHooks() {
		if err != nil || !inForce(d.sockets[h], id) {
			return d.cgroup, false
		}
	}
	return d.cgroup, true
}

func inForce(l link.Link, cgroup uint64) bool {
	if l == nil {
		return false
	}
	info, err := l.Info()
	return err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == cgroup
}

// ensureSockets attaches what is missing, and returns what was.
func (d *Datapath) ensureSockets(ctx context.Context) (missing []string, err error) {
	if d.cgroup == "" {
		return nil, nil
	}
	id, err := cgroupID(d.cgroup)
	if err != nil {
		return nil, fmt.Errorf("programs at sockets: %w", err)
	}
	var errs []error
	for _, h := range socketHooks() {
		if ctx.Err() != nil {
			return missing, errors.Join(append(errs, ctx.Err())...)
		}
		if l := d.sockets[h]; inForce(l, id) {
			if _, err := os.Stat(h.pin(d.cfg.BPFFS)); errors.Is(err, os.ErrNotExist) {
				// As in alive: the link remembers its pin.
				errs = append(errs, l.Unpin(), l.Pin(h.pin(d.cfg.BPFFS)))
			}
			continue
		}
		if err := d.attachSocket(h); err != nil {
			errs = append(errs, err)
			continue
		}
		missing = append(missing, fmt.Sprintf("program %s at the sockets of cgroup %s", h.program, d.cgroup))
	}
	return missing, errors.Join(errs...)
}

// attachSocket attaches a program to d.cgroup; from another one it is taken
// off.
func (d *Datapath) attachSocket(h socketHook) error {
	if err := d.detachSocket(h); err != nil {
		return err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: d.cgroup, Attach: h.attach, Program: d.socketProgram(h)})
	if err != nil {
		return fmt.Errorf("attach program %s to cgroup %s: %w; has another program it for itself? 'bpftool cgroup tree' shows, and --cgroup %s does without", h.program, d.cgroup, err, NoCgroup)
	}
	pin := h.pin(d.cfg.BPFFS)
	err = os.Remove(pin)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		err = l.Pin(pin)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("pin program %s of cgroup %s at %s: %w", h.program, d.cgroup, pin, err), l.Close())
	}
	d.sockets[h] = l
	return nil
}

func (d *Datapath) detachSocket(h socketHook) error {
	l := d.sockets[h]
	if l == nil {
		return nil
	}
	if err := detachLink(l); err != nil {
		return fmt.Errorf("detach program %s from its cgroup: %w", h.program, err)
	}
	delete(d.sockets, h)
	err := os.Remove(h.pin(d.cfg.BPFFS))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, l.Close())
}

// adoptSocket takes over a link of an earlier process. That of a removed
// cgroup is forgotten.
func (d *Datapath) adoptSocket(h socketHook, l link.Link) error {
	d.sockets[h] = l
	if inForce(l, 0) {
		return d.detachSocket(h)
	}
	return nil
}
