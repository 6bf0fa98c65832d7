package deploy

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	yamlv3 "go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/podweir/podweir/internal/cniinstall"
)

func read(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// objects reads the documents of a file strictly into their types.
func objects(t *testing.T, name string) map[string]any {
	t.Helper()
	out := map[string]any{}
	for _, doc := range bytes.Split(read(t, name), []byte("\n---\n")) {
		var head struct{ Kind string }
		if err := yaml.Unmarshal(doc, &head); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var o any
		switch head.Kind {
		case "DaemonSet":
			o = new(appsv1.DaemonSet)
		case "ServiceAccount":
			o = new(corev1.ServiceAccount)
		case "ClusterRole":
			o = new(rbacv1.ClusterRole)
		case "ClusterRoleBinding":
			o = new(rbacv1.ClusterRoleBinding)
		default:
			t.Fatalf("%s: kind %q", name, head.Kind)
		}
		if err := yaml.UnmarshalStrict(doc, o); err != nil {
			t.Errorf("%s: %s: %v", name, head.Kind, err)
		}
		out[head.Kind] = o
	}
	return out
}

// The role has one place of truth; what the documents quote is the same.
func TestRoleInDocs(t *testing.T) {
	role := objects(t, "base/rbac.yaml")["ClusterRole"].(*rbacv1.ClusterRole)
	docs := string(read(t, "../docs/operations.md"))
	quoted := regexp.MustCompile(`(?s)    apiVersion: rbac.*?\n\n`).FindString(docs)
	var there rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict([]byte(regexp.MustCompile(`(?m)^    `).ReplaceAllString(quoted, "")), &there); err != nil {
		t.Fatalf("docs/operations.md: %v\n%s", err, quoted)
	}
	want, _ := json.Marshal(role.Rules)
	have, _ := json.Marshal(there.Rules)
	if !bytes.Equal(want, have) || there.Name != role.Name {
		t.Errorf("docs/operations.md quotes\n%s\ndeploy/base/rbac.yaml has\n%s", have, want)
	}
	for _, r := range role.Rules {
		if !slices.Equal(r.Verbs, []string{"list", "watch"}) {
			t.Errorf("%v: verbs %v: the agent reads, no more", r.Resources, r.Verbs)
		}
	}
}

func TestBindingLeadsToAccount(t *testing.T) {
	o := objects(t, "base/rbac.yaml")
	account, role, binding := o["ServiceAccount"].(*corev1.ServiceAccount), o["ClusterRole"].(*rbacv1.ClusterRole), o["ClusterRoleBinding"].(*rbacv1.ClusterRoleBinding)
	s := binding.Subjects[0]
	if len(binding.Subjects) != 1 || s.Kind != "ServiceAccount" || s.Name != account.Name || s.Namespace != account.Namespace || binding.RoleRef.Name != role.Name {
		t.Errorf("the binding binds %+v to %+v", binding.Subjects, binding.RoleRef)
	}
	ds := objects(t, "base/daemonset.yaml")["DaemonSet"].(*appsv1.DaemonSet)
	if ds.Spec.Template.Spec.ServiceAccountName != account.Name || ds.Namespace != account.Namespace {
		t.Errorf("the pods run as %s/%s", ds.Namespace, ds.Spec.Template.Spec.ServiceAccountName)
	}
}

// What one would not like to lose by an edit.
func TestDaemonSets(t *testing.T) {
	for _, file := range []string{"base/daemonset.yaml", "uninstall/daemonset.yaml"} {
		ds := objects(t, file)["DaemonSet"].(*appsv1.DaemonSet)
		pod := ds.Spec.Template.Spec
		if !pod.HostNetwork || pod.PriorityClassName != "system-node-critical" ||
			!slices.Contains(pod.Tolerations, corev1.Toleration{Operator: corev1.TolerationOpExists}) {
			t.Errorf("%s: host network %v, priority %s, tolerations %v", file, pod.HostNetwork, pod.PriorityClassName, pod.Tolerations)
		}
		volumes := map[string]bool{}
		for _, v := range pod.Volumes {
			volumes[v.Name] = true
		}
		used := map[string]bool{}
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			s := c.SecurityContext
			privileged := s.Privileged != nil && *s.Privileged
			if privileged != (c.Name == "mount-bpffs") {
				t.Errorf("%s: container %s is privileged: %v", file, c.Name, privileged)
			}
			if !privileged && !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
				t.Errorf("%s: container %s keeps capabilities", file, c.Name)
			}
			for _, m := range c.VolumeMounts {
				used[m.Name] = true
				if !volumes[m.Name] {
					t.Errorf("%s: container %s mounts %s, which is no volume", file, c.Name, m.Name)
				}
				both := m.MountPropagation != nil && *m.MountPropagation == corev1.MountPropagationBidirectional
				if both && !privileged {
					t.Errorf("%s: container %s: mount %s would be refused: Bidirectional needs privileges", file, c.Name, m.Name)
				}
			}
		}
		for v := range volumes {
			if !used[v] {
				t.Errorf("%s: volume %s is mounted nowhere", file, v)
			}
		}
	}
}

// The way back goes to all places that the way there goes to.
func TestUninstallReachesEverything(t *testing.T) {
	paths := func(file string) (out []string) {
		ds := objects(t, file)["DaemonSet"].(*appsv1.DaemonSet)
		for _, v := range ds.Spec.Template.Spec.Volumes {
			if v.HostPath != nil {
				out = append(out, v.HostPath.Path)
			}
		}
		return out
	}
	back := paths("uninstall/daemonset.yaml")
	for _, p := range paths("base/daemonset.yaml") {
		// Nothing of ours is made in these.
		if p == "/run/netns" || p == "/sys/fs/cgroup" {
			continue
		}
		if !slices.Contains(back, p) {
			t.Errorf("uninstall does not reach %s", p)
		}
	}
}

func TestConflist(t *testing.T) {
	var one, two any
	if err := json.Unmarshal(read(t, filepath.Join("base", cniinstall.DefaultConfName)), &one); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(cniinstall.DefaultConf(), &two); err != nil {
		t.Fatal(err)
	}
	a, _ := json.Marshal(one)
	b, _ := json.Marshal(two)
	if !bytes.Equal(a, b) {
		t.Errorf("deploy has %s, the agent's default is %s", a, b)
	}
}

// Everything in the folders is in a kustomization, and the other way round.
func TestKustomizations(t *testing.T) {
	for _, dir := range []string{"base", "uninstall"} {
		var k struct {
			APIVersion, Kind, Namespace string
			Resources                   []string
			ConfigMapGenerator          []struct {
				Name  string
				Files []string
			}
		}
		if err := yaml.UnmarshalStrict(read(t, dir+"/kustomization.yaml"), &k); err != nil {
			t.Fatal(err)
		}
		named := append([]string{"kustomization.yaml"}, k.Resources...)
		for _, g := range k.ConfigMapGenerator {
			named = append(named, g.Files...)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var have []string
		for _, e := range entries {
			have = append(have, e.Name())
		}
		slices.Sort(named)
		if !slices.Equal(named, have) {
			t.Errorf("%s: the kustomization names %s, the folder has %s", dir, strings.Join(named, " "), strings.Join(have, " "))
		}
	}
}

// The chart says of each of its values what it is for.
func TestValuesAreDocumented(t *testing.T) {
	var doc yamlv3.Node
	if err := yamlv3.Unmarshal(read(t, "helm/podweir/values.yaml"), &doc); err != nil {
		t.Fatal(err)
	}
	checked := 0
	var check func(under string, m *yamlv3.Node)
	check = func(under string, m *yamlv3.Node) {
		for i := 0; i < len(m.Content); i += 2 {
			key, value := m.Content[i], m.Content[i+1]
			name := under + key.Value
			if key.HeadComment == "" && value.Kind == yamlv3.MappingNode && len(value.Content) > 0 {
				check(name+".", value)
				continue
			}
			checked++
			if key.HeadComment == "" {
				t.Errorf("line %d: nothing is said of %s", key.Line, name)
			}
		}
	}
	check("", doc.Content[0])
	if checked < 10 {
		t.Errorf("%d values", checked)
	}
}
