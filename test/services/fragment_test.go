package services

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// large is a datagram of three fragments on the nodes' link.
const large = 4000

// largeDatagrams are sent, and answered, in fragments that come in order.
func (w *world) largeDatagrams() {
	near, far := service{name: "fragments-near", n: 243, ends: "back-a"}, service{name: "fragments-far", n: 244, ends: "back-b"}
	host := service{name: "fragments-host", n: 245, ends: "node-b"}
	for _, s := range []service{near, far, host} {
		w.put(s)
	}
	w.eachFamily(func(w *world, v6 bool) {
		for _, c := range []struct {
			from, by string
			to       netip.AddrPort
		}{
			{"pod-a", "back-a", netip.AddrPortFrom(w.addr("back-a", v6), cluster.ServerPort)},
			{"pod-a", "back-b", netip.AddrPortFrom(w.addr("back-b", v6), cluster.ServerPort)},
			{"pod-a", "ext", netip.AddrPortFrom(w.addr("ext", v6), cluster.ServerPort)},
			{"pod-a", "node-b", netip.AddrPortFrom(w.addr("node-b", v6), cluster.ServerPort)},
			{"pod-a", "back-a", near.frontend(w, "cluster", v6)},
			{"pod-a", "back-b", far.frontend(w, "lb", v6)},
			{"node-a", "back-b", far.frontend(w, "cluster", v6)},
			{"out", "back-a", near.frontend(w, "node@node-a", v6)},
			{"out", "back-b", far.frontend(w, "node@node-a", v6)},
			{"out", "back-b", far.frontend(w, "lb", v6)},
			{"out", "node-b", host.frontend(w, "node@node-a", v6)},
		} {
			before, err := w.read()
			w.must(err)
			// By the entry node's tunnel an answer may be too large for, and of
			// IPv6 its sender is then told, and not the client: who asks again.
			if server, err := w.exchangeLarge(c.from, c.to, v6 && c.from == "out"); err != nil || server != c.by {
				now, _ := w.read()
				w.Errorf("%s to %v: answered by %q, %v, want %s; counted since:%v", c.from, c.to, server, err, c.by, now.since(before))
			}
		}
	})
}

// exchangeLarge sends a large datagram, once more if it hears of an MTU, and
// again and again if nothing comes and that is allowed.
func (w *world) exchangeLarge(from string, to netip.AddrPort, again bool) (server string, err error) {
	w.Helper()
	end := time.Now().Add(patience)
	err = w.callers[from].ns.Do(func() error {
		c, err := net.Dial("udp", to.String())
		if err != nil {
			return err
		}
		defer c.Close()
		sent := bytes.Repeat([]byte("podweir "), large/8)
		buf := make([]byte, 64<<10)
		n := 0
		// Each way may have an MTU of its own to tell.
		for told := 0; told < 3; {
			until := end
			if again {
				until = time.Now().Add(time.Second)
			}
			if err := c.SetDeadline(until); err != nil {
				return err
			}
			if _, err = c.Write(sent); err == nil {
				n, err = c.Read(buf)
			}
			if errors.Is(err, unix.EMSGSIZE) {
				told++
			} else if !again || !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(end) {
				break
			}
		}
		if err != nil {
			return err
		}
		var r probe.Reply
		if err := json.Unmarshal(buf[:n], &r); err != nil {
			return fmt.Errorf("answer of %d bytes: %w", n, err)
		}
		if r.Echo != string(sent) {
			return fmt.Errorf("%s got something else: %d bytes", r.Server, len(r.Echo))
		}
		server = r.Server
		return nil
	})
	return server, err
}

// reorderedMeetForward: fragments that come ahead of the first of their datagram
// go up to the kernel's reassembly, and by the FORWARD chain on from there. A
// firewall that forwards nothing drops them, and nothing else of a pod.
func (w *world) reorderedMeetForward() {
	const port = 7781
	node := w.Node("node-a")
	for _, step := range []struct {
		what string
		pass bool
	}{{"dropped", false}, {"forwarded", true}} {
		if step.pass {
			w.allowForwarding()
		}
		for _, v6 := range []bool{false, true} {
			for i, to := range []string{"back-a", "back-b"} {
				w.T.Run(step.what+" "+to+" "+family(v6, "IPv4", "IPv6"), func(t *testing.T) {
					w := w.sub(t)
					target := netip.AddrPortFrom(w.addr(to, v6), port)
					server := w.listen(to, target)
					defer server.Close()
					source := netip.AddrPortFrom(w.addr("pod-a", v6), uint16(21000+2*i+family(step.pass, 0, 1)))
					before, err := w.read()
					w.must(err)
					met := w.forwarded(node, "pods")
					late, inOrder := bytes.Repeat([]byte{'r'}, large), bytes.Repeat([]byte{'o'}, large)
					cut := cutDatagram(source, target, late, w.nextID())
					slices.Reverse(cut)
					w.sendRaw("pod-a", target.Addr(), cut)
					w.must(cluster.Eventually(w.ctx, func() error {
						now, err := w.read()
						if err != nil {
							return err
						}
						if n := now[counterKey{"node-a", "from_pod", "fragment_reassembly", v6}] - before[counterKey{"node-a", "from_pod", "fragment_reassembly", v6}]; n != uint64(len(cut)) {
							return fmt.Errorf("%d fragments went up to the kernel, want %d; counted since:%v", n, len(cut), now.since(before))
						}
						if w.forwarded(node, "pods") == met {
							return errors.New("nothing met the FORWARD chain")
						}
						return nil
					}))
					want := [][]byte{inOrder}
					if step.pass {
						want = [][]byte{late, inOrder}
					}
					met = w.forwarded(node, "pods")
					for i, payload := range want {
						if i == len(want)-1 {
							// What was dropped would have been here before.
							w.sendRaw("pod-a", target.Addr(), cutDatagram(source, target, inOrder, w.nextID()))
						}
						buf := make([]byte, 64<<10)
						n, from, err := server.ReadFromUDPAddrPort(buf)
						w.must(err)
						if !bytes.Equal(buf[:n], payload) || netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) != source {
							w.Errorf("%d bytes of %q from %v, want %q from %v", n, buf[0], from, payload[0], source)
						}
					}
					if now := w.forwarded(node, "pods"); now != met {
						w.Errorf("fragments in order met the FORWARD chain: %d of them", now-met)
					}
				})
			}
		}
	}
}

// listen opens a UDP socket in somebody's namespace.
func (w *world) listen(who string, at netip.AddrPort) (c *net.UDPConn) {
	w.Helper()
	w.must(w.callers[who].ns.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	}))
	w.must(c.SetDeadline(time.Now().Add(time.Minute)))
	return c
}

// nextID is an identification that no datagram of this process had.
func (w *world) nextID() uint32 { return 1000 + w.datagrams.Add(1) }

// sendRaw sends IP packets as they are.
func (w *world) sendRaw(from string, to netip.Addr, packets [][]byte) {
	w.Helper()
	w.must(w.callers[from].ns.Do(func() error {
		var sa unix.Sockaddr = &unix.SockaddrInet6{Addr: to.As16()}
		domain := unix.AF_INET6
		if to.Is4() {
			sa, domain = &unix.SockaddrInet4{Addr: to.As4()}, unix.AF_INET
		}
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return fmt.Errorf("raw socket: %w", err)
		}
		defer unix.Close(fd)
		for i, p := range packets {
			if err := unix.Sendto(fd, p, 0, sa); err != nil {
				return fmt.Errorf("packet %d: %w", i, err)
			}
		}
		return nil
	}))
}

// cutDatagram are the IP packets of a UDP datagram in fragments, in order.
func cutDatagram(src, dst netip.AddrPort, payload []byte, id uint32) (out [][]byte) {
	const piece = 1280
	a, b := src.Addr().AsSlice(), dst.Addr().AsSlice()
	length := 8 + len(payload)
	udp := binary.BigEndian.AppendUint16(nil, src.Port())
	udp = binary.BigEndian.AppendUint16(udp, dst.Port())
	udp = binary.BigEndian.AppendUint16(udp, uint16(length))
	udp = append(append(udp, 0, 0), payload...)
	binary.BigEndian.PutUint16(udp[6:], inetSum(uint32(unix.IPPROTO_UDP+length), a, b, udp))
	for off := 0; off < length; off += piece {
		part := udp[off:min(off+piece, length)]
		more := off+piece < length
		var head []byte
		if src.Addr().Is4() {
			head = []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
			binary.BigEndian.PutUint16(head[2:], uint16(20+len(part)))
			binary.BigEndian.PutUint16(head[4:], uint16(id))
			binary.BigEndian.PutUint16(head[6:], uint16(off/8)|family(more, uint16(0), 0x2000))
		} else {
			head = []byte{0x60, 0, 0, 0, 0, 0, unix.IPPROTO_FRAGMENT, 64}
			binary.BigEndian.PutUint16(head[4:], uint16(8+len(part)))
		}
		head = append(append(head, a...), b...)
		if src.Addr().Is6() {
			head = append(head, unix.IPPROTO_UDP, 0)
			head = binary.BigEndian.AppendUint16(head, uint16(off)|family(more, uint16(0), 1))
			head = binary.BigEndian.AppendUint32(head, id)
		} else {
			binary.BigEndian.PutUint16(head[10:], inetSum(0, head))
		}
		out = append(out, append(head, part...))
	}
	return out
}

// inetSum is the internet's checksum; parts but the last have even lengths.
func inetSum(sum uint32, parts ...[]byte) uint16 {
	for _, part := range parts {
		for i, b := range part {
			sum += uint32(b) << (8 * (1 - i%2))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	if sum == 0xffff {
		return 0xffff
	}
	return ^uint16(sum)
}

// Fragments in order by every kind of way, with every way of answering clients
// outside.
func TestLargeDatagrams(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--external-source", "dsr", "--routing-mode", "cross-subnet"}, {"--external-source", "snat", "--routing-mode", "ipip"}} {
		t.Run(args[1], func(t *testing.T) {
			t.Parallel()
			own(t, args...).largeDatagrams()
		})
	}
}
