package fakeapi

import (
	"net/url"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

func labelled(name, app string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{"app": app}},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.98.0.1"},
	}
}

func headless(name string) *corev1.Service {
	s := labelled(name, "web")
	s.Spec.ClusterIP = corev1.ClusterIPNone
	return s
}

func TestSelectedLists(t *testing.T) {
	s := New(t)
	s.Put(labelled("a", "web"), labelled("b", "db"), headless("c"))
	client, err := kubernetes.NewForConfig(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		opts metav1.ListOptions
		want []string
	}{
		{metav1.ListOptions{}, []string{"a", "b", "c"}},
		{metav1.ListOptions{LabelSelector: "app=web"}, []string{"a", "c"}},
		{metav1.ListOptions{LabelSelector: "!app"}, nil},
		{metav1.ListOptions{FieldSelector: "metadata.name=b"}, []string{"b"}},
		{metav1.ListOptions{FieldSelector: "spec.clusterIP!=None"}, []string{"a", "b"}},
		{metav1.ListOptions{LabelSelector: "app=web", FieldSelector: "spec.clusterIP!=None"}, []string{"a"}},
	} {
		list, err := client.CoreV1().Services("").List(t.Context(), c.opts)
		if err != nil {
			t.Fatalf("%+v: %v", c.opts, err)
		}
		var got []string
		for _, o := range list.Items {
			got = append(got, o.Name)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.opts, got, c.want)
		}
	}
	if _, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{FieldSelector: "spec.type=NodePort"}); err == nil {
		t.Error("a field selector that is not supported selects everything")
	}
}

// TestSelectedEvents is what a watch with a selector is told of changes.
func TestSelectedEvents(t *testing.T) {
	web, db := labelled("a", "web"), labelled("a", "db")
	for _, c := range []struct {
		name     string
		what     watch.EventType
		old, now Object
		want     watch.EventType
	}{
		{"matches from the start", watch.Added, nil, web, watch.Added},
		{"never matches", watch.Modified, db, db, ""},
		{"goes on matching", watch.Modified, web, web, watch.Modified},
		{"begins to match", watch.Modified, db, web, watch.Added},
		{"no longer matches", watch.Modified, web, db, watch.Deleted},
		{"is deleted", watch.Deleted, web, web, watch.Deleted},
		{"is deleted unseen", watch.Deleted, db, db, ""},
	} {
		sel, err := selectorOf(url.Values{"labelSelector": {"app=web"}})
		if err != nil {
			t.Fatal(err)
		}
		got := sel.events([]event{{what: c.what, obj: &served{obj: c.now}, old: c.old}})
		switch {
		case c.want == "" && len(got) != 0, c.want != "" && (len(got) != 1 || got[0].what != c.want):
			t.Errorf("%s: %v, want %q", c.name, got, c.want)
		}
	}
}
