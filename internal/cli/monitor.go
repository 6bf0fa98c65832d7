package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// errAgentEnded: the agent has ended its answer.
var errAgentEnded = errors.New("the agent has stopped, and with it what it tells")

func (s *session) monitorCommand() *cobra.Command {
	var f eventFilter
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "Tell of drops as they happen, and which policy denied",
		Long: `Tell of drops as they happen, and which policy denied.

A line stands for a flow's first packet that was dropped, or for a running flow
that is denied by now; a flow that goes on trying is told of every five seconds.
The agent must run. It tells from now on, no more than its flag
--events-per-second says; 'podweir metrics' counts every packet, and as
event_lost what was not told.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			ctx := cmd.Context()
			err := s.env.DialAgent(s.socket).Stream(ctx, api.PathEvents, func(line json.RawMessage) error {
				var ev api.Event
				if err := json.Unmarshal(line, &ev); err != nil {
					return err
				}
				return s.printEvent(f, &ev, line)
			})
			switch {
			case ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			}
			return errAgentEnded
		},
	}
	cmd.Flags().StringVar(&f.pod, "pod", "", "only what this pod (namespace/name) sends, or is sent")
	cmd.Flags().StringVar(&f.reason, "reason", "", "only reasons that contain this: policy, drop_policy_ingress, spoofed, ...")
	return cmd
}

type eventFilter struct{ pod, reason string }

// check refuses what no event can match: nobody must wait for that.
func (f eventFilter) check() error {
	if f.pod != "" && !validPod(f.pod) {
		return usageError("--pod %s: write namespace/name", f.pod)
	}
	reasons := maps.DropReasons()
	if !slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(r, f.reason) }) {
		return usageError("--reason %s: is in the name of no reason; they are %s", f.reason, strings.Join(reasons, ", "))
	}
	return nil
}

func (f eventFilter) match(ev *api.Event) bool {
	if !strings.Contains(ev.Reason, f.reason) {
		return false
	}
	if f.pod == "" {
		return true
	}
	pods := []string{ev.Sender, ev.Source.Pod, ev.Destination.Pod}
	if ev.Denied != nil {
		pods = append(pods, ev.Denied.Source.Pod, ev.Denied.Destination.Pod)
	}
	for _, p := range pods {
		if p == f.pod {
			return true
		}
	}
	return false
}

func (s *session) printEvent(f eventFilter, ev *api.Event, line json.RawMessage) error {
	if ev.Missed > 0 {
		s.warn(fmt.Errorf("%d events were missed: they came faster than they were read", ev.Missed))
	}
	if !f.match(ev) {
		return nil
	}
	if s.output == "json" {
		_, err := fmt.Fprintf(s.env.Stdout, "%s\n", line)
		return err
	}
	_, err := fmt.Fprintln(s.env.Stdout, eventText(ev))
	return err
}

// eventText is an event as a line.
func eventText(ev *api.Event) string {
	end := func(e api.EventEnd) string {
		at := e.Addr.String()
		if e.Port != 0 && !strings.HasPrefix(ev.Protocol, "icmp") {
			at = netip.AddrPortFrom(e.Addr, e.Port).String()
		}
		if e.Pod != "" {
			return fmt.Sprintf("%s (%s)", e.Pod, at)
		}
		return at
	}
	text := fmt.Sprintf("%s %s %s %s -> %s", ev.Time.Format(time.StampMilli), ev.Reason, ev.Protocol, end(ev.Source), end(ev.Destination))
	d := ev.Denied
	switch {
	case d == nil && ev.Sender != ev.Source.Pod && ev.Sender != "":
		return text + ": sent by " + ev.Sender
	case d == nil:
		return text
	case d.Destination.Addr == ev.Source.Addr && d.Source.Addr != ev.Source.Addr:
		text += " (an answer)"
	case d.Destination.Addr != ev.Destination.Addr:
		text += " by a service to " + end(d.Destination)
	}
	pod := d.Pod
	if pod == "" {
		if pod = d.Destination.Addr.String(); d.Direction == "egress" {
			pod = d.Source.Addr.String()
		}
	}
	return fmt.Sprintf("%s: %s of %s: %s", text, d.Direction, pod, ev.Text)
}
