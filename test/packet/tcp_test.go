package packet

import (
	"testing"
	"time"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const (
	finOrig  = uint8(bpf.DpPwTcpStatePW_TCP_FIN_ORIG)
	finReply = uint8(bpf.DpPwTcpStatePW_TCP_FIN_REPLY)
	tcpRST   = uint8(bpf.DpPwTcpStatePW_TCP_RST)
)

// conn is a TCP connection of the client pod to the remote pod through a
// service, the flow with the most to get wrong.
type conn struct {
	w      *world
	out    frame // as the client sends
	answer frame // as the backend answers
}

func (w *world) conn(port uint16) *conn {
	out := tcp(ap(w.f.client, port), ap(w.f.vipRemote, svcPort), 0)
	return &conn{w, out, tcp(ap(w.f.remote, podPort), out.src, 0)}
}

func (c *conn) send(flags uint8) *result {
	c.w.t.Helper()
	c.out.flags = flags
	return c.w.pod(devClient, c.out)
}

func (c *conn) reply(flags uint8) *result {
	c.w.t.Helper()
	c.answer.flags = flags
	return c.w.tunnel(c.w.f.nodeB, c.answer)
}

// open takes the connection through its handshake into pw_flows.
func (c *conn) open() *conn {
	c.w.t.Helper()
	c.send(syn).is(fwdTunnel, miss, created)
	c.reply(syn|ack).is(fwdLocal, hitNew)
	c.send(ack).is(fwdTunnel, hitNew, confirmed)
	c.send(ack|psh).is(fwdTunnel, hit)
	c.reply(ack|psh).is(fwdLocal, hit)
	return c
}

func (c *conn) tcp() (uint8, uint8) {
	c.w.t.Helper()
	return c.w.entry(c.out).Tcp, c.w.entry(c.answer).Tcp
}

func (c *conn) state(want uint8) {
	c.w.t.Helper()
	if fwd, rev := c.tcp(); fwd != want || rev != want {
		c.w.t.Fatalf("entries hold %v and %v, want %v", maps.TCPStateNames(fwd),
			maps.TCPStateNames(rev), maps.TCPStateNames(want))
	}
}

func TestTCPRetransmittedSYNConfirmsNothing(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000)
		c.send(syn).is(fwdTunnel, miss, created)
		c.send(syn).is(fwdTunnel, hitNew)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		for range 2 {
			c.send(syn).is(fwdTunnel, hitNew)
			c.reply(syn|ack).is(fwdLocal, hitNew)
		}
		if w.entry(c.out).confirmed || !w.entry(c.out).is(flagReplied) {
			t.Fatal("want a flow that was answered and is not confirmed")
		}
		c.send(ack).is(fwdTunnel, hitNew, confirmed)
		if w.entry(c.out).Created == 0 || w.entry(c.out).KeyHash == 0 {
			t.Fatal("the confirmed entry lost fields")
		}
	})
}

// A flow whose SYN is answered by RST is closed and never confirmed.
func TestTCPRefused(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000)
		c.send(syn).is(fwdTunnel, miss, created)
		c.reply(rst|ack).is(fwdLocal, hitNew)
		c.state(tcpRST)
		if w.entry(c.out).confirmed {
			t.Fatal("an RST confirmed the flow")
		}
		c.send(syn).is(fwdTunnel, takenOver, miss, created)
		c.state(0)
	})
}

func TestTCPClose(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000).open()
		c.send(fin|ack).is(fwdTunnel, hit)
		c.state(finOrig)
		// A SYN on a half-closed tuple goes through the flow it has.
		c.send(syn).is(fwdTunnel, hit)
		c.reply(ack).is(fwdLocal, hit)
		c.reply(fin|ack).is(fwdLocal, hit)
		c.state(finOrig | finReply)
		// The last ACK and what is late still find their way.
		c.send(ack).is(fwdTunnel, hit)
		c.reply(fin|ack).is(fwdLocal, hit)
		// Closed: the next SYN is a new flow, unconfirmed, in both tables' place.
		c.send(syn).is(fwdTunnel, takenOver, miss, created)
		c.state(0)
		if w.entry(c.out).confirmed || w.entry(c.answer).confirmed {
			t.Fatal("the closed flow's entries are still there")
		}
		c.reply(syn|ack).is(fwdLocal, hitNew)
		c.send(ack).is(fwdTunnel, hitNew, confirmed)
		c.reply(rst).is(fwdLocal, hit)
		c.state(tcpRST)
		c.send(syn).is(fwdTunnel, takenOver, miss, created)
	})
}

// The FINs of an unconfirmed flow are kept when it is confirmed.
func TestTCPFinBeforeConfirm(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000)
		c.send(syn).is(fwdTunnel, miss, created)
		c.reply(syn|ack).is(fwdLocal, hitNew)
		c.reply(fin|ack).is(fwdLocal, hitNew)
		c.send(ack).is(fwdTunnel, hitNew, confirmed)
		c.state(finReply)
		c.send(fin|ack).is(fwdTunnel, hit)
		c.state(finOrig | finReply)
	})
}

// A policy is asked again when a tuple is used again.
func TestTCPReusedTupleIsJudgedAgain(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		c := w.conn(40000).open()
		c.send(rst).is(fwdTunnel, hit)
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyOut = 1 })
		c.send(syn).is(bpf.DpPwReasonPW_DROP_POLICY_EGRESS, takenOver, miss)
		w.noEntry(c.out)
		w.noEntry(c.answer)
	})
}

func TestTCPMidstream(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		fr := tcp(ap(w.f.client, 40000), ap(w.f.remote, podPort), ack|psh).with("in the middle")
		w.pod(devClient, fr).is(fwdTunnel, miss, created, midstream)
		if !w.entry(fr).is(flagMidstream) {
			t.Fatal("not marked as picked up in the middle")
		}
		answer := fr.back()
		w.tunnel(w.f.nodeB, answer).is(fwdLocal, hitNew)
		w.pod(devClient, fr).is(fwdTunnel, hitNew, confirmed)
		w.pod(devClient, fr).is(fwdTunnel, hit)
	})
}

// Picked up from the answering side, a flow is judged in that direction: the
// responder's egress policy counts, the initiator's does not.
func TestTCPMidstreamJudgesItsOwnDirection(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.edit(w.f.client, func(e *maps.Endpoint) { e.PolicyIn = 1 })
		fr := tcp(ap(w.f.remote, podPort), ap(w.f.client, 40000), ack|psh)
		w.tunnel(w.f.nodeB, fr).is(bpf.DpPwReasonPW_DROP_POLICY_INGRESS, miss)
		w.noEntry(fr)
	})
}

// SYN-ACK and RST are delivered if they may be, and start nothing.
func TestTCPSegmentsThatStartNothing(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for _, flags := range []uint8{syn | ack, rst, rst | ack} {
			fr := tcp(ap(w.f.client, 40000), ap(w.f.remote, podPort), flags)
			w.pod(devClient, fr).is(fwdTunnel, miss)
			w.noEntry(fr)
			w.noEntry(fr.back())
			in := tcp(ap(w.f.remote, podPort), ap(w.f.client, 40000), flags)
			w.tunnel(w.f.nodeB, in).is(fwdLocal, miss)
			w.noEntry(in)
		}
	})
}

// Entries live as long as their state says; the age is written back.
func TestExpiry(t *testing.T) {
	limits, err := loader.LoadTimeouts()
	if err != nil {
		t.Fatal(err)
	}
	both(t, func(t *testing.T, w *world) {
		opened := func(port uint16) *conn { return w.conn(port).open() }
		young := w.conn(41000)
		young.send(syn).is(fwdTunnel, miss, created)
		half := opened(41002)
		half.send(fin|ack).is(fwdTunnel, hit)
		closed := opened(41003)
		closed.send(rst).is(fwdTunnel, hit)
		for _, c := range []struct {
			name  string
			conn  *conn
			limit time.Duration
		}{
			{"new", young, limits.TCPNew},
			{"established", opened(41001), limits.TCPEstablished},
			{"half closed", half, limits.TCPHalfClosed},
			{"closed", closed, limits.TCPClosed},
		} {
			t.Run(c.name, func(t *testing.T) {
				w.t, c.conn.w.t = t, t
				k := c.conn.out.key()
				w.age(k, c.limit-5*time.Second)
				w.age(c.conn.answer.key(), c.limit-5*time.Second)
				if r := c.conn.send(ack); r.counts[miss] != 0 {
					t.Fatalf("expired too early: %v", r)
				}
				// One direction idle for long is no death: the other one counts.
				w.age(k, c.limit+time.Second)
				if r := c.conn.send(ack); r.counts[miss] != 0 {
					t.Fatalf("expired although the other direction is alive: %v", r)
				}
				w.age(k, c.limit+time.Second)
				w.age(c.conn.answer.key(), c.limit+time.Second)
				c.conn.send(syn).is(fwdTunnel, takenOver, miss, created)
				if w.entry(c.conn.out).confirmed {
					t.Fatal("the expired entry is still there")
				}
				// And so it is for what starts nothing.
				w.age(k, limits.TCPNew+time.Second)
				w.age(c.conn.answer.key(), limits.TCPNew+time.Second)
				c.conn.send(ack).is(fwdTunnel, takenOver, miss, created, bpf.DpPwReasonPW_FLOW_MIDSTREAM)
			})
		}
	})
}

// age moves an entry's last packet into the past.
func (w *world) age(k maps.FlowKey, by time.Duration) {
	w.t.Helper()
	for _, m := range []maps.Map[maps.FlowKey, maps.Flow]{w.set.Flows, w.set.FlowsNew} {
		f, ok, err := m.Get(k)
		if err != nil {
			w.t.Fatal(err)
		}
		if !ok {
			continue
		}
		f.LastSeen = w.now() - uint64(by)
		put(w, m, k, f)
	}
}
