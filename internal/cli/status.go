package cli

import (
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// statusView is what the agent says of itself and what the maps show.
type statusView struct {
	// Agent is missing when it does not answer; AgentError says why.
	Agent      *api.Status    `json:"agent,omitempty"`
	AgentError string         `json:"agentError,omitempty"`
	Datapath   *datapathView  `json:"datapath,omitempty"`
	Packets    *packetsByFate `json:"packets,omitempty"`
}

// datapathView is what the pinned maps hold.
type datapathView struct {
	Pinned string     `json:"pinned"`
	Maps   []MapUsage `json:"maps"`
}

// packetsByFate sums the counters.
type packetsByFate struct {
	Forwarded uint64 `json:"forwarded"`
	Passed    uint64 `json:"passed"`
	Dropped   uint64 `json:"dropped"`
}

func (s *session) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show how the agent and the datapath are",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var v statusView
			n := s.names(cmd.Context(), api.PathStatus)
			if n.down != nil {
				v.AgentError = n.down.Error()
			} else {
				v.Agent = &n.status
			}
			// What the agent says is worth showing without the maps, too.
			mapsErr := s.withMaps(func(m Maps) error {
				usage, err := m.Usage()
				if err != nil {
					return err
				}
				samples, err := m.Metrics()
				if err != nil {
					return err
				}
				v.Datapath = &datapathView{Pinned: s.bpffs, Maps: usage}
				v.Packets = sumPackets(samples)
				return nil
			})
			if s.output == "json" {
				return errors.Join(s.print(v, nil), mapsErr)
			}
			return errors.Join(s.printStatus(&v), mapsErr)
		},
	}
}

func sumPackets(samples []maps.Sample) *packetsByFate {
	var p packetsByFate
	for _, x := range samples {
		switch name := maps.ReasonName(x.Reason); {
		case maps.IsDrop(x.Reason):
			p.Dropped += x.Packets
		case name == "pass":
			p.Passed += x.Packets
		case strings.HasPrefix(name, "fwd_"):
			p.Forwarded += x.Packets
		}
	}
	return &p
}

func (s *session) printStatus(v *statusView) error {
	tw := tabwriter.NewWriter(s.env.Stdout, 0, 8, 2, ' ', 0)
	line := func(key, format string, args ...any) {
		_, _ = fmt.Fprintf(tw, "%s\t%s\n", key, fmt.Sprintf(format, args...))
	}
	if a := v.Agent; a != nil {
		state := "ready"
		if !a.Ready {
			state = "NOT READY"
			if len(a.NotReady) > 0 {
				state += ": " + strings.Join(a.NotReady, "; ")
			}
		}
		line("Node", "%s", a.Node)
		line("Agent", "%s, version %s, up %s", state, orUnknown(a.Version), span(a.UptimeSeconds))
		for _, src := range a.Sources {
			state := "synced"
			if !src.Synced {
				state = "NOT SYNCED"
			}
			line("Source", "%s %s, %s", src.Kind, src.Location, state)
		}
		if t := a.Tunnel; t.Device != "" {
			from, mtu := "an address not known yet", "MTU not known yet"
			if t.Addr.IsValid() {
				from = t.Addr.String()
			}
			if t.MTU != 0 {
				mtu = fmt.Sprintf("MTU %d", t.MTU)
			}
			line("Tunnel", "%s, VNI %d, UDP port %d, from %s, %s", t.Device, t.VNI, t.Port, from, mtu)
		}
		if len(a.ServiceCIDRs) > 0 {
			line("Service ranges", "%s", strings.Join(texts(a.ServiceCIDRs), ", "))
		}
		line("Masquerade", "%s", a.Masquerade)
		if a.ExternalSource != "" {
			line("External source", "%s", externalSource(a.ExternalSource))
		}
		line("Nodes", "%d", len(a.Nodes))
		if a.RoutingMode != "" {
			accepts := ""
			if a.AcceptsUnencapsulated {
				accepts = ", accepts unencapsulated packets of other nodes' pods"
			}
			line("Routing mode", "%s%s", a.RoutingMode, accepts)
		}
		if a.MTU6 != 0 && a.MTU6 != a.MTU {
			line("Pod MTU", "%d, IPv6 %d", a.MTU, a.MTU6)
		} else {
			line("Pod MTU", "%d", a.MTU)
		}
		for _, d := range a.Devices {
			if d.Role != "pod" {
				line("Device", "%s (%s), MTU %d", d.Name, d.Role, d.MTU)
			}
		}
		switch {
		case a.Sockets.Attached:
			line("Sockets", "translated at connect(), cgroup %s", a.Sockets.Cgroup)
		case a.Sockets.Cgroup != "":
			line("Sockets", "NOT ATTACHED to cgroup %s; translated on the way", a.Sockets.Cgroup)
		default:
			line("Sockets", "translated on the way")
		}
		line("Problems", "%d", len(a.Problems))
	} else {
		line("Agent", "NOT ANSWERING")
	}
	if d := v.Datapath; d != nil {
		line("Maps", "pinned under %s", d.Pinned)
		for _, u := range d.Maps {
			evicted := ""
			if u.Evicted > 0 {
				evicted = fmt.Sprintf(", %d evicted", u.Evicted)
			}
			line("  "+u.Name, "%d of %d%s", u.Entries, u.Max, evicted)
		}
	}
	if p := v.Packets; p != nil {
		line("Packets", "%d forwarded, %d dropped, %d passed to the kernel", p.Forwarded, p.Dropped, p.Passed)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if v.Agent == nil {
		return nil
	}
	for _, p := range v.Agent.Problems {
		var where []string
		if p.File != "" {
			where = append(where, fmt.Sprintf("%s:%d: ", p.File, p.Line))
		}
		if p.Object != "" {
			where = append(where, p.Object+": ")
		}
		_, _ = fmt.Fprintf(s.env.Stdout, "! %s%s\n", strings.Join(where, ""), p.Error)
	}
	return nil
}

// externalSource says what an --external-source does.
func externalSource(mode string) string {
	switch mode {
	case "keep":
		return "keep: clients keep their address, and are answered by the node that they called"
	case "dsr":
		return "dsr: clients keep their address, and are answered by the backend's node"
	case "snat":
		return "snat: clients are seen under the address of the node that they called"
	}
	return mode
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
