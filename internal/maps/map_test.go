package maps

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
)

// newMaps creates the datapath's maps, unpinned, with sizes as given.
func newMaps(t *testing.T, sizes map[string]uint32) Set {
	t.Helper()
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	for name, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
		if n, ok := sizes[name]; ok {
			m.MaxEntries = n
		}
	}
	spec.Maps[bpf.DpMapPwCalls].Contents = nil // a program, which would be loaded too
	var o bpf.DpMaps
	if err := spec.LoadAndAssign(&o, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.Close() })
	return NewSet(&o)
}

func addr(i int) Addr {
	return ToAddr(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
}

func TestHashRoundTrip(t *testing.T) {
	s := newMaps(t, nil)
	const n = 5000 // several batches, the last one not full
	want := make(map[Addr]Peer, n)
	for i := range n {
		want[addr(i)] = Peer{Identity: uint32(i), Slot: uint32(i + 1), Flags: PeerPod}
	}
	if err := s.Addrs.PutAll(want); err != nil {
		t.Fatal(err)
	}
	got, err := s.Addrs.Dump()
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != n {
		t.Fatalf("dumped %d entries, want %d", len(got), n)
	}
	for k, v := range want {
		if got[k] != v {
			t.Fatalf("%s: %+v, want %+v", KeyString(k), got[k], v)
		}
	}
	var keys []Addr
	for i := range n {
		keys = append(keys, addr(i))
	}
	// Absent keys among those deleted are no error and stop nothing.
	keys = append([]Addr{addr(n + 1)}, append(keys, addr(n+2))...)
	if err := s.Addrs.DeleteAll(keys); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Addrs.Dump(); err != nil || len(got) != 0 {
		t.Fatalf("after deleting all: %d entries, %v", len(got), err)
	}
	if err := s.Addrs.Delete(addr(1)); err != nil {
		t.Fatalf("deleting an absent key: %v", err)
	}
	if _, ok, err := s.Addrs.Get(addr(1)); ok || err != nil {
		t.Fatalf("reading an absent key: %v %v", ok, err)
	}
}

func TestLPM(t *testing.T) {
	s := newMaps(t, nil)
	want := make(map[PrefixKey]Peer)
	for i, p := range []string{"10.244.80.0/24", "10.0.0.0/8", "fd00:10:244:50::/64", "::/0"} {
		k, err := ToPrefix(netip.MustParsePrefix(p))
		if err != nil {
			t.Fatal(err)
		}
		want[k] = Peer{Slot: uint32(i + 1)}
	}
	if err := s.Prefixes.PutAll(want); err != nil {
		t.Fatal(err)
	}
	got, err := s.Prefixes.Dump()
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s: %+v, want %+v", KeyString(k), got[k], v)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d entries, want %d", len(got), len(want))
	}
	for k := range want {
		if err := s.Prefixes.DeleteAll([]PrefixKey{k, k}); err != nil {
			t.Error(err)
		}
	}
	if got, err := s.Prefixes.Dump(); err != nil || len(got) != 0 {
		t.Errorf("after deleting all: %v, %v", got, err)
	}
}

// Which entries a full map takes is no matter of chance: those of older tables,
// wider prefixes and lower addresses.
func TestFullMapTakesEntriesInOrder(t *testing.T) {
	s := newMaps(t, map[string]uint32{"pw_policy": 8, "pw_addrs": 8, "pw_prefixes": 8})
	policies := make(map[PolicyKey]PolicyEntry)
	addrs := make(map[Addr]Peer)
	prefixes := make(map[PrefixKey]Peer)
	for i := range 64 {
		policies[PolicyKey{Table: uint32(1 + i/16), Identity: uint32(500 + i%16)}] = PolicyEntry{Verdict: VerdictAllow}
		addrs[addr(i)] = Peer{Identity: 1}
		prefixes[PrefixKey{Len: uint32(65 + i), Addr: addr(1).B}] = Peer{Identity: 1}
	}
	s.Policy.TryPutAll(policies)
	s.Addrs.TryPutAll(addrs)
	s.Prefixes.TryPutAll(prefixes)
	for i := range 8 {
		if _, ok, err := s.Policy.Get(PolicyKey{Table: 1, Identity: uint32(500 + i)}); !ok || err != nil {
			t.Errorf("entry %d of table 1: %v, %v", i, ok, err)
		}
		if _, ok, err := s.Addrs.Get(addr(i)); !ok || err != nil {
			t.Errorf("address %d: %v, %v", i, ok, err)
		}
	}
	got, err := s.Prefixes.Dump()
	if len(got) != 8 || err != nil {
		t.Errorf("%d prefixes, %v", len(got), err)
	}
	for k := range got {
		if k.Len > 72 {
			t.Errorf("/%d is in, and not all wider ones", k.Len)
		}
	}
}

func TestFullMapIsNamed(t *testing.T) {
	s := newMaps(t, map[string]uint32{"pw_services": 4, "pw_prefixes": 4})
	entries := make(map[ServiceKey]Service)
	for i := range 8 {
		entries[ServiceKey{Addr: addr(i), Port: 80, Proto: ProtoTCP}] = Service{Id: uint32(i + 1)}
	}
	errs := s.Services.TryPutAll(entries)
	if len(errs) != 4 {
		t.Fatalf("%d keys failed, want 4: %v", len(errs), errs)
	}
	for k, err := range errs {
		if !errors.Is(err, ErrFull) {
			t.Errorf("not ErrFull: %v", err)
		}
		for _, part := range []string{"pw_services", FromAddr(k.Addr).String(), "80/tcp", "4 entries"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q does not name %q", err, part)
			}
		}
	}
	if got, err := s.Services.Dump(); err != nil || len(got) != 4 {
		t.Errorf("%d entries are in, %v; want the 4 that fit", len(got), err)
	}
	// A key that is in already can be changed while the map is full.
	for k := range entries {
		if errs[k] == nil {
			if err := s.Services.Put(k, Service{Id: 99}); err != nil {
				t.Error(err)
			}
		}
	}
	full := 0
	for i := range 8 {
		k, err := ToPrefix(netip.PrefixFrom(FromAddr(addr(i)), 32))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Prefixes.Put(k, Peer{}); errors.Is(err, ErrFull) {
			full++
		}
	}
	if full != 4 {
		t.Errorf("LPM of 4: %d of 8 refused as full", full)
	}
}

func TestMetrics(t *testing.T) {
	s := newMaps(t, nil)
	if got, err := s.Metrics.Read(); err != nil || len(got) != 0 {
		t.Fatalf("fresh map: %v, %v", got, err)
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		t.Fatal(err)
	}
	row := make([]Counter, cpus)
	for i := range row {
		row[i] = Counter{Packets: uint64(i + 1), Bytes: 100}
	}
	r, h := Reason(bpf.DpPwReasonPW_DROP_NO_SERVICE), Hook(bpf.DpPwHookPW_TO_OVERLAY)
	i := MetricsIndex(r, h, true)
	if err := s.Metrics.m.Put(&i, row); err != nil {
		t.Fatal(err)
	}
	got, err := s.Metrics.Read()
	if err != nil {
		t.Fatal(err)
	}
	want := Sample{Reason: r, Hook: h, IPv6: true, Packets: uint64(cpus * (cpus + 1) / 2), Bytes: uint64(100 * cpus)}
	if len(got) != 1 || got[0] != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestNames(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{ReasonName(Reason(bpf.DpPwReasonPW_DROP_NO_SERVICE)), "drop_no_service"},
		{ReasonName(Reason(bpf.DpPwReasonPW_DROP_V4MAPPED)), "drop_v4_mapped"},
		{ReasonName(127), "reason_127"},
		{HookName(Hook(bpf.DpPwHookPW_FROM_NETDEV)), "from_netdev"},
		{PlaceName(1), "pod"},
		{VerdictName(VerdictDeny), "deny"},
		{strings.Join(FlowFlagNames(1|2|8|0x80), ","), "reply,xlate,confirmed,0x80"},
		{strings.Join(PeerFlagNames(PeerPod|PeerLocal), ","), "pod,local"},
		{strings.Join(TCPStateNames(4), ","), "rst"},
		{IdentityName(IdentityRemoteNode), "remote_node"},
		{IdentityName(300), "300"},
		{PolicyKindName(PolicyAny), "any"},
		{KeyString(ServiceKey{Addr: ToAddr(netip.MustParseAddr("fd00::1")), Port: 53, Proto: ProtoUDP}), "[fd00::1]:53/udp"},
		{KeyString(BackendKey{Set: 3, Slot: 4}), "set 3 slot 4"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	if !IsDrop(Reason(bpf.DpPwReasonPW_DROP_TTL)) || IsDrop(Reason(bpf.DpPwReasonPW_FLOW_HIT)) {
		t.Error("IsDrop takes one for the other")
	}
}
