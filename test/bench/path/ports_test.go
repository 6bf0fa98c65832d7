package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

func TestPortsInTurn(t *testing.T) {
	type taken struct {
		first, last int
		again       bool
	}
	ports := turn{ranges: []portRange{{1000, 1299}, {2000, 2150}}}
	var got []taken
	for range 6 {
		r, again, err := ports.take(50)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, taken{r.first, r.last, again})
	}
	// A hundred each, with those that warm up.
	want := []taken{
		{1000, 1099, false}, {1100, 1199, false}, {1200, 1299, false}, {2000, 2099, false},
		{1000, 1099, true}, {1100, 1199, true},
	}
	if !slices.Equal(got, want) {
		t.Errorf("ports %v, want %v", got, want)
	}
	// What does not fit into the rest of a range fits into the next lap's.
	if r, again, err := ports.take(200); err != nil || !again || r != (portRange{1000, 1249}) {
		t.Errorf("200 ports: %v, %v, %v", r, again, err)
	}
	if r, _, err := ports.take(300); err == nil {
		t.Errorf("a range of 300 gave 350 ports: %v", r)
	}
}

// Connections and datagrams do not use up each other's, and who leaves the
// choice to the kernel uses up none.
func TestWhoTakesPorts(t *testing.T) {
	p := podPorts()
	for _, l := range append(oneLoads(), twoLoads()...) {
		before := p
		first, err := p.take(t.Context(), nil, l, l.count, t.Logf)
		if err != nil {
			t.Fatal(err)
		}
		tcp, udp := p.tcp.at-before.tcp.at, p.udp.at-before.udp.at
		switch l.name {
		case "crr", "two-crr":
			if tcp == 0 || udp != 0 || first < minPort {
				t.Errorf("%s took port %d, %d of TCP's and %d of UDP's", l.name, first, tcp, udp)
			}
		case "first":
			if tcp != 0 || udp == 0 || first < minPort {
				t.Errorf("%s took port %d, %d of TCP's and %d of UDP's", l.name, first, tcp, udp)
			}
		default:
			if tcp != 0 || udp != 0 {
				t.Errorf("%s took %d of TCP's ports and %d of UDP's", l.name, tcp, udp)
			}
		}
	}
}

func TestAwait(t *testing.T) {
	// What remains by each look; then nothing is busy.
	looks := []time.Duration{time.Second, 0, time.Millisecond}
	asked, said := 0, []time.Duration{}
	announce := func(left time.Duration) { said = append(said, left) }
	err := await(t.Context(), func() (time.Duration, bool, error) {
		asked++
		if asked > len(looks) {
			return 0, false, nil
		}
		return looks[asked-1], true, nil
	}, announce)
	if err != nil || asked != len(looks)+1 || !slices.Equal(said, []time.Duration{time.Second}) {
		t.Errorf("error %v, asked %d times, said %v", err, asked, said)
	}
	broken := errors.New("broken")
	if err := await(t.Context(), func() (time.Duration, bool, error) { return 0, true, broken }, announce); !errors.Is(err, broken) {
		t.Errorf("error %v, want what the look said", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = await(ctx, func() (time.Duration, bool, error) {
		cancel()
		return time.Hour, true, nil
	}, announce)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v of a wait that was cancelled", err)
	}
}

// The kernel says which ports are held, of both families, and that nobody can
// bind to one.
func TestLingering(t *testing.T) {
	ns := cluster.ForTest(t, cluster.Config{}).Ext
	for _, ip := range []string{"127.0.0.1", "::1"} {
		var port int
		err := ns.Do(func() (err error) {
			port, err = endedConnection(ip)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		err = ns.Do(func() error {
			left, busy, err := lingering(portRange{port, port})
			if err == nil && (!busy || left <= 0 || left > time.Minute) {
				t.Errorf("%s, port %d: held %v, for %s more", ip, port, busy, left)
			}
			if _, busy, err := lingering(portRange{port + 1, port + 1}); err == nil && busy {
				t.Errorf("%s, port %d: held", ip, port+1)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// endedConnection is the port of a client that closed its connection first.
func endedConnection(ip string) (int, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return 0, err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return 0, err
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		return 0, err
	}
	defer s.Close()
	if err := c.Close(); err != nil {
		return 0, err
	}
	if n, err := s.Read(make([]byte, 1)); n != 0 {
		return 0, err
	}
	return c.LocalAddr().(*net.TCPAddr).Port, s.Close()
}
