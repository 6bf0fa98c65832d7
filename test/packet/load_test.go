package packet

import (
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// The verifier's work is logged, so that growth is seen before it is a limit.
func TestAllProgramsLoad(t *testing.T) {
	d, err := standard()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range hooks() {
		info, err := d.program(h).Info()
		if err != nil {
			t.Fatal(err)
		}
		n, ok := info.VerifiedInstructions()
		if !ok || n == 0 || n > 1_000_000 {
			t.Errorf("%s: %d verified instructions", maps.HookName(h), n)
		}
		t.Logf("%-12s %6d instructions verified", maps.HookName(h), n)
		if info.Name != maps.HookName(h) {
			t.Errorf("program %s is called %q in the kernel", maps.HookName(h), info.Name)
		}
	}
}
