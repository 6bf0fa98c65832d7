package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/podweir/podweir/test/cluster"
)

// listenPort is where servers listen; services translate servicePort to it.
const (
	listenPort  = 8080
	servicePort = 80
)

// A mode is one way of one topology that packets take.
type mode struct {
	name      string
	topology  string   // modes of one name share it
	against   string   // the plain kernel mode that does the same job
	server    string   // pod that serves
	podweir   bool     // agents run; the client calls the service of that name
	tunnel    bool     // between nodes encapsulated; VXLAN, unless
	ipip      bool     // IPv4 in IPv4
	agent     []string // flags
	bin       string   // folder of the programs, "" is this build's
	entry     bool     // the client or the server is no pod; pods are on as many nodes
	nodes     int
	host      bool // the client is a process of the node
	noSockets bool // without programs at connect()
}

// baseline is the mode that all are compared with.
const baseline = "kernel-vxlan"

func allModes() []mode {
	return []mode{
		{name: baseline, topology: "kernel-vxlan", server: "remote", tunnel: true},
		{name: "kernel-direct", topology: "kernel-direct", server: "remote"},
		{name: "kernel-same-node", topology: "kernel-direct", server: "local"},
		{name: "podweir-vxlan", topology: "podweir-vxlan", server: "remote", against: baseline, podweir: true, tunnel: true},
		{name: "podweir-ipip", topology: "podweir-ipip", server: "remote", against: baseline, podweir: true, tunnel: true, ipip: true, agent: []string{"--routing-mode", "ipip"}},
		{name: "podweir-cross-subnet", topology: "podweir-cross-subnet", server: "remote", against: "kernel-direct", podweir: true, agent: []string{"--routing-mode", "cross-subnet"}},
		{name: "podweir-direct", topology: "podweir-direct", server: "remote", against: "kernel-direct", podweir: true, agent: []string{"--routing-mode", "direct"}},
		{name: "podweir-same-node", topology: "podweir-vxlan", server: "local", against: "kernel-same-node", podweir: true},
	}
}

// others are the podweir modes among modes as another build runs them, each
// compared with this build's.
func others(modes []mode, bin string) []mode {
	var out []mode
	for _, m := range modes {
		if m.podweir {
			m.name, m.topology, m.against, m.bin = "other-"+m.name, "other-"+m.topology, m.name, bin
			out = append(out, m)
		}
	}
	return out
}

func modeNames() []string {
	var out []string
	for _, m := range allModes() {
		out = append(out, m.name)
	}
	return out
}

// A workload is one of pw-path-core's.
type workload struct {
	name, unit string
	count      int // samples at scale 1
}

func workloads() []workload {
	return []workload{
		{"udp", "ns/packet", 40},
		{"crr", "ns", 200},
		{"rr", "ns", 800},
		{"bulk", "ns/KiB", 12},
	}
}

// sample is what pw-path-core prints.
type sample struct {
	Operations uint64  `json:"operations"` // with those that warmed up
	Min        float64 `json:"min"`
	P25        float64 `json:"p25"`
	P50        float64 `json:"p50"`
	P75        float64 `json:"p75"`
	P99        float64 `json:"p99"`
	CPU        float64 `json:"cpu"` // of an operation
}

// conversation is between whom pw-path-core measures.
type conversation struct {
	client, server *cluster.Netns
	inside         *cluster.Netns // whose cgroup it is measured in, if not this process's
	target         netip.Addr
	port, listen   int
	firstPort      int // of the client
}

// runCore measures a workload on a CPU; a server that is a process of its own
// has another.
func runCore(ctx context.Context, w string, count int, c conversation, cpu, serverCPU int) (s sample, err error) {
	bin, err := cluster.BinDir()
	if err != nil {
		return s, err
	}
	args := []string{
		filepath.Join(bin, "pw-path-core"), w,
		c.client.Path(), c.server.Path(), c.target.String(), strconv.Itoa(c.port),
		strconv.Itoa(c.listen), strconv.Itoa(c.firstPort), strconv.Itoa(cpu), strconv.Itoa(count), strconv.Itoa(serverCPU),
	}
	var out string
	if c.inside != nil {
		if out, err = c.inside.Exec(ctx, args...); err != nil {
			return s, err
		}
	} else {
		var stdout, stderr strings.Builder
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Run(); err != nil {
			return s, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
		}
		out = stdout.String()
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return s, fmt.Errorf("pw-path-core said %q: %w", out, err)
	}
	return s, nil
}

// measure runs one workload in one mode and checks which way it took.
func (b *bench) measure(ctx context.Context, m mode, w workload) (s sample, err error) {
	t := b.tops[m.topology]
	target, port := t.target(m, b.o.family)
	count := max(1, int(float64(w.count)*b.o.scale))
	client := t.pods["client"].Netns
	firstPort, err := t.ports.take(ctx, client, w, count, sayer(os.Stderr, m.name))
	if err != nil {
		return s, err
	}
	before, err := t.counters()
	if err != nil {
		return s, err
	}
	s, err = runCore(ctx, w.name, count, conversation{
		client: client, server: t.pods[m.server].Netns,
		target: target, port: port, listen: listenPort, firstPort: firstPort,
	}, b.o.cpu, b.o.cpu)
	if err != nil {
		return s, err
	}
	after, err := t.counters()
	if err != nil {
		return s, err
	}
	return s, checkWay(m, w, s.Operations, after.since(before))
}
