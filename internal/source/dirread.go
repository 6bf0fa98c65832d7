package source

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"maps"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/table"
)

// manifestSet is what a directory holds: its files as last read, and the
// objects in force. It has no part in watching.
type manifestSet struct {
	kinds   []kind
	dir     string
	files   map[string]*manifestFile // by name
	inForce map[objectKey]placed
}

type manifestFile struct {
	sum    [sha256.Size]byte
	read   bool // sum and parsed are of a file that was read once
	parsed parsed
	err    error // why it could not be read this time
}

// placed is an object in force and where it was last read well.
type placed struct {
	obj  object
	file string
	line int
}

func newManifestSet(dir string) *manifestSet {
	return &manifestSet{kinds: kinds(), dir: dir, files: map[string]*manifestFile{}, inForce: map[objectKey]placed{}}
}

// isManifest tells by its name whether a file is read. Hidden files are those
// of editors and of mounted ConfigMaps.
func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

// scan reads the directory and returns the objects in force, by kind, and all
// problems.
func (s *manifestSet) scan() (map[string][]object, []table.Problem) {
	var problems []table.Problem
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		problems = append(problems, table.Problem{File: s.dir,
			Err: fmt.Sprintf("the manifest directory cannot be read: %v: what was read before stays in force until it is back", cause(err))})
	} else {
		s.readFiles(entries)
	}
	return s.resolve(problems)
}

func (s *manifestSet) readFiles(entries []fs.DirEntry) {
	present := map[string]bool{}
	for _, e := range entries {
		name := e.Name()
		if !isManifest(name) {
			continue
		}
		data, err := readManifest(filepath.Join(s.dir, name))
		if errors.Is(err, errNoFile) {
			continue
		}
		present[name] = true
		f := s.files[name]
		if f == nil {
			f = &manifestFile{}
			s.files[name] = f
		}
		if f.err = err; err != nil {
			continue
		}
		if sum := sha256.Sum256(data); !f.read || sum != f.sum {
			f.sum, f.read = sum, true
			f.parsed = parseManifests(s.kinds, string(data))
		}
	}
	maps.DeleteFunc(s.files, func(name string, _ *manifestFile) bool { return !present[name] })
}

// errNoFile says that a name is none of a file: a directory, or gone.
var errNoFile = errors.New("no file")

func readManifest(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		if _, lerr := os.Lstat(path); errors.Is(lerr, fs.ErrNotExist) {
			return nil, errNoFile
		}
		return nil, fmt.Errorf("the symbolic link cannot be followed: %w: mend it or remove it", cause(err))
	}
	if info.IsDir() {
		return nil, errNoFile
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("not a regular file (%s): remove it", info.Mode().Type())
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errNoFile
	}
	if err != nil {
		return nil, fmt.Errorf("cannot be read: %w: let the agent read it", cause(err))
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("cannot be read: %w", cause(err))
	case len(data) > maxFile:
		return nil, fmt.Errorf("larger than %d MiB: split it into several files", maxFile>>20)
	case len(data) == 0:
		return nil, errors.New("the file is empty, as if a write had been cut off: write it again, or remove it to remove its objects")
	}
	return data, nil
}

// cause is the bare reason of a file error; the path stands elsewhere.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

const staysInForce = "; the version read before stays in force"

// resolve decides from the files which objects are in force.
func (s *manifestSet) resolve(problems []table.Problem) (map[string][]object, []table.Problem) {
	now := map[objectKey]placed{}
	names := slices.Sorted(maps.Keys(s.files))
	add := func(file string, line int, key objectKey, format string, args ...any) {
		problems = append(problems, table.Problem{
			Object: key.String(), File: filepath.Join(s.dir, file), Line: line, Err: fmt.Sprintf(format, args...)})
	}

	// The good objects. Of two, the first counts: by file name, then in the
	// order of the file. A file that cannot be read now counts by what it
	// held.
	for _, name := range names {
		for _, m := range s.files[name].parsed.objects {
			if first, taken := now[m.key]; taken {
				add(name, m.line, m.key, "defined in %s, line %d, already, which counts: remove one of the two",
					filepath.Join(s.dir, first.file), first.line)
				continue
			}
			now[m.key] = placed{m.obj, name, m.line}
		}
	}

	// What was in force, has gone and may be meant by something bad stays.
	held := map[objectKey]bool{}
	heldFrom := map[string]bool{}
	for key, p := range s.inForce {
		if _, ok := now[key]; !ok && s.meantByFault(key, p.file) {
			now[key] = p
			held[key] = true
			heldFrom[p.file] = true
		}
	}

	for _, name := range names {
		f := s.files[name]
		if f.err != nil {
			kept := ""
			if len(f.parsed.objects) > 0 {
				kept = staysInForce
			}
			add(name, 0, objectKey{}, "%v%s", f.err, kept)
			continue
		}
		for _, bad := range f.parsed.faults {
			kept := ""
			switch {
			case held[bad.key]:
				kept = staysInForce
			case bad.key.name == "" && heldFrom[name]:
				kept = "; the objects read from the file before stay in force"
			}
			add(name, bad.line, bad.key, "%v%s", bad.err, kept)
		}
	}
	s.inForce = now
	return s.deliver(now), problems
}

// meantByFault tells whether a bad document anywhere is about an object that
// was read well from a file before.
func (s *manifestSet) meantByFault(key objectKey, from string) bool {
	for name, f := range s.files {
		if name == from && f.parsed.opaque {
			return true
		}
		for _, bad := range f.parsed.faults {
			if bad.key == key {
				return true
			}
			if bad.loose && bad.key.name == key.name && (bad.key.namespace == key.namespace ||
				bad.key.namespace == "" && key.namespace == corev1.NamespaceDefault) {
				return true
			}
		}
	}
	return false
}

// deliver sorts the objects by kind and adds the namespaces that they live in
// and no manifest defines.
func (s *manifestSet) deliver(now map[objectKey]placed) map[string][]object {
	out := map[string][]object{}
	namespaces := map[string]bool{}
	for key, p := range now {
		out[key.kind] = append(out[key.kind], p.obj)
		if key.namespace != "" {
			namespaces[key.namespace] = true
		}
	}
	i := slices.IndexFunc(s.kinds, func(k kind) bool { return k.name == "Namespace" })
	for name := range namespaces {
		key := objectKey{kind: "Namespace", name: name}
		if _, defined := now[key]; defined {
			continue
		}
		ns := s.kinds[i].empty()
		ns.SetName(name)
		finish(ns, s.kinds[i], key, "")
		out["Namespace"] = append(out["Namespace"], ns)
	}
	return out
}
