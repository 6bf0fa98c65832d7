package cli

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// serviceView is what the datapath holds of a service port for one or several
// frontends that it treats alike.
type serviceView struct {
	ID        uint32   `json:"id"`
	Name      string   `json:"name,omitempty"` // namespace/name[:port]
	Protocol  string   `json:"protocol"`
	Types     []string `json:"types"` // of the frontends, each once
	Frontends []string `json:"frontends"`
	// Set is the number of the backend set for pods and this host; 0 = none.
	Set      uint32   `json:"set"`
	Backends []string `json:"backends"`
	// Count is how many backends the frontends announce.
	Count uint32 `json:"count"`
	// ExtSet, External and ExtCount are the same for everybody else.
	ExtSet   uint32   `json:"extSet"`
	External []string `json:"external"`
	ExtCount uint32   `json:"extCount"`
	// Maglev is the size of the table that chooses among External.
	Maglev uint32 `json:"maglev,omitempty"`
	// Affinity is for how many seconds a client stays with its backend.
	Affinity uint32 `json:"affinitySeconds,omitempty"`
	// SourceRanges that the frontends answer to, if their flags say so.
	SourceRanges []string `json:"sourceRanges,omitempty"`
	Flags        []string `json:"flags,omitempty"`

	first netip.AddrPort
	value maps.Service
}

type servicesView struct {
	Services []serviceView `json:"services"`
	// AddrsWithoutPorts are addresses that a service owns without any port.
	AddrsWithoutPorts []netip.Addr `json:"addrsWithoutPorts,omitempty"`
}

func (s *session) servicesCommand() *cobra.Command {
	return s.kubeconfigFlag(&cobra.Command{
		Use:   "services [NAMESPACE/NAME[:PORT] | ADDRESS[:PORT] | ID]",
		Short: "List service ports, their frontends and backends, or those of one service",
		Long: `List service ports, their frontends and backends, or those of one service.

BACKENDS are for pods and this host, EXTERNAL for everybody else. An ADDRESS is
one of its frontends; of what is found all frontends are listed.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				if err := checkService(args[0], args[0]); err != nil {
					return err
				}
			}
			return s.withMaps(func(m Maps) error {
				n, err := s.namesFor(cmd.Context(), m, api.PathServices)
				if err != nil {
					return err
				}
				v, err := readServices(m, n)
				if err != nil {
					return err
				}
				if len(args) == 1 {
					ids, err := findServices(m, n, args[0], args[0])
					if err != nil {
						return err
					}
					v.AddrsWithoutPorts = nil
					v.Services = slices.DeleteFunc(v.Services, func(s serviceView) bool { return !ids[s.ID] })
				}
				return s.print(v, serviceTable(v, s.wide()))
			})
		},
	})
}

func serviceTable(v servicesView, wide bool) *table {
	t := newTable("no services", "ID", "SERVICE", "PROTO", "TYPE", "FRONTENDS", "BACKENDS", "EXTERNAL",
		"+SET", "+EXTSET", "+MAGLEV", "+AFFINITY", "+RANGES", "+FLAGS")
	number := func(n uint32, unit string) string {
		if n == 0 {
			return ""
		}
		return fmt.Sprint(n, unit)
	}
	for _, svc := range v.Services {
		external := ""
		if svc.value.Flags&maps.ServiceExternal != 0 {
			external = backends(svc.External, svc.ExtCount, svc.value.Flags&maps.ServiceNoLocalExt != 0, wide)
			if svc.ExtSet == svc.Set && svc.ExtSet != 0 {
				external = "the same"
			}
		}
		t.add(fmt.Sprint(svc.ID), svc.Name, svc.Protocol, strings.Join(svc.Types, ","), list(svc.Frontends, wide),
			backends(svc.Backends, svc.Count, svc.value.Flags&maps.ServiceNoLocal != 0, wide), external,
			fmt.Sprint(svc.Set), fmt.Sprint(svc.ExtSet), number(svc.Maglev, ""), number(svc.Affinity, "s"),
			list(svc.SourceRanges, true), list(svc.Flags, true))
	}
	for _, a := range v.AddrsWithoutPorts {
		t.add("", "", "", "", a.String(), "none: no ports", "", "", "", "", "", "", "")
	}
	return t
}

// backends says where a set leads.
func backends(set []string, count uint32, noLocal, wide bool) string {
	switch {
	case count == 0 && noLocal:
		return "none here: dropped"
	case count == 0:
		return "none: refused"
	case len(set) != int(count):
		return strings.TrimSpace(fmt.Sprintf("%s (%d of %d in the map)", list(set, wide), len(set), count))
	}
	return list(set, wide)
}

// frontendType is what a frontend is to its service: the agent knows, the map
// tells some.
func (n *names) frontendType(id uint32, at netip.AddrPort, flags uint32) string {
	s := n.services[id]
	if i := slices.Index(s.Frontends, at); i >= 0 && i < len(s.Types) {
		return s.Types[i]
	}
	switch {
	case flags&maps.ServiceExternal == 0:
		return "ClusterIP"
	case at.Addr().IsUnspecified():
		return "NodePort"
	}
	return "External"
}

func readServices(m Maps, n *names) (servicesView, error) {
	services, err := m.Services()
	if err != nil {
		return servicesView{}, err
	}
	backends, err := m.Backends()
	if err != nil {
		return servicesView{}, err
	}
	srcRanges, err := m.SrcRanges()
	if err != nil {
		return servicesView{}, err
	}
	ranges := map[uint32][]string{}
	for k := range srcRanges {
		id, p := maps.FromSrcRange(k)
		ranges[id] = append(ranges[id], maps.FromPrefix(p).String())
	}
	set := func(num, count uint32) []string {
		out := []string{}
		for slot := range count {
			if b, ok := backends[maps.BackendKey{Set: num, Slot: slot}]; ok {
				out = append(out, addrPort(b.Addr, b.Port).String())
			}
		}
		return out
	}
	// Frontends with one value are one row; while a set is being replaced,
	// some may point at the new one already.
	views := map[maps.Service]*serviceView{}
	withPorts := map[netip.Addr]bool{}
	var owned []netip.Addr
	for k, svc := range services {
		at := addrPort(k.Addr, k.Port)
		if k.Port == 0 && k.Proto == 0 {
			owned = append(owned, at.Addr())
			continue
		}
		withPorts[at.Addr()] = true
		v := views[svc]
		if v == nil {
			v = &serviceView{
				ID: svc.Id, Name: n.serviceName(svc.Id), Protocol: maps.ProtoName(k.Proto),
				Set: svc.Set, Count: svc.Count, Backends: set(svc.Set, svc.Count),
				ExtSet: svc.ExtSet, ExtCount: svc.ExtCount, External: set(svc.ExtSet, svc.ExtCount),
				Maglev: svc.Maglev, Affinity: svc.Affinity, Flags: maps.ServiceFlagNames(svc.Flags), first: at, value: svc,
			}
			if svc.Flags&maps.ServiceSourceRanges != 0 {
				v.SourceRanges = ranges[svc.Id]
				slices.Sort(v.SourceRanges)
			}
			views[svc] = v
		}
		v.Frontends = append(v.Frontends, at.String())
		if kind := n.frontendType(svc.Id, at, svc.Flags); !slices.Contains(v.Types, kind) {
			v.Types = append(v.Types, kind)
			slices.Sort(v.Types)
		}
		if at.Compare(v.first) < 0 {
			v.first = at
		}
	}
	out := servicesView{Services: []serviceView{}}
	for _, v := range views {
		slices.Sort(v.Frontends)
		out.Services = append(out.Services, *v)
	}
	slices.SortFunc(out.Services, func(a, b serviceView) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), a.first.Compare(b.first), cmp.Compare(a.Protocol, b.Protocol),
			cmp.Compare(a.ID, b.ID), cmp.Compare(a.Set, b.Set), cmp.Compare(a.value.Flags, b.value.Flags))
	})
	for _, a := range owned {
		if !withPorts[a] {
			out.AddrsWithoutPorts = append(out.AddrsWithoutPorts, a)
		}
	}
	slices.SortFunc(out.AddrsWithoutPorts, netip.Addr.Compare)
	return out, nil
}
