package source

import (
	"maps"
	"testing"

	"github.com/cilium/statedb"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

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

// What nobody here reads is not kept: of every kind what its other owners have
// in the metadata, of a pod all but where it is and which ports it names.
func TestTrimDropsTheRest(t *testing.T) {
	om := metav1.ObjectMeta{
		Namespace: "default", Name: "web", UID: "u", ResourceVersion: "7", Generation: 3, GenerateName: "web-",
		Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "{}"},
		ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
		OwnerReferences: []metav1.OwnerReference{{Name: "owner"}}, Finalizers: []string{"finalizer"},
	}
	want := metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u", ResourceVersion: "7", Labels: om.Labels}
	few := want
	few.Labels = nil // of services and slices those that they are read by
	always := corev1.ContainerRestartPolicyAlways
	ports := []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	lacks := corev1.PodCondition{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionFalse, Message: "m", Reason: "r"}
	pod := &corev1.Pod{ObjectMeta: om, Spec: corev1.PodSpec{
		NodeName: "a", HostNetwork: true, ServiceAccountName: "x", Volumes: []corev1.Volume{{Name: "v"}}, Tolerations: []corev1.Toleration{{Key: "k"}},
		InitContainers: []corev1.Container{{Name: "once", Ports: ports}, {Name: "beside", Image: "i", Ports: ports, RestartPolicy: &always}},
		Containers:     []corev1.Container{{Name: "c", Image: "i", Env: []corev1.EnvVar{{Name: "E"}}, Args: []string{"a"}, Ports: ports}, {Name: "no-ports", Image: "i"}},
	}, Status: corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: "10.244.80.65", PodIPs: []corev1.PodIP{{IP: "10.244.80.65"}}, HostIP: "172.31.0.2", Message: "m",
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady}, {Type: lacks.Type, Status: corev1.ConditionTrue}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "c"}},
	}}
	for _, c := range []struct{ got, want any }{
		{trimPod(&corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse}, lacks}}}),
			&corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: lacks.Type, Status: lacks.Status}}}}},
		{trimPod(pod), &corev1.Pod{ObjectMeta: want, Spec: corev1.PodSpec{
			NodeName: "a", HostNetwork: true,
			InitContainers: []corev1.Container{{Name: "beside", Ports: ports, RestartPolicy: &always}},
			Containers:     []corev1.Container{{Name: "c", Ports: ports}},
		}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.244.80.65", PodIPs: pod.Status.PodIPs}}},
		{trimNamespace(&corev1.Namespace{ObjectMeta: om, Status: corev1.NamespaceStatus{Phase: corev1.NamespaceActive}}), &corev1.Namespace{ObjectMeta: want}},
		{trimNode(&corev1.Node{ObjectMeta: om, Status: corev1.NodeStatus{Images: []corev1.ContainerImage{{SizeBytes: 1}}}}), &corev1.Node{ObjectMeta: want}},
		{trimService(&corev1.Service{ObjectMeta: om, Spec: corev1.ServiceSpec{Selector: om.Labels, ClusterIP: "10.98.0.1"}}),
			&corev1.Service{ObjectMeta: few, Spec: corev1.ServiceSpec{ClusterIP: "10.98.0.1"}}},
		{trimSlice(&discoveryv1.EndpointSlice{ObjectMeta: om, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.80.65"}, TargetRef: &corev1.ObjectReference{Name: "web"}}}}),
			&discoveryv1.EndpointSlice{ObjectMeta: few, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.80.65"}}}}},
		{trimPolicy(&networkingv1.NetworkPolicy{ObjectMeta: om}), &networkingv1.NetworkPolicy{ObjectMeta: want}},
		{trimClusterPolicy(&v1beta1.ClusterNetworkPolicy{ObjectMeta: om}), &v1beta1.ClusterNetworkPolicy{ObjectMeta: want}},
		{trimServiceCIDR(&networkingv1.ServiceCIDR{ObjectMeta: om}), &networkingv1.ServiceCIDR{ObjectMeta: want}},
	} {
		if d := cmp.Diff(c.want, c.got); d != "" {
			t.Errorf("%T (-want +got):\n%s", c.got, d)
		}
	}
}
