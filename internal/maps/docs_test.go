package maps

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
)

// Every reason that the datapath can count is explained to users.
func TestReasonsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	known := 0
	for r := range Reason(bpf.DpPwReasonPW_REASON_MAX) {
		name := ReasonName(r)
		if strings.HasPrefix(name, "reason_") {
			continue // a number without a name
		}
		known++
		if !strings.Contains(string(doc), "`"+name+"`") {
			t.Errorf("docs/metrics.md says nothing of %s", name)
		}
	}
	if known < 40 {
		t.Errorf("only %d reasons have names", known)
	}
}

// Every map has a row among the sizes, which says the one it has, and a row
// that says what happens when it is full.
func TestMapsAreDocumented(t *testing.T) {
	spec, err := bpf.LoadDp()
	if err != nil {
		t.Fatal(err)
	}
	sizes, full := mapRows(t, "../../docs/operations.md", "| Map | Entries |"), mapRows(t, "../../docs/architecture.md", "| Map | When full |")
	known := 0
	for name, m := range spec.Maps {
		if !strings.HasPrefix(name, "pw_") {
			continue // the constants
		}
		known++
		if full[name] == "" {
			t.Errorf("docs/architecture.md does not say what happens when %s is full", name)
		}
		want := regexp.MustCompile(`^` + thousands(m.MaxEntries) + `\b`)
		switch m.Type {
		case ebpf.RingBuf:
			want = regexp.MustCompile(fmt.Sprintf(`^%d KiB\b`, m.MaxEntries>>10))
		case ebpf.PerCPUArray, ebpf.ProgramArray:
			want = regexp.MustCompile(`a place for each$`)
		}
		if !want.MatchString(sizes[name]) {
			t.Errorf("docs/operations.md says of the size of %s %q, which is not %v", name, sizes[name], want)
		}
	}
	if known < 20 {
		t.Errorf("only %d maps", known)
	}
	for name := range sizes {
		if spec.Maps[name] == nil {
			t.Errorf("docs/operations.md has %s among the maps, which is none", name)
		}
	}
}

// mapRows is a table whose first cells name maps: what stands behind them.
func mapRows(t *testing.T, file, head string) map[string]string {
	t.Helper()
	doc, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(doc), head+"\n|---|---|\n")
	if !ok {
		t.Fatalf("%s has no table %q", file, head)
	}
	out := map[string]string{}
	for line := range strings.Lines(rest) {
		cells := strings.SplitN(line, "|", 4)
		if len(cells) < 3 {
			break
		}
		for name := range strings.SplitSeq(cells[1], ",") {
			out[strings.Trim(name, " `")] = strings.TrimSpace(cells[2])
		}
	}
	return out
}

// thousands is 262144 as 262,144.
func thousands(n uint32) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
