package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/podweir/podweir/internal/maps"
)

// counts are the counters of both nodes: by node, hook and reason.
type counts map[count]uint64

type count struct{ node, hook, reason string }

func (c counts) since(before counts) counts {
	out := counts{}
	for k, v := range c {
		if v > before[k] {
			out[k] = v - before[k]
		}
	}
	return out
}

// sum adds up a reason; node or hook "" is any.
func (c counts) sum(node, hook, reason string) (n uint64) {
	for k, v := range c {
		if (node == "" || k.node == node) && (hook == "" || k.hook == hook) && k.reason == reason {
			n += v
		}
	}
	return n
}

// counters reads the counters of a topology's nodes; there are none without
// agents.
func (t *topology) counters() (counts, error) {
	out := counts{}
	for node, set := range t.maps {
		list, err := set.Metrics.Read()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", node, err)
		}
		for _, s := range list {
			out[count{node, maps.HookName(s.Hook), maps.ReasonName(s.Reason)}] += s.Packets
		}
	}
	return out, nil
}

// slack is how many packets of a measurement may take the slow path beyond
// those that must: first packets of the warm-up and of both directions, and
// the host's own neighbour discovery.
const slack = 16

// checkWay proves that a mode's packets took the fast path. operations are
// what the workload did; every one is at least a packet there, and except
// for one-way workloads a packet back.
func checkWay(m mode, w workload, operations uint64, d counts) error {
	if !m.podweir {
		return nil
	}
	var errs []error
	least := func(what string, got, want uint64) {
		if got+slack < want {
			errs = append(errs, fmt.Errorf("%s grew by %d, want at least %d", what, got, want))
		}
	}
	most := func(what string, got, want uint64) {
		if got > want+slack {
			errs = append(errs, fmt.Errorf("%s grew by %d, want at most %d", what, got, want))
		}
	}
	// Packets there and back, and flows. A connection has at least the
	// handshake's ACK, a request and a FIN there, a SYN-ACK, a response and
	// a FIN back besides its SYN.
	var there, back, flows uint64
	flows = 1
	name, two := strings.CutPrefix(w.name, "two-")
	switch name {
	case "udp":
		there = operations
	case "first":
		there, flows = operations, operations
	case "crr":
		there, back, flows = 3*operations, 3*operations, operations
	case "rr":
		there, back = operations, operations
	case "bulk":
		there = operations / 64 // a KiB each; packets of 64 KiB
	case "bulk8":
		there, flows = operations/64, 8
	}
	nodes := uint64(1)
	switch {
	case m.entry:
		nodes = uint64(m.nodes)
		if calls := d.sum("node-a", "socket", "sock_translated"); m.host && !m.noSockets && name != "udp" && name != "first" {
			least("sock_translated", calls, flows)
			if calls == 0 {
				errs = append(errs, errors.New("no connect() was translated"))
			}
		} else {
			most("sock_translated", calls, 0)
		}
	case m.tunnel && m.server == "remote":
		nodes = 2
		sent := "fwd_encap"
		if m.ipip {
			sent = "fwd_ipip"
		}
		least(sent+" of node-a", d.sum("node-a", "from_pod", sent), there)
		least("fwd_decap of node-b", d.sum("node-b", "from_netdev", "fwd_decap"), there)
		least(sent+" of node-b", d.sum("node-b", "from_pod", sent), back)
		least("fwd_decap of node-a", d.sum("node-a", "from_netdev", "fwd_decap"), back)
		// Builds that may be compared with sent first packets through the device.
		device := uint64(0)
		if m.bin != "" {
			device = flows
		}
		most("fwd_tunnel", d.sum("", "", "fwd_tunnel"), device)
	case m.server == "remote":
		nodes = 2
		least("fwd_direct of node-a", d.sum("node-a", "from_pod", "fwd_direct"), there)
		least("fwd_local of node-b", d.sum("node-b", "from_netdev", "fwd_local"), there)
		least("fwd_direct of node-b", d.sum("node-b", "from_pod", "fwd_direct"), back)
		least("fwd_local of node-a", d.sum("node-a", "from_netdev", "fwd_local"), back)
		most("fwd_tunnel", d.sum("", "", "fwd_tunnel"), 0)
	default:
		least("fwd_local of node-a", d.sum("node-a", "from_pod", "fwd_local"), there+back)
	}
	// What the node itself sends may have a flow there, too.
	tables := nodes
	if m.host {
		tables++
	}
	most("flow_stale", d.sum("", "", "flow_stale"), 0)
	if !two {
		// Two processes may send what is not counted here: segments again.
		most("flow_miss", d.sum("", "", "flow_miss"), tables*flows)
		// A connection's SYN-ACK, and what follows until its initiator is heard
		// again, are found at the second look-up.
		most("flow_hit_new", d.sum("", "", "flow_hit_new"), 4*tables*flows)
	}
	switch name {
	case "crr":
		there, back = there-2*flows, back-flows
	case "first":
		there = 0 // each is a miss
		least("flow_miss", d.sum("", "", "flow_miss"), nodes*flows)
	}
	least("flow_hit", d.sum("", "", "flow_hit"), nodes*(there+back))
	for k, n := range d {
		// Multicast is the pods' own neighbour discovery.
		if strings.HasPrefix(k.reason, "drop_") && k.reason != "drop_multicast" {
			errs = append(errs, fmt.Errorf("%s of %s at %s grew by %d", k.reason, k.node, k.hook, n))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("not the fast path: %w\ncounters: %v", errors.Join(errs...), d)
	}
	return nil
}
