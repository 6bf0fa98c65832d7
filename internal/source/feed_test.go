package source

import (
	"fmt"
	"syscall"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	corev1 "k8s.io/api/core/v1"
)

func mkfifo(path string) error { return syscall.Mkfifo(path, 0o600) }

func podFeed(t *testing.T) *feed {
	t.Helper()
	for _, k := range kinds() {
		if k.name == "Pod" {
			return newFeed(k)
		}
	}
	t.Fatal("no pods")
	return nil
}

func feedPod(name, app string) object {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": app}}}
}

func next(t *testing.T, w watch.Interface) string {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			return "end"
		}
		if e.Type == watch.Error {
			return "ERROR " + string(apierrors.ReasonForError(apierrors.FromObject(e.Object)))
		}
		o := e.Object.(*corev1.Pod)
		return fmt.Sprintf("%s %s=%s @%s", e.Type, o.Name, o.Labels["app"], o.ResourceVersion)
	case <-within(t).Done():
		t.Fatal("no event")
		return ""
	}
}

func TestFeed(t *testing.T) {
	f := podFeed(t)
	f.set([]object{feedPod("a", "1"), feedPod("b", "1")})
	list, err := f.List(metav1.ListOptions{})
	must(t, err)
	pods := list.(*corev1.PodList)
	if len(pods.Items) != 2 || pods.ResourceVersion != "3" {
		t.Fatalf("list %+v", pods)
	}

	// A change between list and watch is not lost; an unchanged set is none.
	f.set([]object{feedPod("a", "2"), feedPod("c", "1")})
	f.set([]object{feedPod("a", "2"), feedPod("c", "1")})
	w, err := f.Watch(metav1.ListOptions{ResourceVersion: pods.ResourceVersion})
	must(t, err)
	for _, want := range []string{"MODIFIED a=2 @4", "ADDED c=1 @5", "DELETED b=1 @6"} {
		if got := next(t, w); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	f.set(nil)
	if got := next(t, w); got != "DELETED a=2 @7" {
		t.Errorf("live: %s", got)
	}
	w.Stop()
	for got := ""; got != "end"; {
		got = next(t, w)
	}

	// Streaming a list ends in a bookmark.
	f.set([]object{feedPod("d", "1")})
	yes := true
	w, err = f.Watch(metav1.ListOptions{SendInitialEvents: &yes, AllowWatchBookmarks: true})
	must(t, err)
	for _, want := range []string{"ADDED d=1 @9", "BOOKMARK = @9"} {
		if got := next(t, w); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	w.Stop()
}

func TestFeedForgets(t *testing.T) {
	f := podFeed(t)
	f.keep = 3
	slow, err := f.Watch(metav1.ListOptions{})
	must(t, err)
	for i := range 10 {
		f.set([]object{feedPod("a", fmt.Sprint(i))})
	}
	if _, err := f.Watch(metav1.ListOptions{ResourceVersion: "2"}); !apierrors.IsResourceExpired(err) {
		t.Errorf("a watch from a forgotten version: %v", err)
	}
	w, err := f.Watch(metav1.ListOptions{ResourceVersion: "8"})
	must(t, err)
	if got := next(t, w); got != "MODIFIED a=7 @9" {
		t.Errorf("the oldest change still known: %s", got)
	}
	w.Stop()
	// A reader that is too slow is told so, whatever it saw before.
	for got := next(t, slow); got != "ERROR Expired"; got = next(t, slow) {
		if got == "end" {
			t.Fatal("the watch ended without a reason")
		}
		if got == "MODIFIED a=9 @11" {
			break // it kept up after all
		}
	}
	slow.Stop()
}
