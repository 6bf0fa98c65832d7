package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
)

func (s *session) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the versions of this program and of the agent",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Podweir string `json:"podweir"`
				Agent   string `json:"agent,omitempty"` // missing when it does not answer
			}{Podweir: s.env.Version}
			v.Agent = s.names(cmd.Context(), api.PathStatus).status.Version
			lines := [][]string{{"podweir", v.Podweir}}
			if v.Agent != "" {
				lines = append(lines, []string{"podweir-agent", v.Agent})
			}
			if s.output == "json" {
				return s.print(v, nil)
			}
			for _, l := range lines {
				if _, err := fmt.Fprintf(s.env.Stdout, "%-14s %s\n", l[0], l[1]); err != nil {
					return err
				}
			}
			return nil
		},
	}
}
