package packet

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/maps"
)

// family is the address plan in one family.
type family struct {
	name string
	v6   bool

	client, local, third     netip.Addr // pods of node a, the one under test
	free                     netip.Addr // node a's range, no pod has it
	remote, remoteFree       netip.Addr // node b's range: a pod, and none
	far                      netip.Addr // a pod of node c
	nodeA, nodeB, nodeC      netip.Addr
	router, world            netip.Addr
	vip, vipLocal, vipRemote netip.Addr // services; vip has both backends
	vipEmpty, vipHost        netip.Addr // without a backend; backend on node a's host
	lb                       netip.Addr // of a load balancer, outside of all ranges
	unowned                  netip.Addr // service range, no service
	lost                     netip.Addr // a pod range whose node is unknown
	multicast                netip.Addr

	podsA, podsB, podsC, podsLost, services netip.Prefix
}

func families() []family {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	return []family{{
		name:   "IPv4",
		client: a("10.244.80.65"), local: a("10.244.80.66"), third: a("10.244.80.67"), free: a("10.244.80.99"),
		remote: a("10.244.158.65"), remoteFree: a("10.244.158.99"), far: a("10.244.9.65"),
		nodeA: a("172.31.0.2"), nodeB: a("172.31.0.3"), nodeC: a("172.31.0.4"),
		router: a("172.31.0.1"), world: a("203.0.113.9"),
		vip: a("10.98.235.247"), vipLocal: a("10.98.0.1"), vipRemote: a("10.98.0.2"),
		vipEmpty: a("10.98.0.3"), vipHost: a("10.98.0.4"), unowned: a("10.98.9.9"), lb: a("198.51.100.7"),
		lost: a("10.244.77.1"), multicast: a("224.0.0.251"),
		podsA: p("10.244.80.0/24"), podsB: p("10.244.158.0/24"), podsC: p("10.244.9.0/24"),
		podsLost: p("10.244.77.0/24"), services: p("10.98.0.0/16"),
	}, {
		name: "IPv6", v6: true,
		client: a("fd00:10:244:50::41"), local: a("fd00:10:244:50::42"), third: a("fd00:10:244:50::43"),
		free:   a("fd00:10:244:50::99"),
		remote: a("fd00:10:244:9e::41"), remoteFree: a("fd00:10:244:9e::99"), far: a("fd00:10:244:9::41"),
		nodeA: a("fd00:172:31::2"), nodeB: a("fd00:172:31::3"), nodeC: a("fd00:172:31::4"),
		router: a("fd00:172:31::1"), world: a("2001:db8::9"),
		vip: a("fd00:10:98::ebf7"), vipLocal: a("fd00:10:98::1"), vipRemote: a("fd00:10:98::2"),
		vipEmpty: a("fd00:10:98::3"), vipHost: a("fd00:10:98::4"), unowned: a("fd00:10:98::9"), lb: a("2001:db8:1::7"),
		lost: a("fd00:10:244:77::1"), multicast: a("ff02::fb"),
		podsA: p("fd00:10:244:50::/64"), podsB: p("fd00:10:244:9e::/64"), podsC: p("fd00:10:244:9::/64"),
		podsLost: p("fd00:10:244:77::/64"), services: p("fd00:10:98::/112"),
	}}
}

// Identities, generation slots and node ids of the world.
const (
	idClient = maps.IdentityFirstDynamic + iota
	idLocal
	idThird
	idRemote
)

const (
	slotConst = iota
	slotShared
	slotClient
	slotLocal
	slotThird
	slotRemote
	slotNodeA
	slotNodeB
	slotWorld
	slotMax
)

const (
	nodeIDB = 1
	nodeIDC = 2
)

const (
	svcPort   = 80   // TCP and UDP, to podPort; each protocol has its own set
	podPort   = 8080 // what the backends listen on
	nodePort  = 30080
	sctpPort  = 90 // SCTP, same port at the backend
	sctpXlate = 91 // SCTP, to another port
	setBoth   = 1
	setLocal  = 2
	setRemote = 3
	setHost   = 4
	setUDP    = 5
	setSCTP   = 6
	setSCTPX  = 7
	setFree   = 50 // and above: for tests
)

// world is the cluster as node a's maps describe it.
type world struct {
	t testing.TB
	f family
	*datapath
	live []frame // of flows that are there, see liven
	// What pods send passes filters of others, see filter.
	filtered bool

	// What TestFuzz is about.
	firsts       map[datagramKey]int // the headers of first fragments
	queue        [][]byte            // fragments that come later
	dsr, defrags bool
}

// both runs a test in the world of each family.
func both(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	for _, f := range families() {
		t.Run(f.name, func(t *testing.T) { test(t, newWorld(t, f)) })
	}
}

func newWorld(t testing.TB, f family) *world {
	t.Helper()
	d, err := standard()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, f: f, datapath: d, filtered: *allFiltered}
	w.fill()
	return w
}

// put writes one entry or ends the test.
func put[K comparable, V any](w *world, m maps.Map[K, V], k K, v V) {
	w.t.Helper()
	if err := m.Put(k, v); err != nil {
		w.t.Fatal(err)
	}
}

func del[K comparable, V any](w *world, m maps.Map[K, V], k K) {
	w.t.Helper()
	if err := m.Delete(k); err != nil {
		w.t.Fatal(err)
	}
}

func clear[K comparable, V any](w *world, m maps.Map[K, V]) {
	w.t.Helper()
	all, err := m.Dump()
	if err != nil {
		w.t.Fatal(err)
	}
	for k := range all {
		del(w, m, k)
	}
}

func (w *world) fill() {
	w.t.Helper()
	w.last = nil
	s := &w.set
	clear(w, s.Flows)
	clear(w, s.FlowsNew)
	clear(w, s.Frags)
	clear(w, s.Services)
	clear(w, s.Backends)
	clear(w, s.Endpoints)
	clear(w, s.Addrs)
	clear(w, s.Prefixes)
	clear(w, s.NodeIDs)
	clear(w, s.Policy)
	clear(w, s.BackendStates)
	clear(w, s.Maglev)
	clear(w, s.Affinity)
	clear(w, s.AffinityIn)
	clear(w, s.SrcRanges)
	clear(w, s.DevAddrs)
	for slot := uint32(slotConst + 1); slot < slotMax; slot++ {
		put(w, s.Gens, slot, 1)
	}
	for _, port := range []uint32{svcPort, podPort, 8081} {
		put(w, s.PortClass, port, 0)
	}
	w.fillPeers()
	w.fillServices()
}

func (w *world) fillPeers() {
	f, s := w.f, &w.set
	w.endpoint(f.client, maps.Endpoint{Id: 1, Ifindex: w.index(devClient), Identity: idClient, Slot: slotClient, Mac: mac(0x41)})
	w.endpoint(f.local, maps.Endpoint{Id: 2, Ifindex: w.index(devLocal), Identity: idLocal, Slot: slotLocal, Mac: mac(0x42)})
	w.endpoint(f.third, maps.Endpoint{Id: 3, Ifindex: w.index(devThird), Identity: idThird, Slot: slotThird, Mac: mac(0x43)})
	w.addr(f.remote, maps.Peer{Identity: idRemote, Slot: slotRemote, Node: nodeIDB, Flags: maps.PeerPod})
	w.addr(f.nodeA, maps.Peer{Identity: maps.IdentityHost, Slot: slotNodeA, Flags: maps.PeerHost | maps.PeerNodePort | maps.PeerInternal})
	w.addr(f.nodeB, maps.Peer{Identity: maps.IdentityRemoteNode, Slot: slotNodeB, Node: nodeIDB, Flags: maps.PeerNode | maps.PeerNodePort})
	w.addr(f.nodeC, maps.Peer{Identity: maps.IdentityRemoteNode, Slot: slotShared, Node: nodeIDC, Flags: maps.PeerNode})
	w.prefix(f.podsA, maps.Peer{Identity: maps.IdentityPod, Slot: slotShared, Flags: maps.PeerPod | maps.PeerLocal})
	w.prefix(f.podsB, maps.Peer{Identity: maps.IdentityPod, Slot: slotShared, Node: nodeIDB, Flags: maps.PeerPod})
	w.prefix(f.podsC, maps.Peer{Identity: maps.IdentityPod, Slot: slotShared, Node: nodeIDC, Flags: maps.PeerPod})
	w.prefix(f.podsLost, maps.Peer{Identity: maps.IdentityPod, Slot: slotShared, Flags: maps.PeerPod})
	w.prefix(f.services, maps.Peer{Slot: slotShared, Flags: maps.PeerService})
	w.prefix(netip.MustParsePrefix("::/0"), maps.Peer{Identity: maps.IdentityWorld, Slot: slotWorld})
	put(w, s.Nodes, 0, maps.Node{Addr: maps.ToAddr(outer().nodeA)})
	put(w, s.Nodes, nodeIDB, maps.Node{Addr: maps.ToAddr(f.nodeB), Mac: mac(0xb)})
	put(w, s.Nodes, nodeIDC, maps.Node{Addr: maps.ToAddr(f.nodeC), Mac: mac(0xc)})
	for id, pods := range map[uint32]netip.Prefix{0: f.podsA, nodeIDB: f.podsB, nodeIDC: f.podsC} {
		put(w, s.NodesV6, id, maps.NodeV6{})
		if f.v6 {
			put(w, s.NodesV6, id, maps.NodeV6{Pods: maps.ToAddr(pods.Addr()), Host: maps.ToAddr(netip.MustParseAddr("fd00:172:31::"))})
		}
	}
	put(w, s.NodeIDs, maps.ToAddr(f.nodeB), nodeIDB)
	put(w, s.NodeIDs, maps.ToAddr(f.nodeC), nodeIDC)
	for _, index := range []uint32{0, w.index(devWire)} {
		own := maps.DevAddrs{V4: maps.ToAddr(families()[0].nodeA), V6: maps.ToAddr(families()[1].nodeA)}
		put(w, s.DevAddrs, index, own)
	}
}

func (w *world) fillServices() {
	f := w.f
	at := netip.AddrPortFrom
	w.backends(setBoth, at(f.local, podPort), at(f.remote, podPort))
	w.backends(setLocal, at(f.local, podPort))
	w.backends(setRemote, at(f.remote, podPort))
	w.backends(setHost, at(f.nodeA, podPort))
	w.backends(setUDP, at(f.third, podPort))
	w.backends(setSCTP, at(f.third, sctpPort))
	w.backends(setSCTPX, at(f.third, sctpPort+5))
	for _, a := range []netip.Addr{f.vip, f.vipLocal, f.vipRemote, f.vipEmpty, f.vipHost} {
		w.service(a, 0, 0, maps.Service{Flags: maps.ServiceAddrOwned})
	}
	w.service(f.vip, svcPort, maps.ProtoTCP, maps.Service{Id: 1, Set: setBoth, Count: 2})
	w.service(f.vip, svcPort, maps.ProtoUDP, maps.Service{Id: 2, Set: setUDP, Count: 1})
	w.service(f.vip, sctpPort, maps.ProtoSCTP, maps.Service{Id: 3, Set: setSCTP, Count: 1})
	w.service(f.vip, sctpXlate, maps.ProtoSCTP, maps.Service{Id: 4, Set: setSCTPX, Count: 1})
	for i, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP} {
		id := uint32(10 + 10*i)
		w.service(f.vipLocal, svcPort, proto, maps.Service{Id: id + 1, Set: setLocal, Count: 1})
		w.service(f.vipRemote, svcPort, proto, maps.Service{Id: id + 2, Set: setRemote, Count: 1})
		w.service(f.vipEmpty, svcPort, proto, maps.Service{Id: id + 3})
		w.service(f.vipHost, svcPort, proto, maps.Service{Id: id + 4, Set: setHost, Count: 1})
		// From outside to the remote pod alone, so that it takes the tunnel.
		external := maps.Service{Id: id + 5, Set: setBoth, Count: 2, ExtSet: setRemote, ExtCount: 1, Flags: maps.ServiceExternal}
		w.service(w.anyNode(), nodePort, proto, external)
		w.service(f.lb, svcPort, proto, external)
		w.service(f.lb, svcPort+1, proto, maps.Service{Id: id + 6, Set: setHost, Count: 1, ExtSet: setHost, ExtCount: 1, Flags: maps.ServiceExternal})
	}
}

// anyNode is the address of NodePorts.
func (w *world) anyNode() netip.Addr {
	if w.f.v6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

func (w *world) index(dev string) uint32 { return uint32(w.devs[dev].index) }

func mac(last byte) [6]byte { return [6]byte{2, 0, 0, 0, 0, last} }

func (w *world) endpoint(a netip.Addr, e maps.Endpoint) {
	w.t.Helper()
	put(w, w.set.Endpoints, maps.ToAddr(a), e)
}

// edit changes an endpoint the way the agent does: entry, then generation.
func (w *world) edit(a netip.Addr, change func(*maps.Endpoint)) {
	w.t.Helper()
	e, ok, err := w.set.Endpoints.Get(maps.ToAddr(a))
	if err != nil || !ok {
		w.t.Fatalf("endpoint %v: %v %v", a, ok, err)
	}
	change(&e)
	w.endpoint(a, e)
	w.bump(e.Slot)
}

func (w *world) bump(slot uint32) {
	w.t.Helper()
	gen, _, err := w.set.Gens.Get(slot)
	if err != nil {
		w.t.Fatal(err)
	}
	put(w, w.set.Gens, slot, gen+1)
}

func (w *world) addr(a netip.Addr, p maps.Peer) {
	w.t.Helper()
	put(w, w.set.Addrs, maps.ToAddr(a), p)
}

func (w *world) prefix(p netip.Prefix, peer maps.Peer) {
	w.t.Helper()
	k, err := maps.ToPrefix(p)
	if err != nil {
		w.t.Fatal(err)
	}
	put(w, w.set.Prefixes, k, peer)
}

func (w *world) backends(set uint32, addrs ...netip.AddrPort) {
	w.t.Helper()
	for i, a := range addrs {
		put(w, w.set.Backends, maps.BackendKey{Set: set, Slot: uint32(i)},
			maps.Backend{Addr: maps.ToAddr(a.Addr()), Port: a.Port()})
	}
}

// service writes a frontend. What is said of one set alone holds for both.
// Its backends are all of those that the sets hold by now.
func (w *world) service(a netip.Addr, port uint16, proto uint8, s maps.Service) {
	w.t.Helper()
	if s.ExtSet == 0 && s.Flags == 0 {
		s.ExtSet, s.ExtCount = s.Set, s.Count
	}
	for set, n := range map[uint32]uint32{s.Set: s.Count, s.ExtSet: s.ExtCount} {
		for slot := range n {
			b, ok, err := w.set.Backends.Get(maps.BackendKey{Set: set, Slot: slot})
			if err != nil {
				w.t.Fatal(err)
			}
			if ok {
				w.state(s.Id, ap(maps.FromAddr(b.Addr), b.Port), maps.BackendIn|maps.BackendCluster|maps.BackendExt|maps.BackendServing)
			}
		}
	}
	put(w, w.set.Services, maps.ServiceKey{Addr: maps.ToAddr(a), Port: port, Proto: proto}, s)
}

// state says what a backend is to a service; 0: it is gone.
func (w *world) state(service uint32, b netip.AddrPort, state uint32) {
	w.t.Helper()
	k := maps.BackendStateKey{Addr: maps.ToAddr(b.Addr()), Service: service, Port: b.Port()}
	if state == 0 {
		del(w, w.set.BackendStates, k)
		return
	}
	put(w, w.set.BackendStates, k, state)
}

// policy writes one compiled verdict. kind, proto and port as in the key.
func (w *world) policy(table, identity uint32, kind, proto uint8, port uint16, verdict uint8) {
	w.t.Helper()
	put(w, w.set.Policy,
		maps.PolicyKey{Table: table, Identity: identity, Kind: kind, Proto: proto, Port: port},
		maps.PolicyEntry{Rule: 100*table + uint32(kind) + 1, Verdict: verdict})
}

// now is the clock of the flow table.
func (w *world) now() uint64 {
	w.t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		w.t.Fatal(err)
	}
	return uint64(ts.Nano())
}
