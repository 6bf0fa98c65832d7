package realcluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// binary is a program to build.
type binary struct {
	name    string
	module  string // folder under modules/
	pkg     string
	version bool // it tells Kubernetes' version
	peer    bool // it does what podweir does elsewhere
}

// binaries are those that a cluster needs, the ones that take longest first.
func binaries() []binary {
	const k8s, cni = "k8s.io/kubernetes/cmd/", "github.com/containernetworking/plugins/plugins/"
	return []binary{
		{"kube-apiserver", "kubernetes", k8s + "kube-apiserver", true, false},
		{"kube-controller-manager", "kubernetes", k8s + "kube-controller-manager", true, false},
		{"kube-scheduler", "kubernetes", k8s + "kube-scheduler", true, false},
		{"kubelet", "kubernetes", k8s + "kubelet", true, false},
		{"kubectl", "kubernetes", k8s + "kubectl", true, false},
		{"etcd", "etcd", "go.etcd.io/etcd/server/v3", false, false},
		{"coredns", "coredns", ".", false, false},
		{"loopback", "cni", cni + "main/loopback", false, false},
		{"bandwidth", "cni", cni + "meta/bandwidth", false, false},
		{"tuning", "cni", cni + "meta/tuning", false, false},
		{"kube-proxy", "kubernetes", k8s + "kube-proxy", true, true},
		{"bridge", "cni", cni + "main/bridge", false, true},
		{"host-local", "cni", cni + "ipam/host-local", false, true},
		{"portmap", "cni", cni + "meta/portmap", false, true},
	}
}

// needs names what this cluster needs of them.
func (c Config) needs() (names []string) {
	for _, b := range binaries() {
		if !c.podweir() || !b.peer {
			names = append(names, b.name)
		}
	}
	return names
}

// ldflags of a binary: Kubernetes reads v0.0.0 unless its linker is told.
func (b binary) ldflags() string {
	flags := []string{"-s", "-w"}
	if b.version {
		major, rest, _ := strings.Cut(strings.TrimPrefix(Version, "v"), ".")
		minor, _, _ := strings.Cut(rest, ".")
		for _, p := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
			for _, kv := range [][2]string{
				{"gitVersion", Version}, {"gitMajor", major}, {"gitMinor", minor},
				{"gitTreeState", "clean"}, {"buildDate", "2026-01-01T00:00:00Z"},
			} {
				flags = append(flags, "-X", p+"."+kv[0]+"="+kv[1])
			}
		}
	}
	return strings.Join(flags, " ")
}

// stamp changes when the binary has to be built again.
func (b binary) stamp(dir string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), b.pkg, b.ldflags())
	for _, f := range []string{"go.mod", "go.sum", "main.go"} {
		data, err := os.ReadFile(filepath.Join(dir, f))
		if errors.Is(err, fs.ErrNotExist) && f == "main.go" {
			continue
		}
		if err != nil {
			return "", err
		}
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Build builds what the cache lacks: of all binaries, or of those named.
func (c Config) Build(ctx context.Context, names ...string) error {
	known := binaries()
	for _, name := range names {
		if !slices.ContainsFunc(known, func(b binary) bool { return b.name == name }) {
			return fmt.Errorf("build %s: no binary of a cluster", name)
		}
	}
	if err := os.MkdirAll(filepath.Join(c.Cache, "bin"), 0o755); err != nil {
		return err
	}
	// All of it may be built there first, on a machine that is slow.
	unlock, err := lockFile(ctx, filepath.Join(c.Cache, "lock"), 2*time.Hour, func() {
		c.Out("waiting for another pw-cluster that builds into %s", c.Cache)
	})
	if err != nil {
		return fmt.Errorf("lock the cache %s: %w", c.Cache, err)
	}
	defer unlock()
	for _, b := range known {
		if len(names) > 0 && !slices.Contains(names, b.name) {
			continue
		}
		dir := filepath.Join(c.Tree, "test", "realcluster", "modules", b.module)
		stamp, err := b.stamp(dir)
		if err != nil {
			return fmt.Errorf("build %s: %w", b.name, err)
		}
		stampFile := c.bin(b.name) + ".stamp"
		if have, err := os.ReadFile(stampFile); err == nil && string(have) == stamp {
			if _, err := os.Stat(c.bin(b.name)); err == nil {
				continue
			}
		}
		if b.module == "kubernetes" {
			c.Out("building %s (all of Kubernetes takes a quarter of an hour of processor time, once)", b.name)
		} else {
			c.Out("building %s", b.name)
		}
		// Until it is built again, what is there is nothing to rely on.
		if err := os.Remove(stampFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		begin := time.Now()
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", b.ldflags(), "-o", c.bin(b.name), b.pkg)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s in %s: %w\n%s", b.name, dir, err, out)
		}
		if err := os.WriteFile(stampFile, []byte(stamp), 0o644); err != nil {
			return err
		}
		c.Out("built %s in %.0f s", b.name, time.Since(begin).Seconds())
	}
	return nil
}
