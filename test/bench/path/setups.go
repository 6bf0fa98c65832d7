package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A setup is a mode at one size of the cluster. Each has a topology of its
// own: hooks that were once registered in a namespace stay.
type setup struct {
	mode
	proxy    string // kube-proxy's mode, "" is none of it
	services int    // of the cluster
	policies int    // on each of the two pods, of podweir's
	flows    int    // alive while it is measured
}

// size is what a setup has more than one of.
func (s setup) size() string {
	var out []string
	add := func(n int, what string) {
		if n > 1 {
			out = append(out, strconv.Itoa(n)+" "+what)
		}
	}
	add(s.services, "services")
	add(s.policies, "policies")
	add(s.flows, "flows")
	return strings.Join(out, ", ")
}

// label tells a setup from the others of its phase.
func (s setup) label() string {
	if size := s.size(); size != "" {
		return s.name + ", " + size
	}
	return s.name
}

const (
	iptablesMode = "kube-proxy-iptables"
	nftablesMode = "kube-proxy-nftables"
	vxlanMode    = "podweir-vxlan"
	directMode   = "podweir-direct"
	// plainMode is vxlanMode whose programs at connect() are not attached.
	plainMode = "podweir-vxlan-no-sockets"
)

// peerModes are all modes, the floor first.
func peerModes() []setup {
	var out []setup
	for _, m := range allModes() {
		// Those are paths of the others here.
		if !strings.HasSuffix(m.name, "-same-node") {
			out = append(out, setup{mode: m})
		}
	}
	out = append(out, setup{mode: mode{name: plainMode, podweir: true, tunnel: true, noSockets: true}})
	for _, p := range []string{"iptables", "nftables"} {
		out = append(out, setup{mode: mode{name: "kube-proxy-" + p, tunnel: true}, proxy: p})
	}
	for i := range out {
		out[i].services, out[i].policies, out[i].flows = 1, 1, 1
	}
	return out
}

func pickModes(names ...string) []setup {
	return slices.DeleteFunc(peerModes(), func(s setup) bool { return !slices.Contains(names, s.name) })
}

// A way is from whom to whom, and by which address.
type way struct {
	name   string
	client string // pod; "" is outside, [hostClient] a process of node-a itself
	server string // pod; "" is outside
	by     string // podIP, clusterIP or nodePort
	entry  string // node that is called, of nodePort
	nodes  int    // on the way
}

const (
	podIP     = "pod IP"
	clusterIP = "ClusterIP"
	nodePort  = "NodePort"
	outsideIP = "address outside"
)

// wireWays are those inside a cluster of two nodes, by one cable.
func wireWays() []way {
	return []way{
		{name: "pod-ip-remote", client: "client", server: "remote", by: podIP, nodes: 2},
		{name: "pod-ip-local", client: "client", server: "local", by: podIP, nodes: 1},
		{name: "cluster-ip-remote", client: "client", server: "remote", by: clusterIP, nodes: 2},
		{name: "cluster-ip-local", client: "client", server: "local", by: clusterIP, nodes: 1},
	}
}

// outsideWays are those of a cluster of three nodes and a host outside, on one
// switch. A backend elsewhere is behind a node that has no pods.
func outsideWays() []way {
	return []way{
		{name: "node-port-local", server: "remote", by: nodePort, entry: "node-b", nodes: 1},
		{name: "node-port-remote", server: "local", by: nodePort, entry: "node-c", nodes: 2},
		{name: "off-cluster", client: "remote", by: outsideIP, nodes: 1},
	}
}

// hostClient calls as a process of the node, in its namespace and cgroup.
const hostClient = "node-a"

func hostWays() []way {
	return []way{{name: "host-cluster-ip", client: hostClient, server: "remote", by: clusterIP, nodes: 1}}
}

func allWays() []way { return slices.Concat(wireWays(), outsideWays(), hostWays()) }

// mode of a setup on a way, as checkWay wants it.
func (s setup) on(w way) mode {
	m := s.mode
	m.server, m.nodes = w.server, w.nodes
	m.entry = w.client == "" || w.server == "" || w.client == hostClient
	m.host = w.client == hostClient
	return m
}

// A phase is what is measured interleaved: topologies that exist together.
type phase struct {
	name, title string
	three       bool // nodes, and a host outside
	setups      []setup
	ways        []way
	loads       []workload
}

func oneLoads() []workload {
	return []workload{
		{"udp", "ns/packet", 40},
		{"first", "ns", 200},
		{"crr", "ns", 300},
		{"rr", "ns", 800},
		{"bulk", "ns/KiB", 12},
		{"bulk8", "ns/KiB", 12},
	}
}

func twoLoads() []workload {
	return []workload{
		{"two-udp", "ns/packet", 40},
		{"two-crr", "ns", 300},
		{"two-rr", "ns", 500},
		{"two-bulk", "ns/KiB", 16},
		{"two-bulk8", "ns/KiB", 16},
	}
}

// sizes of the phases that compare them.
type sizes struct{ services, policies, flows []int }

func defaultSizes() sizes {
	return sizes{services: []int{1, 1000, 10000}, policies: []int{1, 1000}, flows: []int{1, 100000}}
}

// atSizes are setups at each size.
func atSizes(all []setup, at []int, set func(*setup, int)) (out []setup) {
	for _, s := range all {
		for _, n := range at {
			bigger := s
			set(&bigger, n)
			out = append(out, bigger)
		}
	}
	return out
}

func allPhases(z sizes) []phase {
	loads := append(oneLoads(), twoLoads()...)
	remote := []way{wireWays()[2]}
	few := oneLoads()[:4]
	tunnels := pickModes(vxlanMode, iptablesMode, nftablesMode)
	floor := pickModes(baseline)
	// Connections are tracked in one table for all namespaces, so there is no
	// kube-proxy with few of them beside one with many.
	flows := atSizes(tunnels, z.flows, func(s *setup, n int) { s.flows = n })
	flows = slices.DeleteFunc(flows, func(s setup) bool { return s.proxy != "" && s.flows == 1 })
	return []phase{
		{
			name: "ways", title: "inside a cluster of two nodes", ways: wireWays(), loads: loads,
			setups: slices.DeleteFunc(peerModes(), func(s setup) bool { return s.noSockets }),
		},
		{
			name: "outside", title: "three nodes and a host outside", three: true,
			setups: pickModes(baseline, vxlanMode, directMode, iptablesMode, nftablesMode), ways: outsideWays(), loads: loads,
		},
		{
			name: "host", title: "processes of the node itself", ways: hostWays(), loads: loads,
			setups: pickModes(baseline, vxlanMode, plainMode, iptablesMode, nftablesMode),
		},
		{
			name: "services", title: "by the number of services", ways: remote, loads: oneLoads()[:5],
			setups: append(slices.Clone(floor), atSizes(tunnels, z.services, func(s *setup, n int) { s.services = n })...),
		},
		{
			name: "policies", title: "by the number of policies on each pod", ways: remote, loads: few,
			setups: append(slices.Clone(floor), atSizes(pickModes(vxlanMode), z.policies, func(s *setup, n int) { s.policies = n })...),
		},
		{
			name: "flows", title: "by the number of live flows", ways: remote, loads: few,
			setups: append(slices.Clone(floor), flows...),
		},
	}
}

// choosePhases keeps what was asked for. The floor stays in any case.
func choosePhases(o peerOptions) ([]phase, error) {
	z := defaultSizes()
	for _, l := range []struct {
		flag, list string
		into       *[]int
		most       int
	}{
		{"services", o.services, &z.services, maxServices},
		{"policies", o.policies, &z.policies, maxPolicies},
		{"flows", o.flows, &z.flows, maxFlows},
	} {
		if l.list == "" {
			continue
		}
		*l.into = nil
		for text := range strings.SplitSeq(l.list, ",") {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > l.most {
				return nil, fmt.Errorf("--%s %s: %q is no number from 1 to %d", l.flag, l.list, text, l.most)
			}
			if slices.Contains(*l.into, n) {
				return nil, fmt.Errorf("--%s %s: %d is there twice", l.flag, l.list, n)
			}
			*l.into = append(*l.into, n)
		}
	}
	phases, err := choose("phase", o.phases, allPhases(z), func(p phase) string { return p.name })
	if err != nil {
		return nil, err
	}
	modes, err := choose("mode", o.modes, peerModes(), func(s setup) string { return s.name })
	if err != nil {
		return nil, err
	}
	ways, err := choose("path", o.paths, allWays(), func(w way) string { return w.name })
	if err != nil {
		return nil, err
	}
	loads, err := choose("workload", o.workloads, append(oneLoads(), twoLoads()...), func(w workload) string { return w.name })
	if err != nil {
		return nil, err
	}
	var out []phase
	for _, p := range phases {
		// Phases share lists.
		p.setups = slices.DeleteFunc(slices.Clone(p.setups), func(s setup) bool {
			return s.name != baseline && !slices.ContainsFunc(modes, func(m setup) bool { return m.name == s.name })
		})
		p.ways = slices.DeleteFunc(slices.Clone(p.ways), func(w way) bool {
			return !slices.ContainsFunc(ways, func(x way) bool { return x.name == w.name })
		})
		p.loads = slices.DeleteFunc(slices.Clone(p.loads), func(w workload) bool {
			return !slices.ContainsFunc(loads, func(x workload) bool { return x.name == w.name })
		})
		if len(p.setups) > 1 && len(p.ways) > 0 && len(p.loads) > 0 {
			out = append(out, p)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("nothing is left to measure: no phase has those modes, paths and workloads together")
	}
	return out, nil
}
