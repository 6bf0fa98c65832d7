// Package report is what the benchmarks' reports have in common.
package report

import (
	"encoding/json"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// KernelRelease is what uname -r says.
func KernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Quantile of sorted values, interpolated; 0 of none.
func Quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// Median of values in any order.
func Median(values []float64) float64 { return Quantile(slices.Sorted(slices.Values(values)), 0.5) }

// WriteJSON writes all figures to a file.
func WriteJSON(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}
