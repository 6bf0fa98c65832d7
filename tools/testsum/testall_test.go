package main

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// tools/test-all.sh with others in place of what it runs: it ends with the sum
// and the status that go with it, and takes its cluster down, whatever fails,
// and when a signal ends it alone.
func TestTestAll(t *testing.T) {
	script, err := os.ReadFile("../test-all.sh")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		env    []string
		signal syscall.Signal
		last   string
		status int
	}{
		"all well":         {nil, 0, "8 passed, 0 failed, 1 skipped", 0},
		"make fails":       {[]string{"RC_make=1", "SUM_make=4 passed, 1 failed, 1 skipped"}, 0, "7 passed, 1 failed, 1 skipped", 1},
		"a sum alone says": {[]string{"SUM_testsum=2 passed, 1 failed, 0 skipped"}, 0, "7 passed, 1 failed, 1 skipped", 1},
		"no sum":           {[]string{"SUM_make=cut off"}, 0, "3 passed, 1 failed, 0 skipped", 1},
		"nothing is built": {[]string{"RC_deps=1"}, 0, "8 passed, 1 failed, 1 skipped", 1},
		"no older image":   {[]string{"RC_older=1"}, 0, "8 passed, 1 failed, 1 skipped", 1},
		"no way down":      {[]string{"RC_down=1"}, 0, "8 passed, 1 failed, 1 skipped", 1},
		"TERM":             {[]string{"HANG=1"}, syscall.SIGTERM, "5 passed, 1 failed, 1 skipped", 143},
		"INT":              {[]string{"HANG=1"}, syscall.SIGINT, "5 passed, 1 failed, 1 skipped", 130},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range map[string]string{
				"tools/test-all.sh":    string(script),
				"tools/deps.sh":        "exit ${RC_deps:-0}",
				"tools/older-image.sh": "exit ${RC_older:-0}",
				"path/make":            "echo \"${SUM_make-5 passed, 0 failed, 1 skipped}\"; exit ${RC_make:-0}",
				"bin/testsum":          "[[ -n ${HANG:-} ]] && { echo hangs; sleep 20; }; echo \"${SUM_testsum-3 passed, 0 failed, 0 skipped}\"",
				"bin/pw-cluster":       "echo \"$1 $PODWEIR_CLUSTER_NAME\" >> log; [[ $1 != down ]] || exit ${RC_down:-0}",
			} {
				path := filepath.Join(dir, file)
				if !strings.HasPrefix(text, "#!") {
					text = "#!/bin/bash\n" + text + "\n"
				}
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, filepath.Join(dir, "tools/test-all.sh"))
			cmd.Env = append(os.Environ(), append(c.env, "PATH="+filepath.Join(dir, "path")+":"+os.Getenv("PATH"), "TMPDIR="+dir)...)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			last := ""
			for lines := bufio.NewScanner(out); lines.Scan(); {
				if last = lines.Text(); last == "hangs" {
					if err := cmd.Process.Signal(c.signal); err != nil {
						t.Fatal(err)
					}
				}
			}
			var exit *exec.ExitError
			if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if got := cmd.ProcessState.ExitCode(); got != c.status || last != c.last {
				t.Errorf("status %d and %q, want %d and %q", got, last, c.status, c.last)
			}
			log, err := os.ReadFile(filepath.Join(dir, "log"))
			lines := strings.Split(strings.TrimSpace(string(log)), "\n")
			if err != nil || !strings.HasPrefix(lines[len(lines)-1], "down test-") {
				t.Errorf("the cluster was not taken down: %q, %v", log, err)
			}
			if left, err := filepath.Glob(filepath.Join(dir, "tmp.*")); err != nil || len(left) > 0 {
				t.Errorf("left: %q, %v", left, err)
			}
		})
	}
}
