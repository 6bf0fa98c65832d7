package heap

import (
	"runtime"
	"runtime/debug"
	"testing"
)

var sink []byte

// collections that n bytes of garbage cost.
func collections(n int) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range n >> 12 {
		sink = make([]byte, 1<<12)
	}
	runtime.ReadMemStats(&after)
	return int(after.NumGC - before.NumGC)
}

func TestStart(t *testing.T) {
	t.Setenv("GOGC", "")
	const percent, room, garbage = 50, 32 << 20, 512 << 20
	was := debug.SetGCPercent(percent)
	defer debug.SetGCPercent(was)
	runtime.GC()
	usual := collections(garbage)
	settle := Start(room, percent)
	defer settle()
	starting := collections(garbage)
	// The first one comes after the room, and so does every other.
	if most := garbage/room + 2; starting == 0 || starting > most {
		t.Errorf("%d collections while it starts, want 1 to %d", starting, most)
	}
	if usual < 4*starting {
		t.Errorf("%d collections while it starts, %d as usual", starting, usual)
	}
	settle()
	if settled := collections(garbage); settled < usual/2 {
		t.Errorf("%d collections afterwards, %d before", settled, usual)
	}
	if p := debug.SetGCPercent(percent); p != percent {
		t.Errorf("%d percent afterwards", p)
	}
}

// What is alive counts, so that a large heap does not grow by a multiple.
func TestStartPercent(t *testing.T) {
	for _, c := range []struct {
		alive, room uint64
		want        int
	}{
		{0, 20 << 20, 500}, {20 << 20, 20 << 20, 100}, {40 << 20, 20 << 20, 50}, {2000 << 20, 20 << 20, 25},
	} {
		if got := startPercent(c.alive, c.room); got != c.want {
			t.Errorf("%d MiB alive, room of %d MiB: %d%%, want %d%%", c.alive>>20, c.room>>20, got, c.want)
		}
	}
}

// Who sets GOGC gets it.
func TestGOGC(t *testing.T) {
	t.Setenv("GOGC", "70")
	was := debug.SetGCPercent(70)
	defer debug.SetGCPercent(was)
	Start(64<<20, 50)()
	if p := debug.SetGCPercent(70); p != 70 {
		t.Errorf("GOGC=70, and %d percent", p)
	}
}
