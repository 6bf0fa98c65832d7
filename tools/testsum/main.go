// Command testsum runs checks and "go test" and ends with one plain line:
//
//	N passed, M failed, K skipped
//
// It prints one line per package, and the output of what failed or was
// skipped. A check is a shell command that counts as one test. A test with
// subtests is counted by its subtests. The exit status is 1 if anything
// failed, or if nothing ran.
//
//	testsum [-check 'NAME=COMMAND']... [-- go test arguments]
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// event is a line of "go test -json" (go doc test2json).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

type testKey struct{ pkg, name string }

type summary struct {
	out                     io.Writer
	passed, failed, skipped int

	running map[testKey]bool
	parents map[testKey]bool // have subtests
	output  map[testKey]*strings.Builder
	builds  map[string]*strings.Builder // import path -> compiler's output
	broken  map[string]bool             // packages with a failed test
}

func newSummary(out io.Writer) *summary {
	return &summary{
		out: out, running: map[testKey]bool{}, parents: map[testKey]bool{},
		output: map[testKey]*strings.Builder{}, builds: map[string]*strings.Builder{}, broken: map[string]bool{},
	}
}

func main() {
	s := newSummary(os.Stdout)
	var checks []string
	flag.Func("check", "NAME=COMMAND: a shell command that counts as a test (repeatable)", func(v string) error {
		if !strings.Contains(v, "=") {
			return errors.New("want NAME=COMMAND")
		}
		checks = append(checks, v)
		return nil
	})
	flag.Parse()
	for _, c := range checks {
		name, command, _ := strings.Cut(c, "=")
		s.check(name, command)
	}
	s.goTest(flag.Args())
	fmt.Printf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	if s.failed > 0 || s.passed == 0 {
		os.Exit(1)
	}
}

func (s *summary) check(name, command string) {
	start := time.Now()
	out, err := exec.Command("bash", "-c", command).CombinedOutput()
	if err != nil {
		s.failed++
		fmt.Fprintf(s.out, "FAIL  %s: %v\n%s", name, err, out)
		return
	}
	s.passed++
	fmt.Fprintf(s.out, "ok    %-60s %6.1fs\n", name, time.Since(start).Seconds())
}

func (s *summary) goTest(args []string) {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		s.failed++
		fmt.Fprintf(s.out, "FAIL  go test: %v\n", err)
		return
	}
	before := s.failed
	s.read(stdout)
	if err := cmd.Wait(); err != nil && s.failed == before {
		s.failed++
		fmt.Fprintf(s.out, "FAIL  go test: %v\n", err)
	}
}

func (s *summary) read(r io.Reader) {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadBytes('\n')
		var e event
		if len(line) > 0 {
			if json.Unmarshal(line, &e) == nil {
				s.event(e)
			} else {
				fmt.Fprintf(s.out, "%s", line)
			}
		}
		if err != nil {
			return
		}
	}
}

func (s *summary) event(e event) {
	k := testKey{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		text(s.builds, e.ImportPath).WriteString(e.Output)
	case "output":
		text(s.output, k).WriteString(e.Output)
	case "run":
		s.running[k] = true
		if i := strings.LastIndex(e.Test, "/"); i >= 0 {
			s.parents[testKey{e.Package, e.Test[:i]}] = true
		}
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.packageEnd(e)
			return
		}
		s.testEnd(k, e.Action)
	}
}

func text[K comparable](m map[K]*strings.Builder, k K) *strings.Builder {
	if m[k] == nil {
		m[k] = &strings.Builder{}
	}
	return m[k]
}

func (s *summary) testEnd(k testKey, action string) {
	delete(s.running, k)
	parent := s.parents[k]
	out := text(s.output, k).String()
	delete(s.output, k)
	switch {
	case action == "fail":
		fresh := !s.broken[k.pkg+" "+k.name]
		for name := k.name; ; {
			s.broken[k.pkg], s.broken[k.pkg+" "+name] = true, true
			i := strings.LastIndex(name, "/")
			if i < 0 {
				break
			}
			name = name[:i]
		}
		// A parent fails with its subtest; on its own account it counts.
		if parent && !fresh {
			return
		}
		s.failed++
		fmt.Fprintf(s.out, "FAIL  %s %s\n%s", k.pkg, k.name, out)
	case parent:
	case action == "skip":
		s.skipped++
		fmt.Fprintf(s.out, "SKIP  %s %s\n%s", k.pkg, k.name, out)
	default:
		s.passed++
	}
}

func (s *summary) packageEnd(e event) {
	k := testKey{pkg: e.Package}
	out := text(s.output, k).String()
	delete(s.output, k)
	// Tests that never ended: a panic, os.Exit or the time limit.
	var unfinished []string
	for r := range s.running {
		if r.pkg == e.Package && !s.parents[r] {
			unfinished = append(unfinished, r.name)
		}
	}
	slices.Sort(unfinished)
	for _, name := range unfinished {
		s.testEnd(testKey{e.Package, name}, "fail")
	}
	switch {
	case e.Action == "fail":
		if !s.broken[e.Package] {
			s.failed++
		}
		fmt.Fprintf(s.out, "FAIL  %-60s %6.1fs\n%s", e.Package, e.Elapsed, out)
		if b := s.builds[e.FailedBuild]; b != nil {
			fmt.Fprint(s.out, b.String())
			delete(s.builds, e.FailedBuild)
		}
	case e.Action == "pass":
		fmt.Fprintf(s.out, "ok    %-60s %6.1fs\n", e.Package, e.Elapsed)
	}
}
