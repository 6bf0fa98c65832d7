//go:build realcluster

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// uninstallMark is the label of the node that podweir is taken off.
const uninstallMark = "podweir.test/uninstall"

// removal takes podweir off one node.
type removal struct {
	*world
	n   node
	dir string // an overlay of deploy/uninstall
}

func (w *world) removal(n node) *removal {
	w.Helper()
	r := &removal{w, n, filepath.Join(w.cluster.State, "uninstall")}
	must(w, os.MkdirAll(r.dir, 0o755))
	base, err := filepath.Rel(r.dir, filepath.Join(w.cluster.Tree, "deploy", "uninstall"))
	must(w, err)
	must(w, os.WriteFile(filepath.Join(r.dir, "kustomization.yaml"), []byte(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: kube-system
resources: [`+base+`]
patches:
  - patch: |
      apiVersion: apps/v1
      kind: DaemonSet
      metadata: {name: podweir-uninstall, namespace: kube-system}
      spec: {template: {spec: {nodeSelector: {`+uninstallMark+`: "yes"}}}}
`), 0o644))
	return r
}

func (r *removal) label(value string) {
	r.Helper()
	_, err := r.api.CoreV1().Nodes().Patch(background(r.world), r.n.name, types.MergePatchType, []byte(`{"metadata":{"labels":{"`+uninstallMark+`":`+value+`}}}`), metav1.PatchOptions{})
	must(r, err)
}

// elsewhere has agents run where the label is not; those of other nodes stay as
// they are, until whole gives the DaemonSet back what it had.
func (r *removal) elsewhere() (whole func()) {
	r.Helper()
	sets := r.api.AppsV1().DaemonSets(system)
	was, err := sets.Get(r.ctx, "podweir", metav1.GetOptions{})
	must(r, err)
	spec := func(strategy, affinity string) {
		r.Helper()
		_, err := sets.Patch(background(r.world), "podweir", types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"updateStrategy":%s,"template":{"spec":{"affinity":%s}}}}`, strategy, affinity), metav1.PatchOptions{})
		must(r, err)
	}
	spec(`{"type":"OnDelete","rollingUpdate":null}`, `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"`+uninstallMark+`","operator":"DoesNotExist"}]}]}}}`)
	return func() {
		// The template is the one of before, so the agents that were left alone are its.
		spec(`{"type":"OnDelete","rollingUpdate":null}`, "null")
		spec(fmt.Sprintf(`{"type":"RollingUpdate","rollingUpdate":{"maxUnavailable":%d,"maxSurge":0}}`, was.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue()), "null")
	}
}

// off takes the node's agent away.
func (r *removal) off() {
	r.Helper()
	r.label(`"yes"`)
	r.pods(system, "app.kubernetes.io/name=podweir", "no agent on "+r.n.name, func(all []corev1.Pod) error {
		for _, p := range all {
			if p.Spec.NodeName == r.n.name {
				return errors.New("it is there")
			}
		}
		return nil
	})
}

// uninstall is what docs/install.md says.
func (r *removal) uninstall() {
	r.Helper()
	_, err := r.kubectl("apply", "-k", r.dir)
	must(r, err)
	r.pods(system, "app.kubernetes.io/name=podweir-uninstall", "the node is clean", allReady(1))
}

// sh is what a line of shell says on the node.
func (r *removal) sh(line string) string {
	r.Helper()
	out, err := r.output(r.ctx, onNode(r.n), "sh", "-c", line)
	must(r, err)
	return string(out)
}

// state is all of the node that podweir may change, line by line.
func (r *removal) state() map[string][]string {
	r.Helper()
	out := map[string][]string{}
	for what, line := range map[string]string{
		"devices":             "ip -o -d link",
		"addresses":           "ip -o addr",
		"routes":              "ip route show table all; ip -6 route show table all",
		"rules":               "ip rule; ip -6 rule",
		"neighbours":          "ip neigh show nud permanent; ip -6 neigh show nud permanent",
		"qdiscs":              "tc qdisc",
		"programs at devices": "bpftool net show",
		"programs at sockets": "bpftool cgroup tree /sys/fs/cgroup/unified",
		"bpffs":               "find /sys/fs/bpf -mindepth 1",
		// Pods' own are the runtime's.
		"namespaces":           "find /run/netns -mindepth 1 -not -name 'cni-*'",
		"files of the runtime": "find /etc/cni /opt/cni -type f",
		// Empty folders stay, which docs/install.md says.
		"own files": "find /var/lib/podweir /run/podweir -mindepth 1 2>/dev/null || true",
		"sysctls":   "grep -rs . /proc/sys/net/ipv4 /proc/sys/net/ipv6 /proc/sys/net/core || true",
	} {
		// The kernel takes a second to be sure of an IPv6 address.
		lines := slices.Collect(strings.Lines(strings.ReplaceAll(r.sh(line), " tentative", "")))
		slices.Sort(lines)
		// What the kernel does by itself, at times of its own.
		out[what] = slices.DeleteFunc(lines, func(l string) bool {
			return strings.Contains(l, "proto kernel") || strings.Contains(l, "multicast ff00::/8")
		})
	}
	return out
}

// same wants a node to be what it was.
func (r *removal) same(before, after map[string][]string) {
	r.Helper()
	for _, what := range slices.Sorted(maps.Keys(before)) {
		for _, line := range before[what] {
			if !slices.Contains(after[what], line) {
				r.Errorf("%s: gone, or another: %s", what, line)
			}
		}
		for _, line := range after[what] {
			if !slices.Contains(before[what], line) {
				r.Errorf("%s: left: %s", what, line)
			}
		}
	}
}

// loaded names what the node's agent has in the kernel, as bpftool does: "map id
// 12". Nodes of this cluster, and of others, have the like.
func (r *removal) loaded() (out []string) {
	r.Helper()
	text := r.sh(`cd /sys/fs/bpf/podweir
for f in maps/* calls/*; do bpftool -j map show pinned $f; echo; done
for f in programs/*; do bpftool -j prog show pinned $f; echo; done
for f in links/*; do bpftool -j link show pinned $f; echo; done`)
	for line := range strings.Lines(text) {
		var one struct {
			ID   int
			Prog int `json:"prog_id"`
			Type any
		}
		if strings.TrimSpace(line) == "" {
			continue
		}
		if err := json.Unmarshal([]byte(line), &one); err != nil || one.ID == 0 {
			r.Fatalf("bpftool says %q: %v", line, err)
		}
		switch {
		case one.Prog != 0:
			out = append(out, fmt.Sprintf("link show id %d", one.ID), fmt.Sprintf("prog show id %d", one.Prog))
		case strings.Contains(line, `"bytes_key"`):
			out = append(out, fmt.Sprintf("map show id %d", one.ID))
		default:
			out = append(out, fmt.Sprintf("prog show id %d", one.ID))
		}
	}
	return out
}

// still is what of it the kernel has, one line each.
func (r *removal) still(list []string) (lines []string) {
	r.Helper()
	return slices.Collect(strings.Lines(r.sh("for what in '" + strings.Join(list, "' '") + "'; do bpftool $what 2>/dev/null | head -1; done")))
}

// L7: deploy/uninstall takes podweir off a node, which then is what it was when
// it had just been started and never had podweir; and back it comes.
func (l *lifecycleWorld) uninstalled(w *world) {
	n := w.nodes[2]
	r := w.removal(n)
	before := w.readyAgents()
	undone := false
	whole := r.elsewhere()
	undo := func() {
		if _, err := w.kubectl("delete", "-k", r.dir, "--ignore-not-found", "--wait=true"); err != nil {
			w.Error(err)
		}
		whole()
		r.label("null")
	}
	defer func() {
		if !undone {
			undo()
		}
	}()
	r.off()
	// A kernel that has nothing of podweir's yet, and what it forwards, none.
	must(w, w.cluster.PowerOff(w.ctx, n.name))
	must(w, w.cluster.PowerOn(background(w), n.name))
	r.sh("rm -rf /opt/cni/bin/podweir-cni /etc/cni/net.d/*podweir* /var/lib/podweir/* /run/podweir/*")
	sysctls := map[string]string{
		"net/ipv4/ip_forward": "0", "net/ipv6/conf/all/forwarding": "0",
		"net/ipv4/conf/all/send_redirects": "1", "net/ipv6/conf/eth0/accept_ra": "1",
	}
	for name, value := range sysctls {
		r.sh("echo " + value + " > /proc/sys/" + name)
	}
	fresh := r.state()

	r.label("null")
	w.readyAgents()
	w.nodeReady(n.name, true)
	l.restartPods(w, n)
	l.refound(w)
	for _, ip := range l.svc.Spec.ClusterIPs {
		w.first(inPod(l.web[n.name]), at(ip, 80))
		w.first(onNode(n), at(ip, 80))
	}
	for name, value := range sysctls {
		if now := strings.TrimSpace(r.sh("cat /proc/sys/" + name)); now == value {
			w.Errorf("%s is %s with podweir: nothing that could be put back", name, now)
		}
	}
	in := r.loaded()
	for _, kind := range []string{"map", "prog", "link"} {
		if !slices.ContainsFunc(in, func(s string) bool { return strings.HasPrefix(s, kind) }) {
			w.Errorf("there is no %s of podweir's on %s: %v", kind, n.name, in)
		}
	}
	if there := r.still(in); len(there) < len(in) {
		w.Errorf("of %d things that podweir has in the kernel it has %d: %v", len(in), len(there), in)
	}

	r.off()
	r.uninstall()
	r.same(fresh, r.state())
	w.eventually("the kernel has let everything go", func() error {
		if there := r.still(in); len(there) > 0 {
			return fmt.Errorf("it has:\n%s", strings.Join(there, ""))
		}
		return nil
	})
	w.nodeReady(n.name, false)
	undo()
	undone = true
	w.nodeReady(n.name, true)
	after := w.readyAgents()
	for _, other := range w.nodes[:2] {
		if after[other.name].UID != before[other.name].UID {
			w.Errorf("the agent of %s was replaced, too", other.name)
		}
	}
	// Their interfaces went with podweir.
	l.restartPods(w, n)
	w.pods(system, "k8s-app=kube-dns", "DNS", allReady(2))
	l.refound(w)
	l.walk(w)
	if _, err := w.api.AppsV1().DaemonSets(system).Get(w.ctx, "podweir-uninstall", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		w.Errorf("podweir-uninstall is there: %v", err)
	}
}
