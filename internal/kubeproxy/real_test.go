package kubeproxy

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/fakeapi"
)

// realProxy is the kube-proxy that "make cluster" builds.
func realProxy(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("no kube-proxy: %v", err)
	}
	found, err := filepath.Glob(filepath.Join(cache, "podweir", "cluster", "*", "bin", "kube-proxy"))
	if err != nil || len(found) == 0 {
		t.Skip("kube-proxy is not built: make cluster does that")
	}
	return found[len(found)-1]
}

// L4: what a real kube-proxy leaves, in each of its modes and with either
// iptables, is found and goes: every chain that is not the kubelet's, too.
func TestRealKubeProxy(t *testing.T) {
	program := realProxy(t)
	for _, c := range []struct{ mode, iptables string }{{"iptables", "nft"}, {"iptables", "legacy"}, {"nftables", "nft"}} {
		t.Run(c.mode+" "+c.iptables, func(t *testing.T) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			dir := t.TempDir()
			multi, err := exec.LookPath("xtables-" + c.iptables + "-multi")
			if err != nil {
				t.Fatal(err)
			}
			var tools []string
			for _, base := range []string{"iptables", "ip6tables"} {
				tools = append(tools, base+"-"+c.iptables)
				for _, verb := range []string{"", "-save", "-restore"} {
					if err := os.Symlink(multi, filepath.Join(dir, base+verb)); err != nil {
						t.Fatal(err)
					}
				}
			}
			s := fakeapi.New(t)
			s.Put(objects()...)
			config := filepath.Join(dir, "kubeconfig")
			if err := os.WriteFile(config, []byte("{apiVersion: v1, kind: Config, clusters: [{name: a, cluster: {server: "+s.URL+"}}], contexts: [{name: a, context: {cluster: a}}], current-context: a}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cmd := exec.CommandContext(ctx, program, "--kubeconfig", config, "--hostname-override", "node-a", "--proxy-mode", c.mode,
				"--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48", "--conntrack-max-per-core", "0", "--conntrack-min", "0",
				"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s")
			cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "XTABLES_LOCKFILE="+filepath.Join(dir, "lock"))
			var log bytes.Buffer
			cmd.Stdout, cmd.Stderr = &log, &log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			kind := map[string]string{"nftables": NFTables}[c.mode]
			if kind == "" {
				kind = "iptables-" + c.iptables
			}
			// It answers and has written its rules for both families.
			end := time.Now().Add(time.Minute)
			var l Leftovers
			complete := func() bool {
				text := sh(t, "", "nft", "list", "ruleset")
				if kind == IPTablesLegacy {
					text = sh(t, "", "iptables-legacy-save") + sh(t, "", "ip6tables-legacy-save")
				}
				return strings.Contains(text, "10.244.80.66") && strings.Contains(text, "fd00:10:244::66")
			}
			for !complete() || proxyMode(t.Context(), netip.MustParseAddrPort("127.0.0.1:10249")) != c.mode {
				if time.Now().After(end) {
					cancel()
					_ = cmd.Wait() // the log says more
					t.Fatalf("kube-proxy does not get ready:\n%s", log.String())
				}
				time.Sleep(50 * time.Millisecond) // it has no event to wait for
			}
			if l, err = Find(t.Context()); err != nil || l.Running == "" || !l.Any() {
				t.Errorf("while it runs: %+v, %v", l, err)
			}
			if removed, err := Remove(t.Context()); err == nil || len(removed) != 0 {
				t.Errorf("while it runs: removed %q, %v", removed, err)
			}
			cancel()
			if err := cmd.Wait(); err == nil {
				t.Error("kube-proxy ended by itself")
			}
			l, err = Find(t.Context())
			if err != nil || l.Running != "" || !slices.ContainsFunc(l.Tables, func(x Table) bool { return x.Kind == kind && x.Family == "ip" }) ||
				!slices.ContainsFunc(l.Tables, func(x Table) bool { return x.Kind == kind && x.Family == "ip6" }) {
				t.Fatalf("after its end: %+v, %v", l, err)
			}
			removed, err := Remove(t.Context())
			if err != nil || len(removed) != len(l.Tables) {
				t.Fatalf("removed %q, %v; there were %q", removed, err, names(l))
			}
			t.Logf("removed %q", removed)
			nothing(t)
			// The kubelet makes this chain as well, of the same rule.
			kubelets := strings.NewReplacer("KUBE-FIREWALL", "")
			if text := kubelets.Replace(sh(t, "", "nft", "list", "ruleset")); strings.Contains(text, "KUBE-") || strings.Contains(text, "kube-proxy") {
				t.Errorf("left:\n%s", text)
			}
			for _, tool := range tools {
				if text := kubelets.Replace(saved(t, tool)); strings.Contains(text, "KUBE-") {
					t.Errorf("left:\n%s", text)
				}
			}
		})
	}
}

// objects are a node and a service of both families with an endpoint.
func objects() []fakeapi.Object {
	name, port, proto, yes := "", int32(8080), corev1.ProtocolTCP, true
	dual := corev1.IPFamilyPolicyRequireDualStack
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}
	node.Spec.PodCIDRs = []string{"10.244.80.0/24", "fd00:10:244::/64"}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}, {Type: corev1.NodeInternalIP, Address: "::1"}}
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	web.Spec = corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, ClusterIP: "10.98.0.20", ClusterIPs: []string{"10.98.0.20", "fd00:98::20"},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, IPFamilyPolicy: &dual,
		Ports: []corev1.ServicePort{{Port: 80, Protocol: proto, NodePort: 30080}}, SessionAffinity: corev1.ServiceAffinityNone,
	}
	out := []fakeapi.Object{node, web}
	for of, addr := range map[string]string{"web-4": "10.244.80.66", "web-6": "fd00:10:244::66"} {
		slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: of, Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}}
		slice.AddressType = discoveryv1.AddressTypeIPv4
		if of == "web-6" {
			slice.AddressType = discoveryv1.AddressTypeIPv6
		}
		slice.Ports = []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}}
		slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{addr}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}}
		out = append(out, slice)
	}
	return out
}
