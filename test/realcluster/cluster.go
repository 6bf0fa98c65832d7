package realcluster

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.Build(ctx); err != nil {
		return err
	}
	begin := time.Now()
	images, err := c.buildImages(ctx)
	if err != nil {
		return err
	}
	if err := makeBridge(ctx); err != nil {
		return err
	}
	if err := c.startControlPlane(ctx); err != nil {
		return err
	}
	var g errgroup.Group
	for _, n := range c.nodes() {
		g.Go(func() error { return c.startNode(ctx, n, images) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	c.Out("%5.1f s  kubelets run", time.Since(begin).Seconds())
	if err := c.install(ctx); err != nil {
		return err
	}
	for _, wait := range []string{
		"-n kube-system rollout status daemonset/podweir --timeout=120s",
		"wait node --all --for=condition=Ready --timeout=60s",
		"-n kube-system rollout status deployment/coredns --timeout=60s",
	} {
		if err := c.Kubectl(ctx, nil, io.Discard, strings.Fields(wait)...); err != nil {
			return err
		}
		c.Out("%5.1f s  %s", time.Since(begin).Seconds(), wait)
	}
	wrapper := filepath.Join(c.Tree, "bin", "kubectl")
	script := fmt.Sprintf("#!/bin/sh\nexec %q --kubeconfig=%q \"$@\"\n", c.bin("kubectl"), c.Kubeconfig())
	if err := os.WriteFile(wrapper, []byte(script), 0o755); err != nil {
		return err
	}
	c.Out("the cluster is up. %s get pods -A\nor: export KUBECONFIG=%s", wrapper, c.Kubeconfig())
	return nil
}

// Down ends and removes everything but the cache.
func (c Config) Down(ctx context.Context) error {
	if _, err := os.Stat(c.State); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	entries, _ := os.ReadDir(filepath.Join(c.State, "nodes"))
	c.Nodes = max(c.Nodes, len(entries))
	var g errgroup.Group
	for _, n := range c.nodes() {
		g.Go(func() error { return c.stopNode(ctx, n) })
	}
	errs := []error{g.Wait(), c.stopControlPlane()}
	errs = append(errs, removeDevice(ctx, bridge))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cluster-down: %w; what is left is recorded under %s, call it again", err, c.State)
	}
	errs = append(errs, os.RemoveAll(c.State), os.Remove(filepath.Join(c.Tree, "bin", "kubectl")))
	if err := errors.Join(errs...); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
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
	_, err := hierarchies()
	return err
}

// lock keeps a second call out.
func (c Config) lock() (unlock func(), err error) {
	if err := os.MkdirAll(c.State, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(c.State, "lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another pw-cluster is at work on %s: %w", c.State, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// Kubectl runs kubectl as the cluster's administrator.
func (c Config) Kubectl(ctx context.Context, in io.Reader, out io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, c.bin("kubectl"), append([]string{"--kubeconfig=" + c.Kubeconfig()}, args...)...)
	var said strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(said.String()))
	}
	return nil
}

// install applies podweir as an overlay of deploy/base, as its users do, and
// CoreDNS.
func (c Config) install(ctx context.Context) error {
	dir := filepath.Join(c.State, "deploy")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// kubectl takes bases by relative paths alone.
	base, err := filepath.Rel(dir, filepath.Join(c.Tree, "deploy", "base"))
	if err != nil {
		return err
	}
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: kube-system
resources: [`+base+`]
configMapGenerator:
  - name: podweir
    behavior: merge
    files: [agent.yaml, 10-podweir.conflist]
`), 0o644),
		// The plugin tells how long it takes.
		os.WriteFile(filepath.Join(dir, "10-podweir.conflist"), []byte(`{"cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "podweir", "plugins": [
  {"type": "podweir-cni", "capabilities": {"ips": true, "portMappings": true}, "logLevel": "info"}]}
`), 0o644),
		os.WriteFile(filepath.Join(dir, "agent.yaml"), []byte("apiserver: ["+apiserver+"]\ncgroup: /host/cgroup\n"), 0o644))
	if err != nil {
		return err
	}
	if err := c.Kubectl(ctx, nil, io.Discard, "apply", "-k", dir); err != nil {
		return err
	}
	dns := strings.NewReplacer("$DNS_IP", dnsVIP, "$DOMAIN", domain, "$IMAGE", dnsImage).Replace(corednsManifest)
	return c.Kubectl(ctx, strings.NewReader(dns), io.Discard, "apply", "-f", "-")
}

// KubectlPath is the program.
func (c Config) KubectlPath() string { return c.bin("kubectl") }

// Exec runs a command in a node, with this process's input and output.
func (c Config) Exec(ctx context.Context, node string, args ...string) error {
	n, err := c.find(node)
	if err != nil {
		return err
	}
	cmd, done, err := n.In(ctx, args...)
	if err != nil {
		return err
	}
	defer done()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}
