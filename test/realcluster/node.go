package realcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// hierarchies are the folders of cgroup v1 controllers, and unified for v2.
func hierarchies() ([]string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(cgroupRoot, "unified"), &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("%s/unified is no cgroup2: nodes are made on machines with cgroup v1 and cgroup2 beside it", cgroupRoot)
	}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// makeCgroups makes the node's cgroup in every hierarchy: the kubelet's root
// in those of v1, the whole node's in v2.
func (n Node) makeCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		top, own := filepath.Join(cgroupRoot, h), filepath.Join(cgroupRoot, h, n.cgroup())
		if err := os.MkdirAll(own, 0o755); err != nil {
			return err
		}
		// A cpuset without processors and memory takes no process.
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
			data, err := os.ReadFile(filepath.Join(top, f))
			if err == nil {
				err = os.WriteFile(filepath.Join(own, f), data, 0o644)
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// removeCgroups removes a cgroup with all that was made below, and ends who is
// left there.
func removeCgroups(ctx context.Context, name string) error {
	all, err := hierarchies()
	if err != nil {
		return nil // there are none then
	}
	return until(ctx, "cgroups "+name, "", "", 20*time.Second, func() error {
		err := os.WriteFile(filepath.Join(cgroupRoot, "unified", name, "cgroup.kill"), []byte("1"), 0)
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		errs := []error{err}
		for _, h := range all {
			var dirs []string
			_ = filepath.WalkDir(filepath.Join(cgroupRoot, h, name), func(p string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, p)
				}
				return nil
			})
			for _, d := range slices.Backward(dirs) {
				if err := unix.Rmdir(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
					errs = append(errs, fmt.Errorf("%s: %w", d, err))
				}
			}
		}
		return errors.Join(errs...)
	})
}

func (n Node) record() string         { return n.path("run", "init") }
func (n Node) log(name string) string { return n.path("log", name) }

// inCgroup has a command start in the node's cgroup (v2), which its children
// inherit: sockets of the node's processes are told by it.
func (n Node) inCgroup(cmd *exec.Cmd) (done func(), err error) { return inCgroup(cmd, n.cgroup()) }

func inCgroup(cmd *exec.Cmd, name string) (done func(), err error) {
	dir, err := os.Open(filepath.Join(cgroupRoot, "unified", name))
	if err != nil {
		return nil, err
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	return func() { _ = dir.Close() }, nil
}

// In is a command in all of a node's namespaces.
func (n Node) In(ctx context.Context, args ...string) (cmd *exec.Cmd, done func(), err error) {
	pid := running(n.record())
	if pid == 0 {
		return nil, nil, fmt.Errorf("node %s is not up: there is no %s", n.Name, n.own)
	}
	cmd = exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(pid), "-m", "-n", "-u", "-i", "-p", "--"}, args...)...)
	cmd.Env = append(os.Environ(), "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
	done, err = n.inCgroup(cmd)
	return cmd, done, err
}

// run runs a command in the node to its end.
func (n Node) run(ctx context.Context, args ...string) error {
	cmd, done, err := n.In(ctx, args...)
	if err != nil {
		return err
	}
	defer done()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %s: %w: %s", n.Name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// start starts a process in the node; it ends with the node.
func (n Node) start(name string, args ...string) error {
	cmd, done, err := n.In(context.Background(), args...)
	if err != nil {
		return err
	}
	defer done()
	return startProcess(n.path("run", name), n.log(name), cmd)
}

// startNode makes a node and starts its runtime and kubelet, or what of it does
// not run.
func (c Config) startNode(ctx context.Context, n Node, images []string) error {
	if running(n.record()) == 0 {
		if err := c.boot(ctx, n); err != nil {
			return err
		}
	}
	if running(n.path("run", "containerd")) == 0 {
		if err := n.start("containerd", "containerd", "--config", n.path("containerd.toml")); err != nil {
			return err
		}
	}
	err := until(ctx, "containerd of "+n.Name, n.path("run", "containerd"), n.log("containerd"), time.Minute, func() error {
		return n.run(ctx, "ctr", "version")
	})
	if err != nil {
		return err
	}
	for _, a := range images {
		if err := n.importImage(ctx, a); err != nil {
			return err
		}
	}
	if running(n.path("run", "kubelet")) == 0 {
		if err := c.startKubelet(n); err != nil {
			return err
		}
	}
	if c.podweir() {
		return nil
	}
	return c.startPlain(ctx, n)
}

func (n Node) importImage(ctx context.Context, archive string) error {
	return n.run(ctx, "ctr", "-n", "k8s.io", "images", "import", archive)
}

func (c Config) startKubelet(n Node) error {
	return n.start("kubelet", c.bin("kubelet"), "--config="+n.path("kubelet.yaml"), "--kubeconfig="+c.kubeconfig("node-"+n.Name),
		"--hostname-override="+n.Name, "--node-ip="+n.IP+","+n.IP6, "--v=2")
}

// boot makes what a node consists of and starts its init.
func (c Config) boot(ctx context.Context, n Node) error {
	for _, d := range []string{"var-lib", "var-log", "etc", "etc-work", "opt/cni/bin", "cgroup", "log", "run"} {
		if err := os.MkdirAll(n.path(d), 0o755); err != nil {
			return err
		}
	}
	if err := n.makeCgroups(); err != nil {
		return err
	}
	if err := n.makeNetwork(ctx); err != nil {
		return err
	}
	if err := c.nodeFiles(n); err != nil {
		return err
	}
	// The runtime's own plugin, and those that chain, as distributions have
	// them: others come with what is installed.
	for _, p := range []string{"loopback", "bandwidth", "tuning"} {
		if err := copyFile(n.path("opt", "cni", "bin", p), c.bin(p), 0o755); err != nil {
			return err
		}
	}
	// nsenter becomes the program it runs, and so init.
	self := filepath.Join(c.Tree, "bin", "pw-cluster")
	cmd := exec.Command("nsenter", "--net=/run/netns/"+n.netns(), "--", self, "node-init", c.State, n.Name)
	cmd.Env = append(os.Environ(), "PODWEIR_CLUSTER_NAME="+c.Name)
	done, err := n.inCgroup(cmd)
	if err != nil {
		return err
	}
	defer done()
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID
	_ = os.Remove(n.path("run", "mounted"))
	if err := startProcess(n.record(), n.log("init"), cmd); err != nil {
		return err
	}
	return until(ctx, "node "+n.Name, n.record(), n.log("init"), 30*time.Second, func() error {
		_, err := os.Stat(n.path("run", "mounted"))
		return err
	})
}

func copyFile(to, from string, mode fs.FileMode) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, mode)
}

// stopNode ends a node and removes what it was made of.
func (c Config) stopNode(ctx context.Context, n Node) error {
	if err := errors.Join(n.end(ctx), n.removeNetwork(ctx)); err != nil {
		return fmt.Errorf("node %s: %w", n.Name, err)
	}
	return until(ctx, "files of "+n.Name, "", "", 20*time.Second, func() error { return os.RemoveAll(n.dir) })
}

// end ends all processes of a node, from one moment to the next.
func (n Node) end(ctx context.Context) error {
	// With its init the kernel ends all processes of a pid namespace, and with
	// the last of them the mounts are gone.
	errs := []error{stopProcess(n.record(), 0)}
	for _, name := range []string{"containerd", "kubelet", "kube-proxy"} {
		errs = append(errs, stopProcess(n.path("run", name), 2*time.Second))
	}
	return errors.Join(append(errs, removeCgroups(ctx, n.cgroup()))...)
}

// nodeFiles writes the configurations of containerd and kubelet.
func (c Config) nodeFiles(n Node) error {
	pki := func(f string) string { return c.cp("pki", f) }
	return errors.Join(
		// Defaults but for: no AppArmor, and no lowering of oom_score_adj, which
		// takes a capability that root does not have everywhere.
		os.WriteFile(n.path("containerd.toml"), fmt.Appendf(nil, `version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/%s"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
`, pauseImage), 0o644),
		os.WriteFile(n.path("resolv.conf"), []byte("nameserver "+hostIP+"\n"), 0o644),
		os.WriteFile(n.path("kubelet.yaml"), fmt.Appendf(nil, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /%s
enforceNodeAllocatable: []
failSwapOn: false
oomScoreAdj: 0
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
address: %s
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "%s"}}
authorization: {mode: Webhook}
tlsCertFile: "%s"
tlsPrivateKeyFile: "%s"
clusterDomain: %s
clusterDNS: [%s]
resolvConf: "%s"
evictionHard: {memory.available: "50Mi", nodefs.available: "1%%", imagefs.available: "1%%"}
imageGCHighThresholdPercent: 100
serializeImagePulls: false
`, n.cgroup(), n.IP, pki("ca.crt"), pki("node-"+n.Name+".crt"), pki("node-"+n.Name+".key"), domain, dnsVIP, n.path("resolv.conf")), 0o644),
	)
}
