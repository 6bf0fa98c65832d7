package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

// maxSize is what the image may have, in bytes.
const maxSize = 60_000_000

// Two builds of the same tree in two places give the same bytes.
func TestImageIsReproducible(t *testing.T) {
	here, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	there := filepath.Join(t.TempDir(), "elsewhere")
	for _, top := range []string{"go.mod", "go.sum", "bpf", "cmd", "internal", "tools"} {
		if _, err := os.Stat(filepath.Join(here, top)); err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(there, top)
		if fi, _ := os.Stat(filepath.Join(here, top)); fi.IsDir() {
			err = os.CopyFS(to, os.DirFS(filepath.Join(here, top)))
		} else {
			err = os.MkdirAll(there, 0o755)
			var data []byte
			if err == nil {
				data, err = os.ReadFile(filepath.Join(here, top))
			}
			if err == nil {
				err = os.WriteFile(to, data, 0o644)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	build := func(dir string) (archive []byte, digest string) {
		out := filepath.Join(t.TempDir(), "image.tar")
		cmd := exec.CommandContext(t.Context(), "bash", "tools/image.sh", out, "podweir:test")
		cmd.Dir = dir
		said, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		if archive, err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
		digest = regexp.MustCompile(`sha256:[0-9a-f]{64}`).FindString(string(said))
		return archive, digest
	}
	one, digest := build(here)
	two, again := build(there)
	if digest == "" || digest != again || !bytes.Equal(one, two) {
		t.Errorf("two builds differ: %s and %s", digest, again)
	}
	if len(one) > maxSize {
		t.Errorf("the image has %d bytes, more than %d", len(one), maxSize)
	}
	t.Logf("%s, %.1f MB", digest, float64(len(one))/1e6)
}
