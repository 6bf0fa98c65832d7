//go:build realcluster

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Ninety pods come, are replaced and go, beside fifty services. No sandbox
// fails, nothing of them stays in a map (L8), and no program of the system has
// ended by itself. How long it took is printed and decides nothing: see the
// lines that begin with BAR.
func TestRollout(t *testing.T) {
	w := newWorld(t)
	const pods, services = 90, 50
	w.settled()
	logs := map[string]int64{}
	for _, n := range w.nodes {
		logs[n.name] = w.logSize(n)
	}
	base := map[string]map[string]float64{}
	memory := map[string]float64{}
	for _, n := range w.nodes {
		all, err := w.metrics(n.name)
		must(t, err)
		base[n.name], memory[n.name] = entries(all), all["process_resident_memory_bytes"]
	}
	w.step("Pods", func(w *world) {
		for i := range services {
			w.service(fmt.Sprintf("rollout-%d", i), "rollout", nil)
		}
		begin := time.Now()
		d := w.deployment("rollout", pods, func(t *corev1.PodTemplateSpec) {
			// What the plugin takes is to be seen, not the probes.
			t.Spec.Containers[0].ReadinessProbe.PeriodSeconds = 5
		})
		w.Logf("BAR %d pods on %d nodes ready after %.1f s", pods, len(w.nodes), time.Since(begin).Seconds())
		for _, n := range w.nodes {
			all, err := w.metrics(n.name)
			must(w, err)
			w.Logf("BAR %s: agent's memory with %d services and %.0f addresses: %.1f MB (%.1f before)", n.name, services,
				all[`podweir_map_entries{map="pw_addrs"}`], all["process_resident_memory_bytes"]/1e6, memory[n.name]/1e6)
		}
		begin = time.Now()
		// All at once: what the plugin and the agents make of a crowd.
		_, err := w.api.AppsV1().Deployments(w.ns).Patch(w.ctx, d.Name, types.MergePatchType,
			[]byte(`{"spec":{"strategy":{"rollingUpdate":{"maxUnavailable":"100%","maxSurge":0}}}}`), metav1.PatchOptions{})
		must(w, err)
		w.roll(d)
		w.Logf("BAR %d pods replaced in %.1f s", pods, time.Since(begin).Seconds())
		events, err := w.api.CoreV1().Events(w.ns).List(w.ctx, metav1.ListOptions{FieldSelector: "reason=FailedCreatePodSandBox"})
		must(w, err)
		w.Logf("BAR failed sandboxes: %d", len(events.Items))
		restarts := int32(0)
		for _, p := range w.pods(w.ns, "app=rollout", "pods of the rollout", allReady(pods)) {
			restarts += p.Status.ContainerStatuses[0].RestartCount
		}
		if w.Logf("BAR restarts of the %d pods: %d", pods, restarts); restarts > 0 {
			w.Error("pods were restarted")
		}
		for _, e := range events.Items {
			w.Errorf("%s: %s", e.InvolvedObject.Name, e.Message)
		}
	})
	var all []time.Duration
	for _, n := range w.nodes {
		adds := w.cniAdds(n, logs[n.name])
		if len(adds) == 0 {
			t.Errorf("%s: the plugin has told of no ADD in containerd's log", n.name)
			continue
		}
		slices.Sort(adds)
		t.Logf("BAR %s: CNI ADD of %d pods: p50 %v, p99 %v, longest %v", n.name, len(adds), adds[len(adds)/2], adds[len(adds)*99/100], adds[len(adds)-1])
		all = append(all, adds...)
	}
	if len(all) < 2*pods {
		t.Fatalf("the plugin tells of %d ADDs, want %d twice", len(all), pods)
	}
	slices.Sort(all)
	t.Logf("BAR all nodes: CNI ADD of %d pods: p50 %v, p99 %v, longest %v", len(all), all[len(all)/2], all[len(all)*99/100], all[len(all)-1])
	w.pods(w.ns, "", "all pods are gone", allReady(0))
	for _, n := range w.nodes {
		w.eventually("every map is back where it was", func() error {
			all, err := w.metrics(n.name)
			if err != nil {
				return err
			}
			var errs []error
			for name, have := range entries(all) {
				if want := base[n.name][name]; have != want {
					errs = append(errs, fmt.Errorf("%s: %s is %v, before %v", n.name, name, have, want))
				}
			}
			memory[n.name] = all["process_resident_memory_bytes"]
			return errors.Join(errs...)
		})
		t.Logf("BAR %s: agent's memory in the end: %.1f MB", n.name, memory[n.name]/1e6)
	}
	list, err := w.api.CoreV1().Pods(system).List(w.ctx, metav1.ListOptions{})
	must(t, err)
	restarts := 0
	for _, p := range list.Items {
		for _, c := range p.Status.ContainerStatuses {
			// SIGKILL is what tests send.
			if end := c.LastTerminationState.Terminated; end != nil && (end.ExitCode != 137 || end.Reason == "OOMKilled") && strings.HasPrefix(p.Name, "podweir") {
				restarts++
				t.Errorf("%s: container %s ended with %d, %s: %s", p.Name, c.Name, end.ExitCode, end.Reason, end.Message)
			}
		}
	}
	t.Logf("BAR restarts of agents by themselves: %d", restarts)
}

// entries are the sizes of the maps that objects fill; flows are another thing.
func entries(all map[string]float64) map[string]float64 {
	out := map[string]float64{}
	for name, v := range all {
		if m, is := strings.CutPrefix(name, `podweir_map_entries{map="`); is && !strings.HasPrefix(m, "pw_flows") {
			out[strings.TrimSuffix(m, `"}`)] = v
		}
	}
	return out
}

// settled waits until what other tests had is gone, and no agent has anything
// to complain of.
func (w *world) settled() {
	w.Helper()
	w.eventually("other tests' namespaces are gone", func() error {
		list, err := w.api.CoreV1().Namespaces().List(w.ctx, metav1.ListOptions{})
		must(w, err)
		for _, ns := range list.Items {
			if strings.HasPrefix(ns.Name, "e2e-") && ns.Name != w.ns {
				return fmt.Errorf("%s is there", ns.Name)
			}
		}
		return nil
	})
	w.readyAgents()
	// Numbers rest for a moment before they are given again.
	var last map[string]float64
	w.eventually("maps are at rest", func() error {
		now := map[string]float64{}
		for _, n := range w.nodes {
			all, err := w.metrics(n.name)
			if err != nil {
				return err
			}
			for name, v := range entries(all) {
				now[n.name+" "+name] = v
			}
		}
		moved := last == nil
		for name, v := range now {
			moved = moved || last[name] != v
		}
		last = now
		if moved {
			time.Sleep(2 * time.Second)
			return errors.New("they move")
		}
		return nil
	})
}

func (w *world) logSize(n node) int64 {
	w.Helper()
	file, err := w.cluster.LogFile(n.name, "containerd")
	must(w, err)
	st, err := os.Stat(file)
	must(w, err)
	return st.Size()
}

var addDone = regexp.MustCompile(`msg=done op=add .* took=(\S+)`)

// cniAdds is how long the plugin's calls took, by what it says on its standard
// error, which goes to the runtime's log.
func (w *world) cniAdds(n node, from int64) (out []time.Duration) {
	w.Helper()
	file, err := w.cluster.LogFile(n.name, "containerd")
	must(w, err)
	data, err := os.ReadFile(file)
	must(w, err)
	for line := range bytes.Lines(data[min(from, int64(len(data))):]) {
		if m := addDone.FindSubmatch(line); m != nil {
			d, err := time.ParseDuration(string(m[1]))
			must(w, err)
			out = append(out, d)
		}
	}
	return out
}

// startToReady is from the start of an agent's process, as the kernel has it,
// to its word that it is ready.
func (w *world) startToReady(agent *corev1.Pod) (time.Duration, error) {
	node, at := w.node(agent.Spec.NodeName), inPod(agent)
	tasks, err := w.output(w.ctx, onNode(node), "ctr", "-n", "k8s.io", "tasks", "ls")
	if err != nil {
		return 0, err
	}
	m := regexp.MustCompile(at.container + `\s+(\d+)`).FindSubmatch(tasks)
	if m == nil {
		return 0, fmt.Errorf("no task %s:\n%s", at.container, tasks)
	}
	stat, err := w.output(w.ctx, onNode(node), "cat", "/proc/"+string(m[1])+"/stat")
	if err != nil {
		return 0, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, err
	}
	boot := time.Now().Add(-time.Duration(now.Nano()))
	// Field 22, in hundredths of a second since the machine's start; the second
	// is a name in brackets.
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%s/stat: %q", m[1], stat)
	}
	ticks, err := strconv.ParseInt(fields[19], 10, 64)
	if err != nil {
		return 0, err
	}
	log, err := w.api.CoreV1().Pods(system).GetLogs(agent.Name, &corev1.PodLogOptions{Container: "agent"}).DoRaw(w.ctx)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(log)) {
		stamp, rest, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		if at, err := time.Parse(time.RFC3339Nano, stamp); err == nil && strings.TrimSpace(rest) == "level=INFO msg=ready" {
			return at.Sub(boot.Add(time.Duration(ticks) * 10 * time.Millisecond)), nil
		}
	}
	return 0, fmt.Errorf("the agent's log does not say that it is ready:\n%s", log)
}
