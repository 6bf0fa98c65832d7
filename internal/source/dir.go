package source

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/client-go/tools/cache"

	"github.com/podweir/podweir/internal/table"
)

// timing says when a change in the directory is read.
type timing struct {
	quiet  time.Duration // after the last event of a burst
	bound  time.Duration // after the first event at the latest
	relist time.Duration // without any event
}

func defaultTiming() timing {
	return timing{quiet: 50 * time.Millisecond, bound: 500 * time.Millisecond, relist: 30 * time.Second}
}

// Owner names of the problems that the sources report.
const (
	dirOwner = "manifests"
	apiOwner = "api"
)

type dirSource struct {
	dir    string // absolute
	tables *table.Tables
	in     table.Initializers
	log    *slog.Logger
	timing timing
	set    *manifestSet
	feeds  map[string]*feed
}

// NewDir returns a source that reads the manifests of a directory. See the
// package for what is read and what a bad manifest does. The directory must
// exist when the agent starts; it may go and come back later.
func NewDir(dir string, t *table.Tables, log *slog.Logger) (Source, error) {
	return newDir(dir, t, log, defaultTiming())
}

func newDir(dir string, t *table.Tables, log *slog.Logger, timing timing) (*dirSource, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("manifest directory %s: %w", dir, err)
	}
	if _, err := os.ReadDir(abs); err != nil {
		return nil, fmt.Errorf("manifest directory %s: %w: make a directory of Kubernetes manifests that the agent can read", dir, cause(err))
	}
	in, err := t.RegisterSource("the manifests in " + dir)
	if err != nil {
		return nil, err
	}
	d := &dirSource{dir: abs, tables: t, in: in, log: log, timing: timing,
		set: newManifestSet(abs), feeds: map[string]*feed{}}
	for _, k := range kinds() {
		d.feeds[k.name] = newFeed(k)
	}
	return d, nil
}

func (d *dirSource) Run(ctx context.Context) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		// Without events the slow re-list still works.
		d.log.Warn("manifest directory is not watched, changes take longer",
			"dir", d.dir, "interval", d.timing.relist, "error", err, "wayOut", "raise sysctl fs.inotify.max_user_instances")
		w = &fsnotify.Watcher{}
	} else {
		defer w.Close()
	}
	follow := newFollower(d.dir, w)
	d.scan(follow) // before anything is listed, so that the first list is whole

	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	lws := map[string]cache.ListerWatcher{}
	for name, f := range d.feeds {
		lws[name] = f
	}
	wg.Go(func() { runReflectors(ctx, lws, d.tables, d.in, d.log) })

	d.loop(ctx, w, follow)
	return nil
}

// loop reads the directory again when a burst of events is over.
func (d *dirSource) loop(ctx context.Context, w *fsnotify.Watcher, follow *follower) {
	relist := time.NewTicker(d.timing.relist)
	defer relist.Stop()
	settle := time.NewTimer(0)
	settle.Stop()
	var last time.Time // the latest time for the burst; zero outside of one
	stir := func() {
		now := time.Now()
		if last.IsZero() {
			last = now.Add(d.timing.bound)
		}
		settle.Reset(min(d.timing.quiet, max(0, last.Sub(now))))
	}
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-w.Events:
			if follow.concerns(e.Name) {
				stir()
			}
		case err := <-w.Errors:
			// Most likely too many events at once: some are lost.
			d.log.Warn("events of the manifest directory were lost, reading it again", "dir", d.dir, "error", err)
			stir()
		case <-settle.C:
			last = time.Time{}
			d.scan(follow)
		case <-relist.C:
			d.scan(follow)
		}
	}
}

// scan watches what there is to watch, reads the directory and publishes what
// it holds.
func (d *dirSource) scan(follow *follower) {
	unwatched := follow.update()
	objects, problems := d.set.scan()
	if unwatched != nil {
		problems = append(problems, table.Problem{File: d.dir, Err: fmt.Sprintf(
			"not watched, changes are seen every %s only: %v: raise sysctl fs.inotify.max_user_watches", d.timing.relist, unwatched)})
	}
	for _, k := range d.set.kinds {
		d.feeds[k.name].set(objects[k.name])
	}
	added, gone := d.tables.SetProblems(dirOwner, problems)
	for _, p := range added {
		d.log.Error("bad manifest", "file", p.File, "line", p.Line, "object", p.Object, "error", p.Err)
	}
	for _, p := range gone {
		d.log.Info("manifest problem is gone", "file", p.File, "object", p.Object, "was", p.Err)
	}
}
