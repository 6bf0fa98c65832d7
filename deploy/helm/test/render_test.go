package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

type object = map[string]any

// render is what `helm template` writes, by kind and name.
func render(t *testing.T, values string) (map[string]object, error) {
	t.Helper()
	chart, err := loader.Load("../podweir")
	if err != nil {
		t.Fatal(err)
	}
	user := map[string]any{}
	if err := yaml.Unmarshal([]byte(values), &user); err != nil {
		t.Fatal(err)
	}
	vals, err := chartutil.ToRenderValues(chart, user, chartutil.ReleaseOptions{Name: "podweir", Namespace: "kube-system", IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, vals)
	if err != nil {
		return nil, err
	}
	var all []string
	for name, text := range files {
		if strings.HasSuffix(name, ".yaml") {
			all = append(all, strings.Split(text, "\n---\n")...)
		}
	}
	return parse(t, all), nil
}

// base is what `kubectl kustomize deploy/base` writes.
func base(t *testing.T) map[string]object { return kustomize(t, "../../base") }

func kustomize(t *testing.T, dir string) map[string]object {
	t.Helper()
	res, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := res.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, strings.Split(string(text), "\n---\n"))
}

func parse(t *testing.T, docs []string) map[string]object {
	t.Helper()
	out := map[string]object{}
	for _, doc := range docs {
		var o object
		if err := yaml.UnmarshalStrict([]byte(doc), &o); err != nil {
			t.Fatalf("%v:\n%s", err, doc)
		}
		if len(o) == 0 {
			continue
		}
		name, _ := field(o, "metadata", "name").(string)
		out[fmt.Sprintf("%s/%s", o["kind"], hashed.ReplaceAllString(name, ""))] = o
	}
	return out
}

// hashed is what kustomize adds to the names of generated objects.
var hashed = regexp.MustCompile(`-[a-z0-9]{10}$`)

func field(o any, path ...string) any {
	for _, p := range path {
		m, _ := o.(map[string]any)
		o = m[p]
	}
	return o
}

// normal takes away what the two ways of installing rightly do differently.
func normal(t *testing.T, o object) object {
	t.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var c object
	if err := json.Unmarshal([]byte(data), &c); err != nil {
		t.Fatal(err)
	}
	meta := c["metadata"].(object)
	meta["name"] = hashed.ReplaceAllString(meta["name"].(string), "")
	if labels, ok := meta["labels"].(object); ok {
		for _, l := range []string{"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"} {
			delete(labels, l)
		}
	}
	if a, ok := field(c, "spec", "template", "metadata", "annotations").(object); ok {
		delete(a, "podweir.io/config-digest")
	}
	if volumes, ok := field(c, "spec", "template", "spec", "volumes").([]any); ok {
		// A patch puts those it changes first.
		slices.SortFunc(volumes, func(a, b any) int {
			return strings.Compare(a.(object)["name"].(string), b.(object)["name"].(string))
		})
		for _, v := range volumes {
			if cm, ok := v.(object)["configMap"].(object); ok {
				cm["name"] = hashed.ReplaceAllString(cm["name"].(string), "")
			}
		}
	}
	if c["kind"] == "ConfigMap" {
		delete(meta, "labels")
		for k, text := range c["data"].(object) { // comments and white space
			var v any
			if err := yaml.Unmarshal([]byte(text.(string)), &v); err != nil {
				t.Fatal(err)
			}
			c["data"].(object)[k] = v
		}
	}
	return c
}

func TestChartIsTheBase(t *testing.T) {
	chart, err := render(t, "")
	if err != nil {
		t.Fatal(err)
	}
	compare(t, chart, base(t))
}

// compare says where what the chart renders is not what kustomize builds.
func compare(t *testing.T, chart, want map[string]object) {
	t.Helper()
	for name, o := range want {
		have, ok := chart[name]
		if !ok {
			t.Errorf("the chart has no %s", name)
			continue
		}
		if a, b := normal(t, have), normal(t, o); !reflect.DeepEqual(a, b) {
			x, _ := yaml.Marshal(a)
			y, _ := yaml.Marshal(b)
			t.Errorf("%s: the chart has\n%s\nkustomize has\n%s", name, x, y)
		}
	}
	for name := range chart {
		if want[name] == nil {
			t.Errorf("kustomize has no %s", name)
		}
	}
}

// The overlays for kubeadm, kind and k3s are what the chart makes of the values
// beside them, and those of the way back have the same folders.
func TestOverlays(t *testing.T) {
	dirs, err := filepath.Glob("../../overlays/*")
	if err != nil || len(dirs) < 4 {
		t.Fatalf("overlays: %v, %v", dirs, err)
	}
	for _, dir := range dirs {
		name := filepath.Base(dir)
		t.Run(name, func(t *testing.T) {
			built := kustomize(t, dir)
			if of, ok := strings.CutSuffix(name, "-uninstall"); ok {
				there := volumes(t, kustomize(t, filepath.Join(filepath.Dir(dir), of))["DaemonSet/podweir"])
				here := volumes(t, built["DaemonSet/podweir-uninstall"])
				for _, v := range []string{"cni-conf", "cni-bin", "state", "run", "bpffs"} {
					if here[v] == nil || here[v] != there[v] {
						t.Errorf("%s is %v, of what is removed %v", v, here[v], there[v])
					}
				}
				return
			}
			values, err := os.ReadFile(filepath.Join(dir, "values.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			chart, err := render(t, string(values))
			if err != nil {
				t.Fatal(err)
			}
			compare(t, chart, built)
		})
	}
}

// volumes are the host's paths by the volume's name.
func volumes(t *testing.T, daemonSet object) map[string]any {
	t.Helper()
	out := map[string]any{}
	list, _ := field(daemonSet, "spec", "template", "spec", "volumes").([]any)
	for _, v := range list {
		if path := field(v, "hostPath", "path"); path != nil {
			out[v.(object)["name"].(string)] = path
		}
	}
	if len(out) == 0 {
		t.Fatal("no volumes")
	}
	return out
}

func TestValues(t *testing.T) {
	for _, c := range []struct{ values, want string }{
		{"image: {repository: registry.example/podweir, tag: v1}", "registry.example/podweir:v1"},
		{"config: {apiserver: [172.31.0.2:6443], routing-mode: direct}", "routing-mode: direct"},
		{"config: {cgroup: none}", "cgroup: none"},
		{"cni: {confDir: /var/lib/rancher/k3s/agent/etc/cni/net.d}", "/var/lib/rancher/k3s/agent/etc/cni/net.d"},
		{"cni: {confName: 05-podweir.conflist}", "--cni-conf=/etc/podweir/05-podweir.conflist"},
		{"cni: {plugins: [{type: podweir-cni}, {type: bandwidth, capabilities: {bandwidth: true}}]}", `"type": "bandwidth"`},
		{"imagePullSecrets: [a, b]", "name: b"},
		{"maxUnavailable: 10%", "maxUnavailable: 10%"},
		{"podAnnotations: {a: b}", "a: b"},
		{"resources: {limits: {memory: 1Gi}}", "memory: 1Gi"},
		{"tolerations: []", "tolerations: []"},
		{"image: {tags: v1}", "error: tags"},
		{"routingMode: direct", "error: routingMode"},
		{"cni: {confName: podweir}", "error: confName"},
		{"cni: {binDir: opt}", "error: binDir"},
	} {
		objects, err := render(t, c.values)
		if say, ok := strings.CutPrefix(c.want, "error: "); ok {
			if err == nil || !strings.Contains(err.Error(), say) {
				t.Errorf("%s: error %v does not say %q", c.values, err, say)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.values, err)
			continue
		}
		text, err := yaml.Marshal(objects)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), c.want) {
			t.Errorf("%s: nothing rendered says %q:\n%s", c.values, c.want, text)
		}
	}
}

// Other settings are another pod template: that is what rolls the DaemonSet.
func TestConfigRollsPods(t *testing.T) {
	digest := func(values string) any {
		objects, err := render(t, values)
		if err != nil {
			t.Fatal(err)
		}
		return field(objects["DaemonSet/podweir"], "spec", "template", "metadata", "annotations", "podweir.io/config-digest")
	}
	one := digest("")
	if one == nil || one != digest("") {
		t.Errorf("digest %v, and then %v", one, digest(""))
	}
	for _, v := range []string{"config: {mtu: 1400}", "cni: {plugins: [{type: podweir-cni}]}"} {
		if digest(v) == one {
			t.Errorf("%s: the same digest", v)
		}
	}
}
