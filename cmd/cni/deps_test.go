package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The plugin asks the agent, and nobody else: it holds no credentials of the
// API server's, and nothing that could use any.
func TestNoAPIClient(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, "github.com/podweir/podweir/internal/cniapi") {
		t.Fatal("not the packages of the plugin")
	}
	for _, p := range deps {
		if strings.HasPrefix(p, "k8s.io/") {
			t.Errorf("the plugin contains %s", p)
		}
	}
}
