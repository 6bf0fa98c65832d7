package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
)

// The tests here end the plugin, or the agent, at every single step: first an
// operation is made once to learn its steps, then once for each of them.

// startAgent starts an agent of its own process and waits until it is ready,
// or dead.
func (n *node) startAgent(die int) (cmd *exec.Cmd, ready bool) {
	n.t.Helper()
	cmd = n.process("agent", die)
	out, err := cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	return cmd, line == "ready\n"
}

// kill ends an agent's process that has not ended by itself.
func (n *node) kill(cmd *exec.Cmd) {
	n.t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		n.t.Fatal(err)
	}
	n.died(cmd)
}

// takeOver starts an agent in this process after one of another. What is
// attached and in force is not the kernel's here, so it begins anew.
func (n *node) takeOver() {
	n.t.Helper()
	n.fakes = &endpointtest.Fakes{}
	n.start()
}

func (n *node) gc(list *libcni.NetworkConfigList, valid ...types.GCAttachment) {
	n.t.Helper()
	// Not by the library, which deletes what it has in its cache before.
	conf, err := libcni.InjectConf(list.Plugins[0], map[string]any{
		"name": list.Name, "cniVersion": list.CNIVersion, "cni.dev/valid-attachments": append([]types.GCAttachment{}, valid...),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.run(map[string]string{"CNI_COMMAND": "GC"}, string(conf.Bytes)); err != nil {
		n.t.Fatalf("GC: %v", err)
	}
}

// reclaim takes away what is left of an operation that did not end, in one of
// two ways: the runtime's DEL, or GC.
func (n *node) reclaim(way string, list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) {
	n.t.Helper()
	for _, ep := range n.List() {
		req := endpoint.Request{ContainerID: ep.ContainerID, IfName: ep.IfName, Netns: ep.Netns}
		if err := n.Check(n.t.Context(), req); err != nil {
			n.t.Errorf("what is there after the restart is not whole: %v", err)
		}
	}
	if way == "GC" {
		n.gc(list)
	} else {
		n.del(list, rt)
	}
	n.expectNothing()
}

func TestAgentDiesAnywhereInAdd(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web", "10.244.80.65", "fd00:10:244:50::65")
	n.stop()
	agent, _ := n.startAgent(0)
	n.add(list, rt)
	steps := n.takeSteps()
	n.kill(agent)
	n.takeOver()
	n.reclaim("DEL", list, rt)
	if len(steps) < 20 {
		t.Fatalf("only %d steps: %q", len(steps), steps)
	}
	for i, step := range steps {
		for _, way := range []string{"DEL", "GC"} {
			t.Run(fmt.Sprintf("%d %s, %s", i+1, step, way), func(t *testing.T) {
				n.t = t
				n.stop()
				agent, ready := n.startAgent(i + 1)
				if !ready {
					t.Fatal("the agent did not start")
				}
				_, err := n.cni.AddNetworkList(t.Context(), list, rt)
				expectCNI(t, err, types.ErrTryAgainLater, n.socket)
				if !n.died(agent) {
					t.Fatal("the agent lives")
				}
				n.takeOver()
				n.reclaim(way, list, rt)
				n.add(list, rt) // everything can be had again
				n.del(list, rt)
				n.expectNothing()
			})
		}
	}
	n.t = t
}

func TestAgentDiesAnywhereInDel(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	n.add(list, rt)
	n.stop()
	agent, _ := n.startAgent(0)
	n.del(list, rt)
	steps := n.takeSteps()
	n.kill(agent)
	n.takeOver()
	if len(steps) < 10 {
		t.Fatalf("only %d steps: %q", len(steps), steps)
	}
	for i, step := range steps {
		t.Run(fmt.Sprintf("%d %s", i+1, step), func(t *testing.T) {
			n.t = t
			n.add(list, rt)
			n.stop()
			agent, ready := n.startAgent(i + 1)
			if !ready {
				t.Fatal("the agent did not start")
			}
			n.del(list, rt) // it succeeds, and is carried out by the next agent
			if !n.died(agent) {
				t.Fatal("the agent lives")
			}
			n.takeOver()
			n.expectNothing()
		})
	}
	n.t = t
}

// An agent that dies while it starts, with a deletion to make up for and an
// addition to undo, leaves both to the next one.
func TestAgentDiesAnywhereInItsStart(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	noted, half, kept := n.pod("noted"), n.pod("half"), n.pod("kept")
	n.add(list, kept)
	mess := func() {
		n.t.Helper()
		n.add(list, noted)
		n.stop()
		agent, _ := n.startAgent(addSteps - 5) // in operation, but not written down as ready
		if _, err := n.cni.AddNetworkList(n.t.Context(), list, half); err == nil {
			n.t.Fatal("the agent did not die in ADD")
		}
		n.died(agent)
		n.del(list, noted)
		n.takeSteps()
	}
	mess()
	agent, _ := n.startAgent(0)
	steps := n.takeSteps()
	n.kill(agent)
	if len(steps) < 20 {
		t.Fatalf("only %d steps: %q", len(steps), steps)
	}
	n.takeOver()
	for i := range steps {
		t.Run(fmt.Sprint(i+1), func(t *testing.T) {
			n.t = t
			mess()
			agent, ready := n.startAgent(i + 1)
			if !n.died(agent) || ready {
				t.Fatalf("the agent started (%v)", ready)
			}
			n.takeOver()
			if eps := n.List(); len(eps) != 1 || eps[0].Pod != "kept" {
				t.Errorf("endpoints: %v", eps)
			}
			if err := n.cni.CheckNetworkList(t.Context(), list, kept); err != nil {
				t.Error(err)
			}
			n.del(list, half)
		})
	}
	n.t = t
	n.del(list, kept)
	n.expectNothing()
}

// addSteps is how many steps ADD has; TestAgentDiesAnywhereInAdd walks them.
const addSteps = 22

// The plugin is killed at each step of the agent: the agent undoes what nobody
// hears of, and finishes what it has begun to delete.
func TestPluginDiesAnywhere(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	steps := func(f func()) []string {
		var out []string
		n.step = func(s string) { out = append(out, s) }
		defer func() { n.step = nil }()
		f()
		return out
	}
	adds := steps(func() { n.add(list, rt) })
	dels := steps(func() { n.del(list, rt) })
	if len(adds) != addSteps {
		t.Errorf("ADD has %d steps, not %d: %q", len(adds), addSteps, adds)
	}
	for op, all := range map[string][]string{"ADD": adds, "DEL": dels} {
		for i, step := range all {
			t.Run(fmt.Sprintf("%s %d %s", op, i+1, step), func(t *testing.T) {
				n.t = t
				if op == "DEL" {
					n.add(list, rt)
				}
				ctx, kill := context.WithCancel(t.Context())
				dead := make(chan struct{})
				count := 0
				n.step = func(string) {
					if count++; count == i+1 {
						kill() // libcni kills the plugin when its context ends
						<-dead
					}
				}
				var err error
				if op == "ADD" {
					_, err = n.cni.AddNetworkList(ctx, list, rt)
				} else {
					err = n.cni.DelNetworkList(ctx, list, rt)
				}
				close(dead)
				if err == nil {
					t.Error("a killed plugin succeeded")
				}
				n.del(list, rt) // waits for the end of what goes on
				n.step = nil
				n.expectNothing()
			})
		}
	}
	n.t = t
}

// conf is what a runtime gives the plugin, without the library's help.
func (n *node) conf(more map[string]any) string {
	n.t.Helper()
	c := map[string]any{
		"cniVersion": "1.1.0", "name": "podweir", "type": "podweir-cni", "socket": n.socket, "stateDir": n.state, "timeout": "20s",
	}
	for k, v := range more {
		c[k] = v
	}
	data, err := json.Marshal(c)
	if err != nil {
		n.t.Fatal(err)
	}
	return string(data)
}

// plugin runs the plugin up to a step; 0 = to its end.
func (n *node) plugin(command string, rt *libcni.RuntimeConf, die int) (killed bool) {
	n.t.Helper()
	cmd := n.process("plugin", die, "CNI_COMMAND="+command, "CNI_CONTAINERID="+rt.ContainerID, "CNI_NETNS="+rt.NetNS,
		"CNI_IFNAME="+rt.IfName, "CNI_PATH="+n.bin)
	cmd.Stdin = strings.NewReader(n.conf(nil))
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	killed = n.died(cmd)
	if !killed && !cmd.ProcessState.Success() {
		n.t.Errorf("%s: %v", command, cmd.ProcessState)
	}
	return killed
}

// The plugin dies at each of its own steps: with an agent, without one, and
// with one that breaks the first connection.
func TestPluginDiesAtItsOwnSteps(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	rt.Args = nil
	var mu sync.Mutex
	broken := false
	n.wrap = func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			now := broken
			broken = false
			mu.Unlock()
			if now {
				panic(http.ErrAbortHandler)
			}
			next.ServeHTTP(w, r)
		})
	}
	n.stop()
	n.start()
	setBroken := func() { mu.Lock(); broken = true; mu.Unlock() }
	for name, c := range map[string]struct {
		before func() // of the plugin's run
		op     string
		steps  int
	}{
		"ADD":                   {func() {}, "ADD", 2},
		"DEL":                   {func() { n.add(list, rt) }, "DEL", 2},
		"DEL without an agent":  {func() { n.add(list, rt); n.stop() }, "DEL", 7},
		"DEL, connection broke": {func() { n.add(list, rt); setBroken() }, "DEL", 10},
	} {
		t.Run(name, func(t *testing.T) {
			n.t = t
			back := func() { // the agent is there again, the runtime repeats its DEL
				if n.server == nil {
					n.start()
				}
				n.del(list, rt)
				if _, err := n.Repair(t.Context()); err != nil {
					t.Error(err)
				}
				n.expectNothing()
			}
			c.before()
			n.takeSteps()
			if n.plugin(c.op, rt, 0) {
				t.Fatal("it was killed")
			}
			steps := n.takeSteps()
			back()
			if len(steps) != c.steps {
				t.Errorf("%d steps, want %d: %q", len(steps), c.steps, steps)
			}
			for i := range steps {
				c.before()
				if !n.plugin(c.op, rt, i+1) {
					t.Errorf("step %d %s: it was not killed", i+1, steps[i])
				}
				back()
			}
		})
	}
	n.t = t
}
