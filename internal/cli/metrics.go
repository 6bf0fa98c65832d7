package cli

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/maps"
)

// counterView is one counter of the datapath.
type counterView struct {
	Reason  string `json:"reason"`
	Hook    string `json:"hook"`
	Family  string `json:"family"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func (s *session) metricsCommand() *cobra.Command {
	var drops bool
	c := &cobra.Command{
		Use:   "metrics",
		Short: "List the datapath's counters that are not zero",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return s.withMaps(func(m Maps) error {
				samples, err := m.Metrics()
				if err != nil {
					return err
				}
				if drops {
					samples = slices.DeleteFunc(samples, func(x maps.Sample) bool { return !maps.IsDrop(x.Reason) })
				}
				counters := counters(samples)
				t := newTable("no packets counted", "REASON", "HOOK", "FAMILY", "PACKETS", "BYTES")
				for _, x := range counters {
					t.add(x.Reason, x.Hook, x.Family, fmt.Sprint(x.Packets), fmt.Sprint(x.Bytes))
				}
				return s.print(struct {
					Counters []counterView `json:"counters"`
				}{counters}, t)
			})
		},
	}
	c.Flags().BoolVar(&drops, "drops", false, "only drops")
	return c
}

// counters names the samples that are not zero, in the order of the enums.
func counters(samples []maps.Sample) []counterView {
	samples = slices.Clone(samples)
	slices.SortStableFunc(samples, func(a, b maps.Sample) int {
		return cmp.Or(cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Hook, b.Hook), compareBool(a.IPv6, b.IPv6))
	})
	out := []counterView{}
	for _, x := range samples {
		if x.Packets != 0 || x.Bytes != 0 {
			out = append(out, counterView{maps.ReasonName(x.Reason), maps.HookName(x.Hook), x.Family(), x.Packets, x.Bytes})
		}
	}
	return out
}
