package maps

import (
	"os"
	"strings"
	"testing"

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
