//go:build realcluster

package e2e

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/podweir/podweir/test/tools/probe"
)

// S33: another range of services, while everything runs.
func (s *servicesWorld) serviceCIDR(w *world) {
	const cidr, vip = "10.97.0.0/24", "10.97.0.77"
	ranges := w.api.NetworkingV1().ServiceCIDRs()
	_, err := ranges.Create(w.ctx, &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: w.ns}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}}}, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() {
		if err := ranges.Delete(background(w), w.ns, metav1.DeleteOptions{}); err != nil {
			w.Error(err)
		}
	})
	w.eventually("a service of the new range", func() error {
		single := corev1.IPFamilyPolicySingleStack
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "new-range"}, Spec: corev1.ServiceSpec{
			ClusterIP: vip, IPFamilyPolicy: &single, Selector: map[string]string{"app": "web"},
			Ports: []corev1.ServicePort{{Name: "tcp", Port: 80, TargetPort: intstr.FromInt32(port)}, {Name: "udp", Port: 80, TargetPort: intstr.FromInt32(port), Protocol: corev1.ProtocolUDP}},
		}}
		_, err := w.api.CoreV1().Services(w.ns).Create(w.ctx, s, metav1.CreateOptions{})
		return err
	})
	w.Cleanup(func() {
		if err := w.api.CoreV1().Services(w.ns).Delete(background(w), "new-range", metav1.DeleteOptions{}); err != nil {
			w.Error(err)
		}
	})
	for _, from := range s.sources(w) {
		w.first(from, at(vip, 80))
		for _, proto := range []string{"tcp", "udp"} {
			callsAll(w, from, proto, at(vip, 80), len(s.web))
		}
		w.eventually("the rest of the range is nobody's", func() error { return w.fails(from, "tcp", "10.97.0.200:80", probe.Timeout) })
		if err := w.fails(from, "udp", at(vip, 81), probe.Refused); err != nil {
			w.Error(err)
		}
	}
}

// A service goes from type to type, and its addresses come and go with it.
func (s *servicesWorld) types(w *world) {
	from, n := inPod(s.web[w.nodes[1].name]), w.nodes[0]
	svc := w.service("types", "", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "web.example"}
	})
	svc = w.edit(svc.Name, func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName, s.Spec.Selector = corev1.ServiceTypeClusterIP, "", map[string]string{"app": "web"}
		s.Spec.Ports = []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(port)}}
	})
	vip := at(svc.Spec.ClusterIP, 80)
	w.first(from, vip)
	svc = w.edit(svc.Name, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	nodePort := at(n.ips[0], svc.Spec.Ports[0].NodePort)
	w.first(outside, nodePort)
	w.edit(svc.Name, func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromInt32(1) })
	w.eventually("another target port", func() error { return w.fails(from, "tcp", vip, probe.Refused) })
	w.edit(svc.Name, func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromInt32(port) })
	w.first(from, vip)
	w.edit(svc.Name, func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeClusterIP
		s.Spec.Ports[0].NodePort = 0
	})
	w.eventually("no NodePort any more", func() error { return w.fails(outside, "tcp", nodePort, probe.Refused) })
	w.first(from, vip)
	w.edit(svc.Name, func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "web.example", SessionAffinity: corev1.ServiceAffinityNone}
	})
	w.eventually("no cluster IP any more", func() error { return w.fails(from, "tcp", vip, probe.Timeout) })
}

// S20: another proxy's services are nobody's here, from the label on.
func (s *servicesWorld) anotherProxys(w *world) {
	svc := w.service("another-proxys", "web", nil)
	s.everywhereServes(w, svc)
	for _, label := range []string{"service.kubernetes.io/service-proxy-name", corev1.IsHeadlessService} {
		w.edit(svc.Name, func(s *corev1.Service) { s.Labels = map[string]string{label: "x"} })
		for _, from := range s.sources(w) {
			w.eventually("nobody's", func() error { return w.fails(from, "tcp", at(svc.Spec.ClusterIP, 80), probe.Timeout) })
		}
		w.edit(svc.Name, func(s *corev1.Service) { s.Labels = nil })
		s.everywhereServes(w, svc)
	}
}

// S23, S24: a running UDP client goes to another backend when its own is gone,
// and finds one again when there was none for a while.
func (s *servicesWorld) runningUDP(w *world) {
	app := map[string]string{"app": "udp"}
	w.run(w.ns, pod("udp-1", w.nodes[0].name, app), pod("udp-2", w.nodes[1].name, app))
	svc := w.service("udp", "udp", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	s.everywhereServes(w, svc)
	target := at(svc.Spec.ClusterIP, 80)
	streams := map[*stream]string{}
	for _, from := range s.sources(w) {
		streams[w.stream(from, "udp", target)] = ""
	}
	streams[w.stream(outside, "udp", at(w.nodes[2].ips[0], svc.Spec.Ports[1].NodePort))] = ""
	w.remove(w.ns, "udp-1")
	for st := range streams {
		w.eventually(st.name+" moves", func() error {
			r, err := st.soFar()
			if err == nil && (r.Server != "udp-2" || r.LastReply > time.Second) {
				err = fmt.Errorf("%+v", r)
			}
			return err
		})
	}
	w.remove(w.ns, "udp-2")
	for st := range streams {
		if err := st.stalls(); err != nil {
			w.Error(err)
		}
	}
	w.run(w.ns, pod("udp-3", w.nodes[2].name, app))
	for st := range streams {
		w.eventually(st.name+" comes back", func() error {
			r, err := st.soFar()
			if err == nil && r.Server != "udp-3" {
				err = fmt.Errorf("%+v", r)
			}
			return err
		})
	}
}

// Nothing fails while a Deployment is rolled that takes its leave properly.
func (s *servicesWorld) rollingUpdate(w *world) {
	d := w.deployment("rolling", 3, func(t *corev1.PodTemplateSpec) {
		t.Spec.TerminationGracePeriodSeconds = new(int64(20))
		t.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}}
	})
	svc := w.service("rolling", "rolling", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	s.everywhereServes(w, svc)
	var loads []*load
	for _, from := range s.sources(w) {
		loads = append(loads, w.load(from, at(svc.Spec.ClusterIP, 80), "-interval", "20ms"))
	}
	for fam := range 2 {
		target := at(w.nodes[0].ips[fam], svc.Spec.Ports[0].NodePort)
		w.first(outside, target)
		loads = append(loads, w.load(outside, target, "-interval", "20ms"))
	}
	w.roll(d)
	w.none(loads)
}

// none wants nothing to have failed, and something tried.
func (w *world) none(loads []*load) {
	w.Helper()
	total := 0
	for _, l := range loads {
		sum, err := l.end()
		total += sum.Attempts
		if err != nil {
			w.Errorf("%s: %v", l.name, err)
		} else if sum.OK != sum.Attempts || sum.Attempts == 0 {
			w.Errorf("%s: %d of %d failed: %v, the first: %+v", l.name, sum.Attempts-sum.OK, sum.Attempts, sum.Failed, sum.Failure)
		}
	}
	w.Logf("%d connections", total)
}

// S25: a service under an address that another had before.
func (s *servicesWorld) deletedAndMadeAnew(w *world) {
	svc := w.service("anew", "solo", nil)
	s.everywhereServes(w, svc)
	ips := svc.Spec.ClusterIPs
	st := w.stream(inPod(s.web[w.nodes[1].name]), "udp", at(ips[0], 80))
	must(w, w.api.CoreV1().Services(w.ns).Delete(w.ctx, svc.Name, metav1.DeleteOptions{}))
	for _, from := range s.sources(w) {
		w.eventually("nobody's", func() error { return w.fails(from, "tcp", at(ips[0], 80), probe.Timeout) })
	}
	if err := st.stalls(); err != nil {
		w.Error(err)
	}
	anew := w.service("anew-2", "web", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips })
	s.everywhereServes(w, anew)
	if err := st.moves(); err != nil {
		w.Error("a running UDP client:", err)
	}
}
