package contract

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// rejected has a namespace call a target that must refuse it with its first
// packet, and checks that it was counted once.
func (w *world) rejected(t *testing.T, ctx context.Context, from *cluster.Netns, hook, proto, target, reason string, v6 bool) {
	t.Helper()
	before := readCounters(t, w.a)
	s, err := from.Send(ctx, target, "-proto", proto, "-timeout", "5s")
	ok(t, err)
	if s.Failed[probe.Refused] != 1 {
		t.Errorf("%s %s from %s: want it refused, got %+v, %+v", proto, target, from.Name, s, s.Failure)
	}
	got := readCounters(t, w.a).since(before)
	if got.of(reason, hook, v6) != 1 || got.of("refused", hook, v6) != 1 {
		t.Errorf("%s %s from %s: want %s and refused once at %s, got %v", proto, target, from.Name, reason, hook, got)
	}
}

// A service without an endpoint refuses at once: a pod, and a process of the
// host, whoever computes checksums. What comes back is final and right.
func TestS2Refused(t *testing.T) {
	w := shared(t)
	ctx := within(t, 90*time.Second)
	ips := []string{"10.98.2.1", "fd00:10:98::201"}
	w.put(t, clusterIP("nobody", ips, bothPorts(80)...))
	for _, offload := range []bool{true, false} {
		t.Run(fmt.Sprintf("tx offload %v", offload), func(t *testing.T) {
			if !offload {
				ethtool(t, w.client.Netns, "eth0", "tx")
				ethtool(t, w.a.Netns, "podweir.vxlan", "tx")
			}
			families(t, func(t *testing.T, v6 bool) {
				target := vip(pick(v6, ips[0], ips[1]), 80)
				for _, proto := range protos() {
					w.inForce(t, ctx, proto, target)
				}
				for _, from := range []struct {
					name, device, hook string
					ns                 *cluster.Netns
				}{{"pod", "eth0", "from_pod", w.client.Netns}, {"host", "podweir.vxlan", "to_overlay", w.a.Netns}} {
					t.Run(from.name, func(t *testing.T) {
						tap, err := from.ns.Capture(ctx, from.device)
						ok(t, err)
						defer tap.Close()
						for _, proto := range protos() {
							w.rejected(t, ctx, from.ns, from.hook, proto, target, "drop_no_backend", v6)
							answered(t, ctx, tap, proto, target)
						}
						for _, size := range []int{1, 2, 3, 511, 1200, 1232, 1400} {
							datagram(t, from.ns, target, bytes.Repeat([]byte{byte(size)}, size), 0)
						}
						// Segments that leave as one packet.
						datagram(t, from.ns, target, bytes.Repeat([]byte{7}, 5000), 1000)
						for _, p := range tap.Packets() {
							// What pods of the same node send, no device has completed.
							ours := !p.Outgoing && isRefusal(p, target)
							if len(p.BadChecksums) > 0 || ours && p.Offloaded {
								t.Errorf("checksum not right, or not final: %v, offloaded %v", p, p.Offloaded)
							}
						}
					})
				}
			})
		})
	}
}

// answered waits for the answer of a closed port among a device's packets.
func answered(t *testing.T, ctx context.Context, tap *cluster.Capture, proto, target string) {
	t.Helper()
	_, err := tap.Find(ctx, proto+" refusal", func(p *cluster.Packet) bool {
		return !p.Outgoing && isRefusal(p, target) && (p.Outer.Proto == unix.IPPROTO_TCP) == (proto == "tcp")
	})
	ok(t, err)
}

// isRefusal tells the answer of a closed port: a reset from the target, or an
// ICMP error, whoever it is from.
func isRefusal(p *cluster.Packet, target string) bool {
	h := p.Outer
	if h == nil {
		return false
	}
	switch h.Proto {
	case unix.IPPROTO_TCP:
		return h.Flags == "AR" && at(h.Src, h.SPort).String() == target
	case unix.IPPROTO_ICMP:
		return h.ICMPType == 3 && h.ICMPCode == 3
	case unix.IPPROTO_ICMPV6:
		return h.ICMPType == 1 && h.ICMPCode == 4
	}
	return false
}

// datagram sends one, or several in segments of a size, from a connected
// socket, which must be told that nobody is there.
func datagram(t *testing.T, from *cluster.Netns, target string, payload []byte, segment int) {
	t.Helper()
	ok(t, from.Do(func() error {
		c, err := net.Dial("udp", target)
		if err != nil {
			return err
		}
		defer c.Close()
		if segment != 0 {
			raw, err := c.(*net.UDPConn).SyscallConn()
			if err != nil {
				return err
			}
			var serr error
			if err := raw.Control(func(fd uintptr) {
				serr = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, segment)
			}); errors.Join(err, serr) != nil {
				return errors.Join(err, serr)
			}
		}
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		if _, err := c.Write(payload); err != nil {
			return err
		}
		_, err = c.Read(make([]byte, 1))
		if !errors.Is(err, syscall.ECONNREFUSED) {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = errors.New("no answer")
			}
			return fmt.Errorf("%d bytes to %s, segments of %d: %v, want connection refused", len(payload), target, segment, err)
		}
		return nil
	}))
}
