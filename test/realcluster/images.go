package realcluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/podweir/podweir/internal/image"
)

// buildImages writes the archives that nodes import, besides podweir's own.
// There is no registry.
func (c Config) buildImages(ctx context.Context) ([]string, error) {
	dir := filepath.Join(c.State, "images")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	pause := filepath.Join(dir, "pause")
	cc := exec.CommandContext(ctx, "clang-19", "-O2", "-static", "-o", pause, filepath.Join(c.Tree, "test", "realcluster", "pause", "pause.c"))
	if out, err := cc.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile the pause program: %w\n%s", err, out)
	}
	tree := func(name string) string { return filepath.Join(c.Tree, "bin", name) }
	archives := []string{c.Image}
	for name, im := range map[string]image.Image{
		"pause":   {Names: []string{pauseImage}, Files: map[string]string{"pause": pause}, Entrypoint: []string{"/pause"}},
		"coredns": {Names: []string{dnsImage}, Files: map[string]string{"coredns": c.bin("coredns")}, Entrypoint: []string{"/coredns"}},
		"tools": {Names: []string{toolsImage}, Entrypoint: []string{"/usr/bin/pw-server"},
			Files: map[string]string{"usr/bin/pw-server": tree("pw-server"), "usr/bin/pw-client": tree("pw-client")}},
	} {
		im.Architecture, im.Created, im.Env = runtime.GOARCH, time.Unix(0, 0), []string{"PATH=/usr/bin"}
		file := filepath.Join(dir, name+".tar")
		if _, err := im.WriteFile(file); err != nil {
			return nil, err
		}
		archives = append(archives, file)
	}
	if _, err := os.Stat(c.Image); err != nil {
		return nil, errors.Join(errors.New("podweir's image is missing: make image"), err)
	}
	return archives, nil
}
