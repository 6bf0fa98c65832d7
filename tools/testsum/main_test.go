package main

import (
	"strings"
	"testing"
)

func TestCounts(t *testing.T) {
	const fail = `{"Action":"fail","Package":"p","Test":"T"}` + "\n"
	run := func(names ...string) (s string) {
		for _, n := range names {
			s += `{"Action":"run","Package":"p","Test":"` + n + `"}` + "\n"
		}
		return s
	}
	end := func(action, name string) string {
		return `{"Action":"` + action + `","Package":"p","Test":"` + name + `"}` + "\n"
	}
	pkg := func(action string) string { return `{"Action":"` + action + `","Package":"p"}` + "\n" }
	for name, tc := range map[string]struct {
		in                      string
		passed, failed, skipped int
	}{
		"pass":                   {run("T") + end("pass", "T") + pkg("pass"), 1, 0, 0},
		"skip":                   {run("T") + end("skip", "T") + pkg("pass"), 0, 0, 1},
		"fail":                   {run("T") + fail + pkg("fail"), 0, 1, 0},
		"subtests":               {run("T", "T/a", "T/b") + end("pass", "T/a") + end("pass", "T/b") + end("pass", "T") + pkg("pass"), 2, 0, 0},
		"failed subtest":         {run("T", "T/a", "T/b") + end("fail", "T/a") + end("pass", "T/b") + fail + pkg("fail"), 1, 1, 0},
		"parent fails by itself": {run("T", "T/a") + end("pass", "T/a") + fail + pkg("fail"), 1, 1, 0},
		"never ended":            {run("T", "U") + end("pass", "U") + pkg("fail"), 1, 1, 0},
		"does not compile":       {`{"Action":"build-output","ImportPath":"p","Output":"x.go:1: no\n"}` + "\n" + `{"Action":"fail","Package":"p","FailedBuild":"p"}` + "\n", 0, 1, 0},
		"no test files":          {pkg("skip"), 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			s := newSummary(&out)
			s.read(strings.NewReader(tc.in))
			if s.passed != tc.passed || s.failed != tc.failed || s.skipped != tc.skipped {
				t.Errorf("%d passed, %d failed, %d skipped\n%s", s.passed, s.failed, s.skipped, out.String())
			}
		})
	}
}

func TestCheck(t *testing.T) {
	var out strings.Builder
	s := newSummary(&out)
	s.check("good", "true")
	s.check("bad", "echo what is wrong; false")
	if s.passed != 1 || s.failed != 1 || !strings.Contains(out.String(), "what is wrong") {
		t.Errorf("%+v\n%s", s, out.String())
	}
}
