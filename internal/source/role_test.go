package source

import (
	"bytes"
	"os"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// The account of an installed agent may read every kind, and nothing else.
func TestRoleCoversKinds(t *testing.T) {
	data, err := os.ReadFile("../../deploy/base/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	granted := map[string]bool{}
	for _, doc := range bytes.Split(data, []byte("\n---\n")) {
		var role rbacv1.ClusterRole
		if err := yaml.Unmarshal(doc, &role); err != nil {
			t.Fatal(err)
		}
		for _, r := range role.Rules {
			for _, resource := range r.Resources {
				granted[r.APIGroups[0]+"/"+resource] = true
			}
		}
	}
	for _, k := range kinds() {
		group, _, ok := strings.Cut(k.apiVersion, "/")
		if !ok {
			group = ""
		}
		if of := group + "/" + k.resource; granted[of] {
			delete(granted, of)
		} else {
			t.Errorf("%s is read and not granted", of)
		}
	}
	if len(granted) > 0 {
		t.Errorf("granted and not read: %v", granted)
	}
}
