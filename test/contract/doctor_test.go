package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/internal/doctor"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

// examine has podweir doctor look at a node. An exit status other than what
// the findings say is an error.
func examine(t *testing.T, ctx context.Context, n *cluster.Node) (bad []doctor.Finding) {
	t.Helper()
	out, err := n.Podweir(ctx, "doctor", "-o", "json")
	var found struct{ Findings []doctor.Finding }
	if jerr := json.Unmarshal([]byte(out), &found); jerr != nil {
		t.Fatalf("%v: %s, %v", jerr, out, err)
	}
	if doctor.Failed(found.Findings) != (err != nil) {
		t.Fatalf("it says %+v, and ended with %v", found.Findings, err)
	}
	for _, f := range found.Findings {
		if f.State != doctor.OK {
			bad = append(bad, f)
		}
	}
	return bad
}

// finds awaits exactly one finding, with all these words.
func finds(t *testing.T, ctx context.Context, n *cluster.Node, state doctor.State, check string, words ...string) doctor.Finding {
	t.Helper()
	var bad []doctor.Finding
	eventually(t, ctx, func() error {
		bad = examine(t, ctx, n)
		if len(bad) != 1 || bad[0].State != state || bad[0].Check != check {
			return fmt.Errorf("found %+v, want one %s of %s", bad, state, check)
		}
		for _, w := range words {
			if !strings.Contains(bad[0].Object+": "+bad[0].Text, w) {
				return fmt.Errorf("found %+v, which does not say %q", bad[0], w)
			}
		}
		return nil
	})
	return bad[0]
}

func well(t *testing.T, ctx context.Context, n *cluster.Node) {
	t.Helper()
	eventually(t, ctx, func() error {
		if bad := examine(t, ctx, n); len(bad) > 0 {
			return fmt.Errorf("found %+v, want nothing", bad)
		}
		return nil
	})
}

// Faults that are injected are named, and what is said to help helps (N21).
func TestDoctor(t *testing.T) {
	w := own(t, cluster.Config{})
	ctx := within(t, 4*time.Minute)
	ok(t, w.bringUp(ctx))
	n := w.a
	do := func(format string, args ...any) {
		t.Helper()
		_, err := n.Exec(ctx, strings.Fields(fmt.Sprintf(format, args...))...)
		ok(t, err)
	}
	well(t, ctx, n)

	// A firewall: what forwards nothing is no fault, what keeps the tunnel out is.
	do("iptables-legacy -P FORWARD DROP")
	do("iptables-nft -P FORWARD DROP")
	well(t, ctx, n)
	for _, tool := range []string{"iptables-legacy", "iptables-nft"} {
		do("%s -N MINE", tool)
		do("%s -A MINE -p udp -m multiport --dports 4000,4789 -j REJECT", tool)
		do("%s -A INPUT -i eth0 -m comment --comment mine -j MINE", tool)
		f := finds(t, ctx, n, doctor.Fail, "firewall", tool+", table ip filter, chain MINE", "node-b", "-A MINE -p udp")
		silentTunnel(t, ctx, w)
		do("%s", strings.ReplaceAll(f.WayOut, "NODES", "172.31.0.3"))
		well(t, ctx, n)
		send(t, ctx, w.a.Netns, "udp", at(w.remote.IPv4(), cluster.ServerPort).String())
		do("%s -F", tool)
	}
	do("nft add table inet fw")
	do("nft add chain inet fw in { type filter hook input priority 5 ; policy drop ; }")
	do("nft add rule inet fw in iif lo accept")
	do("nft add rule inet fw in ct state established,related accept")
	f := finds(t, ctx, n, doctor.Fail, "firewall", "nft, table inet fw, chain in", "policy drop")
	silentTunnel(t, ctx, w)
	do("%s", f.WayOut)
	well(t, ctx, n)
	send(t, ctx, w.a.Netns, "udp", at(w.remote.IPv4(), cluster.ServerPort).String())
	do("nft delete table inet fw")

	// A device with a smaller MTU: pods follow, and nothing is to be said.
	follow := func(mtu int) {
		t.Helper()
		eventually(t, ctx, func() error {
			if has := hostSide(t, w.client).Attrs().MTU; has != mtu {
				return fmt.Errorf("the pod's device has an MTU of %d, want %d", has, mtu)
			}
			return nil
		})
		well(t, ctx, n)
	}
	do("ip link set eth0 mtu 1400")
	follow(1350)
	do("ip link set eth0 mtu 1500")
	follow(1450)
	// Unless somebody has fixed theirs.
	n.Config.AgentArgs = []string{"--mtu", "1450"}
	ok(t, n.RestartAgent(ctx))
	do("ip link set eth0 mtu 1400")
	finds(t, ctx, n, doctor.Fail, "mtu", "Device eth0", "its MTU of 1400 leaves 1350", "said to be 1450")
	do("ip link set eth0 mtu 1500")
	well(t, ctx, n)

	// A pod's own half of its interface.
	obj := pod("changed", "node-a", "10.244.80.91", "fd00:10:244:50::91")
	w.put(t, obj)
	p, err := w.AddPod(ctx, obj)
	ok(t, err)
	well(t, ctx, n)
	for _, c := range []struct{ command, says string }{
		{"ip addr del fd00:10:244:50::91/128 dev eth0", "address fd00:10:244:50::91/128 is missing"},
		{"ip addr del 10.244.80.91/32 dev eth0", "address 10.244.80.91/32 is missing"},
		{"ip link set eth0 down", "down"},
	} {
		commands(t, ctx, p.Netns, c.command)
		finds(t, ctx, n, doctor.Warn, "pods", "Pod default/changed", c.says)
	}
	veth := hostSide(t, p).Attrs()
	do("ip link del %s", veth.Name)
	eventually(t, ctx, func() error {
		bad := examine(t, ctx, n)
		for _, f := range bad {
			if f.State == doctor.Fail && f.Check == "pods" && f.Object == "Pod default/changed" && strings.Contains(f.Text, veth.Name+" is gone") {
				return nil
			}
		}
		return fmt.Errorf("found %+v, which does not say that %s is gone", bad, veth.Name)
	})
	ok(t, p.Delete(ctx))
	well(t, ctx, n)

	// A policy that denies.
	call, err := w.client.Caller(ctx, at(w.local.IPv4(), cluster.ServerPort).String(), "-timeout", "200ms", "-interval", "20ms", "-parallel", "4")
	ok(t, err)
	ok(t, call.Progress(ctx, 10))
	well(t, ctx, n)
	deny := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "shut"}}
	deny.Spec.PodSelector.MatchLabels = object[*corev1.Pod](w, "local").Labels
	ok(t, w.Manifests.Put(deny))
	finds(t, ctx, n, doctor.Warn, "policy", "Pod default/local", "ingress policy denies default/client to default/local by tcp, port 8080", "default/shut")
	ok(t, w.Manifests.Delete(deny))
	well(t, ctx, n)
	_, err = call.Stop(ctx)
	ok(t, err)

	// A service: no slice, a slice of nobody, conditions; and a map that lost it.
	ips := []string{"10.98.60.1"}
	svc := clusterIP("odd", ips, bothPorts(80)[:1]...)
	w.put(t, svc)
	finds(t, ctx, n, doctor.Warn, "services", "Service default/odd", "no EndpointSlice")
	slice := endpointSlice("odd", "odd", bothSlicePorts(cluster.ServerPort)[:1])
	w.put(t, slice)
	finds(t, ctx, n, doctor.Warn, "services", "Service default/odd", "name none")
	no := false
	slice = endpointSlice("odd", "odd", bothSlicePorts(cluster.ServerPort)[:1], w.local.IPv4())
	slice.Endpoints[0].Conditions.Ready = &no
	ok(t, w.Manifests.Put(slice))
	finds(t, ctx, n, doctor.Warn, "services", "Service default/odd", "of the 1 in its EndpointSlices none is ready")
	slice.Endpoints[0].Conditions.Ready = nil
	ok(t, w.Manifests.Put(slice))
	well(t, ctx, n)
	set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), false)
	ok(t, err)
	defer set.Close()
	ok(t, set.Services.Delete(maps.ServiceKey{Addr: maps.ToAddr(netip.MustParseAddr(ips[0])), Port: 80, Proto: maps.ProtoTCP}))
	finds(t, ctx, n, doctor.Fail, "services", "Service default/odd", "does not have 10.98.60.1:80")
	ok(t, n.RestartAgent(ctx))
	well(t, ctx, n)
	send(t, ctx, w.client.Netns, "tcp", "10.98.60.1:80")

	// Without the agent: what nobody mends.
	ok(t, n.KillAgent(ctx))
	veth = hostSide(t, w.client).Attrs()
	ok(t, n.Sysctl("net/ipv4/conf/"+veth.Name+"/rp_filter", "1"))
	ok(t, n.Sysctl("net/ipv4/ip_forward", "0"))
	l, err := link.LoadPinnedLink(filepath.Join(n.BPFFS(), "links", fmt.Sprintf("%d-from_pod", veth.Index)), nil)
	ok(t, err)
	ok(t, l.Detach())
	ok(t, l.Close())
	said := map[string]string{}
	for _, f := range examine(t, ctx, n) {
		if f.State == doctor.Fail {
			said[f.Check] += f.Object + ": " + f.Text + "\n"
		}
	}
	for check, want := range map[string][]string{
		"agent":    {"does not answer"},
		"programs": {fmt.Sprintf("index %d", veth.Index), "from_pod"},
		"sysctls":  {"net.ipv4.ip_forward: is 0", veth.Name + ".rp_filter: is 1"},
	} {
		for _, words := range want {
			if !strings.Contains(said[check], words) {
				t.Errorf("of %s it says %q, want %q", check, said[check], words)
			}
		}
	}
	ok(t, n.StartAgent(ctx))
	well(t, ctx, n)
}

// silentTunnel: answers to the host from a pod of another node do not get there.
func silentTunnel(t *testing.T, ctx context.Context, w *world) {
	t.Helper()
	silent(t, ctx, w.a.Netns, "udp", at(w.remote.IPv4(), cluster.ServerPort).String())
	// Pods do not notice.
	for _, v6 := range []bool{false, true} {
		send(t, ctx, w.remote.Netns, "tcp", at(ip(w.client, v6), cluster.ServerPort).String())
		send(t, ctx, w.client.Netns, "udp", at(ip(w.remote, v6), cluster.ServerPort).String())
	}
}
