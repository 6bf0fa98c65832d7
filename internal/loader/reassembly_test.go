package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/node"
)

// pinnedIDs are the kernel's numbers of the links in the namespace.
func pinnedIDs(t *testing.T, cfg Config) (ids []link.ID) {
	t.Helper()
	for _, name := range fragPins() {
		l, err := link.LoadPinnedLink(filepath.Join(linksDir(cfg.BPFFS), name), nil)
		must(t, err)
		info, err := l.Info()
		must(t, err)
		ids = append(ids, info.ID)
		must(t, l.Close())
	}
	return ids
}

// fragSocket is a socket on podweir.frag's wire: what is written goes into the
// namespace, what is read came out of it.
func fragSocket(t *testing.T) (send func(frame []byte), read func() []byte) {
	t.Helper()
	dev, err := netlink.LinkByName(node.FragName)
	must(t, err)
	all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all))
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: dev.Attrs().Index}))
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}))
	buf := make([]byte, 1<<17)
	return func(frame []byte) {
			_, err := unix.Write(fd, frame)
			must(t, err)
		}, func() []byte {
			for {
				n, from, err := unix.Recvfrom(fd, buf, 0)
				if err != nil {
					t.Fatalf("nothing comes out: %v", err)
				}
				if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_HOST {
					return slices.Clone(buf[:n])
				}
			}
		}
}

// fragmentsOf cuts a datagram of zeros, which nobody in the namespace checks.
func fragmentsOf(v6 bool, id uint32, token [4]byte, sizes ...int) (out [][]byte) {
	off := 0
	for i, n := range sizes {
		more := i < len(sizes)-1
		f := append(slices.Clone(fragPeerMAC()), 0x02, 'p')
		f = append(f, token[:]...)
		if v6 {
			f = append(f, 0x86, 0xdd, 0x60, 0, 0, 0, byte((8+n)>>8), byte(8+n), 44, 9)
			f = append(append(f, net.ParseIP("2001:db8::9")...), net.ParseIP("fd00::2")...)
			field := uint16(off)
			if more {
				field |= 1
			}
			f = append(f, 17, 0, byte(field>>8), byte(field))
			f = binary.BigEndian.AppendUint32(f, id)
		} else {
			field := uint16(off / 8)
			if more {
				field |= 0x2000
			}
			ip := []byte{0x45, 0, byte((20 + n) >> 8), byte(20 + n), byte(id >> 8), byte(id), byte(field >> 8), byte(field), 9, 17, 0, 0, 203, 0, 113, 9, 172, 31, 0, 2}
			sum := uint32(0)
			for i := 0; i < len(ip); i += 2 {
				sum += uint32(binary.BigEndian.Uint16(ip[i:]))
			}
			binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
			f = append(append(f, 0x08, 0x00), ip...)
		}
		f = append(f, make([]byte, n)...)
		out = append(out, f)
		off += n
	}
	return out
}

// shapeOf says what matters of a frame: token, TTL, offset, length.
func shapeOf(f []byte) string {
	if f[12] == 0x86 {
		if f[20] != 44 {
			return fmt.Sprintf("%x ttl %d whole length %d", f[8:12], f[21], binary.BigEndian.Uint16(f[18:]))
		}
		return fmt.Sprintf("%x ttl %d offset %d length %d", f[8:12], f[21], binary.BigEndian.Uint16(f[56:])&^7, binary.BigEndian.Uint16(f[18:])-8)
	}
	return fmt.Sprintf("%x ttl %d offset %d length %d", f[8:12], f[22], binary.BigEndian.Uint16(f[20:])&0x1fff*8, binary.BigEndian.Uint16(f[16:])-20)
}

// reassembles has datagrams of these families put in order.
func reassembles(t *testing.T, what string, v6s ...bool) {
	t.Helper()
	send, read := fragSocket(t)
	for i, v6 := range v6s {
		for j, sizes := range [][]int{{1280, 1280, 808}, {8, 1400, 16}, {1400, 8}} {
			id := uint32(time.Now().UnixNano())
			token, other := [4]byte{1, 2, byte(i), byte(j)}, [4]byte{9, 9, 9, 9}
			in := fragmentsOf(v6, id, token, sizes...)
			lies := fragmentsOf(v6, id, other, sizes...) // later ones, of another token
			for k := len(in) - 1; k > 0; k-- {
				send(lies[k])
			}
			send(in[0])
			want := []string{}
			for off, k := 0, 0; k < len(sizes); k++ {
				want = append(want, fmt.Sprintf("%x ttl 8 offset %d length %d", token, off, sizes[k]))
				off += sizes[k]
			}
			if v6 && j == 2 {
				want = []string{fmt.Sprintf("%x ttl 8 whole length %d", token, 1408)} // as long as the first was
			}
			for _, w := range want {
				if got := shapeOf(read()); got != w {
					t.Fatalf("%s, IPv6 %v, %v: %s came out, want %s", what, v6, sizes, got, w)
				}
			}
		}
	}
}

// What goes into the namespace in any order comes out of it as it was cut, in
// order, with what the first said of its datagram; the namespace outlives the
// process, stays the same over restarts, is made anew when anything is missing,
// and goes with the rest.
func TestReassembly(t *testing.T) {
	ctx := context.Background()
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	d := load(t, cfg)
	if d.noReassembly {
		t.Skip("this kernel reassembles nothing for us")
	}
	works := func(what string) {
		t.Helper()
		reassembles(t, what, false, true)
	}
	works("at first")
	ids, index := pinnedIDs(t, cfg), d.cfg.FragIfindex
	must(t, d.Close())
	works("after the process")
	d = load(t, cfg)
	if now := pinnedIDs(t, cfg); !slices.Equal(now, ids) || d.cfg.FragIfindex != index {
		t.Fatalf("a restart changed links %v, device %d to %v, %d", ids, index, now, d.cfg.FragIfindex)
	}
	works("after a restart")

	dev := func() netlink.Link {
		l, err := netlink.LinkByName(node.FragName)
		must(t, err)
		return l
	}
	for what, harm := range map[string]func(){
		"no pin":    func() { must(t, os.Remove(filepath.Join(linksDir(cfg.BPFFS), fragPin6))) },
		"no device": func() { must(t, netlink.LinkDel(dev())) },
		"down":      func() { must(t, netlink.LinkSetDown(dev())) },
		"detached": func() {
			l, err := link.LoadPinnedLink(filepath.Join(linksDir(cfg.BPFFS), fragPinEnter), nil)
			must(t, err)
			must(t, l.Detach())
			must(t, l.Close())
		},
		"another program": func() {
			l, err := link.LoadPinnedLink(filepath.Join(linksDir(cfg.BPFFS), fragPinLeave), nil)
			must(t, err)
			must(t, l.Update(d.objs.FragEnter))
			must(t, l.Close())
		},
	} {
		harm()
		repaired, err := d.Verify(ctx)
		if err != nil || len(repaired) == 0 {
			t.Fatalf("%s: repaired %q, %v", what, repaired, err)
		}
		if again, err := d.Verify(ctx); err != nil || len(again) != 0 {
			t.Fatalf("%s: repaired again %q, %v", what, again, err)
		}
		if d.cfg.FragIfindex != index {
			t.Errorf("%s: device %d, was %d", what, d.cfg.FragIfindex, index)
		}
		one(t, cfg, d.cfg.FragIfindex, false, "from_frag")
		works(what)
	}
	left := pinnedIDs(t, cfg)
	must(t, d.Close())
	must(t, Cleanup(cfg.BPFFS))
	if _, err := netlink.LinkByName(node.FragName); err == nil {
		t.Error("the device is left")
	}
	for _, id := range append(ids, left...) {
		gone(t, id)
	}
}

// A kernel that was started without IPv6 has no sysctl of it, nor anything
// else: IPv4 is reassembled all the same.
func TestReassemblyWithoutIPv6(t *testing.T) {
	ctx := context.Background()
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024, Sysctls: t.TempDir()}
	must(t, os.Mkdir(filepath.Join(cfg.Sysctls, "net"), 0o755))
	must(t, os.Symlink("/proc/sys/net/ipv4", filepath.Join(cfg.Sysctls, "net/ipv4")))
	d := load(t, cfg)
	if d.noReassembly {
		t.Skip("this kernel reassembles nothing for us")
	}
	reassembles(t, "without IPv6", false)
	if _, err := os.Stat(filepath.Join(linksDir(cfg.BPFFS), fragPin6)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a link for IPv6: %v", err)
	}
	index := d.cfg.FragIfindex
	d = restart(t, d)
	if repaired, err := d.Verify(ctx); err != nil || len(repaired) != 0 || d.cfg.FragIfindex != index {
		t.Errorf("repaired %q, %v; device %d, was %d", repaired, err, d.cfg.FragIfindex, index)
	}
	must(t, netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: node.FragName, Index: index}}))
	if repaired, err := d.Verify(ctx); err != nil || len(repaired) == 0 {
		t.Errorf("without its device: repaired %q, %v", repaired, err)
	}
	reassembles(t, "made anew", false)
	must(t, d.Close())
	must(t, Cleanup(cfg.BPFFS))
}

// What earlier versions had in the host's own namespace goes at the next load.
func TestFormerDefragLinks(t *testing.T) {
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	p, err := loadFragPrograms()
	if errors.Is(err, errNoReassembly) {
		t.Skip("this kernel reassembles nothing for us")
	}
	must(t, err)
	defer p.close()
	must(t, os.MkdirAll(linksDir(cfg.BPFFS), 0o700))
	l, err := link.AttachNetfilter(link.NetfilterOptions{
		Program: p.netfilter, ProtocolFamily: link.NetfilterProtoIPv4, Hook: link.NetfilterInetPreRouting,
		Priority: defragPriority, NetfilterFlags: nfDefrag,
	})
	must(t, err)
	pin := filepath.Join(linksDir(cfg.BPFFS), "defrag-4")
	must(t, l.Pin(pin))
	info, err := l.Info()
	must(t, err)
	must(t, l.Close())
	load(t, cfg)
	if _, err := os.Stat(pin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pin is left: %v", err)
	}
	gone(t, info.ID)
}

// gone waits for a link that nobody holds to be freed.
func gone(t *testing.T, id link.ID) {
	t.Helper()
	for l, err := link.NewFromID(id); err == nil; l, err = link.NewFromID(id) {
		l.Close()
		if t.Context().Err() != nil {
			t.Fatalf("link %d is left", id)
		}
	}
}
