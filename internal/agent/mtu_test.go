package agent

import (
	"log/slog"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/tunnel"
)

// The MTU of pods, of the tunnel's device and of the ways to nodes follows the
// devices by which nodes are reached, up and down, and pods are told.
func TestMTUFollowsTheDevices(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	b.await("ready", func() bool { return b.a.full })
	peer := netip.MustParseAddr("172.31.0.3")
	told := func() bool {
		select {
		case <-b.a.resized:
			return true
		default:
			return false
		}
	}
	if !told() {
		t.Error("nobody was told of the first MTU")
	}
	s := b.stack
	for _, c := range []struct {
		name      string
		change    func()
		pods, way int
		tell      bool
	}{
		{"smaller", func() { s.list[0].MTU = 1400 }, 1350, 1350, true},
		{"the same again", func() {}, 1350, 1350, false},
		{"larger", func() { s.list[0].MTU = 9000 }, 8950, 8950, true},
		{"one route is narrow: that way's matter", func() {
			s.ways = map[netip.Addr]node.Way{peer: {Device: 2, Nexthop: peer, MTU: 1300, Link: 9000}}
		}, 8950, 1250, false},
		{"nodes are reached by a narrower device than the one with the address", func() {
			s.list = append(s.list, node.Device{Index: 9, Name: "eth1", MTU: 1500, Up: true})
			s.ways = map[netip.Addr]node.Way{peer: {Device: 9, Nexthop: peer, MTU: 1500, Link: 1500}}
		}, 1450, 1450, true},
		{"back", func() { s.ways = nil; s.list = s.list[:1]; s.list[0].MTU = 1400 }, 1350, 1350, true},
	} {
		rounds := uint64(0)
		b.await("rounds", func() bool { rounds = b.a.stats.rounds; return true })
		s.event(c.change)
		way, overlay := 0, 0
		b.await(c.name, func() bool {
			id := b.a.peers.ids.byName["node-b"]
			v, _ := b.a.peers.nodes.Actual(uint32(id))
			s.mu.Lock()
			way, overlay = int(v.Mtu), s.overlays[len(s.overlays)-1].MTU
			s.mu.Unlock()
			return b.a.stats.rounds > rounds && b.a.MTU() == c.pods && way == c.way
		})
		if overlay != c.pods || told() != c.tell {
			t.Errorf("%s: MTU of the tunnel's device %d; want %d; pods told: want %v", c.name, overlay, c.pods, c.tell)
		}
	}
}

// N1: what the headers of each mode and underlay leave, and never less than
// IPv6 needs where pods have it.
func TestMTUOfPods(t *testing.T) {
	v4, v6 := netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("fd00:172:31::2")
	dual := []netip.Prefix{netip.MustParsePrefix("10.244.80.0/24"), netip.MustParsePrefix("fd00:10:244:50::/64")}
	for _, c := range []struct {
		name            string
		mode            tunnel.Mode
		self            netip.Addr
		cidrs           []netip.Prefix
		device, flag    int
		pods, ofOverlay int
	}{
		{"vxlan over IPv4", tunnel.ModeVXLAN, v4, dual, 1500, 0, 1450, 1450},
		{"vxlan over IPv6", tunnel.ModeVXLAN, v6, dual, 1500, 0, 1430, 1430},
		{"cross-subnet", tunnel.ModeCrossSubnet, v4, dual, 1500, 0, 1450, 1450},
		{"direct", tunnel.ModeDirect, v4, dual, 1500, 0, 1500, 1450},
		{"jumbo", tunnel.ModeVXLAN, v4, dual, 9000, 0, 8950, 8950},
		{"fixed by flag", tunnel.ModeVXLAN, v4, dual, 9000, 1400, 1400, 1400},
		{"fixed by flag, direct", tunnel.ModeDirect, v4, dual, 9000, 1400, 1400, 1400},
		{"narrow, IPv4 alone", tunnel.ModeVXLAN, v4, dual[:1], 1300, 0, 1250, 1250},
		{"narrow, both", tunnel.ModeVXLAN, v4, dual, 1300, 0, 1280, 1280},
		{"no device yet", tunnel.ModeVXLAN, netip.Addr{}, nil, 0, 0, 0, 0},
		{"no device yet, by flag", tunnel.ModeVXLAN, netip.Addr{}, nil, 0, 1400, 1400, 1400},
	} {
		a := &Agent{opt: Options{Mode: c.mode, MTU: c.flag}, log: slog.New(slog.DiscardHandler), resized: make(chan struct{}, 1)}
		a.world.self = tunnel.NodeInfo{Addr: c.self, PodCIDRs: c.cidrs}
		if c.self.IsValid() {
			a.world.devices = []node.Device{{Index: 2, MTU: c.device, Addrs: []netip.Addr{c.self}}}
		}
		got := a.syncMTU()
		if a.tellMTU(); got != c.ofOverlay || a.MTU() != c.pods {
			t.Errorf("%s: pods %d, tunnel's device %d; want %d and %d", c.name, a.MTU(), got, c.pods, c.ofOverlay)
		}
	}
}

// What the datapath learns of a way's MTU stays for a while, whatever else
// makes the agent write the entry, and is then forgotten.
func TestLearnedMTUExpires(t *testing.T) {
	var skew atomic.Int64
	b := newAgentBenchAt(t, func() time.Time { return time.Now().Add(time.Duration(skew.Load())) })
	b.cluster()
	b.done()
	b.await("ready", func() bool { return b.a.full })
	nodes := b.dp.set.Nodes
	var id uint32
	b.await("the node's entry", func() bool {
		id = b.a.peers.ids.byName["node-b"]
		v, _ := b.a.peers.nodes.Actual(id)
		return v.Mtu == 1450
	})
	v, _, err := nodes.Get(id)
	if err != nil {
		t.Fatal(err)
	}
	v.Mtu = 1350
	if err := nodes.Put(id, v); err != nil {
		t.Fatal(err)
	}
	is := func(what string, change func(), mtu uint16) {
		t.Helper()
		rounds := uint64(0)
		b.await("rounds", func() bool { rounds = b.a.stats.rounds; return true })
		b.stack.event(change)
		b.await(what, func() bool {
			have, _ := b.a.peers.nodes.Actual(id)
			return b.a.stats.rounds > rounds && have.Mtu == mtu
		})
		if v, _, err := nodes.Get(id); err != nil || v.Mtu != mtu {
			t.Errorf("%s: the map says %d, %v; want %d", what, v.Mtu, err, mtu)
		}
	}
	is("learned", func() {}, 1350)
	is("the device grows", func() { b.stack.list[0].MTU = 9000 }, 1350)
	is("it shrinks below", func() { b.stack.list[0].MTU = 1380 }, 1330)
	is("and grows again", func() { b.stack.list[0].MTU = 9000 }, 1350)
	skew.Store(int64(learnedFor + time.Minute))
	is("forgotten", func() {}, 8950)
	if b.a.MTU() != 8950 {
		t.Errorf("MTU of pods is %d: one way's matter", b.a.MTU())
	}
}
