package fakeapi

import (
	"fmt"
	"net/url"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"
)

// selector is what a request narrows its list or watch to.
type selector struct {
	labels labels.Selector
	fields fields.Selector
}

func selectorOf(q url.Values) (s selector, err error) {
	if s.labels, err = labels.Parse(q.Get("labelSelector")); err != nil {
		return s, fmt.Errorf("labelSelector: %w", err)
	}
	if s.fields, err = fields.ParseSelector(q.Get("fieldSelector")); err != nil {
		return s, fmt.Errorf("fieldSelector: %w", err)
	}
	for _, r := range s.fields.Requirements() {
		switch r.Field {
		case "metadata.name", "metadata.namespace", "spec.clusterIP", "spec.nodeName":
		default:
			return s, fmt.Errorf("fieldSelector: field %q is not supported", r.Field)
		}
	}
	return s, nil
}

func (s selector) matches(o Object) bool {
	if o == nil {
		return false
	}
	if s.labels.Empty() && s.fields.Empty() {
		return true
	}
	f := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
	switch o := o.(type) {
	case *corev1.Service:
		f["spec.clusterIP"] = o.Spec.ClusterIP
	case *corev1.Pod:
		f["spec.nodeName"] = o.Spec.NodeName
	}
	return s.labels.Matches(labels.Set(o.GetLabels())) && s.fields.Matches(f)
}

// events are the changes as a watch with this selector sees them: an object
// that begins to match is added, one that no longer does is deleted.
func (s selector) events(all []event) []event {
	if s.labels.Empty() && s.fields.Empty() {
		return all
	}
	var out []event
	for _, e := range all {
		was := e.old != nil && s.matches(e.old)
		is := e.what != watch.Deleted && s.matches(e.obj.obj)
		switch {
		case is && was:
			e.what = watch.Modified
		case is:
			e.what = watch.Added
		case was:
			e.what = watch.Deleted
		default:
			continue
		}
		out = append(out, e)
	}
	return out
}
