package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

func daemonSet(t *testing.T, file string) *appsv1.DaemonSet {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	ds := new(appsv1.DaemonSet)
	if err := yaml.UnmarshalStrict(data, ds); err != nil {
		t.Fatal(err)
	}
	return ds
}

// parse runs a container's command line through the program's own flags.
func parse(t *testing.T, c corev1.Container) {
	t.Helper()
	line := append(append([]string{}, c.Command...), c.Args...)
	if line[0] != "podweir-agent" {
		t.Fatalf("container %s runs %s", c.Name, line[0])
	}
	root := command()
	cmd, rest, err := root.Find(line[1:])
	if err == nil {
		err = cmd.ParseFlags(rest)
	}
	if err == nil {
		err = cmd.ValidateArgs(cmd.Flags().Args())
	}
	if err != nil {
		t.Errorf("container %s: %v", c.Name, err)
	}
	// Folders that flags name are mounted.
	for _, a := range rest {
		_, path, ok := strings.Cut(a, "=/")
		if !ok {
			continue
		}
		mounted := false
		for _, m := range c.VolumeMounts {
			// A flag may name a folder above a mount, as that of sysctls does.
			mounted = mounted || strings.HasPrefix("/"+path+"/", m.MountPath+"/") || strings.HasPrefix(m.MountPath, "/"+path+"/")
		}
		if !mounted {
			t.Errorf("container %s: nothing is mounted at %s", c.Name, a)
		}
	}
}

func TestDeployedCommandLines(t *testing.T) {
	for _, file := range []string{"../../deploy/base/daemonset.yaml", "../../deploy/uninstall/daemonset.yaml"} {
		pod := daemonSet(t, file).Spec.Template.Spec
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			parse(t, c)
		}
	}
}

// The settings that are shipped, those that they suggest, and the overlays'.
func TestDeployedSettings(t *testing.T) {
	files, err := filepath.Glob("../../deploy/overlays/*/agent.yaml")
	if err != nil || len(files) < 3 {
		t.Fatalf("settings of overlays: %v, %v", files, err)
	}
	for _, file := range append(files, "../../deploy/base/agent.yaml") {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, content := range []string{string(data), strings.ReplaceAll(string(data), "\n#apiserver", "\napiserver")} {
			name := t.TempDir() + "/agent.yaml"
			if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			var f flags
			err := fromFile(commandOf(&f), name)
			if err == nil {
				err = f.complete()
			}
			if err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}
