package service

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

func backends(n int) []maps.Backend {
	out := make([]maps.Backend, n)
	for i := range out {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		out[i] = maps.Backend{Addr: maps.ToAddr(a), Port: 8080}
	}
	return out
}

func TestMaglevSize(t *testing.T) {
	for _, size := range append([]uint32{MaglevMin, MaglevMax}, maglevSizes[:]...) {
		if err := CheckMaglevSize(size); err != nil {
			t.Error(err)
		}
	}
	for _, tt := range []struct {
		given uint32
		n     int
		want  uint32
	}{
		{0, 0, 0}, {0, 1, 0}, {0, 2, 1021}, {0, 10, 1021}, {0, 11, 4093}, {0, 655, 65521}, {0, 5000, 65521},
		{0, 65521, 65521}, {0, 65522, 131071}, {0, 65536, 131071}, {0, 65537, 0},
		{1009, 2, 1009}, {1009, 1009, 1009}, {1009, 1010, 65521}, {131071, 70000, 0},
	} {
		if got := MaglevSize(tt.given, tt.n); got != tt.want {
			t.Errorf("%d backends, %d given: %d, want %d", tt.n, tt.given, got, tt.want)
		}
	}
}

// S32: shares are even.
func TestMaglevEvenness(t *testing.T) {
	for _, n := range []int{2, 3, 4, 10, 100, 600} {
		list := backends(n)
		size := MaglevSize(0, n)
		share := make([]int, n)
		for _, slot := range Maglev(list, size) {
			share[slot]++
		}
		low, high := slices.Min(share), slices.Max(share)
		// Each takes one entry per turn: shares differ by one.
		if high-low > 1 || low == 0 {
			t.Errorf("%d backends in %d entries: shares from %d to %d", n, size, low, high)
		}
	}
}

// S32: without one of n backends, about 1/n of the entries move.
func TestMaglevRemoval(t *testing.T) {
	for _, n := range []int{3, 4, 10, 100} {
		list := backends(n)
		size := MaglevSize(0, n)
		if MaglevSize(0, n-1) != size {
			t.Fatalf("%d and %d backends have tables of different sizes", n, n-1)
		}
		before := Maglev(list, size)
		worst := 0.0
		for gone := range list {
			rest := slices.Delete(slices.Clone(list), gone, gone+1)
			after := Maglev(rest, size)
			moved := 0
			for i := range before {
				if list[before[i]] != rest[after[i]] {
					moved++
				}
			}
			worst = max(worst, float64(moved)/float64(size))
		}
		if limit := 1/float64(n) + 0.08; worst > limit {
			t.Errorf("%d backends: %.3f of the entries moved, want at most %.3f", n, worst, limit)
		}
	}
}

// S32: the same input gives the same table on every node, now and in later
// versions: nodes of two versions have to agree while they are replaced.
func TestMaglevIsFixed(t *testing.T) {
	table := Maglev(backends(4), 251)
	const want = "[2 3 0 3 2 3 0 1 2 1 0 1 2 1 0 3]"
	if got := fmt.Sprint(table[:16]); got != want {
		t.Errorf("entries %s, want %s", got, want)
	}
	six := []maps.Backend{
		{Addr: maps.ToAddr(netip.MustParseAddr("fd00:10:244:50::66")), Port: 80},
		{Addr: maps.ToAddr(netip.MustParseAddr("fd00:10:244:50::66")), Port: 81},
	}
	if slices.Equal(Maglev(six, 251)[:16], table[:16]) {
		t.Error("other backends, the same table")
	}
}

// The order in which backends are named in slices makes no difference.
func TestMaglevOrderIndependence(t *testing.T) {
	list := backends(20)
	set := candidateSet{}
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(len(list)) {
		set[netip.AddrPortFrom(maps.FromAddr(list[i].Addr), list[i].Port)] = Endpoint{Backend: list[i]}
	}
	var sorted []maps.Backend
	for _, e := range set.sorted() {
		sorted = append(sorted, e.Backend)
	}
	if !slices.Equal(Maglev(sorted, 2039), Maglev(list, 2039)) {
		t.Error("another order, another table")
	}
}

func TestMaglevChunks(t *testing.T) {
	table := Maglev(backends(7), 1021)
	chunks := MaglevChunks(table)
	if len(chunks) != 16 {
		t.Fatalf("%d chunks, want 16", len(chunks))
	}
	for i, slot := range table {
		if got := chunks[i/64].Slot[i%64]; got != slot {
			t.Fatalf("entry %d: %d, want %d", i, got, slot)
		}
	}
	if last := chunks[15]; last.Slot[63] != 0 {
		t.Error("behind the table there is something")
	}
}

func TestCheckMaglevSize(t *testing.T) {
	for size, ok := range map[uint32]bool{0: true, 251: true, 250: false, 252: false, 65537: true, 131071: true, 131072: false} {
		if err := CheckMaglevSize(size); (err == nil) != ok {
			t.Errorf("%d: %v", size, err)
		}
	}
}

func BenchmarkMaglev4(b *testing.B) {
	list := backends(4)
	for b.Loop() {
		Maglev(list, MaglevSize(0, 4))
	}
}

func BenchmarkMaglev5000(b *testing.B) {
	list := backends(5000)
	for b.Loop() {
		Maglev(list, MaglevSize(0, 5000))
	}
}
