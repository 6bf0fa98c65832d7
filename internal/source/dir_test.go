package source

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/table"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func podText(name, app string) string {
	if app != "[]" { // which is a mistake
		app = "'" + app + "'"
	}
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata:\n  name: %s\n  labels: {app: %s}\n", name, app)
}

// scanned runs one scan and returns the pods as "name=app" and the problems.
func scanned(s *manifestSet) (string, []string) {
	objects, problems := s.scan()
	var pods, texts []string
	for _, o := range objects["Pod"] {
		pods = append(pods, o.GetName()+"="+o.GetLabels()["app"])
	}
	slices.Sort(pods)
	for _, p := range problems {
		texts = append(texts, strings.ReplaceAll(p.String(), s.dir+"/", ""))
	}
	return strings.Join(pods, " "), texts
}

type step struct {
	name     string
	do       func(t *testing.T, dir string)
	pods     string
	problems []string // a part of each, in order
}

func put(files ...string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		for i := 0; i < len(files); i += 2 {
			write(t, filepath.Join(dir, files[i]), files[i+1])
		}
	}
}

func remove(name string) func(*testing.T, string) {
	return func(t *testing.T, dir string) { must(t, os.RemoveAll(filepath.Join(dir, name))) }
}

// What the directory puts in force, step by step.
func TestWhatIsInForce(t *testing.T) {
	two := podText("a", "1") + "---\n" + podText("b", "1")
	for name, steps := range map[string][]step{
		"bad version keeps the last good one": {
			{"good", put("x.yaml", two), "a=1 b=1", nil},
			{"a bad", put("x.yaml", podText("a", "[]")+"---\n"+podText("b", "2")), "a=1 b=2",
				[]string{"x.yaml:5: Pod default/a: metadata.labels: the value is of type array; the field takes a text: put it in quotes; the version read before stays in force"}},
			{"mended", put("x.yaml", podText("a", "3")), "a=3", nil},
		},
		"removing the bad document removes the object": {
			{"good", put("x.yaml", two), "a=1 b=1", nil},
			{"a bad", put("x.yaml", podText("a", "[]")), "a=1", []string{"x.yaml:5"}},
			{"gone", put("x.yaml", "# empty now\n"), "", nil},
		},
		"broken YAML keeps what the file held": {
			{"good", put("x.yaml", two, "y.yaml", podText("c", "1")), "a=1 b=1 c=1", nil},
			{"half", put("x.yaml", podText("a", "2")+"---\napiVersion: v1\nkind: Pod\nmetadata: {name: b"), "a=2 b=1 c=1",
				[]string{"the objects read from the file before stay in force"}},
			{"removed", remove("x.yaml"), "c=1", nil},
		},
		"an empty file is a write cut off": {
			{"good", put("x.yaml", two), "a=1 b=1", nil},
			{"truncated", put("x.yaml", ""), "a=1 b=1", []string{"x.yaml: the file is empty"}},
			{"written", put("x.yaml", podText("a", "2")), "a=2", nil},
		},
		"a mistyped kind keeps the object": {
			{"good", put("x.yaml", podText("a", "1")), "a=1", nil},
			{"typo", put("x.yaml", strings.Replace(podText("a", "2"), "Pod", "Pood", 1)), "a=1", []string{"kind \"Pood\""}},
			{"another kind", put("x.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n"), "", []string{"kind \"Deployment\""}},
		},
		"of two definitions the first counts": {
			{"both", put("x.yaml", podText("a", "x"), "y.yaml", podText("b", "y")+"---\n"+podText("a", "y")), "a=x b=y",
				[]string{"y.yaml:7: Pod default/a: defined in x.yaml, line 1, already, which counts: remove one of the two"}},
			{"first gone", remove("x.yaml"), "a=y b=y", nil},
			{"twice in one", put("x.yaml", podText("a", "1")+"---\n"+podText("a", "2"), "y.yaml", "#\n"), "a=1",
				[]string{"x.yaml:7: Pod default/a: defined in x.yaml, line 1"}},
		},
		"a good definition elsewhere wins over a bad one": {
			{"good", put("x.yaml", podText("a", "1")), "a=1", nil},
			{"moved", put("x.yaml", podText("a", "[]"), "y.yaml", podText("a", "2")), "a=2", []string{"x.yaml:5"}},
		},
		"a renamed file": {
			{"good", put("x.yaml", two), "a=1 b=1", nil},
			{"renamed", func(t *testing.T, dir string) {
				must(t, os.Rename(filepath.Join(dir, "x.yaml"), filepath.Join(dir, "w.yml")))
			}, "a=1 b=1", nil},
			{"out of sight", func(t *testing.T, dir string) {
				must(t, os.Rename(filepath.Join(dir, "w.yml"), filepath.Join(dir, "w.yml.off")))
			}, "", nil},
		},
		"what is not read": {
			{"others", func(t *testing.T, dir string) {
				put(".x.yaml", podText("a", "1"), "x.yaml~", podText("b", "1"), "README.md", "# x", ".#y.yaml", "broken: [")(t, dir)
				must(t, os.MkdirAll(filepath.Join(dir, "sub.yaml"), 0o755))
				write(t, filepath.Join(dir, "sub.yaml", "z.yaml"), podText("c", "1"))
			}, "", nil},
			{"json", put("x.json", `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "j", "labels": {"app": "1"}}}`), "j=1", nil},
		},
		"links": {
			{"good", func(t *testing.T, dir string) {
				write(t, filepath.Join(dir, "real"), podText("a", "1"))
				must(t, os.Symlink("real", filepath.Join(dir, "x.yaml")))
			}, "a=1", nil},
			{"dangling", remove("real"), "a=1", []string{"x.yaml: the symbolic link cannot be followed: no such file or directory"}},
			{"removed", remove("x.yaml"), "", nil},
		},
		"the directory goes and comes back": {
			{"good", put("x.yaml", two), "a=1 b=1", nil},
			{"gone", remove(""), "a=1 b=1", []string{"the manifest directory cannot be read: no such file or directory: what was read before stays in force"}},
			{"back", func(t *testing.T, dir string) {
				must(t, os.Mkdir(dir, 0o755))
				put("x.yaml", podText("a", "2"))(t, dir)
			}, "a=2", nil},
		},
		"a fifo is not opened": {
			{"fifo", func(t *testing.T, dir string) { must(t, mkfifo(filepath.Join(dir, "x.yaml"))) }, "", []string{"x.yaml: not a regular file"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "manifests")
			must(t, os.Mkdir(dir, 0o755))
			s := newManifestSet(dir)
			for _, st := range steps {
				st.do(t, dir)
				pods, problems := scanned(s)
				if pods != st.pods {
					t.Errorf("%s: in force %q, want %q", st.name, pods, st.pods)
				}
				ok := len(problems) == len(st.problems)
				for i := range st.problems {
					ok = ok && strings.Contains(problems[i], st.problems[i])
				}
				if !ok {
					t.Errorf("%s: problems\n%s\nwant parts\n%s", st.name, strings.Join(problems, "\n"), strings.Join(st.problems, "\n"))
				}
			}
		})
	}
}

// liveDir starts a directory source whose slow re-list never comes.
func liveDir(t *testing.T, dir string) *table.Tables {
	t.Helper()
	tables := newTables(t)
	timing := defaultTiming()
	timing.relist = time.Hour
	src, err := newDir(dir, tables, testLog(t), timing)
	must(t, err)
	run(t, src)
	waitSynced(t, tables)
	return tables
}

func app(name, value string) func(map[string]*corev1.Pod) bool {
	return func(have map[string]*corev1.Pod) bool {
		p := have["default/"+name]
		return p != nil && p.Labels["app"] == value
	}
}

func TestDirFollowsFiles(t *testing.T) {
	dir := t.TempDir()
	x := filepath.Join(dir, "x.yaml")
	write(t, x, podText("a", "1"))
	tables := liveDir(t, dir)
	if _, _, ok := tables.Pods.Get(tables.DB.ReadTxn(), table.ByName[*corev1.Pod]("default", "a")); !ok {
		t.Error("synced without the pod that stood in the directory")
	}

	write(t, x, podText("a", "2"))
	await(t, tables, tables.Pods, "the rewrite", app("a", "2"))

	// As editors do: the old one aside, the new one in its place.
	must(t, os.Rename(x, x+"~"))
	write(t, x, podText("a", "3"))
	await(t, tables, tables.Pods, "the editor's rename", app("a", "3"))

	tmp := filepath.Join(dir, ".tmp")
	write(t, tmp, podText("a", "4"))
	must(t, os.Rename(tmp, x))
	await(t, tables, tables.Pods, "the rename over it", app("a", "4"))

	write(t, filepath.Join(dir, "y.yaml"), podText("b", "1"))
	await(t, tables, tables.Pods, "a second file", exactly[*corev1.Pod]("default/a", "default/b"))
	must(t, os.Remove(x))
	await(t, tables, tables.Pods, "the removal", exactly[*corev1.Pod]("default/b"))

	write(t, x, "kind: Pod\n")
	awaitProblems(t, tables, "the bad file", func(p []string) bool {
		return len(p) == 1 && strings.HasPrefix(p[0], x+":1: Pod: apiVersion is missing")
	})
	must(t, os.Remove(x))
	awaitProblems(t, tables, "its end", func(p []string) bool { return len(p) == 0 })
}

// A mounted ConfigMap: the files are links through ..data, which is swapped.
func TestDirFollowsConfigMapSwap(t *testing.T) {
	dir := t.TempDir()
	version := func(n string) {
		must(t, os.Mkdir(filepath.Join(dir, "..v"+n), 0o755))
		write(t, filepath.Join(dir, "..v"+n, "x.yaml"), podText("a", n))
		must(t, os.Symlink("..v"+n, filepath.Join(dir, "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("1")
	must(t, os.Symlink("..data/x.yaml", filepath.Join(dir, "x.yaml")))
	tables := liveDir(t, dir)
	await(t, tables, tables.Pods, "version 1", app("a", "1"))
	for _, n := range []string{"2", "3"} {
		version(n)
		await(t, tables, tables.Pods, "version "+n, app("a", n))
	}
	// A change behind the links is seen too.
	write(t, filepath.Join(dir, "..v3", "x.yaml"), podText("a", "4"))
	await(t, tables, tables.Pods, "the change behind the links", app("a", "4"))
}

func TestDirFollowsReplacedDirectories(t *testing.T) {
	base := t.TempDir()
	release := func(n string) string {
		p := filepath.Join(base, "releases", n)
		must(t, os.MkdirAll(p, 0o755))
		write(t, filepath.Join(p, "x.yaml"), podText("a", n))
		return p
	}
	current := filepath.Join(base, "current")
	must(t, os.Symlink(release("1"), current))
	tables := liveDir(t, current)
	await(t, tables, tables.Pods, "release 1", app("a", "1"))

	must(t, os.Symlink(release("2"), current+".new"))
	must(t, os.Rename(current+".new", current))
	await(t, tables, tables.Pods, "release 2", app("a", "2"))
	write(t, filepath.Join(base, "releases", "2", "x.yaml"), podText("a", "2b"))
	await(t, tables, tables.Pods, "a change in release 2", app("a", "2b"))

	// The directory itself moves away and another takes its place.
	two := filepath.Join(base, "releases", "2")
	must(t, os.Rename(two, two+".old"))
	awaitProblems(t, tables, "the missing directory", func(p []string) bool {
		return len(p) == 1 && strings.Contains(p[0], "cannot be read")
	})
	await(t, tables, tables.Pods, "what was in force", app("a", "2b"))
	must(t, os.Rename(release("3"), two))
	await(t, tables, tables.Pods, "the directory in its place", app("a", "3"))
	awaitProblems(t, tables, "its end", func(p []string) bool { return len(p) == 0 })
	write(t, filepath.Join(two, "x.yaml"), podText("a", "3b"))
	await(t, tables, tables.Pods, "a change in it", app("a", "3b"))
}

// Files rewritten without a pause end in the last state, and pods that are in
// every version of their file never go.
func TestDirConcurrentRewriting(t *testing.T) {
	const writers, rounds = 4, 60
	dir := t.TempDir()
	path := func(w int) string { return filepath.Join(dir, fmt.Sprintf("f%d.yaml", w)) }
	text := func(w, round int) string {
		return podText(fmt.Sprintf("p%d", w), fmt.Sprint(round)) + "---\n" + podText(fmt.Sprintf("q%d", w), fmt.Sprint(round))
	}
	for w := range writers {
		write(t, path(w), text(w, 0))
	}
	tables := liveDir(t, dir)
	wtxn := tables.DB.WriteTxn(tables.Pods)
	changes, err := tables.Pods.Changes(wtxn)
	wtxn.Commit()
	must(t, err)

	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for round := 1; round <= rounds; round++ {
				tmp := filepath.Join(dir, fmt.Sprintf(".f%d", w))
				if w%2 == 0 { // by renaming, by writing in place
					tmp = path(w)
				}
				if err := os.WriteFile(tmp, []byte(text(w, round)), 0o644); err != nil {
					t.Error(err)
				}
				if w%2 == 1 {
					if err := os.Rename(tmp, path(w)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	await(t, tables, tables.Pods, "the last round", func(have map[string]*corev1.Pod) bool {
		for w := range writers {
			if !app(fmt.Sprintf("p%d", w), fmt.Sprint(rounds))(have) || !app(fmt.Sprintf("q%d", w), fmt.Sprint(rounds))(have) {
				return false
			}
		}
		return true
	})
	awaitProblems(t, tables, "none", func(p []string) bool { return len(p) == 0 })
	seq, _ := changes.Next(tables.DB.ReadTxn())
	for c := range seq {
		if c.Deleted {
			t.Errorf("pod %s went for a while", c.Object.Name)
		}
	}
}

func TestDirNamespaces(t *testing.T) {
	dir := t.TempDir()
	x := filepath.Join(dir, "x.yaml")
	inNS := strings.Replace(podText("a", "1"), "name: a", "name: a\n  namespace: shop", 1)
	write(t, x, inNS)
	tables := liveDir(t, dir)
	have := await(t, tables, tables.Namespaces, "the namespace of the pod", exactly[*corev1.Namespace]("shop"))
	made := have["shop"]
	if made.Labels[corev1.LabelMetadataName] != "shop" || made.UID == "" {
		t.Errorf("namespace %+v", made.ObjectMeta)
	}
	write(t, x, inNS+"---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n  labels: {team: x}\n")
	have = await(t, tables, tables.Namespaces, "the namespace defined", func(have map[string]*corev1.Namespace) bool {
		return have["shop"] != nil && have["shop"].Labels["team"] == "x"
	})
	if got := have["shop"]; got.Labels[corev1.LabelMetadataName] != "shop" || got.UID != made.UID {
		t.Errorf("defined namespace %+v, made before %+v", got.ObjectMeta, made.ObjectMeta)
	}
	must(t, os.Remove(x))
	await(t, tables, tables.Namespaces, "no namespace", exactly[*corev1.Namespace]())
}

func TestDirMustExist(t *testing.T) {
	_, err := NewDir(filepath.Join(t.TempDir(), "none"), newTables(t), testLog(t))
	if err == nil || !strings.Contains(err.Error(), "no such file or directory: make a directory") {
		t.Errorf("got %v", err)
	}
}

// Without any event the slow re-list finds a change.
func TestDirRelist(t *testing.T) {
	dir := t.TempDir()
	tables := newTables(t)
	src, err := newDir(dir, tables, testLog(t), timing{quiet: time.Hour, bound: time.Hour, relist: 10 * time.Millisecond})
	must(t, err)
	run(t, src)
	waitSynced(t, tables)
	write(t, filepath.Join(dir, "x.yaml"), podText("a", "1"))
	await(t, tables, tables.Pods, "the pod", app("a", "1"))
}
