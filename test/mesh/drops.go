package mesh

import (
	"strings"

	"github.com/podweir/podweir/internal/maps"
)

// Dropped counts what was dropped of pods' packets according to the maps of
// these nodes; the kernel's own multicast, which no device carries, is not of
// them.
func Dropped(nodes map[string]maps.Set) func() (uint64, error) {
	return func() (uint64, error) {
		var sum uint64
		for _, set := range nodes {
			list, err := set.Metrics.Read()
			if err != nil {
				return 0, err
			}
			for _, s := range list {
				if name := maps.ReasonName(s.Reason); strings.HasPrefix(name, "drop_") && name != "drop_multicast" {
					sum += s.Packets
				}
			}
		}
		return sum, nil
	}
}
