//go:build realcluster

package e2e

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/realcluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// N11: datagrams of a client outside whose fragments come in any order reach
// the backend of a NodePort whole, by its own node and by others, and so do the
// answers. It takes the device and the namespace that the agent makes for them,
// with what a pod of the DaemonSet may do.
func TestFragmentsInAnyOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	app := map[string]string{"app": "frag"}
	backend := w.run(w.ns, pod("frag", w.nodes[0].name, app))[0]
	s := w.service("frag", "frag", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	nodePort := s.Spec.Ports[1].NodePort
	// Which of the three parts comes when.
	orders := [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {2, 0, 1}, {1, 2, 0}}
	for i, own := range []string{realcluster.HostIP, realcluster.HostIP6} {
		for _, n := range w.nodes {
			target := netip.MustParseAddrPort(at(n.ips[i], nodePort))
			w.eventually("the service is there", func() error {
				_, err := w.reach(outside, "udp", target.String())
				return err
			})
			put := w.reassembled(n)
			for k, order := range orders {
				what := fmt.Sprintf("%s, fragments in the order %v", target, order)
				data := strings.Repeat(string(rune('a'+k)), 3500)
				reply, err := fragmented(netip.MustParseAddr(own), target, []byte(data), order)
				switch {
				case err != nil:
					w.Errorf("%s: %v", what, err)
				case reply.Server != backend.Name || reply.Echo != data:
					w.Errorf("%s: %s answers and has got %d bytes, want %s and %d", what, reply.Server, len(reply.Echo), backend.Name, len(data))
				}
			}
			// All but the first order have fragments ahead of the first.
			if now := w.reassembled(n); now < put+len(orders)-1 {
				w.Errorf("%s: %d fragments were handed to podweir.frag, want %d or more", n.name, now-put, len(orders)-1)
			}
		}
	}
	for _, n := range w.nodes {
		w.noProblem(n)
	}
}

// reassembled counts what a node has handed to the kernel to be put in order.
func (w *world) reassembled(n node) int {
	w.Helper()
	out, err := w.output(w.ctx, onNode(n), "cat", "/sys/class/net/podweir.frag/statistics/tx_packets")
	must(w, err)
	count, err := strconv.Atoi(strings.TrimSpace(string(out)))
	must(w, err)
	return count
}

// noProblem: the agent has nothing to complain of.
func (w *world) noProblem(n node) {
	w.Helper()
	w.eventually("no problem on "+n.name, func() error {
		var status struct {
			Agent struct {
				Ready    bool
				Problems []struct{ Object, Error string }
			}
		}
		err := w.podweirJSON(n.name, &status, "status")
		if err == nil && (!status.Agent.Ready || len(status.Agent.Problems) > 0) {
			err = fmt.Errorf("%+v", status.Agent)
		}
		return err
	})
}

// fragmented sends a datagram in three parts, in this order, and returns the
// answer of a pw-server to all of it.
func fragmented(from netip.Addr, to netip.AddrPort, data []byte, order []int) (r probe.Reply, err error) {
	u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)))
	if err != nil {
		return r, err
	}
	defer u.Close()
	fd, sa, err := rawSocket(to.Addr())
	if err != nil {
		return r, err
	}
	defer unix.Close(fd)
	port := uint16(u.LocalAddr().(*net.UDPAddr).Port)
	parts := inParts(from, to.Addr(), udpDatagram(from, to, port, data), uint32(time.Now().UnixNano()), len(order))
	if len(parts) != len(order) {
		return r, fmt.Errorf("%d parts for the order %v", len(parts), order)
	}
	for _, i := range order {
		if err := unix.Sendto(fd, parts[i], 0, sa); err != nil {
			return r, fmt.Errorf("send part %d: %w", i, err)
		}
	}
	if err := u.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return r, err
	}
	buf := make([]byte, 64<<10)
	n, peer, err := u.ReadFromUDPAddrPort(buf)
	if err != nil {
		return r, err
	}
	if got := netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()); got != to {
		return r, fmt.Errorf("answered by %s", got)
	}
	return r, json.Unmarshal(buf[:n], &r)
}

// rawSocket takes whole packets for an address.
func rawSocket(to netip.Addr) (fd int, sa unix.Sockaddr, err error) {
	if !to.Is4() {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return fd, &unix.SockaddrInet6{Addr: to.As16()}, err
	}
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
		return fd, nil, err
	}
	// The kernel's conntrack here is not to put them in order.
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_NODEFRAG, 1); err != nil {
		return fd, nil, errors.Join(err, unix.Close(fd))
	}
	return fd, &unix.SockaddrInet4{Addr: to.As4()}, nil
}

// udpDatagram is the header and the data.
func udpDatagram(from netip.Addr, to netip.AddrPort, port uint16, data []byte) []byte {
	u := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(u[0:], port)
	binary.BigEndian.PutUint16(u[2:], to.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(8+len(data)))
	u = append(u, data...)
	pseudo := slices.Concat(from.AsSlice(), to.Addr().AsSlice(), []byte{0, unix.IPPROTO_UDP}, u[4:6])
	if len(u)%2 == 1 {
		pseudo = append(slices.Concat(pseudo, u), 0)
	} else {
		pseudo = slices.Concat(pseudo, u)
	}
	var sum uint32
	for i := 0; i < len(pseudo); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(pseudo[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	check := ^uint16(sum)
	if check == 0 {
		check = 0xffff
	}
	binary.BigEndian.PutUint16(u[6:], check)
	return u
}

// inParts are the packets of a datagram in so many fragments.
func inParts(from, to netip.Addr, datagram []byte, id uint32, count int) (out [][]byte) {
	size := (len(datagram)/count + 8) &^ 7
	for off := 0; off < len(datagram); off += size {
		part := datagram[off:min(off+size, len(datagram))]
		more := off+size < len(datagram)
		var p []byte
		if to.Is4() { // the kernel fills in the checksum
			p = make([]byte, 20)
			p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
			binary.BigEndian.PutUint16(p[2:], uint16(20+len(part)))
			binary.BigEndian.PutUint16(p[4:], uint16(id)|1) // 0 would be given another
			at := uint16(off / 8)
			if more {
				at |= 0x2000
			}
			binary.BigEndian.PutUint16(p[6:], at)
			copy(p[12:], from.AsSlice())
			copy(p[16:], to.AsSlice())
		} else {
			p = make([]byte, 48)
			p[0], p[6], p[7] = 0x60, unix.IPPROTO_FRAGMENT, 64
			binary.BigEndian.PutUint16(p[4:], uint16(8+len(part)))
			copy(p[8:], from.AsSlice())
			copy(p[24:], to.AsSlice())
			p[40] = unix.IPPROTO_UDP
			at := uint16(off)
			if more {
				at |= 1
			}
			binary.BigEndian.PutUint16(p[42:], at)
			binary.BigEndian.PutUint32(p[44:], id)
		}
		out = append(out, append(p, part...))
	}
	return out
}
