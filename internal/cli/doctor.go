package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/doctor"
)

func (s *session) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Look for what is broken on this node, and say what to do",
		Long: `Look for what is broken on this node, and say what to do.

Run it in the node's own network namespace; for what the node's firewall lets
in, with the programs of that (nft, iptables) in the path. Exit status: 0 if nothing fails, warnings or not;
1 if something does.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := doctor.Facts{Host: s.env.Host(s.bpffs)}
			var status api.Status
			if f.Agent = s.env.DialAgent(s.socket).Get(cmd.Context(), api.PathStatus, &status); f.Agent == nil {
				f.Status = &status
				var endpoints api.Endpoints
				if s.env.DialAgent(s.socket).Get(cmd.Context(), api.PathEndpoints, &endpoints) == nil {
					f.Endpoints = &endpoints
				}
				var services api.Services
				if s.env.DialAgent(s.socket).Get(cmd.Context(), api.PathServices, &services) == nil {
					f.Services = &services
				}
			}
			f.Maps = s.withMaps(func(m Maps) error {
				_, err := m.Usage()
				return err
			})
			found := doctor.Run(cmd.Context(), f, doctor.Checks())
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
