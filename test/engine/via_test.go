package engine

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// Two services share a backend, on this node or another, and the client uses
// one source port to both and to the backend itself at the same time (S27):
// every answer comes from whom it asked.
func TestServicesThatShareABackend(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	for i, server := range []*cluster.Pod{w.remote, w.local} {
		vip := func(f family, n int) netip.Addr {
			return f.pick(fmt.Sprintf("10.98.27.%d", 2*i+n), fmt.Sprintf("fd00:10:98::27%d", 2*i+n))
		}
		for n := range 2 {
			w.service(t, ctx, fmt.Sprintf("shared-%d-%d", i, n), vip(families[0], n).String(), vip(families[1], n).String(), server)
		}
		for _, f := range families {
			t.Run(server.PodName+" "+f.name, func(t *testing.T) {
				from, at := port(f.of(w.client), w.port()), port(f.of(server), serverPort)
				echoTCP(t, server.Netns, at)
				defer echoUDP(t, server.Netns, at).Close()
				share := func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }
				var tcp, udps []net.Conn
				before := counters(t, w.a)
				for _, to := range []string{port(vip(f, 0), 80), port(vip(f, 1), 80), at} {
					c, err := dial(ctx, w.client.Netns, from, to, nil)
					ok(t, err)
					defer func() { c.(*net.TCPConn).SetLinger(0); c.Close() }()
					tcp = append(tcp, c)
					// A connected socket takes answers from its peer alone.
					udps = append(udps, udp(t, w.client.Netns, from, to, share))
				}
				for round := range 5 {
					for i := range tcp {
						ok(t, talk(tcp[i], fmt.Sprintf("tcp %d to %v", round, tcp[i].RemoteAddr())))
						ok(t, talk(udps[i], fmt.Sprintf("udp %d to %v", round, udps[i].RemoteAddr())))
					}
				}
				counters(t, w.a).since(before).want(t, "second and third flow", counts{"flow_port_changed": 4, "drop_flow_collision": 0})
			})
		}
	}
}

// received waits for the next inner packet at a tunnel peer.
func (v *vtep) received(t *testing.T) (l3, l4 gopacket.Layer, payload []byte, flags byte, raw gopacket.Packet) {
	t.Helper()
	buf := make([]byte, 64<<10)
	ok(t, v.SetReadDeadline(soon()))
	n, _, err := v.ReadFromUDP(buf)
	ok(t, err)
	p := gopacket.NewPacket(buf[:n], layers.LayerTypeVXLAN, gopacket.Default)
	l3 = p.NetworkLayer()
	switch l := p.TransportLayer().(type) {
	case *layers.TCP:
		return l3, l, l.Payload, l.Contents[13], p
	case *layers.UDP:
		return l3, l, l.Payload, 0, p
	}
	t.Fatalf("at %v: %v", v.node, p)
	return nil, nil, nil, 0, nil
}

// entry is one connection of a client outside the cluster through one node.
type entry struct {
	*vtep
	out  packet
	next uint32 // sequence number of the other side
}

// expect waits for a packet with these flags (TCP: ignoring bare
// acknowledgements) and checks that it goes to the client's own port.
func (e *entry) expect(t *testing.T, want byte) []byte {
	t.Helper()
	for {
		l3, l4, payload, flags, raw := e.received(t)
		flow, ports := l3.(gopacket.NetworkLayer).NetworkFlow(), l4.(gopacket.TransportLayer).TransportFlow()
		src, _ := netip.AddrFromSlice(flow.Src().Raw())
		dst, _ := netip.AddrFromSlice(flow.Dst().Raw())
		if src != e.out.dst || dst != e.out.src {
			t.Fatalf("at %v: %v", e.node, raw)
		}
		if got := ports.String(); got != fmt.Sprintf("%d->%d", e.out.dport, e.out.sport) {
			t.Fatalf("at %v: ports %s, want %d->%d", e.node, got, e.out.dport, e.out.sport)
		}
		if e.out.proto == 6 {
			tcp := l4.(*layers.TCP)
			if flags == ack && want != ack && len(payload) == 0 {
				continue
			}
			if flags&want != want || flags&rst != 0 {
				t.Fatalf("at %v: flags %#x, want %#x", e.node, flags, want)
			}
			e.next = tcp.Seq + uint32(len(payload))
			if flags&(syn|fin) != 0 {
				e.next++
			}
		}
		return payload
	}
}

// A client outside uses one port towards two entry nodes that pick the same
// backend (S28): the tunnel frames say by their inner source address that the
// source entered there. Both connections live, the backend sees two ports,
// and each answer leaves by the node its request came by, to the port the
// client used.
func TestOnePortThroughTwoEntryNodes(t *testing.T) {
	w := shared(t)
	ctx := within(t, 2*time.Minute)
	via := net.HardwareAddr{0x02, 'p', 'w', 0, 0, 0x02}
	peers := []*vtep{w.newVTEP(ctx, t, "entry1", "172.31.0.7/24", w.b), w.newVTEP(ctx, t, "entry2", "172.31.0.8/24", w.b)}
	for _, f := range families {
		for _, proto := range []byte{17, 6} {
			t.Run(fmt.Sprint(f.name, " protocol ", proto), func(t *testing.T) {
				at := port(f.of(w.remote), serverPort)
				seen := make(chan string, 10)
				if proto == 17 {
					defer watchedUDP(t, w.remote.Netns, at, seen).Close()
				} else {
					defer watchedTCP(t, w.remote.Netns, at, seen).Close()
				}
				before, number := counters(t, w.b), w.port()
				var conns []*entry
				clients := map[string]bool{}
				for i, v := range peers {
					e := &entry{vtep: v, out: packet{
						srcMAC: via, src: f.pick("203.0.113.7", "2001:db8:7::7"), dst: f.of(w.remote),
						sport: number, dport: serverPort, proto: proto, seq: uint32(1000 * (i + 1)),
					}}
					if proto == 6 {
						e.out.flags = syn
						v.send(t, e.out)
						e.expect(t, syn|ack)
						e.out.seq++
						e.out.flags, e.out.ack = ack, e.next
						v.send(t, e.out)
					} else {
						e.out.payload = []byte("open")
						v.send(t, e.out)
						if got := e.expect(t, 0); string(got) != "open" {
							t.Fatalf("%q", got)
						}
					}
					clients[<-seen] = true
					conns = append(conns, e)
				}
				if !clients[port(f.pick("203.0.113.7", "2001:db8:7::7"), number)] || len(clients) != 2 {
					t.Errorf("the backend saw %v, want port %d once and another", clients, number)
				}
				// In turns, so that each must find its own way back.
				for round := range 4 {
					for i, e := range conns {
						e.out.payload = fmt.Appendf(nil, "round %d by %d", round, i)
						if proto == 6 {
							e.out.flags, e.out.ack = ack|psh, e.next
						}
						e.send(t, e.out)
						if got := e.expect(t, psh); !bytes.Equal(got, e.out.payload) {
							t.Fatalf("%q answered with %q", e.out.payload, got)
						}
						e.out.seq += uint32(len(e.out.payload))
					}
				}
				got := counters(t, w.b).since(before)
				got.want(t, "two entry nodes", counts{"flow_port_changed": 1})
				if len(got.drops()) > 0 {
					t.Errorf("drops: %v", got.drops())
				}
				for _, e := range conns {
					e.out.flags, e.out.payload = rst|ack, nil
					if proto == 6 {
						e.send(t, e.out)
					}
				}
			})
		}
	}
}

// watchedTCP echoes and says who connects.
func watchedTCP(t *testing.T, n *cluster.Netns, addr string, seen chan<- string) net.Listener {
	l := listen(t, n, addr, nil)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			seen <- c.RemoteAddr().String()
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l
}

// watchedUDP echoes and says who is new.
func watchedUDP(t *testing.T, n *cluster.Netns, addr string, seen chan<- string) *net.UDPConn {
	u := udp(t, n, addr, "", nil)
	go func() {
		known := map[string]bool{}
		buf := make([]byte, 2048)
		for {
			k, from, err := u.ReadFromUDP(buf)
			if err != nil {
				return
			}
			if !known[from.String()] {
				known[from.String()] = true
				seen <- from.String()
			}
			_, _ = u.WriteToUDP(buf[:k], from)
		}
	}()
	return u
}
