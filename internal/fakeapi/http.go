package fakeapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

func uid(n uint64) types.UID {
	return types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012x", n))
}

func (r *resource) gvk() schema.GroupVersionKind {
	return schema.FromAPIVersionAndKind(r.apiVersion, r.kind)
}

// find takes the resource out of a path such as /api/v1/pods or
// /apis/discovery.k8s.io/v1/endpointslices.
func (s *Server) find(path string) (string, *resource) {
	for name, r := range s.resources {
		prefix := "/apis/" + r.apiVersion + "/"
		if !strings.Contains(r.apiVersion, "/") {
			prefix = "/api/" + r.apiVersion + "/"
		}
		if path == prefix+name {
			return name, r
		}
	}
	return "", nil
}

// discovery is what the server says of a group (/apis/GROUP) or of one of its
// versions; nil where it has nothing of that name. A kind that is missing on
// purpose is not named.
func (s *Server) discovery(path string) any {
	path, ok := strings.CutPrefix(path, "/apis/")
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		close(s.changed)
		s.changed = make(chan struct{})
	}()
	group := metav1.APIGroup{TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}, Name: path}
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: path}
	for _, name := range slices.Sorted(maps.Keys(s.resources)) {
		r := s.resources[name]
		gvk := r.gvk()
		if gvk.Group == path {
			r.looks++
		}
		if r.fail == http.StatusNotFound {
			continue
		}
		if v := (metav1.GroupVersionForDiscovery{GroupVersion: r.apiVersion, Version: gvk.Version}); gvk.Group == path && !slices.Contains(group.Versions, v) {
			group.Versions = append(group.Versions, v)
		}
		if r.apiVersion == path {
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: name, Kind: r.kind, Verbs: metav1.Verbs{"list", "watch"}})
		}
	}
	switch {
	case len(group.Versions) > 0:
		group.PreferredVersion = group.Versions[0]
		return group
	case len(list.APIResources) > 0:
		return list
	}
	return nil
}

// ServeHTTP answers lists and watches over all namespaces, and discovery.
func (s *Server) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if d := s.discovery(req.URL.Path); d != nil && req.Method == http.MethodGet {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(d) // the client may have gone
		return
	}
	name, r := s.find(req.URL.Path)
	q := req.URL.Query()
	isWatch := q.Get("watch") == "true" || q.Get("watch") == "1"
	initial := isWatch && q.Get("sendInitialEvents") == "true"

	fail := 0
	if r == nil || req.Method != http.MethodGet {
		fail = http.StatusNotFound
	} else {
		// What is held back waits here; what fails does so at once.
		held := func() bool {
			if fail = r.fail; fail != 0 {
				return false
			}
			if initial || !isWatch {
				return r.holdLists
			}
			return r.holdWatches
		}
		if !s.wait(req, held) {
			return
		}
	}
	sel, err := selectorOf(q)
	switch {
	case err != nil:
		fmtStatus(w, apierrors.NewBadRequest(err.Error()))
	case fail == http.StatusNotFound:
		fmtStatus(w, apierrors.NewGenericServerResponse(http.StatusNotFound, "get", schema.GroupResource{Resource: name}, "", "the server could not find the requested resource", 0, true))
	case fail == http.StatusForbidden:
		fmtStatus(w, apierrors.NewForbidden(schema.GroupResource{Resource: name}, "", fmt.Errorf("not allowed")))
	case fail != 0:
		fmtStatus(w, apierrors.NewGenericServerResponse(fail, "get", schema.GroupResource{Resource: name}, "", "told to fail", 0, true))
	case isWatch:
		s.watch(w, req, r, sel, initial)
	default:
		s.list(w, req, r, sel)
	}
}

// wait returns when a condition, asked under the lock, is false; it returns
// false if the request ended first.
func (s *Server) wait(req *http.Request, held func() bool) bool {
	for {
		s.mu.Lock()
		waiting := held()
		changed := s.changed
		s.mu.Unlock()
		if !waiting {
			return true
		}
		select {
		case <-changed:
		case <-req.Context().Done():
			return false
		}
	}
}

func fmtStatus(w http.ResponseWriter, err *apierrors.StatusError) {
	st := err.Status()
	st.Kind, st.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(st.Code))
	_ = json.NewEncoder(w).Encode(st) // the client may have gone
}

func (r *resource) snapshot(sel selector) []*served {
	out := make([]*served, 0, len(r.objects))
	for _, key := range slices.Sorted(maps.Keys(r.objects)) {
		if o := r.objects[key]; sel.matches(o.obj) {
			out = append(out, o)
		}
	}
	return out
}

// list answers with all objects, or with a first page if the rest is held.
// Nothing may change between two pages.
func (s *Server) list(w http.ResponseWriter, req *http.Request, r *resource, sel selector) {
	first := 0
	if from := req.URL.Query().Get("continue"); from != "" {
		if !s.wait(req, func() bool { return r.part > 0 }) {
			return
		}
		var err error
		if first, err = strconv.Atoi(from); err != nil {
			fmtStatus(w, apierrors.NewBadRequest("continue "+from))
			return
		}
	}
	s.mu.Lock()
	f := formatOf(req, s.protobuf && !r.custom)
	meta := metav1.ListMeta{ResourceVersion: strconv.FormatUint(s.version, 10)}
	objs := r.snapshot(sel)[first:]
	part := first == 0 && r.part > 0 && r.part < len(objs)
	if part {
		objs = objs[:r.part]
		meta.Continue = strconv.Itoa(r.part)
	}
	s.mu.Unlock()
	body, err := f.list(r, objs, meta)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", f.contentType)
	_, _ = w.Write(body) // the client may have gone
	s.update(func() {
		if part {
			r.begun++
		} else {
			r.lists++
		}
	})
}

func (s *Server) watch(w http.ResponseWriter, req *http.Request, r *resource, sel selector, initial bool) {
	q := req.URL.Query()
	rv := q.Get("resourceVersion")

	s.mu.Lock()
	if initial && !s.watchList {
		s.mu.Unlock()
		fmtStatus(w, apierrors.NewInvalid(r.gvk().GroupKind(), "", nil))
		return
	}
	f := formatOf(req, s.protobuf && !r.custom)
	from := s.version
	var first []event
	if initial || rv == "" || rv == "0" {
		for _, o := range r.snapshot(sel) {
			first = append(first, event{what: watch.Added, obj: o})
		}
		if initial && q.Get("allowWatchBookmarks") == "true" {
			first = append(first, event{what: watch.Bookmark, obj: &served{obj: s.bookmark(r)}})
		}
	} else {
		v, err := strconv.ParseUint(rv, 10, 64)
		if err != nil {
			s.mu.Unlock()
			fmtStatus(w, apierrors.NewBadRequest("resourceVersion "+rv))
			return
		}
		from = v
	}
	cut, part := r.cut, r.part
	s.mu.Unlock()

	s.update(func() {
		if !initial {
			r.watches++
		}
		r.open++
	})
	defer s.update(func() { r.open-- })
	w.Header().Set("Content-Type", f.streamType)
	w.WriteHeader(http.StatusOK)
	flush := w.(http.Flusher).Flush
	flush()
	// What there is at once goes out together.
	send := func(events ...event) bool {
		if len(events) == 0 {
			return true
		}
		defer flush()
		for _, e := range events {
			obj, err := e.obj.encoded(f)
			if err != nil {
				panic(fmt.Sprintf("fakeapi: %s %s: %v", r.kind, e.obj.obj.GetName(), err))
			}
			frame, err := f.frame(e.what, obj)
			if err == nil {
				_, err = w.Write(frame)
			}
			if err != nil {
				return false
			}
		}
		return true
	}
	if initial && part > 0 && part < len(first) {
		if !send(first[:part]...) {
			return
		}
		first = first[part:]
		s.update(func() { r.begun++ })
		if !s.wait(req, func() bool { return r.part > 0 }) {
			return
		}
	}
	if !send(first...) {
		return
	}
	if initial {
		s.update(func() { r.lists++ })
	}
	for {
		s.mu.Lock()
		gone := from < r.dropped
		var events []event
		if !r.holdEvents && !gone {
			// Only the end of a log that grows is new.
			at := len(r.log)
			for at > 0 && r.log[at-1].version > from {
				at--
			}
			events = slices.Clone(r.log[at:])
		}
		changed := s.changed
		s.mu.Unlock()
		if gone {
			st := apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d", from)).Status()
			st.Kind, st.APIVersion = "Status", "v1"
			if obj, err := f.encode(&st); err == nil {
				if frame, err := f.frame(watch.Error, obj); err == nil {
					_, _ = w.Write(frame)
					flush()
				}
			}
			return
		}
		if len(events) > 0 {
			if !send(sel.events(events)...) {
				return
			}
			from = events[len(events)-1].version
		}
		select {
		case <-changed:
		case <-cut:
			// Not an orderly end: the connection breaks.
			panic(http.ErrAbortHandler)
		case <-req.Context().Done():
			return
		}
	}
}

func (s *Server) bookmark(r *resource) Object {
	return &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: r.apiVersion, Kind: r.kind},
		ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.FormatUint(s.version, 10),
			Annotations:     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		},
	}
}
