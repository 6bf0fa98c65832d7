package source

import (
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
