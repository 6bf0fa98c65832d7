//go:build realcluster

package e2e

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podweir/podweir/test/realcluster"
)

// An API server takes what deploy/ has for every way of installing. Nothing is
// changed: it is asked what it would do.
func TestOverlaysAreTaken(t *testing.T) {
	tree, err := filepath.Abs("../../..")
	must(t, err)
	c, err := realcluster.Default(tree)
	must(t, err)
	overlays, err := filepath.Glob(filepath.Join(tree, "deploy/overlays/*"))
	must(t, err)
	if len(overlays) < 4 {
		t.Fatalf("overlays: %v", overlays)
	}
	for _, dir := range append(overlays, filepath.Join(tree, "deploy/base"), filepath.Join(tree, "deploy/uninstall")) {
		var said bytes.Buffer
		err := c.Kubectl(t.Context(), nil, &said, "apply", "--dry-run=server", "--validate=strict", "-o", "name", "-k", dir)
		if err != nil || !strings.Contains(said.String(), "daemonset.apps/podweir") {
			t.Errorf("%s: %v\n%s", dir, err, said.String())
		}
	}
}
