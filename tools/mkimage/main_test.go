package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
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
	var programs string
	build := func(dir string) (archive []byte, digest string) {
		out := filepath.Join(t.TempDir(), "image.tar")
		programs = filepath.Join(filepath.Dir(out), "image-"+runtime.GOARCH)
		cmd := exec.CommandContext(t.Context(), "bash", "tools/image.sh", out, "podweir:test", "v1.2.3-test")
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
	if !bytes.Contains(one, []byte(`"org.opencontainers.image.version":"v1.2.3-test"`)) {
		t.Error("the image does not have its version as a label")
	}
	t.Logf("%s, %.1f MB", digest, float64(len(one))/1e6)

	// Every program of it says the version that it was built as.
	for _, c := range []struct{ args, want string }{
		{"podweir-agent --version", "podweir-agent version v1.2.3-test\n"},
		{"podweir-cni --version", "podweir-cni version v1.2.3-test\n"},
		{"podweir --version", "podweir version v1.2.3-test\n"},
		{"podweir version --socket " + there + "/none.sock", "podweir        v1.2.3-test\n"},
	} {
		args := strings.Fields(c.args)
		said, err := exec.CommandContext(t.Context(), filepath.Join(programs, args[0]), args[1:]...).Output()
		if err != nil || string(said) != c.want {
			t.Errorf("%s: %q, %v; want %q", c.args, said, err, c.want)
		}
	}
	// Nor does a runtime that is asked something else get an answer.
	if said, err := exec.CommandContext(t.Context(), filepath.Join(programs, "podweir-cni"), "add").CombinedOutput(); err == nil || !strings.Contains(string(said), "--version alone") {
		t.Errorf("podweir-cni add: %q, %v", said, err)
	}
}

// A version goes to the linker, and to the shell before that.
func TestVersionIsAWord(t *testing.T) {
	for v, ok := range map[string]bool{"v1.2.3": true, "1.0-rc.1+x": true, "v1 -X main.x=y": false, "-v": false, "$(id)": false} {
		said, err := exec.CommandContext(t.Context(), "bash", "../ldflags.sh", v).CombinedOutput()
		if (err == nil) != ok || ok != strings.HasSuffix(string(said), ".stamp="+v+"\n") {
			t.Errorf("%q: %q, %v", v, said, err)
		}
	}
	if said, err := exec.CommandContext(t.Context(), "bash", "../ldflags.sh").CombinedOutput(); err != nil || !strings.Contains(string(said), ".stamp=") {
		t.Errorf("without one: %q, %v", said, err)
	}
}
