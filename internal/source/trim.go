package source

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"

	"github.com/podweir/podweir/internal/health"
)

// The trim functions make the object that goes into a table: a new one that
// carries what the dataplane reads and shares the parts it keeps. Trimming
// twice changes nothing.

func trimMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	out := metav1.ObjectMeta{
		Name:              m.Name,
		Namespace:         m.Namespace,
		UID:               m.UID,
		ResourceVersion:   m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp,
		DeletionTimestamp: m.DeletionTimestamp,
		Labels:            m.Labels,
	}
	for name, value := range m.Annotations {
		if strings.HasPrefix(name, "podweir.io/") || strings.HasPrefix(name, "service.kubernetes.io/") {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[name] = value
		}
	}
	return out
}

func trimPod(p *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{ObjectMeta: trimMeta(p.ObjectMeta)}
	out.Spec.NodeName = p.Spec.NodeName
	out.Spec.HostNetwork = p.Spec.HostNetwork
	for _, c := range p.Spec.InitContainers {
		// Of these, the ones that go on running beside the others.
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways && len(c.Ports) > 0 {
			out.Spec.InitContainers = append(out.Spec.InitContainers,
				corev1.Container{Name: c.Name, Ports: c.Ports, RestartPolicy: c.RestartPolicy})
		}
	}
	for _, c := range p.Spec.Containers {
		if len(c.Ports) > 0 {
			out.Spec.Containers = append(out.Spec.Containers, corev1.Container{Name: c.Name, Ports: c.Ports})
		}
	}
	out.Status.Phase = p.Status.Phase
	out.Status.PodIP = p.Status.PodIP
	out.Status.PodIPs = p.Status.PodIPs
	for _, c := range p.Status.Conditions {
		// Hardly a pod has it, and others are read by nobody.
		if c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionFalse {
			out.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return out
}

func trimNamespace(n *corev1.Namespace) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: trimMeta(n.ObjectMeta)}
}

func trimNode(n *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: trimMeta(n.ObjectMeta)}
	out.Spec.PodCIDR = n.Spec.PodCIDR
	out.Spec.PodCIDRs = n.Spec.PodCIDRs
	for _, t := range n.Spec.Taints {
		if t.Key == health.TaintToBeDeleted {
			out.Spec.Taints = []corev1.Taint{{Key: t.Key, Effect: t.Effect}}
		}
	}
	out.Status.Addresses = n.Status.Addresses
	return out
}

// trimLabels keeps the labels that services and slices are read by.
func trimLabels(all map[string]string) (out map[string]string) {
	for _, name := range []string{discoveryv1.LabelServiceName, "service.kubernetes.io/service-proxy-name", corev1.IsHeadlessService} {
		if value, ok := all[name]; ok {
			if out == nil {
				out = make(map[string]string, 1)
			}
			out[name] = value
		}
	}
	return out
}

func trimService(s *corev1.Service) *corev1.Service {
	out := &corev1.Service{ObjectMeta: trimMeta(s.ObjectMeta), Spec: s.Spec}
	out.Labels = trimLabels(s.Labels)
	out.Spec.Selector = nil
	out.Status.LoadBalancer = s.Status.LoadBalancer
	return out
}

func trimSlice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{ObjectMeta: trimMeta(s.ObjectMeta), AddressType: s.AddressType, Ports: s.Ports}
	out.Labels = trimLabels(s.Labels)
	if at, ok := s.Annotations[corev1.EndpointsLastChangeTriggerTime]; ok {
		if out.Annotations == nil {
			out.Annotations = map[string]string{}
		}
		out.Annotations[corev1.EndpointsLastChangeTriggerTime] = at
	}
	if s.Endpoints != nil {
		out.Endpoints = make([]discoveryv1.Endpoint, len(s.Endpoints))
	}
	// Endpoints share the values of their conditions, which nobody writes.
	yes, no := true, false
	share := func(p *bool) *bool {
		switch {
		case p == nil:
			return nil
		case *p:
			return &yes
		}
		return &no
	}
	for i, e := range s.Endpoints {
		e.DeprecatedTopology, e.TargetRef, e.Hostname = nil, nil, nil
		c := &e.Conditions
		c.Ready, c.Serving, c.Terminating = share(c.Ready), share(c.Serving), share(c.Terminating)
		out.Endpoints[i] = e
	}
	return out
}

func trimPolicy(p *networkingv1.NetworkPolicy) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{ObjectMeta: trimMeta(p.ObjectMeta), Spec: p.Spec}
}

func trimClusterPolicy(p *v1beta1.ClusterNetworkPolicy) *v1beta1.ClusterNetworkPolicy {
	return &v1beta1.ClusterNetworkPolicy{ObjectMeta: trimMeta(p.ObjectMeta), Spec: p.Spec}
}

func trimServiceCIDR(s *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: trimMeta(s.ObjectMeta), Spec: s.Spec}
}
