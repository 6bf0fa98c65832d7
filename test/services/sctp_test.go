package services

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/test/cluster"
)

// sctpEnd speaks SCTP as far as a first packet and its answer go, by a raw
// socket: the kernels that tests run on have no sockets of the protocol.
type sctpEnd struct {
	f    *os.File
	v6   bool
	port uint16
}

const sctpHeader = 12 // ports, verification tag, CRC32c (RFC 9260 3.1)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpCRC is the checksum of a packet, computed over zeros in its place (RFC
// 9260 6.8 and appendix A).
func sctpCRC(pkt []byte) uint32 {
	c := slices.Clone(pkt)
	clear(c[8:sctpHeader])
	return crc32.Checksum(c, castagnoli)
}

// sctpPacket is the header and one chunk of a private type (RFC 9260 3.2).
func sctpPacket(from, to uint16, text string) []byte {
	pkt := make([]byte, sctpHeader+4, sctpHeader+8+len(text))
	binary.BigEndian.PutUint16(pkt, from)
	binary.BigEndian.PutUint16(pkt[2:], to)
	pkt[sctpHeader] = 0xfe
	binary.BigEndian.PutUint16(pkt[sctpHeader+2:], uint16(4+len(text)))
	pkt = append(pkt, text...)
	for len(pkt)%4 != 0 {
		pkt = append(pkt, 0)
	}
	binary.LittleEndian.PutUint32(pkt[8:], sctpCRC(pkt))
	return pkt
}

// sctp opens an end in somebody's namespace.
func (w *world) sctp(who string, port uint16, v6 bool) *sctpEnd {
	w.Helper()
	e := &sctpEnd{v6: v6, port: port}
	w.must(w.callers[who].ns.Do(func() error {
		fd, err := unix.Socket(family(v6, unix.AF_INET, unix.AF_INET6), unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		if err != nil {
			return fmt.Errorf("raw socket: %w", err)
		}
		e.f = os.NewFile(uintptr(fd), "sctp of "+who)
		return nil
	}))
	w.Cleanup(func() { _ = e.f.Close() })
	return e
}

func (e *sctpEnd) send(to netip.AddrPort, text string) error {
	var sa unix.Sockaddr
	if e.v6 {
		sa = &unix.SockaddrInet6{Addr: to.Addr().As16()}
	} else {
		sa = &unix.SockaddrInet4{Addr: to.Addr().As4()}
	}
	return e.control(func(fd int) error { return unix.Sendto(fd, sctpPacket(e.port, to.Port(), text), 0, sa) })
}

func (e *sctpEnd) control(fn func(fd int) error) error {
	raw, err := e.f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	return errors.Join(raw.Control(func(fd uintptr) { ferr = fn(int(fd)) }), ferr)
}

// receive returns the next packet to this end's port. Its CRC must be right.
func (e *sctpEnd) receive(deadline time.Time) (from netip.AddrPort, text string, err error) {
	buf := make([]byte, 2048)
	if err := e.f.SetReadDeadline(deadline); err != nil {
		return from, "", err
	}
	raw, err := e.f.SyscallConn()
	if err != nil {
		return from, "", err
	}
	for {
		var n int
		var sa unix.Sockaddr
		var rerr error
		if err := raw.Read(func(fd uintptr) bool {
			n, sa, rerr = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(rerr, unix.EAGAIN)
		}); err != nil || rerr != nil {
			return from, "", errors.Join(err, rerr)
		}
		pkt, addr := buf[:n], netip.Addr{}
		switch sa := sa.(type) {
		case *unix.SockaddrInet4: // with the IP header
			pkt, addr = pkt[int(pkt[0]&0xf)*4:], netip.AddrFrom4(sa.Addr)
		case *unix.SockaddrInet6:
			addr = netip.AddrFrom16(sa.Addr)
		}
		if len(pkt) < sctpHeader+4 || binary.BigEndian.Uint16(pkt[2:]) != e.port {
			continue
		}
		from = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(pkt))
		if got, want := binary.LittleEndian.Uint32(pkt[8:]), sctpCRC(pkt); got != want {
			return from, "", fmt.Errorf("SCTP from %v: CRC %#x, want %#x", from, got, want)
		}
		length := int(binary.BigEndian.Uint16(pkt[sctpHeader+2:]))
		if length < 4 || sctpHeader+length > len(pkt) {
			return from, "", fmt.Errorf("SCTP from %v: a chunk of %d bytes in a packet of %d", from, length, len(pkt))
		}
		return from, string(pkt[sctpHeader+4 : sctpHeader+length]), nil
	}
}

// serveSCTP answers every packet to a port with the server's name and who it
// saw, until the test ends.
func (w *world) serveSCTP(who string, port uint16) {
	w.Helper()
	for _, v6 := range []bool{false, true} {
		e := w.sctp(who, port, v6)
		done := make(chan error, 1)
		go func() {
			for {
				from, _, err := e.receive(time.Time{})
				if err == nil {
					err = e.send(from, who+" "+from.Addr().String())
				}
				if err != nil {
					done <- err
					return
				}
			}
		}()
		w.Cleanup(func() {
			select {
			case err := <-done:
				w.Errorf("%s serves SCTP: %v", who, err)
			default:
			}
			_ = e.f.Close()
			<-done
		})
	}
}

// askSCTP sends one packet and returns who answered and whom it saw. The
// answer must come from whom was asked.
func (w *world) askSCTP(who string, sport uint16, to netip.AddrPort) (server string, saw netip.Addr) {
	w.Helper()
	e := w.sctp(who, sport, to.Addr().Is6())
	defer e.f.Close()
	w.must(e.send(to, "who?"))
	from, text, err := e.receive(time.Now().Add(patience))
	if err != nil {
		w.Fatalf("%s, port %d, asks %v by SCTP: %v", who, sport, to, err)
	}
	if from != to {
		w.Errorf("%s asked %v by SCTP, %v answered", who, to, from)
	}
	var seen string
	if _, err := fmt.Sscan(text, &server, &seen); err != nil {
		w.Fatalf("%s asks %v by SCTP: answer %q: %v", who, to, text, err)
	}
	saw, err = netip.ParseAddr(seen)
	w.must(err)
	return server, saw
}

// SCTP has session affinity like the rest: from other ports and by other
// addresses a client comes to the backend that it had, whose port is another
// (S14, S35).
func TestS14SCTP(t *testing.T) {
	w := shared(t)
	const port = 9999
	ends := []string{"back-a", "back-b", "pod-b"}
	for _, end := range ends {
		w.serveSCTP(end, port)
	}
	s := service{name: "sticky-sctp", n: 209, ends: strings.Join(ends, " "), target: port,
		protos: []corev1.Protocol{corev1.ProtocolSCTP}, change: sticky(0)}
	w.put(s)
	w.eachFamily(func(w *world, v6 bool) {
		for from, ats := range map[string][]string{
			"pod-a":  {"cluster", "lb", "node@node-a", "node@node-b"},
			"node-a": {"cluster", "lb", "node@node-b"},
			"out":    {"lb", "ext", "node@node-a"},
		} {
			was := ""
			for i := range uint16(12) {
				at := ats[int(i)%len(ats)]
				server, saw := w.askSCTP(from, 40000+i, s.frontend(w, at, v6))
				if !slices.Contains(ends, server) || was != "" && server != was {
					w.Errorf("%s by %s: answered by %q, it was %q before", from, at, server, was)
				}
				if saw != w.addr(from, v6) {
					w.Errorf("%s by %s: seen as %v", from, at, saw)
				}
				was = server
			}
		}
	})
	// Without it, one client meets all of them.
	s.change = nil
	w.write(s)
	w.settled()
	w.eachFamily(func(w *world, v6 bool) {
		met := map[string]bool{}
		for i := range uint16(enough) {
			server, _ := w.askSCTP("pod-a", 41000+i, s.frontend(w, "cluster", v6))
			met[server] = true
		}
		if len(met) != len(ends) {
			w.Errorf("answered by %v alone", met)
		}
	})
}

// A host port by SCTP: for everybody, its pod sees who asks.
func TestHostPortSCTP(t *testing.T) {
	w := shared(t)
	const port, hostPort = 9998, 8898
	w.know("sctp-pod", "10.244.80.78", "fd00:10:244:50::4e")
	obj := podObject("sctp-pod", "node-a", "10.244.80.78", "fd00:10:244:50::4e")
	w.must(w.Manifests.Put(obj))
	pod, err := w.AddPod(w.ctx, obj, cluster.PortMapping{HostPort: hostPort, ContainerPort: port, Protocol: "sctp"})
	w.must(err)
	w.Cleanup(func() {
		if err := errors.Join(pod.Delete(context.Background()), w.Manifests.Delete(obj)); err != nil {
			w.Error(err)
		}
	})
	w.join("sctp-pod", pod.Netns)
	w.serveSCTP("sctp-pod", port)
	w.eachFamily(func(w *world, v6 bool) {
		target := netip.AddrPortFrom(w.addr("node-a", v6), hostPort)
		for from, sees := range map[string]string{
			"out": "out", "pod-a": "pod-a", "pod-b": "node-b", "node-b": "node-b", "node-a": "node-a", "sctp-pod": "node-a",
		} {
			server, saw := w.askSCTP(from, 42000, target)
			if server != "sctp-pod" || saw != w.addr(sees, v6) {
				w.Errorf("%s: answered by %q, which saw %v, want %s", from, server, saw, sees)
			}
		}
	})
}
