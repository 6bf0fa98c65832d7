package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const said = `goos: linux
BenchmarkPrograms/hook=from_pod/path=established/family=IPv4-2         	       1	        60.00 ns/repeated	        87.00 ns/run
BenchmarkPrograms/hook=from_pod/path=established/family=IPv4-2         	       1	        50.00 ns/repeated	        89.00 ns/run
BenchmarkPrograms/hook=from_pod/path=established/family=IPv4-2         	       1	        70.00 ns/repeated	       500.00 ns/run
BenchmarkPrograms/hook=from_pod/path=established/family=IPv6-2         	       1	       101.0 ns/run
BenchmarkLiveFlows/flows=1000-2                                                	       1	       159.0 ns/run
PASS
ok  	example	19.549s
`

func TestFigures(t *testing.T) {
	all, failed, err := parse(strings.NewReader(said))
	if err != nil || failed != "" {
		t.Fatal(err, failed)
	}
	got := figures(all)
	if len(got) != 3 || got[0].Run != 89 || got[0].Repeated != 60 || len(got[0].Samples) != 3 || got[1].Run != 101 || got[1].Repeated != 0 {
		t.Fatalf("%+v", got)
	}
	if got[2].key() != "LiveFlows/flows=1000" || got[2].Run != 159 {
		t.Fatalf("%+v", got[2])
	}
}

func TestRun(t *testing.T) {
	json := filepath.Join(t.TempDir(), "out.json")
	var out bytes.Buffer
	if err := run(strings.NewReader(said), &out, json); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{"from_pod   established     89    101               60                -", "flows=1000   159"} {
		if !strings.Contains(out.String(), row) {
			t.Errorf("no %q in\n%s", row, out.String())
		}
	}
	if data, err := os.ReadFile(json); err != nil || !bytes.Contains(data, []byte(`"run": 89`)) {
		t.Errorf("%v: %s", err, data)
	}
}

// TestWhatIsNoResult: a benchmark that failed, none at all, and what cannot be
// read are errors.
func TestWhatIsNoResult(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"failed", said + "--- FAIL: BenchmarkPrograms/hook=x\n    x_test.go:1: counted 0 times\nFAIL\n", "counted 0 times"},
		{"nothing", "PASS\n", "no benchmark"},
		{"no unit", "BenchmarkX/a=b-2 \t 1 \t 12.0\n", "values with units"},
		{"no number", "BenchmarkX/a=b-2 \t 1 \t many ns/run\n", "many"},
		{"another name", "BenchmarkX/plain-2 \t 1 \t 12.0 ns/run\n", "key=value"},
	} {
		if err := run(strings.NewReader(c.in), &bytes.Buffer{}, ""); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}
