package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// memory is what a process has, in MiB.
type memory struct {
	RSS     float64 `json:"rss"`
	Files   float64 `json:"files"` // of it, pages of the program's own file
	Peak    float64 `json:"peak"`  // VmHWM
	GoHeap  float64 `json:"goHeap"`
	GoTotal float64 `json:"goTotal"` // of the Go runtime, from the system
}

const mib = 1 << 20

// memory reads the RSS before it asks the process for its own figures, which
// costs some memory itself.
func (b *bench) memory(ctx context.Context, pid int) (m memory, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, _ := strconv.ParseFloat(fields[1], 64)
		switch fields[0] {
		case "VmRSS:":
			m.RSS = kib / 1024
		case "RssFile:":
			m.Files = kib / 1024
		case "VmHWM:":
			m.Peak = kib / 1024
		}
	}
	body, err := b.sub.metrics(ctx)
	if err != nil {
		return m, err
	}
	m.GoHeap = metric(body, "go_memstats_heap_alloc_bytes") / mib
	m.GoTotal = metric(body, "go_memstats_sys_bytes") / mib
	if m.RSS == 0 || m.GoHeap == 0 || m.GoTotal == 0 {
		return m, fmt.Errorf("memory of process %d: not all of it is told: %+v", pid, m)
	}
	return m, nil
}

// cpu is the time a process has spent so far, in milliseconds, its own and the
// kernel's for it.
func cpu(pid int) (float64, error) {
	const sched = 2 // the clock of what the scheduler has given a process, see clock_getcpuclockid(3)
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &ts); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return float64(ts.Nano()) / 1e6, nil
}

// mapMemory is what the kernel charges for each pinned map, in bytes.
func mapMemory(dir string) (map[string]uint64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	out := map[string]uint64{}
	for _, e := range entries {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, e.Name()), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return nil, fmt.Errorf("map %s: %w", e.Name(), err)
		}
		info, err := m.Info()
		_ = m.Close()
		if err != nil {
			return nil, fmt.Errorf("map %s: %w", e.Name(), err)
		}
		if n, ok := info.Memlock(); ok {
			out[e.Name()] = n
		}
	}
	return out, nil
}
