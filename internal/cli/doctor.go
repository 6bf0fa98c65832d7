package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/doctor"
	"github.com/podweir/podweir/internal/maps"
)

func (s *session) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Look for what is broken on this node, and say what to do",
		Long: `Look for what is broken on this node, and say what to do.

Run it in the node's own network namespace; for what the node's firewall lets
in, with the programs of that (nft, iptables) in the path. For a second it looks
at what policy denies. Exit status: 0 if nothing fails, warnings or not;
1 if something does.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			found := doctor.Run(cmd.Context(), s.facts(cmd.Context()), doctor.Checks())
			if err := s.printFindings(found); err != nil {
				return err
			}
			if doctor.Failed(found) {
				return errors.New("something on this node does not work: see above")
			}
			return nil
		},
	}
}

// facts gathers what the checks look at.
func (s *session) facts(ctx context.Context) doctor.Facts {
	f := doctor.Facts{Host: s.env.Host(s.bpffs)}
	agent := s.env.DialAgent(s.socket)
	var status api.Status
	if f.Agent = agent.Get(ctx, api.PathStatus, &status); f.Agent == nil {
		f.Status, f.Plugged = &status, s.env.Plugged(s.socket)
		f.Denials = denials(ctx, agent)
		var endpoints api.Endpoints
		if agent.Get(ctx, api.PathEndpoints, &endpoints) == nil {
			f.Endpoints = &endpoints
		}
		var services api.Services
		if agent.Get(ctx, api.PathServices, &services) == nil {
			f.Services = &services
		}
	}
	f.Maps = s.withMaps(func(m Maps) error {
		if _, err := m.Usage(); err != nil {
			return err
		}
		if f.Services == nil {
			return nil
		}
		programmed, err := m.Services()
		if err != nil {
			return err
		}
		// What changed in between is none of these.
		var now api.Services
		if agent.Get(ctx, api.PathServices, &now) == nil {
			f.Missing = missing(f.Services, &now, programmed)
		}
		return nil
	})
	return f
}

// lookFor is how long doctor listens to what is denied.
const lookFor = time.Second

// denials are what policy denies within that time.
func denials(ctx context.Context, agent Agent) (out []api.Event) {
	ctx, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	// It ends with the time; an agent that tells nothing has other findings.
	_ = agent.Stream(ctx, api.PathEvents, func(line json.RawMessage) error {
		var ev api.Event
		if err := json.Unmarshal(line, &ev); err != nil {
			return err
		}
		if ev.Denied != nil {
			out = append(out, ev)
		}
		return nil
	})
	return out
}

// missing are the frontends that the agent has before and after, and the
// datapath has not, by service.
func missing(before, after *api.Services, programmed map[maps.ServiceKey]maps.Service) map[string][]netip.AddrPort {
	has := map[string]bool{}
	key := func(at netip.AddrPort, proto string) string { return at.String() + "/" + proto }
	for k := range programmed {
		has[key(addrPort(k.Addr, k.Port), maps.ProtoName(k.Proto))] = true
	}
	out := map[string][]netip.AddrPort{}
	for _, s := range before.Services {
		i := slices.IndexFunc(after.Services, func(t api.Service) bool { return t.ID == s.ID && t.Kind == s.Kind })
		if i < 0 {
			continue
		}
		for _, at := range s.Frontends {
			if slices.Contains(after.Services[i].Frontends, at) && !has[key(at, strings.ToLower(s.Protocol))] {
				name := s.Kind + " " + doctor.ServiceName(s)
				out[name] = append(out[name], at)
			}
		}
	}
	return out
}

func (s *session) printFindings(found []doctor.Finding) error {
	if s.output == "json" {
		return s.print(map[string]any{"findings": found}, nil)
	}
	marks := map[doctor.State]string{doctor.OK: "ok  ", doctor.Warn: "WARN", doctor.Fail: "FAIL"}
	for _, f := range found {
		object := ""
		if f.Object != "" {
			object = f.Object + ": "
		}
		if _, err := fmt.Fprintf(s.env.Stdout, "%s %-9s %s%s\n", marks[f.State], f.Check, object, f.Text); err != nil {
			return err
		}
		if f.WayOut != "" {
			if _, err := fmt.Fprintf(s.env.Stdout, "%15sWay out: %s\n", "", f.WayOut); err != nil {
				return err
			}
		}
	}
	return nil
}
