package policy

import "testing"

// The cases share a cluster; each starts without policies.
func TestPolicy(t *testing.T) {
	w := newWorld(t)
	w.run("without policies everything is allowed", func(w *world) {
		if _, denied := w.matrix(); denied > 0 {
			w.Fatalf("the rules deny %d", denied)
		}
	})
	w.run("P1 isolation", (*world).isolation)
	w.run("P2 peers", (*world).peers)
	w.run("P6 ports", (*world).ports)
	w.run("P7 blocks", (*world).blocks)
	w.run("P16 selectors", (*world).selectors)
}
