package packet

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// struct virtio_net_hdr, which packet sockets put before a frame: its
// checksum is left to a device, or its segmentation.
const (
	vnetHeader     = 10
	vnetNeedsCsum  = 1
	vnetGSOTCPv4   = 1
	vnetGSOTCPv6   = 4
	vnetSegment    = 1000
	receiveTimeout = 5 * time.Second
)

// wireEnd is the far end of a device: a packet socket on its peer.
type wireEnd struct {
	t    *testing.T
	file *os.File
	to   unix.SockaddrLinklayer
}

func openWire(t *testing.T, index int) *wireEnd {
	t.Helper()
	proto := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := &wireEnd{t: t, file: os.NewFile(uintptr(fd), "packet socket"), to: unix.SockaddrLinklayer{Protocol: proto, Ifindex: index}}
	t.Cleanup(func() { _ = w.file.Close() })
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &w.to); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *wireEnd) send(header [vnetHeader]byte, pkt []byte) {
	w.t.Helper()
	if _, err := w.file.Write(append(header[:], pkt...)); err != nil {
		w.t.Fatal(err)
	}
}

// exchange sends a frame and returns the one that the addresses make its
// answer, and whether that one's checksum was still to be filled in.
func (w *wireEnd) exchange(header [vnetHeader]byte, pkt []byte) ([]byte, bool) {
	w.t.Helper()
	w.send(header, pkt)
	in, _ := decode(pkt)
	if err := w.file.SetReadDeadline(time.Now().Add(receiveTimeout)); err != nil {
		w.t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			w.t.Fatalf("no answer: %v", err)
		}
		if d, ok := decode(buf[vnetHeader:n]); ok && d.src == in.dst && d.dst == in.src {
			return slices.Clone(buf[vnetHeader:n]), buf[0]&vnetNeedsCsum != 0
		}
	}
}

// leave leaves a packet's checksum to a device: what it starts from is the
// sum of the pseudo header.
func leave(pkt []byte, gso bool) (h [vnetHeader]byte) {
	d, _ := decode(pkt)
	at, cover, _, _ := d.field()
	binary.BigEndian.PutUint16(cover[at:], uint16(onesSum(d.pseudo(len(cover)), nil)))
	h[0] = vnetNeedsCsum
	binary.NativeEndian.PutUint16(h[6:], uint16(d.at))
	binary.NativeEndian.PutUint16(h[8:], uint16(at))
	if gso {
		if h[1] = vnetGSOTCPv4; d.v6 {
			h[1] = vnetGSOTCPv6
		}
		binary.NativeEndian.PutUint16(h[2:], uint16(d.at+20))
		binary.NativeEndian.PutUint16(h[4:], vnetSegment)
	}
	return h
}

// Answers are right, and final, whoever was to compute the checksum of the
// packet that is answered, and whoever computes those of what leaves.
func TestAnswersUnderOffload(t *testing.T) {
	p := partsFor(t)
	devs, err := findDevices()
	if err != nil {
		t.Fatal(err)
	}
	peer := "x" + devWire
	wire := openWire(t, devs[peer].index)
	t.Cleanup(func() { transmitOffload(t, "on", devWire, peer) })
	for _, part := range []struct {
		name string
		prog *ebpf.Program
		want func(in []byte) []byte
	}{
		{"refuse", p.PartRefuse, refusal},
		{"too big", p.PartTooBig, func(in []byte) []byte {
			return aboutPacket(in, [2]byte{3, 4}, [2]byte{2, 0}, partMTU)
		}},
	} {
		l, err := link.AttachTCX(link.TCXOptions{Program: part.prog, Attach: ebpf.AttachTCXIngress, Interface: devs[devWire].index})
		if err != nil {
			t.Fatal(err)
		}
		for _, there := range []string{"on", "off"} {
			for _, back := range []string{"on", "off"} {
				transmitOffload(t, there, peer)
				transmitOffload(t, back, devWire)
				for _, f := range families() {
					t.Run(fmt.Sprintf("%s, %s, tx %s, back %s", part.name, f.name, there, back), func(t *testing.T) {
						wire.t = t
						if there == "on" {
							wire.inside(f, devs[devWire].mac, part.want, back == "off")
						}
						for name, pkt := range offloaded(t, f, there == "on") {
							copy(pkt, devs[devWire].mac)
							header := leave(pkt, name == "TCP segments")
							want := part.want(arrives(pkt, there))
							got, open := wire.exchange(header, pkt)
							if open || !slices.Equal(got, want) || wrong(got) != "" {
								t.Errorf("%s: checksum open %v\n in   %x\n got  %x\n want %x", name, open, pkt, got, want)
							}
						}
					})
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// inside: a pod's own tunnel leaves the sum of a packet inside to the device.
// Where it starts says the packet. If that is beyond what an answer replaces,
// the answer has padding: the sum is forgotten, or lands there.
func (w *wireEnd) inside(f family, mac net.HardwareAddr, want func([]byte) []byte, summed bool) {
	w.t.Helper()
	pkt := dontFragment(udp(ap(f.client, 40000), ap(f.vip, 81)).with(string(pattern(1400))).bytes(w.t))
	copy(pkt, mac)
	padding := 34
	if f.v6 {
		padding = 54
	}
	for _, at := range []int{100, 140, 300, len(pkt) - padding - 1, len(pkt) - padding + 14, len(pkt) - 8} {
		var h [vnetHeader]byte
		h[0] = vnetNeedsCsum
		binary.NativeEndian.PutUint16(h[6:], uint16(at))
		binary.NativeEndian.PutUint16(h[8:], 6)
		got, open := w.exchange(h, pkt)
		answer := want(pkt)
		mayBeOpen := at > len(pkt)-padding && !summed
		if padded := at > 300; padded && len(got) == len(answer)+padding {
			got = got[:len(answer)]
		}
		if open && !mayBeOpen || !slices.Equal(got, answer) {
			w.t.Errorf("sum from %d: checksum open %v\n got  %x\n want %x", at, open, got, answer)
		}
	}
}

// offloaded are packets whose checksum a device is to compute. Segments stay
// together as long as nobody must do that.
func offloaded(t *testing.T, f family, together bool) map[string][]byte {
	src, dst := ap(f.client, 40000), ap(f.vip, 81)
	out := map[string][]byte{
		"SYN":  dontFragment(tcp(src, dst, syn).bytes(t)),
		"data": dontFragment(tcp(src, dst, ack|psh).with(string(pattern(1000))).bytes(t)),
	}
	if together {
		out["TCP segments"] = dontFragment(tcp(src, dst, psh).with(string(pattern(3000))).bytes(t))
	}
	for _, n := range []int{0, 1, 7, 600, 1232, 1400} {
		out[fmt.Sprintf("UDP, %d bytes", n)] = dontFragment(udp(src, dst).with(string(pattern(n))).bytes(t))
	}
	if f.v6 {
		out["extension header"] = extend(t, udp(src, dst).bytes(t), extension{kind: 60, bytes: 16})
	}
	return out
}

// arrives is a packet as it reaches the other end: its sender's device has
// filled the checksum in, or not.
func arrives(pkt []byte, tx string) []byte {
	out := slices.Clone(pkt)
	if tx == "off" {
		mend(out)
	}
	return out
}

func transmitOffload(t *testing.T, value string, devices ...string) {
	t.Helper()
	for _, dev := range devices {
		// Outlives the test's context, which is over in its cleanup.
		out, err := exec.CommandContext(context.Background(), "ethtool", "-K", dev, "tx", value).CombinedOutput()
		if err != nil {
			t.Fatalf("ethtool -K %s tx %s: %v\n%s", dev, value, err, out)
		}
	}
}
