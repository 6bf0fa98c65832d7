//go:build realcluster

package e2e

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func at(addr string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port)).String()
}

// Pods of every node reach those of every node, in both families, under their
// own addresses.
func TestPodToPod(t *testing.T) {
	w := newWorld(t)
	pods := w.everywhere("web")
	for _, from := range pods {
		for _, to := range pods {
			for i, ip := range to.Status.PodIPs {
				for _, proto := range []string{"tcp", "udp"} {
					r, err := w.reach(from, proto, at(ip.IP, 8080))
					if err != nil {
						t.Errorf("%s on %s to %s on %s: %v", from.Name, from.Spec.NodeName, ip.IP, to.Spec.NodeName, err)
						continue
					}
					if peer := netip.MustParseAddrPort(r.Peer).Addr().Unmap().String(); r.Server != to.Name || peer != from.Status.PodIPs[i].IP {
						t.Errorf("%s to %s: %s answers and sees %s", from.Name, ip.IP, r.Server, r.Peer)
					}
				}
			}
		}
	}
}

// A name of the cluster's DNS leads to the service, and so do its addresses,
// from pods of every node, and from outside its NodePort on every node.
func TestServices(t *testing.T) {
	w := newWorld(t)
	pods := w.everywhere("web")
	s := w.service("web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	targets := []string{fmt.Sprintf("web.%s.svc.cluster.local:80", w.ns), "web:80"}
	for _, ip := range s.Spec.ClusterIPs {
		targets = append(targets, at(ip, 80))
	}
	for _, from := range pods {
		for _, target := range targets {
			for _, proto := range []string{"tcp", "udp"} {
				w.eventually(fmt.Sprintf("%s from %s", target, from.Spec.NodeName), func() error {
					_, err := w.reach(from, proto, target)
					return err
				})
			}
		}
	}
	nodes, err := w.api.CoreV1().Nodes().List(w.ctx, metav1.ListOptions{})
	must(t, err)
	for _, n := range nodes.Items {
		for _, a := range n.Status.Addresses {
			if a.Type != corev1.NodeInternalIP {
				continue
			}
			r, err := w.reach(nil, "tcp", at(a.Address, s.Spec.Ports[0].NodePort))
			if err != nil {
				t.Errorf("NodePort of %s: %v", a.Address, err)
				continue
			}
			if peer := netip.MustParseAddrPort(r.Peer).Addr().Unmap(); peer != netip.MustParseAddr("172.31.0.1") && peer != netip.MustParseAddr("fd00:172:31::1") {
				t.Errorf("NodePort of %s: the backend sees %s, not the client", a.Address, r.Peer)
			}
		}
	}
}

// A policy by labels holds for the pods of all nodes, and ends with itself; the
// kubelet's probes pass.
func TestPolicy(t *testing.T) {
	w := newWorld(t)
	web, friend, other := w.everywhere("web"), w.everywhere("friend"), w.everywhere("other")
	policy := &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
				{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "friend"}}}}}},
		},
	}
	_, err := w.api.NetworkingV1().NetworkPolicies(w.ns).Create(w.ctx, policy, metav1.CreateOptions{})
	must(t, err)
	for node, to := range web {
		target := at(to.Status.PodIP, 8080)
		for from := range web {
			w.eventually(fmt.Sprintf("other on %s is kept from web on %s", from, node), func() error {
				if _, err := w.reach(other[from], "tcp", target); err == nil {
					return fmt.Errorf("%s answers", target)
				}
				return nil
			})
			if _, err := w.reach(friend[from], "tcp", target); err != nil {
				t.Errorf("friend on %s to web on %s: %v", from, node, err)
			}
		}
	}
	for _, p := range web {
		now, err := w.api.CoreV1().Pods(w.ns).Get(w.ctx, p.Name, metav1.GetOptions{})
		must(t, err)
		if now.Status.ContainerStatuses[0].RestartCount > 0 || !now.Status.ContainerStatuses[0].Ready {
			t.Errorf("%s is not ready under a policy: probes do not pass", p.Name)
		}
	}
	must(t, w.api.NetworkingV1().NetworkPolicies(w.ns).Delete(w.ctx, "web", metav1.DeleteOptions{}))
	for _, to := range web {
		w.eventually("all are let in again", func() error {
			for _, from := range other {
				if _, err := w.reach(from, "tcp", at(to.Status.PodIP, 8080)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// Agents are replaced one after another while pods talk through a service:
// nothing is lost.
func TestRollAgents(t *testing.T) {
	w := newWorld(t)
	pods := w.everywhere("web")
	s := w.service("web", nil)
	target := at(s.Spec.ClusterIP, 80)
	for _, from := range pods {
		w.eventually("the service", func() error {
			_, err := w.reach(from, "tcp", target)
			return err
		})
	}
	done := make(chan struct{})
	lost := make(chan string, 64)
	ended := make(chan int, len(pods))
	for node, from := range pods {
		go func() {
			calls := 0
			defer func() { ended <- calls }()
			for {
				select {
				case <-done:
					return
				default:
				}
				if _, err := w.from(from, "send", "-count", "200", "-timeout", "3s", target); err != nil {
					lost <- fmt.Sprintf("from %s: %v", node, err)
					return
				}
				calls += 200
			}
		}()
	}
	var out bytes.Buffer
	for _, args := range []string{"rollout restart daemonset/podweir", "rollout status daemonset/podweir --timeout=180s"} {
		if err := w.cluster.Kubectl(w.ctx, nil, &out, append([]string{"-n", "kube-system"}, strings.Fields(args)...)...); err != nil {
			t.Error(err)
		}
	}
	close(done)
	total := 0
	for range pods {
		total += <-ended
	}
	close(lost)
	for l := range lost {
		t.Error(l)
	}
	t.Logf("%d connections while all agents were replaced", total)
	if total == 0 {
		t.Error("nothing was tried")
	}
}
