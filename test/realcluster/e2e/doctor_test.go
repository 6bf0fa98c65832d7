//go:build realcluster

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/tools/probe"
)

// What is broken on purpose is named by "podweir doctor", run in the agent's
// pod as one would, and no more once it is mended.
func TestDoctor(t *testing.T) {
	w := newWorld(t)
	n := w.nodes[0]
	web := w.run(w.ns, pod("web", n.name, map[string]string{"app": "web"}))[0]
	w.step("Well", func(w *world) {
		for _, n := range w.nodes {
			w.eventually("nothing fails", func() error { return w.silent(n.name, "FAIL") })
			for _, check := range []string{"agent", "maps", "programs", "sysctls", "mtu", "pods", "dns"} {
				if err := w.says(n.name, "ok ", check); err != nil {
					w.Error(err)
				}
			}
		}
	})
	// O1: the address, route or interface of a pod.
	w.step("PodRoute", func(w *world) {
		for _, ip := range web.Status.PodIPs {
			family := "-4"
			if strings.Contains(ip.IP, ":") {
				family = "-6"
			}
			// The agent puts it back: as often as that is quicker.
			w.eventually("the route is missed", func() error {
				if _, err := w.output(w.ctx, onNode(n), "ip", family, "route", "del", ip.IP); err != nil && !strings.Contains(err.Error(), "No such process") {
					return err
				}
				return w.says(n.name, "FAIL", "pods", w.ns+"/"+web.Name, ip.IP)
			})
			w.eventually("the route comes back", func() error {
				if _, err := w.reach(onNode(n), "tcp", at(ip.IP, port)); err != nil {
					return err
				}
				return w.silent(n.name, "FAIL")
			})
		}
	})
	// O1: the pod's own half of it, which the agent does not mend, and all of it.
	w.step("PodInterface", func(w *world) { podInterfaceBroken(w, n, web) })
	// O1, O5: it is policy.
	w.step("Policy", func(w *world) {
		caller := w.run(w.ns, pod("caller", n.name, nil))[0]
		denied := func(w *world, node string) error {
			return w.says(node, "WARN", "policy", w.ns+"/"+web.Name, w.ns+"/shut")
		}
		w.load(inPod(caller), at(web.Status.PodIP, port), "-interval", "50ms", "-parallel", "4", "-timeout", "1s")
		if err := w.silent(n.name, "WARN", "policy", w.ns+"/"+web.Name); err != nil {
			w.Error(err)
		}
		w.policy("shut", "web", networkingv1.NetworkPolicySpec{})
		w.eventually("it is named", func() error { return denied(w, n.name) })
		must(w, w.unpolicy("shut"))
		w.eventually("it is mended", func() error { return w.silent(n.name, "WARN", "policy", w.ns+"/"+web.Name) })
	})
	// O3: pod addresses work, the service does not.
	w.step("Endpoints", func(w *world) {
		svc := w.service("wrong", "webb", nil)
		for _, n := range w.nodes {
			w.eventually("it is named", func() error { return w.says(n.name, "WARN", "services", w.ns+"/wrong", "no usable endpoint") })
		}
		if err := w.fails(inPod(web), "tcp", at(svc.Spec.ClusterIP, 80), probe.Refused); err != nil {
			w.Error(err)
		}
		w.edit("wrong", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		for _, n := range w.nodes {
			w.eventually("it is mended", func() error { return w.silent(n.name, w.ns+"/wrong") })
		}
		w.first(inPod(web), at(svc.Spec.ClusterIP, 80))
	})
	// O3: slices and their conditions, and the map.
	w.step("Slices", func(w *world) { slicesBroken(w, n, web) })
	// O4: cluster IPs work, names do not.
	w.step("DNS", func(w *world) {
		patch := func(to string) {
			w.Helper()
			_, err := w.api.CoreV1().Services(system).Patch(background(w), "kube-dns", types.JSONPatchType, []byte(to), metav1.PatchOptions{})
			must(w, err)
		}
		whole := func() {
			patch(`[{"op":"replace","path":"/spec/selector","value":{"k8s-app":"kube-dns"}},{"op":"replace","path":"/spec/ports/0/targetPort","value":53}]`)
		}
		defer whole()
		resolves := func() error {
			_, err := w.output(w.ctx, inPod(web), "pw-client", "lookup", "-timeout", "3s", "kubernetes.default.svc.cluster.local.")
			return err
		}
		must(w, resolves())
		for _, fault := range []struct{ patch, says string }{
			{`[{"op":"replace","path":"/spec/ports/0/targetPort","value":5353}]`, "None of its endpoints answers"},
			{`[{"op":"replace","path":"/spec/selector","value":{"k8s-app":"nobody"}}]`, "no usable endpoint"},
		} {
			patch(fault.patch)
			for _, n := range w.nodes {
				w.eventually("it is named", func() error { return w.says(n.name, "FAIL", "dns", "kube-system/kube-dns", fault.says) })
			}
			if resolves() == nil {
				w.Error(errors.New("names are resolved all the same"))
			}
			whole()
			for _, n := range w.nodes {
				w.eventually("it is mended", func() error { return w.silent(n.name, "FAIL") })
			}
			w.eventually("names are resolved again", resolves)
		}
	})
}

// says is an error unless a finding of podweir doctor names all of these.
func (w *world) says(node string, words ...string) error {
	out, _ := w.podweir(w.ctx, node, "doctor")
	for line := range strings.Lines(string(out)) {
		all := true
		for _, word := range words {
			all = all && strings.Contains(line, word)
		}
		if all {
			return nil
		}
	}
	return fmt.Errorf("podweir doctor on %s has no line with %q:\n%s", node, words, out)
}

func (w *world) silent(node string, words ...string) error {
	if w.says(node, words...) == nil {
		return fmt.Errorf("podweir doctor on %s still says %q", node, words)
	}
	return nil
}

func podInterfaceBroken(w *world, n node, web *corev1.Pod) {
	p := w.run(w.ns, pod("broken", n.name, nil))[0]
	pid := w.pid(p)
	if err := w.silent(n.name, w.ns+"/"+p.Name); err != nil {
		w.Error(err)
	}
	for fam, ip := range p.Status.PodIPs {
		if _, err := w.reach(inPod(web), "tcp", at(ip.IP, port)); err != nil {
			w.Error(err)
		}
		length := []string{"/32", "/128"}[fam]
		_, err := w.output(w.ctx, onNode(n), "nsenter", "-t", pid, "-n", "ip", "addr", "del", ip.IP+length, "dev", "eth0")
		must(w, err)
		w.eventually("the address is missed", func() error {
			return w.says(n.name, "WARN", "pods", w.ns+"/"+p.Name, "address "+ip.IP+length+" is missing")
		})
		if err := w.fails(inPod(web), "tcp", at(ip.IP, port), probe.Timeout); err != nil {
			w.Error(err)
		}
	}
	_, err := w.output(w.ctx, onNode(n), "nsenter", "-t", pid, "-n", "ip", "link", "set", "eth0", "down")
	must(w, err)
	w.eventually("it is down", func() error { return w.says(n.name, "WARN", "pods", w.ns+"/"+p.Name, "down") })
	veth := w.device(n, p)
	_, err = w.output(w.ctx, onNode(n), "ip", "link", "del", veth)
	must(w, err)
	w.eventually("it is gone", func() error { return w.says(n.name, "FAIL", "pods", w.ns+"/"+p.Name, veth+" is gone") })
	w.remove(w.ns, p.Name)
	w.eventually("it is mended", func() error { return w.silent(n.name, w.ns+"/"+p.Name) })
}

// device is the host's end of a pod's interface.
func (w *world) device(n node, p *corev1.Pod) string {
	w.Helper()
	var list struct {
		Endpoints []struct{ Pod, Device string }
	}
	must(w, w.podweirJSON(n.name, &list, "endpoints"))
	for _, e := range list.Endpoints {
		if e.Pod == p.Namespace+"/"+p.Name {
			return e.Device
		}
	}
	w.Fatalf("podweir endpoints does not show %s: %+v", p.Name, list)
	return ""
}

func slicesBroken(w *world, n node, web *corev1.Pod) {
	svc := w.service("by-hand", "", func(s *corev1.Service) {
		policy := corev1.IPFamilyPolicySingleStack
		s.Spec.IPFamilyPolicy, s.Spec.Ports = &policy, s.Spec.Ports[:1]
	})
	name, number, no := "tcp", int32(port), false
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: svc.Name, Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &number}},
	}
	named := func(why string) {
		w.Helper()
		for _, n := range w.nodes {
			w.eventually("it is named", func() error { return w.says(n.name, "WARN", "services", w.ns+"/"+svc.Name, "no usable endpoint", why) })
		}
		if err := w.fails(inPod(web), "tcp", at(svc.Spec.ClusterIP, 80), probe.Refused); err != nil {
			w.Error(err)
		}
		if _, err := w.reach(inPod(web), "tcp", at(web.Status.PodIP, port)); err != nil {
			w.Error("the pod's own address:", err)
		}
	}
	slices := w.api.DiscoveryV1().EndpointSlices(w.ns)
	named("no EndpointSlice")
	slice, err := slices.Create(w.ctx, slice, metav1.CreateOptions{})
	must(w, err)
	named("name none")
	slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{web.Status.PodIP}, NodeName: &n.name, Conditions: discoveryv1.EndpointConditions{Ready: &no}}}
	slice, err = slices.Update(w.ctx, slice, metav1.UpdateOptions{})
	must(w, err)
	named("none is ready")
	slice.Endpoints[0].Conditions.Ready = nil
	_, err = slices.Update(w.ctx, slice, metav1.UpdateOptions{})
	must(w, err)
	for _, n := range w.nodes {
		w.eventually("it is mended", func() error { return w.silent(n.name, w.ns+"/"+svc.Name) })
	}
	w.first(inPod(web), at(svc.Spec.ClusterIP, 80))
	// One node's map loses it.
	key, err := binary.Append(nil, binary.NativeEndian, maps.ServiceKey{Addr: maps.ToAddr(netip.MustParseAddr(svc.Spec.ClusterIP)), Port: 80, Proto: maps.ProtoTCP})
	must(w, err)
	_, err = w.output(w.ctx, onNode(n), "sh", "-c", fmt.Sprintf("bpftool map delete pinned /sys/fs/bpf/podweir/maps/pw_services key hex % x", key))
	must(w, err)
	w.eventually("it is named", func() error {
		return w.says(n.name, "FAIL", "services", w.ns+"/"+svc.Name, "does not have "+at(svc.Spec.ClusterIP, 80))
	})
	if err := w.silent(w.nodes[1].name, "FAIL"); err != nil {
		w.Error(err)
	}
	if w.try(inPod(web), "tcp", at(svc.Spec.ClusterIP, 80)).OK {
		w.Error("the service works all the same")
	}
	// As it says.
	w.kill(n, w.agent(w.ctx, n.name))
	w.eventually("it is mended", func() error { return w.silent(n.name, "FAIL") })
	w.first(inPod(web), at(svc.Spec.ClusterIP, 80))
}
