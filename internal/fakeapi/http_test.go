package fakeapi_test

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/podweir/podweir/internal/fakeapi"
)

func start(t *testing.T) (*fakeapi.Server, *kubernetes.Clientset) {
	t.Helper()
	api := fakeapi.New(t)
	c, err := kubernetes.NewForConfig(api.Config())
	if err != nil {
		t.Fatal(err)
	}
	return api, c
}

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

func service(name, ip string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.ServiceSpec{ClusterIP: ip}}
}

func TestGet(t *testing.T) {
	api, c := start(t)
	api.Put(node("a"), node("b"))
	n, err := c.CoreV1().Nodes().Get(t.Context(), "b", metav1.GetOptions{})
	if err != nil || n.Name != "b" || n.UID == "" {
		t.Errorf("get of node b: %q %q, %v", n.Name, n.UID, err)
	}
	if _, err := c.CoreV1().Nodes().Get(t.Context(), "c", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("get of a node that is not there: %v, want NotFound", err)
	}
}

func TestFieldSelectors(t *testing.T) {
	api, c := start(t)
	api.Put(node("a"), node("b"), service("headless", corev1.ClusterIPNone), service("plain", "10.98.0.1"))
	nodes, err := c.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=b"})
	if err != nil || len(nodes.Items) != 1 || nodes.Items[0].Name != "b" {
		t.Errorf("list of node b: %v, %v", nodes, err)
	}
	services, err := c.CoreV1().Services("").List(t.Context(), metav1.ListOptions{FieldSelector: "spec.clusterIP!=None"})
	if err != nil || len(services.Items) != 1 || services.Items[0].Name != "plain" {
		t.Errorf("list of services with an address: %v, %v", services, err)
	}
	for _, bad := range []string{"metadata.name!=b", "metadata.name=b,spec.unschedulable=true", "spec.nodeName=b"} {
		if _, err := c.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{FieldSelector: bad}); !apierrors.IsBadRequest(err) {
			t.Errorf("list with %q: %v, want BadRequest", bad, err)
		}
	}
}

// A watch of one name sees that object's changes alone, those behind others',
// too, and each once.
func TestWatchByName(t *testing.T) {
	api, c := start(t)
	api.Put(node("a"), node("b"))
	list, err := c.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w, err := c.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=b", ResourceVersion: list.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for i := range 3 {
		label := string(rune('x' + i))
		changed := node("b")
		changed.Labels = map[string]string{"step": label}
		api.Put(node("a"), changed, node("a"))
		want = append(want, "b "+label)
		e := <-w.ResultChan()
		n := e.Object.(*corev1.Node)
		got = append(got, n.Name+" "+n.Labels["step"])
	}
	if !slices.Equal(got, want) {
		t.Errorf("the watch saw %v, want %v", got, want)
	}
}
