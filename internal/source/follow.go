package source

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"maps"

	"github.com/fsnotify/fsnotify"
)

// follower keeps the file watches of a manifest directory right while
// directories and symbolic links are replaced under it.
type follower struct {
	dir      string
	watcher  *fsnotify.Watcher
	watched  map[string]inode // directories with a watch
	real     string           // the directory behind all links, "" if none
	concern  map[string]bool  // paths outside of it that matter
	disabled bool             // there is no watcher
}

type inode struct{ dev, ino uint64 }

func newFollower(dir string, w *fsnotify.Watcher) *follower {
	return &follower{dir: dir, watcher: w, watched: map[string]inode{}, disabled: w.Events == nil}
}

// concerns tells whether an event on a path may change what the directory
// holds. The directories around it are watched for its own name alone.
func (f *follower) concerns(path string) bool {
	return f.concern[path] || (f.real != "" && filepath.Dir(path) == f.real)
}

// update puts watches on the directory, on the directories that hold the links
// leading to it, and on those its own links lead to. It goes on until nothing
// moved in between, so that no change stays unseen. The error is the first
// watch that could not be made.
func (f *follower) update() error {
	if f.disabled {
		return nil
	}
	for range 10 {
		dirs := f.survey()
		changed, err := f.apply(dirs)
		if err != nil || !changed {
			return err
		}
	}
	return errors.New("it is replaced again and again while looking")
}

// survey finds the directories to watch.
func (f *follower) survey() map[string]bool {
	dirs := map[string]bool{}
	f.concern = map[string]bool{}
	note := func(paths []string) {
		for _, p := range paths {
			f.concern[p] = true
			dirs[filepath.Dir(p)] = true
		}
	}
	real, passed, err := walkLinks(f.dir)
	note(passed)
	if err != nil {
		f.real = ""
		return dirs
	}
	f.real = real
	dirs[real] = true
	entries, err := os.ReadDir(real)
	if err != nil {
		return dirs
	}
	for _, e := range entries {
		if isManifest(e.Name()) && e.Type()&fs.ModeSymlink != 0 {
			_, passed, _ := walkLinks(filepath.Join(real, e.Name()))
			note(passed)
		}
	}
	return dirs
}

// apply makes the set of watches equal to dirs. A directory that was replaced
// by another of the same name is watched anew.
func (f *follower) apply(dirs map[string]bool) (changed bool, first error) {
	alive := f.watcher.WatchList()
	for dir := range f.watched {
		if !dirs[dir] {
			f.drop(dir)
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		id, err := inodeOf(dir)
		if err != nil {
			f.drop(dir)
			continue
		}
		if old, ok := f.watched[dir]; ok && old == id && slices.Contains(alive, dir) {
			continue
		}
		f.drop(dir)
		err = f.watcher.Add(dir)
		if errors.Is(err, fs.ErrNotExist) {
			changed = true
			continue
		}
		if err != nil {
			if first == nil {
				first = fmt.Errorf("watch %s: %w", dir, err)
			}
			continue
		}
		f.watched[dir] = id
		changed = true
	}
	return changed, first
}

func (f *follower) drop(dir string) {
	if _, ok := f.watched[dir]; ok {
		delete(f.watched, dir)
		// It fails when the watch went with its directory: as wanted.
		_ = f.watcher.Remove(dir)
	}
}

func inodeOf(path string) (inode, error) {
	info, err := os.Stat(path)
	if err != nil {
		return inode{}, err
	}
	st := info.Sys().(*syscall.Stat_t)
	return inode{uint64(st.Dev), st.Ino}, nil
}

// walkLinks follows an absolute path through all its symbolic links. It
// returns where that ends, and every path whose replacement would change it:
// the links on the way and the end itself. Where something is missing, that is
// the last of them, and an error.
func walkLinks(path string) (end string, passed []string, err error) {
	rest := strings.Split(strings.Trim(filepath.Clean(path), "/"), "/")
	at := "/"
	for hops := 0; len(rest) > 0; {
		next := rest[0]
		rest = rest[1:]
		switch next {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		p := filepath.Join(at, next)
		info, err := os.Lstat(p)
		if err != nil {
			return "", append(passed, p), err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = p
			continue
		}
		passed = append(passed, p)
		if hops++; hops > 40 {
			return "", passed, fmt.Errorf("%s: too many symbolic links", path)
		}
		target, err := os.Readlink(p)
		if err != nil {
			return "", passed, err
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(strings.Trim(target, "/"), "/"), rest...)
	}
	return at, append(passed, at), nil
}
