package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// BinDir is where the programs under test are: $PODWEIR_BIN, or bin/ of the
// repository this package was compiled from.
func BinDir() (string, error) {
	if dir := os.Getenv("PODWEIR_BIN"); dir != "" {
		return filepath.Abs(dir)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, "bin"), nil
}

// Root is the repository this package was compiled from.
func Root() (string, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(file) {
		return "", errors.New("compiled with -trimpath: set PODWEIR_BIN to the folder of the programs")
	}
	return filepath.Dir(filepath.Dir(filepath.Dir(file))), nil
}

// Build brings the programs in bin/ up to date, unless PODWEIR_BIN says that
// somebody else did. Concurrent test binaries build one after the other.
func Build(ctx context.Context) error {
	if os.Getenv("PODWEIR_BIN") != "" {
		return nil
	}
	root, err := Root()
	if err != nil {
		return err
	}
	bin := filepath.Join(root, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	lock, err := os.Open(bin)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "make", "-s", "build")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make build: %w\n%s", err, out)
	}
	return nil
}

// ForTest builds the programs and a cluster that ends with the test. When
// the test failed, the agents' logs are part of its output.
func ForTest(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	if err := Build(t.Context()); err != nil {
		t.Fatal(err)
	}
	cfg.Label = t.Name()
	c, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range c.Nodes {
				if n.Agent() != nil {
					t.Logf("agent of %s:\n%s", n.NodeName, n.LogTail())
				}
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}
