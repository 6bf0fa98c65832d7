// Package heap has a process collect garbage as suits it: seldom while it
// starts, when nearly everything that is allocated is new and every collection
// goes over what the last one found alive, and by the usual percentage from
// then on, so that memory that is held for good stays small.
//
// It sets the process's own GC percentage (runtime/debug); the environment
// variable GOGC overrides all of it.
package heap

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
)

// runtimeMin is the heap, at 100 percent, that the Go runtime does not collect
// below (runtime/mgcpacer.go); it grows with the percentage.
const runtimeMin = 4 << 20

// growth is what a heap may grow by while the process starts, in percent of
// what is alive, where that is more than the room it is given.
const growth = 25

// Start lets the heap grow by room bytes before it is collected, and by a share
// of what is alive if that is more. The function returned ends that: percent holds
// from then on, and what is free goes back to the system.
func Start(room uint64, percent int) (settle func()) {
	if os.Getenv("GOGC") != "" {
		return debug.FreeOSMemory
	}
	p := &pacer{room: room}
	p.mu.Lock()
	debug.SetGCPercent(max(int(room*100/runtimeMin), percent))
	p.mu.Unlock()
	p.await()
	return func() {
		p.mu.Lock()
		p.ended = true
		debug.SetGCPercent(percent)
		p.mu.Unlock()
		debug.FreeOSMemory()
	}
}

// pacer sets the percentage after every collection.
type pacer struct {
	mu    sync.Mutex
	room  uint64
	ended bool
}

// await has the pacer called after the next collection, which finds an object
// that nobody has.
func (p *pacer) await() {
	mark := new([16]byte) // large enough to be an allocation of its own
	runtime.AddCleanup(mark, func(p *pacer) { p.collected() }, p)
}

func (p *pacer) collected() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	debug.SetGCPercent(startPercent(alive(), p.room))
	p.await()
}

// startPercent is the percentage at which a heap grows by room or growth.
func startPercent(alive, room uint64) int {
	return max(growth, int(room*100/max(alive, runtimeMin)))
}

// alive is what the last collection left, in bytes.
func alive() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return s[0].Value.Uint64()
}
