package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
)

func prefixes(s ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func newAllocator(t *testing.T, cidrs ...string) *Allocator {
	t.Helper()
	a := &Allocator{}
	if err := a.SetCIDRs(prefixes(cidrs...)); err != nil {
		t.Fatal(err)
	}
	return a
}

func allocate(t *testing.T, a *Allocator, owner string, wanted ...netip.Addr) []netip.Addr {
	t.Helper()
	got, err := a.Allocate(owner, wanted...)
	if err != nil {
		t.Fatalf("Allocate(%s, %v): %v", owner, wanted, err)
	}
	return got
}

func TestBothFamiliesFromTheSecondHostAddressOn(t *testing.T) {
	a := newAllocator(t, "fd00:10:244:50::/64", "10.244.80.0/24")
	got := allocate(t, a, "x")
	if fmt.Sprint(got) != "[10.244.80.2 fd00:10:244:50::2]" {
		t.Errorf("first addresses are %v", got)
	}
}

func TestEveryUsableAddressOnceThenExhausted(t *testing.T) {
	a := newAllocator(t, "10.0.0.0/28")
	a.SetNodeAddrs([]netip.Addr{addr("10.0.0.7"), addr("192.0.2.1")})
	seen := map[netip.Addr]bool{}
	for i := range 12 { // 16, less network, gateway, broadcast and the node
		if err := a.Ready(); err != nil {
			t.Fatalf("not ready after %d: %v", i, err)
		}
		got := allocate(t, a, fmt.Sprint(i))
		if len(got) != 1 || seen[got[0]] {
			t.Fatalf("allocation %d gave %v", i, got)
		}
		seen[got[0]] = true
	}
	for _, never := range []string{"10.0.0.0", "10.0.0.1", "10.0.0.7", "10.0.0.15"} {
		if seen[addr(never)] {
			t.Errorf("%s was given out", never)
		}
	}
	if _, err := a.Allocate("late"); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "10.0.0.0/28") {
		t.Errorf("error of a full CIDR: %v", err)
	}
	if err := a.Ready(); !errors.Is(err, ErrExhausted) {
		t.Errorf("Ready of a full CIDR: %v", err)
	}
}

func TestNothingIsKeptWhenOneFamilyIsExhausted(t *testing.T) {
	a := newAllocator(t, "10.0.0.0/24", "fd00::/126") // two usable IPv6 addresses
	allocate(t, a, "a")
	allocate(t, a, "b")
	if _, err := a.Allocate("c"); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "fd00::/126") {
		t.Fatalf("error: %v", err)
	}
	if _, taken := a.Owner(addr("10.0.0.4")); taken {
		t.Error("an IPv4 address leaked")
	}
}

func TestTinyCIDRsGiveNothing(t *testing.T) {
	for _, c := range []string{"10.0.0.1/32", "10.0.0.0/31", "fd00::1/128", "fd00::/127", "255.255.255.255/32"} {
		a := newAllocator(t, c)
		if got, err := a.Allocate("x"); !errors.Is(err, ErrExhausted) {
			t.Errorf("%s gave %v, %v", c, got, err)
		}
	}
	a := newAllocator(t, "10.0.0.0/30")
	if got := allocate(t, a, "x"); fmt.Sprint(got) != "[10.0.0.2]" {
		t.Errorf("a /30 gave %v", got)
	}
}

func TestFreedAddressIsReusedLast(t *testing.T) {
	a := newAllocator(t, "10.0.0.0/29") // .2 to .6
	first := allocate(t, a, "a")
	a.Release("a", first...)
	wanted := allocate(t, a, "b", addr("10.0.0.3"))
	a.Release("b", wanted...)
	var order []string
	for i := range 5 {
		order = append(order, allocate(t, a, fmt.Sprint(i))[0].String())
	}
	if got := strings.Join(order, " "); got != "10.0.0.4 10.0.0.5 10.0.0.6 10.0.0.2 10.0.0.3" {
		t.Errorf("order of reuse: %s", got)
	}
}

func TestWanted(t *testing.T) {
	a := newAllocator(t, "10.244.80.0/24", "fd00:10:244:50::/64")
	a.SetNodeAddrs([]netip.Addr{addr("10.244.80.9")})
	got := allocate(t, a, "pod default/client", addr("10.244.80.65"))
	if fmt.Sprint(got) != "[10.244.80.65 fd00:10:244:50::2]" {
		t.Errorf("got %v", got)
	}
	got = allocate(t, a, "pod default/both", addr("fd00:10:244:50::66"), addr("::ffff:10.244.80.66"))
	if fmt.Sprint(got) != "[10.244.80.66 fd00:10:244:50::66]" {
		t.Errorf("got %v", got)
	}
	for _, c := range []struct {
		addr string
		want error
		text string
	}{
		{"10.244.80.65", ErrTaken, "pod default/client"},
		{"10.244.81.1", ErrOutside, "10.244.80.0/24"},
		{"fd00::1", ErrOutside, "fd00:10:244:50::/64"},
		{"10.244.80.0", ErrReserved, "network"},
		{"10.244.80.1", ErrReserved, "gateway"},
		{"10.244.80.255", ErrReserved, "broadcast"},
		{"10.244.80.9", ErrReserved, "this node"},
		{"fd00:10:244:50::1", ErrReserved, "gateway"},
	} {
		_, err := a.Allocate("other", addr(c.addr))
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), c.addr) {
			t.Errorf("%s: %v", c.addr, err)
		}
	}
	if _, err := a.Allocate("other", addr("10.244.80.70"), addr("10.244.80.65")); !errors.Is(err, ErrTaken) {
		t.Errorf("error: %v", err)
	}
	if _, taken := a.Owner(addr("10.244.80.70")); taken {
		t.Error("half of a refused request was kept")
	}
}

func TestConcurrentAllocationsNeverShare(t *testing.T) {
	a := newAllocator(t, "10.0.0.0/24", "fd00::/120")
	var mu sync.Mutex
	held := map[netip.Addr]string{}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			owner := fmt.Sprint(i)
			for range 100 {
				got, err := a.Allocate(owner)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, x := range got {
					if other, ok := held[x]; ok {
						t.Errorf("%s given to %s and %s", x, other, owner)
					}
					held[x] = owner
				}
				mu.Unlock()
				mu.Lock()
				for _, x := range got {
					delete(held, x)
				}
				mu.Unlock()
				a.Release(owner, got...)
			}
		})
	}
	wg.Wait()
}

func TestReserveAndRelease(t *testing.T) {
	a := &Allocator{}
	if _, err := a.Allocate("x"); !errors.Is(err, ErrNoCIDR) {
		t.Errorf("without CIDR: %v", err)
	}
	if err := a.Reserve("old", addr("10.0.0.2"), addr("192.0.2.1")); err != nil {
		t.Fatal(err)
	}
	if err := a.Reserve("old", addr("10.0.0.2")); err != nil {
		t.Errorf("reserving one's own again: %v", err)
	}
	if err := a.Reserve("new", addr("10.0.0.9"), addr("10.0.0.2")); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), "old") {
		t.Errorf("reserving another's: %v", err)
	}
	if _, taken := a.Owner(addr("10.0.0.9")); taken {
		t.Error("half of a refused reservation was kept")
	}
	if err := a.SetCIDRs(prefixes("10.0.0.0/24")); err != nil {
		t.Fatal(err)
	}
	if got := allocate(t, a, "x"); got[0] != addr("10.0.0.3") {
		t.Errorf("after a reserved .2: %v", got)
	}
	a.Release("x", addr("10.0.0.2"))
	if owner, _ := a.Owner(addr("10.0.0.2")); owner != "old" {
		t.Error("another owner's release freed an address")
	}
}

func TestSetCIDRs(t *testing.T) {
	a := newAllocator(t, "10.0.0.0/24")
	allocate(t, a, "x")
	if err := a.SetCIDRs(prefixes("10.0.0.0/24", "10.0.0.128/25")); err == nil {
		t.Error("overlapping CIDRs were accepted")
	}
	if err := a.SetCIDRs([]netip.Prefix{{}}); err == nil {
		t.Error("an invalid CIDR was accepted")
	}
	if err := a.SetCIDRs(prefixes("10.0.1.7/24")); err != nil { // host bits are cleared
		t.Fatal(err)
	}
	if got := allocate(t, a, "y"); got[0] != addr("10.0.1.2") {
		t.Errorf("from the new CIDR: %v", got)
	}
	if owner, _ := a.Owner(addr("10.0.0.2")); owner != "x" {
		t.Error("an address in use was lost with its CIDR")
	}
	if err := a.SetCIDRs(prefixes("10.0.0.0/24", "10.0.1.0/24")); err != nil {
		t.Fatal(err)
	}
	if got := allocate(t, a, "z"); got[0] != addr("10.0.0.3") {
		t.Errorf("after the old CIDR came back: %v", got)
	}
	if fmt.Sprint(a.CIDRs()) != "[10.0.0.0/24 10.0.1.0/24]" {
		t.Errorf("CIDRs: %v", a.CIDRs())
	}
}
