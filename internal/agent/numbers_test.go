package agent

import (
	"errors"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

func TestGenerations(t *testing.T) {
	store := newMem[uint32, uint32]("pw_gens", &journal{})
	store.size = 6 // slots 2..5 can be given out
	store.m[3] = 7
	c := newClock()
	g, err := newGenerations(store, c.now)
	if err != nil {
		t.Fatal(err)
	}
	for slot, want := range map[uint32]bool{0: false, 1: true, 3: true, 6: false} {
		if got := g.adopt(slot); got != want {
			t.Errorf("adopt %d: %v", slot, got)
		}
	}
	if g.adopt(3) {
		t.Error("a slot was adopted twice")
	}
	a, b, d := g.alloc(), g.alloc(), g.alloc()
	if a != 2 || b != 4 || d != 5 {
		t.Errorf("allocated %d %d %d, want 2 4 5", a, b, d)
	}
	if got := g.alloc(); got != slotShared {
		t.Errorf("with none left: %d, want the shared one", got)
	}
	g.release(3)
	if got := g.alloc(); got != slotShared {
		t.Errorf("a freed slot was given out at once: %d", got)
	}
	if err := g.flush(); err != nil || store.m[3] != 8 {
		t.Errorf("freeing did not move the generation: %d, %v", store.m[3], err)
	}
	c.advance(slotRest)
	if got := g.alloc(); got != 3 {
		t.Errorf("after its rest: %d, want 3", got)
	}
	// A write that fails is made up for.
	g.bump(2)
	g.bump(slotConstant)
	store.bad = func(uint32, uint32) error { return errors.New("refused") }
	if g.flush() == nil || store.m[2] != 0 {
		t.Error("a failed write went unnoticed")
	}
	store.bad = nil
	if err := g.flush(); err != nil || store.m[2] != 1 {
		t.Errorf("not made up for: %d, %v", store.m[2], err)
	}
	if _, moved := store.m[slotConstant]; moved {
		t.Error("the constant slot moved")
	}
	if err := g.flush(); err != nil || store.m[2] != 1 {
		t.Error("an idle flush moved something")
	}
}

func TestLPM(t *testing.T) {
	l := newLPM[string]()
	for _, p := range []string{"::/0", "10.0.0.0/8", "10.244.80.0/24", "fd00::/8", "0.0.0.0/0"} {
		l.set(pfx(p), p)
	}
	for addr, want := range map[string]string{
		"10.244.80.65": "10.244.80.0/24", "10.1.2.3": "10.0.0.0/8", "8.8.8.8": "0.0.0.0/0",
		"fd00::1": "fd00::/8", "2001:db8::1": "::/0",
	} {
		if got, ok := l.lookup(ip(addr).B, 128); !ok || got != want {
			t.Errorf("%s: %q, want %q", addr, got, want)
		}
	}
	if got, _ := l.covering(pfx("10.244.80.0/24")); got != "10.244.80.0/24" {
		t.Errorf("covering itself: %q", got)
	}
	if got, _ := l.parent(pfx("10.244.80.0/24")); got != "10.0.0.0/8" {
		t.Errorf("parent: %q", got)
	}
	if got, _ := l.parent(pfx("0.0.0.0/0")); got != "::/0" {
		t.Errorf("IPv4 as a whole lies in ::/0: %q", got)
	}
	l.remove(pfx("0.0.0.0/0"))
	l.remove(pfx("0.0.0.0/0"))
	if got, _ := l.lookup(ip("8.8.8.8").B, 128); got != "::/0" {
		t.Errorf("after removal: %q", got)
	}
}

func TestNodeIDs(t *testing.T) {
	addr := func(s string) maps.Node { return maps.Node{Addr: ip(s)} }
	n := adoptNodeIDs(8, map[uint32]maps.Node{
		2: addr("172.31.0.3"),
		3: addr("172.31.0.4"), // the same address twice: pw_node_ids names 5
		5: addr("172.31.0.4"),
		9: addr("172.31.0.9"), // out of range
	}, map[maps.Addr]uint32{ip("172.31.0.3"): 2, ip("172.31.0.4"): 5})
	get := func(name, a string, want uint32) {
		t.Helper()
		if id, err := n.get(name, ip(a)); err != nil || id != want {
			t.Errorf("%s: id %d, %v; want %d", name, id, err, want)
		}
	}
	get("b", "172.31.0.3", 2)
	get("c", "172.31.0.4", 5)
	get("d", "172.31.0.5", 6)
	get("b", "172.31.0.33", 2) // the number stays with the name
	n.retain(map[string]uint32{"c": 2, "d": 6})
	get("e", "172.31.0.6", 7) // not the one just freed
	get("f", "172.31.0.7", 2)
	for name, a := range map[string]string{"g": "172.31.0.8", "h": "172.31.0.10", "i": "172.31.0.11"} {
		if _, err := n.get(name, ip(a)); err != nil {
			t.Error(err)
		}
	}
	if id, err := n.get("j", ip("172.31.0.12")); !errors.Is(err, errNoNodeID) {
		t.Errorf("the eighth of seven: %d, %v", id, err)
	}
	seen := make(map[uint32]string)
	for name, id := range n.byName {
		if other, double := seen[id]; double || id == 0 || id >= 8 {
			t.Errorf("%s and %s have id %d", name, other, id)
		}
		seen[id] = name
	}
}
