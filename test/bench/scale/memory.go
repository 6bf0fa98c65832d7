package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
)

// memory is what the agent's process has, in MiB.
type memory struct {
	RSS     float64 `json:"rss"`
	Files   float64 `json:"files"` // of it, pages of the program's own file
	Peak    float64 `json:"peak"`  // VmHWM
	GoHeap  float64 `json:"goHeap"`
	GoTotal float64 `json:"goTotal"` // of the Go runtime, from the system
}

const mib = 1 << 20

// memory reads the RSS before it asks the agent for its own figures, which
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
	_, body, err := b.node.AgentGet(ctx, "/metrics")
	if err != nil {
		return m, err
	}
	in := bufio.NewScanner(strings.NewReader(body))
	for in.Scan() {
		name, value, _ := strings.Cut(in.Text(), " ")
		v, _ := strconv.ParseFloat(value, 64)
		switch name {
		case "go_memstats_heap_alloc_bytes":
			m.GoHeap = v / mib
		case "go_memstats_sys_bytes":
			m.GoTotal = v / mib
		}
	}
	return m, in.Err()
}

// cpu is the time a process has spent so far, in milliseconds, its own and the
// kernel's for it.
func cpu(pid int) (float64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), ") ") // the name may hold spaces
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("unexpected /proc/%d/stat", pid)
	}
	var ticks float64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return ticks * 10, nil // of USER_HZ, which is 100
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
