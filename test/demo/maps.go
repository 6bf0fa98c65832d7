package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/podweir/podweir/test/cluster"
	"github.com/podweir/podweir/test/tools/probe"
)

// flowView and counterView are what the steps read of "podweir -o json".
type flowView struct {
	Protocol       string `json:"protocol"`
	Source         string `json:"source"`
	Destination    string `json:"destination"`
	NewDestination string `json:"newDestination"`
	NewSource      string `json:"newSource"`
	Direction      string `json:"direction"`
	State          string `json:"state"`
}

type counterView struct {
	Reason  string `json:"reason"`
	Hook    string `json:"hook"`
	Family  string `json:"family"`
	Packets uint64 `json:"packets"`
}

func podweir(ctx context.Context, n *cluster.Node, v any, args ...string) error {
	out, err := n.Podweir(ctx, append(args, "-o", "json")...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), v); err != nil {
		return fmt.Errorf("podweir %s said %q: %w", strings.Join(args, " "), out, err)
	}
	return nil
}

// flows opens a connection to the service and shows both its entries.
func (d *demo) flows(ctx context.Context) error {
	say("one entry for each direction; confirmed: the client was seen again after an answer")
	for _, target := range []string{vip4, vip6} {
		stream, err := d.pod("client").Stream(ctx, target)
		if err != nil {
			return err
		}
		if _, err := stream.Await(ctx, "some answers", func(r probe.StreamReport) bool { return r.Received > 3 }); err != nil {
			return err
		}
		rep, err := stream.Report(ctx)
		if err != nil {
			return err
		}
		var list struct {
			Flows []flowView `json:"flows"`
		}
		if err := podweir(ctx, d.pod("client").Node, &list, "flows"); err != nil {
			return err
		}
		found := map[string]flowView{}
		for _, f := range list.Flows {
			if f.Source == rep.Local && f.Destination == target || f.NewSource == target && f.NewDestination == rep.Local {
				found[f.Direction] = f
				say("%-8s %s  %s -> %s  becomes  %s -> %s  (%s)", f.Direction, f.Protocol, f.Source, f.Destination, f.NewSource, f.NewDestination, f.State)
			}
		}
		orig, reply := found["original"], found["reply"]
		if orig.State != "confirmed" || reply.State != "confirmed" {
			return fmt.Errorf("of %d entries, found for %s -> %s: %+v; want one per direction, confirmed", len(list.Flows), rep.Local, target, found)
		}
		if orig.NewDestination != reply.Source {
			return fmt.Errorf("the two directions name different backends")
		}
		if _, err := stream.Stop(ctx); err != nil {
			return err
		}
	}
	return nil
}

func counters(ctx context.Context, n *cluster.Node) (map[string]uint64, error) {
	var list struct {
		Counters []counterView `json:"counters"`
	}
	sums := map[string]uint64{}
	if err := podweir(ctx, n, &list, "metrics"); err != nil {
		return nil, err
	}
	for _, c := range list.Counters {
		sums[c.Reason] += c.Packets
	}
	return sums, nil
}

// oneLookup compares the counters of the flow engine around one UDP flow on
// one node, where every packet meets exactly one program.
func (d *demo) oneLookup(ctx context.Context) error {
	client, local := d.pod("client"), d.pod("local")
	before, err := counters(ctx, client.Node)
	if err != nil {
		return err
	}
	stream, err := client.Stream(ctx, both(local)[0], "-proto", "udp", "-interval", "1ms")
	if err != nil {
		return err
	}
	if _, err := stream.Await(ctx, "500 answers", func(r probe.StreamReport) bool { return r.Received >= 500 }); err != nil {
		return err
	}
	rep, err := stream.Stop(ctx)
	if err != nil {
		return err
	}
	after, err := counters(ctx, client.Node)
	if err != nil {
		return err
	}
	delta := func(reason string) uint64 { return after[reason] - before[reason] }
	packets := rep.Sent + rep.Received
	// Each packet is counted by exactly one of these, or as stale.
	first, second, unknown := delta("flow_hit"), delta("flow_hit_new"), delta("flow_miss")
	say("%d packets: %d found at the first lookup, %d at the second (not yet confirmed), %d unknown", packets, first, second, unknown)
	if got := first + second + unknown + delta("flow_stale"); got != packets {
		return fmt.Errorf("%d packets, but %d judged: a packet met more than one program, or none", packets, got)
	}
	// The flow is confirmed when the client is seen again after the first
	// answer; on a busy machine it has sent some more by then.
	if unknown != 1 || delta("flow_confirmed") != 1 || packets-first > packets/10 {
		return fmt.Errorf("%d of %d packets were not found at the first lookup", packets-first, packets)
	}
	return nil
}

// counters shows the counters that the steps so far must have moved.
func (d *demo) counters(ctx context.Context) error {
	sums := map[string]uint64{}
	say("packets by what became of them (docs/metrics.md) and the hook that saw them, as podweir metrics shows:")
	say("%-8s %-24s %-14s %-6s %8s", "NODE", "REASON", "HOOK", "FAMILY", "PACKETS")
	for _, n := range d.c.Nodes {
		var list struct {
			Counters []counterView `json:"counters"`
		}
		if err := podweir(ctx, n, &list, "metrics"); err != nil {
			return err
		}
		for _, c := range list.Counters {
			sums[c.Reason] += c.Packets
			say("%-8s %-24s %-14s %-6s %8d", n.NodeName, c.Reason, c.Hook, c.Family, c.Packets)
		}
		code, body, err := n.AgentGet(ctx, "/metrics")
		if err != nil {
			return err
		}
		if code != 200 || !strings.Contains(body, "flow_hit") {
			return fmt.Errorf("/metrics of %s: %d, without the datapath's counters", n.NodeName, code)
		}
	}
	for _, reason := range []string{"flow_hit", "flow_created", "flow_confirmed", "fwd_local", "fwd_encap", "fwd_decap", "flow_stale", "drop_policy_ingress", "drop_no_service", "drop_no_service_port"} {
		if sums[reason] == 0 {
			return fmt.Errorf("%s is 0 on both nodes", reason)
		}
	}
	if sums["drop_helper"] > 0 {
		return fmt.Errorf("drop_helper is %d: the kernel refused what must work", sums["drop_helper"])
	}
	return nil
}
