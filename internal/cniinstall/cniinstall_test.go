package cniinstall

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"
)

func put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestProgram(t *testing.T) {
	dir := t.TempDir()
	from, bin := filepath.Join(dir, "program"), filepath.Join(dir, "bin")
	put(t, dir, map[string]string{"program": "one"})
	for _, step := range []struct {
		content string
		changed bool
	}{{"one", true}, {"one", false}, {"two", true}} {
		put(t, dir, map[string]string{"program": step.content})
		changed, err := Program(from, bin)
		if err != nil || changed != step.changed {
			t.Fatalf("%s: changed %v, %v", step.content, changed, err)
		}
		have, err := os.ReadFile(filepath.Join(bin, Plugin))
		if err != nil || string(have) != step.content {
			t.Errorf("%q, %v", have, err)
		}
		if fi, _ := os.Stat(filepath.Join(bin, Plugin)); fi.Mode().Perm() != 0o755 {
			t.Errorf("mode %v", fi.Mode())
		}
	}
	// A program that is running cannot be written to, but it can be replaced;
	// and what a crash left is removed.
	put(t, bin, map[string]string{"." + Plugin + "-1" + temporary: "half", "bridge": "other"})
	put(t, dir, map[string]string{"program": "three"})
	before, err := os.Open(filepath.Join(bin, Plugin))
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	if _, err := Program(from, bin); err != nil {
		t.Fatal(err)
	}
	old := make([]byte, 3)
	if _, err := before.Read(old); err != nil || string(old) != "two" {
		t.Errorf("the file in use became %q, %v", old, err)
	}
	if got := names(t, bin); !slices.Equal(got, []string{"bridge", Plugin}) {
		t.Errorf("folder has %v", got)
	}
	if err := RemoveProgram(bin); err != nil {
		t.Fatal(err)
	}
	if got := names(t, bin); !slices.Equal(got, []string{"bridge"}) {
		t.Errorf("after removal the folder has %v", got)
	}
	if err := RemoveProgram(bin); err != nil {
		t.Errorf("removing again: %v", err)
	}
}

// A folder in a place that is not there is a slip of the hand: nothing is made.
func TestProgramInAFolderThatIsNone(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, map[string]string{"program": "one", "file": ""})
	from := filepath.Join(dir, "program")
	for name, want := range map[string]string{
		"optt/cni/bin": filepath.Join(dir, "optt/cni") + ": is the name right",
		"file":         "is a file", "file/bin": "not a directory",
	} {
		if _, err := Program(from, filepath.Join(dir, name)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	if got := names(t, dir); !slices.Equal(got, []string{"file", "program"}) {
		t.Errorf("folder has %v", got)
	}
	if _, err := Program(from, filepath.Join(dir, "bin")+"/"); err != nil {
		t.Errorf("a folder where there is a place for it: %v", err)
	}
}

// So is one of configurations: the runtime would not look there.
func TestConfInAFolderThatIsNone(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, map[string]string{"file": ""})
	for name, want := range map[string]string{"ect/cni/net.d": filepath.Join(dir, "ect/cni") + ": is the name right", "file": "is a file"} {
		if _, _, err := Conf(filepath.Join(dir, name), DefaultConfName, DefaultConf()); err == nil || !strings.Contains(err.Error(), "CNI configurations") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	if got := names(t, dir); !slices.Equal(got, []string{"file"}) {
		t.Errorf("folder has %v", got)
	}
}

// What the default says, in the eyes of the library that runtimes use.
func TestDefaultConf(t *testing.T) {
	dir := t.TempDir()
	if _, first, err := Conf(dir, DefaultConfName, DefaultConf()); err != nil || first != "" {
		t.Fatal(first, err)
	}
	list, err := libcni.LoadNetworkConf(dir, "podweir")
	if err != nil {
		t.Fatal(err)
	}
	if list.CNIVersion != "1.1.0" || len(list.Plugins) != 1 || list.Plugins[0].Network.Type != Plugin || !list.Plugins[0].Network.Capabilities["portMappings"] {
		t.Errorf("%+v", list)
	}
}

func TestConf(t *testing.T) {
	dir := t.TempDir()
	other := `{"cniVersion": "1.0.0", "name": "cbr0", "plugins": [{"type": "flannel"}]}`
	put(t, dir, map[string]string{
		"05-podweir.conflist": string(DefaultConf()), "20-podweir.conf": `{"name": "x", "type": "podweir-cni"}`,
		"10-flannel.conflist": other, "notes.txt": "podweir-cni", "broken.conf": "{",
		".10-podweir.conflist-77" + temporary: "half",
	})
	changed, first, err := Conf(dir, DefaultConfName, DefaultConf())
	if err != nil || !changed || first != "10-flannel.conflist" {
		t.Errorf("changed %v, first %q, %v", changed, first, err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"10-flannel.conflist", "10-podweir.conflist", "broken.conf", "notes.txt"}) {
		t.Errorf("folder has %v", got)
	}
	if changed, _, err := Conf(dir, DefaultConfName, DefaultConf()); changed || err != nil {
		t.Errorf("the same again: changed %v, %v", changed, err)
	}
	if _, first, err := Conf(dir, "00-podweir.conflist", DefaultConf()); first != "" || err != nil {
		t.Errorf("first %q, %v", first, err)
	}
	removed, err := RemoveConf(dir)
	if !removed || err != nil {
		t.Errorf("removed %v, %v", removed, err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"10-flannel.conflist", "broken.conf", "notes.txt"}) {
		t.Errorf("folder has %v", got)
	}
	if removed, err := RemoveConf(dir); removed || err != nil {
		t.Errorf("again: removed %v, %v", removed, err)
	}
	if removed, err := RemoveConf(filepath.Join(dir, "nowhere")); removed || err != nil {
		t.Errorf("no folder: removed %v, %v", removed, err)
	}
}

func TestBadConf(t *testing.T) {
	for want, c := range map[string][2]string{
		"end with .conflist":           {"podweir", string(DefaultConf())},
		"unexpected end of JSON":       {"a.conflist", `{"name": "x"`},
		"it has no name":               {"a.conflist", `{"plugins": [{"type": "podweir-cni"}]}`},
		"none of its plugins":          {"a.conflist", `{"name": "x", "plugins": [{"type": "bridge"}]}`},
		"cannot unmarshal string into": {"a.conflist", `{"name": "x", "plugins": "podweir-cni"}`},
	} {
		dir := t.TempDir()
		if _, _, err := Conf(dir, c[0], []byte(c[1])); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
		if got := names(t, dir); len(got) > 0 {
			t.Errorf("%s: left %v", want, got)
		}
	}
}

// On a full disk the old file stays, and nothing half written is left.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Skipf("mount a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	if _, _, err := Conf(dir, DefaultConfName, DefaultConf()); err != nil {
		t.Fatal(err)
	}
	large := append(DefaultConf(), make([]byte, 64<<10)...)
	for i := range large[len(DefaultConf()):] {
		large[len(DefaultConf())+i] = ' '
	}
	if _, _, err := Conf(dir, DefaultConfName, large); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("error %v", err)
	}
	have, err := os.ReadFile(filepath.Join(dir, DefaultConfName))
	if err != nil || string(have) != string(DefaultConf()) {
		t.Errorf("the file became %q, %v", have, err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{DefaultConfName}) {
		t.Errorf("folder has %v", got)
	}
}
