package netfilter

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options of getsockopt by which legacy iptables asks; the same numbers in both
// families.
const (
	soGetInfo    = 64
	soGetEntries = 65
)

// legacyFamily is how the kernel lays out the tables of one family.
type legacyFamily struct {
	family      string
	domain      int
	level       int
	names       string // file of the tables' names
	program     string
	offset      int // of target_offset in an entry
	entryLength int // before matches
}

func legacyFamilies() []legacyFamily {
	return []legacyFamily{
		{"ip", unix.AF_INET, unix.SOL_IP, "ip_tables_names", "iptables", 88, 112},
		{"ip6", unix.AF_INET6, unix.SOL_IPV6, "ip6_tables_names", "ip6tables", 140, 168},
	}
}

const tableNameLength = 32 // XT_TABLE_MAXNAMELEN

// legacyInfo is struct ipt_getinfo, and that of ip6tables.
type legacyInfo struct {
	name          [tableNameLength]byte
	validHooks    uint32
	hookEntry     [5]uint32
	underflow     [5]uint32
	entries, size uint32
}

// tables that are in use here. Others are not asked for: to ask makes them.
func (f legacyFamily) tables() ([]string, error) {
	b, err := os.ReadFile("/proc/thread-self/net/" + f.names)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the kernel has no legacy iptables
	}
	if err != nil {
		return nil, fmt.Errorf("tables of legacy %s: %w", f.program, err)
	}
	return strings.Fields(string(b)), nil
}

// read returns the tables with the chains that are not the kernel's.
func (f legacyFamily) read() (out []Table, err error) {
	runtime.LockOSThread() // the list of names is the thread's
	defer runtime.UnlockOSThread()
	names, err := f.tables()
	if err != nil || len(names) == 0 {
		return nil, err
	}
	fd, err := unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket to ask for legacy %s: %w", f.program, err)
	}
	defer unix.Close(fd)
	var errs []error
	for _, name := range names {
		entries, err := f.entries(fd, name)
		if err != nil {
			errs = append(errs, fmt.Errorf("rules of legacy %s, table %s, could not be read: %w", f.program, name, err))
			continue
		}
		out = append(out, Table{Kind: IPTablesLegacy, Family: f.family, Name: name, Chains: f.chains(entries)})
	}
	sortTables(out)
	return out, errors.Join(errs...)
}

// entries are the rules of a table as the kernel lays them out. The size may
// change between the two questions.
func (f legacyFamily) entries(fd int, table string) ([]byte, error) {
	const header = tableNameLength + 8 // struct ipt_get_entries, whose entries are aligned
	var err error
	for range dumpTries {
		var info legacyInfo
		copy(info.name[:tableNameLength-1], table)
		if err = getsockopt(fd, f.level, soGetInfo, unsafe.Pointer(&info), unsafe.Sizeof(info)); err != nil {
			return nil, err
		}
		// Of words, so that it is aligned as the kernel wants it.
		words := make([]uint64, (header+int(info.size)+7)/8)
		buf := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), header+int(info.size))
		copy(buf[:tableNameLength-1], table)
		binary.NativeEndian.PutUint32(buf[tableNameLength:], info.size)
		if err = getsockopt(fd, f.level, soGetEntries, unsafe.Pointer(&words[0]), uintptr(len(buf))); err == nil {
			return buf[header:], nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return nil, err
}

func getsockopt(fd, level, option int, value unsafe.Pointer, length uintptr) error {
	size := uint32(length)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(value), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// chains are the names of a table's own chains: each begins with an entry whose
// target is called ERROR and has the name.
func (f legacyFamily) chains(entries []byte) (out []string) {
	const targetHeader = 32 // struct xt_entry_target
	for len(entries) >= f.entryLength {
		target := int(binary.NativeEndian.Uint16(entries[f.offset:]))
		next := int(binary.NativeEndian.Uint16(entries[f.offset+2:]))
		if target < f.entryLength || next < target+targetHeader || next > len(entries) {
			return out
		}
		if t := entries[target:next]; bytes.HasPrefix(t[2:], []byte("ERROR\x00")) {
			// The last entry of a table is one, too.
			if name := text(t[targetHeader:]); name != "ERROR" {
				out = append(out, name)
			}
		}
		entries = entries[next:]
	}
	return out
}
