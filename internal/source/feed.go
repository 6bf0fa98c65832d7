package source

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"sync"

	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/podweir/podweir/internal/table"
)

// feed offers the objects of one kind for listing and watching, as the API
// server does: every change has a resource version, a watch goes on from one,
// and a version too old for the log of changes is Gone.
type feed struct {
	kind kind
	keep int // changes to remember

	mu      sync.Mutex
	version uint64             // of the last change
	objects map[string]feedObj // by table key
	log     []feedEvent        // the last changes, oldest first
	dropped uint64             // version of the newest change no longer in log
	changed chan struct{}      // closed at the next change
}

type feedObj struct {
	plain  object // as it came, without a version: to compare with
	served object // a copy with its version; never modified
}

type feedEvent struct {
	version uint64
	event   watch.Event
}

func newFeed(k kind) *feed {
	return &feed{kind: k, keep: 4096, version: 1, objects: map[string]feedObj{}, dropped: 1, changed: make(chan struct{})}
}

// set makes objs all the objects there are. They must not be modified after.
func (f *feed) set(objs []object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.version
	present := make(map[string]bool, len(objs))
	for _, o := range objs {
		key := table.Key(o.GetNamespace(), o.GetName())
		present[key] = true
		old, exists := f.objects[key]
		switch {
		case !exists:
			f.objects[key] = feedObj{o, f.record(watch.Added, o)}
		case !reflect.DeepEqual(old.plain, o):
			f.objects[key] = feedObj{o, f.record(watch.Modified, o)}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(f.objects)) {
		if !present[key] {
			f.record(watch.Deleted, f.objects[key].plain)
			delete(f.objects, key)
		}
	}
	if f.version == before {
		return
	}
	if over := len(f.log) - f.keep; over > 0 {
		f.dropped = f.log[over-1].version
		f.log = slices.Clone(f.log[over:])
	}
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *feed) record(what watch.EventType, o object) object {
	f.version++
	served := o.DeepCopyObject().(object)
	served.SetResourceVersion(strconv.FormatUint(f.version, 10))
	f.log = append(f.log, feedEvent{f.version, watch.Event{Type: what, Object: served}})
	return served
}

// snapshot lists the objects by key. f.mu is held.
func (f *feed) snapshot() []runtime.Object {
	out := make([]runtime.Object, 0, len(f.objects))
	for _, key := range slices.Sorted(maps.Keys(f.objects)) {
		out = append(out, f.objects[key].served)
	}
	return out
}

func (f *feed) List(opts metav1.ListOptions) (runtime.Object, error) {
	return f.ListWithContext(context.Background(), opts)
}

func (f *feed) ListWithContext(context.Context, metav1.ListOptions) (runtime.Object, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kind.list(f.snapshot(), strconv.FormatUint(f.version, 10)), nil
}

func (f *feed) Watch(opts metav1.ListOptions) (watch.Interface, error) {
	return f.WatchWithContext(context.Background(), opts)
}

// WatchWithContext watches from a version on. Without one, or when the initial
// events are asked for, it begins with all objects as Added events; their end
// is marked by a bookmark when asked for.
func (f *feed) WatchWithContext(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var first []watch.Event
	from := f.version
	initial := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	if initial || opts.ResourceVersion == "" || opts.ResourceVersion == "0" {
		for _, o := range f.snapshot() {
			first = append(first, watch.Event{Type: watch.Added, Object: o})
		}
		if initial && opts.AllowWatchBookmarks {
			end := f.kind.empty()
			end.SetResourceVersion(strconv.FormatUint(f.version, 10))
			end.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
			first = append(first, watch.Event{Type: watch.Bookmark, Object: end})
		}
	} else {
		v, err := strconv.ParseUint(opts.ResourceVersion, 10, 64)
		if err != nil {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("resourceVersion %q is not a number", opts.ResourceVersion))
		}
		from = v
		if from < f.dropped {
			return nil, apierrors.NewResourceExpired(f.tooOld(from))
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &feedWatch{result: make(chan watch.Event), cancel: cancel}
	go w.run(ctx, f, first, from)
	return w, nil
}

func (f *feed) tooOld(version uint64) string {
	return fmt.Sprintf("the changes of %s since version %d are forgotten: list them again", f.kind.resource, version)
}

// after returns the changes after a version and a channel that is closed when
// there are more. ok is false if some of them are forgotten.
func (f *feed) after(version uint64) (events []feedEvent, more <-chan struct{}, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if version < f.dropped {
		return nil, nil, false
	}
	i, _ := slices.BinarySearchFunc(f.log, version+1, func(e feedEvent, v uint64) int {
		switch {
		case e.version < v:
			return -1
		case e.version > v:
			return 1
		}
		return 0
	})
	return slices.Clone(f.log[i:]), f.changed, true
}

type feedWatch struct {
	result chan watch.Event
	cancel context.CancelFunc
}

func (w *feedWatch) Stop()                          { w.cancel() }
func (w *feedWatch) ResultChan() <-chan watch.Event { return w.result }

func (w *feedWatch) run(ctx context.Context, f *feed, first []watch.Event, from uint64) {
	defer w.cancel()
	defer close(w.result)
	send := func(e watch.Event) bool {
		select {
		case w.result <- e:
			return true
		case <-ctx.Done():
			return false
		}
	}
	for _, e := range first {
		if !send(e) {
			return
		}
	}
	for {
		events, more, ok := f.after(from)
		if !ok {
			status := apierrors.NewResourceExpired(f.tooOld(from)).Status()
			send(watch.Event{Type: watch.Error, Object: &status})
			return
		}
		for _, e := range events {
			if !send(e.event) {
				return
			}
			from = e.version
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
			return
		}
	}
}
