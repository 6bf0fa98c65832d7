package realcluster

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

//go:embed manifests/coredns.yaml
var corednsManifest string

// Up brings the cluster up, or what is missing of it.
func (c Config) Up(ctx context.Context) error {
	if err := c.check(); err != nil {
		return err
	}
	unlock, err := c.lock(ctx, 0)
	if err != nil {
		return err
	}
	defer unlock()
	if c.complete() {
		c.Out("%s is up already, with %v. %s", c.title(), c.settings(), c.hint())
		return nil
	}
	if err := c.bringUp(ctx); err != nil {
		return fmt.Errorf("%w\n%s is not up: pw-cluster describe shows its logs, up goes on, down removes what there is", err, c.title())
	}
	return nil
}

func (c Config) bringUp(ctx context.Context) error {
	if err := c.settings().write(c.settingsFile()); err != nil {
		return err
	}
	begin, last := time.Now(), time.Now()
	step := func(format string, args ...any) {
		c.Out("%6.1f s  %s", time.Since(last).Seconds(), fmt.Sprintf(format, args...))
		last = time.Now()
	}
	if err := c.Build(ctx, c.needs()...); err != nil {
		return err
	}
	step("the binaries of Kubernetes are there")
	images, err := c.buildImages(ctx)
	if err != nil {
		return err
	}
	step("images are written")
	if err := c.makeBridge(ctx); err != nil {
		return err
	}
	if err := c.startControlPlane(ctx, step); err != nil {
		return err
	}
	var g errgroup.Group
	for _, n := range c.nodes() {
		g.Go(func() error { return c.startNode(ctx, n, images) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	step("nodes have their images, kubelets run")
	waits := []string{
		"wait node --all --for=condition=Ready --timeout=60s",
		"-n kube-system rollout status deployment/coredns --timeout=60s",
	}
	if c.podweir() {
		if err := c.Install(ctx, Installation{}); err != nil {
			return err
		}
		waits = append([]string{"-n kube-system rollout status daemonset/podweir --timeout=120s"}, waits...)
	}
	if err := c.installDNS(ctx); err != nil {
		return err
	}
	step("manifests are applied")
	for _, wait := range waits {
		if err := c.Kubectl(ctx, nil, io.Discard, strings.Fields(wait)...); err != nil {
			return err
		}
		step("kubectl %s", wait)
	}
	script := "#!/bin/sh\nexec"
	for _, arg := range c.kubectl(ctx).Args {
		script += fmt.Sprintf(" %q", arg)
	}
	if err := os.WriteFile(c.wrapper(), []byte(script+" \"$@\"\n"), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(c.marker(), nil, 0o644); err != nil {
		return err
	}
	c.Out("%6.1f s  in all: %s is up, with %v. %s", time.Since(begin).Seconds(), c.title(), c.settings(), c.hint())
	return nil
}

func (c Config) title() string {
	if c.Name == "" {
		return "the cluster"
	}
	return "cluster " + c.Name
}

// wrapper is kubectl for this cluster.
func (c Config) wrapper() string {
	return filepath.Join(c.Tree, "bin", strings.TrimSuffix("kubectl-"+c.Name, "-"))
}

func (c Config) hint() string {
	if c.Name == "" {
		return fmt.Sprintf("%s get pods -A\nor: export KUBECONFIG=%s", c.wrapper(), c.Kubeconfig())
	}
	return fmt.Sprintf("%s get pods -A\nIts network is a namespace: PODWEIR_CLUSTER_NAME=%s bin/pw-cluster outside CMD... runs there", c.wrapper(), c.Name)
}

// marker is there once the cluster has been up.
func (c Config) marker() string { return filepath.Join(c.State, "complete") }

// complete tells whether the cluster has been up and all its processes run.
func (c Config) complete() bool {
	if _, err := os.Stat(c.marker()); err != nil {
		return false
	}
	var records []string
	for _, p := range c.parts() {
		records = append(records, c.record(p))
	}
	for _, n := range c.nodes() {
		records = append(records, n.record(), n.path("run", "containerd"), n.path("run", "kubelet"))
		if !c.podweir() {
			records = append(records, n.path("run", "kube-proxy"))
		}
	}
	return !slices.ContainsFunc(records, func(r string) bool { return running(r) == 0 })
}

// Down ends and removes everything but the cache. What is not recorded, it
// finds by its name.
func (c Config) Down(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("this needs root: namespaces and cgroups are removed")
	}
	// An up that was just told to end needs a moment for it.
	unlock, err := c.lock(ctx, time.Minute)
	if err != nil {
		return err
	}
	defer unlock()
	c.Nodes = max(c.Nodes, c.lastNode())
	var g errgroup.Group
	for _, n := range c.nodes() {
		g.Go(func() error { return c.stopNode(ctx, n) })
	}
	errs := []error{g.Wait(), c.stopControlPlane(ctx)}
	errs = append(errs, c.removeBridge(ctx), tidyNetns())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cluster-down: %w; what is left is recorded under %s, call it again", err, c.State)
	}
	if err := os.Remove(c.wrapper()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(c.State)
}

// lastNode is the highest number of a node that something is left of.
func (c Config) lastNode() int {
	last := 0
	for dir, prefix := range map[string]string{
		filepath.Join(c.State, "nodes"):      "n",
		netnsDir:                             c.label() + "-n",
		filepath.Join(cgroupRoot, "unified"): c.label() + "-n",
	} {
		entries, _ := os.ReadDir(dir) // there need not be one
		for _, e := range entries {
			number, is := strings.CutPrefix(e.Name(), prefix)
			if i, err := strconv.Atoi(number); is && err == nil {
				last = max(last, i)
			}
		}
	}
	return last
}

// check says what is missing on this machine.
func (c Config) check() error {
	if os.Geteuid() != 0 {
		return errors.New("this needs root: namespaces, cgroups and BPF programs")
	}
	for _, p := range []string{"containerd", "ctr", "runc", "nsenter", "ip", "clang-19"} {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("%s is missing: tools/deps.sh cluster: %w", p, err)
		}
	}
	if !c.podweir() {
		for _, p := range []string{"nft", "iptables", "bridge"} {
			if _, err := exec.LookPath(p); err != nil {
				return fmt.Errorf("%s is missing, which %v needs: tools/deps.sh cluster: %w", p, c.settings(), err)
			}
		}
		if _, err := os.Stat("/proc/sys/net/bridge"); err != nil {
			return fmt.Errorf("CNI=%s needs the kernel's br_netfilter, as kube-proxy does not see what two pods of a bridge say else: modprobe br_netfilter: %w", c.CNI, err)
		}
	}
	_, err := hierarchies()
	return err
}

// lock keeps a second call out, which waits for so long.
func (c Config) lock(ctx context.Context, patience time.Duration) (unlock func(), err error) {
	if err := os.MkdirAll(c.State, 0o700); err != nil {
		return nil, err
	}
	unlock, err = lockFile(ctx, filepath.Join(c.State, "lock"), patience, func() {})
	if err != nil {
		return nil, fmt.Errorf("another pw-cluster is at work on %s: %w", c.State, err)
	}
	return unlock, nil
}

// lockFile locks a file that is made for it; if somebody else has it, it calls
// waiting and then waits for so long.
func lockFile(ctx context.Context, file string, patience time.Duration, waiting func()) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	flock := func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
	err = flock()
	if errors.Is(err, unix.EWOULDBLOCK) && patience > 0 {
		waiting()
		err = until(ctx, file, "", "", patience, flock)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// kubectl is the command, as the cluster's administrator.
func (c Config) kubectl(ctx context.Context, args ...string) *exec.Cmd {
	return c.Outside(ctx, append([]string{c.bin("kubectl"), "--kubeconfig=" + c.Kubeconfig()}, args...)...)
}

// Kubectl runs kubectl as the cluster's administrator.
func (c Config) Kubectl(ctx context.Context, in io.Reader, out io.Writer, args ...string) error {
	cmd := c.kubectl(ctx, args...)
	var said strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(said.String()))
	}
	return nil
}

// Installation is how podweir is installed; the zero value is what the cluster
// comes up with.
type Installation struct {
	Image    string   // of another version, which nodes have: see ImportOlder
	Settings []string // lines of agent.yaml
	Chained  []string // plugins, as JSON, that come after podweir's in the CNI configuration
	Label    string   // of nodes; only those where its value is yes get podweir
}

// Install applies podweir as an overlay of deploy/base, as its users do.
func (c Config) Install(ctx context.Context, in Installation) error {
	if in.Image == "" {
		in.Image = podweirImage
	}
	name, tag, ok := strings.Cut(in.Image, ":")
	if !ok {
		return fmt.Errorf("install podweir: its image %q has no tag", in.Image)
	}
	patches := ""
	if in.Label != "" {
		patches = `patches:
  - target: {kind: DaemonSet, name: podweir}
    patch: '[{"op": "add", "path": "/spec/template/spec/nodeSelector/` + in.Label + `", "value": "yes"}]'
`
	}
	dir := filepath.Join(c.State, "deploy")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// kubectl takes bases by relative paths alone.
	base, err := filepath.Rel(dir, filepath.Join(c.Tree, "deploy", "base"))
	if err != nil {
		return err
	}
	// The plugin tells how long it takes.
	plugins := append([]string{`{"type": "podweir-cni", "capabilities": {"ips": true, "portMappings": true, "bandwidth": true}, "logLevel": "info"}`}, in.Chained...)
	settings := append([]string{"apiserver: [" + apiserver + "]", "cgroup: /host/cgroup"}, in.Settings...)
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: kube-system
resources: [`+base+`]
images:
  - {name: podweir, newName: `+name+`, newTag: `+tag+`}
configMapGenerator:
  - name: podweir
    behavior: merge
    files: [agent.yaml, 10-podweir.conflist]
`+patches), 0o644),
		os.WriteFile(filepath.Join(dir, "10-podweir.conflist"), []byte(`{"cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "podweir", "plugins": [
  `+strings.Join(plugins, ",\n  ")+`]}
`), 0o644),
		os.WriteFile(filepath.Join(dir, "agent.yaml"), []byte(strings.Join(settings, "\n")+"\n"), 0o644))
	if err != nil {
		return err
	}
	return c.Kubectl(ctx, nil, io.Discard, "apply", "-k", dir)
}

func (c Config) installDNS(ctx context.Context) error {
	dns := strings.NewReplacer("$DNS_IP", dnsVIP, "$DOMAIN", domain, "$IMAGE", dnsImage).Replace(corednsManifest)
	return c.Kubectl(ctx, strings.NewReader(dns), io.Discard, "apply", "-f", "-")
}

// KubectlPath is the program.
func (c Config) KubectlPath() string { return c.bin("kubectl") }

// Exec runs a command in a node, or outside of all of them if it names none,
// with this process's input and output.
func (c Config) Exec(ctx context.Context, node string, args ...string) error {
	cmd := c.Outside(ctx, args...)
	if node != "" {
		n, err := c.find(node)
		if err != nil {
			return err
		}
		in, done, err := n.In(ctx, args...)
		if err != nil {
			return err
		}
		defer done()
		cmd = in
	} else if err := c.there(); err != nil {
		return err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

// ExecKubectl runs kubectl with this process's input and output.
func (c Config) ExecKubectl(ctx context.Context, args ...string) error {
	if err := c.there(); err != nil {
		return err
	}
	cmd := c.kubectl(ctx, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

// there is an error if there is no cluster.
func (c Config) there() error {
	if _, err := os.Stat(c.Kubeconfig()); err != nil {
		return fmt.Errorf("%s is not up: make cluster: %w", c.title(), err)
	}
	return nil
}
