package cluster_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/cluster"
)

// The test binary stands in for the agent and the plugin, so that what the
// cluster does with them is tested apart from what they do.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "podweir-agent":
		os.Exit(standInAgent())
	case "podweir-cni":
		os.Exit(standInPlugin())
	}
	os.Exit(m.Run())
}

// standInAgent answers /readyz, after it logged its namespace's devices.
// With --fail it ends at once.
func standInAgent() int {
	if slices.Contains(os.Args, "--fail") {
		fmt.Fprintln(os.Stderr, "told to fail")
		return 3
	}
	ifis, _ := net.Interfaces()
	for _, i := range ifis {
		addrs, _ := i.Addrs()
		fmt.Fprintln(os.Stderr, "device", i.Name, addrs)
	}
	socket := os.Args[slices.Index(os.Args, "--socket")+1]
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Fprintln(os.Stderr, http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" {
			http.NotFound(w, r)
		}
	})))
	return 1
}

// standInPlugin answers ADD with the addresses asked for, if it runs inside
// node-a, and fails for a pod called "refused".
func standInPlugin() int {
	var conf struct {
		CNIVersion string `json:"cniVersion"`
		Socket     string
		Runtime    struct{ IPs []string } `json:"runtimeConfig"`
	}
	fail := func(msg string) int {
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": "1.1.0", "code": 100, "msg": msg})
		return 1
	}
	if err := json.NewDecoder(os.Stdin).Decode(&conf); err != nil {
		return fail(err.Error())
	}
	if os.Getenv("CNI_COMMAND") != "ADD" {
		return 0
	}
	eth0, err := net.InterfaceByName("eth0")
	if err != nil {
		return fail("not inside a node: " + err.Error())
	}
	if addrs, _ := eth0.Addrs(); !strings.Contains(fmt.Sprint(addrs), "172.31.0.2/24") {
		return fail(fmt.Sprintf("not inside node-a: %v", addrs))
	}
	for _, part := range []string{"K8S_POD_NAMESPACE=default", "K8S_POD_UID=uid-1", "K8S_POD_INFRA_CONTAINER_ID=" + os.Getenv("CNI_CONTAINERID")} {
		if !strings.Contains(os.Getenv("CNI_ARGS"), part) {
			return fail("CNI_ARGS lack " + part)
		}
	}
	if _, err := os.Stat(conf.Socket); err != nil {
		return fail(err.Error())
	}
	if strings.Contains(os.Getenv("CNI_ARGS"), "K8S_POD_NAME=refused") {
		return fail("refused it is")
	}
	var ips []map[string]string
	for _, ip := range conf.Runtime.IPs {
		bits := "/32"
		if strings.Contains(ip, ":") {
			bits = "/128"
		}
		ips = append(ips, map[string]string{"address": ip + bits})
	}
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": conf.CNIVersion, "ips": ips})
	return 0
}

// standIns is a bin folder with the test binary under the programs' names.
func standIns(t *testing.T) string {
	t.Helper()
	bin, err := cluster.BinDir()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, target := range map[string]string{
		"podweir-agent": self, "podweir-cni": self,
		"pw-server": filepath.Join(bin, "pw-server"), "pw-client": filepath.Join(bin, "pw-client"),
	} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestAgentProcesses(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{BinDir: standIns(t)})
	ctx := within(t, 10*time.Second)
	if err := c.StartAgents(ctx); err != nil {
		t.Fatal(err)
	}
	b := c.Node("node-b")
	if log := b.LogTail(); !strings.Contains(log, "172.31.0.3/24") || strings.Contains(log, "172.31.0.2/24") {
		t.Errorf("the agent of node-b is in the wrong namespace:\n%s", log)
	}
	old := b.Agent().PID
	if err := b.StartAgent(ctx); err == nil || !strings.Contains(err.Error(), "already running") {
		t.Errorf("started twice: %v", err)
	}
	if err := c.KillAgents(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", old)); err == nil {
		t.Error("the killed agent is still there")
	}
	if err := b.RestartAgent(ctx); err != nil {
		t.Fatal(err)
	}
	if b.Agent().PID == old {
		t.Error("the same process after a restart")
	}
	if code, _, err := b.AgentGet(ctx, "/nothing"); code != 404 || err != nil {
		t.Errorf("/nothing: %d, %v", code, err)
	}
}

func TestAgentThatEndsIsReported(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{BinDir: standIns(t), AgentArgs: []string{"--fail"}})
	err := c.StartAgents(within(t, 10*time.Second))
	if err == nil || !strings.Contains(err.Error(), "told to fail") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("%v", err)
	}
}

func TestPodsArePluggedInsideTheNode(t *testing.T) {
	c := cluster.ForTest(t, cluster.Config{BinDir: standIns(t)})
	ctx := within(t, 10*time.Second)
	if err := c.StartAgents(ctx); err != nil {
		t.Fatal(err)
	}
	obj := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "client", UID: "uid-1"},
		Spec:       corev1.PodSpec{NodeName: "node-a"},
		Status:     corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.244.80.65"}, {IP: "fd00:10:244:50::65"}}},
	}
	p, err := c.AddPod(ctx, obj)
	if err != nil {
		t.Fatal(err)
	}
	if p.IPv4().String() != "10.244.80.65" || p.IPv6().String() != "fd00:10:244:50::65" {
		t.Errorf("addresses %v", p.Addrs)
	}
	if c.Pod("default", "client") != p {
		t.Error("the pod is not found by its name")
	}
	if _, err := c.AddPod(ctx, obj); err == nil {
		t.Error("added twice")
	}
	if _, err := p.Serve(ctx, "client", cluster.ServerPort); err != nil {
		t.Fatal(err)
	}
	if s, err := p.Send(ctx, "127.0.0.1:8080"); err != nil || s.OK != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	for range 2 {
		if err := p.Del(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := p.Delete(ctx); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(p.Path()); err == nil || c.Pod("default", "client") != nil {
		t.Error("the deleted pod is still there")
	}
	refused := obj.DeepCopy()
	refused.Name = "refused"
	if _, err := c.AddPod(ctx, refused); err == nil || !strings.Contains(err.Error(), "refused it is") {
		t.Errorf("a refused ADD: %v", err)
	}
}
