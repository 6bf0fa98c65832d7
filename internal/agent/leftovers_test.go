package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/netfilter"
	"github.com/podweir/podweir/internal/oldcni"
	"github.com/podweir/podweir/internal/table"
)

// L4: what a kube-proxy left is a problem from the start on, and none when it
// is gone.
func TestLeftovers(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	b.await("the first round", func() bool { return b.a.full })
	ctx, cancel := context.WithCancel(t.Context())
	tick, ended := make(chan time.Time), make(chan struct{})
	found := make(chan kubeproxy.Leftovers, 1)
	failed := errors.New("no CAP_NET_ADMIN")
	fail := make(chan error, 1)
	look := func(l kubeproxy.Leftovers, err error) {
		found <- l
		fail <- err
	}
	go func() {
		defer close(ended)
		b.a.watchLeftovers(ctx, leftovers{"a kube-proxy", func(context.Context, []netip.Prefix) ([]table.Problem, error) {
			return proxyProblems(<-found), <-fail
		}}, tick)
	}()
	has := func(parts ...string) {
		t.Helper()
		b.await(strings.Join(parts, ", "), func() bool {
			var got []string
			for p := range b.tables.Problems.All(b.tables.DB.ReadTxn()) {
				if strings.Contains(p.Err, "kube-proxy") {
					got = append(got, p.Object+": "+p.Err)
				}
			}
			text := strings.Join(got, "\n")
			for _, p := range parts {
				if !strings.Contains(text, p) {
					return false
				}
			}
			return len(got) == len(parts)
		})
	}
	look(kubeproxy.Leftovers{
		Running: "process 7", Device: true,
		Tables: []kubeproxy.Table{{Kind: kubeproxy.IPTablesNFT, Family: "ip", Name: "nat", Chains: []string{"KUBE-SERVICES", "KUBE-SVC-X"}}},
	}, nil)
	has("kube-proxy: a kube-proxy runs on this node (process 7)", "iptables-nft, table ip nat, chain KUBE-SERVICES: rules", "Device kube-ipvs0: ")
	tick <- time.Time{}
	look(kubeproxy.Leftovers{Device: true}, failed)
	has("Device kube-ipvs0: ", "cannot be read: no CAP_NET_ADMIN")
	tick <- time.Time{}
	look(kubeproxy.Leftovers{}, nil)
	has()
	cancel()
	<-ended
}

// L4: what another CNI plugin left is a problem; routes are judged by the
// ranges of all nodes.
func TestLeftoversOfAPlugin(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	b.await("the first round", func() bool { return b.a.full })
	ctx, cancel := context.WithCancel(t.Context())
	tick, ended := make(chan time.Time), make(chan struct{})
	found := make(chan oldcni.View, 1)
	go func() {
		defer close(ended)
		b.a.watchLeftovers(ctx, leftovers{"another CNI plugin", func(_ context.Context, ranges []netip.Prefix) ([]table.Problem, error) {
			return pluginProblems(<-found, ranges), nil
		}}, tick)
	}()
	found <- oldcni.View{
		Tables: []netfilter.Table{{Kind: netfilter.NFTables, Family: "ip", Name: "cni_hostport"}},
		Routes: []oldcni.Route{{Dst: netip.MustParsePrefix("10.244.158.64/26"), Device: "eth0", Protocol: 80}, {Dst: netip.MustParsePrefix("10.9.0.0/26"), Device: "eth0", Protocol: 80}},
	}
	about := func() string {
		var all []string
		for p := range b.tables.Problems.All(b.tables.DB.ReadTxn()) {
			all = append(all, p.String())
		}
		return strings.Join(all, "\n")
	}
	b.await("both problems", func() bool {
		return strings.Contains(about(), "nftables, table ip cni_hostport: rules of the plugin portmap") && strings.Contains(about(), "Route 10.244.158.64/26: routes of Calico")
	})
	tick <- time.Time{}
	found <- oldcni.View{}
	b.await("none", func() bool { return about() == "" })
	cancel()
	<-ended
}

// L4: a pod that runs here and that podweir did not plug is named when two
// looks in a row see it; pods that have no address of their own here, end, or
// have ended, are none.
func TestPodsOfAnotherPlugin(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	now := metav1.Now()
	host, ends, ended, starts := testPod("host", "node-a", "172.31.0.2", nil), testPod("ends", "node-a", "10.9.0.2", nil),
		testPod("ended", "node-a", "10.9.0.3", nil), testPod("starts", "node-a", "", nil)
	host.Spec.HostNetwork, ends.DeletionTimestamp, ended.Status.Phase = true, &now, corev1.PodSucceeded
	rebooted, old := testPod("rebooted", "node-a", "10.9.0.5", nil), testPod("old", "node-a", "10.9.0.4", nil)
	rebooted.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionFalse}}
	old.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionTrue}}
	b.put(host, ends, ended, starts, rebooted, old)
	b.put(testPod("plugged", "node-a", "10.244.80.65", nil))
	b.done()
	if err := b.a.eps.Up(t.Context(), testEndpoint("plugged", "", "10.244.80.65")); err != nil {
		t.Fatal(err)
	}
	var w strangerWatch
	look := func() (out []table.Problem) {
		t.Helper()
		err := b.a.do(t.Context(), func() {
			w.look(b.a)
			out = b.a.problems["pods of another CNI plugin"]
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	wants := func(when string, want ...string) {
		t.Helper()
		got := look()
		for i, p := range got {
			if i >= len(want) || !strings.Contains(p.String(), want[i]) {
				t.Fatalf("%s: %+v, want %q", when, got, want)
			}
		}
		if len(got) != len(want) {
			t.Errorf("%s: %+v, want %q", when, got, want)
		}
	}
	wants("seen once")
	wants("seen twice", "Pod default/old: podweir did not plug it: it runs with what another CNI plugin gave it (10.9.0.4)")
	again := testPod("old", "node-a", "10.9.0.4", nil)
	again.UID = "another"
	b.put(again)
	wants("another pod of that name")
	for i := range mostStrangers + 2 {
		b.put(testPod(fmt.Sprintf("old-%02d", i), "node-a", fmt.Sprintf("10.9.1.%d", i), nil))
	}
	wants("many, seen once", "default/old:")
	got := look()
	if len(got) != mostStrangers+1 || got[mostStrangers].Object != "" || !strings.Contains(got[mostStrangers].Err, "and 3 pods more") {
		t.Errorf("many: %+v", got)
	}
}
