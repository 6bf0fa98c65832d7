package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/fakeapi"
)

// fakeCluster has objects by kind; a kind that is not there cannot be listed.
type fakeCluster map[string][]metav1.Object

func (f fakeCluster) Each(_ context.Context, kind string, each func(metav1.Object)) error {
	objs, ok := f[kind]
	if !ok {
		return fmt.Errorf("cannot list %s: forbidden", kind)
	}
	for _, o := range objs {
		each(o)
	}
	return nil
}

// planCluster is what a kubeconfig leads to: "admin" to the plan's objects,
// "away" to nothing.
func planCluster(kubeconfig string) (Cluster, error) {
	switch kubeconfig {
	case "admin":
		f := fakeCluster{}
		for _, o := range planObjects() {
			kind := strings.TrimPrefix(fmt.Sprintf("%T", o), "*v1.")
			f[kind] = append(f[kind], o)
		}
		return f, nil
	case "away":
		return fakeCluster{}, nil
	}
	return nil, fmt.Errorf("--kubeconfig %s: %w", kubeconfig, fs.ErrNotExist)
}

// planObjects are those of the plan, and some that must name nothing.
func planObjects() []fakeapi.Object {
	pod := func(name, node string, ips ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{NodeName: node}}
		for _, ip := range ips {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
		}
		p.Status.PodIP = ips[0]
		return p
	}
	done := pod("done", "b", "10.244.158.65") // its address is another's by now
	done.Status.Phase = corev1.PodSucceeded
	onHost := pod("on-host", "a", "172.31.0.2")
	onHost.Spec.HostNetwork = true
	node := func(name, ip string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeInternalIP, Address: ip}}
		return n
	}
	service := func(name string, ips []string, ports ...corev1.ServicePort) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.Ports = ips[0], ips, ports
		return s
	}
	lb := service("lb", []string{"10.98.0.20"}, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080})
	lb.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.80"}}
	return []fakeapi.Object{
		pod("client", "a", "10.244.80.65", "fd00:10:244:50::65"), pod("local", "a", "10.244.80.66"), pod("web-1", "b", "10.244.158.65"),
		done, onHost, node("a", "172.31.0.2"), node("b", "172.31.0.3"), lb,
		service("web", []string{"10.98.235.247", "fd00:10:98::f7"}, corev1.ServicePort{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}),
		service("headless", []string{corev1.ClusterIPNone}, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: 80}),
		service("dns", []string{"10.98.0.10"}, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: 53}), // the map has UDP's
	}
}

// By a kubeconfig, from an API server that speaks the protocol.
func TestKubeconfig(t *testing.T) {
	server := fakeapi.New(t)
	server.Put(planObjects()...)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{"name": "c", "cluster": {"server": %q}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}]}`, server.URL)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	flows := func(agent fakeAgent) (to map[string]string, stderr string) {
		t.Helper()
		var out, warnings bytes.Buffer
		status := Run(t.Context(), []string{"flows", "-o", "json", "--kubeconfig", file}, Env{
			OpenMaps:    func(string) (Maps, error) { return planMaps(), nil },
			DialAgent:   func(string) Agent { return agent },
			DialCluster: DialCluster,
			Now:         func() uint64 { return bootTime },
			IfName:      func(uint32) string { return "" },
			Stdout:      &out, Stderr: &warnings,
		})
		var list struct{ Flows []flowView }
		if err := json.Unmarshal(out.Bytes(), &list); err != nil || status != 0 {
			t.Fatalf("status %d: %v\n%s", status, err, warnings.String())
		}
		to = map[string]string{}
		for _, f := range list.Flows {
			if f.Service != "" {
				to["service"] = f.Service
			}
			to[f.NewDestination] = f.To.String()
		}
		return to, warnings.String()
	}
	for name, agent := range map[string]fakeAgent{"agent": planAgent(), "no agent": nil} {
		to, _ := flows(agent)
		for addr, want := range map[string]string{"10.244.158.65:8080": "default/web-1 (node b)", "10.244.80.66:53": "default/local"} {
			if to[addr] != want {
				t.Errorf("%s: %s is %q, want %q", name, addr, to[addr], want)
			}
		}
		if to["service"] == "" {
			t.Errorf("%s: no service has a name: %v", name, to)
		}
	}
	// An account that may read some.
	server.Fail(http.StatusForbidden, fakeapi.Services)
	to, stderr := flows(nil)
	if to["10.244.158.65:8080"] != "default/web-1 (node b)" || to["service"] != "" {
		t.Errorf("without services: %v", to)
	}
	if !strings.Contains(stderr, "cannot list services") {
		t.Errorf("nothing is said of services:\n%s", stderr)
	}
	if _, err := DialCluster(file + "-none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

// P10: an address that two pods have is that of the one that stays, and of the
// one made last.
func TestHeirFirst(t *testing.T) {
	pod := func(name string, made int64, deleted bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, CreationTimestamp: metav1.Unix(made, 0)}}
		p.Status.PodIPs = []corev1.PodIP{{IP: "10.244.80.65"}}
		if deleted {
			now := metav1.Unix(100, 0)
			p.DeletionTimestamp = &now
		}
		return p
	}
	for name, c := range map[string]struct {
		pods []metav1.Object
		want string
	}{
		"one goes":             {[]metav1.Object{pod("a", 2, true), pod("b", 1, false)}, "default/b"},
		"one is younger":       {[]metav1.Object{pod("a", 1, false), pod("b", 2, false)}, "default/b"},
		"both go":              {[]metav1.Object{pod("a", 1, true), pod("b", 2, true)}, "default/b"},
		"made in one second":   {[]metav1.Object{pod("b", 1, false), pod("a", 1, false)}, "default/a"},
		"the first, otherwise": {[]metav1.Object{pod("b", 2, false), pod("a", 1, false)}, "default/b"},
	} {
		n := askNames(t.Context(), fakeAgent{}, func(uint32) string { return "" }, "", func(error) {})
		if err := n.complete(t.Context(), fakeCluster{"Pod": c.pods}, planMaps(), func(error) {}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := n.pods[netip.MustParseAddr("10.244.80.65")]; got != c.want {
			t.Errorf("%s: the address is that of %s, want %s", name, got, c.want)
		}
	}
}
