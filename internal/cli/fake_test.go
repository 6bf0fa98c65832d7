package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/firewall"
	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/oldcni"
)

const second = 1_000_000_000

// bootTime is when the tests happen on the datapath's clock.
const bootTime = 1_000_000 * second

func a(s string) maps.Addr { return maps.ToAddr(netip.MustParseAddr(s)) }

func prefixKey(s string) maps.PrefixKey {
	k, err := maps.ToPrefix(netip.MustParsePrefix(s))
	if err != nil {
		panic(err)
	}
	return k
}

func rangeKey(id uint32, s string) maps.SrcRangeKey {
	return maps.ToSrcRange(id, prefixKey(s))
}

// fakeMaps stands in for the pinned maps.
type fakeMaps struct {
	confirmed, unconfirmed map[maps.FlowKey]maps.Flow
	gens                   map[uint32]uint32
	services               map[maps.ServiceKey]maps.Service
	backends               map[maps.BackendKey]maps.Backend
	ranges                 map[maps.SrcRangeKey]uint32
	endpoints              map[maps.Addr]maps.Endpoint
	addrs                  map[maps.Addr]maps.Peer
	prefixes               map[maps.PrefixKey]maps.Peer
	nodes                  map[uint32]maps.Node
	nodeIDs                map[maps.Addr]uint32
	policy                 map[maps.PolicyKey]maps.PolicyEntry
	classes                []uint16
	metrics                []maps.Sample
	asks                   map[question]maps.Ask
	err                    error
	closed                 int
}

func (f *fakeMaps) Flows() (c, u map[maps.FlowKey]maps.Flow, err error) {
	return f.confirmed, f.unconfirmed, f.err
}
func (f *fakeMaps) Generation(slot uint32) (uint32, error)               { return f.gens[slot], f.err }
func (f *fakeMaps) Services() (map[maps.ServiceKey]maps.Service, error)  { return f.services, f.err }
func (f *fakeMaps) Backends() (map[maps.BackendKey]maps.Backend, error)  { return f.backends, f.err }
func (f *fakeMaps) SrcRanges() (map[maps.SrcRangeKey]uint32, error)      { return f.ranges, f.err }
func (f *fakeMaps) Endpoints() (map[maps.Addr]maps.Endpoint, error)      { return f.endpoints, f.err }
func (f *fakeMaps) Addrs() (map[maps.Addr]maps.Peer, error)              { return f.addrs, f.err }
func (f *fakeMaps) Prefixes() (map[maps.PrefixKey]maps.Peer, error)      { return f.prefixes, f.err }
func (f *fakeMaps) Nodes() (map[uint32]maps.Node, error)                 { return f.nodes, f.err }
func (f *fakeMaps) NodeIDs() (map[maps.Addr]uint32, error)               { return f.nodeIDs, f.err }
func (f *fakeMaps) Policy() (map[maps.PolicyKey]maps.PolicyEntry, error) { return f.policy, f.err }
func (f *fakeMaps) PortClasses() ([]uint16, error)                       { return f.classes, f.err }
func (f *fakeMaps) Metrics() ([]maps.Sample, error)                      { return f.metrics, f.err }
func (f *fakeMaps) Close() error                                         { f.closed++; return nil }

// question is what the datapath is asked, in short.
type question struct {
	src, dst string
	proto    uint8
	port     uint16
	slot     uint32
}

func (f *fakeMaps) Ask(q maps.Ask) (maps.Ask, error) {
	k := question{maps.FromAddr(q.Key.Src).String(), maps.FromAddr(q.Key.Dst).String(), q.Key.Proto, q.Key.Dport, q.Slot}
	r, ok := f.asks[k]
	if !ok && f.err == nil {
		return r, fmt.Errorf("no answer to %+v", k)
	}
	r.Key, r.Slot = q.Key, q.Slot
	return r, f.err
}

func (f *fakeMaps) Usage() ([]MapUsage, error) {
	return []MapUsage{
		{Name: "pw_flows", Entries: len(f.confirmed), Max: 262144},
		{Name: "pw_flows_new", Entries: len(f.unconfirmed), Max: 65536, Evicted: 17},
		{Name: "pw_services", Entries: len(f.services), Max: 65536},
	}, f.err
}

// fakeAgent answers from a map of bodies; nil is an agent that is down.
type fakeAgent map[string]any

func (f fakeAgent) Get(_ context.Context, path string, into any) error {
	if f == nil {
		return &agentDownError{errors.New("the agent does not answer")}
	}
	body, ok := f[path]
	if !ok {
		return errors.New("agent: " + path + ": 404 Not Found")
	}
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, into)
}

// Stream answers with the lines of the body, a list.
func (f fakeAgent) Stream(ctx context.Context, path string, each func(json.RawMessage) error) error {
	var lines []json.RawMessage
	if err := f.Get(ctx, path, &lines); err != nil {
		return err
	}
	for _, line := range lines {
		if err := each(line); err != nil {
			return err
		}
	}
	return nil
}

// pair adds both directions of a flow to m: the original as given, the reply
// derived from it.
func pair(m map[maps.FlowKey]maps.Flow, k maps.FlowKey, f maps.Flow) {
	m[k] = f
	r := f
	r.Src, r.Dst, r.Sport, r.Dport = k.Dst, k.Src, k.Dport, k.Sport
	r.From, r.To = f.To, f.From
	r.Flags |= flagReply
	m[twinKey(k, f)] = r
}

// enum pw_flow_flags and pw_place_kind, as the datapath writes them.
const (
	flagReply, flagReplied, flagConfirmed, flagMidstream = 1, 4, 8, 16
	placePod, placeNode, placeWire, placeHost            = 1, 2, 3, 4
)

// clusterMaps is planMaps with a ClusterNetworkPolicy about local's egress.
func clusterMaps() *fakeMaps {
	f := planMaps()
	const table = 6 | maps.TableDefault
	e := f.endpoints[a("10.244.80.66")]
	e.PolicyOut = table
	f.endpoints[a("10.244.80.66")] = e
	f.policy[maps.PolicyKey{Table: table, Identity: 257, Port: 25, Proto: maps.ProtoTCP}] = maps.PolicyEntry{Rule: 9, Verdict: maps.VerdictDeny}
	f.policy[maps.PolicyKey{Table: table, Kind: maps.PolicyDefault}] = maps.PolicyEntry{Verdict: maps.VerdictAllow}
	return f
}

// planMaps is node a of the fixed plan with some traffic.
func planMaps() *fakeMaps {
	f := &fakeMaps{
		confirmed:   map[maps.FlowKey]maps.Flow{},
		unconfirmed: map[maps.FlowKey]maps.Flow{},
		gens:        map[uint32]uint32{10: 3, 11: 1, 12: 5},
		services: map[maps.ServiceKey]maps.Service{
			{Addr: a("10.98.235.247")}:                                    {Flags: maps.ServiceAddrOwned},
			{Addr: a("10.98.235.247"), Port: 80, Proto: maps.ProtoTCP}:    {Id: 12, Set: 40, Count: 2},
			{Addr: a("fd00:10:98::f7")}:                                   {Flags: maps.ServiceAddrOwned},
			{Addr: a("fd00:10:98::f7"), Port: 80, Proto: maps.ProtoTCP}:   {Id: 13, Set: 41, Count: 6},
			{Addr: a("10.98.0.10")}:                                       {Flags: maps.ServiceAddrOwned},
			{Addr: a("10.98.0.10"), Port: 53, Proto: maps.ProtoUDP}:       {Id: 14},
			{Addr: a("10.98.0.11")}:                                       {Flags: maps.ServiceAddrOwned},
			{Addr: a("10.98.0.12"), Port: 9000, Proto: maps.ProtoSCTP}:    {Id: 15, Set: 42, Count: 2},
			{Addr: a("10.98.0.13"), Port: 65535, Proto: maps.ProtoTCP}:    {Id: 15, Set: 43, Count: 1},
			{Addr: a("fd00:10:98::12"), Port: 9000, Proto: maps.ProtoTCP}: {Id: 99, Set: 44, Count: 1},
			// A host port.
			{Addr: a("172.31.0.2"), Port: 8888, Proto: maps.ProtoTCP}: {Id: 22, Set: 46, Count: 1, ExtSet: 46, ExtCount: 1, Flags: maps.ServiceExternal | maps.ServiceKeepSource},
			// A load balancer with externalTrafficPolicy Local, and one without
			// endpoints here.
			{Addr: a("10.98.0.20")}:                                     {Flags: maps.ServiceAddrOwned},
			{Addr: a("10.98.0.20"), Port: 80, Proto: maps.ProtoTCP}:     {Id: 20, Set: 40, Count: 2, ExtSet: 40, ExtCount: 2, Affinity: 10800},
			{Addr: a("0.0.0.0"), Port: 30080, Proto: maps.ProtoTCP}:     {Id: 20, Set: 40, Count: 2, ExtSet: 45, ExtCount: 1, Affinity: 10800, Flags: maps.ServiceExternal | maps.ServiceKeepSource},
			{Addr: a("192.0.2.80"), Port: 80, Proto: maps.ProtoTCP}:     {Id: 20, Set: 40, Count: 2, ExtSet: 45, ExtCount: 1, Affinity: 10800, Flags: maps.ServiceExternal | maps.ServiceKeepSource | maps.ServiceSourceRanges},
			{Addr: a("::"), Port: 30081, Proto: maps.ProtoTCP}:          {Id: 21, Set: 44, Count: 1, Flags: maps.ServiceExternal | maps.ServiceNoLocalExt},
			{Addr: a("2001:db8::9"), Port: 80, Proto: maps.ProtoTCP}:    {Id: 21, Set: 44, Count: 1, ExtSet: 44, ExtCount: 1, Maglev: 1021, Flags: maps.ServiceExternal},
			{Addr: a("fd00:10:98::20"), Port: 80, Proto: maps.ProtoTCP}: {Id: 21, Flags: maps.ServiceNoLocal | maps.ServiceNoLocalExt},
		},
		backends: map[maps.BackendKey]maps.Backend{
			{Set: 46, Slot: 0}: {Addr: a("10.244.80.65"), Port: 8080},
			{Set: 40, Slot: 0}: {Addr: a("10.244.80.66"), Port: 8080},
			{Set: 40, Slot: 1}: {Addr: a("10.244.158.65"), Port: 8080},
			{Set: 42, Slot: 0}: {Addr: a("10.244.158.65"), Port: 9000},
			{Set: 43, Slot: 0}: {Addr: a("10.244.158.66"), Port: 9000},
			{Set: 45, Slot: 0}: {Addr: a("10.244.80.66"), Port: 8080},
			{Set: 44, Slot: 0}: {Addr: a("fd00:10:244:9e::65"), Port: 9000},
		},
		ranges: map[maps.SrcRangeKey]uint32{
			rangeKey(20, "203.0.113.0/24"): 1, rangeKey(20, "198.51.100.7/32"): 1, rangeKey(22, "192.0.2.0/24"): 1,
		},
		endpoints: map[maps.Addr]maps.Endpoint{
			a("10.244.80.65"):       {Id: 1, Ifindex: 7, Identity: 256, Mac: [6]byte{2, 0, 0, 0, 0, 1}},
			a("fd00:10:244:50::65"): {Id: 1, Ifindex: 7, Identity: 256, Mac: [6]byte{2, 0, 0, 0, 0, 1}},
			a("10.244.80.66"):       {Id: 2, Ifindex: 9, Identity: 4, PolicyIn: 5, PolicyOut: 6, Mac: [6]byte{2, 0, 0, 0, 0, 2}},
		},
		addrs: map[maps.Addr]maps.Peer{
			a("10.244.80.65"):       {Identity: 256, Flags: maps.PeerPod | maps.PeerLocal},
			a("fd00:10:244:50::65"): {Identity: 256, Flags: maps.PeerPod | maps.PeerLocal},
			a("10.244.80.66"):       {Identity: 4, Flags: maps.PeerPod | maps.PeerLocal},
			a("10.244.158.65"):      {Identity: 4, Flags: maps.PeerPod, Node: 1},
			a("10.244.90.1"):        {Identity: 4, Flags: maps.PeerPod},
			a("172.31.0.3"):         {Identity: 3, Flags: maps.PeerNode, Node: 1},
			a("172.31.0.2"):         {Identity: 2, Flags: maps.PeerHost | maps.PeerInternal},
		},
		prefixes: map[maps.PrefixKey]maps.Peer{
			prefixKey("10.244.80.0/24"):      {Identity: 4, Flags: maps.PeerPod | maps.PeerLocal},
			prefixKey("10.244.158.0/24"):     {Identity: 4, Flags: maps.PeerPod, Node: 1},
			prefixKey("fd00:10:244:9e::/64"): {Identity: 4, Flags: maps.PeerPod, Node: 1},
			prefixKey("192.0.2.0/24"):        {Identity: 257},
			prefixKey("10.98.0.0/16"):        {Flags: maps.PeerService},
			prefixKey("::/0"):                {Identity: 1},
		},
		nodes: map[uint32]maps.Node{
			1: {Addr: a("172.31.0.3"), Mac: [6]byte{2, 1, 1, 1, 1, 3}},
			2: {Addr: a("172.31.0.4"), Mac: [6]byte{2, 1, 1, 1, 1, 4}},
		},
		nodeIDs: map[maps.Addr]uint32{a("172.31.0.3"): 1},
		policy: map[maps.PolicyKey]maps.PolicyEntry{
			{Table: 5, Identity: 2, Kind: maps.PolicyAny}:                                    {Rule: 1, Verdict: maps.VerdictAllow},
			{Table: 5, Identity: 256, Port: 8080, Proto: maps.ProtoTCP}:                      {Rule: 7, Verdict: maps.VerdictAllow},
			{Table: 5, Identity: 257, Port: 3, Proto: maps.ProtoUDP, Kind: maps.PolicyClass}: {Rule: 8, Verdict: maps.VerdictAllow},
			{Table: 5, Identity: 257, Port: 9, Proto: maps.ProtoUDP, Kind: maps.PolicyClass}: {Rule: 77, Verdict: maps.VerdictDeny},
		},
		asks:    planAsks(),
		classes: make([]uint16, 65536),
		metrics: []maps.Sample{
			{Reason: 44, Hook: 0, Packets: 3, Bytes: 180},
			{Reason: 2, Hook: 0, IPv6: true, Packets: 10, Bytes: 1000},
			{Reason: 2, Hook: 0, Packets: 100, Bytes: 140000},
			{Reason: 8, Hook: 4, Packets: 99, Bytes: 139000},
			{Reason: 0, Hook: 2, Packets: 5, Bytes: 300},
			{Reason: 50, Hook: 1},
		},
	}
	for port := 8000; port <= 8080; port++ {
		f.classes[port] = 3
	}
	f.classes[53] = 3
	now := uint64(bootTime)

	// The client calls the service; the backend is on node b; it is closing.
	k := maps.FlowKey{Src: a("10.244.80.65"), Dst: a("10.98.235.247"), Sport: 40000, Dport: 80, Proto: maps.ProtoTCP}
	web := maps.Flow{
		Src: k.Src, Dst: a("10.244.158.65"), Sport: 40000, Dport: 8080,
		Flags: 2 | flagReplied | flagConfirmed, Tcp: 1, Verdict: maps.VerdictAllow,
		From: maps.Place{Kind: placePod, Id: 7}, To: maps.Place{Kind: placeNode, Id: 1},
		SrcGen: maps.GenRef{Slot: 10, Gen: 3}, DstGen: maps.GenRef{Slot: 11, Gen: 1},
		Service: 12, Rule: 7, Created: now - 192*second, LastSeen: now - 1500*second/1000,
	}
	pair(f.confirmed, k, web)
	// Its old copy ages where it was born.
	old := web
	old.Flags &^= flagConfirmed
	old.LastSeen = now - 190*second
	f.unconfirmed[k] = old

	// A datagram between pods of the node, denied by now, decided under a
	// generation that has moved since.
	k = maps.FlowKey{Src: a("10.244.80.65"), Dst: a("10.244.80.66"), Sport: 5000, Dport: 53, Proto: maps.ProtoUDP}
	pair(f.unconfirmed, k, maps.Flow{
		Src: k.Src, Dst: k.Dst, Sport: 5000, Dport: 53, Verdict: maps.VerdictDeny, Reason: 50, Rule: 77,
		From: maps.Place{Kind: placePod, Id: 7}, To: maps.Place{Kind: placePod, Id: 9},
		SrcGen: maps.GenRef{Slot: 10, Gen: 3}, DstGen: maps.GenRef{Slot: 12, Gen: 4},
		Created: now - 4000*second, LastSeen: now - 20*second,
	})

	// The node pings its pod; the reply's entry is gone.
	k = maps.FlowKey{Src: a("fd00::2"), Dst: a("fd00:10:244:50::65"), Sport: 77, Proto: 58}
	f.unconfirmed[k] = maps.Flow{
		Src: k.Src, Dst: k.Dst, Sport: 77, Verdict: maps.VerdictAllow,
		From: maps.Place{Kind: placeHost}, To: maps.Place{Kind: placePod, Id: 7},
		Created: now + second, LastSeen: now + second,
	}

	// A connection to the world, picked up in the middle.
	k = maps.FlowKey{Src: a("10.244.80.66"), Dst: a("192.0.2.1"), Sport: 41000, Dport: 443, Via: 2, Proto: maps.ProtoTCP}
	f.confirmed[k] = maps.Flow{
		Src: k.Src, Dst: k.Dst, Sport: 41000, Dport: 443, TwinVia: 2, Flags: flagConfirmed | flagMidstream,
		Verdict: maps.VerdictAllow, From: maps.Place{Kind: placePod, Id: 9}, To: maps.Place{Kind: placeWire, Id: 2},
		Nexthop: a("172.31.0.1"), Service: 99, Created: now - 200000*second, LastSeen: now - 8000*second,
	}
	// An answer whose original is gone.
	k = maps.FlowKey{Src: a("10.244.158.65"), Dst: a("10.244.80.66"), Sport: 9000, Dport: 42000, Proto: maps.ProtoSCTP}
	f.confirmed[k] = maps.Flow{
		Src: a("10.98.0.12"), Dst: k.Dst, Sport: 9000, Dport: 42000, Flags: flagReply | flagConfirmed | 2,
		Verdict: maps.VerdictAllow, From: maps.Place{Kind: placeNode, Id: 1}, To: maps.Place{Kind: placePod, Id: 9},
		Service: 15, Created: now - 30*second, LastSeen: now - 5*second,
	}
	return f
}

// planEvents is what the agent of node a tells a listener.
func planEvents() []api.Event {
	at := time.Date(2026, 3, 1, 12, 0, 0, 250e6, time.UTC)
	end := func(pod, addr string, port uint16) api.EventEnd {
		return api.EventEnd{Pod: pod, Addr: netip.MustParseAddr(addr), Port: port}
	}
	client, local := end("default/client", "10.244.80.65", 40000), end("default/local", "10.244.80.66", 8081)
	denied := api.Event{
		Time: at, Reason: "drop_policy_ingress", Hook: "from_pod", Protocol: "tcp", Source: client, Destination: local,
		From: "pod", Sender: "default/client", Table: 5, Policies: []string{"default/allow-web"}, Text: "isolated by default/allow-web, no rule allows",
		Denied: &api.Denial{Direction: "ingress", Pod: "default/local", PeerIdentity: 256, Source: end("default/client", "10.244.80.65", 0), Destination: local},
	}
	called := denied
	called.Destination, called.Missed = end("", "10.98.235.247", 80), 3
	called.RuleID, called.Rule, called.Policies, called.Text = 77, "default/deny ingress[0]", nil, "denied by default/deny ingress[0]"
	answer := denied
	answer.Source, answer.Destination, answer.Sender = local, client, "default/local"
	spoof := api.Event{
		Time: at.Add(time.Second), Reason: "drop_spoofed_source", Hook: "from_pod", Protocol: "udp",
		Source: end("", "192.0.2.1", 53), Destination: local, From: "pod", Sender: "default/client",
	}
	ping := api.Event{
		Time: at.Add(2 * time.Second), Reason: "drop_no_endpoint", Hook: "from_overlay", Protocol: "icmpv6",
		Source: end("default/web-1", "fd00:10:244:9e::65", 7), Destination: end("", "fd00:10:244:50::99", 0), From: "node",
	}
	return []api.Event{denied, called, answer, spoof, ping}
}

// planAsks is what the datapath of planMaps answers.
func planAsks() map[question]maps.Ask {
	client, local := maps.Place{Kind: placePod, Id: 7}, maps.Place{Kind: placePod, Id: 9}
	nodeB, host, wire := maps.Place{Kind: placeNode, Id: 1}, maps.Place{Kind: placeHost}, maps.Place{Kind: placeWire}
	open := maps.AskHalf{Identity: 4, Verdict: maps.VerdictAllow}
	web := maps.AskHalf{Table: 5, Identity: 256, Rule: 7, Verdict: maps.VerdictAllow}
	none := maps.AskHalf{Table: 5, Identity: 256, Verdict: maps.VerdictDeny}
	rule := maps.AskHalf{Table: 5, Identity: 257, Rule: 77, Verdict: maps.VerdictDeny}
	left := maps.AskHalf{Table: 5, Identity: 256, Verdict: maps.VerdictAllow}
	closed := maps.AskHalf{Table: 6, Identity: 256, Verdict: maps.VerdictDeny}
	const tcp, udp = maps.ProtoTCP, maps.ProtoUDP
	return map[question]maps.Ask{
		{"10.244.80.65", "10.244.80.66", tcp, 8080, 0}:         {From: client, To: local, Egress: open, Ingress: web},
		{"10.244.80.65", "10.244.80.66", tcp, 8082, 0}:         {From: client, To: local, Egress: open, Ingress: left},
		{"10.244.80.65", "10.244.80.66", tcp, 8081, 0}:         {From: client, To: local, Egress: open, Ingress: none, Reason: 50},
		{"10.244.80.66", "10.244.80.65", udp, 53, 0}:           {From: local, To: client, Egress: closed, Ingress: open, Reason: 49},
		{"192.0.2.9", "10.244.80.66", udp, 9, 0}:               {From: wire, To: local, Ingress: rule, Reason: 50},
		{"10.244.80.65", "10.244.80.65", 1, 0, 0}:              {From: client, To: client},
		{"fd00:10:244:50::65", "fd00:10:244:50::65", 58, 0, 0}: {From: client, To: client},
		{"172.31.0.2", "10.244.80.66", tcp, 8081, 0}:           {From: host, To: local},
		{"10.244.80.65", "10.98.235.247", tcp, 80, 0}: {
			From: client, To: local, Egress: open, Ingress: web, Service: 12, Backends: 2, Dst: a("10.244.80.66"), Dport: 8080},
		{"10.244.80.65", "10.98.235.247", tcp, 80, 1}: {
			From: client, To: nodeB, Egress: open, Service: 12, Backends: 2, Dst: a("10.244.158.65"), Dport: 8080},
		{"10.244.80.65", "10.98.0.10", udp, 53, 0}:      {From: client, Service: 14, Reason: 45},
		{"10.244.158.65", "10.244.80.66", tcp, 8081, 0}: {From: nodeB, To: local, Ingress: none, Reason: 50},
		{"10.244.80.65", "10.244.158.65", tcp, 8080, 0}: {From: client, To: nodeB, Egress: open},
		{"10.244.158.65", "10.98.235.247", tcp, 80, 0}:  {From: nodeB, Reason: 43},
		{"10.244.158.65", "10.244.80.99", tcp, 80, 0}:   {From: nodeB, Reason: 46},
		{"192.0.2.9", "192.0.2.10", tcp, 80, 0}:         {From: wire},
	}
}

// planAgent is the agent of node a.
func planAgent() fakeAgent {
	ip, pfx := netip.MustParseAddr, netip.MustParsePrefix
	pods := api.Pods{Pods: []api.Pod{{Namespace: "default", Name: "web-1", Node: "b", Addrs: []netip.Addr{ip("10.244.158.65")}}}}
	return fakeAgent{
		api.PathStatus: api.Status{
			Node: "a", Version: "v0.1.0", UptimeSeconds: 3725, Synced: true,
			NotReady: []string{"first sync of policy"},
			Sources:  []api.Source{{Kind: "directory", Location: "/etc/podweir/manifests", Synced: true}, {Kind: "api", Location: "https://192.0.2.9:6443"}},
			Problems: []api.Problem{
				{Object: "Service default/bad", File: "svc.yaml", Line: 12, Error: "spec.ports[0].port: 0 is no port number"},
				{Object: "Device eth1", Error: "no such device"},
				{File: "junk.yaml", Line: 1, Error: "no YAML"},
			},
			Nodes: []api.Node{
				{Name: "a", Self: true, Addr: ip("172.31.0.2")},
				{ID: 1, Name: "b", Addr: ip("172.31.0.3")},
				{Name: "d", PodCIDRs: []netip.Prefix{pfx("10.244.99.0/24")}},
			},
			Devices:        []api.Device{{Name: "eth0", Ifindex: 2, Role: "netdev", MTU: 1500}, {Name: "pw00000000001", Ifindex: 7, Role: "pod", MTU: 1450}},
			MTU:            1450,
			Sockets:        api.Sockets{Cgroup: "/sys/fs/cgroup", Attached: true},
			Tunnel:         api.Tunnel{Device: "podweir.vxlan", VNI: 4096, Port: 4789, Addr: ip("172.31.0.2"), MAC: "02:01:01:01:01:02", MTU: 1450},
			RoutingMode:    "ipip",
			ExternalSource: "dsr",
			ServiceCIDRs:   []netip.Prefix{pfx("10.98.0.0/16"), pfx("fd00:10:98::/112")},
			Masquerade:     api.Masquerade{IPv4: true, IPv6: true, Except: []netip.Prefix{pfx("10.0.0.0/8"), pfx("fd00::/8")}, SourcePorts: []string{"1024-29999", "61000-65535"}},
		},
		api.PathServices: api.Services{Services: []api.Service{
			{Namespace: "default", Name: "web", Port: "http", ID: 12}, {Namespace: "default", Name: "web", Port: "http", ID: 13},
			{Namespace: "kube-system", Name: "dns", ID: 14}, {Namespace: "default", Name: "sig", ID: 15},
			{Namespace: "default", Name: "lb", Protocol: "TCP", ID: 20, Slices: 1, Endpoints: 2,
				Frontends: []netip.AddrPort{netip.MustParseAddrPort("10.98.0.20:80"), netip.MustParseAddrPort("0.0.0.0:30080"), netip.MustParseAddrPort("192.0.2.80:80")},
				Types:     []string{"ClusterIP", "NodePort", "LoadBalancer"}},
			{Kind: "Pod", Namespace: "default", Name: "client", Port: "8888", Protocol: "TCP", ID: 22,
				Frontends: []netip.AddrPort{netip.MustParseAddrPort("172.31.0.2:8888")}, Types: []string{"HostPort"}},
		}},
		api.PathEndpoints: api.Endpoints{Endpoints: []api.Endpoint{
			{ID: 1, Namespace: "default", Pod: "client", ContainerID: "c1", HostIfName: "pw00000000001", HostIfindex: 7, Addrs: []netip.Addr{ip("10.244.80.65"), ip("fd00:10:244:50::65")}, HostPorts: []string{"8888->8080/tcp", "172.31.0.2:53->53/udp"}},
			{ID: 2, Namespace: "default", Pod: "local", ContainerID: "c2", HostIfName: "pw00000000002", HostIfindex: 9, Addrs: []netip.Addr{ip("10.244.80.66")}},
			{ID: 3, Namespace: "default", Pod: "starting", ContainerID: "c3", HostIfName: "pw00000000003", HostIfindex: 11, Addrs: []netip.Addr{ip("10.244.80.67")}, MAC: "02:00:00:00:00:03"},
		}},
		api.PathPods + "?name=default%2Fweb-1": pods, api.PathPods + "?addr=10.244.158.65": pods,
		api.PathPods + "?name=default%2Fnobody": api.Pods{}, api.PathPods + "?addr=192.0.2.9": api.Pods{},
		api.PathPods + "?name=default%2Fweb": api.Pods{}, api.PathPods + "?name=default%2Fnothing": api.Pods{},
		api.PathPods + "?name=default%2Fpending": api.Pods{Pods: []api.Pod{{Namespace: "default", Name: "pending", Node: "b"}}},
		api.PathEvents:                           planEvents(),
		api.PathAllPods: []api.Pod{
			{Namespace: "default", Name: "client", Node: "a", Addrs: []netip.Addr{ip("10.244.80.65"), ip("fd00:10:244:50::65")}},
			{Namespace: "default", Name: "local", Node: "a", Addrs: []netip.Addr{ip("10.244.80.66")}},
			pods.Pods[0],
		},
		api.PathPolicy: api.Policy{
			Rules: map[uint32]api.Rule{
				1: {Namespace: "default", Name: "allow-host", Direction: "ingress", Index: 0, Text: "default/allow-host ingress[0]"},
				7: {Namespace: "default", Name: "allow-web", Direction: "ingress", Index: 0, Text: "default/allow-web ingress[0]"},
				8: {Namespace: "default", Name: "allow-web", Direction: "ingress", Index: 1, Text: "default/allow-web ingress[1]"},
				9: {Tier: "Admin", Name: "guard", Direction: "egress", Index: 0, RuleName: "no-mail", Text: `ClusterNetworkPolicy guard (Admin) egress[0] "no-mail"`},
			},
			Endpoints: []api.PolicyEndpoint{{Namespace: "default", Pod: "local", Policies: []string{"default/allow-web", "default/deny-all"},
				IngressPolicies: []string{"default/allow-web", "default/deny-all"}, EgressPolicies: []string{"default/deny-all"}}},
			Identities: []api.Identity{
				{ID: 256, Description: "default/ app=client", Count: 2},
				{ID: 257, Description: "192.0.2.0/24", Count: 1},
			},
		},
	}
}

// fakeHost is a node that lacks one program and has a firewall.
type fakeHost struct{}

func (fakeHost) Programs(ifindex int) ([]string, error) {
	return []string{"from_netdev", "to_netdev", "from_overlay", "to_overlay", "to_pod"}, nil
}
func (fakeHost) Pinned() (map[int][]string, error) { return map[int][]string{7: {"from_pod"}}, nil }
func (fakeHost) Sysctl(name string) (string, error) {
	return map[string]string{"net/ipv4/conf/all/send_redirects": "0"}[name], nil
}
func (fakeHost) Devices() (map[string]int, error)   { return map[string]int{"eth0": 1500}, nil }
func (fakeHost) Route(a netip.Addr) (string, error) { return "eth0", nil }
func (fakeHost) AskDNS(context.Context, netip.AddrPort) error {
	return errors.New("i/o timeout")
}
func (fakeHost) OldCNI() (oldcni.View, error) { return oldcni.View{}, nil }
func (fakeHost) KubeProxy(context.Context) (kubeproxy.Leftovers, error) {
	return kubeproxy.Leftovers{}, nil
}
func (fakeHost) Firewall(context.Context) (firewall.Ruleset, []error) {
	set, err := firewall.IPTables("iptables-nft", "ip", "*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\nCOMMIT\n")
	if err != nil {
		return set, []error{err}
	}
	return set, nil
}

// fakePlugged is asked about pods whose interface the host has: none.
func fakePlugged(_ context.Context, ep api.Endpoint) error {
	return errors.New("asked about " + ep.Pod)
}
