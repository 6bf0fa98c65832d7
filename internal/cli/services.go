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

// serviceView is a service port as the datapath holds it.
type serviceView struct {
	ID        uint32   `json:"id"`
	Name      string   `json:"name,omitempty"` // namespace/name[:port]
	Protocol  string   `json:"protocol"`
	Frontends []string `json:"frontends"`
	// Set is the number of the backend set; 0 = none.
	Set      uint32   `json:"set"`
	Backends []string `json:"backends"`
	// Count is how many backends the frontends announce.
	Count uint32   `json:"count"`
	Flags []string `json:"flags,omitempty"`

	first netip.AddrPort
}

type servicesView struct {
	Services []serviceView `json:"services"`
	// AddrsWithoutPorts are addresses that a service owns without any port.
	AddrsWithoutPorts []netip.Addr `json:"addrsWithoutPorts,omitempty"`
}

func (s *session) servicesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "services",
		Short: "List service ports, their frontends and backends",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withMaps(func(m Maps) error {
				n := s.names(cmd.Context(), api.PathServices)
				v, err := readServices(m, n)
				if err != nil {
					return err
				}
				return s.print(v, serviceTable(v, s.wide()))
			})
		},
	}
}

func serviceTable(v servicesView, wide bool) *table {
	t := newTable("no services", "ID", "SERVICE", "PROTO", "FRONTENDS", "BACKENDS", "+SET", "+FLAGS")
	for _, svc := range v.Services {
		backends := list(svc.Backends, wide)
		switch {
		case svc.Count == 0:
			backends = "none: dropped"
		case len(svc.Backends) != int(svc.Count):
			backends = strings.TrimSpace(fmt.Sprintf("%s (%d of %d in the map)", backends, len(svc.Backends), svc.Count))
		}
		t.add(fmt.Sprint(svc.ID), svc.Name, svc.Protocol, list(svc.Frontends, wide), backends,
			fmt.Sprint(svc.Set), list(svc.Flags, true))
	}
	for _, a := range v.AddrsWithoutPorts {
		t.add("", "", "", a.String(), "none: no ports", "", "")
	}
	return t
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
	// While a set is being replaced, the frontends of one port may point at
	// two sets: both are shown.
	type ref struct{ id, set uint32 }
	views := map[ref]*serviceView{}
	withPorts := map[netip.Addr]bool{}
	var owned []netip.Addr
	for k, svc := range services {
		at := addrPort(k.Addr, k.Port)
		if k.Port == 0 && k.Proto == 0 {
			owned = append(owned, at.Addr())
			continue
		}
		withPorts[at.Addr()] = true
		v := views[ref{svc.Id, svc.Set}]
		if v == nil {
			v = &serviceView{
				ID: svc.Id, Name: n.serviceName(svc.Id), Protocol: maps.ProtoName(k.Proto), Set: svc.Set,
				Count: svc.Count, Flags: maps.ServiceFlagNames(svc.Flags), Backends: []string{}, first: at,
			}
			for slot := range svc.Count {
				if b, ok := backends[maps.BackendKey{Set: svc.Set, Slot: slot}]; ok {
					v.Backends = append(v.Backends, addrPort(b.Addr, b.Port).String())
				}
			}
			views[ref{svc.Id, svc.Set}] = v
		}
		v.Frontends = append(v.Frontends, at.String())
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
			cmp.Compare(a.ID, b.ID), cmp.Compare(a.Set, b.Set))
	})
	for _, a := range owned {
		if !withPorts[a] {
			out.AddrsWithoutPorts = append(out.AddrsWithoutPorts, a)
		}
	}
	slices.SortFunc(out.AddrsWithoutPorts, netip.Addr.Compare)
	return out, nil
}
