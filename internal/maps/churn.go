package maps

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
)

// Churn reads pw_churn: how many entries were put into pw_flows_new and taken
// out of it again. What the kernel pushed out follows, see [Evicted].
type Churn struct {
	m *ebpf.Map
}

// NewChurn wraps the map of counts.
func NewChurn(m *ebpf.Map) *Churn { return &Churn{m: m} }

// Read returns the counts of all CPUs together, with the entries of
// [Churn.AddFound] among those inserted.
func (c *Churn) Read() (ChurnCount, error) {
	var sum ChurnCount
	for row := range uint32(bpf.DpPwChurnRowPW_CHURN_ROWS) {
		cpus, err := c.row(row)
		if err != nil {
			return sum, err
		}
		for _, n := range cpus {
			sum.Inserted += n.Inserted
			sum.Removed += n.Removed
		}
	}
	return sum, nil
}

// AddFound counts n entries that were inserted before there were counts. The
// programs never write where it does.
func (c *Churn) AddFound(n uint64) error {
	row := uint32(bpf.DpPwChurnRowPW_CHURN_FOUND)
	cpus, err := c.row(row)
	if err != nil {
		return err
	}
	cpus[0].Inserted += n
	if err := c.m.Put(row, cpus); err != nil {
		return fmt.Errorf("%s: write row %d: %w", bpf.DpMapPwChurn, row, err)
	}
	return nil
}

func (c *Churn) row(i uint32) ([]ChurnCount, error) {
	var cpus []ChurnCount
	if err := c.m.Lookup(&i, &cpus); err != nil {
		return nil, fmt.Errorf("%s: read row %d: %w", bpf.DpMapPwChurn, i, err)
	}
	return cpus, nil
}

// Close closes the file descriptor.
func (c *Churn) Close() error {
	if c == nil || c.m == nil {
		return nil
	}
	return c.m.Close()
}

// Evicted says how many entries of pw_flows_new the kernel has pushed out:
// so many at least, for what comes and goes while the entries present are
// being counted, between the two readings, is taken for neither. The truth is
// found in a quiet moment.
//
// uncounted is how many entries are present that nobody inserted: they are
// older than the counts. Then evicted is what it is with [Churn.AddFound] of
// them.
func Evicted(before, after ChurnCount, present uint64) (evicted, uncounted uint64) {
	most := int64(after.Inserted - before.Removed - present)
	if most < 0 {
		uncounted = uint64(-most)
	}
	least := int64(before.Inserted - after.Removed - present + uncounted)
	return uint64(max(least, 0)), uncounted
}
