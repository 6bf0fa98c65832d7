package packet

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/maps"
)

// The verifier's work is logged, so that growth is seen before it is a limit.
func TestAllProgramsLoad(t *testing.T) {
	d, err := defragging()
	if err != nil {
		t.Fatal(err)
	}
	programs := map[string]*ebpf.Program{"slow": d.objs.Slow, "fragment": d.objs.Fragment, "from_frag": d.objs.FromFrag, "from_pod_judge": d.objs.FromPodJudge, "from_pod_send": d.objs.FromPodSend}
	for _, h := range hooks() {
		programs[maps.HookName(h)] = d.program(h)
	}
	all := uint32(0)
	for name, p := range programs {
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		n, ok := info.VerifiedInstructions()
		if !ok || n == 0 {
			t.Errorf("%s: %d verified instructions", name, n)
		}
		t.Logf("%-12s %6d instructions verified", name, n)
		if info.Name != name {
			t.Errorf("program %s is called %q in the kernel", name, info.Name)
		}
		all += n
	}
	// Once the slow path was verified in every hook: 800,000.
	if t.Logf("%-12s %6d", "together", all); all > 200_000 {
		t.Errorf("%d instructions verified: an agent's start takes as long as they do", all)
	}
}
