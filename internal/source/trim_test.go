package source

import (
	"maps"
	"testing"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/podweir/podweir/internal/health"
)

// S19: what health and its metrics read is kept, and nothing that changes
// beside it.
func TestTrimKeepsWhatHealthReads(t *testing.T) {
	when := map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-03-01T12:00:00Z"}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Annotations: maps.Clone(when)}}
	slice.Annotations["other"] = "x"
	if got := trimSlice(trimSlice(slice)).Annotations; !maps.Equal(got, when) {
		t.Errorf("annotations of a slice: %v", got)
	}
	if got := trimSlice(&discoveryv1.EndpointSlice{}).Annotations; got != nil {
		t.Errorf("annotations from nowhere: %v", got)
	}
	now := metav1.Now()
	node := &corev1.Node{}
	node.Spec.Taints = []corev1.Taint{
		{Key: "node.kubernetes.io/unreachable", Effect: corev1.TaintEffectNoExecute, TimeAdded: &now},
		{Key: health.TaintToBeDeleted, Value: "1772366400", Effect: corev1.TaintEffectNoSchedule},
	}
	got := trimNode(trimNode(node)).Spec.Taints
	if len(got) != 1 || got[0].Key != health.TaintToBeDeleted || got[0].Value != "" {
		t.Errorf("taints of a node: %+v", got)
	}
}

// An object of a first list that streams in is trimmed once, one that comes
// otherwise, too.
func TestTrimmedOnce(t *testing.T) {
	tables := newTables(t)
	trims := 0
	s := newStore(tables, tables.Slices, func(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		trims++
		return trimSlice(s)
	}, func(statedb.WriteTxn) {})
	transform := s.(cache.TransformingStore).Transformer()
	streamed, err := transform(slice("web-1", "web", "10.244.80.66"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Replace([]any{streamed, slice("web-2", "web", "10.244.80.67")}, "1"); err != nil {
		t.Fatal(err)
	}
	if trims != 2 {
		t.Errorf("%d trims of two objects", trims)
	}
	if err := s.Update(slice("web-1", "other")); err != nil {
		t.Fatal(err)
	}
	if trims != 3 {
		t.Errorf("%d trims after an update", trims)
	}
}
