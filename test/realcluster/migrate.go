package realcluster

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

//go:embed manifests/migrate.yaml
var migrateManifest string

// Ways of docs/migration.md.
const (
	Whole      = "whole"
	NodeByNode = "node-by-node"
)

// nodeLabel is by whom podweir runs where nodes change over one by one.
const nodeLabel = "podweir"

type migration struct {
	c       Config
	ns      string
	ranges  map[string][]netip.Prefix
	callers []*steady
}

// Migrate has a cluster with kube-proxy and the reference plugins change over to
// podweir as docs/migration.md says, while services are called, and says what is
// lost at which step. In the end nothing of the former is left and podweir
// doctor has nothing to say.
func (c *Config) Migrate(ctx context.Context, way string) (err error) {
	if err := c.there(); err != nil {
		return err
	}
	if c.podweir() {
		return fmt.Errorf("%s has podweir already", c.title())
	}
	m := &migration{c: *c, ns: fmt.Sprintf("migrate-%d", time.Now().UnixNano())}
	if m.ranges, err = c.ranges(ctx); err != nil {
		return err
	}
	defer func() {
		for _, s := range m.callers {
			s.end()
		}
		err = errors.Join(err, c.Kubectl(context.WithoutCancel(ctx), nil, io.Discard, "delete", "namespace", m.ns, "--ignore-not-found", "--wait=false"))
	}()
	if err := m.deploy(ctx); err != nil {
		return err
	}
	begin := time.Now()
	switch way {
	case Whole:
		err = m.whole(ctx)
	case NodeByNode:
		err = m.nodeByNode(ctx)
	default:
		return fmt.Errorf("%q is no way to change over: %s, %s", way, Whole, NodeByNode)
	}
	if err != nil {
		return fmt.Errorf("migration, %s: %w", way, err)
	}
	c.Proxy, c.CNI = ProxyPodweir, CNIPodweir
	if err := c.settings().write(c.settingsFile()); err != nil {
		return err
	}
	// Whoever calls from now on is served. Calls that began before may still wait
	// for a pod that is gone.
	for _, s := range m.callers {
		s.end()
	}
	sum, err := m.step(ctx, "nothing more", func() error { return c.Check(ctx) })
	if err != nil {
		return err
	}
	for kind, l := range sum {
		if l.lost > 0 || l.calls == 0 {
			return fmt.Errorf("after the migration: calls were lost, %s: %s", kind, l)
		}
	}
	if err := c.each(func(n Node) error { return m.isClean(ctx, n) }); err != nil {
		return err
	}
	c.Out("%6.1f s  migrated, %s: nothing is left of kube-proxy and its plugins", time.Since(begin).Seconds(), way)
	return nil
}

// deploy brings up who is called, and the callers.
func (m *migration) deploy(ctx context.Context) error {
	c := m.c
	if err := c.Kubectl(ctx, nil, io.Discard, "create", "namespace", m.ns); err != nil {
		return err
	}
	manifest := strings.ReplaceAll(migrateManifest, "$IMAGE", toolsImage)
	if err := c.Kubectl(ctx, strings.NewReader(manifest), io.Discard, "-n", m.ns, "apply", "-f", "-"); err != nil {
		return err
	}
	if err := c.Kubectl(ctx, nil, io.Discard, "-n", m.ns, "rollout", "status", "daemonset/host", "--timeout=120s"); err != nil {
		return err
	}
	if err := m.webIsReady(ctx); err != nil {
		return err
	}
	var ip bytes.Buffer
	if err := c.Kubectl(ctx, nil, &ip, "-n", m.ns, "get", "service/web", "-o", "jsonpath={.spec.clusterIP}"); err != nil {
		return err
	}
	m.makeCallers(ip.String())
	return nil
}

// whole is the way "Whole".
func (m *migration) whole(ctx context.Context) error {
	c := m.c
	return m.steps(ctx, []migrationStep{
		{"kube-proxy ends", func() error {
			return c.each(func(n Node) error { return c.endKubeProxy(n) })
		}},
		{"the other plugin's files and devices go", func() error {
			return c.each(func(n Node) error { return m.removePlugin(ctx, n) })
		}},
		{"podweir", func() error {
			if err := c.Install(ctx, Installation{}); err != nil {
				return err
			}
			if err := c.rollout(ctx, "daemonset/podweir"); err != nil {
				return err
			}
			if err := m.kubectl(ctx, "wait node --all --for=condition=Ready --timeout=60s"); err != nil {
				return err
			}
			return c.each(func(n Node) error {
				return errors.Join(m.removeKubeProxy(ctx, n), m.namesStrangers(ctx, n, "Pod "+m.ns+"/web-"))
			})
		}},
		{"pods anew", func() error {
			if err := m.deletePods(ctx, ""); err != nil {
				return err
			}
			return errors.Join(c.rollout(ctx, "deployment/coredns"), m.webIsReady(ctx))
		}},
		{"what doctor names goes", func() error {
			return c.each(func(n Node) error { return m.heal(ctx, n) })
		}},
	})
}

// nodeByNode is the way "Node by node".
func (m *migration) nodeByNode(ctx context.Context) error {
	c := m.c
	steps := []migrationStep{{"podweir, on no node yet", func() error { return c.Install(ctx, Installation{Label: nodeLabel}) }}}
	for _, n := range c.nodes() {
		steps = append(steps,
			migrationStep{n.Name + " is drained", func() error {
				return m.kubectl(ctx, "drain "+n.Name+" --ignore-daemonsets --delete-emptydir-data --timeout=120s")
			}},
			migrationStep{n.Name + " changes over", func() error {
				if err := m.kubectl(ctx, "label node "+n.Name+" "+nodeLabel+"=yes"); err != nil {
					return err
				}
				// Both of which the label does where they are DaemonSets.
				if err := errors.Join(c.endKubeProxy(n), m.removePlugin(ctx, n)); err != nil {
					return err
				}
				if err := m.agentIsReady(ctx, n); err != nil {
					return err
				}
				if err := m.kubectl(ctx, "wait node "+n.Name+" --for=condition=Ready --timeout=60s"); err != nil {
					return err
				}
				if err := m.removeKubeProxy(ctx, n); err != nil || n.index > 1 {
					return err
				}
				return m.namesStrangers(ctx, n, "Pod "+m.ns+"/web-") // which takes its time
			}},
			migrationStep{"the DaemonSets' pods of " + n.Name + " anew", func() error {
				if err := m.deletePods(ctx, n.Name); err != nil {
					return err
				}
				if err := m.webIsReady(ctx); err != nil {
					return err
				}
				return errors.Join(m.heal(ctx, n), m.kubectl(ctx, "uncordon "+n.Name))
			}})
	}
	steps = append(steps, migrationStep{"podweir without its node selector", func() error {
		if err := c.Install(ctx, Installation{}); err != nil {
			return err
		}
		if err := c.rollout(ctx, "daemonset/podweir"); err != nil {
			return err
		}
		return errors.Join(c.rollout(ctx, "deployment/coredns"), m.kubectl(ctx, "label node --all "+nodeLabel+"-"))
	}})
	return m.steps(ctx, steps)
}

type migrationStep struct {
	what string
	do   func() error
}

// steps takes them; nothing is lost while nothing has changed.
func (m *migration) steps(ctx context.Context, steps []migrationStep) error {
	if err := m.c.Check(ctx); err != nil {
		return err
	}
	for _, s := range steps {
		if _, err := m.step(ctx, s.what, s.do); err != nil {
			return err
		}
	}
	return nil
}

func (m *migration) kubectl(ctx context.Context, args string) error {
	return m.c.Kubectl(ctx, nil, io.Discard, strings.Fields(args)...)
}

func (c Config) rollout(ctx context.Context, what string) error {
	return c.Kubectl(ctx, nil, io.Discard, "-n", "kube-system", "rollout", "status", what, "--timeout=180s")
}

func (c Config) each(do func(Node) error) error {
	var g errgroup.Group
	for _, n := range c.nodes() {
		g.Go(func() error { return do(n) })
	}
	return g.Wait()
}

// endKubeProxy ends it as its DaemonSet's end does. The recorded process is
// nsenter, which waits for it.
func (c Config) endKubeProxy(n Node) error {
	if err := n.endChild("kube-proxy"); err != nil {
		return err
	}
	return os.Remove(n.path("run", "kube-proxy"))
}

// removePlugin moves a node's CNI configuration away and removes what the plugin
// has there of its own accord: devices, routes to the other nodes, rules.
func (m *migration) removePlugin(ctx context.Context, n Node) error {
	lines := []string{"mkdir -p /var/lib/cni-before && mv /etc/cni/net.d/* /var/lib/cni-before/", "nft delete table inet podweir-test-masquerade"}
	for _, o := range without(m.c.nodes(), n) {
		for _, r := range m.ranges[o.Name] {
			if m.c.CNI == CNIBridge {
				lines = append(lines, "ip route del "+r.String())
			}
		}
	}
	if m.c.CNI == CNIVXLAN {
		lines = append(lines, "ip link delete vxlan0")
	}
	return n.run(ctx, "sh", "-ec", strings.Join(append(lines, "ip link delete cni0"), "\n"))
}

// agentIsReady waits for the agent of a node.
func (m *migration) agentIsReady(ctx context.Context, n Node) error {
	return until(ctx, "the agent of "+n.Name, "", "", 2*time.Minute, func() error {
		s, err := m.status(ctx, n)
		if err == nil && !s.Agent.Ready {
			err = fmt.Errorf("not ready: %v", s.Agent.NotReady)
		}
		return err
	})
}

// removeKubeProxy removes its rules, from the agent's pod.
func (m *migration) removeKubeProxy(ctx context.Context, n Node) error {
	var pod bytes.Buffer
	err := m.c.Kubectl(ctx, nil, &pod, "-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=podweir", "--field-selector", "spec.nodeName="+n.Name, "-o", "name")
	if err != nil {
		return err
	}
	return m.c.Kubectl(ctx, nil, io.Discard, "-n", "kube-system", "exec", strings.TrimSpace(pod.String()), "--", "podweir-agent", "cleanup", "--kube-proxy")
}

// migrationPod is what is read of one.
type migrationPod struct {
	Metadata struct{ Namespace, Name string }
	Spec     struct {
		NodeName    string
		HostNetwork bool
	}
	Status struct {
		Phase             string
		ContainerStatuses []struct{ ContainerID string }
	}
}

func (m *migration) pods(ctx context.Context, args ...string) (out []migrationPod, err error) {
	var data bytes.Buffer
	if err := m.c.Kubectl(ctx, nil, &data, append([]string{"get", "pods", "-o", "json"}, args...)...); err != nil {
		return nil, err
	}
	var list struct{ Items []migrationPod }
	err = json.Unmarshal(data.Bytes(), &list)
	return list.Items, err
}

// container is the server of a node, where calls of pods come from; "" if there
// is none at the moment.
func (m *migration) container(ctx context.Context, n Node) (string, error) {
	pods, err := m.pods(ctx, "-n", m.ns, "-l", "app=web", "--field-selector", "spec.nodeName="+n.Name)
	if err != nil || len(pods) != 1 || len(pods[0].Status.ContainerStatuses) != 1 {
		return "", err
	}
	return strings.TrimPrefix(pods[0].Status.ContainerStatuses[0].ContainerID, "containerd://"), nil
}

// deletePods deletes all pods with an address of their own, of one node or all,
// and waits until they are gone.
func (m *migration) deletePods(ctx context.Context, node string) error {
	args := []string{"-A"}
	if node != "" {
		args = append(args, "--field-selector", "spec.nodeName="+node)
	}
	pods, err := m.pods(ctx, args...)
	if err != nil {
		return err
	}
	byNamespace := map[string][]string{}
	for _, p := range pods {
		if !p.Spec.HostNetwork {
			byNamespace[p.Metadata.Namespace] = append(byNamespace[p.Metadata.Namespace], p.Metadata.Name)
		}
	}
	for ns, names := range byNamespace {
		if err := m.c.Kubectl(ctx, nil, io.Discard, append([]string{"-n", ns, "delete", "pod", "--timeout=120s"}, names...)...); err != nil {
			return err
		}
	}
	return nil
}

// webIsReady waits for the pods that are called, wherever they run.
func (m *migration) webIsReady(ctx context.Context) error {
	return until(ctx, "pods of daemonset/web", "", "", 2*time.Minute, func() error {
		var out bytes.Buffer
		if err := m.c.Kubectl(ctx, nil, &out, "-n", m.ns, "get", "daemonset/web", "-o", "jsonpath={.status.numberReady}"); err != nil {
			return err
		}
		if ready, err := strconv.Atoi(out.String()); err != nil || ready != m.c.Nodes {
			return fmt.Errorf("%s are ready", out.String())
		}
		return nil
	})
}

// migrationStatus is what is read of podweir status.
type migrationStatus struct {
	Agent struct {
		Ready    bool
		NotReady []string
		Problems []struct{ Object, Error string }
	}
}

func (m *migration) podweir(ctx context.Context, n Node, to any, args ...string) error {
	cmd, done, err := n.In(ctx, append([]string{m.c.ToolPath("podweir"), "-o", "json"}, args...)...)
	if err != nil {
		return err
	}
	defer done()
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if json.Unmarshal(out, to) == nil { // it says so, too, when something fails
		return nil
	}
	return fmt.Errorf("podweir %s on %s: %w: %s%s", strings.Join(args, " "), n.Name, err, out, said.String())
}

func (m *migration) status(ctx context.Context, n Node) (s migrationStatus, err error) {
	return s, m.podweir(ctx, n, &s, "status")
}

// namesStrangers waits until the agent names a pod that podweir did not plug.
func (m *migration) namesStrangers(ctx context.Context, n Node, prefix string) error {
	return until(ctx, "pods of the former plugin on "+n.Name, "", "", time.Minute, func() error {
		s, err := m.status(ctx, n)
		for _, p := range s.Agent.Problems {
			if strings.HasPrefix(p.Object, prefix) && strings.Contains(p.Error, "podweir did not plug it") {
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("status names none: %+v", s.Agent.Problems))
	})
}

type migrationFinding struct{ Check, Result, Object, Text, WayOut string }

// doctor is what it has to say that is not well.
func (m *migration) doctor(ctx context.Context, n Node) (bad []migrationFinding, err error) {
	var all struct{ Findings []migrationFinding }
	err = m.podweir(ctx, n, &all, "doctor")
	for _, f := range all.Findings {
		if f.Result != "ok" {
			bad = append(bad, f)
		}
	}
	if err == nil && len(all.Findings) == 0 {
		err = errors.New("it checked nothing")
	}
	return bad, err
}

// commands are those that a finding names.
var commands = regexp.MustCompile(`on the node: (.*); or reboot it$`)

// heal does what doctor says about leftovers.
func (m *migration) heal(ctx context.Context, n Node) error {
	// What the plugin portmap had for the pods' host ports: they were deleted
	// by podweir's plugin, which knows nothing of it.
	found, err := m.doctor(ctx, n)
	if err != nil {
		return err
	}
	rules := 0
	for _, f := range found {
		match := commands.FindStringSubmatch(f.WayOut)
		if f.Check != "leftovers" || match == nil {
			continue
		}
		if strings.Contains(f.Text, "the plugin portmap") {
			rules++
		}
		if err := n.run(ctx, "sh", "-ec", match[1]); err != nil {
			return fmt.Errorf("%s: %s: %w", f.Object, f.WayOut, err)
		}
	}
	if rules == 0 {
		return fmt.Errorf("doctor on %s names no rules of portmap's: %+v", n.Name, found)
	}
	return nil
}

// isClean waits until neither doctor nor the agent has anything to say; that
// looks once a minute.
func (m *migration) isClean(ctx context.Context, n Node) error {
	return until(ctx, "doctor on "+n.Name, "", "", 2*time.Minute, func() error {
		found, err := m.doctor(ctx, n)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("%+v", found)
		}
		return err
	})
}
