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

// reordered: datagrams whose fragments come last first arrive by every kind of
// way, and are answered; they go through the kernel's reassembly, and not
// through the firewall of the node that forwards.
func (w *world) reordered() {
	near, far := service{name: "reordered-near", n: 246, ends: "back-a"}, service{name: "reordered-far", n: 247, ends: "back-b"}
	host := service{name: "reordered-host", n: 248, ends: "node-a"}
	for _, s := range []service{near, far, host} {
		w.put(s)
	}
	w.eachFamily(func(w *world, v6 bool) {
		met := make(map[string]int)
		for _, n := range w.Nodes {
			met[n.NodeName] = w.forwarded(n, "pods")
		}
		for i, c := range []struct {
			from, by, hook string
			to             netip.AddrPort
		}{
			{"pod-a", "back-a", "from_pod", netip.AddrPortFrom(w.addr("back-a", v6), cluster.ServerPort)},
			{"pod-a", "back-b", "from_pod", netip.AddrPortFrom(w.addr("back-b", v6), cluster.ServerPort)},
			{"pod-a", "node-a", "from_pod", netip.AddrPortFrom(w.addr("node-a", v6), cluster.ServerPort)},
			{"pod-a", "back-a", "from_pod", near.frontend(w, "cluster", v6)},
			{"pod-a", "back-b", "from_pod", far.frontend(w, "cluster", v6)},
			{"pod-a", "node-a", "from_pod", host.frontend(w, "cluster", v6)},
			{"out", "back-a", "from_netdev", near.frontend(w, "node@node-a", v6)},
			{"out", "back-b", "from_netdev", far.frontend(w, "node@node-a", v6)},
			{"out", "node-a", "from_netdev", host.frontend(w, "node@node-a", v6)},
			{"out", "node-a", "from_netdev", netip.AddrPortFrom(w.addr("node-a", v6), cluster.ServerPort)},
		} {
			before, err := w.read()
			w.must(err)
			source := netip.AddrPortFrom(w.addr(c.from, v6), uint16(21000+i))
			if server, err := w.exchangeReordered(c.from, source, c.to); err != nil || server != c.by {
				now, _ := w.read()
				w.Errorf("%s to %v: answered by %q, %v, want %s; counted since:%v", c.from, c.to, server, err, c.by, now.since(before))
			}
			now, err := w.read()
			w.must(err)
			if key := (counterKey{"node-a", c.hook, "fragment_reassembly", v6}); now[key] == before[key] {
				w.Errorf("%s to %v: nothing went to the kernel's reassembly; counted since:%v", c.from, c.to, now.since(before))
			}
		}
		for _, n := range w.Nodes {
			if now := w.forwarded(n, "pods"); now != met[n.NodeName] {
				w.Errorf("%s: %d fragments met the FORWARD chain", n.NodeName, now-met[n.NodeName])
			}
		}
	})
}

// exchangeReordered sends a large datagram with the last fragment first, and
// again until it is answered: who answers may have to be told the MTU of its
// way.
func (w *world) exchangeReordered(from string, source, to netip.AddrPort) (server string, err error) {
	w.Helper()
	c := w.listen(from, source)
	defer c.Close()
	sent := bytes.Repeat([]byte("podweir "), large/8)
	buf := make([]byte, 64<<10)
	for end := time.Now().Add(patience); ; {
		cut := cutDatagram(source, to, sent, w.nextID())
		slices.Reverse(cut)
		w.sendRaw(from, to.Addr(), cut)
		w.must(c.SetReadDeadline(time.Now().Add(time.Second)))
		n, err := c.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(end) {
			continue
		}
		if err != nil {
			return "", err
		}
		var r probe.Reply
		if err := json.Unmarshal(buf[:n], &r); err != nil {
			return "", fmt.Errorf("answer of %d bytes: %w", n, err)
		}
		if r.Echo != string(sent) {
			return "", fmt.Errorf("%s got something else: %d bytes", r.Server, len(r.Echo))
		}
		return r.Server, nil
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
