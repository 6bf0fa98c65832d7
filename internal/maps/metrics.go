package maps

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
)

// Metrics reads pw_metrics.
type Metrics struct {
	m *ebpf.Map
}

// Sample is one counter, summed over all CPUs.
type Sample struct {
	Reason  Reason
	Hook    Hook
	IPv6    bool
	Packets uint64
	Bytes   uint64
}

// Family is the value of the family label: "ipv4" or "ipv6".
func (s Sample) Family() string {
	if s.IPv6 {
		return "ipv6"
	}
	return "ipv4"
}

// NewMetrics wraps the map of counters.
func NewMetrics(m *ebpf.Map) *Metrics { return &Metrics{m: m} }

// MetricsIndex is the row of a counter; see struct pw_counter.
func MetricsIndex(r Reason, h Hook, ipv6 bool) uint32 {
	i := (uint32(r)*uint32(bpf.DpPwHookPW_HOOK_MAX) + uint32(h)) * 2
	if ipv6 {
		i++
	}
	return i
}

// Read returns every counter that is not zero, in the order of the map.
func (c *Metrics) Read() ([]Sample, error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("pw_metrics: %w", err)
	}
	rows := int(c.m.MaxEntries())
	keys, vals := make([]uint32, rows), make([]Counter, rows*cpus)
	var cursor ebpf.MapBatchCursor
	n, err := c.m.BatchLookup(&cursor, keys, vals, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) || n < rows {
		// No batches for per-CPU arrays before 5.13.
		for i := range rows {
			keys[i] = uint32(i)
			var row []Counter
			if err := c.m.Lookup(&keys[i], &row); err != nil {
				return nil, fmt.Errorf("pw_metrics: read row %d: %w", i, err)
			}
			copy(vals[i*cpus:], row)
		}
	}
	var out []Sample
	for i, k := range keys {
		var s Sample
		for _, v := range vals[i*cpus : (i+1)*cpus] {
			s.Packets += v.Packets
			s.Bytes += v.Bytes
		}
		if s.Packets == 0 && s.Bytes == 0 {
			continue
		}
		s.IPv6 = k&1 != 0
		s.Hook = Hook(k / 2 % uint32(bpf.DpPwHookPW_HOOK_MAX))
		s.Reason = Reason(k / 2 / uint32(bpf.DpPwHookPW_HOOK_MAX))
		out = append(out, s)
	}
	return out, nil
}

// Close closes the file descriptor.
func (c *Metrics) Close() error {
	if c == nil || c.m == nil {
		return nil
	}
	return c.m.Close()
}
